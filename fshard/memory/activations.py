"""Activations in host memory from the forward to the backward: `HostCopy`, for `fs.remat`.

forward     x ── to host ──●                      x keeps its memory until the second copy after it
                                                  starts: then the stream that computes waits for ●
backward                       ── to device ──●  x         the copies before it return too

On a GPU the host waits for none of this: see Note [The device waits for room].
"""

from __future__ import annotations

import threading
from weakref import ref

import torch
from torch import Tensor

from fshard.memory.transfers import Link, Transfer, start
from fshard.mesh.layout.host_copies import is_on_host, pinned_like
from fshard.mesh.layout.kinds import empty_in, mark_memory
from fshard.mesh.spmd.scope import here

RUNNING = 2
"""The copies to the host that run at a time."""

AHEAD = 2
"""The copies back to the device that start before they are needed."""


class _Thread(threading.local):
    """The last copy that a thread has started."""

    last: ref[HostCopy] | None = None


_thread = _Thread()


def can_leave(x: Tensor) -> bool:
    """Return True for a tensor of a device whose host memory is another kind.

    That is a GPU, or a device of a mesh.
    """
    return not is_on_host(x) or here() is not None


class HostCopy:
    """A tensor's values in host memory, copied while the device computes.

    `x` is kept until it may be written to: if it has been written to before, the copy has no
    values.
    """

    def __init__(self, x: Tensor) -> None:
        device = 0
        runtime = "process"
        scope = here()
        if scope is not None:
            device = scope.number
            runtime = scope.mesh.runtime
        self._back = Link("host", "device", runtime, device)
        self._source = x
        self._version = x._version
        self._device = str(x.device)
        self._shape = x.shape
        self._stride = torch.empty_like(x, device="meta").stride()  # dense, in the order of x's
        if not is_on_host(x):
            # Page-locked by torch, which keeps freed memory for the next step: to lock it is slow.
            values = mark_memory(pinned_like(x), "host")
            self._values = values.as_strided((x.numel(),), (1,))
        else:
            self._values = empty_in("host", (x.numel(),), x.dtype, x.device.type)

        target = self._values.as_strided(self._shape, self._stride)
        link = Link("device", "host", runtime, device)
        self._leaving: Transfer | None = start([x], [target], link)
        self._fetched: Transfer | None = None
        self._is_used = False

        # Weak references: a copy is freed with its graph, not with the copies after it.
        self._previous = _thread.last
        _thread.last = ref(self)
        for copy in self._with_previous(1 + RUNNING)[RUNNING:]:
            copy._end()

    def _with_previous(self, count: int) -> list[HostCopy]:
        """Return `count` copies: this one and those started before it."""
        copies: list[HostCopy] = []
        copy: HostCopy | None = self
        while copy is not None and len(copies) < count:
            copies.append(copy)
            previous = copy._previous
            copy = None if previous is None else previous()
        return copies

    def _end(self) -> None:
        """Free the tensor, once its copy to the host no longer needs it."""
        if self._leaving is not None:
            self._leaving.release()
            self._is_valid = self._source._version == self._version
            del self._source  # frees its memory: the reason for the copy
            self._leaving = None

    def get(self) -> Tensor | None:
        """Return the tensor on its device; None if it was written to while it was copied."""
        # A backward with retain_graph gets a copy again.
        self._is_used = False
        for copy in self._with_previous(1 + AHEAD):
            copy._end()
            if copy._is_valid and copy._fetched is None and not copy._is_used:
                target = empty_in("device", copy._values.shape, copy._values.dtype, copy._device)
                copy._fetched = start([copy._values], [target], copy._back)

        transfer = self._fetched
        self._fetched = None
        self._is_used = True
        if transfer is None:
            return None
        (values,) = transfer.wait()
        return values.as_strided(self._shape, self._stride)
