"""The folder of a step that differed.

    audits/step-12/arguments    params, state, buffers and batch, by fs.save; the random state
    audits/step-12/audit.json   the number of the step, the program that makes it again, layouts
    audits/step-12/table.txt    the error

No code is in it, and no pickle: the step is made by the function that the user names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.restore import restore
from fshard.checkpoint.save import save
from fshard.errors import AuditError
from fshard.mesh.layout import PyTree

_ARGUMENTS = "arguments"
_FACTS = "audit.json"
_TABLE = "table.txt"


class AuditFacts(NamedTuple):
    """The plain values of a folder.

    Args:
        step: its number.
        program: FILE:FUNCTION or None.
        layout: of the step, in words.
        other_layout: the other one.
    """

    step: int
    program: str | None
    layout: str
    other_layout: str


def save_step(
    path: Path, facts: AuditFacts, table: str, arguments: Sequence[PyTree], random: Tensor
) -> None:
    """Save the arguments of a step that differed, and the table; all devices call it."""
    save(path / _ARGUMENTS, _tree_of(arguments, random))
    # Each process writes the same text.
    (path / _FACTS).write_text(json.dumps(facts._asdict()), encoding="utf-8")
    (path / _TABLE).write_text(f"{table}\n", encoding="utf-8")


def read_facts(path: Path) -> AuditFacts:
    """Return the plain values of a folder."""
    if not (path / _FACTS).is_file():
        raise AuditError(
            "replay: the folder must be one that fs.audit has written, such as audits/step-12; "
            f"got {path}, which has no {_FACTS}."
        )
    return AuditFacts(**json.loads((path / _FACTS).read_text(encoding="utf-8")))


def restored_arguments(path: Path, like: Sequence[PyTree]) -> tuple[list[PyTree], Tensor]:
    """Return the arguments of a folder, in place of others, and the random state."""
    tree = restore(path / _ARGUMENTS, _tree_of(like, torch.get_rng_state()))
    arguments = [tree[name] for name in _names(len(like))]
    return arguments, tree["random"]


def _tree_of(arguments: Sequence[PyTree], random: Tensor) -> dict[str, Any]:
    """Return the tree that is saved."""
    names = _names(len(arguments))
    return {**dict(zip(names, arguments, strict=True)), "random": random}


def _names(count: int) -> list[str]:
    """Return the names of the arguments of a step: buffers are there if it has four."""
    return ["params", "state", "buffers", "batch"] if count == 4 else ["params", "state", "batch"]
