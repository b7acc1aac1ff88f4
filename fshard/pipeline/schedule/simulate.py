"""`simulate`: when each action of a schedule runs, given the duration of each.

An action starts when the actions before it in its row have started, its inputs are available, and its device does not
compute. Messages and the communication of weights run beside computation.

    latency 1    device 0   0F0 0F1 0F2
                 device 1       (1) 1F0 1F1 1F2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from numbers import Rational

from fshard.pipeline.schedule.actions import COMPUTE, MESSAGES, SENDS, UNITS, Kind
from fshard.pipeline.schedule.dependencies import Dependencies
from fshard.pipeline.schedule.draw import draw_svg, draw_text
from fshard.pipeline.schedule.rows import ScheduleRows
from fshard.pipeline.schedule.trace import Event, Number, rounded, to_chrome_trace
from fshard.pipeline.schedule.verify import verified_order

Cost = Number | Sequence[Number] | Callable[[int], Number]
"""One cost for all stages, or one per stage."""


@dataclass(frozen=True, repr=False)
class Simulation:
    """The times of all actions. Made by `simulate`.

    Args:
        schedule: the schedule.
        events: of each device, in the order of its row.
        critical_path: actions of which each starts when the one before it ends or its message arrives, up to the last end.
        peak_activations: the peak of each device, from the start of an F to the end of its B or W.
        messages: number of values sent between devices.
    """

    schedule: ScheduleRows
    events: tuple[tuple[Event, ...], ...]
    critical_path: tuple[Event, ...]
    peak_activations: tuple[Number, ...]
    messages: int

    @property
    def makespan(self) -> Number:
        """The time at which all is done."""
        return _exact(max((event.end for row in self.events for event in row), default=0))

    @property
    def busy(self) -> tuple[Number, ...]:
        """Time that each device computes."""
        return tuple(
            _exact(sum(event.end - event.start for event in row)) for row in self._computed
        )

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
    def _computed(self) -> list[list[Event]]:
        return [[event for event in row if event.action.kind in COMPUTE] for row in self.events]

    def to_chrome_trace(self, *, unit: float = 1) -> str:
        """Write the events as a Perfetto trace; `unit` is a unit of time in microseconds."""
        return to_chrome_trace(chain(*self.events), unit=unit)

    def to_svg(self) -> str:
        """Draw the timeline as SVG."""
        return draw_svg(self.schedule, self.events, self._summary)

    @property
    def _summary(self) -> str:
        peak = rounded(max(self.peak_activations, default=0))
        return f"time {rounded(self.makespan)}, bubble {rounded(self.bubble)}, at most {peak} activations on a device"

    def __str__(self) -> str:
        return draw_text(self.schedule, self.events, self._summary)

    def _repr_html_(self) -> str:
        return self.to_svg()

    def __repr__(self) -> str:
        peaks = ", ".join(map(str, self.peak_activations))
        return (
            f"{self.schedule.name}: makespan {self.makespan}, bubble {self.bubble}, idle {self.idle}, "
            f"activations {peaks}, messages {self.messages}"
        )


def simulate(
    schedule: ScheduleRows,
    *,
    forward: Cost = 1,
    backward_input: Cost = 1,
    backward_weight: Cost = 1,
    send: Cost = 0,
    gather: Cost = 0,
    reduce: Cost = 0,
    activation: Cost = 1,
) -> Simulation:
    """Return when each action runs. A cost is a number, or a sequence or function with one per stage.

    Args:
        schedule: a valid one; others raise as in `verify`.
        forward: duration of F.
        backward_input: duration of I.
        backward_weight: duration of W; B takes as long as both.
        send: latency of a message from a stage.
        gather: duration of the all-gather of a stage's weights.
        reduce: duration of the reduction of their gradients.
        activation: size of a stage's activations for one microbatch.

    >>> gpipe = ScheduleRows.from_csv("0F0,0F1,0B0,0B1\\n1F0,1F1,1B0,1B1", name="gpipe")
    >>> simulate(gpipe)
    gpipe: makespan 9, bubble 1/3, idle 6, activations 2, 2, messages 4
    >>> simulate(gpipe, forward=[1, 2], send=Fraction(1, 2)).makespan
    Fraction(12, 1)
    """
    compute = {
        "forward": forward,
        "backward_input": backward_input,
        "backward_weight": backward_weight,
    }
    costs = _by_stage(
        schedule, **compute, send=send, gather=gather, reduce=reduce, activation=activation
    )
    graph, order = verified_order(schedule)
    zero: list[Number] = [0] * schedule.stages
    durations = {
        Kind.F: costs["forward"],
        Kind.B: [
            i + w for i, w in zip(costs["backward_input"], costs["backward_weight"], strict=True)
        ],
        Kind.I: costs["backward_input"],
        Kind.W: costs["backward_weight"],
        Kind.SEND_F: zero,
        Kind.SEND_B: zero,
        Kind.UNSHARD: costs["gather"],
        Kind.RESHARD: zero,
        Kind.REDUCE: costs["reduce"],
    }
    start, end, cause, messages = _times(graph, order, durations, costs["send"])
    events = [*map(Event, graph.device, graph.actions, map(_exact, start), map(_exact, end))]
    path: list[Event] = []
    number = max(order, key=end.__getitem__, default=None)
    while number is not None:
        path.append(events[number])
        number = cause[number]
    return Simulation(
        graph.schedule,
        events=tuple(
            tuple(events[number] for number in graph.row(device))
            for device in range(schedule.devices)
        ),
        critical_path=tuple(reversed(path)),
        peak_activations=tuple(graph.peak_activations(costs["activation"])),
        messages=messages,
    )


def _times(
    graph: Dependencies,
    order: Sequence[int],
    durations: Mapping[Kind, list[Number]],
    latency: list[Number],
) -> tuple[list[Number], list[Number], list[int | None], int]:
    """Run each action as soon as it can; return starts, ends, the last action that each has waited for, and messages."""
    starts: list[Number] = [0] * len(graph.actions)
    ends: list[Number] = [0] * len(graph.actions)
    causes: list[int | None] = [None] * len(graph.actions)
    free: dict[int, tuple[Number, int | None]] = defaultdict(
        lambda: (0, None)
    )  # by device; -1 - device: its weights
    messages = 0
    for number in order:
        here, (kind, stage, _) = graph.device[number], graph.actions[number]
        if kind in MESSAGES - SENDS:
            continue  # its send has set its times
        start, cause = free[here]
        if kind in UNITS and free[-1 - here][0] > start:
            start, cause = free[-1 - here]
        for need in graph.needs[number]:
            end = ends[need]
            if graph.device[need] != here:  # a message that the schedule does not contain
                end += latency[graph.actions[need].stage]
                messages += 1
            if end > start:
                start, cause = end, need
        end = start + durations[kind][stage]
        if kind in SENDS:
            end += latency[stage]
            receive = graph.partner[number]
            starts[receive], ends[receive], causes[receive] = start, end, number
            messages += 1
        else:
            free[-1 - here if kind in UNITS else here] = (end, number)
        starts[number], ends[number], causes[number] = start, end, cause
    return starts, ends, causes, messages


def _by_stage(schedule: ScheduleRows, **costs: Cost) -> dict[str, list[Number]]:
    """Return the cost of each stage; raise if one is missing or negative."""
    numbers: dict[str, list[Number]] = {}
    stages = range(schedule.stages)
    for name, cost in costs.items():
        numbers[name] = (
            [*cost]
            if isinstance(cost, Sequence)
            else [cost(s) if callable(cost) else cost for s in stages]
        )
        if len(numbers[name]) != schedule.stages or not all(each >= 0 for each in numbers[name]):
            raise ValueError(
                f"simulate: {name} must be a cost of at least 0 for each of {schedule.stages} stages; got {numbers[name]}."
            )
    return numbers


def _exact(number: Number) -> Number:
    return Fraction(number) if isinstance(number, Rational) else number
