"""Values that are shown as tables: as text, and as HTML in notebooks."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH = 110  # columns of text
_STYLE = "line-height:1.2;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"


class Tabular:
    """A value that is printed as its table."""

    def table(self) -> Table:
        """Return the value as a rich table."""
        raise NotImplementedError

    def __str__(self) -> str:
        return text_of(self.table())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        code_format = f'<pre style="{_STYLE}">{{code}}</pre>'
        return _printed(self.table()).export_html(inline_styles=True, code_format=code_format)


def text_of(table: Table) -> str:
    """Return a rich table as text."""
    return _printed(table).export_text().rstrip()


def _printed(table: Table) -> Console:
    from rich.console import Console  # slow to import

    console = Console(file=StringIO(), width=_WIDTH, record=True, force_jupyter=False)
    console.print(table)
    return console
