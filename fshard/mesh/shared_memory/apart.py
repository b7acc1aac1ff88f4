"""Collectives on many tensors in their own memory: nothing is packed into one buffer.

Each process publishes a table of its tensors' addresses; the others copy from these to the results, or add. Each
tensor is split into n flat shards; a process sums its own and receives the others from the processes that have them.

    process 0   [own | ...] [own | ...]     "mine are at 0x7f.., 0x7f.."   --->   process 1   [... | own] [... | own]
                     ^           ^                                                                  |           |
                     └───────────┴──────────────────── one call for all of them ────────────────────┴───────────┘

    gather     shards -> full tensors, which may contain the own shards already
    scatter    full tensors -> sums of the own shards
    reduce     full tensors -> their sums or extremes: scatter, then gather
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.moves import AllGather, PsumScatter, Wired, combining, is_plain, plain
from fshard.mesh.layout.arithmetic import Combine, chunk, combined, flat_range
from fshard.mesh.runtimes.link import Wire
from fshard.mesh.shared_memory.direct import ANSWER, PIECE, TransferTurn
from fshard.mesh.shared_memory.neighbours import Need, empty

MANY = 4096
"""Tensors up to which a table is short enough for one message."""
LARGE = 1 << 20
"""Total bytes from which tensors stay in their own memory: packing would cost more than two messages."""

Tensors = Sequence[Tensor]


def suits(move: Wired, xs: Tensors) -> bool:
    """Return True if a move on these tensors can work on their flat shards, and is cheaper so."""
    flat = move.wire == "reduce" or (isinstance(move, AllGather | PsumScatter) and move.dim == 0)
    return (
        flat
        and 1 < len(xs) <= MANY
        and sum([x.nbytes for x in xs]) >= LARGE
        and all(x.is_cpu and is_plain(x) for x in xs)
    )


def room(move: Wired, xs: Tensors, n: int) -> tuple[Tensor, ...]:
    """Return memory for the results of a move that suits."""
    if isinstance(move, AllGather):
        return tuple([empty((n * x.shape[0], *x.shape[1:]), x.dtype) for x in xs])
    if isinstance(move, PsumScatter):
        return tuple([empty((x.shape[0] // n, *x.shape[1:]), x.dtype) for x in xs])
    return tuple([empty(x.shape, x.dtype) for x in xs])


def wire(turn: TransferTurn, move: Wired, xs: Tensors, into: Tensors) -> Wire:
    """Return the wire of a move that suits; its results come into these tensors."""
    if move.wire == "gather":
        return gather(turn, [plain(x).contiguous() for x in xs], into)
    return _SUMS[move.wire](turn, [x.view(-1) for x in xs], [x.view(-1) for x in into], combining(move))


def gather(turn: TransferTurn, xs: Tensors, into: Tensors) -> Wire:
    """All-gather of many tensors, each from its flat shards."""
    table = _publish(turn, xs)
    here, ends = _own_addresses(into), _ends_of(tuple([x.numel() for x in into]), into[0].element_size(), turn.n)
    elsewhere = (table != here + ends[turn.index]).nonzero()
    for number in elsewhere.view(-1).tolist():
        own = _shard(into[number].view(-1), turn.n, turn.index)
        own.copy_(xs[number].view(-1)[: own.numel()])
    yield turn.needs(*turn.others)
    for other in turn.others:
        _fetch(turn, other, _addresses(turn, other, len(xs)), here, ends)
    yield from _settled(turn)
    return table  # the table must live until all have read it


def scatter(turn: TransferTurn, xs: Tensors, into: Tensors, combine: Combine) -> Wire:
    """Reduce-scatter of many tensors. (n * elements,) each -> (elements,) each"""
    table = _publish(turn, xs)
    yield turn.needs(*turn.others)
    _sum(turn, xs, into, combine)
    for other in turn.others:
        turn.done(other)
    yield from _settled(turn)
    return table


def reduce(turn: TransferTurn, xs: Tensors, into: Tensors, combine: Combine) -> Wire:
    """All-reduce of many tensors: reduce-scatter, then all-gather. (elements,) each -> (elements,) each"""
    table = _publish(turn, xs)
    yield turn.needs(*turn.others)
    _sum(turn, xs, [_shard(x, turn.n, turn.index) for x in into], combine)
    here = _publish(turn, into, part=1)
    ends = _ends_of(tuple([x.numel() for x in into]), into[0].element_size(), turn.n)
    yield turn.needs(*turn.others, part=1)
    for other in turn.others:
        _fetch(turn, other, _addresses(turn, other, len(xs), part=1) + ends[other], here, ends)
    yield from _settled(turn)
    return torch.cat([table, here])


_SUMS: dict[str, Callable[[TransferTurn, Tensors, Tensors, Combine], Wire]] = {"scatter": scatter, "reduce": reduce}


def _publish(turn: TransferTurn, xs: Tensors, part: int = 0) -> Tensor:
    """Publish the addresses of tensors to all others, and return the table."""
    table = _own_addresses(xs)
    for other in turn.others:
        turn.put(other, table.data_ptr(), table.nbytes, part)
    return table


def _own_addresses(xs: Tensors) -> Tensor:
    return torch.tensor([x.data_ptr() for x in xs])


def _addresses(turn: TransferTurn, other: int, count: int, part: int = 0) -> Tensor:
    """Return the addresses that a process has published."""
    table = torch.empty(count, dtype=torch.int64)
    turn.get(other, table.data_ptr(), table.nbytes, part)
    return table


def _settled(turn: TransferTurn) -> Generator[list[Need], None, None]:
    """Wait until all others have read the published table and tensors."""
    answers = [(turn.peers[other], turn.key | ANSWER) for other in turn.others]
    yield answers
    turn.answered(answers)


def _shard(full: Tensor, n: int, index: int) -> Tensor:
    return full[slice(*flat_range(len(full), n, index))]


@lru_cache(maxsize=1024)
def _ends_of(lengths: tuple[int, ...], item: int, n: int) -> Tensor:
    """Return where the shards of each process begin in tensors of these lengths, and at last where the tensors end; in bytes.

    >>> _ends_of((5, 1), 4, 2)
    tensor([[ 0,  0],
            [12,  4],
            [20,  4]])
    """
    return torch.tensor(
        [[min(index * chunk(length, n), length) * item for length in lengths] for index in range(n + 1)]
    )


def _fetch(turn: TransferTurn, other: int, addresses: Tensor, here: Tensor, ends: Tensor) -> None:
    """Copy a process's shards, at these addresses, into the local full tensors, and confirm it."""
    begins, sizes = ends[other], ends[other + 1] - ends[other]
    turn.peers[other].read_all(torch.stack([here + begins, sizes], 1), torch.stack([addresses, sizes], 1))
    turn.done(other)


class Batches(NamedTuple):
    """A plan to read shards in batches that fit into the processor's cache, each of one or several spans.

    Args:
        spans: (index of the shard, begin, end, offset in the batch), in elements.
        batches: (first span, one past the last).
        table: a row per span: index of the shard; begin, offset and size in bytes.
        longest: the elements of the longest batch.
    """

    spans: list[tuple[int, int, int, int]]
    batches: list[tuple[int, int]]
    table: Tensor
    longest: int


@lru_cache(maxsize=1024)
def _batches(lengths: tuple[int, ...], item: int) -> Batches:
    """Return the batches for shards of these lengths.

    >>> _batches((3, 0, 70000), 4)[:2]
    ([(0, 0, 3, 0), (2, 0, 65533, 3), (2, 65533, 70000, 0)], [(0, 2), (2, 3)])
    """
    most = PIECE // item
    spans, batches, first, place = list[tuple[int, int, int, int]](), list[tuple[int, int]](), 0, 0
    for number, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + most - place)
            spans.append((number, begin, end, place))
            place, begin = place + end - begin, end
            if place == most:
                batches.append((first, len(spans)))
                first, place = len(spans), 0
    if place:
        batches.append((first, len(spans)))
    rows = [(number, begin * item, place * item, (end - begin) * item) for number, begin, end, place in spans]
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
    return Batches(spans, batches, table, min(most, sum(lengths)))


def _sum(turn: TransferTurn, xs: Tensors, into: Tensors, combine: Combine) -> None:
    """Sum the own shards of all processes' tensors, at the published addresses."""
    own, item = [_shard(x, turn.n, turn.index) for x in xs], xs[0].element_size()
    ends = _ends_of(tuple([len(x) for x in xs]), item, turn.n)
    spans, batches, table, longest = _batches(tuple([x.numel() for x in own]), item)
    numbers, begins, places, sizes = table.unbind(1)
    scratch = torch.empty((turn.n, longest), dtype=xs[0].dtype)
    rows = dict[int, tuple[Tensor, Tensor]]()
    for other in turn.others:
        theirs = _addresses(turn, other, len(xs)) + ends[turn.index]
        here = scratch.data_ptr() + other * longest * item + places
        rows[other] = torch.stack([here, sizes], 1), torch.stack([theirs[numbers] + begins, sizes], 1)
    for first, end in batches:
        for other, (here, there) in rows.items():
            turn.peers[other].read_all(here[first:end], there[first:end])
        for number, start, stop, place in spans[first:end]:
            kept, length = own[number][start:stop], stop - start
            summands = [
                kept if process == turn.index else scratch[process, place : place + length] for process in range(turn.n)
            ]
            combined(summands, combine, kept, into[number][start:stop])
