"""`fs.replay`, `fshard replay`: repeat the step of a folder that an audit has written."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from fshard.auditing.audit import AuditedStep, AuditOutcome
from fshard.auditing.folder import read_facts, restored_arguments
from fshard.auditing.runs import AuditTrial
from fshard.errors import AuditError
from fshard.mesh.layout import PyTree


def replay(
    folder: str | os.PathLike[str],
    step: AuditedStep,
    params: PyTree,
    state: PyTree,
    *inputs: PyTree,
) -> AuditOutcome:
    """Repeat the step of a folder that an audit has written, in both layouts; return the outcome.

    The devices may be others, such as virtual ones in place of processes, but the layout of the
    step is that of the run: axes of the mesh, stage of ZeRO, and options that are no defaults. The
    other layout may be a new one; then the table has both. What a fault did once is not there
    again: then the outcome is equal.

    Args:
        folder: such as "audits/step-12".
        step: made again, by `fs.audit`. Its loss function is not compared with that of the run.
        params, state: arguments of the same shapes as those of the run, whose values are replaced.
        inputs: buffers, if there are any, and a batch, likewise.
    """
    path = Path(folder)
    facts = read_facts(path)
    _validate(step, inputs)
    layout, other_layout = step.twin.recorded
    if layout != facts.layout:
        raise AuditError(
            "replay: the step must have the layout of the run; "
            f"recorded: {facts.layout}; replayed: {layout}. Make the step as the run made it."
        )
    before = torch.get_rng_state()
    arguments, random = restored_arguments(path, [params, state, *inputs])
    torch.set_rng_state(random)
    try:
        _, outcome = step.check(AuditTrial(step.twin, arguments), arguments, facts.step)
    finally:
        torch.set_rng_state(before)
    if other_layout == facts.other_layout:
        return outcome
    layouts = f"the other layout, recorded: {facts.other_layout}; replayed: {other_layout}"
    return outcome._replace(text=f"{outcome.text}\n  {layouts}")


def _validate(step: object, inputs: Sequence[PyTree]) -> None:
    """Raise unless a step is audited and gets as many arguments as it takes."""
    if not isinstance(step, AuditedStep):
        raise ValueError(
            f"replay: step must be a step of fs.audit; got {type(step).__name__}. The arguments "
            "are (folder, step, params, state, batch)."
        )
    has_buffers = step.step.options.has_buffers
    if len(inputs) != 1 + has_buffers:
        names = "params, state, buffers, batch" if has_buffers else "params, state, batch"
        raise ValueError(
            f"replay: the arguments must be (folder, step, {names}); got {4 + len(inputs)}, not "
            f"{5 + has_buffers}. Give those of the step, as at the start of the run."
        )


def run(arguments: Sequence[str]) -> int:
    """Run the command `fshard replay`; return the exit status: 1 if the layouts differ again."""
    options = _parser().parse_args(arguments)
    program = options.program or read_facts(Path(options.folder)).program
    if program is None:
        sys.stderr.write(
            "fshard replay: the program must be FILE:FUNCTION, a function that returns the step "
            "and its arguments; got none, and the folder names none.\n"
        )
        return 2
    try:
        outcome = _replayed(options.folder, program)
    except (Exception, SystemExit) as error:  # of the program: 1 is for layouts that differ
        text = " ".join(str(error).split())
        sys.stderr.write(f"fshard replay: {program} failed: {type(error).__name__}: {text}\n")
        return 2
    sys.stdout.write(f"{outcome.text}\n")
    return 0 if outcome.is_equal else 1


def _replayed(folder: str, program: str) -> AuditOutcome:
    """Make a step by a program, and repeat that of a folder."""
    made = _function_of(program)()
    if not isinstance(made, tuple | list) or len(made) < 3:
        raise AuditError(
            "replay: the function must return (step, params, state, batch), with buffers before "
            f"the batch if there are any; got {type(made).__name__}."
        )
    step, params, state, *inputs = made
    return replay(folder, step, params, state, *inputs)


def _function_of(program: str) -> Callable[[], Any]:
    """Return a function in a file."""
    path, _, name = program.rpartition(":")
    spec = spec_from_file_location("replayed_program", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise AuditError(f"replay: the program must be FILE:FUNCTION; {path} is no Python file.")
    module = module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as in `python FILE`
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise AuditError(
            f"replay: the program must be FILE:FUNCTION; {path} has no function {name}."
        )
    return getattr(module, name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard replay",
        description="Repeat a step whose layouts differed in an audit, on virtual devices, and "
        "print the table. Status 0: they are equal now; 1: they differ again; 2: an error.",
    )
    parser.add_argument("folder", help="such as audits/step-12")
    parser.add_argument(
        "program",
        nargs="?",
        metavar="FILE:FUNCTION",
        help="a function that returns (step, params, state, batch), or with buffers before the "
        "batch: the audited step, and arguments as at the start. Default: that of the folder",
    )
    return parser
