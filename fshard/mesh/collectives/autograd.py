"""Linear maps as autograd Functions: the backward of a map is its transpose, which is one too.

    y = psum(x)             forward     Bound(Psum)      x  ->  y
                            backward    Bound(Pvary)     dy ->  dx      Bound(Psum).transposed()
                            backward of the backward     Bound(Psum)    and so on

Derivatives of any order follow. Forward mode applies the map to the tangents; `vmap` applies the
map with one more leading dim. A Function with `setup_context` works under torch.func but costs
three times as much to call, so it is used only while a torch.func transform is active.

`pmax` and `pmin` are not linear and have a Function of their own:
dy/dx = [x == y] / (number of devices with x == y).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack  # no public API
from torch.autograd import forward_ad
from torch.autograd.function import Function

from fshard.mesh.collectives.delivery import world_of
from fshard.mesh.collectives.ledger import active
from fshard.mesh.collectives.moves import Alone, Move, Psum, Purpose, Wired
from fshard.mesh.layout.counting import CollectiveCounter, LedgerRow
from fshard.mesh.runtimes.thread_state import batches_nested
from fshard.mesh.spmd.scope import Group, Pending, UserCall, loss_along
from fshard.source import Site

Tensors = tuple[Tensor, ...]
_VF: Any = torch._VF  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_unpack_dual = _VF._unpack_dual
"""The function behind forward_ad.unpack_dual, called directly: every tensor of every collective
needs it."""

_torch: Any = torch  # for private functions


class LinearMap:
    """A linear map on a tuple of tensors, with its transpose."""

    __slots__ = ()

    def run(self, xs: Tensors) -> Tensors:
        """Compute it; `xs` are plain tensors, no gradient is recorded."""
        raise NotImplementedError

    def transposed(self) -> LinearMap:
        """Return the map of the cotangents."""
        raise NotImplementedError

    def batched(self) -> LinearMap:
        """Return the same map on tensors with one more leading dim."""
        return self

    def of_tangents(self) -> LinearMap:
        """Return the same map for tangents."""
        return self


def apply(linear: LinearMap, xs: Tensors) -> Tensors:
    """Apply a linear map so that it can be differentiated."""
    if transformed():
        return _Transformed.apply(linear, *xs)
    if recorded(xs):
        return _Recorded.apply(linear, *xs)  # (5)
    return linear.run(xs)


def transformed() -> bool:
    """Return True if a torch.func transform is active in this thread."""
    return peek_interpreter_stack() is not None


def recorded(xs: Tensors) -> bool:
    """Return True if autograd records one of these tensors, in backward or forward mode."""
    if torch.is_grad_enabled():
        for x in xs:  # a loop: a generator would cost more than the check
            if x.requires_grad:
                return True
    return has_tangent(xs)


def has_tangent(xs: Tensors) -> bool:
    """Return True if one of these tensors has a forward-mode tangent."""
    level = forward_ad._current_level  # pyright: ignore[reportPrivateUsage]
    if level >= 0:
        for x in xs:
            if _unpack_dual(x, level=level)[1] is not None:
                return True
    return False


class _Recorded(Function):
    """A linear map under plain autograd."""

    @staticmethod
    def forward(ctx: Any, linear: LinearMap, *xs: Tensor) -> Tensors:
        ctx.linear = linear
        ys = linear.run(xs)
        if not batches_nested():
            return ys
        # Copies, no views: the many tangents of a result cannot be a view of one.
        return tuple([y.clone(memory_format=torch.contiguous_format) for y in ys])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return None, *apply_to_many(ctx.linear.transposed(), cotangents)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensors:
        _, *tangents = grad_inputs
        ys = apply_to_many(ctx.linear.of_tangents(), tuple(tangents))
        # If an input is returned, as by `pvary`, autograd requires a view of it.
        tangent_ids = {id(tangent) for tangent in tangents}
        return tuple([y.view_as(y) if id(y) in tangent_ids else y for y in ys])


def apply_to_many(linear: LinearMap, xs: Tensors) -> Tensors:
    """Apply a linear map to cotangents or tangents, or to a batch of them."""
    return over_many(lambda xs: apply(linear, xs), lambda xs: apply(linear.batched(), xs), xs)


def over_many(
    f: Callable[[Tensors], Tensors],
    batched_f: Callable[[Tensors], Tensors],
    xs: Tensors,
) -> Tensors:
    """Call `f`, or `batched_f` on tensors with one more leading dim under autograd's own vmap.

    `is_grads_batched` and `vectorize` use that vmap; it does not call the vmap rules of Functions.
    """
    if not any(map(is_legacy_batchedtensor, xs)):
        return f(xs)

    level = batches_nested()
    batches: list[Tensor | None] = []
    for x in xs:
        is_batched = is_legacy_batchedtensor(x)
        # The arguments 1 and 0: a batch of any size (it is only read for a tensor that is not one),
        # whose dim shall be the first.
        batches.append(_torch._remove_batch_dim(x, level, 1, 0) if is_batched else None)
    size = next(batch.shape[0] for batch in batches if batch is not None)

    arguments: list[Tensor] = []
    for x, batch in zip(xs, batches, strict=True):
        arguments.append(leading(x, None, size) if batch is None else batch)
    results = batched_f(tuple(arguments))
    return tuple([_torch._add_batch_dim(y.contiguous(), 0, level) for y in results])


class _Transformed(Function):
    """The same under torch.func."""

    @staticmethod
    def forward(linear: LinearMap, *xs: Tensor) -> Tensors:
        return linear.run(xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[LinearMap, *Tensors], output: Tensors) -> None:
        ctx.linear = inputs[0]

    backward = _Recorded.backward
    jvp = _Recorded.jvp

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensors, tuple[int, ...]]:
        linear, *xs = args
        ys = apply(linear.batched(), _with_leading_dim(xs, in_dims[1:], info.batch_size))
        return ys, (0,) * len(ys)


def leading(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Put the dim that vmap maps over first; give one to a tensor that it does not map over."""
    if dim is None:
        return x.expand(size, *x.shape)
    return x.movedim(dim, 0)


def _with_leading_dim(xs: list[Tensor], dims: tuple[int | None, ...], size: int) -> Tensors:
    return tuple([leading(x, dim, size) for x, dim in zip(xs, dims, strict=True)])


@dataclass(slots=True)
class Bound(LinearMap):
    """A move, the group it runs on, the source line that called it, and its purpose.

    `user_call`: the call by user code, from which the backward chooses the transpose.
    """

    move: Move
    group: Group
    site: Site
    purpose: Purpose = "values"
    user_call: UserCall | None = None

    def run(self, xs: Tensors) -> Tensors:
        move = self.move
        if isinstance(move, Alone):
            index = self.group.index
            n = self.group.size
            return tuple([move.local(x, index, n) for x in xs])
        return self.start(xs).wait()

    def start(self, xs: Tensors, dtype: torch.dtype | None = None) -> Pending:
        """Write the collective into the ledger, and start it on tensors, cast to a dtype."""
        move = self.move
        assert isinstance(move, Wired)
        group = self.group
        ledgers = active()
        if ledgers:
            self._record_bytes(move, xs, dtype, ledgers)
        return world_of(group).start(move, xs, group, self.site, self.purpose, dtype)  # (6)

    def _record_bytes(
        self,
        move: Wired,
        xs: Tensors,
        dtype: torch.dtype | None,
        ledgers: Sequence[CollectiveCounter],
    ) -> None:
        group = self.group
        size = sum(x.numel() * (dtype or x.dtype).itemsize for x in xs)
        index = None if group.represents_all else group.index  # None: the most that any sends
        sent = move.sent(size, index, group.size)
        row = LedgerRow(move.name, group.axes, self.site._replace(leaves=()))
        for ledger in ledgers:
            ledger.record(group.number, row, sent)

    def transposed(self) -> Bound:
        return Bound(
            self._move_of_cotangents(), self.group, self.site, "cotangents", self.user_call
        )

    def _move_of_cotangents(self) -> Move:
        """Return the transpose, or the adjoint where cotangents of equal values differ."""
        user_call = self.user_call
        loss = None if user_call is None else loss_along(self.group)
        if user_call is None or loss is None:
            return self.move.transposed()

        if user_call.slice is None:  # see Note [Collectives of loops]
            loss.called_group(self.group.axes, user_call.name)
            return self.move.adjoint()

        is_in_forward = user_call.slice is loss.slice
        if is_in_forward and loss.notice is not None:
            loss.notice(user_call.name, self.group, "cotangents")
        return self.move.transposed()

    def batched(self) -> Bound:
        return replace(self, move=self.move.batched())

    def of_tangents(self) -> Bound:
        return replace(self, purpose="tangents")


# Note [Collectives of loops]
# In the code of `fs.run` values have types: the result of a psum is replicated, its cotangent equal
# on all devices. Code that differentiates by torch.autograd keeps to that, or marks a value by
# `pvary`. But a boosted loop gives each device a loss of its own, and its objective is their mean,
# as in a loss function of `value_and_grad`, where every value is varying.
#
# Which of the two holds is decided in the backward: `booster.backward` runs in the scope of a loss
# function. There the collectives that the loop has called use the adjoint, and the step records
# them, as it does where a loss function calls them. So a mean over devices is right with `pvary`
# behind it and without.


def apply_extreme(bound: Bound, xs: Tensors) -> Tensors:
    """Apply pmax or pmin so that it can be differentiated."""
    return _Extreme.apply(bound, *xs)


class _Extreme(Function):
    @staticmethod
    def forward(bound: Bound, *xs: Tensor) -> Tensors:
        return bound.run(xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Bound, *Tensors], output: Tensors) -> None:
        bound, *xs = inputs
        ctx.bound = bound
        ctx.save_for_backward(*xs, *output)
        ctx.save_for_forward(*xs, *output)
        ctx.mark_non_differentiable(*[y for y in output if not y.is_floating_point()])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        bound = replace(ctx.bound, purpose="cotangents")
        shares = _shares(bound, ctx.saved_tensors)
        psum = replace(ctx.bound, move=Psum())
        varying = apply_to_many(psum.transposed(), cotangents)
        return None, *_products(varying, shares)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensors:
        _, *tangents = grad_inputs
        bound = replace(ctx.bound, purpose="tangents")
        shares = _shares(bound, ctx.saved_tensors)
        return apply_to_many(replace(bound, move=Psum()), _products(tangents, shares))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensors, tuple[int, ...]]:
        bound, *xs = args
        batched = _with_leading_dim(xs, in_dims[1:], info.batch_size)
        return apply_extreme(bound.batched(), batched), (0,) * len(xs)


def _shares(bound: Bound, saved: Tensors) -> Tensors:
    """Return each device's part in the extreme: 0, or 1 over the number of devices that hold it."""
    middle = len(saved) // 2
    xs = saved[:middle]
    ys = saved[middle:]
    held = tuple([(x == y).to(y.dtype) for x, y in zip(xs, ys, strict=True)])
    totals = apply(replace(bound, move=Psum()), held)
    return tuple([mask / total for mask, total in zip(held, totals, strict=True)])


def _products(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensors:
    return tuple([x * y for x, y in zip(xs, ys, strict=True)])
