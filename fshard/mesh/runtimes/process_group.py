"""The transports over a group of torch.distributed: what gloo and NCCL share."""

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
        self._numbers = cycle(range(1, _NUMBERS))
        # The numbers of messages to come, by peer and direction.
        self.messages: dict[tuple[int, bool], Iterator[int]] = defaultdict(
            lambda: cycle(range(_NUMBERS))
        )

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        return self.wires[move.wire](self.numbered(call), self.joined(move, xs, call.dtype), move)

    def numbered(self, call: CallInfo) -> GroupCall:
        """Return what the wire of a collective needs: see Note [Tags]."""
        number = next(self._numbers)
        call.meeting = f"{self.pg.group_name}/{number}", call.group.members
        tag = number << 20 | call.stamp & _STAMP
        return GroupCall(self.pg, self.index, self.n, tag)

    def joined(self, move: Wired, xs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return packed tensors as one buffer, cast to a dtype."""
        return joined(xs, dtype)

    def send(self, xs: Tensors, to: int, call: CallInfo) -> Wire:
        buffer = as_bytes(xs)
        yield [self.pg.send([buffer], to, self._message_tag(to, call))]
        return buffer

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        buffer = make()
        yield [self.pg.recv([buffer.view(torch.uint8)], source, self._message_tag(source, call))]
        return buffer

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
        compare_failed(call)
