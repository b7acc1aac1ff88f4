"""Linear layers on local shards: Megatron's column and row, SUMMA and the cube.

C = A B with A (m, k) the activations and B (k, n) the transposed weight. Elements that a device
sends, forward and backward; t, q, d devices along an axis:

    1d    column, then row: a psum of the M h activations each way
                                4(t-1)/t M h
    2d    SUMMA: A gathered along rows, B along columns, and again in the backward
                                3(q-1)/q^2 (mk + kn)
    2.5d  the same on d planes; the gradient of B is summed over them
                                3(q-1)/q^2 (mk/d + kn) + 2(d-1)/d kn/q^2
    3d    the cube: A and B gathered, C reduce-scattered, along an axis each
                                2(q-1)/q^3 (mk + kn + mn)

Weights may be a tuple, such as q, k and v: they share each collective. The bias is then a tuple
too; None is no bias.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

from fshard.mesh.collectives.api import all_gather, psum, psum_scatter, pvary
from fshard.mesh.layout import Axes, PyTree
from fshard.tensor.modes import Mode

Tensors = tuple[Tensor, ...]


def column(x: Tensor, weight: PyTree, axis: Axes, bias: PyTree = None) -> PyTree:
    """Multiply a replicated activation by weights (out, in) of layout P(axis).

    The features of the result are sharded over `axis`. The bias has the layout P(axis). Only the
    backward communicates: a psum. The devices need not divide `out`.
    """
    return _products(pvary(x, axis), weight, bias)


def row(x: Tensor, weight: PyTree, axis: Axes, bias: PyTree = None) -> PyTree:
    """Multiply features sharded over `axis` by weights (out, in) of layout P(None, axis).

    The products are summed over devices. The bias is replicated, and added once.
    """
    return _biased(psum(_products(x, weight), axis), bias)


def linear(x: Tensor, weight: PyTree, mode: Mode, bias: PyTree = None) -> PyTree:
    """Apply a linear layer with shards of `mode.weight` and `mode.bias`: from `mode` to its next."""
    inner = x.shape[-1]
    if mode.kind == "3d":
        # The input dim of a weight is sharded over one axis more than the features of x.
        inner //= mode.size()
    weights = (weight,) if isinstance(weight, Tensor) else weight
    wrong_shapes = [str(tuple(w.shape)) for w in weights if w.shape[1] != inner]
    if wrong_shapes:
        raise ValueError(
            f"linear: weights must be local shards (out, {inner}) of {mode.weight}; "
            f"got {', '.join(wrong_shapes)}."
        )

    if mode.kind == "1d" and mode.flipped:
        return row(x, weight, mode.axes, bias)
    if mode.kind == "1d":
        return column(x, weight, mode.axes, bias)
    y = _cube(x, weight, mode) if mode.kind == "3d" else _summa(x, weight, mode)
    return _biased(y, varying(bias, mode.next.tokens))


def classifier(x: Tensor, embedding: Tensor, mode: Mode) -> Tensor:
    """Compute logits of `mode.next` by a tied embedding, of `mode.embedding`.

    A classifier with a weight of its own is a `linear`.
    """
    if mode.kind == "1d":
        return column(x, embedding, mode.axes)
    if mode.kind == "3d":
        return _cube(x, embedding, mode, dim=0)
    return psum_scatter(F.linear(x, all_gather(embedding, mode.vocabulary)), mode.hidden, dim=-1)


def varying(values: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Mark replicated weights where they meet data that is sharded over `axes`.

    So their gradients are summed over these.
    """
    if not axes or values is None:
        return values
    return pvary(values, axes)


def _cube(x: Tensor, weight: PyTree, mode: Mode, dim: int = 1) -> PyTree:
    """Gather A, gather B along dim `dim` of the weight, multiply, reduce-scatter C."""
    rows = all_gather(x, mode.next.hidden, dim=0)
    products = _products(rows, all_gather(weight, mode.axes[0], dim=dim))
    return psum_scatter(products, mode.hidden, dim=0)


def _summa(x: Tensor, weight: PyTree, mode: Mode) -> PyTree:
    depth = mode.axes[:-2]  # of 2.5d; the gradient of a weight is summed over it
    weight = varying(weight, depth)
    weights = (weight,) if isinstance(weight, Tensor) else weight
    # A view of a lazy parameter is a plain tensor, which `_Summa` can save.
    inputs = [y if type(y) is Tensor else y.view_as(y) for y in (x, *weights)]
    ys = cast("Any", _Summa).apply(mode, *inputs)
    return ys[0] if isinstance(weight, Tensor) else ys


class _Summa(Function):
    """C = gather(A) gather(B). The backward gathers the saved shards again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mode: Mode, x: Tensor, *weights: Tensor) -> Tensors:
        rows = all_gather(x, mode.hidden, dim=-1)
        return _products(rows, all_gather(weights, mode.contracted, dim=1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.mode, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        mode = ctx.mode
        x, *weights = ctx.saved_tensors
        _, needs_x, *needs_weights = ctx.needs_input_grad

        grad_x: Tensor | None = None
        if needs_x:
            full = all_gather(tuple(weights), mode.contracted, dim=1)
            summands = sum(g @ w for g, w in zip(cotangents, full, strict=True))
            del full  # before the rows of x are gathered
            grad_x = psum_scatter(summands, mode.hidden, dim=-1)

        grad_weights: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(needs_weights):
            rows = all_gather(x, mode.hidden, dim=-1).flatten(0, -2)
            summands = tuple([g.flatten(0, -2).mT @ rows for g in cotangents])
            grad_weights = psum_scatter(summands, mode.contracted, dim=1)
        return None, grad_x, *grad_weights

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensors:
        # Linear in x and in the weights, so the tangent is a sum of two products.
        x, *weights = ctx.saved_tensors
        _, tangent_x, *tangent_weights = grad_inputs
        summa = cast("Any", _Summa).apply
        of_x = summa(ctx.mode, tangent_x, *weights)
        of_weights = summa(ctx.mode, x, *tangent_weights)
        return tuple([a + b for a, b in zip(of_x, of_weights, strict=True)])


def _products(x: Tensor, weight: PyTree, bias: PyTree = None) -> PyTree:
    """Return x times a weight plus its bias, or the tuple of these for a tuple of weights."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    biases = bias or (None,) * len(weight)
    return tuple([F.linear(x, w, b) for w, b in zip(weight, biases, strict=True)])


def _biased(y: PyTree, bias: PyTree) -> PyTree:
    """Add a bias, or each one of a tuple to its result."""
    if bias is None:
        return y
    if isinstance(y, Tensor):
        return y + bias
    return tuple([_biased(result, b) for result, b in zip(y, bias, strict=True)])
