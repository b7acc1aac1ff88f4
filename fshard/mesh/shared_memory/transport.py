"""The transport between processes of one machine: each reads what others offer it.

Small memory is offered as a copy inside a message, large memory by its address, and the reader
confirms that it has read it. Sums use the fixed tree of `arithmetic`, in chunks that fit into the
processor's cache.

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
from itertools import count

from torch import Tensor

from fshard.mesh.collectives.moves import PartsMove, Wired, combining
from fshard.mesh.layout.arithmetic import Combine, combined, flat_range
from fshard.mesh.layout.packing import cast
from fshard.mesh.runtimes.buffers import empty
from fshard.mesh.runtimes.call import CALL, CallInfo
from fshard.mesh.runtimes.row_plan import row_plan
from fshard.mesh.runtimes.transport import Tensors, Transport, Wire, Works, as_bytes, joined
from fshard.mesh.shared_memory.peers import Need, Peers, Span
from fshard.mesh.shared_memory.rings import INSIDE, READ, RECEIVED, SIZE, RingMessage

# Note [Message forms]
# A message of a ring is (key, address, size, stamp), perhaps with bytes inside. The receiver of a
# call waits for a key, so messages of several calls may arrive in any order:
#
#     bits of a key   63 .. 32   31 .. 3             2                      1, 0
#                     group      number of the call  1 for `send`, `recv`   round 0 or 1, or ANSWER
#
# It takes one of three forms, by its address:
#
#     INSIDE      the bytes are in the ring; the sender's tensor may change at once
#     READ        an answer: the receiver has read what was offered by address
#     another     the bytes are there in the sender's memory, and the receiver answers
#
# Until the answer the memory must stay: a wire keeps its inputs in local variables until it has run
# `confirmed`. After an error there is no answer, so `fail` closes the link to each member, and what
# was read from a closed link does not count.

INLINE = 256 << 10
"""Bytes up to which memory is sent inside a message: one more copy, but no wait for an answer."""
INLINE_MESSAGE = SIZE // 8
"""The same for a message of `send`, if at least half of the ring is free.

So other messages still fit while the receiver is late: no call waits for a receiver of messages.
"""
ONE_ROUND = 1 << 20
"""Bytes to read up to which every process sums everything, in one round instead of two."""
OWN_SUM = 64 << 10
"""Bytes from which on a tensor among several is summed where it is; smaller ones share a buffer."""
CHUNK = 1024 << 10
"""Bytes that are read and added at a time."""
_NUMBER = (1 << 32) - 8
"""Bits of a key that are the number of a call, which begins again after 2**29 others."""
MESSAGE, ANSWER = 4, 3
"""Last bits of a key: see Note [Message forms]."""


# Note [Attempts leave links open]
# After an error a process closes its links, since others may wait for it, or read memory that it
# frees. Then no group of theirs works any more, though all but one process may be alive. An attempt
# is work whose processes learn elsewhere that it has failed, and whose results none of them uses
# then. So its transport looks for that while it waits, and leaves the links open. It has
# keys of its own: messages of a failed attempt are those of no other call.


class SharedMemory(Transport):
    """The processes of one group, all of this machine.

    Args:
        attempt: the name of an attempt, see Note [Attempts leave links open]; "" for none.
        failure: returns why the attempt has failed, or "".
    """

    def __init__(
        self,
        works: Works,
        peers: Peers,
        members: tuple[int, ...],
        rank: int,
        attempt: str = "",
        failure: Callable[[], str] = str,
    ) -> None:
        super().__init__(works, members.index(rank), len(members))
        self.lock = peers.lock
        self._all_peers = peers
        self.peers = {
            index: peers.by_rank[member] for index, member in enumerate(members) if member != rank
        }
        self.neighbours = [(self.index + step) % self.n for step in range(1, self.n)]
        self._group = zlib.crc32(f"{members}{attempt}".encode()) << 32
        self._is_attempt = bool(attempt)
        self._failure = failure
        # The numbers of calls to come: of collectives, and of messages by peer and direction.
        self._calls = count(0, 8)
        self._messages: dict[tuple[int, bool], Iterator[int]] = defaultdict(lambda: count(0, 8))

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        number = next(self._calls) & _NUMBER
        exchange = Exchange(self, self._group | number, call)
        wire = _WIRES[move.wire]
        if wire is not _move_rows:  # which casts where it joins
            xs = cast(xs, [call.dtype] * len(xs))
        return wire(exchange, xs, move)

    def send(self, xs: Tensors, to: int, call: CallInfo) -> Wire:
        """Send a message: short ones inside, long ones as copies that the receiver reads later."""
        exchange = self._message_exchange(to, call)
        peer = self.peers[to]
        buffer = as_bytes(xs)
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
        number = next(self._messages[peer, call.is_send]) & _NUMBER
        return Exchange(self, self._group | MESSAGE | number, call)

    def put(self, to: int, *message: int) -> None:
        """Write a message to a process, when there is space."""
        self._all_peers.put(self.peers[to], *message)

    def wait(self, needs: Sequence[Need], timeout: timedelta) -> None:
        """Wait for messages, and advance all works meanwhile. The limit is that of the peers."""
        self._all_peers.wait(needs, self._advance_others)

    def _advance_others(self) -> bool:
        failure = self._failure()
        if failure:
            raise RuntimeError(f"The attempt has failed: {failure}")
        return len(self.works.in_progress) > 1 and self.works.advance()

    def is_ready(self, needs: Sequence[Need], call: CallInfo) -> bool:
        return all(self._all_peers.has_arrived(peer, key) for peer, key in needs)

    def fail(self, error: BaseException) -> None:
        if self._is_attempt:
            return
        # Others must not read memory that is freed after the error: see Note [Message forms].
        for peer in self.peers.values():
            peer.close(error)


class Exchange:
    """One collective or message: what this process offers to others, and gets from them.

    See Note [Message forms].
    """

    __slots__ = ("_call", "_key", "dtype", "index", "n", "neighbours", "transport")

    def __init__(self, transport: SharedMemory, key: int, call: CallInfo) -> None:
        self.transport = transport
        self.index = transport.index
        self.n = transport.n
        self.neighbours = transport.neighbours
        self._key = key
        self.dtype = call.dtype
        self._call = call

    def needs(self, sources: Sequence[int], round: int = 0) -> list[Need]:
        """Return what to wait for before taking what these processes offer."""
        key = self._key | round
        return [(self.transport.peers[source], key) for source in sources]

    # -- offers ------------------------------------------------------------------------------------

    def offer(
        self, to: int, address: int, size: int, round: int = 0, inside: bool | None = None
    ) -> None:
        """Offer memory to a process; it must stay until it is read, unless it is sent inside."""
        key = self._key | round
        stamp = self._call.stamp
        if inside is None:
            inside = size <= INLINE
        if inside:
            self.transport.put(to, key, INSIDE, size, stamp, address)
        else:
            self.transport.put(to, key, address, size, stamp)

    def offer_rows(self, to: int, rows: Sequence[Tensor], round: int = 0) -> None:
        """Offer one row to a process; of several, by a table of their addresses."""
        if len(rows) == 1:
            self.offer(to, rows[0].data_ptr(), rows[0].nbytes, round)
        else:
            table = array("q", [row.data_ptr() for row in rows])
            address, _ = table.buffer_info()
            self.offer(to, address, 8 * len(rows), round, inside=True)

    def confirmed(self, readers: Sequence[int]) -> Generator[list[Need], None, None]:
        """Wait until these processes have read what this one offers by address."""
        answers = self.needs(readers, ANSWER)
        if answers:
            yield answers
        for peer, key in answers:
            del peer.incoming.inbox[key]

    # -- the offers of others ----------------------------------------------------------------------

    def take(self, source: int, size: int, round: int = 0) -> RingMessage:
        """Return the offer of a process; raise if it is in another call."""
        peer = self.transport.peers[source]
        message = peer.incoming.inbox.pop(self._key | round)
        if (message.stamp ^ self._call.stamp) & CALL or message.size != size:
            raise self._call.mismatch(peer.rank, message.stamp)
        return message

    def take_rows(self, source: int, sizes: Sequence[int], round: int = 0) -> list[RingMessage]:
        """Return the offer of each row of a process."""
        if len(sizes) == 1:
            return [self.take(source, sizes[0], round)]
        message = self.take(source, 8 * len(sizes), round)
        table = array("q", ctypes.string_at(message.inside, message.size))
        rows = zip(table, sizes, strict=True)
        return [RingMessage(address, size, message.stamp, 0) for address, size in rows]

    def copy(
        self, source: int, message: RingMessage, spans: Sequence[Span], offset: int = 0
    ) -> None:
        """Copy what a process offers, from an offset on, to memory of this one."""
        if message.address != INSIDE:
            self.transport.peers[source].read(message.address + offset, spans)
            return
        address = message.inside + offset
        for target, size in spans:
            ctypes.memmove(target, address, size)
            address += size

    def get(self, source: int, spans: Sequence[Span]) -> None:
        """Copy all that a process offers, and confirm it."""
        message = self.take(source, sum([size for _, size in spans]))
        self.copy(source, message, spans)
        if message.address != INSIDE:
            self.confirm(source)

    def get_rows(self, source: int, rows: Sequence[Tensor], round: int = 0) -> None:
        """Copy the rows of a process to memory of this one, and confirm it."""
        messages = self.take_rows(source, [row.nbytes for row in rows], round)
        for row, message in zip(rows, messages, strict=True):
            self.copy(source, message, [(row.data_ptr(), row.nbytes)])
        if len(rows) > 1 or messages[0].address != INSIDE:
            self.confirm(source)

    def confirm(self, source: int) -> None:
        """Confirm to a process that its offer has been read."""
        self.transport.put(source, self._key | ANSWER, READ, 0, self._call.stamp)


# -- moves of rows ---------------------------------------------------------------------------------
# A wire keeps offered tensors until they are confirmed: see Note [Message forms].


def _move_rows(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Get the rows of the move's plan, and copy the local one meanwhile.

    The tensors are sent in one buffer; each has a result of its own.
    """
    plan = row_plan(move, exchange.index, exchange.n)
    x = joined(xs, exchange.dtype)
    sizes = [x.shape[-1] * exchange.dtype.itemsize for x in xs]
    size = sum(sizes)
    begin = x.data_ptr()
    for peer, row in plan.sends:
        exchange.offer(peer, begin + row * size, size)

    results = [empty(plan.shape(x.shape[-1]), exchange.dtype) for x in xs]
    result_begins = [result.data_ptr() for result in results]
    if plan.keeps is not None:
        local_row, row = plan.keeps
        address = begin + local_row * size
        for target, length in zip(result_begins, sizes, strict=True):
            ctypes.memmove(target + row * length, address, length)
            address += length
    elif not plan.gets:
        for result in results:
            result.zero_()

    yield exchange.needs([source for source, _ in plan.gets])
    for source, row in plan.gets:
        spans: list[Span] = []
        for target, length in zip(result_begins, sizes, strict=True):
            spans.append((target + row * length, length))
        exchange.get(source, spans)
    if size > INLINE:
        yield from exchange.confirmed([peer for peer, _ in plan.sends])
    return results


def _exchange_parts(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Exchange unequal parts, with each process what it lacks. (elements,) -> (elements,)"""
    assert isinstance(move, PartsMove)
    x = joined(xs, exchange.dtype)
    outgoing = move.parcels(x, exchange.index)
    for peer, shard in outgoing.items():
        exchange.offer(peer, shard.data_ptr(), shard.nbytes)

    incoming = move.incoming(x, exchange.index, empty)
    if incoming:
        yield exchange.needs([*incoming])
    for source, shard in incoming.items():
        exchange.get(source, [(shard.data_ptr(), shard.nbytes)])
    result = move.unpacked(x, exchange.index, incoming)

    readers = [peer for peer, shard in outgoing.items() if shard.nbytes > INLINE]
    yield from exchange.confirmed(readers)
    return result


# -- sums ------------------------------------------------------------------------------------------
# Of several tensors large ones are summed where they are; the small ones share a buffer. A *column*
# is one of the tensors to sum, as the row of it that each process sums.


def _reduce_scatter(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Reduce-scatter. (n, elements) -> (elements,)"""
    tensors = _tensors_to_sum(xs)
    columns = [list(rows) for rows in tensors]
    totals = [empty((rows.shape[1],), rows.dtype) for rows in tensors]
    yield from _sum_columns(exchange, columns, combining(move), totals)
    return _sums_in_order(xs, totals)


def _all_reduce(exchange: Exchange, xs: Sequence[Tensor], move: Wired) -> Wire:
    """All-reduce (sum or extreme). (elements,) -> (elements,)"""
    n = exchange.n
    tensors = _tensors_to_sum(xs)
    totals = [empty(x.shape, x.dtype) for x in tensors]
    if sum([x.nbytes for x in tensors]) * (n - 1) <= ONE_ROUND:
        columns = [[x] * n for x in tensors]
        yield from _sum_columns(exchange, columns, combining(move), totals)
        return _sums_in_order(xs, totals)

    # Round 0: each process sums one shard of each tensor.
    shards = [_shards(x, n) for x in tensors]
    sums = [_shards(total, n) for total in totals]
    local_sums = [column[exchange.index] for column in sums]
    yield from _sum_columns(exchange, shards, combining(move), local_sums, confirms=False)

    # Round 1: each gets the sums of all others. An offer of this round answers for round 0, since a
    # process makes it after it has read all of round 0.
    for peer in exchange.neighbours:
        exchange.offer_rows(peer, local_sums, round=1)
    yield exchange.needs(exchange.neighbours, round=1)
    for peer in exchange.neighbours:
        exchange.get_rows(peer, [column[peer] for column in sums], round=1)
    if _are_offered_by_address(local_sums):
        yield from exchange.confirmed(exchange.neighbours)
    return _sums_in_order(xs, totals)


def _shards(x: Tensor, n: int) -> list[Tensor]:
    """Return views of the n flat shards of a tensor."""
    shards: list[Tensor] = []
    for index in range(n):
        begin, end = flat_range(x.numel(), n, index)
        shards.append(x[begin:end])
    return shards


def _tensors_to_sum(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors to sum: the large ones, and before these all others in one buffer."""
    if len(xs) == 1:
        return [xs[0].contiguous()]
    small = [x for x in xs if x.nbytes < OWN_SUM]
    large = [x.contiguous() for x in xs if x.nbytes >= OWN_SUM]
    return [joined(small, small[0].dtype), *large] if small else large


def _sums_in_order(xs: Sequence[Tensor], totals: list[Tensor]) -> Tensor | list[Tensor]:
    """Return the sum of each tensor, from those of `_tensors_to_sum`; or of all in one buffer."""
    if len(totals) == 1:
        return totals[0]
    large_sums = iter(totals)
    small_sums: Iterator[Tensor] = iter(())
    small_widths = [x.shape[-1] for x in xs if x.nbytes < OWN_SUM]
    if small_widths:
        small_sums = iter(next(large_sums).split(small_widths))

    sums: list[Tensor] = []
    for x in xs:
        is_small = x.nbytes < OWN_SUM
        sums.append(next(small_sums if is_small else large_sums))
    return sums


def _sum_columns(
    exchange: Exchange,
    columns: list[list[Tensor]],
    combine: Combine,
    totals: list[Tensor],
    *,
    confirms: bool = True,
) -> Wire:
    """Sum this process's row of each column with the rows that all others offer, into `totals`.

    Offers each process its row of each column. Wait at the end until the others have read these,
    unless `confirms` is False.
    """
    peers = exchange.neighbours
    for peer in peers:
        exchange.offer_rows(peer, [rows[peer] for rows in columns])
    local_rows = [rows[exchange.index] for rows in columns]
    sizes = [row.nbytes for row in local_rows]
    yield exchange.needs(peers)

    offers = {peer: exchange.take_rows(peer, sizes) for peer in peers}
    itemsize = local_rows[0].element_size()
    largest = min(CHUNK, max(sizes))
    scratch = [empty((largest // itemsize,), local_rows[0].dtype) for _ in peers]
    confirms = confirms and _are_offered_by_address(local_rows)
    chunks = _chunks(sizes)
    for number, (column, begin, size) in enumerate(chunks, start=1):
        chunk = local_rows[column]
        total = totals[column]
        received = scratch
        if size < sizes[column] or size < largest:
            elements = slice(begin // itemsize, (begin + size) // itemsize)
            chunk = chunk[elements]
            total = total[elements]
            received = [row[: size // itemsize] for row in scratch]

        for peer, row in zip(peers, received, strict=True):
            exchange.copy(peer, offers[peer][column], [(row.data_ptr(), size)], begin)
            if confirms and number == len(chunks):
                exchange.confirm(peer)  # before the last addition, so that the peer waits less
        summands = [chunk, *received]  # of this process, of the next one, ...
        first = exchange.n - exchange.index  # the summand of process 0
        combined(summands[first:] + summands[:first], combine, chunk, total)
    if confirms:
        yield from exchange.confirmed(peers)


def _chunks(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Divide columns of these sizes into chunks: (column, begin, size), in bytes."""
    chunks: list[tuple[int, int, int]] = []
    for column, size in enumerate(sizes):
        for begin in range(0, size, CHUNK):
            chunks.append((column, begin, min(CHUNK, size - begin)))
    return chunks


def _are_offered_by_address(rows: Sequence[Tensor]) -> bool:
    return len(rows) > 1 or rows[0].nbytes > INLINE


_WIRES: dict[str, Callable[[Exchange, Sequence[Tensor], Wired], Wire]] = {
    "reduce": _all_reduce,
    "scatter": _reduce_scatter,
    "gather": _move_rows,
    "exchange": _move_rows,
    "permute": _move_rows,
    "broadcast": _move_rows,
    "parts": _exchange_parts,
}
