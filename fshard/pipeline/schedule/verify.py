"""`verify`: prove that a schedule is valid, or raise with a drawing of all errors.

1. Each device does its own stages' work once: for every microbatch F, and B or both I and W; or F alone.
2. The inputs of an action are computed before it in its row, and no devices wait for each other in a cycle.
3. If there are messages, each value that changes devices has one send and one receive, in one order between two devices,
   and even blocking sends cannot deadlock.
4. Weights are unsharded wherever they are used, and resharded in the end; gradients are reduced once, after the last W.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.actions import COMPUTE, MESSAGES, SENDS, Action, Kind
from fshard.pipeline.schedule.dependencies import Dependencies, Wait, find_dependencies
from fshard.pipeline.schedule.rows import ScheduleRows

_MAX_NAMED = 20  # of all errors, and of all actions of one error, this many are named


@dataclass(frozen=True, repr=False)
class Proof:
    """The result of `verify`. Prints as a sentence.

    Args:
        schedule: the valid schedule.
        messages: number of values sent between devices; 0 if the schedule has no messages.
        collectives: number of all-gathers of weights and reductions of gradients in each copy of the pipeline.
        peak_activations: maximal number of activations of a stage on each device.
    """

    schedule: ScheduleRows
    messages: int
    collectives: int
    peak_activations: tuple[int, ...]

    def __repr__(self) -> str:
        proven = [
            "every action runs once and after its inputs",
            *(
                [f"{self.messages} messages are received even if sends block"]
                if self.messages
                else []
            ),
            *([f"{self.collectives} collectives have one order"] if self.collectives else []),
            f"devices hold at most {', '.join(map(str, self.peak_activations))} activations",
        ]
        return f"{self.schedule.name} can run: {'; '.join(proven)}."


def verify(schedule: ScheduleRows) -> Proof:
    """Prove that a schedule can run; raise a `ScheduleError` with a drawing of all errors otherwise.

    >>> verify(ScheduleRows.from_csv("0F0,0SEND_F0,0RECV_B0,0B0\\n1RECV_F0,1F0,1B0,1SEND_B0"))
    csv can run: every action runs once and after its inputs; 2 messages are received even if sends block;
    devices hold at most 1, 1 activations.
    >>> verify(ScheduleRows.from_csv("0F0,0B0,0F1,0B1\\n1F0,1F1,1B0,1B1"))
    Traceback (most recent call last):
    fshard.errors.ScheduleError: "csv" cannot run:
    - devices 0 -> 1 -> 0 wait for each other:
        device 0: 0F0 [0B0] [0F1] 0B1   0B0 (index 1) waits for 1B0 (device 1, index 2)
        device 1: 1F0 [1F1] [1B0] 1B1   1F1 (index 1) waits for 0F1 (device 0, index 2)
    """
    graph, _ = verified_order(schedule)
    kinds = [action.kind for action in graph.actions]
    return Proof(
        schedule,
        messages=sum(kind in SENDS for kind in kinds),
        collectives=sum(kind in {Kind.UNSHARD, Kind.REDUCE} for kind in kinds),
        peak_activations=tuple(map(int, graph.peak_activations([1] * schedule.stages))),
    )


def verified_order(schedule: ScheduleRows) -> tuple[Dependencies, list[int]]:
    """Return the dependencies of a valid schedule, and one order in which all its actions can run."""
    graph = find_dependencies(schedule)
    order, waits = graph.execute()
    errors = [*_count_errors(graph), *_sharding_errors(graph), *_deadlocks(graph, waits)]
    if errors:
        more = [f"and {len(errors) - _MAX_NAMED} more errors"] if len(errors) > _MAX_NAMED else []
        raise ScheduleError(
            "\n- ".join([f'"{schedule.name}" cannot run:', *errors[:_MAX_NAMED], *more])
        )
    return graph, order


def _count_errors(graph: Dependencies) -> Iterator[str]:
    """Yield useless, repeated and missing actions."""
    schedule, expected = graph.schedule, _expected_actions(graph)
    number_of: dict[Action, int] = {}
    for number, action in enumerate(graph.actions):
        device = schedule.placement[action.stage]
        if action.kind in {Kind.UNSHARD, Kind.RESHARD} and device == graph.device[number]:
            continue
        if device != graph.device[number] or not expected.issuperset(graph.parts[number]):
            reason = "nothing is to be sent, received or reduced"
            if device != graph.device[number]:
                reason = f"stage {action.stage} is on device {device}"
            elif (action.microbatch or 0) >= schedule.microbatches:
                reason = f"microbatches are below {schedule.microbatches}"
            yield f"{_located(graph, number)} must not be there: {reason}"
            continue
        if repeated := [number_of[half] for half in graph.parts[number] if half in number_of]:
            yield f"{_located(graph, number)} repeats {_located(graph, repeated[0])}"
        number_of |= dict.fromkeys(graph.parts[number], number)
    missing = expected - number_of.keys()
    for inputs in [action for action in missing if action.kind is Kind.I]:
        if (weights := inputs._replace(kind=Kind.W)) in missing:
            missing -= {inputs, weights}
            missing.add(inputs._replace(kind=Kind.B))
    for device in range(schedule.devices):
        actions = sorted(action for action in missing if schedule.placement[action.stage] == device)
        if actions:
            more = [f"and {len(actions) - _MAX_NAMED} more"] if len(actions) > _MAX_NAMED else []
            yield f"missing on device {device}: {', '.join([*map(str, actions[:_MAX_NAMED]), *more])}"


def _expected_actions(graph: Dependencies) -> set[Action]:
    """Return all actions that the stages need; I and W for each B."""
    schedule, kinds = graph.schedule, {action.kind for action in graph.actions}
    backward, messages = bool(kinds & {Kind.B, Kind.I, Kind.W}), bool(kinds & MESSAGES)
    expected: set[Action] = set()
    for stage in range(schedule.stages):
        before, after = (messages and schedule.crosses(stage, step) for step in (-1, 1))
        needed = {
            Kind.F: True,
            Kind.I: backward,
            Kind.W: backward,
            Kind.SEND_F: after,
            Kind.RECV_F: before,
            Kind.SEND_B: before and backward,
            Kind.RECV_B: after and backward,
        }
        of_stage = [kind for kind, is_needed in needed.items() if is_needed]
        expected |= {
            Action(kind, stage, m) for kind in of_stage for m in range(schedule.microbatches)
        }
        if backward and Kind.REDUCE in kinds:
            expected.add(Action(Kind.REDUCE, stage))
    return expected


def _sharding_errors(graph: Dependencies) -> Iterator[str]:
    """Yield weights that are used while they are sharded, unsharded twice, or never resharded."""
    if not any(action.kind in {Kind.UNSHARD, Kind.RESHARD} for action in graph.actions):
        return
    for device in range(graph.schedule.devices):
        unsharded: set[int] = set()
        for number in graph.row(device):
            kind, stage, _ = graph.actions[number]
            if kind in COMPUTE | {Kind.RESHARD, Kind.UNSHARD} and (kind is Kind.UNSHARD) == (
                stage in unsharded
            ):
                state = "unsharded already" if stage in unsharded else "sharded"
                yield f"stage {stage} is {state} at {_located(graph, number)}"
            unsharded |= {stage} if kind is Kind.UNSHARD else set()
            unsharded -= {stage} if kind is Kind.RESHARD else set()
        yield from (
            f"stage {stage} is not resharded at the end of device {device}"
            for stage in sorted(unsharded)
        )


def _deadlocks(graph: Dependencies, waits: dict[int, Wait]) -> Iterator[str]:
    """Yield the cycles of waiting devices; all other waiting devices wait for one of them.

    A cycle of one is an action before its input in the same row. Messages in different orders at their ends are a cycle too.
    """
    visited: set[int] = set()
    for first in sorted(waits):
        path: list[int] = []
        device = first
        while device not in visited:
            visited.add(device)
            path.append(device)
            device = graph.device[waits[device].on]
        if device in path:
            yield _draw_cycle(graph, [waits[device] for device in path[path.index(device) :]])


def _draw_cycle(graph: Dependencies, waits: list[Wait]) -> str:
    devices = [graph.device[wait.action] for wait in waits]
    rows = [
        _draw_neighbours(graph, device, wait.action, before.on)
        for device, wait, before in zip(devices, waits, [waits[-1], *waits], strict=False)
    ]
    reasons = [
        f"{graph.actions[wait.action]} (index {wait.action - graph.begin[device]}) waits for {_located(graph, wait.on)}"
        for device, wait in zip(devices, waits, strict=True)
    ]
    width = max(map(len, rows))
    drawn = "".join(
        f"\n    {row:{width}}   {text}" for row, text in zip(rows, reasons, strict=True)
    )
    cycle = f"devices {' -> '.join(map(str, [*devices, devices[0]]))} wait for each other"
    return f"{f'device {devices[0]} waits for itself' if len(devices) == 1 else cycle}:{drawn}"


def _draw_neighbours(graph: Dependencies, device: int, *marked: int) -> str:
    """Draw the actions that are marked, in brackets, and their neighbours."""
    row = graph.row(device)
    shown = sorted(
        {number for mark in marked for number in (mark - 1, mark, mark + 1) if number in row}
    )
    words = ["…"] if shown[0] > row[0] else []
    for before, number in zip([shown[0] - 1, *shown], shown, strict=False):
        words += ["…"] if number > before + 1 else []
        words.append(
            f"[{graph.actions[number]}]" if number in marked else f"{graph.actions[number]}"
        )
    return " ".join([f"device {device}:", *words, *(["…"] if shown[-1] < row[-1] else [])])


def _located(graph: Dependencies, number: int) -> str:
    device = graph.device[number]
    return f"{graph.actions[number]} (device {device}, index {number - graph.begin[device]})"
