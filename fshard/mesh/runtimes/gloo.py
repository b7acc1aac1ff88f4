"""Collectives over gloo, composed of its fast operations.

gloo's all_reduce and reduce_scatter take up to four times as long as sending the same bytes and adding them here. So
gloo only sends bytes, which supports every dtype, and sums are computed locally in the fixed tree of `arithmetic`,
which makes them deterministic. The thresholds are measured: see `benchmarks/RESULTS.md`.

Legend: n processes; `rows` is (n, elements) with a row for each process; `x` is (elements,).

    reduce      small: recursive doubling        log2(n) rounds, the full tensor each
                large: scatter, then gather      each process sums one row
    scatter     exchange rows, then sum          the process's own row is neither sent nor copied
                large: recursive halving         log2(n) rounds, see Note [Neighbours first]
    gather      exchange; large: doubling        the transpose
    exchange, permute                            the rows of a plan, see `row_plan`
    broadcast   binomial tree                    gloo's own broadcast has no tag
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.mesh.collectives.moves import Broadcast, PartsMove, Wired, combining
from fshard.mesh.layout.arithmetic import WIDER, Combine, combined
from fshard.mesh.runtimes.buffers import empty
from fshard.mesh.runtimes.call import CallInfo
from fshard.mesh.runtimes.process_group import GroupCall, GroupTransport, WireFunction
from fshard.mesh.runtimes.row_plan import row_plan
from fshard.mesh.runtimes.transport import Helper, Wire, Works, joined

ALONE = 256 << 10
"""Bytes from which on a tensor among several is sent from its own memory and received in that of its result.

Smaller ones share messages, which costs two copies.
"""
SMALL = 1 << 20
"""Bytes up to which a reduction is best done in few rounds rather than in few bytes."""
_GLOO_DTYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
}


def _with_gloo_dtype(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes where gloo does not know its dtype: it never meets one that it refuses."""
    return x if x.dtype in _GLOO_DTYPES else x.view(torch.uint8)


def _exchange_with_all(
    call: GroupCall, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
) -> list[Any]:
    """Start sending `outgoing[i]` to process i and receiving `incoming[i]` from it, for all others."""
    peers, works = [(call.index + step) % call.n for step in range(1, call.n)], list[Any]()
    for peer in reversed(peers):
        works.append(call.pg.recv([_with_gloo_dtype(incoming[peer])], peer, call.tag))
    for peer in peers:
        works.append(call.pg.send([_with_gloo_dtype(outgoing[peer])], peer, call.tag))
    return works


def reduce(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce (sum or extreme). (elements,) -> (elements,)"""
    combine, size = combining(move), x.numel() * x.element_size()
    doubles = call.n & (call.n - 1) == 0
    exact = call.n == 2 or x.dtype not in WIDER  # a wide sum is rounded once, at the end
    if doubles and exact and size <= SMALL:
        return _reduce_by_doubling(call, x, combine)
    return _reduce_by_rows(call, x, move)


def _reduce_by_doubling(call: GroupCall, x: Tensor, combine: Combine) -> Wire:
    """Recursive doubling: add with the neighbour, then with the next level of the tree."""
    tag, total, received, distance = call.tag, x, empty(x.shape, x.dtype), 1
    result = empty(x.shape, x.dtype)
    while distance < call.n:
        peer = call.index ^ distance
        yield [
            call.pg.recv([_with_gloo_dtype(received)], peer, tag),
            call.pg.send([_with_gloo_dtype(total)], peer, tag),
        ]
        pair = (
            [received, total] if call.index & distance else [total, received]
        )  # 0.0 and -0.0 keep their order
        total = combined(pair, combine, None, result)
        distance *= 2
    return total


def _reduce_by_rows(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce: each process sums one row of the tensor, then all gather the rows."""
    each = -(-x.numel() // call.n)
    rows = x
    if each * call.n != x.numel():
        rows = x.new_zeros(call.n * each)
        rows[: x.numel()] = x
    result = empty((call.n, each), x.dtype)
    yield from scatter(call, rows.view(call.n, each), move, result[call.index])
    yield from gather(call, result[call.index], move, result)
    return result.view(-1)[: x.numel()]


def scatter(call: GroupCall, rows: Tensor, move: Wired, out: Tensor | None = None) -> Wire:
    """Reduce-scatter: sum the rows of all processes for this one in the fixed tree. (n, elements) -> (elements,)"""
    local_row = rows[call.index]
    out = empty(local_row.shape, rows.dtype) if out is None else out
    if _uses_recursion(call, rows.nbytes) and rows.dtype not in WIDER:
        return (yield from _scatter_by_halving(call, list(rows), combining(move), out))
    summands = list(empty((call.n - 1, *local_row.shape), rows.dtype))
    summands.insert(call.index, local_row)
    yield _exchange_with_all(call, list(rows), summands)
    return combined(summands, combining(move), local_row, out)


# Note [Neighbours first]
# Recursive halving sends most rows to the next process and the fewest to the farthest one; its transpose, the gather by
# doubling, too. Neighbours are of one machine, if ranks are in order. So of n processes on two machines each sends
# 1 / n of a tensor across in either, where an exchange of all with all sends 1 / 2.
#
#     4 processes, rows 0 to 3    halving: 0 <-> 1 rows 0 2 | 1 3, 0 <-> 2 row 0 | 2    doubling: the same, backwards
def _uses_recursion(call: GroupCall, size: int) -> bool:
    """Return True if bytes matter more than rounds: see Note [Neighbours first]."""
    return size > SMALL and call.n > 2 and call.n & (call.n - 1) == 0


def _exchange_at_distance(
    call: GroupCall, distance: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
) -> list[Any]:
    """Start an exchange with the process at a distance."""
    peer = call.index ^ distance
    works: list[Any] = [call.pg.recv([_with_gloo_dtype(row)], peer, call.tag) for row in incoming]
    return works + [call.pg.send([_with_gloo_dtype(row)], peer, call.tag) for row in outgoing]


def _scatter_by_halving(call: GroupCall, rows: list[Tensor], combine: Combine, out: Tensor) -> Wire:
    """Reduce-scatter by recursive halving: swap half of the rows with a process, and add the others."""
    distance = 1
    while distance < call.n:
        step = 2 * distance
        summands, outgoing = (
            rows[call.index % step :: step],
            rows[(call.index ^ distance) % step :: step],
        )
        sums = list(empty((len(summands), *out.shape), out.dtype)) if len(summands) > 1 else [out]
        yield _exchange_at_distance(call, distance, outgoing, sums)
        for row, x in zip(summands, sums, strict=True):  # x was received
            pair = (x, row) if call.index & distance else (row, x)  # 0.0 and -0.0 keep their order
            combine(*pair, out=x)
        rows[call.index % step :: step] = sums
        distance = step
    return out


def gather(call: GroupCall, x: Tensor, move: Wired, result: Tensor | None = None) -> Wire:
    """All-gather, by default into new memory. (elements,) -> (n, elements)"""
    is_new = result is None
    result = empty((call.n, *x.shape), x.dtype) if result is None else result
    rows = list(result)
    works = (
        [] if _uses_recursion(call, result.nbytes) else _exchange_with_all(call, [x] * call.n, rows)
    )
    if is_new:
        result[call.index] = x  # while it is on its way
    if works:
        yield works
        return result
    distance = call.n // 2
    while distance:
        step = 2 * distance
        yield _exchange_at_distance(
            call,
            distance,
            rows[call.index % step :: step],
            rows[(call.index ^ distance) % step :: step],
        )
        distance //= 2
    return result


def _move_rows(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Send and receive the rows of the move's plan; the row that stays is copied while others are in flight."""
    plan, length = row_plan(move, call.index, call.n), x.shape[-1]
    result = empty(plan.shape(length), x.dtype)
    local_rows = (
        x.view(-1, length) if length else x.view(call.n if move.wire == "exchange" else 1, 0)
    )
    rows, tag = result.view(plan.rows, length), call.tag
    works: list[Any] = [
        call.pg.recv([_with_gloo_dtype(rows[row])], source, tag)
        for source, row in reversed(plan.gets)
    ]
    works += [call.pg.send([_with_gloo_dtype(local_rows[row])], to, tag) for to, row in plan.sends]
    if plan.keeps is not None:
        rows[plan.keeps[1]] = local_rows[plan.keeps[0]]
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
    tag, distance, result = call.tag, (call.index - move.source) % call.n, empty(x.shape, x.dtype)
    lowest = distance & -distance or 1 << call.n.bit_length()
    if distance:
        yield [
            call.pg.recv(
                [_with_gloo_dtype(result)], (move.source + distance - lowest) % call.n, tag
            )
        ]
    bits = [lowest >> down for down in range(1, lowest.bit_length())]
    children = [(move.source + distance + bit) % call.n for bit in bits if distance + bit < call.n]
    message = _with_gloo_dtype(result if distance else x)
    works: list[Any] = [call.pg.send([message], child, tag) for child in children]
    if not distance:
        result.copy_(x)  # while it is on its way
    yield works
    return result


def parts(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Exchange of unequal parts: receive from each process what is missing. (elements,) -> (elements,)"""
    assert isinstance(move, PartsMove)
    tag, outgoing = call.tag, move.parcels(x, call.index)
    incoming = {
        source: empty((size,), x.dtype) for source, size in move.expected(x, call.index).items()
    }
    works: list[Any] = [
        call.pg.recv([_with_gloo_dtype(buffer)], source, tag) for source, buffer in incoming.items()
    ]
    yield works + [
        call.pg.send([_with_gloo_dtype(buffer)], to, tag) for to, buffer in outgoing.items()
    ]
    return move.unpacked(x, call.index, incoming)


def side_by_side(call: GroupCall, wire: WireFunction, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Run a wire for each large tensor and one for the small ones, which share a buffer, in the same rounds."""
    small = [index for index, x in enumerate(xs) if x.nbytes < ALONE]
    wires: dict[tuple[int, ...], Wire] = {
        (index,): wire(call, x.contiguous(), move)
        for index, x in enumerate(xs)
        if x.nbytes >= ALONE
    }
    if small:
        wires[tuple(small)] = wire(call, joined([xs[index] for index in small]), move)
    widths, results = [x.shape[-1] for x in xs], dict[int, Tensor]()
    del xs  # small tensors may be freed before the result is there
    while wires:
        needs = list[Any]()
        for indices in [*wires]:
            try:
                needs += next(wires[indices])
            except StopIteration as stopped:
                del wires[indices]
                rows = stopped.value.split([widths[index] for index in indices], dim=-1)
                results.update(zip(indices, rows, strict=True))
        if needs:
            yield needs
    return [results[index] for index in range(len(widths))]


WIRES: dict[str, WireFunction] = {
    "reduce": reduce,
    "scatter": scatter,
    "gather": gather,
    **dict.fromkeys(("exchange", "permute"), _move_rows),
    "broadcast": broadcast,
    "parts": parts,
}


class Gloo(GroupTransport):
    """Processes connected by gloo, whose threads send and receive.

    A collective in several rounds advances only while a thread waits for it. If only the waiter of its handle did so, two
    processes that wait for their handles in different orders would deadlock. So when a process begins another work,
    whatever is in progress is given to a helper thread, which runs it in the order of starting: that order is equal on
    all processes. The memory of sent messages is freed by a helper too. Neither waits for the other.
    """

    wires = WIRES

    def __init__(self, works: Works, pg: ProcessGroup, index: int, n: int) -> None:
        super().__init__(works, pg, index, n)
        self._collectives, self._sends = Helper(), Helper()

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        if len(xs) > 1 and any(x.nbytes >= ALONE for x in xs):
            return side_by_side(self.numbered(call), self.wires[move.wire], xs, move)
        return super().collective(move, xs, call)

    def helper(self, call: CallInfo) -> Helper | None:
        if call.move is None:
            return self._sends if call.is_send else None
        has_rounds = call.move.wire in ("reduce", "broadcast") or (
            self.n > 2 and call.move.wire in ("scatter", "gather")
        )
        return self._collectives if has_rounds else None
