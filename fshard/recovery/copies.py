"""`Copies`: the last versions of a tree, in the memory of the devices that train.

The share of a device is what it would write to a file of a checkpoint, so the shares of all are the
tree, once. Each device also keeps the shares of some others. Four devices, `copies=1`:

    device    shares       without device 2
    0         s0  s3       s0  s3
    1         s1  s0       s1  s0
    2         s2  s1
    3         s3  s2       s3  s2          all four are there
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.form import share_sizes
from fshard.checkpoint.index import Index, index_of
from fshard.checkpoint.random import RandomState
from fshard.checkpoint.snapshot import TreeSnapshot, as_device_of, snapshot_of
from fshard.errors import CheckpointError, MismatchError
from fshard.mesh.collectives.ledger import active, uncounted
from fshard.mesh.collectives.moves import Permute
from fshard.mesh.layout import Memory, Mesh, PyTree
from fshard.mesh.layout.counting import LedgerRow, counting, without_counters
from fshard.mesh.layout.kinds import empty_in, owned_by
from fshard.mesh.reshard.between import mesh_of_numbers
from fshard.mesh.runtimes.abstract import Done
from fshard.mesh.runtimes.process import Finish, ProcessWorld, beside_computation, machines_of
from fshard.mesh.spmd.moments import listeners, reach
from fshard.mesh.spmd.run import local_devices, run_on_devices
from fshard.mesh.spmd.scope import Pending
from fshard.recovery.exchange import all_rows, start
from fshard.source import call_site

KEPT = 2
"""Versions that a device keeps: see Note [Two versions]."""

TREE = "tree"
RANDOM = "random"
"""The parts of a version: the tree of the program, and the random generators beside it."""


class VersionKey(NamedTuple):
    """The place of a version in a run: the generation of devices, and its number in that one."""

    generation: int
    number: int


@dataclass
class Version:
    """A saved tree, as far as one device has it.

    Args:
        key: the place of the version in the run.
        step: as the program counts.
        text: the index of the tree, as JSON.
        owners: the number of devices that have a share of it.
        shares: bytes by owner: its own share, and those of others that have arrived.
        memory: of its own share.
        is_first: True if nothing was saved before it.
    """

    key: VersionKey
    step: int
    text: str
    owners: int
    shares: dict[int, Tensor]
    memory: Tensor
    is_first: bool = False


@dataclass(frozen=True)
class Found:
    """A version as it can be read.

    Args:
        key: of the version.
        step: as the program counts.
        index: of the tree.
        shares: that the caller may read, by owner.
        holders: the device of the mesh that has each share.
    """

    key: VersionKey
    step: int
    index: Index
    shares: Mapping[int, Tensor]
    holders: Mapping[int, int]


class Arriving(NamedTuple):
    """A share that may not have its values yet: its owner, its bytes, and the call."""

    owner: int
    size: int
    call: Pending


@dataclass
class Shelf:
    """The memory of one device for versions.

    Args:
        versions: the last one first.
        arriving: shares of the last version that may not have their values yet.
        finish: returns them, once the device has them; None where the host waits for each call.
        saved: the number of versions of this generation.
    """

    versions: list[Version] = field(default_factory=list[Version])
    arriving: list[Arriving] = field(default_factory=list[Arriving])
    finish: Finish | None = None
    saved: int = 0

    def complete(self) -> None:
        """Wait for the shares that are on their way: see Note [Behind the host]."""
        calls = [call for _, _, call in self.arriving]
        if self.finish is not None:
            results = self.finish(calls)
        else:
            results = [call.wait() for call in calls]
        for (owner, size, _), (row,) in zip(self.arriving, results, strict=True):
            self.versions[0].shares[owner] = row[:size]
        self.finish = None
        self.arriving = []

    def free_memory(self) -> Tensor | None:
        """Drop the version before the last, and return its memory; None if there is none."""
        if len(self.versions) < KEPT:
            return None
        return self.versions.pop().memory

    def keep_only(self, key: VersionKey | None) -> None:
        """Drop all versions but one, as a generation begins: see Note [Two versions]."""
        self.versions = [version for version in self.versions if version.key == key]
        self.arriving = []
        self.finish = None
        self.saved = 0


# Note [Two versions]
# A device writes a version over the one before the last, and keeps the last meanwhile. In `save`
# devices meet first. One that has met the others knows that each has ended its save before, whose
# version is complete everywhere. So whenever devices are lost, the others have one complete version
# at least:
#
#     device 0    save 4 ...... step ...... save 5: meets, writes 5 over 3
#     device 1    save 4 ...... step ...... save 5: meets, lost            4 is complete on both
#
# The last version may be complete too; what counts is that each share is on a device that is left.
# The next generation begins from one version, and drops the others: else it would keep, as the last
# one, a version that only some have.


# Note [Behind the host]
# On a GPU the host starts copies, and continues. If a process is lost, kernels of others hang in a
# collective; when that is aborted, what was queued behind it runs on garbage, copies of the state
# too. So a share counts only once the host knows that the device has it, and no host starts to
# write over the version before until all know it. Each `save` waits for the copies of the one
# before, with the step between them still queued:
#
#     host      save 4    step 5    save 5: waits for ●, meets
#     device           step 4 ...  copy 4 ●  step 5 ...


class Copies:
    """The versions of a tree on the devices of the caller, over all generations of a run.

    Args:
        count: the number of other devices that keep each share.
        memory: of the shares: "device" or "host".
    """

    shelves: dict[int, Shelf]
    """The shelves of devices, by their name in the run."""

    def __init__(self, count: int, memory: Memory) -> None:
        self.shelves = {}
        self._copies = count
        self._memory: Memory = memory
        self._generation = 0
        self._began_empty = True
        self._mesh: Mesh | None = None
        self._names: Sequence[int] = ()

    def begin(
        self, generation: int, mesh: Mesh, names: Sequence[int], key: VersionKey | None
    ) -> None:
        """Begin a generation of devices with one version, or none.

        Args:
            generation: its number.
            mesh: of its devices.
            names: of these in the run, in mesh order.
            key: of the version that it begins with.
        """
        self._generation = generation
        self._began_empty = key is None
        self._mesh = mesh
        self._names = names
        for shelf in self.shelves.values():
            shelf.keep_only(key)

    def drop(self, names: Collection[int]) -> None:
        """Forget what lost devices have: virtual ones, whose memory is the caller's."""
        for name in names:
            self.shelves.pop(name, None)

    def shelf(self, device: int) -> Shelf:
        """Return what a device of the mesh keeps."""
        return self.shelves.setdefault(self._names[device], Shelf())

    @property
    def last_step(self) -> int | None:
        """The step of the last version of this generation; None before the first."""
        if self._mesh is None or not self._mesh.is_member:
            return None
        shelf = self.shelf(local_devices(self._mesh)[0])
        return shelf.versions[0].step if shelf.saved else None

    def last_saved(self) -> Found | None:
        """Return the last version of this generation, if there is one, as the caller may read it.

        A device reads its own share, and requests the others of their owners.
        """
        mesh = self._mesh
        if mesh is None or self.last_step is None:
            return None
        versions: dict[int, Version] = {}
        for device in local_devices(mesh):
            self.shelf(device).complete()
            versions[device] = self.shelf(device).versions[0]
        shares = {device: version.shares[device] for device, version in versions.items()}
        holders = {owner: owner for owner in range(mesh.size)}
        last = next(iter(versions.values()))
        return Found(last.key, last.step, index_of(json.loads(last.text)), shares, holders)

    @torch.no_grad()
    def save(self, step: int, tree: PyTree, *, flag: bool = False) -> bool:
        """Keep a version of a tree; return True if any device has a flag.

        All devices of the mesh call it.
        """
        mesh = self._mesh
        assert mesh is not None
        meeting = mesh_of_numbers(mesh.devices, mesh)
        if mesh.runtime == "abstract":
            self._count(step, tree, meeting)
            return False
        with as_device_of(mesh):
            content = snapshot_of({TREE: tree, RANDOM: RandomState()}, compare=False)
        _validate_devices(content, mesh)
        text = content.index.text
        digest = zlib.crc32(text.encode())

        def meet(device: int) -> list[list[int]]:
            shelf = self.shelf(device)
            shelf.complete()
            with uncounted():
                return all_rows([shelf.saved, step, digest, _size(content, device), int(flag)])

        rows = run_on_devices(meeting, meet)[0]
        _validate(rows)
        sizes = [size for *_, size, _ in rows]
        memory = self._free(mesh, max(sizes))
        staged = content.staged(memory)
        if self._memory == "host":
            staged.wait()  # others read it; what a device reads waits by itself
        self._keep(step, text, sizes, memory, meeting)
        return any([has_flag for *_, has_flag in rows])

    def _count(self, step: int, tree: PyTree, meeting: Mesh) -> None:
        """Do what `save` does on an abstract mesh: its memory and its bytes are counted."""
        with without_counters():  # what a program does not keep
            random_bytes = RandomState().state_dict()["rows"].shape[-1]
        sizes = [size + random_bytes for size in share_sizes(tree)]
        (device,) = local_devices(meeting)
        shelf = self.shelf(device)
        # The memory of the last version is from before this count, unless one began at the run.
        for version in shelf.versions:
            for x in (version.memory, *version.shares.values()):
                for counter in counting().counters:
                    counter.claim(x, meeting.devices[device], self._memory)
        shelf.complete()
        self._keep(step, "", sizes, self._free(meeting, max(sizes)), meeting)

    def _keep(
        self,
        step: int,
        text: str,
        sizes: Sequence[int],
        memory: Mapping[int, Tensor],
        meeting: Mesh,
    ) -> None:
        """Keep a version whose shares are in the memory of devices, and send it to the others.

        Args:
            step: as the program counts.
            text: of the index.
            sizes: of the shares of all devices.
            memory: by device; all have one length.
            meeting: all devices.
        """
        shifts = _shifts(meeting, self._copies)
        assert self._mesh is not None
        axes = self._mesh.axis_names
        ledger_row = LedgerRow("copy", axes, call_site()._replace(leaves=()))
        waits = _copies_at_once(meeting)

        def keep(device: int) -> None:
            shelf = self.shelf(device)
            shelf.saved += 1
            key = VersionKey(self._generation, shelf.saved)
            row = memory[device]
            is_first = self._began_empty and shelf.saved == 1
            version = Version(key, step, text, len(sizes), {}, row, is_first)
            shelf.versions.insert(0, version)
            if listeners:
                reach("copy")
            with beside_computation(meeting) as shelf.finish:
                for shift in shifts:
                    owner = (device - shift) % len(sizes)
                    for ledger in active():
                        ledger.record(meeting.devices[device], ledger_row, Fraction(len(row)))
                    with uncounted():
                        call = start(_ring(len(sizes), shift), row)
                    shelf.arriving.append(Arriving(owner, sizes[owner], call))
            if shelf.finish is None:
                version.shares[device] = row[: sizes[device]]
            else:
                shelf.arriving.append(Arriving(device, sizes[device], Done((row,))))
            if waits:
                shelf.complete()

        run_on_devices(meeting, keep)

    def _free(self, mesh: Mesh, length: int) -> dict[int, Tensor]:
        """Return memory for the shares of the caller's devices, of one length."""
        memory: dict[int, Tensor] = {}
        for device in local_devices(mesh):
            free = self.shelf(device).free_memory()
            if free is None or len(free) < length:
                with owned_by(mesh.devices[device]):
                    free = empty_in(self._memory, (length,), torch.uint8, mesh.device_type)
            memory[device] = free[:length]
        return memory

    def complete(self) -> None:
        """Wait until the last version is complete on the caller's devices."""
        for shelf in self.shelves.values():
            shelf.complete()

    def complete_everywhere(self) -> None:
        """Wait until the last version is complete on all devices of the mesh; each calls it.

        Only then may one of them leave its groups: others may still receive from it.
        """
        mesh = self._mesh
        assert mesh is not None
        self.complete()
        with uncounted():
            run_on_devices(mesh_of_numbers(mesh.devices, mesh), lambda device: all_rows([device]))


def _copies_at_once(mesh: Mesh) -> bool:
    """Return True if copies are made in `save`, not beside the next step.

    A run of virtual devices ends with all its calls. Processes of one machine copy memory
    themselves, when they wait for it, so that nothing is gained by waiting later; and a version
    that is complete at once outlives a process that is lost in the next step.
    """
    if mesh.runtime == "virtual":
        return True
    return mesh.runtime == "process" and ProcessWorld.of(mesh).is_near(mesh)


def _size(content: TreeSnapshot, device: int) -> int:
    """Return the bytes of a device's share."""
    return sum([x.values.nbytes for x in content.shares.get(device, ())])


def _validate_devices(content: TreeSnapshot, mesh: Mesh) -> None:
    """Raise if arrays are on other devices than those of a run, which keep their shares."""
    if content.mesh is not None and content.mesh.devices != mesh.devices:
        raise CheckpointError(
            f"run.save: arrays must be on the devices of run.mesh, {mesh}; got {content.mesh}. "
            "Lay them out on run.mesh, or on slices of it."
        )


def _validate(rows: Sequence[Sequence[int]]) -> None:
    """Raise unless devices save one tree."""
    for device, (saved, step, digest, *_) in enumerate(rows):
        first_saved, first_step, first_digest, *_ = rows[0]
        if (saved, step) != (first_saved, first_step):
            raise MismatchError(
                f"run.save: step must be equal on all devices; got {step} on device {device} and "
                f"{first_step} on device 0."
            )
        if digest != first_digest:
            raise MismatchError(
                "run.save: the tree must have equal names, shapes, layouts and plain values on all "
                f"devices; that of device {device} differs from that of device 0."
            )


def _ring(size: int, shift: int) -> Permute:
    """Return the move from each device to the one that is some places further."""
    return Permute(tuple([(device, (device + shift) % size) for device in range(size)]))


def _shifts(mesh: Mesh, count: int) -> list[int]:
    """Return how far from each device those are that keep its share.

    On several machines they are on another one, where that can be for all devices alike: a machine
    is lost with all its processes.
    """
    machines = machines_of(mesh)
    size = len(machines)
    shifts = range(1, size)

    def stays(shift: int) -> bool:
        return any(machines[device] == machines[(device + shift) % size] for device in range(size))

    return sorted(shifts, key=stays)[:count]
