"""Many tensors summed and gathered where they lie, and wires that go on though nobody waits for them."""

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from fshard.mesh.layout.arithmetic import tree_sum
from fshard.mesh.shared_memory import meet, peers
from fshard.testing.processes import run_processes

SHAPES = {"even": (64, 8), "odd": (7, 3), "one": (1,), "empty": (0, 4), "scalar": (), "large": (700, 1001)}


def parameters(dtype):
    draw = torch.Generator().manual_seed(3)
    params = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}
    return {**params, "columns": params["even"].clone().t(), "part of another": torch.ones(10, dtype=dtype)[2:8]}


def halved(grads, state, params):
    return {name: -0.5 * g for name, g in grads.items()}, state


OPTIMIZERS = {
    "writes": lambda: fs.optim.adamw(0.1, fused=False),
    "makes anew": lambda: fs.optim.Optimizer(lambda params: (), halved, elementwise=True),
}


def trained(n, kind, dtype):
    """Return the parameters after three steps whose gradients they are themselves, and what was sent."""
    mesh = fs.make_mesh({"d": n})
    params = fs.shard_params(parameters(dtype), P(), mesh=mesh)
    opt = fs.partition_optimizer(OPTIMIZERS[kind](), mesh=mesh, axis="d", stage=2)
    state = opt.init(params)
    with fs.ledger() as comm:
        for _ in range(3):
            grads = {name: fs.reshard(x, opt.gradients(x.layout)) for name, x in params.items()}
            params, state = opt.step(grads, state, params)
    return {name: x.shards[0] for name, x in params.items()}, comm.by_collective(0)


@pytest.mark.parametrize(("kind", "dtype"), [("writes", torch.float32), ("makes anew", torch.bfloat16)], ids=str)
def test_optimizer_step_equals_virtual_bits(two, four, kind, dtype):
    for processes, n in ((two, 2), (four, 4)):
        virtual, sent = trained(n, kind, dtype)
        for rank, (params, here) in enumerate(processes.run(trained, n, kind, dtype)):
            assert rank or here == sent
            assert all(torch.equal(params[name], x) for name, x in virtual.items())


def in_many_parts():
    peers.MAX_SPANS = 2
    return trained(2, "writes", torch.float32)[0]


@pytest.mark.skipif(meet._libc() is None, reason="this system does not read other processes' memory")
def test_more_spans_than_one_call_reads_equal_virtual():
    virtual, _ = trained(2, "writes", torch.float32)
    for params in run_processes(in_many_parts, 2):
        assert all(torch.equal(params[name], x) for name, x in virtual.items())


LENGTHS = (120_000, 4, 0, 300_000, 8, 70_000, 16)
COLLECTIVES = {
    "psum": lambda xs: fs.psum(xs, "d"),
    "pmax": lambda xs: fs.pmax(xs, "d"),
    "psum_scatter": lambda xs: fs.psum_scatter(xs, "d"),
    "all_gather": lambda xs: fs.all_gather(xs, "d"),
    "along columns": lambda xs: fs.psum_scatter([x.view(-1, 4) for x in xs], "d", dim=1),
    "of a transposed": lambda xs: fs.psum([*xs[:2], xs[3].view(-1, 4).t()], "d"),
    "with odd ends": lambda xs: fs.psum([x[1:] for x in xs], "d"),
    "of a conjugate": lambda xs: fs.psum([torch.complex(x, x).conj() for x in xs], "d"),
    "one large, many small": lambda xs: fs.psum([xs[3], *(xs[1] + k for k in range(5))], "d"),
    "at once": lambda xs: [handle.wait() for handle in [fs.psum.start(xs, "d"), fs.psum_scatter.start(xs, "d")][::-1]],
}


def collected(n, name, dtype):
    """Return what each device has after a collective on many tensors, more than are laid out in one buffer."""

    def main():
        draw = torch.Generator().manual_seed(fs.axis_index("d"))
        xs = [torch.randn(length, generator=draw) * 9 for length in LENGTHS]
        return COLLECTIVES[name]([x.to(dtype) for x in xs])

    return fs.run(main, mesh=fs.make_mesh({"d": n}))


KINDS = [(name, torch.float32) for name in COLLECTIVES] + [
    (name, dtype) for name in ("psum", "psum_scatter") for dtype in (torch.bfloat16, torch.int16, torch.float64)
]


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_many_tensors_collectives_equal_virtual_bits(two, four, name, dtype):
    for processes, n in ((two, 2), (four, 4)):
        expected = collected(n, name, dtype)
        for rank, (found,) in enumerate(processes.run(collected, n, name, dtype)):
            pairs = zip(flatten(found)[0], flatten(expected[rank])[0], strict=True)
            assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)


def test_many_tensors_results_share_no_memory_with_arguments(two):
    for kept, alone in two.run(kept_apart):
        assert kept
        assert alone


def kept_apart():
    """Return whether what was given is as it was, and whether no result lies in its memory."""

    def main():
        xs = [torch.ones(length) for length in LENGTHS if length]
        ys = fs.psum(xs, "d")
        before, after = ({x.untyped_storage().data_ptr() for x in some} for some in (xs, ys))
        return all(bool((x == 1).all()) for x in xs), before.isdisjoint(after)

    return fs.run(main, mesh=fs.make_mesh({"d": 2}))[0]


def one_does_something_else():
    """Process 1 comes second, so all is there when it starts its part; then it is away until process 0 has its result."""

    def main():
        first = fs.axis_index("d") == 0
        x = torch.full((1 << 20,), 1.0 + fs.axis_index("d"))
        if first:
            handle = fs.psum_scatter.start(x, "d")
        dist.barrier()
        if not first:
            handle = fs.psum_scatter.start(x, "d")
            dist.barrier()
        result = handle.wait()
        if first:
            dist.barrier()
        return result[0].item()

    return fs.run(main, mesh=fs.make_mesh({"d": 2}, timeout=20))[0]


@pytest.mark.skipif(meet._libc() is None, reason="this system does not read other processes' memory")
def test_started_collective_of_a_late_process_does_not_block():
    assert run_processes(one_does_something_else, 2, environment={"FSHARD_LINES": "0"}) == [3.0, 3.0]


def rows_of(rank, dtype):
    x = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(rank))
    return (100 * x).to(dtype)


def scatter_twice(dtype):
    """The second is waited for first, so the rows of the first leave the ring as copies."""

    def main():
        x = rows_of(fs.axis_index("d"), dtype)
        before = x.clone()
        first, second = fs.psum_scatter.start(x, "d"), fs.psum_scatter.start(x.flip(1), "d")
        later, sooner = second.wait(), first.wait()
        return x.equal(before), sooner, later

    return fs.run(main, mesh=fs.make_mesh({"d": 4}))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_psum_scatter_keeps_arguments_and_fixed_tree(dtype):
    for rank, (is_kept, sooner, later) in enumerate(run_processes(scatter_twice, 4, dtype)):
        expected = tree_sum([rows_of(other, dtype)[rank] for other in range(4)])
        assert is_kept and sooner.flatten().equal(expected) and later.flatten().equal(expected.flip(0))
