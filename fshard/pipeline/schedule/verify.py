"""`verify`: prove that a schedule is valid, or raise with a drawing of all errors.

1. Each device runs all actions of its stages once: for every microbatch F, and B or both I and W;
   or F alone.
2. The inputs of an action precede it in its row, and no devices wait for each other in a cycle.
3. If there are messages, each value that changes devices has one send and one receive. Two devices
   send and receive in the same order, and even blocking sends cannot deadlock.
4. Weights are unsharded wherever they are used, and resharded in the end; gradients are reduced
   once, after the last W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
        collectives: number of all-gathers of weights and reductions of gradients in each copy of
            the pipeline.
        peak_activations: maximal number of activations of a stage on each device.
    """

    schedule: ScheduleRows
    messages: int
    collectives: int
    peak_activations: tuple[int, ...]

    def __repr__(self) -> str:
        proven = ["every action runs once and after its inputs"]
        if self.messages:
            proven.append(f"{self.messages} messages are received even if sends block")
        if self.collectives:
            proven.append(f"{self.collectives} collectives have one order")
        peaks = ", ".join(map(str, self.peak_activations))
        proven.append(f"devices hold at most {peaks} activations")
        return f"{self.schedule.name} can run: {'; '.join(proven)}."


def verify(schedule: ScheduleRows) -> Proof:
    """Prove that a schedule can run; otherwise raise a `ScheduleError` that draws all errors.

    >>> verify(ScheduleRows.from_csv("0F0,0SEND_F0,0RECV_B0,0B0\\n1RECV_F0,1F0,1B0,1SEND_B0"))
    csv can run: every action runs once and after its inputs;
    2 messages are received even if sends block; devices hold at most 1, 1 activations.
    >>> verify(ScheduleRows.from_csv("0F0,0B0,0F1,0B1\\n1F0,1F1,1B0,1B1"))
    Traceback (most recent call last):
    fshard.errors.ScheduleError: "csv" cannot run:
    - devices 0 -> 1 -> 0 wait for each other:
        device 0: 0F0 [0B0] [0F1] 0B1   0B0 (index 1) waits for 1B0 (device 1, index 2)
        device 1: 1F0 [1F1] [1B0] 1B1   1F1 (index 1) waits for 0F1 (device 0, index 2)
    """
    graph, _ = verify_and_order(schedule)
    kinds = [action.kind for action in graph.actions]
    peaks = graph.peak_activations([1] * schedule.stages)
    return Proof(
        schedule,
        messages=sum(kind in SENDS for kind in kinds),
        collectives=sum(kind in {Kind.UNSHARD, Kind.REDUCE} for kind in kinds),
        peak_activations=tuple(map(int, peaks)),
    )


@lru_cache(maxsize=32)  # a search simulates one schedule with the costs of many plans
def verify_and_order(schedule: ScheduleRows) -> tuple[Dependencies, list[int]]:
    """Return the dependencies and a topological order of a schedule; raise if it is not valid."""
    graph = find_dependencies(schedule)
    topological_order, waits = graph.execute()
    errors = [*_count_errors(graph), *_sharding_errors(graph), *_deadlocks(graph, waits)]
    if errors:
        lines = [f'"{schedule.name}" cannot run:', *_first_named(errors, " errors")]
        raise ScheduleError("\n- ".join(lines))
    return graph, topological_order


def _first_named(texts: Sequence[str], noun: str = "") -> list[str]:
    """Return the first texts, and how many more there are."""
    named = list(texts[:_MAX_NAMED])
    if len(texts) > _MAX_NAMED:
        named.append(f"and {len(texts) - _MAX_NAMED} more{noun}")
    return named


# -- 1, 3: each action once ------------------------------------------------------------------------


def _count_errors(graph: Dependencies) -> Iterator[str]:
    """Yield useless, repeated and missing actions."""
    expected = _expected_actions(graph)
    number_of: dict[Action, int] = {}
    for number, action in enumerate(graph.actions):
        parts = graph.parts[number]
        is_placed = graph.schedule.placement[action.stage] == graph.device[number]
        if is_placed and action.kind in {Kind.UNSHARD, Kind.RESHARD}:
            continue  # any number of them is valid: see `_sharding_errors`
        if not is_placed or not expected.issuperset(parts):
            reason = _why_useless(graph, number)
            yield f"{_located(graph, number)} must not be there: {reason}"
            continue

        repeated = [number_of[part] for part in parts if part in number_of]
        if repeated:
            yield f"{_located(graph, number)} repeats {_located(graph, repeated[0])}"
        for part in parts:
            number_of[part] = number

    missing = expected - number_of.keys()
    yield from _missing_errors(graph.schedule, missing)


def _why_useless(graph: Dependencies, number: int) -> str:
    action, schedule = graph.actions[number], graph.schedule
    device = schedule.placement[action.stage]
    if device != graph.device[number]:
        return f"stage {action.stage} is on device {device}"
    if action.microbatch is not None and action.microbatch >= schedule.microbatches:
        return f"microbatches are below {schedule.microbatches}"
    return "nothing is to be sent, received or reduced"


def _missing_errors(schedule: ScheduleRows, missing: set[Action]) -> Iterator[str]:
    """Yield the missing actions of each device; where both I and W are missing, a B is named."""
    named = set(missing)
    for action in missing:
        weights = action._replace(kind=Kind.W)
        if action.kind is Kind.I and weights in missing:
            named -= {action, weights}
            named.add(action._replace(kind=Kind.B))

    for device in range(schedule.devices):
        actions = [action for action in named if schedule.placement[action.stage] == device]
        if actions:
            texts = [str(action) for action in sorted(actions)]
            yield f"missing on device {device}: {', '.join(_first_named(texts))}"


def _expected_actions(graph: Dependencies) -> set[Action]:
    """Return all actions that the stages need; I and W for each B."""
    schedule = graph.schedule
    kinds = {action.kind for action in graph.actions}
    has_backward = bool(kinds & {Kind.B, Kind.I, Kind.W})
    has_messages = bool(kinds & MESSAGES)

    expected: set[Action] = set()
    for stage in range(schedule.stages):
        is_before_crossing = has_messages and schedule.crosses(stage, 1)
        is_after_crossing = has_messages and schedule.crosses(stage, -1)

        needed = [Kind.F]
        if is_after_crossing:
            needed.append(Kind.RECV_F)
        if is_before_crossing:
            needed.append(Kind.SEND_F)
        if has_backward:
            needed += [Kind.I, Kind.W]
            if is_before_crossing:
                needed.append(Kind.RECV_B)
            if is_after_crossing:
                needed.append(Kind.SEND_B)

        for kind in needed:
            expected |= {Action(kind, stage, m) for m in range(schedule.microbatches)}
        if has_backward and Kind.REDUCE in kinds:
            expected.add(Action(Kind.REDUCE, stage))
    return expected


# -- 4: unsharded where used -----------------------------------------------------------------------


def _sharding_errors(graph: Dependencies) -> Iterator[str]:
    """Yield weights that are used while they are sharded, unsharded twice, or never resharded."""
    if not any(action.kind in {Kind.UNSHARD, Kind.RESHARD} for action in graph.actions):
        return

    for device in range(graph.schedule.devices):
        unsharded: set[int] = set()
        for number in graph.row(device):
            kind, stage, _ = graph.actions[number]
            is_unsharded = stage in unsharded
            needs_unsharded = kind in COMPUTE or kind is Kind.RESHARD
            if needs_unsharded and not is_unsharded:
                yield f"stage {stage} is sharded at {_located(graph, number)}"
            if kind is Kind.UNSHARD and is_unsharded:
                yield f"stage {stage} is unsharded already at {_located(graph, number)}"

            if kind is Kind.UNSHARD:
                unsharded.add(stage)
            elif kind is Kind.RESHARD:
                unsharded.discard(stage)

        for stage in sorted(unsharded):
            yield f"stage {stage} is not resharded at the end of device {device}"


# -- 2, 3: no deadlock -----------------------------------------------------------------------------


def _deadlocks(graph: Dependencies, waits: dict[int, Wait]) -> Iterator[str]:
    """Yield the cycles of waiting devices; all other waiting devices wait for one of them.

    A cycle of one device is an action before its input in the same row. Messages in other orders at
    their two ends are a cycle, too.
    """
    visited: set[int] = set()
    for first in sorted(waits):
        # Every stuck device waits for an action of a stuck device, so this path ends in a cycle, or
        # at a device of an earlier path, whose cycle is drawn.
        path: list[int] = []
        device = first
        while device not in visited:
            visited.add(device)
            path.append(device)
            device = graph.device[waits[device].on]

        if device in path:
            cycle = path[path.index(device) :]
            yield _draw_cycle(graph, [waits[device] for device in cycle])


def _draw_cycle(graph: Dependencies, cycle: Sequence[Wait]) -> str:
    devices = [graph.device[wait.action] for wait in cycle]
    drawings: list[str] = []
    reasons: list[str] = []
    for index, wait in enumerate(cycle):
        device = devices[index]
        wanted_by_previous = cycle[index - 1].on  # of the first device: by the last one
        drawings.append(_draw_neighbours(graph, device, {wait.action, wanted_by_previous}))

        position = wait.action - graph.begin[device]
        action = graph.actions[wait.action]
        reasons.append(f"{action} (index {position}) waits for {_located(graph, wait.on)}")

    title = f"device {devices[0]} waits for itself"
    if len(devices) > 1:
        path = " -> ".join(map(str, [*devices, devices[0]]))
        title = f"devices {path} wait for each other"
    width = max(map(len, drawings))
    lines = [f"{title}:"]
    for drawing, reason in zip(drawings, reasons, strict=True):
        lines.append(f"    {drawing:{width}}   {reason}")
    return "\n".join(lines)


def _draw_neighbours(graph: Dependencies, device: int, marked: set[int]) -> str:
    """Draw the marked actions of a row, in brackets, and their neighbours."""
    row = graph.row(device)
    near = {number + distance for number in marked for distance in (-1, 0, 1)}
    shown = sorted(near & set(row))

    words: list[str] = []
    before = row[0] - 1
    for number in shown:
        if number > before + 1:
            words.append("…")
        action = str(graph.actions[number])
        words.append(f"[{action}]" if number in marked else action)
        before = number
    if before < row[-1]:
        words.append("…")
    return f"device {device}: {' '.join(words)}"


def _located(graph: Dependencies, number: int) -> str:
    device = graph.device[number]
    position = number - graph.begin[device]
    return f"{graph.actions[number]} (device {device}, index {position})"
