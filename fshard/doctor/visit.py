"""The command `fshard doctor`: examine processes, judge, and print.

It starts the processes, or is one of those that a launcher has started.

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
from fshard.doctor.examine import Findings, Machine, Speed, examine
from fshard.errors import MeshError
from fshard.mesh.runtimes.launchers import launched, process_info

LIMIT = 600.0
"""Seconds that processes started here may take."""
WIDTH = 80
"""Columns of the page outside of a terminal."""
SHOWN = 3
"""Number of errors shown per collective; `--json` has all."""
KIB = 1 << 10
GIB = 1 << 30


def visit(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status.

    Of processes that a launcher has started, the first prints.
    """
    options = _parser().parse_args(arguments)
    rank = 0
    count = options.processes
    if count is None:
        count = _default_processes(options.device)
    findings: list[Findings] = []
    try:
        if launched():
            count = fs.mesh.process_count()
            rank = fs.mesh.process_index()
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


def _default_processes(device: str | None) -> int:
    """Return one process for each GPU, but two at least."""
    if device == "cpu" or not torch.cuda.is_available():
        return 2
    return max(2, torch.cuda.device_count())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard doctor",
        description="Show versions, devices, the speed between processes, and check every "
        "collective. Under torchrun, srun or mpirun (python -m fshard doctor) it examines those "
        "processes.",
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
    count = fs.mesh.process_count()
    if processes not in (None, count):
        raise MeshError(
            f"--processes must be the number of processes started, {count}; got {processes}. "
            "Leave it out."
        )
    info = process_info()
    launcher = info.launcher if info is not None else "torch.distributed"
    findings: list[Any] = [None] * count
    dist.all_gather_object(findings, examine(device, launcher))
    return findings


# -- the verdict ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """True on success, with reason and recommendation."""

    well: bool
    sentence: str
    advice: tuple[str, ...] = ()


def judge(findings: Sequence[Findings]) -> Verdict:
    """Judge the results of all processes."""
    first = findings[0]
    n = len(findings)
    wrong: list[str] = []
    advice: list[str] = []
    for trial, complaints in _complaints(findings):
        if complaints:
            results = f"{len(complaints)} of {n * trial.cases} results"
            wrong.append(f"{trial.collective} wrong in {results}, {complaints[0]}")
    if wrong:
        link = "direct" if "direct" in first.transport else first.transport
        advice.append(_WORKAROUNDS[link])

    ranks = {process.machine.versions: process.rank for process in findings}  # one of each version
    if len(ranks) > 1:
        rows: list[str] = []
        for (python, torch_version, fshard_version), rank in ranks.items():
            versions = f"Python {python}, torch {torch_version}, fshard {fshard_version}"
            rows.append(f"process {rank} has {versions}")
        wrong.append(f"the processes run different versions ({', '.join(rows)})")
        advice.append("Install the same versions on all machines.")

    hints = _hints(findings)
    if wrong:
        return Verdict(False, f"Not well: {'; '.join(wrong)}.", (*advice, *hints))
    processes = f"{n} processes over {first.transport}" if n > 1 else "1 process"
    if first.device == "cuda":
        gpus: set[str] = set()
        for process in findings:
            gpus.update(process.machine.gpus)
        processes += f" on {', '.join(sorted(gpus))}"
    sentence = f"All well: {processes}, {len(first.trials)} collectives right."
    return Verdict(True, sentence, hints)


def failed(error: BaseException, processes: int) -> Verdict:
    """Judge an error that was raised instead of results."""
    kind = f"{type(error).__name__}: {error}".rstrip(".")
    sentence = f"Not well: {processes} processes did not get through. {kind}."
    advice = ("FSHARD_CHECK=1 shows the call of each process.", *getattr(error, "__notes__", []))
    return Verdict(False, sentence, advice)


def _complaints(findings: Sequence[Findings]) -> list[tuple[Trial, list[str]]]:
    """Return the first process's trial of each collective, and the complaints of all processes."""
    rows: list[tuple[Trial, list[str]]] = []
    for trials in zip(*[process.trials for process in findings], strict=True):
        complaints: list[str] = []
        for trial in trials:
            complaints += trial.complaints
        rows.append((trials[0], complaints))
    return rows


_WORKAROUNDS = {
    "direct": "Run it again with FSHARD_DIRECT=0, which sends everything through gloo: if all is "
    "right then, reading memory fails here, and FSHARD_DIRECT=0 is the workaround.",
    "nccl": "Run it again with --device cpu: if all is right then, it is NCCL; NCCL_P2P_DISABLE=1 "
    "avoids direct links.",
    "gloo": "Only torch's gloo is used between the processes: reinstall torch, or another version.",
}


def _hints(findings: Sequence[Findings]) -> tuple[str, ...]:
    """Return hints for better speed."""
    first = findings[0]
    hosts = {process.machine.host for process in findings}
    processes_per_host = len(findings) // len(hosts)
    hints: list[str] = []
    if first.transport == "gloo" and processes_per_host > 1:
        hints.append(
            "Processes of one machine use gloo, which is slower than reading memory: that needs "
            "Linux on x86-64, one user, one container that permits process_vm_readv, ptrace_scope "
            "0 or 1, and no FSHARD_DIRECT=0."
        )
    processors = first.machine.processors
    if first.device == "cpu" and processors < processes_per_host:
        hints.append(
            f"{processes_per_host} processes share {processors} processors of "
            f"{first.machine.host}: they wait."
        )
    left_over: dict[str, str] = {}  # of each host, once
    for process in findings:
        if process.machine.left_over:
            left_over.setdefault(process.machine.host, process.machine.left_over)
    hints += [f"{host}: {files}" for host, files in left_over.items()]
    return tuple(hints)


# -- the page -------------------------------------------------------------------------------------

Section = tuple[str, list[str]]
"""A title and lines."""


def _print(findings: Sequence[Findings], verdict: Verdict, as_json: bool) -> None:
    if as_json:
        processes = [asdict(process) for process in findings]
        text = json.dumps({**asdict(verdict), "processes": processes}, indent=2)
        sys.stdout.write(f"{text}\n")
        return

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    sections = _sections(findings) if findings else []
    sections.append(("Verdict", [verdict.sentence, *verdict.advice]))
    for title, lines in sections:
        console.print(Text(f"\n{title}", "bold"))
        for line in lines:
            style = ""
            if line == verdict.sentence:
                style = "bold green" if verdict.well else "bold red"
            console.print(Padding(Text(line, style), (0, 2), expand=False))


def _sections(findings: Sequence[Findings]) -> list[Section]:
    first = findings[0]
    hosts = {process.machine.host for process in findings}
    sections = [
        ("Machine", _machine_lines(first.machine, hosts)),
        ("Processes", _process_lines(first, len(findings), len(hosts))),
    ]
    if first.speeds:
        sections.append(("Speed", _speed_lines(first.speeds)))
    sections.append(("Collectives", _collective_lines(findings)))
    return sections


def _machine_lines(machine: Machine, hosts: set[str]) -> list[str]:
    host = f"{machine.host}, {machine.system}"
    others = sorted(hosts - {machine.host})
    if others:
        host += f"; also {', '.join(others)}"
    names = dict.fromkeys(machine.gpus)
    gpus = ", ".join([f"{machine.gpus.count(name)} × {name}" for name in names])
    versions = f"Python {machine.python}, torch {machine.torch}, fshard {machine.fshard}"
    processors = f"{machine.processors}, of which a process uses {machine.threads}"
    return [
        _labelled("versions", versions),
        _labelled("backends", ", ".join(machine.backends) or "none"),
        _labelled("host", host),
        _labelled("processors", processors),
        _labelled("memory", f"{machine.memory / GIB:.0f} GiB"),
        _labelled("GPUs", gpus or "none"),
    ]


def _process_lines(first: Findings, processes: int, hosts: int) -> list[str]:
    plural = "s" if hosts > 1 else ""
    return [
        _labelled("number", f"{processes}, on {hosts} machine{plural}"),
        _labelled("started by", first.by),
        _labelled("device", first.device),
        _labelled("transport", first.transport),
    ]


def _labelled(label: str, value: str) -> str:
    return f"{label:12}{value}"


def _collective_lines(findings: Sequence[Findings]) -> list[str]:
    lines: list[str] = []
    for trial, complaints in _complaints(findings):
        mark = "wrong" if complaints else "right"
        lines.append(f"{trial.collective:14}{mark}   {trial.cases} cases")
        lines += [f"    {complaint}" for complaint in complaints[:SHOWN]]
    return lines


def _speed_lines(speeds: Sequence[Speed]) -> list[str]:
    """Return one line per collective: the time for few bytes, for many the bytes in a second."""
    lines: dict[str, str] = {}
    for speed in speeds:
        if speed.held < KIB**2:
            held = f"{speed.held // KIB} KiB"
        else:
            held = f"{speed.held // KIB**2} MiB"
        if speed.held > KIB:
            rate = f"{speed.sent / speed.seconds / GIB:.2f} GiB/s"
        else:
            rate = f"{speed.seconds * 1e6:,.0f} µs"
        line = lines.get(speed.collective, f"{speed.collective:14}")
        lines[speed.collective] = f"{line}{held:>6} {rate:14}"
    return [line.rstrip() for line in lines.values()]
