"""A road: a collective between neighbours on one tensor, with all that can be known before kept.

Most collectives are called again and again on tensors of one shape, and a small one takes less time than preparing it:
finding the group, the user's line, a buffer, a handle.  A road has all that, and goes straight.  The user's line is
looked up only if there is an error: the call is still on the stack.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch import Tensor

from fshard.errors import FshardError
from fshard.mesh.moves import Wired
from fshard.mesh.runtimes.direct import Direct
from fshard.mesh.runtimes.link import What
from fshard.mesh.runtimes.running import UnderWay, explain, go_on, hand_over
from fshard.source import call_site

if TYPE_CHECKING:
    from fshard.mesh.scope import Group


class Road:
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
