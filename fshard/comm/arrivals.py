"""Asynchronous training: who pushes a gradient when, having read which version of the parameters.

Version v is the parameters after v pushes. A worker computes on what it received last: version 0, or the one that its
previous push made. The staleness of a push is the number of pushes since that version.

    push       0  1  2  3        w[t + 1] = w[t] - lr grad(w[t - staleness])
    worker     0  1  0  0
    read       0  0  1  3
    staleness  0  1  1  0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from random import Random

from fshard.optim.arguments import validate, within


@dataclass(frozen=True)
class Arrivals:
    """The pushes of asynchronous workers, in order.

    Args:
        events: a pair for each push: the worker, from 0, and the version of the parameters that it has read.
        bound: the largest staleness that is allowed.

    >>> Arrivals([(0, 0), (1, 0), (0, 1), (0, 3)], bound=1).staleness
    (0, 1, 1, 0)
    """

    events: Sequence[tuple[int, int]]
    bound: int

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "events", tuple([(int(worker), int(version)) for worker, version in self.events])
        )
        received = dict[int, int]()
        for push, (worker, version) in enumerate(self.events):
            newest, event = (
                received.get(worker, 0),
                f"Arrivals: events[{push}] = {(worker, version)}",
            )
            if version != newest:
                raise ValueError(
                    f"{event}: the version must be {newest}, which the worker has received last."
                )
            if push - version > self.bound:
                raise ValueError(
                    f"{event}: staleness must be at most the bound, {self.bound}; got {push - version}."
                )
            received[worker] = push + 1

    @property
    def staleness(self) -> tuple[int, ...]:
        """For each push, the number of pushes since the version that its gradient was computed on."""
        return tuple([push - version for push, (_, version) in enumerate(self.events)])


class PushOrder:
    """First come, first served; but a push waits if those of the other workers would then exceed the bound."""

    def __init__(self, workers: Sequence[int], bound: int) -> None:
        if bound < len(workers) - 1:
            raise ValueError(
                f"bound must be at least {len(workers) - 1} for {len(workers)} workers; got {bound}."
            )
        self.bound, self.versions = bound, dict.fromkeys(workers, 0)
        self.events, self.waiting = list[tuple[int, int]](), list[int]()

    def take(self) -> int | None:
        """Log the push of the first waiting worker whose turn may come, and return the worker; None if none may."""
        push = len(self.events)
        for worker in self.waiting:
            versions = sorted(version for peer, version in self.versions.items() if peer != worker)
            if all(
                later - version <= self.bound for later, version in enumerate(versions, push + 1)
            ):
                self.waiting.remove(worker)
                self.events.append((worker, self.versions[worker]))
                self.versions[worker] = push + 1
                return worker
        return None


def arrivals(
    speeds: Sequence[float], *, bound: int, count: int, seed: int = 0, jitter: float = 0.2
) -> Arrivals:
    """Simulate asynchronous workers, and return their pushes.

    Args:
        speeds: of each worker, in gradients per second.
        bound: the largest staleness; a worker waits where its push would make another's exceed it.
        count: number of pushes of all workers together.
        seed: of the draws.
        jitter: a gradient takes 1 / speed seconds, times a number drawn between 1 - jitter and 1 + jitter.

    >>> arrivals([1.0, 2.5], bound=2, count=5, jitter=0.0).events
    ((1, 0), (1, 1), (0, 0), (1, 2), (1, 4))
    """
    integers = within("[0, inf)", integer=True, bound=bound) + within(
        "[1, inf)", integer=True, count=count
    )
    validate(
        "arrivals",
        *[within("(0, inf)", speeds=speed) for speed in speeds],
        integers,
        within("[0, 1]", jitter=jitter),
    )
    random, order = Random(seed), PushOrder(range(len(speeds)), bound)

    def end(worker: int, start: float) -> tuple[float, int]:
        return start + (1 + jitter * random.uniform(-1, 1)) / speeds[worker], worker

    computing = [end(worker, 0.0) for worker in range(len(speeds))]
    heapify(computing)
    while len(order.events) < count:
        time, worker = heappop(computing)
        order.waiting.append(worker)
        while (pushed := order.take()) is not None:
            heappush(computing, end(pushed, time))
    return Arrivals(order.events[:count], bound)
