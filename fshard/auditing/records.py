"""`StepRecord`: digests of what each device computes, sends and receives in one step.

    device 0                                 device 1
    shard             w        5f3c...       shard             w        90ab...
    sent      all_gather       5f3c...       sent      all_gather       90ab...
    received  all_gather       1d77...       received  all_gather       1d77...
    received  unsharded w      1d77...       received  unsharded w      1d77...
    computed  loss of slice 0  ...           computed  loss of slice 2  ...

The entries of a device are in the order of time, which is the same when the step is repeated. So
the first entry that differs is that of a fault. A device whose first difference is something
that it received is innocent, if another device has sent something else: if none has, the message
was changed on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.layout import PyTree, path_text
from fshard.mesh.layout.counting import RecordedMessage, RecordedPhase, counting, counting_by
from fshard.mesh.layout.sharded import Sharded, flatten_shards
from fshard.mesh.spmd.global_inputs import digest
from fshard.optim.leaves import Leaves

Direction = Literal["computed", "sent", "received"]

_RECEIVED = ("unsharded", "reduced gradient")
"""The phases whose values are results of collectives."""


class RecordEntry(NamedTuple):
    """An event of a device in a step: it computed, sent or received something.

    Args:
        direction: computed, sent or received.
        subject: the phase, or the collective with its axes.
        leaf: the parameter, or "".
        slice: the number of the slice among all; of a message -1.
        group: of a collective, the first device of those that take part; else -1.
        repeats: how often the same has occurred before on this device.
    """

    direction: Direction
    subject: str
    leaf: str
    slice: int
    group: int = -1
    repeats: int = 0

    @property
    def message(self) -> tuple[str, int, int]:
        """A key of a message or collective, which is equal on all devices that take part."""
        return self.subject, self.group, self.repeats

    def __str__(self) -> str:
        if self.subject in ("loss", "gradient", "output"):
            of_leaf = f" of {self.leaf}" if self.leaf else ""
            return f"{self.subject}{of_leaf} in slice {self.slice}"
        if self.leaf:
            return f"{self.subject} of {self.leaf}"
        return self.subject


class DeviceRecord:
    """The entries of one device in one step, with the digest of each."""

    def __init__(self) -> None:
        self.digests: dict[RecordEntry, int] = {}
        self._counts: Counter[RecordEntry] = Counter()
        self._slice = 0

    def begin_slice(self, number: int) -> None:
        """Begin a slice: entries after this one are of it."""
        self._slice = number

    def record(self, phase: RecordedPhase, leaf: str, x: Any) -> None:
        """Record what the device has computed, or the result of a collective by its parameter."""
        direction: Direction = "received" if phase in _RECEIVED else "computed"
        self.add(RecordEntry(direction, phase, path_text(leaf), self._slice), x)

    def add(self, entry: RecordEntry, x: Any) -> None:
        """Add an entry."""
        count = self._counts[entry]
        self._counts[entry] += 1
        self.digests[entry._replace(repeats=count)] = digest_of(x)

    def first_difference(self, other: DeviceRecord) -> RecordEntry | None:
        """Return the first entry whose digest another record of the device does not have."""
        for entry, value in self.digests.items():
            if other.digests.get(entry) != value:
                return entry
        return None

    def sent_otherwise(self, other: DeviceRecord) -> list[tuple[str, int, int]]:
        """Return the messages that the device has sent with other values."""
        messages: list[tuple[str, int, int]] = []
        for entry, value in self.digests.items():
            if entry.direction == "sent" and other.digests.get(entry) != value:
                messages.append(entry.message)
        return messages

    def leaf_from(self, first: RecordEntry, other: DeviceRecord) -> str:
        """Return the leaf of a difference: its own, or that of the next one that has any."""
        has_begun = False
        for entry, value in self.digests.items():
            has_begun = has_begun or entry == first
            if has_begun and entry.leaf and other.digests.get(entry) != value:
                return entry.leaf
        return ""


class StepRecord:
    """Records one step on all devices of the caller.

    Args:
        substitute: from the reduced gradients to those that the update takes; None: the same.

    `grads` are the reduced gradients.
    """

    def __init__(self, substitute: Callable[[PyTree], PyTree] | None = None) -> None:
        self.devices: dict[int, DeviceRecord] = {}
        self.grads: PyTree = None
        self._substitute = substitute
        self._messages: Counter[tuple[int, str, int, bool]] = Counter()
        self._is_update = False

    def on_device(self, number: int) -> DeviceRecord:
        """Return the record of a device, by its number in the world."""
        return self.devices.setdefault(number, DeviceRecord())

    def reduced(self, grads: PyTree) -> PyTree:
        """Record reduced gradients; return those that the update takes."""
        self.grads = copies_of(grads)
        self._is_update = True
        if self._substitute is None:
            return grads
        with recorded_by(None):  # what it moves is none of the step
            return self._substitute(grads)

    def begin(self, device: int, subject: str, group: int, *, receives: bool) -> RecordedMessage:
        """Count a message that a device receives, or else sends."""
        if self._is_update:
            subject = f"{subject} in the update"
        key = (device, subject, group, receives)
        number = self._messages[key]
        self._messages[key] += 1
        return RecordedMessage(device, subject, group, number)

    def sent(self, message: RecordedMessage, xs: Sequence[Tensor]) -> None:
        """Record the tensors that a device gives to a collective, or sends."""
        self.on_device(message.device).digests[_entry_of("sent", message)] = digest_of(xs)

    def received(self, message: RecordedMessage, xs: Sequence[Tensor]) -> None:
        """Record the results of a collective on a device, or a message that it gets."""
        self.on_device(message.device).digests[_entry_of("received", message)] = digest_of(xs)

    def add_results(self, phase: str, tree: PyTree, numbers: Sequence[int]) -> None:
        """Record the local shards of a tree, at the end of the step.

        `numbers`: of the devices of the caller, in the order of shards.
        """
        if not numbers:  # the caller is outside of the mesh
            return
        leaves = Leaves.of(tree)
        for path, leaf in zip(leaves.paths, leaves.leaves, strict=True):
            if not isinstance(leaf, Sharded):
                continue
            for number, shard in zip(numbers, leaf.shards, strict=True):
                entry = RecordEntry("computed", phase, path_text(path), -1)
                self.on_device(number).add(entry, shard)


def recorded_by(record: StepRecord | None) -> AbstractContextManager[None]:
    """Let a record take the values and messages of the block's step, or let none."""
    return counting_by(replace(counting(), recorder=record))


def _entry_of(direction: Direction, message: RecordedMessage) -> RecordEntry:
    """Return the entry of a message."""
    return RecordEntry(direction, message.subject, "", -1, message.group, message.number)


@torch.no_grad()
def copies_of(tree: PyTree) -> PyTree:
    """Return a tree of copies of all shards and tensors; ties stay ties.

    A step may write its arguments in place.
    """

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        if not isinstance(leaf, Sharded):
            return leaf
        return Sharded(leaf.shape, leaf.layout, tuple([x.detach().clone() for x in leaf.shards]))

    return Leaves.of(tree).mapped(copy)


def digest_of(x: Any) -> int:
    """Return a digest of the bits of a tensor, or of all tensors of a tree."""
    if isinstance(x, Tensor):
        if x.is_meta:  # without values, as outside of a mesh
            return 0
        return digest(x)
    leaves, _ = flatten_shards(x)
    digests = [digest_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return hash(tuple(digests))  # of integers it is equal in all processes, unlike that of texts


class Fault(NamedTuple):
    """The entry at which a run first differed from its repetition.

    Args:
        device: its number in the world.
        entry: the first one that differs.
        leaf: of the parameter or state, "" if it has none.
    """

    device: int
    entry: RecordEntry
    leaf: str


def faults(record: StepRecord, other: StepRecord) -> list[Fault]:
    """Return the first difference of each device from another record of the same step."""
    first_faults: list[Fault] = []
    for number, device in record.devices.items():
        other_device = other.devices.get(number, DeviceRecord())
        entry = device.first_difference(other_device)
        if entry is not None:
            first_faults.append(Fault(number, entry, device.leaf_from(entry, other_device)))
    return first_faults


def sent_otherwise(record: StepRecord, other: StepRecord) -> list[tuple[str, int, int]]:
    """Return the messages that any device has sent with other values in another record."""
    messages: list[tuple[str, int, int]] = []
    for number, device in record.devices.items():
        messages += device.sent_otherwise(other.devices.get(number, DeviceRecord()))
    return messages


def origins(candidates: Sequence[Fault], sent: Iterable[tuple[str, int, int]]) -> list[Fault]:
    """Return the faults that no message explains, which another device has sent otherwise.

    Args:
        candidates: the first difference of each device.
        sent: the messages that devices have sent with other values.
    """
    explanations = {*sent}
    unexplained: list[Fault] = []
    for fault in candidates:
        is_explained = fault.entry.direction == "received" and fault.entry.message in explanations
        if not is_explained:
            unexplained.append(fault)
    return unexplained or [*candidates]
