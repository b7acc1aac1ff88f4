"""From full gradients to the shards of their sums: `AgreedReductions` decides the order, `Reducer` reduces.

              AgreedReductions                          Reducer
                  complete            its turn              full                finished
a unit's uses  ─────────────>  waiting  ─────────>  bucket  ──────>  in flight  ─────────>  sums
      └─ accumulated: of earlier slices

All devices reduce in one order and in one dtype, so that their buckets match. Gradients become
complete in an order that may depend on the data, and some never do where a branch skips them. So a
unit before its turn waits, one that is missing after the backward is reduced as zeros, and one
without a turn is reduced last.

    turns       head  blocks[1]  blocks[0]            agreed in the first step: device 0's order of use, reversed
    device 0    head  blocks[0]              ->       head  blocks[1] = 0  blocks[0]
    device 1    head  blocks[1]              ->       head  blocks[1]      blocks[0] = 0

The gradient of a sharded unit is sent immediately, to free its memory; gradients of replicated
units wait until a bucket is full. Stages need no agreement, since their schedule has the order:
`StageSums` gives their gradients to a `Reducer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.memory.kinds import claim, made_for, purpose
from fshard.memory.transfers import Link, Transfer, start
from fshard.mesh.layout.counting import DeviceRecorder, RecordedPhase
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.layout.packing import cast
from fshard.mesh.reshard.execute import StartedReshard, start_reshard
from fshard.mesh.spmd.moments import listeners, reach
from fshard.mesh.spmd.run import local_devices
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agreement import host_row, reduce_rows
from fshard.transforms.fsdp.plans import (
    Along,
    Gradients,
    Order,
    ParamPlan,
    ReductionPlans,
    UnitPlan,
)
from fshard.transforms.options import StepOptions

AccumulateInto = Callable[[UnitPlan, Gradients], None]
"""Takes a slice's gradients of a unit instead of reducing them."""


class PendingReduction(NamedTuple):
    """The reduction of a bucket.

    Args:
        indices: of its parameters.
        reshard: from gradients to shards of their sums, in progress.
        copies: number of devices that have the same samples.
    """

    indices: Sequence[int]
    reshard: StartedReshard
    copies: int


class SentGradients(NamedTuple):
    """Reduced gradients under way to the host.

    Args:
        indices: of their parameters.
        transfer: of the gradients.
        copies: number of devices that have the same samples.
    """

    indices: Sequence[int]
    transfer: Transfer
    copies: int


class Reducer:
    """Reduces the gradients of one device in one step: cast, in buckets, and added up.

    Args:
        leaves: the plans of parameters.
        device: that computes the gradients.
        options: of the step.
        site: the source line of the step.
        wide: True if sums of several slices are reduced in at least 32 bits.
        recorder: of the device, if the step is recorded.

    `used` is True for each parameter that this device has used; `sums` are the reduced gradients. A
    gradient whose layout is on the host is sent there when it is reduced, and added there.
    """

    def __init__(
        self,
        leaves: Sequence[ParamPlan],
        device: torch.device,
        options: StepOptions,
        site: Site,
        *,
        wide: bool,
        recorder: DeviceRecorder | None = None,
    ) -> None:
        self.leaves = leaves
        self.device = device
        self.options = options
        self.site = site
        self.wide = wide
        self.recorder = recorder
        self._along: Along = ()
        self.used = [False] * len(leaves)
        self.sums: list[Tensor | None] = [None] * len(leaves)
        self._plans: ReductionPlans = {}
        self._bucket: list[tuple[int, Tensor]] = []
        self._bucket_bytes = 0
        self._in_flight: list[PendingReduction] = []
        self._sent: dict[int, SentGradients] = {}  # by each of their indices

        # A reduction is waited for when the next bucket is packed. Gradients for the host are
        # waited for one bucket earlier, so that their copies to the host begin, and their memory is
        # freed, before that one is packed.
        memories = [leaf.gradient.memory for leaf in leaves]
        has_host_gradients = "host" in memories
        self._packed_ahead = 0 if has_host_gradients else max(options.in_flight - 1, 0)

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes that the gradients of parameters are reduced in."""
        return [self.options.reduced_in(leaf.dtype, wide=self.wide) for leaf in self.leaves]

    def begin(self, plans: ReductionPlans, along: Along) -> None:
        """Begin a backward, whose gradients are summed by these plans.

        Over the axes of the batch and `along`.
        """
        # A backward that failed may have left gradients, which no other device sends now.
        self._clear()
        self._plans = plans
        self._along = along

    # -- until they are sent ----------------------------------------

    def record(
        self, indices: Sequence[int], gs: Sequence[Tensor | None], *, is_idle: bool
    ) -> Gradients:
        """Record parameters as used; return their gradients, dense.

        They are None if the slice is idle.
        """
        gradients = [*gs]
        for position, index in enumerate(indices):
            g = gradients[position]
            if g is None:
                continue
            self.used[index] = True
            if is_idle:
                gradients[position] = None  # instead of times 0: it may be infinite
            elif g.is_sparse:
                gradients[position] = g.to_dense()
        if self.recorder is not None:
            self._show("gradient", indices, gradients)
        return gradients

    def _show(
        self, phase: RecordedPhase, indices: Sequence[int], gs: Sequence[Tensor | None]
    ) -> None:
        """Show gradients to the recorder."""
        assert self.recorder is not None
        for index, g in zip(indices, gs, strict=True):
            if g is not None:
                self.recorder.record(phase, self.leaves[index].path, g)

    def cast(self, indices: Sequence[int], gs: Sequence[Tensor | None]) -> Gradients:
        """Cast gradients to the dtypes that they are reduced in."""
        return cast(gs, [self.dtypes[index] for index in indices])

    @made_for("gradients")
    def put(self, indices: Sequence[int], gs: Sequence[Tensor | None]) -> None:
        """Put the gradients of trained parameters into the bucket.

        Zeros for those that this device has not.
        """
        dtypes = [self.dtypes[index] for index in indices]
        for index, g in zip(indices, cast(gs, dtypes), strict=True):
            leaf = self.leaves[index]
            if not leaf.trained:
                continue
            if g is None:
                g = torch.zeros(leaf.shape, dtype=self.dtypes[index], device=self.device)
            self._bucket.append((index, g))
            self._bucket_bytes += g.nbytes
        # Those that autograd has made were counted as activations until now.
        claim([g for _, g in self._bucket], "gradients")

    @property
    def is_full(self) -> bool:
        """True if the bucket has its size."""
        return self._bucket_bytes >= self.options.bucket

    def _clear(self) -> None:
        """Empty the bucket."""
        self._bucket = []
        self._bucket_bytes = 0

    # -- until they are summed ----------------------------------------

    def send(self) -> None:
        """Start the reduction of the bucket, after the next round of those in flight."""
        if not self._bucket:
            return
        if listeners:
            reach("reduce")
        indices, xs = zip(*self._bucket, strict=True)
        self._clear()
        if self.recorder is not None:
            self._show("sum of gradients", indices, xs)
        self._advance()
        plans = [self._plans[index] for index in indices]
        with purpose("gradients"):
            reshard = start_reshard(xs, plans, self.site, ahead=self.options.in_flight > 0)  # (8)
        shape = self.leaves[0].gradient.mesh.shape
        copies = prod([shape[axis] for axis in self._along])
        self._in_flight.append(PendingReduction(indices, reshard, copies))

    def _advance(self) -> None:
        """Start the next round of all reductions in flight: see Note [Rounds of steps].

        Wait for those that have none, the oldest first, until few enough are packed.
        """
        in_flight = self._in_flight
        self._in_flight = []
        while in_flight:
            is_due = len(in_flight) > self._packed_ahead
            pending = in_flight.pop(0)
            with purpose("gradients"):
                has_started = pending.reshard.start_round()
            if has_started or not is_due:
                self._in_flight.append(pending)  # of the later round only a shard is in memory
            else:
                with purpose("gradients"):
                    self._receive(pending)

    def finish(self) -> None:
        """Wait for all reductions in flight, the oldest first."""
        while self._in_flight:
            pending = self._in_flight.pop(0)
            with purpose("gradients"):
                self._receive(pending)

    def _receive(self, pending: PendingReduction) -> None:
        """Wait for a reduction; add its gradients, or send them to the host to be added there."""
        indices: list[int] = []
        gs: list[Tensor] = []
        of_host: dict[int, Tensor] = {}
        reduced = pending.reshard.wait()
        if self.recorder is not None:
            self._show("reduced gradient", pending.indices, reduced)
        for index, g in zip(pending.indices, reduced, strict=True):
            if self.leaves[index].gradient.memory == "host":
                of_host[index] = g
            else:
                indices.append(index)
                gs.append(g)
        self._add(indices, gs, pending.copies)
        if of_host:
            self._send_to_host(of_host, pending.copies)

    def _add(self, indices: Sequence[int], gs: Sequence[Tensor], copies: int) -> None:
        """Add reduced gradients, each in at least the dtype of its parameter."""
        dtypes: list[torch.dtype] = []
        for index, g in zip(indices, gs, strict=True):
            dtype = self.leaves[index].dtype
            is_cast_by_addition = self.sums[index] is not None and copies == 1
            if g.dtype is dtype or is_cast_by_addition:
                dtypes.append(g.dtype)
            else:
                dtypes.append(torch.promote_types(g.dtype, dtype))

        for index, g in zip(indices, cast(gs, dtypes), strict=True):
            if copies != 1:
                g = g / copies  # so many devices have the same samples, which count once
            total = self.sums[index]
            self.sums[index] = g if total is None else total + g

    def _send_to_host(self, gradients: dict[int, Tensor], copies: int) -> None:
        """Start to copy reduced gradients, by the indices of parameters, to the host.

        Those before, which have arrived by now, are added there.
        """
        indices = [*gradients]
        for index in indices:
            self._receive_on_host(index)
        mesh = self.leaves[indices[0]].gradient.mesh
        buffers: list[Tensor] = []
        for g in gradients.values():
            buffers.append(empty_in("host", g.shape, g.dtype, mesh.device_type))
        number = mesh.devices[local_devices(mesh)[0]]
        link = Link("device", "host", mesh.runtime, number)
        transfer = start([*gradients.values()], buffers, link)
        self._sent |= dict.fromkeys(indices, SentGradients(indices, transfer, copies))

    def _receive_on_host(self, index: int) -> None:
        """Wait for a gradient that is under way to the host, if there is one.

        It is added, and so are those that were sent with it.
        """
        sent = self._sent.get(index)
        if sent is None:
            return
        for sent_index in sent.indices:
            del self._sent[sent_index]
        self._add(sent.indices, sent.transfer.wait(), sent.copies)

    # -- at the end of the step ----------------------------------------

    @made_for("gradients")
    def gradients(self, used: Sequence[float], divisor: float = 1.0) -> Gradients:
        """Return the sums divided by a number, in the dtypes of the parameters.

        None for those that no device used.
        """
        # The last ones first: copies end in the order of their starts, so that the host waits once.
        for index in reversed([*self._sent]):
            self._receive_on_host(index)

        is_divided = divisor != 1.0
        gradients = [*self.sums]
        for index, leaf in enumerate(self.leaves):
            g = gradients[index]
            if not used[index]:
                g = None
            if g is not None and is_divided:
                g = g / divisor
            if g is not None and g.dtype is not leaf.dtype:
                g = g.to(leaf.dtype)
            gradients[index] = g
        return gradients

    def drop(self) -> None:
        """Drop all gradients of the step, those in flight too."""
        self.finish()
        self.used = [False] * len(self.leaves)
        self.sums = [None] * len(self.leaves)
        self._sent = {}


class AgreedReductions:
    """The order in which the units of a full model are reduced, on which all devices agree.

    Args:
        units: their plans.
        reducer: takes a unit's gradients when it is the unit's turn.
        plans: returns those that sum gradients over the batch's axes and further ones.
        order: of an earlier step.

    `accumulated` are the gradients of earlier slices, by the number of their unit, which are not
    reduced yet.
    """

    def __init__(
        self,
        units: Sequence[UnitPlan],
        reducer: Reducer,
        plans: Callable[[Along], ReductionPlans],
        order: Order,
    ) -> None:
        self.units = units
        self.accumulated: list[Gradients | None] = [None] * len(units)
        self.sequence = [*order.turns]
        self.along = order.along
        self._reducer = reducer
        self._plans = plans
        self._accumulate_into: AccumulateInto | None = None
        self._is_idle = False
        self._turn = 0  # the index in the sequence of the unit that is reduced next
        self._waiting: dict[int, Gradients] = {}

    # -- a backward ----------------------------------------

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
        self._accumulate_into = accumulate_into
        self._is_idle = is_idle
        self._turn = 0
        self._waiting = {}
        self._reducer.begin(self._plans(along), along)
        if along != self.along:
            self.along = along
            self.sequence = []  # there are more devices to agree
        if not self.sequence and any(unit.is_trained for unit in self.units):
            self.sequence = self._agree_on_sequence(used, group)

    # Note [Devices agree on the order of reductions]
    # A device's backward reaches units in its own order, and with branches other units than that of
    # its neighbour. But the n-th reduction of all devices must be of the same parameters:
    # collectives are matched by their order, and zeros are needed of a device that has not used a
    # unit. So before the first backward one small sum gives every device the order of the first
    # device, and which units any other uses. It is kept from step to step, so it costs nothing
    # later; what has no turn, as a unit that is first used in a later step, is reduced at the end
    # of the step, and has one in the next.
    def _agree_on_sequence(self, used: Iterable[int], group: Group | None) -> list[int]:
        """Return the order of all devices: see Note [Devices agree on the order of reductions].

        It is that of the first device, reversed, then units that only others have used.
        """
        is_first_device = group is None or not group.index
        count = len(self.units)
        positions = {number: 1.0 + position for position, number in enumerate(used)}
        row = [0.0] * (2 * count)
        for number, position in positions.items():
            if is_first_device:
                row[number] = position
            row[count + number] = 1.0

        (sums,) = reduce_rows((host_row(row, self._reducer.device),), group, self._reducer.site)
        if sums.is_meta:  # on an abstract mesh all devices do what this one does
            return [*reversed(positions)]
        first_positions, users = sums.view(2, count).tolist()
        numbers = [number for number in range(count) if users[number]]
        return sorted(numbers, key=lambda number: -first_positions[number])

    def receive(self, unit: UnitPlan, gs: Sequence[Tensor | None], *, is_last_use: bool) -> None:
        """Receive the cotangents of one use of a unit.

        After that of the last use, reduce all units whose turn has come.
        """
        gs = self._reducer.record(unit.indices, gs, is_idle=self._is_idle)
        if self._accumulate_into is not None:
            self._accumulate_into(unit, gs)
        elif not is_last_use or unit.number in self._waiting:
            # It was resharded and unsharded again in the forward, so autograd has several nodes for
            # it.
            self.accumulate(unit, gs)
        else:
            self._waiting[unit.number] = self._take_accumulated(unit, gs)
            self._reduce_due()

    def receive_separately(self, unit: UnitPlan, gs: Sequence[Tensor | None]) -> None:
        """Receive cotangents of lazy parameters, or of a single use.

        They are reduced after the backward.
        """
        accumulate = self._accumulate_into or self.accumulate
        accumulate(unit, self._reducer.record(unit.indices, gs, is_idle=self._is_idle))

    def _reduce_due(self, *, is_end: bool = False) -> None:
        """Reduce the units whose turn has come.

        At the end of a backward, those that it has not reached too, as zeros.
        """
        while self._turn < len(self.sequence):
            number = self.sequence[self._turn]
            if number not in self._waiting and not is_end:
                return
            self._turn += 1
            unit = self.units[number]
            gs = self._waiting.pop(number, [None] * len(unit.indices))
            self.reduce(unit, self._take_accumulated(unit, gs))

    def reduce(self, unit: UnitPlan, gs: Sequence[Tensor | None]) -> None:
        """Put the gradients of a unit into the bucket.

        Send it if it is full or the unit is sharded.
        """
        self._reducer.put(unit.indices, gs)
        if unit.is_sharded or self._reducer.is_full:
            self._reducer.send()

    def end(self) -> None:
        """Reduce all units that are still due.

        Those without a turn are accumulated until the end of the step.
        """
        self._reduce_due(is_end=True)
        self._reducer.send()
        for number, gs in self._waiting.items():
            self.accumulate(self.units[number], gs)
        self._waiting.clear()

    # -- several backwards ----------------------------------------

    def accumulate(self, unit: UnitPlan, gs: Gradients) -> None:
        """Add gradients to those of earlier slices, in at least 32 bits.

        They are reduced together.
        """
        self.accumulated[unit.number] = _add_wide(self.accumulated[unit.number], gs)

    def _take_accumulated(self, unit: UnitPlan, gs: Gradients) -> Gradients:
        """Return gradients plus the accumulated ones, and reset these."""
        sums = self.accumulated[unit.number]
        if sums is None:
            return gs
        self.accumulated[unit.number] = None
        return _add_wide(sums, gs)

    # -- the end of the step ----------------------------------------

    def rest(self, accumulated: Sequence[float], used: Sequence[float]) -> None:
        """Reduce the units that any device has accumulated; set the order of the next step."""
        units = [unit for unit, devices in zip(self.units, accumulated, strict=True) if devices]
        for unit in units:
            gs: Gradients = [None] * len(unit.indices)
            self.reduce(unit, self._take_accumulated(unit, gs))
        self._reducer.send()
        self._reducer.finish()

        numbers = dict.fromkeys([*self.sequence, *[unit.number for unit in units]])
        self.sequence = []
        for number in numbers:
            if any(used[index] for index in self.units[number].indices):
                self.sequence.append(number)

    def drop(self) -> None:
        """Drop all gradients of the step."""
        self._reducer.drop()
        self.accumulated = [None] * len(self.units)


def _add_wide(sums: Gradients | None, gs: Gradients) -> Gradients:
    """Add gradients to sums in at least 32 bits: each addition in 16 bits would round."""
    result: Gradients = [None] * len(gs) if sums is None else [*sums]
    for position, g in enumerate(gs):
        if g is not None:
            total = result[position]
            result[position] = g if total is None else total + g  # the addition casts
    return cast(result, [_wide_dtype(g) for g in result])


def _wide_dtype(g: Tensor | None) -> torch.dtype:
    """Return the dtype of a sum that begins with a gradient."""
    if g is None or g.dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    return g.dtype
