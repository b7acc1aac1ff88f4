"""Activations in host memory from the forward to the backward: `HostCopy`, for `fs.remat`.

forward     x ── to the host ──●                       x has its memory until the second copy after it starts
backward                           ── to the device ──●  x      the copies before it start to come back too
"""

from __future__ import annotations

import threading
from weakref import ref

import torch
from torch import Tensor

from fshard.memory.transfers import Link, Transfer, start
from fshard.mesh.layout.kinds import empty_in, mark_memory
from fshard.mesh.spmd.scope import here

RUNNING, AHEAD = 2, 2
"""The copies to the host that run at a time, and those back that start before they are needed."""


class _Thread(threading.local):
    """The last copy that a thread has started."""

    last: ref[HostCopy] | None = None


_thread = _Thread()


def can_leave(x: Tensor) -> bool:
    """Return True for a tensor of a GPU, or of a device of a mesh, whose host memory is another kind."""
    return x.is_cuda or here() is not None


class HostCopy:
    """A tensor's values in host memory, copied while the device computes.

    `x` is kept until its copy has ended; if it has been written to before, the copy has no values.
    """

    def __init__(self, x: Tensor) -> None:
        scope = here()
        device, runtime = (0, "process") if scope is None else (scope.device, scope.mesh.runtime)
        self._there, self._back = (
            Link("device", "host", runtime, device),
            Link("host", "device", runtime, device),
        )
        self._source, self._version, self._device = x, x._version, str(x.device)
        self._shape, self._stride = x.shape, torch.empty_like(x, device="meta").stride()
        if x.is_cuda:  # torch keeps freed page-locked memory
            self._values = mark_memory(
                torch.empty(x.numel(), dtype=x.dtype, pin_memory=True), "host"
            )
        else:
            self._values = empty_in("host", (x.numel(),), x.dtype, x.device.type)
        self._leaving: Transfer | None = start(
            x, self._values.as_strided(self._shape, self._stride), self._there
        )
        self._fetched: Transfer | None = None
        self._is_used = False
        self._previous = _thread.last
        _thread.last = ref(self)
        for copy in self._before(1 + RUNNING)[RUNNING:]:
            copy._end()

    def _before(self, count: int) -> list[HostCopy]:
        """Return this copy and those started before it."""
        copy, copies = self, list[HostCopy]()
        while copy is not None and len(copies) < count:
            copies.append(copy)
            copy = copy._previous and copy._previous()
        return copies

    def _end(self) -> None:
        """Wait for the copy to the host, and free the tensor."""
        if self._leaving is not None:
            self._leaving.wait()
            self._is_valid = self._source._version == self._version
            del self._source, self._leaving
            self._leaving = None

    def get(self) -> Tensor | None:
        """Return the tensor on its device; None if it was written to while it was copied."""
        self._is_used = False
        for copy in self._before(1 + AHEAD):
            copy._end()
            if copy._is_valid and copy._fetched is None and not copy._is_used:
                target = empty_in("device", copy._values.shape, copy._values.dtype, copy._device)
                copy._fetched = start(copy._values, target, copy._back)
        transfer, self._fetched, self._is_used = self._fetched, None, True
        return None if transfer is None else transfer.wait().as_strided(self._shape, self._stride)
