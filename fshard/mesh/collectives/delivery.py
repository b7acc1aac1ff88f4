"""Count results of collectives for their receivers, in `fshard.memory.limit`; record for audits.

The buffers of transports are not counted. From its start until its end a collective counts as large
as its results, and its arguments are kept: so a program has one peak on all runtimes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fshard.mesh.layout.counting import RecordedMessage, ValueRecorder, counting, without_counters
from fshard.mesh.spmd.moments import listeners, reach_as

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Purpose, Wired
    from fshard.mesh.spmd.scope import Group, Pending, World
    from fshard.source import Site


def delivered(move: Wired, x: Tensor, n: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor without memory, as a move over n devices makes of `x`, cast to a dtype."""
    x = x.detach().to("meta", dtype)
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

    def __init__(
        self, xs: tuple[Tensor, ...], results: Sequence[Tensor], start: Callable[[], Pending]
    ) -> None:
        self._xs = xs
        self._counters = counting().counters
        size = sum([y.nbytes for y in results])
        for counter in self._counters:
            counter.reserve(self, xs, size)
        with without_counters():
            self._pending: Pending | None = start()

    def wait(self, into: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Return the results, which are counted in place of what was reserved."""
        pending = self._pending
        self._pending = None
        assert pending is not None
        with without_counters():
            results = pending.wait(into)

        for counter in self._counters:
            counter.deliver(self, results)
        self._xs = ()
        return results


def world_of(group: Group) -> World:
    """Return the world that runs a group's collectives.

    Within a limit it counts results; in an audit it records what is sent and received.
    """
    world = group.world.current()
    if listeners and group.size > 1:
        reach_as(group.number, "collective", world.runtime)
    counts = counting()
    if counts.counters:
        world = cast("World", _CountedWorld(world))
    if counts.recorder is not None:
        world = cast("World", _RecordedWorld(world, counts.recorder))
    return world


@dataclass(frozen=True)
class _CountedWorld:
    """A world that counts results. The buffers of messages that are sent are left out."""

    world: World

    def start(
        self,
        move: Wired,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        purpose: Purpose = "values",
        dtype: torch.dtype | None = None,
    ) -> Pending:
        start = partial(self.world.start, move, xs, group, site, purpose, dtype)
        if not xs:
            return start()
        with without_counters():  # the shapes of results, without memory
            results = [delivered(move, x, group.size, dtype) for x in xs]
        return Delivery(xs, results, start)

    def receive(self, likes: tuple[Tensor, ...], *rest: Any) -> Pending:
        receive = partial(self.world.receive, likes, *rest)
        return Delivery(likes, likes, receive) if likes else receive()

    def send(self, *args: Any) -> None:
        with without_counters():
            self.world.send(*args)


@dataclass(frozen=True)
class _RecordedWorld:
    """A world whose tensors are recorded, as they are sent and as they arrive."""

    world: World
    recorder: ValueRecorder

    def start(
        self,
        move: Wired,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        purpose: Purpose = "values",
        dtype: torch.dtype | None = None,
    ) -> Pending:
        subject = f"{move.name} over {'+'.join(group.axes)}"
        message = self.recorder.begin(group.number, subject, group.base, receives=True)
        if has_values(move, group):
            self.recorder.sent(message, xs)
        pending = self.world.start(move, xs, group, site, purpose, dtype)
        return cast("Pending", _RecordedDelivery(pending, self.recorder, message))

    def receive(self, likes: tuple[Tensor, ...], group: Group, source: int, *rest: Any) -> Pending:
        subject = f"message of device {group.number_of(source)} to device {group.number}"
        message = self.recorder.begin(group.number, subject, group.base, receives=True)
        pending = self.world.receive(likes, group, source, *rest)
        return cast("Pending", _RecordedDelivery(pending, self.recorder, message))

    def send(self, xs: tuple[Tensor, ...], group: Group, to: int, *rest: Any) -> None:
        subject = f"message of device {group.number} to device {group.number_of(to)}"
        message = self.recorder.begin(group.number, subject, group.base, receives=False)
        self.recorder.sent(message, xs)
        self.world.send(xs, group, to, *rest)


def has_values(move: Wired, group: Group) -> bool:
    """Return True if the calling device gives values to a collective.

    To a broadcast all but one device give memory for the result.
    """
    from fshard.mesh.collectives.moves import Broadcast  # which imports this module

    return not isinstance(move, Broadcast) or group.index == move.source


@dataclass(frozen=True)
class _RecordedDelivery:
    """A collective or message in progress, whose results are recorded."""

    pending: Pending
    recorder: ValueRecorder
    message: RecordedMessage

    def wait(self, into: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        results = self.pending.wait(into)
        self.recorder.received(self.message, results)
        return results
