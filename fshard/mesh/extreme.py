"""The gradient of `pmax` and `pmin`: to whoever holds the extreme value, in equal parts where several do.

    y = max over devices of x          dy/dx = [x == y] / (how many devices have x == y)

It is not linear, so it has a Function of its own; what it does with cotangents and tangents is linear again and is put
together from `psum`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import Function

from fshard.mesh.differentiate import Bound, Tensors, apply, apply_to_many, leading
from fshard.mesh.moves import Psum, Pvary
from fshard.mesh.purpose import serving


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
        ctx.mark_non_differentiable(*(y for y in output if not y.is_floating_point()))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        with serving("cotangents"):
            shares = _shares(ctx.bound, ctx.saved_tensors)
            own = apply_to_many(Bound(Pvary(), ctx.bound.group, ctx.bound.site), cotangents)
        return None, *(cotangent * share for cotangent, share in zip(own, shares, strict=True))

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensors:
        _, *tangents = grad_inputs
        with serving("tangents"):
            shares = _shares(ctx.bound, ctx.saved_tensors)
            parts = tuple(tangent * share for tangent, share in zip(tangents, shares, strict=True))
            return apply_to_many(_sum_like(ctx.bound), parts)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensors, tuple[int, ...]]:
        bound, *xs = args
        batched = tuple(leading(x, dim, info.batch_size) for x, dim in zip(xs, in_dims[1:], strict=True))
        return apply_extreme(bound.batched(), batched), (0,) * len(xs)


def _sum_like(bound: Bound) -> Bound:
    return Bound(Psum(), bound.group, bound.site)


def _shares(bound: Bound, saved: Tensors) -> Tensors:
    """Return each device's part in the extreme: 0, or 1 over the number of devices that hold it."""
    xs, ys = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    held = tuple((x == y).to(y.dtype) for x, y in zip(xs, ys, strict=True))
    return tuple(mask / total for mask, total in zip(held, apply(_sum_like(bound), held), strict=True))
