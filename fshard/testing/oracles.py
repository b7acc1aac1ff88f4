"""Define every collective on a plain list of per-device tensors: the oracle of all runtimes.

A list has a tensor per device of a group, in the group's order. `forward` returns the results of
the devices; `backward` maps their cotangents (and the inputs) to the cotangents of the inputs;
`sent` returns the bytes that a device sends. All is written independently, from the documentation
and without looking at the code under test.

Legend: n devices, xs their inputs, gs the cotangents of their results; i a device's index, size its
bytes.
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
    """Add in the documented tree, ((0 + 1) + (2 + 3)) + ..., level by level.

    A tensor without partner moves up. 16-bit floats are added in 32 bits and rounded once; booleans
    are counted.

    >>> total([torch.tensor(True), torch.tensor(False), torch.tensor(True)])
    tensor(2)
    """
    dtype = xs[0].dtype
    if dtype == torch.bool:
        return total([x.long() for x in xs])
    if dtype in (torch.float16, torch.bfloat16):
        return total([x.float() for x in xs]).to(dtype)
    if len(xs) == 1:
        return xs[0]
    sums = [a + b for a, b in zip(xs[::2], xs[1::2], strict=False)]
    if len(xs) % 2 == 1:
        sums.append(xs[-1])
    return total(sums)


def cut(x: Tensor, n: int, dim: int) -> Tensors:
    """Split a dim into n equal shards."""
    each = x.shape[dim] // n
    return [x.narrow(dim, i * each, each) for i in range(n)]


def share(xs: Tensors, extreme: Tensor) -> Tensors:
    """Return each device's share of an extreme: equal shares for all that hold it."""
    holds = [(x == extreme).to(extreme.dtype) for x in xs]
    holders = torch.stack(holds).sum(0)
    return [has / holders for has in holds]


# -- forward: from the devices' tensors to their results ------------------------------------------


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
    rows = [x.reshape(1) if x.ndim == 0 else x for x in xs]
    return [torch.cat(rows, dim) for _ in xs]


def psum_scatter(xs: Tensors, *, dim: int = 0) -> Tensors:
    """[1 2], [3 4]  =>  [4], [6]."""
    return cut(total(xs), len(xs), dim)


def all_to_all(xs: Tensors, *, split_dim: int = 0, concat_dim: int | None = None) -> Tensors:
    """[1 2], [3 4]  =>  [1 3], [2 4]."""
    if concat_dim is None:
        concat_dim = split_dim
    parts_by_sender = [cut(x, len(xs), split_dim) for x in xs]
    parts_by_receiver = zip(*parts_by_sender, strict=True)
    return [torch.cat(parts, concat_dim) for parts in parts_by_receiver]


def ppermute(xs: Tensors, *, perm: Pairs) -> Tensors:
    """[1], [2]  =>  [0], [1]  with perm ((0, 1),)."""
    results = [torch.zeros_like(x) for x in xs]
    for origin, to in perm:
        results[to] = xs[origin].clone()
    return results


def broadcast(xs: Tensors, *, source: int = 0) -> Tensors:
    """[1], [2]  =>  [1], [1]."""
    return [xs[source].clone() for _ in xs]


# -- backward: from the cotangents of the results to those of the inputs --------------------------


def psum_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """Pass through: the sum was the same everywhere, and so is its cotangent."""
    return [g.clone() for g in gs]


def pmean_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """Pass through, divided."""
    return [g / len(gs) for g in gs]


def pmax_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """Give equal parts to the devices that hold the largest."""
    shares = share(xs, pmax(xs)[0])
    return [g * part for g, part in zip(gs, shares, strict=True)]


def pmin_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """Give equal parts to the devices that hold the smallest."""
    shares = share(xs, pmin(xs)[0])
    return [g * part for g, part in zip(gs, shares, strict=True)]


def pvary_backward(gs: Tensors, xs: Tensors) -> Tensors:
    """[1], [2]  <=  the sum [3], [3]: the value was one, used by all."""
    return psum(gs)


def all_gather_backward(gs: Tensors, xs: Tensors, *, dim: int = 0, to: str = "varying") -> Tensors:
    """Sum the cotangents of each shard over its users; a replicated result is used once."""
    sums = gs if to == "replicated" else psum(gs)
    cotangents: Tensors = []
    for i, (g, x) in enumerate(zip(sums, xs, strict=True)):
        cotangents.append(cut(g, len(gs), dim)[i].reshape(x.shape))
    return cotangents


def psum_scatter_backward(gs: Tensors, xs: Tensors, *, dim: int = 0) -> Tensors:
    """Each summand was in all shards: put the shards' cotangents side by side."""
    return all_gather(gs, dim=dim)


def all_to_all_backward(
    gs: Tensors, xs: Tensors, *, split_dim: int = 0, concat_dim: int | None = None
) -> Tensors:
    """Send everything back."""
    if concat_dim is None:
        concat_dim = split_dim
    return all_to_all(gs, split_dim=concat_dim, concat_dim=split_dim)


def ppermute_backward(gs: Tensors, xs: Tensors, *, perm: Pairs) -> Tensors:
    """Send everything back."""
    return ppermute(gs, perm=[(to, origin) for origin, to in perm])


def broadcast_backward(gs: Tensors, xs: Tensors, *, source: int = 0) -> Tensors:
    """Give the source its cotangent: the result is one value, other devices' inputs are unused."""
    cotangents = [torch.zeros_like(g) for g in gs]
    cotangents[source] = gs[source].clone()
    return cotangents


# -- bytes: what device i of n sends, of a tensor of `size` bytes ----------------------------------


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
    destinations = [to for origin, to in perm if origin == i and to != i]
    return Fraction(size * len(destinations))


def chained(size: int, i: int, n: int, *, source: int = 0) -> Fraction:
    """Send the tensor to the next device, but at the end of the chain from the source."""
    is_end = (i + 1) % n == source
    return Fraction(0 if is_end else size)


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
    if dtype == torch.bool:
        return "b"
    if dtype.is_floating_point:
        return "f"
    if dtype.is_complex:
        return "c"
    return "i"


ADDS = (True, False)
ADDS_BACK = (False, True)

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
"""Every collective, by the name of its function.

`send_recv` is a `send` and a `recv` for every pair."""


# -- options --------------------------------------------------------------------------------------

Options = dict[str, Any]
"""The keyword arguments of a collective."""


def _routes(n: int) -> list[Options]:
    """Take a ring, a ring the other way, a single hop, and the swap of two; alone, nothing."""
    if n == 1:
        return [{"perm": ()}]
    ring = tuple([(i, (i + 1) % n) for i in range(n)])
    back = tuple([(to, origin) for origin, to in ring])
    hop = ((n - 1, 0),)
    swap = ((0, n - 1), (n - 1, 0))
    return [{"perm": perm} for perm in (ring, back, hop, swap)]


def _pairs_of_dims(n: int) -> list[Options]:
    """Take one dim to split, and one to concatenate along."""
    options: list[Options] = [{"split_dim": 0}, {"split_dim": 1}]
    for split, join in ((0, 1), (1, 0), (-1, 0)):
        options.append({"split_dim": split, "concat_dim": join})
    return options


def _gathers(n: int) -> list[Options]:
    options: list[Options] = []
    for dim in (0, -1):
        options += [{"dim": dim, "to": "varying"}, {"dim": dim, "to": "replicated"}]
    return options


def _permutations(n: int) -> list[Options]:
    """Take routes, one of no messages, and one from each device to itself."""
    identity = tuple([(i, i) for i in range(n)])
    return [*_routes(n), {"perm": ()}, {"perm": identity}]


OPTIONS: dict[str, Callable[[int], list[Options]]] = {
    "all_gather": _gathers,
    "psum_scatter": lambda n: [{"dim": 0}, {"dim": 1}, {"dim": -1}],
    "all_to_all": _pairs_of_dims,
    "ppermute": _permutations,
    "broadcast": lambda n: [{"source": source} for source in sorted({0, n - 1})],
    "send_recv": _routes,
}
"""From the number of devices to the options worth trying, on tensors of at least two dims."""


def options_of(collective: str, n: int) -> list[Options]:
    """Return the options of a collective to try over n devices; the first one is the plainest.

    >>> options_of("broadcast", 4), options_of("psum", 4)
    ([{'source': 0}, {'source': 3}], [{}])
    """
    return OPTIONS[collective](n) if collective in OPTIONS else [{}]
