"""Gradients on their way: collected from a unit's uses, reduced when it has its turn, added up over slices.

                  complete            its turn (`agree`)         full               arrived
a unit's uses  ─────────────>  waiting  ─────────────>  bucket  ──────>  under way  ─────────>  sums
      └─ kept: of earlier slices, and what a slice of its own is to be added to

All devices take turns in one order, and reduce in one dtype whatever they have; so their buckets are alike.  A unit that
lies sharded is not kept waiting in a bucket: its whole gradients are to go.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from fshard.mesh.reshard.execute import Way, go
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agree import agreed_turns
from fshard.transforms.fsdp.units import Leaf, Manner, Unit
from fshard.transforms.graph_checks import refuse_backward

Along = tuple[str, ...]
Ways = Callable[[Along], tuple[Sequence[Way | None], int]]
"""The ways of gradients, None where a leaf is not trained; and how many devices there are along these axes."""
Keep = Callable[[Unit, list[Tensor | None]], None]
"""Takes the gradients that a slice gives for the leaves of a unit."""


class Reductions:
    """The gradients of one device, through the slices of one step.

    Args:
        units: what is reduced together.
        leaves: the parameters, and `shards` what this device holds of them.
        turns: the order in which units are reduced, by number; none if devices have not agreed yet.
        along: the axes besides the batch's along which devices hold summands too, when they agreed: see `talk`.
        ways: for such axes, from the sum that each device holds a summand of, to each gradient's layout.

        wide: sums of several slices are reduced in 32 bits at least.

    `used` says of each leaf whether this device has used it; `sums` are the reduced gradients, in no fewer bits than came.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        leaves: Sequence[Leaf],
        shards: Sequence[Tensor],
        manner: Manner,
        site: Site,
        turns: Sequence[int],
        along: Along,
        ways: Ways,
        wide: bool,
    ) -> None:
        self.units, self.leaves, self.shards, self.manner, self.site = units, leaves, shards, manner, site
        self.turns, self.wide = list(turns), wide
        self.along, self._ways = along, ways
        self.used = [False] * len(leaves)
        self.sums: list[Tensor | None] = [None] * len(leaves)
        self._keep: Keep | None = None
        self._turn, self._idle, self._asked = 0, False, False
        self._waiting: dict[int, list[Tensor | None]] = {}
        self._bucket: list[tuple[int, Tensor, Way]] = []
        self._size = 0  # of the bucket, in bytes
        self._under_way: list[tuple[list[int], Callable[[], list[Tensor]], int]] = []

    def begin(
        self, used: Sequence[int], group: Group | None, along: Along, keep: Keep | None = None, *, idle: bool
    ) -> None:
        """Begin a backward: agree on the turns, unless they are known.

        Args:
            used: the units that the forward has used, by number.
            group: all devices whose losses make up the objective.
            along: their axes besides the batch's.
            keep: takes the gradients, if they are not to be reduced yet.
            idle: the slice counts for nothing, and its gradients are 0.
        """
        self._keep = keep
        self._idle, self._turn = idle, 0
        self._waiting, self._bucket, self._size = {}, [], 0  # of one that has failed
        if along != self.along:
            self.turns, self.along = [], along  # there are more devices to agree
        if not self.turns and any(leaf.trained for leaf in self.leaves):
            self.turns = agreed_turns(used, len(self.units), group, self.site, self.shards[0].device)

    @contextmanager
    def asked(self) -> Generator[None]:
        """Go back within: what comes at any other time is another's backward, which only this device has taken."""
        self._asked = True
        try:
            yield
        finally:
            self._asked = False

    def receive(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Take the cotangents of one use of a unit."""
        gs = self._noted(unit, gs)
        unit.went_back()
        if self._keep is not None:
            self._keep(unit, gs)
        elif unit.awaited:  # it was used, let go and used again: its uses are reduced together
            unit.keep(gs)
        else:
            self._complete(unit, unit.with_kept(gs))

    def receive_apart(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Take cotangents that came to a unit's handles themselves, or of one use alone, to be reduced after the backward."""
        if any(g is not None for g in gs):
            (self._keep or Unit.keep)(unit, self._noted(unit, gs))

    def _noted(self, unit: Unit, gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Note which leaves were used; return what counts of their cotangents."""
        if not self._asked:
            refuse_backward()
        for place, g in zip(unit.places, gs, strict=True):
            self.used[place] |= g is not None
        return [None if self._idle else g.to_dense() if g is not None and g.is_sparse else g for g in gs]

    def _complete(self, unit: Unit, gs: list[Tensor | None]) -> None:
        """Reduce what has its turn, now that a unit's gradients are there."""
        if unit.number in self._waiting:
            unit.keep(gs)
        else:
            self._waiting[unit.number] = gs
        while self._turn < len(self.turns) and self.turns[self._turn] in self._waiting:
            self._next()

    def _next(self) -> None:
        unit = self.units[self.turns[self._turn]]
        self._turn += 1
        self.reduce(unit, unit.with_kept(self._waiting.pop(unit.number, [None] * len(unit.places))))

    def end(self) -> None:
        """Reduce all whose turn has not come, and keep what has none for the end of the step."""
        while self._turn < len(self.turns):
            self._next()
        self.send()
        for number, gs in self._waiting.items():
            self.units[number].keep(gs)
        self._waiting.clear()

    def rest(self, kept: Sequence[float], used: Sequence[float]) -> None:
        """Reduce what some device has kept; set the turns of the next step."""
        rest = [unit for unit, times in zip(self.units, kept, strict=True) if times]
        for unit in rest:
            self.reduce(unit, unit.with_kept([None] * len(unit.places)))
        self.send()
        self.finish()
        turns = dict.fromkeys([*self.turns, *(unit.number for unit in rest)])
        self.turns = [number for number in turns if any(used[place] for place in self.units[number].places)]

    def reduce(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Reduce the gradients of a unit, if it lies whole together with those that come before and after."""
        ways, _ = self._ways(self.along)
        for place, g in zip(unit.places, self.as_reduced(unit, gs), strict=True):
            leaf, near, way = self.leaves[place], self.shards[place], ways[place]
            if way is not None:
                g = near.new_zeros(leaf.shape, dtype=reduced_in(leaf.dtype, self.manner, self.wide)) if g is None else g
                self._bucket.append((place, g, way))
                self._size += g.nbytes
        if unit.sharded or self._size >= self.manner.bucket:
            self.send()

    def as_reduced(self, unit: Unit, gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients of a unit in the dtypes that they are reduced in."""
        dtypes = [reduced_in(self.leaves[place].dtype, self.manner, self.wide) for place in unit.places]
        return [g if g is None or g.dtype is dtype else g.to(dtype) for g, dtype in zip(gs, dtypes, strict=True)]

    def drop(self) -> None:
        """Drop what has been added up, and what is kept for later."""
        self.used = [False] * len(self.leaves)
        self.sums = [None] * len(self.leaves)
        for unit in self.units:
            unit.kept = None

    def send(self) -> None:
        """Start to reduce what is in the bucket."""
        if self._bucket:
            places, xs, ways = map(list, zip(*self._bucket, strict=True))
            self._bucket, self._size = [], 0
            _, many = self._ways(self.along)
            self._under_way.append((places, go(xs, ways, self.site, ahead=self.manner.in_flight > 0), many))
            self.finish(self.manner.in_flight)

    def finish(self, but: int = 0) -> None:
        """Wait for reductions, the oldest first, until only so many are under way."""
        while len(self._under_way) > but:
            places, finish, many = self._under_way.pop(0)
            for place, result in zip(places, finish(), strict=True):
                known, leaf = self.sums[place], self.leaves[place]
                if result.dtype is not leaf.dtype:
                    result = result.to(torch.promote_types(result.dtype, leaf.dtype))
                result = result if many == 1 else result / many
                self.sums[place] = result if known is None else known + result


@lru_cache(maxsize=256)
def reduced_in(dtype: torch.dtype, manner: Manner, wide: bool) -> torch.dtype:
    """Return the dtype in which the gradients of a leaf are reduced."""
    if dtype.is_complex:
        return dtype
    used = manner.compute or dtype
    return manner.reduce or (torch.promote_types(used, torch.float32) if wide else used)
