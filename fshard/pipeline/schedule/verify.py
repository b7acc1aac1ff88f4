"""`verify`: prove that a schedule is valid, or raise with a drawing of all errors.

1. Each device does its own stages' work once: for every microbatch F, and B or both I and W; or F alone.
2. The inputs of an action are computed before it in its row, and no devices wait for each other in a cycle.
3. If there are messages, each value that changes devices has one send and one receive, in one order between two devices,
   and even blocking sends cannot deadlock.
4. Gathered weights are unsharded wherever they are used, and freed in the end; gradients are reduced once, after the last W.
5. No device exceeds its limit of activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.program import SENDS, Program, Stuck, Task, crosses, nowhere, peaks, wire
from fshard.pipeline.schedule.schedule import COMPUTE, MESSAGES, Action, Kind, Schedule

_MOST = 20  # of all faults, and of all actions of one fault, this many are named


@dataclass(frozen=True, repr=False)
class Proof:
    """The result of `verify`. Prints as a sentence.

    Args:
        schedule: the valid schedule.
        messages: number of values sent between devices; 0 if the schedule has no messages.
        collectives: number of gathers of weights and reductions of gradients in each copy of the pipeline.
        peak_activations: maximal number of activations of a stage on each device.
    """

    schedule: Schedule
    messages: int
    collectives: int
    peak_activations: tuple[int, ...]

    def __repr__(self) -> str:
        proven = [
            "all is done once and after what it needs",
            *([f"{self.messages} messages are received even if sends block"] if self.messages else []),
            *([f"{self.collectives} collectives have one order"] if self.collectives else []),
            f"devices hold at most {', '.join(map(str, self.peak_activations))} activations",
        ]
        return f"{self.schedule.name} can run: {'; '.join(proven)}."


def verify(schedule: Schedule, *, memory: int | None = None) -> Proof:
    """Prove that a schedule can run; raise a `ScheduleError` with a drawing of all errors otherwise.

    Args:
        schedule: any schedule.
        memory: maximal number of activations of a stage on a device; default: unlimited.

    >>> from fshard.pipeline.schedule.schedule import Schedule
    >>> verify(Schedule.from_csv("0F0,0SEND_F0,0RECV_B0,0B0\\n1RECV_F0,1F0,1B0,1SEND_B0"))
    csv can run: all is done once and after what it needs; 2 messages are received even if sends block;
    devices hold at most 1, 1 activations.
    >>> verify(Schedule.from_csv("0F0,0B0,0F1,0B1\\n1F0,1F1,1B0,1B1"))
    Traceback (most recent call last):
    fshard.errors.ScheduleError: "csv" cannot run:
    - devices 0 -> 1 -> 0 wait for each other:
        device 0: 0F0 [0B0] [0F1] 0B1   0B0 (index 1) waits for 1B0 (device 1, index 2)
        device 1: 1F0 [1F1] [1B0] 1B1   1F1 (index 1) waits for 0F1 (device 0, index 2)
    """
    program, _ = verified(schedule, memory=memory)
    kinds = [action.kind for action in program.actions]
    return Proof(
        schedule,
        messages=sum(kind in SENDS for kind in kinds),
        collectives=sum(kind in {Kind.GATHER, Kind.REDUCE} for kind in kinds),
        peak_activations=_held(program),
    )


def verified(schedule: Schedule, *, memory: int | None = None) -> tuple[Program, list[int]]:
    """Wire up a schedule that can run, with one order in which all its actions may be done."""
    program = wire(schedule)
    order, stuck = program.walk()
    faults = [
        *_misplaced(program),
        *_counts(program),
        *_late(program),
        *_crossed(program),
        *_ungathered(program),
        *_above(program, memory),
        *_circles(program, stuck),
    ]
    if faults:
        more = [f"and {len(faults) - _MOST} more faults"] if len(faults) > _MOST else []
        raise ScheduleError("\n- ".join([f'"{schedule.name}" cannot run:', *faults[:_MOST], *more]))
    return program, order


def _misplaced(program: Program) -> Iterator[str]:
    for number, why in program.misplaced.items():
        yield f"{_where(program, number)} cannot be there: {why}"


def _counts(program: Program) -> Iterator[str]:
    """Yield duplicate, useless and missing actions."""
    for number, first in program.repeated.items():
        yield f"{_where(program, number)} does again what {_where(program, first)} does"
    expected = _work(program)
    for task in sorted(program.at.keys() - expected):
        number = next(number for number in program.at[task] if number is not None)
        yield f"{_where(program, number)} has no purpose: nothing is to be sent, received or reduced there"
    places = {task: program.at.get(task) or nowhere(program.schedule, task.kind) for task in expected}
    missing = {task: {m for m, number in enumerate(numbers) if number is None} for task, numbers in places.items()}
    for stage in range(program.schedule.stages):
        inputs, weights = (missing.get(Task(kind, stage), set[int]()) for kind in (Kind.I, Kind.W))
        missing |= {
            Task(Kind.B, stage): inputs & weights,
            Task(Kind.I, stage): inputs - weights,
            Task(Kind.W, stage): weights - inputs,
        }
    for (kind, stage), microbatches in sorted(missing.items(), key=lambda item: item[0][::-1]):
        if microbatches:
            names = (str(Action(kind, stage, None if kind is Kind.REDUCE else m)) for m in sorted(microbatches))
            yield f"missing on device {program.schedule.placement[stage]}: {_some(names)}"


def _work(program: Program) -> set[Task]:
    """Return all tasks of the stages; I and W for each B."""
    schedule, kinds = program.schedule, {action.kind for action in program.actions}
    backward, messages = bool(kinds & {Kind.B, Kind.I, Kind.W}), bool(kinds & MESSAGES)
    work: set[Task] = set()
    for stage in range(schedule.stages):
        before, after = (messages and crosses(schedule, stage, step) for step in (-1, 1))
        expected = {
            Kind.F: True,
            Kind.I: backward,
            Kind.W: backward,
            Kind.SEND_F: after,
            Kind.RECV_F: before,
            Kind.SEND_B: before and backward,
            Kind.RECV_B: after and backward,
            Kind.REDUCE: backward and Kind.REDUCE in kinds,
        }
        work |= {Task(kind, stage) for kind, true in expected.items() if true}
    return work


def _late(program: Program) -> Iterator[str]:
    """Yield actions that precede something in their row that they need."""
    for number, needs in enumerate(program.needs):
        late = [need for need in needs if need > number and program.device[need] == program.device[number]]
        if late:
            names = _some(_where(program, need) for need in late)
            drawn = _row(program, program.device[number], number, *late)
            yield f"{_where(program, number)} needs later actions: {names}\n    {drawn}"


def _crossed(program: Program) -> Iterator[str]:
    """Yield where one device sends to another in one order, and that receives in another."""
    channels: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number in sorted(program.meets):
        if program.actions[number].kind in SENDS:
            channels[program.device[number], program.device[program.meets[number]]].append(number)
    for (source, target), sent in channels.items():
        wanted = [program.meets[number] for number in sent]
        for number, receive, turn in zip(sent, sorted(wanted), wanted, strict=True):
            if receive != turn:
                yield (
                    f"device {source} sends to device {target} in one order, and is received from in another:"
                    f"\n    {_row(program, source, number)}\n    {_row(program, target, receive)}"
                )
                break


def _ungathered(program: Program) -> Iterator[str]:
    """Yield weights that are used while they are not there, gathered twice, or never freed."""
    if not any(action.kind in {Kind.GATHER, Kind.FREE} for action in program.actions):
        return
    for device in range(program.schedule.devices):
        gathered: dict[int, int] = {}
        absent: dict[int, list[int]] = defaultdict(list)
        for number in program.row(device):
            kind, stage, _ = program.actions[number]
            if kind is Kind.GATHER:
                if stage in gathered:
                    yield f"{_where(program, number)} gathers again what {_where(program, gathered[stage])} has gathered"
                gathered[stage] = number
            elif kind in COMPUTE | {Kind.FREE} and stage not in gathered:
                absent[stage].append(number)
            elif kind is Kind.FREE:
                del gathered[stage]
        for stage, numbers in absent.items():
            yield f"stage {stage} is not gathered at {_some(_where(program, number) for number in numbers)}"
        for number in gathered.values():
            yield f"{_where(program, number)} gathers what nothing frees"


def _above(program: Program, memory: int | None) -> Iterator[str]:
    for device, peak in enumerate(_held(program)):
        if memory is not None and peak > memory:
            yield f"device {device} holds {peak} activations, {peak - memory} more than memory={memory}"


def _held(program: Program) -> tuple[int, ...]:
    return tuple(map(int, peaks(program, [1] * program.schedule.stages)))


def _circles(program: Program, stuck: dict[int, Stuck]) -> Iterator[str]:
    """Yield the cycles of waiting devices; all other stuck devices wait for one of them."""
    if not stuck:
        return
    buffers = ""
    if program.meets:
        buffers = (
            ", even if messages are buffered" if program.walk(buffered=True)[1] else ", unless messages are buffered"
        )
    seen: set[int] = set()
    for first in sorted(stuck):
        path: list[int] = []
        here = first
        while here not in seen:
            seen.add(here)
            path.append(here)
            here = program.device[stuck[here].on]
        if here in path:
            circle = path[path.index(here) :]
            yield _circle(program, [stuck[device] for device in circle], buffers)


def _circle(program: Program, waits: list[Stuck], buffers: str) -> str:
    devices = [program.device[wait.action] for wait in waits]
    rows = [
        _row(program, device, wait.action, before.on)
        for device, wait, before in zip(devices, waits, [waits[-1], *waits], strict=False)
    ]
    why = [
        f"{program.actions[wait.action]} (index {wait.action - program.begin[device]}) waits for {_where(program, wait.on)}"
        for device, wait in zip(devices, waits, strict=True)
    ]
    width = max(map(len, rows))
    drawn = "".join(f"\n    {row:{width}}   {text}" for row, text in zip(rows, why, strict=True))
    return f"devices {' -> '.join(map(str, [*devices, devices[0]]))} wait for each other{buffers}:{drawn}"


def _row(program: Program, device: int, *marked: int) -> str:
    """Draw the actions that are marked, in brackets, and their neighbours."""
    row = program.row(device)
    shown = sorted({number for mark in marked for number in (mark - 1, mark, mark + 1) if number in row})
    words = ["…"] if shown[0] > row[0] else []
    for before, number in zip([shown[0] - 1, *shown], shown, strict=False):
        words += ["…"] if number > before + 1 else []
        words.append(f"[{program.actions[number]}]" if number in marked else f"{program.actions[number]}")
    return " ".join([f"device {device}:", *words, *(["…"] if shown[-1] < row[-1] else [])])


def _where(program: Program, number: int) -> str:
    device = program.device[number]
    return f"{program.actions[number]} (device {device}, index {number - program.begin[device]})"


def _some(names: Iterable[str]) -> str:
    names = [*names]
    return ", ".join(names[:_MOST] + ([f"and {len(names) - _MOST} more"] if len(names) > _MOST else []))
