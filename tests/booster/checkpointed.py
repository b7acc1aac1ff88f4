"""A loop under each plugin, for checkpoints."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs


class Block(nn.Module):
    def __init__(self, counts, dropout):
        super().__init__()
        self.counts = counts
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        q, k, v = (
            y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(y.transpose(1, 2).flatten(2)))


def network(counts=True, dropout=0.25):
    """Return a row of layers whose first and last share a weight."""
    torch.manual_seed(0)
    blocks = [Block(counts, dropout), nn.Linear(8, 8), Block(counts, dropout)]
    model = nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 8))
    model[4].weight = model[0].weight
    return model.double()


def adamw(model):
    decayed = [x for x in model.parameters() if x.ndim > 1]
    rest = [x for x in model.parameters() if x.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=0.01, betas=(0.8, 0.9)
    )


HYBRID = partial(fs.HybridParallelPlugin, sample=torch.randn(2, 4, 8).double(), microbatches=1)


PLUGINS = {
    "ddp": (fs.DDPPlugin, {"data": 2}),
    "zero1": (partial(fs.ZeroPlugin, stage=1), {"data": 4}),
    "zero2": (partial(fs.ZeroPlugin, stage=2), {"data": 2}),
    "fsdp": (fs.FSDPPlugin, {"data": 4}),
    "stages": (partial(HYBRID, pipeline=2, zero_stage=1), {"pipe": 2, "data": 2}),
    "tensor": (partial(HYBRID, tensor=2, zero_stage=3), {"data": 2, "model": 2}),
    "both": (
        partial(HYBRID, tensor=2, pipeline=2, zero_stage=2),
        {"pipe": 2, "data": 1, "model": 2},
    ),
}
