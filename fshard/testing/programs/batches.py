"""The batch of the run in one process, made of those of the processes.

equal along model, other rows along data       the rows of all, in the order of ranks
other columns along context                    the same, by splits={"context": 1}
the program's own batch in one process has     that one: the program knows how it is split
the elements of all
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import xxhash
from torch import Tensor

from fshard.mesh.layout import PyTree, flatten
from fshard.testing.programs.record import RankRecord

Axes = Mapping[str, int]
Coordinates = tuple[int, ...]
Leaves = Sequence[Any]


def coordinates_of(axes: Axes) -> list[Coordinates]:
    """Return the coordinates of the ranks."""
    return list(product(*[range(size) for size in axes.values()]))


def equal_axes(batches_of_ranks: Sequence[Sequence[PyTree]], axes: Axes) -> list[str]:
    """Return the axes along which the batches of processes are equal, in all steps."""
    leaves_by_rank = [flatten(list(batches))[0] for batches in batches_of_ranks]
    groups = dict(zip(coordinates_of(axes), leaves_by_rank, strict=True))
    equal: list[str] = []
    for number, (name, size) in enumerate(axes.items()):
        is_equal = True
        for coordinates, leaves in groups.items():
            first = groups[(*coordinates[:number], 0, *coordinates[number + 1 :])]
            is_equal = is_equal and are_equal(first, leaves)
        if is_equal and size > 1:
            equal.append(name)
    return equal


def repeated_rows(ranks: Sequence[RankRecord], axes: Axes) -> tuple[int, int]:
    """Return the number of rows that several ranks read, and that of all rows.

    Ranks count as one along an axis along which all their batches are equal.
    """
    equal = equal_axes([rank.batches for rank in ranks], axes)
    readers: Counter[bytes] = Counter()
    for coordinates, rank in zip(coordinates_of(axes), ranks, strict=True):
        along = zip(coordinates, axes, strict=True)
        is_copy = any(i > 0 and name in equal for i, name in along)
        if not is_copy:
            readers.update(_digests_of_rows(rank))
    repeated = sum(1 for count in readers.values() if count > 1)
    return repeated, len(readers)


def _digests_of_rows(rank: RankRecord) -> set[bytes]:
    """Return a digest of each row that a rank reads, with all that the batch has of the row."""
    digests: set[bytes] = set()
    for batch in rank.batches:
        tensors = [x for x in flatten(batch)[0] if has_rows(x)]
        rows = min([len(x) for x in tensors], default=0)
        for row in range(rows):
            digest = xxhash.xxh3_128()
            for x in tensors:
                if len(x) == rows:
                    values = x[row].detach().contiguous().view(-1)
                    digest.update(values.view(torch.uint8).numpy().tobytes())
            digests.add(digest.digest())
    return digests


def joined_batches(
    batches_of_ranks: Sequence[Sequence[PyTree]],
    axes: Axes,
    splits: Mapping[str, int] | None = None,
    alone: Sequence[Leaves] | None = None,
) -> list[Leaves]:
    """Return the leaves of the batch of all processes, for each step or for all steps.

    Args:
        batches_of_ranks: the batch of each step, or one for all steps, of each process.
        axes: of the mesh.
        splits: the dim that is split along an axis; 0 for others.
        alone: the batches that the program makes in one process. They are taken if they have the
            same elements.
    """
    equal = equal_axes(batches_of_ranks, axes)
    lone_axes: dict[str, int] = {}
    members: dict[Coordinates, Sequence[PyTree]] = {}
    for name, size in axes.items():
        lone_axes[name] = 1 if name in equal else size
    for coordinates, batches in zip(coordinates_of(axes), batches_of_ranks, strict=True):
        is_member = all(i < n for i, n in zip(coordinates, lone_axes.values(), strict=True))
        if is_member:
            members[coordinates] = batches

    joined: list[Leaves] = []
    for step in range(len(batches_of_ranks[0])):
        groups = {key: flatten(batches[step])[0] for key, batches in members.items()}
        _validate_splits(groups, lone_axes, splits or {})
        own = alone[step] if alone is not None and step < len(alone) else None
        if own is not None and _has_all_elements(own, list(groups.values())):
            joined.append(own)
        else:
            joined.append(_joined(groups, lone_axes, splits or {}))
    return joined


def _validate_splits(
    groups: Mapping[Coordinates, Leaves], axes: Axes, splits: Mapping[str, int]
) -> None:
    """Raise if no tensor of the batches has the dim that is split along an axis."""
    leaves = next(iter(groups.values()))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    dims = max([x.ndim for x in tensors], default=0)
    for axis, dim in splits.items():
        if axes.get(axis, 1) > 1 and dim >= dims > 0:
            raise ValueError(
                f"certify_program: splits must be dims of batches; got {axis}={dim}, and no tensor "
                f"of the batch has more than {dims} dims. Give one below: --split {axis}={dims - 1}."
            )


def _joined(groups: Mapping[Coordinates, Leaves], axes: Axes, splits: Mapping[str, int]) -> Leaves:
    """Join batches axis by axis, the last one first.

    Coordinates of groups lose their last one, until one group is left.
    """
    for name in reversed(list(axes)):
        lines: dict[Coordinates, list[Leaves]] = {}
        for coordinates, leaves in groups.items():
            lines.setdefault(coordinates[:-1], []).append(leaves)
        groups = {
            key: _concatenated(line, name, splits.get(name, 0)) for key, line in lines.items()
        }
    return groups[()]


def are_equal(leaves: Leaves, others: Leaves) -> bool:
    """Return True if two batches have equal leaves."""
    if len(leaves) != len(others):
        return False
    for x, y in zip(leaves, others, strict=True):
        are_tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
        if not (torch.equal(x, y) if are_tensors else bool(x == y)):
            return False
    return True


def are_all_equal(column: Leaves) -> bool:
    """Return True if a leaf is equal in all batches."""
    return all(are_equal(column[:1], [x]) for x in column[1:])


def has_rows(x: Any) -> bool:
    """Return True if a leaf is a tensor with a dim."""
    return isinstance(x, Tensor) and x.ndim > 0


def _has_all_elements(own: Leaves, batches: Sequence[Leaves]) -> bool:
    """Return True if a batch has the elements of several others, in any order.

    A leaf that all of them share, such as a mask, may be there once.
    """
    if any(len(leaves) != len(own) for leaves in batches):
        return False
    for x, column in zip(own, zip(*batches, strict=True), strict=True):
        if not isinstance(x, Tensor):
            continue
        if not are_all_equal([x, *column]) and not _is_rearranged(x, column):
            return False
    return True


def _is_rearranged(full: Tensor, parts: Sequence[Any]) -> bool:
    if not all(isinstance(x, Tensor) and x.dtype == full.dtype for x in parts):
        return False
    if sum([x.numel() for x in parts]) != full.numel():
        return False
    elements = torch.cat([x.flatten() for x in parts])
    return torch.equal(elements.sort().values, full.flatten().sort().values)


def _concatenated(line: Sequence[Leaves], axis: str, dim: int) -> list[Any]:
    """Concatenate several batches along a dim, leaf by leaf."""
    if len(line) == 1:
        return list(line[0])
    joined: list[Any] = []
    errors: list[str] = []
    for column in zip(*line, strict=True):
        first = column[0]
        if not isinstance(first, Tensor) or first.ndim <= dim:
            if not are_all_equal(column):
                errors.append(" and ".join([str(x) for x in column]))
            joined.append(first)
            continue
        shapes = {tuple(x.shape[:dim] + x.shape[dim + 1 :]) for x in column}
        if len(shapes) > 1:
            errors.append(" and ".join([str(list(x.shape)) for x in column]))
        else:
            joined.append(torch.cat(column, dim))
    if errors:
        what = "rows" if dim == 0 else f"dim {dim}"
        raise ValueError(
            f"certify_program: along {axis} the batches of processes must differ in {what} only; "
            f"got {'; '.join(errors)}. Give numbers that differ as tensors of a number for each row; "
            f'if another dim is split along {axis}, say so: splits={{"{axis}": 1}}, --split {axis}=1.'
        )
    return joined


def rows_at(rank: RankRecord, step: int) -> int:
    """Return the rows of a process's batch: of its first tensor that has a dim; 1 if none has."""
    for x in flatten(rank.batch(step))[0]:
        if has_rows(x):
            return len(x)
    return 1


IGNORED = -100
"""The label of tokens that torch's cross-entropy leaves out."""


def element_counts(rank: RankRecord, step: int) -> dict[str, int]:
    """Return the numbers of elements of a process's batch by which a mean may weigh, by names."""
    counts: dict[str, int] = {}
    for number, x in enumerate(flatten(rank.batch(step))[0]):
        if has_rows(x):
            leaf = f"elements of leaf {number} of the batch"
            counts[leaf] = x.numel()
            counts[f"{leaf} that are not {IGNORED}"] = int((x != IGNORED).sum())
            counts[f"{leaf} that are not 0"] = int((x != 0).sum())
    return counts
