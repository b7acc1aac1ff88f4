"""The transports over a group of torch.distributed: what gloo and NCCL share.

The tag of a message is distinct for concurrent calls and for calls that differ. So processes in different calls wait
until the time-out instead of receiving each other's bytes. NCCL ignores tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.mesh.collectives.moves import Wired
from fshard.mesh.runtimes.call import CallInfo
from fshard.mesh.runtimes.transport import Tensors, Transport, Wire, Works, as_bytes, joined
from fshard.mesh.runtimes.watch import compare_failed

_STAMP = (1 << 20) - 1
"""Bits of a tag that distinguish different calls; the higher bits are the number of the call."""
MESSAGE_TAG = 1 << 30
"""The tag of messages, to which number and stamp are added; those of collectives are smaller."""


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One collective on a group of torch.distributed: what its wire needs."""

    pg: ProcessGroup
    index: int
    n: int
    tag: int


WireFunction = Callable[[GroupCall, Tensor, Wired], Wire]


class GroupTransport(Transport):
    """The processes of a group of torch.distributed."""

    wires: ClassVar[Mapping[str, WireFunction]]

    def __init__(self, works: Works, pg: ProcessGroup, index: int, n: int) -> None:
        super().__init__(works, index, n)
        self.pg = pg
        self._numbers = cycle(range(1, MESSAGE_TAG // (_STAMP + 1)))
        self.messages: dict[tuple[int, bool], Iterator[int]] = defaultdict(
            lambda: cycle(range(MESSAGE_TAG // (_STAMP + 1)))
        )

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        return self.wires[move.wire](self.numbered(call), self.joined(move, xs), move)

    def numbered(self, call: CallInfo) -> GroupCall:
        """Return what the wire of a collective needs: its number is in the tag."""
        number = next(self._numbers)
        call.meeting = f"{self.pg.group_name}/{number}", call.group.members
        tag = number * (_STAMP + 1) + (call.stamp & _STAMP)
        return GroupCall(self.pg, self.index, self.n, tag)

    def joined(self, move: Wired, xs: Sequence[Tensor]) -> Tensor:
        """Return packed tensors as one buffer."""
        return joined(xs)

    def send(self, xs: Tensors, to: int, call: CallInfo) -> Wire:
        buffer = as_bytes(xs)
        yield [self.pg.send([buffer], to, self._message_tag(to, call))]
        return buffer

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        buffer = make()
        yield [self.pg.recv([buffer.view(torch.uint8)], source, self._message_tag(source, call))]
        return buffer

    def _message_tag(self, peer: int, call: CallInfo) -> int:
        """Return the tag of a message: its number between the two processes, and its stamp."""
        number, ranks = (
            next(self.messages[peer, call.is_send]),
            dist.get_process_group_ranks(self.pg),
        )
        route = (
            (ranks[self.index], ranks[peer]) if call.is_send else (ranks[peer], ranks[self.index])
        )
        call.meeting = f"{self.pg.group_name}/{route}/{number}", route
        return MESSAGE_TAG + number * (_STAMP + 1) + (call.stamp & _STAMP)

    def wait(self, needs: Sequence[Any], timeout: timedelta) -> None:
        """Wait for operations; the backend's threads advance the others."""
        for work in needs:
            work.wait(timeout)

    def is_ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        return all(work.is_completed() for work in needs)

    def explain(self, call: CallInfo) -> None:
        """Raise if other processes have failed in a different call."""
        compare_failed(call)
