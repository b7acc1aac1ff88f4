"""Transports, which carry the calls of one group of processes, and works, the calls in progress.

A *wire* is a generator: it starts messages, yields what it waits for, and returns the result. So
every algorithm is written sequentially, yet can be started now and finished later. Collectives,
sends and receives are wires. A `Work` is a wire that was started, and is advanced by any thread
that waits. Here a process waits for the second of two collectives of two rounds each:

    start A    A: round 1
    start B    B: round 1
    B.wait()   A: round 2    B: round 2    the result of B
    A.wait()   the result of A

A thread that waits for one work advances all others, or gives them to the helper threads of their
transports. So processes may wait for their works in different orders.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, ClassVar, NoReturn
from weakref import finalize

import torch
from torch import Tensor

from fshard.errors import CollectiveTimeoutError, FshardError, LostProcessError
from fshard.mesh.collectives.moves import AWAITED_COTANGENTS, Wired
from fshard.mesh.layout.packing import join_into
from fshard.mesh.runtimes.buffers import empty
from fshard.mesh.runtimes.call import CallInfo

LOST = (
    "onnection closed",
    "onnection reset",
    "onnection refused",
    "roken pipe",
    "Socket closed",
    "remote process",
)
"""Error texts of backends for a lost peer."""
ENDED = "has ended before this call"
"""Text of the error for a process that has left after all its calls."""

# Note [Unlimited sends]
# A message may wait for its receiver without a limit: the receiver may compute for hours before it
# receives. A time-out would also close all of gloo's connections. Where the sender itself waits for
# its messages, when it leaves the world, the usual limit holds: see `Works.finish_sends`.
UNLIMITED = timedelta(days=30)
"""The time limit of a send."""

Tensors = tuple[Tensor, ...]
Wire = Generator[Sequence[Any], None, Any]
"""Yields what it waits for, in its transport's terms."""
Unpack = Callable[[Any, Sequence[Tensor] | None], Tensors]
"""Makes the results from that of a wire, in the memory of given tensors perhaps."""


class Transport:
    """The processes of one group, as a backend connects them; the caller has `index` of `n`.

    A transport knows tensors and processes, and nothing of trees, autograd, ledgers or scopes.
    """

    lock: AbstractContextManager[Any] = nullcontext()
    """The lock to hold while a wire takes a step: see Note [Order of locks]."""
    has_streams: ClassVar[bool] = False
    """True if works run on the streams of a device."""

    def __init__(self, works: Works, index: int, n: int) -> None:
        self.works = works
        self.index = index
        self.n = n

    def start(
        self,
        wire: Wire,
        call: CallInfo,
        unpack: Unpack = lambda x, into: (x,),
        verify: Callable[[], None] | None = None,
    ) -> Work:
        """Start a wire of this transport; `unpack` makes the results.

        `verify` raises, before the result is waited for, unless all processes make the same call.
        """
        works = self.works
        began = time.monotonic()
        works.recent.append((began, call))
        if works.in_progress:
            works.hand_over()

        work = Work(self, wire, call, unpack, verify, began)
        works.in_progress[work] = None
        try:
            with work.lock, self.lock:
                work.needs = next(wire)
        except StopIteration as stopped:
            work.end(stopped.value)
        except BaseException as error:
            work.fail(error)
        if verify is None:
            # Others may wait for this process, which may not wait for anything soon. With `verify`
            # nothing advances before the calls are known to be equal.
            works.advance()
        return work

    # -- the wires ---------------------------------------------------------------------------------

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        """Return the wire of a collective on packed tensors of one dtype.

        It returns as many tensors, or their concatenation.
        """
        raise NotImplementedError

    def send(self, xs: Tensors, to: int, call: CallInfo) -> Wire:
        """Return the wire that sends tensors to the process at an index.

        The tensors may change after its first step.
        """
        raise NotImplementedError

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        """Return the wire that receives the next message of the process at an index.

        `make` returns the new buffer that it is received into.
        """
        raise NotImplementedError

    def blocks_in_receive(self, source: int) -> bool:
        """Return True if the host waits for the sender when it starts the next receive from it."""
        return False

    # -- the waits of wires ------------------------------------------------------------------------

    def wait(self, needs: Sequence[Any], timeout: timedelta) -> None:
        """Wait for what a wire has yielded."""
        raise NotImplementedError

    def is_ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        """Return True if what a wire has yielded is complete.

        False also if that is unknown without waiting.
        """
        raise NotImplementedError

    def finish_send(self, send: Work) -> None:
        """Wait until a message was received, or raise; at most for the time limit."""
        send.wait()

    def helper(self, call: CallInfo) -> Helper | None:
        """Return the helper thread that advances a work while no thread waits for it, if any."""
        return None

    def fail(self, error: BaseException) -> None:
        """Leave the group: a wire has raised an error."""

    def explain(self, call: CallInfo) -> None:
        """Raise a better error for a call that has failed, if there is one."""


def joined(xs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Join tensors along their last dim, cast to a dtype, in one contiguous buffer."""
    x = xs[0]
    if len(xs) == 1:
        x = x.to(dtype).contiguous()
        if x.stride(-1) != 1:
            # A dim of one element or none is contiguous whatever its stride, such as 0 of the
            # gradient of x.sum(). But torch refuses to view it as bytes.
            x = x.as_strided(x.shape, (x.shape[-1], 1)[-x.ndim :])
        return x

    shape = (*x.shape[:-1], sum([x.shape[-1] for x in xs]))
    buffer = empty(shape, dtype) if x.is_cpu else x.new_empty(shape, dtype=dtype)
    join_into(buffer, xs)
    return buffer


def as_bytes(xs: Tensors) -> Tensor:
    """Copy tensors of one dtype into one row of bytes."""
    return torch.cat([x.detach().reshape(-1) for x in xs]).view(torch.uint8)


class Works:
    """The works of a process that were started and have not ended, in order.

    Args:
        timeout: the limit of a wait.
        has_gone: True for the rank of a process of this machine that has ended.
    """

    def __init__(
        self, timeout: timedelta, has_gone: Callable[[int], bool] = lambda rank: False
    ) -> None:
        self.timeout = timeout
        self.has_gone = has_gone
        self.in_progress: dict[Work, None] = {}  # a set in order
        # For the text of an error on NCCL, where the host does not know which calls have ended.
        self.recent: deque[tuple[float, CallInfo]] = deque(maxlen=64)
        # The error that has ended all groups: see Note [Errors without waits].
        self.error: FshardError | None = None
        self.has_raised_error = False

    def raise_error(self) -> None:
        """Raise the error that has ended all groups, if there is one."""
        if self.error is not None:
            self.has_raised_error = True
            raise self.error

    def hand_over(self, waited_for: Work | None = None) -> None:
        """Give works to helpers, where they need one: before another starts or is waited for."""
        for work in [*self.in_progress]:
            if work is not waited_for:
                work.hand_over()

    def advance(self) -> bool:
        """Advance each work that can take a step; return True if one could."""
        if not self.in_progress:
            return False
        has_stepped = False
        for work in [*self.in_progress]:
            if work.try_step():
                has_stepped = True
        return has_stepped

    def finish_sends(self) -> list[CallInfo]:
        """Wait until all messages have been received; return those that were not."""
        sends = [work for work in self.in_progress if work.call.is_send]
        for work in sends:
            with suppress(RuntimeError, FshardError):
                work.transport.finish_send(work)
        return [work.call for work in sends if not work.is_done]


# Note [Order of locks]
# A work's lock is held by the thread that advances its wire, a transport's lock by the thread that
# takes a step of any wire of it. The order is
#
#     lock of one work  ->  lock of the transport
#
# and never back: a step must not touch the lock of a work. A thread that has the lock of one work
# only tries for the locks of others (`try_step`, `hand_over`) and skips a work that another thread
# advances. If it waited for these locks, two threads that wait for A and B, and advance each
# other's work meanwhile, would deadlock.


# Note [Buffers belong to one stream]
# The allocator reuses freed memory in the order of the stream that it was allocated on. So a wire
# on a device takes all its steps on the stream of its start, whichever thread waits. A waiter on
# another stream waits for that one, and the results, which it may read for longer, are not reused
# before it has.


class Work:
    """A started wire. Its buffers are local variables of the generator, until it ends."""

    def __init__(
        self,
        transport: Transport,
        wire: Wire,
        call: CallInfo,
        unpack: Unpack,
        verify: Callable[[], None] | None,
        began: float,
    ) -> None:
        self.call = call
        self.began = began
        self.lock = Lock()  # held by the thread that advances the wire: see Note [Order of locks]
        self.needs: Sequence[Any] = ()
        self.is_done = False
        self.transport = transport
        self._wire = wire
        self._unpack = unpack
        self._verify = verify
        self._result: Any = None
        self._error: BaseException | None = None
        self._helper_ended: Event | None = None  # set once a helper runs the wire
        self._stream = None
        if transport.has_streams and torch.cuda.is_initialized():
            self._stream = torch.cuda.current_stream()

    def wait(self, into: Sequence[Tensor] | None = None) -> Tensors:
        """Return the results, for use on the caller's stream.

        See Note [Buffers belong to one stream].
        """
        if self._stream is None:
            return self._finish_wire(into)
        stream = torch.cuda.current_stream(self._stream.device)
        if self._stream == stream:
            return self._finish_wire(into)

        if into is not None:
            self._stream.wait_stream(stream)  # which may still use that memory for what it had
        with torch.cuda.stream(self._stream):
            results = self._finish_wire(into)
        stream.wait_stream(self._stream)
        for x in results:
            x.record_stream(stream)
        return results

    def _finish_wire(self, into: Sequence[Tensor] | None) -> Tensors:
        """Run the wire to its end, or wait for the helper that does; unpack the result."""
        works = self.transport.works
        if len(works.in_progress) > 1 or self._verify is not None:
            works.hand_over(self)
        if self._verify is not None:
            self._verify_call()

        with self.lock:
            if self._helper_ended is None:
                self._run_wire()
        if self._helper_ended is not None:
            # Without the lock, which the helper needs.
            limit = works.timeout.total_seconds() if self.call.is_send else None
            self._helper_ended.wait(limit)
        if self._error is not None:
            raise self._error

        result = self._result
        self._result = None  # this work may outlive the wait, and the packed result must not
        return self._unpack(result, into)

    def _verify_call(self) -> None:
        """Raise unless all processes make this call; then end the wire, unless a helper runs it."""
        verify = self._verify
        self._verify = None
        try:
            if verify is not None:
                verify()
        except BaseException as error:
            # A helper's wire ends by itself: the group is left, so it raises there.
            is_running = self._error is None and not self.is_done
            if is_running and self.lock.acquire(blocking=False):
                try:
                    self.fail(error)
                finally:
                    self.lock.release()
            raise

    def hand_over(self) -> None:
        """Give the wire to the transport's helper, if any, unless a thread advances it already."""
        helper = self.transport.helper(self.call)
        if helper is not None and self.lock.acquire(blocking=False):
            try:
                if self._helper_ended is None:
                    self._helper_ended = helper.submit(self._run_in_helper)
            finally:
                self.lock.release()

    def _run_in_helper(self) -> None:
        """Run the wire to its end; an error is raised in the thread that waits."""
        with self.lock, suppress(BaseException):
            self._run_wire()

    def _run_wire(self) -> None:
        # See Note [Unlimited sends].
        timeout = UNLIMITED if self.call.is_send else self.transport.works.timeout
        while not self.is_done:
            if self._error is not None:
                raise self._error
            try:
                self.transport.wait(self.needs, timeout)
            except BaseException as error:
                self.fail(error)
            self._step_wire()

    def try_step(self) -> bool:
        """Advance the wire if what it waits for is complete; return True if so.

        An error is raised in the thread that waits.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            if self.is_done or self._error is not None:
                return False
            with suppress(Exception):
                if not self._is_ready():
                    return False
                self._step_wire()
            return True
        finally:
            self.lock.release()

    def _is_ready(self) -> bool:
        """Return True if what the wire waits for is complete; end the work if that has failed."""
        try:
            return self.transport.is_ready(self.needs, self.call)
        except Exception as error:
            self.fail(error)

    def _step_wire(self) -> None:
        """Run the wire to where it waits next, or to its end."""
        try:
            with self.transport.lock:
                self.needs = next(self._wire)
        except StopIteration as stopped:
            self.end(stopped.value)
        except BaseException as error:
            self.fail(error)

    def end(self, result: Any) -> None:
        """Keep the result until it is waited for."""
        self._result = result
        self.needs = ()
        self.is_done = True
        self.transport.works.in_progress.pop(self, None)

    def fail(self, error: BaseException) -> NoReturn:
        """Leave the group, and raise with a description of the call: also to a second waiter."""
        self.transport.works.in_progress.pop(self, None)
        self._wire.close()
        self.transport.fail(error)
        try:
            self._error = self._explained_error(error)
        except BaseException as explanation:
            self._error = explanation
        if self._error is error:
            raise error
        raise self._error from error

    def _explained_error(self, error: BaseException) -> BaseException:
        """Return the error to raise: a time-out or a lost peer is an error of its own."""
        works = self.transport.works
        works.raise_error()
        if not isinstance(error, RuntimeError) or isinstance(error, FshardError):
            return error

        self.transport.explain(self.call)
        text = str(error)
        first_line = text.splitlines()[0] if text else ""
        if "imed out" in text or "imeout" in text:
            waits_for_cotangents = self.call.number is not None and not self.call.is_send
            advice = AWAITED_COTANGENTS if waits_for_cotangents else ""
            return CollectiveTimeoutError(
                f"{self.call} did not end within {works.timeout.total_seconds():g} s: another "
                "process of the group has not made the same call. Run with FSHARD_CHECK=1 to see "
                f"where each process is.{advice} ({first_line})"
            )
        if ENDED in text:
            return LostProcessError(
                f"{self.call} cannot end: {first_line}. Every process of a group must make the same "
                "calls: look for a loop that is shorter there, or a return or exit before its end."
            )
        if any(lost in text for lost in LOST):
            return LostProcessError(
                f"{self.call} cannot end: another process of the group has failed or ended. Its "
                "own error is the one to look for; without one it was killed, or has ended before "
                f"this call, which every process must make. ({first_line})"
            )
        error.add_note(f"in {self.call}")
        return error


Task = tuple[Callable[[], None], Event, bool]
"""A function to run, the event of its end, and whether it runs in inference mode."""


class Helper:
    """Runs tasks in order, in a thread that starts with the first task.

    The thread ends with the last reference to the helper.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._is_started = False

    def submit(self, task: Callable[[], None]) -> Event:
        """Queue a task that raises nothing; return an event that is set when it has ended."""
        if not self._is_started:
            self._is_started = True
            # The thread refers to the queue alone: a reference to the helper would keep it forever.
            thread = Thread(
                target=_run_queue, args=(self._tasks,), name="fshard-helper", daemon=True
            )
            thread.start()
            finalize(self, self._tasks.put, None)
        ended = Event()
        self._tasks.put((task, ended, torch.is_inference_mode_enabled()))
        return ended


def _run_queue(tasks: SimpleQueue[Task | None]) -> None:
    """Run tasks until there is None."""
    while (item := tasks.get()) is not None:
        task, ended, is_inference = item
        # Outside of inference mode torch refuses to write to tensors that were made in it.
        with torch.inference_mode(is_inference):
            task()
        del task, item  # else the buffers of this wire would live until the next task
        ended.set()
