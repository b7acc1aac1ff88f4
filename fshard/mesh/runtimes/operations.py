"""Operations in progress: wires that were started, are advanced by any waiting thread, and are waited for.

A thread that waits for one operation advances all others, or gives them to the helpers of their links. So handles may
be waited for in any order.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event, Lock
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fshard.errors import CollectiveTimeoutError, FshardError, LostProcessError
from fshard.mesh.runtimes.link import CallInfo, GroupLink, Link, NcclLink, Wire
from fshard.mesh.runtimes.watch import compare_failed

LOST = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "Socket closed", "remote process")
"""Error texts of backends for a lost peer."""

UNLIMITED = timedelta(days=30)
"""A message may wait for its receiver as long as it likes."""

Tensors = tuple[Tensor, ...]


class Operations:
    """The operations of a process that were started and have not ended, in order."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.in_progress: dict[Operation, None] = {}
        self.recent: deque[tuple[float, CallInfo]] = deque(maxlen=64)
        self.error: FshardError | None = None

    def start(
        self,
        link: Link,
        wire: Wire,
        call: CallInfo,
        unpack: Callable[[Tensor], Tensors] = lambda x: (x,),
        verify: Callable[[], None] | None = None,
    ) -> Operation:
        """Start a wire.

        `unpack` makes the results. `verify` raises, before the result is waited for, unless all make the same call.
        """
        self.recent.append((time.monotonic(), call))
        self.hand_over()
        operation = Operation(self, link, wire, call, unpack, verify)
        self.in_progress[operation] = None
        operation.begin()
        if verify is None:
            self.advance()  # others may wait for this process, which may not wait for anything soon
        return operation

    def hand_over(self, but: Operation | None = None) -> None:
        """Give operations to helpers, where they need one: before another one starts or is waited for."""
        for operation in [*self.in_progress]:
            if operation is not but:
                operation.hand_over()

    def advance(self, but: Operation | None = None) -> bool:
        """Step the operations that can; return True if one has stepped."""
        if not self.in_progress:
            return False
        return sum(operation.try_step() for operation in [*self.in_progress] if operation is not but) > 0

    def finish_sends(self) -> list[CallInfo]:
        """Wait until all messages have been received; return those that were not."""
        sends = [operation for operation in self.in_progress if operation.call.is_send]
        for operation in sends:
            with suppress(RuntimeError, FshardError):
                operation.wait()
        return [operation.call for operation in sends if not operation.is_done]

    def end_hangs(self, stream: Any, store: Any, stopped: Event) -> None:
        """Mark a compute stream every second, until stopped: on NCCL the host waits for no call, so none could raise.

        If it does not reach a mark within nine tenths of the time limit (then NCCL's watchdog would end the process), or
        another process has failed, write the calls since the mark before to stderr, and abort the groups: kernels that
        wait for other processes end, and the next call raises.
        """
        limit = 0.9 * self.timeout.total_seconds()
        since, marked, mark = 0.0, time.monotonic(), stream.record_event()
        with suppress(dist.DistError):  # the process with the store has ended
            while self.error is None and not stopped.wait(min(1.0, limit / 20)):
                if store.check(["failure"]):
                    self.error = LostProcessError(store.get("failure").decode())
                elif mark.query():
                    since, marked, mark = marked, time.monotonic(), stream.record_event()
                elif time.monotonic() - marked > limit:
                    self.error = CollectiveTimeoutError(f"A call did not end within {limit:g} s.")
        if self.error is not None:
            calls = [f"\n  {call}" for began, call in [*self.recent] if began >= since]
            sys.stderr.write(f"fshard: {self.error} Calls that may not have ended:{''.join(calls)}\n")
            groups: Any = dist.distributed_c10d
            groups._abort_process_group()

    def fail(self, error: BaseException, link: Link, call: CallInfo) -> NoReturn:
        """Leave a group, and raise with a description of the call: a time-out or a lost peer is an error of its own."""
        link.fail(error)
        if self.error is not None:
            raise self.error from error
        if not isinstance(error, RuntimeError) or isinstance(error, FshardError):
            raise error
        text = str(error)
        if isinstance(link, GroupLink):
            compare_failed(call)
        if "imed out" in text or "imeout" in text:
            raise CollectiveTimeoutError(
                f"{call} did not end within {self.timeout.total_seconds():g} s: another process of the group has not "
                f"made the same call. Run with FSHARD_CHECK=1 to see where each process is. ({text.splitlines()[0]})"
            ) from error
        if any(word in text for word in LOST):
            raise LostProcessError(
                f"{call} cannot end: another process of the group has failed or ended. Its own error is the one to "
                f"look for. ({text.splitlines()[0]})"
            ) from error
        error.add_note(f"in {call}")
        raise error


# Note [Buffers belong to one stream]
# The allocator reuses freed memory in the order of the stream that it was allocated on. So a wire on a device takes all
# its steps on the stream of its start, whichever thread waits. A waiter on another stream waits for that one, and the
# results, which it may read for longer, are not reused before it has.
class Operation:
    """A started wire. Its buffers are local variables of the generator, until it ends."""

    def __init__(
        self,
        operations: Operations,
        link: Link,
        wire: Wire,
        call: CallInfo,
        unpack: Callable[[Tensor], Tensors],
        verify: Callable[[], None] | None,
    ) -> None:
        self.call, self._all, self._link, self._wire = call, operations, link, wire
        self._unpack, self._verify = unpack, verify
        self._needs: Sequence[Any] = ()
        self._result: Any = None
        self.is_done = False
        self._error: BaseException | None = None
        self._ended: Event | None = None
        self._turn = Lock()  # held by the thread that advances the wire
        has_streams = isinstance(link, NcclLink) and torch.cuda.is_initialized()
        self._stream = torch.cuda.current_stream() if has_streams else None

    def begin(self) -> None:
        """Start the wire's first messages."""
        with self._turn:
            self._step()

    def wait(self) -> Tensors:
        """Return the results, for use on the caller's stream: see Note [Buffers belong to one stream]."""
        if self._stream is None or self._stream == (stream := torch.cuda.current_stream(self._stream.device)):
            return self._finish()
        with torch.cuda.stream(self._stream):
            results = self._finish()
        stream.wait_stream(self._stream)
        for x in results:
            x.record_stream(stream)
        return results

    def _finish(self) -> Tensors:
        """Run it to its end, or wait for the thread that does; unpack the result."""
        self._all.hand_over(self)
        if self._verify is not None:
            try:
                self._verify()
            except BaseException as error:
                self._give_up(error)
            self._verify = None
        with self._turn:
            if self._ended is None:
                self._run()
        if self._ended is not None:
            self._ended.wait(self._all.timeout.total_seconds() if self.call.is_send else None)
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None  # freed as soon as it is unpacked
        return self._unpack(result)

    def hand_over(self) -> None:
        """Give it to its link's helper, if that has one; unless a thread waits for it already."""
        helper = self._link.helper(self.call)
        if helper is not None and self._turn.acquire(blocking=False):
            try:
                self._ended = self._ended or helper.submit(self._run_to_end)
            finally:
                self._turn.release()

    def _run_to_end(self) -> None:
        """Run it; an error is raised where it is waited for."""
        with self._turn, suppress(BaseException):
            self._run()

    def try_step(self) -> bool:
        """Step if what it waits for is complete; return True if so. Errors are raised where it is waited for."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self.is_done or self._error is not None or not self._link.ready(self._needs, self.call):
                return False
            with suppress(Exception):
                self._step()
            return True
        finally:
            self._turn.release()

    def _run(self) -> None:
        timeout = UNLIMITED if self.call.is_send else self._all.timeout
        while not self.is_done:
            if self._error is not None:
                raise self._error
            try:
                self._link.wait(self._needs, timeout, self._advance_others)
            except BaseException as error:
                self._fail(error)
            self._step()

    def _step(self) -> None:
        """Run the wire to where it waits next, or to its end."""
        try:
            with self._link.lock:
                self._needs = next(self._wire)
        except StopIteration as stopped:
            self._result, self._needs, self.is_done = stopped.value, (), True
            self._all.in_progress.pop(self, None)
        except BaseException as error:
            self._fail(error)

    def _advance_others(self) -> bool:
        return len(self._all.in_progress) > 1 and self._all.advance(self)

    def _give_up(self, error: BaseException) -> NoReturn:
        """Raise; and end the wire, unless a helper runs it, whose error will come from the group."""
        if self._error is None and not self.is_done and self._turn.acquire(blocking=False):
            try:
                self._fail(error)
            finally:
                self._turn.release()
        raise error

    def _fail(self, error: BaseException) -> NoReturn:
        self._all.in_progress.pop(self, None)
        self._wire.close()
        try:
            self._all.fail(error, self._link, self.call)
        except BaseException as raised:
            self._error = raised  # a second waiter gets the same error
            raise
