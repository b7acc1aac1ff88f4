"""`Joined`: parts of a fused weight, such as q, k and v, and of its product; they are concatenated only if need be.

Each part is sharded by itself: a device has its heads of q, of k and of v, which are no range of the fused dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from fshard.array.dispatch import operate
from fshard.array.rules import arrays_in
from fshard.mesh.layout.sharded import Sharded


class Joined:
    """Arrays that are one array, concatenated along a dim.

    The product with a fused weight is joined again, along its last dim; a view keeps that, and a split or a slice takes a
    part. Any other operation gets the concatenation.
    """

    computes_on_arrays = True
    step = None
    _version = 0

    def __init__(self, parts: Sequence[Any], dim: int) -> None:
        self.parts, self.dim = tuple(parts), dim
        first, length = self.parts[0], sum(x.shape[dim] for x in self.parts)
        self.shape = torch.Size(
            length if d == dim % first.ndim else n for d, n in enumerate(first.shape)
        )

    def full(self) -> Any:
        """Return the concatenation."""
        return torch.cat(self.parts, self.dim)

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)
        if not callable(method):
            return (
                getattr(self.parts[0], name)
                if name in ("dtype", "device", "requires_grad", "ndim")
                else getattr(self.full(), name)
            )
        return lambda *args, **kwargs: compute(method, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return compute(torch.Tensor.__getitem__, (self, index), {})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on arguments of which some are joined."""
    name = getattr(func, "__name__", "").strip("_")
    first = args[0]
    if name in ("linear", "addmm") and not kwargs:
        weights = [x for x in args if isinstance(x, Joined)]
        columns = [x.parts if isinstance(x, Joined) else (x,) * len(weights[0].parts) for x in args]
        return Joined([func(*each) for each in zip(*columns, strict=True)], -1)
    if isinstance(first, Joined) and first.dim == -1:
        result = _of_result(name, first, func, args[1:], kwargs)
        if result is not None:
            return result
    full_args = tuple([concatenated(x) for x in args])
    full_kwargs = {key: concatenated(x) for key, x in kwargs.items()}
    if any(isinstance(x, Sharded) for x in arrays_in(full_args, full_kwargs)):
        return operate(func, full_args, full_kwargs)  # torch's own methods take tensors only
    return func(*full_args, **full_kwargs)


def concatenated(x: Any) -> Any:
    """Return the array that parts are; anything else unchanged."""
    return x.full() if isinstance(x, Joined) else x


def _of_result(
    name: str, x: Joined, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of a view, a split or a slice of a product; None if it does not keep the parts."""
    if name not in _VIEWS or arrays_in(args, kwargs):
        return None
    lengths, like = [shard.shape[-1] for shard in x.parts], torch.empty(x.shape, device="meta")
    result = func(like, *args, **kwargs)
    if name in ("view", "reshape"):
        views = [shard.reshape(*result.shape[:-1], shard.shape[-1]) for shard in x.parts]
        return Joined(views, -1) if result.shape[-1] == x.shape[-1] else None
    stops = [*accumulate(lengths)]
    ranges = [*zip([0, *stops], stops, strict=False)]
    view_ranges = ranges_of(like, arrays_in(result), -1) or [None]
    parts = [
        x.parts[ranges.index(view_range)] for view_range in view_ranges if view_range in ranges
    ]
    return (
        None
        if len(parts) < len(view_ranges)
        else parts[0]
        if isinstance(result, torch.Tensor)
        else tuple(parts)
    )


_VIEWS = {
    "view",
    "reshape",
    "split",
    "split_with_sizes",
    "chunk",
    "tensor_split",
    "narrow",
    "getitem",
}


def ranges_of(x: Any, views: Sequence[Any], dim: int) -> list[tuple[int, int]] | None:
    """Return the ranges of a dim that views of a tensor are, if they have all of its other dims; else None."""
    step, ranges = x.stride(dim), list[tuple[int, int]]()
    for y in views:
        if (
            y.stride() != x.stride()
            or not step
            or y.shape.numel() * x.shape[dim] != x.shape.numel() * y.shape[dim]
        ):
            return None
        start = (y.storage_offset() - x.storage_offset()) // step
        ranges.append((start, start + y.shape[dim]))
    return ranges
