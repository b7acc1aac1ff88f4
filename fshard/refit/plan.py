"""The bytes that a version sends: `RefitPlan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fshard.tables import Table, TableCell, TableColumn, Tabular


@dataclass(frozen=True, repr=False)
class RefitPlan(Tabular):
    """The bytes that one version sends, without a delta.

    Args:
        leaves: the number of arrays; tied ones count once.
        links: bytes by sender and receiver, as numbers of devices.
        unused: names of arrays that the engine needs nothing of.
    """

    leaves: int
    links: Mapping[tuple[int, int], int]
    unused: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The bytes that all devices send."""
        return sum(self.links.values())

    def table(self) -> Table:
        """Return the plan as a table."""
        columns = (TableColumn("sender"), TableColumn("receiver"), TableColumn("bytes", "bytes"))
        table = Table(columns, title=f"refit of {self.leaves} arrays")
        for (sender, receiver), size in sorted(self.links.items()):
            table.add(sender, receiver, size)
        table.add_section()
        table.add("all", None, self.bytes)
        if self.unused:
            table.add("unused", None, TableCell(", ".join(self.unused), kind="text"))
        return table
