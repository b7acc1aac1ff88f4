"""Collectives between the processes of one machine: each reads what it needs from the memory of the others.

Sums use the fixed tree of `arithmetic`, in chunks that fit into the processor's cache: a chunk is read from each of
the others, added, and written to the result, so there is no receive buffer.

Legend: n processes; `rows` is (n, elements) with a row for each process; `x` is (elements,).

    small rows  one swap: see `swaps`
    reduce      not large: recursive doubling    log2(n) rounds
                large: scatter, then gather      each process sums its row of all x
    scatter     each reads its row of all x
    gather, exchange, permute, broadcast         each reads its result
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from itertools import cycle
from typing import cast

import torch
from torch import Tensor

from fshard.mesh.collectives.moves import Broadcast, Permute, Wired, combining, is_plain
from fshard.mesh.layout.arithmetic import WIDER, Combine, combined
from fshard.mesh.reshard.exchange import Parts
from fshard.mesh.runtimes.link import Coming, Departed, Stamped, What, Wire, packed
from fshard.mesh.shared_memory.neighbours import INLINE, SLICE, Need, Neighbours, differs, empty
from fshard.mesh.shared_memory.rings import INSIDE, READ, SIZE, Message
from fshard.mesh.shared_memory.swaps import Swapping, swap_of

FEW = 192 << 10
"""Bytes up to which a process may send its tensor to all others, to be added there."""
SMALL = 1 << 20
"""Bytes up to which a reduction is best done in few rounds rather than in few bytes."""
INLINE_MESSAGE = SIZE // 8
"""Bytes up to which a message of `send` is put into the ring, if at least half of the ring is free.

So other messages still fit while the receiver is late: no call waits for a receiver of messages.
"""
MESSAGE, ANSWER = 4, 3
"""Last bits of a key: a bit that distinguishes messages from collectives, and the value that confirms a read."""
PIECE = 256 << 10
"""Bytes that are read and added at a time."""


class Direct:
    """The link among the processes of one group, all of this machine."""

    def __init__(self, neighbours: Neighbours, members: tuple[int, ...], rank: int) -> None:
        self.index, self.n = members.index(rank), len(members)
        self.neighbours = neighbours
        self.peers = {place: neighbours.known[other] for place, other in enumerate(members) if other != rank}
        self.others = [(self.index + step) % self.n for step in range(1, self.n)]
        self.lock = neighbours.lock
        self._group = zlib.crc32(repr(members).encode()) << 32
        self._calls = cycle(range(1 << 28))
        self._messages: dict[tuple[int, bool], Iterator[int]] = {}

    def begin(self, move: Wired, x: Tensor, what: What) -> Wire:
        """Return the wire that carries a move on a buffer."""
        return self.carrier(move, x, what)(self.number(), x)

    def carrier(self, move: Wired, x: Tensor, what: Stamped) -> Callable[[int, Tensor], Wire]:
        """Return the function that makes wires for a move on buffers like this one, given the number of the call."""
        swap = swap_of(move, self.index, self.n)
        size = x.nbytes // swap.cut
        if move.wire != "parts" and size <= INLINE and (move.wire != "reduce" or len(self.others) * size <= FEW):
            return Swapping(move, swap, x, self.neighbours, self.peers, what).wire
        wire = WIRES[move.wire]
        return lambda key, x: wire(TransferTurn(self, key, what), x, move)

    def number(self) -> int:
        """Return the key of the next collective's messages."""
        return self._group | next(self._calls) << 3

    def wait(self, needs: Sequence[Need], timeout: timedelta, go_on: Callable[[], bool]) -> None:
        """Wait for messages; advance what else is in progress meanwhile."""
        self.neighbours.wait(needs, go_on)

    def ready(self, needs: Sequence[Need]) -> bool:
        """Return True if all messages have arrived."""
        return all(self.neighbours.look(peer, key) for peer, key in needs)

    def helper(self, what: What) -> None:
        """Return None: every waiter advances all wires."""

    def broken(self, error: BaseException) -> None:
        """Leave the group: after an error, others must not read memory that may be freed."""
        for peer in self.peers.values():
            peer.close(error)

    def send(self, xs: tuple[Tensor, ...], to: int, what: What) -> Departed | None:
        """Send a message: short ones inline, long ones as a copy that the receiver reads when it gets there."""
        turn = TransferTurn(self, next(self.messages(to, sent=True)), what)
        with self.lock:
            if sum([x.nbytes for x in xs]) <= INLINE_MESSAGE and self.peers[to].outgoing.roomy:
                buffer = xs[0] if len(xs) == 1 and is_plain(xs[0]) else packed(xs)
                turn.put(to, buffer.data_ptr(), buffer.nbytes)
                return None
            buffer = packed(xs)
            turn.offer_address(to, buffer.data_ptr(), buffer.nbytes)
        return Departed(Sent(self.neighbours, (self.peers[to], turn.key | ANSWER)), buffer)

    def receive(self, make: Callable[[], Tensor], source: int, what: What) -> Coming:
        """Return a function that returns the next message of a process, once it has arrived."""
        turn = TransferTurn(self, next(self.messages(source, sent=False)), what)

        def take() -> Tensor:
            into = make()
            turn.get(source, into.data_ptr(), into.nbytes)
            return into

        return Coming(turn.needs(source), take)

    def messages(self, peer: int, *, sent: bool) -> Iterator[int]:
        """Yield the keys of the messages to a process, or from it, in order."""
        keys = self._messages.get((peer, sent))
        if keys is None:
            keys = self._messages[peer, sent] = map((self._group | MESSAGE).__or__, cycle(range(0, 1 << 31, 8)))
        return keys


class Sent:
    """A sent message, and the confirmation that it has been read."""

    def __init__(self, neighbours: Neighbours, answer: Need) -> None:
        self._neighbours, self._answer = neighbours, cast("Need | None", answer)

    def is_completed(self) -> bool:
        """Return True if its memory can be freed: it has been read, or never will be."""
        if self._answer is not None:
            peer, key = self._answer
            if self._neighbours.look(peer, key) or peer.gone:
                peer.inbox.pop(key, None)
                self._answer = None
        return self._answer is None

    def wait(self, timeout: timedelta) -> None:
        """Wait until it has been read."""
        until = time.monotonic() + timeout.total_seconds()
        while not self.is_completed() and time.monotonic() < until:
            self._neighbours.sleep(SLICE)


class TransferTurn:
    """One collective (or message) between the processes of a link.

    A message's key is the group, the number of the call, its kind (collective or message) and its part.
    """

    __slots__ = ("index", "key", "n", "neighbours", "others", "peers", "stamp", "what")

    def __init__(self, link: Direct, key: int, what: Stamped) -> None:
        self.index, self.n, self.others, self.peers = link.index, link.n, link.others, link.peers
        self.neighbours, self.key, self.what, self.stamp = link.neighbours, key, what, what.stamp

    def put(self, to: int, address: int, size: int, part: int = 0) -> None:
        """Offer a tensor to a process: small ones are sent inline, large ones must stay until they have been read."""
        if size > INLINE:
            self.offer_address(to, address, size, part)
        elif not self.peers[to].offer(self.key | part, INSIDE, size, self.stamp, address):
            self.neighbours.press(self.peers[to], (self.key | part, INSIDE, size, self.stamp, address))

    def offer_address(self, to: int, address: int, size: int, part: int = 0) -> None:
        """Send a process the address of a tensor of any size."""
        if not self.peers[to].offer(self.key | part, address, size, self.stamp):
            self.neighbours.press(self.peers[to], (self.key | part, address, size, self.stamp))

    def needs(self, *sources: int, part: int = 0) -> list[Need]:
        """Return the conditions to wait for before reading from these processes."""
        return [(self.peers[source], self.key | part) for source in sources]

    def answers(self, *readers: int, size: int) -> list[Need]:
        """Return the conditions to wait for before a tensor that these processes read may change."""
        return [(self.peers[reader], self.key | ANSWER) for reader in readers] if size > INLINE else []

    def get(self, source: int, into: int, size: int, part: int = 0) -> None:
        """Get a tensor of a process, which is there."""
        address, _, _, place = self._taken(source, size, part)
        if address == INSIDE:
            ctypes.memmove(into, place, size)
        else:
            self.read(source, into, address, size)
            self.done(source)

    def where(self, source: int, size: int, part: int = 0) -> int:
        """Return the address that a process has sent."""
        return self._taken(source, size, part)[0]

    def read(self, source: int, into: int, address: int, size: int) -> None:
        """Copy from the memory of a process."""
        self.peers[source].read(into, address, size)

    def done(self, source: int) -> None:
        """Confirm to a process that its tensor has been read."""
        self.offer_address(source, READ, 0, ANSWER)

    def answered(self, needs: list[Need]) -> None:
        """Put away the answers that have come."""
        for peer, key in needs:
            del peer.inbox[key]

    def _taken(self, source: int, size: int, part: int) -> Message:
        message = self.peers[source].inbox.pop(self.key | part)
        if message[2] != self.stamp or message[1] != size:
            raise differs(self.what, self.peers[source], message[2])
        return message


# -- the wires --------------------------------------------------------------------------------------------------


def reduce(turn: TransferTurn, x: Tensor, move: Wired) -> Wire:
    """All-reduce (sum or extreme). (elements,) -> (elements,)"""
    combine = combining(move)
    doubles = turn.n & (turn.n - 1) == 0 and (turn.n == 2 or x.dtype not in WIDER)  # wide sums are rounded once
    return _doubling(turn, x, combine) if doubles and x.nbytes <= SMALL else _in_parts(turn, x, combine)


def _doubling(turn: TransferTurn, x: Tensor, combine: Combine) -> Wire:
    """Recursive doubling: add with the neighbour, then with the next level of the tree."""
    total, size, distance = x, x.nbytes, 1
    received = result = x
    while distance < turn.n:
        other = turn.index ^ distance
        turn.put(other, total.data_ptr(), size)
        if distance == 1:
            received, result = torch.empty_like(x), torch.empty_like(x)
        yield turn.needs(other)
        turn.get(other, received.data_ptr(), size)
        yield from _settled(turn, [other], size)
        pair = [received, total] if turn.index & distance else [total, received]  # 0.0 and -0.0 keep their order
        total = combined(pair, combine, None, result)
        distance *= 2
    return total


def _settled(turn: TransferTurn, readers: Sequence[int], size: int) -> Generator[list[Need], None, None]:
    """Wait until these processes have read what was offered to them."""
    answers = turn.answers(*readers, size=size)
    if answers:
        yield answers
        turn.answered(answers)


def _in_parts(turn: TransferTurn, x: Tensor, combine: Combine) -> Wire:
    """All-reduce: each process sums one row of all tensors, then all gather the rows."""
    size, item, each = x.nbytes, x.element_size(), -(-x.numel() // turn.n)
    parts = [(min(place * each, x.numel()), min((place + 1) * each, x.numel())) for place in range(turn.n)]
    result = _new((x.numel(),), x)
    for other in turn.others:
        turn.offer_address(other, x.data_ptr(), size)
    yield turn.needs(*turn.others)
    begin, end = parts[turn.index]
    places = {other: turn.where(other, size) + begin * item for other in turn.others}
    _sum(turn, places, x[begin:end], result[begin:end], combine)
    for other in turn.others:
        turn.offer_address(other, result.data_ptr(), size, part=1)
    yield turn.needs(*turn.others, part=1)
    for other in turn.others:
        begin, end = parts[other]
        place = turn.where(other, size, part=1)
        turn.read(other, result.data_ptr() + begin * item, place + begin * item, (end - begin) * item)
        turn.done(other)
    yield from _settled(turn, turn.others, size)
    return result


def _sum(turn: TransferTurn, places: dict[int, int], own: Tensor, out: Tensor, combine: Combine) -> None:
    """Sum the tensors at these addresses of the others and the local one, chunk by chunk."""
    item, length = own.element_size(), min(PIECE // own.element_size(), own.numel())
    scratch = torch.empty((turn.n, length), dtype=own.dtype)
    for begin in range(0, own.numel(), length or 1):
        kept = own[begin : begin + length]
        xs = [kept if place == turn.index else scratch[place, : kept.numel()] for place in range(turn.n)]
        for other, place in places.items():
            turn.read(other, xs[other].data_ptr(), place + begin * item, kept.nbytes)
        combined(xs, combine, kept, out[begin : begin + length])


def scatter(turn: TransferTurn, rows: Tensor, move: Wired) -> Wire:
    """Reduce-scatter. (n, elements) -> (elements,)"""
    base, size = rows.data_ptr(), rows.nbytes // turn.n
    for other in turn.others:
        turn.put(other, base + other * size, size)
    combine, own = combining(move), rows[turn.index]
    out = _new(own.shape, rows)
    yield turn.needs(*turn.others)
    if size > INLINE:
        _sum(turn, {other: turn.where(other, size) for other in turn.others}, own, out, combine)
        for other in turn.others:
            turn.done(other)
        yield from _settled(turn, turn.others, size)
        return out
    xs = [own if place == turn.index else torch.empty_like(own) for place in range(turn.n)]
    for other in turn.others:
        turn.get(other, xs[other].data_ptr(), size)
    return combined(xs, combine, own, out)


def gather(turn: TransferTurn, x: Tensor, move: Wired) -> Wire:
    """All-gather. (elements,) -> (n, elements)"""
    own, size = x.data_ptr(), x.nbytes
    for other in turn.others:
        turn.put(other, own, size)
    return (yield from _collected(turn, own, _new((turn.n, x.numel()), x), size))


def exchange(turn: TransferTurn, rows: Tensor, move: Wired) -> Wire:
    """All-to-all: row i is sent to process i. (n, elements) -> (n, elements)"""
    base, size = rows.data_ptr(), rows.nbytes // turn.n
    for other in turn.others:
        turn.put(other, base + other * size, size)
    return (yield from _collected(turn, base + turn.index * size, _new(rows.shape, rows), size))


def _collected(turn: TransferTurn, own: int, result: Tensor, size: int) -> Wire:
    """Receive a row from every process; the local one is `own`."""
    base = result.data_ptr()
    ctypes.memmove(base + turn.index * size, own, size)
    yield turn.needs(*turn.others)
    for other in turn.others:
        turn.get(other, base + other * size, size)
    yield from _settled(turn, turn.others, size)
    return result


def permute(turn: TransferTurn, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (elements,): along the pairs of the move, zeros where none ends."""
    assert isinstance(move, Permute)
    size, here = x.nbytes, turn.index
    sources = [source for source, to in move.pairs if to == here != source]
    readers = [to for source, to in move.pairs if source == here != to]
    for to in readers:
        turn.put(to, x.data_ptr(), size)
    if sources:
        result = _new(x.shape, x)
        yield turn.needs(*sources)
        turn.get(sources[0], result.data_ptr(), size)
    else:
        result = x.clone() if (here, here) in move.pairs else torch.zeros_like(x)
    yield from _settled(turn, readers, size)
    return result


def broadcast(turn: TransferTurn, x: Tensor, move: Wired) -> Wire:
    """Broadcast. (elements,) -> (elements,)"""
    assert isinstance(move, Broadcast)
    size = x.nbytes
    for other in turn.others if turn.index == move.source else ():
        turn.put(other, x.data_ptr(), size)
    result = _new(x.shape, x)
    if turn.index != move.source:
        yield turn.needs(move.source)
        turn.get(move.source, result.data_ptr(), size)
        return result
    result.copy_(x)  # while the others read
    yield from _settled(turn, turn.others, size)
    return result


def parts(turn: TransferTurn, x: Tensor, move: Wired) -> Wire:
    """Exchange of unequal parts. (elements,) -> (elements,)"""
    assert isinstance(move, Parts)
    outgoing = move.parcels(x, turn.index)
    incoming = {source: _new((size,), x) for source, size in move.expected(x, turn.index).items()}
    for to, part in outgoing.items():
        turn.put(to, part.data_ptr(), part.nbytes)
    if incoming:
        yield turn.needs(*incoming)
    for source, part in incoming.items():
        turn.get(source, part.data_ptr(), part.nbytes)
    result = move.unpacked(x, turn.index, incoming)
    for to, part in outgoing.items():
        yield from _settled(turn, [to], part.nbytes)
    return result


def _new(shape: Sequence[int], like: Tensor) -> Tensor:
    return empty(tuple(shape), like.dtype)


WIRES: dict[str, Callable[[TransferTurn, Tensor, Wired], Wire]] = {
    wire.__name__: wire for wire in (reduce, gather, scatter, exchange, permute, broadcast, parts)
}
