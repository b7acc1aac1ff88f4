"""`Unit`: parameters that are all-gathered and reduce-scattered together (an FSDP bucket).

One autograd Function with an output per parameter does both.  It is recorded just before the first operation that uses the
unit.  So autograd calls its backward, the reduce-scatter, right after the backward of that operation, and the backward of
earlier units overlaps with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import Function

from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.spmd.scope import entered
from fshard.transforms.fsdp.engine import Gradients, has_communication, no_graph, versions_of

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
Result = TypeVar("Result")


class Unit:
    """Parameters that are all-gathered and reduce-scattered together; those of ZeRO 0-2 are replicated and only reduced.

    `runtime` is the `ParamRuntime` of the step on one device, which has the units.
    """

    __slots__ = (
        "accumulated", "indices", "number", "outputs", "pending", "pending_backwards", "runtime", "sharded", "trained",
        "values", "versions",
    )  # fmt: skip

    def __init__(self, runtime: Any, number: int, indices: list[int]) -> None:
        self.runtime, self.number, self.indices = runtime, number, indices
        self.pending: Callable[[], list[Tensor]] | None = None
        leaves = [runtime.leaves[index] for index in indices]
        self.sharded = any(has_communication(leaf.gather) for leaf in leaves)
        self.trained = any(leaf.trained for leaf in leaves)
        self.outputs: tuple[Tensor, ...] | None = None
        self.values: list[Tensor] = []
        self.versions: list[int] = []
        self.accumulated: Gradients | None = None
        self.pending_backwards = 0  # uses whose backward is still to come

    def unshard(self) -> tuple[Tensor, ...]:
        """Return all parameters of the unit, unsharded and differentiable."""
        used = self.outputs
        if used is None:
            is_gathered = self.sharded and not self.values
            if is_gathered:
                self.runtime.make_room(self)
            if self.trained and torch.is_grad_enabled():
                used = _outside_transforms(lambda: _UseUnit.apply(self.runtime.anchor, self))
                if _C._current_graph_task_id() == -1:  # a recomputation ends with the backward that it is part of
                    self.pending_backwards += 1
                    self.runtime.first += [self.number] if self.number not in self.runtime.first else []
            else:
                used = _outside_transforms(self._detached)
            if torch.is_grad_enabled() or not self.trained:
                self.outputs = used
            if is_gathered:
                self.runtime.look_ahead(self.runtime.seen.forward, self.runtime.expected.forward, self)
        return used

    def _detached(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple([x.detach() for x in self.gather()])

    def leaf(self, at: int) -> Tensor:
        """Return one parameter, unsharded and differentiable, for one use."""
        x = self.unshard()[at]
        if self.runtime.each_use and x.requires_grad:
            return _outside_transforms(lambda: _UseOnce.apply(x, self, at))
        return x

    def gather(self) -> list[Tensor]:
        """Return all parameters, unsharded."""
        self.start()
        self.arrive()
        return self.values

    def start(self) -> None:
        """Start the all-gather, unless the unit is unsharded or about to be."""
        if not self.values and self.pending is None:
            if self.sharded:
                self.runtime.sequence.append(self.number)
            with entered(self.runtime.scope):  # torch.autograd.grad(loss, inputs) may be called outside of `run`
                self.pending = self.runtime.storage.unshard(self.indices)

    def arrive(self) -> None:
        """Wait for the all-gather, if one was started."""
        if self.pending is not None:
            with no_graph():
                self.values, self.pending = self.pending(), None
            self.versions = versions_of(self.values)
            if self.sharded:
                self.runtime.saved.register(self)

    def written(self) -> set[int]:
        """Return the indices of unsharded parameters that were written to in place."""
        now = versions_of(self.values)  # empty once resharded
        return {index for index, one, other in zip(self.indices, now, self.versions, strict=False) if one != other}

    def unshard_for_backward(self) -> list[Tensor]:
        """Return all parameters for the backward, and unshard them again if they were freed."""
        if not self.values:
            self.runtime.make_room(self)
            self.gather()  # (7)
            self.runtime.look_ahead(self.runtime.seen.backward, self.runtime.expected.backward, self)
        return self.values

    def reshard(self) -> None:
        """Free the unsharded parameters: the next use all-gathers them again."""
        if self.values:
            self.runtime.written |= self.written()
            self.values, self.versions = [], []
        self.outputs = None
        if self.sharded:
            self.runtime.live = [other for other in self.runtime.live if other is not self]

    def end_use(self) -> None:
        """Count the end of the backward of one use, and reshard."""
        self.pending_backwards -= 1
        if self.sharded and self.runtime.options.reshard_after_forward:
            self.reshard()

    def accumulate(self, gs: Gradients) -> None:
        """Add gradients to those of earlier slices, in at least 32 bits; they are reduced together."""
        gs = [g.float() if g is not None and g.dtype in (torch.bfloat16, torch.float16) else g for g in gs]
        if self.accumulated is None:
            self.accumulated = gs
            return
        for at, g in enumerate(gs):
            known = self.accumulated[at]
            if g is not None:
                self.accumulated[at] = g if known is None else known + g

    def take_accumulated(self, gs: Gradients) -> Gradients:
        """Return gradients plus the accumulated ones, and reset these."""
        if self.accumulated is not None:
            self.accumulate(gs)
            gs, self.accumulated = self.accumulated, None
        return gs


class _UseUnit(Function):
    """Forward: the all-gather of a unit.  Backward: the reduction of its gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, unit: Unit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        values = [x.detach() for x in unit.gather()]  # `check_unchanged` finds writes to them
        leaves = unit.runtime.leaves
        fixed = [x for x, index in zip(values, unit.indices, strict=True) if not leaves[index].trained]
        ctx.mark_non_differentiable(*fixed)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None]:
        ctx.unit.runtime.reductions.receive(ctx.unit, gs)
        return None, None


class _UseOnce(Function):
    """One use of one parameter, in reproducible mode.  Backward: its cotangent is received separately.

    Autograd adds up the cotangents of all uses of a `_UseUnit`, of which a unit has several if it was resharded in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Unit, at: int) -> Tensor:
        ctx.unit, ctx.at = unit, at
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None, None]:
        own: Gradients = [None] * len(ctx.unit.indices)
        (own[ctx.at],) = gs
        ctx.unit.runtime.reductions.receive_apart(ctx.unit, own)
        return None, None, None


USE_NODES: tuple[Any, ...] = tuple(cast("Any", use)._backward_cls for use in (_UseUnit, _UseOnce))
"""The autograd nodes of uses of units."""


def _outside_transforms(make: Callable[[], Result]) -> Result:
    """Call `make` outside of torch.func's transforms, which parameters do not belong to."""
    if not transformed():
        return make()
    with temporarily_clear_interpreter_stack():
        return make()
