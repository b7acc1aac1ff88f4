"""Define every collective on a plain list of per-device tensors: the oracle that all runtimes are compared with.

A list has a tensor per device of a group, in the group's order. `forward` returns the results of the devices;
`backward` maps their cotangents (and the inputs) to the cotangents of the inputs; `sent` returns the bytes that a
device sends. All is written independently, from the documentation and without looking at the code under test.

Legend: n devices, xs their inputs, gs the cotangents of their results; i a device's index, size its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor]
Pairs = Sequence[tuple[int, int]]


def total(xs: Sequence[Tensor]) -> Tensor:
    """Add in the documented tree, ((0 + 1) + (2 + 3)) + ..., level by level; a tensor without partner moves up.

    16-bit floats are added in 32 bits and rounded once; booleans are counted.

    >>> total([torch.tensor(True), torch.tensor(False), torch.tensor(True)])
    tensor(2)
    """
    dtype = xs[0].dtype
    if dtype == torch.bool:
        return total([x.long() for x in xs])
    if dtype in (torch.float16, torch.bfloat16):
        return total([x.float() for x in xs]).to(dtype)
    pairs = [a + b for a, b in zip(xs[::2], xs[1::2], strict=False)]
    return xs[0] if len(xs) == 1 else total([*pairs, *xs[len(xs) & ~1 :]])


def cut(x: Tensor, n: int, dim: int) -> Tensors:
    """Split a dim into n equal shards."""
    each = x.shape[dim] // n
    return [x.narrow(dim, i * each, each) for i in range(n)]


def share(xs: Tensors, extreme: Tensor) -> Tensors:
    """Return each device's share of an extreme: equal shares for all that hold it."""
    holds = [(x == extreme).to(extreme.dtype) for x in xs]
    return [mine / torch.stack(holds).sum(0) for mine in holds]


# -- forward: what the devices hold, to what they get -------------------------------------------------------------


def psum(xs: Tensors) -> Tensors:
    """[1 2], [3 4]  =>  [4 6], [4 6]."""
    return [total(xs) for _ in xs]


def pmean(xs: Tensors) -> Tensors:
    """[1 2], [3 4]  =>  [2 3], [2 3]."""
    return [total(xs) / len(xs) for _ in xs]


def pmax(xs: Tensors) -> Tensors:
    """[1 9], [3 4]  =>  [3 9], [3 9]."""
    return [torch.stack(xs).amax(0) for _ in xs]


def pmin(xs: Tensors) -> Tensors:
    """[1 9], [3 4]  =>  [1 4], [1 4]."""
    return [torch.stack(xs).amin(0) for _ in xs]


def pvary(xs: Tensors) -> Tensors:
    """[1 2], [1 2]  =>  [1 2], [1 2]."""
    return [x.clone() for x in xs]


def all_gather(xs: Tensors, *, dim: int = 0, to: str = "varying") -> Tensors:
    """[1], [2]  =>  [1 2], [1 2].  A 0-d tensor counts as one of one element."""
    return [torch.cat([x if x.ndim else x[None] for x in xs], dim) for _ in xs]


def psum_scatter(xs: Tensors, *, dim: int = 0) -> Tensors:
    """[1 2], [3 4]  =>  [4], [6]."""
    return cut(total(xs), len(xs), dim)


def all_to_all(xs: Tensors, *, split_dim: int = 0, concat_dim: int | None = None) -> Tensors:
    """[1 2], [3 4]  =>  [1 3], [2 4]."""
    join = split_dim if concat_dim is None else concat_dim
    return [torch.cat([cut(x, len(xs), split_dim)[i] for x in xs], join) for i in range(len(xs))]


def ppermute(xs: Tensors, *, perm: Pairs) -> Tensors:
    """[1], [2]  =>  [0], [1]  with perm ((0, 1),)."""
    source = {to: origin for origin, to in perm}
    return [xs[source[i]].clone() if i in source else torch.zeros_like(x) for i, x in enumerate(xs)]


def broadcast(xs: Tensors, *, source: int = 0) -> Tensors:
    """[1], [2]  =>  [1], [1]."""
    return [xs[source].clone() for _ in xs]


# -- backward: what the devices are given for what they got, to what is due to what they held ----------------------


def psum_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """Pass through: the sum was the same everywhere, and so is its cotangent."""
    return [g.clone() for g in gs]


def pmean_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """Pass through, divided."""
    return [g / len(gs) for g in gs]


def pmax_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """Give equal parts to the devices that hold the largest."""
    return [g * part for g, part in zip(gs, share(xs, pmax(xs)[0]), strict=True)]


def pmin_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """Give equal parts to the devices that hold the smallest."""
    return [g * part for g, part in zip(gs, share(xs, pmin(xs)[0]), strict=True)]


def pvary_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """[1], [2]  <=  the sum [3], [3]: the value was one, used by all."""
    return psum(gs)


def all_gather_backward(gs: Tensors, xs: Tensors, *, dim: int = 0, to: str = "varying") -> Tensors:
    """Sum the cotangents of each shard over its users; a replicated result is used once."""
    full = gs if to == "replicated" else psum(gs)
    return [
        cut(g, len(gs), dim)[i].reshape(x.shape)
        for i, (g, x) in enumerate(zip(full, xs, strict=True))
    ]


def psum_scatter_backward(gs: Tensors, xs: Tensors, *, dim: int = 0) -> Tensors:
    """Each summand was in all shards: put the shards' cotangents side by side."""
    return all_gather(gs, dim=dim)


def all_to_all_backward(
    gs: Tensors, xs: Tensors, *, split_dim: int = 0, concat_dim: int | None = None
) -> Tensors:
    """Send everything back."""
    return all_to_all(
        gs, split_dim=split_dim if concat_dim is None else concat_dim, concat_dim=split_dim
    )


def ppermute_backward(gs: Tensors, xs: Tensors, *, perm: Pairs) -> Tensors:
    """Send everything back."""
    return ppermute(gs, perm=[(to, origin) for origin, to in perm])


def broadcast_backward(gs: Tensors, xs: Tensors, *, source: int = 0) -> Tensors:
    """Give the source its cotangent: the result is one value, and the inputs of the others are unused."""
    return [g.clone() if i == source else torch.zeros_like(g) for i, g in enumerate(gs)]


# -- bytes: what a device at place i of n sends, holding `size` bytes ----------------------------------------------


def reduced(size: int, i: int, n: int) -> Fraction:
    """In a ring: all rows but one while summing, and again while spreading the sums."""
    return Fraction(2 * (n - 1) * size, n)


def exchanged(size: int, i: int, n: int, **_: Any) -> Fraction:
    """Send all rows but the own."""
    return Fraction((n - 1) * size, n)


def gathered(size: int, i: int, n: int, **_: Any) -> Fraction:
    """Send the tensor to all others: (n-1)/n of the result."""
    return Fraction((n - 1) * size)


def free(size: int, i: int, n: int) -> Fraction:
    """Send nothing."""
    return Fraction(0)


def along(size: int, i: int, n: int, *, perm: Pairs) -> Fraction:
    """Send the tensor once per destination other than the device itself."""
    return Fraction(sum(size for origin, to in perm if origin == i != to))


def chained(size: int, i: int, n: int, *, source: int = 0) -> Fraction:
    """Send the tensor to the next device, except at the end of the chain that begins at the source."""
    return Fraction(0 if (i + 1) % n == source else size)


@dataclass(frozen=True)
class Oracle:
    """The definition of one collective.

    Args:
        forward: from (xs, **options) to the results.
        backward: from (gs, xs, **options) to the cotangents of xs.
        sent: from (size, i, n) and options that matter to bytes, exactly.
        kinds: the dtypes it takes, "b" bool, "i" integer, "f" float, "c" complex.
        sums: whether the forward, and the backward, add: only there may bits depend on an order.
        counts: True if booleans become integers.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    sent: Callable[..., Fraction]
    kinds: str = "bifc"
    sums: tuple[bool, bool] = (False, False)
    counts: bool = False

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True if the collective is defined for a dtype."""
        return kind(dtype) in self.kinds


def kind(dtype: torch.dtype) -> str:
    """Return "b", "i", "f" or "c".

    >>> kind(torch.bfloat16), kind(torch.uint8)
    ('f', 'i')
    """
    return (
        "b"
        if dtype == torch.bool
        else "f"
        if dtype.is_floating_point
        else "c"
        if dtype.is_complex
        else "i"
    )


ADDS, ADDS_BACK = (True, False), (False, True)

ORACLES: dict[str, Oracle] = {
    "psum": Oracle(psum, psum_backward, reduced, sums=ADDS, counts=True),
    "pmean": Oracle(pmean, pmean_backward, reduced, kinds="fc", sums=ADDS),
    "pmax": Oracle(pmax, pmax_backward, reduced, kinds="bif", sums=ADDS_BACK),
    "pmin": Oracle(pmin, pmin_backward, reduced, kinds="bif", sums=ADDS_BACK),
    "pvary": Oracle(pvary, pvary_backward, free, sums=ADDS_BACK),
    "all_gather": Oracle(all_gather, all_gather_backward, gathered, sums=ADDS_BACK),
    "psum_scatter": Oracle(psum_scatter, psum_scatter_backward, exchanged, sums=ADDS, counts=True),
    "all_to_all": Oracle(all_to_all, all_to_all_backward, exchanged),
    "ppermute": Oracle(ppermute, ppermute_backward, along),
    "broadcast": Oracle(broadcast, broadcast_backward, chained),
    "send_recv": Oracle(ppermute, ppermute_backward, along),
}
"""Every collective, by the name of its function; `send_recv` is a `send` and a `recv` for every pair."""
