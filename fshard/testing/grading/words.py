"""Show values, errors and remarks in few words."""

from __future__ import annotations

import html
import re
import sysconfig
import traceback
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import Tensor

import fshard as fs

_LONGEST_VALUE = 120
_LONGEST_MESSAGE = 300

_CAUSES: dict[type[Exception], str] = {
    fs.errors.DeadlockError: "Some devices wait in a collective that others never call. All devices"
    " must call the same collectives in the same order: look for an `if` around one.",
    fs.errors.MismatchError: "The devices met in one collective with different calls: other shapes,"
    " or another collective. Look for what depends on `fs.axis_index`.",
    fs.errors.PromiseError: "The devices return different values where equal ones are promised."
    " A sum (`fs.psum`) or a mark (`fs.pvary`) is missing.",
    RecursionError: "The answer calls itself without an end.",
}


def shown(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, fs.Sharded):
        return str(fs.typeof(value))
    if isinstance(value, fs.Mesh):
        return f"a mesh of {dict(value.shape)}"
    if isinstance(value, Tensor) and value.numel() > 8:
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Tensor):
        return str(value.tolist())
    text = str(value) if isinstance(value, Fraction) else repr(value)
    if len(text) > _LONGEST_VALUE:
        return f"{text[: _LONGEST_VALUE - 3]}..."
    return text


def text_of_error(error: Exception) -> str:
    """Return the error of an answer in a sentence: its cause, its line, its case."""
    for kind, cause in _CAUSES.items():
        if isinstance(error, kind):
            return cause

    message = str(error).partition("\n")[0][:_LONGEST_MESSAGE].rstrip(".")
    text = f"The answer raises {type(error).__name__}: {message}."
    line = _line_of(error)
    if line:
        text += f" The line is `{line}`."
    cases = [note for note in vars(error).get("__notes__", []) if note.startswith("for ")]
    if cases:
        text += f" It is called {cases[0]}."
    return text


def _line_of(error: Exception) -> str:
    """Return the last line of the learner's own code in a traceback."""
    packages = (str(Path(fs.__file__).parent), *sysconfig.get_paths().values())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if not frame.filename.startswith(packages)]
    if not lines:
        return ""
    return lines[-1] or ""


def marked(text: str) -> str:
    """Return text as HTML, with code in backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def box(colour: str, content: str) -> str:
    """Return HTML in a box with a coloured edge."""
    style = f"border-left:4px solid {colour};padding:4px 10px;max-width:44em;line-height:1.5"
    return f'<div style="{style}">{content}</div>'
