"""What a device's part of a batch counts for, where parts differ: what the loader has told, or else what devices tell.

    5 samples, 2 devices, which have 3 and 2      a mean over 3 of them counts for 3 / 5 of the mean over all

A tensor that the loader has handed out is known by itself, and so is a view of it.  A copy, on its way to an accelerator say,
is taken for a part of the batch that was told last, as long as batches come in turn.  Where they were fetched ahead, or none
is told any more, devices add up how many rows they have, which is one small number in a step; if no batch that was told is
cut unevenly, each counts as much as the others.

So it is for who has no loader that tells: as in torch, where each takes the mean of its own.

A functional step asks whether what it is given is such a part at all, or the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fshard.errors import LayoutError, MismatchError
from fshard.mesh.mesh import Mesh
from fshard.mesh.scope import require
from fshard.mesh.spmd import device_of
from fshard.mesh.tree import PyTree, flatten_outside
from fshard.source import call_site
from fshard.transforms.agree import on_host, summed
from fshard.transforms.batch import Cut, Part
from fshard.transforms.opaque import rows_of, tensors_of

_LENT = (
    "all devices have as many rows, and batches were fetched ahead and copied, of which one has fewer samples than there are "
    "devices; whether some of these rows are a neighbour's nobody knows. Call the model with the tensors that the loader has "
    "given, take each batch when its turn has come, or leave the last one out: drop_last=True."
)


class Counted(NamedTuple):
    """A device's part of a batch.

    Args:
        rows: how many its tensors have, if any has some.
        cut: how its samples are cut, likewise.
        share: of the whole; None: others have to be asked.
        lent: whether its rows may be a neighbour's, which count for nothing.
        known: how many samples the loader has given the device, if it is known which batch this is.
        total: how many all devices have, likewise, or if batches come in turn.
    """

    rows: int | None
    cut: Cut | None
    share: float | None
    lent: bool
    known: int | None
    total: int | None

    def is_among(self, others: Sequence[Counted]) -> bool:
        """Return whether others have the same share, on all devices alike."""
        return self.share is not None and any(x.share is not None and x.total == self.total for x in others)


class Announced:
    """The batches that a loader has told.

    Args:
        mesh: the devices.
        axes: along which batches are cut.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self._mesh, self._axes, self._parts = mesh, axes, prod(mesh.shape[axis] for axis in axes)
        self._totals = WeakTensorKeyDictionary()  # of tensors that are still there; None: of several batches
        self._told = set[int]()
        self._last: int | None = None
        self._unused = self._ahead = False

    def tell(self, total: int | None, part: PyTree) -> None:
        """Note how many samples all devices have together of a batch that comes; None: no more come."""
        self._ahead |= self._unused  # the one before has not been used
        self._last, self._unused = total, total is not None
        if total is None:
            return
        self._told.add(total)
        for leaf in flatten_outside(part)[1]:
            for x in tensors_of(leaf):
                self._totals[x] = total if self._totals.get(x, total) == total else None

    def counted(self, leaves: Sequence[Any], device: int) -> Counted:
        """Return what the leaves of a device's part count for."""
        self._unused = False
        known = self._known(leaves)
        total = known if known is not None else None if self._ahead else self._last
        own = None if total is None else self._own(total, device)
        rows = _rows(leaves, None if own is None else max(own, 1))
        fits = total is not None and own is not None and rows in (None, max(own, 1))
        cut = None if rows is None else Cut(self._axes, self._parts, total if total and fits else self._parts * rows)
        if total is not None and own is not None:
            return Counted(rows, cut, own / total, False, None if known is None else own, total)
        if rows is None or not any(total % self._parts for total in self._told):
            return Counted(rows, cut, 1 / self._parts, False, None, None)
        lent = self._ahead and min(self._told) < self._parts and not (rows > 1 and rows * self._parts in self._told)
        return Counted(rows, cut, None, lent, None, None)

    def part(self, batch: PyTree) -> PyTree:
        """Return a batch as this device's part, if the loader has told it; else, as who has no loader gives it, the whole.

        A copy with as many rows as the part that was told last is one.  If it is not, all devices have the same few rows, and
        a mean over all of them is the mean over each.
        """
        self._unused = False
        leaves = flatten_outside(batch)[1]
        known = self._known(leaves)
        total = self._last if known is None else known
        if total is None:
            return batch
        own = max(self._own(total, device_of(self._mesh)), 1)
        if known is None and {rows_of(x) for x in leaves} - {None} != {own}:
            return batch
        if known is None and self._ahead and total < self._parts:
            raise MismatchError(f"step: {_LENT}")
        return Part(batch, Cut(self._axes, self._parts, total))

    def _known(self, leaves: Sequence[Any]) -> int | None:
        """Return how many samples all devices have of the batch that leaves are of, if one has been told."""
        found = (self._total_of(x) for leaf in leaves for x in tensors_of(leaf))
        return next((total for total in found if total is not None), None)

    def _total_of(self, x: Tensor) -> int | None:
        return self._totals.get(x if x in self._totals or x._base is None else x._base)

    def _own(self, total: int, device: int) -> int:
        start, stop = Cut(self._axes, self._parts, total).ranges(self._mesh, device, 1)[0]
        return stop - start

    def share(self, parts: Sequence[Counted]) -> float:
        """Return this device's share of the batches of some forwards, which is to be one; all devices have to ask."""
        asked = [part for part in parts if part.share is None]
        parts = [part for place, part in enumerate(parts) if not part.is_among(parts[:place])]
        shares = [part.share for part in parts if part.share is not None] + self._told_by_all(asked)
        if len(shares) > 1 and self._sum([any(abs(share - shares[0]) > 1e-9 for share in shares)])[0]:
            raise LayoutError(
                "backward: the model was called with batches of which this device, or another, has different shares, and one "
                "loss was made of them. Go back through each alone: booster.backward(loss, optimizer) after each call."
            )
        return shares[0]

    def _told_by_all(self, asked: Sequence[Counted]) -> list[float]:
        """Return the shares of the rows of all devices; where all have as many, those of some may be lent by a neighbour."""
        if not asked:
            return []
        rows = [part.rows or 0 for part in asked]
        sums = self._sum([x for n, part in zip(rows, asked, strict=True) for x in (n, n**2, part.lent)])
        if any(lent and n**2 == self._parts * squares for n, squares, lent in zip(*[iter(sums)] * 3, strict=True)):
            raise MismatchError(f"backward: {_LENT}")
        return [n / total for n, total in zip(rows, sums[::3], strict=True)]

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        group = require("backward").group(self._axes, "backward")
        return summed((on_host(numbers, torch.device("cpu")),), group, call_site())[0].tolist()


def _rows(leaves: Sequence[Any], wanted: int | None) -> int | None:
    """Return how many rows a part has: as many as are wanted, if any leaf has them, else those of the first with some."""
    found = [rows for x in leaves if (rows := rows_of(x)) is not None]
    return wanted if wanted in found else next(iter(found), None)
