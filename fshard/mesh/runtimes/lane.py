"""A lane: messages of one tensor, of one shape and dtype, to and from one neighbour, with all that can be known before kept.

It is to messages what a road is to collectives.  The numbers of messages are those of its link, so what goes by a lane and what
does not keep their order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fshard.mesh.moves import is_plain
from fshard.mesh.runtimes.direct import INLINE_MESSAGE, Direct, Turn
from fshard.mesh.runtimes.link import What
from fshard.mesh.runtimes.rings import INSIDE
from fshard.mesh.runtimes.running import UnderWay, explain, fail, go_on, hand_over

if TYPE_CHECKING:
    from fshard.mesh.scope import Group
    from fshard.source import Site


class Lane:
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
        """Send a tensor, if it can go at once; return whether it could."""
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
                Turn(link, key, self._what).get(self._place, x.data_ptr(), x.nbytes)
        except BaseException as error:
            fail(error, link, self._timeout, self._what)
        return x

    def _others_go_on(self) -> bool:
        return bool(self._under_way) and go_on(self._under_way)
