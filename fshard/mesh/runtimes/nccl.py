"""Collectives by the backend's own operations, for backends where these are fast: NCCL.

A work runs on the stream that it was started on: to wait for it makes the caller's stream wait, not
the host. So the host never knows which calls have ended, and no wait can raise: see `end_hangs`.

Unsupported dtypes are converted before the call, wherever that is exact: a rejected call can leave
a group broken. 16-bit integers are summed as 32-bit ones, complex numbers as pairs of reals.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.errors import CollectiveTimeoutError, LostProcessError
from fshard.mesh.collectives.moves import Broadcast, Extreme, PartsMove, Permute, Wired, combining
from fshard.mesh.layout.arithmetic import WIDER, combined, flipped
from fshard.mesh.layout.mesh import run_defaults
from fshard.mesh.layout.packing import join_into
from fshard.mesh.runtimes.call import CallInfo
from fshard.mesh.runtimes.process_group import GroupCall, GroupTransport, WireFunction
from fshard.mesh.runtimes.transport import Wire, Works

_dist: Any = dist
# The second names are those before torch 2.13.
_all_gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_reduce_scatter = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor

_REDUCES_AS = {**WIDER, torch.bool: torch.uint8, torch.int16: torch.int32}
"""Dtypes that the backend cannot add or compare, and one with the same values that it can."""
del _REDUCES_AS[torch.float16], _REDUCES_AS[torch.bfloat16]  # NCCL adds these itself


# -- reductions ------------------------------------------------------------------------------------


def _reducible(x: Tensor) -> Tensor:
    """Return the same values in a form that the backend can reduce."""
    if x.is_complex():
        return torch.view_as_real(x)
    return x.to(_REDUCES_AS.get(x.dtype, x.dtype))


def _restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(x) if dtype.is_complex else x.to(dtype)


def _reduce_operation(move: Wired) -> dist.ReduceOp.RedOpType:
    if not isinstance(move, Extreme):
        return dist.ReduceOp.SUM
    return dist.ReduceOp.MAX if move.largest else dist.ReduceOp.MIN


def reduce(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce (sum or extreme). (elements,) -> (elements,)"""
    if isinstance(move, Extreme) and x.is_floating_point():
        return (yield from _reduce_float_extreme(call, x, move))
    if isinstance(move, Extreme) and x.dtype == torch.uint64:
        # As int64 the upper half of uint64 is negative; flipped values are in order.
        return flipped((yield from reduce(call, flipped(x), move)))

    dtype = x.dtype
    result = _reducible(x)
    if result.data_ptr() == x.data_ptr():
        result = result.clone()  # the reduction is in place, and arguments stay
    del x  # only the copy stays alive
    yield [dist.all_reduce(result, _reduce_operation(move), call.pg, async_op=True)]
    return _restored(result, dtype)


def _reduce_float_extreme(call: GroupCall, x: Tensor, move: Extreme) -> Wire:
    """All-reduce to the largest or smallest, or to NaN if there is one.

    The backend keeps or drops NaN depending on the dtype, so NaN is reduced beside the values.
    """
    dtype = x.dtype
    result = _reducible(x)
    is_nan = result.isnan()
    neutral = -torch.inf if move.largest else torch.inf
    result = result.masked_fill(is_nan, neutral)
    has_nan = is_nan.to(torch.uint8)
    del x, is_nan  # only the two tensors of the calls stay alive
    yield [
        dist.all_reduce(result, _reduce_operation(move), call.pg, async_op=True),
        dist.all_reduce(has_nan, dist.ReduceOp.MAX, call.pg, async_op=True),
    ]
    return _restored(result.masked_fill_(has_nan.bool(), torch.nan), dtype)


def scatter(call: GroupCall, rows: Tensor, move: Wired) -> Wire:
    """Reduce-scatter. (n, elements) -> (elements,)"""
    summands = _reducible(rows).contiguous()
    result = torch.empty_like(summands[0])
    yield [_reduce_scatter(result, summands.flatten(0, 1), group=call.pg, async_op=True)]
    return _restored(result, rows.dtype)


# -- moves of bytes --------------------------------------------------------------------------------
# Bytes, since the backend does not know every dtype.


def gather(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-gather. (elements,) -> (n, elements), or in place if `x` has a row for each process."""
    is_in_place = x.ndim == 2
    rows = x if is_in_place else x.new_empty(call.n, x.numel())
    shard = x[call.index] if is_in_place else x
    row_bytes = rows.view(-1).view(torch.uint8)
    yield [_all_gather(row_bytes, shard.view(torch.uint8), call.pg, async_op=True)]
    return rows


def exchange(call: GroupCall, rows: Tensor, move: Wired) -> Wire:
    """All-to-all: row i is sent to process i. (n, elements) -> (n, elements)"""
    result = torch.empty_like(rows)
    received = result.view(-1).view(torch.uint8)
    sent = rows.contiguous().view(-1).view(torch.uint8)
    yield [dist.all_to_all_single(received, sent, group=call.pg, async_op=True)]
    return result


def permute(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Send along the pairs of the move; zeros where none ends. (elements,) -> (elements,)"""
    assert isinstance(move, Permute)
    result = torch.zeros_like(x)
    received = result.view(torch.uint8)
    sent = x.view(torch.uint8)
    messages: list[dist.P2POp] = []
    for source, target in move.pairs:
        if source == target == call.index:
            result.copy_(x)
        elif target == call.index:
            messages.append(dist.P2POp(dist.irecv, received, group=call.pg, group_peer=source))
        elif source == call.index:
            messages.append(dist.P2POp(dist.isend, sent, group=call.pg, group_peer=target))
    # As one batch: single messages would wait for each other in a ring.
    yield dist.batch_isend_irecv(messages) if messages else []
    return result


def broadcast(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Broadcast. (elements,) -> (elements,)"""
    assert isinstance(move, Broadcast)
    result = x.clone()
    message = result.view(torch.uint8)
    yield [dist.broadcast(message, group=call.pg, group_src=move.source, async_op=True)]
    return result


def parts(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Exchange unequal parts, with each process what it lacks. (elements,) -> (elements,)"""
    assert isinstance(move, PartsMove)
    outgoing = move.parcels(x, call.index)
    sizes = move.expected(x, call.index)

    sent = torch.cat([outgoing[peer] for peer in sorted(outgoing)]) if outgoing else x[:0]
    received = x.new_empty(sum(sizes.values()))
    sent_sizes: list[int] = []
    received_sizes: list[int] = []
    for peer in range(call.n):
        sent_sizes.append(outgoing[peer].nbytes if peer in outgoing else 0)
        received_sizes.append(sizes.get(peer, 0) * x.element_size())
    yield [
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            received_sizes,
            sent_sizes,
            group=call.pg,
            async_op=True,
        )
    ]

    arrived = received.split([sizes.get(source, 0) for source in range(call.n)])
    incoming = {source: arrived[source] for source in sizes}
    return move.unpacked(x, call.index, incoming)


# -- sums in the fixed tree ------------------------------------------------------------------------


def tree_reduce(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce in the fixed tree: each process combines one row, then all gather the rows.

    (elements,) -> (elements,)
    """
    rows = torch.cat([x, x.new_zeros(-x.numel() % call.n)])
    arrived = torch.empty_like(rows)
    # The stream waits here, not when the handle is waited for: a gather that starts only then could
    # start in another order on another process.
    dist.all_to_all_single(arrived.view(torch.uint8), rows.view(torch.uint8), group=call.pg)
    row = _combine_rows(arrived.view(call.n, rows.numel() // call.n), move)
    return (yield from gather(call, row, move)).view(-1)[: x.numel()]


def tree_scatter(call: GroupCall, rows: Tensor, move: Wired) -> Wire:
    """Reduce-scatter in the fixed tree: exchange rows, then combine them.

    (n, elements) -> (elements,)
    """
    return _combine_rows((yield from exchange(call, rows, move)), move)


def _combine_rows(rows: Tensor, move: Wired) -> Tensor:
    """Combine rows in the fixed tree, reusing their memory. (n, elements) -> (elements,)"""
    return combined([*rows], combining(move), None, torch.empty_like(rows[0]))


def _select_by_mode(usual: WireFunction, reproducible: WireFunction) -> WireFunction:
    """Return the wire that is `reproducible` in that mode, else the `usual` one.

    The backend's order of summands varies with their number and size.
    """

    def wire(call: GroupCall, x: Tensor, move: Wired) -> Wire:
        selected = reproducible if run_defaults().has_fixed_order else usual
        return selected(call, x, move)

    return wire


WIRES: dict[str, WireFunction] = {
    "reduce": _select_by_mode(reduce, tree_reduce),
    "scatter": _select_by_mode(scatter, tree_scatter),
    "gather": gather,
    "exchange": exchange,
    "permute": permute,
    "broadcast": broadcast,
    "parts": parts,
}


class Nccl(GroupTransport):
    """Processes connected by NCCL.

    Only the thread that waits ends a collective, since a helper thread has another stream. The host
    sees the end of sends alone, whose buffers are kept until then.
    """

    wires = WIRES
    has_streams = True

    def joined(self, move: Wired, xs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return packed tensors as one buffer; for a gather in place as a row of its result."""
        if move.wire != "gather" or len(xs) == 1:
            return super().joined(move, xs, dtype)
        width = sum([len(x) for x in xs])
        # NCCL loads and stores 16 bytes at a time only if all rows begin at a multiple of these.
        padding = -width % max(16 // dtype.itemsize, 1)
        buffer = xs[0].new_empty(self.n, width + padding, dtype=dtype)
        join_into(buffer[self.index][:width], xs)
        return buffer

    def wait(self, needs: Sequence[Any], timeout: timedelta) -> None:
        for work in needs:
            work.wait()  # with a time limit it would block the host until the operation has ended

    def is_ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        return call.is_send and super().is_ready(needs, call)


# -- messages --------------------------------------------------------------------------------------


def direction(sender: int, receiver: int) -> str:
    """Return the direction of messages between two ranks."""
    return "up" if receiver > sender else "down"


# Note [Messages have a queue for each direction]
# NCCL ignores tags: two ranks have one queue for all that they send and receive. A device starts to
# receive ahead of its computation. In one queue that would block its next send, which the other end
# may need first:
#
#     rank 0   recv B0 (ahead), send F0           F0 is behind B0
#     rank 1   recv F0, send B0                   B0 needs F0
#
# So messages to higher ranks have one group, those to lower ranks another. A queue then has the
# messages of one rank to one other, and both start them in the same order. The groups are not bound
# to a device, as those of collectives are: all ranks of a bound group share one queue.
class MessageLinks:
    """The transports of one rank's messages, by direction; their indices are ranks of the world."""

    def __init__(
        self, works: Works, rank: int, device_type: str, make_group: Callable[[str], ProcessGroup]
    ) -> None:
        self._rank = rank
        self._device_type = device_type
        self._transports: dict[str, Nccl] = {}
        for name in ("up", "down"):
            pg = make_group(f"messages {name}")
            self._transports[name] = Nccl(works, pg, rank, pg.size())
        self._connected: set[tuple[int, int]] = set()

    def transport(self, sender: int, receiver: int) -> Nccl:
        """Return the transport of the messages from one rank to another."""
        return self._transports[direction(sender, receiver)]

    def connect(self, members: Sequence[int], pairs: Iterable[tuple[int, int]]) -> None:
        """Connect pairs of members, given as indices (sender, receiver), by a first message each.

        Both ends of a pair call it. NCCL connects two ranks in their first call, which blocks the
        host until the other end makes its own: if all members of a ring send before they receive,
        none would.
        """
        for pair in sorted(pairs, key=_connection_order):
            sender, receiver = route = members[pair[0]], members[pair[1]]
            is_end = self._rank in route and sender != receiver
            if is_end and route not in self._connected:
                self._connected.add(route)
                self._send_byte(sender, receiver)

    def _send_byte(self, sender: int, receiver: int) -> None:
        """Send or receive one byte, and wait until the other end does."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device_type)
        pg = self.transport(sender, receiver).pg
        if self._rank == sender:
            pg.send([byte], receiver, 0).wait()
        else:
            pg.recv([byte], sender, 0).wait()


def _connection_order(pair: tuple[int, int]) -> tuple[int, ...]:
    """Return the key by which all ranks order pairs: neighbours at even indices first.

    Of a ring of four these are 0-1, 2-3, then 1-2; disjoint pairs connect at the same time.
    """
    lower, upper = sorted(pair)
    return (lower % 2, lower, upper, *pair)


# -- hangs -----------------------------------------------------------------------------------------


def end_hangs(works: Works, stream: Any, store: Any, stopped: Event) -> None:
    """Abort the groups if the compute stream hangs, or another process fails; until `stopped`.

    Runs in a thread of its own. It marks the compute stream about once a second, since on NCCL the
    host waits for no call, so no call could raise. If the stream does not reach a mark within nine
    tenths of the time limit, or another process has failed, the calls since the mark before are
    written to stderr, and the groups are aborted. Then kernels that wait for other processes end,
    and the next call raises.
    """
    # Before the full limit, at which NCCL's watchdog would end the process.
    limit = 0.9 * works.timeout.total_seconds()
    interval = min(1.0, limit / 20)
    since = 0.0  # when the last mark that was reached was set
    marked = time.monotonic()
    mark = stream.record_event()
    with suppress(dist.DistError):  # the process with the store has ended
        while works.error is None and not stopped.wait(interval):
            if store.check(["failure"]):
                works.error = LostProcessError(store.get("failure").decode())
            elif mark.query():
                since = marked
                marked = time.monotonic()
                mark = stream.record_event()
            elif time.monotonic() - marked > limit:
                works.error = CollectiveTimeoutError(f"A call did not end within {limit:g} s.")
    if works.error is not None:
        calls = [f"\n  {call}" for began, call in [*works.recent] if began >= since]
        sys.stderr.write(f"fshard: {works.error} Calls that may not have ended:{''.join(calls)}\n")
        groups: Any = dist.distributed_c10d
        groups._abort_process_group()
