"""What a function computes with on an abstract mesh: tensors without values, wherever they come from.

The shards that a function is given are meta tensors.  What it makes itself (`torch.ones`, a module, an array of numpy) or
reaches from outside has values; so that it fits, it forgets them: at once if it is made, else where it meets a tensor
without values.  What asks for a value that nobody has is one clear error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors  # pyright: ignore[reportPrivateUsage]

from fshard.errors import LayoutError
from fshard.mesh.differentiate import LinearMap, Tensors, apply
from fshard.mesh.tree import flatten, unflatten
from fshard.source import call_site

_MAKES: frozenset[Any] = frozenset(_device_constructors())


class Valueless(TorchFunctionMode):
    """Make all tensors without values, and let those that meet such a tensor forget theirs.

    >>> import torch
    >>> with Valueless():
    ...     x = torch.ones(2)
    >>> x.device, (x + 1).device
    (device(type='meta'), device(type='meta'))
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {name: given for name, given in (kwargs or {}).items() if name != "generator"}
        if func in _MAKES:
            return func(*args, **named | {"device": "meta"})
        given: Any = (args, named)
        leaves, structure = flatten(given)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not any(x.is_meta for x in tensors):
            return func(*args, **(kwargs or {}))
        if len(tensors) > 1:
            args, named = unflatten(structure, [without_values(x) if isinstance(x, Tensor) else x for x in leaves])
        try:
            return func(*args, **named)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "meta" not in str(error):
                raise
            raise LayoutError(
                f"{getattr(func, '__name__', func)} at {call_site()} asks for the value of a tensor of shape "
                f"{tuple(tensors[0].shape)}, but on an abstract mesh tensors have none. What depends on values, an `if` or "
                "a .item(), runs on a virtual mesh."
            ) from error


def without_values(x: Tensor) -> Tensor:
    """Return a tensor that is like this one, without values."""
    return x if x.is_meta else apply(Forget(), (x,))[0]


@dataclass(frozen=True)
class Forget:
    """Keep of a tensor only what it is like, on an abstract mesh.  Cotangents have no values either: none leads back."""

    def run(self, xs: Tensors) -> Tensors:
        """Take the values away."""
        return tuple(x.to("meta") for x in xs)

    def transposed(self) -> LinearMap:
        """Return what says that there is no way back."""
        return _Forgotten()

    def batched(self) -> LinearMap:
        """Return itself."""
        return self


class _Forgotten(Forget):
    def run(self, xs: Tensors) -> Tensors:
        raise LayoutError(
            f"A gradient of shape {tuple(xs[0].shape)} was asked for at a tensor with values, but on an abstract mesh it has "
            'none. Give the mesh meta tensors: x.detach().to("meta").requires_grad_().'
        )
