"""Collectives on a backend with streams: what the host waits for, on which stream buffers lie, and
what stays alive.
"""

from contextlib import contextmanager
from datetime import timedelta
from runpy import run_path
from threading import Event, current_thread, main_thread
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P
from fshard.mesh.collectives.moves import AllGather
from fshard.mesh.reshard.execute import plan_reshard, start_reshard
from fshard.mesh.runtimes import nccl
from fshard.mesh.runtimes.gloo import Gloo
from fshard.mesh.runtimes.process_group import FirstSend
from fshard.mesh.runtimes.transport import Works
from fshard.mesh.spmd.deterministic import deterministic
from fshard.mesh.spmd.scope import require
from fshard.source import call_site
from tests.helpers.processes import run_processes
from tests.mesh.runtimes import echo, nccl_rules
from tests.mesh.runtimes.programs import each_collective, extremes


@pytest.fixture
def mesh():
    """A mesh `d` of two, of which this process plays both ranks."""
    with echo.echoing(2):
        mesh = fs.make_mesh({"d": 2}, runtime="process", device="cpu")
        echo.forget()
        yield mesh


def group():
    return require("test").group("d", "test")


def test_sends_end_when_the_device_has_read_the_buffer(mesh):
    def main():
        transport = group().world.transport(group())
        works = group().world._works
        work = echo.EchoWork("send")
        buffer = torch.ones(2)

        def wire(x):
            yield [work]
            return x

        transport.start(wire(buffer), SimpleNamespace(is_send=True, move=None))
        reference = ref(buffer)
        del buffer
        assert not works.advance() and reference() is not None
        work.is_done = True
        assert works.advance() and reference() is None

    fs.run(main, mesh=mesh)


class Stream:
    """A stream of a device, by name; it records what it waits for."""

    def __init__(self, name):
        self.name = name
        self.device = torch.device("cuda", 0)
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other.name)


@pytest.fixture
def current(monkeypatch):
    """The streams that are entered, "start" first and the current one last."""
    streams = [Stream("start")]

    @contextmanager
    def stream(entered):
        streams.append(entered)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return streams


def test_waiter_on_another_stream_waits_for_the_stream_of_the_start(mesh, monkeypatch, current):
    recorded = []
    steps = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: recorded.append((x.shape, stream.name))
    )
    monkeypatch.setattr(echo.EchoWork, "wait", lambda work: steps.append(current[-1].name))
    other = Stream("other")

    def main():
        handles = [fs.all_gather.start([torch.ones(2), torch.ones(3)], "d") for _ in range(2)]
        handles[0].wait()
        assert not recorded
        with torch.cuda.stream(other):
            handles[1].wait()

    fs.run(main, mesh=mesh)
    assert steps == ["start", "start"] and other.waited == ["start"]
    assert recorded == [((4,), "other"), ((6,), "other")]


def test_unpacking_into_given_memory_waits_for_the_stream_that_used_it(mesh, monkeypatch, current):
    """A block of the allocator may still be read on the waiter's stream by what had it before."""
    start = current[0]
    other = Stream("other")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)

    def main():
        shapes = [(4,), (6,)]
        plans = [
            plan_reshard(fs.Layout(mesh, P.flat("d")), fs.Layout(mesh, P()), shape)
            for shape in shapes
        ]
        reshard = start_reshard([torch.ones(2), torch.ones(3)], plans, call_site(), ahead=True)
        memory = [torch.zeros(shape) for shape in shapes]
        with torch.cuda.stream(other):
            reshard.wait(memory)
        assert [x.sum().item() for x in memory] == [4, 6]

    fs.run(main, mesh=mesh)
    assert start.waited == ["other"] and other.waited == ["start"]


def test_first_send_waits_for_its_buffer_on_a_stream_of_its_own(monkeypatch, current):
    """The stream of the caller may have kernels that the receiver takes part in only later."""
    caller = current[0]
    caller.record_event = lambda: "the buffer is written"
    waits = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda,
        "Stream",
        lambda device: SimpleNamespace(wait_event=lambda event: waits.append((device, event))),
    )
    work, streams = echo.EchoWork("send"), []

    def start():
        streams.append(current[-1])
        return work

    send = FirstSend(start)
    assert not send.is_completed() and not waits
    send.start()
    assert waits == [(3, "the buffer is written")] and streams[0] is not caller
    assert not send.is_completed()
    work.is_done = True
    assert send.is_completed() and echo.blocking == []


def test_later_messages_follow_the_first_in_order(mesh):
    """The helper starts all messages until it has none left; then they are started directly."""
    receiver_has_come, started = Event(), []

    class Group:
        def send(self, tensors, to, tag):
            if not started:
                receiver_has_come.wait()
            started.append((int(tensors[0]), current_thread() is main_thread()))
            return echo.EchoWork("send")

    route = nccl.Nccl(Works(timedelta(seconds=5)), Group(), 0, 2)
    sends = [route._start_send(torch.tensor([number]), 1, 0) for number in range(2)]
    receiver_has_come.set()
    sends += [route._start_send(torch.tensor([2]), 1, 0)]
    assert route._first_sends[1]._last_started.wait(5)
    route._start_send(torch.tensor([3]), 1, 0)
    assert [number for number, _ in started] == [0, 1, 2, 3]
    assert [is_direct for _, is_direct in started][::3] == [False, True]


def test_started_reductions_keep_only_packed_gradients(mesh):
    def main():
        summands = fs.Layout(mesh, P(unreduced="d"))
        shards = fs.Layout(mesh, P.flat("d"))
        for after in (shards, fs.Layout(mesh, P())):
            gs = [torch.ones(3), torch.ones(2, 2)]
            ways = [plan_reshard(summands, after, tuple(g.shape)) for g in gs]
            alive = [ref(g) for g in gs]
            reshard = start_reshard(gs, ways, call_site(), ahead=True)
            del gs
            assert [g() for g in alive] == [None, None]
            assert [y.numel() for y in reshard.wait()] == ([2, 2] if after is shards else [3, 4])
        leaves = {"a": torch.ones(3), "b": torch.ones(2)}
        alive = [ref(leaf) for leaf in leaves.values()]
        handle = fs.psum.start(leaves, "d")
        del leaves
        assert [leaf() for leaf in alive] == [None, None]
        handle.wait()

    fs.run(main, mesh=mesh)


def test_several_tensors_are_packed_into_the_row_that_is_gathered(mesh, monkeypatch):
    offsets, gather = [], nccl._all_gather

    def spy(rows, x, *args, **kwargs):
        offsets.append((rows.numel(), x.numel(), x.data_ptr() - rows.data_ptr()))
        return gather(rows, x, *args, **kwargs)

    monkeypatch.setattr(nccl, "_all_gather", spy)
    xs = [torch.ones(3), torch.ones(0), torch.ones(2, 2)]
    ys = fs.run(lambda: fs.all_gather(xs, "d"), mesh=mesh)[0]
    assert offsets == [(64, 32, 0)]  # 28 bytes, and padding: NCCL copies 16 at a time
    assert all(torch.equal(y, torch.cat([x, x])) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("count", [1, 2])
def test_result_of_a_gather_is_freed_once_it_is_unpacked(mesh, monkeypatch, count):
    references = []

    def gather(call, x, move):
        rows = x.view(call.n, -1) if x.ndim == 2 else x.new_empty(call.n, x.numel())
        del x
        references.append(ref(rows))
        yield [echo.EchoWork("gather")]
        return rows

    monkeypatch.setitem(nccl.WIRES, "gather", gather)

    def main():
        pending = group().world.start(
            AllGather(1), (torch.ones(2, 2),) * count, group(), call_site()
        )
        full = pending.wait()
        assert references[0]() is None and [y.shape for y in full] == [(2, 4)] * count

    fs.run(main, mesh=mesh)


def under_rules_of_nccl():
    """Run each collective, then one again while nothing completes; count what the host has waited
    for.
    """
    mesh = fs.make_mesh({"d": 2}, device="cpu")
    values = fs.run(lambda: (each_collective(), extremes()), mesh=mesh)[0]

    def held():
        """Start all while nothing completes, and wait in another order: a launch and a wait each,
        two for pmax.
        """
        started = sum(nccl_rules.counts[name] for name in ("launches", "waits"))
        x = torch.ones(4)
        handles = [fs.all_gather.start([torch.ones(3), torch.ones(2)], "d"), fs.psum.start(x, "d")]
        handles += [
            fs.broadcast.start(x, "d", source=0),
            fs.pmax.start(x, "d"),
            fs.psum_scatter.start(x, "d"),
        ]
        handles += [fs.all_to_all.start(x, "d"), fs.ppermute.start(x, "d", [(0, 1), (1, 0)])]
        for handle in reversed(handles):
            handle.wait()
        return sum(nccl_rules.counts[name] for name in ("launches", "waits")) - started

    nccl_rules.hold()
    count = fs.run(held, mesh=mesh)[0]
    nccl_rules.release()
    return *values, count, nccl_rules.counts["host syncs"], nccl_rules.violations


def test_collectives_obey_the_rules_of_nccl():
    results = run_processes(under_rules_of_nccl, 2, environment={"FSHARD_BACKEND": "nccl_rules"})
    expected = fs.run(lambda: (each_collective(), extremes()), mesh=fs.make_mesh({"d": 2}))
    for (values, texts, *counts), (expected_values, expected_texts) in zip(
        results, expected, strict=True
    ):
        assert all(torch.equal(x, y) for x, y in zip(values, expected_values, strict=True))
        assert texts == expected_texts and counts == [16, 0, []]


class Copies(TorchDispatchMode):
    """Lists the operations that write all of a buffer."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and "empty" not in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


FROM_OTHER, FROM_SELF, FROM_NONE = [(1, 0)], [(0, 0)], [(0, 1)]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: fs.psum(x, "d"), ["clone"]),
        (lambda x: fs.psum([x, x], "d"), ["cat"]),
        (lambda x: fs.psum([x.cfloat(), x.cfloat()], "d"), ["_to_copy"] * 2 + ["cat"]),
        (lambda x: fs.broadcast(x, "d", source=0), ["clone"]),
        (lambda x: fs.broadcast(x, "d", source=1), []),
        (lambda x: fs.broadcast([x, x], "d", source=0), ["cat"]),
        (lambda x: fs.ppermute(x, "d", FROM_OTHER), []),
        (lambda x: fs.ppermute(x, "d", FROM_SELF), ["clone"]),
        (lambda x: fs.ppermute(x, "d", FROM_NONE), ["zeros_like"]),
    ],
)
def test_calls_copy_only_what_the_caller_may_still_read(mesh, call, expected):
    x = torch.arange(4.0)

    def main():
        with Copies() as copies:
            results = call(x)
        return copies.names, results

    names, results = fs.run(main, mesh=mesh)[0]
    assert names == expected
    assert x.tolist() == [0, 1, 2, 3]
    for result in results if isinstance(results, list) else [results]:
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_sums_in_the_fixed_tree_pad_only_what_does_not_divide(mesh):
    def main():
        counts = []
        for length in (4, 5):
            x = torch.ones(length)
            with Copies() as copies:
                fs.psum(x, "d")
            counts.append(copies.names.count("cat"))
        return counts

    with deterministic(True, "cpu"):
        assert fs.run(main, mesh=mesh)[0] == [0, 1]


def test_leaves_on_host_and_device_use_different_buffers_and_links(mesh):
    xs = [torch.ones(1), torch.ones(2, device="meta"), torch.ones(3)]
    sizes = []

    def reduce(call, x, move):
        sizes.append(x.numel())
        yield []
        return 2 * x

    def main():
        world = group().world
        world.device_type, world._hosts[0, 1] = "meta", Gloo(world._works, dist.group.WORLD, 0, 2)
        world._hosts[0, 1].wires = {"reduce": reduce}
        return fs.psum(xs, "d")

    ys = fs.run(main, mesh=mesh)[0]
    assert [(y.shape, y.device) for y in ys] == [(x.shape, x.device) for x in xs]
    assert sizes == [4] and len(echo.works) == 1 and torch.equal(ys[2], 2 * xs[2])


@pytest.mark.parametrize("names", [{}, {"all_gather_single": 1, "reduce_scatter_single": 2}])
def test_native_wires_take_new_and_old_names_of_torch(monkeypatch, names):
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        monkeypatch.delattr(dist, new, raising=False)
        monkeypatch.setattr(dist, old, old)
    for name, function in names.items():
        monkeypatch.setattr(dist, name, function, raising=False)
    loaded = run_path(nccl.__file__)
    expected = (1, 2) if names else ("all_gather_into_tensor", "reduce_scatter_tensor")
    assert (loaded["_all_gather"], loaded["_reduce_scatter"]) == expected
