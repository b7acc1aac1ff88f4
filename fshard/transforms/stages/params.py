"""The parameters of one stage on one device, and the sums of their gradients.

Autograd's saved tensors of a parameter, views included, share its memory. So that memory is freed
and refilled under the same tensors: nothing is replaced or recorded twice.

    UNSHARD       all-gather starts
    F, B, I, W    memory is filled
    RESHARD       memory is freed
    REDUCE        `StageSums`

A tied parameter is owned by the first of its stages; the others borrow it, and send their gradients
to the owner's device:

    any mode             each stage its sum           ->  the owner: their sum
    reproducible mode    each microbatch separately   ->  the owner: their sums, the tree of these
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fshard.errors import ModuleError
from fshard.memory.kinds import claim, made_for
from fshard.mesh.layout import PyTree
from fshard.mesh.reshard.execute import start_reshard
from fshard.pipeline.execution.gradient_sums import OrderedSum, RunningSum
from fshard.transforms.fsdp.lazy_param import WRITES
from fshard.transforms.fsdp.plans import ParamPlan
from fshard.transforms.fsdp.reductions import Reducer
from fshard.transforms.fsdp.units import StepContext, Unit, versions_of
from fshard.transforms.patterns import titled
from fshard.transforms.stages.plan import StageLeaves, StagePlan, Tie

_data_of = cast("Any", Tensor).data.__get__


class _StageParam(Tensor):
    """A parameter of a stage.

    A write to `.data` is detected as any other, by its version.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    _is_param = True
    """Makes isinstance(x, nn.Parameter) true."""
    path = ""
    step: StepContext
    """The step whose parameter it is."""

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """The same memory, and the same version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ModuleError(f"a stage writes to the parameter {titled(self.path)}. {WRITES}")


# Note [Parameters of a stage are freed under their tensors]
# The operations of a stage save its parameters for many microbatches. Their storages are resized to
# 0 bytes and back, so that these saved tensors have no memory while the stage is resharded and the
# same values after. Autograd must not count that as a write: it is done through `.data`, which has
# a version counter of its own. A storage that numpy has an array of cannot be resized, and stays
# until the step ends.


class StageParams:
    """The parameters of a stage: unsharded before use, and freed after, always in the same tensors.

    See Note [Parameters of a stage are freed under their tensors].

    Args:
        context: of the step.
        stage: its number.
        params: the plans of its parameters.
        shards: of these.

    `trained` are the tensors of its trained parameters.
    """

    def __init__(
        self,
        context: StepContext,
        stage: int,
        params: StageLeaves,
        shards: Sequence[Tensor],
    ) -> None:
        self._plans = params.leaves
        self._unit = Unit(context, params.sharded, [shards[i] for i in params.sharded.indices])
        self._is_filled = not params.sharded.is_sharded  # the memory of parameters has their values

        tensors: dict[int, Tensor] = {}
        replicated = Unit(
            context, params.replicated, [shards[i] for i in params.replicated.indices]
        )
        replicated.unshard()
        tensors.update(zip(params.replicated.indices, replicated.wait_for_unshard(), strict=True))
        for index in params.sharded.indices:
            dtype = context.options.used_in(self._plans[index].dtype)
            shape = self._plans[index].shape
            tensors[index] = torch.empty(shape, dtype=dtype, device=context.device)
            tensors[index].untyped_storage().resize_(0)

        self._params: list[_StageParam] = []
        self.trained: list[Tensor] = []
        for index, plan in enumerate(self._plans):
            param = tensors[index].detach().as_subclass(_StageParam)
            param.path = plan.path
            param.step = context
            if plan.trained:
                self.trained.append(param.requires_grad_())
            self._params.append(param)

        self._edges = [get_gradient_edge(x) for x in self.trained]
        self._tree = params.tree([*self._params])
        self._first_versions = versions_of(self._params)
        self._sharded = [self._params[index] for index in params.sharded.indices]

    def tree(self) -> PyTree:
        """Return the unsharded parameters."""
        self.wait_for_unshard()
        return self._tree

    def edges(self) -> list[GradientEdge]:
        """Return the edges of trained parameters' gradients, for a backward: unsharded."""
        self.wait_for_unshard()
        return self._edges

    def unshard(self) -> None:
        """Start the all-gather, unless the stage is unsharded or about to be."""
        if not self._is_filled:
            self._unit.unshard()

    def wait_for_unshard(self) -> None:
        """Fill the memory of the parameters, once the all-gather is complete.

        It is started if it was not.
        """
        if self._is_filled:
            return
        self._unit.unshard()
        self._unit.wait_for_unshard([_allocated(param) for param in self._sharded])
        self._unit.reshard()  # the values are in the parameters
        self._is_filled = True

    def reshard(self) -> None:
        """Free the memory of the parameters."""
        if self._unit.pending is not None:
            self.wait_for_unshard()  # other devices take part
        for param in self._sharded:
            storage = param.untyped_storage()
            if storage.resizable():
                storage.resize_(0)
                claim(_data_of(param), "unsharded")
        self._is_filled = not self._unit.plan.is_sharded

    def written(self) -> list[str]:
        """Return the paths of those that the stage has written to."""
        rows = zip(self._plans, versions_of(self._params), self._first_versions, strict=True)
        return [plan.path for plan, version, before in rows if version != before]


def _allocated(param: _StageParam) -> Tensor:
    """Return a parameter's data, whose memory is allocated if it was freed."""
    x: Tensor = _data_of(param)
    storage = x.untyped_storage()
    if storage.nbytes() != x.nbytes:
        storage.resize_(x.nbytes)
        claim(x, "unsharded")
    return x


class StageSums:
    """The gradients of one device's stages: added over microbatches, and reduced stage by stage.

    Args:
        plan: of all stages.
        reducer: of the gradients of the device.
        stages: those of the device.
        weights: of each microbatch, in reproducible mode; None: gradients are weighted already.
        coordinate: of the device along the pipeline.
    """

    def __init__(
        self,
        plan: StagePlan,
        reducer: Reducer,
        stages: Sequence[int],
        weights: list[float] | None,
        coordinate: int,
    ) -> None:
        self._reducer = reducer
        self._leaves: Sequence[ParamPlan] = reducer.leaves
        self._ties = plan.ties
        self._weights = weights
        self._coordinate = coordinate
        self._totals = {stage: self._new_sum() for stage in stages}
        self._trained: dict[int, list[int]] = {}
        for stage in stages:
            indices = plan.by_stage[stage].indices
            self._trained[stage] = [index for index in indices if self._leaves[index].trained]

        self._tied: set[int] = set()
        self._tied_sums: dict[tuple[int, int], dict[int, Tensor]] = {}
        for tie in plan.ties:
            self._tied.add(tie.leaf)
            for stage in tie.stages:
                self._tied_sums[stage, tie.leaf] = {}

    def _new_sum(self) -> RunningSum | OrderedSum:
        """Return a sum over microbatches.

        In the order in which they come, or in the fixed tree of reproducible mode.
        """
        return RunningSum() if self._weights is None else OrderedSum(self._weights)

    # -- a microbatch ----------------------------------------

    def let_accumulate(self, stage: int, weights: Sequence[Tensor]) -> bool:
        """Let autograd accumulate into `.grad` of the weights; return True if so.

        It may, if the sums need no other dtype or order.
        """
        total = self._totals[stage]
        if not isinstance(total, RunningSum):
            return False
        options, dtypes = self._reducer.options, self._reducer.dtypes
        for index in self._trained[stage]:
            if dtypes[index] is not options.used_in(self._leaves[index].dtype):
                return False
        return total.let_accumulate(weights)

    @made_for("gradients")
    def add(
        self, stage: int, microbatch: int, gs: Sequence[Tensor | None], *, is_idle: bool
    ) -> None:
        """Add the gradients of one microbatch; an idle one counts as zero."""
        indices = self._trained[stage]
        row = self._reducer.record(indices, gs, is_idle=is_idle)
        for position, index in enumerate(indices):
            if index in self._tied:
                self._add_tied(stage, index, microbatch, row[position])
                row[position] = None
        total = self._totals[stage]
        if isinstance(total, RunningSum):
            total.add(microbatch, row, [self._reducer.dtypes[index] for index in indices])
        else:
            total.add(microbatch, self._reducer.cast(indices, row))

    def _add_tied(self, stage: int, index: int, microbatch: int, g: Tensor | None) -> None:
        """Add to the gradient of a tied parameter in one stage.

        In reproducible mode there is one for each microbatch.
        """
        if g is None:
            return
        sums = self._tied_sums[stage, index]
        number = 0 if self._weights is None else microbatch
        g = g.to(self._tie_dtype(index))
        sums[number] = sums[number] + g if number in sums else g

    def _tie_dtype(self, index: int) -> torch.dtype:
        """Return the dtype in which the stages' gradients of a tied parameter are added."""
        if self._weights is None:
            return self._reducer.dtypes[index]
        # Those of one microbatch are added as in one backward.
        return self._reducer.options.used_in(self._leaves[index].dtype)

    # -- reductions ----------------------------------------

    def reduce(self, stage: int) -> None:
        """Start reducing the gradients of a stage, except tied ones."""
        indices = self._trained[stage]
        sums = self._totals.pop(stage).sums() or [None] * len(indices)
        untied_indices: list[int] = []
        untied: list[Tensor | None] = []
        for index, g in zip(indices, sums, strict=True):
            if g is not None:
                # Autograd may have accumulated it: see `let_accumulate`.
                self._reducer.used[index] = True
            if index in self._tied:
                self._add_tied(stage, index, 0, g)
            else:
                untied_indices.append(index)
                untied.append(g)
        self._reducer.put(untied_indices, untied)
        self._reducer.send()

    def reduce_rest(self) -> None:
        """Reduce the stages that are left and the tied parameters, and wait for all reductions."""
        for stage in [*self._totals]:
            self.reduce(stage)
        self._reduce_ties()
        self._reducer.finish()

    def _reduce_ties(self) -> None:
        """Send gradients of borrowers to the owners, which add and reduce them."""
        borrowers = [(tie, index) for tie in self._ties for index in range(1, len(tie.stages))]
        sent = [self._stack_tied(tie, index) for tie, index in borrowers]
        plans = [tie.to_owner[index] for tie, index in borrowers]
        received = start_reshard(sent, plans, self._reducer.site).wait()
        for tie in self._ties:
            if tie.coordinates[0] != self._coordinate:
                continue
            # The last stage first, as one backward of the full model adds them.
            stacks = [self._stack_tied(tie, 0)]
            stacks += [x for (other, _), x in zip(borrowers, received, strict=True) if other is tie]
            rows = stacks.pop()
            while stacks:
                rows = rows + stacks.pop()

            total = self._new_sum()
            for microbatch, g in enumerate(rows):  # one row, without reproducible mode
                total.add(microbatch, self._reducer.cast([tie.leaf], [g]))
            self._reducer.put([tie.leaf], total.sums())
            self._reducer.send()

    def _stack_tied(self, tie: Tie, index: int) -> Tensor:
        """Return the gradients of a tied parameter in one stage, stacked.

        A row for each microbatch, or one in all; empty on devices that have another stage.
        """
        shape, dtype = self._leaves[tie.leaf].shape, self._tie_dtype(tie.leaf)
        if tie.coordinates[index] != self._coordinate:
            empty = [0] * (1 + len(shape))
            return torch.zeros(empty, dtype=dtype, device=self._reducer.device)
        sums = self._tied_sums.pop((tie.stages[index], tie.leaf))
        zero = torch.zeros(shape, dtype=dtype, device=self._reducer.device)
        count = 1 if self._weights is None else len(self._weights)
        return torch.stack([sums.get(row, zero) for row in range(count)])
