"""Programs of collectives that processes run."""

import torch

import fshard as fs
from fshard import P


def the_example():
    """The program of the README, as a plain script."""
    torch.manual_seed(0)
    mesh = fs.make_mesh({"data": 2, "model": 2})
    x = fs.device_put(torch.randn(8, 6), fs.Layout(mesh, P("data", "model")))
    w = torch.randn(6, 3)

    def matmul(a, b):
        return fs.psum(a @ b, "model")

    f = fs.shard_map(
        matmul, mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("data")
    )
    with fs.ledger() as comm:
        y = f(x, w)
        full = fs.unshard(y)
    return (
        full,
        str(fs.typeof(y)),
        str(comm),
        [comm.by_collective(device) for device in sorted(comm.devices)],
    )


def each_collective():
    x = torch.arange(6.0).reshape(2, 3) + 10 * fs.axis_index("d")
    sizes = 2, 180_003, 1, 600_001  # over gloo, small tensors share a buffer, and large ones do not
    several = [
        torch.arange(2.0 * size).reshape(2, size) + 10 * fs.axis_index("d") for size in sizes
    ]
    trees = [x], [x.to(torch.complex64)], several, several[1::2]
    calls = [
        (fs.psum, {}),
        (fs.all_gather, {}),
        (fs.all_gather, {"dim": 1}),
        (fs.psum_scatter, {}),
        (fs.all_to_all, {}),
        (fs.ppermute, {"perm": [(0, 1)]}),
        (fs.ppermute, {"perm": [(0, 1), (1, 0)]}),
        (fs.broadcast, {"source": 1}),
    ]
    results = [
        y
        for collective, options in calls
        for tree in trees
        for y in collective(tree, "d", **options)
    ]
    return [fs.pmax(x, "d"), fs.psum(x.to(torch.int16), "d"), *results]


def extremes():
    """The extremes of NaN beside numbers and of uint64 from 2**63, as text."""
    is_first = fs.axis_index("d") == 0
    nan, inf = torch.nan, torch.inf
    floats = torch.tensor([nan, 1, nan, -inf, 2, -nan] if is_first else [1, nan, nan, inf, -3, inf])
    unsigned = torch.tensor(
        [2**63, 5, 2**64 - 1] if is_first else [1, 2**63 + 7, 2**63], dtype=torch.uint64
    )
    signed = torch.tensor([-1, 2, -(2**63)] if is_first else [1, -2, 2**63 - 1])
    xs = [
        floats,
        floats.bfloat16(),
        floats.double(),
        unsigned,
        signed,
        signed.short(),
        signed.bool(),
    ]
    return [str(y.tolist()) for x in xs for y in (fs.pmax(x, "d"), fs.pmin(x, "d"))]
