"""Reject tensors that a mapped function captures from outside.

A mapped function is one operation of its arguments. A tensor that it captures from a closure would
be a constant to autograd and torch.func, so a captured tensor that requires grad raises.
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
    """Raise if a result depends on a tensor that requires grad and was not passed in.

    The gradient of that tensor would be lost. A leaf that the function made out of an argument, as
    `w.detach().requires_grad_()`, is no such tensor.
    """
    for xs, ys in zip(inputs, outputs, strict=True):
        if not any(y.requires_grad for y in ys):
            continue
        memory = {_storage_of(x) for x in xs if not x.is_meta}
        for leaf in _graph_leaves(ys):
            is_argument = any(leaf is x for x in xs)
            if not is_argument and _storage_of(leaf) not in memory:
                raise LayoutError(
                    "A result of the function depends on a tensor that requires grad (shape "
                    f"{tuple(leaf.shape)}, {leaf.dtype}) and is not one of its arguments, so its "
                    f"gradient on {mesh} would be lost. Pass it as an argument with a spec; if it "
                    "was made inside, detach the result."
                )


def _storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _graph_leaves(ys: Tensors) -> Iterator[Tensor]:
    """Yield the leaves that require grad in the graph of some tensors."""
    visited: set[Any] = set()
    nodes = [y.grad_fn for y in ys if y.grad_fn is not None]
    yield from [y for y in ys if y.grad_fn is None and y.requires_grad]
    while nodes:
        node = nodes.pop()
        if node not in visited:
            visited.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                yield variable
            nodes += [before for before, _ in node.next_functions if before is not None]


class RefuseTransformed(TorchFunctionMode):
    """Raise where a device makes a tensor of one that a torch.func transform around the run maps.

    Such a tensor, captured from outside, is wrapped; on a device no transform is active.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if transformed():  # by the function itself: its own wrapped tensors
            return result

        arguments: Any = (args, kwargs)
        tensors = [x for x in flatten_shards(arguments)[0] if isinstance(x, Tensor)]
        wrapped = [x for x in tensors if is_functorch_wrapped_tensor(x)]
        if wrapped and any(isinstance(x, Tensor) for x in flatten_shards(result)[0]):
            shape = tuple(wrapped[0].shape)
            raise LayoutError(
                f"The function uses a tensor from outside (shape {shape}, {wrapped[0].dtype}) that "
                "a transform of torch.func looks at and that is not one of its arguments, so its "
                "derivative would be lost. Pass it as an argument with a spec, or detach it."
            )
        return result
