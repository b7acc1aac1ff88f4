"""Compute what devices send to each other, where a tensor moves between two meshes. Pure data.

Every device of either mesh computes the same two tables of regions: what each of them stores, and
what each needs. Outside of the one mesh a device stores nothing, outside of the other it needs
nothing. From the tables follows the list of elements that one device sends to another, at both of
them alike: see Note [Requests without messages].
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from fshard.mesh.layout import Layout, P
from fshard.mesh.layout.arithmetic import strides
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
    volume,
)


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

    def boxes_in_memory(
        self, shape: tuple[int, ...], device: int, boxes: Sequence[Numbers]
    ) -> list[Box]:
        """Convert boxes of global indices to boxes in the memory of a device's shard."""
        zigzag_dims = self.zigzag_dims(shape)
        return local_boxes(self.spec, shape, self.axes, device, boxes, zigzag_dims)

    @property
    def digest(self) -> int:
        """A digest, equal on all devices."""
        return zlib.crc32(repr(self).encode())


@dataclass(frozen=True, eq=False)
class RegionSide:
    """Boxes of a tensor that devices need, where these are no layout.

    A device's shard has the elements of its boxes, one box after another.

    Args:
        devices: their numbers in the world.
        boxes: of each device, disjoint.  (k, d, 2) each
    """

    devices: tuple[int, ...]
    boxes: tuple[Numbers, ...]

    @property
    def digest(self) -> int:
        """A digest, equal on all devices."""
        digest = zlib.crc32(repr(self.devices).encode())
        for boxes in self.boxes:
            digest = zlib.crc32(boxes.tobytes(), digest)
        return digest

    def regions(self, shape: tuple[int, ...]) -> Numbers:
        """Return what each device needs; shorter lists end with empty boxes.  (n, k, d, 2)"""
        most = max([1, *map(len, self.boxes)])  # `intersect` needs one box, if an empty one
        regions = np.zeros((len(self.devices), most, len(shape), 2), np.int64)
        for device, boxes in enumerate(self.boxes):
            regions[device, : len(boxes)] = boxes
        return regions

    def boxes_in_memory(
        self, shape: tuple[int, ...], device: int, boxes: Sequence[Numbers]
    ) -> list[Box]:
        """Convert boxes of global indices, each in one of the device's, to boxes in its shard."""
        starts = self.boxes[device][..., 0]
        stops = self.boxes[device][..., 1]
        lengths = stops - starts
        sizes = lengths.prod(1)
        begins = sizes.cumsum() - sizes  # of each box in the shard

        result: list[Box] = []
        for box in boxes:
            start = box[:, 0]
            stop = box[:, 1]
            # What is sent is cut at the boxes of the receiver, so one of them is around it.
            is_around = (starts <= start).all(1) & (stop <= stops).all(1)
            index = int(is_around.argmax())
            steps = strides(lengths[index].tolist())
            offset = (start - starts[index]) @ steps
            box_lengths = tuple((stop - start).tolist())
            result.append(Box(int(begins[index] + offset), box_lengths, steps))
        return result


class Served(NamedTuple):
    """Devices that have a shard, and the elements of it that they send.

    Args:
        servers: their indices among all devices.
        requests: of those devices that they are the nearest to.
    """

    servers: tuple[int, ...]
    requests: Requests


class Elements(NamedTuple):
    """Elements of one tensor on the way between two devices, in the order in which they are sent.

    Args:
        regions: boxes of global indices.  (d, 2) each
        boxes: the same in the memory of the shard of the device whose traffic it is.
    """

    regions: list[Numbers]
    boxes: list[Box]


class CrossingTraffic(NamedTuple):
    """The elements of one tensor that one device sends, receives, and has already.

    Args:
        outgoing: by receiver, in the old shard.
        incoming: by sender, in the new shard.
        local: pairs of boxes, in the old shard and in the new one.
    """

    outgoing: dict[int, Elements]
    incoming: dict[int, Elements]
    local: list[tuple[Box, Box]]


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
    after: MeshSide | RegionSide
    shape: tuple[int, ...]
    devices: tuple[int, ...]
    machines: tuple[int, ...]

    __hash__ = CachedHash.__hash__

    @cached_property
    def _index_of(self) -> dict[int, int]:
        return {number: index for index, number in enumerate(self.devices)}

    def _table(self, side: MeshSide | RegionSide) -> Numbers:
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
            near = [index for index in holders if self.machines[index] == machine]
            servers = tuple(near or holders)  # of other machines, if there is none on this one
            receivers_of.setdefault(servers, []).append(receiver)
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

    @cached_property
    def digest(self) -> int:
        """A digest of shape and sides, equal on all devices."""
        return zlib.crc32(f"{self.shape} {self.before.digest} {self.after.digest}".encode())

    @cached_property
    def traffic(self) -> Callable[[int], CrossingTraffic]:
        """A function from a device to the elements that it sends, receives and has.

        It is cached on this object, for all leaves that are alike.
        """
        return cache(self._traffic)

    def _traffic(self, index: int) -> CrossingTraffic:
        sent: dict[int, list[Numbers]] = {}
        received: dict[int, list[Numbers]] = {}
        for servers, requests in self.served:
            if index in servers:
                replica = servers.index(index)
                for receiver in np.flatnonzero(requests.counts).tolist():
                    sent.setdefault(receiver, []).extend(requests.boxes(receiver, replica))
            if requests.counts[index]:
                for replica, sender in enumerate(servers):
                    received.setdefault(sender, []).extend(requests.boxes(index, replica))

        common = intersect(self.old_regions[index], self.new_regions[index])
        overlap = [*nonempty_boxes(common)]
        local: list[tuple[Box, Box]] = []
        if overlap:
            old_boxes = self._in_memory(self.before, index, overlap)
            new_boxes = self._in_memory(self.after, index, overlap)
            local = [*zip(old_boxes, new_boxes, strict=True)]
        outgoing = self._elements(self.before, index, sent)
        incoming = self._elements(self.after, index, received)
        return CrossingTraffic(outgoing, incoming, local)

    def _elements(
        self, side: MeshSide | RegionSide, index: int, regions_of_peers: dict[int, list[Numbers]]
    ) -> dict[int, Elements]:
        """Return elements by peer, with their boxes in the memory of a device's shard on a side."""
        result: dict[int, Elements] = {}
        for peer, regions in regions_of_peers.items():
            if regions:
                result[peer] = Elements(regions, self._in_memory(side, index, regions))
        return result

    def _in_memory(
        self, side: MeshSide | RegionSide, index: int, boxes: Sequence[Numbers]
    ) -> list[Box]:
        """Convert boxes of global indices to boxes in the memory of a device's shard on a side."""
        device = side.devices.index(self.devices[index])
        return side.boxes_in_memory(self.shape, device, boxes)


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
