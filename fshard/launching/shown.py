"""Show the output of other processes: in a terminal, and in the cell of a notebook, which file numbers do not reach.

Each process writes into pipes of its own.  Whoever waits for the processes reads them (`Shown.pump`) and passes on whole
lines through Python's `sys.stdout` and `sys.stderr` as they are at that time; so lines of several processes do not mix.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

STREAMS = ("stdout", "stderr")
_CHUNK = 1 << 16


class Shown:
    """One stream of one process."""

    def __init__(self, pipe: Connection, stream: str) -> None:
        self.pipe, self.stream, self._begun = pipe, stream, b""

    @property
    def open(self) -> bool:
        """Whether something may still come."""
        return not self.pipe.closed

    def pump(self) -> None:
        """Read what has come (there is something, or the end), and show what is whole: up to an end of line, or a return."""
        chunk = os.read(self.pipe.fileno(), _CHUNK)
        text = self._begun + chunk
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._begun = text[end:]
        self._show(text[:end])
        if not chunk:
            self.pipe.close()

    def drain(self) -> None:
        """Show what has come until now."""
        while self.open and self.pipe.poll():
            self.pump()

    def close(self) -> None:
        """Show the rest, even if its line is not whole."""
        self.drain()
        if self._begun:
            self._show(self._begun + b"\n")
            self._begun = b""
        if self.open:
            self.pipe.close()

    def _show(self, text: bytes) -> None:
        stream = getattr(sys, self.stream)
        if text and stream is not None:
            stream.write(text.decode("utf-8", errors="replace"))
            stream.flush()


def write_to(pipes: Sequence[Connection]) -> None:
    """Let all that this process writes, from Python or not, go into pipes."""
    for number, (pipe, stream) in enumerate(zip(pipes, STREAMS, strict=True), start=1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
        setattr(
            sys, stream, os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        )
