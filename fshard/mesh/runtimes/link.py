"""A link: the processes of one group, as a backend sees them.

A *wire* is a generator: it starts messages, yields what it waits for, and returns the collective's result. So every
algorithm is written sequentially, yet can be started now and finished later: see `running`.
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
"""Bits of a tag that distinguish different calls; the higher bits are the number of the call."""
MESSAGE_TAG = 1 << 30
"""The tag of messages, to which number and stamp are added; those of collectives are smaller."""


class Departed(NamedTuple):
    """A message that is on its way, and the memory that it is read from."""

    work: Work
    memory: Tensor


class Coming(NamedTuple):
    """A message to receive: what to wait for, in its link's terms, and a function that then returns it."""

    needs: Sequence[Any]
    take: Callable[[], Tensor]


Wire = Generator[Sequence[Any], None, Tensor]
"""Yields what it waits for, in its link's terms."""


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
        """A hash of collective, shapes, dtype and leaves; its last two bits are the purpose of the call."""
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
        """Wait for what a wire has yielded; `go_on` advances other wires and returns True if one advanced."""
        ...

    def ready(self, needs: Sequence[Any]) -> bool:
        """Return True if what a wire has yielded is complete; False also if that is unknown without waiting."""
        ...

    def helper(self, what: What) -> Helper | None:
        """Return the helper that advances collectives in progress, if they need one."""
        ...

    def broken(self, error: BaseException) -> None:
        """Learn that a wire has ended by an error."""
        ...

    def send(self, xs: tuple[Tensor, ...], to: int, what: What) -> Departed | None:
        """Start sending tensors (free to change after) to the process at index `place`; return what must be kept
        alive.
        """
        ...

    def receive(self, make: Callable[[], Tensor], source: int, what: What) -> Coming:
        """Start receiving the next message of the process at index `place`, into a new buffer."""
        ...


@dataclass(frozen=True)
class GroupLink:
    """The processes of a group of torch.distributed: the caller is the one at `index` of `n`.

    `departing`: messages in flight, where the backend does not report completion.
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
        """Wait for operations; the backend's threads advance the others."""
        for work in needs:
            work.wait(timeout)

    def ready(self, needs: Sequence[Work]) -> bool:
        """Return False: a work reports completion only when it is waited for."""
        return False

    def helper(self, what: What) -> Helper | None:
        """Return the link's helper, for wires of several rounds."""
        return self._helper if what.move is not None and what.move.wire in ("reduce", "broadcast") else None

    def broken(self, error: BaseException) -> None:
        """Do nothing: the backend breaks its group itself."""

    def send(self, xs: tuple[Tensor, ...], to: int, what: What) -> Departed:
        """Start sending bytes; the tag of a message has its number between the two processes and its hash."""
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
    """One collective on a group of torch.distributed: what its wire needs."""

    pg: ProcessGroup
    index: int
    n: int
    _stamp: int
    _numbers: Iterator[int]

    def tag(self) -> int:
        """Return a tag for messages, distinct for concurrent collectives and for calls that differ.

        So processes in different calls wait until the time-out instead of receiving each other's bytes.
        """
        return next(self._numbers) * (_STAMP + 1) + self._stamp


WireFunction = Callable[[GroupCall, Tensor, Wired], Wire]
