"""The elements of a parameter that each rank has, found by the values before the first step.

the full parameter                            all ranks
a shard of a dim along an axis                weight[0:4] on model=0, weight[4:8] on model=1
the same of each of several parts             q, k and v in one weight
shards of two dims, or of one by two axes     experts on one axis, columns on another
any rows or columns                           found one by one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import permutations, product
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.rounding import largest, widest
from fshard.testing.programs.batches import Axes, coordinates_of
from fshard.testing.programs.record import RankRecord

Parts = Mapping[str, Sequence[int]]
"""The rows of each part of parameters, by patterns of names."""


class RankSlice(NamedTuple):
    """The elements of a parameter that a rank has: indices of some dims."""

    indices: tuple[tuple[int, Tensor], ...] = ()

    def of(self, full: Tensor) -> Tensor:
        """Take the elements of a full tensor."""
        for dim, index in self.indices:
            full = full.index_select(dim, index)
        return full

    def is_equal(self, other: RankSlice) -> bool:
        """Return True if both are made by the same indices."""
        if len(self.indices) != len(other.indices):
            return False
        for (dim, index), (other_dim, other_index) in zip(self.indices, other.indices, strict=True):
            if dim != other_dim or not torch.equal(index, other_index):
                return False
        return True


Slices = Mapping[int, RankSlice]
"""By rank."""


def slices_of(
    name: str, axes: Axes, ranks: Sequence[RankRecord], single: RankRecord, parts: Parts
) -> Slices:
    """Return the slice of a parameter in each rank that has it; none if there is no such layout.

    Several layouts have the values before the first step of a bias that is 0. Of these the one is
    taken that has the gradients, or else the parameters after the step.
    """
    full = single.start.get(name)
    starts = {rank: record.start[name] for rank, record in enumerate(ranks) if name in record.start}
    if full is None or not starts:
        return {}
    fitting: list[Slices] = []
    for slices in _candidates(full, starts, axes, _parts_of(name, parts)):
        is_equal = all(torch.equal(starts[rank], each.of(full)) for rank, each in slices.items())
        if is_equal and _is_complete(full, slices):
            fitting.append(slices)
            if all(not each.indices for each in slices.values()):
                break  # no other layout has full tensors
    if not fitting:
        return {}
    return min(fitting, key=lambda slices: _error(name, slices, ranks, single))


def mistake_at_start(name: str, ranks: Sequence[RankRecord], single: RankRecord) -> str:
    """Describe how a parameter without a layout begins wrongly; "" if its shards are not known."""
    full = single.start.get(name)
    if full is None:
        return ""
    starts = {rank: record.start[name] for rank, record in enumerate(ranks) if name in record.start}
    if not starts:
        has_other_names = any(record.start.keys() - single.start.keys() for record in ranks)
        return "" if has_other_names else "is on no rank"
    if all(x.shape == full.shape for x in starts.values()):
        others = [str(rank) for rank, x in starts.items() if not torch.equal(x, full)]
        return f"begins with other values on rank {', '.join(others)}"
    for dim in range(full.ndim):
        if all(_matched(full, x, dim) is not None for x in starts.values()):
            return f"has indices of dim {dim} that no rank has"
    return ""


def _error(
    name: str, slices: Slices, ranks: Sequence[RankRecord], single: RankRecord
) -> tuple[float, float]:
    """Return the largest errors in a layout: of gradients, and of parameters after a step."""
    gradients = [rank.steps[0].grads for rank in ranks]
    params = [rank.steps[0].params for rank in ranks]
    of_gradients = _largest_error(name, slices, gradients, single.steps[0].grads)
    of_params = _largest_error(name, slices, params, single.steps[0].params)
    return of_gradients, of_params


def _largest_error(
    name: str, slices: Slices, runs: Sequence[Mapping[str, Tensor]], single: Mapping[str, Tensor]
) -> float:
    """Return the largest error of a tensor on the ranks that have it; 0 if there is none."""
    if name not in single:
        return 0.0
    error = 0.0
    for rank, each in slices.items():
        if name in runs[rank]:
            error = max(error, largest(runs[rank][name] - each.of(single[name])))
    return error


def _is_complete(full: Tensor, slices: Slices) -> bool:
    """Return True if each element is on a rank."""
    numbers = torch.arange(full.numel()).reshape(full.shape)
    found = torch.zeros(full.numel(), dtype=torch.bool)
    for each in slices.values():
        found[each.of(numbers).flatten()] = True
    return bool(found.all())


def _parts_of(name: str, parts: Parts) -> Sequence[int] | None:
    for pattern, sizes in parts.items():
        if fnmatchcase(name, pattern):
            return sizes
    return None


def _candidates(
    full: Tensor, starts: Mapping[int, Tensor], axes: Axes, sizes: Sequence[int] | None
) -> Iterator[Slices]:
    """Yield the layouts that a parameter may have, the usual ones first."""
    yield {rank: RankSlice() for rank in starts}
    numbers = [number for number, size in enumerate(axes.values()) if size > 1]
    cuts = [_Cut(dim, number) for dim, number in product(range(full.ndim), numbers)]

    if sizes is not None and full.ndim and sum(sizes) == len(full):
        for number in numbers:
            yield _cut(full, [_Cut(0, number, tuple(sizes))], axes, starts)
    for cut in cuts:
        yield _cut(full, [cut], axes, starts)
    for cut, n in product(cuts, (2, 3)):  # gate and up, or query, key and value
        length = full.shape[cut.dim]
        if length % n == 0:
            in_parts = cut._replace(sizes=(length // n,) * n)
            yield _cut(full, [in_parts], axes, starts)
    for pair in permutations(cuts, 2):
        if pair[0].axis != pair[1].axis:
            yield _cut(full, list(pair), axes, starts)
    for dim in range(full.ndim):
        found = {rank: _matched(full, x, dim) for rank, x in starts.items()}
        slices = {
            rank: RankSlice(((dim, index),)) for rank, index in found.items() if index is not None
        }
        if len(slices) == len(starts):
            yield slices


class _Cut(NamedTuple):
    """The division of a dim along an axis: of all of it, or of each of its parts."""

    dim: int
    axis: int
    sizes: tuple[int, ...] = ()


def _cut(
    full: Tensor, cuts: Sequence[_Cut], axes: Axes, ranks: Mapping[int, Tensor]
) -> dict[int, RankSlice]:
    """Return the slices of some ranks, where those along axes divide dims."""
    slices = {rank: RankSlice() for rank in ranks}
    for cut in cuts:
        for line in _lines(cut.axis, axes, list(ranks)):
            for number, rank in enumerate(line):
                rows = torch.arange(slices[rank].of(full).shape[cut.dim])
                parts = rows.split(cut.sizes) if cut.sizes else [rows]
                shards = [part.tensor_split(len(line))[number] for part in parts]
                indices = slices[rank].indices
                slices[rank] = RankSlice((*indices, (cut.dim, torch.cat(shards))))
    return slices


def _lines(axis: int, axes: Axes, ranks: Sequence[int]) -> list[list[int]]:
    """Return those of some ranks that differ in their coordinate of an axis only."""
    coordinates = coordinates_of(axes)
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        others = coordinates[rank][:axis] + coordinates[rank][axis + 1 :]
        lines.setdefault(others, []).append(rank)
    return list(lines.values())


def _matched(full: Tensor, shard: Tensor, dim: int) -> Tensor | None:
    """Return the indices of a dim at which a full tensor has what a shard has."""
    if shard.ndim != full.ndim:
        return None
    numbers: dict[bytes, int] = {}
    for number, row in enumerate(full.unbind(dim)):
        numbers.setdefault(_bytes_of(row), number)
    found = [numbers.get(_bytes_of(row)) for row in shard.unbind(dim)]
    if any(number is None for number in found):
        return None
    return torch.tensor([number for number in found if number is not None], dtype=torch.int64)


def _bytes_of(x: Tensor) -> bytes:
    return widest(x).contiguous().numpy().tobytes()
