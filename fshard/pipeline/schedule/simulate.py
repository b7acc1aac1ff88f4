"""`simulate`: when each action of a schedule runs, given the duration of each.

An action starts when the actions before it in its row have started, its inputs are available, and its *lanes* are
free: the device's computation, and with `overlap` one more for its weights' communication, and one to each other
device.

    latency 1, overlap                         no overlap
    device 0   0F0 0F1 0F2                     0F0 0SEND_F0 0F1 0SEND_F1 0F2
    device 1       (1) 1F0 1F1 1F2                 1RECV_F0 1F0 1RECV_F1 1F1
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from numbers import Rational
from typing import TYPE_CHECKING

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.messages import with_messages
from fshard.pipeline.schedule.program import RECEIVES, SENDS, Program, crosses, peaks
from fshard.pipeline.schedule.schedule import COMPUTE, MESSAGES, Kind, Schedule
from fshard.pipeline.schedule.trace import Event, Number, to_chrome_trace
from fshard.pipeline.schedule.verify import verified

if TYPE_CHECKING:
    from rich.console import Group

Cost = Number | Sequence[Number] | Mapping[int, Number] | Callable[[int], Number]
"""One cost for all stages, or one per stage."""
_HANDED_ON = {Kind.F: (Kind.SEND_F, 1), Kind.I: (Kind.SEND_B, -1), Kind.B: (Kind.SEND_B, -1)}


@dataclass(frozen=True, repr=False)
class Simulation:
    """The times of all actions. Made by `simulate`.

    Args:
        schedule: the schedule.
        events: of each device, in the order of its row.
        critical_path: actions of which each starts when the one before it ends or its message arrives, up to the last end.
        peak_activations: the peak of each device, from the start of an F to the end of its B or W.
        messages_by_pair: number of values sent from one device to another.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    critical_path: tuple[Event, ...]
    peak_activations: tuple[Number, ...]
    messages_by_pair: Mapping[tuple[int, int], int]

    @property
    def makespan(self) -> Number:
        """The time at which all is done."""
        return _exact(max((event.end for row in self.events for event in row), default=0))

    @property
    def busy(self) -> tuple[Number, ...]:
        """Time that each device computes."""
        return tuple(_exact(sum(event.end - event.start for event in row)) for row in self._computed)

    @property
    def idle_by_device(self) -> tuple[Number, ...]:
        """Idle time of each device, from 0 to the end of all."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle(self) -> Number:
        """Total idle time of all devices."""
        return _exact(sum(self.idle_by_device))

    @property
    def idle_span(self) -> tuple[Number, ...]:
        """Idle time of each device between its first and its last computation."""
        return tuple(
            (row[-1].end - row[0].start if row else 0) - busy
            for row, busy in zip(self._computed, self.busy, strict=True)
        )

    @property
    def bubble(self) -> Number:
        """The idle part of the time of all devices."""
        return self.idle / (self.makespan * self.schedule.devices) if self.makespan else _exact(0)

    @property
    def messages(self) -> int:
        """Number of values sent between devices."""
        return sum(self.messages_by_pair.values())

    @property
    def _computed(self) -> list[list[Event]]:
        return [[event for event in row if event.action.kind in COMPUTE] for row in self.events]

    def to_chrome_trace(self, *, unit: float = 1) -> str:
        """Write the events as a Perfetto trace; `unit` is a unit of time in microseconds."""
        return to_chrome_trace(chain(*self.events), unit=unit)

    def __str__(self) -> str:
        from fshard.pipeline.schedule.draw import text_of

        return text_of(self).plain

    def __rich__(self) -> Group:
        from rich.console import Group

        from fshard.pipeline.schedule.draw import text_of

        return Group(text_of(self))  # a bare Text would be wrapped

    def _repr_html_(self) -> str:
        from fshard.pipeline.schedule.draw import html_of

        return html_of(self)

    def __repr__(self) -> str:
        peaks = ", ".join(map(str, self.peak_activations))
        return (
            f"{self.schedule.name}: makespan {self.makespan}, bubble {self.bubble}, idle {self.idle}, "
            f"activations {peaks}, messages {self.messages}"
        )


def simulate(
    schedule: Schedule,
    *,
    forward: Cost = 1,
    backward_input: Cost = 1,
    backward_weight: Cost = 1,
    send: Cost = 0,
    size: Cost = 0,
    bandwidth: Number | None = None,
    gather: Cost = 0,
    reduce: Cost = 0,
    activation: Cost = 1,
    overlap: bool = True,
) -> Simulation:
    """Return when each action runs. A cost is a number, or a sequence, mapping or function with one per stage.

    Args:
        schedule: a valid one; others raise as in `verify`.
        forward: duration of F.
        backward_input: duration of I.
        backward_weight: duration of W; B takes as long as both.
        send: latency of a message from a stage.
        size: of a message from a stage.
        bandwidth: size sent per unit of time; messages from one device to another are sent one after another.
        gather: duration of the all-gather of a stage's weights.
        reduce: duration of the reduction of their gradients.
        activation: size of a stage's activations for one microbatch.
        overlap: True if devices compute while they send, receive, gather and reduce.

    >>> gpipe = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1F1,1B0,1B1", name="gpipe")
    >>> simulate(gpipe)
    gpipe: makespan 9, bubble 1/3, idle 6, activations 2, 2, messages 4
    >>> simulate(gpipe, forward=[1, 2], send=Fraction(1, 2)).makespan
    Fraction(12, 1)
    """
    costs = _by_stage(
        schedule,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        send=send,
        size=size,
        gather=gather,
        reduce=reduce,
        activation=activation,
    )
    if any(costs["size"]) != (bandwidth is not None) or (bandwidth is not None and not bandwidth > 0):
        raise ScheduleError(f"simulate: a message takes size / bandwidth; found size={size}, bandwidth={bandwidth}.")
    program, order = verified(schedule)
    if not (overlap or program.meets):
        program, order = verified(with_messages(schedule))
    passes: list[Number] = [_exact(each) / bandwidth if bandwidth else 0 for each in costs["size"]]
    takes: dict[Kind, list[Number]] = {
        Kind.F: costs["forward"],
        Kind.B: [i + w for i, w in zip(costs["backward_input"], costs["backward_weight"], strict=True)],
        Kind.I: costs["backward_input"],
        Kind.W: costs["backward_weight"],
        Kind.SEND_F: passes,
        Kind.SEND_B: passes,
        Kind.GATHER: costs["gather"],
        Kind.FREE: [0] * schedule.stages,
        Kind.REDUCE: costs["reduce"],
    }
    clock = _Clock(program, takes, costs["send"], overlap)
    for number in order:
        clock.do(number)
    times = (map(_exact, each) for each in (clock.start, clock.end))
    events = [*map(Event, program.device, program.actions, *times)]
    path: list[Event] = []
    number = max(order, key=clock.end.__getitem__, default=None)
    while number is not None:
        path.append(events[number])
        number = clock.because[number]
    return Simulation(
        program.schedule,
        events=tuple(tuple(events[number] for number in program.row(device)) for device in range(schedule.devices)),
        critical_path=tuple(reversed(path)),
        peak_activations=tuple(peaks(program, costs["activation"])),
        messages_by_pair=dict(sorted(clock.messages.items())),
    )


class _Clock:
    """Current time of each lane: a device, (device, device) for its weights, or (device, other) from one to another."""

    def __init__(self, program: Program, takes: dict[Kind, list[Number]], latency: list[Number], overlap: bool) -> None:
        self.program, self.takes, self.latency, self.overlap = program, takes, latency, overlap
        self.start: list[Number] = [0] * len(program.actions)
        self.end: list[Number] = [0] * len(program.actions)
        self.because: list[int | None] = [None] * len(program.actions)  # of the one that it has waited for last
        self.messages: Counter[tuple[int, int]] = Counter()
        self._carried = any(action.kind in MESSAGES for action in program.actions)
        self._free: dict[int | tuple[int, int], tuple[Number, int | None]] = defaultdict(lambda: (0, None))
        self._arrived: dict[int, Number] = {}  # of messages that the schedule does not contain

    def do(self, number: int) -> None:
        """Do an action as soon as it can be done; all that come before it in the order are."""
        program, here = self.program, self.program.device[number]
        kind, stage, _ = program.actions[number]
        if kind in RECEIVES:
            return  # done with its send
        there = program.device[program.meets[number]] if kind in SENDS else here
        lanes = (here,) if kind in COMPUTE else ((here, there),) if self.overlap else (here, there)
        start, because = self._free[here]
        for lane in lanes:
            if self._free[lane][0] > start:
                start, because = self._free[lane]
        for need in program.needs[number]:
            end = self.end[need] if program.device[need] == here else self._arrived[need]
            if end > start:
                start, because = end, need
        end = free = start + self.takes[kind][stage]
        if kind in SENDS:
            end += self.latency[stage]
            other = program.meets[number]
            self.start[other], self.end[other], self.because[other] = start, end, number
            self.messages[here, there] += 1
        self.start[number], self.end[number], self.because[number] = start, end, because
        for lane in lanes:
            self._free[lane] = (free if self.overlap else end, number)
        if kind in _HANDED_ON and not self._carried:
            self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        """Send the result of an action to the stage that needs it, if that is on another device."""
        kind, stage, _ = self.program.actions[number]
        message, step = _HANDED_ON[kind]
        if crosses(self.program.schedule, stage, step):
            way = (self.program.device[number], self.program.schedule.placement[stage + step])
            free = max(self.end[number], self._free[way][0]) + self.takes[message][stage]
            self._free[way] = (free, number)
            self._arrived[number] = free + self.latency[stage]
            self.messages[way] += 1


def _by_stage(schedule: Schedule, **given: Cost) -> dict[str, list[Number]]:
    """Expand each cost to one per stage; raise with all invalid ones."""
    found: dict[str, list[Number]] = {}
    wrong: list[str] = []
    stages = range(schedule.stages)
    for name, cost in given.items():
        if isinstance(cost, Sequence | Mapping):
            table = dict(cost) if isinstance(cost, Mapping) else dict(enumerate(cost))
        else:
            table = {stage: cost(stage) if callable(cost) else cost for stage in stages}
        if {*table} != {*stages}:
            wrong.append(f"{name}={cost} is not for stages 0 to {stages[-1]}")
        elif below := [stage for stage in stages if not table[stage] >= 0]:
            wrong.append(f"{name} is below 0 for stages {below}")
        else:
            found[name] = [table[stage] for stage in stages]
    if wrong:
        raise ScheduleError(f"simulate, {schedule.name}: {'; '.join(wrong)}.")
    return found


def _exact(number: Number) -> Number:
    return Fraction(number) if isinstance(number, Rational) else number
