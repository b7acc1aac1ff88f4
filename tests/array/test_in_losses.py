"""Arrays inside the functions of devices: losses of `fs.value_and_grad`, and `fs.shard_map`."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import fshard as fs
from fshard import P
from tests.array.cases import CASES
from tests.array.oracle import tensors

F64 = torch.float64
MESH = fs.make_mesh({"data": 2, "model": 2})
MODEL = fs.Layout(MESH["model"])
DRAW = torch.Generator().manual_seed(0)
SHAPES = {"words": (10, 4), "norm": (4,), "up": (6, 4), "bias": (6,), "down": (4, 6)}
SPECS = {
    "words": P("model"),
    "norm": P(),
    "up": P("model"),
    "bias": P("model"),
    "down": P(None, "model"),
}
SERIAL = {name: torch.randn(shape, generator=DRAW, dtype=F64) for name, shape in SHAPES.items()}
IDS = torch.randint(0, 10, (8, 5), generator=DRAW)


def loss_fn(params, ids):
    x = F.embedding(ids, params["words"])
    h = F.gelu(F.linear(F.layer_norm(x, (4,), params["norm"]), params["up"], params["bias"]))
    h = F.layer_norm(x + F.linear(h, params["down"]), (4,), params["norm"])
    return F.cross_entropy(F.linear(h, params["words"]).flatten(0, 1), ids.flatten())


def as_arrays(params, ids):
    """Cut the full parameters of a device to arrays along "model"."""
    arrays = {
        name: fs.array.constrain(fs.Sharded(SHAPES[name], MODEL, (x,)), SPECS[name])
        for name, x in params.items()
    }
    return arrays, fs.Sharded(tuple(ids.shape), MODEL, (ids,))


def loss_of_arrays(params, ids):
    return fs.array.constrain(loss_fn(*as_arrays(params, ids)), P()).local


@pytest.mark.parametrize("rules", [P(), fs.fsdp("data"), fs.fsdp(("data", "model"))])
def test_loss_of_arrays_has_the_serial_gradient(rules):
    params = fs.shard_params(SERIAL, rules, mesh=MESH)
    with fs.ledger() as comm:
        loss, grads = fs.value_and_grad(loss_of_arrays, mesh=MESH, batch=P("data"))(params, IDS)
    expected, value = torch.func.grad_and_value(loss_fn)(SERIAL, IDS)
    torch.testing.assert_close(loss, value.float(), check_dtype=False)
    torch.testing.assert_close(fs.unshard(grads), expected)
    assert not comm.calls(collective="all_to_all")  # the logits stay sharded over the vocabulary


def test_arrays_in_shard_map_know_their_device():
    def look_up(ids):
        words = fs.Sharded(
            (10, 4),
            MODEL.with_spec(P("model")),
            (SERIAL["words"].chunk(2)[fs.axis_index("model")],),
        )
        actual = F.embedding(fs.Sharded(tuple(ids.shape), MODEL, (ids,)), words)
        return fs.array.constrain(actual, P()).local

    actual = fs.shard_map(look_up, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(IDS)
    torch.testing.assert_close(fs.unshard(actual), F.embedding(IDS, SERIAL["words"]))


# Dims that the devices do not divide, and dims in zigzag order.

DRAWS = ("dropout", "multinomial")
RANDOM = {name for name in CASES if name.startswith(DRAWS) or "dropout" in name}
"""Cases that draw: a loss draws by a key of its own."""


def weighed(y):
    """Return a sum that depends on the place of each element."""
    places = torch.arange(1.0, 1 + math.prod(y.shape), dtype=F64).reshape(y.shape)
    places = (
        fs.Sharded(tuple(y.shape), fs.Layout(y.mesh), (places,))
        if isinstance(y, fs.Sharded)
        else places
    )
    y = y.abs() if y.dtype.is_complex else y.double()
    return (torch.where(y.isfinite(), y, 0) * places).sum()


def sharded(x, dim, mesh):
    """Return an array of a full tensor: a dim in chunks or in zigzag order."""
    array = fs.Sharded(tuple(x.shape), fs.Layout(mesh), (x,))
    if dim is None or mesh.zigzag:
        return array if dim is None else fs.array.constrain(array, P(*((),) * dim, "model"))
    own = x.chunk(mesh.size, dim)[fs.axis_index("model")]
    return fs.Sharded(tuple(x.shape), fs.Layout(mesh, P(*((),) * dim, "model")), (own,))


def loss_of_case(f, given, mesh=None, dims=()):
    """Return a loss of all results, and of all parameters."""
    xs = given if mesh is None else [sharded(*pair, mesh) for pair in zip(given, dims, strict=True)]
    loss = sum(weighed(y) for y in tensors(f(*xs)))
    loss = loss if mesh is None else fs.array.constrain(loss, P()).local
    return loss + sum(0 * x.sum() for x in given if x.is_floating_point())


def legal_dims(x, n, is_zigzag):
    """Return the dims of a tensor that n devices can share."""

    def is_legal(length):
        return length % (2 * n) == 0 if is_zigzag else (n - 1) * -(-length // n) < length

    return [None, *(dim for dim, length in enumerate(x.shape) if is_legal(length))]


def check_dims(name, n, is_zigzag, dims):
    """Check values and gradients of an operation in a loss, whose arrays are sharded along some
    dims.
    """
    f, xs = CASES[name]
    mesh = fs.make_mesh({"data": 1, "model": n})
    own = replace(mesh["model"], zigzag="model") if is_zigzag else mesh["model"]
    params = {str(number): x for number, x in enumerate(xs) if x.is_floating_point()}

    def loss_fn(params, batch, *options):
        return loss_of_case(
            f, [params.get(str(number), x) for number, x in enumerate(xs)], *options
        )

    expected, value = torch.func.grad_and_value(loss_fn)(params, None)
    gradient = fs.value_and_grad(lambda p, b: loss_fn(p, b, own, dims), mesh=mesh, batch=P("data"))
    loss, grads = gradient(fs.shard_params(params, P(), mesh=mesh), torch.zeros(1))
    torch.testing.assert_close(loss, value, check_dtype=False, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fs.unshard(grads), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@given(
    st.sampled_from(sorted({*CASES} - RANDOM)), st.sampled_from([(2, True), (3, False)]), st.data()
)
def test_dims_in_zigzag_order_and_uneven_ones_are_exact(name, how, data):
    check_dims(
        name, *how, [data.draw(st.sampled_from(legal_dims(x, *how))) for x in CASES[name][1]]
    )


@pytest.mark.parametrize(("name", "dim"), [("pshuffle", 1), ("idxl", 0), ("idxl", 1)])
def test_zigzag_dims_of_results_that_are_shorter_or_empty_are_exact(name, dim):
    check_dims(name, 2, True, [dim])
