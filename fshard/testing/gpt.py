"""A small GPT as plain functions, with dropout and tied embeddings.

The tests train it; it is a template for other models.

>>> params = init(layers=1)
>>> loss_fn(params, batch(size=2), dropout=0.0).shape
torch.Size([])
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LENGTH = 31, 16, 2, 12


def init(layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return parameters drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    def init_block() -> dict[str, Tensor]:
        return {
            "norm": torch.ones(WIDTH, dtype=dtype),
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "bias": normal(4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }

    return {
        "embedding": normal(VOCABULARY, WIDTH),
        "position": normal(LENGTH, WIDTH),
        "blocks": [init_block() for _ in range(layers)],
        "norm": torch.ones(WIDTH, dtype=dtype),
    }


def block(w: Any, x: Tensor, dropout: float) -> Tensor:
    """Apply one block to x (batch, length, width): attention, then an MLP."""
    normed = F.layer_norm(x, (WIDTH,)) * w["norm"]
    q, k, v = rearrange(
        normed @ w["qkv"],
        "batch length (qkv heads each) -> qkv batch heads length each",
        qkv=3,
        heads=HEADS,
    )
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    is_seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    attended = scores.masked_fill(~is_seen, float("-inf")).softmax(-1) @ v
    attended = rearrange(attended, "batch heads length each -> batch length (heads each)")
    x = x + F.dropout(attended @ w["out"], dropout)

    hidden = F.gelu(x @ w["up"] + w["bias"])
    return x + F.dropout(hidden @ w["down"], dropout)


def loss_fn(params: Any, batch: dict[str, Tensor], dropout: float = 0.1) -> Tensor:
    """Return the mean loss of predicting the next token."""
    x = F.embedding(batch["x"], params["embedding"]) + params["position"][: batch["x"].shape[1]]
    for w in params["blocks"]:
        x = block(w, x, dropout)
    x = F.layer_norm(x, (WIDTH,)) * params["norm"]
    return F.cross_entropy((x @ params["embedding"].T).flatten(0, 1), batch["y"].flatten())


def without_dropout(params: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the same loss, without randomness."""
    return loss_fn(params, batch, 0.0)


def batch(size: int = 8, seed: int = 1) -> dict[str, Tensor]:
    """Return random tokens, and those that follow them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=generator)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}
