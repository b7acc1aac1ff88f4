"""Copies between a device and pinned host memory; the host waits only where it reads one.

    start_read    compute  ── x to host ──●── ...               the host waits for ● alone, when it reads
    HostCopy      compute  ──●────────────────●──  ...  ──●──   one stream waits for the other at ●, the host never
                  copies     └── x to host ───┘   x back ─┘

There is no pool: torch keeps freed pinned memory, and reuses it only after the copies that use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from threading import get_ident
from typing import cast
from weakref import ref

import torch
from torch import Tensor

RUNNING, AHEAD = 2, 4
"""The copies to the host that run at a time, and those back that start before they are needed."""


def is_on_host(x: Tensor) -> bool:
    """Return True if a tensor takes no accelerator memory."""
    return x.device.type in ("cpu", "meta")


def host_like(x: Tensor) -> Tensor:
    """Return an empty tensor in host memory, pinned if x is on a GPU."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)


def start_read(xs: Sequence[Tensor], into: Iterable[Tensor] | None = None) -> Callable[[], list[Tensor]]:
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
        self._stream = stream = _CopyStream.of(x.device, get_ident())
        while len(stream.running) >= RUNNING:
            stream.running.popleft().wait()
        self._event = stream.copy(x, self._values)
        stream.running.append(self._event)
        self._previous, stream.last = stream.last, cast("ref[HostCopy]", ref(self))

    def wait(self) -> None:
        """Let the device wait for the copy: from now on it may write to the tensor."""
        self._event.wait()

    def get(self) -> Tensor:
        """Return the tensor on its device."""
        self._is_used, copy = False, self
        for _ in range(1 + AHEAD):
            copy = copy and copy._fetch()
        self._event.wait()
        x, self._fetched, self._is_used = cast(Tensor, self._fetched), None, True
        return x

    def _fetch(self) -> HostCopy | None:
        """Start the copy back, unless it was needed already; return the copy before this one."""
        if self._fetched is None and not self._is_used:
            self._fetched = torch.empty_like(self._values, device=self._device)
            self._event = self._stream.copy(self._values, self._fetched)
        return self._previous and self._previous()


class _CopyStream:
    """The stream for copies of a thread: the copies to the host that run, and the last one."""

    last: ref[HostCopy] | None = None

    def __init__(self, device: torch.device) -> None:
        self.stream, self.running = torch.cuda.Stream(device), deque[torch.Event]()

    @staticmethod
    @lru_cache
    def of(device: torch.device, thread: int) -> _CopyStream:
        return _CopyStream(device)

    def copy(self, source: Tensor, target: Tensor) -> torch.Event:
        """Copy after what the current stream has so far; return the event of the end."""
        x = target if is_on_host(source) else source
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        x.record_stream(self.stream)  # its memory is not reused before
        return self.stream.record_event()
