"""Divide what moves between two meshes into rounds of bounded memory.

A pair is a device that sends to one other. All leaves of a dtype share the rounds:

    list of 0 -> 2       w w w w | w w b b | b         of elements of the leaves w and b
    list of 1 -> 2       w w w w | b b                 each round at most 4 of each list

Both ends of a pair know its list, see `crossing`, so a round sends elements alone.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fshard.mesh.collectives.moves import NewBuffer, PartsMove
from fshard.mesh.reshard.crossing import Crossing, Elements
from fshard.mesh.reshard.exchange import Box
from fshard.mesh.reshard.regions import Numbers

ROUND = 16 << 20
"""The most bytes of buffers that a device needs beside its old and its new shards."""


# Note [Rounds of pairs]
# What one device sends to one other, of all leaves of a dtype, is a list of elements. Round r sends
# the elements r m to (r + 1) m of each pair's list, so that all devices work in each round and a
# leaf may be in several. Of a pair's list both ends know its length and its order.
#
# With p the most devices that any device sends to or receives from, a round needs p m elements for
# what is sent and as many for what arrives. Two rounds are on their way at a time, and until a round
# has arrived, `fshard.memory.limit` counts what arrives once more. So m is such that
#
#     6 p m (bytes of an element) <= ROUND


@dataclass(frozen=True)
class Parcels(PartsMove):
    """One round: elements of each device for each other one.

    A buffer has first what its device sends, in the order of receivers, and then space for what it
    receives, in the order of senders:

    device 0  [1 2 . .]   =>  [1 2 . .]         0 sends 1 2 to device 1, and receives nothing
    device 1  [. . . .]       [. . 1 2]

    Args:
        pairs: (sender, receiver, elements), in order.
        way: the two meshes, for errors.
        tensors: how many there are, and a digest of their shapes and layouts: all devices of both
            meshes must have equal ones.
        number: of the round.
    """

    pairs: tuple[tuple[int, int, int], ...] = field(repr=False, hash=False)
    way: str = ""
    tensors: str = ""
    number: int = 0
    name: ClassVar[str] = "reshard"
    has_one_line: ClassVar[bool] = False

    @cached_property
    def _most_sent(self) -> int:
        """The most elements that any device sends."""
        sizes = Counter[int]()
        for sender, _, size in self.pairs:
            sizes[sender] += size
        return max(sizes.values())

    @cached_property
    def _most_received(self) -> int:
        sizes = Counter[int]()
        for _, receiver, size in self.pairs:
            sizes[receiver] += size
        return max(sizes.values())

    @property
    def length(self) -> int:
        """The elements of a buffer."""
        return self._most_sent + self._most_received

    def parcels(self, x: Tensor, index: int) -> dict[int, Tensor]:
        sizes = {receiver: size for sender, receiver, size in self.pairs if sender == index}
        return _slices(x, sizes)

    def incoming(self, x: Tensor, index: int, empty: NewBuffer) -> dict[int, Tensor]:
        return _slices(x[self._most_sent :], self.expected(x, index))

    def expected(self, x: Tensor, index: int) -> dict[int, int]:
        return {sender: size for sender, receiver, size in self.pairs if receiver == index}

    def unpacked(self, x: Tensor, index: int, arrived: Mapping[int, Tensor]) -> Tensor:
        for source, target in self.incoming(x, index, x.new_empty).items():
            if arrived[source].data_ptr() != target.data_ptr():
                target.copy_(arrived[source])
        return x[self._most_sent :]

    def unpack(self, rows: Tensor, shape: torch.Size, n: int) -> Tensor:
        return rows[-self._most_received :]


def _slices(row: Tensor, sizes: Mapping[int, int]) -> dict[int, Tensor]:
    """Return slices of these sizes of a row, one after another."""
    slices: dict[int, Tensor] = {}
    begin = 0
    for key, size in sizes.items():
        slices[key] = row[begin : begin + size]
        begin += size
    return slices


class Portion(NamedTuple):
    """Elements of one leaf in the list of a pair.

    Args:
        leaf: its index among all leaves.
        shape: of the leaf.
        begin: elements of other leaves before it.
        elements: of the leaf.
    """

    leaf: int
    shape: tuple[int, ...]
    begin: int
    elements: Elements


class PairList:
    """The list of elements that a device sends to one other, or receives from it."""

    def __init__(self) -> None:
        self.portions: list[Portion] = []
        self._begins: list[int] = []
        self._size = 0

    def append(self, leaf: int, shape: tuple[int, ...], elements: Elements) -> None:
        """Add the elements of a leaf."""
        self.portions.append(Portion(leaf, shape, self._size, elements))
        self._begins.append(self._size)
        self._size += sum([box.size for box in elements.boxes])

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """Return elements `start` to `stop` as leaves with boxes."""
        first = max(0, bisect_right(self._begins, start) - 1)
        for portion in self.portions[first:]:
            if portion.begin >= stop:
                return
            begin = portion.begin
            for box in portion.elements.boxes:
                size = box.size
                if begin >= start and begin + size <= stop:
                    yield portion.leaf, box
                else:
                    for inner_box in box.range(start - begin, stop - begin):
                        yield portion.leaf, inner_box
                begin += size


class Rounds:
    """The rounds of leaves that are sent in one dtype: see Note [Rounds of pairs].

    Args:
        leaves: their indices among all leaves.
        crossings: their ways.
        dtype: in which they are sent.
        way: the two meshes, for errors.
    """

    def __init__(
        self,
        leaves: Sequence[int],
        crossings: Sequence[Crossing],
        dtype: torch.dtype,
        way: str,
    ) -> None:
        self.leaves = leaves
        self.crossings = crossings
        self.dtype = dtype
        self.way = way
        self.devices = crossings[0].devices

        self.total = np.zeros_like(crossings[0].counts)
        for crossing, count in Counter(crossings).items():
            self.total += crossing.counts * count
        is_sent = self.total > 0
        most_peers = max(1, int(is_sent.sum(0).max()), int(is_sent.sum(1).max()))
        self.at_once = max(1, ROUND // (6 * most_peers * dtype.itemsize))
        self.count = -(-int(self.total.max()) // self.at_once)

    @property
    def sent(self) -> Numbers:
        """The bytes that each device sends to each.  (senders, receivers)"""
        return self.total * self.dtype.itemsize

    @cached_property
    def _tensors(self) -> str:
        """The number of leaves, and a digest of their shapes and layouts."""
        digests = [crossing.digest for crossing in self.crossings]
        digest = zlib.crc32(np.array(digests, np.uint32).tobytes())
        return f"{len(self.leaves)} ({digest:08x})"

    def counts(self, number: int) -> Numbers:
        """Return the elements that each device sends to each in a round.  (senders, receivers)"""
        return np.clip(self.total - number * self.at_once, 0, self.at_once)

    def move(self, number: int) -> Parcels:
        """Return the collective of a round."""
        counts = self.counts(number)
        pairs: list[tuple[int, int, int]] = []
        for sender, receiver in np.argwhere(counts).tolist():
            pairs.append((sender, receiver, int(counts[sender, receiver])))
        return Parcels(tuple(pairs), self.way, self._tensors, number)

    def overlap(self, index: int) -> Iterator[tuple[int, Box, Box]]:
        """Return what a device has already: leaves, with boxes in the old and in the new shard."""
        for leaf, crossing in zip(self.leaves, self.crossings, strict=True):
            for old_box, new_box in crossing.traffic(index).local:
                yield leaf, old_box, new_box

    def outgoing(self, index: int) -> list[PairList]:
        """Return what a device sends, in the order of receivers."""
        return self._lists([crossing.traffic(index).outgoing for crossing in self.crossings])

    def incoming(self, index: int) -> list[PairList]:
        """Return what a device receives, in the order of senders."""
        return self._lists([crossing.traffic(index).incoming for crossing in self.crossings])

    def _lists(self, elements_of_leaves: Sequence[Mapping[int, Elements]]) -> list[PairList]:
        """Return the list of each peer, from the elements of each leaf by peer."""
        lists: dict[int, PairList] = {}
        rows = zip(self.leaves, self.crossings, elements_of_leaves, strict=True)
        for leaf, crossing, elements_by_peer in rows:
            for peer, elements in elements_by_peer.items():
                lists.setdefault(peer, PairList()).append(leaf, crossing.shape, elements)
        return [lists[peer] for peer in sorted(lists)]

    def boxes(self, lists: Sequence[PairList], number: int) -> Iterator[tuple[int, Box]]:
        """Return the leaves and boxes of a round, in the order of its buffer."""
        start = number * self.at_once
        for pair_list in lists:
            yield from pair_list.boxes(start, start + self.at_once)
