"""The bytes that a version sends: `RefitPlan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fshard.tables import Tabular

if TYPE_CHECKING:  # it is imported where a table is shown
    from rich.table import Table


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
        """Return the plan as a rich table."""
        from rich.table import Table

        table = Table("sender", "receiver", "bytes", title=f"refit of {self.leaves} arrays")
        for (sender, receiver), size in sorted(self.links.items()):
            table.add_row(str(sender), str(receiver), f"{size:,}")
        table.add_section()
        table.add_row("all", "", f"{self.bytes:,}")
        if self.unused:
            table.add_row("unused", "", ", ".join(self.unused))
        table.columns[2].justify = "right"
        return table
