"""The programs of JAX's shard_map tutorial, each against the program of one device."""

from functools import partial
from itertools import pairwise

import pytest
import torch

import fshard as fs
from fshard import P

SIZES = [24, 16, 16, 16, 8]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def network(generator):
    """Parameters, a batch, the loss of one device, and its gradient."""
    pairs = pairwise(SIZES)
    params = [(torch.randn(i, o, generator=generator).double() / i**0.5, torch.zeros(o).double()) for i, o in pairs]
    batch = tuple(torch.randn(32, size, generator=generator).double() for size in (SIZES[0], SIZES[-1]))
    return params, batch, loss(params, batch), torch.func.grad(loss)(params, batch)


def predict(params, x):
    for w, b in params:
        x = torch.relu(x @ w + b)
    return x


def loss(params, batch):
    x, y = batch
    return (predict(params, x) - y).square().sum(-1).mean()


def assert_same(program, network):
    params, _, expected, gradient = network
    torch.testing.assert_close(fs.unshard(program(params)), expected)
    torch.testing.assert_close(torch.func.grad(lambda params: fs.unshard(program(params)))(params), gradient)


def test_matmul_of_blocks_equals_matmul(generator):
    a, b = torch.randn(8, 16, generator=generator), torch.randn(16, 4, generator=generator)
    mesh = fs.make_mesh((4, 2), ("x", "y"))

    @partial(fs.shard_map, mesh=mesh, in_specs=(P("x", "y"), P("y", None)), out_specs=P("x", None))
    def matmul(a, b):
        return fs.psum(a @ b, "y")

    torch.testing.assert_close(fs.unshard(matmul(a, b)), a @ b)


def test_all_gather_matmul_overlaps_by_ppermute(generator):
    a, b = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
    mesh = fs.make_mesh((4,), ("i",))

    @partial(fs.shard_map, mesh=mesh, in_specs=(P("i", None), P("i", None)), out_specs=P("i", None))
    def matmul(a, b):
        n, index, width = fs.axis_size("i"), fs.axis_index("i"), len(b)
        total = 0
        for step in range(n):
            start = (index - step) % n * width
            total = total + a[:, start : start + width] @ b
            b = fs.ppermute(b, "i", perm=[(k, (k + 1) % n) for k in range(n)])
        return total

    torch.testing.assert_close(fs.unshard(matmul(a, b)), a @ b)


def test_psum_scatter_matmul_shards_its_result(generator):
    a, b = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
    mesh = fs.make_mesh((4,), ("i",))

    @partial(fs.shard_map, mesh=mesh, in_specs=(P(None, "i"), P("i", None)), out_specs=P("i", None))
    def matmul(a, b):
        return fs.psum_scatter(a @ b, "i", dim=0)

    torch.testing.assert_close(fs.unshard(matmul(a, b)), a @ b)


def test_data_parallel_network_has_the_serial_gradient(network):
    @partial(fs.shard_map, mesh=fs.make_mesh((8,), ("batch",)), in_specs=(P(), P("batch")), out_specs=P())
    def sharded(params, batch):
        return fs.pmean(loss(fs.pvary(params, "batch"), batch), "batch")

    assert_same(lambda params: sharded(params, network[1]), network)


def test_fully_sharded_network_has_the_serial_gradient(network):
    @partial(fs.shard_map, mesh=fs.make_mesh((8,), ("batch",)), in_specs=(P("batch"), P("batch")), out_specs=P())
    def sharded(params, batch):
        x, y = batch
        for w, b in params:  # each layer is gathered where it is used
            x = torch.relu(x @ fs.all_gather(w, "batch") + fs.all_gather(b, "batch"))
        return fs.pmean((x - y).square().sum(-1).mean(), "batch")

    assert_same(lambda params: sharded(params, network[1]), network)


def test_tensor_parallel_network_has_the_serial_gradient(network):
    @partial(
        fs.shard_map, mesh=fs.make_mesh((8,), ("feature",)), in_specs=(P("feature"), P(None, "feature")), out_specs=P()
    )
    def sharded(params, batch):
        x, y = batch
        for w, b in params:
            x = torch.relu(fs.psum_scatter(x @ w, "feature", dim=1) + b)
        return fs.psum((x - y).square().sum(-1), "feature").mean()

    assert_same(lambda params: sharded(params, network[1]), network)


def test_fsdp_with_tensor_parallelism_has_the_serial_gradient(network):
    mesh = fs.make_mesh((4, 2), ("batch", "feature"))
    specs = (P(("feature", "batch")), P("batch", "feature"))

    @partial(fs.shard_map, mesh=mesh, in_specs=specs, out_specs=P())
    def sharded(params, batch):
        x, y = batch
        for w, b in params:
            w, b = fs.all_gather(w, "batch"), fs.all_gather(b, "batch")
            x = torch.relu(fs.psum_scatter(x @ w, "feature", dim=1) + b)
        return fs.pmean(fs.psum((x - y).square().sum(-1), "feature").mean(), "batch")

    assert_same(lambda params: sharded(params, network[1]), network)


def test_pipeline_of_ppermutes_equals_all_layers(generator):
    weights = torch.randn(8, 16, 16, generator=generator) / 4
    batches = torch.randn(6, 4, 16, generator=generator)

    def layers(weights, x):
        for weight in weights:
            x = torch.relu(x @ weight)
        return x

    @partial(fs.shard_map, mesh=fs.make_mesh((4,), ("stage",)), in_specs=(P("stage"), P()), out_specs=P())
    def pipeline(weights, batches):
        n, index, results = fs.axis_size("stage"), fs.axis_index("stage"), []
        state = torch.zeros_like(batches[0])
        for tick in range(len(batches) + n - 1):
            if index == 0:
                state = batches[min(tick, len(batches) - 1)]
            state = layers(weights, state)
            results.append(state if index == n - 1 else torch.zeros_like(state))
            state = fs.ppermute(state, "stage", perm=[(k, k + 1) for k in range(n - 1)])
        return fs.psum(torch.stack(results[n - 1 :]), "stage")

    torch.testing.assert_close(fs.unshard(pipeline(weights, batches)), layers(weights, batches))
