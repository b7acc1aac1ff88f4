"""The command `fshard`, which is also `python -m fshard`.

Each word of `COMMANDS` has a function, which gets the arguments behind the word. Its module is
imported when it is called: to import all of them takes as long as to import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from fshard.errors import FshardError

USAGE = """usage: fshard run [options] [-m] FILE ...
       fshard doctor [--processes N] [--device cpu|cuda] [--json]
       fshard certify FILE:NAME --mesh data=4 [--mesh data=2,model=2] [--steps N] [--json OUT]
       fshard certify --run FILE --mesh data=4 [--steps N] [--alone ARGUMENTS] [-- ARGUMENTS]
       fshard plan CONFIG --devices N[,N] --gpu NAME --global-batch N [--sequence N]
                   [--tokens 15T] [--price P] [--tensor N[,N] ...] [--why LAYOUT] [-o FILE]
       fshard explore PLAN [PLAN] [-o PAGE]
       fshard lab [CONFIG] [--devices N] [--gpu NAME] [--port N] [--no-browser]
       fshard calibrate [--processes N] [-o FILE]
       fshard checkpoint inspect PATH
       fshard checkpoint verify [--trust] PATH
       fshard checkpoint convert --to hf|dcp|torch|safetensors [--only NAME] [--rename OLD=NEW]
                   [--trust] PATH OUT
       fshard replay FOLDER [FILE:FUNCTION]
       fshard --version

run      start a file in several processes: fshard run train.py (options: fshard run --help);
         with --elastic the others go on when one dies
doctor   show versions, devices and the speed between processes, and check every collective
certify  compare a program of torch.distributed in processes with one process, gradient by gradient;
         with --run a script as torchrun runs it, without an edit
plan     rank meshes and options of training a model of Hugging Face, by its config.json
explore  write a plan of fshard plan -o as one HTML file, or two with what differs, or the
         collectives that a program of torch.distributed has called (.json)
lab      serve a page on which a mesh and layouts are changed, and a step's costs are seen at once
calibrate    measure this machine, and write its numbers into a file, for fs.plan
checkpoint   show what a checkpoint has, compare it with its digests, write it in another format
replay   repeat a step whose layouts differed in an audit, on virtual devices
"""


COMMANDS = {
    "run": "fshard.launching.torchrun.run",
    "doctor": "fshard.doctor.visit.visit",
    "certify": "fshard.testing.certify_command.run",
    "plan": "fshard.plan.command.run_plan",
    "explore": "fshard.explore.command.run",
    "lab": "fshard.laboratory.command.run",
    "calibrate": "fshard.plan.command.run_calibrate",
    "checkpoint": "fshard.checkpoint.command.run",
    "replay": "fshard.auditing.replay.run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
    match [*arguments]:
        case [name, *rest] if name in COMMANDS:
            module, _, function = COMMANDS[name].rpartition(".")
            command = getattr(import_module(module), function)
            try:
                return command(rest)
            except (FshardError, OSError) as error:  # such as a folder that is not there
                sys.stderr.write(f"{error}\n")
                return 2
        case ["--version"]:
            sys.stdout.write(f"fshard {version('fshard')}\n")
            return 0
        case ["-h" | "--help"]:
            sys.stdout.write(USAGE)
            return 0
        case _:
            sys.stderr.write(USAGE)
            return 2
