"""`Reductions`: the gradients of units, reduced in an order that all devices share, and summed over slices.

                  complete            its turn (agreed)          full                finished
a unit's uses  ─────────────>  waiting  ─────────────>  bucket  ──────>  in flight  ─────────>  sums
      └─ accumulated: of earlier slices

All devices reduce in one order and in one dtype, so that their buckets match. Gradients become complete in an order that may
depend on the data, and some never do where a branch skips them. So a unit before its turn waits, one that is missing after
the backward is reduced as zeros, and one without a turn is reduced last.

    turns       head  blocks[1]  blocks[0]            agreed in the first step: device 0's order of use, reversed
    device 0    head  blocks[0]              ->       head  blocks[1] = 0  blocks[0]
    device 1    head  blocks[1]              ->       head  blocks[1]      blocks[0] = 0

The gradient of a sharded unit is sent
immediately, to free its memory; gradients of replicated units wait until a bucket is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agreement import host_row, reduce_rows
from fshard.transforms.fsdp.engine import Along, Gradients, GradientSums, ParamPlan, Ways
from fshard.transforms.fsdp.graph_checks import refuse_backward
from fshard.transforms.fsdp.units import LazyUnit, Order
from fshard.transforms.options import StepOptions

AccumulateInto = Callable[[LazyUnit, Gradients], None]
"""Takes a slice's gradients of a unit instead of reducing them."""


class Reductions(GradientSums):
    """The gradients of the units of one device in one step, reduced in an `order` that is cached from an earlier one."""

    def __init__(
        self,
        units: Sequence[LazyUnit],
        leaves: Sequence[ParamPlan],
        device: torch.device,
        options: StepOptions,
        ways: Ways,
        *,
        order: Order,
        wide: bool,
        site: Site,
    ) -> None:
        super().__init__(leaves, device, options, ways, site, wide=wide, along=order.along)
        self.units, self.turns = units, [*order.turns]
        self._accumulate_into: AccumulateInto | None = None
        self._turn, self._is_idle = 0, False
        self._waiting: dict[int, Gradients] = {}

    def begin(
        self,
        used: Iterable[int],
        group: Group | None,
        along: Along,
        accumulate_into: AccumulateInto | None = None,
        *,
        is_idle: bool,
    ) -> None:
        """Begin a backward: agree on the order of reductions, unless it is cached.

        Args:
            used: the numbers of the units that the forward has used.
            group: all devices whose losses the objective sums.
            along: their axes besides the batch's.
            accumulate_into: takes the gradients, if they are not reduced yet.
            is_idle: the slice has weight 0, and so have its gradients.
        """
        self._accumulate_into, self._is_idle, self._turn = accumulate_into, is_idle, 0
        self._waiting = {}
        self.clear()  # of what a backward that failed has left
        if along != self.along:
            self.turns, self.along = [], along  # there are more devices to agree
        if not self.turns and any(leaf.trained for leaf in self.leaves):
            self.turns = self._agree_on_turns(used, group)

    def _agree_on_turns(self, used: Iterable[int], group: Group | None) -> list[int]:
        """Return the order of all devices: the first one's, reversed, then units that only others have used."""
        is_first, count = group is None or not group.index, len(self.units)
        positions = {number: 1.0 + position for position, number in enumerate(used)}
        row = [is_first * positions.get(number, 0.0) for number in range(count)]
        row += [float(number in positions) for number in range(count)]
        (sums,) = reduce_rows((host_row(row, self.device),), group, self.site)
        if sums.is_meta:
            return [*used][::-1]
        firsts, users = sums.view(2, count).tolist()
        return sorted((number for number in range(count) if users[number]), key=lambda number: -firsts[number])

    def receive(self, unit: LazyUnit, gs: Sequence[Tensor | None]) -> None:
        """Receive the cotangents of one use of a unit; after that of the last use, reduce all units whose turn has come."""
        gs = self._recorded(unit, gs)
        if self._accumulate_into is not None:
            self._accumulate_into(unit, gs)
        elif unit.pending_backwards or unit.number in self._waiting:  # it was resharded and unsharded again
            unit.accumulate(gs)
        else:
            self._waiting[unit.number] = unit.take_accumulated(gs)
            self._reduce_due()

    def receive_separately(self, unit: LazyUnit, gs: Sequence[Tensor | None]) -> None:
        """Receive cotangents of lazy parameters, or of a single use; they are reduced after the backward."""
        if any(g is not None for g in gs):
            (self._accumulate_into or LazyUnit.accumulate)(unit, self._recorded(unit, gs))

    def _recorded(self, unit: LazyUnit, gs: Sequence[Tensor | None]) -> Gradients:
        """Record the parameters as used, in a backward that fshard has started."""
        if unit.runtime.state != "backward":
            refuse_backward()
        return self.record(unit.indices, gs, is_idle=self._is_idle)

    def _reduce_due(self, *, is_end: bool = False) -> None:
        """Reduce the units whose turn has come; at the end of a backward, those that it has not reached too, as zeros."""
        while self._turn < len(self.turns) and (is_end or self.turns[self._turn] in self._waiting):
            unit = self.units[self.turns[self._turn]]
            self._turn += 1
            gs = self._waiting.pop(unit.number, [None] * len(unit.indices))
            self.reduce(unit, unit.take_accumulated(gs))

    def end(self) -> None:
        """Reduce all units that are still due; accumulate those without a turn until the end of the step."""
        self._reduce_due(is_end=True)
        self.send()
        for number, gs in self._waiting.items():
            self.units[number].accumulate(gs)
        self._waiting.clear()

    def rest(self, accumulated: Sequence[float], used: Sequence[float]) -> None:
        """Reduce the units that any device has accumulated; set the order of the next step."""
        rest = [unit for unit, times in zip(self.units, accumulated, strict=True) if times]
        for unit in rest:
            self.reduce(unit, unit.take_accumulated([None] * len(unit.indices)))
        self.send()
        self.finish()
        turns = dict.fromkeys([*self.turns, *(unit.number for unit in rest)])
        self.turns = [number for number in turns if any(used[index] for index in self.units[number].indices)]

    def reduce(self, unit: LazyUnit, gs: Sequence[Tensor | None]) -> None:
        """Put the gradients of a unit into the bucket, and send it if it is full or the unit is sharded."""
        self.put(unit.indices, gs)
        if unit.is_sharded or self.is_full:
            self.send()

    def as_reduced(self, unit: LazyUnit, gs: Sequence[Tensor | None]) -> Gradients:
        """Cast the gradients of a unit to the dtypes that they are reduced in."""
        return self.cast(unit.indices, gs)

    def drop(self) -> None:
        """Drop all gradients of the step, those in flight too."""
        self.finish()
        self.used = [False] * len(self.leaves)
        self.sums, self._sent = [None] * len(self.leaves), {}
        for unit in self.units:
            unit.accumulated = None
