"""Interleaved timing: all calls in one run, round after round, in a new random order in each."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from itertools import cycle
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
Times = dict[str, list[float]]


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    warm_up: int = 2,
    between: Callable[[], Any] = lambda: None,
    ready: Callable[[], Any] = lambda: None,
) -> Times:
    """Return the seconds that each call took in each round but the first few.

    `between` runs before each round (`gc.collect`, where rounds leave much behind), `ready` before each call.  What is there
    at the beginning is frozen, so that the collector does not fill the caches with it.

    >>> times = interleaved({"a": lambda: 1, "b": lambda: 2}, rounds=3)
    >>> {name: len(row) for name, row in times.items()}
    {'a': 3, 'b': 3}
    """
    times: Times = {name: [] for name in calls}
    gc.freeze()
    for turn in range(warm_up + rounds):
        between()
        for name in random.Random(turn).sample(
            list(calls), len(calls)
        ):  # the same order in every process
            ready()
            began = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - began)
    return {name: row[warm_up:] for name, row in times.items()}


def slowest(times: Times, device: torch.device | str = "cpu") -> Times:
    """Return for each round the time of the process that took longest."""
    rows = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
    dist.all_reduce(rows, dist.ReduceOp.MAX)
    return dict(zip(times, rows.tolist(), strict=True))


def paired(times: list[float], others: list[float]) -> float:
    """Return the median over the rounds of how many times as long one call took as another in the same round.

    >>> paired([1.0, 4.0, 2.0], [1.0, 2.0, 1.0])
    2.0
    """
    return median(one / other for one, other in zip(times, others, strict=True))


def likely(times: list[float], others: list[float]) -> tuple[float, float]:
    """Return the bounds of that median in 95 of 100 runs, if rounds are independent.

    >>> likely([float(x) for x in range(1, 101)], [1.0] * 100)
    (41.0, 60.0)
    """
    ratios = sorted(one / other for one, other in zip(times, others, strict=True))
    away = round(0.98 * len(ratios) ** 0.5)
    return ratios[max(0, len(ratios) // 2 - away)], ratios[
        min(len(ratios) - 1, (len(ratios) - 1) // 2 + away)
    ]


def over(count: int, call: Callable[[int], Result]) -> Callable[[], Result]:
    """Return a call that returns 0, 1, ..., count - 1, and starts over.

    >>> step = over(2, lambda index: f"batch {index}")
    >>> step(), step(), step()
    ('batch 0', 'batch 1', 'batch 0')
    """
    indices = cycle(range(count))
    return lambda: call(next(indices))
