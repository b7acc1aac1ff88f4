"""The time of recorded events on a machine: the only model of `fshard.plan`.

    computation    operations one after another
    network        collectives of each level one after another, beside the computation from their start to their wait
    copies         of each pair of memories one after another
    messages       of stages: their receiver waits until they have arrived

More operations, bandwidth or memory per second never make a step slower: each event begins at the latest end of earlier
ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2, prod
from typing import NamedTuple

from fshard.mesh.layout import Mesh
from fshard.plan.cluster import Cluster
from fshard.plan.trace import (
    CollectiveStart,
    CollectiveWait,
    Copy,
    Event,
    MessageSend,
    MessageWait,
    Operation,
)


class TimedEvent(NamedTuple):
    """The time in which a device does an event, on a lane: "compute", "network: data", "host to device"."""

    lane: str
    event: Event
    start: float
    end: float


@dataclass
class Times:
    """Seconds of a device in a step.

    Args:
        step: from its begin to its end.
        compute: of operations.
        exposed: in which operations wait for the network, by axes.
        network: of collectives, by axes, exposed or not.
        copies: in which the step waits for copies at its end.
        idle: in which a stage waits for messages of others.
        begins: the times at which units are used first: those of `fshard.memory.mark`.
        timed: the times of all events but waits.
    """

    step: float = 0.0
    compute: float = 0.0
    exposed: dict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))
    network: dict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))
    copies: float = 0.0
    idle: float = 0.0
    begins: dict[str, float] = field(default_factory=dict[str, float], repr=False)
    timed: list[TimedEvent] = field(default_factory=list[TimedEvent], repr=False)


def times_of(
    programs: Mapping[int, Sequence[Event]], cluster: Cluster, mesh: Mesh
) -> dict[int, Times]:
    """Return the times of the events of a step on some devices, those that exchange messages."""
    mail = defaultdict[tuple[int, int], deque[float]](deque)
    clocks = {
        device: DeviceClock(device, events, cluster, mesh, mail)
        for device, events in programs.items()
    }
    waiting = [*clocks.values()]
    while waiting:
        still = [clock for clock in waiting if not clock.advance()]
        if len(still) == len(waiting) and not any(clock.has_moved for clock in still):
            raise AssertionError("stages wait for each other")
        waiting = still
    return {device: clock.finish() for device, clock in clocks.items()}


class DeviceClock:
    """The time of one device: advances until a message is needed that has not been sent yet.

    `mail` has the times at which messages arrive, by sender and receiver.
    """

    def __init__(
        self,
        device: int,
        events: Sequence[Event],
        cluster: Cluster,
        mesh: Mesh,
        mail: Mapping[tuple[int, int], deque[float]],
    ) -> None:
        self._device, self._events, self._cluster, self._mesh, self._mail = (
            device,
            events,
            cluster,
            mesh,
            mail,
        )
        self._now, self._index, self.has_moved = 0.0, 0, False
        self._free = defaultdict[object, float](
            float
        )  # when a level of the network, or two memories, are free
        self._ends = dict[int, float]()  # of collectives that were started, by index
        self._times = Times()

    def advance(self) -> bool:
        """Do events up to a message that is not there; return True at the end."""
        before = self._index
        while self._index < len(self._events) and self._do(self._index, self._events[self._index]):
            self._index += 1
        self.has_moved = self._index > before
        return self._index == len(self._events)

    def finish(self) -> Times:
        """Return the times of the step, which ends when its copies have arrived."""
        self._times.step = max([self._now, *self._free.values()])
        self._times.copies = self._times.step - self._now
        return self._times

    def _do(self, index: int, event: Event) -> bool:
        """Do one event; return False if its message has not been sent."""
        cluster, times, now = self._cluster, self._times, self._now
        match event:
            case Operation():
                seconds = cluster.seconds_of_operation(
                    event.name, event.dtype, event.flops, event.traffic
                )
                self._now, times.compute = now + seconds, times.compute + seconds
                times.begins.setdefault(event.unit, now)
                times.timed.append(TimedEvent("compute", event, now, self._now))
            case CollectiveStart():
                axes, (level, seconds) = (
                    event.row.axes,
                    seconds_of_collective(event, cluster, self._mesh),
                )
                self._ends[index] = self._occupy(
                    f"network: {'+'.join(axes)}", level, seconds, event
                )
                times.network[axes] += seconds
                if not event.is_started or not cluster.efficiency.overlap:
                    self._wait(axes, self._ends[index])
            case CollectiveWait():
                collective = self._events[event.start]
                assert isinstance(collective, CollectiveStart)
                self._wait(collective.row.axes, self._ends[event.start])
            case Copy():
                rate = cluster.disk if "disk" in event[:2] else cluster.host
                self._occupy(
                    f"{event.source} to {event.target}", event[:2], event.size / rate, event
                )
            case MessageSend():
                level, bandwidth, latency = cluster.level_between(self._device, event.to)
                arrival = self._occupy("messages", level, latency + event.sent / bandwidth, event)
                self._mail[self._device, event.to].append(arrival)
                if not cluster.efficiency.overlap:
                    self._now = arrival
            case MessageWait():
                if not (arrivals := self._mail[event.source, self._device]):
                    return False
                arrival = arrivals.popleft()
                times.idle += max(arrival - now, 0.0)
                self._now = max(now, arrival)
        return True

    def _occupy(self, lane: str, resource: object, seconds: float, event: Event) -> float:
        """Use a resource as soon as it is free; return the time at which it is free again."""
        start = max(self._now, self._free[resource])
        self._free[resource] = start + seconds
        self._times.timed.append(TimedEvent(lane, event, start, start + seconds))
        return start + seconds

    def _wait(self, axes: tuple[str, ...], end: float) -> None:
        self._times.exposed[axes] += max(end - self._now, 0.0)
        self._now = max(self._now, end)


def seconds_of_collective(
    event: CollectiveStart, cluster: Cluster, mesh: Mesh
) -> tuple[int, float]:
    """Return the level of the network that a collective uses, and its time."""
    axes = event.row.axes
    level, bandwidth, latency = cluster.level(mesh, axes)
    rounds = max(1, ceil(log2(prod(mesh.shape[axis] for axis in axes))))
    return level, rounds * latency + event.sent / bandwidth
