"""The parser of the arguments of commands: what is wrong is one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fshard.errors import FshardError


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that raises; it neither prints the usage nor ends the process.

    The command `fshard` prints the error as one line, and returns 2.
    """

    def error(self, message: str) -> NoReturn:
        """Raise, naming the argument."""
        raise FshardError(f"{self.prog}: {message}. See {self.prog} --help.")
