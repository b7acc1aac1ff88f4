"""What a function of one device may not take along: tensors from outside whose derivative would be lost.

The run on all devices is one operation of its arguments.  A tensor that the function reaches in another way, out of a
closure say, is no part of it: autograd and the transforms of torch.func would take it for a constant.  To read what such
a tensor is like, its shape or dtype, is harmless.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from fshard.errors import LayoutError
from fshard.mesh.differentiate import Tensors, transformed
from fshard.mesh.mesh import Mesh
from fshard.mesh.tree import flatten


def refuse_captured(mesh: Mesh, inputs: list[Tensors], outputs: list[Tensors]) -> None:
    """Raise if a result depends on a tensor that requires grad and was not passed in: its gradient would be lost.

    A leaf that the function made out of an argument, as `w.detach().requires_grad_()`, is no such tensor.
    """
    for xs, ys in zip(inputs, outputs, strict=True):
        if not any(y.requires_grad for y in ys):
            continue
        memory = {x.untyped_storage()._cdata for x in xs if x.device.type != "meta"}  # pyright: ignore[reportPrivateUsage]
        for leaf in _leaves_of(ys):
            if not any(leaf is x for x in xs) and leaf.untyped_storage()._cdata not in memory:  # pyright: ignore[reportPrivateUsage]
                raise LayoutError(
                    f"A result of the function depends on a tensor that requires grad (shape {tuple(leaf.shape)}, "
                    f"{leaf.dtype}) and is not one of its arguments, so its gradient on {mesh} would be lost. Pass it as "
                    "an argument with a spec; if it was made inside, detach the result."
                )


def _leaves_of(ys: Tensors) -> Iterator[Tensor]:
    """Yield the leaves that require grad in the graph of some tensors."""
    seen: set[Any] = set()
    nodes = [y.grad_fn for y in ys if y.grad_fn is not None]
    yield from (y for y in ys if y.grad_fn is None and y.requires_grad)
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                yield variable
            nodes += [before for before, _ in node.next_functions if before is not None]


def _metadata() -> frozenset[Any]:
    """Return the functions that read what a tensor is like, and none of its values."""
    kind: Any = Tensor
    read = "shape dtype device layout ndim requires_grad is_leaf itemsize nbytes "
    read += "is_cuda is_cpu is_meta is_nested is_sparse is_quantized"
    asked = "size dim ndimension nelement element_size stride __len__ get_device is_contiguous"
    both = "numel is_floating_point is_complex is_signed is_inference is_conj is_neg"
    return frozenset(
        [getattr(kind, name).__get__ for name in read.split()]
        + [getattr(kind, name) for name in (asked + " " + both).split()]
        + [getattr(torch, name) for name in both.split()]
    )


_METADATA = _metadata()


class RefuseTransformed(TorchFunctionMode):
    """Raise where a device computes with a tensor of a torch.func transform around the run: its derivative would be lost."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            return func(*args, **(kwargs or {}))
        given: Any = (args, kwargs or {})
        leaves, _ = flatten(given)
        lost = [x for x in leaves if isinstance(x, Tensor) and is_functorch_wrapped_tensor(x)]
        if lost and not transformed():
            raise LayoutError(
                f"The function uses a tensor from outside (shape {tuple(lost[0].shape)}, {lost[0].dtype}) that a transform of "
                "torch.func looks at and that is not one of its arguments, so its derivative would be lost. Pass it as an "
                "argument with a spec, or detach it."
            )
        return func(*args, **(kwargs or {}))
