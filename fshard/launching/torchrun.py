"""The command line of torchrun for that of `fshard run`: five options; all others are torchrun's.

fshard run train.py --rate 0.1                        a process for each GPU here, or two processes
fshard run --nodes 2 --node-index 0 --address gpu1:29500 train.py      the first of two machines
fshard run --processes 4 -m package.module            a module
fshard run --processes 4 --max-restarts 3 train.py    an option of torchrun
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import NoReturn

import torch

from fshard.errors import MeshError

_THEIRS = ("--standalone", "--rdzv", "--master", "--nnodes", "--node-rank", "--node_rank")
"""Options of torchrun for the meeting point."""


def _with_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the five options to a parser."""
    parser.add_argument(
        "--processes", metavar="N", help="number on this machine; default: one for each GPU, or 2 without"
    )
    parser.add_argument("--nodes", metavar="N", type=int, default=1, help="number of machines; run the command on each")
    parser.add_argument("--node-index", metavar="I", type=int, help="which machine this is, from 0")
    parser.add_argument("--address", metavar="HOST:PORT", help="where all machines meet, on machine 0")
    parser.add_argument("--dry-run", action="store_true", help="print torchrun's command line, and do nothing")
    return parser


def _parser() -> argparse.ArgumentParser:
    return _with_options(
        argparse.ArgumentParser(
            prog="fshard run",
            usage="fshard run [options] [-m] FILE [arguments of FILE]",
            description="Start a file, or with -m a module, in several processes.",
            epilog="All options of torchrun may be added, such as --max-restarts 3: see torchrun --help.",
            allow_abbrev=False,
        )
    )


def command(arguments: Sequence[str], *, look: bool = False) -> tuple[list[str], bool]:
    """Return the command line that starts the processes, and True if it is only to be printed.

    `look`: raise if the file or module does not exist.

    >>> words, dry = command(["--processes", "4", "train.py", "--processes", "theirs"])
    >>> words[1:], dry
    (['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '4', 'train.py', '--processes', 'theirs'], False)
    """
    before, target, known = _divided(list(arguments))
    own, theirs = _parser().parse_known_args(before)
    count: list[str] = []
    if not _has(theirs, ("--nproc",)):
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        count = ["--nproc-per-node", own.processes or str(gpus or 2)]
        if not (count[1].isdecimal() and int(count[1]) > 0):
            raise MeshError(f"fshard run cannot start: --processes must be an integer >= 1; got {count[1]}.")
    meeting = _meeting_point(own, theirs)
    if look and not own.dry_run:
        _validate_exists(known)
    return [sys.executable, "-m", "torch.distributed.run", *meeting, *count, *theirs, *target], own.dry_run


def _divided(arguments: list[str]) -> tuple[list[str], list[str], argparse.Namespace]:
    """Split the arguments before the file or module to run, by torchrun's own parser; return the parsed options too."""
    from torch.distributed.run import get_args_parser

    both = _with_options(get_args_parser())
    both.format_help, both.format_usage = _parser().format_help, _parser().format_usage
    both.prog = "fshard run"
    known = both.parse_args(arguments)
    count = 1 + len(known.training_script_args)
    return arguments[: len(arguments) - count], arguments[len(arguments) - count :], known


def _validate_exists(known: argparse.Namespace) -> None:
    """Raise if the file, or the package of the module, that torchrun would start does not exist."""
    name = known.training_script.partition(".")[0] if known.module else known.training_script
    exists = PathFinder.find_spec(name, ["", *sys.path]) if known.module else os.path.exists(name)
    if not exists and not known.no_python:  # which starts any program
        raise MeshError(f"fshard run cannot start: there is no {'module' if known.module else 'file'} {name}.")


def _has(words: Sequence[str], starts: tuple[str, ...]) -> bool:
    return any(word.startswith(starts) for word in words)


def _meeting_point(own: argparse.Namespace, theirs: Sequence[str]) -> list[str]:
    """Return torchrun's options for the number of this machine and the meeting point."""
    if own.nodes == 1 and own.address is None and own.node_index is None:
        return [] if _has(theirs, _THEIRS) else ["--standalone"]
    host, _, port = (own.address or "").rpartition(":")
    if own.node_index is None or not 0 <= own.node_index < own.nodes:
        raise MeshError(
            f"fshard run cannot start: --node-index must be an integer from 0 to {own.nodes - 1}; got {own.node_index}."
        )
    if not (host and port.isdecimal()):
        raise MeshError(f"fshard run cannot start: --address must be HOST:PORT on machine 0; got {own.address}.")
    if _has(theirs, _THEIRS):
        raise MeshError(
            "fshard run cannot start: --nodes, --node-index and --address set the meeting point, as torchrun's options do."
        )
    where = ["--nnodes", str(own.nodes), "--node-rank", str(own.node_index)]
    return [*where, "--master-addr", host.strip("[]"), "--master-port", port]


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by torchrun."""
    words, dry = command(arguments, look=True)
    if dry:
        sys.stdout.write(shlex.join(words) + "\n")
        raise SystemExit(0)
    sys.stdout.flush()
    os.execv(words[0], words)
