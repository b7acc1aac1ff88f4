"""`custom_function`: a function on arrays with a gradient of its own, as `jax.custom_vjp`.

A `torch.autograd.Function` of the user takes an array for a constant. This one takes the shards of
the arrays apart, so that autograd records them, and gives both functions of the user arrays again:

    arguments -> shards -> [ arrays -> forward -> arrays ] -> shards -> outputs
    gradients <- shards <- [ arrays <- backward <- arrays ] <- shards <- cotangents
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from fshard.array.autograd import as_gradient, cotangent_shards
from fshard.array.communicate import in_loss, plan_transfer, transfer
from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import Tensors, recorded, transformed
from fshard.mesh.layout import Layout, P, PyTree, Structure, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded


def custom_function(
    forward: Callable[..., Any], backward: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """Return a function on arrays whose gradient is computed by `backward`, as by `jax.custom_vjp`.

    Both functions compute with operations on arrays. Arguments, outputs and residuals are arrays or
    trees of them; other values, such as numbers, pass unchanged and have no gradient. Arrays that
    `forward` does not get as arguments are constants.

    It works under `torch.autograd` and `fs.array.lift(torch.func.grad)`, on any layout, and may be
    differentiated again: `backward` is then differentiated too, and `forward` called once more for
    the residuals.

    Args:
        forward: called with the arguments. It returns `(output, residuals)`, where the residuals
            are what `backward` needs; or an output that is a single array, without residuals,
            which are `()` then.
        backward: called with `(residuals, cotangent)`. The cotangent is like the output. It returns
            a tuple with one cotangent for each argument, None for an argument without gradient; for
            a single argument also its cotangent alone. The cotangent of an array has its shape; its
            layout may be another.

    >>> import torch, fshard as fs
    >>> layout = fs.Layout(fs.make_mesh({"data": 2}), fs.P("data"))
    >>> x = fs.array.full((4,), 1.7, layout=layout).requires_grad_()
    >>> def pass_through(residuals, cotangent):
    ...     return cotangent
    >>> straight_through = fs.array.custom_function(lambda x: x.round(), pass_through)
    >>> y = straight_through(x)
    >>> (3 * y).sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([2.0, 2.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0])
    """

    @wraps(forward)
    def function(*args: Any) -> Any:
        forms: list[_Form] = []
        shards: list[Tensor] = []
        for arg in args:
            form, arg_shards = _open(arg)
            forms.append(form)
            shards += arg_shards
        if not transformed() and not recorded(tuple(shards)):
            output, _ = _output_and_residuals(forward(*args))
            return output

        call = _Call(forward, backward, forms)
        outputs = _Custom.apply(call, *shards)
        assert call.output is not None
        return call.output.close(iter(outputs))

    return function


# Trees of arrays, as shards.


class _ArrayForm(NamedTuple):
    """An array without its shards."""

    shape: tuple[int, ...]
    layout: Layout
    dtype: torch.dtype
    shard_count: int
    """The number of shards that this process holds."""

    @property
    def is_continuous(self) -> bool:
        return _is_continuous(self.dtype)


@dataclass(frozen=True)
class _Form:
    """A tree with forms in place of arrays."""

    leaves: list[Any]
    structure: Structure

    @property
    def has_arrays(self) -> bool:
        return any(type(leaf) is _ArrayForm for leaf in self.leaves)

    def close(self, shards: Iterator[Tensor]) -> PyTree:
        """Put the tree together with the next shards."""
        leaves: list[Any] = []
        for leaf in self.leaves:
            if type(leaf) is _ArrayForm:
                own_shards = tuple(islice(shards, leaf.shard_count))
                leaves.append(Sharded(leaf.shape, leaf.layout, own_shards))
            else:
                leaves.append(leaf)
        return unflatten(self.structure, leaves)


def _open(tree: PyTree) -> tuple[_Form, list[Tensor]]:
    """Return the form of a tree of arrays, and the shards of all its arrays."""
    leaves, structure = flatten(tree, none_is_leaf=True)
    shards: list[Tensor] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Sharded):
            leaf.check()
            shards += leaf.shards
            leaves[index] = _ArrayForm(leaf.shape, leaf.layout, leaf.dtype, len(leaf.shards))
        elif isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            raise LayoutError(
                "custom_function: what is differentiated must be an array; got a plain tensor of "
                f"shape {tuple(leaf.shape)}. Put it on the mesh: fs.device_put(x, fs.Layout(mesh, "
                "P()))."
            )
    return _Form(leaves, structure), shards


# A call.


@dataclass
class _Call:
    """The functions and the arguments of one call, without shards."""

    forward: Callable[..., Any]
    backward: Callable[[Any, Any], Any]
    args: list[_Form]
    output: _Form | None = None
    residuals: _Form | None = None
    residual_shards: Tensors = ()
    """The shards of residuals, from the forward until autograd saves them."""
    random_state: Tensor | None = None
    """The state of the generator before the forward: a recompute draws the same numbers."""

    def arguments(self, shards: Sequence[Tensor]) -> list[PyTree]:
        """Return the arguments with these shards."""
        remaining = iter(shards)
        return [form.close(remaining) for form in self.args]

    def compute(self, shards: Sequence[Tensor]) -> Tensors:
        """Call the forward, and return the shards of its output."""
        self.random_state = torch.get_rng_state()
        output, residuals = _output_and_residuals(self.forward(*self.arguments(shards)))
        self.output, outputs = _open(output)
        self.residuals, residual_shards = _open(residuals)
        self.residual_shards = tuple(residual_shards)
        return tuple(outputs)

    def recompute_residuals(self, shards: Sequence[Tensor]) -> PyTree:
        """Compute the residuals from the arguments, so that derivatives include them."""
        assert self.random_state is not None
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_state)
            _, residuals = _output_and_residuals(self.forward(*self.arguments(shards)))
            return residuals

    def cotangents(self, residuals: PyTree, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the arguments' shards, given those of the outputs' shards.

        It calls the backward.
        """
        assert self.output is not None
        remaining = iter(gradients)
        leaves: list[Any] = []
        for leaf in self.output.leaves:
            cotangent = None
            if type(leaf) is _ArrayForm:
                leaf_gradients = tuple(islice(remaining, leaf.shard_count))
                if leaf.is_continuous:
                    cotangent = _incoming(leaf_gradients, leaf)
            leaves.append(cotangent)
        returned = self.backward(residuals, unflatten(self.output.structure, leaves))

        if not isinstance(returned, tuple) and len(self.args) == 1:
            returned = (returned,)
        if not isinstance(returned, tuple) or len(returned) != len(self.args):
            raise LayoutError(
                "custom_function: backward must return a tuple with a cotangent or None for each of "
                f"the {len(self.args)} arguments; got {_described(returned)}."
            )
        shards: list[Tensor | None] = []
        for number, (form, cotangent) in enumerate(zip(self.args, returned, strict=True)):
            shards += _outgoing(number, form, cotangent)
        return shards


class _Custom(Function):
    @staticmethod
    def forward(call: _Call, *shards: Tensor) -> Tensors:
        outputs = call.compute([shard.detach() for shard in shards])
        # Replicas may be one tensor; autograd records an output only once.
        tensor_ids: set[int] = set()
        distinct: list[Tensor] = []
        for y in outputs:
            distinct.append(y.clone() if id(y) in tensor_ids else y)
            tensor_ids.add(id(y))
        return tuple(distinct)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        call, *shards = inputs
        residual_shards = call.residual_shards
        call.residual_shards = ()  # from now on autograd keeps them, and frees them
        if transformed():
            residual_shards = ()  # torch.func saves inputs and outputs only
        ctx.call = call
        ctx.count = len(shards) if call.residuals.has_arrays else 0
        ctx.save_for_backward(*shards[: ctx.count], *residual_shards)
        ctx.mark_non_differentiable(*[y for y in output if not _is_continuous(y.dtype)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        saved = ctx.saved_tensors
        shards = saved[: ctx.count]
        residual_shards = saved[ctx.count :]
        is_recorded = torch.is_grad_enabled()
        if is_recorded and in_loss():
            raise LayoutError(
                "custom_function: in a loss function a first derivative must be taken, without "
                "create_graph=True. Write the function with operations on arrays, whose derivatives "
                "are known."
            )
        if shards and (is_recorded or not residual_shards):
            residuals = call.recompute_residuals(shards)
        else:
            residuals = call.residuals.close(iter(residual_shards))
        return None, *call.cotangents(residuals, gradients)


def _output_and_residuals(result: Any) -> tuple[PyTree, PyTree]:
    if isinstance(result, Sharded):
        return result, ()
    if not isinstance(result, tuple) or len(result) != 2:
        raise LayoutError(
            "custom_function: forward must return (output, residuals), or one array; got "
            f"{_described(result)}. Write return output, () if backward needs no residuals."
        )
    return result


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# Note [Cotangents of arrays]
# The gradient of a shard, as autograd has it, becomes an array, and the other way round. Outside of
# a loss function the cotangent of a sharded or replicated array has its layout, and that of an
# unreduced one is replicated. In a loss function every value is varying: a device has its own part
# of the cotangent of a replicated array, so that is unreduced.


def _incoming(gradients: Tensors, form: _ArrayForm) -> Sharded:
    """Return the gradients of the shards of an output as an array.

    See Note [Cotangents of arrays].
    """
    if not in_loss():
        return as_gradient(gradients, Sharded(form.shape, form.layout, gradients))
    return Sharded(form.shape, form.layout.with_spec(_in_loss_spec(form.layout)), gradients)


def _outgoing(number: int, form: _Form, cotangent: PyTree) -> list[Tensor | None]:
    """Return the cotangent of an argument as the gradients of its shards."""
    leaves: Sequence[Any] = [None] * len(form.leaves)
    if cotangent is not None:
        leaves, structure = flatten(cotangent, none_is_leaf=True)
        if structure != form.structure:
            raise LayoutError(
                f"custom_function: backward must return a cotangent like argument {number}; got "
                f"{_described(cotangent)}. Return None for an argument without gradient."
            )

    shards: list[Tensor | None] = []
    for leaf, x in zip(leaves, form.leaves, strict=True):
        if type(x) is not _ArrayForm:
            continue
        if leaf is None or not x.is_continuous:
            shards += [None] * x.shard_count
            continue
        is_like = isinstance(leaf, Sharded) and leaf.shape == x.shape
        if not is_like or leaf.mesh != x.layout.mesh:
            raise LayoutError(
                f"custom_function: backward must return an array of shape {x.shape} on "
                f"{x.layout.mesh} for argument {number}; got {_described(leaf)}. Sum over dims that "
                "were broadcast."
            )
        if leaf.dtype is not x.dtype:
            leaf = leaf.to(x.dtype)
        if in_loss():
            change = plan_transfer(leaf.shape, leaf.layout, _in_loss_spec(x.layout))
            shards += transfer(leaf, change, "custom_function")
        else:
            shards += cotangent_shards(leaf, x.layout.spec)
    return shards


def _in_loss_spec(layout: Layout) -> P:
    """Return the spec of the cotangent of an array in a loss function."""
    used = layout.spec.axes
    replicated = tuple(axis for axis in layout.mesh.axis_names if axis not in used)
    return layout.spec.replace(unreduced=replicated)


def _described(x: Any) -> str:
    return repr(x) if isinstance(x, Sharded) else type(x).__name__
