"""`Joined`: the parts of a fused weight, such as q, k and v, and those of its product.

Each part is sharded by itself: a device has its heads of q, of k and of v, which are no range of
the fused dim. Here 2 devices share 4 heads:

    fused dim       q0 q1 q2 q3 k0 k1 k2 k3 v0 v1 v2 v3
    a range of it   q0 q1 q2 q3 k0 k1                       what device 0 would have
    parts           q0 q1       k0 k1       v0 v1           what it has

So the parts are concatenated only where an operation needs them as one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from fshard.array.dispatch import operate
from fshard.array.rules import arrays_in
from fshard.errors import LayoutError
from fshard.mesh.layout.array_methods import ArrayMethods
from fshard.mesh.layout.sharded import Sharded

_VIEWS = {
    "view", "reshape", "split", "split_with_sizes", "chunk", "tensor_split", "narrow", "getitem",
}  # fmt: skip
"""The operations that may keep the parts of a product, or take some."""
_INPUTS = {"linear": (0, "input"), "addmm": (1, "mat1")}
"""The operations that multiply by a fused weight: position and name of what they multiply."""
_OF_A_PART = {"dtype", "device", "requires_grad", "ndim"}
"""The attributes that are equal for a part and for the concatenation."""


class Joined(ArrayMethods):
    """Arrays that are one array, concatenated along a dim.

    The product with a fused weight is joined again, along its last dim. A view of all of that dim
    is too, and a split or a slice takes parts. Any other operation gets the concatenation.
    """

    computes_on_arrays = True
    step: Any = None
    """The step of lazy parameters, where `functionalize` looks for it."""

    def __init__(self, parts: Sequence[Any], joined_dim: int) -> None:
        self.parts = tuple(parts)
        self.joined_dim = joined_dim
        shape = list(self.parts[0].shape)
        shape[joined_dim] = sum([part.shape[joined_dim] for part in self.parts])
        self.shape = torch.Size(shape)

    def full(self) -> Any:
        """Return the concatenation."""
        return torch.cat(self.parts, self.joined_dim)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a torch function of arguments of which some are joined, or read an attribute."""
    if isinstance(func, str):
        joined = args[0]
        source = joined.parts[0] if func in _OF_A_PART else joined.full()
        return getattr(source, func)

    name = getattr(func, "__name__", "")
    if name in _INPUTS:
        position, key = _INPUTS[name]
        x = args[position] if position < len(args) else kwargs.get(key)
        if not isinstance(x, Joined):  # so the weight is
            return _multiply(func, args, kwargs)
    if _is_in_place(name):
        raise LayoutError(
            f"{name} must not change a fused weight or its product in place: a plan has their "
            "parts as arrays of their own. Use the result of an operation that returns a new "
            "array, such as y = y * 2."
        )
    if args and isinstance(args[0], Joined) and args[0].joined_dim == -1:
        view = _view(name.strip("_"), args[0], func, args[1:], kwargs)
        if view is not None:
            return view

    full_args = tuple([concatenated(x) for x in args])
    full_kwargs = {key: concatenated(x) for key, x in kwargs.items()}
    if any(isinstance(x, Sharded) for x in arrays_in(full_args, full_kwargs)):
        return operate(func, full_args, full_kwargs)  # torch's own methods take tensors only
    return func(*full_args, **full_kwargs)


Joined.operations = staticmethod(compute)


def concatenated(x: Any) -> Any:
    """Return the array that the parts of a `Joined` are; anything else unchanged."""
    return x.full() if isinstance(x, Joined) else x


def _is_in_place(name: str) -> bool:
    """Return True for a function of torch that changes its first argument: add_, __setitem__."""
    is_special = name.startswith("__")
    return name == "__setitem__" or (name.endswith("_") and not is_special)


def _multiply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Joined:
    """Return the products with the parts of a fused weight, each with its part of the bias."""
    joined = [x for x in (*args, *kwargs.values()) if isinstance(x, Joined)]
    products: list[Any] = []
    for number in range(len(joined[0].parts)):
        part_args = [_part(x, number) for x in args]
        part_kwargs = {key: _part(x, number) for key, x in kwargs.items()}
        products.append(func(*part_args, **part_kwargs))
    return Joined(products, -1)


def _part(x: Any, number: int) -> Any:
    return x.parts[number] if isinstance(x, Joined) else x


def _view(name: str, x: Joined, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a view, a split or a slice of a product; None if it does not consist of its parts."""
    if name not in _VIEWS or arrays_in(args, kwargs):
        return None
    # torch itself computes which range of the last dim each view is, on a tensor without memory.
    meta = torch.empty(x.shape, device="meta")
    result = func(meta, *args, **kwargs)

    if name in ("view", "reshape"):
        if result.shape[-1] != x.shape[-1]:
            return None
        views = [part.reshape(*result.shape[:-1], part.shape[-1]) for part in x.parts]
        return Joined(views, -1)

    view_ranges = ranges_of(meta, arrays_in(result), -1)
    if view_ranges is None:
        return None
    stops = accumulate([part.shape[-1] for part in x.parts], initial=0)
    part_of_range = dict(zip(pairwise(stops), x.parts, strict=True))
    if not all(view_range in part_of_range for view_range in view_ranges):
        return None
    parts = [part_of_range[view_range] for view_range in view_ranges]
    return parts[0] if isinstance(result, torch.Tensor) else tuple(parts)


def ranges_of(x: Any, views: Sequence[Any], dim: int) -> list[tuple[int, int]] | None:
    """Return the ranges of a dim that views of a tensor are.

    None if one does not have all of the other dims, in which case it is no range of this one.

    >>> x = torch.empty(2, 6)
    >>> ranges_of(x, x.split([2, 4], -1), -1)
    [(0, 2), (2, 6)]
    """
    step = x.stride(dim)
    if step == 0:
        return None
    ranges: list[tuple[int, int]] = []
    for view in views:
        has_same_strides = view.stride() == x.stride()
        # As many elements as the range has, times those of the other dims.
        elements = view.shape.numel() * x.shape[dim]
        if not has_same_strides or elements != x.shape.numel() * view.shape[dim]:
            return None
        start = (view.storage_offset() - x.storage_offset()) // step
        ranges.append((start, start + view.shape[dim]))
    return ranges
