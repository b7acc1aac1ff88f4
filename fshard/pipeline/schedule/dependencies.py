"""The dependencies of a schedule's actions, and their execution on all devices concurrently.

Beside the order of its row, an action waits for what it needs; a send and its receive run together. All are of the same
microbatch, and a B is both I and W:

    F s       needs F s-1, or RECV_F s if that is on another device and the schedule has messages
    I s       needs F s, and I s+1, or RECV_B s likewise
    W s       needs I s
    SEND_F s  needs F s and runs with RECV_F s+1
    SEND_B s  needs I s and runs with RECV_B s-1
    REDUCE s  needs W s of all microbatches
    F, I, W   need the last UNSHARD of their stage before them, if there is one
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from fshard.pipeline.schedule.actions import COMPUTE, MESSAGES, Action, Kind
from fshard.pipeline.schedule.rows import ScheduleRows
from fshard.pipeline.schedule.trace import Number


class Wait(NamedTuple):
    """An action that cannot start, and the one that it waits for."""

    action: int
    on: int


@dataclass(frozen=True)
class Dependencies:
    """The actions of all devices, numbered row after row, with their dependencies. `find_dependencies` makes it."""

    schedule: ScheduleRows
    actions: list[Action]
    parts: list[tuple[Action, ...]]  # I and W of a B, any other action itself
    device: list[int]  # of each action
    begin: list[int]  # of each row, and the end of the last one
    needs: list[
        list[int]
    ]  # of each action, those that must end before it starts, as far as they exist
    partner: dict[int, int]  # the receive of each send, and the send of each receive

    def row(self, device: int) -> range:
        """Return the numbers of a device's actions."""
        return range(self.begin[device], self.begin[device + 1])

    def execute(self) -> tuple[list[int], dict[int, Wait]]:
        """Execute all rows concurrently: return an order of all that can run, and what each other device waits for.

        A send blocks until it is received. The set of executed actions does not depend on the order.
        """
        device, partner = self.device, self.partner
        position, ended, order = self.begin[:-1], bytearray(len(self.actions)), list[int]()
        waiting: dict[int, list[int]] = defaultdict(list)
        waits: dict[int, Wait] = {}
        ready = [*range(len(position))]
        while ready:
            current = ready.pop()
            while (number := position[current]) < self.begin[current + 1]:
                mate = partner.get(number)
                if mate is not None and position[device[mate]] != mate:
                    missing = mate
                else:
                    needs = (
                        self.needs[number]
                        if mate is None
                        else self.needs[number] + self.needs[mate]
                    )
                    missing = next((need for need in needs if not ended[need]), None)
                if missing is not None:
                    waits[current] = Wait(number, missing)
                    waiting[missing].append(current)
                    break
                for done in (number,) if mate is None else (number, mate):
                    order.append(done)
                    ended[done] = 1
                    position[device[done]] += 1
                    ready += waiting.pop(done, ())
            else:
                waits.pop(current, None)
        return order, waits

    def peak_activations(self, size: Sequence[Number]) -> list[Number]:
        """Return the peak of each device, from the start of an F to the end of its B or W (or of itself, if alone)."""
        has_backward = any(action.kind in {Kind.B, Kind.W} for action in self.actions)
        last = {Kind.B, Kind.W} if has_backward else {Kind.F}
        peaks: list[Number] = []
        for row in self.schedule.rows:
            held: Number = 0
            peak: Number = 0
            for kind, stage, _ in row:
                if kind is Kind.F:
                    held += size[stage]
                    peak = max(peak, held)
                if kind in last:
                    held -= size[stage]
            peaks.append(peak)
        return peaks


def find_dependencies(schedule: ScheduleRows) -> Dependencies:
    """Find all dependencies. Actions on a wrong device wait for nothing, and nothing waits for missing ones."""
    actions = [action for row in schedule.rows for action in row]
    device = [index for index, row in enumerate(schedule.rows) for _ in row]
    parts = [
        (action._replace(kind=Kind.I), action._replace(kind=Kind.W))
        if action.kind is Kind.B
        else (action,)
        for action in actions
    ]
    number_of: dict[Action, int] = {}
    for number, (action, halves) in enumerate(zip(actions, parts, strict=True)):
        for half in halves if schedule.placement[action.stage] == device[number] else ():
            number_of.setdefault(half, number)
    has_messages = any(action.kind in MESSAGES for action in actions)
    needs: list[list[int]] = [[] for _ in actions]
    partner: dict[int, int] = {}
    unshards: dict[tuple[int, int], int] = {}
    for number, action in enumerate(actions):
        stage = device[number], action.stage
        if action.kind in {Kind.UNSHARD, Kind.RESHARD}:
            unshards[stage] = number
        elif action.kind in COMPUTE and actions[unshards.get(stage, number)].kind is Kind.UNSHARD:
            needs[number].append(unshards[stage])
        if schedule.placement[action.stage] == device[number]:
            inputs = [
                need
                for half in parts[number]
                for need in inputs_of(schedule, half, has_messages=has_messages)
            ]
            needs[number] += [
                n for n in map(number_of.get, inputs) if n is not None and n != number
            ]
            mate = number_of.get(action.partner) if action.kind in MESSAGES else None
            if mate is not None and device[mate] != device[number] and number_of[action] == number:
                partner[number] = mate
    return Dependencies(
        schedule, actions, parts, device, [0, *accumulate(map(len, schedule.rows))], needs, partner
    )


def inputs_of(
    schedule: ScheduleRows, action: Action, *, has_messages: bool = False
) -> Iterator[Action]:
    """Yield what an action needs, also before the first stage and after the last."""
    kind, stage, m = action
    if kind is Kind.F:
        received = has_messages and schedule.crosses(stage, -1)
        yield Action(Kind.RECV_F, stage, m) if received else Action(Kind.F, stage - 1, m)
    elif kind is Kind.I:
        received = has_messages and schedule.crosses(stage, 1)
        yield Action(Kind.F, stage, m)
        yield Action(Kind.RECV_B, stage, m) if received else Action(Kind.I, stage + 1, m)
    elif kind is Kind.SEND_F:
        yield Action(Kind.F, stage, m)
    elif kind is Kind.W or kind is Kind.SEND_B:
        yield Action(Kind.I, stage, m)
    elif kind is Kind.REDUCE:
        yield from (
            Action(Kind.W, stage, microbatch) for microbatch in range(schedule.microbatches)
        )
