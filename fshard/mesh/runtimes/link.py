"""A link: the processes of one group, as a backend sees them, and a collective under way.

A *wire* is a generator: it starts its messages, yields what it waits for, and goes on when that is done; what it
returns is the collective's result.  So every composition is written straight down, and can be started now and
finished later.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from itertools import cycle
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.errors import CollectiveTimeoutError, LostProcessError
from fshard.mesh.moves import Wired, describe

if TYPE_CHECKING:
    from fshard.mesh.scope import Group
    from fshard.source import Site

LOST = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "Socket closed")
"""How a backend says that a peer is gone."""
FIRST_MESSAGE = 1 << 20
"""Where the tags of messages begin; those of collectives are smaller."""


class Work(Protocol):
    """What is handed out for an operation under way, by torch.distributed and by direct links."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block until it is done."""
        ...

    def is_completed(self) -> bool:
        """Return whether it is done."""
        ...


Wire = Generator[Sequence[Any], None, Tensor]


class What:
    """Which call it is: in words, made only when there is an error, and as a stamp.  Without a move it is a message."""

    __slots__ = ("_stamp", "group", "move", "site", "xs")

    def __init__(self, move: Wired | None, xs: tuple[Tensor, ...], group: Group, site: Site) -> None:
        self.move, self.xs, self.group, self.site = move, xs, group, site
        self._stamp: int | None = None

    def __str__(self) -> str:
        call = f"{describe(self.move) if self.move is not None else 'a message'} of {shapes_of(self.xs)}"
        return f"{call} over {'+'.join(self.group.axes)} (processes {list(self.group.members)}) at {self.site}"

    @property
    def stamp(self) -> int:
        """A number that differs where collectives, shapes or dtypes do."""
        if self._stamp is None:
            self._stamp = _stamp(self.move, self.xs[0].dtype, tuple([x.shape for x in self.xs]))
        return self._stamp


@lru_cache(maxsize=4096)
def _stamp(move: Wired | None, dtype: torch.dtype, shapes: tuple[torch.Size, ...]) -> int:
    return zlib.crc32(f"{move} {dtype} {shapes}".encode())


def shapes_of(xs: tuple[Tensor, ...]) -> str:
    """Return dtypes and shapes as text."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in xs)


class Link(Protocol):
    """The processes of one group."""

    def begin(self, move: Wired, x: Tensor, what: What) -> Wire:
        """Return the wire that carries a move on a buffer."""
        ...

    def send(self, x: Tensor, to: int, what: What) -> Work:
        """Start to send bytes to the process at place `to`."""
        ...

    def receive(self, into: Tensor, source: int, what: What) -> Work:
        """Start to receive what the process at place `source` sends next."""
        ...


@dataclass(frozen=True)
class GroupLink:
    """The processes of a group of torch.distributed: the caller is the one at `index` of `n`."""

    pg: ProcessGroup
    index: int
    n: int
    wires: Mapping[str, WireFunction]
    _tags: Iterator[int] = field(default_factory=lambda: cycle(range(2, FIRST_MESSAGE)), compare=False)

    def begin(self, move: Wired, x: Tensor, what: What) -> Wire:
        """Return the wire that carries a move on a buffer."""
        return self.wires[move.wire](self, x, move)

    def send(self, x: Tensor, to: int, what: What) -> Work:
        """Start to send bytes; messages between two processes arrive in order."""
        return self.pg.send([x], to, FIRST_MESSAGE)

    def receive(self, into: Tensor, source: int, what: What) -> Work:
        """Start to receive bytes."""
        return self.pg.recv([into], source, FIRST_MESSAGE)

    def tag(self) -> int:
        """Return a tag for the messages of one collective.

        Processes start their collectives in one order but may wait for them in another; the tag tells apart what the
        later rounds of two collectives under way send.
        """
        return next(self._tags)


WireFunction = Callable[[GroupLink, Tensor, Wired], Wire]


class Running:
    """A wire that has been started.  Its buffers live in the generator, until it ends.

    Whoever drops it unfinished leaves its peers reading and sending; so it is kept in `under_way` until it ends.
    """

    __slots__ = ("__weakref__", "_result", "_timeout", "_under_way", "_what", "_wire", "_works")

    def __init__(self, wire: Wire, timeout: timedelta, what: What, under_way: set[Running]) -> None:
        self._wire, self._timeout, self._what, self._under_way = wire, timeout, what, under_way
        self._works: Sequence[Work] = ()
        self._result: Tensor | None = None
        under_way.add(self)
        try:
            self._works = next(wire)
        except StopIteration as stopped:
            self._end(stopped.value)
        except RuntimeError as error:
            explain(error, timeout, what)

    def _end(self, result: Tensor) -> None:
        self._result = result
        self._under_way.discard(self)

    def wait(self) -> Tensor:
        """Run it to its end."""
        try:
            while self._result is None:
                for work in self._works:
                    work.wait(self._timeout)
                self._works = next(self._wire)
        except StopIteration as stopped:
            self._end(stopped.value)
        except RuntimeError as error:
            explain(error, self._timeout, self._what)
        assert self._result is not None
        return self._result


def explain(error: RuntimeError, timeout: timedelta, what: What) -> NoReturn:
    """Turn a time-out or a lost peer, in what a backend was asked to do, into an error that says what was done."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        raise CollectiveTimeoutError(
            f"{what} did not end within {timeout.total_seconds():g} s: another process of the group has not made "
            f"the same call. Run with FSHARD_CHECK=1 to see where each process is. ({text.splitlines()[0]})"
        ) from error
    if any(word in text for word in LOST):
        raise LostProcessError(
            f"{what} cannot end: another process of the group has failed or ended. Its own error is the one to look "
            f"for. ({text.splitlines()[0]})"
        ) from error
    error.add_note(f"in {what}")
    raise error
