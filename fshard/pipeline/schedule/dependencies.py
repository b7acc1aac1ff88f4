"""The dependencies of a schedule's actions, and their execution on all devices concurrently.

An action waits for the actions before it in its row, and for those that it needs; a send and its
receive run together. All are of the same microbatch, and a B is both I and W:

    F s       needs F s-1; or RECV_F s, if that is on another device and the schedule has messages
    I s       needs F s, and I s+1; or RECV_B s, likewise
    W s       needs I s
    SEND_F s  needs F s and runs with RECV_F s+1
    SEND_B s  needs I s and runs with RECV_B s-1
    REDUCE s  needs W s of all microbatches
    F, I, W   need the last UNSHARD of their stage before them, if there is one

Actions are numbered row after row: the rows `0F0 0B0` and `1F0 1B0` have the numbers 0 1 and 2 3.
An order of all actions that keeps the rows and all dependencies is a *topological order*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from fshard.pipeline.schedule.actions import COMPUTE, MESSAGES, Action, Kind
from fshard.pipeline.schedule.rows import ScheduleRows
from fshard.pipeline.schedule.trace import Number


class Wait(NamedTuple):
    """The number of an action that cannot start, and the number of the action that it waits for."""

    action: int
    on: int


@dataclass(frozen=True)
class Dependencies:
    """The numbered actions of all devices, with their dependencies: see `find_dependencies`.

    Args:
        schedule: the schedule.
        actions: of all rows, one row after the other.
        parts: I and W of a B; of any other action, the action itself.
        device: the device of each action.
        begin: the number of each row's first action, and the count of all actions.
        needs: of each action, those that must end before it starts, as far as they exist.
        partner: the receive of each send, and the send of each receive.
    """

    schedule: ScheduleRows
    actions: list[Action]
    parts: list[tuple[Action, ...]]
    device: list[int]
    begin: list[int]
    needs: list[list[int]]
    partner: dict[int, int]

    def row(self, device: int) -> range:
        """Return the numbers of a device's actions."""
        return range(self.begin[device], self.begin[device + 1])

    def execute(self) -> tuple[list[int], dict[int, Wait]]:
        """Run the rows of all devices concurrently, as far as they can run.

        A send blocks until it is received. Which actions can run does not depend on the devices'
        speeds, so one execution decides for all.

        Returns:
            the actions that have run, in a topological order; and of each device that is stuck, the
            action that cannot start.
        """
        topological_order: list[int] = []
        has_ended = bytearray(len(self.actions))
        position = self.begin[:-1]  # of each device, the next action
        waits: dict[int, Wait] = {}
        # The devices to resume when an action ends. A device looks at its inputs only then, so the
        # time is proportional to the number of dependencies.
        sleepers: dict[int, list[int]] = defaultdict(list)

        ready = list(range(len(position)))
        while ready:
            device = ready.pop()
            waits.pop(device, None)
            while position[device] < self.begin[device + 1]:
                number = position[device]
                missing = self._missing(number, position, has_ended)
                if missing is not None:
                    waits[device] = Wait(number, missing)
                    sleepers[missing].append(device)
                    break

                partner = self.partner.get(number)
                ended = [number] if partner is None else [number, partner]
                for action in ended:
                    topological_order.append(action)
                    has_ended[action] = True
                    position[self.device[action]] += 1
                    ready += sleepers.pop(action, ())
        return topological_order, waits

    def _missing(
        self, number: int, position: Sequence[int], has_ended: Sequence[int]
    ) -> int | None:
        """Return an action that the next one of a row waits for; None if it can run."""
        partner = self.partner.get(number)
        needs = self.needs[number]
        if partner is not None:
            if position[self.device[partner]] != partner:
                return partner
            needs = needs + self.needs[partner]
        for need in needs:
            if not has_ended[need]:
                return need
        return None

    def peak_activations(self, sizes: Sequence[Number]) -> list[Number]:
        """Return the largest sum of activations that each device holds; `sizes` has one per stage.

        They are held from the start of an F to the end of its B or W. A schedule without a backward
        holds them during the F alone.
        """
        has_backward = any(action.kind in {Kind.B, Kind.W} for action in self.actions)
        frees = {Kind.B, Kind.W} if has_backward else {Kind.F}
        peaks: list[Number] = []
        for row in self.schedule.rows:
            held: Number = 0
            peak: Number = 0
            for kind, stage, _ in row:
                if kind is Kind.F:
                    held += sizes[stage]
                    peak = max(peak, held)
                if kind in frees:
                    held -= sizes[stage]
            peaks.append(peak)
        return peaks


def find_dependencies(schedule: ScheduleRows) -> Dependencies:
    """Find all dependencies, also of a schedule that is wrong.

    Actions on a wrong device need nothing, and no action needs one that is missing.
    """
    actions = list(chain(*schedule.rows))
    device: list[int] = []
    for index, row in enumerate(schedule.rows):
        device += [index] * len(row)
    begin = [0, *accumulate(map(len, schedule.rows))]
    parts = [_parts_of(action) for action in actions]
    homes = [schedule.placement[action.stage] for action in actions]
    is_placed = [home == index for home, index in zip(homes, device, strict=True)]
    number_of = _number_parts(parts, is_placed)

    has_messages = any(action.kind in MESSAGES for action in actions)
    needs = _needed_unshards(actions, device)
    partner: dict[int, int] = {}
    for number, action in enumerate(actions):
        if not is_placed[number]:
            continue

        for part in parts[number]:
            for required in inputs_of(schedule, part, has_messages=has_messages):
                need = number_of.get(required)
                if need is not None and need != number:  # the W of a B needs the I of the same B
                    needs[number].append(need)

        if action.kind in MESSAGES:
            other = number_of.get(action.partner)
            is_first = number_of[action] == number  # a repeated message has no partner
            if other is not None and device[other] != device[number] and is_first:
                partner[number] = other
    return Dependencies(schedule, actions, parts, device, begin, needs, partner)


def _parts_of(action: Action) -> tuple[Action, ...]:
    if action.kind is Kind.B:
        return action._replace(kind=Kind.I), action._replace(kind=Kind.W)
    return (action,)


def _number_parts(
    parts: Sequence[Sequence[Action]], is_placed: Sequence[bool]
) -> dict[Action, int]:
    """Return the number of each action or half of a B: the first one on the device of its stage."""
    number_of: dict[Action, int] = {}
    for number, parts_of_action in enumerate(parts):
        if is_placed[number]:
            for part in parts_of_action:
                number_of.setdefault(part, number)
    return number_of


def _needed_unshards(actions: Sequence[Action], device: Sequence[int]) -> list[list[int]]:
    """Return for each action the UNSHARD that it needs, if any.

    That is the last one of its stage before it on its device, unless a RESHARD is between them.
    """
    needs: list[list[int]] = []
    unshards: dict[tuple[int, int], int] = {}
    for number, action in enumerate(actions):
        key = device[number], action.stage
        unshard = None
        if action.kind is Kind.UNSHARD:
            unshards[key] = number
        elif action.kind is Kind.RESHARD:
            unshards.pop(key, None)
        elif action.kind in COMPUTE:
            unshard = unshards.get(key)
        needs.append([] if unshard is None else [unshard])
    return needs


def inputs_of(
    schedule: ScheduleRows, action: Action, *, has_messages: bool = False
) -> Iterator[Action]:
    """Yield the actions that an action needs, also before the first stage and after the last."""
    kind, stage, m = action
    if kind is Kind.F:
        is_received = has_messages and schedule.crosses(stage, -1)
        yield Action(Kind.RECV_F, stage, m) if is_received else Action(Kind.F, stage - 1, m)
    elif kind is Kind.I:
        is_received = has_messages and schedule.crosses(stage, 1)
        yield Action(Kind.F, stage, m)
        yield Action(Kind.RECV_B, stage, m) if is_received else Action(Kind.I, stage + 1, m)
    elif kind is Kind.SEND_F:
        yield Action(Kind.F, stage, m)
    elif kind in (Kind.W, Kind.SEND_B):
        yield Action(Kind.I, stage, m)
    elif kind is Kind.REDUCE:
        for microbatch in range(schedule.microbatches):
            yield Action(Kind.W, stage, microbatch)
