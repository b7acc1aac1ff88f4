"""The command `fshard doctor`: start processes, or be one of those started; examine, judge and print.

The verdict is one sentence with a recommendation; the page has colours in a terminal, and is plain text elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import fshard as fs
from fshard.doctor.examine import SIZES, Findings, Machine, Speed, Trial, examine, why_not_direct
from fshard.errors import MeshError
from fshard.mesh.runtimes.launchers import launched, process_info

LIMIT = 600.0
"""Seconds that processes started here may take."""


def visit(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    known = _parser().parse_args(arguments)
    findings: list[Findings] = []
    count = known.processes if known.processes is not None else _usual(known.device)
    try:
        if launched():
            return _among_others(known.processes, known.device, known.json)
        findings = fs.launch(
            examine, known.device, "fshard doctor", processes=count, device=known.device, timeout=LIMIT
        )
        verdict = judge(findings)
    except Exception as error:
        verdict = failed(error, count)
    _print(findings, verdict, known.json)
    return 0 if verdict.well else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard doctor",
        description="Show versions, devices, the speed between processes, and check every collective. Under torchrun, srun or "
        "mpirun (python -m fshard doctor) it examines those processes.",
    )
    parser.add_argument(
        "--processes", type=int, help="how many to start; by default one for each GPU, and at least two"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda, if there are GPUs")
    parser.add_argument("--json", action="store_true", help="all that was found, for programs")
    return parser


def _usual(device: str | None) -> int:
    return max(2, torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0)


def _among_others(processes: int | None, device: str | None, as_json: bool) -> int:
    """Look at the processes that were started together; the first of them speaks."""
    here, count = process_info(), fs.mesh.process_count()
    if processes not in (None, count):
        raise MeshError(f"--processes {processes} cannot be: {count} processes were started. Leave it out.")
    found: list[Any] = [None] * count
    try:
        findings = examine(device, here.by if here is not None else "torch.distributed")
        dist.all_gather_object(found, findings)
        verdict = judge(found)
    except Exception as error:
        found, verdict = [], failed(error, count)
    if fs.mesh.process_index() == 0:
        _print(found, verdict, as_json)
    elif not found:  # process 0 may be past speaking
        sys.stderr.write(f"process {fs.mesh.process_index()}: {verdict.sentence}\n")
    return 0 if verdict.well else 1


def _print(findings: Sequence[Findings], verdict: Verdict, as_json: bool) -> None:
    if as_json:
        found_ = {**asdict(verdict), "processes": [asdict(one) for one in findings]}
        sys.stdout.write(json.dumps(found_, indent=2) + "\n")
    else:
        show(findings, verdict)


@dataclass(frozen=True)
class Verdict:
    """True on success, with reason and recommendation."""

    well: bool
    sentence: str
    advice: tuple[str, ...] = ()


def judge(findings: Sequence[Findings]) -> Verdict:
    """Judge the results of all processes."""
    wrong = [one for one in (_collectives(findings), _versions(findings)) if one]
    if wrong:
        return Verdict(False, "Not well: " + "; ".join(wrong) + ".", (*_remedies(findings), *_hints(findings)))
    first, n = findings[0], len(findings)
    who = f"{n} processes over {first.way}" if n > 1 else "1 process"
    gpus = ", ".join(sorted({gpu for one in findings for gpu in one.machine.gpus}))
    where = f" on {gpus}" if first.device == "cuda" else ""
    count = sum(len(_functions(trial.collective)) for trial in first.trials)
    return Verdict(True, f"All well: {who}{where}, {count} collectives right.", _hints(findings))


def failed(error: BaseException, processes: int) -> Verdict:
    """Judge an error that was raised instead of results."""
    kind = f"{type(error).__name__}: {error}".rstrip(".")
    advice = ("FSHARD_CHECK=1 shows the call of each process.", *getattr(error, "__notes__", []))
    return Verdict(False, f"Not well: {processes} processes did not get through. {kind}.", advice)


def _functions(name: str) -> tuple[str, ...]:
    """Return the functions that are tried under one name: `send_recv` are two."""
    return ("send", "recv") if name == "send_recv" else (name,)


def _collectives(findings: Sequence[Findings]) -> str | None:
    """Return a line for each wrong collective, with an example."""
    found_: list[str] = []
    for at, trial in enumerate(findings[0].trials):
        complaints = [complaint for one in findings for complaint in one.trials[at].complaints]
        if complaints:
            name = " and ".join(_functions(trial.collective))
            found_.append(
                f"{name} wrong in {len(complaints)} of {trial.cases * len(findings)} results, {complaints[0]}"
            )
    return "; ".join(found_) if found_ else None


def _versions(findings: Sequence[Findings]) -> str | None:
    found = {one.machine.versions: one.rank for one in findings}
    if len(found) == 1:
        return None
    each = ", ".join(f"process {rank} has Python {p}, torch {t}, fshard {f}" for (p, t, f), rank in found.items())
    return f"the processes run different versions ({each})"


def _remedies(findings: Sequence[Findings]) -> list[str]:
    """Return steps to find the cause of wrong results."""
    if not _collectives(findings):
        return ["Install the same versions on all machines."]
    way = findings[0].way
    if "direct" in way:
        return [
            "Run it again with FSHARD_DIRECT=0, which sends everything through gloo: if all is right then, reading memory "
            "fails here, and FSHARD_DIRECT=0 is the workaround."
        ]
    if way == "nccl":
        return [
            "Run it again with --device cpu: if all is right then, it is NCCL; NCCL_P2P_DISABLE=1 avoids its fast ways."
        ]
    return ["Only torch's gloo is used between the processes: reinstall torch, or another version."]


def _hints(findings: Sequence[Findings]) -> tuple[str, ...]:
    """Return hints for better speed."""
    first = findings[0]
    hints: list[str] = []
    hosts = {one.machine.host for one in findings}
    if first.way == "gloo" and len(findings) > len(hosts):
        hints.append(
            f"Processes of one machine communicate through gloo, which is slower than reading memory: {why_not_direct()}."
        )
    if first.device == "cpu" and first.machine.processors < len(findings) // len(hosts):
        hints.append(
            f"{len(findings) // len(hosts)} processes share {first.machine.processors} processors of {first.machine.host}: "
            "what is measured is how they wait for each other."
        )
    if first.machine.gpus and first.device == "cpu":
        hints.append("There are GPUs that were not tried: --device cuda.")
    return tuple(hints)


WIDTH = 80
"""Columns where there is no terminal that has some."""
SHOWN = 3
"""Number of errors shown per collective; `--json` has all."""
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
    """Format one row per collective: the time for few bytes, the time and the bytes sent for many."""
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
    for at, trial in enumerate(findings[0].trials):
        all_of: list[Trial] = [one.trials[at] for one in findings]
        complaints = [complaint for one in all_of for complaint in one.complaints]
        mark, style = ("wrong", "red") if complaints else ("right", "green")
        lines.append(Text.assemble(f"  {trial.collective:14}", (mark, style), f"   {trial.cases} cases"))
        lines += [Padding(Text(complaint), (0, 6), expand=False) for complaint in complaints[:SHOWN]]
    return Group(*lines)
