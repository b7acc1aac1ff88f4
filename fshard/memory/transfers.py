"""`start`: copies between memory kinds, made while the device computes.

    runtime             a copy is made
    virtual, abstract   at once
    process, CPU        by one helper thread, in the order of the starts
    process, CUDA       by a stream for each direction; by the helper thread if one side is on disk

At most `AT_ONCE` copies are under way: the next start waits for the oldest. The compute stream
waits for what is copied to the device, the host for all else. Source and target must not be written
before that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.memory import disk
from fshard.memory.kinds import note_move
from fshard.memory.pool import Stress, current_stress, poison, stress
from fshard.mesh.collectives.ledger import active
from fshard.mesh.layout import Memory, Runtime

__all__ = ["AT_ONCE", "Link", "Transfer", "start", "stress"]

AT_ONCE = 8
"""Copies that are under way at a time: their tensors stay in memory. No reason is known for 8."""


class Transfer:
    """A copy under way; `end` waits for it, or makes it, and raises its error."""

    def __init__(self, target: Tensor, end: Callable[[], object] | None = None) -> None:
        self._target = target
        self._end = end

    def wait(self) -> Tensor:
        """Wait until the target has its values, and return it."""
        if self._end is not None:
            self._end()
            self._end = None
        return self._target


class Link(NamedTuple):
    """The way of a transfer: from one memory to another, of a device of a mesh of some runtime."""

    source: Memory
    target: Memory
    runtime: Runtime = "virtual"
    device: int = 0


def start(source: Tensor, target: Tensor, link: Link) -> Transfer:
    """Start copying a tensor into another one of its shape and dtype.

    The ledger counts the bytes; between disk and device they pass through the host.

    >>> start(torch.ones(2), torch.empty(2), Link("host", "device")).wait()
    tensor([1., 1.])
    """
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"start: target must have the shape and dtype of source, {tuple(source.shape)} and "
            f"{source.dtype}; got {tuple(target.shape)} and {target.dtype}. "
            "Make it with torch.empty_like."
        )
    path = _PATHS.get((link.source, link.target), (link.source, link.target))
    for ledger in active():
        for hop in pairwise(path):
            ledger.record_move(link.device, *hop, source.nbytes)
    note_move(link.source, link.target, source.nbytes)

    source = source.detach()
    target = target.detach()
    mode = current_stress()
    if source.is_meta or target.is_meta:
        return Transfer(target)
    if mode.poison:
        poison(target)
        if mode.rate is None:
            return Transfer(target, partial(disk.copy, source, target))

    is_of_process = link.runtime == "process"
    is_on_gpu = source.is_cuda or target.is_cuda
    is_on_disk = disk.is_on_disk(source) or disk.is_on_disk(target)
    if is_of_process and is_on_gpu and not is_on_disk:
        return _start_on_stream(source, target)
    if is_of_process or mode.rate is not None:
        return _start_in_thread(source, target, mode)
    disk.copy(source, target)
    return Transfer(target)


_PATHS: dict[tuple[Memory, Memory], tuple[Memory, ...]] = {
    ("disk", "device"): ("disk", "host", "device"),
    ("device", "disk"): ("device", "host", "disk"),
}
"""Copies that pass through another memory, for the ledger."""


# -- copies under way ----------------------------------------------------------------------------


class _Copy(NamedTuple):
    is_done: Callable[[], bool]
    finish: Callable[[], object]
    host: Tensor | None = None  # memory that must stay until the copy is done


_under_way: deque[_Copy] = deque()
_lock = threading.Lock()


def _make_room() -> None:
    """Remove copies that are done; wait for the oldest one if there are too many."""
    with _lock:
        while _under_way and (_under_way[0].is_done() or len(_under_way) >= AT_ONCE):
            _under_way.popleft().finish()


def _start_in_thread(source: Tensor, target: Tensor, mode: Stress) -> Transfer:
    device = next((x.device for x in (source, target) if x.is_cuda), None)
    ready = None  # when the device has computed the source, and no longer uses the target
    if device is not None:
        ready = torch.cuda.current_stream(device).record_event()

    def run() -> None:
        if mode.rate is not None:
            time.sleep(source.nbytes / mode.rate)
        if device is None or ready is None:
            disk.copy(source, target)
            return
        stream = _stream(device, target.is_cuda)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            disk.copy(source, target)
        stream.synchronize()

    _make_room()
    future = _helper(os.getpid()).submit(run)
    _under_way.append(_Copy(future.done, future.exception))
    return Transfer(target, future.result)


@lru_cache(maxsize=1)
def _helper(process: int) -> ThreadPoolExecutor:
    """Return the helper thread of a process; a fork has none of its parent's."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"fshard transfers {process}")


def _start_on_stream(source: Tensor, target: Tensor) -> Transfer:
    to_device = target.is_cuda
    on_gpu, on_host = (target, source) if to_device else (source, target)
    _make_room()
    stream = _stream(on_gpu.device, to_device)
    stream.wait_stream(torch.cuda.current_stream(on_gpu.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        event = stream.record_event()
    on_gpu.record_stream(stream)  # else its memory may be reused before the copy ends
    _under_way.append(_Copy(event.query, event.synchronize, on_host))

    if to_device:
        device = on_gpu.device
        return Transfer(target, lambda: torch.cuda.current_stream(device).wait_event(event))
    return Transfer(target, event.synchronize)


@lru_cache
def _stream(device: torch.device, to_device: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
