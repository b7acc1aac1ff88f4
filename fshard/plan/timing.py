"""The time of recorded events on a machine: the only model of `fshard.plan`.

    computation    operations one after another
    network        collectives of each level one after another, beside the computation
                   from their start to their wait
    copies         of each pair of memories one after another
    messages       of stages: their receiver waits until they have arrived

More operations, bandwidth or memory per second never make a step slower: each event begins at the
latest end of earlier ones.
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
    """The time of an event on a lane: "compute", "network: data", "host to device", "messages"."""

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
        copies: in which the step waits at its end for copies, messages and collectives that have
            no later wait.
        idle: in which a stage waits for messages of others.
        exposed_by_unit: the same as `exposed`, of each unit of operations before the wait.
        begins: the times at which units are used first: those of `fshard.memory.mark`.
        timed: the times of all events but waits.
    """

    step: float = 0.0
    compute: float = 0.0
    exposed: dict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))
    network: dict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))
    copies: float = 0.0
    idle: float = 0.0
    exposed_by_unit: dict[str, dict[tuple[str, ...], float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float)), repr=False
    )
    begins: dict[str, float] = field(default_factory=dict[str, float], repr=False)
    timed: list[TimedEvent] = field(default_factory=list[TimedEvent], repr=False)


def times_of(
    programs: Mapping[int, Sequence[Event]], cluster: Cluster, mesh: Mesh
) -> dict[int, Times]:
    """Return the times of the events of a step on some devices, those that exchange messages."""
    mail = defaultdict[tuple[int, int], deque[float]](deque)
    clocks = dict[int, DeviceClock]()
    for device, events in programs.items():
        clocks[device] = DeviceClock(device, events, cluster, mesh, mail)

    waiting = [*clocks.values()]
    while waiting:
        unfinished = [clock for clock in waiting if not clock.advance()]
        has_progress = len(unfinished) < len(waiting) or any(
            clock.has_moved for clock in unfinished
        )
        if not has_progress:
            raise AssertionError("stages wait for each other")
        waiting = unfinished
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
        self._device = device
        self._events = events
        self._cluster = cluster
        self._mesh = mesh
        self._mail = mail
        self._slowest = cluster.slowest(mesh.size)
        self._now = 0.0
        self._index = 0
        self._unit = ""  # of the last operation
        self.has_moved = False
        # When a level of the network, or the way between two memories, is free again.
        self._free = defaultdict[object, float](float)
        # The ends of collectives that were started, by the index of their event.
        self._ends = dict[int, float]()
        self._times = Times()

    def advance(self) -> bool:
        """Do events up to a message that is not there; return True at the end."""
        before = self._index
        while self._index < len(self._events) and self._do(self._index, self._events[self._index]):
            self._index += 1
        self.has_moved = self._index > before
        return self._index == len(self._events)

    def finish(self) -> Times:
        """Return the times of the step, which ends when all that it has started has arrived."""
        self._times.step = max([self._now, *self._free.values()])
        self._times.copies = self._times.step - self._now
        return self._times

    def _do(self, index: int, event: Event) -> bool:
        """Do one event; return False if its message has not been sent."""
        match event:
            case Operation():
                self._compute(event)
            case CollectiveStart():
                self._start(index, event)
            case CollectiveWait():
                collective = self._events[event.start]
                assert isinstance(collective, CollectiveStart)
                self._wait(collective.row.axes, self._ends[event.start])
            case Copy():
                self._copy(event)
            case MessageSend():
                self._send(event)
            case MessageWait():
                return self._receive(event)
        return True

    def _compute(self, event: Operation) -> None:
        begin = self._now
        self._unit = event.unit
        seconds = self._cluster.seconds_of_operation(
            event.name, event.dtype, event.flops, event.traffic
        )
        self._now += seconds * self._slowest
        self._times.compute += self._now - begin
        self._times.begins.setdefault(event.unit, begin)
        self._times.timed.append(TimedEvent("compute", event, begin, self._now))

    def _start(self, index: int, event: CollectiveStart) -> None:
        axes = event.row.axes
        level, seconds = seconds_of_collective(event, self._cluster, self._mesh)
        end = self._occupy(f"network: {'+'.join(axes)}", level, seconds, event)
        self._ends[index] = end
        self._times.network[axes] += seconds
        runs_beside = event.is_started and self._cluster.efficiency.overlap
        if runs_beside:
            # What the computation loses to the collective beside it is time for the network too.
            self._wait(axes, self._now + seconds * self._cluster.efficiency.contention)
        else:
            self._wait(axes, end)

    def _copy(self, event: Copy) -> None:
        memories = (event.source, event.target)
        rate = self._cluster.disk if "disk" in memories else self._cluster.host
        lane = f"{event.source} to {event.target}"
        self._occupy(lane, memories, event.size / rate, event)

    def _send(self, event: MessageSend) -> None:
        level = self._cluster.level_between(self._device, event.to, self._mesh.size)
        seconds = level.latency + event.sent / level.bandwidth
        arrival = self._occupy("messages", level.number, seconds, event)
        self._mail[self._device, event.to].append(arrival)
        if not self._cluster.efficiency.overlap:
            self._now = arrival

    def _receive(self, event: MessageWait) -> bool:
        """Wait for the next message; return False if it has not been sent."""
        arrivals = self._mail[event.source, self._device]
        if not arrivals:
            return False
        arrival = arrivals.popleft()
        self._times.idle += max(arrival - self._now, 0.0)
        self._now = max(self._now, arrival)
        return True

    def _occupy(self, lane: str, resource: object, seconds: float, event: Event) -> float:
        """Use a resource as soon as it is free; return the time at which it is free again."""
        start = max(self._now, self._free[resource])
        end = start + seconds
        self._free[resource] = end
        self._times.timed.append(TimedEvent(lane, event, start, end))
        return end

    def _wait(self, axes: tuple[str, ...], end: float) -> None:
        exposed = max(end - self._now, 0.0)
        self._times.exposed[axes] += exposed
        self._times.exposed_by_unit[self._unit][axes] += exposed
        self._now = max(self._now, end)


def seconds_of_collective(
    event: CollectiveStart, cluster: Cluster, mesh: Mesh
) -> tuple[int, float]:
    """Return the level of the network that a collective uses, and its time."""
    axes = event.row.axes
    level = cluster.level(mesh, axes)
    members = prod(mesh.shape[axis] for axis in axes)
    # A tree needs log2 rounds of messages; one device alone still calls the collective.
    rounds = max(1, ceil(log2(members)))
    return level.number, rounds * level.latency + event.sent / level.bandwidth
