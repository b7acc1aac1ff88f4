"""Models of transformers that are trained and exported."""

import torch

import fshard as fs
from tests.checkpoint.helpers.programs import mesh
from tests.checkpoint.helpers.tiny import tiny

CONFIGS = {
    "linear": fs.nn.LoraConfig(r=2, target_modules=["c_attn", "attn.c_proj"], lora_alpha=3),
    "embedding": fs.nn.LoraConfig(
        r=3, target_modules=["wte", "c_fc"], bias="lora_only", modules_to_save=["ln_f"]
    ),
    "tied head": fs.nn.LoraConfig(r=2, target_modules=r".*(lm_head|mlp\.c_proj)", bias="all"),
    "all": fs.nn.LoraConfig(),
}


def trained(config):
    """Return a model of LoRA with differences, and its parameters in ZeRO-3."""
    model = fs.nn.lora(tiny("gpt2").eval(), config)
    for x in model.parameters():
        torch.nn.init.normal_(x)
    return model, fs.shard_params(fs.functionalize(model)[1], fs.fsdp("data"), mesh=mesh())
