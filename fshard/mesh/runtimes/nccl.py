"""Collectives by the backend's own operations, for backends where these are fast: NCCL.

A work runs on the stream that it was started on: to wait for it makes the caller's stream wait, not the host.

Unsupported dtypes are converted before the call (a rejected call can leave a group broken): 16-bit integers are summed
as 32-bit ones, complex numbers as pairs of reals, and so on, wherever that is exact.
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
from fshard.mesh.runtimes.call import CallInfo
from fshard.mesh.runtimes.process_group import GroupCall, GroupTransport, WireFunction
from fshard.mesh.runtimes.transport import Wire, Works

_dist: Any = dist
_all_gather = (
    getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
)  # the name before torch 2.13
_reduce_scatter = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor

_REDUCES_AS = {
    **{
        dtype: wide for dtype, wide in WIDER.items() if dtype not in (torch.float16, torch.bfloat16)
    },
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
}
"""Dtypes that the backend cannot add or compare, and one that holds the same values and that it can."""


def _reducible(x: Tensor) -> Tensor:
    """Return the same values in a form that the backend can reduce."""
    return torch.view_as_real(x) if x.is_complex() else x.to(_REDUCES_AS.get(x.dtype, x.dtype))


def _restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(x) if dtype.is_complex else x.to(dtype)


def _reduce_operation(move: Wired) -> dist.ReduceOp.RedOpType:
    if isinstance(move, Extreme):
        return dist.ReduceOp.MAX if move.largest else dist.ReduceOp.MIN
    return dist.ReduceOp.SUM


def reduce(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce (sum or extreme). (elements,) -> (elements,)"""
    if isinstance(move, Extreme) and x.is_floating_point():
        return (yield from _reduce_float_extreme(call, x, move))
    if isinstance(move, Extreme) and x.dtype == torch.uint64:
        return flipped((yield from reduce(call, flipped(x), move)))
    result, dtype = _reducible(x), x.dtype
    result = result.clone() if result.data_ptr() == x.data_ptr() else result
    del x  # only the copy stays alive
    yield [dist.all_reduce(result, _reduce_operation(move), call.pg, async_op=True)]
    return _restored(result, dtype)


def _reduce_float_extreme(call: GroupCall, x: Tensor, move: Extreme) -> Wire:
    """All-reduce to the largest or smallest, or to NaN, which the backend keeps or drops depending on the dtype."""
    result, dtype = _reducible(x), x.dtype
    is_nan = result.isnan()
    result, has_nan = (
        result.masked_fill(is_nan, -torch.inf if move.largest else torch.inf),
        is_nan.to(torch.uint8),
    )
    del x, is_nan
    works = [dist.all_reduce(result, _reduce_operation(move), call.pg, async_op=True)]
    yield [*works, dist.all_reduce(has_nan, dist.ReduceOp.MAX, call.pg, async_op=True)]
    return _restored(result.masked_fill_(has_nan.bool(), torch.nan), dtype)


def gather(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-gather. (elements,), or in place (n, elements) with this process's row -> (n, elements)"""
    rows = x if x.ndim == 2 else x.new_empty(call.n, x.numel())
    shard = x[call.index] if x.ndim == 2 else x
    yield [
        _all_gather(
            rows.view(-1).view(torch.uint8), shard.view(torch.uint8), call.pg, async_op=True
        )
    ]
    return rows


def scatter(call: GroupCall, rows: Tensor, move: Wired) -> Wire:
    """Reduce-scatter. (n, elements) -> (elements,)"""
    summands = _reducible(rows).contiguous()
    result = torch.empty_like(summands[0])
    yield [_reduce_scatter(result, summands.flatten(0, 1), group=call.pg, async_op=True)]
    return _restored(result, rows.dtype)


def exchange(call: GroupCall, rows: Tensor, move: Wired) -> Wire:
    """All-to-all: row i is sent to process i. (n, elements) -> (n, elements)"""
    result = torch.empty_like(rows)
    flat = rows.contiguous().view(-1)
    yield [
        dist.all_to_all_single(
            result.view(-1).view(torch.uint8), flat.view(torch.uint8), group=call.pg, async_op=True
        )
    ]
    return result


def permute(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """(elements,) -> (elements,): along the pairs of the move, zeros where none ends."""
    assert isinstance(move, Permute)
    result, sent_bytes = torch.zeros_like(x), x.view(torch.uint8)
    messages: list[dist.P2POp] = []
    for source, to in move.pairs:
        if source == to == call.index:
            result.copy_(x)
        elif to == call.index:
            messages.append(
                dist.P2POp(dist.irecv, result.view(torch.uint8), group=call.pg, group_peer=source)
            )
        elif source == call.index:
            messages.append(dist.P2POp(dist.isend, sent_bytes, group=call.pg, group_peer=to))
    yield dist.batch_isend_irecv(messages) if messages else []
    return result


def broadcast(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Broadcast. (elements,) -> (elements,)"""
    assert isinstance(move, Broadcast)
    result = x.clone()
    yield [
        dist.broadcast(
            result.view(torch.uint8), group=call.pg, group_src=move.source, async_op=True
        )
    ]
    return result


def parts(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Exchange of unequal parts. (elements,) -> (elements,)"""
    assert isinstance(move, PartsMove)
    outgoing, sizes = move.parcels(x, call.index), move.expected(x, call.index)
    sent_buffer = torch.cat([outgoing[to] for to in sorted(outgoing)]) if outgoing else x[:0]
    result = x.new_empty(sum(sizes.values()))
    sent = [outgoing[to].nbytes if to in outgoing else 0 for to in range(call.n)]
    received = [sizes.get(source, 0) * x.element_size() for source in range(call.n)]
    buffers = result.view(torch.uint8), sent_buffer.view(torch.uint8)
    yield [dist.all_to_all_single(*buffers, received, sent, group=call.pg, async_op=True)]
    arrived = result.split([sizes.get(source, 0) for source in range(call.n)])
    return move.unpacked(x, call.index, {source: arrived[source] for source in sizes})


def tree_reduce(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce in the fixed tree: each process combines one row, then all gather the rows. (elements,) -> (elements,)"""
    rows = torch.cat([x, x.new_zeros(-x.numel() % call.n)])
    arrived = torch.empty_like(rows)
    # The stream waits here, not when the handle is waited for: all processes start the same operations in one order.
    dist.all_to_all_single(arrived.view(torch.uint8), rows.view(torch.uint8), group=call.pg)
    row = _combine_rows(arrived.view(call.n, rows.numel() // call.n), move)
    return (yield from gather(call, row, move)).view(-1)[: x.numel()]


def tree_scatter(call: GroupCall, rows: Tensor, move: Wired) -> Wire:
    """Reduce-scatter in the fixed tree: exchange rows, then combine them. (n, elements) -> (elements,)"""
    return _combine_rows((yield from exchange(call, rows, move)), move)


def _combine_rows(rows: Tensor, move: Wired) -> Tensor:
    """Combine rows in the fixed tree, reusing their memory. (n, elements) -> (elements,)"""
    return combined([*rows], combining(move), None, torch.empty_like(rows[0]))


def _select_by_mode(usual: WireFunction, reproducible: WireFunction) -> WireFunction:
    """Return the wire that is `reproducible` in that mode: sums in the fixed tree; else the `usual` one.

    The backend's order of summands varies with their number and size.
    """

    def wire(call: GroupCall, x: Tensor, move: Wired) -> Wire:
        selected = reproducible if run_defaults().has_fixed_order else usual
        return selected(call, x, move)

    return wire


WIRES: dict[str, WireFunction] = {
    "reduce": _select_by_mode(reduce, tree_reduce),
    "scatter": _select_by_mode(scatter, tree_scatter),
    **{wire.__name__: wire for wire in (gather, exchange, permute, broadcast, parts)},
}


class Nccl(GroupTransport):
    """Processes connected by NCCL.

    Only the waiting thread ends a collective, since a helper thread has another stream. The host sees the end of sends
    alone, whose buffers are kept until then.
    """

    wires = WIRES
    has_streams = True

    def joined(self, move: Wired, xs: Sequence[Tensor]) -> Tensor:
        """Return packed tensors as one buffer: that of the result, for a gather in place."""
        if move.wire != "gather" or len(xs) == 1:
            return super().joined(move, xs)
        buffer = xs[0].new_empty(self.n, sum([len(x) for x in xs]))
        torch.cat([*xs], out=buffer[self.index])
        return buffer

    def wait(self, needs: Sequence[Any], timeout: timedelta) -> None:
        for work in needs:
            work.wait()  # with a time limit it would block the host until the operation has ended

    def is_ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        return call.is_send and super().is_ready(needs, call)


def direction(sender: int, receiver: int) -> str:
    """Return the direction of messages between two ranks."""
    return "up" if receiver > sender else "down"


# Note [Messages have a queue for each direction]
# NCCL ignores tags: two ranks have one queue for all that they send and receive. A device starts to receive ahead of its
# computation. In one queue that would block its next send, which the other end may need first:
#
#     rank 0   recv B0 (ahead), send F0           F0 is behind B0
#     rank 1   recv F0, send B0                   B0 needs F0
#
# So messages to higher ranks have one group, those to lower ranks another. A queue then has the messages of one rank to
# one other, and both start them in the same order. The groups are not bound to a device, as those of collectives are: all
# ranks of a bound group share one queue.
class MessageLinks:
    """The transports of one rank's messages, by direction; indices in them are ranks of the world."""

    def __init__(
        self, works: Works, rank: int, device_type: str, make_group: Callable[[str], ProcessGroup]
    ) -> None:
        self._rank, self._device_type = rank, device_type
        groups = {name: make_group(f"messages {name}") for name in ("up", "down")}
        self._transports = {name: Nccl(works, pg, rank, pg.size()) for name, pg in groups.items()}
        self._connected: set[tuple[int, int]] = set()

    def transport(self, sender: int, receiver: int) -> Nccl:
        """Return the transport of the messages from one rank to another."""
        return self._transports[direction(sender, receiver)]

    def connect(self, members: Sequence[int], pairs: Iterable[tuple[int, int]]) -> None:
        """Send a byte between members, from index to index, unless one has been sent. Both ends of a pair call it.

        NCCL connects two ranks in their first call, which blocks the host until the other end makes its own: if all
        members of a ring send before they receive, none would. All ranks take pairs in one order, disjoint ones first.
        """
        for pair in sorted(pairs, key=lambda pair: (min(pair) % 2, *sorted(pair), pair)):
            sender, receiver = route = members[pair[0]], members[pair[1]]
            if self._rank in route and sender != receiver and route not in self._connected:
                self._connected.add(route)
                byte, pg = (
                    torch.zeros(1, dtype=torch.uint8, device=self._device_type),
                    self.transport(*route).pg,
                )
                work = (
                    pg.send([byte], receiver, 0)
                    if self._rank == sender
                    else pg.recv([byte], sender, 0)
                )
                work.wait()


def end_hangs(works: Works, stream: Any, store: Any, stopped: Event) -> None:
    """Mark a compute stream every second, until stopped: on NCCL the host waits for no call, so none could raise.

    If it does not reach a mark within nine tenths of the time limit (then NCCL's watchdog would end the process), or
    another process has failed, write the calls since the mark before to stderr, and abort the groups: kernels that
    wait for other processes end, and the next call raises.
    """
    limit = 0.9 * works.timeout.total_seconds()
    since, marked, mark = 0.0, time.monotonic(), stream.record_event()
    with suppress(dist.DistError):  # the process with the store has ended
        while works.error is None and not stopped.wait(min(1.0, limit / 20)):
            if store.check(["failure"]):
                works.error = LostProcessError(store.get("failure").decode())
            elif mark.query():
                since, marked, mark = marked, time.monotonic(), stream.record_event()
            elif time.monotonic() - marked > limit:
                works.error = CollectiveTimeoutError(f"A call did not end within {limit:g} s.")
    if works.error is not None:
        calls = [f"\n  {call}" for began, call in [*works.recent] if began >= since]
        sys.stderr.write(f"fshard: {works.error} Calls that may not have ended:{''.join(calls)}\n")
        groups: Any = dist.distributed_c10d
        groups._abort_process_group()
