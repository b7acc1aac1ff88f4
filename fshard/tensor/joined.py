"""`Joined`: parts of a fused weight, such as q, k and v, and of its product; they are concatenated only if need be.

Each part is sharded by itself: a device has its heads of q, of k and of v, which are no range of the fused dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch


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
        one, length = self.parts[0], sum(x.shape[dim] for x in self.parts)
        self.shape = torch.Size(length if d == dim % one.ndim else n for d, n in enumerate(one.shape))

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
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
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
        found = _of_result(name, first, args[1:], kwargs)
        if found is not None:
            return found
    args = tuple(x.full() if isinstance(x, Joined) else x for x in args)
    return func(*args, **{key: x.full() if isinstance(x, Joined) else x for key, x in kwargs.items()})


def _of_result(name: str, x: Joined, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a view, a split or a slice of a product; None if it does not keep the parts."""
    lengths = [part.shape[-1] for part in x.parts]
    last = x.shape[-1]
    if name in ("view", "reshape"):
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        return (
            Joined([part.reshape(*shape[:-1], part.shape[-1]) for part in x.parts], -1) if shape[-1] == last else None
        )
    if name in ("split", "chunk"):
        wanted = [y.shape[-1] for y in getattr(torch, name)(torch.empty(1, last, device="meta"), args[0], -1)]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return x.parts if wanted == lengths and dim in (-1, len(x.shape) - 1) else None
    if name == "getitem" and isinstance(args[0], tuple) and args[0][0] is Ellipsis and len(args[0]) == 2:
        stops = [*accumulate(lengths)]
        ranges = [*zip([0, *stops], stops, strict=False)]
        found = args[0][1].indices(last)[:2] if isinstance(args[0][1], slice) else None
        return x.parts[ranges.index(found)] if found in ranges else None
    return None
