"""A pool that recycles large host buffers.

A new buffer of 32 MB costs more in page faults than the message it is for: adding into a new one
takes five times as long as into a mapped one. The pool keeps the storages that it has returned, and
returns one again when nothing else refers to it.
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
"""Bytes that the pool may keep. No reason known for this number."""

CPU = torch.device("cpu")  # whatever the default device

open_limits: list[object] = []
"""The open limits of `fshard.memory`, during which nothing is recycled.

A limit counts what is freed as free, which a pooled storage never is.
"""

_use_count: Any = torch._C._storage_Use_Count  # pyright: ignore[reportPrivateUsage]
_pool: list[torch.UntypedStorage] = []
_lock = threading.Lock()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor, in recycled memory if an idle buffer has that size."""
    size = prod(shape) * dtype.itemsize
    if size < SMALLEST or open_limits:
        return torch.empty(shape, dtype=dtype, device=CPU)

    x: Any = torch.empty(0, dtype=dtype, device=CPU)  # torch's stub of set_ has no shape argument
    # Another thread would find the storage idle too until the tensor refers to it.
    with _lock:
        storage = _idle_storage(size)
        if storage is None:
            storage = torch.UntypedStorage(size)
            _make_room(size)
            _pool.append(storage)
        return x.set_(storage, 0, shape)


def _idle_storage(size: int) -> torch.UntypedStorage | None:
    for storage in _pool:
        if storage.nbytes() == size and _is_idle(storage):
            return storage
    return None


def _is_idle(storage: torch.UntypedStorage) -> bool:
    """Return True if only the pool refers to a storage."""
    return _use_count(storage._cdata) == 1  # pyright: ignore[reportPrivateUsage]


def _make_room(size: int) -> None:
    """Remove buffers from the pool until one of this size fits: idle ones first, oldest first.

    A busy one that is removed is freed with its last tensor.
    """
    while _pool and sum([storage.nbytes() for storage in _pool]) + size > LARGEST_POOL:
        oldest = 0
        for index, storage in enumerate(_pool):
            if _is_idle(storage):
                oldest = index
                break
        del _pool[oldest]
