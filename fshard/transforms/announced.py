"""What a device's part of a batch counts for, where parts differ: what the loader has told, or else what devices tell.

    5 samples, 2 devices, which have 3 and 2      a mean over 3 of them counts for 3 / 5 of the mean over all

A tensor that the loader has handed out is known by itself.  A copy of one, on its way to an accelerator say, is taken for a
part of the batch that was told last, if batches come in turn and that one is cut evenly.  Where neither is so, and any batch
is cut unevenly, devices add up how many rows they have, which is one small number in a step.

Who has no loader that tells, counts as much as the others: as in torch, where each takes the mean of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fshard.errors import MismatchError
from fshard.mesh.mesh import Mesh
from fshard.mesh.scope import require
from fshard.mesh.tree import PyTree, flatten_outside
from fshard.source import call_site
from fshard.transforms.agree import on_host, summed
from fshard.transforms.batch import Cut
from fshard.transforms.opaque import tensors_of


class Counted(NamedTuple):
    """A device's part of a batch: how the samples are cut, if tensors say it, and what returns its share of all.

    That may ask all other devices, so it is called in the backward, which takes all of them.
    """

    cut: Cut | None
    share: Callable[[], float]


class Announced:
    """The batches that a loader has told.

    Args:
        mesh: the devices.
        axes: along which batches are cut.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self._mesh, self._axes, self._parts = mesh, axes, prod(mesh.shape[axis] for axis in axes)
        self._totals = WeakTensorKeyDictionary()  # of tensors that are still there
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
                self._totals[x] = total

    def counted(self, leaves: Sequence[Any], rows: int | None, device: int) -> Counted:
        """Return what the leaves of a device's part count for, which have so many rows, if that is known."""
        self._unused = False
        known = [self._totals[x] for leaf in leaves for x in tensors_of(leaf) if x in self._totals]
        total = known[0] if known else None if self._ahead else self._last
        own = None if total is None else self._own(total, device)
        fits = rows is None or (own is not None and max(own, 1) == rows)
        cut = None if rows is None else Cut(self._axes, self._parts, total if total and fits else self._parts * rows)
        if rows is not None and not known and self._in_doubt:
            lent = self._ahead and min(self._told) < self._parts and not (rows > 1 and rows * self._parts in self._told)
            return Counted(cut, partial(self._by_all, 0 if own == 0 else rows, lent=lent))
        share = own / total if total and own is not None and (known or fits) else 1 / self._parts
        return Counted(cut, lambda: share)

    def _own(self, total: int, device: int) -> int:
        start, stop = Cut(self._axes, self._parts, total).ranges(self._mesh, device, 1)[0]
        return stop - start

    @property
    def _in_doubt(self) -> bool:
        """Whether what is not known may be a part of a batch that is cut unevenly: on all devices alike."""
        uneven = any(total % self._parts for total in self._told)
        return uneven and (self._ahead or self._last is None or self._last % self._parts > 0)

    def _by_all(self, rows: int, *, lent: bool) -> float:
        """Return this device's share of the rows of all; if all have as many, those of some may be `lent` by a neighbour."""
        site, group = call_site(), require("backward").group(self._axes, "backward")
        (sums,) = summed((on_host([rows, rows**2, lent], torch.device("cpu")),), group, site)
        total, squares, lent_to_any = sums.tolist()
        if lent_to_any and total**2 == self._parts * squares:
            raise MismatchError(
                "backward: all devices have as many rows, and batches were fetched ahead and copied, of which one has fewer "
                "samples than there are devices; whether some of these rows are a neighbour's nobody knows. Call the model "
                "with the tensors that the loader has given, take each batch when its turn has come, or leave the last one "
                "out: drop_last=True."
            )
        return rows / total
