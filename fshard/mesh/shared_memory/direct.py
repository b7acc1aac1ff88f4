"""The link between processes of one machine: each reads what it needs from the memory of the others.

small rows       one exchange of inline messages: see `small`
large tensors    each process publishes addresses, and the others read: see `large`
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import cycle

from torch import Tensor

from fshard.mesh.collectives.moves import Wired, is_plain
from fshard.mesh.runtimes.link import CallInfo, Wire, packed
from fshard.mesh.shared_memory import large
from fshard.mesh.shared_memory.neighbours import Need, Neighbours
from fshard.mesh.shared_memory.rings import RECEIVED, SIZE
from fshard.mesh.shared_memory.small import SmallCollective, is_small
from fshard.mesh.shared_memory.transfer import MESSAGE, PeerTransfer

INLINE_MESSAGE = SIZE // 8
"""Bytes up to which a message of `send` is put into the ring, if at least half of the ring is free.

So other messages still fit while the receiver is late: no call waits for a receiver of messages.
"""


class Direct:
    """The link among the processes of one group, all of this machine."""

    def __init__(self, neighbours: Neighbours, members: tuple[int, ...], rank: int) -> None:
        self.index, self.n = members.index(rank), len(members)
        self.neighbours, self.lock = neighbours, neighbours.lock
        self.peers = {place: neighbours.known[other] for place, other in enumerate(members) if other != rank}
        self._others = [(self.index + step) % self.n for step in range(1, self.n)]
        self._group = zlib.crc32(repr(members).encode()) << 32
        self._calls = cycle(range(1 << 28))
        self._messages: dict[tuple[int, bool], Iterator[int]] = {}

    def begin(self, move: Wired, x: Tensor, call: CallInfo) -> Wire:
        return self.wires(move, x, call)(self.next_key(), x)

    def begin_many(self, move: Wired, xs: Sequence[Tensor], into: Sequence[Tensor], call: CallInfo) -> Wire:
        """Return the wire of a collective that suits tensors in their own memory; its results are written to `into`."""
        return large.start_many(self.transfer(self.next_key(), call), move, xs, into)

    def wires(self, move: Wired, x: Tensor, call: CallInfo) -> Callable[[int, Tensor], Wire]:
        """Return the function that makes wires for a move on buffers like this one, given the key of the call."""
        if is_small(move, x, self.n):
            return SmallCollective(move, x, self.index, self.neighbours, self.peers, call).wire
        wire = large.WIRES[move.wire]
        return lambda key, x: wire(self.transfer(key, call), x, move)

    def transfer(self, key: int, call: CallInfo) -> PeerTransfer:
        """Return the steps of one call."""
        return PeerTransfer(self.neighbours, self.peers, self.index, self._others, key, call)

    def next_key(self) -> int:
        """Return the key of the next collective's messages."""
        return self._group | next(self._calls) << 3

    def send(self, xs: tuple[Tensor, ...], to: int, call: CallInfo) -> Wire:
        """Send a message: short ones inline, long ones as a copy that the receiver reads when it gets there."""
        transfer = self.transfer(next(self.message_keys(to, sent=True)), call)
        self.peers[to].sent += 1
        self.peers[to].calls.append(call)
        is_short = sum([x.nbytes for x in xs]) <= INLINE_MESSAGE and self.peers[to].outgoing.roomy
        buffer = xs[0] if is_short and len(xs) == 1 and is_plain(xs[0]) else packed(xs)
        if is_short:
            transfer.offer(to, buffer.data_ptr(), buffer.nbytes)
        else:
            transfer.offer_address(to, buffer.data_ptr(), buffer.nbytes)
            yield from transfer.settled([to])
        return buffer

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        transfer = self.transfer(next(self.message_keys(source, sent=False)), call)
        yield transfer.needs(source)
        into = make()
        transfer.get(source, into.data_ptr(), into.nbytes)
        self.peers[source].incoming.words[RECEIVED] += 1
        return into

    def message_keys(self, peer: int, *, sent: bool) -> Iterator[int]:
        """Yield the keys of the messages to a process, or from it, in order."""
        keys = self._messages.get((peer, sent))
        if keys is None:
            keys = self._messages[peer, sent] = map((self._group | MESSAGE).__or__, cycle(range(0, 1 << 31, 8)))
        return keys

    def wait(self, needs: Sequence[Need], timeout: timedelta, advance: Callable[[], bool]) -> None:
        self.neighbours.wait(needs, advance)

    def ready(self, needs: Sequence[Need], call: CallInfo) -> bool:
        return all(self.neighbours.look(peer, key) for peer, key in needs)

    def helper(self, call: CallInfo) -> None:
        return None  # every waiter advances all wires

    def fail(self, error: BaseException) -> None:
        for peer in self.peers.values():  # after an error, others must not read memory that may be freed
            peer.close(error)
