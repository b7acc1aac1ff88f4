"""Integers are exact beyond 2^53, where 64-bit floats are not: sums of arrays, collectives,
averaged buffers.
"""

import pytest
import torch

import fshard as fs
from fshard import P

MESH = fs.make_mesh({"data": 2, "model": 2})
BIG = 2**53 + 1
X = torch.tensor(
    [
        [BIG, 3, -BIG - 2, 5],
        [7, 2**60 + 1, 1, -9],
        [2**62, 1, -(2**62), 3],
        [1, 2, 3, 2**55 + 1],
    ]
)
LAYOUTS = [
    P(),
    P("data"),
    P(None, "model"),
    P("data", "model"),
    P(("data", "model")),
    P.flat("data"),
]
OPERATIONS = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "sum of columns": lambda x: x.sum(1, keepdim=True),
    "sum of sums": lambda x: x.sum(0).sum(),
    "cumsum": lambda x: x.cumsum(0),
    "product with a matrix": lambda x: x @ torch.ones_like(x),
    "linear after a sum": lambda x: 2 * x.sum(0) - x.sum(0) + x[0],
    "floor division of a sum": lambda x: x.sum(0) // 3,
    "bits of a sum": lambda x: x.sum(0) & 1,
    "absolute sum": lambda x: x.sum(1).abs(),
    "comparison of a sum": lambda x: x.sum(0) == torch.tensor(2**62 + BIG + 8),
    "maximum": lambda x: x.amax(0),
    "maximum of all": lambda x: x.max(),
    "minimum": lambda x: x.amin(1),
    "sorted": lambda x: x.sort(0).values,
    "masked sum": lambda x: x.masked_fill(x < 0, 0).sum(),
    "rows by index": lambda x: x[[2, 0, 2]].sum(0),
    "an item": lambda x: torch.tensor(int(x.sum())),
}


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_on_large_integers_is_exact(name, spec):
    f = OPERATIONS[name]
    result = f(fs.device_put(X, fs.Layout(MESH, spec)))
    actual = fs.unshard(result) if isinstance(result, fs.Sharded) else result
    assert torch.equal(actual, f(X))


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(None, "data"), P("model", "data"), P.flat("data")]
)
def test_reshard_of_unreduced_integers_is_exact(spec):
    summands = [X, torch.full_like(X, BIG)]
    shards = [summands[MESH.coordinates(device)["data"]] for device in range(MESH.size)]
    x = fs.Sharded((4, 4), fs.Layout(MESH, P(unreduced="data")), tuple(shards))
    assert torch.equal(fs.unshard(fs.reshard(x, fs.Layout(MESH, spec))), X + BIG)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_collectives_of_large_integers_are_exact(n):
    rows = torch.randint(-(2**60), 2**60, (n, n, 3), generator=torch.Generator().manual_seed(n))

    def main():
        x = rows[fs.axis_index("data")]
        return (
            fs.psum(x, "data"),
            fs.psum_scatter(x, "data", dim=0),
            fs.pmax(x, "data"),
            fs.pmin(x, "data"),
            fs.all_gather(x, "data", dim=0),
        )

    results = fs.run(main, mesh=fs.make_mesh({"data": n}))
    for device, (total, scattered, largest, smallest, gathered) in enumerate(results):
        assert torch.equal(total, rows.sum(0))
        assert torch.equal(scattered, rows.sum(0)[device : device + 1])
        assert torch.equal(largest, rows.amax(0))
        assert torch.equal(smallest, rows.amin(0))
        assert torch.equal(gathered, rows.flatten(0, 1))


BUFFERS = {"count": torch.tensor(BIG), "many": torch.tensor([BIG, 2**60 + 1, -BIG]), "kept": X}


def count_samples(params, buffers, x):
    changed = {
        "count": buffers["count"] + 2,
        "many": buffers["many"] - 3,
        "kept": buffers["kept"],
    }
    return (x @ params).mean(), changed


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"reproducible": True, "slices": 4}], ids=str
)
@pytest.mark.parametrize("rules", [P(), fs.fsdp("data")], ids=["stage 0", "stage 3"])
def test_averaged_buffers_of_large_integers_are_exact(rules, options):
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params(torch.ones(4, 4), rules, mesh=mesh)
    gradient = fs.value_and_grad(
        count_samples, mesh=mesh, batch=P("data"), has_buffers=True, **options
    )
    buffers = BUFFERS
    steps = 3
    for _ in range(steps):
        (_, buffers), _ = gradient(params, buffers, torch.ones(8, 4))
    after = fs.unshard(buffers)

    writes = (after["count"] - BIG) // 2  # one a step, or one a slice of it
    assert writes in (steps, 2 * steps)
    assert torch.equal(after["count"], BUFFERS["count"] + 2 * writes)
    assert torch.equal(after["many"], BUFFERS["many"] - 3 * writes)
    assert torch.equal(after["kept"], X)


def test_buffers_of_uneven_batches_are_weighted_by_their_samples():
    mesh = fs.make_mesh({"data": 4})
    x = torch.arange(7.0, dtype=torch.float64).unsqueeze(1) ** 2

    def loss(params, buffers, x):
        return (x * params).mean(), {"mean": x.mean(), "steps": buffers["steps"] + 1}

    params = fs.shard_params(torch.ones(1, dtype=torch.float64), P(), mesh=mesh)
    gradient = fs.value_and_grad(loss, mesh=mesh, batch=P("data"), has_buffers=True)
    before = {"mean": torch.zeros((), dtype=torch.float64), "steps": torch.tensor(BIG)}
    (_, after), _ = gradient(params, before, x)

    torch.testing.assert_close(fs.unshard(after["mean"]), x.mean())
    assert fs.unshard(after["steps"]) == BIG + 1
