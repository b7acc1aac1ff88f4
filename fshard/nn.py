"""Functions for modules and losses beyond the first page.

LoRA, policies of `remat`, units, stages, drawn parameters; `MoE`.
"""

from fshard.experts.module import MoE
from fshard.transforms.module.lazy import materialize
from fshard.transforms.module.lora import LoraConfig, lora, merge_lora
from fshard.transforms.module.remat import checkpoint_name, offload, save_names
from fshard.transforms.shard_params import init_params, units_of
from fshard.transforms.stages.functions import stage_functions

__all__ = [
    "LoraConfig",
    "MoE",
    "checkpoint_name",
    "init_params",
    "lora",
    "materialize",
    "merge_lora",
    "offload",
    "save_names",
    "stage_functions",
    "units_of",
]
