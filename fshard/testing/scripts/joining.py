"""The batches of the one process, joined from those that the processes read.

process 0   rows 0 1 | rows 4 5        one process   rows 0 1 2 3 | rows 4 5 6 7
process 1   rows 2 3 | rows 6 7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.testing.programs.batches import Axes, coordinates_of, equal_axes, joined_batches
from fshard.testing.programs.record import RankRecord
from fshard.testing.scripts.loaders import TRAINS, Batches, Key, Uncollated


class Joining(NamedTuple):
    """Joins the batches of processes to those of one.

    Args:
        axes: of the mesh.
        splits: the dim of batches that is split along an axis, if it is not the rows.
        turn: the number of batches in a microbatch, to give the microbatches of the processes one
            after another, to a script that takes more of them in fewer processes. 0 joins them.
        repeats: give equal microbatches of several processes as often as these have them.
    """

    axes: Axes
    splits: Mapping[str, int]
    turn: int = 0
    repeats: bool = False

    def joined(self, ranks: Sequence[Batches]) -> Batches:
        """Return what the one process reads."""
        loaders: dict[Key, list[PyTree]] = {}
        for key, batches in ranks[0].loaders.items():
            have_all = all(key in rank.loaders for rank in ranks)
            if have_all:
                loaders[key] = self._joined_pass(ranks, key)
            elif key[0] is TRAINS:
                loaders[key] = _dispatched(batches, ranks)
        inputs = self._joined([rank.inputs for rank in ranks])
        losses = [rank.losses_name for rank in ranks if rank.losses_name]
        return Batches(
            loaders,
            ranks[0].lengths,
            inputs,
            {},
            _joined_targets(ranks),
            losses[0] if losses else "",
        )

    def _joined_pass(self, ranks: Sequence[Batches], key: Key) -> list[PyTree]:
        batches = [rank.loaders[key] for rank in ranks]
        try:
            return self._joined(batches)
        except ValueError:
            # They differ in more than rows, as where each is padded to a length of its own.
            samples = [rank.samples.get(key, []) for rank in ranks]
            if not all(isinstance(x, list) for each in samples for x in each):
                raise
            number = min(len(each) for each in samples)
            if number < min(len(each) for each in batches):
                raise
            return self._uncollated(batches, samples, number)

    def _uncollated(
        self, batches: Sequence[list[PyTree]], samples: Sequence[list[Any]], number: int
    ) -> list[PyTree]:
        """Return the samples of all processes; of those whose batches are equal, of one."""
        records = [_record(flatten(each[:number])[0]) for each in batches]
        equal = equal_axes(records, self.axes)
        members: list[int] = []
        for rank, coordinates in enumerate(coordinates_of(self.axes)):
            repeats = [i for i, name in zip(coordinates, self.axes, strict=True) if name in equal]
            if not any(repeats):
                members.append(rank)
        uncollated: list[PyTree] = []
        for i in range(number):
            together: list[Any] = []
            for rank in members:
                together += samples[rank][i]
            uncollated.append(Uncollated(together))
        return uncollated

    def _joined(self, ranks: Sequence[Sequence[PyTree]]) -> list[PyTree]:
        """Return the batches of all processes: joined, or those of one after another."""
        number = min(len(batches) for batches in ranks)
        if not number:
            return []
        lists = [list(batches[:number]) for batches in ranks]
        if self.turn:
            return _in_turn(lists if self.repeats else _different(lists), self.turn)

        leaves_of_ranks = [flatten(batches)[0] for batches in lists]
        _, structure = flatten(lists[0])
        if len({len(leaves) for leaves in leaves_of_ranks}) > 1:
            raise ValueError("certify: the batches of processes must have the same structure.")
        columns = [*zip(*leaves_of_ranks, strict=True)]
        rows: set[int] = set()
        for column in columns:
            if not _are_equal(column):
                rows.update([len(x) for x in column if _has_rows(x)])
        kept: dict[int, Any] = {}
        for position, column in enumerate(columns):
            # A mask that all rows share is no rows, and a text is nothing to compute with.
            is_shared = not _has_rows(column[0]) or len(column[0]) not in rows
            is_text = isinstance(column[0], str)
            if is_text or (is_shared and _are_equal(column)):
                kept[position] = column[0]

        records: list[RankRecord] = []
        for leaves in leaves_of_ranks:
            records.append(_record([x for i, x in enumerate(leaves) if i not in kept]))
        (leaves_of_all,) = joined_batches(records, self.axes, self.splits)
        joined = iter(leaves_of_all)
        leaves = [kept[i] if i in kept else next(joined) for i in range(len(columns))]
        return cast(list[PyTree], unflatten(structure, leaves))


def _dispatched(batches: Sequence[PyTree], ranks: Sequence[Batches]) -> list[PyTree]:
    """Return the batches of a loader that process 0 alone reads, and sends to the others.

    It reads a batch for each process, or one that it splits: the inputs of the others show it.
    """
    n = len(ranks)
    of_one = [rank.inputs[0] for rank in ranks[1:] if rank.inputs]
    of_batch = [x for x in flatten(list(batches[:1]))[0] if _has_rows(x)]
    if of_one and of_batch and len(of_batch[0]) == n * len(cast(Tensor, of_one[0])):
        return list(batches)
    groups = [batches[i : i + n] for i in range(0, len(batches), n)]
    return [_in_one(group) for group in groups if len(group) == n]


def _in_turn(lists: Sequence[Sequence[PyTree]], size: int) -> list[PyTree]:
    """Return a microbatch of each process in turn."""
    turns: list[PyTree] = []
    for begin in range(0, len(lists[0]), size):
        for batches in lists:
            turns += batches[begin : begin + size]
    return turns


def _different(lists: Sequence[Sequence[PyTree]]) -> list[Sequence[PyTree]]:
    """Return lists of batches without those that are equal to another one."""
    different: list[Sequence[PyTree]] = []
    for batches in lists:
        leaves = flatten(batches)[0]
        if not any(_are_equal_lists(leaves, flatten(others)[0]) for others in different):
            different.append(batches)
    return different


def _are_equal_lists(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
    return len(xs) == len(ys) and all(map(_are_equal, zip(xs, ys, strict=True)))


def _joined_targets(ranks: Sequence[Batches]) -> list[PyTree]:
    """Return the targets of the ranks that have some; of equal ones, those of one."""
    different = _different([rank.targets for rank in ranks if rank.targets])
    if not different:
        return []
    return [_in_one(targets) for targets in zip(*different, strict=True)]


def _in_one(batches: Sequence[PyTree]) -> PyTree:
    """Return several batches as one."""
    records = [_record(flatten(batch)[0]) for batch in batches]
    (leaves,) = joined_batches(records, {"ranks": len(batches)})
    return unflatten(flatten(batches[0])[1], list(leaves))


def _record(leaves: Sequence[Any]) -> RankRecord:
    return RankRecord(batches=[leaves])


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _are_equal(column: Sequence[Any]) -> bool:
    first = column[0]
    for x in column[1:]:
        if isinstance(first, Tensor):
            if not isinstance(x, Tensor) or not torch.equal(first, x):
                return False
        elif x != first:
            return False
    return True
