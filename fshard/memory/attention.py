"""Fused attention of tensors without values, which torch computes by its formula.

The formula has the scores of all pairs of tokens, which no device stores.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils.flop_counter import (
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

_ops: Any = torch.ops.aten
_FUSED: Any = _ops._scaled_dot_product_flash_attention_for_cpu
_lock = threading.Lock()
_users: list[Library] = []  # one entry for each user; the same library


@contextmanager
def fused_attention() -> Generator[None]:
    """Replace attention on meta tensors, inside the block, by the fused operation of CPUs.

    It saves as much memory as those of GPUs.
    """
    # The rule is one of the process, so it stays as long as one of several threads is inside.
    with _lock:
        is_first = not _users
        library = Library("aten", "IMPL") if is_first else _users[0]
        _users.append(library)
        if is_first:
            library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
    try:
        yield
    finally:
        with _lock:
            library = _users.pop()
            if not _users:
                library._destroy()  # pyright: ignore[reportPrivateUsage]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    has_one_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    is_fused = query.ndim == 4 and not dropout_p and has_one_width
    if not is_fused:
        formula = _ops._scaled_dot_product_attention_math
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return formula(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]

    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # The fused operation takes a mask of numbers, which torch makes of one of booleans.
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype, device="meta")
    return _FUSED(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


@register_flop_formula(_FUSED)
def _forward_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


@register_flop_formula(_ops._scaled_dot_product_flash_attention_for_cpu_backward)
def _backward_flops(cotangent: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(cotangent, query, key, value))
