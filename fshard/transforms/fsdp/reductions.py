"""`Reductions`: the gradients of units, reduced in an order that all devices share, and summed over slices.

                  complete            its turn (`agree`)         full                finished
a unit's uses  ─────────────>  waiting  ─────────────>  bucket  ──────>  in flight  ─────────>  sums
      └─ accumulated: of earlier slices

All devices reduce in one order and in one dtype, so that their buckets match. The gradient of a sharded unit is sent
immediately, to free its memory; gradients of replicated units wait until a bucket is full.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from fshard.mesh.reshard.execute import ReshardPlan, go
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agree import agreed_turns
from fshard.transforms.fsdp.units import ParamPlan, Unit, UnitOptions
from fshard.transforms.graph_checks import refuse_backward

Along = tuple[str, ...]
Ways = Callable[[Along], tuple[Sequence[ReshardPlan | None], int]]
"""From axes to the reshard plans of gradients, None where frozen, and to the number of devices along these axes."""
Accumulate = Callable[[Unit, list[Tensor | None]], None]
"""Takes a slice's gradients of a unit instead of reducing them."""


class Reductions:
    """The gradients of one device in one step.

    Args:
        units: whose gradients are reduced together.
        leaves: the plans of parameters, and `shards` this device's shards.
        options: of units.
        site: the source line of the step.
        turns: the order in which units are reduced, by index; empty if devices have not agreed on it yet.
        along: the axes beside the batch's over which gradients are partial sums, when devices agreed.
        ways: the reshard plans from partial sums over such axes to the layouts of gradients.
        wide: True if sums of several slices are reduced in at least 32 bits.

    `used` is True for each parameter that this device has used; `sums` are the reduced gradients.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        leaves: Sequence[ParamPlan],
        shards: Sequence[Tensor],
        options: UnitOptions,
        site: Site,
        turns: Sequence[int],
        along: Along,
        ways: Ways,
        wide: bool,
    ) -> None:
        self.units, self.leaves, self.shards, self.options, self.site = units, leaves, shards, options, site
        self.turns, self.wide = list(turns), wide
        self.along, self._ways = along, ways
        self.used = [False] * len(leaves)
        self.sums: list[Tensor | None] = [None] * len(leaves)
        self._accumulate: Accumulate | None = None
        self._turn, self._idle, self._collecting = 0, False, False
        self._waiting: dict[int, list[Tensor | None]] = {}
        self._bucket: list[tuple[int, Tensor, ReshardPlan]] = []
        self._size = 0  # of the bucket, in bytes
        self._in_flight: list[tuple[list[int], Callable[[], list[Tensor]], int]] = []

    def begin(
        self,
        used: Sequence[int],
        group: Group | None,
        along: Along,
        accumulate: Accumulate | None = None,
        *,
        idle: bool,
    ) -> None:
        """Begin a backward: agree on the order of reductions, unless it is cached.

        Args:
            used: the numbers of the units that the forward has used.
            group: all devices whose losses the objective sums.
            along: their axes besides the batch's.
            accumulate: takes the gradients, if they are not reduced yet.
            idle: the slice has weight 0, and so have its gradients.
        """
        self._accumulate = accumulate
        self._idle, self._turn = idle, 0
        self._waiting, self._bucket, self._size = {}, [], 0  # left by a backward that failed
        if along != self.along:
            self.turns, self.along = [], along  # there are more devices to agree
        if not self.turns and any(leaf.trained for leaf in self.leaves):
            self.turns = agreed_turns(used, len(self.units), group, self.site, self.shards[0].device)

    @contextmanager
    def collecting(self) -> Generator[None]:
        """Accept gradients within: outside of it, a backward was not started by fshard, and other devices do not join in."""
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False

    def receive(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Receive the cotangents of one use of a unit."""
        gs = self._recorded(unit, gs)
        unit.end_use()
        if self._accumulate is not None:
            self._accumulate(unit, gs)
        elif unit.pending_backwards:  # it was resharded and unsharded again: reduce with the last use
            unit.accumulate(gs)
        else:
            self._complete(unit, unit.take_accumulated(gs))

    def receive_apart(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Receive cotangents of lazy parameters, or of a single use; they are reduced after the backward."""
        if any(g is not None for g in gs):
            (self._accumulate or Unit.accumulate)(unit, self._recorded(unit, gs))

    def _recorded(self, unit: Unit, gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Record the parameters as used; return their cotangents, dense, or None if the slice is idle."""
        if not self._collecting:
            refuse_backward()
        for index, g in zip(unit.indices, gs, strict=True):
            self.used[index] |= g is not None
        return [None if self._idle else g.to_dense() if g is not None and g.is_sparse else g for g in gs]

    def _complete(self, unit: Unit, gs: list[Tensor | None]) -> None:
        """Queue a unit's gradients, and reduce every unit whose turn has come."""
        if unit.number in self._waiting:
            unit.accumulate(gs)
        else:
            self._waiting[unit.number] = gs
        while self._turn < len(self.turns) and self.turns[self._turn] in self._waiting:
            self._next()

    def _next(self) -> None:
        unit = self.units[self.turns[self._turn]]
        self._turn += 1
        self.reduce(unit, unit.take_accumulated(self._waiting.pop(unit.number, [None] * len(unit.indices))))

    def end(self) -> None:
        """Reduce all units that are still due; accumulate those without a turn until the end of the step."""
        while self._turn < len(self.turns):
            self._next()
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

    def reduce(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Put the gradients of a unit into the bucket, and send it if it is full or the unit is sharded."""
        ways, _ = self._ways(self.along)
        for index, g in zip(unit.indices, self.as_reduced(unit, gs), strict=True):
            leaf, near, way = self.leaves[index], self.shards[index], ways[index]
            if way is not None:
                g = (
                    near.new_zeros(leaf.shape, dtype=reduced_in(leaf.dtype, self.options, self.wide))
                    if g is None
                    else g
                )
                self._bucket.append((index, g, way))
                self._size += g.nbytes
        if unit.sharded or self._size >= self.options.bucket:
            self.send()

    def as_reduced(self, unit: Unit, gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Cast the gradients of a unit to the dtypes that they are reduced in."""
        dtypes = [reduced_in(self.leaves[index].dtype, self.options, self.wide) for index in unit.indices]
        return [g if g is None or g.dtype is dtype else g.to(dtype) for g, dtype in zip(gs, dtypes, strict=True)]

    def drop(self) -> None:
        """Drop all gradients of the step."""
        self.used = [False] * len(self.leaves)
        self.sums = [None] * len(self.leaves)
        for unit in self.units:
            unit.accumulated = None

    def send(self) -> None:
        """Start the reduction of the bucket."""
        if self._bucket:  # (8)
            indices, xs, ways = map(list, zip(*self._bucket, strict=True))
            self._bucket, self._size = [], 0
            _, many = self._ways(self.along)
            self._in_flight.append((indices, go(xs, ways, self.site, ahead=self.options.in_flight > 0), many))
            self.finish(self.options.in_flight)

    def finish(self, but: int = 0) -> None:
        """Wait for reductions, the oldest first, until at most `but` are in flight."""
        while len(self._in_flight) > but:
            indices, finish, many = self._in_flight.pop(0)
            for index, result in zip(indices, finish(), strict=True):
                known, leaf = self.sums[index], self.leaves[index]
                if result.dtype is not leaf.dtype:
                    result = result.to(torch.promote_types(result.dtype, leaf.dtype))
                result = result if many == 1 else result / many
                self.sums[index] = result if known is None else known + result


@lru_cache(maxsize=256)
def reduced_in(dtype: torch.dtype, options: UnitOptions, wide: bool) -> torch.dtype:
    """Return the dtype that the gradient of a parameter is reduced in."""
    if dtype.is_complex:
        return dtype
    used = options.compute or dtype
    return options.reduce or (torch.promote_types(used, torch.float32) if wide else used)
