"""The command line of `fshard run`: torchrun's with `--processes`, or `--elastic` without torchrun.

fshard run train.py --rate 0.1                        a process for each GPU here, or two processes
fshard run --processes 4 -m package.module            a module
fshard run --processes 4 --max-restarts 3 train.py    an option of torchrun
fshard run --elastic --processes 4 train.py           processes that do not end with each other
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NoReturn

import torch

from fshard.errors import MeshError
from fshard.launching.program import run_program

_MEETING = ("--standalone", "--rdzv", "--master", "--nnodes", "--node-rank", "--node_rank")
"""Options of torchrun for the meeting point."""
_OF_ELASTIC = ("elastic", "processes", "module", "training_script", "training_script_args")
"""Everything that a command line with `--elastic` may have."""


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of torchrun that starts the processes.

    >>> command(["--processes", "4", "train.py", "--processes", "of the file"])[3:]
    ['--standalone', '--nproc-per-node', '4', 'train.py', '--processes', 'of the file']
    """
    parsed = _parser().parse_args(arguments)

    # The file and its arguments are last; torchrun's parser knows how many arguments these are.
    file = len(arguments) - 1 - len(parsed.training_script_args)
    options = [word.replace("--processes", "--nproc-per-node") for word in arguments[:file]]
    if not any(word.startswith("--nproc") for word in options):
        options = ["--nproc-per-node", str(_default_count()), *options]
    if not any(word.startswith(_MEETING) for word in options):
        options = ["--standalone", *options]
    return [sys.executable, "-m", "torch.distributed.run", *options, *arguments[file:]]


def elastic_command(arguments: Sequence[str]) -> tuple[list[str], int] | None:
    """Return the command line of each process, and their number; None without `--elastic`.

    >>> words, n = elastic_command(["--elastic", "--processes", "4", "-m", "a.b", "--elastic"])
    >>> words[1:], n
    (['-u', '-m', 'a.b', '--elastic'], 4)
    """
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if not parsed.elastic:
        return None
    _refuse_options_of_torchrun(parser, parsed)
    count = parsed.processes or str(_default_count())
    if not count.isdecimal() or int(count) < 1:
        raise MeshError(f"--processes must be an integer >= 1; got {count}.")

    # Unbuffered: what a process has written before it was killed is displayed.
    words = [sys.executable, "-u"]
    if parsed.module:
        words.append("-m")
    return [*words, parsed.training_script, *parsed.training_script_args], int(count)


def run(arguments: Sequence[str]) -> int:
    """Start the processes; return the exit code, or replace this process by torchrun."""
    elastic = elastic_command(arguments)
    if elastic is None:
        _become_torchrun(arguments)
    words, count = elastic
    return run_program(words, count)


def _become_torchrun(arguments: Sequence[str]) -> NoReturn:
    words = command(arguments)
    sys.stdout.flush()
    os.execv(words[0], words)


def _parser() -> ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "fshard run"
    parser.usage = "fshard run [options] [-m] FILE [arguments of FILE]"
    parser.description = (
        "Start a file, or with -m a module, in several processes by torchrun; or without it, by "
        "--elastic, which has no other options than --processes and -m."
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        help="number on this machine; default: one for each GPU, or 2 without",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="for programs in fs.elastic: let the others go on when a process dies. The exit code "
        "is 0 if one has ended with 0, and each of the others was killed by a signal or has failed "
        "before. A second command, with the same folder, starts more processes",
    )
    return parser


def _refuse_options_of_torchrun(parser: ArgumentParser, parsed: Namespace) -> None:
    others: list[str] = []
    for name, value in vars(parsed).items():
        if name not in _OF_ELASTIC and value != parser.get_default(name):
            others.append(f"--{name.replace('_', '-')}")
    if others:
        raise MeshError(
            "fshard run --elastic must have no options but --processes and -m; got "
            f"{', '.join(others)}. It starts processes on this machine, without torchrun."
        )


def _default_count() -> int:
    """Return the number of GPUs here, or 2 without."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus or 2
