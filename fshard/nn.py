"""Functions for modules and loss functions beyond the first page: LoRA, BatchNorm, policies of `remat`, units, stages."""

from fshard.transforms.module.batchnorm import commit_batch_norm
from fshard.transforms.module.lora import LoraConfig, lora, merge_lora
from fshard.transforms.module.remat import checkpoint_name, offload, save_names
from fshard.transforms.shard_params import units_of
from fshard.transforms.stages.functions import stage_functions

__all__ = [
    "LoraConfig",
    "checkpoint_name",
    "commit_batch_norm",
    "lora",
    "merge_lora",
    "offload",
    "save_names",
    "stage_functions",
    "units_of",
]
