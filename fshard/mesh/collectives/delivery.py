"""Count the results of collectives for their receivers, in `fshard.memory.limit`.

The buffers of transports are not counted. From its start until its end a collective counts as large as its results, and
its arguments are kept: so a program has one peak on all runtimes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fshard.ambient import ambient, setting

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Wired
    from fshard.mesh.spmd.scope import Pending


def delivered(move: Wired, x: Tensor, n: int) -> Tensor:
    """Return an empty tensor of the shape that a move over n devices makes of `x`."""
    packed = move.pack(x, n)
    match move.wire:
        case "gather":
            rows = packed.new_empty((n, packed.shape[-1]))
        case "scatter":
            rows = packed.new_empty(packed.shape[-1])
        case "reduce" | "exchange" | "permute" | "broadcast" | "parts":
            rows = torch.empty_like(packed)
    return move.unpack(rows, x.shape, n)


class Delivery:
    """A collective or message in progress whose results are counted."""

    def __init__(self, xs: tuple[Tensor, ...], results: Sequence[Tensor], start: Callable[[], Pending]) -> None:
        self._xs, self._counters = xs, ambient.counters
        for counter in self._counters:
            counter.reserve(self, xs, sum([y.nbytes for y in results]))
        with setting(counters=()):
            self._pending: Pending | None = start()

    def wait(self) -> tuple[Tensor, ...]:
        """Return the results, which are counted in place of what was reserved."""
        pending, self._pending = self._pending, None
        assert pending is not None
        with setting(counters=()):
            results = pending.wait()
        del pending
        for counter in self._counters:
            counter.deliver(self, results)
        self._xs = ()
        return results


def counted_start(start: Callable[..., Pending]) -> Callable[..., Pending]:
    """Count the results of a world's `start`, while there is a limit."""

    @wraps(start)
    def run(self: Any, move: Wired, xs: tuple[Tensor, ...], group: Any, *rest: Any) -> Pending:
        if not ambient.counters or not xs:
            return start(self, move, xs, group, *rest)
        with setting(counters=()):
            results = [delivered(move, x.detach().to("meta"), group.size) for x in xs]
        return Delivery(xs, results, lambda: start(self, move, xs, group, *rest))

    return run


def counted_receive(receive: Callable[..., Pending]) -> Callable[..., Pending]:
    """Count the results of a world's `receive`, while there is a limit."""

    @wraps(receive)
    def run(self: Any, likes: tuple[Tensor, ...], *rest: Any) -> Pending:
        if not ambient.counters or not likes:
            return receive(self, likes, *rest)
        return Delivery(likes, likes, lambda: receive(self, likes, *rest))

    return run


def uncounted_send(send: Callable[..., None]) -> Callable[..., None]:
    """Leave out the buffers of messages."""

    @wraps(send)
    def run(*args: Any) -> None:
        if not ambient.counters:
            return send(*args)
        with setting(counters=()):
            return send(*args)

    return run
