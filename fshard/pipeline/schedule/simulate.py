"""`simulate`: when each action of a schedule runs, given the duration of each.

An action starts when its inputs are available and its device has finished the computations before
it in the row. Messages and the communication of weights run beside computation.

    latency 1    device 0   0F0 0F1 0F2
                 device 1       (1) 1F0 1F1 1F2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from numbers import Rational
from typing import NamedTuple

from fshard.pipeline.schedule.actions import COMPUTE, RECEIVES, SENDS, UNITS, Kind
from fshard.pipeline.schedule.dependencies import Dependencies
from fshard.pipeline.schedule.draw import draw_svg, draw_text
from fshard.pipeline.schedule.rows import ScheduleRows
from fshard.pipeline.schedule.trace import Event, Number, rounded, to_chrome_trace
from fshard.pipeline.schedule.verify import verify_and_order

Cost = Number | Sequence[Number] | Callable[[int], Number]
"""One cost for all stages, or one per stage."""


@dataclass(frozen=True, repr=False)
class Simulation:
    """The times of all actions. Made by `simulate`.

    Args:
        schedule: the schedule.
        events: of each device, as in its row.
        critical_path: actions of which each starts when the one before it ends or its message
            arrives, up to the last end.
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
        ends = [event.end for event in chain(*self.events)]
        return _as_fraction(max(ends, default=0))

    @property
    def busy(self) -> tuple[Number, ...]:
        """Time that each device computes."""
        totals: list[Number] = []
        for row in self._computations:
            total = sum([event.end - event.start for event in row])
            totals.append(_as_fraction(total))
        return tuple(totals)

    @property
    def idle_by_device(self) -> tuple[Number, ...]:
        """Idle time of each device, from 0 to the end of all."""
        makespan = self.makespan
        return tuple([makespan - busy for busy in self.busy])

    @property
    def idle(self) -> Number:
        """Total idle time of all devices."""
        return _as_fraction(sum(self.idle_by_device))

    @property
    def idle_span(self) -> tuple[Number, ...]:
        """Idle time of each device between its first and its last computation."""
        idle: list[Number] = []
        for row, busy in zip(self._computations, self.busy, strict=True):
            span = row[-1].end - row[0].start if row else 0
            idle.append(span - busy)
        return tuple(idle)

    @property
    def bubble(self) -> Number:
        """The idle part of the time of all devices."""
        time = self.makespan * self.schedule.devices
        return self.idle / time if time else _as_fraction(0)

    @property
    def _computations(self) -> list[list[Event]]:
        rows: list[list[Event]] = []
        for row in self.events:
            rows.append([event for event in row if event.action.kind in COMPUTE])
        return rows

    def to_chrome_trace(self, *, unit: float = 1) -> str:
        """Write the events as a Perfetto trace; `unit` is a unit of time in microseconds."""
        return to_chrome_trace(chain(*self.events), unit=unit)

    def to_svg(self) -> str:
        """Draw the timeline as SVG."""
        return draw_svg(self.schedule, self.events, self._summary)

    @property
    def _summary(self) -> str:
        peak = rounded(max(self.peak_activations, default=0))
        return (
            f"time {rounded(self.makespan)}, bubble {rounded(self.bubble)}, "
            f"at most {peak} activations on a device"
        )

    def __str__(self) -> str:
        return draw_text(self.schedule, self.events, self._summary)

    def _repr_html_(self) -> str:
        return self.to_svg()

    def __repr__(self) -> str:
        peaks = ", ".join(map(str, self.peak_activations))
        return (
            f"{self.schedule.name}: makespan {self.makespan}, bubble {self.bubble}, "
            f"idle {self.idle}, activations {peaks}, messages {self.messages}"
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
    """Return when each action runs. A cost is a number, or a list or function with one per stage.

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
    forwards = _costs_by_stage(schedule, "forward", forward)
    backward_inputs = _costs_by_stage(schedule, "backward_input", backward_input)
    backward_weights = _costs_by_stage(schedule, "backward_weight", backward_weight)
    latencies = _costs_by_stage(schedule, "send", send)
    gathers = _costs_by_stage(schedule, "gather", gather)
    reductions = _costs_by_stage(schedule, "reduce", reduce)
    activations = _costs_by_stage(schedule, "activation", activation)

    backwards = [i + w for i, w in zip(backward_inputs, backward_weights, strict=True)]
    zeros: list[Number] = [0] * schedule.stages
    durations = {
        Kind.F: forwards,
        Kind.B: backwards,
        Kind.I: backward_inputs,
        Kind.W: backward_weights,
        Kind.SEND_F: zeros,
        Kind.SEND_B: zeros,
        Kind.UNSHARD: gathers,
        Kind.RESHARD: zeros,
        Kind.REDUCE: reductions,
    }

    graph, topological_order = verify_and_order(schedule)
    times = _find_times(graph, topological_order, durations, latencies)
    events: list[Event] = []
    for number, action in enumerate(graph.actions):
        start = _as_fraction(times.starts[number])
        end = _as_fraction(times.ends[number])
        events.append(Event(graph.device[number], action, start, end))

    rows: list[tuple[Event, ...]] = []
    for first, stop in pairwise(graph.begin):
        rows.append(tuple(events[first:stop]))

    # Back from the last end, each time to what the action has waited for.
    path: list[Event] = []
    number = max(topological_order, key=times.ends.__getitem__, default=None)
    while number is not None:
        path.append(events[number])
        number = times.causes[number]

    return Simulation(
        graph.schedule,
        events=tuple(rows),
        critical_path=tuple(reversed(path)),
        peak_activations=tuple(graph.peak_activations(activations)),
        messages=times.messages,
    )


class _ActionTimes(NamedTuple):
    """The start and the end of each action, and the last action that it has waited for."""

    starts: list[Number]
    ends: list[Number]
    causes: list[int | None]
    messages: int


def _find_times(
    graph: Dependencies,
    topological_order: Sequence[int],
    durations: Mapping[Kind, list[Number]],
    latencies: list[Number],
) -> _ActionTimes:
    """Run each action as soon as it can."""
    starts: list[Number] = [0] * len(graph.actions)
    ends: list[Number] = [0] * len(graph.actions)
    causes: list[int | None] = [None] * len(graph.actions)
    messages = 0

    # A device has a lane for computation, and one for the communication of weights. Of each lane:
    # the end of its last action, and that action.
    idle = (0, None)
    compute_lanes: list[tuple[Number, int | None]] = [idle] * graph.schedule.devices
    weight_lanes: list[tuple[Number, int | None]] = [idle] * graph.schedule.devices

    for number in topological_order:
        device = graph.device[number]
        kind, stage, _ = graph.actions[number]
        if kind in RECEIVES:
            continue  # the send of the message has set its times

        start, cause = compute_lanes[device]
        if kind in UNITS and weight_lanes[device][0] > start:
            start, cause = weight_lanes[device]
        for need in graph.needs[number]:
            available = ends[need]
            if graph.device[need] != device:  # a message that the schedule does not contain
                available += latencies[graph.actions[need].stage]
                messages += 1
            if available > start:
                start, cause = available, need

        end = start + durations[kind][stage]
        if kind in SENDS:
            end += latencies[stage]
            messages += 1
            receive = graph.partner[number]
            starts[receive] = start
            ends[receive] = end
            causes[receive] = number
        else:
            lanes = weight_lanes if kind in UNITS else compute_lanes
            lanes[device] = (end, number)
        starts[number] = start
        ends[number] = end
        causes[number] = cause
    return _ActionTimes(starts, ends, causes, messages)


def _costs_by_stage(schedule: ScheduleRows, name: str, cost: Cost) -> list[Number]:
    """Return the cost of each stage; raise if one is missing or negative."""
    if isinstance(cost, Sequence):
        costs = list(cost)
    elif callable(cost):
        costs = [cost(stage) for stage in range(schedule.stages)]
    else:
        costs = [cost] * schedule.stages

    # `not >=`, so that nan raises.
    if len(costs) != schedule.stages or not all([each >= 0 for each in costs]):
        raise ValueError(
            f"simulate: {name} must be a cost of at least 0 for each of {schedule.stages} stages; "
            f"got {costs}."
        )
    return costs


def _as_fraction(number: Number) -> Number:
    """Return a Fraction of a rational number, so that times are exact; a float as it is."""
    return Fraction(number) if isinstance(number, Rational) else number
