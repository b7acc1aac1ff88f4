"""Collectives over gloo, composed of its fast operations.

gloo's all_reduce and reduce_scatter take up to four times as long as sending the same bytes and
adding them here. So gloo only sends bytes, which supports every dtype. Sums are computed locally in
the fixed tree of `arithmetic`, which makes them deterministic. The thresholds are measured: see
`benchmarks/RESULTS.md`.

Legend: n processes; `rows` is (n, elements) with a row for each process; `x` is (elements,).

    reduce      small: recursive doubling        log2(n) rounds, the full tensor each
                small, of many: a tree           2 log2(n) rounds, and few connections
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
from fshard.mesh.layout.packing import cast
from fshard.mesh.runtimes.buffers import empty
from fshard.mesh.runtimes.call import CallInfo
from fshard.mesh.runtimes.interface import MANY, gloo_connects_late
from fshard.mesh.runtimes.process_group import GroupCall, GroupTransport, WireFunction
from fshard.mesh.runtimes.row_plan import row_plan
from fshard.mesh.runtimes.transport import Helper, Wire, Works, joined

ALONE = 256 << 10
"""Bytes from which on a tensor among several has messages of its own.

It is sent from its own memory and received in that of its result. Smaller ones share messages,
which costs two copies.
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
    """View a contiguous tensor as bytes where gloo does not know its dtype.

    A call that gloo rejects leaves its group broken.
    """
    return x if x.dtype in _GLOO_DTYPES else x.view(torch.uint8)


# -- rounds ----------------------------------------------------------------------------------------


def _exchange_with_all(
    call: GroupCall, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
) -> list[Any]:
    """Start sending `outgoing[i]` to each other process i and receiving `incoming[i]` from it."""
    peers = [(call.index + step) % call.n for step in range(1, call.n)]
    works: list[Any] = []
    for peer in reversed(peers):  # from the previous one first: it sends to this one first
        works.append(call.pg.recv([_with_gloo_dtype(incoming[peer])], peer, call.tag))
    for peer in peers:
        works.append(call.pg.send([_with_gloo_dtype(outgoing[peer])], peer, call.tag))
    return works


def _exchange_at_distance(
    call: GroupCall, distance: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
) -> list[Any]:
    """Start an exchange with the process whose index differs in the bit `distance`."""
    peer = call.index ^ distance
    works: list[Any] = []
    for row in incoming:
        works.append(call.pg.recv([_with_gloo_dtype(row)], peer, call.tag))
    for row in outgoing:
        works.append(call.pg.send([_with_gloo_dtype(row)], peer, call.tag))
    return works


# Note [Neighbours first]
# Recursive halving sends most rows to the next process and the fewest to the farthest one; its
# transpose, the gather by doubling, too. Neighbours are of one machine, if ranks are in order. So
# of n processes on two machines each sends 1 / n of a tensor across in either, where an exchange of
# all with all sends 1 / 2. The fixed tree of sums, ((0+1)+(2+3))+..., adds neighbours first, too.
#
#     process 0 of 4    first                             then
#     halving           with 1: sends 1 3, adds to 0 2    with 2: sends 2, adds to 0
#     doubling          with 2: sends 0, receives 2       with 1: sends 0 2, receives 1 3
def _uses_recursion(call: GroupCall, size: int) -> bool:
    """Return True if bytes matter more than rounds: see Note [Neighbours first]."""
    is_power_of_two = call.n & (call.n - 1) == 0
    return size > SMALL and call.n > 2 and is_power_of_two


def _halves(call: GroupCall, distance: int) -> tuple[slice, slice]:
    """Return the rows of this process and of its peer when they are `distance` apart.

    These are the rows that equal their index modulo 2 * `distance`. Both have all of these rows
    before the round in halving, and after it in doubling.
    """
    step = 2 * distance
    peer = call.index ^ distance
    return slice(call.index % step, None, step), slice(peer % step, None, step)


# -- reductions ------------------------------------------------------------------------------------


def reduce(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce (sum or extreme). (elements,) -> (elements,)"""
    is_power_of_two = call.n & (call.n - 1) == 0
    # Of 16 bits, a sum is computed in 32 and rounded once: doubling would round in each round.
    is_rounded_once = call.n == 2 or x.dtype not in WIDER
    if is_rounded_once and x.nbytes <= SMALL:
        if is_power_of_two:
            return _reduce_by_doubling(call, x, combining(move))
        if call.n > MANY:
            return _reduce_by_tree(call, x, combining(move))
    return _reduce_by_rows(call, x, move)


def _reduce_by_doubling(call: GroupCall, x: Tensor, combine: Combine) -> Wire:
    """All-reduce by recursive doubling: add with the neighbour, then with the tree's next level."""
    total = x
    received = empty(x.shape, x.dtype)
    result = empty(x.shape, x.dtype)
    distance = 1
    while distance < call.n:
        yield _exchange_at_distance(call, distance, [total], [received])
        is_upper = call.index & distance != 0
        pair = [received, total] if is_upper else [total, received]  # 0.0 and -0.0 keep their order
        total = combined(pair, combine, None, result)
        distance *= 2
    return total


def _reduce_by_tree(call: GroupCall, x: Tensor, combine: Combine) -> Wire:
    """All-reduce: add up along a binomial tree to process 0, then broadcast along it.

    Each process is connected with at most log2(n) others; exchanging rows connects all. The order
    is that of the fixed tree. Of five:

        1 -> 0    3 -> 2            0+1, 2+3
        2 -> 0                      (0+1)+(2+3)
        4 -> 0                      ((0+1)+(2+3))+4
    """
    total = x
    received = empty(x.shape, x.dtype)
    result = empty(x.shape, x.dtype)
    distance = 1
    while distance < call.n and not call.index & distance:
        child = call.index + distance
        if child < call.n:
            yield [call.pg.recv([_with_gloo_dtype(received)], child, call.tag)]
            total = combined([total, received], combine, None, result)
        distance *= 2
    if call.index > 0:
        yield [call.pg.send([_with_gloo_dtype(total)], call.index - distance, call.tag)]
    return (yield from broadcast(call, total, Broadcast(0)))


def _reduce_by_rows(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce: each process sums one row of the tensor, then all gather the rows."""
    size = x.numel()
    length = -(-size // call.n)
    rows = x
    if length * call.n != size:
        rows = x.new_zeros(call.n * length)
        rows[:size] = x
    result = empty((call.n, length), x.dtype)
    yield from scatter(call, rows.view(call.n, length), move, result[call.index])
    yield from gather(call, result[call.index], move, result)
    return result.view(-1)[:size]


def scatter(call: GroupCall, rows: Tensor, move: Wired, out: Tensor | None = None) -> Wire:
    """Reduce-scatter: sum the rows of all processes for this one. (n, elements) -> (elements,)"""
    local_row = rows[call.index]
    if out is None:
        out = empty(local_row.shape, rows.dtype)
    if _uses_recursion(call, rows.nbytes) and rows.dtype not in WIDER:
        return (yield from _scatter_by_halving(call, list(rows), combining(move), out))

    summands = list(empty((call.n - 1, *local_row.shape), rows.dtype))
    summands.insert(call.index, local_row)
    yield _exchange_with_all(call, list(rows), summands)
    return combined(summands, combining(move), local_row, out)


def _scatter_by_halving(call: GroupCall, rows: list[Tensor], combine: Combine, out: Tensor) -> Wire:
    """Reduce-scatter by recursive halving: swap half of the rows with a peer, add the others."""
    distance = 1
    while distance < call.n:
        local, swapped = _halves(call, distance)
        summands = rows[local]
        sums = [out]
        if len(summands) > 1:
            sums = list(empty((len(summands), *out.shape), out.dtype))
        yield _exchange_at_distance(call, distance, rows[swapped], sums)

        is_upper = call.index & distance != 0
        for row, received in zip(summands, sums, strict=True):
            if is_upper:  # 0.0 and -0.0 keep their order
                combine(received, row, out=received)
            else:
                combine(row, received, out=received)
        rows[local] = sums
        distance *= 2
    return out


# -- moves of rows ---------------------------------------------------------------------------------


def gather(call: GroupCall, x: Tensor, move: Wired, result: Tensor | None = None) -> Wire:
    """All-gather. (elements,) -> (n, elements), in new memory or in `result`, which has x then."""
    is_new = result is None
    if result is None:
        result = empty((call.n, *x.shape), x.dtype)
    rows = list(result)
    if not _uses_recursion(call, result.nbytes):
        works = _exchange_with_all(call, [x] * call.n, rows)
        if is_new:
            result[call.index] = x  # while it is on its way
        yield works
        return result

    if is_new:
        result[call.index] = x
    distance = call.n // 2
    while distance:
        local, missing = _halves(call, distance)
        yield _exchange_at_distance(call, distance, rows[local], rows[missing])
        distance //= 2
    return result


def _move_rows(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Send and receive the rows of the move's plan: of an all-to-all, or a permutation."""
    plan = row_plan(move, call.index, call.n)
    length = x.shape[-1]
    result = empty(plan.shape(length), x.dtype)
    local_rows = x if x.ndim == 2 else x.unsqueeze(0)
    rows = result if result.ndim == 2 else result.unsqueeze(0)

    works: list[Any] = []
    for source, row in reversed(plan.gets):
        works.append(call.pg.recv([_with_gloo_dtype(rows[row])], source, call.tag))
    for peer, row in plan.sends:
        works.append(call.pg.send([_with_gloo_dtype(local_rows[row])], peer, call.tag))

    if plan.keeps is not None:  # the row that is not sent is copied while others are in flight
        local_row, row = plan.keeps
        rows[row] = local_rows[local_row]
    elif not plan.gets:
        result.zero_()
    yield works
    return result


def broadcast(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Broadcast along a binomial tree. (elements,) -> (elements,)

    Processes count from the source. Process p receives from p without its lowest set bit, and sends
    to p plus each lower bit, the highest first. Of six:

        0 -> 4 -> 5
        0 -> 2 -> 3
        0 -> 1
    """
    assert isinstance(move, Broadcast)
    number = (call.index - move.source) % call.n
    is_source = number == 0
    lowest_bit = 1 << call.n.bit_length() if is_source else number & -number
    result = empty(x.shape, x.dtype)
    if not is_source:
        parent = (move.source + number - lowest_bit) % call.n
        yield [call.pg.recv([_with_gloo_dtype(result)], parent, call.tag)]

    message = _with_gloo_dtype(x if is_source else result)
    works: list[Any] = []
    bit = lowest_bit >> 1
    while bit:
        if number + bit < call.n:
            child = (move.source + number + bit) % call.n
            works.append(call.pg.send([message], child, call.tag))
        bit >>= 1
    if is_source:
        result.copy_(x)  # while it is on its way
    yield works
    return result


def parts(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Exchange unequal parts, with each process what it lacks. (elements,) -> (elements,)"""
    assert isinstance(move, PartsMove)
    outgoing = move.parcels(x, call.index)
    incoming = move.incoming(x, call.index, empty)
    works: list[Any] = []
    for source, buffer in incoming.items():
        works.append(call.pg.recv([_with_gloo_dtype(buffer)], source, call.tag))
    for peer, buffer in outgoing.items():
        works.append(call.pg.send([_with_gloo_dtype(buffer)], peer, call.tag))
    yield works
    return move.unpacked(x, call.index, incoming)


def side_by_side(call: GroupCall, wire: WireFunction, xs: Sequence[Tensor], move: Wired) -> Wire:
    """Run a wire for each large tensor and one for all small ones, which share a buffer.

    The wires share their rounds.
    """
    wires: dict[tuple[int, ...], Wire] = {}  # by the tensors of each wire
    small: list[int] = []
    widths: list[int] = []
    for index, x in enumerate(xs):
        widths.append(x.shape[-1])
        if x.nbytes < ALONE:
            small.append(index)
        else:
            wires[index,] = wire(call, x.contiguous(), move)
        del x
    if small:
        wires[tuple(small)] = wire(call, joined([xs[index] for index in small], xs[0].dtype), move)
    del xs  # small tensors are in the buffer, and may be freed before the result is there

    results: dict[int, Tensor] = {}
    while wires:
        needs: list[Any] = []
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
    "exchange": _move_rows,
    "permute": _move_rows,
    "broadcast": broadcast,
    "parts": parts,
}


# Note [Rounds over gloo need a thread]
# A collective of several rounds advances only while a thread waits for it. If only the waiter of
# its handle did so, two processes that wait for their handles in different orders would deadlock:
#
#     process 0    A.start  B.start  A.wait     round 2 of A needs process 1
#     process 1    A.start  B.start  B.wait     round 2 of B needs process 0
#
# So when a process begins another work, or waits for one, all others in progress are given to a
# helper thread. It runs them in the order of starting, which is equal on all processes of a group.
# The memory of sent messages is freed by a second helper: gloo knows that a message was sent only
# where a thread waits for it. Messages wait without a limit, so collectives must not wait for them
# in one queue.
class Gloo(GroupTransport):
    """Processes connected by gloo, whose threads send and receive."""

    wires = WIRES

    def __init__(self, works: Works, pg: ProcessGroup, index: int, n: int) -> None:
        super().__init__(works, pg, index, n)
        self.connects_late = gloo_connects_late()
        self._collectives = Helper()
        self._sends = Helper()

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        # By the bytes that are sent, which are equal on all processes.
        largest = max([x.numel() for x in xs]) * call.dtype.itemsize
        if len(xs) > 1 and largest >= ALONE:
            xs = cast(xs, [call.dtype] * len(xs))
            return side_by_side(self.numbered(call), self.wires[move.wire], xs, move)
        return super().collective(move, xs, call)

    def helper(self, call: CallInfo) -> Helper | None:
        """Return the helper of a work: see Note [Rounds over gloo need a thread]."""
        if call.move is None:
            return self._sends if call.is_send else None
        has_rounds = call.move.wire in ("reduce", "broadcast")
        if self.n > 2 and call.move.wire in ("scatter", "gather"):
            has_rounds = True
        return self._collectives if has_rounds else None
