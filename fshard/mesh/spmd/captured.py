"""Reject tensors that a mapped function captures from outside.

A mapped function is one operation of its arguments. A tensor that it captures from a closure would be a constant to
autograd and torch.func, so a captured tensor that requires grad raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import Tensors, transformed
from fshard.mesh.layout import Mesh
from fshard.mesh.layout.sharded import flatten_shards


def validate_captured(mesh: Mesh, inputs: list[Tensors], outputs: list[Tensors]) -> None:
    """Raise if a result depends on a tensor that requires grad and was not passed in: its gradient would be lost.

    A leaf that the function made out of an argument, as `w.detach().requires_grad_()`, is no such tensor.
    """
    for xs, ys in zip(inputs, outputs, strict=True):
        if not any(y.requires_grad for y in ys):
            continue
        memory = {x.untyped_storage()._cdata for x in xs if x.device.type != "meta"}  # pyright: ignore[reportPrivateUsage]
        for leaf in _graph_leaves(ys):
            if not any(leaf is x for x in xs) and leaf.untyped_storage()._cdata not in memory:  # pyright: ignore[reportPrivateUsage]
                raise LayoutError(
                    f"A result of the function depends on a tensor that requires grad (shape {tuple(leaf.shape)}, "
                    f"{leaf.dtype}) and is not one of its arguments, so its gradient on {mesh} would be lost. Pass it as "
                    "an argument with a spec; if it was made inside, detach the result."
                )


def _graph_leaves(ys: Tensors) -> Iterator[Tensor]:
    """Yield the leaves that require grad in the graph of some tensors."""
    visited: set[Any] = set()
    nodes = [y.grad_fn for y in ys if y.grad_fn is not None]
    yield from (y for y in ys if y.grad_fn is None and y.requires_grad)
    while nodes:
        node = nodes.pop()
        if node not in visited:
            visited.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                yield variable
            nodes += [before for before, _ in node.next_functions if before is not None]


class RefuseTransformed(TorchFunctionMode):
    """Raise where a device makes a tensor of one that a torch.func transform around the run looks at."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments: Any = (args, kwargs or {})
        lifted = [
            x
            for x in flatten_shards(arguments)[0]
            if isinstance(x, Tensor) and is_functorch_wrapped_tensor(x)
        ]
        if (
            lifted
            and not transformed()
            and any(isinstance(x, Tensor) for x in flatten_shards(result)[0])
        ):
            raise LayoutError(
                f"The function uses a tensor from outside (shape {tuple(lifted[0].shape)}, {lifted[0].dtype}) that a transform "
                "of torch.func looks at and that is not one of its arguments, so its derivative would be lost. Pass it as an "
                "argument with a spec, or detach it."
            )
        return result
