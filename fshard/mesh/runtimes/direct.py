"""Collectives among the processes of one machine: everybody reads what it needs from where it lies.

Sums are made in the fixed tree of `sums`, in pieces that stay in the processor's cache: a piece is read from each of
the others, added, and written to the result at once, so there is no buffer for what arrives.

Legend: n processes; `rows` is (n, elements) with a row for each process; `x` is (elements,).

    reduce      small: recursive doubling        log2(n) rounds (or one in which all get all)
                large: scatter, then gather      each process sums its part of everybody's x
    scatter     each reads its row of everybody's
    gather, exchange, permute, broadcast         each reads what it gets
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import cycle

import torch
from torch import Tensor

from fshard.errors import MismatchError
from fshard.mesh.moves import Broadcast, Permute, Wired, combining
from fshard.mesh.runtimes.buffers import empty
from fshard.mesh.runtimes.link import What, Wire, Work
from fshard.mesh.runtimes.neighbours import INLINE, INSIDE, READ, Message, Neighbour
from fshard.mesh.sums import WIDER, Combine, combined

SMALL = 256 << 10
"""Bytes up to which a reduction is best done in few rounds rather than in few bytes."""
FOREVER = timedelta.max
"""A link knows its own limit."""
PIECE = 256 << 10
"""Bytes that are read and added at a time."""


class Direct:
    """The link among the processes of one group, all of this machine."""

    def __init__(
        self, neighbours: Mapping[int, Neighbour], members: tuple[int, ...], rank: int, timeout: timedelta
    ) -> None:
        self.index, self.n, self.timeout = members.index(rank), len(members), timeout.total_seconds()
        self.peers = {place: neighbours[other] for place, other in enumerate(members) if other != rank}
        self.others = [(self.index + step) % self.n for step in range(1, self.n)]
        self._group = zlib.crc32(repr(members).encode()) << 32
        self._calls = cycle(range(1 << 28))
        self._sent: dict[int, Iterator[int]] = {}
        self._received: dict[int, Iterator[int]] = {}

    def begin(self, move: Wired, x: Tensor, what: What) -> Wire:
        """Start a collective."""
        turn = Turn(self, self._group | next(self._calls) << 3, what)
        return WIRES[move.wire](turn, x, move)

    def send(self, x: Tensor, to: int, what: What) -> Work:
        """Send a message; what is returned waits until the tensor may change again."""
        turn = Turn(self, self._group | _next(self._sent, to) << 3 | 4, what)
        turn.put(to, x.data_ptr(), x.nbytes)
        return Leaving(turn, to, x)

    def receive(self, into: Tensor, source: int, what: What) -> Work:
        """Receive the next message of a process, when the work that is returned is waited for."""
        return Arriving(Turn(self, self._group | _next(self._received, source) << 3 | 4, what), source, into)


def _next(counters: dict[int, Iterator[int]], peer: int) -> int:
    return next(counters.setdefault(peer, cycle(range(1 << 28))))


class Turn:
    """One collective (or message) among the processes of a link.

    A message's key is the group, the number of the call, whether it is a collective or a message, and which part of it.
    """

    __slots__ = ("index", "key", "n", "others", "peers", "stamp", "timeout", "what")

    def __init__(self, link: Direct, key: int, what: What) -> None:
        self.index, self.n, self.others, self.peers, self.timeout = (
            link.index,
            link.n,
            link.others,
            link.peers,
            link.timeout,
        )
        self.key, self.what, self.stamp = key, what, what.stamp

    def put(self, to: int, address: int, size: int, part: int = 0) -> None:
        """Let a process get a tensor: small ones travel at once, large ones must stay until they have been read."""
        peer = self.peers[to]
        post = peer.post if size > INLINE else peer.post_inside
        post(self.key | part, address, size, self.stamp, self.timeout)

    def get(self, source: int, into: int, size: int, part: int = 0) -> None:
        """Get a tensor of a process."""
        address, _, _, text = self._taken(source, size, part)
        if address == INSIDE:
            ctypes.memmove(into, text, size)
        else:
            self.read(source, into, address, size)
            self.done(source)

    def lies(self, to: int, address: int, size: int, part: int = 0) -> None:
        """Tell a process where a tensor lies, whatever its size."""
        self.peers[to].post(self.key | part, address, size, self.stamp, self.timeout)

    def where(self, source: int, size: int, part: int = 0) -> int:
        """Return where a tensor lies that a process told of."""
        return self._taken(source, size, part)[0]

    def read(self, source: int, into: int, address: int, size: int) -> None:
        """Copy from the memory of a process."""
        self.peers[source].read(into, address, size)

    def done(self, source: int) -> None:
        """Tell a process that its tensor has been read."""
        self.peers[source].post(self.key | 3, READ, 0, self.stamp, self.timeout)

    def settle(self, to: int, size: int) -> None:
        """Wait until a process has read a tensor of this size, if it had to read it."""
        if size > INLINE:
            self.peers[to].take(self.key | 3, self.timeout)

    def settled(self, to: int) -> bool:
        """Return whether a process has said that it has read a tensor."""
        return self.peers[to].came(self.key | 3)

    def _taken(self, source: int, size: int, part: int) -> Message:
        message = self.peers[source].take(self.key | part, self.timeout)
        if message[2] != self.stamp or message[1] != size:
            raise MismatchError(
                f"{self.what}: process {self.peers[source].rank} makes another call, or makes it on another shape or dtype. "
                "Every process of a group has to call the same collectives in the same order, on equal shapes and dtypes; "
                "run with FSHARD_CHECK=1 to see both calls."
            )
        return message


class Arriving:
    """A message that is to come."""

    __slots__ = ("into", "source", "turn")

    def __init__(self, turn: Turn, source: int, into: Tensor) -> None:
        self.turn, self.source, self.into = turn, source, into

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """Get it."""
        self.turn.get(self.source, self.into.data_ptr(), self.into.nbytes)
        return True

    def is_completed(self) -> bool:
        """Return False: nobody else will wait for it."""
        return False


class Leaving:
    """A message that has been sent; its tensor must stay until it is done."""

    __slots__ = ("kept", "to", "turn")

    def __init__(self, turn: Turn, to: int, kept: Tensor) -> None:
        self.turn, self.to = turn, to
        self.kept = kept if kept.nbytes > INLINE else None

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """Wait until it has been read."""
        if self.kept is not None:
            self.turn.settle(self.to, self.kept.nbytes)
            self.kept = None
        return True

    def is_completed(self) -> bool:
        """Return whether it has been read."""
        if self.kept is not None and self.turn.settled(self.to):
            self.kept = None
        return self.kept is None


# -- the wires --------------------------------------------------------------------------------------------------


def reduce(turn: Turn, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (elements,): everybody gets the sum, or the extreme."""
    combine = combining(move)
    if x.nbytes > SMALL:
        return _in_parts(turn, x, combine)
    doubles = turn.n & (turn.n - 1) == 0 and (turn.n == 2 or x.dtype not in WIDER)  # wide sums are rounded once
    return _doubling(turn, x, combine) if doubles else _all_to_all(turn, x, combine)


def _doubling(turn: Turn, x: Tensor, combine: Combine) -> Wire:
    """Add with the neighbour, then with the neighbours' neighbours: the levels of the tree, one after the other."""
    total, received, result, size, distance = x, torch.empty_like(x), torch.empty_like(x), x.nbytes, 1
    turn.put(turn.index ^ 1, x.data_ptr(), size)
    yield ()
    while True:
        other = turn.index ^ distance
        turn.get(other, received.data_ptr(), size)
        turn.settle(other, size)
        pair = [received, total] if turn.index & distance else [total, received]  # 0.0 and -0.0 keep their order
        total = combined(pair, combine, None, result)
        distance *= 2
        if distance == turn.n:
            return total
        turn.put(turn.index ^ distance, total.data_ptr(), size)


def _all_to_all(turn: Turn, x: Tensor, combine: Combine) -> Wire:
    """Everybody gets everybody's, and adds."""
    size = x.nbytes
    for other in turn.others:
        turn.put(other, x.data_ptr(), size)
    yield ()
    xs = [x if place == turn.index else torch.empty_like(x) for place in range(turn.n)]
    for other in turn.others:
        turn.get(other, xs[other].data_ptr(), size)
    for other in turn.others:
        turn.settle(other, size)
    return combined(xs, combine, x, torch.empty_like(x))


def _in_parts(turn: Turn, x: Tensor, combine: Combine) -> Wire:
    """Everybody sums one part of all tensors, then everybody gets the parts."""
    size, item, each = x.nbytes, x.element_size(), -(-x.numel() // turn.n)
    parts = [(min(place * each, x.numel()), min((place + 1) * each, x.numel())) for place in range(turn.n)]
    result = _new((x.numel(),), x)
    for other in turn.others:
        turn.lies(other, x.data_ptr(), size)
    yield ()
    begin, end = parts[turn.index]
    places = {other: turn.where(other, size) + begin * item for other in turn.others}
    _sum(turn, places, x[begin:end], result[begin:end], combine)
    for other in turn.others:
        turn.lies(other, result.data_ptr(), size, part=1)
    for other in turn.others:
        begin, end = parts[other]
        place = turn.where(other, size, part=1)
        turn.read(other, result.data_ptr() + begin * item, place + begin * item, (end - begin) * item)
        turn.done(other)
    for other in turn.others:
        turn.settle(other, size)
    return result


def _sum(turn: Turn, places: dict[int, int], own: Tensor, out: Tensor, combine: Combine) -> None:
    """Sum what lies at these places of the others with the own tensor, piece by piece."""
    item, length = own.element_size(), min(PIECE // own.element_size(), own.numel())
    scratch = torch.empty((turn.n, length), dtype=own.dtype)
    for begin in range(0, own.numel(), length or 1):
        kept = own[begin : begin + length]
        xs = [kept if place == turn.index else scratch[place, : kept.numel()] for place in range(turn.n)]
        for other, place in places.items():
            turn.read(other, xs[other].data_ptr(), place + begin * item, kept.nbytes)
        combined(xs, combine, kept, out[begin : begin + length])


def scatter(turn: Turn, rows: Tensor, move: Wired) -> Wire:
    """(n, elements) -> (elements,): everybody gets the sum of the rows that were meant for it."""
    combine, size, base, own = combining(move), rows.nbytes // turn.n, rows.data_ptr(), rows[turn.index]
    out = _new(own.shape, rows)
    for other in turn.others:
        turn.put(other, base + other * size, size)
    yield ()
    if size > INLINE:
        _sum(turn, {other: turn.where(other, size) for other in turn.others}, own, out, combine)
        for other in turn.others:
            turn.done(other)
        for other in turn.others:
            turn.settle(other, size)
        return out
    xs = [own if place == turn.index else torch.empty_like(own) for place in range(turn.n)]
    for other in turn.others:
        turn.get(other, xs[other].data_ptr(), size)
    return combined(xs, combine, own, out)


def gather(turn: Turn, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (n, elements): everybody gets everybody's."""
    size, result = x.nbytes, _new((turn.n, x.numel()), x)
    for other in turn.others:
        turn.put(other, x.data_ptr(), size)
    return _collected(turn, x.data_ptr(), result, size, x)


def exchange(turn: Turn, rows: Tensor, move: Wired) -> Wire:
    """(n, elements) -> (n, elements): row i goes to process i."""
    size, base, result = rows.nbytes // turn.n, rows.data_ptr(), _new(rows.shape, rows)
    for other in turn.others:
        turn.put(other, base + other * size, size)
    return _collected(turn, base + turn.index * size, result, size, rows)


def _collected(turn: Turn, own: int, result: Tensor, size: int, kept: Tensor) -> Wire:
    """Get a row from everybody; the own one lies at `own`."""
    base = result.data_ptr()
    ctypes.memmove(base + turn.index * size, own, size)
    yield ()
    for other in turn.others:
        turn.get(other, base + other * size, size)
    for other in turn.others:
        turn.settle(other, size)
    return result


def permute(turn: Turn, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (elements,): along the pairs of the move, zeros where none ends."""
    assert isinstance(move, Permute)
    size, here = x.nbytes, turn.index
    source = next((source for source, to in move.pairs if to == here), None)
    to = next((to for source, to in move.pairs if source == here), here)
    if to != here:
        turn.put(to, x.data_ptr(), size)
    if source is None or source == here:
        result = torch.zeros_like(x) if source is None else x.clone()
        yield ()
    else:
        result = _new(x.shape, x)
        yield ()
        turn.get(source, result.data_ptr(), size)
    if to != here:
        turn.settle(to, size)
    return result


def broadcast(turn: Turn, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (elements,): everybody gets the source's."""
    assert isinstance(move, Broadcast)
    size, result = x.nbytes, _new(x.shape, x)
    if turn.index != move.source:
        yield ()
        turn.get(move.source, result.data_ptr(), size)
        return result
    for other in turn.others:
        turn.put(other, x.data_ptr(), size)
    result.copy_(x)  # while the others read
    yield ()
    for other in turn.others:
        turn.settle(other, size)
    return result


def _new(shape: Sequence[int], like: Tensor) -> Tensor:
    return empty(tuple(shape), like.dtype)


WIRES: dict[str, Callable[[Turn, Tensor, Wired], Wire]] = {
    wire.__name__: wire for wire in (reduce, gather, scatter, exchange, permute, broadcast)
}
