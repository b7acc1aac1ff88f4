"""Who sends to whom in a permutation: pairs written out, or a matching of what devices hold with what they want.

A matching is known by the two cuts alone.  Whom each device asks is worked out where that is needed, and kept: a search
that weighs many matchings, and an abstract mesh, on which nothing is sent, never ask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from fshard.mesh.arithmetic import ravel, unravel

Dims = tuple[tuple[str, ...], ...]
"""The axes that cut each dim."""
Pair = tuple[int, int]
"""The source and the destination."""


@dataclass(frozen=True, repr=False)
class Matching:
    """The pairs that bring every device the piece it wants from one that holds it; who holds it already keeps it.

    Args:
        before: the axes of every dim of the pieces held, each of more than one device.
        after: those of the pieces wanted, which are other axes or in another order.
        axes: names and sizes of all of them, major to minor: they number the devices.
        back: whether the pieces go back to where they came from.

    >>> Matching((("a",),), (("b",),), (("a", 2), ("b", 2)))
    ((0, 0), (1, 2), (2, 1), (3, 3))
    """

    before: Dims
    after: Dims
    axes: tuple[tuple[str, int], ...]
    back: bool = False

    def __iter__(self) -> Iterator[Pair]:
        return iter(_pairs(self))

    def __repr__(self) -> str:
        return repr(_pairs(self))


Pairs = tuple[Pair, ...] | Matching


def turned(pairs: Pairs) -> Pairs:
    """Return the pairs that lead back."""
    if isinstance(pairs, Matching):
        return replace(pairs, back=not pairs.back)
    return tuple((to, source) for source, to in pairs)


def moving(pairs: Pairs) -> bool:
    """Return whether any device sends to another one; in a matching of two cuts that differ, some do."""
    return isinstance(pairs, Matching) or any(source != to for source, to in pairs)


@lru_cache(maxsize=256)
def _pairs(matching: Matching) -> tuple[Pair, ...]:
    if matching.back:
        return tuple((to, source) for source, to in replace(matching, back=False))
    sizes = dict(matching.axes)

    def piece(dims: Dims, device: int) -> tuple[int, ...]:
        place = dict(zip(sizes, unravel(device, list(sizes.values())), strict=True))
        return tuple(ravel([place[axis] for axis in names], [sizes[axis] for axis in names]) for names in dims)

    devices = range(prod(sizes.values()))
    wanted = {device: piece(matching.after, device) for device in devices}
    spare: dict[tuple[int, ...], deque[int]] = {}
    pairs: list[Pair] = []
    for device in devices:
        held = piece(matching.before, device)
        if held == wanted[device]:
            del wanted[device]
            pairs.append((device, device))
        else:
            spare.setdefault(held, deque()).append(device)
    pairs += [(spare[asked].popleft(), device) for device, asked in wanted.items()]
    return tuple(sorted(pairs))
