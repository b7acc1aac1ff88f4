"""A pool that recycles large host buffers.

A new buffer of 32 MB costs more in page faults than the message it is for (5 times adding into a mapped one). The pool
keeps the storages it has returned, and returns one again when it has no other reference.
"""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import torch
from torch import Tensor

SMALLEST = 256 << 10
"""Bytes from which on a buffer is pooled: the C library returns larger ones to the system."""
LARGEST_POOL = 1 << 30
"""Bytes that the pool may keep."""

CPU = torch.device("cpu")  # whatever the default device

_use_count: Any = torch._C._storage_Use_Count  # pyright: ignore[reportPrivateUsage]
_pool: list[torch.UntypedStorage] = []
_lock = threading.Lock()
open_limits: list[object] = []
"""The open limits of `fshard.memory`, during which nothing is recycled: what is freed is counted as free."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor, in recycled memory if an idle buffer has that size."""
    size = prod(shape) * dtype.itemsize
    if size < SMALLEST or open_limits:
        return torch.empty(shape, dtype=dtype, device=CPU)
    x: Any = torch.empty(0, dtype=dtype, device=CPU)  # torch's stub of set_ has no shape argument
    with _lock:
        storage = next(
            (storage for storage in _pool if storage.nbytes() == size and _is_idle(storage)), None
        )
        if storage is None:
            storage = torch.UntypedStorage(size)
            _make_room(size)
            _pool.append(storage)
        return x.set_(storage, 0, shape)


def _is_idle(storage: torch.UntypedStorage) -> bool:
    return _use_count(storage._cdata) == 1  # pyright: ignore[reportPrivateUsage]


def _make_room(size: int) -> None:
    """Free idle buffers of other sizes, oldest first; stop tracking busy ones if that is not enough."""
    while _pool and sum(storage.nbytes() for storage in _pool) + size > LARGEST_POOL:
        index = next((index for index, storage in enumerate(_pool) if _is_idle(storage)), 0)
        del _pool[index]
