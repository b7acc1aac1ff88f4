"""The parameters of one stage on one device, and the sums of their gradients.

Autograd's saved tensors of a parameter, views included, share its memory. So that memory is freed and refilled under
the same tensors: nothing is replaced or recorded twice.

    UNSHARD   `Storage.unshard` starts   F, B, I, W   memory is filled   RESHARD   memory is freed   REDUCE   `GradientSums`

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
from fshard.mesh.reshard.execute import go
from fshard.pipeline.execution.gradient_sums import OrderedSum, RunningSum
from fshard.source import Site
from fshard.transforms.fsdp.engine import (
    Gradients,
    GradientSums,
    Storage,
    has_communication,
    versions_of,
)
from fshard.transforms.fsdp.lazy_param import WRITES
from fshard.transforms.module.replica import Replica
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.stages.plan import StageLeaves, StageParams, Tie

_data_of = cast("Any", Tensor).data.__get__


class _StageParam(Tensor):
    """A parameter of a stage, of which a write to `.data` is detected as any other, by its version."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    _is_param = True
    """Makes isinstance(x, nn.Parameter) true."""
    path = ""
    step: StageUnit
    """The step whose parameter it is."""

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """The same memory, and the same version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ModuleError(f"a stage writes to the parameter {named(parts_of(self.path))}. {WRITES}")


class StageUnit:
    """The parameters of a stage: unsharded before use, and freed after.

    Args:
        own: their plans.
        storage: unshards them.
        options: of units.
        device: of the parameters.
    """

    def __init__(self, own: StageLeaves, storage: Storage, options: StepOptions, device: torch.device) -> None:
        leaves = own.leaves
        self._storage, self._replicas = storage, list[Replica]()
        self._sharded = [at for at, leaf in enumerate(leaves) if has_communication(leaf.gather)]
        self._pending: Callable[[], list[Tensor]] | None = None
        self._is_unsharded = not self._sharded
        rest = [at for at in range(len(leaves)) if at not in self._sharded]
        full = dict(zip(rest, storage.unshard(rest)(), strict=True))
        for at in self._sharded:
            full[at] = torch.empty(leaves[at].shape, dtype=options.used_in(leaves[at].dtype), device=device)
            full[at].untyped_storage().resize_(0)
        self._xs = [self._param(full[at], leaf.path) for at, leaf in enumerate(leaves)]
        self.trained = [self._xs[at].requires_grad_() for at, leaf in enumerate(leaves) if leaf.trained]
        self._edges = [get_gradient_edge(x) for x in self.trained]
        self._tree = own.tree(self._xs)
        self._versions, self._leaves = versions_of(self._xs), leaves

    def _param(self, x: Tensor, path: str) -> Tensor:
        made = x.detach().as_subclass(_StageParam)
        made.path, made.step = path, self
        return made

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
        """Record a module copy that has the parameters installed until the step closes."""
        if not any(replica is other for other in self._replicas):
            self._replicas.append(replica)

    def close(self) -> None:
        """End the step: take the parameters out of modules."""
        for replica in self._replicas:
            replica.rest()
        self._replicas = []

    def written(self) -> list[str]:
        """Return the paths of those that a stage has written to."""
        now = versions_of(self._xs)
        both = zip(self._leaves, now, self._versions, strict=True)
        return [leaf.path for leaf, version, before in both if version != before]

    def start(self) -> None:
        """Start the all-gather, unless the stage is unsharded or about to be."""
        if not self._is_unsharded and self._pending is None:
            self._pending = self._storage.unshard(self._sharded)

    def _arrive(self) -> None:
        self.start()
        if self._pending is not None:
            values, self._pending, self._is_unsharded = self._pending(), None, True
            for at, value in zip(self._sharded, values, strict=True):
                x = _data_of(self._xs[at])  # whose changes autograd does not count
                if x.untyped_storage().nbytes() != x.nbytes:
                    x.untyped_storage().resize_(x.nbytes)
                x.copy_(value)

    def reshard(self) -> None:
        """Free unsharded parameters."""
        self._arrive()  # other devices take part
        for at in self._sharded:
            memory = self._xs[at].untyped_storage()
            if memory.resizable():  # that of which numpy has an array stays until the step ends
                memory.resize_(0)
        self._is_unsharded = not self._sharded


class StageSums:
    """The gradients of one device's stages: added over microbatches, and reduced stage by stage.

    Args:
        plan: of the parameters.
        stages: those of the device.
        weights: of each microbatch, in reproducible mode; None: gradients are weighted already.
        place: coordinate of the device along the pipeline.
        reduced: reduces the sums over devices.
        site: the source line of the step.
    """

    def __init__(
        self,
        plan: StageParams,
        stages: Sequence[int],
        weights: list[float] | None,
        place: int,
        reduced: GradientSums,
        site: Site,
    ) -> None:
        self.reduced, self._ties, self._weights, self._place, self._site = reduced, plan.ties, weights, place, site
        leaves, options = plan.leaves, reduced.options
        self._trained = {
            stage: [index for index in plan.own[stage].indices if leaves[index].trained] for stage in stages
        }
        self._is_plain = {  # the sums are in the dtype in which parameters are used
            stage: all(
                options.reduced_in(leaves[index].dtype, wide=reduced.wide) is options.used_in(leaves[index].dtype)
                for index in own
            )
            for stage, own in self._trained.items()
        }
        self._totals = {stage: self._total() for stage in stages}
        self._tied = {tie.leaf for tie in plan.ties}
        self._each = {(stage, tie.leaf): dict[int, Tensor]() for tie in plan.ties for stage in tie.stages}

    def _total(self) -> RunningSum | OrderedSum:
        return RunningSum() if self._weights is None else OrderedSum(self._weights)

    def add(self, stage: int, microbatch: int, gs: Sequence[Tensor | None], *, idle: bool) -> None:
        """Add the gradients of one microbatch; an idle one counts as zero."""
        indices = self._trained[stage]
        row = self.reduced.record(indices, gs, idle=idle)
        for at, index in enumerate(indices):
            if index in self._tied:
                self._keep(stage, index, microbatch, row[at])
                row[at] = None
        self._totals[stage].add(microbatch, self.reduced.cast(indices, row))

    def _keep(self, stage: int, index: int, microbatch: int, g: Tensor | None) -> None:
        """Add to the gradient of a tied parameter in one stage, in reproducible mode for each microbatch."""
        if g is not None:
            kept, at = self._each[stage, index], 0 if self._weights is None else microbatch
            g = g.to(self._tie_dtype(index))
            kept[at] = kept[at] + g if at in kept else g

    def let_accumulate(self, stage: int, own: Sequence[Tensor]) -> bool:
        """Let autograd accumulate into the weights' `.grad`, if sums are plain; return True if so."""
        total = self._totals[stage]
        return self._is_plain[stage] and isinstance(total, RunningSum) and total.let_accumulate(own)

    def reduce(self, stage: int) -> None:
        """Start reducing the gradients of a stage, except tied ones."""
        indices = self._trained[stage]
        sums = _sums(self._totals.pop(stage)) or [None] * len(indices)
        untied = list[tuple[int, Tensor | None]]()
        for index, g in zip(indices, sums, strict=True):
            self.reduced.used[index] |= g is not None
            if index in self._tied:
                self._keep(stage, index, 0, g)
            else:
                untied.append((index, g))
        self._send(untied)

    def _send(self, found: Sequence[tuple[int, Tensor | None]]) -> None:
        self.reduced.put([index for index, _ in found], [g for _, g in found])
        self.reduced.send()

    def finish(self) -> None:
        """Reduce what is left, and wait for all reductions."""
        for stage in [*self._totals]:
            self.reduce(stage)
        self._bring_home()
        self.reduced.finish()

    def _bring_home(self) -> None:
        """Send gradients of borrowers to the owners, which add and reduce them."""
        rows = [(tie, at) for tie in self._ties for at in range(1, len(tie.stages))]
        stacks = go([self._stacked(*row) for row in rows], [tie.homes[at] for tie, at in rows], self._site)()
        for tie in self._ties:
            if tie.places[0] == self._place:
                others = [stack for (other, _), stack in zip(rows, stacks, strict=True) if other is tie]
                total = self._total()
                found = reduce(torch.add, reversed([self._stacked(tie, 0), *others]))  # (microbatch or 1, ...)
                for at, g in enumerate(found):
                    total.add(at, self.reduced.cast([tie.leaf], [g]))
                self._send([(tie.leaf, _sums(total)[0])])

    def _stacked(self, tie: Tie, at: int) -> Tensor:
        """Return the gradients of a tied parameter in one stage, a row for each microbatch or one in all; empty elsewhere."""
        shape, dtype = self.reduced.leaves[tie.leaf].shape, self._tie_dtype(tie.leaf)
        if tie.places[at] != self._place:
            return torch.zeros([0] * (1 + len(shape)), dtype=dtype, device=self.reduced.device)
        kept = self._each.pop((tie.stages[at], tie.leaf))
        zero = torch.zeros(shape, dtype=dtype, device=self.reduced.device)
        return torch.stack([kept.get(row, zero) for row in range(len(self._weights or [1.0]))])

    def _tie_dtype(self, index: int) -> torch.dtype:
        """Return the dtype in which the stages' gradients of a tied parameter are added."""
        dtype, options = self.reduced.leaves[index].dtype, self.reduced.options
        if self._weights is None:
            return options.reduced_in(dtype, wide=self.reduced.wide)
        return options.used_in(dtype)  # those of one microbatch are added as in one backward


def _sums(total: RunningSum | OrderedSum) -> Gradients:
    return total.sums() if isinstance(total, OrderedSum) else total.result()
