"""Fast paths between processes of one machine, for one tensor shape and dtype, with everything precomputed.

Preparing a small collective (group, source line, buffer, handle) takes longer than running it, and most are called
repeatedly on tensors of one shape. A `FastPath` runs one collective, a `MessageLane` sends and receives messages. The
source line is looked up only for an error: the call is still on the stack. Messages are numbered as on the link, so
they keep their order with others.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fshard.errors import FshardError
from fshard.mesh.collectives.moves import Wired, is_plain
from fshard.mesh.runtimes.link import What
from fshard.mesh.runtimes.running import UnderWay, explain, fail, go_on, hand_over
from fshard.mesh.shared_memory.direct import INLINE_MESSAGE, Direct, TransferTurn
from fshard.mesh.shared_memory.rings import INSIDE
from fshard.source import call_site

if TYPE_CHECKING:
    from fshard.mesh.spmd.scope import Group
if TYPE_CHECKING:
    from fshard.mesh.spmd.scope import Group
    from fshard.source import Site


class FastPath:
    """One move on tensors of one shape and dtype, along one link."""

    __slots__ = ("_group", "_like", "_link", "_move", "_timeout", "_under_way", "_wire", "stamp")

    def __init__(
        self, move: Wired, group: Group, x: Tensor, link: Direct, timeout: timedelta, under_way: UnderWay
    ) -> None:
        self._move, self._group, self._like, self._link = move, group, x.to("meta"), link
        self._timeout, self._under_way, self.stamp = timeout, under_way, self._what().stamp
        self._wire = link.carrier(move, move.pack(self._like, link.n), self)

    def __str__(self) -> str:
        return str(self._what())

    def _what(self) -> What:
        return What(self._move, (self._like,), self._group, call_site())

    def take(self, x: Tensor) -> Tensor:
        """Run it to its end, now."""
        move, link = self._move, self._link
        neighbours, n = link.neighbours, link.n
        if self._under_way:
            hand_over(self._under_way)
        buffer = move.pack(x, n).contiguous()
        wire = self._wire(link.number(), buffer)
        try:
            while True:
                with neighbours.lock:
                    needs = next(wire)
                neighbours.wait(needs, self._others_go_on)
        except StopIteration as stopped:
            return move.unpack(stopped.value, x.shape, n)
        except BaseException as error:
            link.broken(error)
            wire.close()
            if isinstance(error, RuntimeError) and not isinstance(error, FshardError):
                explain(error, self._timeout, self._what())
            raise

    def _others_go_on(self) -> bool:
        return bool(self._under_way) and go_on(self._under_way)


class MessageLane:
    """The messages like one tensor between this process and the one at `place` of a link."""

    __slots__ = ("_got", "_like", "_link", "_peer", "_place", "_sent", "_short", "_timeout", "_under_way", "_what")

    def __init__(
        self, like: Tensor, group: Group, place: int, site: Site, link: Direct, timeout: timedelta, under_way: UnderWay
    ) -> None:
        self._like, self._place, self._link, self._what = like, place, link, What(None, (like,), group, site)
        self._timeout, self._under_way, self._short = timeout, under_way, like.nbytes <= INLINE_MESSAGE
        self._peer = link.peers[place]
        self._sent, self._got = (link.messages(place, sent=sent) for sent in (True, False))

    def send(self, x: Tensor) -> bool:
        """Send a tensor if there is space; return False otherwise."""
        if not self._short or not is_plain(x):
            return False
        peer = self._peer
        with self._link.lock:
            if not peer.outgoing.roomy:
                return False
            try:
                return peer.offer(next(self._sent), INSIDE, x.nbytes, self._what.stamp, x.data_ptr())
            except RuntimeError as error:
                explain(error, self._timeout, self._what)

    def take(self) -> Tensor:
        """Wait for the next message."""
        link = self._link
        if self._under_way:
            hand_over(self._under_way)
        key, peer = next(self._got), self._peer
        try:
            x = torch.empty_like(self._like, memory_format=torch.contiguous_format)
            with link.lock:
                here = peer.look(key)
            if not here:
                link.neighbours.wait(((peer, key),), self._others_go_on)
            with link.lock:
                TransferTurn(link, key, self._what).get(self._place, x.data_ptr(), x.nbytes)
        except BaseException as error:
            fail(error, link, self._timeout, self._what)
        return x

    def _others_go_on(self) -> bool:
        return bool(self._under_way) and go_on(self._under_way)
