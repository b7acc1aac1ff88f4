"""The batches of the one process, joined from those that the processes read.

process 0   rows 0 1 | rows 4 5        one process   rows 0 1 2 3 | rows 4 5 6 7
process 1   rows 2 3 | rows 6 7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.testing.programs.batches import (
    Axes,
    are_all_equal,
    are_equal,
    coordinates_of,
    equal_axes,
    has_rows,
    joined_batches,
)
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
        equal = equal_axes([each[:number] for each in batches], self.axes)
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
        kept = _leaves_of_all_rows(columns)
        others: list[list[PyTree]] = []
        for leaves in leaves_of_ranks:
            others.append([[x for i, x in enumerate(leaves) if i not in kept]])
        (leaves_of_all,) = joined_batches(others, self.axes, self.splits)
        joined = iter(leaves_of_all)
        leaves = [kept[i] if i in kept else next(joined) for i in range(len(columns))]
        return cast(list[PyTree], unflatten(structure, leaves))


def _leaves_of_all_rows(columns: Sequence[Sequence[Any]]) -> dict[int, Any]:
    """Return the leaves that are not joined, by their positions.

    A mask that all rows share is no rows, and a text is nothing to compute with.
    """
    rows: set[int] = set()
    for column in columns:
        if not are_all_equal(column):
            rows.update([len(x) for x in column if has_rows(x)])
    leaves: dict[int, Any] = {}
    for position, column in enumerate(columns):
        first = column[0]
        is_shared = not has_rows(first) or len(first) not in rows
        if isinstance(first, str) or (is_shared and are_all_equal(column)):
            leaves[position] = first
    return leaves


def _dispatched(batches: Sequence[PyTree], ranks: Sequence[Batches]) -> list[PyTree]:
    """Return the batches of a loader that process 0 alone reads, and sends to the others.

    It reads a batch for each process, or one that it splits: the inputs of the others show it.
    """
    n = len(ranks)
    of_one = [rank.inputs[0] for rank in ranks[1:] if rank.inputs]
    of_batch = [x for x in flatten(list(batches[:1]))[0] if has_rows(x)]
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
        if not any(are_equal(leaves, flatten(others)[0]) for others in different):
            different.append(batches)
    return different


def _joined_targets(ranks: Sequence[Batches]) -> list[PyTree]:
    """Return the targets of the ranks that have some; of equal ones, those of one."""
    different = _different([rank.targets for rank in ranks if rank.targets])
    if not different:
        return []
    return [_in_one(targets) for targets in zip(*different, strict=True)]


def _in_one(batches: Sequence[PyTree]) -> PyTree:
    """Return several batches as one."""
    _, structure = flatten(batches[0])
    (leaves,) = joined_batches([[batch] for batch in batches], {"ranks": len(batches)})
    return unflatten(structure, list(leaves))
