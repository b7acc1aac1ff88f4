"""A link: the processes of one group, as a backend sees them, and a message under way.

A *wire* is a generator: it starts its messages, yields what it waits for, and goes on when that is done; what it
returns is the collective's result.  So every composition is written straight down, and can be started now and
finished later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.errors import CollectiveTimeoutError, LostProcessError
from fshard.mesh.moves import Wired

LOST = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "Socket closed")
"""How a backend says that a peer is gone."""


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
    _tags: Iterator[int] = field(default_factory=lambda: cycle(range(2, 1 << 20)), compare=False)

    def tag(self) -> int:
        """Return a tag for the messages of one collective.

        Processes start their collectives in one order but may wait for them in another; the tag tells apart what the
        later rounds of two collectives under way send.
        """
        return next(self._tags)


class Running:
    """A wire that has been started.  Its buffers live in the generator, until it ends."""

    def __init__(self, wire: Wire, timeout: timedelta, what: Callable[[], str]) -> None:
        self._wire, self._timeout, self._what = wire, timeout, what
        self._works: list[Any] = []
        self._result: Tensor | None = None
        self.ended = False
        self._advance()

    def _advance(self) -> None:
        try:
            with told(self._timeout, self._what):
                self._works = next(self._wire)
        except StopIteration as stopped:
            self._result = stopped.value

    def wait(self) -> Tensor:
        """Run it to its end."""
        while self._result is None:
            for work in self._works:
                finish(work, self._timeout, self._what)
            self._advance()
        self.ended = True
        return self._result


def finish(work: Work, timeout: timedelta, what: Callable[[], str]) -> None:
    """Wait for one operation."""
    with told(timeout, what):
        work.wait(timeout)


@contextmanager
def told(timeout: timedelta, what: Callable[[], str]) -> Generator[None]:
    """Turn a time-out or a lost peer, in what the backend is asked to do, into an error that says what was done."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "imed out" in text or "imeout" in text:
            raise CollectiveTimeoutError(
                f"{what()} did not end within {timeout.total_seconds():g} s: another process of the group has not made "
                f"the same call. Run with FSHARD_CHECK=1 to see where each process is. ({text.splitlines()[0]})"
            ) from error
        if any(word in text for word in LOST):
            raise LostProcessError(
                f"{what()} cannot end: another process of the group has failed or ended. Its own error is the one to look "
                f"for. ({text.splitlines()[0]})"
            ) from error
        error.add_note(f"in {what()}")
        raise
