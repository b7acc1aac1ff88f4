"""What one of 1,024 ranks makes: groups, store keys and sockets, by a model of torch's groups in
one process.

The library's own code decides which groups there are and which ranks communicate; the model counts.
A group over gloo has a key in the store for each member and a listening socket, and connects two
ranks where they communicate: measured in `test_gloo_of_many_connects_ranks_that_communicate`, with
real groups.
"""

import math
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import P
from fshard.mesh.collectives.moves import Psum
from fshard.mesh.layout.arithmetic import combined
from fshard.mesh.runtimes import gloo, interface, process
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.mesh.runtimes.process_group import GroupCall
from tests.helpers.processes import run_processes
from tests.mesh.runtimes import echo

GPU = torch.device("cuda", 0)


class CountedGroup(echo.EchoGroup):
    """A group whose ranks all have the data of this one; it notes the ranks that messages go to and
    come from.
    """

    def __init__(self, rank, n):
        super().__init__(rank, n)
        self.has_gloo = True
        self.is_bound = True
        self.partners = set()
        self.receives = {}
        self.sent = {}

    _device_types = (torch.device("cpu"), torch.device("cuda"))

    @property
    def sockets(self):
        """One that listens, and one for each rank that this one communicates with."""
        return 1 + len(self.partners) if self.has_gloo else 0

    def send(self, tensors, to, tag=0):
        self.partners.add(to)
        self.sent[to, tag] = tensors[0].clone()
        if (to, tag) in self.receives:
            self.receives.pop((to, tag)).copy_(tensors[0])
        return _ended(super().send(tensors, to, tag))

    def recv(self, tensors, source, tag=0):
        self.partners.add(source)
        # What this rank has sent to the other, or is about to.
        tensors[0].copy_(self.sent.get((source, tag), torch.zeros_like(tensors[0])))
        self.receives[source, tag] = tensors[0]
        return _ended(super().recv(tensors, source, tag))


def _ended(work):
    work.is_done = True
    return work


@contextmanager
def rank_of_many(monkeypatch, rank, n):
    """Be a rank of many with a GPU each; yield the list of its groups, the world's first."""
    groups = []

    def add(store, rank, n, timeout):
        groups.append(CountedGroup(rank, n))
        return groups[-1]

    monkeypatch.delitem(dist.Backend._plugins, "COUNTED", raising=False)
    monkeypatch.delattr(dist.Backend, "COUNTED", raising=False)
    dist.Backend.register_backend("counted", add, devices=["cpu"])
    dist.init_process_group("counted", store=dist.HashStore(), rank=rank, world_size=n)

    make_group = process._C10D._new_process_group_helper

    def new_group(n, index, members, backend, *args, device_id, **options):
        pg, store = make_group(n, index, members, "counted", *args, **options)
        pg.has_gloo = "gloo" in backend
        pg.is_bound = device_id is not None
        return pg, store

    start = ProcessWorld.start

    def start_by_memory(world, move, xs, group, *rest):
        """Take sums in float64 for those of rows in host memory: all other tensors are taken for
        those of GPUs.
        """
        is_of_host = isinstance(move, Psum) and xs[0].dtype == torch.float64
        world.device_type = "cuda" if is_of_host else "cpu"
        try:
            return start(world, move, xs, group, *rest)
        finally:
            world.device_type = "cpu"

    monkeypatch.setattr(ProcessWorld, "start", start_by_memory)
    monkeypatch.setattr(process._C10D, "_new_process_group_helper", new_group)
    monkeypatch.setattr(dist, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    # Each rank has the inputs of this one, whose hashes would not add up to 0.
    monkeypatch.setattr("fshard.transforms.agreement.hash_of", lambda value: 0)
    dist.group.WORLD.bound_device_id = GPU
    try:
        yield groups
    finally:
        process.leave(waiting=False)
        if dist.is_initialized():
            dist.destroy_process_group()


def train(axes, rows, data):
    """Take two steps with parameters divided along some axes, and samples along others."""
    mesh = fs.make_mesh(axes, runtime="process", device="cpu")
    params = fs.shard_params({"w": torch.ones(2, 1024)}, fs.fsdp(rows), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis=rows, stage=3)
    step = fs.train_step(
        lambda p, x: (x @ p["w"]).square().mean(), opt, mesh=mesh, batch=P(data), donate=True
    )
    state = opt.init(params)
    n = math.prod(mesh.shape.values())
    x = fs.device_put(torch.ones(n, 2), fs.Layout(mesh, P(data)))
    for _ in range(2):
        params, state, _ = step(params, state, x)


HSDP = {"replica": 16, "pipe": 1, "data": 64}
UNEVEN = {"replica": 25, "data": 41}


@pytest.mark.parametrize("rank", [0, 511, 1023])
@pytest.mark.parametrize(
    ("axes", "data", "sizes", "most_sockets"),
    [
        ({"data": 1024}, "data", [1024], 11),
        (HSDP, ("replica", "data"), [1024, 64, 16, 1], 23),
        (UNEVEN, ("replica", "data"), [1025, 41, 25], 64),
    ],
    ids=str,
)
def test_rank_of_many_has_few_groups_keys_and_sockets(
    monkeypatch, axes, data, sizes, most_sockets, rank
):
    n = math.prod(axes.values())
    with rank_of_many(monkeypatch, rank, n) as groups:
        train(axes, "data", data)
        made = sorted([group.size() for group in groups], reverse=True)
        keys = sum(group.size() for group in groups if group.has_gloo)
        sockets = sum(group.sockets for group in groups)
        bound = sorted([group.size() for group in groups if group.is_bound], reverse=True)
    assert made == sizes
    assert bound == [size for size in sizes if size > 1]
    assert keys == sum(sizes) <= 1.1 * n
    assert sockets <= most_sockets


# -- sums along a tree -----------------------------------------------------------------------------


class Post:
    """Messages between wires that this process runs in turns."""

    def __init__(self):
        self.messages = {}
        self.partners = defaultdict(set)

    def group(self, rank):
        """Return the group as the wire of one rank sees it."""

        def send(tensors, to, tag):
            self.partners[rank].add(to)
            self.messages[rank, to] = tensors[0].clone()
            return lambda: True

        def recv(tensors, source, tag):
            self.partners[rank].add(source)

            def has_arrived():
                if (source, rank) not in self.messages:
                    return False
                tensors[0].copy_(self.messages.pop((source, rank)))
                return True

            return has_arrived

        return SimpleNamespace(send=send, recv=recv)


def reduce_by_wires(xs):
    """Run the wires of all ranks; return their results, and how many others each communicates with."""
    post, results, waiting = Post(), {}, {}
    for rank, x in enumerate(xs):
        call = GroupCall(post.group(rank), rank, len(xs), 0)
        waiting[rank] = gloo.reduce(call, x, Psum()), []
    while waiting:
        for rank, (wire, needs) in [*waiting.items()]:
            needs = [need for need in needs if not need()]
            try:
                waiting[rank] = wire, needs or next(wire)
            except StopIteration as stopped:
                del waiting[rank]
                results[rank] = stopped.value
    assert not post.messages
    return results, [len(post.partners[rank]) for rank in range(len(xs))]


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12, 1000])
def test_sum_of_many_ranks_has_the_bits_of_the_fixed_tree(monkeypatch, n):
    monkeypatch.setattr(gloo, "MANY", 2)
    generator = torch.Generator().manual_seed(n)
    xs = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(n)]
    copies = [x.clone() for x in xs]
    results, partners = reduce_by_wires(xs)
    assert all(torch.equal(x, copy) for x, copy in zip(xs, copies, strict=True))
    expected = combined(copies, torch.add, None, torch.empty(3, dtype=torch.float64))
    assert all(torch.equal(y, expected) for y in results.values())
    assert max(partners) <= math.ceil(math.log2(n))


# -- gloo itself -----------------------------------------------------------------------------------


def count_sockets():
    """Return the number of open sockets of this process."""
    count = 0
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{file}").startswith("socket:")
    return count


def groups_of_gloo(n):
    """Make the groups of n ranks, each in a thread; return them and the number of keys in their
    store.
    """
    store = dist.HashStore()
    with ThreadPoolExecutor(n) as threads:
        groups = [
            threads.submit(dist.ProcessGroupGloo, store, rank, n, timedelta(seconds=60))
            for rank in range(n)
        ]
    return [group.result() for group in groups], store.num_keys()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux lists the files of a process")
@pytest.mark.parametrize("has_many", [False, True])
def test_gloo_of_many_connects_ranks_that_communicate(monkeypatch, has_many):
    n = 8
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")  # so that it is restored
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    monkeypatch.setattr(interface, "MANY", n - 1 if has_many else n)
    interface.choose_connections(n)
    before = count_sockets()
    groups, keys = groups_of_gloo(n)
    assert keys == n
    assert count_sockets() - before == (n if has_many else n + n * (n - 1))

    # Of a message both ends have a socket. One of them blocks until the other comes.
    x, y = torch.ones(1), torch.zeros(1)
    with ThreadPoolExecutor(2) as threads:
        works = [
            threads.submit(groups[2].send, [x], 5, 0),
            threads.submit(groups[5].recv, [y], 2, 0),
        ]
    for work in works:
        work.result().wait()
    assert torch.equal(x, y)
    assert count_sockets() - before == (n + 2 if has_many else n + n * (n - 1))


def first_messages():
    """Send around a ring, and to a receiver that comes late, before any other call; then sum."""
    mesh = fs.make_mesh({"data": 4}, device="cpu")

    def main():
        index = fs.axis_index("data")
        received = []
        for _ in range(2):
            fs.send(torch.full((2,), float(index)), "data", to=(index + 1) % 4)
            received.append(fs.recv(torch.zeros(2), "data", source=(index - 1) % 4))
        if index == 0:
            fs.send(torch.ones(2), "data", to=2)
        total = fs.psum(torch.ones(2), "data")
        if index == 2:
            received.append(fs.recv(torch.zeros(2), "data", source=0))
        return torch.stack(received), total

    return fs.run(main, mesh=mesh)


def test_first_messages_of_many_cannot_deadlock():
    environment = {"FSHARD_DIRECT": "0", "TORCH_GLOO_LAZY_INIT": "1", "FSHARD_TIMEOUT": "60"}
    results = run_processes(first_messages, 4, environment=environment)
    for index, ((received, total),) in enumerate(results):
        before = (index - 1) % 4
        expected = [[before] * 2] * 2 + [[1, 1]] * (index == 2)
        assert received.tolist() == expected
        assert total.tolist() == [4, 4]
