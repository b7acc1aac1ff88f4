"""Fast paths between processes of one machine, for one tensor shape and dtype, with everything precomputed.

Preparing a small collective (group, source line, buffer, handle) takes longer than running it, and most are called
repeatedly on tensors of one shape. A `FastPath` runs one collective of one source line, a `MessageLane` sends and
receives messages. Messages are numbered as on the link, so they keep their order with others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fshard.mesh.collectives.moves import Wired, is_plain
from fshard.mesh.runtimes.link import CallInfo, Wire
from fshard.mesh.runtimes.operations import Operations
from fshard.mesh.shared_memory.direct import INLINE_MESSAGE, Direct
from fshard.mesh.shared_memory.rings import INSIDE

if TYPE_CHECKING:
    from fshard.mesh.spmd.scope import Group
    from fshard.source import Site


class FastPath:
    """One move on tensors of one shape and dtype, along one link."""

    __slots__ = ("_call", "_link", "_move", "_operations", "_wires")

    def __init__(self, move: Wired, group: Group, x: Tensor, site: Site, link: Direct, operations: Operations) -> None:
        like = x.to("meta")
        self._move, self._link, self._operations = move, link, operations
        self._call = CallInfo(move, (like,), group, site, "values")
        self._wires = link.wires(move, move.pack(like, link.n), self._call)

    def run(self, x: Tensor) -> Tensor:
        """Run it to its end, now."""
        move, link = self._move, self._link
        wire = self._wires(link.next_key(), move.pack(x, link.n).contiguous())
        return move.unpack(_run(wire, link, self._operations, self._call), x.shape, link.n)


class MessageLane:
    """The messages like one tensor between this process and the one at `place` of a link."""

    __slots__ = ("_call", "_keys", "_link", "_make", "_operations", "_peer", "_place", "_short")

    def __init__(
        self, like: Tensor, group: Group, place: int, site: Site, link: Direct, operations: Operations
    ) -> None:
        self._place, self._link, self._operations = place, link, operations
        self._call, self._short = CallInfo(None, (like,), group, site, "values"), like.nbytes <= INLINE_MESSAGE
        self._peer, self._keys = link.peers[place], link.message_keys(place, sent=True)
        self._make = partial(torch.empty_like, like, memory_format=torch.contiguous_format)

    def send(self, x: Tensor) -> bool:
        """Send a tensor if there is space; return False otherwise."""
        if not self._short or not is_plain(x):
            return False
        peer = self._peer
        with self._link.lock:
            if not peer.outgoing.roomy:
                return False
            try:
                peer.sent += 1
                peer.calls.append(self._call)
                return peer.offer(next(self._keys), INSIDE, x.nbytes, self._call.stamp, x.data_ptr())
            except RuntimeError as error:
                self._operations.fail(error, self._link, self._call)

    def take(self) -> Tensor:
        """Wait for the next message."""
        wire = self._link.receive(self._make, self._place, self._call)
        return _run(wire, self._link, self._operations, self._call)


def _run(wire: Wire, link: Direct, operations: Operations, call: CallInfo) -> Tensor:
    """Run a wire to its end, now."""
    if operations.in_progress:
        operations.hand_over()
    lock, wait, advance = link.lock, link.neighbours.wait, operations.advance
    try:
        while True:
            with lock:
                needs = next(wire)
            wait(needs, advance)
    except StopIteration as stopped:
        return stopped.value
    except BaseException as error:
        wire.close()
        operations.fail(error, link, call)
