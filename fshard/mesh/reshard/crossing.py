"""Compute what each device sends to each other one, where a tensor moves between two meshes. Pure data.

Every device of either mesh computes the same two tables of regions: what each of them stores, and
what each needs. Outside of the one mesh a device stores nothing, outside of the other it needs
nothing. From the tables follows the list of elements that one device sends to another, at both of
them alike: see Note [Requests without messages].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from fshard.mesh.collectives.moves import Rows
from fshard.mesh.layout import Layout, P
from fshard.mesh.layout.spec import CachedHash
from fshard.mesh.reshard.exchange import Box, Requests, local_boxes
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

ROUND = 16 << 20
"""The most bytes of buffers that a device needs beside its old and its new shards."""


# -- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshSide(CachedHash):
    """The layout of a tensor on one of two meshes, as values that all their devices have.

    Args:
        spec: without sums.
        axes: of the mesh.
        devices: their numbers in the world, in mesh order.
        zigzag: of the mesh.
    """

    spec: P
    axes: Sizes
    devices: tuple[int, ...]
    zigzag: str | None = None

    __hash__ = CachedHash.__hash__

    @staticmethod
    def of(layout: Layout) -> MeshSide:
        """Return the side of a layout without sums."""
        mesh = layout.mesh
        return MeshSide(layout.spec, mesh.axes, mesh.devices, mesh.zigzag)

    def regions(self, shape: tuple[int, ...]) -> Numbers:
        """Return what each device stores of a tensor.  (n, k, d, 2)"""
        regions = regions_of(self.spec, shape, self.axes)
        for zigzag in self.zigzag_dims(shape):
            regions = zigzag.regions(regions)
        return regions

    def zigzag_dims(self, shape: tuple[int, ...]) -> list[ZigzagDim]:
        """Return the dims of a tensor that are in zigzag order."""
        sizes = dict(self.axes)
        result: list[ZigzagDim] = []
        for dim, axes in enumerate(self.spec.dims(len(shape))):
            is_zigzag = self.zigzag in axes and shape[dim] > 0
            if self.zigzag is not None and is_zigzag:
                blocks = prod([sizes[axis] for axis in axes[: axes.index(self.zigzag)]])
                devices = sizes[self.zigzag]
                chunk = shape[dim] // (blocks * 2 * devices)
                result.append(ZigzagDim(dim, devices, chunk))
        return result

    def replicas(self) -> Numbers:
        """Return the numbers of devices with equal shards.  (rows, replicas)"""
        rows = replicas(self.axes, self.spec.sharded_axes)
        return np.array(self.devices, np.int64)[rows]


class Served(NamedTuple):
    """Devices that have a shard, and the elements of it that they send.

    Args:
        servers: their indices among all devices.
        requests: of those devices that they are the nearest to.
    """

    servers: tuple[int, ...]
    requests: Requests


class Portion(NamedTuple):
    """Elements of one tensor on the way between two devices.

    Args:
        position: of the tensor, among those that share the rounds.
        begin: elements of other tensors between these two, before it.
        size: the number of elements.
        boxes: of global indices, in the order in which they are sent.  (k, d, 2)
    """

    position: int
    begin: int
    size: int
    boxes: Numbers


@dataclass(frozen=True)
class Crossing(CachedHash):
    """The way of one tensor from a layout on one mesh to a layout on another.

    Both ends compute it, each on its own: see Note [Requests without messages]. Of the devices that
    have an element, those on the receiver's machine send it, if there are any.

    Args:
        before, after: the two layouts.
        shape: of the tensor; a scalar has one dim.
        devices: the numbers of all devices of both meshes, in order.
        machines: the machine of each of these devices.
    """

    before: MeshSide
    after: MeshSide
    shape: tuple[int, ...]
    devices: tuple[int, ...]
    machines: tuple[int, ...]

    __hash__ = CachedHash.__hash__

    @cached_property
    def _index_of(self) -> dict[int, int]:
        return {number: index for index, number in enumerate(self.devices)}

    def _table(self, side: MeshSide) -> Numbers:
        """Return what every device stores on one side: outside of its mesh nothing."""
        regions = side.regions(self.shape)
        table = np.zeros((len(self.devices), *regions.shape[1:]), np.int64)
        table[[self._index_of[number] for number in side.devices]] = regions
        return table

    @cached_property
    def old_regions(self) -> Numbers:
        """The regions of all devices before the move."""
        return self._table(self.before)

    @cached_property
    def new_regions(self) -> Numbers:
        """The regions of all devices after it."""
        return self._table(self.after)

    @cached_property
    def served(self) -> list[Served]:
        """The requests for each shard, by the devices that serve them."""
        result: list[Served] = []
        for row in self.before.replicas():
            holders = [self._index_of[number] for number in row.tolist()]
            regions = intersect(self.old_regions[holders[0]], self.new_regions)
            regions[holders] = 0  # these have the elements already
            counts = volume(regions)
            if not counts.any():
                continue
            for servers, receivers in self._nearest(holders, np.flatnonzero(counts)):
                is_served = np.zeros(len(counts), bool)
                is_served[receivers] = True
                served_regions = regions * is_served[:, None, None, None]
                served_counts = counts * is_served
                requests = Requests(
                    len(servers), served_regions, served_counts, served_counts.cumsum()
                )
                result.append(Served(servers, requests))
        return result

    def _nearest(
        self, holders: list[int], receivers: Numbers
    ) -> list[tuple[tuple[int, ...], list[int]]]:
        """Return the receivers of a shard by the holders that serve them."""
        receivers_of: dict[tuple[int, ...], list[int]] = {}
        for receiver in receivers.tolist():
            machine = self.machines[receiver]
            near = tuple([index for index in holders if self.machines[index] == machine])
            receivers_of.setdefault(near or tuple(holders), []).append(receiver)
        return [*receivers_of.items()]

    @cached_property
    def counts(self) -> Numbers:
        """The number of elements that each device sends to each.  (senders, receivers)"""
        n = len(self.devices)
        result = np.zeros((n, n), np.int64)
        for servers, requests in self.served:
            # The balanced ranges of `Requests.boxes`, of all servers and receivers at once.
            bounds = np.arange(len(servers) + 1) * requests.ends[-1] // len(servers)
            begins = requests.ends - requests.counts
            start = np.maximum(begins[None], bounds[:-1, None])
            stop = np.minimum(requests.ends[None], bounds[1:, None])
            result[[*servers]] += np.maximum(stop - start, 0)
        return result

    def outgoing(self, index: int) -> dict[int, Numbers]:
        """Return the boxes that a device sends to each receiver."""
        result: dict[int, list[Numbers]] = {}
        for servers, requests in self.served:
            if index not in servers:
                continue
            replica = servers.index(index)
            for receiver in np.flatnonzero(requests.counts).tolist():
                boxes = requests.boxes(receiver, replica)
                if boxes:
                    result.setdefault(receiver, []).extend(boxes)
        return {receiver: np.stack(boxes) for receiver, boxes in result.items()}

    def incoming(self, index: int) -> dict[int, Numbers]:
        """Return the boxes that a device receives from each sender."""
        result: dict[int, list[Numbers]] = {}
        for servers, requests in self.served:
            if requests.counts[index] == 0:
                continue
            for replica, sender in enumerate(servers):
                boxes = requests.boxes(index, replica)
                if boxes:
                    result.setdefault(sender, []).extend(boxes)
        return {sender: np.stack(boxes) for sender, boxes in result.items()}

    def overlap(self, index: int) -> list[Numbers]:
        """Return the boxes that a device has already."""
        return [*nonempty_boxes(intersect(self.old_regions[index], self.new_regions[index]))]

    def boxes_in_memory(self, side: MeshSide, index: int, boxes: Sequence[Numbers]) -> list[Box]:
        """Convert boxes of global indices to boxes in the memory of a device's shard on a side."""
        device = side.devices.index(self.devices[index])
        zigzag_dims = side.zigzag_dims(self.shape)
        return local_boxes(side.spec, self.shape, side.axes, device, boxes, zigzag_dims)


@lru_cache(maxsize=4096)
def crossing_of(
    before: MeshSide,
    after: MeshSide,
    shape: tuple[int, ...],
    devices: tuple[int, ...],
    machines: tuple[int, ...],
) -> Crossing:
    """Return the way of a tensor, whose tables are computed once for all leaves that are alike."""
    return Crossing(before, after, shape, devices, machines)


# -- rounds ----------------------------------------------------------------------------------------

# Note [Rounds of pairs]
# What one device sends to one other, of all leaves of a dtype, is a list of elements. Round r sends
# the elements r m to (r + 1) m of each pair's list, so that all devices work in each round and a
# leaf may be in several. Of a pair's list both ends know its length and its order. A round needs
# four buffers: what is sent, what arrives, and a transport's copies of both. With p the most
# devices that any device sends to or receives from, m is such that these have at most ROUND bytes:
#
#     4 p m (bytes of an element) <= ROUND


@dataclass(frozen=True)
class Parcels(Rows):
    """One round: elements of each device for each other one.

    Args:
        way: the two meshes, for errors.
        number: of the round.
    """

    counts: tuple[tuple[int, ...], ...] = field(repr=False)
    width: int = field(default=1, repr=False)
    way: str = ""
    number: int = 0
    name: ClassVar[str] = "reshard"
    has_one_line: ClassVar[bool] = False


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
        self._begins: list[Numbers] = []  # of each leaf, in the list of each pair
        for crossing in crossings:
            self._begins.append(self.total)
            self.total = self.total + crossing.counts

        is_sent = self.total > 0
        most_peers = max(1, int(is_sent.sum(0).max()), int(is_sent.sum(1).max()))
        self.at_once = max(1, ROUND // (4 * most_peers * dtype.itemsize))
        self.count = -(-int(self.total.max()) // self.at_once)

    @property
    def sent(self) -> Numbers:
        """The bytes that each device sends to each.  (senders, receivers)"""
        return self.total * self.dtype.itemsize

    def move(self, number: int) -> Parcels:
        """Return the collective of a round."""
        counts = np.clip(self.total - number * self.at_once, 0, self.at_once)
        rows = tuple([tuple(row) for row in counts.tolist()])
        return Parcels(rows, 1, self.way, number)

    def overlap(self, index: int) -> list[tuple[int, Box, Box]]:
        """Return what a device has already: leaves, with boxes in the old and in the new shard."""
        result: list[tuple[int, Box, Box]] = []
        for leaf, crossing in zip(self.leaves, self.crossings, strict=True):
            boxes = crossing.overlap(index)
            if not boxes:
                continue
            old_boxes = crossing.boxes_in_memory(crossing.before, index, boxes)
            new_boxes = crossing.boxes_in_memory(crossing.after, index, boxes)
            for old_box, new_box in zip(old_boxes, new_boxes, strict=True):
                result.append((leaf, old_box, new_box))
        return result

    def outgoing(self, index: int) -> list[Portion]:
        """Return what a device sends, by receiver, and for each in the order of leaves."""
        result: list[tuple[int, Portion]] = []
        for position, crossing in enumerate(self.crossings):
            for receiver, boxes in crossing.outgoing(index).items():
                begin = int(self._begins[position][index, receiver])
                size = int(crossing.counts[index, receiver])
                result.append((receiver, Portion(position, begin, size, boxes)))
        return _by_peer(result)

    def incoming(self, index: int) -> list[Portion]:
        """Return what a device receives, by sender, and for each in the order of leaves."""
        result: list[tuple[int, Portion]] = []
        for position, crossing in enumerate(self.crossings):
            for sender, boxes in crossing.incoming(index).items():
                begin = int(self._begins[position][sender, index])
                size = int(crossing.counts[sender, index])
                result.append((sender, Portion(position, begin, size, boxes)))
        return _by_peer(result)

    def boxes_of_round(
        self, portions: Sequence[Portion], number: int, index: int, *, is_old: bool
    ) -> list[tuple[int, Box]]:
        """Return the boxes of a round in the memory of a device's old or new shards.

        Each with its leaf, in the order of the buffer.
        """
        start = number * self.at_once
        stop = start + self.at_once
        result: list[tuple[int, Box]] = []
        for portion in portions:
            first = max(start - portion.begin, 0)
            last = min(stop - portion.begin, portion.size)
            if first >= last:
                continue
            boxes = slice_region(portion.boxes, first, last)
            crossing = self.crossings[portion.position]
            side = crossing.before if is_old else crossing.after
            for box in crossing.boxes_in_memory(side, index, boxes):
                result.append((self.leaves[portion.position], box))
        return result


def _by_peer(portions: list[tuple[int, Portion]]) -> list[Portion]:
    """Return portions in the order of the devices at their other end."""
    portions.sort(key=lambda pair: pair[0])  # stable: those of one device stay in order
    return [portion for _, portion in portions]
