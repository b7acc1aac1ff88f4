"""The command `fshard doctor`: start processes, or be one of those that were started; look, judge and say so."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import fshard as fs
from fshard.doctor.examine import Findings, examine
from fshard.doctor.page import show
from fshard.doctor.verdict import Verdict, failed, judge
from fshard.errors import MeshError
from fshard.mesh.runtimes.together import launched, place

LIMIT = 600.0
"""Seconds that processes started here may take."""


def visit(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
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
    _say(findings, verdict, known.json)
    return 0 if verdict.well else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard doctor",
        description="Say what is here, how fast processes talk, and whether every collective is right. Under torchrun, srun or "
        "mpirun (python -m fshard doctor) it looks at those processes.",
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
    here, count = place(), fs.process_count()
    if processes not in (None, count):
        raise MeshError(f"--processes {processes} cannot be: {count} processes were started. Leave it out.")
    found: list[Any] = [None] * count
    try:
        findings = examine(device, here.by if here is not None else "torch.distributed")
        dist.all_gather_object(found, findings)
        verdict = judge(found)
    except Exception as error:
        found, verdict = [], failed(error, count)
    if fs.process_index() == 0:
        _say(found, verdict, as_json)
    elif not found:  # process 0 may be past speaking
        sys.stderr.write(f"process {fs.process_index()}: {verdict.sentence}\n")
    return 0 if verdict.well else 1


def _say(findings: Sequence[Findings], verdict: Verdict, as_json: bool) -> None:
    if as_json:
        told = {**asdict(verdict), "processes": [asdict(one) for one in findings]}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        show(findings, verdict)
