"""`MemoryUsage`: blocks of memory, their totals, the peaks of these, and limits.

    add ──> _count: the total of (device, kind) rises, or raises beyond its limit ──> a new peak?
    storage freed ──> its weak reference is in `_dead` ──> free_dead ──> _count: the total falls

Bytes are also counted by line and purpose. A peak needs these counts as they were at that time.
They are copied when the total first falls after it, not with each allocation while it rises.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import ref

from fshard.errors import MemoryLimitError
from fshard.memory.snapshot import MemoryEvent, write_snapshot
from fshard.mesh.layout import Memory
from fshard.mesh.layout.counting import MEMORIES, PURPOSES, Purpose
from fshard.source import Site
from fshard.tables import Table, TableCell, TableColumn, Tabular

RECORDED = 100_000
"""The last allocations and frees that are kept for a snapshot."""


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A storage, or bytes that are to be delivered.

    Args:
        device: None if it counts on all devices.
        is_adopted: it was not allocated by an operation of a device, but seen as an argument.
        users: its storages, of which one may be the storage without values that an abstract mesh
            has in place of another.
    """

    size: int
    kind: Memory
    purpose: Purpose
    device: int | None
    site: Site
    address: int
    is_adopted: bool = False
    users: int = 1


class Holder(NamedTuple):
    """The bytes that one line of the program allocated for one purpose."""

    bytes: int
    purpose: Purpose
    site: Site


class Line(NamedTuple):
    """A line of the program, and what it allocates for."""

    purpose: Purpose
    site: Site


Lines = Counter[Line]
"""The bytes that lines have allocated for purposes."""


@dataclass(slots=True)
class StepEvent:
    """The time from a mark of a step to the next: a unit is used, or parameters are updated.

    Args:
        name: of the unit, or "begin" and "update".
        peak: the most bytes in device memory.
        flops: of matrix products, convolutions and attention.
        moved: bytes of the copies that start in it, by source and target.
        kept: the most bytes of named activations that are saved on the device, by name.
    """

    name: str
    peak: int
    flops: int = 0
    moved: Counter[tuple[Memory, Memory]] = field(default_factory=Counter[tuple[Memory, Memory]])
    kept: Counter[str] = field(default_factory=Counter[str])


def _validate_kind(kind: object) -> None:
    """Raise if a kind of memory is none, such as the name or number of a device."""
    if kind not in MEMORIES:
        raise ValueError(f'memory: kind must be "device", "host" or "disk"; got {kind!r}.')


class MemoryUsage(Tabular):
    """The memory that was in use while a limit was open.

    Prints as a table of the peaks: see `limit`.
    """

    def __init__(self, limits: dict[Memory, int | None]) -> None:
        self.limits = limits
        self.timeline: list[StepEvent] = []  # from each mark to the next
        # The bytes in device memory now, of all devices together.
        self.purposes: Counter[Purpose] = Counter()
        # The most bytes in device memory since a recorder last set it: between two operations too.
        self.highest = 0
        self._blocks: dict[ref[Any], MemoryBlock] = {}
        self._dead: deque[ref[Any]] = deque()
        self._addresses = count(1 << 20, 1 << 12)
        self._totals: defaultdict[tuple[int | None, Memory], int] = defaultdict(int)
        self._lines: defaultdict[tuple[int | None, Memory], Lines] = defaultdict(Lines)
        self._peaks: dict[Memory, tuple[int, Lines]] = {kind: (0, Lines()) for kind in MEMORIES}
        # Kinds whose peak is not over, and the device of each: its lines are still to be copied.
        self._rising: dict[Memory, int | None] = {}
        self._events: deque[MemoryEvent] = deque(maxlen=RECORDED)
        self._remaining: list[MemoryEvent] | None = None  # in use when the limit was closed
        self._kept: Counter[str] = Counter()  # bytes of named activations on the device now

    # -- results ---------------------------------------------------------------------------------

    def peak(self, kind: Memory = "device", purpose: Purpose | None = None) -> int:
        """Return the largest number of bytes that any device has held.

        With a purpose return the bytes for it at that time.
        """
        if purpose is None:
            _validate_kind(kind)
            return self._peaks[kind][0]
        if purpose not in PURPOSES:
            raise ValueError(
                f"memory: purpose must be one of {', '.join(PURPOSES)}; got {purpose!r}."
            )
        return sum(holder.bytes for holder in self.holders(kind) if holder.purpose == purpose)

    def holders(self, kind: Memory = "device") -> list[Holder]:
        """Return what the peak of a kind consists of, the largest first."""
        _validate_kind(kind)
        self._end_peak(kind)
        return _holders(self._peaks[kind][1])

    def now(self, kind: Memory = "device") -> int:
        """Return the bytes that the fullest device holds now."""
        _validate_kind(kind)
        self.free_dead()
        return self._total(kind, None)

    def table(self) -> Table:
        """Return the peaks as a table."""
        columns = (
            TableColumn("kind"),
            TableColumn("purpose"),
            TableColumn("bytes per device", "bytes"),
            TableColumn("source line", "source"),
        )
        table = Table(columns, title="peak memory")
        for kind in MEMORIES:
            peak = self.peak(kind)
            limit = self.limits.get(kind)
            if limit is not None:
                table.add(kind, None, TableCell(peak, remark=f" of {limit:,}"), None)
            elif peak:
                table.add(kind, None, peak, None)
            for holder in self.holders(kind):
                table.add(TableCell(kind, text=""), holder.purpose, holder.bytes, holder.site)
        return table

    def export_snapshot(self, path: str | Path) -> None:
        """Write a file for torch's memory viewer, which runs in a browser.

        The viewer, https://docs.pytorch.org/memory_viz, shows each memory of each device as a
        device of its own, with the last 100,000 allocations and frees.
        """
        in_use = self._in_use() if self._remaining is None else self._remaining
        write_snapshot(path, self._events, in_use)

    def _in_use(self) -> list[MemoryEvent]:
        self.free_dead()
        return [_event("alloc", block) for block in dict.fromkeys(self._blocks.values())]

    def close(self) -> None:
        """End the count; the results stay."""
        for kind in MEMORIES:
            self._end_peak(kind)
        self._remaining = self._in_use()
        self._blocks.clear()

    # -- blocks ----------------------------------------------------------------------------------

    def find(self, owner: object) -> MemoryBlock | None:
        """Return the block of a storage."""
        return self._blocks.get(ref(owner))

    def share(self, owner: object, block: MemoryBlock) -> None:
        """Let another storage have a block too."""
        self._blocks[ref(owner, self._dead.append)] = block
        block.users += 1

    def take(self, owner: object) -> MemoryBlock:
        """Free the block of an owner that is alive, and return it."""
        block = self._blocks.pop(ref(owner))
        self._free(block)
        return block

    def add(self, owner: Any, block: MemoryBlock) -> MemoryBlock:
        """Count a block until its owner is freed."""
        self._count(block, block.size)
        self._blocks[ref(owner, self._dead.append)] = block
        self._events.append(_event("alloc", block))
        return block

    def free_dead(self) -> None:
        """Free the blocks of storages that are gone.

        Their weak references are called back at any time, in any thread, so they only enter a
        queue then, and are counted here.
        """
        while self._dead:
            block = self._blocks.pop(self._dead.popleft(), None)
            if block is not None:
                self._free(block)

    def _free(self, block: MemoryBlock) -> None:
        block.users -= 1
        if not block.users:
            self._count(block, -block.size)
            self._events.append(_event("free", block))

    def resize(self, block: MemoryBlock, size: int) -> None:
        """Count a storage that has another size."""
        if size != block.size:
            self._count(block, size - block.size)
            self._events += [_event("free", block), _event("alloc", replace(block, size=size))]
            block.size = size

    def change(
        self, block: MemoryBlock, device: int | None, kind: Memory, purpose: Purpose
    ) -> None:
        """Count a block for another device, kind or purpose."""
        if (device, kind) == (block.device, block.kind):
            self._add_line(block, -block.size)
            block.purpose = purpose
            self._add_line(block, block.size)
            return

        before = (block.device, block.kind, block.purpose)
        self._count(block, -block.size)
        self._events.append(_event("free", block))
        block.device, block.kind, block.purpose = device, kind, purpose
        try:
            self._count(block, block.size)
        except MemoryLimitError:
            block.device, block.kind, block.purpose = before
            self._count(block, block.size)
            raise
        finally:
            self._events.append(_event("alloc", block))

    def new_address(self) -> int:
        """Return an address for a block, which no other has had."""
        return next(self._addresses)

    def mark(self, name: str) -> None:
        """Begin an entry of the timeline."""
        self.free_dead()
        self.timeline.append(StepEvent(name, self._total("device", None), kept=self._kept.copy()))

    def keep(self, name: str, size: int) -> None:
        """Count a named activation that is saved on the device.

        The size is negative when the backward takes it.
        """
        self._kept[name] += size
        if self.timeline:
            event = self.timeline[-1]
            event.kept[name] = max(event.kept[name], self._kept[name])

    # -- totals ----------------------------------------------------------------------------------

    def _count(self, block: MemoryBlock, size: int) -> None:
        """Add bytes to the totals of a block's device and kind, or raise beyond the limit."""
        kind = block.kind
        device = block.device
        if size > 0:
            total = self._total(kind, device) + size
            limit = self.limits.get(kind)
            if limit is not None and total > limit:
                raise self._beyond(block, size, total, limit)
            if kind == "device":
                self.highest = max(self.highest, total)
                if self.timeline:
                    self.timeline[-1].peak = max(self.timeline[-1].peak, total)
            if total > self._peaks[kind][0]:
                self._peaks[kind] = (total, Lines())
                self._rising[kind] = self._fullest(kind) if device is None else device
        else:
            self._end_peak(kind)
        self._totals[device, kind] += size
        self._add_line(block, size)

    def _add_line(self, block: MemoryBlock, size: int) -> None:
        lines = self._lines[block.device, block.kind]
        line = Line(block.purpose, block.site)
        lines[line] += size
        if not lines[line]:
            del lines[line]
        if block.kind == "device":
            self.purposes[block.purpose] += size

    def _total(self, kind: Memory, device: int | None) -> int:
        """Return the bytes of a kind on a device, None for the fullest."""
        if device is None:
            device = self._fullest(kind)
        on_all_devices = self._totals[None, kind]
        return on_all_devices if device is None else on_all_devices + self._totals[device, kind]

    def _fullest(self, kind: Memory) -> int | None:
        """Return the device with the most bytes of a kind; None if no device has any of its own."""
        devices: list[int] = []
        for device, other_kind in [*self._totals]:  # a copy: other threads may add devices
            if device is not None and other_kind == kind:
                devices.append(device)
        return max(devices, key=lambda device: self._totals[device, kind], default=None)

    def _lines_on(self, device: int | None, kind: Memory) -> Lines:
        on_all_devices = self._lines[None, kind]
        own = Lines() if device is None else self._lines[device, kind]
        return on_all_devices + own

    def _end_peak(self, kind: Memory) -> None:
        """Copy the lines of a peak before anything is freed."""
        if kind in self._rising:
            lines = self._lines_on(self._rising.pop(kind), kind)
            self._peaks[kind] = (self._peaks[kind][0], lines)

    def _beyond(self, block: MemoryBlock, size: int, total: int, limit: int) -> MemoryLimitError:
        device = self._fullest(block.kind) if block.device is None else block.device
        holders: list[str] = []
        for holder in _holders(self._lines_on(device, block.kind))[:5]:
            holders.append(f"{holder.bytes:,} bytes for {holder.purpose} at {holder.site}")
        return MemoryLimitError(
            f"memory.limit: {block.kind} memory must be at most {limit:,} bytes per device; got "
            f"{total:,} with {size:,} more for {block.purpose} at {block.site}, on device "
            f"{device or 0}. The largest holders are {'; '.join(holders)}. "
            "Raise the limit, or store parameters elsewhere: shard_params(memory=)."
        )


def _holders(lines: Lines) -> list[Holder]:
    return [Holder(size, purpose, site) for (purpose, site), size in lines.most_common()]


def _event(action: Literal["alloc", "free"], block: MemoryBlock) -> MemoryEvent:
    """Return an allocation or a free as of now."""
    microseconds = time.time_ns() // 1000
    return MemoryEvent(
        action,
        microseconds,
        block.device,
        block.kind,
        block.address,
        block.size,
        block.purpose,
        block.site,
    )
