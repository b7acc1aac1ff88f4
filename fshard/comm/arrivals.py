"""Asynchronous training: the order of pushes, and the versions of the parameters that they read.

Version v is the parameters after v pushes. A worker computes on what it received last: version 0,
or the one that its previous push made. The staleness of a push is the number of pushes since that
version.

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
        events: a pair for each push: the worker, from 0, and the version that it has read.
        bound: the largest staleness that is allowed.

    >>> Arrivals([(0, 0), (1, 0), (0, 1), (0, 3)], bound=1).staleness
    (0, 1, 1, 0)
    """

    events: Sequence[tuple[int, int]]
    bound: int

    def __post_init__(self) -> None:
        events = tuple([(int(worker), int(version)) for worker, version in self.events])
        object.__setattr__(self, "events", events)

        received: dict[int, int] = {}  # the newest version of each worker
        for push, (worker, version) in enumerate(events):
            event = f"Arrivals: events[{push}] = {(worker, version)}"
            newest = received.get(worker, 0)
            if version != newest:
                raise ValueError(
                    f"{event}: the version must be {newest}, which the worker has received last."
                )
            staleness = push - version
            if staleness > self.bound:
                raise ValueError(
                    f"{event}: staleness must be at most the bound, {self.bound}; got {staleness}."
                )
            received[worker] = push + 1

    @property
    def staleness(self) -> tuple[int, ...]:
        """For each push, the number of pushes since the version that the worker has read."""
        return tuple([push - version for push, (_, version) in enumerate(self.events)])


class PushOrder:
    """The order of live pushes: first come, first served, within a bound of staleness.

    A push waits if those of the other workers would then exceed the bound.

    Args:
        workers: that push.
        bound: the largest staleness.
    """

    def __init__(self, workers: Sequence[int], bound: int) -> None:
        fewest = len(workers) - 1  # if all others push first
        if bound < fewest:
            raise ValueError(
                f"bound must be at least {fewest} for {len(workers)} workers; got {bound}."
            )
        self.bound = bound
        self.versions = dict.fromkeys(workers, 0)  # that each worker has read
        self.events: list[tuple[int, int]] = []  # the pushes so far, as in `Arrivals`
        self.waiting: list[int] = []  # workers with a gradient, in the order of arrival

    def take(self) -> int | None:
        """Log the push of the first waiting worker that may push; return the worker, if any."""
        for worker in self.waiting:
            if self._can_push(worker):
                self.waiting.remove(worker)
                self.events.append((worker, self.versions[worker]))
                self.versions[worker] = len(self.events)
                return worker
        return None

    def _can_push(self, worker: int) -> bool:
        """Return True if after this push all other workers can push within the bound.

        They can if they do in the best order: those that have read the oldest version first.
        """
        versions = [version for peer, version in self.versions.items() if peer != worker]
        next_push = len(self.events) + 1
        for push, version in enumerate(sorted(versions), next_push):
            if push - version > self.bound:
                return False
        return True


def arrivals(
    speeds: Sequence[float], *, bound: int, count: int, seed: int = 0, jitter: float = 0.2
) -> Arrivals:
    """Simulate asynchronous workers, and return their pushes.

    Args:
        speeds: of each worker, in gradients per second.
        bound: the largest staleness; a worker waits where its push would make another's exceed it.
        count: number of pushes of all workers together.
        seed: of the draws.
        jitter: a gradient takes 1 / speed seconds, times a number drawn from 1 - jitter to
            1 + jitter.

    >>> arrivals([1.0, 2.5], bound=2, count=5, jitter=0.0).events
    ((1, 0), (1, 1), (0, 0), (1, 2), (1, 4))
    """
    errors: list[str] = []
    for speed in speeds:
        errors += within("(0, inf)", speeds=speed)
    errors += within("[0, inf)", integer=True, bound=bound)
    errors += within("[1, inf)", integer=True, count=count)
    errors += within("[0, 1]", jitter=jitter)
    validate("arrivals", errors)
    random = Random(seed)
    order = PushOrder(range(len(speeds)), bound)

    def end_of_gradient(worker: int, start: float) -> tuple[float, int]:
        factor = 1 + jitter * random.uniform(-1, 1)
        return start + factor / speeds[worker], worker

    computing = [end_of_gradient(worker, 0.0) for worker in range(len(speeds))]
    heapify(computing)
    while len(order.events) < count:
        time, worker = heappop(computing)
        order.waiting.append(worker)
        # One push may let others, which wait for it, follow.
        while (pushed := order.take()) is not None:
            heappush(computing, end_of_gradient(pushed, time))
    return Arrivals(order.events[:count], bound)
