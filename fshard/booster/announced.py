"""The weight of a device's part of a batch, where parts differ: a loader announces the batch's number of samples.

    5 samples, 2 devices, which have 3 and 2      a mean over 3 of them has weight 3 / 5 in the mean over all

A tensor that a loader has returned is recognised, and so is a view of it. A copy, such as one on an accelerator, is
assigned to the batch announced last or, where batches are prefetched, to the one whose part has as many rows. If
several match, and some batch is uneven, it raises.

Without a loader parts have equal weight: as in torch, each device takes the mean of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fshard.errors import MismatchError
from fshard.mesh.layout import Mesh, PyTree, flatten_outside
from fshard.mesh.spmd.run import device_of
from fshard.transforms.batch import BatchPart, Cut, rows_of, tensors_in


class Counted(NamedTuple):
    """A device's part of a batch.

    Args:
        rows: number of rows of its tensors, if any.
        cut: how its samples are sharded, likewise.
        share: its weight in the batch; None: unknown, and parts differ.
        known: number of samples that the loader gave the device, if the tensors are the loader's.
    """

    rows: int | None
    cut: Cut | None
    share: float | None
    known: int | None


class Announced:
    """The batches that a loader has announced.

    Args:
        mesh: the devices.
        axes: that shard batches.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self._mesh, self._axes, self._parts = mesh, axes, prod(mesh.shape[axis] for axis in axes)
        self._totals = WeakTensorKeyDictionary()  # of tensors that are still there; None: of several batches
        self._announced_totals = set[int]()
        self._last: int | None = None
        self._before: int | None = None  # the last of the pass before
        self._unused = self._ahead = False

    def announce(self, total: int | None, part: PyTree) -> None:
        """Record a returned batch and its number of samples on all devices; None: a pass begins or ends."""
        if total is None:
            self._ahead = self._last is not None and (self._ahead or self._unused)
            self._before, self._last, self._unused = self._last, None, False
            return
        if self._last is None:  # the first of a pass, which may be the same that was only looked at
            self._ahead = self._ahead and total != self._before
        else:
            self._ahead = self._ahead or self._unused
        self._last, self._unused = total, True
        self._announced_totals.add(total)
        for leaf in flatten_outside(part)[1]:
            for x in tensors_in(leaf):
                self._totals[x] = total if self._totals.get(x, total) == total else None

    def counted(self, leaves: Sequence[Any], device: int) -> Counted:
        """Return the share of the part that has these leaves."""
        known, total = self._which(leaves, device)
        rows = [n for n in map(rows_of, leaves) if n is not None]
        if total is None:
            count = rows[0] if rows else None
            share = None if self._in_doubt() else 1 / self._parts
            return Counted(count, self._cut(count and self._parts * count), share, None)
        own = self._own(total, device)
        count = max(own, 1) if max(own, 1) in rows else rows[0] if rows else None
        cut = self._cut(count and (total if count == max(own, 1) else self._parts * count))
        return Counted(count, cut, own / total, own if known else None)

    def share(self, part: Counted) -> float:
        """Return the share of the batch of a forward."""
        if part.share is None:
            raise MismatchError(_AHEAD.format("the model"))
        return part.share

    def part(self, batch: PyTree) -> PyTree:
        """Return the batch of a functional step as this device's part, if a loader returned it; else unchanged."""
        leaves, device = flatten_outside(batch)[1], device_of(self._mesh)
        known, total = self._which(leaves, device)
        if total is None:
            if self._in_doubt():
                raise MismatchError(_AHEAD.format("a step"))
            return batch
        own = max(self._own(total, device), 1)
        if not known and {rows_of(x) for x in leaves} - {None} != {own}:
            return batch  # the global one
        return BatchPart(batch, Cut(self._axes, self._parts, total))

    def _in_doubt(self) -> bool:
        """Return True if the weight of an unrecognised batch matters and is ambiguous."""
        return self._ahead and any(total % self._parts for total in self._announced_totals)

    def _which(self, leaves: Sequence[Any], device: int) -> tuple[bool, int | None]:
        """Return True if leaves are a loader's, and the number of samples of their batch, if known."""
        self._unused = False
        found = (self._totals.get(_owner(x, self._totals)) for leaf in leaves for x in tensors_in(leaf))
        total = next((total for total in found if total is not None), None)
        if total is not None:
            return True, total
        rows = {*map(rows_of, leaves)}
        fitting = (
            [total for total in self._announced_totals if max(self._own(total, device), 1) in rows]
            if self._ahead
            else [self._last]
        )
        return False, fitting[0] if len(fitting) == 1 else None

    def _own(self, total: int, device: int) -> int:
        start, stop = Cut(self._axes, self._parts, total).ranges(self._mesh, device, 1)[0]
        return stop - start

    def _cut(self, total: int | None) -> Cut | None:
        return None if total is None else Cut(self._axes, self._parts, total)


def _owner(x: Tensor, known: WeakTensorKeyDictionary) -> Tensor:
    """Return the tensor that another is a view of, unless it is recognised itself."""
    return x if x in known or x._base is None else x._base


_AHEAD = (
    "{} must be given a loader's own tensors, or a copy of each batch before the next is fetched: this may be one of several "
    "batches, which do not all divide evenly. Take each batch in its turn, or leave the last one out: drop_last=True."
)
