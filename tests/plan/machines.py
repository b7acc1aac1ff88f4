"""A machine, a decoder layer as plain modules, and the case that tests of costs vary."""

import torch
from torch import nn
from torch.nn import functional

from fshard.plan import cluster

H100 = cluster("h100")


WIDTH, HEADS, TOKENS, ROWS = 16, 4, 6, 16


class Block(nn.Module):
    def __init__(self, kv_heads):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS * kv_heads) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        heads = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


FIXED = {
    "layers": 2, "kv_heads": 2, "stage": 3, "name": "adamw", "recomputed": False, "dtype": torch.float32,
}  # fmt: skip
