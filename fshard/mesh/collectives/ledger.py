"""The ledger: the bytes that each device sends, by one rule on every runtime.

It counts the bytes of the bandwidth-optimal algorithm, for n devices with B bytes each:

    psum                        2(n-1)/n B
    psum_scatter, all_to_all    (n-1)/n B
    all_gather                  (n-1) B
    ppermute, send              B
    broadcast                   B       a chain, whose last device sends nothing
    reshard                     the elements that devices of another mesh lack, each once

Of shards of unequal sizes each device counts those that it sends. A program has the same ledger,
device by device, on virtual and process meshes; fractions are exact. On an abstract mesh one device
represents all and counts the most that any device sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction

from fshard.mesh.layout.counting import (
    MEMORIES,
    CollectiveCounter,
    LedgerRow,
    Memory,
    counting,
    counting_by,
)
from fshard.tables import Table, TableColumn, Tabular

COUNTED = (
    "psum",
    "pmax",
    "pmin",
    "psum_scatter",
    "all_gather",
    "all_to_all",
    "ppermute",
    "broadcast",
    "send",
    "reshard",
    "copy",
)
"""Collectives, by the names of rows."""


@dataclass
class Entry:
    """Calls and bytes sent of one device."""

    calls: int = 0
    bytes: Fraction = Fraction(0)


@dataclass(repr=False)
class Ledger(Tabular):
    """The bytes that were sent while the ledger was open. Prints as a table; see `ledger`.

    `devices` maps the number of a device to its rows: all devices on a virtual mesh, this process's
    own on a process mesh, the representative's on an abstract one. `moves` maps it to the bytes
    that the device moved between two memories. `links` maps (sender, receiver), two numbers, to the
    bytes of reshards from one mesh to another.
    """

    devices: dict[int, dict[LedgerRow, Entry]] = field(
        default_factory=dict[int, dict[LedgerRow, Entry]]
    )
    moves: dict[int, Counter[tuple[Memory, Memory]]] = field(
        default_factory=dict[int, Counter[tuple[Memory, Memory]]]
    )
    links: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])

    def record(self, device: int, row: LedgerRow, sent: Fraction) -> None:
        """Add one call of one device."""
        rows = self.devices.setdefault(device, {})
        entry = rows.setdefault(row, Entry())
        entry.calls += 1
        entry.bytes += sent

    def record_move(self, device: int, source: Memory, target: Memory, count: int) -> None:
        """Add bytes that one device moved between two memories."""
        counts = self.moves.setdefault(device, Counter())
        counts[source, target] += count

    def record_link(self, sender: int, receiver: int, count: int) -> None:
        """Add bytes that one device sent to one other, in a reshard between meshes."""
        self.links[sender, receiver] += count

    def moved(self, source: Memory, target: Memory, device: int | None = None) -> int:
        """Return the bytes of arrays that a device moved between two memories.

        Without a device, return the largest of all devices. These bytes are not part of `bytes`,
        which are sent to other devices.
        """
        for kind in (source, target):
            if kind not in MEMORIES:
                raise ValueError(
                    f'ledger: a memory must be "device", "host" or "disk"; got {kind!r}.'
                )
        totals: list[int] = []
        for number, counts in self.moves.items():
            if device in (None, number):
                totals.append(counts[source, target])
        return max(totals, default=0)

    def bytes(
        self, device: int | None = None, *, collective: str | None = None, axis: str | None = None
    ) -> Fraction:
        """Return the bytes that a device sent, in total or filtered.

        Without a device, return the largest of all devices. `collective` is one of `COUNTED`;
        `axis` selects calls along it, alone or with other axes.
        """
        totals: list[Fraction] = []
        for entries in self._filtered_entries(device, collective, axis):
            totals.append(sum([entry.bytes for entry in entries], Fraction(0)))
        return max(totals, default=Fraction(0))

    def calls(
        self, device: int | None = None, *, collective: str | None = None, axis: str | None = None
    ) -> int:
        """Return the calls that a device made, in total or filtered.

        Without a device, return the most that any made.
        """
        totals: list[int] = []
        for entries in self._filtered_entries(device, collective, axis):
            totals.append(sum([entry.calls for entry in entries]))
        return max(totals, default=0)

    def _filtered_entries(
        self, device: int | None, collective: object, axis: object
    ) -> list[list[Entry]]:
        """Return the entries of each device, or of one.

        Raise for a filter that matches no collective: its total would always be 0.
        """
        if collective is not None and collective not in COUNTED:
            raise ValueError(
                f"ledger: collective must be one of {', '.join(COUNTED)} (a pmean is a psum); "
                f"got {collective!r}."
            )
        if not isinstance(axis, str | None):
            raise TypeError(f"ledger: axis must be the name of one axis; got {axis!r}.")

        selected: list[list[Entry]] = []
        for number, rows in self.devices.items():
            if device not in (None, number):
                continue
            entries: list[Entry] = []
            for row, entry in rows.items():
                is_selected = collective in (None, row.collective)
                is_along_axis = axis in (None, *row.axes)
                if is_selected and is_along_axis:
                    entries.append(entry)
            selected.append(entries)
        return selected

    def by_collective(
        self, device: int | None = None
    ) -> dict[tuple[str, tuple[str, ...]], tuple[int, Fraction]]:
        """Return {(collective, axes): (calls, bytes)} of one device; default: the first one."""
        if device is None:
            device = min(self.devices, default=0)

        totals: dict[tuple[str, tuple[str, ...]], tuple[int, Fraction]] = {}
        for row, entry in self.devices.get(device, {}).items():
            key = (row.collective, row.axes)
            calls, sent = totals.get(key, (0, Fraction(0)))
            totals[key] = (calls + entry.calls, sent + entry.bytes)
        return totals

    def rows(self) -> list[tuple[LedgerRow, int, Fraction]]:
        """Return every line with the most calls and bytes that a device had there.

        Lines are in the order of first calls.
        """
        largest: dict[LedgerRow, tuple[int, Fraction]] = {}
        for entries in self.devices.values():
            for row, entry in entries.items():
                calls, sent = largest.get(row, (0, Fraction(0)))
                largest[row] = (max(calls, entry.calls), max(sent, entry.bytes))
        return [(row, calls, sent) for row, (calls, sent) in largest.items()]

    def table(self) -> Table:
        """Return the ledger as a table."""
        columns = (
            TableColumn("collective"),
            TableColumn("axis"),
            TableColumn("calls", "count"),
            TableColumn("bytes per device", "bytes"),
            TableColumn("source line", "source"),
        )
        table = Table(columns, title="ledger")
        for row, calls, sent in self.rows():
            table.add(row.collective, "+".join(row.axes), calls, sent, row.site)
        table.add_section()
        table.add("all", None, self.calls(), self.bytes(), None)

        pairs: dict[tuple[Memory, Memory], None] = {}  # a set in order
        for counts in self.moves.values():
            pairs.update(dict.fromkeys(counts))
        for source, target in pairs:
            table.add(f"{source} to {target}", None, None, self.moved(source, target), None)
        return table


def active() -> Sequence[CollectiveCounter]:
    """Return the ledgers that the calling code writes to."""
    return counting().ledgers


def writing_to(ledgers: Sequence[CollectiveCounter]) -> AbstractContextManager[None]:
    """Write the collectives of the block to these ledgers, and to no other."""
    return counting_by(replace(counting(), ledgers=tuple(ledgers)))


def uncounted() -> AbstractContextManager[None]:
    """Exclude the calling thread's collectives from all ledgers."""
    return writing_to(())


@contextmanager
def ledger() -> Generator[Ledger]:
    """Count the collectives of the calling thread in the block, and of the devices that it runs.

    Each process of a process mesh has a ledger of its own;
    `if fs.mesh.process_index() == 0: print(comm)` prints one.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> def total(x):
    ...     return fs.psum(x, "data")
    >>> sum_of_shards = fs.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> with fs.ledger() as comm:
    ...     y = sum_of_shards(torch.ones(8))
    >>> comm.by_collective()  # each device sends 2 (n-1)/n of its 8 bytes
    {('psum', ('data',)): (1, Fraction(12, 1))}
    """
    opened = Ledger()
    with writing_to((*active(), opened)):
        yield opened
