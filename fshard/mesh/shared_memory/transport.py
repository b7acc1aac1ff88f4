"""The transport between processes of one machine: each reads what it needs from messages and memory of the others.

Small memory is offered as a copy inside a message, large memory by its address, and the reader confirms that it has
read it. Sums use the fixed tree of `arithmetic`, in chunks that fit into the processor's cache.

    gather, exchange, permute, broadcast   each process gets the rows of its plan, see `row_plan`
    scatter                                each process gets its row of all others, and sums
    reduce    small                        each process gets the tensors of all others, and sums
              large                        scatter, then gather

Legend: n processes; x is (elements,), rows is (n, elements) with a row for each process.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from itertools import cycle

from torch import Tensor

from fshard.mesh.collectives.moves import Wired, combining
from fshard.mesh.layout.arithmetic import Combine, combined, flat_range
from fshard.mesh.reshard.exchange import Parts
from fshard.mesh.runtimes.buffers import empty
from fshard.mesh.runtimes.call import CALL, CallInfo
from fshard.mesh.runtimes.row_plan import row_plan
from fshard.mesh.runtimes.transport import Tensors, Transport, Wire, Works, as_bytes, joined
from fshard.mesh.shared_memory.peers import Need, Peers, Span
from fshard.mesh.shared_memory.rings import INSIDE, READ, RECEIVED, SIZE, RingMessage

INLINE = 256 << 10
"""Bytes up to which memory is sent inside a message: one more copy, but no wait until it has been read."""
INLINE_MESSAGE = SIZE // 8
"""The same for a message of `send`, if at least half of the ring is free.

So other messages still fit while the receiver is late: no call waits for a receiver of messages.
"""
ONE_ROUND = 1 << 20
"""Bytes to read up to which every process sums everything, in one round instead of two."""
CHUNK = 256 << 10
"""Bytes that are read and added at a time."""
MESSAGE, ANSWER = 4, 3
"""Last bits of a key: a bit that distinguishes messages from collectives, and the value that confirms a read."""


class SharedMemory(Transport):
    """The processes of one group, all of this machine."""

    def __init__(self, works: Works, peers: Peers, members: tuple[int, ...], rank: int) -> None:
        super().__init__(works, members.index(rank), len(members))
        self._all, self.lock = peers, peers.lock
        self.peers = {index: peers.by_rank[member] for index, member in enumerate(members) if member != rank}
        self.others = [(self.index + step) % self.n for step in range(1, self.n)]
        self._group = zlib.crc32(repr(members).encode()) << 32
        self._calls = cycle(range(1 << 28))
        self._messages: dict[tuple[int, bool], Iterator[int]] = defaultdict(lambda: cycle(range(0, 1 << 31, 8)))

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        exchange = Exchange(self, self._group | next(self._calls) << 3, call)
        return _WIRES[move.wire](exchange, xs, move)

    def send(self, xs: Tensors, to: int, call: CallInfo) -> Wire:
        """Send a message: a short one inside, a long one as a copy that the receiver reads when it gets there."""
        exchange, peer, buffer = self._message(to, call), self.peers[to], as_bytes(xs)
        peer.sent += 1
        peer.calls.append(call)
        is_inside = buffer.nbytes <= INLINE_MESSAGE and peer.outgoing.is_roomy
        exchange.offer(to, buffer.data_ptr(), buffer.nbytes, inside=is_inside)
        if not is_inside:
            yield from exchange.confirmed([to])
        return buffer

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        exchange = self._message(source, call)
        yield exchange.needs([source])
        buffer = make()
        exchange.get(source, [(buffer.data_ptr(), buffer.nbytes)])
        self.peers[source].incoming.words[RECEIVED] += 1
        return buffer

    def _message(self, peer: int, call: CallInfo) -> Exchange:
        """Return the exchange of the next message to or from a process."""
        return Exchange(self, self._group | MESSAGE | next(self._messages[peer, call.is_send]), call)

    def put(self, to: int, *message: int) -> None:
        """Write a message to a process, when there is space."""
        self._all.put(self.peers[to], *message)

    def wait(self, needs: Sequence[Need], timeout: timedelta) -> None:
        """Wait for messages, and advance all works meanwhile."""
        self._all.wait(needs, self._advance)

    def _advance(self) -> bool:
        return len(self.works.in_progress) > 1 and self.works.advance()

    def is_ready(self, needs: Sequence[Need], call: CallInfo) -> bool:
        return all(self._all.look(peer, key) for peer, key in needs)

    def fail(self, error: BaseException) -> None:
        for peer in self.peers.values():  # after an error, others must not read memory that may be freed
            peer.close(error)


class Exchange:
    """One collective or message: what this process offers to others, and gets from them.

    The key of a message is the group, the number of the call, its kind (collective or message) and its round.
    """

    __slots__ = ("_call", "_key", "index", "n", "others", "transport")

    def __init__(self, transport: SharedMemory, key: int, call: CallInfo) -> None:
        self.transport, self._key, self._call = transport, key, call
        self.index, self.n, self.others = transport.index, transport.n, transport.others

    def offer(self, to: int, address: int, size: int, round: int = 0, inside: bool | None = None) -> None:
        """Offer memory to a process; it must stay until it has been read, unless the message has it inside."""
        key, stamp = self._key | round, self._call.stamp
        if size <= INLINE if inside is None else inside:
            self.transport.put(to, key, INSIDE, size, stamp, address)
        else:
            self.transport.put(to, key, address, size, stamp)

    def needs(self, sources: Sequence[int], round: int = 0) -> list[Need]:
        """Return what to wait for before taking what these processes offer."""
        return [(self.transport.peers[source], self._key | round) for source in sources]

    def take(self, source: int, size: int, round: int = 0) -> RingMessage:
        """Return the offer of a process; raise if it is in another call."""
        peer = self.transport.peers[source]
        message = peer.incoming.inbox.pop(self._key | round)
        if (message.stamp ^ self._call.stamp) & CALL or message.size != size:
            raise self._call.mismatch(peer.rank, message.stamp)
        return message

    def copy(self, source: int, message: RingMessage, spans: Sequence[Span], offset: int = 0) -> None:
        """Copy what a process offers, from an offset on, to memory of this one."""
        if message.address != INSIDE:
            self.transport.peers[source].read(message.address + offset, spans)
            return
        address = message.inside + offset
        for into, size in spans:
            ctypes.memmove(into, address, size)
            address += size

    def get(self, source: int, spans: Sequence[Span], round: int = 0) -> None:
        """Copy all that a process offers, and confirm it."""
        message = self.take(source, sum([size for _, size in spans]), round)
        self.copy(source, message, spans)
        if message.address != INSIDE:
            self.confirm(source)

    def confirm(self, source: int) -> None:
        """Confirm to a process that its offer has been read."""
        self.transport.put(source, self._key | ANSWER, READ, 0, self._call.stamp)

    def confirmed(self, readers: Sequence[int]) -> Generator[list[Need], None, None]:
        """Wait until these processes have read what this one offers, and is not inside a message."""
        answers = self.needs(readers, ANSWER)
        if answers:
            yield answers
        for peer, key in answers:
            del peer.incoming.inbox[key]


# -- the wires ------------------------------------------------------------------------------------------------------


def _rows(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Get the rows of the move's plan, each tensor's into a result of its own; copy the local one meanwhile."""
    plan, x = row_plan(move, exchange.index, exchange.n), joined(xs)
    sizes = [x.shape[-1] * x.element_size() for x in xs]
    size, start = sum(sizes), x.data_ptr()
    for to, row in plan.sends:
        exchange.offer(to, start + row * size, size)
    results = [empty(plan.shape(x.shape[-1]), x.dtype) for x in xs]
    begins = [result.data_ptr() for result in results]

    if plan.keeps is not None:
        address = start + plan.keeps[0] * size
        for begin, length in zip(begins, sizes, strict=True):
            ctypes.memmove(begin + plan.keeps[1] * length, address, length)
            address += length
    elif not plan.gets:
        for result in results:
            result.zero_()
    yield exchange.needs([source for source, _ in plan.gets])
    for source, row in plan.gets:
        spans = [(begin + row * length, length) for begin, length in zip(begins, sizes, strict=True)]
        exchange.get(source, spans)
    if size > INLINE:
        yield from exchange.confirmed([to for to, _ in plan.sends])
    return results


def _scatter(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Reduce-scatter. (n, elements) -> (elements,)"""
    rows = joined(xs)
    total = empty((rows.shape[1],), rows.dtype)
    yield from _sum(exchange, [*rows], combining(move), total)
    yield from _end_sum(exchange, total.nbytes)
    return total


def _reduce(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """All-reduce (sum or extreme). (elements,) -> (elements,)"""
    x = joined(xs)
    total, n = empty((len(x),), x.dtype), exchange.n
    if x.nbytes * (n - 1) <= ONE_ROUND:
        yield from _sum(exchange, [x] * n, combining(move), total)
        yield from _end_sum(exchange, x.nbytes)
        return total

    ranges = [slice(*flat_range(len(x), n, index)) for index in range(n)]
    sums = [total[range] for range in ranges]
    yield from _sum(exchange, [x[range] for range in ranges], combining(move), sums[exchange.index])
    for other in exchange.others:
        exchange.offer(other, sums[exchange.index].data_ptr(), sums[exchange.index].nbytes, round=1)
    yield exchange.needs(exchange.others, round=1)  # these are offered after all of the first round has been read
    for other in exchange.others:
        exchange.get(other, [(sums[other].data_ptr(), sums[other].nbytes)], round=1)
    if sums[exchange.index].nbytes > INLINE:
        yield from exchange.confirmed(exchange.others)
    return total


def _sum(exchange: Exchange, rows: Sequence[Tensor], combine: Combine, total: Tensor) -> Wire:
    """Offer each process its row; combine the local one with those that all others offer, in chunks."""
    for other in exchange.others:
        exchange.offer(other, rows[other].data_ptr(), rows[other].nbytes)
    yield exchange.needs(exchange.others)
    local = rows[exchange.index]
    messages = {other: exchange.take(other, local.nbytes) for other in exchange.others}
    item, length = local.element_size(), min(CHUNK // local.element_size(), len(local))
    scratch = empty((exchange.n, length), local.dtype)
    for begin in range(0, len(local), length or 1):
        chunk = local[begin : begin + length]
        summands = [chunk if index == exchange.index else scratch[index, : len(chunk)] for index in range(exchange.n)]
        for other, message in messages.items():
            exchange.copy(other, message, [(summands[other].data_ptr(), chunk.nbytes)], begin * item)
        combined(summands, combine, chunk, total[begin : begin + length])


def _end_sum(exchange: Exchange, size: int) -> Wire:
    """Wait until all others have read rows of a size, and confirm that theirs have been read."""
    if size > INLINE:
        for other in exchange.others:
            exchange.confirm(other)
        yield from exchange.confirmed(exchange.others)


def _parts(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Exchange of unequal parts. (elements,) -> (elements,)"""
    assert isinstance(move, Parts)
    x = joined(xs)
    outgoing = move.parcels(x, exchange.index)
    incoming = {source: empty((size,), x.dtype) for source, size in move.expected(x, exchange.index).items()}
    for to, part in outgoing.items():
        exchange.offer(to, part.data_ptr(), part.nbytes)
    if incoming:
        yield exchange.needs([*incoming])
    for source, part in incoming.items():
        exchange.get(source, [(part.data_ptr(), part.nbytes)])
    result = move.unpacked(x, exchange.index, incoming)
    yield from exchange.confirmed([to for to, part in outgoing.items() if part.nbytes > INLINE])
    return result


_WIRES: dict[str, Callable[[Exchange, Sequence[Tensor], Wired], Wire]] = {
    "reduce": _reduce,
    "scatter": _scatter,
    **dict.fromkeys(("gather", "exchange", "permute", "broadcast"), _rows),
    "parts": _parts,
}
