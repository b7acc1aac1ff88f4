"""The folder of a step that differed, and its repetition: `fs.replay`, `fshard replay`.

    audits/step-12/arguments    params, state, buffers and batch, by fs.save; the random state
    audits/step-12/audit.json   the number of the step, and the program that makes it again
    audits/step-12/table.txt    the error

No code is in it, and no pickle: the step is made by the function that the user names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fshard.checkpoint.restore import restore
from fshard.checkpoint.save import save
from fshard.errors import AuditError
from fshard.mesh.layout import PyTree

if TYPE_CHECKING:
    from fshard.auditing.audit import AuditedStep, AuditOutcome

_ARGUMENTS = "arguments"
_FACTS = "audit.json"
_TABLE = "table.txt"


def _tree_of(arguments: Sequence[PyTree], random: Tensor) -> dict[str, PyTree]:
    """Return the tree that is saved: params, state, buffers if there are any, batch."""
    params, state, *buffers, batch = arguments
    tree = {"params": params, "state": state, "batch": batch, "random": random}
    if buffers:
        (tree["buffers"],) = buffers
    return tree


def save_step(
    path: Path,
    number: int,
    table: str,
    arguments: Sequence[PyTree],
    random: Tensor,
    program: str | None,
) -> None:
    """Save the arguments of a step that differed, and what was found; all devices call it."""
    save(path / _ARGUMENTS, _tree_of(arguments, random))
    # Each process writes the same text.
    facts = {"step": number, "program": program}
    (path / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
    (path / _TABLE).write_text(f"{table}\n", encoding="utf-8")


def replay(
    folder: str | os.PathLike[str],
    step: AuditedStep,
    params: PyTree,
    state: PyTree,
    *inputs: PyTree,
) -> AuditOutcome:
    """Repeat the step of a folder that an audit has written, in both layouts; return the outcome.

    The mesh may be another one, such as virtual devices in place of processes. What a fault did
    once is not there again: then the outcome is equal.

    Args:
        folder: such as "audits/step-12".
        step: made again, by `fs.audit`.
        params, state: arguments of the same shapes as those of the run, whose values are replaced.
        inputs: buffers, if there are any, and a batch, likewise.
    """
    path = Path(folder)
    facts = json.loads(_text_of(path / _FACTS))
    random = torch.get_rng_state()
    target = _tree_of([params, state, *inputs], torch.zeros_like(random))
    tree = restore(path / _ARGUMENTS, target)
    arguments = [tree["params"], tree["state"]]
    if "buffers" in tree:
        arguments.append(tree["buffers"])
    arguments.append(tree["batch"])

    torch.set_rng_state(tree["random"])
    try:
        _, outcome = step.check(arguments, facts["step"])
    finally:
        torch.set_rng_state(random)
    return outcome


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise AuditError(
            f"replay: the folder must be one that fs.audit has written, such as audits/step-12; "
            f"{path} is not there."
        )
    return path.read_text(encoding="utf-8")


def run(arguments: Sequence[str]) -> int:
    """Run the command `fshard replay`; return the exit status: 1 if the layouts differ again."""
    options = _parser().parse_args(arguments)
    facts = json.loads(_text_of(Path(options.folder) / _FACTS))
    program = options.program or facts["program"]
    if program is None:
        sys.stderr.write(
            "fshard replay: the program must be FILE:FUNCTION, a function that returns the step "
            "and its arguments; got none, and the folder names none.\n"
        )
        return 2
    step, *given = _function_of(program)()
    outcome = replay(options.folder, step, *given)
    sys.stdout.write(f"{outcome.text}\n")
    return 0 if outcome.is_equal else 1


def _function_of(program: str) -> Callable[[], Any]:
    """Return a function in a file."""
    path, _, name = program.rpartition(":")
    spec = spec_from_file_location("replayed_program", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise AuditError(f"replay: the program must be FILE:FUNCTION; {path} is no Python file.")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
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
