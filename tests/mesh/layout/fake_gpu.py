"""A fake GPU for tests of copies: CPU tensors count as a GPU's; copies happen only when something waits for them."""

from collections import deque

import torch
from torch import Tensor

from fshard.mesh.layout import host_copies


class FakeGpu:
    """The current stream runs at once, but for its copies with `non_blocking`; the streams for copies do not run.

    Copies wait in one queue until an event behind them is waited for. Until then their targets are NaN; the source of a
    copy on another stream must not change. Tensors of `host_like` lie on the host, all others on the GPU.
    `log` has each copy ("to host", "to device") and each wait ("device waits", "host waits").
    """

    def __init__(self, monkeypatch, *modules):
        self.log, self.host, self.current = [], {}, "compute"
        self._queue = deque()
        self._started = 0
        self._copy = Tensor.copy_
        host_like = host_copies.host_like
        monkeypatch.setattr(
            Tensor,
            "copy_",
            lambda x, source, non_blocking=False: self.copy(x, source, non_blocking),
        )
        monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self, "copies"))
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device: FakeStream(self, self.current)
        )
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        for module in (host_copies, *modules):
            monkeypatch.setattr(module, "is_on_host", lambda x: memory(x) in self.host)
            monkeypatch.setattr(
                module, "host_like", lambda x: self.on_host(host_like(x)), raising=False
            )

    def on_host(self, x):
        self.host[memory(x)] = x  # held: no other memory gets its name
        return x

    def copy(self, target, source, non_blocking):
        if not non_blocking:
            return self._copy(target, source)
        before = source if self.current == "copies" else source.clone()
        self.log.append("to host" if memory(target) in self.host else "to device")
        self._queue.append((target, before, before._version))
        self._started += 1
        return target.fill_(torch.nan if target.is_floating_point() else 77)

    def finish(self, count):
        while self._started - len(self._queue) < count:
            target, source, version = self._queue.popleft()
            assert memory(source) in self.host or source._version == version, (
                "a tensor was written to while it was copied"
            )
            self._copy(target, source)


class FakeStream:
    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name

    def __enter__(self):
        self.before, self.gpu.current = self.gpu.current, self.name

    def __exit__(self, *error):
        self.gpu.current = self.before

    def wait_stream(self, other):
        assert (self.name, other.name) == ("copies", "compute")

    def record_event(self):
        return FakeEvent(self.gpu, self.gpu._started)


class FakeEvent:
    def __init__(self, gpu, count):
        self.gpu, self.count = gpu, count

    def wait(self):
        self.gpu.log.append("device waits")
        self.gpu.finish(self.count)

    def synchronize(self):
        self.gpu.log.append("host waits")
        self.gpu.finish(self.count)


def memory(x):
    return x.untyped_storage()._cdata
