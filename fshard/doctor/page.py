"""What was found, for a person to read: with colours in a terminal, and as plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fshard.doctor.examine import Findings
from fshard.doctor.machine import Machine
from fshard.doctor.speeds import SIZES, Speed
from fshard.doctor.trials import Trial
from fshard.doctor.verdict import Verdict

WIDTH = 80
"""Columns where there is no terminal that has some."""
SHOWN = 3
"""How many complaints about a collective are shown; `--json` has all."""
KIB, GIB = 1 << 10, 1 << 30


def show(findings: Sequence[Findings], verdict: Verdict) -> None:
    """Print the page."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    parts: list[RenderableType] = []
    if findings:
        first = findings[0]
        parts += [_title("Machine"), _facts(_machines(findings)), _title("Processes"), _facts(_processes(findings))]
        if first.speeds:
            parts += [_title("Speed"), _speeds(first.speeds)]
        parts += [_title("Collectives"), _trials(findings)]
    parts.append(_title("Verdict"))
    parts.append(
        Padding(Text(verdict.sentence, style="bold green" if verdict.well else "bold red"), (0, 2), expand=False)
    )
    parts += [Padding(Text(line), (0, 2), expand=False) for line in verdict.advice]
    console.print(Group(*parts))


def _title(text: str) -> RenderableType:
    return Text(f"\n{text}", style="bold")


def _facts(rows: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", Text(value))
    return table


def _machines(findings: Sequence[Findings]) -> list[tuple[str, str]]:
    """Describe the machine of process 0, and name the others."""
    here: Machine = findings[0].machine
    others = sorted({one.machine.host for one in findings} - {here.host})
    gpus = [f"{here.gpus.count(name)} × {name}" for name in dict.fromkeys(here.gpus)]
    return [
        ("versions", f"Python {here.python}, torch {here.torch}, fshard {here.fshard}"),
        ("backends of torch", ", ".join(here.backends) or "none"),
        ("host", f"{here.host}, {here.system}" + (f"; also {', '.join(others)}" if others else "")),
        ("processors", f"{here.processors}, of which a process uses {here.threads}"),
        ("memory", f"{here.memory / GIB:.0f} GiB"),
        ("GPUs", ", ".join(gpus) or "none"),
    ]


def _processes(findings: Sequence[Findings]) -> list[tuple[str, str]]:
    first = findings[0]
    return [
        ("how many", f"{len(findings)}, on {_machines_in_words(findings)}"),
        ("started by", first.by),
        ("device", first.device),
        ("bytes go by", first.way),
    ]


def _machines_in_words(findings: Sequence[Findings]) -> str:
    count = len({one.machine.host for one in findings})
    return "one machine" if count == 1 else f"{count} machines"


def _speeds(speeds: Sequence[Speed]) -> RenderableType:
    """Lay out one row for each collective: the time for little, the time and what each process sends for much."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("  each holds", no_wrap=True)
    for held in SIZES:
        table.add_column(_size(held), justify="right", no_wrap=True)
        if held > KIB:
            table.add_column("sent by each", justify="right", no_wrap=True)
    for name in dict.fromkeys(speed.collective for speed in speeds):
        cells: list[str] = []
        for speed in (one for one in speeds if one.collective == name):
            cells += [f"{speed.seconds * 1e6:,.0f} µs"]
            cells += [f"{speed.rate / GIB:.2f} GiB/s"] * (speed.held > KIB)
        table.add_row(f"  {name}", *cells)
    return table


def _size(held: int) -> str:
    return f"{held // KIB} KiB" if held < 1 << 20 else f"{held >> 20} MiB"


def _trials(findings: Sequence[Findings]) -> RenderableType:
    """List every collective, and every complaint below it: the first few of them."""
    lines: list[RenderableType] = []
    for place, trial in enumerate(findings[0].trials):
        all_of: list[Trial] = [one.trials[place] for one in findings]
        complaints = [complaint for one in all_of for complaint in one.complaints]
        mark, style = ("wrong", "red") if complaints else ("right", "green")
        lines.append(Text.assemble(f"  {trial.collective:14}", (mark, style), f"   {trial.cases} cases"))
        lines += [Padding(Text(complaint), (0, 6), expand=False) for complaint in complaints[:SHOWN]]
    return Group(*lines)
