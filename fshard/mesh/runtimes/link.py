"""A link: the processes of one group, as a backend sees them, and a message under way.

A *wire* is a generator: it starts its messages, yields what it waits for, and goes on when that is done; what it
returns is the collective's result.  So every composition is written straight down, and can be started now and
finished later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.errors import CollectiveTimeoutError
from fshard.mesh.moves import Wired


class Work(Protocol):
    """What torch.distributed hands out for an operation under way."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block until it is done."""
        ...


Wire = Generator[list[Any], None, Tensor]
WireFunction = Callable[["Link", Tensor, Wired], Wire]


@dataclass(frozen=True)
class Link:
    """The processes of one group: the caller is the one at `index` of `n`."""

    pg: ProcessGroup
    index: int
    n: int
    timeout: timedelta


class Running:
    """A wire that has been started.  Its buffers live in the generator, until it ends."""

    def __init__(self, wire: Wire, timeout: timedelta, what: Callable[[], str]) -> None:
        self._wire, self._timeout, self._what = wire, timeout, what
        self._works: list[Any] = []
        self._result: Tensor | None = None
        self._advance()

    def _advance(self) -> None:
        try:
            self._works = next(self._wire)
        except StopIteration as stopped:
            self._result = stopped.value

    def wait(self) -> Tensor:
        """Run it to its end."""
        while self._result is None:
            for work in self._works:
                finish(work, self._timeout, self._what)
            self._advance()
        return self._result


def finish(work: Work, timeout: timedelta, what: Callable[[], str]) -> None:
    """Wait for one operation; a time-out or a lost peer is an error that says what was waited for."""
    try:
        work.wait(timeout)
    except RuntimeError as error:
        text = str(error)
        if "imed out" in text or "imeout" in text:
            raise CollectiveTimeoutError(
                f"{what()} did not end within {timeout.total_seconds():g} s: another process of the group has not made "
                f"the same call. Run with FSHARD_CHECK=1 to see where each process is. ({text.splitlines()[0]})"
            ) from error
        error.add_note(f"while waiting for {what()}")
        raise
