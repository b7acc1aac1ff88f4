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
from array import array
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from itertools import cycle

from torch import Tensor

from fshard.mesh.collectives.moves import PartsMove, Wired, combining
from fshard.mesh.layout.arithmetic import Combine, combined, flat_range
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
OWN_SUM = 64 << 10
"""Bytes from which on a tensor among several is summed in its own memory; smaller ones share a buffer."""
CHUNK = 1024 << 10
"""Bytes that are read and added at a time."""
MESSAGE, ANSWER = 4, 3
"""Last bits of a key: a bit that distinguishes messages from collectives, and the value that confirms a read."""


class SharedMemory(Transport):
    """The processes of one group, all of this machine."""

    def __init__(self, works: Works, peers: Peers, members: tuple[int, ...], rank: int) -> None:
        super().__init__(works, members.index(rank), len(members))
        self._all_peers, self.lock = peers, peers.lock
        self.peers = {
            index: peers.by_rank[member] for index, member in enumerate(members) if member != rank
        }
        self.neighbours = [(self.index + step) % self.n for step in range(1, self.n)]
        self._group = zlib.crc32(repr(members).encode()) << 32
        self._calls = cycle(range(1 << 28))
        self._messages: dict[tuple[int, bool], Iterator[int]] = defaultdict(
            lambda: cycle(range(0, 1 << 31, 8))
        )

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        exchange = Exchange(self, self._group | next(self._calls) << 3, call)
        return _WIRES[move.wire](exchange, xs, move)

    def send(self, xs: Tensors, to: int, call: CallInfo) -> Wire:
        """Send a message: a short one inside, a long one as a copy that the receiver reads when it gets there."""
        exchange, peer, buffer = self._message_exchange(to, call), self.peers[to], as_bytes(xs)
        peer.sent += 1
        peer.calls.append(call)
        is_inside = buffer.nbytes <= INLINE_MESSAGE and peer.outgoing.is_roomy
        exchange.offer(to, buffer.data_ptr(), buffer.nbytes, inside=is_inside)
        if not is_inside:
            yield from exchange.confirmed([to])
        return buffer

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        exchange = self._message_exchange(source, call)
        yield exchange.needs([source])
        buffer = make()
        exchange.get(source, [(buffer.data_ptr(), buffer.nbytes)])
        self.peers[source].incoming.words[RECEIVED] += 1
        return buffer

    def _message_exchange(self, peer: int, call: CallInfo) -> Exchange:
        """Return the exchange of the next message to or from a process."""
        return Exchange(
            self, self._group | MESSAGE | next(self._messages[peer, call.is_send]), call
        )

    def put(self, to: int, *message: int) -> None:
        """Write a message to a process, when there is space."""
        self._all_peers.put(self.peers[to], *message)

    def wait(self, needs: Sequence[Need], timeout: timedelta) -> None:
        """Wait for messages, and advance all works meanwhile."""
        self._all_peers.wait(needs, self._advance_others)

    def _advance_others(self) -> bool:
        return len(self.works.in_progress) > 1 and self.works.advance()

    def is_ready(self, needs: Sequence[Need], call: CallInfo) -> bool:
        return all(self._all_peers.has_arrived(peer, key) for peer, key in needs)

    def fail(self, error: BaseException) -> None:
        for (
            peer
        ) in self.peers.values():  # after an error, others must not read memory that may be freed
            peer.close(error)


class Exchange:
    """One collective or message: what this process offers to others, and gets from them.

    The key of a message is the group, the number of the call, its kind (collective or message) and its round.
    """

    __slots__ = ("_call", "_key", "index", "n", "neighbours", "transport")

    def __init__(self, transport: SharedMemory, key: int, call: CallInfo) -> None:
        self.transport, self._key, self._call = transport, key, call
        self.index, self.n, self.neighbours = transport.index, transport.n, transport.neighbours

    def offer(
        self, to: int, address: int, size: int, round: int = 0, inside: bool | None = None
    ) -> None:
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

    def offer_rows(self, to: int, rows: Sequence[Tensor], round: int = 0) -> None:
        """Offer one row to a process; of several, by a table of their addresses."""
        if len(rows) == 1:
            self.offer(to, rows[0].data_ptr(), rows[0].nbytes, round)
        else:
            table = array("q", [row.data_ptr() for row in rows])
            self.offer(to, table.buffer_info()[0], 8 * len(rows), round, inside=True)

    def take_rows(self, source: int, sizes: Sequence[int], round: int = 0) -> list[RingMessage]:
        """Return the offer of each row of a process."""
        if len(sizes) == 1:
            return [self.take(source, sizes[0], round)]
        message = self.take(source, 8 * len(sizes), round)
        table = array("q", ctypes.string_at(message.inside, message.size))
        return [
            RingMessage(address, size, message.stamp, 0)
            for address, size in zip(table, sizes, strict=True)
        ]

    def get_rows(self, source: int, rows: Sequence[Tensor], round: int = 0) -> None:
        """Copy the rows of a process to memory of this one, and confirm it."""
        messages = self.take_rows(source, [row.nbytes for row in rows], round)
        for row, message in zip(rows, messages, strict=True):
            self.copy(source, message, [(row.data_ptr(), row.nbytes)])
        if len(rows) > 1 or messages[0].address != INSIDE:
            self.confirm(source)

    def copy(
        self, source: int, message: RingMessage, spans: Sequence[Span], offset: int = 0
    ) -> None:
        """Copy what a process offers, from an offset on, to memory of this one."""
        if message.address != INSIDE:
            self.transport.peers[source].read(message.address + offset, spans)
            return
        address = message.inside + offset
        for into, size in spans:
            ctypes.memmove(into, address, size)
            address += size

    def get(self, source: int, spans: Sequence[Span]) -> None:
        """Copy all that a process offers, and confirm it."""
        message = self.take(source, sum([size for _, size in spans]))
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


def _move_rows(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
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
        spans = [
            (begin + row * length, length) for begin, length in zip(begins, sizes, strict=True)
        ]
        exchange.get(source, spans)
    if size > INLINE:
        yield from exchange.confirmed([to for to, _ in plan.sends])
    return results


def _reduce_scatter(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Reduce-scatter. (n, elements) -> (elements,)"""
    columns = _tensors_to_sum(xs)
    totals = [empty((rows.shape[1],), rows.dtype) for rows in columns]
    yield from _sum_columns(exchange, [[*rows] for rows in columns], combining(move), totals)
    return _sums_in_order(xs, totals)


def _all_reduce(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """All-reduce (sum or extreme). (elements,) -> (elements,)"""
    columns, n = _tensors_to_sum(xs), exchange.n
    totals = [empty(x.shape, x.dtype) for x in columns]
    if sum([x.nbytes for x in columns]) * (n - 1) <= ONE_ROUND:
        yield from _sum_columns(exchange, [[x] * n for x in columns], combining(move), totals)
        return _sums_in_order(xs, totals)

    ranges = [[slice(*flat_range(x.numel(), n, index)) for index in range(n)] for x in columns]
    shards = [[x[range] for range in each] for x, each in zip(columns, ranges, strict=True)]
    sums = [[total[range] for range in each] for total, each in zip(totals, ranges, strict=True)]
    local = [rows[exchange.index] for rows in sums]
    yield from _sum_columns(exchange, shards, combining(move), local, confirms=False)
    for peer in exchange.neighbours:
        exchange.offer_rows(peer, local, round=1)
    yield exchange.needs(
        exchange.neighbours, round=1
    )  # these are offered after all of the first round has been read
    for peer in exchange.neighbours:
        exchange.get_rows(peer, [rows[peer] for rows in sums], round=1)
    if _are_offered_by_address(local):
        yield from exchange.confirmed(exchange.neighbours)
    return _sums_in_order(xs, totals)


def _tensors_to_sum(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors to sum: the large ones, and before these all others in one buffer."""
    if len(xs) == 1:
        return [xs[0].contiguous()]
    small = [x for x in xs if x.nbytes < OWN_SUM]
    large = [x.contiguous() for x in xs if x.nbytes >= OWN_SUM]
    return [joined(small), *large] if small else large


def _sums_in_order(xs: Sequence[Tensor], totals: list[Tensor]) -> Tensor | list[Tensor]:
    """Return the sum of each tensor, from those of `_tensors_to_sum`; or of all in one buffer."""
    if len(totals) == 1:
        return totals[0]
    widths = [x.shape[-1] for x in xs if x.nbytes < OWN_SUM]
    small, large = (
        iter(totals[0].split(widths) if widths else ()),
        iter(totals[1:] if widths else totals),
    )
    return [next(small if x.nbytes < OWN_SUM else large) for x in xs]


def _sum_columns(
    exchange: Exchange,
    columns: list[list[Tensor]],
    combine: Combine,
    totals: list[Tensor],
    *,
    confirms: bool = True,
) -> Wire:
    """Offer each process its row of each column; combine the local ones with those that all others offer, in chunks.

    Then wait until the others have read, unless `confirms` is False.
    """
    n, index, peers = exchange.n, exchange.index, exchange.neighbours
    for peer in peers:
        exchange.offer_rows(peer, [rows[peer] for rows in columns])
    local_rows = [rows[index] for rows in columns]
    sizes = [row.nbytes for row in local_rows]
    yield exchange.needs(peers)
    offers = {peer: exchange.take_rows(peer, sizes) for peer in peers}
    item, largest = local_rows[0].element_size(), min(CHUNK, max(sizes))
    scratch = [empty((largest // item,), local_rows[0].dtype) for _ in peers]
    chunks = [
        (column, begin, min(CHUNK, size - begin))
        for column, size in enumerate(sizes)
        for begin in range(0, size, CHUNK)
    ]
    confirms = confirms and _are_offered_by_address(local_rows)
    for number, (column, begin, size) in enumerate(chunks, start=1):
        chunk, total, rows = local_rows[column], totals[column], scratch
        if size < sizes[column] or size < largest:
            elements = slice(begin // item, (begin + size) // item)
            chunk, total, rows = (
                chunk[elements],
                total[elements],
                [row[: size // item] for row in scratch],
            )
        for peer, row in zip(peers, rows, strict=True):
            exchange.copy(peer, offers[peer][column], [(row.data_ptr(), size)], begin)
            if confirms and number == len(chunks):
                exchange.confirm(peer)
        summands = [chunk, *rows]  # of this process, of the next one, ...
        combined(summands[n - index :] + summands[: n - index], combine, chunk, total)
    if confirms:
        yield from exchange.confirmed(peers)


def _are_offered_by_address(rows: Sequence[Tensor]) -> bool:
    return len(rows) > 1 or rows[0].nbytes > INLINE


def _exchange_parts(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Exchange of unequal parts. (elements,) -> (elements,)"""
    assert isinstance(move, PartsMove)
    x = joined(xs)
    outgoing = move.parcels(x, exchange.index)
    incoming = {
        source: empty((size,), x.dtype) for source, size in move.expected(x, exchange.index).items()
    }
    for to, shard in outgoing.items():
        exchange.offer(to, shard.data_ptr(), shard.nbytes)
    if incoming:
        yield exchange.needs([*incoming])
    for source, shard in incoming.items():
        exchange.get(source, [(shard.data_ptr(), shard.nbytes)])
    result = move.unpacked(x, exchange.index, incoming)
    yield from exchange.confirmed([to for to, shard in outgoing.items() if shard.nbytes > INLINE])
    return result


_WIRES: dict[str, Callable[[Exchange, Sequence[Tensor], Wired], Wire]] = {
    "reduce": _all_reduce,
    "scatter": _reduce_scatter,
    **dict.fromkeys(("gather", "exchange", "permute", "broadcast"), _move_rows),
    "parts": _exchange_parts,
}
