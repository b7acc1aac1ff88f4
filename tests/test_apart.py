"""Pieces gathered where the wholes lie, and wires that go on though nobody waits for them."""

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import P
from fshard.mesh.runtimes import apart, neighbours
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
    """Return the parameters after three steps whose gradients they are themselves, whether they stayed, and what was sent."""
    mesh = fs.make_mesh({"d": n})
    params = fs.shard_params(parameters(dtype), P(), mesh=mesh)
    opt = fs.partition_optimizer(OPTIMIZERS[kind](), mesh=mesh, axis="d", stage=2)
    state, before = opt.init(params), [x.shards[0].data_ptr() for x in params.values()]
    with fs.ledger() as comm:
        for _ in range(3):
            grads = {name: fs.reshard(x, opt.gradients(x.layout)) for name, x in params.items()}
            params, state = opt.step(grads, state, params)
    stayed = before == [x.shards[0].data_ptr() for x in params.values()]
    return {name: x.shards[0] for name, x in params.items()}, stayed, comm.by_collective(0)


@pytest.mark.parametrize(("kind", "dtype"), [("writes", torch.float32), ("makes anew", torch.bfloat16)], ids=str)
def test_parameters_are_put_together_in_their_own_memory(two, four, link, kind, dtype):
    for processes, n in ((two, 2), (four, 4)):
        virtual, _, sent = trained(n, kind, dtype)
        for rank, (params, stayed, here) in enumerate(processes.run(trained, n, kind, dtype)):
            assert stayed or link or neighbours._libc() is None
            assert rank or here == sent
            assert all(torch.equal(params[name], x) for name, x in virtual.items())


def in_many_parts():
    neighbours._MOST_SPANS = 2
    return trained(2, "writes", torch.float32)[:2]


def in_small_tables():
    apart.MANY = 3
    return trained(2, "writes", torch.float32)[:2]


@pytest.mark.skipif(neighbours._libc() is None, reason="this system does not read other processes' memory")
@pytest.mark.parametrize("limited", [in_many_parts, in_small_tables])
def test_limits_of_one_call_and_of_one_table_are_kept(limited):
    virtual, *_ = trained(2, "writes", torch.float32)
    for params, stayed in run_processes(limited, 2):
        assert stayed == (limited is in_many_parts)
        assert all(torch.equal(params[name], x) for name, x in virtual.items())


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


@pytest.mark.skipif(neighbours._libc() is None, reason="this system does not read other processes' memory")
def test_whoever_is_behind_holds_nobody_up_once_it_has_started_its_part():
    assert run_processes(one_does_something_else, 2) == [3.0, 3.0]
