"""A Llama, written for one device: RMSNorm, rotary positions, grouped queries, SwiGLU or experts."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model; `experts` of each layer are in place of its MLP, unless 0."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    experts: int = 0


def rotated(x):
    """Turn the pairs of each head by angles that grow with the position: (batch, heads, tokens, head)."""
    length, head = x.shape[-2:]
    rates = 10_000.0 ** (-torch.arange(0, head, 2, device=x.device) / head)
    angles = torch.arange(length, device=x.device)[:, None] * rates  # (tokens, head / 2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Each token attends to those before it; several heads of queries share one of keys and values."""

    def __init__(self, sizes):
        super().__init__()
        self.head = sizes.width // sizes.heads
        kv_width = self.head * sizes.kv_heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, kv_width, bias=False)
        self.v = nn.Linear(sizes.width, kv_width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x):
        q, k, v = (
            project(x)
            .unflatten(-1, (-1, self.head))
            .transpose(1, 2)  # (batch, heads, tokens, head)
            for project in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: two matrices side by side, of which one is the gate of the other, then a third."""

    def __init__(self, sizes):
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then an MLP or experts, each behind a norm and added to its input."""

    def __init__(self, sizes):
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.width)
        if sizes.experts:
            # Two experts of a token, each of half an MLP's width: as many operations.
            axes = {"axis": "expert", "batch": ("data", "expert")}
            half = sizes.hidden // 2
            self.mlp = fs.nn.MoE(sizes.width, half, experts=sizes.experts, top_k=2, **axes)
        else:
            self.mlp = MLP(sizes)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Returns the scores of the next token at each place; of rows of tokens and targets their loss.

    With experts the loss has a term that balances their loads.
    """

    def __init__(self, sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # The branches of all layers are added: their last layers begin smaller.
                is_last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * sizes.layers) ** (0.5 * is_last))

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens)  # (batch, tokens, width)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        if targets is None:
            return scores

        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        balances = [block.mlp.balance for block in self.blocks if isinstance(block.mlp, fs.nn.MoE)]
        return loss + 0.01 * sum(balances)
