"""A link: the processes of one group, as a backend sees them.

A *wire* is a generator: it starts messages, yields what it waits for, and returns the result. So every algorithm is
written sequentially, yet can be started now and finished later: see `operations`. Collectives, sends and receives are
wires.

A sum in several rounds advances only while a thread waits for it. If only the waiter of its handle did so, two
processes that wait for their handles in different orders would deadlock. So when a process begins another operation,
whatever is in progress is given to a helper thread of its link, which runs it in the order of starting: that order is
equal on all processes. The memory of sent messages is freed by a helper too.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from itertools import cycle
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.mesh.collectives.moves import PURPOSES, Purpose, Wired, describe, named
from fshard.source import Site

if TYPE_CHECKING:
    from fshard.mesh.spmd.scope import Group

_STAMP = (1 << 20) - 1
"""Bits of a tag that distinguish different calls; the higher bits are the number of the call."""
MESSAGE_TAG = 1 << 30
"""The tag of messages, to which number and stamp are added; those of collectives are smaller."""

Wire = Generator[Sequence[Any], None, Tensor]
"""Yields what it waits for, in its link's terms."""


CALL = (1 << 32) - 1
"""Bits of a stamp that are equal on all processes of a call."""


class CallInfo:
    """A collective, or a message (`move` is None): as a stamp, and as text, which is made only for an error."""

    __slots__ = ("_dtype", "_shapes", "_stamp", "group", "is_send", "meeting", "move", "purpose", "site")
    meeting: tuple[str, tuple[int, ...]]  # on groups of torch.distributed: its name on all processes, and their ranks

    def __init__(
        self,
        move: Wired | None,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        purpose: Purpose,
        *,
        is_send: bool = False,
    ) -> None:
        self.move, self.group, self.site, self.is_send = move, group, site, is_send
        self._dtype, self._shapes = xs[0].dtype, tuple([x.shape for x in xs])
        self.purpose: Purpose = purpose
        self._stamp: int | None = None

    def __str__(self) -> str:
        return f"{self.signature} (processes {list(self.group.members)}) at {self.site}"

    @property
    def signature(self) -> str:
        """The call in words, without its line."""
        name = named(describe(self.move) if self.move is not None else "a message", self.purpose)
        dtype = str(self._dtype).removeprefix("torch.")
        shapes = ", ".join(f"{dtype}{list(shape)}" for shape in self._shapes)
        return f"{name} of {shapes}{self.site.given} over {'+'.join(self.group.axes)}"

    @property
    def stamp(self) -> int:
        """The call in 64 bits: a hash of the file's name, the line, a hash of the call, its purpose (16, 16, 30, 2)."""
        if self._stamp is None:
            stamp = _stamp(self.move, self._dtype, self._shapes, self.group.axes, self.site)
            self._stamp = stamp | PURPOSES.index(self.purpose)
        return self._stamp


@lru_cache(maxsize=4096)
def _stamp(
    move: Wired | None, dtype: torch.dtype, shapes: tuple[torch.Size, ...], axes: tuple[str, ...], site: Site
) -> int:
    line = _hash_file(site.file) << 16 | site.line & 0xFFFF
    shared_line = line if move is not None and compares_lines() else None  # a message has a line at each end
    call = zlib.crc32(f"{move} {dtype} {shapes} {axes} {site.leaves} {shared_line}".encode())
    return line << 32 | call & ~3


def compares_lines() -> bool:
    """Return True if all processes of a collective must call it in one source line."""
    return os.environ.get("FSHARD_LINES", "1") != "0" and os.environ.get("FSHARD_CHECK") != "shapes"


def line_of(stamp: int, call: CallInfo) -> str:
    """Return the source line of a stamp that another process made; `call` is the local one."""
    files = (call.site.file, *[getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]])
    name = next((os.path.basename(file) for file in files if _hash_file(file) == stamp >> 48), "another file")
    return f"{name}:{stamp >> 32 & 0xFFFF}"


def _hash_file(file: str) -> int:
    """Hash the name of a file without its folder, which may differ between machines."""
    return zlib.crc32(os.path.basename(file).encode()) & 0xFFFF


def packed(xs: tuple[Tensor, ...]) -> Tensor:
    """Copy tensors of one dtype into one row of bytes."""
    return torch.cat([x.detach().reshape(-1) for x in xs]).view(torch.uint8)


Task = tuple[Callable[[], None], Event, bool]
"""A function to run, the event of its end, and whether it runs in inference mode."""


class Helper:
    """Runs tasks in order, in a thread that starts with the first and ends with the last reference to the helper."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._started = False

    def submit(self, task: Callable[[], None]) -> Event:
        """Queue a task that raises nothing; return an event that is set when it has ended."""
        if not self._started:
            self._started = True
            Thread(target=_work, args=(self._tasks,), name="fshard-helper", daemon=True).start()
            finalize(self, self._tasks.put, None)
        ended = Event()
        self._tasks.put((task, ended, torch.is_inference_mode_enabled()))
        return ended


def _work(tasks: SimpleQueue[Task | None]) -> None:
    while (item := tasks.get()) is not None:
        task, ended, inference = item
        with torch.inference_mode(inference):
            task()
        del task, item
        ended.set()


class Link(Protocol):
    """The processes of one group."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock to hold while a wire takes a step."""
        ...

    def begin(self, move: Wired, x: Tensor, call: CallInfo) -> Wire:
        """Return the wire of a collective on a buffer."""
        ...

    def send(self, xs: tuple[Tensor, ...], to: int, call: CallInfo) -> Wire:
        """Return the wire that sends tensors to the process at an index. After its first step they may change."""
        ...

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        """Return the wire that receives the next message of the process at an index, into a new buffer."""
        ...

    def wait(self, needs: Sequence[Any], timeout: timedelta, advance: Callable[[], bool]) -> None:
        """Wait for what a wire has yielded; `advance` steps other wires and returns True if one has stepped."""
        ...

    def ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        """Return True if what a wire has yielded is complete; False also if that is unknown without waiting."""
        ...

    def helper(self, call: CallInfo) -> Helper | None:
        """Return the helper thread that advances an operation while nothing waits for it, if it needs one."""
        ...

    def fail(self, error: BaseException) -> None:
        """Leave the group: a wire has raised an error."""
        ...


@dataclass(frozen=True)
class GroupLink:
    """The processes of a group of torch.distributed: the caller is the one at `index` of `n`."""

    pg: ProcessGroup
    index: int
    n: int
    wires: Mapping[str, WireFunction]
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext, compare=False)
    _collectives: Helper = field(default_factory=Helper, compare=False)
    _sends: Helper = field(default_factory=Helper, compare=False)
    _numbers: Iterator[int] = field(default_factory=lambda: cycle(range(1, MESSAGE_TAG // (_STAMP + 1))), compare=False)
    _messages: dict[tuple[int, bool], Iterator[int]] = field(
        default_factory=lambda: defaultdict(lambda: cycle(range(MESSAGE_TAG // (_STAMP + 1)))), compare=False
    )

    def begin(self, move: Wired, x: Tensor, call: CallInfo) -> Wire:
        number = next(self._numbers)
        call.meeting = f"{self.pg.group_name}/{number}", call.group.members
        tag = number * (_STAMP + 1) + (call.stamp & _STAMP)
        return self.wires[move.wire](GroupCall(self.pg, self.index, self.n, tag), x, move)

    def send(self, xs: tuple[Tensor, ...], to: int, call: CallInfo) -> Wire:
        """Send one buffer of bytes; the tag of a message has its number between the two processes and its hash."""
        buffer = packed(xs)
        yield [self.pg.send([buffer], to, self._tag(to, call))]
        return buffer

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        into = make()
        yield [self.pg.recv([into.view(torch.uint8)], source, self._tag(source, call))]
        return into

    def _tag(self, peer: int, call: CallInfo) -> int:
        number, ranks = next(self._messages[peer, call.is_send]), dist.get_process_group_ranks(self.pg)
        route = (ranks[self.index], ranks[peer]) if call.is_send else (ranks[peer], ranks[self.index])
        call.meeting = f"{self.pg.group_name}/{route}/{number}", route
        return MESSAGE_TAG + number * (_STAMP + 1) + (call.stamp & _STAMP)

    def wait(self, needs: Sequence[Any], timeout: timedelta, advance: Callable[[], bool]) -> None:
        """Wait for operations; the backend's threads advance the others."""
        for work in needs:
            work.wait(timeout)

    def ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        """Return True if the operations have completed; those of gloo report it only when they are waited for."""
        return all(work.is_completed() for work in needs)

    def helper(self, call: CallInfo) -> Helper | None:
        """Return the helper for sends, or for collectives of several rounds. Neither waits for the other."""
        if call.move is None:
            return self._sends if call.is_send else None
        return self._collectives if call.move.wire in ("reduce", "broadcast") else None

    def fail(self, error: BaseException) -> None:
        pass  # the backend breaks its group itself


class NcclLink(GroupLink):
    """A group whose operations run on the streams of a device: to wait makes the caller's stream wait, not the host.

    Only the waiting thread ends a collective, since a helper thread has another stream. The host sees the end of sends
    alone, whose buffers are kept until then.
    """

    def wait(self, needs: Sequence[Any], timeout: timedelta, advance: Callable[[], bool]) -> None:
        for work in needs:
            work.wait()  # with a time limit it would block the host until the operation has ended

    def ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        return call.is_send and super().ready(needs, call)

    def helper(self, call: CallInfo) -> None:
        return None


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One collective on a group of torch.distributed: what its wire needs.

    The tag of its messages is distinct for concurrent collectives and for calls that differ. So processes in different
    calls wait until the time-out instead of receiving each other's bytes.
    """

    pg: ProcessGroup
    index: int
    n: int
    tag: int


WireFunction = Callable[[GroupCall, Tensor, Wired], Wire]
