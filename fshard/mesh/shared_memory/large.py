"""Large collectives of one machine: each process reads what it needs from the memory of the others.

Each process publishes the addresses of its tensors; the others copy from these to the results, or add. Sums use the
fixed tree of `arithmetic`, in chunks that fit into the processor's cache. gather, scatter and reduce take any number
of tensors, each split into n flat shards, and pack none of them:

    process 0   [own | ...] [own | ...]     "mine are at 0x7f.., 0x7f.."   --->   process 1   [... | own] [... | own]
                     ^           ^                                                                  |           |
                     └───────────┴──────────────────── one call for all of them ────────────────────┴───────────┘

    gather     shards -> full tensors, which may contain the own shards already
    scatter    full tensors -> sums of the own shards
    reduce     small: every process sums everything; large: scatter, then gather
    gather, exchange, permute, broadcast    of one tensor: each process reads the rows of its plan, see `small`

Legend: n processes; `rows` is (n, elements) with a row for each process; `x` is (elements,).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.moves import AllGather, PsumScatter, Wired, combining, is_plain, plain
from fshard.mesh.layout.arithmetic import Combine, combined, flat_range
from fshard.mesh.reshard.exchange import Parts
from fshard.mesh.runtimes.link import Wire
from fshard.mesh.shared_memory.neighbours import INLINE, empty
from fshard.mesh.shared_memory.small import row_bytes, row_plan
from fshard.mesh.shared_memory.transfer import PeerTransfer

MAX_TENSORS = 4096
"""Tensors up to which a table of addresses is short enough to be sent inline."""
UNPACKED = 1 << 20
"""Total bytes from which several tensors stay in their own memory: packing would cost more than two messages."""
ONE_ROUND = 1 << 20
"""Bytes to read up to which every process sums everything, in one round instead of two."""
CHUNK = 256 << 10
"""Bytes that are read and added at a time."""

Tensors = Sequence[Tensor]


# -- many tensors ---------------------------------------------------------------------------------------------------


def suits(move: Wired, xs: Tensors) -> bool:
    """Return True if a move on these tensors can work on their flat shards, and is cheaper so."""
    flat = move.wire == "reduce" or (isinstance(move, AllGather | PsumScatter) and move.dim == 0)
    return (
        flat
        and 1 < len(xs) <= MAX_TENSORS
        and sum([x.nbytes for x in xs]) >= UNPACKED
        and all(x.is_cpu and is_plain(x) for x in xs)
    )


def empty_results(move: Wired, xs: Tensors, n: int) -> tuple[Tensor, ...]:
    """Return memory for the results of a move that suits."""
    if isinstance(move, AllGather):
        return tuple([empty((n * x.shape[0], *x.shape[1:]), x.dtype) for x in xs])
    if isinstance(move, PsumScatter):
        return tuple([empty((x.shape[0] // n, *x.shape[1:]), x.dtype) for x in xs])
    return tuple([empty(x.shape, x.dtype) for x in xs])


def start_many(transfer: PeerTransfer, move: Wired, xs: Tensors, into: Tensors) -> Wire:
    """Return the wire of a move that suits; its results are written to `into`."""
    results = [x.view(-1) for x in into]
    if move.wire == "gather":
        return gather(transfer, [plain(x).contiguous().view(-1) for x in xs], results)
    sums = reduce if move.wire == "reduce" else scatter
    return sums(transfer, [x.view(-1) for x in xs], results, combining(move))


def gather(transfer: PeerTransfer, xs: Tensors, into: Tensors) -> Wire:
    """All-gather each tensor from its flat shards. (elements,) each -> (n * elements,) each"""
    n, index = transfer.n, transfer.index
    own, here = _publish(transfer, xs), [x.data_ptr() for x in into]
    ends = _boundaries(tuple([len(x) for x in into]), into[0].element_size(), n)
    for address, full, begin, end in zip(own, here, ends[index], ends[index + 1], strict=True):
        if address != full + begin:
            ctypes.memmove(full + begin, address, end - begin)
    yield transfer.needs(*transfer.others)
    for other in transfer.others:
        _fetch(transfer, other, _published(transfer, other, len(xs)), here, ends)
    yield from transfer.settled(transfer.others)
    return into[0]


def scatter(transfer: PeerTransfer, xs: Tensors, into: Tensors, combine: Combine) -> Wire:
    """Reduce-scatter each tensor. (n * elements,) each -> (elements,) each"""
    _publish(transfer, xs)
    yield transfer.needs(*transfer.others)
    begins = _boundaries(tuple([len(x) for x in xs]), xs[0].element_size(), transfer.n)[transfer.index]
    _sum(transfer, [_shard(x, transfer.n, transfer.index) for x in xs], begins, into, combine)
    for other in transfer.others:
        transfer.confirm(other)
    yield from transfer.settled(transfer.others)
    return into[0]


def reduce(transfer: PeerTransfer, xs: Tensors, into: Tensors, combine: Combine) -> Wire:
    """All-reduce each tensor (sum or extreme). (elements,) each -> (elements,) each"""
    n, index = transfer.n, transfer.index
    _publish(transfer, xs)
    yield transfer.needs(*transfer.others)
    ends = _boundaries(tuple([len(x) for x in xs]), xs[0].element_size(), n)
    if sum(ends[n]) * (n - 1) <= ONE_ROUND:
        _sum(transfer, xs, ends[0], into, combine, ONE_ROUND)
        for other in transfer.others:
            transfer.confirm(other)
    else:
        _sum(transfer, [_shard(x, n, index) for x in xs], ends[index], [_shard(x, n, index) for x in into], combine)
        here = _publish(transfer, into, part=1)
        yield transfer.needs(*transfer.others, part=1)
        for other in transfer.others:
            theirs = _published(transfer, other, len(xs), part=1)
            _fetch(transfer, other, _added(theirs, ends[other]), here, ends)
    yield from transfer.settled(transfer.others)
    return into[0]


def _publish(transfer: PeerTransfer, xs: Tensors, part: int = 0) -> Sequence[int]:
    """Publish the addresses of tensors to all others, of several in a table, and return them."""
    table = array("q", [x.data_ptr() for x in xs])
    offer, address = (transfer.offer_address, table[0]) if len(xs) == 1 else (transfer.offer, table.buffer_info()[0])
    for other in transfer.others:
        offer(other, address, 8 * len(table), part)
    return table


def _published(transfer: PeerTransfer, other: int, count: int, part: int = 0) -> Sequence[int]:
    """Return the addresses that a process has published."""
    if count == 1:
        return [transfer.address(other, 8, part)]
    table = array("q", bytes(8 * count))
    transfer.get(other, table.buffer_info()[0], 8 * count, part)
    return table


def _added(addresses: Sequence[int], offsets: Sequence[int]) -> list[int]:
    return [address + offset for address, offset in zip(addresses, offsets, strict=True)]


def _shard(full: Tensor, n: int, index: int) -> Tensor:
    return full[slice(*flat_range(len(full), n, index))]


@lru_cache(maxsize=1024)
def _boundaries(lengths: tuple[int, ...], item: int, n: int) -> list[list[int]]:
    """Return where each process's shards begin in tensors of these lengths, and at last where the tensors end; in bytes.

    >>> _boundaries((5, 1), 4, 2)
    [[0, 0], [12, 4], [20, 4]]
    """
    begins = [[flat_range(length, n, index)[0] * item for length in lengths] for index in range(n)]
    return [*begins, [length * item for length in lengths]]


def _fetch(
    transfer: PeerTransfer, other: int, addresses: Sequence[int], here: Sequence[int], ends: list[list[int]]
) -> None:
    """Copy a process's shards, at these addresses, into the local full tensors, and confirm it."""
    sizes = [end - begin for begin, end in zip(ends[other], ends[other + 1], strict=True)]
    transfer.peers[other].read_all(_added(here, ends[other]), addresses, sizes)
    transfer.confirm(other)


class ChunkPlan(NamedTuple):
    """A plan to read shards in chunks that fit into the processor's cache, each of one or several spans.

    Args:
        spans: (index of the shard, begin, end, offset in the chunk), in elements.
        chunks: (first span, one past the last).
        reads: (index of the shard, begin, offset in the chunk, size) of all spans, in bytes.
        longest: the elements of the longest chunk.
    """

    spans: list[tuple[int, int, int, int]]
    chunks: list[tuple[int, int]]
    reads: list[tuple[int, int, int, int]]
    longest: int


@lru_cache(maxsize=1024)
def _chunk_plan(lengths: tuple[int, ...], item: int, limit: int = CHUNK) -> ChunkPlan:
    """Return the chunks for shards of these lengths.

    >>> _chunk_plan((3, 0, 70000), 4)[:2]
    ([(0, 0, 3, 0), (2, 0, 65533, 3), (2, 65533, 70000, 0)], [(0, 2), (2, 3)])
    """
    most = limit // item
    spans, chunks, first, place = list[tuple[int, int, int, int]](), list[tuple[int, int]](), 0, 0
    for number, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + most - place)
            spans.append((number, begin, end, place))
            place, begin = place + end - begin, end
            if place == most:
                chunks.append((first, len(spans)))
                first, place = len(spans), 0
    if place:
        chunks.append((first, len(spans)))
    rows = [(number, begin * item, place * item, (end - begin) * item) for number, begin, end, place in spans]
    return ChunkPlan(spans, chunks, rows, min(most, sum(lengths)))


def _sum(
    transfer: PeerTransfer, own: Tensors, begins: Sequence[int], into: Tensors, combine: Combine, limit: int = CHUNK
) -> None:
    """Sum ranges of all processes' tensors: the local ones are `own`, the others begin at these bytes."""
    theirs = {other: _added(_published(transfer, other, len(own)), begins) for other in transfer.others}
    if len(own) == 1:
        _sum_one(transfer, own[0], {other: one for other, (one,) in theirs.items()}, into[0], combine, limit)
        return
    spans, chunks, reads, longest = _chunk_plan(tuple([len(x) for x in own]), own[0].element_size(), limit)
    scratch = torch.empty((transfer.n, longest), dtype=own[0].dtype)
    rows = {other: scratch[other].data_ptr() for other in transfer.others}
    for first, end in chunks:
        some = reads[first:end]
        for other, addresses in theirs.items():
            here = [rows[other] + place for _, _, place, _ in some]
            there = [addresses[number] + begin for number, begin, _, _ in some]
            transfer.peers[other].read_all(here, there, [size for _, _, _, size in some])
        for number, start, stop, place in spans[first:end]:
            kept = own[number][start:stop]
            summands = [
                kept if process == transfer.index else scratch[process, place : place + stop - start]
                for process in range(transfer.n)
            ]
            combined(summands, combine, kept, into[number][start:stop])


def _sum_one(
    transfer: PeerTransfer, own: Tensor, theirs: Mapping[int, int], into: Tensor, combine: Combine, limit: int
) -> None:
    """Sum one tensor: as `_sum`, without the tables, which take as long as a chunk."""
    item, length = own.element_size(), min(limit // own.element_size(), len(own))
    scratch = torch.empty((transfer.n, length), dtype=own.dtype)
    for begin in range(0, len(own), length or 1):
        kept = own[begin : begin + length]
        rows = [kept if place == transfer.index else scratch[place, : len(kept)] for place in range(transfer.n)]
        for other, address in theirs.items():
            transfer.peers[other].read(rows[other].data_ptr(), address + begin * item, kept.nbytes)
        combined(rows, combine, kept, into[begin : begin + length])


# -- one tensor -----------------------------------------------------------------------------------------------------


def _reduce_one(transfer: PeerTransfer, x: Tensor, move: Wired) -> Wire:
    if transfer.n == 2 and x.nbytes <= ONE_ROUND:
        return _reduce_pair(transfer, x, combining(move))
    return reduce(transfer, [x], [empty((len(x),), x.dtype)], combining(move))


def _reduce_pair(transfer: PeerTransfer, x: Tensor, combine: Combine) -> Wire:
    """All-reduce of two processes: each reads the other's tensor and adds. (elements,) -> (elements,)"""
    (other,) = transfer.others
    transfer.offer(other, x.data_ptr(), x.nbytes)
    received, result = torch.empty_like(x), torch.empty_like(x)
    yield transfer.needs(other)
    transfer.get(other, received.data_ptr(), x.nbytes)
    if x.nbytes > INLINE:
        yield from transfer.settled([other])
    return combined([received, x] if transfer.index else [x, received], combine, None, result)


def _scatter_one(transfer: PeerTransfer, rows: Tensor, move: Wired) -> Wire:
    return scatter(transfer, [rows.view(-1)], [empty((rows.shape[1],), rows.dtype)], combining(move))


def _rows(transfer: PeerTransfer, x: Tensor, move: Wired) -> Wire:
    """Send and get the rows of the move's plan; each process copies its own to the result."""
    plan, size = row_plan(move, transfer.index, transfer.n), row_bytes(move, x, transfer.n)
    for to, row in plan.sends:
        transfer.offer(to, x.data_ptr() + row * size, size)
    result = empty(plan.shape(size // x.element_size()), x.dtype)
    into = result.data_ptr()
    if plan.keeps is not None:
        ctypes.memmove(into + plan.keeps[1] * size, x.data_ptr() + plan.keeps[0] * size, size)
    elif not plan.gets:
        result.zero_()
    yield transfer.needs(*[source for source, _ in plan.gets])
    for source, row in plan.gets:
        transfer.get(source, into + row * size, size)
    yield from transfer.settled([to for to, _ in plan.sends])
    return result


def _parts(transfer: PeerTransfer, x: Tensor, move: Wired) -> Wire:
    """Exchange of unequal parts. (elements,) -> (elements,)"""
    assert isinstance(move, Parts)
    outgoing = move.parcels(x, transfer.index)
    incoming = {source: empty((size,), x.dtype) for source, size in move.expected(x, transfer.index).items()}
    for to, part in outgoing.items():
        transfer.offer(to, part.data_ptr(), part.nbytes)
    if incoming:
        yield transfer.needs(*incoming)
    for source, part in incoming.items():
        transfer.get(source, part.data_ptr(), part.nbytes)
    result = move.unpacked(x, transfer.index, incoming)
    yield from transfer.settled([to for to, part in outgoing.items() if part.nbytes > INLINE])
    return result


WIRES: dict[str, Callable[[PeerTransfer, Tensor, Wired], Wire]] = {
    "reduce": _reduce_one,
    "scatter": _scatter_one,
    **dict.fromkeys(("gather", "exchange", "permute", "broadcast"), _rows),
    "parts": _parts,
}
