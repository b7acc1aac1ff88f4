"""`cost_of_stages`: the cost of a plan in stages, from a program of four stages.

    program of     0 ──> 1 ──> 2 ──> 3       layers: 1, 2, 1, 1; three microbatches
    four stages         layer = 1 - 2

    each action of each stage ──> the schedule of all stages and microbatches: time
    seconds, bytes            ──> its rows, action after action: bytes

A device of a pipeline runs only its own stages, and an action does the same in all schedules. So
forwards, backwards, and what follows them are measured where the program is short: see
Note [Actions are linear].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from fshard.memory.limit import open_usages
from fshard.mesh.collectives.ledger import active
from fshard.mesh.layout import Mesh
from fshard.mesh.layout.make import make_mesh
from fshard.parallelism.value import Parallelism
from fshard.pipeline.schedule.actions import COMPUTE, Action, Kind
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.trace import Event as TimelineEvent
from fshard.pipeline.schedule.trace import Timeline, recording_to
from fshard.plan.cluster import Cluster
from fshard.plan.cost import Cost, DeviceCost
from fshard.plan.program import LayeredModel
from fshard.plan.programs.numbers import ProgramCost, cost_of_short_program, peaks
from fshard.plan.timing import times_of
from fshard.plan.trace import (
    PURPOSES,
    CollectiveWait,
    Event,
    MessageSend,
    MessageWait,
    Operation,
    TracedLedger,
)

# Note [Actions are linear]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# All layers are equal: with one layer more an action does the operations of one layer more, at its
# begin, its end or between. So seconds, and the bytes that are left when it ends, are on a line
# through those of the stages 2 and 1. Its peak is that of its first or of its last layer, each on
# a line too: "first" counts operations from the begin of the action, "last" from its end. The ends
# of the model add what the stages 0 and 3 have more than stage 2.
#
# The first microbatch makes the sums of gradients, and the last one may leave them for the
# reduction: so the first, the last and those between are measured apart.

STAGES = 4
LAYERS = [1, 2, 1, 1]
"""The layers of each stage: of five, since the ends of the model count too."""

BETWEEN = 2
LONGER = 1
"""The stages without ends of the model: with a layer, and with two."""

MOST_MICROBATCHES = 3

LAYERS_OF_BUILDING = 3
"""To make a program takes as long as to run some layers."""

NAMES = (*PURPOSES, "under way")
"""The purposes of bytes, and those that a collective will write before the next operation."""

Bytes = tuple[float, ...]
"""Bytes by purpose, in the order of `NAMES`."""


FIRST, MIDDLE, LAST = range(3)
"""The positions of a microbatch among those of a stage."""


def _sum(x: Bytes, y: Bytes, factor: float = 1.0) -> Bytes:
    return tuple([a + factor * b for a, b in zip(x, y, strict=True)])


def _with_difference(x: Bytes, more: Bytes, less: Bytes, count: int) -> Bytes:
    """Return bytes with `more` - `less` added some times."""
    difference = _sum(more, less, -1)
    return _sum(x, difference, count)


class ActionCost(NamedTuple):
    """The needs of an action.

    Args:
        seconds: without waits for messages.
        until_sent: seconds from its begin until it sends its message.
        change: of the bytes when it has ended.
        at_begin, at_end: bytes at the peak of its first and its last layer, above its begin.
    """

    seconds: float
    until_sent: float
    change: Bytes
    at_begin: Bytes
    at_end: Bytes

    def plus(self, more: ActionCost, less: ActionCost, count: int) -> ActionCost:
        """Return the cost with a number of layers more; each is `more` - `less`."""
        seconds = more.seconds - less.seconds
        until_sent = more.until_sent - less.until_sent
        return ActionCost(
            seconds=self.seconds + count * seconds,
            until_sent=self.until_sent + count * until_sent,
            change=_with_difference(self.change, more.change, less.change, count),
            at_begin=_with_difference(self.at_begin, more.at_begin, less.at_begin, count),
            at_end=_with_difference(self.at_end, more.at_end, less.at_end, count),
        )

    @property
    def peak(self) -> Bytes:
        """The bytes at the peak, above the begin."""
        return max(self.at_begin, self.at_end, key=sum)


class DeviceEnds(NamedTuple):
    """The begin of a device's row, and what follows it: reductions, update, gathers.

    Args:
        seconds: after the row.
        begin: bytes before the row.
        reduction, update: bytes at the peaks after the row.
    """

    seconds: float
    begin: Bytes
    reduction: Bytes
    update: Bytes

    def plus(self, more: DeviceEnds, less: DeviceEnds, count: int) -> DeviceEnds:
        """Return the numbers with a difference of others, some times."""
        seconds = more.seconds - less.seconds
        return DeviceEnds(
            seconds=self.seconds + count * seconds,
            begin=_with_difference(self.begin, more.begin, less.begin, count),
            reduction=_with_difference(self.reduction, more.reduction, less.reduction, count),
            update=_with_difference(self.update, more.update, less.update, count),
        )

    def with_state(self, factor: float) -> DeviceEnds:
        """Return the numbers with a part of the state."""
        state = NAMES.index("state")
        parts = list[Bytes]()
        for sizes in (self.begin, self.reduction, self.update):
            parts.append((*sizes[:state], sizes[state] * factor, *sizes[state + 1 :]))
        return DeviceEnds(self.seconds, *parts)


class ActionCase(NamedTuple):
    """All that the cost of an action of a stage depends on.

    Args:
        kind: of the action.
        position: of the microbatch: FIRST, MIDDLE or LAST.
        is_split: the backward of the microbatch is in two parts.
    """

    kind: Kind
    position: int
    is_split: bool


StageCosts = list[dict[ActionCase, ActionCost]]
"""The costs of the actions of each stage."""


@dataclass(frozen=True)
class MeasuredStages:
    """The costs of the program of four stages.

    Args:
        actions: of each stage.
        ends: of each device.
        message: its bytes.
    """

    actions: list[dict[ActionCase, ActionCost]]
    ends: list[DeviceEnds]
    message: float

    def action(self, case: ActionCase, layers: int, is_first: bool, is_last: bool) -> ActionCost:
        """Return the cost of an action of a stage with some layers, at the ends of the model."""
        stage = BETWEEN
        if is_first:
            stage = 0
        if is_last:
            stage = STAGES - 1
        less = self._of(BETWEEN, case)
        more = self._of(LONGER, case)
        return self._of(stage, case).plus(more, less, layers - 1)

    def _of(self, stage: int, case: ActionCase) -> ActionCost:
        actions = self.actions[stage]
        # Where a program has one or two microbatches there is none between.
        for position in (case.position, MIDDLE, FIRST, LAST):
            measured = actions.get(case._replace(position=position))
            if measured is not None:
                return measured
        raise AssertionError(f"no {case} was measured")

    def device(self, layers: int, is_first: bool, is_last: bool) -> DeviceEnds:
        """Return the ends of a device with some layers."""
        ends = self.ends[BETWEEN].plus(self.ends[LONGER], self.ends[BETWEEN], layers - 1)
        if is_first:
            ends = ends.plus(self.ends[0], self.ends[BETWEEN], 1)
        if is_last:
            ends = ends.plus(self.ends[STAGES - 1], self.ends[BETWEEN], 1)
        return ends


# -- the cost --------------------------------------------------------------------------------------


def cost_of_stages(
    model: LayeredModel,
    plan: Parallelism,
    cluster: Cluster,
    steps: int,
    layers: Sequence[int],
    more_seconds: float,
    known: dict[Parallelism, MeasuredStages],
) -> ProgramCost:
    """Return the cost of the program of a plan in stages, with all layers and microbatches.

    Args:
        model: with any number of layers.
        plan: its sizes and options, with `data` as a number.
        cluster: the machine.
        steps: that run, of which the last one counts.
        layers: of each stage.
        more_seconds: that follow the rows, than with `data_of_program` devices along "data".
        known: stages that are measured, and that are from now on.
    """
    schedule = plan.pipeline_schedule()
    measured = _measured(model, plan, cluster, steps, known)
    ends = _ends_of_devices(measured, plan, schedule, layers)
    cases_of_rows = [_cases(row, schedule.microbatches) for row in schedule.rows]
    costs = _costs_of_stages(measured, cases_of_rows, layers)

    level = cluster.level_between(0, plan.devices // plan.pipeline, plan.devices)
    message = level.latency + measured.message / level.bandwidth
    overlaps = bool(cluster.efficiency.overlap)
    row_ends = _ends_of_rows(schedule, cases_of_rows, costs, message, overlaps)
    device_ends = [row_end + end.seconds for row_end, end in zip(row_ends, ends, strict=True)]
    seconds = max(device_ends) + more_seconds

    peaks_of_devices = list[Bytes]()
    for row, cases, end in zip(schedule.rows, cases_of_rows, ends, strict=True):
        peaks_of_devices.append(_peak_of_row(row, cases, costs, end))
    fullest = max(peaks_of_devices, key=sum)
    memory = {name: round(size) for name, size in zip(NAMES, fullest, strict=True)}
    return ProgramCost(seconds, {name: size for name, size in memory.items() if size > 0})


def _ends_of_devices(
    measured: MeasuredStages, plan: Parallelism, schedule: Schedule, layers: Sequence[int]
) -> list[DeviceEnds]:
    """Return what is before and after the row of each device, with the layers of its stages."""
    placement = schedule.placement
    layers_of_devices = [0] * plan.pipeline
    for count, coordinate in zip(layers, placement, strict=True):
        layers_of_devices[coordinate] += count

    # The measured program has fewer devices along "data", so that each has more of the state.
    part = 1.0
    if plan.zero_stage:
        part = data_of_program(plan) / cast(int, plan.data)
    ends = list[DeviceEnds]()
    for coordinate, count in enumerate(layers_of_devices):
        is_first = placement[0] == coordinate
        is_last = placement[-1] == coordinate
        ends.append(measured.device(count, is_first, is_last).with_state(part))
    return ends


def _costs_of_stages(
    measured: MeasuredStages, cases_of_rows: Sequence[Sequence[ActionCase]], layers: Sequence[int]
) -> StageCosts:
    """Return the cost of each action in a schedule, of each stage with its layers."""
    distinct = {case for cases in cases_of_rows for case in cases}
    last = len(layers) - 1
    costs = list[dict[ActionCase, ActionCost]]()
    for stage, count in enumerate(layers):
        of_stage = dict[ActionCase, ActionCost]()
        for case in distinct:
            of_stage[case] = measured.action(case, count, stage == 0, stage == last)
        costs.append(of_stage)
    return costs


def data_of_program(plan: Parallelism) -> int:
    """Return the devices along "data" of the program of four stages.

    Only what follows the rows depends on their number, so that one program serves for all.
    """
    return min(cast(int, plan.data), 2)


def size_of_stages(plan: Parallelism, steps: int) -> int:
    """Return the layers, times microbatches, that `cost_of_stages` runs in some steps."""
    programs = short_programs(plan)
    layers = STAGES + 1 + LAYERS_OF_BUILDING
    return sum([layers * cast(int, program.microbatches) * steps for program in programs])


def _ends_of_rows(
    schedule: Schedule,
    cases_of_rows: Sequence[Sequence[ActionCase]],
    costs: StageCosts,
    message: float,
    overlaps: bool,
) -> list[float]:
    """Return the seconds at which each device ends its row.

    An action begins when the one before it in the row has ended, and its message has arrived: of a
    forward from the stage before, of a backward from the stage after.

    Args:
        schedule: of the stages.
        cases_of_rows: those of the actions of each row.
        costs: of each stage.
        message: seconds from its begin until it arrives on another device.
        overlaps: messages are sent beside the computation.
    """
    placement = schedule.placement
    last = len(placement) - 1
    # The time at which the message of an action is there, by its direction, stage and microbatch.
    arrivals = dict[tuple[bool, int, int], float]()
    now = [0.0] * schedule.devices
    indices = [0] * schedule.devices
    waiting = [*range(schedule.devices)]
    while waiting:
        unfinished = list[int]()
        for device in waiting:
            row = schedule.rows[device]
            while indices[device] < len(row):
                kind, stage, number = row[indices[device]]
                microbatch = cast(int, number)
                is_forward = kind is Kind.F
                has_messages = kind is not Kind.W  # a gradient of weights stays on its device

                begin = now[device]
                source_stage = stage - 1 if is_forward else stage + 1
                if has_messages and 0 <= source_stage <= last:
                    arrival = arrivals.get((is_forward, stage, microbatch))
                    if arrival is None:
                        unfinished.append(device)
                        break
                    begin = max(begin, arrival)

                cost = costs[stage][cases_of_rows[device][indices[device]]]
                now[device] = begin + cost.seconds
                target_stage = stage + 1 if is_forward else stage - 1
                if has_messages and 0 <= target_stage <= last:
                    is_other_device = placement[target_stage] != device
                    seconds = message if is_other_device else 0.0
                    arrival = begin + cost.until_sent + seconds
                    arrivals[is_forward, target_stage, microbatch] = arrival
                    if not overlaps:
                        now[device] += seconds
                indices[device] += 1
        waiting = unfinished
    return now


def _peak_of_row(
    row: Sequence[Action], cases: Sequence[ActionCase], costs: StageCosts, end: DeviceEnds
) -> Bytes:
    """Return the bytes at the peak of a device, which runs a row of the schedule."""
    peak = max(end.begin, end.reduction, end.update, key=sum)
    held = end.begin
    for action, case in zip(row, cases, strict=True):
        cost = costs[action.stage][case]
        peak = max(peak, _sum(held, cost.peak), key=sum)
        held = _sum(held, cost.change)
    return peak


def _cases(row: Sequence[Action], microbatches: int) -> list[ActionCase]:
    """Return all that the cost of each action in a row depends on.

    The position of a backward counts those that add a gradient of weights: in B, or W.
    """
    counts = Counter[tuple[int, Kind]]()
    split = {(stage, microbatch) for kind, stage, microbatch in row if kind is Kind.I}
    cases = list[ActionCase]()
    for kind, stage, microbatch in row:
        adds = Kind.W if kind is Kind.B else kind
        number = counts[stage, adds]
        counts[stage, adds] += 1
        position = MIDDLE
        if number == 0:
            position = FIRST
        if number == microbatches - 1:
            position = LAST
        cases.append(ActionCase(kind, position, (stage, microbatch) in split))
    return cases


# -- the program of four stages --------------------------------------------------------------------


class Moment(NamedTuple):
    """The end of an action: the number of events before it, and the bytes then."""

    action: Action
    events: int
    held: Bytes


@dataclass(frozen=True)
class ActionEnds(Timeline):
    """A timeline of events and bytes instead of seconds, by device."""

    moments: dict[int, list[Moment]] = field(default_factory=dict[int, list[Moment]])

    def add(self, event: TimelineEvent) -> None:
        """Record the end of an action of the calling device."""
        if event.action.kind not in COMPUTE:
            return
        (ledger,) = [each for each in active() if isinstance(each, TracedLedger)]
        (usage,) = open_usages()
        usage.free_dead()
        held = (*[float(usage.purposes[purpose]) for purpose in PURPOSES], 0.0)
        moment = Moment(event.action, len(ledger.events), held)
        self.moments.setdefault(event.device, []).append(moment)


def _measured(
    model: LayeredModel,
    plan: Parallelism,
    cluster: Cluster,
    steps: int,
    known: dict[Parallelism, MeasuredStages],
) -> MeasuredStages:
    """Return the stages with all kinds of actions: those of two programs for a schedule of both."""
    of_schedules = list[MeasuredStages]()
    for key in short_programs(plan):
        if key not in known:
            axes = {**plan.axes, "data": key.data} if "data" in plan.axes else plan.axes
            mesh = make_mesh(cast(dict[str, int], axes), runtime="abstract")
            known[key] = _measure(model, key, cluster, steps, mesh)
        of_schedules.append(known[key])
    measured = of_schedules[0]
    for other in of_schedules[1:]:
        pairs = zip(measured.actions, other.actions, strict=True)
        measured = replace(measured, actions=[{**x, **y} for x, y in pairs])
    return measured


def short_programs(plan: Parallelism) -> list[Parallelism]:
    """Return the plans of the programs of four stages, one for each kind of backward."""
    kinds = {action.kind for action in plan.pipeline_schedule().rows[0]}
    plans = list[Parallelism]()
    for schedule, kind in (("1f1b", Kind.B), ("zb-h1", Kind.I)):
        if kind in kinds:
            plans.append(short_program(plan, schedule))
    return plans


def short_program(plan: Parallelism, schedule: str) -> Parallelism:
    """Return the plan of the program of four stages."""
    microbatches = min(cast(int, plan.microbatches), MOST_MICROBATCHES)
    data = data_of_program(plan)
    sizes: dict[str, Any] = {"pipeline": STAGES, "data": data, "microbatches": microbatches}
    return replace(plan, **sizes, chunks=1, schedule=schedule)


def _measure(
    model: LayeredModel, plan: Parallelism, cluster: Cluster, steps: int, mesh: Mesh
) -> MeasuredStages:
    """Run the program of four stages; its times are those on a mesh of all."""
    with recording_to(ActionEnds()) as run:
        cost = cost_of_short_program(model, plan, cluster, steps, STAGES + 1)
    devices = [*cost.devices.values()]
    moments = list[list[Moment]]()
    for number in cost.devices:
        of_all_steps = run.moments[number]
        moments.append(of_all_steps[-len(of_all_steps) // steps :])

    parts = list[dict[ActionCase, Part]]()
    ends = list[DeviceEnds]()
    for device, of_device in zip(devices, moments, strict=True):
        parts.append(_parts(device, of_device, cast(int, plan.microbatches)))
        ends.append(_ends_of(device, of_device, cluster, mesh))
    actions = [_actions_of(stage, parts, cluster, mesh) for stage in range(STAGES)]
    return MeasuredStages(actions, ends, _message_of(cost))


class Part(NamedTuple):
    """The events of an action, those until its message is sent, and the bytes around it."""

    events: list[Event]
    until_sent: list[Event]
    before: Bytes
    after: Bytes


def _parts(
    device: DeviceCost, moments: Sequence[Moment], microbatches: int
) -> dict[ActionCase, Part]:
    """Return the events of each action."""
    row = [moment.action for moment in moments]
    begin = 0
    before = _bytes_at(device.events[: moments[0].events])[0]
    parts = dict[ActionCase, Part]()
    for moment, case in zip(moments, _cases(row, microbatches), strict=True):
        end = moment.events
        sends = [i for i in range(begin, end) if isinstance(device.events[i], MessageSend)]
        sent = sends[-1] if sends else end
        events = _alone(device.events, begin, end)
        until_sent = _alone(device.events, begin, sent)
        parts[case] = Part(events, until_sent, before, moment.held)
        begin = end
        before = moment.held
    return parts


def _alone(events: Sequence[Event], begin: int, end: int) -> list[Event]:
    """Return the events of a part of a step, without messages."""
    alone = list[Event]()
    numbers = dict[int, int]()
    for index in range(begin, end):
        event = events[index]
        if isinstance(event, MessageSend | MessageWait):
            continue
        if isinstance(event, CollectiveWait):
            if event.start not in numbers:
                continue  # it began before
            event = CollectiveWait(numbers[event.start])
        numbers[index] = len(alone)
        alone.append(event)
    return alone


def _actions_of(
    stage: int, parts: Sequence[dict[ActionCase, Part]], cluster: Cluster, mesh: Mesh
) -> dict[ActionCase, ActionCost]:
    """Return the cost of each action of a stage."""
    costs = dict[ActionCase, ActionCost]()
    for case, part in parts[stage].items():
        seconds = times_of({0: part.events}, cluster, mesh)[0].step
        until_sent = times_of({0: part.until_sent}, cluster, mesh)[0].step
        change = _sum(part.after, part.before, -1)
        above = [_sum(size, part.before, -1) for size in _bytes_at(part.events)]
        above.append(change)

        # The peak at the begin, or at the end, is that of the operations of one layer there.
        shorter = len(_bytes_at(parts[BETWEEN].get(case, part).events))
        longer = len(_bytes_at(parts[LONGER].get(case, part).events))
        layer = max(longer - shorter, 1)
        at_begin = above
        at_end = above
        if stage == LONGER:
            at_begin = above[:shorter]
            at_end = above[-shorter - 1 :]
        elif stage == 0:
            at_begin = above[:layer]
        elif stage == STAGES - 1:
            at_end = above[-layer - 1 :]
        peaks_of_ends = [max([*sizes, change], key=sum) for sizes in (at_begin, at_end)]
        costs[case] = ActionCost(seconds, until_sent, change, *peaks_of_ends)
    return costs


def _bytes_at(events: Sequence[Event]) -> list[Bytes]:
    sizes = list[Bytes]()
    for event in events:
        if isinstance(event, Operation):
            sizes.append((*event.memory, event.peak - sum(event.memory)))
    return sizes


def _ends_of(
    device: DeviceCost, moments: Sequence[Moment], cluster: Cluster, mesh: Mesh
) -> DeviceEnds:
    """Return what is before and after the row of a device."""
    begin = _bytes_at(device.events[: moments[0].events])[0]
    after = _alone(device.events, moments[-1].events, len(device.events))
    seconds = times_of({0: after}, cluster, mesh)[0].step
    operations = [event for event in after if isinstance(event, Operation)]
    before_update = [event for event in operations if event.unit != "update"]
    reduction = max(_bytes_at(before_update), key=sum, default=begin)
    _, in_update = peaks(device)
    update = tuple([in_update[name] for name in NAMES])
    return DeviceEnds(seconds, begin, reduction, update)


def _message_of(cost: Cost) -> float:
    """Return the bytes of a message."""
    sizes = [0.0]
    for device in cost.devices.values():
        sizes += [event.sent for event in device.events if isinstance(event, MessageSend)]
    return max(sizes)
