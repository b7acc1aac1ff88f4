"""Large host buffers, used again.

A fresh buffer of 32 MB costs more in page faults than the message that it is for (5 times the time of adding into one
that is already mapped).  GPUs have a caching allocator; on the CPU this pool is one, for results and scratch alike: it
keeps the storages it has handed out, and hands one out again once nobody else refers to it.
"""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import torch
from torch import Tensor

SMALLEST = 4 << 20
"""Bytes from which on a buffer is pooled: smaller ones the C library recycles well by itself."""
LARGEST_POOL = 1 << 30
"""Bytes that the pool may keep."""

_use_count: Any = torch._C._storage_Use_Count  # pyright: ignore[reportPrivateUsage]
_pool: list[torch.UntypedStorage] = []
_lock = threading.Lock()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the CPU, in used memory if some of that size lies idle."""
    size = prod(shape) * dtype.itemsize
    if size < SMALLEST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    fresh: Any = torch.empty(0, dtype=dtype, device="cpu")  # torch's stub of set_ knows no shape
    with _lock:
        storage = next((kept for kept in _pool if kept.nbytes() == size and _idle(kept)), None)
        if storage is None:
            storage = torch.UntypedStorage(size)
            _make_room(size)
            _pool.append(storage)
        return fresh.set_(storage, 0, shape)


def _idle(storage: torch.UntypedStorage) -> bool:
    return _use_count(storage._cdata) == 1  # pyright: ignore[reportPrivateUsage]


def _make_room(size: int) -> None:
    """Let go of idle buffers of other sizes, oldest first, and stop keeping the busy ones if that is not enough."""
    while _pool and sum(kept.nbytes() for kept in _pool) + size > LARGEST_POOL:
        place = next((place for place, kept in enumerate(_pool) if _idle(kept)), 0)
        del _pool[place]
