"""Reshard arrays from one mesh to another: each element is sent once to each device that lacks it.

The meshes may be disjoint, overlap, or number the same devices in another order. No tensor is
gathered, and nothing is agreed on: the devices of both know what each sends, see `crossing`.

    trainer  P.flat("data"), 2 devices        engine  P(None, "model"), 2 other devices

    stores   0: [0 1 2 3]    1: [4 5 6 7]     needs    2: [0 1 4 5]    3: [2 3 6 7]
    sends    0 -> 2: 0 1     0 -> 3: 2 3      1 -> 2: 4 5     1 -> 3: 6 7

Values travel from the old shards directly into the new ones, in rounds of `rounds.ROUND` bytes for
all leaves of a dtype: see Note [Rounds of pairs]. The map is linear, and its transpose is the way
back: so a program on two meshes has gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound, LinearMap, Tensors, apply
from fshard.mesh.collectives.ledger import active, uncounted
from fshard.mesh.layout import Layout, Mesh
from fshard.mesh.layout.counting import LedgerRow
from fshard.mesh.layout.kinds import compute_device, empty_in, owned_by
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.crossing import Crossing, MeshSide, crossing_of
from fshard.mesh.reshard.exchange import Box
from fshard.mesh.reshard.rounds import Rounds
from fshard.mesh.runtimes.buffers import empty
from fshard.mesh.runtimes.process import machines_of
from fshard.mesh.spmd.run import local_devices, run_on_devices
from fshard.mesh.spmd.scope import Pending, here, require
from fshard.source import Site

_CALLER = "fs.reshard"
AXIS = "device"
"""The axis of the mesh of all devices of two meshes."""

Shards = Sequence[Tensor | None]
"""The shards of some leaves on one device; None where the device is outside of their mesh."""


def can_move_between(before: Mesh, after: Mesh) -> bool:
    """Return True if the caller can move arrays from one mesh to another without gathering them.

    Both have devices of one world: processes, or virtual devices. The caller may be outside of one
    or both, see Note [Outside of a mesh], but not in a `shard_map`.
    """
    scope = here()
    if scope is not None and scope.mapped:
        return False
    has_plain_arrays = not before.is_varying and not after.is_varying
    has_entire_meshes = before.parent is None and after.parent is None
    has_twin = not before.is_member or not after.is_member
    is_one_world = has_twin or before.runtime == after.runtime
    return has_plain_arrays and has_entire_meshes and is_one_world


class MovedLeaf(NamedTuple):
    """A tensor on its way: its layouts without sums, its shape, and its dtypes."""

    before: Layout
    after: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    new_dtype: torch.dtype

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which it is sent: the smaller one."""
        return min(self.new_dtype, self.dtype, key=lambda dtype: dtype.itemsize)

    def transposed(self) -> MovedLeaf:
        """Return the way of its cotangent."""
        return MovedLeaf(self.after, self.before, self.shape, self.new_dtype, self.dtype)

    def new_shard(self, device: int) -> Tensor:
        """Return an uninitialised shard of a device."""
        layout = self.after
        shape = layout.local_shape(self.shape, device)
        return empty_in(layout.memory, shape, self.new_dtype, layout.mesh.device_type)


def move_between(
    arrays: Sequence[Sharded],
    layouts: Sequence[Layout],
    dtypes: Sequence[torch.dtype],
    site: Site,
) -> list[Sharded]:
    """Return arrays of one mesh in layouts on another one, in other dtypes.

    No layout, before or after, has sums.
    """
    before = arrays[0].mesh
    after = layouts[0].mesh
    leaves: list[MovedLeaf] = []
    for x, layout, dtype in zip(arrays, layouts, dtypes, strict=True):
        leaves.append(MovedLeaf(x.layout, layout, x.shape, x.dtype, dtype))

    move = MoveBetween(tuple(leaves), before, after, site)
    flat = apply(move, tuple([shard for x in arrays for shard in x.shards]))
    count = len(flat) // len(leaves)
    results: list[Sharded] = []
    for index, leaf in enumerate(leaves):
        shards = flat[index * count : (index + 1) * count]
        results.append(Sharded(leaf.shape, leaf.after, shards))
    return results


@dataclass(frozen=True, eq=False)
class MoveBetween(LinearMap):
    """The map from shards on one mesh to shards on another one, of several leaves.

    Its tensors are those that the caller has: of each leaf a shard for each of its devices, or one
    without values, outside of the mesh.

    Args:
        leaves: the tensors.
        before, after: the meshes.
        site: the line of the program.
    """

    leaves: tuple[MovedLeaf, ...]
    before: Mesh
    after: Mesh
    site: Site

    def transposed(self) -> LinearMap:
        """Return the map of cotangents, which go back the same way."""
        leaves = tuple([leaf.transposed() for leaf in self.leaves])
        return MoveBetween(leaves, self.after, self.before, self.site)

    def batched(self) -> LinearMap:
        """Return the map of tensors with one more leading dim."""
        return _MoveOfMany(self)

    def run(self, xs: Tensors) -> Tensors:
        """Move the shards; where the caller is outside of both meshes, return types at once."""
        devices = tuple(sorted({*self.before.devices, *self.after.devices}))
        meeting = meeting_of(self.before, self.after)
        if meeting is None:
            if self.before.is_member and self.after.is_member:
                self._record_all(self._all_rounds(devices, (0,) * len(devices)))
            return self._types()

        machines = machines_of(meeting)
        all_rounds = self._all_rounds(devices, machines)
        old_shards = self._by_number(self.before, xs)
        results: dict[int, list[Tensor]] = {}

        def on_device(index: int) -> None:
            number = devices[index]
            old: Shards = old_shards.get(number, [None] * len(self.leaves))
            new = self._new_shards(number)
            for rounds in all_rounds:
                record_sent(rounds, index, rounds.sent[index].tolist(), self.site)
                run_rounds(rounds, index, old, new, meeting, self.site)
            if number in self.after.devices:
                results[number] = [x for x in new if x is not None]

        with torch.no_grad():
            run_on_devices(meeting, on_device)
        if not results:
            return self._types()
        numbers = numbers_held(self.after)
        flat: list[Tensor] = []
        for leaf in range(len(self.leaves)):
            flat += [results[number][leaf] for number in numbers]
        return tuple(flat)

    def _types(self) -> Tensors:
        """Return a shard without values for each leaf."""
        device = local_devices(self.after)[0]
        shards: list[Tensor] = []
        for leaf in self.leaves:
            shape = leaf.after.local_shape(leaf.shape, device)
            shards.append(torch.empty(shape, dtype=leaf.new_dtype, device="meta"))
        return tuple(shards)

    def _by_number(self, mesh: Mesh, xs: Tensors) -> dict[int, list[Tensor]]:
        """Return the caller's shards of all leaves, by the number of their device."""
        numbers = numbers_held(mesh)
        result: dict[int, list[Tensor]] = {}
        for row, number in enumerate(numbers):
            result[number] = [*xs[row :: len(numbers)]]
        return result

    def _new_shards(self, number: int) -> Shards:
        """Return uninitialised shards of the device with a number."""
        if number not in self.after.devices:
            return [None] * len(self.leaves)
        device = self.after.devices.index(number)
        with owned_by(number):
            return [leaf.new_shard(device) for leaf in self.leaves]

    def _all_rounds(self, devices: tuple[int, ...], machines: tuple[int, ...]) -> list[Rounds]:
        """Return the rounds of the leaves, for each dtype in which they are sent."""
        indices_of: dict[torch.dtype, list[int]] = {}
        for index, leaf in enumerate(self.leaves):
            indices_of.setdefault(leaf.wire_dtype, []).append(index)

        way = way_between(self.before, self.after)
        result: list[Rounds] = []
        for dtype, indices in indices_of.items():
            crossings = [self._crossing(index, devices, machines) for index in indices]
            result.append(Rounds(indices, crossings, dtype, way))
        return result

    def _crossing(
        self, index: int, devices: tuple[int, ...], machines: tuple[int, ...]
    ) -> Crossing:
        leaf = self.leaves[index]
        shape = leaf.shape or (1,)
        return crossing_of(
            MeshSide.of(leaf.before), MeshSide.of(leaf.after), shape, devices, machines
        )

    def _record_all(self, all_rounds: Sequence[Rounds]) -> None:
        """Write what every device would send: on abstract meshes the caller represents all."""
        for rounds in all_rounds:
            for index in rounds.sent.sum(1).nonzero()[0].tolist():
                record_sent(rounds, index, rounds.sent[index].tolist(), self.site)


def way_between(before: Mesh, after: Mesh) -> str:
    """Return two meshes in words that are equal on all devices."""
    return f"{before.grid} -> {after.grid}"


def record_sent(rounds: Rounds, index: int, sent: Sequence[int], site: Site) -> None:
    """Write the bytes that a device sends to each other one into the open ledgers."""
    row = LedgerRow("reshard", (rounds.way,), site._replace(leaves=()))
    number = rounds.devices[index]
    for ledger in active():
        ledger.record(number, row, Fraction(sum(sent)))
        for receiver, size in zip(rounds.devices, sent, strict=True):
            if size:
                ledger.record_link(number, receiver, size)


def meeting_of(before: Mesh, after: Mesh) -> Mesh | None:
    """Return the mesh of all devices of both; None where the caller is outside of both.

    It is None for abstract meshes too.
    """
    devices = tuple(sorted({*before.devices, *after.devices}))
    for mesh in (before, after):
        if mesh.runtime != "abstract":
            return mesh_of_numbers(devices, mesh)
    return None


def mesh_of_numbers(numbers: tuple[int, ...], like: Mesh) -> Mesh:
    """Return a mesh of one axis, of devices in the world of another mesh."""
    axes = ((AXIS, len(numbers)),)
    return Mesh(axes, like.runtime, like.device_type, None, numbers, world=like.world)


def numbers_held(mesh: Mesh) -> list[int]:
    """Return the numbers of the devices whose shards the caller has; [] outside of the mesh."""
    if not mesh.is_member:
        return []
    return [mesh.devices[device] for device in local_devices(mesh)]


@dataclass(frozen=True, eq=False)
class _MoveOfMany(LinearMap):
    """The same map for each row of tensors with one more leading dim."""

    move: MoveBetween

    def run(self, xs: Tensors) -> Tensors:
        rows = [self.move.run(row) for row in zip(*[x.unbind() for x in xs], strict=True)]
        return tuple([torch.stack(column) for column in zip(*rows, strict=True)])

    def transposed(self) -> LinearMap:
        return self.move.transposed().batched()


# -- one device ------------------------------------------------------------------------------------


def run_rounds(
    rounds: Rounds, index: int, old: Shards, new: Shards, meeting: Mesh, site: Site
) -> None:
    """Copy the elements of a device's new shards: from its old shards, and from other devices."""
    copy_overlap(rounds, index, old, new)
    outgoing = rounds.outgoing(index)
    incoming = rounds.incoming(index)
    group = require(_CALLER).group((AXIS,), _CALLER)

    # Two buffers: while a round is on its way, the elements of the next one are copied. A buffer is
    # written again only when its round has arrived, since until then others may read it.
    buffers: list[Tensor] = []
    on_the_way: Pending | None = None
    for number in range(rounds.count):
        move = rounds.move(number)
        if len(buffers) < 2:
            buffers.append(_new_buffer(move.length, rounds.dtype, meeting))
        row = buffers[number % 2][: move.length]  # no round is longer than one before it
        _copy_to_row(rounds.boxes(outgoing, number), old, row)
        with uncounted():
            started = Bound(move, group, site).start((row,))
        if on_the_way is not None:
            _receive(rounds.boxes(incoming, number - 1), on_the_way, new)
        on_the_way = started
    if on_the_way is not None:
        _receive(rounds.boxes(incoming, rounds.count - 1), on_the_way, new)


def copy_overlap(rounds: Rounds, index: int, old: Shards, new: Shards) -> None:
    """Copy the elements that a device has already into its new shards."""
    for leaf, old_box, new_box in rounds.overlap(index):
        source = old[leaf]
        target = new[leaf]
        assert source is not None
        assert target is not None
        new_box.of(target).copy_(old_box.of(source))


def _new_buffer(length: int, dtype: torch.dtype, mesh: Mesh) -> Tensor:
    """Return an uninitialised row: on CPUs in recycled memory, as page faults cost more than it."""
    device = compute_device(mesh)
    if device.type == "cpu":
        return empty((length,), dtype)
    return torch.empty(length, dtype=dtype, device=device)


def _copy_to_row(boxes: Iterable[tuple[int, Box]], shards: Shards, row: Tensor) -> None:
    """Copy boxes of shards into a row, one after another, cast to its dtype."""
    begin = 0
    for leaf, box in boxes:
        end = begin + box.size
        source = shards[leaf]
        assert source is not None
        row[begin:end].view(box.lengths).copy_(box.of(source))
        begin = end


def _receive(boxes: Iterable[tuple[int, Box]], on_the_way: Pending, shards: Shards) -> None:
    """Wait for a round, and copy its row into boxes of shards."""
    (row,) = on_the_way.wait()
    begin = 0
    for leaf, box in boxes:
        end = begin + box.size
        target = shards[leaf]
        assert target is not None
        box.of(target).copy_(row[begin:end].view(box.lengths))
        begin = end
