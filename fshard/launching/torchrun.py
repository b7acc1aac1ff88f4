"""The command line of torchrun for that of `fshard run`: a few shorter options, all others are torchrun's.

fshard run --processes 4 train.py --rate 0.1          four processes here
fshard run --nodes 2 --node-index 0 --address gpu1:29500 --processes 8 train.py      the first of two machines
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
_COUNTS = ("auto", "cpu", "gpu", "xpu")
"""Values that torchrun accepts as a number of processes."""


def _own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the own options to a parser."""
    own = parser.add_argument_group("fshard")
    own.add_argument("--processes", help="how many on this machine; by default one for each GPU")
    own.add_argument("--nodes", type=int, default=1, help="how many machines; the command is given on each")
    own.add_argument("--node-index", type=int, help="which of them this is, from 0")
    own.add_argument("--address", help="HOST:PORT where all meet, on machine 0")
    own.add_argument("--dry-run", action="store_true", help="print torchrun's command line, and do nothing")
    return parser


def command(arguments: Sequence[str], *, look: bool = False) -> tuple[list[str], bool]:
    """Return the command line that starts the processes, and True if it is only to be printed.

    `look`: raise if the file or module does not exist.

    >>> words, dry = command(["--processes", "4", "train.py", "--processes", "theirs"])
    >>> words[1:], dry
    (['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '4', 'train.py', '--processes', 'theirs'], False)
    """
    before, target, known = _divided(list(arguments))
    own, theirs = _own(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args(before)
    wrong: list[str] = []
    processes = own.processes or (str(torch.cuda.device_count()) if torch.cuda.is_available() else None)
    if processes is None and not _has(theirs, ("--nproc",)):
        wrong.append("--processes is missing (its default is the number of GPUs, and there are none)")
    if own.processes is not None and own.processes not in _COUNTS and not _is_count(own.processes):
        some = f"{', '.join(_COUNTS[:-1])} or {_COUNTS[-1]}"
        wrong.append(f"--processes {own.processes} is neither an integer from 1 on nor {some}")
    meeting = _meeting(own, theirs, wrong)
    if look and not own.dry_run and (missing := _missing(known)):
        wrong.append(missing)
    if wrong:
        raise MeshError(f"fshard run cannot start: {'; '.join(wrong)}.")
    count = ["--nproc-per-node", processes] if processes is not None and not _has(theirs, ("--nproc",)) else []
    return [sys.executable, "-m", "torch.distributed.run", *meeting, *count, *theirs, *target], own.dry_run


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def _missing(known: argparse.Namespace) -> str | None:
    """Return an error if the file, or the package of the module, that torchrun would start does not exist."""
    name = known.training_script
    if known.no_python:  # any program
        return None
    if not known.module:
        return None if os.path.exists(name) else f"there is no file {name}"
    package = name.partition(".")[0]
    return None if PathFinder.find_spec(package, ["", *sys.path]) else f"there is no module {package}"


def _divided(arguments: list[str]) -> tuple[list[str], list[str], argparse.Namespace]:
    """Split the arguments before the file or module to run, by torchrun's own parser.

    Returns the parsed options too.
    """
    from torch.distributed.run import get_args_parser

    both = _own(get_args_parser())
    both.prog, both.description = "fshard run", "Start a file in several processes, by torchrun."
    known = both.parse_args(arguments)
    count = 1 + len(known.training_script_args)
    return arguments[: len(arguments) - count], arguments[len(arguments) - count :], known


def _has(words: Sequence[str], starts: tuple[str, ...]) -> bool:
    return any(word.startswith(starts) for word in words)


def _meeting(own: argparse.Namespace, theirs: Sequence[str], wrong: list[str]) -> list[str]:
    """Return torchrun's options for the number of this machine and the meeting point."""
    if own.nodes == 1 and own.address is None and own.node_index is None:
        return [] if _has(theirs, _THEIRS) else ["--standalone"]
    host, colon, port = (own.address or "").rpartition(":")
    if own.nodes < 1:
        wrong.append(f"--nodes {own.nodes} is no number of machines")
    if own.node_index is None:
        wrong.append("--node-index is missing (which of the machines this is)")
    elif not 0 <= own.node_index < own.nodes:
        wrong.append(f"--node-index {own.node_index} is none of 0 to {own.nodes - 1}")
    if own.address is None:
        wrong.append("--address is missing (HOST:PORT where all meet, on machine 0)")
    elif not (host and colon and port.isdecimal()):
        wrong.append(f"--address {own.address} is not HOST:PORT")
    if _has(theirs, _THEIRS):
        wrong.append("--nodes, --node-index and --address set the meeting point, and so do options of torchrun")
    where = ["--nnodes", str(own.nodes), "--node-rank", str(own.node_index)]
    return [*where, "--master-addr", host.strip("[]"), "--master-port", port]


def run(arguments: Sequence[str]) -> NoReturn:
    """Become torchrun."""
    words, dry = command(arguments, look=True)
    if dry:
        sys.stdout.write(shlex.join(words) + "\n")
        raise SystemExit(0)
    sys.stdout.flush()
    os.execv(words[0], words)
