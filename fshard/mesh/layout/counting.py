"""`Counting`: what counts or records the collectives and the storages of the calling code.

    ledgers    the bytes that collectives send: `fs.ledger`
    counters   the storages of every device: `fs.memory.limit`
    recorder   values that devices compute, send and receive: `fs.audit`

It is a fact of a thread: any operation of torch makes storages, and takes no argument for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol, get_args

from torch import Tensor

from fshard.ambient import setting
from fshard.source import Site

Memory = Literal["device", "host", "disk"]
"""Memory of a shard: the device's, the host's, or a file's. See `fshard.mesh.layout.kinds`."""
MEMORIES: tuple[Memory, ...] = get_args(Memory)

Purpose = Literal[
    "parameters", "gradients", "state", "unsharded", "activations", "buffers", "source", "other"
]
"""The purpose that a storage was made for: "other" outside of steps, such as batches.

"source" are the plain, full tensors that parameters are sharded from: the caller has them, and no
device needs them.
"""
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

ActivationMemory = Literal["device", "host", "recomputed"]
"""The memory of an activation with a name from the forward to the backward."""


class LedgerRow(NamedTuple):
    """The key of a ledger's entry: a collective at one line of the program."""

    collective: str
    axes: tuple[str, ...]
    site: Site


class CollectiveCounter(Protocol):
    """Counts the bytes of collectives: see `fshard.mesh.collectives.ledger`."""

    def record(self, device: int, row: LedgerRow, sent: Fraction) -> None:
        """Add one call of one device."""
        ...

    def record_move(self, device: int, source: Memory, target: Memory, count: int) -> None:
        """Add bytes that one device moved between two memories."""
        ...

    def record_link(self, sender: int, receiver: int, count: int) -> None:
        """Add bytes that one device sent to one other, in a reshard between meshes."""
        ...


class StorageCounter(Protocol):
    """Counts storages: see `fshard.memory.limit`, which is above this package."""

    def claim(
        self,
        x: Tensor,
        device: int | None = None,
        kind: Memory | None = None,
        purpose: Purpose | None = None,
    ) -> None:
        """Count the storage of a tensor; change the device, kind and purpose it is counted for."""
        ...

    def reserve(self, delivery: object, xs: Sequence[Tensor], count: int) -> None:
        """Count bytes that are to be delivered, until they are or the delivery is freed."""
        ...

    def deliver(self, delivery: object, results: Sequence[Tensor]) -> None:
        """Count the storages of the results in place of what was reserved."""
        ...

    def mark(self, name: str) -> None:
        """Begin an entry in the timeline: a use of a unit, or the update."""
        ...

    def note_move(self, source: Memory, target: Memory, count: int) -> None:
        """Count the bytes of a copy in the current entry of the timeline."""
        ...

    def note_kept(self, name: str, count: int) -> None:
        """Count the bytes of a named activation that is saved on the device."""
        ...


RecordedPhase = Literal[
    "shard", "unsharded", "output", "loss", "gradient", "sum of gradients", "reduced gradient"
]
"""The values of a step that are recorded, on the way to the gradients.

    shard, unsharded          a parameter of a unit, before and after its all-gather
    output                    of a stage of a pipeline
    loss, gradient            of one slice, the gradient leaf by leaf
    sum of gradients          of a device's slices, as it is reduced
    reduced gradient          the device's shard of the sum
"""


class DeviceRecorder(Protocol):
    """Records what one device computes in one step."""

    def begin_slice(self, number: int) -> None:
        """Begin a slice, or a microbatch, by its number among those of all devices."""
        ...

    def record(self, phase: RecordedPhase, leaf: str, x: Any) -> None:
        """Record a tensor, or the tensors of a tree; `leaf` is the path of a parameter, or ""."""
        ...


class RecordedMessage(NamedTuple):
    """A message or collective, as a recorder knows it.

    Args:
        device: the number of the device that sends or receives.
        subject: of the message: equal on all devices that take part, as `group` is.
        group: the first device of those that take part.
        number: of such messages of the device, in the order of their starts; from 0.
    """

    device: int
    subject: str
    group: int
    number: int


class ValueRecorder(Protocol):
    """Records values of one step on all devices of the caller: see `fshard.auditing`.

    A step without a recorder compares a field with None, and that is all. Listeners, which learn of
    phases without values on all threads, are another thing: see `fshard.mesh.spmd.moments`.
    """

    def on_device(self, number: int) -> DeviceRecorder:
        """Return the recorder of a device, by its number in the world."""
        ...

    def begin(self, device: int, subject: str, group: int, *, receives: bool) -> RecordedMessage:
        """Count a message that a device receives, or else sends."""
        ...

    def sent(self, message: RecordedMessage, xs: Sequence[Tensor]) -> None:
        """Take the tensors that a device gives to a collective, or sends."""
        ...

    def received(self, message: RecordedMessage, xs: Sequence[Tensor]) -> None:
        """Take the results of a collective on a device, or a message that it gets."""
        ...


@dataclass(frozen=True, slots=True)
class Counting:
    """The ledgers and counters of the calling code, and labels of its new storages.

    Args:
        ledgers: those that collectives are written to.
        counters: those that count storages.
        purpose: of new storages; None for the purpose of an operation's arguments.
        site: the line of new storages where no line of the user is being executed.
        memory: of new storages; None for the memory of an operation's arguments.
        owner: the device that new storages belong to, outside of any device's scope.
        recorder: of a step; None for nothing.
    """

    ledgers: tuple[CollectiveCounter, ...] = ()
    counters: tuple[StorageCounter, ...] = ()
    purpose: Purpose | None = None
    site: Site | None = None
    memory: Memory | None = None
    owner: int | None = None
    recorder: ValueRecorder | None = None


_counting: ContextVar[Counting] = ContextVar(
    "counting",
    default=Counting(),  # noqa: B039  # it is frozen
)

counting = _counting.get
"""Return what counts the calling code: the method itself, since each collective reads it."""


def counting_by(value: Counting) -> AbstractContextManager[None]:
    """Count the block by a value, in place of the one around it."""
    return setting(_counting, value)


def without_counters() -> AbstractContextManager[None]:
    """Count no storages in the block: of buffers of transports, or tensors without memory."""
    current = counting()
    if not current.counters:
        return nullcontext()
    return counting_by(replace(current, counters=()))
