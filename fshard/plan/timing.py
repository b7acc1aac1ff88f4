"""The time of recorded events on a machine: the only model of `fshard.plan`.

    computation    operations one after another
    network        collectives of each level one after another, beside the computation from their start to their wait
    copies         of each pair of memories one after another

More operations, bandwidth or memory per second never make a step slower: each event begins at the latest end of earlier
ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log2, prod

from fshard.mesh.layout import Mesh
from fshard.plan.cluster import Cluster
from fshard.plan.trace import CollectiveStart, CollectiveWait, Copy, Event, Operation


@dataclass
class Times:
    """Seconds of a step.

    Args:
        step: from its begin to its end.
        compute: of operations.
        exposed: in which operations wait for the network, by axes.
        network: of collectives, by axes, exposed or not.
        copies: in which the step waits for copies at its end.
    """

    step: float = 0.0
    compute: float = 0.0
    exposed: dict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))
    network: dict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))
    copies: float = 0.0


def times_of(events: Sequence[Event], cluster: Cluster, mesh: Mesh) -> Times:
    """Return the time of the events of a step on a machine."""
    times, now = Times(), 0.0
    free = defaultdict[object, float](float)  # when a level of the network, or a pair of memories, is free
    ends = dict[int, float]()  # of collectives that were started, by index

    def wait(axes: tuple[str, ...], end: float) -> None:
        nonlocal now
        times.exposed[axes] += max(end - now, 0.0)
        now = max(now, end)

    for index, event in enumerate(events):
        match event:
            case Operation():
                seconds = cluster.seconds_of_operation(event.name, event.dtype, event.flops, event.traffic)
                now, times.compute = now + seconds, times.compute + seconds
            case CollectiveStart():
                level, seconds = seconds_of_collective(event, cluster, mesh)
                ends[index] = free[level] = max(now, free[level]) + seconds
                times.network[event.row.axes] += seconds
                if not event.is_started or not cluster.efficiency.overlap:
                    wait(event.row.axes, ends[index])
            case CollectiveWait():
                collective = events[event.start]
                assert isinstance(collective, CollectiveStart)
                wait(collective.row.axes, ends[event.start])
            case Copy():
                rate = cluster.disk if "disk" in event[:2] else cluster.host
                free[event[:2]] = max(now, free[event[:2]]) + event.size / rate
    end = max([now, *free.values()])
    times.copies = end - now
    times.step = end
    return times


def seconds_of_collective(event: CollectiveStart, cluster: Cluster, mesh: Mesh) -> tuple[int, float]:
    """Return the level of the network that a collective uses, and its time."""
    axes = event.row.axes
    level, bandwidth, latency = cluster.level(mesh, axes)
    rounds = max(1, ceil(log2(prod(mesh.shape[axis] for axis in axes))))
    return level, rounds * latency + event.sent / bandwidth
