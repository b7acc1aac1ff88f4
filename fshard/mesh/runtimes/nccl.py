"""Collectives by the backend's own operations, for backends where these are fast: NCCL.

A work runs on the stream that it was started on: to wait for it makes the caller's stream wait, not
the host. So the host never knows which calls have ended: see Note [Errors without waits].

Unsupported dtypes are converted before the call, wherever that is exact: a rejected call can leave
a group broken. 16-bit integers are summed as 32-bit ones, complex numbers as pairs of reals.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fshard.errors import CollectiveTimeoutError, FshardError, LostProcessError
from fshard.mesh.collectives.moves import Broadcast, Extreme, PartsMove, Permute, Wired, combining
from fshard.mesh.layout.arithmetic import WIDER, combined, flipped
from fshard.mesh.layout.mesh import run_defaults
from fshard.mesh.layout.packing import join_into
from fshard.mesh.runtimes.call import CallInfo
from fshard.mesh.runtimes.process_group import GroupCall, GroupTransport, WireFunction
from fshard.mesh.runtimes.transport import Wire, Work, Works, joined

_dist: Any = dist
# The second names are those before torch 2.13.
_all_gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_reduce_scatter = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor

_REDUCES_AS = {**WIDER, torch.bool: torch.uint8, torch.int16: torch.int32}
"""Dtypes that the backend cannot add or compare, and one with the same values that it can."""
del _REDUCES_AS[torch.float16], _REDUCES_AS[torch.bfloat16]  # NCCL adds these itself

PAUSE = 0.01
"""Seconds between two looks at a device, where a process waits for it to leave."""
_SHORT_PAUSE = 0.001
"""The same where a process waits in the middle of its work."""
_LOOKS = 0.25
"""Seconds between two looks whether a process is lost, where that can be known."""


def device_limit(works: Works) -> float:
    """Return the seconds that a call may take on the device.

    They are fewer than those after which NCCL's watchdog ends the process, without naming the call.
    """
    return 0.9 * works.timeout.total_seconds()


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
    if result.data_ptr() == x.data_ptr() and not call.owns_buffer:
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


def permute(call: GroupCall, xs: Sequence[Tensor], move: Permute) -> Wire:
    """Send tensors along the pairs of the move; zeros where none ends. (elements,) -> (elements,)"""
    source_of = {target: source for source, target in move.pairs}
    results: list[Tensor] = []
    for x in xs:
        if call.index not in source_of:
            results.append(torch.zeros_like(x))
        elif source_of[call.index] == call.index:
            results.append(x.clone())
        else:
            results.append(torch.empty_like(x))  # all of it is received

    messages: list[dist.P2POp] = []
    for source, target in move.pairs:
        if source == target:
            continue
        for x, result in zip(xs, results, strict=True):
            if target == call.index:
                received = result.view(torch.uint8)
                messages.append(dist.P2POp(dist.irecv, received, group=call.pg, group_peer=source))
            elif source == call.index:
                sent = x.view(torch.uint8)
                messages.append(dist.P2POp(dist.isend, sent, group=call.pg, group_peer=target))
    # As one batch: single messages would wait for each other in a ring.
    yield dist.batch_isend_irecv(messages) if messages else []
    return results


def broadcast(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Broadcast. (elements,) -> (elements,)"""
    assert isinstance(move, Broadcast)
    if call.owns_buffer:
        result = x
    elif move.source == call.index:
        result = x.clone()  # results do not alias arguments
    else:
        result = torch.empty_like(x)
    message = result.view(torch.uint8)
    yield [dist.broadcast(message, group=call.pg, group_src=move.source, async_op=True)]
    return result


def parts(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """Exchange unequal parts, with each process what it lacks. (elements,) -> (elements,)"""
    assert isinstance(move, PartsMove)
    outgoing = move.parcels(x, call.index)
    incoming = move.incoming(x, call.index, x.new_empty)
    sent = _joined([outgoing[peer] for peer in sorted(outgoing)], x)
    received = _joined([incoming[peer] for peer in sorted(incoming)], x)
    sent_sizes = [outgoing[peer].nbytes if peer in outgoing else 0 for peer in range(call.n)]
    received_sizes = [incoming[peer].nbytes if peer in incoming else 0 for peer in range(call.n)]
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
    return move.unpacked(x, call.index, incoming)


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return flat tensors as one: a view if they are adjacent, else a copy."""
    if not parts:
        return like[:0]
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            return torch.cat([*parts])
        end += part.nbytes
    size = sum([part.numel() for part in parts])
    return parts[0].as_strided((size,), (1,))


# -- sums in the fixed tree ------------------------------------------------------------------------


def tree_reduce(call: GroupCall, x: Tensor, move: Wired) -> Wire:
    """All-reduce in the fixed tree: each process combines one row, then all gather the rows.

    (elements,) -> (elements,)
    """
    missing = -x.numel() % call.n
    rows = torch.cat([x, x.new_zeros(missing)]) if missing else x
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
    connects_late = True

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        if isinstance(move, Permute):
            # A batch has several tensors as they are, without the copies of a joined buffer.
            return permute(self.numbered(call), [joined([x], call.dtype) for x in xs], move)
        return super().collective(move, xs, call)

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
        self.works.raise_error()

    def is_ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        return call.is_send and super().is_ready(needs, call)

    def finish_send(self, send: Work) -> None:
        # `wait` would return at once, and to destroy the groups would wait until NCCL's watchdog
        # ends the process, at the age of the limit.
        end = send.began + device_limit(self.works)
        while not send.try_step() and not send.is_done:
            if self.works.error is not None or time.monotonic() > end:
                return
            time.sleep(PAUSE)


# -- hangs -----------------------------------------------------------------------------------------


# Note [Errors without waits]
# On NCCL the host waits for no call, so no call can raise because another process is late or gone.
# A thread finds out, writes the calls that may not have ended to stderr, keeps the error in `Works`
# and aborts the groups. Kernels that wait for other processes then end, without their results.
# Every later call raises the error. If there is none, leaving the world does, and the process ends
# with exit code 1: it may have read, printed or saved what its last calls should have received.
class HangWatch:
    """Aborts the groups if the compute stream hangs, or another process fails.

    A thread marks the compute stream about once a second. A stream that does not reach a mark
    within nine tenths of the time limit hangs. Once the store is lost, a tenth of that is enough,
    since the process with the store has ended. Where `find_loss` is given, a lost process is enough
    at once. See Note [Errors without waits].

    find_loss: returns what is known of a lost process, or "".
    """

    def __init__(self, works: Works, stream: Any, store: Any) -> None:
        self.find_loss: Callable[[], str] | None = None
        self._works = works
        self._stream = stream
        self._store = store
        self._is_store_lost = False
        self._limit = device_limit(works)
        self._interval = min(1.0, self._limit / 20)
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="fshard-hangs", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the compute stream has reached this point, or an error is found."""
        mark = self._stream.record_event()
        while self._thread.is_alive() and not mark.query():
            time.sleep(PAUSE)

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached a mark; raise the error that has ended the groups.

        Where groups are aborted, the device runs on without the results that it has waited for, and
        reaches its marks too. The error is there before the groups are aborted, so what has been
        reached without an error has its values.
        """
        self._works.raise_error()
        while not mark.query():
            self._works.raise_error()
            time.sleep(_SHORT_PAUSE)
        self._works.raise_error()

    def stop(self) -> None:
        """End the thread; if it aborts the groups just now, wait until it has."""
        self._stopped.set()
        self._thread.join(5)  # it may wait for a store that does not answer

    def publish(self, text: str) -> None:
        """Let the other processes raise an error, unless one is published already."""
        with suppress(RuntimeError):  # the process with the store has ended
            self._store.compare_set("failure", "", text)

    def linger(self) -> None:
        """Keep the store until all processes have read what is published; rank 0 may have it."""
        time.sleep(2 * self._interval)

    def _run(self) -> None:
        works = self._works
        since = 0.0  # when the last mark that was reached was set
        marked = time.monotonic()
        mark = self._stream.record_event()
        while works.error is None and not self._stopped.wait(self._pause()):
            failure = self._read_loss() or self._read_failure()
            if failure:
                works.error = LostProcessError(failure)
            elif mark.query():
                since = marked
                marked = time.monotonic()
                mark = self._stream.record_event()
            else:
                works.error = self._find_hang(time.monotonic() - marked)
        if works.error is not None:
            calls = [f"\n  {call}" for began, call in [*works.recent] if began >= since]
            table = " Calls that may not have ended:" + "".join(calls)
            if self.find_loss is not None and isinstance(works.error, LostProcessError):
                table = ""  # the run continues without that process
            sys.stderr.write(f"fshard: {works.error}{table}\n")
            groups: Any = dist.distributed_c10d
            groups._abort_process_group()

    def _pause(self) -> float:
        """Return the seconds until the next look."""
        return self._interval if self.find_loss is None else min(self._interval, _LOOKS)

    def _read_loss(self) -> str:
        """Return what is known of a lost process, or ""."""
        return "" if self.find_loss is None else self.find_loss()

    def _read_failure(self) -> str:
        """Return what another process has published, or "" if it is nothing, or unknown."""
        if self._is_store_lost:
            return ""
        try:
            return self._store.get("failure").decode() if self._store.check(["failure"]) else ""
        except dist.DistError:
            self._is_store_lost = True
            return ""

    def _find_hang(self, seconds: float) -> FshardError | None:
        """Return the error of a stream that has not reached a mark for some time, if it is one."""
        if seconds > self._limit:
            return CollectiveTimeoutError(f"A call did not end within {self._limit:g} s.")
        # Processes that end in order leave no call of others open. But rank 0 may be the first to
        # end, while the streams of others still have work of their own.
        if self._is_store_lost and seconds > self._limit / 10:
            return LostProcessError(
                f"The process with the store, rank 0 or its launcher, has ended, and a call has "
                f"not ended for {seconds:.0f} s since: look for the error of that process."
            )
        return None
