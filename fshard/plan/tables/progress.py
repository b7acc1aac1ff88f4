"""`ProgressLine`: what a command does, while it takes its time."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

PATIENCE = 5.0
"""Seconds between two lines in a file."""

ERASED = "\r\x1b[K"
"""Returns to the begin of a terminal's line, and erases it: of ANSI."""


class ProgressLine:
    """A line on stderr: on a terminal it is written over, in a file there is one in five seconds.

    >>> with ProgressLine() as progress:
    ...     progress("tried 1 layout")
    """

    def __enter__(self) -> ProgressLine:
        self._is_terminal = sys.stderr.isatty()
        self._last = monotonic()
        return self

    def __call__(self, text: str) -> None:
        """Write what is done now."""
        if self._is_terminal:
            sys.stderr.write(f"{ERASED}{text} ...")
            sys.stderr.flush()
        elif monotonic() - self._last >= PATIENCE:
            sys.stderr.write(f"{text} ...\n")
            self._last = monotonic()

    def __exit__(self, *error: Any) -> None:
        if self._is_terminal:
            sys.stderr.write(ERASED)
            sys.stderr.flush()
