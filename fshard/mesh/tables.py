"""A rich table as text and as HTML: how what has rows shows itself in a terminal and in a notebook."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

_STYLE = "line-height:1.2;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"


def as_text(table: Table, width: int = 110) -> str:
    """Return a table as plain text."""
    console = Console(file=StringIO(), width=width, force_terminal=False, force_jupyter=False, color_system=None)
    with console.capture() as shown:
        console.print(table)
    return shown.get().rstrip()


def as_html(table: Table, width: int = 110) -> str:
    """Return a table as HTML."""
    console = Console(file=StringIO(), width=width, record=True, force_jupyter=False)
    console.print(table)
    return console.export_html(inline_styles=True, code_format=f'<pre style="{_STYLE}">{{code}}</pre>')
