"""A link: the processes of one group, as a backend sees them.

A *wire* is a generator: it starts its messages, yields what it waits for, and goes on when that is done; what it
returns is the collective's result.  So every composition is written straight down, and can be started now and
finished later: see `running`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.mesh.collectives.moves import PURPOSES, Purpose, Wired, describe, named, purpose
from fshard.mesh.runtimes.helper import Departing, Helper, Work

if TYPE_CHECKING:
    from fshard.mesh.spmd.scope import Group
    from fshard.source import Site

_STAMP = (1 << 20) - 1
"""The part of a tag that tells calls apart that differ; above it stands the number of the call."""
MESSAGE_TAG = 1 << 30
"""The tag of messages, to which number and stamp are added; those of collectives are smaller."""


class Departed(NamedTuple):
    """A message that is on its way, and the memory that it is read from."""

    work: Work
    memory: Tensor


class Coming(NamedTuple):
    """A message that is awaited: what to wait for, in its link's own terms, and what then returns it."""

    needs: Sequence[Any]
    take: Callable[[], Tensor]


Wire = Generator[Sequence[Any], None, Tensor]
"""Yields what it waits for, in its link's own terms."""


class What:
    """Which call it is: in words, made only when there is an error, and as a stamp.  Without a move it is a message."""

    __slots__ = ("_stamp", "group", "move", "purpose", "site", "xs")

    def __init__(self, move: Wired | None, xs: tuple[Tensor, ...], group: Group, site: Site) -> None:
        self.move, self.xs, self.group, self.site = move, xs, group, site
        self.purpose: Purpose = purpose()
        self._stamp: int | None = None

    def __str__(self) -> str:
        name = named(describe(self.move) if self.move is not None else "a message", self.purpose)
        call = f"{name} of {shapes_of(self.xs)}{self.site.given}"
        return f"{call} over {'+'.join(self.group.axes)} (processes {list(self.group.members)}) at {self.site}"

    @property
    def stamp(self) -> int:
        """A number that differs where collectives, shapes, dtypes or leaves do; its last two bits say what the call is for."""
        if self._stamp is None:
            own = _stamp(self.move, self.xs[0].dtype, tuple([x.shape for x in self.xs]), self.site.leaves)
            self._stamp = own & ~3 | PURPOSES.index(self.purpose)
        return self._stamp


class Stamped(Protocol):
    """Which call it is, as a stamp and in words."""

    @property
    def stamp(self) -> int: ...
    def __str__(self) -> str: ...


@lru_cache(maxsize=4096)
def _stamp(move: Wired | None, dtype: torch.dtype, shapes: tuple[torch.Size, ...], leaves: tuple[str, ...]) -> int:
    return zlib.crc32(f"{move} {dtype} {shapes} {leaves}".encode())


def shapes_of(xs: tuple[Tensor, ...]) -> str:
    """Return dtypes and shapes as text."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in xs)


def packed(xs: tuple[Tensor, ...]) -> Tensor:
    """Copy tensors of one dtype into one row of bytes."""
    return torch.cat([x.detach().reshape(-1) for x in xs]).view(torch.uint8)


class Link(Protocol):
    """The processes of one group."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock to hold while a wire takes a step."""
        ...

    def begin(self, move: Wired, x: Tensor, what: What) -> Wire:
        """Return the wire that carries a move on a buffer."""
        ...

    def wait(self, needs: Sequence[Any], timeout: timedelta, go_on: Callable[[], bool]) -> None:
        """Wait for what a wire has yielded; `go_on` lets other wires take a step, and says whether one could."""
        ...

    def ready(self, needs: Sequence[Any]) -> bool:
        """Return whether what a wire has yielded is there, if that can be told without waiting."""
        ...

    def helper(self, what: What) -> Helper | None:
        """Return who carries a collective on that is under way, if it does not by itself while others are waited for."""
        ...

    def broken(self, error: BaseException) -> None:
        """Learn that a wire has ended by an error."""
        ...

    def send(self, xs: tuple[Tensor, ...], to: int, what: What) -> Departed | None:
        """Start to send tensors, which may change at once, to the process at place `to`; return what has to be kept."""
        ...

    def receive(self, make: Callable[[], Tensor], source: int, what: What) -> Coming:
        """Begin to receive what the process at place `source` sends next, into a buffer that is made for it."""
        ...


@dataclass(frozen=True)
class GroupLink:
    """The processes of a group of torch.distributed: the caller is the one at `index` of `n`.

    `departing` are messages under way, where the backend does not tell when one has left.
    """

    pg: ProcessGroup
    index: int
    n: int
    wires: Mapping[str, WireFunction]
    departing: Departing | None = field(default=None, compare=False)
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext, compare=False)
    _helper: Helper = field(default_factory=Helper, compare=False)
    _numbers: Iterator[int] = field(default_factory=lambda: cycle(range(1, MESSAGE_TAG // (_STAMP + 1))), compare=False)
    _messages: dict[tuple[int, bool], Iterator[int]] = field(
        default_factory=dict[tuple[int, bool], Iterator[int]], compare=False
    )

    def begin(self, move: Wired, x: Tensor, what: What) -> Wire:
        """Return the wire that carries a move on a buffer."""
        return self.wires[move.wire](
            GroupCall(self.pg, self.index, self.n, what.stamp & _STAMP, self._numbers), x, move
        )

    def wait(self, needs: Sequence[Work], timeout: timedelta, go_on: Callable[[], bool]) -> None:
        """Wait for operations; the backend's own threads let others go on."""
        for work in needs:
            work.wait(timeout)

    def ready(self, needs: Sequence[Work]) -> bool:
        """Return False: a work knows only once it is waited for."""
        return False

    def helper(self, what: What) -> Helper | None:
        """Return the link's helper for what has several rounds."""
        return self._helper if what.move is not None and what.move.wire in ("reduce", "broadcast") else None

    def broken(self, error: BaseException) -> None:
        """Do nothing: the backend breaks its group itself."""

    def send(self, xs: tuple[Tensor, ...], to: int, what: What) -> Departed:
        """Start to send bytes; each message between two processes has a number, and what it is, in its tag."""
        buffer = packed(xs)
        work: Any = self.pg.send([buffer], to, self._tag(to, what, sent=True))
        return Departed(work if self.departing is None else self.departing.add(work), buffer)

    def receive(self, make: Callable[[], Tensor], source: int, what: What) -> Coming:
        """Begin to receive the next message."""
        into = make()
        return Coming(
            [self.pg.recv([into.view(torch.uint8)], source, self._tag(source, what, sent=False))], lambda: into
        )

    def _tag(self, peer: int, what: What, *, sent: bool) -> int:
        numbers = self._messages.setdefault((peer, sent), cycle(range(MESSAGE_TAG // (_STAMP + 1))))
        return MESSAGE_TAG + next(numbers) * (_STAMP + 1) + (what.stamp & _STAMP)


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One collective on a group of torch.distributed: what its wire needs to know."""

    pg: ProcessGroup
    index: int
    n: int
    _stamp: int
    _numbers: Iterator[int]

    def tag(self) -> int:
        """Return a tag for messages: it tells apart what several collectives under way send, and calls that differ.

        Processes that are in different calls so wait until their time is out; they do not take each other's bytes.
        """
        return next(self._numbers) * (_STAMP + 1) + self._stamp


WireFunction = Callable[[GroupCall, Tensor, Wired], Wire]
