"""Collectives over gloo, composed of its fast operations.

gloo's all_reduce and reduce_scatter take up to four times as long as sending the same bytes and adding them here. So
gloo only sends bytes, which supports every dtype, and sums are computed locally in the fixed tree of `arithmetic`,
which makes them deterministic. The thresholds are measured: see `benchmarks/RESULTS.md`.

Legend: n processes; `rows` is (n, elements) with a row for each process; `x` is (elements,).

    reduce      small: recursive doubling        log2(n) rounds, the full tensor each
                large: scatter, then gather      each process sums one row
    scatter     exchange rows, then sum          the process's own row is neither sent nor copied
    gather, exchange, permute                    the rows of a plan, see `row_plan`
    broadcast   binomial tree                    gloo's own broadcast has no tag
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.mesh.collectives.moves import Broadcast, Wired, combining
from fshard.mesh.layout.arithmetic import WIDER, Combine, combined
from fshard.mesh.reshard.exchange import Parts
from fshard.mesh.runtimes.buffers import empty
from fshard.mesh.runtimes.call import CallInfo
from fshard.mesh.runtimes.process_group import GroupCall, GroupTransport, WireFunction
from fshard.mesh.runtimes.row_plan import row_plan
from fshard.mesh.runtimes.transport import Helper, Wire, Works

SMALL = 1 << 20
"""Bytes up to which a reduction is best done in few rounds rather than in few bytes."""
_KNOWN = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8}


def _bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes where gloo does not know its dtype: it never meets one that it refuses."""
    return x if x.dtype in _KNOWN else x.view(torch.uint8)


def _new(shape: Sequence[int], like: Tensor) -> Tensor:
    return empty(tuple(shape), like.dtype)


def _exchange(call: GroupCall, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Any]:
    """Start sending `outgoing[i]` to process i and receiving `incoming[i]` from it, for all others."""
    others = [(call.index + step) % call.n for step in range(1, call.n)]
    works: list[Any] = [call.pg.recv([_bytes(incoming[other])], other, call.tag) for other in reversed(others)]
    return works + [call.pg.send([_bytes(outgoing[other])], other, call.tag) for other in others]


def reduce(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce (sum or extreme). (elements,) -> (elements,)"""
    combine, size = combining(move), x.numel() * x.element_size()
    doubles = call.n & (call.n - 1) == 0
    exact = call.n == 2 or x.dtype not in WIDER  # a wide sum is rounded once, at the end
    if doubles and exact and size <= SMALL:
        return _doubling(call, x, combine)
    return _scatter_gather(call, x, combine)


def _doubling(call: GroupCall, x: Tensor, combine: Combine) -> Wire:
    """Recursive doubling: add with the neighbour, then with the next level of the tree."""
    tag, total, received, distance = call.tag, x, _new(x.shape, x), 1
    result = _new(x.shape, x)
    while distance < call.n:
        other = call.index ^ distance
        yield [call.pg.recv([_bytes(received)], other, tag), call.pg.send([_bytes(total)], other, tag)]
        pair = [received, total] if call.index & distance else [total, received]  # 0.0 and -0.0 keep their order
        total = combined(pair, combine, None, result)
        distance *= 2
    return total


def _scatter_gather(call: GroupCall, x: Tensor, combine: Combine) -> Wire:
    """All-reduce: each process sums one row of the tensor, then all gather the rows."""
    each = -(-x.numel() // call.n)
    rows = x
    if each * call.n != x.numel():
        rows = x.new_zeros(call.n * each)
        rows[: x.numel()] = x
    result = _new((call.n, each), x)
    yield from _sum_rows(call, rows.view(call.n, each), combine, result[call.index])
    yield _exchange(call, [result[call.index]] * call.n, list(result))
    return result.view(-1)[: x.numel()]


def _sum_rows(call: GroupCall, rows: Tensor, combine: Combine, out: Tensor) -> Wire:
    """Send each row to its process and sum those that arrive, with the own one, in the fixed tree."""
    arriving = list(_new(rows.shape, rows))
    yield _exchange(call, list(rows), arriving)
    own = rows[call.index]
    return combined([own if place == call.index else row for place, row in enumerate(arriving)], combine, own, out)


def scatter(call: GroupCall, rows: Tensor, move: Wired) -> Wire:
    """Reduce-scatter. (n, elements) -> (elements,)"""
    return (yield from _sum_rows(call, rows, combining(move), _new(rows.shape[1:], rows)))


def _rows(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Send and receive the rows of the move's plan; the own row is copied while the others are in flight."""
    plan, length = row_plan(move, call.index, call.n), x.shape[-1]
    result = _new(plan.shape(length), x)
    given = x.view(-1, length) if length else x.view(call.n if move.wire == "exchange" else 1, 0)
    rows, tag = result.view(plan.rows, length), call.tag
    works: list[Any] = [call.pg.recv([_bytes(rows[row])], source, tag) for source, row in reversed(plan.gets)]
    works += [call.pg.send([_bytes(given[row])], to, tag) for to, row in plan.sends]
    if plan.keeps is not None:
        rows[plan.keeps[1]] = given[plan.keeps[0]]
    elif not plan.gets:
        result.zero_()
    yield works
    return result


def broadcast(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Broadcast along a binomial tree. (elements,) -> (elements,)

    Counted from the source, process p receives from p without its lowest set bit, and sends to p plus each bit below
    that.
    """
    assert isinstance(move, Broadcast)
    tag, place, result = call.tag, (call.index - move.source) % call.n, _new(x.shape, x)
    lowest = place & -place or 1 << call.n.bit_length()
    if place:
        yield [call.pg.recv([_bytes(result)], (move.source + place - lowest) % call.n, tag)]
    further = [
        place + bit for bit in (lowest >> down for down in range(1, lowest.bit_length())) if place + bit < call.n
    ]
    held = _bytes(result if place else x)
    works: list[Any] = [call.pg.send([held], (move.source + other) % call.n, tag) for other in further]
    if not place:
        result.copy_(x)  # while it is on its way
    yield works
    return result


def parts(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Exchange of unequal parts: receive from each process what is missing. (elements,) -> (elements,)"""
    assert isinstance(move, Parts)
    tag, outgoing = call.tag, move.parcels(x, call.index)
    incoming = {source: _new((size,), x) for source, size in move.expected(x, call.index).items()}
    works: list[Any] = [call.pg.recv([_bytes(part)], source, tag) for source, part in incoming.items()]
    yield works + [call.pg.send([_bytes(part)], to, tag) for to, part in outgoing.items()]
    return move.unpacked(x, call.index, incoming)


WIRES: dict[str, WireFunction] = {
    "reduce": reduce,
    "scatter": scatter,
    **dict.fromkeys(("gather", "exchange", "permute"), _rows),
    "broadcast": broadcast,
    "parts": parts,
}


class Gloo(GroupTransport):
    """Processes connected by gloo, whose threads send and receive.

    A sum in several rounds advances only while a thread waits for it. If only the waiter of its handle did so, two
    processes that wait for their handles in different orders would deadlock. So when a process begins another work,
    whatever is in progress is given to a helper thread, which runs it in the order of starting: that order is equal on
    all processes. The memory of sent messages is freed by a helper too. Neither waits for the other.
    """

    wires = WIRES

    def __init__(self, works: Works, pg: ProcessGroup, index: int, n: int) -> None:
        super().__init__(works, pg, index, n)
        self._collectives, self._sends = Helper(), Helper()

    def helper(self, call: CallInfo) -> Helper | None:
        if call.move is None:
            return self._sends if call.is_send else None
        return self._collectives if call.move.wire in ("reduce", "broadcast") else None
