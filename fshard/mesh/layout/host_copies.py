"""Copies between a device and pinned host memory; the host waits only where it reads one.

    start_read    compute  ── x to host ──●── ...               the host waits for ● alone, when it reads
    HostCopy      compute  ──●────────────────●──  ...  ──●──   one stream waits for the other at ●, the host never
                  copies     └── x to host ───┘   x back ─┘

There is no pool: torch keeps freed pinned memory, and reuses it only after the copies that use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor

RUNNING, AHEAD = 2, 4
"""The copies to the host that run at a time, and those back that start before they are needed."""
_thread: Any = threading.local()


def is_on_host(x: Tensor) -> bool:
    """Return True if a tensor takes no accelerator memory."""
    return x.device.type in ("cpu", "meta")


def host_like(x: Tensor) -> Tensor:
    """Return an empty tensor in host memory, pinned if x is on a GPU."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)


def start_read(xs: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> Callable[[], list[Tensor]]:
    """Start copying tensors to the host; return the function that waits for the copies and returns them."""
    copies = [x if is_on_host(x) else host_like(x) for x in xs] if into is None else [*into]
    for x, copy in zip(xs, copies, strict=True):
        if x is not copy:
            copy.copy_(x, non_blocking=True)
    devices = {x.device for x in xs if not is_on_host(x)}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def read() -> list[Tensor]:
        for event in events:
            event.synchronize()
        return copies

    return read


class HostCopy:
    """A tensor's values in host memory, copied by a stream of their own while the device computes.

    With the third copy the device waits for the first, and has its memory again. In backward the last copies are needed
    first: whichever is needed starts some of those before it.
    """

    def __init__(self, x: Tensor) -> None:
        self._device, self._values, self._fetched, self._is_used = x.device, host_like(x), None, False
        self._event = _copy(x, self._values)
        self._previous, _thread.last = getattr(_thread, "last", None), ref(self)
        for copy in self._before(1 + RUNNING)[RUNNING:]:
            copy.wait()

    def _before(self, count: int) -> list[HostCopy]:
        """Return this copy and those started before it."""
        copy, copies = self, list[HostCopy]()
        while copy is not None and len(copies) < count:
            copies.append(copy)
            copy = copy._previous and copy._previous()
        return copies

    def wait(self) -> None:
        """Let the device wait for the copy: from now on it may write to the tensor."""
        self._event.wait()

    def get(self) -> Tensor:
        """Return the tensor on its device."""
        self._is_used = False
        for copy in self._before(1 + AHEAD):
            if copy._fetched is None and not copy._is_used:
                copy._fetched = torch.empty_like(copy._values, device=copy._device)
                copy._event = _copy(copy._values, copy._fetched)
        self.wait()
        x, self._fetched, self._is_used = self._fetched, None, True
        assert x is not None
        return x


def _copy(source: Tensor, target: Tensor) -> torch.Event:
    """Copy after what the current stream has so far; return the event of the end."""
    x = target if is_on_host(source) else source
    stream = _copy_stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    x.record_stream(stream)  # its memory is not reused before
    return stream.record_event()


@lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
