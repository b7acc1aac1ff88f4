"""Transports, which carry the calls of one group of processes, and works, the calls in progress.

A *wire* is a generator: it starts messages, yields what it waits for, and returns the result. So every algorithm is
written sequentially, yet can be started now and finished later. Collectives, sends and receives are wires; a `Work` is
one that was started, and is advanced by whichever thread waits. A thread that waits for one work advances all others,
or gives them to the helpers of their transports. So works may be waited for in any order.
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
from fshard.mesh.collectives.moves import Wired
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

UNLIMITED = timedelta(days=30)
"""A message may wait for its receiver as long as it likes."""

Tensors = tuple[Tensor, ...]
Wire = Generator[Sequence[Any], None, Any]
"""Yields what it waits for, in its transport's terms."""


class Transport:
    """The processes of one group, as a backend connects them; the caller is the one at `index` of `n`.

    A transport knows tensors and processes, and nothing of trees, autograd, ledgers or scopes.
    """

    lock: AbstractContextManager[Any] = nullcontext()
    """The lock to hold while a wire takes a step."""
    has_streams: ClassVar[bool] = False
    """True if works run on the streams of a device."""

    def __init__(self, works: Works, index: int, n: int) -> None:
        self.works, self.index, self.n = works, index, n

    def start(
        self,
        wire: Wire,
        call: CallInfo,
        unpack: Callable[[Any], Tensors] = lambda x: (x,),
        verify: Callable[[], None] | None = None,
    ) -> Work:
        """Start a wire of this transport; `unpack` makes the results.

        `verify` raises, before the result is waited for, unless all make the same call.
        """
        works = self.works
        works.recent.append((time.monotonic(), call))
        if works.in_progress:
            works.hand_over()
        work = Work(self, wire, call, unpack, verify)
        works.in_progress[work] = None
        try:
            with work.advancing, self.lock:
                work.needs = next(wire)
        except StopIteration as stopped:
            work.end(stopped.value)
        except BaseException as error:
            work.fail(error)
        if verify is None:
            works.advance()  # others may wait for this process, which may not wait for anything soon
        return work

    # -- the wires --------------------------------------------------------------------------------------------------

    def collective(self, move: Wired, xs: Sequence[Tensor], call: CallInfo) -> Wire:
        """Return the wire of a collective on packed tensors of one dtype; it returns as many, or their concatenation."""
        raise NotImplementedError

    def send(self, xs: Tensors, to: int, call: CallInfo) -> Wire:
        """Return the wire that sends tensors to the process at an index. After its first step they may change."""
        raise NotImplementedError

    def receive(self, make: Callable[[], Tensor], source: int, call: CallInfo) -> Wire:
        """Return the wire that receives the next message of the process at an index, into a new buffer."""
        raise NotImplementedError

    # -- what they wait for -----------------------------------------------------------------------------------------

    def wait(self, needs: Sequence[Any], timeout: timedelta) -> None:
        """Wait for what a wire has yielded."""
        raise NotImplementedError

    def is_ready(self, needs: Sequence[Any], call: CallInfo) -> bool:
        """Return True if what a wire has yielded is complete; False also if that is unknown without waiting."""
        raise NotImplementedError

    def helper(self, call: CallInfo) -> Helper | None:
        """Return the helper thread that advances a work while nothing waits for it, if it needs one."""
        return None

    def fail(self, error: BaseException) -> None:
        """Leave the group: a wire has raised an error."""

    def explain(self, call: CallInfo) -> None:
        """Raise a better error for a call that has failed, if there is one."""


def joined(xs: Sequence[Tensor]) -> Tensor:
    """Return packed tensors as one contiguous buffer."""
    x = xs[0]
    if len(xs) == 1:
        return x.contiguous()
    buffer = empty((*x.shape[:-1], sum([x.shape[-1] for x in xs])), x.dtype) if x.is_cpu else None
    return torch.cat([*xs], dim=-1, out=buffer)


def as_bytes(xs: Tensors) -> Tensor:
    """Copy tensors of one dtype into one row of bytes."""
    return torch.cat([x.detach().reshape(-1) for x in xs]).view(torch.uint8)


class Works:
    """The works of a process that were started and have not ended, in order."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.in_progress: dict[Work, None] = {}
        self.recent: deque[tuple[float, CallInfo]] = deque(maxlen=64)
        self.error: FshardError | None = None

    def hand_over(self, waited_for: Work | None = None) -> None:
        """Give works to helpers, where they need one: before another one starts or is waited for."""
        for work in [*self.in_progress]:
            if work is not waited_for:
                work.hand_over()

    def advance(self) -> bool:
        """Step the works that can; return True if one has stepped."""
        if not self.in_progress:
            return False
        return sum([work.try_step() for work in [*self.in_progress]]) > 0

    def finish_sends(self) -> list[CallInfo]:
        """Wait until all messages have been received; return those that were not."""
        sends = [work for work in self.in_progress if work.call.is_send]
        for work in sends:
            with suppress(RuntimeError, FshardError):
                work.wait()
        return [work.call for work in sends if not work.is_done]


# Note [Buffers belong to one stream]
# The allocator reuses freed memory in the order of the stream that it was allocated on. So a wire on a device takes all
# its steps on the stream of its start, whichever thread waits. A waiter on another stream waits for that one, and the
# results, which it may read for longer, are not reused before it has.
class Work:
    """A started wire. Its buffers are local variables of the generator, until it ends."""

    def __init__(
        self,
        transport: Transport,
        wire: Wire,
        call: CallInfo,
        unpack: Callable[[Any], Tensors],
        verify: Callable[[], None] | None,
    ) -> None:
        self.call, self._transport, self._wire = call, transport, wire
        self._unpack, self._verify = unpack, verify
        self.needs: Sequence[Any] = ()
        self._result: Any = None
        self.is_done = False
        self._error: BaseException | None = None
        self._ended: Event | None = None
        self.advancing = Lock()  # held by the thread that advances the wire
        has_streams = transport.has_streams and torch.cuda.is_initialized()
        self._stream = torch.cuda.current_stream() if has_streams else None

    def wait(self) -> Tensors:
        """Return the results, for use on the caller's stream: see Note [Buffers belong to one stream]."""
        if self._stream is None or self._stream == (
            stream := torch.cuda.current_stream(self._stream.device)
        ):
            return self._finish_wire()
        with torch.cuda.stream(self._stream):
            results = self._finish_wire()
        stream.wait_stream(self._stream)
        for x in results:
            x.record_stream(stream)
        return results

    def _finish_wire(self) -> Tensors:
        """Run it to its end, or wait for the thread that does; unpack the result."""
        works = self._transport.works
        if len(works.in_progress) > 1 or self._verify is not None:
            works.hand_over(self)
            self._verify_call()
        with self.advancing:
            if self._ended is None:
                self._run_wire()
        if self._ended is not None:
            self._ended.wait(works.timeout.total_seconds() if self.call.is_send else None)
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None  # freed as soon as it is unpacked
        return self._unpack(result)

    def _verify_call(self) -> None:
        """Raise unless all make this call; and end the wire then, unless a helper runs it, whose error the group raises."""
        verify, self._verify = self._verify, None
        try:
            if verify is not None:
                verify()
        except BaseException as error:
            if self._error is None and not self.is_done and self.advancing.acquire(blocking=False):
                try:
                    self.fail(error)
                finally:
                    self.advancing.release()
            raise

    def hand_over(self) -> None:
        """Give it to its transport's helper, if that has one; unless a thread waits for it already."""
        helper = self._transport.helper(self.call)
        if helper is not None and self.advancing.acquire(blocking=False):
            try:
                self._ended = self._ended or helper.submit(self._run_in_helper)
            finally:
                self.advancing.release()

    def _run_in_helper(self) -> None:
        """Run it; an error is raised where it is waited for."""
        with self.advancing, suppress(BaseException):
            self._run_wire()

    def _run_wire(self) -> None:
        timeout = UNLIMITED if self.call.is_send else self._transport.works.timeout
        while not self.is_done:
            if self._error is not None:
                raise self._error
            try:
                self._transport.wait(self.needs, timeout)
            except BaseException as error:
                self.fail(error)
            self._step_wire()

    def try_step(self) -> bool:
        """Step if what it waits for is complete; return True if so. Errors are raised where it is waited for."""
        if not self.advancing.acquire(blocking=False):
            return False
        try:
            if (
                self.is_done
                or self._error is not None
                or not self._transport.is_ready(self.needs, self.call)
            ):
                return False
            with suppress(Exception):
                self._step_wire()
            return True
        finally:
            self.advancing.release()

    def _step_wire(self) -> None:
        """Run the wire to where it waits next, or to its end."""
        try:
            with self._transport.lock:
                self.needs = next(self._wire)
        except StopIteration as stopped:
            self.end(stopped.value)
        except BaseException as error:
            self.fail(error)

    def end(self, result: Any) -> None:
        """Keep the result until it is waited for."""
        self._result, self.needs, self.is_done = result, (), True
        self._transport.works.in_progress.pop(self, None)

    def fail(self, error: BaseException) -> NoReturn:
        """Leave the group, and raise with a description of the call: also to a second waiter."""
        self._transport.works.in_progress.pop(self, None)
        self._wire.close()
        self._transport.fail(error)
        try:
            self._error = self._explained_error(error)
        except BaseException as raised:
            self._error = raised
        if self._error is error:
            raise error
        raise self._error from error

    def _explained_error(self, error: BaseException) -> BaseException:
        """Return the error to raise for one of a wire: a time-out or a lost peer is an error of its own."""
        works = self._transport.works
        if works.error is not None:
            return works.error
        if not isinstance(error, RuntimeError) or isinstance(error, FshardError):
            return error
        self._transport.explain(self.call)
        text, first = str(error), str(error).splitlines()[0] if str(error) else ""
        if "imed out" in text or "imeout" in text:
            return CollectiveTimeoutError(
                f"{self.call} did not end within {works.timeout.total_seconds():g} s: another process of the group has not "
                f"made the same call. Run with FSHARD_CHECK=1 to see where each process is. ({first})"
            )
        if any(word in text for word in LOST):
            return LostProcessError(
                f"{self.call} cannot end: another process of the group has failed or ended. Its own error is the one to "
                f"look for. ({first})"
            )
        error.add_note(f"in {self.call}")
        return error


Task = tuple[Callable[[], None], Event, bool]
"""A function to run, the event of its end, and whether it runs in inference mode."""


class Helper:
    """Runs tasks in order, in a thread that starts with the first and ends with the last reference to the helper."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._started = False

    def submit(self, task: Callable[[], None]) -> Event:
        """Queue a task that raises nothing; return an event that is set when it has ended."""
        if not self._started:
            self._started = True
            Thread(
                target=_run_queue, args=(self._tasks,), name="fshard-helper", daemon=True
            ).start()
            finalize(self, self._tasks.put, None)
        ended = Event()
        self._tasks.put((task, ended, torch.is_inference_mode_enabled()))
        return ended


def _run_queue(tasks: SimpleQueue[Task | None]) -> None:
    while (item := tasks.get()) is not None:
        task, ended, inference = item
        with torch.inference_mode(inference):
            task()
        del task, item
        ended.set()
