"""Exchange exactly the elements that each device lacks, where collectives of equal rows send more.

Devices store shards of one layout and need shards of another. An element that a device has already
stays there. A device that lacks an element receives it once, from a device that has it, and
replicas divide these requests among themselves.

    P.flat("b") -> P.flat("b", "a"), 7 elements on 2 x 3 devices: a = 0 above, a = 1 below

    stores   [0 1 2] [3 4 5] [6]    needs    [0 1] [4 5] []      receives    -    -    -
             [0 1 2] [3 4 5] [6]             [2 3] [6]   []                  3    6    -

Device (1, 0) receives 3 from (1, 1), which receives 6 from (1, 2). The devices above send nothing:
see Note [Requests without messages].

Any number of tensors share one exchange. A device concatenates its shards of them to a row, padded
to the length of the longest such row; the padding has no defined value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.mesh.collectives.moves import Alone, Move, PartsMove, plain
from fshard.mesh.layout import P
from fshard.mesh.layout.arithmetic import balanced_range, strides, unravel
from fshard.mesh.layout.spec import CachedHash
from fshard.mesh.reshard.regions import (
    Numbers,
    Sizes,
    ZigzagDim,
    intersect,
    nonempty_boxes,
    regions_of,
    replicas,
    slice_region,
    volume,
)


class Box(NamedTuple):
    """A box in the memory of one shard: its offset, lengths and strides."""

    offset: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.lengths)

    def of(self, shard: Tensor) -> Tensor:
        """Return a view of the box in a shard. The strides of a box are those of a contiguous one."""
        begin = shard.storage_offset()
        if shard.is_contiguous():
            return shard.as_strided(self.lengths, self.strides, begin + self.offset)
        if shard.ndim == 1:
            step = shard.stride(0)
            steps = [step * stride for stride in self.strides]
            return shard.as_strided(self.lengths, steps, begin + step * self.offset)
        starts = unravel(self.offset, shard.shape)
        sides = zip(starts, self.lengths, strict=True)
        return shard[tuple([slice(start, start + length) for start, length in sides])]

    def view(self, rows: Tensor) -> Tensor:
        """Return a view of the box in the shard of each row.  (rows, length) -> (rows, ...)"""
        lengths = (len(rows), *self.lengths)
        steps = (rows.stride(0), *self.strides)
        return rows.as_strided(lengths, steps, rows.storage_offset() + self.offset)

    def range(self, start: int, stop: int) -> list[Box]:
        """Return elements `start` to `stop` of the box, in order: see Note [Boxes of a range].

        Bounds beyond it are clipped. There are a head, full rows and a tail, where not empty.

        >>> [(box.offset, box.lengths) for box in Box(10, (3, 2), (6, 1)).range(1, 5)]
        [(11, (1, 1)), (16, (1, 2)), (22, (1, 1))]
        """
        start = max(start, 0)
        stop = min(stop, self.size)
        if start >= stop:
            return []
        if len(self.lengths) == 1:
            return [Box(self.offset + start * self.strides[0], (stop - start,), self.strides)]

        row_size = prod(self.lengths[1:])
        first_row = start // row_size
        first_full_row = -(-start // row_size)
        last_row = stop // row_size
        boxes: list[Box] = []
        if first_row < first_full_row:
            boxes += self._range_of_row(first_row, start, stop)
        if first_full_row < last_row:
            offset = self.offset + first_full_row * self.strides[0]
            lengths = (last_row - first_full_row, *self.lengths[1:])
            boxes.append(Box(offset, lengths, self.strides))
        if first_full_row <= last_row:
            boxes += self._range_of_row(last_row, last_row * row_size, stop)
        return boxes

    def _range_of_row(self, row: int, start: int, stop: int) -> list[Box]:
        """Return those of elements `start` to `stop` that are in a row."""
        begin = row * prod(self.lengths[1:])
        inner_box = Box(self.offset + row * self.strides[0], self.lengths[1:], self.strides[1:])
        boxes: list[Box] = []
        for box in inner_box.range(start - begin, stop - begin):
            boxes.append(Box(box.offset, (1, *box.lengths), self.strides))
        return boxes


class Traffic(NamedTuple):
    """The boxes of one tensor that one device sends, receives, and has already.

    Args:
        outgoing: for each receiver, boxes in the old shard.
        incoming: for each sender, boxes in the new shard.
        local: pairs of boxes, in the old shard and in the new one.
    """

    outgoing: Mapping[int, list[Box]]
    incoming: Mapping[int, list[Box]]
    local: list[tuple[Box, Box]]


# Note [Requests without messages]
# A sender and its receiver compute the same boxes, each on its own. So nothing here may depend on
# what only one of them has, and boxes are enumerated in one order, that of the receivers' numbers.
#
# Replicas have the same old shard; all elements of it that other devices lack are its requests, as
# one list. Of r replicas, number i sends the balanced range i of the list.
#
#     P("a") -> P("b"), 8 elements on 2 x 2 devices (a, b)
#
#     replicas           shard      requests, by receiver    (0, 0) or (1, 0)    (0, 1) or (1, 1)
#     (0, 0) (0, 1)      0 1 2 3    (1, 0): 0 1 2 3          sends 0 1           sends 2 3
#     (1, 0) (1, 1)      4 5 6 7    (0, 1): 4 5 6 7          sends 4 5           sends 6 7
#
# `LeafExchange.sent` counts the list without making it. Each of the 4 elements is needed by c = 2
# devices, as after the exchange there are 2 replicas of it. Of these 4 c = 8 shard elements, the
# devices of the row have 4 already: (0, 0) needs 0 1 2 3 and stores them. So 8 - 4 = 4 are sent.


@dataclass(frozen=True)
class LeafExchange(CachedHash):
    """The exchange of one tensor between two layouts on a group of devices.

    The axes of the group are those of the two specs.
    """

    before: P
    after: P
    shape: tuple[int, ...]
    group: Sizes

    __hash__ = CachedHash.__hash__

    def transposed(self) -> LeafExchange:
        return LeafExchange(self.after, self.before, self.shape, self.group)

    @property
    def old_regions(self) -> Numbers:
        """The regions of all devices before the exchange."""
        return regions_of(self.before, self.shape, self.group)

    @property
    def new_regions(self) -> Numbers:
        """The regions of all devices after the exchange."""
        return regions_of(self.after, self.shape, self.group)

    @property
    def _replicas(self) -> Numbers:
        """The devices with equal old shards.  (rows, replicas)"""
        return replicas(self.group, self.before.sharded_axes)

    @property
    def length(self) -> int:
        """The elements of the longest shard, before or after."""
        longest_before = volume(self.old_regions).max()
        longest_after = volume(self.new_regions).max()
        return int(max(longest_before, longest_after))

    @cached_property
    def sent(self) -> Numbers:
        """The number of elements that each device sends: see Note [Requests without messages]."""
        old_regions = self.old_regions
        rows = self._replicas
        copies = prod([size for axis, size in self.group if axis not in self.after.sharded_axes])
        needed = volume(old_regions[rows[:, 0]]) * copies  # of each row's shard
        local = volume(intersect(old_regions, self.new_regions))
        requested = needed - local[rows].sum(1)

        # The balanced ranges of `_requests_of_row`, of all rows at once.
        count = rows.shape[1]
        bounds = np.arange(count + 1) * requested[:, None] // count  # (rows, replicas + 1)
        result = np.empty(len(old_regions), np.int64)
        result[rows] = np.diff(bounds)
        return result

    def traffic(self, index: int) -> Traffic:
        """Return the boxes that a device sends, receives and has already."""
        rows = self._replicas
        old_region = self.old_regions[index]
        new_region = self.new_regions[index]

        # It sends its range of the requests for its own shard.
        ((row_index, replica_index),) = np.argwhere(rows == index)
        requests = self._requests_of_row(rows[row_index])
        outgoing: dict[int, list[Box]] = {}
        for receiver in np.flatnonzero(requests.counts):
            boxes = requests.boxes(int(receiver), int(replica_index))
            if boxes:
                outgoing[int(receiver)] = self._in_shard(self.before, index, boxes)

        # It receives from the replicas of each shard with elements that it lacks.
        incoming: dict[int, list[Box]] = {}
        overlaps = volume(intersect(self.old_regions[rows[:, 0]], new_region))
        for row in rows[overlaps > 0]:
            requests = self._requests_of_row(row)
            if requests.counts[index] == 0:
                continue
            for replica, sender in enumerate(row):
                boxes = requests.boxes(index, replica)
                if boxes:
                    incoming[int(sender)] = self._in_shard(self.after, index, boxes)

        overlap = [*nonempty_boxes(intersect(old_region, new_region))]
        old_boxes = self._in_shard(self.before, index, overlap)
        new_boxes = self._in_shard(self.after, index, overlap)
        return Traffic(outgoing, incoming, [*zip(old_boxes, new_boxes, strict=True)])

    def _in_shard(self, spec: P, index: int, boxes: list[Numbers]) -> list[Box]:
        return local_boxes(spec, self.shape, self.group, index, boxes)

    def _requests_of_row(self, devices: Numbers) -> Requests:
        """Return the requests for the shard that some replicas have."""
        regions = intersect(self.old_regions[devices[0]], self.new_regions)
        regions[devices] = 0  # these have the elements already
        counts = volume(regions)
        return Requests(len(devices), regions, counts, counts.cumsum())


def local_boxes(
    spec: P,
    shape: tuple[int, ...],
    group: Sizes,
    index: int,
    boxes: Sequence[Numbers],
    zigzag_dims: Sequence[ZigzagDim] = (),
) -> list[Box]:
    """Convert boxes of global indices to boxes in the memory of a device's shard.

    In the memory of a block, element (i, j, ...) is at i * strides[0] + j * strides[1] + ..., less
    the same of the block's first element; in a flat shard also less its first element. With
    P("a", flat="b"), shape (4, 6) and 2 x 2 devices, device (1, 1) has rows 2:4, and of their 12
    elements 6:12. Box [3:4, 2:5] is at 3*6 + 2 - (2*6 + 0) - 6 = 2 in its shard.

    Args:
        spec: of the tensor.
        shape: of the tensor.
        group: the axes of the devices.
        index: of the device.
        boxes: of global indices.
        zigzag_dims: the dims whose shards are in zigzag order.
    """
    sizes = dict(group)
    coordinates = dict(zip(sizes, unravel(index, [*sizes.values()]), strict=True))
    block = spec.block(shape, sizes, coordinates)
    steps = strides([stop - start for start, stop in block])
    first = sum([start * step for (start, _), step in zip(block, steps, strict=True)])
    if spec.is_flat:
        ((flat_start, _),) = spec.ranges(shape, sizes, coordinates)
        first += flat_start

    result: list[Box] = []
    for box in boxes:
        starts = box[:, 0]
        lengths = box[:, 1] - starts
        if zigzag_dims:
            starts = starts.copy()
            for zigzag in zigzag_dims:
                starts[zigzag.dim] = zigzag.stored(int(starts[zigzag.dim]))
        result.append(Box(int(starts @ steps) - first, tuple(lengths.tolist()), steps))
    return result


class Requests(NamedTuple):
    """The elements of one shard that each device lacks: see Note [Requests without messages].

    Args:
        replicas: the number of devices that have the shard.
        regions: the elements for each device.  (n, k, d, 2)
        counts: the number of them.  (n,)
        ends: the end of the elements for each device in the list of all.  (n,)
    """

    replicas: int
    regions: Numbers
    counts: Numbers
    ends: Numbers

    def boxes(self, receiver: int, replica: int) -> list[Numbers]:
        """Return the boxes of global indices that a replica sends to a device."""
        start, stop = balanced_range(int(self.ends[-1]), self.replicas, replica)
        begin = int(self.ends[receiver] - self.counts[receiver])
        return slice_region(self.regions[receiver], start - begin, stop - begin)


class ShardSizes(NamedTuple):
    """The number of elements of one device's shards of each tensor."""

    before: list[int]
    after: list[int]


@dataclass(frozen=True)
class DirectExchange(CachedHash, PartsMove):
    """Send each device the elements of its new shards that it lacks, for one or more tensors."""

    leaves: tuple[LeafExchange, ...]

    __hash__ = CachedHash.__hash__

    @cached_property
    def traffic(self) -> Callable[[int], list[Traffic]]:
        """A function from a device to the boxes of each tensor that it sends, receives and has.

        It is cached on this object, so that its results are freed with the exchange.
        """

        def traffic(index: int) -> list[Traffic]:
            return [leaf.traffic(index) for leaf in self.leaves]

        return cache(traffic)

    @cached_property
    def sizes(self) -> Callable[[int], ShardSizes]:
        """A function from a device to the sizes of its shards, cached like `traffic`."""
        before, after = self._volumes

        def sizes(index: int) -> ShardSizes:
            return ShardSizes(before[:, index].tolist(), after[:, index].tolist())

        return cache(sizes)

    @cached_property
    def _volumes(self) -> tuple[Numbers, Numbers]:
        """The number of elements of each shard, before and after.  (tensors, n) each"""
        before = np.stack([volume(leaf.old_regions) for leaf in self.leaves])
        after = np.stack([volume(leaf.new_regions) for leaf in self.leaves])
        return before, after

    @cached_property
    def _transposed(self) -> DirectExchange:
        return DirectExchange(tuple(leaf.transposed() for leaf in self.leaves))

    def transposed(self) -> DirectExchange:
        return self._transposed  # one object, with one cache of traffic, for all backwards

    @cached_property
    def length(self) -> int:
        """The length of a row: that of the longest one that any device has, before or after."""
        before, after = self._volumes
        return max(1, int(before.sum(0).max()), int(after.sum(0).max()))

    @cached_property
    def _sent(self) -> Numbers:
        return np.sum([leaf.sent for leaf in self.leaves], axis=0)

    def sent(self, size: int, index: int | None, n: int) -> Fraction:
        count = self._sent.max() if index is None else self._sent[index]
        return Fraction(size, self.length) * int(count)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Concatenate the old shards of one device into a row."""
        if len(shards) == 1:
            row = shards[0].reshape(-1)
        else:
            row = torch.cat([shard.reshape(-1) for shard in shards])
        missing = self.length - row.numel()
        return pad(row, (0, missing)) if missing else row

    def split(self, row: Tensor, index: int) -> list[Tensor]:
        """Return the new shards of one device, flat, from its row."""
        sizes = self.sizes(index).after
        if sizes == [row.numel()]:
            return [row]
        # Copied: a view would keep the row alive, and unaligned matmuls round differently.
        return [shard[0].clone() for shard in _split_rows(row[None], sizes)]

    def parcels(self, x: Tensor, index: int) -> dict[int, Tensor]:
        shards = _split_rows(x.view(-1, self.length), self.sizes(index).before)
        parts: dict[int, list[Tensor]] = {}
        for shard, traffic in zip(shards, self.traffic(index), strict=True):
            for receiver, boxes in traffic.outgoing.items():
                flat_boxes = [box.view(shard).reshape(-1) for box in boxes]
                parts.setdefault(receiver, []).extend(flat_boxes)
        return {receiver: torch.cat(parcel) for receiver, parcel in parts.items()}

    def expected(self, x: Tensor, index: int) -> dict[int, int]:
        rows = x.numel() // self.length
        sizes = Counter[int]()
        for traffic in self.traffic(index):
            for sender, boxes in traffic.incoming.items():
                sizes[sender] += rows * sum([box.size for box in boxes])
        return sizes

    def unpacked(self, x: Tensor, index: int, arrived: Mapping[int, Tensor]) -> Tensor:
        rows = x.view(-1, self.length)
        new_rows = torch.zeros_like(rows)  # with NaNs in the padding, anomaly detection would raise
        sizes = self.sizes(index)
        old_shards = _split_rows(rows, sizes.before)
        new_shards = _split_rows(new_rows, sizes.after)

        # A parcel has the boxes of the first tensor, then those of the second: see `parcels`.
        begins = dict.fromkeys(arrived, 0)
        leaves = zip(self.traffic(index), old_shards, new_shards, strict=True)
        for traffic, old_shard, new_shard in leaves:
            for old_box, new_box in traffic.local:
                new_box.view(new_shard).copy_(old_box.view(old_shard))

            for sender, boxes in traffic.incoming.items():
                for box in boxes:
                    target = box.view(new_shard)
                    begin = begins[sender]
                    end = begin + target.numel()
                    begins[sender] = end
                    target.copy_(arrived[sender][begin:end].view(target.shape))
        return new_rows.view(x.shape)


def _split_rows(rows: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return the shard of each tensor in rows, without the padding.

    (rows, length) -> (rows, size) each
    """
    padding = rows.shape[1] - sum(sizes)
    return rows.split([*sizes, padding], 1)[:-1]


@dataclass(frozen=True)
class DirectSlice(Alone):
    """Slice the new shard of one tensor from the old one, where every device has all of it.

    The transpose is an exchange: a device has the cotangent of its own new shard only.
    """

    exchange: DirectExchange
    name = "keep"

    def local(self, x: Tensor, index: int, n: int) -> Tensor:
        return self.exchange.unpacked(plain(x).contiguous(), index, {})

    def transposed(self) -> Move:
        return self.exchange.transposed()

    def new_shard(self, old_shard: Tensor, index: int) -> Tensor:
        """Return the new shard of a device, flat; a view if it is contiguous in the old one."""
        (traffic,) = self.exchange.traffic(index)
        if not traffic.local:
            return old_shard.new_empty(0)

        row = plain(old_shard).reshape(1, -1)  # a copy, if the shard has gaps
        boxes = [box.view(row).reshape(-1) for box, _ in traffic.local]
        del row  # boxes that are copies need it no more
        return boxes[0] if len(boxes) == 1 else torch.cat(boxes)
