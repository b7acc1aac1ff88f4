"""A fake GPU for tests of copies: CPU tensors count as a GPU's; copies happen only when something
waits for them.

It sees:

- each wait of the host for copies: `event.synchronize()`, `stream.synchronize()`, `torch.cuda.synchronize()`, and
  copies between host and GPU that block, since they say so or since the host's memory is pageable;
- a use of a target before its copy: it holds NaN, or 77;
- memory that is freed before a copy that reads it, unless an event or `record_stream` kept it: it is overwritten, as if
  another tensor had got it;
- a copy into memory that was freed, or on a stream that did not wait for what computes or uses the memory;
- a tensor that is written to while it is copied.

It cannot see: reads of numbers, such as `.item()` (tests/transforms/test_host_syncs.py counts
them); a missing wait of one stream of computation for another one, since kernels run at once;
memory that kernels use, of any stream; copies by operations other than `Tensor.copy_` (a
`.to("cuda")` fails on a machine without one); times; orders of the two directions.
"""

import sys
import threading
import traceback
from collections import deque
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import fshard as fs
from fshard.memory import transfers
from fshard.mesh.layout import host_copies
from fshard.mesh.layout.kinds import mark_memory, memory_of

DEVICE = torch.device("cpu")
PACKAGE = Path(fs.__file__).parent


class FakeGpu:
    """Streams for copies do not run until they are waited for; those of computation run at once,
    but for their reads.

    Tensors of host memory kinds and of `on_host` lie on the host, all others on the GPU. `log` has
    each copy ("to host", "to device"), and each wait ("device waits", "host waits"); the host waits
    for what it has not waited for.
    """

    def __init__(self, monkeypatch):
        self.log, self.faults = [], []
        self.waiting, self.waiting_threads = (
            [],
            [],
        )  # functions and threads of each wait of the host
        self.streams = []
        self.current = self.stream()
        self.owners = WeakKeyDictionary()  # of memory that was made on a stream for copies
        self._pinned = WeakSet()  # memory that torch's allocator keeps until copies of it end
        self._pageable = WeakSet()
        self._copy = Tensor.copy_
        self._empty, self._empty_like = torch.empty, torch.empty_like

        patched = {
            (Tensor, "copy_"): lambda x, source, non_blocking=False: self.copy(
                x, source, non_blocking
            ),
            (Tensor, "record_stream"): lambda x, stream: self.record_stream(x, stream),
            (torch, "empty"): self.owned(torch.empty),
            (torch, "empty_like"): self.owned(torch.empty_like),
            (torch.cuda, "Stream"): lambda device=None: self.stream(is_for_copies=True),
            (torch.cuda, "current_stream"): lambda device=None: self.current,
            (torch.cuda, "stream"): lambda stream: stream,
            (torch.cuda, "synchronize"): lambda device=None: self.synchronize(),
        }
        for (owner, name), function in patched.items():
            monkeypatch.setattr(owner, name, function)
        decisions = {
            "is_on_host": self.is_on_host,
            "GPUS": ("cpu", "cuda"),
            "pinned_like": self.pinned_like,
            "copy_stream": lru_cache(host_copies.copy_stream.__wrapped__),
        }
        modules = [module for name, module in sys.modules.items() if name.startswith("fshard.")]
        for name, function in decisions.items():
            original = getattr(host_copies, name)
            for module in modules:
                if module.__dict__.get(name) is original:
                    monkeypatch.setattr(module, name, function)
        monkeypatch.setattr(transfers, "_under_way", type(transfers._under_way)(transfers._Queue))

    # -- memory ------------------------------------------------------------------------------------

    def is_on_host(self, x):
        return x.is_meta or memory_of(x) != "device"

    def on_host(self, x):
        """Return a tensor that the user has made on the host: in pageable memory."""
        self._pageable.add(x.untyped_storage())
        return mark_memory(x, "host")

    def pinned_like(self, x):
        copy = mark_memory(self._empty_like(x), "host")
        self._pinned.add(copy.untyped_storage())
        return copy

    def owned(self, make):
        def made(*args, **options):
            x = make(*args, **options)
            stream = self.current
            if stream.is_for_copies:
                users = self.owners[x.untyped_storage()] = {stream}
                finalize(x.untyped_storage(), self.check_users, users)
            return x

        return made

    def check_users(self, users):
        if len(users) == 1:
            self.faults.append("memory of a stream for copies was freed without record_stream")

    def record_stream(self, x, stream):
        self.owners.get(x.untyped_storage(), set()).add(stream)
        if stream.is_for_copies:
            stream.issue(lambda: x)  # held until then

    def held(self, x):
        """Return a function that returns a tensor, or None when its memory was freed."""
        if x.untyped_storage() in self._pinned:
            return lambda: x
        storage, form = ref(x.untyped_storage()), (x.storage_offset(), x.shape, x.stride())
        dtype = x.dtype

        def tensor():
            memory = storage()
            return None if memory is None else self._empty(0, dtype=dtype).set_(memory, *form)

        return tensor

    # -- streams -----------------------------------------------------------------------------------

    def stream(self, *, is_for_copies=False):
        """Return a new stream; `with gpu.stream():` is a user's own."""
        self.streams.append(FakeStream(self, is_for_copies))
        return self.streams[-1]

    def note_host_wait(self):
        self.log.append("host waits")
        self.waiting_threads.append(threading.current_thread())
        frames = traceback.extract_stack()
        self.waiting.append([x.name for x in frames if Path(x.filename).is_relative_to(PACKAGE)])

    def synchronize(self):
        self.note_host_wait()
        for stream in self.streams:
            stream.await_on_host(stream.issued)

    def finish(self):
        """End the test: run all copies; raise if memory was misused."""
        for stream in self.streams:
            stream.run(stream.issued)
        assert not self.faults, self.faults

    # -- copies ------------------------------------------------------------------------------------

    @torch.no_grad()
    def copy(self, target, source, non_blocking):
        if not isinstance(source, Tensor) or self.is_on_host(target) == self.is_on_host(source):
            return self._copy(target, source)
        on_host = target if self.is_on_host(target) else source
        to_host, stream = on_host is target, self.current
        self.log.append("to host" if to_host else "to device")
        if not non_blocking or on_host.untyped_storage() in self._pageable:
            self.note_host_wait()
            stream.await_on_host(stream.issued)
            return self._copy(target, source)
        stream.check(source if to_host else target)
        if not stream.is_for_copies and not to_host:
            return self._copy(target, source)

        with _disable_current_modes():  # such as those that count memory
            before = source.clone()
            poison(target)
        source, copied = self.held(source), self.held(target)
        is_ordered = not stream.is_for_copies  # with what writes to the source, and frees it

        @_disable_current_modes()
        def run():
            values, result = source(), copied()
            if not is_ordered and values is not None and not same(values, before):
                self.faults.append("a tensor was written to while it was copied")
            if result is None:
                self.faults.append("memory was freed while a copy wrote to it")
            elif is_ordered or values is not None:
                self._copy(result, before)
            else:
                poison(result)

        stream.issue(run)
        return target


class FakeStream:
    """Work in order.

    The GPU is far behind the host: the host knows of no work that is done until it has waited for
    it.
    """

    def __init__(self, gpu, is_for_copies):
        self.gpu, self.is_for_copies, self.device = gpu, is_for_copies, DEVICE
        self.issued = 0
        self.awaited = 0  # by the host
        self.has_waited = False  # for computation, since it became the current stream
        self._queue = deque()
        self._waits = []  # for events, with the number of works before

    def __enter__(self):
        self._before, self.gpu.current = self.gpu.current, self
        return self

    def __exit__(self, *error):
        self.gpu.current = self._before
        self.has_waited = False

    def issue(self, work):
        self._queue.append(work)
        self.issued += 1

    def run(self, count):
        while self.issued - len(self._queue) < count:
            self._queue.popleft()()

    def await_on_host(self, count):
        self.run(count)
        self.awaited = max(self.awaited, count)
        for before, event in self._waits:
            if before < count and not event.query():
                event.stream.await_on_host(event.count)

    def check(self, x):
        """Note a fault unless this stream has waited for what computes a tensor or used its memory."""
        is_own = self in self.gpu.owners.get(x.untyped_storage(), ())
        if self.is_for_copies and not self.has_waited and not is_own:
            self.gpu.faults.append("a copy did not wait for the stream of its tensor")

    def record_event(self):
        self.issue(lambda: None)
        return FakeEvent(self)

    def wait_event(self, event):
        self._waits.append((self.issued, event))
        if self.is_for_copies:
            self.has_waited |= not event.stream.is_for_copies
            self.issue(event.occur)
        else:
            self.gpu.log.append("device waits")
            event.occur()

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.record_event().synchronize()


class FakeEvent:
    def __init__(self, stream):
        self.stream, self.count = stream, stream.issued

    def occur(self):
        self.stream.run(self.count)

    def query(self):
        return self.stream.awaited >= self.count

    def wait(self):
        self.stream.gpu.current.wait_event(self)

    def synchronize(self):
        if not self.query():
            self.stream.gpu.note_host_wait()
            self.stream.await_on_host(self.count)


def poison(x):
    return x.fill_(torch.nan if x.is_floating_point() else 77)


def same(x, y):
    return torch.equal(x.nan_to_num(), y.nan_to_num())


class Storages:
    """Memory of tensors, counted while it is there."""

    def __init__(self):
        self._storages = WeakSet()

    def add(self, x):
        self._storages.add(x.untyped_storage())

    def count(self):
        return len(self._storages)
