"""`Cells`: shards with all that belongs to each, as lists, which is how torch's kernels want them.

leaf      0 (two shards)     1 (plain)
params    p0a    p0b         p1
grads     g0a    g0b         g1
steps     t0     t0          t1
state     m0a    m0b         m1         ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard.optim.leaves import Leaf, shards_of


@dataclass(frozen=True)
class Cells:
    """Shards and what belongs to each.

    Args:
        leaves: which leaf of the tree each is a shard of, by number, and
        owners: that leaf as it was, for its layout.
        params: the shards, to be written.
        grads: their gradients, of the same dtype, not to be written.
        steps: how many steps each will have made with this one.
        state: the slots, to be written.  A slot that a leaf does not have is None.
    """

    leaves: list[int]
    owners: list[Leaf]
    params: list[Tensor]
    grads: list[Tensor]
    steps: list[float]
    state: dict[str, list[Tensor]]

    def only(self, places: Sequence[int]) -> Cells:
        """Return some of the cells."""

        def taken(column: list[Any]) -> list[Any]:
            return [column[place] for place in places]

        return Cells(
            taken(self.leaves),
            taken(self.owners),
            taken(self.params),
            taken(self.grads),
            taken(self.steps),
            {name: taken(column) for name, column in self.state.items()},
        )

    def filled(self) -> Cells:
        """Return the cells that have elements: others are what lies on other devices, those of other stages, say."""
        some = [place for place, param in enumerate(self.params) if param.numel()]
        return self if len(some) == len(self.params) else self.only(some)

    def real(self) -> Cells:
        """Return complex cells as cells of real numbers, in the same memory."""
        if not self.params[0].is_complex():
            return self
        return replace(
            self,
            params=list(map(torch.view_as_real, self.params)),
            grads=[torch.view_as_real(grad.resolve_conj()) for grad in self.grads],
            state={name: list(map(torch.view_as_real, column)) for name, column in self.state.items()},
        )

    def kinds(self) -> Iterator[Cells]:
        """Yield the cells of each device and dtype: what a foreach kernel takes in one go."""
        groups: dict[object, list[int]] = {}
        for place, param in enumerate(self.params):
            groups.setdefault((param.device, param.dtype), []).append(place)
        if len(groups) == 1:
            return iter((self,))
        return (self.only(places) for places in groups.values())


def cells_of(
    moved: list[int], owners: list[Leaf], params: list[Leaf], grads: list[Leaf], columns: dict[str, list[Leaf]]
) -> Cells:
    """Go down from some leaves, by number, to their shards.  `columns` are the leaves of "step" and of each slot."""
    sizes = [len(shards_of(params[i])) for i in moved]

    def repeated(column: list[Any]) -> list[Any]:
        return [x for x, size in zip(column, sizes, strict=True) for _ in range(size)]

    def shards(column: list[Leaf]) -> list[Any]:
        return [x for i, size in zip(moved, sizes, strict=True) for x in shards_of(column[i]) or (None,) * size]

    written = shards(params)
    return Cells(
        leaves=repeated(moved),
        owners=repeated([owners[i] for i in moved]),
        params=written,
        grads=[g if g.dtype is p.dtype else g.to(p.dtype) for g, p in zip(shards(grads), written, strict=True)],
        steps=repeated(numbers_of([columns["step"][i] for i in moved])),
        state={name: shards(column) for name, column in columns.items() if name != "step"},
    )


def numbers_of(counts: list[Tensor]) -> list[float]:
    """Return what counts say; most are one tensor, which is asked once."""
    found = {id(count): count.item() for count in {id(count): count for count in counts}.values()}
    return [found[id(count)] for count in counts]
