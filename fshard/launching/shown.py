"""Display the output of other processes, in a terminal or in the cell of a notebook.

Output reaches a notebook's cell through Python's `sys.stdout` alone, not through file descriptors.
So each process writes to its own pipes. The thread that waits reads them (`Shown.pump`) and writes
complete lines to the present `sys.stdout` and `sys.stderr`: lines of several processes do not mix.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

STREAMS = ("stdout", "stderr")
_CHUNK = 1 << 16


class Shown:
    """One stream of one process.

    Args:
        pipe: the end to read.
        stream: "stdout" or "stderr" of this process, where it is displayed.
        prefix: what each line begins with.
    """

    def __init__(self, pipe: Connection, stream: str, prefix: str = "") -> None:
        self.pipe = pipe
        self.stream = stream
        self._prefix = prefix
        self._incomplete = b""  # the begin of a line

    @property
    def open(self) -> bool:
        """True until the end of the stream."""
        return not self.pipe.closed

    def pump(self) -> None:
        """Read available output, and display complete lines.

        A line ends with a newline or a carriage return, as progress bars write.
        """
        chunk = os.read(self.pipe.fileno(), _CHUNK)
        text = self._incomplete + chunk
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._incomplete = text[end:]
        self._show(text[:end])
        if not chunk:
            self.pipe.close()

    def drain(self) -> None:
        """Display the output so far."""
        while self.open and self.pipe.poll():
            self.pump()

    def close(self) -> None:
        """Display the rest, even if its line is incomplete."""
        self.drain()
        if self._incomplete:
            self._show(self._incomplete + b"\n")
            self._incomplete = b""
        if self.open:
            self.pipe.close()

    def _show(self, text: bytes) -> None:
        stream = getattr(sys, self.stream)
        if text and stream is not None:
            lines = text.splitlines(keepends=True)  # of bytes: only \n and \r end lines
            texts = [self._prefix + line.decode("utf-8", errors="replace") for line in lines]
            stream.write("".join(texts))
            stream.flush()
