"""The transports over a group of torch.distributed: what gloo and NCCL share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import cycle
from threading import Event
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.mesh.collectives.moves import Wired
from fshard.mesh.runtimes.call import CallInfo
from fshard.mesh.runtimes.transport import (
    Helper,
    Tensors,
    Transport,
    Wire,
    Works,
    as_bytes,
    joined,
)
from fshard.mesh.runtimes.watch import compare_failed

# Note [Tags]
# Calls that are in progress at a time have distinct tags, and calls that differ have, too. So
# processes in different calls wait until the time-out, instead of receiving each other's bytes.
# NCCL ignores tags. A tag has 31 bits, so it is positive as a 32-bit integer:
#
#     bit 30              29 .. 20                19 .. 0
#     1 for a message     number of the call      lowest bits of its stamp, see Note [Stamps]
#
# Collectives of a group are counted from 1, messages of each route from 0. So tags below 1 << 20
# are free for others: torch's own messages have tag 0.
_STAMP = (1 << 20) - 1
"""The bits of a tag that are of the stamp."""
MESSAGE_TAG = 1 << 30
"""The bit of a tag that only messages have."""
_NUMBERS = MESSAGE_TAG >> 20
"""Numbers of calls in tags: a call has the tag of an equal one only after 1,023 others."""


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One collective on a group of torch.distributed: what its wire needs.

    `owns_buffer`: the wire may write into its buffer, which is no memory of the caller's.
    """

    pg: ProcessGroup
    index: int
    n: int
    tag: int
    owns_buffer: bool = False


WireFunction = Callable[[GroupCall, Tensor, Wired], Wire]


class GroupTransport(Transport):
    """The processes of a group of torch.distributed."""

    wires: ClassVar[Mapping[str, WireFunction]]
    connects_late: bool = False
    """True if two processes are connected when they first communicate."""

    def __init__(self, works: Works, pg: ProcessGroup, index: int, n: int) -> None:
        super().__init__(works, index, n)
        self.pg = pg
        self._numbers = cycle(range(1, _NUMBERS))
        # The numbers of messages to come, by peer and direction.
        self.messages: dict[tuple[int, bool], Iterator[int]] = defaultdict(
            lambda: cycle(range(_NUMBERS))
        )
        self._first_sends: dict[int, FirstSends] = defaultdict(FirstSends)  # by peer

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        buffer = self.joined(move, xs, call.dtype)
        is_copy = buffer.data_ptr() != xs[0].data_ptr()
        return self.wires[move.wire](self.numbered(call, owns_buffer=is_copy), buffer, move)

    def numbered(self, call: CallInfo, *, owns_buffer: bool = False) -> GroupCall:
        """Return what the wire of a collective needs: see Note [Tags]."""
        number = next(self._numbers)
        call.meeting = f"{self.pg.group_name}/{number}", call.group.members
        tag = number << 20 | call.stamp & _STAMP
        return GroupCall(self.pg, self.index, self.n, tag, owns_buffer)

    def joined(self, move: Wired, xs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return packed tensors as one buffer, cast to a dtype."""
        return joined(xs, dtype)

    def send(self, xs: Tensors, to: int, call: CallInfo) -> Wire:
        buffer = as_bytes(xs)
        yield [self._start_send(buffer, to, self._message_tag(to, call))]
        return buffer

    def _start_send(self, buffer: Tensor, to: int, tag: int) -> Any:
        """Start to send a buffer; never block the host."""
        start = partial(self.pg.send, [buffer], to, tag)
        if self.connects_late:
            return self._first_sends[to].start(start)
        return start()

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        buffer = make()
        yield [self.pg.recv([buffer.view(torch.uint8)], source, self._message_tag(source, call))]
        return buffer

    def blocks_in_receive(self, source: int) -> bool:
        is_first = (source, False) not in self.messages
        return self.connects_late and is_first

    def _message_tag(self, peer: int, call: CallInfo) -> int:
        """Return the tag of a message to or from a peer: see Note [Tags]."""
        number = next(self.messages[peer, call.is_send])
        ranks = dist.get_process_group_ranks(self.pg)
        local, remote = ranks[self.index], ranks[peer]
        route = (local, remote) if call.is_send else (remote, local)
        call.meeting = f"{self.pg.group_name}/{route}/{number}", route
        return MESSAGE_TAG | number << 20 | call.stamp & _STAMP

    def wait(self, needs: Sequence[Any], timeout: timedelta) -> None:
        """Wait for operations; the backend's threads advance the others."""
        for work in needs:
            work.wait(timeout)

    def is_ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        return all(work.is_completed() for work in needs)

    def explain(self, call: CallInfo) -> None:
        """Raise if other processes have failed in a different call."""
        compare_failed(call, self.works.has_gone)


# Note [First messages block the host]
# Where two processes are connected when they first communicate, the first call blocks the host
# until the other end makes its own: always over NCCL, and at one of the two ends over gloo. A
# receive waits for its sender anyway. But if all members of a ring send before they receive, and a
# send blocks, none would receive. So a helper thread starts the first messages to a process:
#
#     sender      helper: the first send blocks    direct sends, as soon as no other is left there
#     receiver                   the first receive
#
# On a device it starts them on a stream of its own, which waits for the buffer alone: the stream of
# the caller may go on to kernels that the receiver must take part in before it receives.
class FirstSends:
    """The messages to a process from the first one on: see Note [First messages block the host]."""

    def __init__(self) -> None:
        self._helper = Helper()
        self._last_started: Event | None = None  # set once the helper has started the last one

    def start(self, start: Callable[[], Any]) -> Any:
        """Call `start`, or let the helper do so, after the messages that it has."""
        if self._last_started is not None and self._last_started.is_set():
            return start()
        send = FirstSend(start)
        self._last_started = send.started = self._helper.submit(send.start)
        return send


class FirstSend:
    """A send that a helper thread starts."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self.started = Event()
        self._start = start
        self._work: Any = None
        self._error: Exception | None = None
        self._written: Any = None  # the event after which the buffer has its values
        if torch.cuda.is_initialized():
            self._device = torch.cuda.current_device()
            self._written = torch.cuda.current_stream().record_event()

    def start(self) -> None:
        """Start the send; return once the receiver has come."""
        stream = None
        if self._written is not None:
            stream = torch.cuda.Stream(self._device)
            stream.wait_event(self._written)
        try:
            with torch.cuda.stream(stream):  # of None it does nothing
                self._work = self._start()
        except Exception as error:
            self._error = error

    def is_completed(self) -> bool:
        """Return True if the message was received; raise if it could not be started."""
        if self._error is not None:
            raise self._error
        return self._work is not None and self._work.is_completed()

    def wait(self, timeout: timedelta) -> None:
        """Block the host until the receiver has come, and then as a wait for the send does."""
        if not self.started.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out: the receiver of a first message has not come.")
        if self._error is not None:
            raise self._error
        self._work.wait(timeout)
