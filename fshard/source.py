"""The user's source line of a collective.

Errors and ledgers name a line of the user's program, so frames of fshard, torch and the standard
library's plumbing are skipped.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import optree
import torch

Argument = TypeVar("Argument")
Result = TypeVar("Result")
_FSHARD = str(Path(__file__).parent)

_PLUMBING = (
    _FSHARD,
    str(Path(str(torch.__file__)).parent),
    str(Path(str(optree.__file__)).parent),
    str(contextlib.__file__),
    str(functools.__file__),  # a cached property of fshard's runs a step
    str(threading.__file__),
    str(Path(concurrent.futures.__file__).parent),
    "<frozen",  # Python's own modules, such as those that import
)
"""Beginnings of the paths of files that are not the user's."""

_MODEL = str(Path(__file__).parent / "plan" / "models.py")
"""The model of `fs.plan`: its lines are those of layers, as a user's would be."""


class Site(NamedTuple):
    """A line of source: file, number, function; and the leaves of a tree that it concerns.

    >>> print(Site("train.py", 7, "main", ('["w"]', '["b"]')).given)
     (leaves ["w"], ["b"])
    """

    file: str
    line: int
    function: str
    leaves: tuple[str, ...] = ()

    @property
    def given(self) -> str:
        """The leaves in words; none for a single tensor."""
        return f" (leaves {', '.join(self.leaves)})" if self.leaves else ""

    @property
    def is_of_program(self) -> bool:
        """True if the file is neither of fshard nor of torch."""
        return not _is_plumbing(self.file)

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} in {self.function}"


def site_of(frame: FrameType | None, default: Site | None = None) -> Site:
    """Return the first line from `frame` outwards that is the user's.

    If there is none it is the default, or the line that the thread runs for, or the frame's own.
    """
    user_frame = frame
    while user_frame is not None and _is_plumbing(user_frame.f_code.co_filename):
        user_frame = user_frame.f_back

    if user_frame is None:
        site = default or _line_of_thread(frame)
        if site is not None:
            return site
        if frame is None:
            return Site("<unknown>", 0, "<unknown>")
        user_frame = frame
    code = user_frame.f_code
    return Site(code.co_filename, user_frame.f_lineno, code.co_name)


def run_for_line(site: Site, function: Callable[[Argument], Result], argument: Argument) -> Result:
    """Call a function for a line of the user's program, where no frame of the thread is that line.

    `site_of` finds this frame, and its `site`.
    """
    return function(argument)


def _line_of_thread(frame: FrameType | None) -> Site | None:
    """Return the line that the innermost `run_for_line` was given."""
    while frame is not None and frame.f_code is not run_for_line.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["site"]


@functools.cache  # each collective looks at all frames up to the user's
def _is_plumbing(file: str) -> bool:
    return file.startswith(_PLUMBING) and file != _MODEL


def call_site(default: Site | None = None) -> Site:
    """Return the user's line that is being executed in this thread."""
    return site_of(sys._getframe(1), default)  # pyright: ignore[reportPrivateUsage]


def _name_of_cell(file: str) -> str | None:
    """Return the name of a notebook's cell by its file, `In[3]`. IPython is never imported."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    compiler = getattr(shell, "compile", None)
    name_of = getattr(compiler, "format_code_name", None)
    if name_of is None:
        return None
    kind_and_name = name_of(file)  # ("Cell", "In[3]")
    return None if kind_and_name is None else kind_and_name[1]


def _short(file: str) -> str:
    """Shorten the path of a file.

    Return the name of a notebook's cell, or the path relative to the working directory if the file
    is below, else the last two components.
    """
    cell = _name_of_cell(file)
    if cell is not None:
        return cell
    path = Path(file)
    if not path.is_absolute():
        return file
    folder = Path.cwd()
    if path.is_relative_to(folder):
        return str(path.relative_to(folder))
    return "/".join(path.parts[-2:])


def locate(
    error: BaseException, paths: Mapping[int, str], stop: CodeType | None = None
) -> tuple[str, str]:
    """Return the path of the innermost module whose code raised or called `stop`, and the line.

    `paths`: by the ids of modules. The line is the innermost one of the user's code; if there is
    none, that of a module of torch.
    """
    path_of_module = ""
    line_of_user = ""
    line_of_torch = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code is stop:
            break
        file = frame.f_code.co_filename
        line = f"{Path(file).name}:{number}"
        is_ours = file.startswith(_FSHARD)
        module = None if is_ours else paths.get(id(frame.f_locals.get("self")))
        if module is not None:
            path_of_module = module
        if not _is_plumbing(file):
            line_of_user = line
        elif module is not None:
            line_of_torch = line
    return path_of_module, line_of_user or line_of_torch
