"""The command `fshard doctor`: start processes, or be one of those started; examine, judge and print.

The verdict is one sentence with a recommendation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

import fshard as fs
from fshard.doctor.check import Trial
from fshard.doctor.examine import Findings, Speed, examine
from fshard.errors import MeshError
from fshard.mesh.runtimes.launchers import launched, process_info

LIMIT = 600.0
"""Seconds that processes started here may take."""
WIDTH = 80
"""Columns of the page outside of a terminal."""
SHOWN = 3
"""Number of errors shown per collective; `--json` has all."""
KIB, GIB = 1 << 10, 1 << 30


def visit(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status. Of processes that a launcher has started, the first prints."""
    options = _parser().parse_args(arguments)
    gpus = torch.cuda.device_count() if options.device != "cpu" and torch.cuda.is_available() else 0
    count, rank = options.processes if options.processes is not None else max(2, gpus), 0
    findings = list[Findings]()
    try:
        if launched():
            count, rank = fs.mesh.process_count(), fs.mesh.process_index()
            findings = _examine_launched(options.processes, options.device)
        else:
            launch: Any = partial(fs.launch, processes=count, device=options.device, timeout=LIMIT)
            findings = launch(examine, options.device, "fshard doctor")
        verdict = judge(findings)
    except Exception as error:
        verdict = failed(error, count)
    if rank == 0:
        _print(findings, verdict, options.json)
    elif not findings:  # process 0 may have ended
        sys.stderr.write(f"process {rank}: {verdict.sentence}\n")
    return 0 if verdict.well else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard doctor",
        description="Show versions, devices, the speed between processes, and check every collective. Under torchrun, srun or "
        "mpirun (python -m fshard doctor) it examines those processes.",
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="how many to start; by default one for each GPU, and at least two",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="by default cuda, if there are GPUs"
    )
    parser.add_argument("--json", action="store_true", help="all that was found, for programs")
    return parser


def _examine_launched(processes: int | None, device: str | None) -> list[Findings]:
    """Examine the processes that a launcher has started."""
    info, count = process_info(), fs.mesh.process_count()
    if processes not in (None, count):
        raise MeshError(
            f"--processes must be the number of processes started, {count}; got {processes}. Leave it out."
        )
    findings: list[Any] = [None] * count
    dist.all_gather_object(
        findings, examine(device, info.launcher if info is not None else "torch.distributed")
    )
    return findings


# -- the verdict --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """True on success, with reason and recommendation."""

    well: bool
    sentence: str
    advice: tuple[str, ...] = ()


def judge(findings: Sequence[Findings]) -> Verdict:
    """Judge the results of all processes."""
    first, n = findings[0], len(findings)
    wrong = [
        f"{trial.collective} wrong in {len(texts)} of {n * trial.cases} results, {texts[0]}"
        for trial, texts in _complaints(findings)
        if texts
    ]
    versions = {one.machine.versions: one.rank for one in findings}
    advice: list[str] = []
    if wrong:
        advice.append(_WORKAROUNDS["direct" if "direct" in first.transport else first.transport])
    if len(versions) > 1:
        each = (
            f"process {rank} has Python {p}, torch {t}, fshard {f}"
            for (p, t, f), rank in versions.items()
        )
        wrong.append(f"the processes run different versions ({', '.join(each)})")
        advice.append("Install the same versions on all machines.")
    if wrong:
        return Verdict(False, f"Not well: {'; '.join(wrong)}.", (*advice, *_hints(findings)))
    what = f"{n} processes over {first.transport}" if n > 1 else "1 process"
    gpus = ", ".join(sorted({gpu for one in findings for gpu in one.machine.gpus}))
    on = f" on {gpus}" if first.device == "cuda" else ""
    return Verdict(
        True, f"All well: {what}{on}, {len(first.trials)} collectives right.", _hints(findings)
    )


def failed(error: BaseException, processes: int) -> Verdict:
    """Judge an error that was raised instead of results."""
    kind = f"{type(error).__name__}: {error}".rstrip(".")
    advice = ("FSHARD_CHECK=1 shows the call of each process.", *getattr(error, "__notes__", []))
    return Verdict(False, f"Not well: {processes} processes did not get through. {kind}.", advice)


def _complaints(findings: Sequence[Findings]) -> list[tuple[Trial, list[str]]]:
    """List each collective's first trial, and the complaints of all processes."""
    rows = zip(*(one.trials for one in findings), strict=True)
    return [
        (row[0], [complaint for trial in row for complaint in trial.complaints]) for row in rows
    ]


_WORKAROUNDS = {
    "direct": "Run it again with FSHARD_DIRECT=0, which sends everything through gloo: if all is right then, reading "
    "memory fails here, and FSHARD_DIRECT=0 is the workaround.",
    "nccl": "Run it again with --device cpu: if all is right then, it is NCCL; NCCL_P2P_DISABLE=1 avoids direct links.",
    "gloo": "Only torch's gloo is used between the processes: reinstall torch, or another version.",
}


def _hints(findings: Sequence[Findings]) -> tuple[str, ...]:
    """Return hints for better speed."""
    first, hosts = findings[0], {one.machine.host for one in findings}
    each = len(findings) // len(hosts)
    hints: list[str] = []
    if first.transport == "gloo" and each > 1:
        hints.append(
            "Processes of one machine use gloo, which is slower than reading memory: that needs Linux on x86-64, one user, "
            "one container that permits process_vm_readv, ptrace_scope 0 or 1, and no FSHARD_DIRECT=0."
        )
    if first.device == "cpu" and first.machine.processors < each:
        hints.append(
            f"{each} processes share {first.machine.processors} processors of {first.machine.host}: they wait."
        )
    return tuple(hints)


# -- the page -----------------------------------------------------------------------------------------------------


def _print(findings: Sequence[Findings], verdict: Verdict, as_json: bool) -> None:
    if as_json:
        everything = {**asdict(verdict), "processes": [asdict(one) for one in findings]}
        sys.stdout.write(json.dumps(everything, indent=2) + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    sections = [
        *(_sections(findings) if findings else []),
        ("Verdict", [verdict.sentence, *verdict.advice]),
    ]
    for title, lines in sections:
        console.print(Text(f"\n{title}", "bold"))
        for line in lines:
            style = (
                ("bold green" if verdict.well else "bold red") if line == verdict.sentence else ""
            )
            console.print(Padding(Text(line, style), (0, 2), expand=False))


def _sections(findings: Sequence[Findings]) -> list[tuple[str, list[str]]]:
    first, here = findings[0], findings[0].machine
    others = sorted({one.machine.host for one in findings} - {here.host})
    facts = {
        "versions": f"Python {here.python}, torch {here.torch}, fshard {here.fshard}",
        "backends": ", ".join(here.backends) or "none",
        "host": f"{here.host}, {here.system}" + (f"; also {', '.join(others)}" if others else ""),
        "processors": f"{here.processors}, of which a process uses {here.threads}",
        "memory": f"{here.memory / GIB:.0f} GiB",
        "GPUs": ", ".join(f"{here.gpus.count(name)} × {name}" for name in dict.fromkeys(here.gpus))
        or "none",
    }
    processes = {
        "number": f"{len(findings)}, on {len(others) + 1} machine{'s' * bool(others)}",
        "started by": first.by,
        "device": first.device,
        "transport": first.transport,
    }
    collectives: list[str] = []
    for trial, complaints in _complaints(findings):
        mark = "wrong" if complaints else "right"
        collectives.append(f"{trial.collective:14}{mark}   {trial.cases} cases")
        collectives += [f"    {complaint}" for complaint in complaints[:SHOWN]]
    return [
        ("Machine", [f"{name:12}{value}" for name, value in facts.items()]),
        ("Processes", [f"{name:12}{value}" for name, value in processes.items()]),
        *([("Speed", _speeds(first.speeds))] if first.speeds else []),
        ("Collectives", collectives),
    ]


def _speeds(speeds: Sequence[Speed]) -> list[str]:
    """Format one line per collective: the time for few bytes, and for many the bytes sent in a second."""
    lines: dict[str, str] = {}
    for speed in speeds:
        held = f"{speed.held // KIB} KiB" if speed.held < KIB**2 else f"{speed.held // KIB**2} MiB"
        rate = (
            f"{speed.sent / speed.seconds / GIB:.2f} GiB/s"
            if speed.held > KIB
            else f"{speed.seconds * 1e6:,.0f} µs"
        )
        lines[speed.collective] = (
            f"{lines.get(speed.collective, f'{speed.collective:14}')}{held:>6} {rate:14}"
        )
    return [line.rstrip() for line in lines.values()]
