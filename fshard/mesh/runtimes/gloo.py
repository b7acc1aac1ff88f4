"""Collectives over gloo, put together from its fast operations.

gloo moves bytes well and reduces badly: its all_reduce and reduce_scatter take up to four times as long as moving the
same bytes and adding them here.  So only bytes are moved, which makes every dtype work, and sums are made locally in
the fixed tree of `moves.tree_sum`, which makes them deterministic.  The choice by size was measured: see
`benchmarks/RESULTS.md`.

Legend: n processes; `rows` is (n, elements) with a row for each process; `x` is (elements,).

    reduce      small: recursive doubling        log2(n) rounds, the whole tensor each
                large: scatter, then gather      each process sums one row
    scatter     all_to_all, then a local sum     2 n messages at once
    gather      everybody sends to everybody
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.mesh.moves import Broadcast, Extreme, Permute, Wired, WireKind
from fshard.mesh.runtimes.buffers import empty
from fshard.mesh.runtimes.link import Link, Wire, WireFunction

SMALL = 1 << 20
"""Bytes up to which a reduction is best done in few rounds rather than in few bytes."""

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes: what gloo is given, so that it never meets a dtype it does not know."""
    return x.view(torch.uint8)


def _new(shape: Sequence[int], like: Tensor) -> Tensor:
    return empty(tuple(shape), like.dtype)


def _exchange(link: Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Any]:
    """Start to send `outgoing[i]` to process i and to receive `incoming[i]` from it, for all others."""
    others = [(link.index + step) % link.n for step in range(1, link.n)]
    works: list[Any] = [link.pg.recv([_bytes(incoming[other])], other, 0) for other in reversed(others)]
    return works + [link.pg.send([_bytes(outgoing[other])], other, 0) for other in others]


def _all_to_all(link: Link, rows: Tensor, result: Tensor) -> list[Any]:
    return [link.pg.alltoall_base(_bytes(result.view(-1)), _bytes(rows.view(-1)), [], [])]


def _combine(move: Wired) -> Callable[..., Tensor]:
    if isinstance(move, Extreme):
        return torch.maximum if move.largest else torch.minimum
    return torch.add


def _tree(rows: Tensor, combine: Callable[..., Tensor], out: Tensor) -> Tensor:
    """Reduce rows in the fixed tree, in their own memory, with the last step into `out`."""
    wide = _WIDE.get(rows.dtype)
    xs = list(rows if wide is None else rows.to(wide))
    while len(xs) > 2:
        paired = [combine(xs[place], xs[place + 1], out=xs[place]) for place in range(0, len(xs) - 1, 2)]
        xs = paired + xs[2 * len(paired) :]
    return combine(xs[0], xs[1], out=out) if wide is None else out.copy_(combine(xs[0], xs[1]))


def reduce(link: Link, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (elements,): everybody gets the sum, or the extreme."""
    combine, small = _combine(move), x.numel() * x.element_size() <= SMALL
    if link.n == 2 and not small:
        return _halves(link, x, combine)
    doubles = link.n & (link.n - 1) == 0
    if doubles and small and (link.n == 2 or x.dtype not in _WIDE):  # a wide sum is rounded once, at the end
        return _doubling(link, x, combine)
    return _scatter_gather(link, x, combine)


def _doubling(link: Link, x: Tensor, combine: Callable[..., Tensor]) -> Wire:
    """Add with the neighbour, then with the neighbours' neighbours: the levels of the tree, one after the other."""
    total, received, distance = x, _new(x.shape, x), 1
    result = _new(x.shape, x)
    while distance < link.n:
        other = link.index ^ distance
        yield [link.pg.recv([_bytes(received)], other, 0), link.pg.send([_bytes(total)], other, 0)]
        total = combine(total, received, out=result)
        distance *= 2
    return total


def _halves(link: Link, x: Tensor, combine: Callable[..., Tensor]) -> Wire:
    """Two processes: each adds one half and sends it to the other."""
    middle = x.numel() // 2
    mine, theirs = (slice(0, middle), slice(middle, None))[:: 1 if link.index == 0 else -1]
    other, result = 1 - link.index, _new(x.shape, x)
    received = _new(x[mine].shape, x)
    yield [link.pg.recv([_bytes(received)], other, 0), link.pg.send([_bytes(x[theirs])], other, 0)]
    combine(x[mine], received, out=result[mine])
    yield [link.pg.recv([_bytes(result[theirs])], other, 0), link.pg.send([_bytes(result[mine])], other, 0)]
    return result


def _scatter_gather(link: Link, x: Tensor, combine: Callable[..., Tensor]) -> Wire:
    """Each process sums one row of the tensor, then everybody gathers the rows."""
    each = -(-x.numel() // link.n)
    rows = x.new_zeros(link.n * each) if each * link.n != x.numel() else x
    if rows is not x:
        rows[: x.numel()] = x
    received = _new((link.n, each), x)
    yield _all_to_all(link, rows, received)
    result = _new((link.n, each), x)
    _tree(received, combine, result[link.index])
    yield _exchange(link, [result[link.index]] * link.n, list(result))
    return result.view(-1)[: x.numel()]


def gather(link: Link, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (n, elements): everybody gets everybody's."""
    result = _new((link.n, x.numel()), x)
    works = _exchange(link, [x] * link.n, list(result))
    result[link.index] = x
    yield works
    return result


def scatter(link: Link, rows: Tensor, move: Wired) -> Wire:
    """(n, elements) -> (elements,): everybody gets the sum of the rows that were meant for it."""
    received = _new(rows.shape, rows)
    yield _all_to_all(link, rows, received)
    return _tree(received, _combine(move), _new(rows.shape[1:], rows))


def exchange(link: Link, rows: Tensor, move: Wired) -> Wire:
    """(n, elements) -> (n, elements): row i goes to process i."""
    received = _new(rows.shape, rows)
    yield _all_to_all(link, rows, received)
    return received


def permute(link: Link, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (elements,): along the pairs of the move, zeros where none ends."""
    assert isinstance(move, Permute)
    works: list[Any] = []
    result = None
    for source, to in move.pairs:
        if to == link.index:
            result = x.clone() if source == to else _new(x.shape, x)
            works += [link.pg.recv([_bytes(result)], source, 0)] if source != to else []
    works += [link.pg.send([_bytes(x)], to, 0) for source, to in move.pairs if source == link.index != to]
    yield works
    return torch.zeros_like(x) if result is None else result


def broadcast(link: Link, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (elements,): everybody gets the source's."""
    assert isinstance(move, Broadcast)
    result = x.clone() if link.index == move.source else _new(x.shape, x)
    yield [link.pg.broadcast(_bytes(result), move.source)]
    return result


WIRES: dict[WireKind, WireFunction] = {
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "exchange": exchange,
    "permute": permute,
    "broadcast": broadcast,
}
