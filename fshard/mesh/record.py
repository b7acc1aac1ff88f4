"""A text that is recorded once, in a file: of several processes' texts the first one counts."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


class FileRecord:
    """A text in a file, which can be decided once.

    It is written beside its place and linked there, which succeeds once: no process reads half of
    it. The folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def decide(self, text: str) -> str:
        """Record a text, unless there is one; return the one that counts."""
        draft = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        draft.write_text(text)
        with suppress(FileExistsError):
            os.link(draft, self._path)
        draft.unlink()
        return self.current()

    def current(self) -> str:
        """Return the text, or "" before it."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
