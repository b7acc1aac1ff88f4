"""From full gradients to the shards of their sums: `GradientSums`, and `Reductions` of a full model's units.

                  complete            its turn (agreed)          full                finished
a unit's uses  ─────────────>  waiting  ─────────────>  bucket  ──────>  in flight  ─────────>  sums
      └─ accumulated: of earlier slices

All devices reduce in one order and in one dtype, so that their buckets match. Gradients become complete in an order that may
depend on the data, and some never do where a branch skips them. So a unit before its turn waits, one that is missing after
the backward is reduced as zeros, and one without a turn is reduced last.

    turns       head  blocks[1]  blocks[0]            agreed in the first step: device 0's order of use, reversed
    device 0    head  blocks[0]              ->       head  blocks[1] = 0  blocks[0]
    device 1    head  blocks[1]              ->       head  blocks[1]      blocks[0] = 0

The gradient of a sharded unit is sent immediately, to free its memory; gradients of replicated units wait until a bucket is
full. Of stages a schedule has the order, so they share the right half alone, from the bucket on. A gradient whose layout
is on the host is sent there when it is reduced, and added there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.memory.kinds import claim, made_for, purpose
from fshard.memory.transfers import Link, Transfer, start
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.reshard.execute import start_reshard
from fshard.mesh.spmd.run import local_devices
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agreement import host_row, reduce_rows
from fshard.transforms.fsdp.graph_checks import raise_foreign_backward
from fshard.transforms.fsdp.plans import Along, Gradients, ParamPlan, ReductionPlans
from fshard.transforms.fsdp.units import LazyUnit, Order
from fshard.transforms.options import StepOptions

AccumulateInto = Callable[[LazyUnit, Gradients], None]
"""Takes a slice's gradients of a unit instead of reducing them."""


class PendingReduction(NamedTuple):
    """The reduction of a bucket: the indices of its parameters, the function that waits for it, and how many devices have
    the same samples.
    """

    indices: Sequence[int]
    wait: Callable[[], list[Tensor]]
    copies: int


class GradientSums:
    """The gradients of one device in one step: cast, reduced in buckets, and summed.

    Args:
        leaves: the plans of parameters.
        device: of the gradients.
        options: of units.
        reduction_plans: those that sum gradients: reduce-scatter where they are sharded, all-reduce elsewhere.
        site: the source line of the step.
        wide: True if sums of several slices are reduced in at least 32 bits.

    `used` is True for each parameter that this device has used; `sums` are the reduced gradients.
    """

    def __init__(
        self,
        leaves: Sequence[ParamPlan],
        device: torch.device,
        options: StepOptions,
        reduction_plans: ReductionPlans,
        site: Site,
        *,
        wide: bool,
        along: Along = (),
    ) -> None:
        self.leaves, self.device, self.options, self.wide, self.along = (
            leaves,
            device,
            options,
            wide,
            along,
        )
        self._reduction_plans, self.site = reduction_plans, site
        self.used = [False] * len(leaves)
        self.sums: list[Tensor | None] = [None] * len(leaves)
        self._bucket: list[tuple[int, Tensor]] = []
        self._size = 0  # of the bucket, in bytes
        self._in_flight: list[PendingReduction] = []
        # Those in flight when the next one is packed: none, if gradients are then copied to the host.
        to_host = any(leaf.gradient.memory == "host" for leaf in leaves)
        self._packed_ahead = 0 if to_host else max(options.in_flight - 1, 0)
        self._sent: dict[int, tuple[Transfer, int]] = {}  # gradients under way to the host

    def record(
        self, indices: Sequence[int], gs: Sequence[Tensor | None], *, is_idle: bool
    ) -> Gradients:
        """Record parameters as used; return their gradients, dense, or None if the slice is idle."""
        for index, g in zip(indices, gs, strict=True):
            self.used[index] |= g is not None
        return [
            None if is_idle else g.to_dense() if g is not None and g.is_sparse else g for g in gs
        ]

    def reduced_in(self, index: int) -> torch.dtype:
        """Return the dtype that the gradient of a parameter is reduced in."""
        return self.options.reduced_in(self.leaves[index].dtype, wide=self.wide)

    def cast(self, indices: Sequence[int], gs: Sequence[Tensor | None]) -> Gradients:
        """Cast gradients to the dtypes that they are reduced in."""
        dtypes = map(self.reduced_in, indices)
        return [
            g if g is None or g.dtype is dtype else g.to(dtype)
            for g, dtype in zip(gs, dtypes, strict=True)
        ]

    @made_for("gradients")
    def put(self, indices: Sequence[int], gs: Sequence[Tensor | None]) -> None:
        """Put the gradients of trained parameters into the bucket, zeros for those that this device has not."""
        for index, g in zip(indices, self.cast(indices, gs), strict=True):
            leaf = self.leaves[index]
            if leaf.trained:
                g = (
                    torch.zeros(leaf.shape, dtype=self.reduced_in(index), device=self.device)
                    if g is None
                    else g
                )
                self._bucket.append((index, g))
                self._size += g.nbytes
        claim([g for _, g in self._bucket], "gradients")

    @property
    def is_full(self) -> bool:
        """True if the bucket has its size."""
        return self._size >= self.options.bucket

    def clear(self) -> None:
        """Empty the bucket."""
        self._bucket, self._size = [], 0

    def send(self) -> None:
        """Start the reduction of the bucket."""
        if not self._bucket:
            return
        indices, xs = zip(*self._bucket, strict=True)
        self.clear()
        self.finish(self._packed_ahead)
        plans = self._reduction_plans(self.along)
        bucket_plans = [plan for index in indices if (plan := plans[index])]
        with purpose("gradients"):
            wait = start_reshard(
                xs, bucket_plans, self.site, ahead=self.options.in_flight > 0
            )  # (8)
        shape = self.leaves[0].gradient.mesh.shape
        self._in_flight.append(
            PendingReduction(indices, wait, prod([shape[axis] for axis in self.along]))
        )

    def finish(self, in_flight: int = 0) -> None:
        """Wait for reductions, the oldest first, until at most `in_flight` are left."""
        while len(self._in_flight) > in_flight:
            pending = self._in_flight.pop(0)
            with purpose("gradients"):
                for index, g in zip(pending.indices, pending.wait(), strict=True):
                    add = (
                        self._send_to_host
                        if self.leaves[index].gradient.memory == "host"
                        else self._add
                    )
                    add(index, g, pending.copies)

    def _add(self, index: int, g: Tensor, copies: int) -> None:
        total, leaf = self.sums[index], self.leaves[index]
        g = g if g.dtype is leaf.dtype else g.to(torch.promote_types(g.dtype, leaf.dtype))
        g = g if copies == 1 else g / copies
        self.sums[index] = g if total is None else total + g

    def _send_to_host(self, index: int, g: Tensor, copies: int) -> None:
        """Start to copy a reduced gradient to the host; the one before, which has arrived by now, is added there."""
        self._receive_on_host(index)
        mesh = self.leaves[index].gradient.mesh
        buffer = empty_in("host", g.shape, g.dtype, mesh.device_type)
        link = Link("device", "host", mesh.runtime, local_devices(mesh)[0])
        self._sent[index] = start(g, buffer, link), copies

    def _receive_on_host(self, index: int) -> None:
        if index in self._sent:
            transfer, copies = self._sent.pop(index)
            self._add(index, transfer.wait(), copies)

    @made_for("gradients")
    def gradients(self, used: Sequence[float], divisor: float | Tensor = 1.0) -> Gradients:
        """Return the sums divided by a number, in the dtypes of the parameters; None for those that no device used."""
        for index in [*self._sent]:
            self._receive_on_host(index)
        sums = [g if times else None for g, times in zip(self.sums, used, strict=True)]
        if isinstance(divisor, Tensor) or divisor != 1.0:
            sums = [g if g is None else g / divisor for g in sums]
        return [
            g if g is None or g.dtype is leaf.dtype else g.to(leaf.dtype)
            for g, leaf in zip(sums, self.leaves, strict=True)
        ]


class Reductions(GradientSums):
    """The gradients of the units of one device in one step, reduced in an `order` that is cached from an earlier one."""

    def __init__(
        self,
        units: Sequence[LazyUnit],
        leaves: Sequence[ParamPlan],
        device: torch.device,
        options: StepOptions,
        reduction_plans: ReductionPlans,
        *,
        order: Order,
        wide: bool,
        site: Site,
    ) -> None:
        super().__init__(
            leaves, device, options, reduction_plans, site, wide=wide, along=order.along
        )
        self.units, self.sequence = units, [*order.turns]
        self._accumulate_into: AccumulateInto | None = None
        self._position, self._is_idle = 0, False
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
        self._accumulate_into, self._is_idle, self._position = accumulate_into, is_idle, 0
        self._waiting = {}
        self.clear()  # of what a backward that failed has left
        if along != self.along:
            self.sequence, self.along = [], along  # there are more devices to agree
        if not self.sequence and any(leaf.trained for leaf in self.leaves):
            self.sequence = self._agree_on_sequence(used, group)

    def _agree_on_sequence(self, used: Iterable[int], group: Group | None) -> list[int]:
        """Return the order of all devices: the first one's, reversed, then units that only others have used."""
        is_first, count = group is None or not group.index, len(self.units)
        positions = {number: 1.0 + position for position, number in enumerate(used)}
        row = [is_first * positions.get(number, 0.0) for number in range(count)]
        row += [float(number in positions) for number in range(count)]
        (sums,) = reduce_rows((host_row(row, self.device),), group, self.site)
        if sums.is_meta:
            return [*used][::-1]
        firsts, users = sums.view(2, count).tolist()
        return sorted(
            (number for number in range(count) if users[number]), key=lambda number: -firsts[number]
        )

    def receive(self, unit: LazyUnit, gs: Sequence[Tensor | None]) -> None:
        """Receive the cotangents of one use of a unit; after that of the last use, reduce all units whose turn has come."""
        gs = self._record_use(unit, gs)
        if self._accumulate_into is not None:
            self._accumulate_into(unit, gs)
        elif (
            unit.pending_backwards or unit.number in self._waiting
        ):  # it was resharded and unsharded again
            unit.accumulate(gs)
        else:
            self._waiting[unit.number] = unit.take_accumulated(gs)
            self._reduce_due()

    def receive_separately(self, unit: LazyUnit, gs: Sequence[Tensor | None]) -> None:
        """Receive cotangents of lazy parameters, or of a single use; they are reduced after the backward."""
        if any(g is not None for g in gs):
            (self._accumulate_into or LazyUnit.accumulate)(unit, self._record_use(unit, gs))

    def _record_use(self, unit: LazyUnit, gs: Sequence[Tensor | None]) -> Gradients:
        """Record the parameters as used, in a backward that fshard has started."""
        if unit.runtime.state != "backward":
            raise_foreign_backward()
        return self.record(unit.indices, gs, is_idle=self._is_idle)

    def _reduce_due(self, *, is_end: bool = False) -> None:
        """Reduce the units whose turn has come; at the end of a backward, those that it has not reached too, as zeros."""
        while self._position < len(self.sequence) and (
            is_end or self.sequence[self._position] in self._waiting
        ):
            unit = self.units[self.sequence[self._position]]
            self._position += 1
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
        units = [unit for unit, times in zip(self.units, accumulated, strict=True) if times]
        for unit in units:
            self.reduce(unit, unit.take_accumulated([None] * len(unit.indices)))
        self.send()
        self.finish()
        numbers = dict.fromkeys([*self.sequence, *(unit.number for unit in units)])
        self.sequence = [
            number for number in numbers if any(used[index] for index in self.units[number].indices)
        ]

    def reduce(self, unit: LazyUnit, gs: Sequence[Tensor | None]) -> None:
        """Put the gradients of a unit into the bucket, and send it if it is full or the unit is sharded."""
        self.put(unit.indices, gs)
        if unit.is_sharded or self.is_full:
            self.send()

    def drop(self) -> None:
        """Drop all gradients of the step, those in flight too."""
        self.finish()
        self.used = [False] * len(self.leaves)
        self.sums, self._sent = [None] * len(self.leaves), {}
        for unit in self.units:
            unit.accumulated = None
