"""The comparison of a run in processes with one in a single process, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import PromiseError
from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.rounding import TOLERANCES, bound_of, largest
from fshard.testing.certificate import CertificateRow
from fshard.testing.programs.record import RankRecord, rows_of
from fshard.testing.verdicts import Comparison, Shards, judge

Axes = Mapping[str, int]


def _coordinates(axes: Axes) -> list[tuple[int, ...]]:
    """Return the coordinates of the ranks."""
    return list(product(*[range(size) for size in axes.values()]))


def joined_batch(ranks: Sequence[RankRecord], axes: Axes) -> PyTree:
    """Return the batch of all processes.

    Its rows are those of the axes along which batches differ, in the order of ranks.
    """
    leaves_by_rank = [flatten(rank.batch)[0] for rank in ranks]
    _, structure = flatten(ranks[0].batch)
    groups: dict[tuple[int, ...], Sequence[Any]] = dict(
        zip(_coordinates(axes), leaves_by_rank, strict=True)
    )
    # Axis by axis, the last one first: the coordinates of a group lose their last one, until one
    # group is left, of coordinates ().
    for _ in axes:
        lines: dict[tuple[int, ...], list[Sequence[Any]]] = {}
        for coordinates, leaves in groups.items():
            lines.setdefault(coordinates[:-1], []).append(leaves)

        is_equal = all(_equal(line[0], leaves) for line in lines.values() for leaves in line)
        if is_equal:
            groups = {key: line[0] for key, line in lines.items()}
        else:
            groups = {key: _concatenated(line) for key, line in lines.items()}
    return unflatten(structure, list(groups[()]))


def _equal(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    for x, y in zip(leaves, others, strict=True):
        are_tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
        if not (torch.equal(x, y) if are_tensors else bool(x == y)):
            return False
    return True


def _concatenated(line: Sequence[Sequence[Any]]) -> list[Any]:
    """Concatenate the rows of several batches, leaf by leaf; take numbers of the first one."""
    joined: list[Any] = []
    errors: list[str] = []
    for column in zip(*line, strict=True):
        first = column[0]
        if not isinstance(first, Tensor) or first.ndim == 0:
            joined.append(first)
            continue
        row_shapes = {tuple(x.shape[1:]) for x in column}
        if len(row_shapes) > 1:
            errors.append(str(sorted(row_shapes)))
        else:
            joined.append(torch.cat(column))
    if errors:
        raise ValueError(
            "certify_program: the batches of processes must differ in rows only; got rows of "
            f"{'; '.join(errors)}."
        )
    return joined


class _Slice(NamedTuple):
    """The elements of a parameter that a rank has: a shard, by its number, of `n` shards of a dim."""

    dim: int = 0
    number: int = 0
    n: int = 1

    def of(self, full: Tensor) -> Tensor:
        """Take the elements of a full tensor."""
        return full if self.n == 1 else full.tensor_split(self.n, self.dim)[self.number]


def judge_ranks(
    axes: Axes, ranks: Sequence[RankRecord], single: RankRecord, dtype: torch.dtype
) -> list[CertificateRow]:
    """Judge the run in the processes of a mesh: the loss, and gradients and changes of parameters.

    Each parameter has a row.
    """
    names: dict[str, None] = {}  # a set in order
    for rank in (single, *ranks):
        names.update(dict.fromkeys(rank.start))
    slices = {name: _slices(name, axes, ranks, single) for name in names}

    mesh = ", ".join([f"{name}={size}" for name, size in axes.items()])
    different = [name for name, slices_of_ranks in slices.items() if not slices_of_ranks]
    if different:
        raise PromiseError(
            f"certify_program: on mesh {mesh} parameters must begin as in one process; got other "
            f"values, names or parts of {', '.join(different)}. Seed all ranks alike, and shard "
            "dims in equal parts in the order of an axis."
        )
    sizes = dict(axes)
    if len(axes) > 1:
        sizes["all axes"] = len(ranks)
    return judge(_comparisons(ranks, single, slices, dtype), mesh, sizes, 1e-6 + TOLERANCES[dtype])


def _slices(
    name: str, axes: Axes, ranks: Sequence[RankRecord], single: RankRecord
) -> dict[int, _Slice]:
    """Return the slice of a parameter in each rank that has it; none if they differ.

    It is found by the values before the first step. All ranks have the full parameter, or a part of
    a dim, in the order of an axis.
    """
    full = single.start.get(name)
    if full is None:
        return {}
    starts = {rank: record.start[name] for rank, record in enumerate(ranks) if name in record.start}
    for slices in _candidates(full.ndim, axes, list(starts)):
        if all(torch.equal(starts[rank], each.of(full)) for rank, each in slices.items()):
            return slices
    return {}


def _candidates(ndim: int, axes: Axes, ranks: Sequence[int]) -> Iterator[dict[int, _Slice]]:
    """Yield the slices that ranks may have: of full tensors, and of each dim along each axis."""
    yield {rank: _Slice() for rank in ranks}
    for dim, axis in product(range(ndim), range(len(axes))):
        yield _slices_along(dim, axis, axes, ranks)


def _slices_along(dim: int, axis: int, axes: Axes, ranks: Sequence[int]) -> dict[int, _Slice]:
    """Return the slices of some ranks, where the ranks along an axis divide a dim."""
    coordinates = _coordinates(axes)
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        other_coordinates = coordinates[rank][:axis] + coordinates[rank][axis + 1 :]
        lines.setdefault(other_coordinates, []).append(rank)

    slices: dict[int, _Slice] = {}
    for line in lines.values():
        for number, rank in enumerate(line):
            slices[rank] = _Slice(dim, number, len(line))
    return slices


def _comparisons(
    ranks: Sequence[RankRecord],
    single: RankRecord,
    slices: Mapping[str, Mapping[int, _Slice]],
    dtype: torch.dtype,
) -> Iterator[Comparison]:
    """Compare the losses, gradients and changes of parameters of all steps."""
    for step, grads in enumerate(single.grads):
        loss = _mean_loss(ranks, step)
        if loss is not None and single.losses[step] is not None:
            expected = torch.tensor(single.losses[step], dtype=torch.float64)
            shards = Shards([loss], [0], lambda x: [x])
            yield Comparison(step, "loss", "loss", shards, expected, bound_of(expected, 0.0, dtype))

        largest_of_all = max(map(largest, grads.values()), default=0.0)
        for name, slices_of_ranks in slices.items():
            rank_grads = {
                rank: ranks[rank].grads[step][name]
                for rank in slices_of_ranks
                if name in ranks[rank].grads[step]
            }
            if rank_grads or name in grads:
                # No gradient is one of 0.
                expected = grads.get(name, torch.zeros_like(single.start[name]))
                if not rank_grads:
                    rank_grads = {
                        rank: torch.zeros_like(ranks[rank].start[name]) for rank in slices_of_ranks
                    }
                shards = _shards(rank_grads, slices_of_ranks)
                bound = bound_of(expected, largest_of_all, dtype)
                yield Comparison(step, name, "gradient", shards, expected, bound, rivals=grads)

            # The change, relative to the parameter: a small one has the errors of the large.
            changes: dict[int, Tensor] = {}
            for rank in slices_of_ranks:
                changes[rank] = ranks[rank].params[step][name] - ranks[rank].start[name]
            expected = single.params[step][name] - single.start[name]
            shards = _shards(changes, slices_of_ranks)
            bound = bound_of(single.params[step][name], 0.0, dtype)
            yield Comparison(step, name, "change of the parameter", shards, expected, bound)


def _shards(parts: Mapping[int, Tensor], slices: Mapping[int, _Slice]) -> Shards:
    """Return the tensors of some ranks as shards of a full one."""

    def cut(full: Tensor) -> list[Tensor]:
        return [slices[rank].of(full) for rank in parts]

    return Shards(list(parts.values()), list(parts), cut)


def _mean_loss(ranks: Sequence[RankRecord], step: int) -> Tensor | None:
    """Return the mean of the losses, weighted by rows, of processes that have one."""
    total = 0.0
    total_rows = 0
    for rank in ranks:
        loss = rank.losses[step]
        if loss is not None:
            rows = rows_of(rank.batch) or 1
            total += loss * rows
            total_rows += rows
    if not total_rows:
        return None
    return torch.tensor(total / total_rows, dtype=torch.float64)
