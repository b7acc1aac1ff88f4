"""The parameters of one stage on one device, unsharded before use and freed after; and the sums of their gradients.

Autograd's saved tensors of a parameter, views included, share its memory. So that memory is freed and refilled under
the same tensors: nothing is replaced or recorded twice.

    UNSHARD   all-gather starts     F, B, I, W   memory is filled     RESHARD   memory is freed     REDUCE   reduce-scatter

A tied parameter is owned by the first of its stages; the others borrow it, and send their gradients to the owner's
device:

    any mode             each stage its sum           ->  the owner: their sum                          ->  reduced
    reproducible mode    each microbatch separately   ->  the owner: their sums, then the tree of them  ->  reduced
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fshard.errors import ModuleError
from fshard.mesh.layout import PyTree
from fshard.mesh.reshard.execute import ReshardPlan, go
from fshard.pipeline.execution.gradient_sums import OrderedSum, RunningSum
from fshard.source import Site
from fshard.transforms.fsdp.lazy_param import WRITES
from fshard.transforms.fsdp.units import versions_of
from fshard.transforms.module.replica import Replica
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.stages.plan import Own, StagePlan, Tie

_data_of = cast("Any", Tensor).data.__get__


class _Guarded(Tensor):
    """A parameter of a stage, of which a write to `.data` is seen as any other, by its version."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    _is_param = True
    """as torch checks for a Parameter"""
    path = ""
    step: StageParams
    """The step whose parameter it is."""

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """The same memory, and the same version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ModuleError(f"a stage writes to the parameter {named(parts_of(self.path))}. {WRITES}")


def _guarded(x: Tensor, path: str, step: StageParams) -> Tensor:
    made = x.detach().as_subclass(_Guarded)
    made.path, made.step = path, step
    return made


class StageParams:
    """The parameters of a stage, each once.

    Args:
        own: their descriptions, and their plans from shards to unsharded.
        shards: the local shards.
        compute: the floating dtype of computation; None: each its own.
        site: the source line of the step.
    """

    def __init__(self, own: Own, shards: Sequence[Tensor], compute: torch.dtype | None, site: Site) -> None:
        leaves = own.leaves
        self._shards, self._compute, self._site = shards, compute, site
        self._replicas: list[Replica] = []
        self._ways = [leaf.gather for leaf in leaves]
        self._cut = [place for place, way in enumerate(self._ways) if any(step.kind != "reshape" for step in way.steps)]
        self._coming: Callable[[], list[Tensor]] | None = None
        self._unsharded = not self._cut
        full_tensors = dict(zip(self._uncut, self._go(self._uncut, ahead=False)(), strict=True))
        for place in self._cut:
            near = self._converted(place)
            full_tensors[place] = torch.empty(leaves[place].shape, dtype=near.dtype, device=near.device)
            full_tensors[place].untyped_storage().resize_(0)
        self._xs = [_guarded(full_tensors[place], leaf.path, self) for place, leaf in enumerate(leaves)]
        trained = [place for place, leaf in enumerate(leaves) if leaf.trained]
        self.own = [self._xs[place].requires_grad_() for place in trained]
        self._edges = [get_gradient_edge(x) for x in self.own]
        self._tree = own.tree(self._xs)
        self._versions, self._leaves = versions_of(self._xs), leaves

    @property
    def tree(self) -> PyTree:
        """Unsharded parameters."""
        self._arrive()
        return self._tree

    @property
    def edges(self) -> list[GradientEdge]:
        """The edges of trained parameters' gradients; unshards them."""
        self._arrive()
        return self._edges

    def use(self, replica: Replica) -> None:
        """Note that the parameters are installed in a module until the step closes."""
        if not any(replica is other for other in self._replicas):
            self._replicas.append(replica)

    def close(self) -> None:
        """End the step: take the parameters out of modules."""
        for replica in self._replicas:
            replica.rest()
        self._replicas = []

    def written_to(self) -> list[str]:
        """Return the paths of those that a stage has written to."""
        now = versions_of(self._xs)
        both = zip(self._leaves, now, self._versions, strict=True)
        return [leaf.path for leaf, version, before in both if version != before]

    def gather(self) -> None:
        """Prefetch: start the all-gather of sharded parameters."""
        if not self._unsharded and self._coming is None:
            self._coming = self._go(self._cut, ahead=True)

    def free(self) -> None:
        """Free unsharded parameters."""
        self._arrive()  # other devices take part
        for place in self._cut:
            memory = self._xs[place].untyped_storage()
            if memory.resizable():  # that of which numpy has an array stays until the step ends
                memory.resize_(0)
        self._unsharded = not self._cut

    def _arrive(self) -> None:
        self.gather()
        if self._coming is not None:
            values, self._coming, self._unsharded = self._coming(), None, True
            for place, value in zip(self._cut, values, strict=True):
                x = _data_of(self._xs[place])  # whose changes autograd does not count
                if x.untyped_storage().nbytes() != x.nbytes:
                    x.untyped_storage().resize_(x.nbytes)
                x.copy_(value)

    @property
    def _uncut(self) -> list[int]:
        return [place for place in range(len(self._ways)) if place not in self._cut]

    def _go(self, places: Sequence[int], *, ahead: bool) -> Callable[[], list[Tensor]]:
        with torch.no_grad():
            xs = [self._converted(place) for place in places]
            return go(xs, [self._ways[place] for place in places], self._site, ahead=ahead)

    def _converted(self, place: int) -> Tensor:
        x = self._shards[place].detach()
        return x if self._compute is None or not x.is_floating_point() else x.to(self._compute)


Gradients = list[Tensor | None]


class StageSums:
    """The gradients of one device in one step.

    Args:
        plan: of all steps.
        stages: those of the device.
        weights: of each microbatch, in reproducible mode; None: gradients are weighted already.
        place: coordinate of the device along the pipeline.
        near: a tensor on the device.
        site: the source line of the step.
    """

    def __init__(
        self, plan: StagePlan, stages: Sequence[int], weights: list[float] | None, place: int, near: Tensor, site: Site
    ) -> None:
        leaves, own, self._ways, _, ties = plan.weights
        used, wide = [plan.used_in(leaf) for leaf in leaves], [plan.reduced_in(leaf) for leaf in leaves]
        trained = {stage: [leaf for leaf in own[stage].numbers if leaves[leaf].trained] for stage in stages}
        self._leaves, self._trained, self._wide = leaves, trained, wide
        self._apart = wide if weights is None else used  # those of one microbatch are added as in one backward
        self._ties, self._weights, self._place, self._near, self._site = ties, weights, place, near, site
        self._tied = {tie.leaf for tie in ties}
        self._each = {(stage, tie.leaf): dict[int, Tensor]() for tie in ties for stage in tie.stages}
        self._totals = {stage: self._total() for stage in trained}
        self._under_way: list[tuple[Sequence[int], Callable[[], list[Tensor]]]] = []
        self._simply = {stage: all(wide[leaf] is used[leaf] for leaf in own) for stage, own in trained.items()}
        self.used = [False] * len(leaves)

    def _total(self) -> RunningSum | OrderedSum:
        return RunningSum() if self._weights is None else OrderedSum(self._weights)

    def add(self, stage: int, microbatch: int, gs: Sequence[Tensor | None], *, idle: bool) -> None:
        """Add the gradients of one microbatch; an idle one counts as zero."""
        row: Gradients = []
        for leaf, g in zip(self._trained[stage], gs, strict=True):
            self.used[leaf] |= g is not None
            if g is not None:
                g = None if idle else g.to_dense() if g.is_sparse else g
            if g is not None and leaf in self._tied:
                self._keep(self._each[stage, leaf], microbatch, g.to(self._apart[leaf]))
                g = None
            row.append(None if g is None else g.to(self._wide[leaf]))
        self._totals[stage].add(microbatch, row)

    def let_accumulate(self, stage: int, own: Sequence[Tensor]) -> bool:
        """Let autograd accumulate into the weights' `.grad`, if sums are plain and in their own dtypes; return True
        if so.
        """
        total = self._totals[stage]
        return self._simply[stage] and isinstance(total, RunningSum) and total.let_accumulate(own)

    def _keep(self, kept: dict[int, Tensor], microbatch: int, g: Tensor) -> None:
        at = 0 if self._weights is None else microbatch
        kept[at] = kept[at] + g if at in kept else g

    def reduce(self, stage: int) -> None:
        """Start reducing the gradients of a stage, except tied ones."""
        total = self._totals.pop(stage)
        sums = total.sums() if isinstance(total, OrderedSum) else total.result()
        found = dict(zip(self._trained[stage], sums or [None] * len(self._trained[stage]), strict=True))
        for leaf, g in found.items():
            if g is not None:
                self.used[leaf] = True
                if leaf in self._tied:
                    self._keep(self._each[stage, leaf], 0, g)
        self._send({leaf: g for leaf, g in found.items() if leaf not in self._tied})

    def _send(self, found: dict[int, Tensor | None]) -> None:
        ways, xs = list[ReshardPlan](), list[Tensor]()
        for leaf, g in found.items():
            way = self._ways[leaf]
            assert way is not None
            ways.append(way)
            xs.append(self._zeros(self._leaves[leaf].shape, self._wide[leaf]) if g is None else g)
        if xs:
            self._under_way.append(([*found], go(xs, ways, self._site, ahead=True)))

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._near.new_zeros(shape, dtype=dtype)

    def result(self) -> dict[int, Tensor]:
        """Return the reduced gradients of parameters on this device, by index."""
        for stage in [*self._totals]:
            self.reduce(stage)
        self._bring_home()
        return {leaf: g for leaves, finish in self._under_way for leaf, g in zip(leaves, finish(), strict=True)}

    def _bring_home(self) -> None:
        """Send gradients of borrowers to the owners, which add and reduce them."""
        rows = [(tie, at) for tie in self._ties for at in range(1, len(tie.stages))]
        xs = [self._stacked(tie, at) for tie, at in rows]
        stacks = go(xs, [tie.homes[at] for tie, at in rows], self._site)()
        for tie in self._ties:
            if tie.places[0] == self._place:
                others = [stack for (other, _), stack in zip(rows, stacks, strict=True) if other is tie]
                total = self._total()
                found = reduce(torch.add, reversed([self._stacked(tie, 0), *others]))  # (microbatch or 1, ...)
                for at, g in enumerate(found):
                    total.add(at, [g.to(self._wide[tie.leaf])])
                self._send({tie.leaf: (total.sums() if isinstance(total, OrderedSum) else total.result())[0]})

    def _stacked(self, tie: Tie, at: int) -> Tensor:
        """Return the gradients of a tied parameter in one stage, a row for each microbatch or one in all; empty elsewhere."""
        shape, dtype = self._leaves[tie.leaf].shape, self._apart[tie.leaf]
        if tie.places[at] != self._place:
            return self._zeros([0] * (1 + len(shape)), dtype)
        kept, zero = self._each.pop((tie.stages[at], tie.leaf)), self._zeros(shape, dtype)
        return torch.stack([kept.get(row, zero) for row in range(len(self._weights or [1.0]))])
