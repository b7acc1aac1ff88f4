"""The dependencies of a schedule's actions, and the walk that executes all rows concurrently.

Actions are numbered consecutively, row after row. Beside the order of its row, an action waits for what it *needs*; a
send and its receive *meet*. A need is for the same microbatch, so the stages are wired (a B is both I and W):

    F s       needs F s-1, or RECV_F s if that is on another device and the schedule has messages
    I s       needs F s, and I s+1, or RECV_B s likewise
    W s       needs I s
    SEND_F s  needs F s and meets RECV_F s+1
    SEND_B s  needs I s and meets RECV_B s-1
    REDUCE s  needs W s of all microbatches
    F, I, W   need the last UNSHARD of their stage before them, if it is gathered
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import NamedTuple

from fshard.pipeline.schedule.schedule import COMPUTE, MESSAGES, UNITS, Action, Kind, Schedule
from fshard.pipeline.schedule.trace import Number

SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = MESSAGES - SENDS


class Task(NamedTuple):
    """A task of a stage, once per microbatch or once per step."""

    kind: Kind
    stage: int


class Stuck(NamedTuple):
    """An action that cannot start, and the one on another device that it waits for."""

    action: int
    on: int


@dataclass(frozen=True)
class Program:
    """The actions of all devices as one list, with their dependencies.

    `tasks`: the numbers of the actions that do a task, per microbatch or for all; None if there is none. A B counts as
    I and W.
    """

    schedule: Schedule
    actions: list[Action]  # row after row
    device: list[int]  # of each action
    begin: list[int]  # of each row, and the end of the last one
    at: dict[Task, list[int | None]]
    needs: list[list[int]]  # of each action, those that have to end before it starts, as far as they are there
    meets: dict[int, int]  # the receive of each send, and the send of each receive
    misplaced: dict[int, str]  # actions that are invalid where they are, whatever surrounds them, with the reason
    repeated: dict[int, int]  # actions that repeat an earlier one, and that one

    def row(self, device: int) -> range:
        """Return the numbers of a device's actions."""
        return range(self.begin[device], self.begin[device + 1])

    def walk(self, *, buffered: bool = False) -> tuple[list[int], dict[int, Stuck]]:
        """Execute all rows concurrently: return an order of all that can run, and why each device that did not finish
        is stuck.

        A send blocks until it is received, unless messages are buffered. The set of executed actions does not depend
        on the order.
        """
        device, needs, meets = self.device, self.needs, self.meets
        if buffered:  # then a receive needs its send, and none must meet
            received = {number: [other] for number, other in meets.items() if self.actions[number].kind not in SENDS}
            needs, meets = [need + received.get(number, []) for number, need in enumerate(needs)], {}
        at, ended, order = self.begin[:-1], bytearray(len(self.actions)), list[int]()
        waiting: dict[int, list[int]] = defaultdict(list)
        stuck: dict[int, Stuck] = {}
        ready = [*range(len(at))]
        while ready:
            here = ready.pop()
            while (number := at[here]) < self.begin[here + 1]:
                other = meets.get(number)
                lack = None if other is None or at[device[other]] == other else other
                for need in needs[number]:
                    if not ended[need] and device[need] != here:
                        lack = need
                if lack is not None:
                    stuck[here] = Stuck(number, lack)
                    waiting[lack].append(here)
                    break
                for done in (number,) if other is None else (number, other):
                    order.append(done)
                    ended[done] = 1
                    at[device[done]] += 1
                    ready += waiting.pop(done, ())
            else:
                stuck.pop(here, None)
        return order, stuck


def wire(schedule: Schedule) -> Program:
    """Find all dependencies. Invalid actions wait for nothing, and nothing waits for missing ones."""
    actions = [action for row in schedule.rows for action in row]
    device = [place for place, row in enumerate(schedule.rows) for _ in row]
    misplaced = {n: why for n, action in enumerate(actions) if (why := _complaint(schedule, device[n], action))}
    at, repeated = _locate(schedule, {n: action for n, action in enumerate(actions) if n not in misplaced})
    needs = [[gather] if gather is not None else [] for gather in _gathers(actions)]
    meets: dict[int, int] = {}
    carried = any(task.kind in MESSAGES for task in at)
    for task, places in at.items():
        for other in _needs(schedule, task, carried):
            for number, need in _pairs(places, at.get(other, ())):
                needs[number] += [need] if need != number else []
        if task.kind in MESSAGES:
            partner = Action(task.kind, task.stage).partner
            pairs = _pairs(places, at.get(Task(partner.kind, partner.stage), ()))
            meets |= {number: other for number, other in pairs if device[number] != device[other]}
    begin = [0, *accumulate(map(len, schedule.rows))]
    return Program(schedule, actions, device, begin, at, needs, meets, misplaced, repeated)


def _locate(schedule: Schedule, actions: Mapping[int, Action]) -> tuple[dict[Task, list[int | None]], dict[int, int]]:
    """Find the action of each task for each microbatch, and the duplicates."""
    at: dict[Task, list[int | None]] = {}
    repeated: dict[int, int] = {}
    for number, (kind, stage, microbatch) in actions.items():
        if kind is Kind.GATHER or kind is Kind.FREE:
            continue
        for task in (Task(Kind.I, stage), Task(Kind.W, stage)) if kind is Kind.B else (Task(kind, stage),):
            if task not in at:
                at[task] = nowhere(schedule, kind)
            places = at[task]
            if (first := places[microbatch or 0]) is None:
                places[microbatch or 0] = number
            else:
                repeated[number] = first
    return at, repeated


def _gathers(actions: Iterable[Action]) -> Iterator[int | None]:
    """Yield for each action the gather of its stage, if that is gathered and used there."""
    gathered: dict[int, int] = {}
    for number, (kind, stage, _) in enumerate(actions):
        yield gathered.get(stage) if kind in COMPUTE else None
        if kind is Kind.GATHER:
            gathered[stage] = number
        elif kind is Kind.FREE:
            gathered.pop(stage, None)


def nowhere(schedule: Schedule, kind: Kind) -> list[int | None]:
    """Return the entries of a task that no action does."""
    return [None] * (1 if kind in UNITS else schedule.microbatches)


def crosses(schedule: Schedule, stage: int, step: int) -> bool:
    """Return True if the stage `step` after (or before) this one exists on another device."""
    placement = schedule.placement
    return 0 <= stage + step < len(placement) and placement[stage + step] != placement[stage]


def _complaint(schedule: Schedule, device: int, action: Action) -> str:
    if (home := schedule.placement[action.stage]) != device:
        return f"stage {action.stage} is on device {home}"
    if action.microbatch is not None and not 0 <= action.microbatch < schedule.microbatches:
        return f"there is no microbatch {action.microbatch}, but {schedule.microbatches} from 0 on"
    return ""


def _needs(schedule: Schedule, task: Task, carried: bool) -> Iterator[Task]:
    kind, stage = task
    if kind is Kind.F:
        yield Task(Kind.RECV_F, stage) if carried and crosses(schedule, stage, -1) else Task(Kind.F, stage - 1)
    elif kind is Kind.I:
        yield Task(Kind.F, stage)
        yield Task(Kind.RECV_B, stage) if carried and crosses(schedule, stage, 1) else Task(Kind.I, stage + 1)
    elif kind is Kind.SEND_F:
        yield Task(Kind.F, stage)
    elif kind is Kind.W or kind is Kind.SEND_B:
        yield Task(Kind.I, stage)
    elif kind is Kind.REDUCE:
        yield Task(Kind.W, stage)


def _pairs(places: Iterable[int | None], others: Iterable[int | None]) -> Iterator[tuple[int, int]]:
    """Yield the actions of the same microbatch; those for all belong to each."""
    for number, other in zip(cycle(places), others, strict=False):
        if number is not None and other is not None:
            yield number, other


def peaks(program: Program, size: Sequence[Number]) -> list[Number]:
    """Return the peak activations of each device, from the start of an F to the end of its B or W (or of itself, if
    alone).
    """
    last = {Kind.B, Kind.W} if any(action.kind in {Kind.B, Kind.W} for action in program.actions) else {Kind.F}
    found: list[Number] = []
    for device in range(program.schedule.devices):
        held: Number = 0
        most: Number = 0
        for number in program.row(device):
            action = program.actions[number]
            if action.kind is Kind.F:
                held += size[action.stage]
                most = max(most, held)
            if action.kind in last:
                held -= size[action.stage]
        found.append(most)
    return found
