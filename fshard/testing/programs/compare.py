"""The comparison of a run in processes with one in a single process, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import PromiseError
from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.testing.certificate import CertificateRow
from fshard.testing.programs.record import RankRecord, rows_of
from fshard.testing.verdicts import TOLERANCES, Comparison, Shards, bound_of, judge, largest

Axes = Mapping[str, int]


def _coordinates(axes: Axes) -> list[tuple[int, ...]]:
    """Return the coordinates of the ranks."""
    return [*product(*map(range, axes.values()))]


def joined_batch(ranks: Sequence[RankRecord], axes: Axes) -> PyTree:
    """Return the batch of all processes: rows of axes along which batches differ, in the order of ranks."""
    columns, structure = [flatten(rank.batch)[0] for rank in ranks], flatten(ranks[0].batch)[1]
    groups = dict(zip(_coordinates(axes), columns, strict=True))
    for axis in reversed(range(len(axes))):
        before = {key[:axis] for key in groups}
        lines = {key: [groups[(*key, i)] for i in range([*axes.values()][axis])] for key in before}
        is_equal = all(_equal(line[0], leaves) for line in lines.values() for leaves in line)
        groups = {key: line[0] if is_equal else _concatenated(line) for key, line in lines.items()}
    return unflatten(structure, groups[()])


def _equal(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)
        for x, y in zip(leaves, others, strict=True)
    )


def _concatenated(line: Sequence[Sequence[Any]]) -> list[Any]:
    columns = [*zip(*line, strict=True)]
    if errors := [
        str(sorted({tuple(x.shape[1:]) for x in column}))
        for column in columns
        if isinstance(column[0], Tensor) and len({x.shape[1:] for x in column}) > 1
    ]:
        raise ValueError(
            f"certify_program: the batches of processes must differ in rows only; got rows of {'; '.join(errors)}."
        )
    return [
        torch.cat(column) if isinstance(column[0], Tensor) and column[0].ndim else column[0]
        for column in columns
    ]


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
    """Judge the run in the processes of a mesh: the loss, and each parameter's gradients and changes."""
    names = dict.fromkeys(name for rank in (single, *ranks) for name in rank.start)
    slices = {name: _slices(name, axes, ranks, single) for name in names}
    mesh = ", ".join(f"{name}={size}" for name, size in axes.items())
    if unlike := [name for name, slices_of_ranks in slices.items() if not slices_of_ranks]:
        raise PromiseError(
            f"certify_program: on mesh {mesh} parameters must begin as in one process; got other values, names or parts of "
            f"{', '.join(unlike)}. Seed all ranks alike, and shard dims in equal parts in the order of an axis."
        )
    sizes = {**axes, **({"all axes": len(ranks)} if len(axes) > 1 else {})}
    return judge(_comparisons(ranks, single, slices, dtype), mesh, sizes, 1e-6 + TOLERANCES[dtype])


def _slices(
    name: str, axes: Axes, ranks: Sequence[RankRecord], single: RankRecord
) -> dict[int, _Slice]:
    """Return the slice of a parameter in each rank that has it, by the values before the first step; none if they differ.

    All ranks have the full parameter, or a part of a dim, in the order of an axis.
    """
    shards = {rank: record.start[name] for rank, record in enumerate(ranks) if name in record.start}
    full, coordinates = single.start.get(name), _coordinates(axes)
    if full is None:
        return {}
    for dim, axis in [(0, None), *product(range(full.ndim), range(len(axes)))]:
        lines: dict[Any, list[int]] = {}
        for rank in shards:
            key = (
                rank
                if axis is None
                else (*coordinates[rank][:axis], *coordinates[rank][axis + 1 :])
            )
            lines.setdefault(key, []).append(rank)
        slices = {
            rank: _Slice(dim, i, len(line))
            for line in lines.values()
            for i, rank in enumerate(line)
        }
        if all(torch.equal(shards[rank], part.of(full)) for rank, part in slices.items()):
            return slices
    return {}


def _comparisons(
    ranks: Sequence[RankRecord],
    single: RankRecord,
    slices: Mapping[str, Mapping[int, _Slice]],
    dtype: torch.dtype,
) -> Iterator[Comparison]:
    """Compare the losses, gradients and changes of parameters of all steps."""
    for step, grads in enumerate(single.grads):
        if (loss := _mean_loss(ranks, step)) is not None and single.losses[step] is not None:
            expected = torch.tensor(single.losses[step], dtype=torch.float64)
            yield Comparison(
                step,
                "loss",
                "loss",
                Shards([loss], [0], lambda x: [x]),
                expected,
                bound_of(expected, 0.0, dtype),
            )
        largest_of_all = max(map(largest, grads.values()), default=0.0)
        for name, of_ranks in slices.items():
            start = single.start[name]
            parts = {
                rank: ranks[rank].grads[step][name]
                for rank in of_ranks
                if name in ranks[rank].grads[step]
            }
            if parts or name in grads:
                expected = grads.get(name, torch.zeros_like(start))
                parts = parts or {
                    rank: torch.zeros_like(ranks[rank].start[name]) for rank in of_ranks
                }
                bound = bound_of(expected, largest_of_all, dtype)
                yield Comparison(
                    step, name, "gradient", _shards(parts, of_ranks), expected, bound, rivals=grads
                )
            parts = {
                rank: ranks[rank].params[step][name] - ranks[rank].start[name] for rank in of_ranks
            }
            expected, bound = (
                single.params[step][name] - start,
                bound_of(single.params[step][name], 0.0, dtype),
            )
            yield Comparison(
                step, name, "change of the parameter", _shards(parts, of_ranks), expected, bound
            )


def _shards(parts: Mapping[int, Tensor], slices: Mapping[int, _Slice]) -> Shards:
    return Shards(
        [*parts.values()], [*parts], lambda full: [slices[rank].of(full) for rank in parts]
    )


def _mean_loss(ranks: Sequence[RankRecord], step: int) -> Tensor | None:
    """Return the mean of the losses, weighted by rows, of processes that have one."""
    pairs = [
        (loss, rows_of(rank.batch) or 1)
        for rank in ranks
        if (loss := rank.losses[step]) is not None
    ]
    rows = sum(rows for _, rows in pairs)
    return (
        torch.tensor(sum(loss * rows for loss, rows in pairs) / rows, dtype=torch.float64)
        if rows
        else None
    )
