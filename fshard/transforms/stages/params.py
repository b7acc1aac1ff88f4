"""The parameters of one stage on one device, and the sums of their gradients.

Autograd's saved tensors of a parameter, views included, share its memory. So that memory is freed and refilled under
the same tensors: nothing is replaced or recorded twice.

    UNSHARD   all-gather starts   F, B, I, W   memory is filled   RESHARD   memory is freed   REDUCE   `GradientSums`

A tied parameter is owned by the first of its stages; the others borrow it, and send their gradients to the owner's
device:

    any mode             each stage its sum           ->  the owner: their sum                          ->  reduced
    reproducible mode    each microbatch separately   ->  the owner: their sums, then the tree of them  ->  reduced
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fshard.errors import ModuleError
from fshard.memory.kinds import claim, made_for
from fshard.mesh.layout import PyTree
from fshard.mesh.reshard.execute import start_reshard
from fshard.pipeline.execution.gradient_sums import OrderedSum, RunningSum
from fshard.source import Site
from fshard.transforms.fsdp.lazy_param import WRITES
from fshard.transforms.fsdp.plans import Along, ParamPlan, versions_of
from fshard.transforms.fsdp.reductions import GradientSums
from fshard.transforms.fsdp.units import Unit, UnitRuntime
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.stages.plan import StageLeaves, StagePlan, Tie

_data_of = cast("Any", Tensor).data.__get__


class _StageParam(Tensor):
    """A parameter of a stage, of which a write to `.data` is detected as any other, by its version."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    _is_param = True
    """Makes isinstance(x, nn.Parameter) true."""
    path = ""
    step: UnitRuntime
    """The step whose parameter it is."""

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """The same memory, and the same version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ModuleError(f"a stage writes to the parameter {named(parts_of(self.path))}. {WRITES}")


class StageUnit(Unit):
    """The parameters of a stage: unsharded before use, and freed after, always in the same tensors.

    Args:
        runtime: of the stages of the device.
        stage: its number.
        params: the plans of its parameters.
        shards: of these.
        device: of the parameters.
    """

    def __init__(
        self,
        runtime: UnitRuntime,
        stage: int,
        params: StageLeaves,
        shards: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        plans, sharded, replicated = params.leaves, params.sharded, params.replicated
        super().__init__(runtime, stage, sharded, [shards[index] for index in sharded.indices])
        replicated_unit = Unit(
            runtime, stage, replicated, [shards[index] for index in replicated.indices]
        )
        replicated_unit.unshard()
        memory = dict(zip(replicated.indices, replicated_unit.wait_for_unshard(), strict=True))
        for index in sharded.indices:
            dtype = runtime.options.used_in(plans[index].dtype)
            memory[index] = torch.empty(plans[index].shape, dtype=dtype, device=device)
            memory[index].untyped_storage().resize_(0)
        self._params = [
            memory[index].detach().as_subclass(_StageParam) for index in range(len(plans))
        ]
        for x, plan in zip(self._params, plans, strict=True):
            x.path, x.step = plan.path, runtime
        self.trained = [
            x.requires_grad_() for x, plan in zip(self._params, plans, strict=True) if plan.trained
        ]
        self._edges = [get_gradient_edge(x) for x in self.trained]
        self._tree, self._all_plans = params.tree([*self._params]), plans
        self._first_versions = versions_of(self._params)
        self._refilled = [self._params[index] for index in sharded.indices]

    @property
    def tree(self) -> PyTree:
        """Unsharded parameters."""
        self.wait_for_unshard()
        return self._tree

    @property
    def edges(self) -> list[GradientEdge]:
        """The edges of trained parameters' gradients; unshards them."""
        self.wait_for_unshard()
        return self._edges

    def wait_for_unshard(self) -> list[Tensor]:
        """Unshard, and fill the memory of the parameters."""
        if self.is_sharded and not self.values:
            self.unshard()
            for param, value in zip(self._refilled, super().wait_for_unshard(), strict=True):
                x = _data_of(param)  # whose changes autograd does not count
                if x.untyped_storage().nbytes() != x.nbytes:
                    x.untyped_storage().resize_(x.nbytes)
                    claim(x, "unsharded")
                x.copy_(value)
            self.values = [*self._refilled]
        return self.values

    def reshard(self) -> None:
        """Free the memory of the parameters."""
        if self.pending is not None:
            self.wait_for_unshard()  # other devices take part
        super().reshard()
        for x in self._refilled:
            memory = x.untyped_storage()
            if memory.resizable():  # that of which numpy has an array stays until the step ends
                memory.resize_(0)
                claim(_data_of(x), "unsharded")

    def written(self) -> list[str]:
        """Return the paths of those that the stage has written to."""
        rows = zip(self._all_plans, versions_of(self._params), self._first_versions, strict=True)
        return [plan.path for plan, version, before in rows if version != before]


class StageSums(GradientSums):
    """The gradients of one device's stages: added over microbatches, and reduced stage by stage.

    Args:
        plan: of all stages.
        leaves: these with the shapes that this device uses.
        stages: those of the device.
        weights: of each microbatch, in reproducible mode; None: gradients are weighted already.
        coordinate: of the device along the pipeline.
        device: of the gradients.
        along: local axes.
        site: the source line of the step.
    """

    def __init__(
        self,
        plan: StagePlan,
        leaves: Sequence[ParamPlan],
        stages: Sequence[int],
        weights: list[float] | None,
        coordinate: int,
        device: torch.device,
        along: Along,
        site: Site,
    ) -> None:
        options = plan.options
        wide = options.reproducible or options.accumulate > 1
        super().__init__(
            leaves, device, options, lambda _: plan.reduction_plans, site, wide=wide, along=along
        )
        self._ties, self._weights, self._coordinate = plan.ties, weights, coordinate
        self._trained = {
            stage: [index for index in plan.by_stage[stage].indices if leaves[index].trained]
            for stage in stages
        }
        self._is_plain = {  # the sums are in the dtype in which parameters are used
            stage: all(
                options.reduced_in(leaves[index].dtype, wide=wide)
                is options.used_in(leaves[index].dtype)
                for index in indices
            )
            for stage, indices in self._trained.items()
        }
        self._totals = {stage: self._new_sum() for stage in stages}
        self._tied = {tie.leaf for tie in plan.ties}
        self._tied_sums = {
            (stage, tie.leaf): dict[int, Tensor]() for tie in plan.ties for stage in tie.stages
        }

    def _new_sum(self) -> RunningSum | OrderedSum:
        return RunningSum() if self._weights is None else OrderedSum(self._weights)

    @made_for("gradients")
    def add(
        self, stage: int, microbatch: int, gs: Sequence[Tensor | None], *, is_idle: bool
    ) -> None:
        """Add the gradients of one microbatch; an idle one counts as zero."""
        indices = self._trained[stage]
        row = self.record(indices, gs, is_idle=is_idle)
        for number, index in enumerate(indices):
            if index in self._tied:
                self._add_tied(stage, index, microbatch, row[number])
                row[number] = None
        total = self._totals[stage]
        if isinstance(total, RunningSum):
            total.add(microbatch, row, [self.reduced_in(index) for index in indices])
        else:
            total.add(microbatch, self.cast(indices, row))

    def _add_tied(self, stage: int, index: int, microbatch: int, g: Tensor | None) -> None:
        """Add to the gradient of a tied parameter in one stage, in reproducible mode for each microbatch."""
        if g is not None:
            sums, number = self._tied_sums[stage, index], 0 if self._weights is None else microbatch
            g = g.to(self._tie_dtype(index))
            sums[number] = sums[number] + g if number in sums else g

    def let_accumulate(self, stage: int, weights: Sequence[Tensor]) -> bool:
        """Let autograd accumulate into the weights' `.grad`, if sums are plain; return True if so."""
        total = self._totals[stage]
        return (
            self._is_plain[stage]
            and isinstance(total, RunningSum)
            and total.let_accumulate(weights)
        )

    def reduce(self, stage: int) -> None:
        """Start reducing the gradients of a stage, except tied ones."""
        indices = self._trained[stage]
        sums = self._totals.pop(stage).sums() or [None] * len(indices)
        untied = list[tuple[int, Tensor | None]]()
        for index, g in zip(indices, sums, strict=True):
            self.used[index] |= g is not None
            if index in self._tied:
                self._add_tied(stage, index, 0, g)
            else:
                untied.append((index, g))
        self.put([index for index, _ in untied], [g for _, g in untied])
        self.send()

    def reduce_rest(self) -> None:
        """Reduce the stages that are left and the tied parameters, and wait for all reductions."""
        for stage in [*self._totals]:
            self.reduce(stage)
        self._reduce_ties()
        self.finish()

    def _reduce_ties(self) -> None:
        """Send gradients of borrowers to the owners, which add and reduce them."""
        rows = [(tie, index) for tie in self._ties for index in range(1, len(tie.stages))]
        stacks = start_reshard(
            [self._stack_tied(*row) for row in rows],
            [tie.to_owner[index] for tie, index in rows],
            self.site,
        )()
        for tie in self._ties:
            if tie.coordinates[0] == self._coordinate:
                stacks_of_tie = [
                    stack
                    for (row_tie, _), stack in zip(rows, stacks, strict=True)
                    if row_tie is tie
                ]
                total = self._new_sum()
                summed = reduce(
                    torch.add, reversed([self._stack_tied(tie, 0), *stacks_of_tie])
                )  # (microbatch or 1, ...)
                for microbatch, g in enumerate(summed):
                    total.add(microbatch, self.cast([tie.leaf], [g]))
                self.put([tie.leaf], total.sums())
                self.send()

    def _stack_tied(self, tie: Tie, index: int) -> Tensor:
        """Return the gradients of a tied parameter in one stage, a row for each microbatch or one in all; empty elsewhere."""
        shape, dtype = self.leaves[tie.leaf].shape, self._tie_dtype(tie.leaf)
        if tie.coordinates[index] != self._coordinate:
            return torch.zeros([0] * (1 + len(shape)), dtype=dtype, device=self.device)
        sums = self._tied_sums.pop((tie.stages[index], tie.leaf))
        zero = torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.stack([sums.get(row, zero) for row in range(len(self._weights or [1.0]))])

    def _tie_dtype(self, index: int) -> torch.dtype:
        """Return the dtype in which the stages' gradients of a tied parameter are added."""
        dtype, options = self.leaves[index].dtype, self.options
        if self._weights is None:
            return options.reduced_in(dtype, wide=self.wide)
        return options.used_in(dtype)  # those of one microbatch are added as in one backward
