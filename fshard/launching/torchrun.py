"""The command line of torchrun for `fshard run`, whose options are torchrun's and `--processes`.

fshard run train.py --rate 0.1                        a process for each GPU here, or two processes
fshard run --processes 4 -m package.module            a module
fshard run --processes 4 --max-restarts 3 train.py    an option of torchrun
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

_MEETING = ("--standalone", "--rdzv", "--master", "--nnodes", "--node-rank", "--node_rank")
"""Options of torchrun for the meeting point."""


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that starts the processes.

    >>> command(["--processes", "4", "train.py", "--processes", "of the file"])[3:]
    ['--standalone', '--nproc-per-node', '4', 'train.py', '--processes', 'of the file']
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "fshard run"
    parser.usage = "fshard run [options] [-m] FILE [arguments of FILE]"
    parser.description = "Start a file, or with -m a module, in several processes by torchrun."
    parser.add_argument(
        "--processes",
        metavar="N",
        help="number on this machine; default: one for each GPU, or 2 without",
    )
    parsed = parser.parse_args(arguments)

    # The file and its arguments are last; torchrun's parser knows how many arguments these are.
    file = len(arguments) - 1 - len(parsed.training_script_args)
    options = [word.replace("--processes", "--nproc-per-node") for word in arguments[:file]]
    if not any(word.startswith("--nproc") for word in options):
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        options = ["--nproc-per-node", str(gpus or 2), *options]
    if not any(word.startswith(_MEETING) for word in options):
        options = ["--standalone", *options]
    return [sys.executable, "-m", "torch.distributed.run", *options, *arguments[file:]]


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by torchrun."""
    words = command(arguments)
    sys.stdout.flush()
    os.execv(words[0], words)
