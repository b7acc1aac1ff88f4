"""Execute reshards on one device: run the steps of many leaves, with few collectives.

`plan` gives the steps of each leaf. Leaves that take the same step, in the same dtype, share one
collective. Here are gradients on their way to P.flat("data"), with the collectives in order:

    leaf            layout before                     step 0                  step 1
    weight  f32     P(unreduced="data")               1 flat_scatter "data"
    bias    f32     P(unreduced="data")               1 flat_scatter "data"
    norm    f32     P(unreduced=("data", "model"))    1 flat_scatter "data"   3 psum "model"
    router  bf16    P(unreduced="data")               2 flat_scatter "data"

A shared step packs shards into tensors that are equally long on all devices, runs its move on them,
and unpacks the results. Here a leaf of 7 elements is gathered from 4 devices:

    shards    [0 1] [2 3] [4 5] [6]
    pack      [0 1] [2 3] [4 5] [6 .]
    gather    [0 1 2 3 4 5 6 .]           on every device
    unpack    [0 1 2 3 4 5 6]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.mesh.collectives.autograd import Bound, apply, recorded, transformed
from fshard.mesh.collectives.ledger import active
from fshard.mesh.collectives.moves import Alone, Move
from fshard.mesh.layout import Layout
from fshard.mesh.layout.arithmetic import chunk, flat_range
from fshard.mesh.layout.counting import LedgerRow
from fshard.mesh.layout.packing import cast, copy_into, padded
from fshard.mesh.reshard.exchange import DirectExchange, DirectSlice, LeafExchange
from fshard.mesh.reshard.plan import Step, plan
from fshard.mesh.spmd.scope import Group, Pending, Scope, require
from fshard.source import Site

# An exchange holds a packed and a received row beside the shards. 16 MiB is little beside a model
# that must be sharded, and enough for bandwidth, not latency, to determine the exchange's time.
AT_ONCE = 1 << 24
"""Bytes per device of one direct exchange, about: see Note [Rounds of direct exchanges]."""

_CALLER = "fs.reshard"
"""The function that errors of a scope name."""


@dataclass(frozen=True, eq=False, slots=True)
class ReshardPlan:
    """The steps of one leaf and its global shape.

    Hashed by identity: every reshard looks up its plans in the cache of `_rounds`, and
    hashing their steps takes ten times as long. `plan_reshard` is cached, so equal plans are in
    general one object.
    """

    steps: tuple[Step, ...]
    shape: tuple[int, ...]


@lru_cache(maxsize=4096)
def plan_reshard(before: Layout, after: Layout, shape: tuple[int, ...]) -> ReshardPlan:
    """Return the plan from one layout to another on the same mesh."""
    steps = plan(before.spec.shapeless, after.spec.shapeless, shape, after.mesh.axes)
    return ReshardPlan(steps, shape)


# Note [Order of collectives]
# A collective is matched with those of other devices by its position in their order alone. So all
# devices take the same shared steps in the same order, which follows from plans, dtypes and
# AT_ONCE. It must not depend on what may differ between devices: coordinates, memory, recorded
# gradients. A device outside the coordinates `at` of a step only skips it.


def start_reshard(
    shards: Sequence[Tensor],
    plans: Sequence[ReshardPlan],
    site: Site,
    *,
    ahead: bool = False,
    dtypes: Sequence[torch.dtype] | None = None,
) -> StartedReshard:
    """Start the plans of all leaves; `wait` of the result returns the new shards.

    Args:
        shards: the shard of each leaf on this device.
        plans: one for each leaf.
        site: the user's line, for errors and the ledger.
        ahead: only start the first collectives, so that the caller computes while they run.
            Autograd does not record these.
        dtypes: of the new shards, with `ahead`; by default those of the old ones, which are cast
            before they are sent.
    """
    reshard = StartedReshard(shards, plans, site, ahead=ahead, dtypes=dtypes)
    reshard.start_round()
    return reshard


# Note [Rounds of steps]
# Round r has step r of every leaf. It needs the results of the round before, so on no runtime can
# it start before these are waited for. Where that happens is left to the caller, who computes in
# between: each round has its own computation to hide behind. A gradient along "data" and its copies
# along "replicas", as `Reducer` reduces it during the backward:
#
#     backward of    block 3            block 2              block 1              block 0
#     block 3        reduce-scatter ->  all-reduce ->        wait
#     block 2                           reduce-scatter ->    all-reduce ->        wait
#
# All devices must start their rounds in the same order: see Note [Order of collectives]. So a round
# starts at a place in the program, and never when a device happens to see that the last one ended.
class StartedReshard:
    """The plans of some leaves on one device, in progress; `wait` returns the new shards."""

    def __init__(
        self,
        shards: Sequence[Tensor],
        plans: Sequence[ReshardPlan],
        site: Site,
        *,
        ahead: bool,
        dtypes: Sequence[torch.dtype] | None,
    ) -> None:
        self._casts = dtypes is not None
        if dtypes is None:
            dtypes = [shard.dtype for shard in shards]
        self._dtypes = tuple(dtypes)
        self._rounds = deque(_rounds(tuple(plans), self._dtypes, AT_ONCE))
        self._scope = require(_CALLER)
        self._site = site
        self._ahead = ahead
        self._started: list[tuple[SharedStep, Pending]] = []
        # The shard of each leaf before its next step. A shard is popped when that step begins: a
        # gradient would live beside its packed copy until the collective ends.
        self._current = dict(enumerate(shards))
        if self._casts:
            # Others are cast where their first step packs them: one copy of each shard, not two.
            still = [index for index, leaf_plan in enumerate(plans) if not leaf_plan.steps]
            copies = cast([shards[i] for i in still], [self._dtypes[i] for i in still])
            self._current.update(zip(still, copies, strict=True))

    def start_round(self) -> bool:
        """Wait for the collectives of this round, and start those of the next, if there is one.

        Rounds without a collective to start are run. Return True if a collective was started.
        """
        while self._rounds:
            if self._started:
                self._finish_round()
            for step in self._rounds.popleft():
                old_shards = [self._current.pop(index) for index in step.indices]
                dtype = self._dtypes[step.indices[0]]  # all leaves of a step have one
                if self._ahead and step.communicates and step.includes(self._scope):
                    pending = step.start(old_shards, self._scope, self._site, dtype)
                    self._started.append((step, pending))
                else:
                    if self._casts:
                        old_shards = cast(old_shards, [dtype] * len(old_shards))
                    new_shards = step.run(old_shards, self._scope, self._site)
                    self._current.update(zip(step.indices, new_shards, strict=True))
            if self._started:
                return True
        return False

    def _finish_round(self, into: Sequence[Tensor] | None = None) -> None:
        for step, pending in self._started:
            targets = None if into is None else [into[index] for index in step.indices]
            new_shards = step.unpack(pending.wait(targets), self._scope)
            self._current.update(zip(step.indices, new_shards, strict=True))
        self._started = []

    def wait(self, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run the rounds that are left; return the new shards.

        With `into` they are also in these tensors: contiguous ones, of their shapes and dtypes.
        """
        while self._rounds:
            self.start_round()
        if self._started:
            self._finish_round(into)
        # By index, since the dict is in the order of completion. Popped: the caller may still hold
        # this object, with which the shards would live as long.
        results = [self._current.pop(index) for index in range(len(self._current))]
        if into is not None:
            copy_into(into, results)
        return results


class SharedStep:
    """Step `number` of several plans, which their leaves take together.

    The steps differ at most in the spec after them and in the tensors of a direct exchange: see
    `_group_leaves`.
    """

    def __init__(self, indices: list[int], plans: list[ReshardPlan], number: int) -> None:
        self.indices = indices
        self.steps = [leaf_plan.steps[number] for leaf_plan in plans]
        self.shapes = [leaf_plan.shape for leaf_plan in plans]

        first = self.steps[0]
        self.kind = first.kind
        self.axes = first.axes
        self.at = first.at
        self.move = _shared_move(self.steps)
        self.communicates = self.move is not None and not isinstance(self.move, Alone)
        # The slices that are worth a view: `pack` would copy the shard. Take, of dims, does not.
        self.is_slice = self.kind == "flat_slice" or isinstance(self.move, DirectSlice)

        sharded_axes: dict[str, None] = {}  # a set in order
        for step in self.steps:
            sharded_axes.update(dict.fromkeys(step.after.sharded_axes))
        self._sharded_axes = tuple(sharded_axes)
        self._local_shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def includes(self, scope: Scope) -> bool:
        """Return True if the device of `scope` takes part in the step."""
        return all(scope.group(axes, _CALLER).index == index for axes, index in self.at)

    def run(self, shards: list[Tensor], scope: Scope, site: Site) -> list[Tensor]:
        """Take the step with these shards; return the new shards."""
        if not self.includes(scope):
            # The new shards are empty, like the old ones.
            self._record_for_participant(shards, scope, site)
            return self._without_padding(shards, scope)
        if self._is_view(shards):
            return self._reshape_or_slice(shards, scope)
        # Autograd records the move, if the shards need a gradient.
        # What is packed gets no name: it would live until the results are unpacked.
        dtype = shards[0].dtype
        is_recorded = _is_differentiated(shards)
        results = apply(
            self._bound_move(scope, site), self._pack(shards, scope, dtype, is_recorded=is_recorded)
        )
        return self.unpack(results, scope)

    def _is_view(self, shards: list[Tensor]) -> bool:
        """Return True if views of these shards will do: for a reshape, and for most slices.

        A slice that is differentiated must run its move, whose transpose is an all-gather: a device
        has the cotangent of its own shard alone. For a view torch would fill the rest with zeros.
        """
        if self.move is None:
            return True
        return self.is_slice and not _is_differentiated(shards)

    def _reshape_or_slice(self, shards: list[Tensor], scope: Scope) -> list[Tensor]:
        """Return the new shards as views of the old ones."""
        if self.is_slice:
            group = scope.group(self.axes, _CALLER)
            shards = [self._slice(shard, group) for shard in shards]
        return self._without_padding(shards, scope)

    def _slice(self, shard: Tensor, group: Group) -> Tensor:
        if isinstance(self.move, DirectSlice):
            return self.move.new_shard(shard, group.index)
        start, stop = flat_range(shard.numel(), group.size, group.index)
        return shard.reshape(-1)[start:stop]

    def start(self, shards: list[Tensor], scope: Scope, site: Site, dtype: torch.dtype) -> Pending:
        """Start the collective on these shards, cast to a dtype; autograd does not record it."""
        # `_is_differentiated` would fail here: a parameter is unsharded below autograd, where torch
        # cannot look for the tangents of a loss in forward mode.
        return self._bound_move(scope, site).start(
            self._pack(shards, scope, dtype, is_recorded=False), dtype
        )

    def _bound_move(self, scope: Scope, site: Site) -> Bound:
        assert self.move is not None
        return Bound(self.move, scope.group(self.axes, _CALLER), site)

    def _pack(
        self, shards: Sequence[Tensor], scope: Scope, dtype: torch.dtype, *, is_recorded: bool
    ) -> tuple[Tensor, ...]:
        """Return the input of the move: tensors that are equally long on all devices.

        Those of another dtype than this one are cast by the move.
        """
        if isinstance(self.move, DirectExchange):
            return (self.move.join(cast(shards, [dtype] * len(shards))),)
        if isinstance(self.move, DirectSlice):
            exchange = self.move.exchange
            return tuple([exchange.join([shard]) for shard in shards])

        # Of n flat shards the last ones may be shorter; all are padded to the first, a chunk.
        n = scope.group(self.axes, _CALLER).size
        if self.kind in ("flat_slice", "flat_scatter"):
            lengths = [n * chunk(shard.numel(), n) for shard in shards]
        elif self.kind == "flat_gather":
            lengths = [chunk(prod(gathered), n) for gathered in self.local_shapes(scope)]
        else:
            return tuple(shards)
        # Only where needed: to reshape a flat tensor costs 1 us, and a node of autograd's graph.
        flats = [shard if shard.ndim == 1 else shard.reshape(-1) for shard in shards]
        if not is_recorded:
            return tuple(padded(flats, lengths, dtype))
        for index, flat in enumerate(flats):
            missing = lengths[index] - len(flat)
            if missing:
                flats[index] = pad(flat, (0, missing))
        return tuple(flats)

    def unpack(self, results: Sequence[Tensor], scope: Scope) -> list[Tensor]:
        """Return the new shards, from the results of the move."""
        if isinstance(self.move, DirectExchange):
            (row,) = results
            group = scope.group(self.axes, _CALLER)
            results = self.move.split(row, group.index)
        return self._without_padding(results, scope)

    def _without_padding(self, tensors: Sequence[Tensor], scope: Scope) -> list[Tensor]:
        pairs = zip(tensors, self.local_shapes(scope), strict=True)
        # Most have no padding: a call for each would cost as much as a small collective's pack.
        return [x if x.shape == shape else _trimmed(x, shape) for x, shape in pairs]

    def local_shapes(self, scope: Scope) -> list[tuple[int, ...]]:
        """Return the shape of each leaf's shard on this device after the step.

        Cached for each device's coordinates, as a shape takes 6 us and a reshape 1 us. The sizes
        of axes need not be in the key, since the plans of a step belong to one mesh.
        """
        groups = [scope.group((axis,), _CALLER) for axis in self._sharded_axes]
        indices = tuple([group.index for group in groups])
        shapes = self._local_shapes.get(indices)
        if shapes is None:
            shapes = self._compute_local_shapes(groups)
            self._local_shapes[indices] = shapes
        return shapes

    def _compute_local_shapes(self, groups: Sequence[Group]) -> list[tuple[int, ...]]:
        sizes: dict[str, int] = {}
        coordinates: dict[str, int] = {}
        for axis, group in zip(self._sharded_axes, groups, strict=True):
            sizes[axis] = group.size
            coordinates[axis] = group.index

        pairs = zip(self.steps, self.shapes, strict=True)
        return [step.after.local_shape(shape, sizes, coordinates) for step, shape in pairs]

    def _record_for_participant(self, shards: list[Tensor], scope: Scope, site: Site) -> None:
        """Record the bytes of a device that takes part, if this one represents all of its mesh.

        The one device of an abstract mesh may be at other coordinates than the step. The ledger
        must have the bytes of the busiest device all the same, so they are recorded under the
        number of the device that differs from this one in these coordinates only.
        """
        if self.move is None or isinstance(self.move, Alone):
            return

        device = scope.device
        for axes, index in self.at:
            group = scope.group(axes, _CALLER)
            if not group.represents_all:
                return
            _, stride = group.dims[0]  # the only one: plans have coordinates axis by axis
            device += (index - group.index) * stride

        sent = Fraction(0)
        for shard, step in zip(shards, self.steps, strict=True):
            sent += step.elements * shard.element_size()

        number = scope.mesh.devices[device]
        site = site._replace(leaves=())  # a line of the program has one row, for all of its leaves
        row = LedgerRow(self.move.name, self.axes, site)
        for ledger in active():
            ledger.record(number, row, sent)


def _shared_move(steps: list[Step]) -> Move | None:
    """Return the move of a shared step: the equal move of all steps, or their exchanges as one."""
    exchanges: list[LeafExchange] = []
    for step in steps:
        if isinstance(step.move, DirectExchange):
            exchanges.extend(step.move.leaves)
    if exchanges:
        return DirectExchange(tuple(exchanges))
    return steps[0].move


def _is_differentiated(shards: list[Tensor]) -> bool:
    """Return True if autograd records one of these shards, or a torch.func transform is active."""
    return transformed() or recorded(tuple(shards))


@lru_cache(maxsize=1024)
def _rounds(
    plans: tuple[ReshardPlan, ...],
    dtypes: tuple[torch.dtype, ...],
    at_once: int,
) -> tuple[tuple[SharedStep, ...], ...]:
    """Return the rounds of shared steps of all leaves, in the order in which devices take them.

    `at_once` is an argument so that it is part of the cache's key: tests change AT_ONCE.
    """
    rounds: list[tuple[SharedStep, ...]] = []
    most_steps = max([len(leaf_plan.steps) for leaf_plan in plans], default=0)
    for number in range(most_steps):
        shared_steps: list[SharedStep] = []
        for indices in _group_leaves(plans, dtypes, number, at_once):
            members = [plans[index] for index in indices]
            shared_steps.append(SharedStep(indices, members, number))
        rounds.append(tuple(shared_steps))
    return tuple(rounds)


# Note [Rounds of direct exchanges]
# Any leaves can share a direct exchange, and its memory grows with them, so it runs in rounds of
# about AT_ONCE bytes. A leaf is never divided: the bytes of the leaves before it determine its
# round. They are counted for each pair of coordinates (before, after), so that all devices work in
# each round.
# Six matrices with owners 0 0 0 1 1 1, two of which fit into a round:
#
#     counted for each pair    rounds 0 0 1 0 0 1    both rounds have matrices of both owners
#     counted for all          rounds 0 0 1 1 2 2    owner 1 receives nothing in round 0


def _group_leaves(
    plans: tuple[ReshardPlan, ...],
    dtypes: tuple[torch.dtype, ...],
    number: int,
    at_once: int,
) -> Collection[list[int]]:
    """Return the leaves that have a step `number`, as groups of indices that share it."""
    groups: dict[object, list[int]] = {}
    bytes_before: dict[object, int] = {}
    for index, dtype in enumerate(dtypes):
        if number >= len(plans[index].steps):
            continue

        step = plans[index].steps[number]
        shared = (step.kind, step.axes, step.at, dtype)
        if isinstance(step.move, DirectExchange):
            (exchange,) = step.move.leaves  # before it is shared an exchange has one leaf
            pair = (*shared, exchange.before.at, exchange.after.at)
            begin = bytes_before.get(pair, 0)
            bytes_before[pair] = begin + exchange.length * dtype.itemsize
            key = (*shared, begin // at_once)
        else:
            key = (*shared, step.move)
        groups.setdefault(key, []).append(index)
    return groups.values()


def _trimmed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the first elements of a padded tensor, in a shape."""
    size = prod(shape)
    if tensor.numel() != size:
        tensor = tensor.reshape(-1)[:size]
        if size == 0:
            tensor = tensor.clone()  # a view without elements would keep the padding alive
    return tensor if tensor.shape == shape else tensor.reshape(shape)
