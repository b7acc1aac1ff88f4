"""Buffers that transfers reuse, and host memory at its exact size.

torch's allocator of pinned memory rounds sizes up to powers of two, up to twice what is needed. So
memory is mapped here in pages and registered with CUDA, which takes long: when the last tensor over
it is freed, the next one of its size gets it. Before more is registered, free memory is released
until it has no more bytes than tensors use, or `KEPT`.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from fshard.errors import MemoryLimitError


class Pool:
    """Buffers that are made by a function when none is free, and reused."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._free: deque[tuple[Tensor, torch.Event | None]] = deque()

    def take(self) -> Tensor:
        """Return a buffer, after the last copy that used it."""
        if not self._free:
            return self._make()
        buffer, event = self._free.popleft()
        if event is not None and buffer.is_cpu:
            event.synchronize()
        elif event is not None:
            event.wait()  # of the current stream, not of the host
        return buffer

    def release(self, buffer: Tensor, after: torch.Event | None = None) -> None:
        """Return a buffer to the pool: it is free once the event has occurred."""
        if current_stress().poison:
            poison(buffer)
        self._free.append((buffer, after))


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor in host memory of exactly its size, page-locked for CUDA."""
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    registered = _registered(os.getpid())
    memory = registered.take(nbytes, shape)
    x = torch.frombuffer(memory, dtype=torch.uint8)
    finalizer = finalize(x.untyped_storage(), registered.freed.append, memory)
    finalizer.atexit = False  # when the process ends there is no next tensor
    return x.view(dtype).view(tuple(shape))


KEPT = 1 << 30
"""Bytes of free registered memory that are kept even if tensors use less."""


class RegisteredMemory:
    """The memory of a process that is registered with CUDA.

    `freed` gets memory whose last tensor is gone.
    """

    def __init__(self) -> None:
        # A deque, since Python frees tensors at any time, in any thread, within `take` too.
        self.freed: deque[mmap.mmap] = deque()
        self._kept: dict[int, list[mmap.mmap]] = {}  # by size, the longest unused first
        self._bytes = 0  # all that is registered
        self._lock = threading.Lock()

    def take(self, nbytes: int, shape: Sequence[int]) -> mmap.mmap:
        """Return memory of a size for a tensor of some shape: free memory, or else new."""
        with self._lock:
            self._collect_freed()
            memories = self._kept.get(nbytes)
            if not memories:
                return self._register(nbytes, shape)
            memory = memories.pop()
            if not memories:
                del self._kept[nbytes]
            return memory

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept, without a tensor over them."""
        self._collect_freed()
        return sum([nbytes * len(memories) for nbytes, memories in self._kept.items()])

    def _collect_freed(self) -> None:
        while self.freed:
            memory = self.freed.popleft()
            memories = self._kept.pop(len(memory), [])
            memories.append(memory)
            self._kept[len(memory)] = memories  # now the last size

    def _register(self, nbytes: int, shape: Sequence[int]) -> mmap.mmap:
        used = self._bytes - self.kept_bytes
        self._release(max(used, KEPT))
        if nbytes > _free_bytes():
            self._release(0)
        available = _free_bytes()
        if nbytes > available:  # to lock more would end the process
            raise MemoryLimitError(
                f"the host must have {nbytes:,} more bytes of memory for a tensor of shape "
                f"{tuple(shape)}; got {available:,}. Store less on the host, or use "
                'memory="disk" or state_memory="disk".'
            )
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            # Else each fork, as of a worker that loads data, copies all locked pages at once.
            memory.madvise(mmap.MADV_DONTFORK)
        torch.cuda.check_error(_cuda().cudaHostRegister(_address(memory), nbytes, 0))
        self._bytes += nbytes
        return memory

    def _release(self, kept: int) -> None:
        """Release free memory, the longest unused first, until at most `kept` bytes are free."""
        free = self.kept_bytes
        while free > kept:
            nbytes = next(iter(self._kept))
            memories = self._kept[nbytes]
            _cuda().cudaHostUnregister(_address(memories.pop()))
            if not memories:
                del self._kept[nbytes]
            self._bytes -= nbytes
            free -= nbytes


# All are cached: a fork that dropped its parent's would unmap addresses that are not mapped there,
# but may be by then those of other memory.
@cache
def _registered(process: int) -> RegisteredMemory:
    """Return the registered memory of a process: a fork has none of its parent's."""
    return RegisteredMemory()


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _free_bytes() -> int:
    """Return the bytes of memory that Linux can still give; elsewhere the largest number."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) << 10  # in KiB
    except OSError:
        pass
    return sys.maxsize


def _cuda() -> Any:
    return torch.cuda.cudart()


# -- stress --------------------------------------------------------------------------------------


class Stress(NamedTuple):
    """The rate of transfers in tests, and whether their targets are poisoned.

    Args:
        rate: bytes per second; None for as fast as they run.
        poison: fill targets with NaN while they are under way, and buffers when they are released.
    """

    rate: float | None = None
    poison: bool = False


_stresses = [Stress()]


def current_stress() -> Stress:
    """Return the mode of the innermost `stress`, which all threads share."""
    return _stresses[-1]


@contextmanager
def stress(*, rate: float | None = None, poison: bool = False) -> Generator[None]:
    """Run transfers so that a missing wait changes bits on a CPU: late, into targets full of NaN.

    Args:
        rate: bytes per second, in the helper thread on every runtime. None: with `poison` a
            transfer is made in its `wait`, and not at all without one.
        poison: fill targets with NaN (integers with their largest value) while they are under way,
            and buffers when they are released.

    >>> from fshard.memory.transfers import Link, start
    >>> x, y = torch.ones(2), torch.zeros(2)
    >>> with stress(poison=True):
    ...     transfer = start([x], [y], Link("host", "device"))
    ...     print(y)
    ...     print(transfer.wait())
    tensor([nan, nan])
    [tensor([1., 1.])]
    """
    _stresses.append(Stress(rate, poison))
    try:
        yield
    finally:
        _stresses.pop()


def poison(x: Tensor) -> None:
    """Fill a tensor with NaN, or the largest value of its dtype."""
    if x.is_floating_point() or x.is_complex():
        x.fill_(torch.nan)
    else:
        largest = True if x.dtype == torch.bool else torch.iinfo(x.dtype).max
        x.fill_(largest)
