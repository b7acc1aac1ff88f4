"""Collectives among the processes of one machine: everybody reads what it needs from where it lies.

Sums are made in the fixed tree of `sums`, in parts that stay in the processor's cache: a shard is read from each of
the others, added, and written to the result at once, so there is no buffer for what arrives.

Legend: n processes; `rows` is (n, elements) with a row for each process; `x` is (elements,).

    small rows  one swap: see `swaps`
    reduce      not large: recursive doubling    log2(n) rounds
                large: scatter, then gather      each process sums its part of everybody's x
    scatter     each reads its row of everybody's
    gather, exchange, permute, broadcast         each reads what it gets
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
"""Bytes up to which a message of `send` is put into the ring, if at least half of that is free: its receiver may take its time.

So there is room for what has to be skipped before it, and for others' messages: no call waits for a receiver of messages.
"""
MESSAGE, ANSWER = 4, 3
"""The last bits of a key: a bit that tells messages from collectives, and the part that says that a tensor has been read."""
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
        """Wait for messages, letting what else is under way go on."""
        self.neighbours.wait(needs, go_on)

    def ready(self, needs: Sequence[Need]) -> bool:
        """Return whether all messages are there."""
        return all(self.neighbours.look(peer, key) for peer, key in needs)

    def helper(self, what: What) -> None:
        """Return None: whoever waits lets all go on."""

    def broken(self, error: BaseException) -> None:
        """Take leave of the group: after an error, others must not read what may no longer be there."""
        for peer in self.peers.values():
            peer.close(error)

    def send(self, xs: tuple[Tensor, ...], to: int, what: What) -> Departed | None:
        """Send a message: a short one travels at once, a long one is copied, to be read when its receiver comes to it."""
        turn = TransferTurn(self, next(self.messages(to, sent=True)), what)
        with self.lock:
            if sum([x.nbytes for x in xs]) <= INLINE_MESSAGE and self.peers[to].outgoing.roomy:
                buffer = xs[0] if len(xs) == 1 and is_plain(xs[0]) else packed(xs)
                turn.put(to, buffer.data_ptr(), buffer.nbytes)
                return None
            buffer = packed(xs)
            turn.lies(to, buffer.data_ptr(), buffer.nbytes)
        return Departed(Sent(self.neighbours, (self.peers[to], turn.key | ANSWER)), buffer)

    def receive(self, make: Callable[[], Tensor], source: int, what: What) -> Coming:
        """Return how to get the next message of a process, once it is there."""
        turn = TransferTurn(self, next(self.messages(source, sent=False)), what)

        def take() -> Tensor:
            into = make()
            turn.get(source, into.data_ptr(), into.nbytes)
            return into

        return Coming(turn.needs(source), take)

    def messages(self, peer: int, *, sent: bool) -> Iterator[int]:
        """Return the keys of the messages to a process, or from it, one after the other."""
        keys = self._messages.get((peer, sent))
        if keys is None:
            keys = self._messages[peer, sent] = map((self._group | MESSAGE).__or__, cycle(range(0, 1 << 31, 8)))
        return keys


class Sent:
    """A message that has been sent, and the answer that says that it has been read."""

    def __init__(self, neighbours: Neighbours, answer: Need) -> None:
        self._neighbours, self._answer = neighbours, cast("Need | None", answer)

    def is_completed(self) -> bool:
        """Return whether its memory is needed no more: it has been read, or never will be."""
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
    """One collective (or message) among the processes of a link.

    A message's key is the group, the number of the call, whether it is a collective or a message, and which part of it.
    """

    __slots__ = ("index", "key", "n", "neighbours", "others", "peers", "stamp", "what")

    def __init__(self, link: Direct, key: int, what: Stamped) -> None:
        self.index, self.n, self.others, self.peers = link.index, link.n, link.others, link.peers
        self.neighbours, self.key, self.what, self.stamp = link.neighbours, key, what, what.stamp

    def put(self, to: int, address: int, size: int, part: int = 0) -> None:
        """Let a process get a tensor: small ones travel at once, large ones must stay until they have been read."""
        if size > INLINE:
            self.lies(to, address, size, part)
        elif not self.peers[to].offer(self.key | part, INSIDE, size, self.stamp, address):
            self.neighbours.press(self.peers[to], (self.key | part, INSIDE, size, self.stamp, address))

    def lies(self, to: int, address: int, size: int, part: int = 0) -> None:
        """Tell a process where a tensor lies, whatever its size."""
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
        """Return where a tensor lies that a process told of."""
        return self._taken(source, size, part)[0]

    def read(self, source: int, into: int, address: int, size: int) -> None:
        """Copy from the memory of a process."""
        self.peers[source].read(into, address, size)

    def done(self, source: int) -> None:
        """Tell a process that its tensor has been read."""
        self.lies(source, READ, 0, ANSWER)

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
    """(elements,) -> (elements,): everybody gets the sum, or the extreme."""
    combine = combining(move)
    doubles = turn.n & (turn.n - 1) == 0 and (turn.n == 2 or x.dtype not in WIDER)  # wide sums are rounded once
    return _doubling(turn, x, combine) if doubles and x.nbytes <= SMALL else _in_parts(turn, x, combine)


def _doubling(turn: TransferTurn, x: Tensor, combine: Combine) -> Wire:
    """Add with the neighbour, then with the neighbours' neighbours: the levels of the tree, one after the other."""
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
    """Wait until these processes have read what was put for them."""
    answers = turn.answers(*readers, size=size)
    if answers:
        yield answers
        turn.answered(answers)


def _in_parts(turn: TransferTurn, x: Tensor, combine: Combine) -> Wire:
    """Everybody sums one part of all tensors, then everybody gets the parts."""
    size, item, each = x.nbytes, x.element_size(), -(-x.numel() // turn.n)
    parts = [(min(place * each, x.numel()), min((place + 1) * each, x.numel())) for place in range(turn.n)]
    result = _new((x.numel(),), x)
    for other in turn.others:
        turn.lies(other, x.data_ptr(), size)
    yield turn.needs(*turn.others)
    begin, end = parts[turn.index]
    places = {other: turn.where(other, size) + begin * item for other in turn.others}
    _sum(turn, places, x[begin:end], result[begin:end], combine)
    for other in turn.others:
        turn.lies(other, result.data_ptr(), size, part=1)
    yield turn.needs(*turn.others, part=1)
    for other in turn.others:
        begin, end = parts[other]
        place = turn.where(other, size, part=1)
        turn.read(other, result.data_ptr() + begin * item, place + begin * item, (end - begin) * item)
        turn.done(other)
    yield from _settled(turn, turn.others, size)
    return result


def _sum(turn: TransferTurn, places: dict[int, int], own: Tensor, out: Tensor, combine: Combine) -> None:
    """Sum what lies at these places of the others with the own tensor, shard by shard."""
    item, length = own.element_size(), min(PIECE // own.element_size(), own.numel())
    scratch = torch.empty((turn.n, length), dtype=own.dtype)
    for begin in range(0, own.numel(), length or 1):
        kept = own[begin : begin + length]
        xs = [kept if place == turn.index else scratch[place, : kept.numel()] for place in range(turn.n)]
        for other, place in places.items():
            turn.read(other, xs[other].data_ptr(), place + begin * item, kept.nbytes)
        combined(xs, combine, kept, out[begin : begin + length])


def scatter(turn: TransferTurn, rows: Tensor, move: Wired) -> Wire:
    """(n, elements) -> (elements,): everybody gets the sum of the rows that were meant for it."""
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
    """(elements,) -> (n, elements): everybody gets everybody's."""
    own, size = x.data_ptr(), x.nbytes
    for other in turn.others:
        turn.put(other, own, size)
    return (yield from _collected(turn, own, _new((turn.n, x.numel()), x), size))


def exchange(turn: TransferTurn, rows: Tensor, move: Wired) -> Wire:
    """(n, elements) -> (n, elements): row i goes to process i."""
    base, size = rows.data_ptr(), rows.nbytes // turn.n
    for other in turn.others:
        turn.put(other, base + other * size, size)
    return (yield from _collected(turn, base + turn.index * size, _new(rows.shape, rows), size))


def _collected(turn: TransferTurn, own: int, result: Tensor, size: int) -> Wire:
    """Get a row from everybody; the own one lies at `own`."""
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
    """(elements,) -> (elements,): everybody gets the source's."""
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
    """(elements,) -> (elements,): everybody gets from each what it lacks."""
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
