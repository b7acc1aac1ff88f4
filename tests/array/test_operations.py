"""Operations on arrays equal those on unsharded tensors: values, and gradients twice over.

The oracle is torch's operation on one float64 tensor (`tests/array/oracle.py`). Layouts are drawn.
"""

import itertools
import random
from functools import partial
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import fshard as fs
from fshard import P
from tests.array.cases import CASES, F64, FIRST_ORDER
from tests.array.oracle import check
from tests.helpers.sampled import THOROUGH

MESH = fs.make_mesh({"data": 2, "model": 2})
SIZES = {"data": 2, "model": 2}


def specs_of(x):
    """List the specs that a tensor can have on the 2 x 2 mesh."""
    specs = [P(), P.flat("data"), P.flat("data", "model")]

    # One dim is sharded, over one axis or both.
    for dim in range(x.ndim):
        for axes in ("data", "model", ("data", "model"), ("model", "data")):
            devices = 2 if isinstance(axes, str) else 4
            if x.shape[dim] % devices == 0:
                specs.append(P(*[None] * dim, axes))

    # Two dims are sharded.
    for first, second in itertools.permutations(range(x.ndim), 2):
        if x.shape[first] % 2 == 0 and x.shape[second] % 2 == 0:
            entries = [None] * x.ndim
            entries[first] = "data"
            entries[second] = "model"
            specs.append(P(*entries))

    if x.is_floating_point():
        specs += [P(unreduced="model"), P(unreduced=("data", "model"))]
        if x.ndim and x.shape[0] % 2 == 0:
            specs.append(P("data", unreduced="model"))
    return specs


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_operation_equals_unsharded_with_drawn_layouts(name):
    f, xs = CASES[name]
    combinations = list(itertools.product(*map(specs_of, xs)))
    count = 36 if THOROUGH else 3
    drawn = random.Random(name).sample(combinations, min(count, len(combinations)))
    order = 1 if name in FIRST_ORDER else 2

    for specs in drawn:
        check(f, xs, specs, MESH, order=order)


SHARDED = [(P(("data", "model")), 0), (P("data", "model"), 1), (P("data"), 0)]
"""Layouts of an (8, 4) array, with a dim that is sharded."""


@pytest.mark.parametrize(("spec", "dim"), SHARDED, ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmax_over_sharded_dim_does_not_overflow(name, spec, dim):
    x = 1000 + 100 * torch.randn(8, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    check(lambda x: getattr(torch, name)(x, dim), [x], [spec], MESH)


CORRECTIONS = [
    {"correction": 0},
    {"correction": 1},
    {"correction": 2.5},
    {"unbiased": False},
    {"unbiased": True},
]


@pytest.mark.parametrize(("spec", "dim"), SHARDED, ids=str)
@pytest.mark.parametrize("name", ["var", "std"])
def test_variance_over_sharded_dim_divides_by_length_minus_correction(name, spec, dim):
    f = getattr(torch, name)
    x = torch.randn(8, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    for options in CORRECTIONS:
        check(partial(f, dim=dim, **options), [x], [spec], MESH)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's of degrees of freedom
@pytest.mark.parametrize(("spec", "dim"), SHARDED, ids=str)
@pytest.mark.parametrize("name", ["var", "std"])
def test_variance_with_large_correction_is_infinite(name, spec, dim):
    f = getattr(torch, name)
    x = torch.randn(8, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    array = fs.device_put(x, fs.Layout(MESH, spec))
    for correction in (8, 9):
        expected = f(x, dim, correction=correction)

        actual = f(array, dim, correction=correction)

        assert expected.isinf().all()
        torch.testing.assert_close(fs.unshard(actual), expected)


@pytest.mark.parametrize("spec", [P("data"), P("data", "model"), P("data", None, "model")], ids=str)
def test_einsum_sums_over_sharded_dims_of_dots(spec):
    x = torch.randn(2, 4, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = check(lambda x: torch.einsum("...i->i", x), [x], [spec], MESH)
    assert y.spec.unreduced


@st.composite
def arrays(draw, mesh, shape):
    """Draw a spec that an array of a shape can have: flat, or each axis shards a dim, or none."""
    is_flat = draw(st.integers(0, 5)) == 0
    axes = draw(st.permutations(mesh.axis_names))
    if is_flat:
        count = draw(st.integers(1, len(axes)))
        return P.flat(*axes[:count])

    entries = [[] for _ in shape]
    unreduced = []
    for axis in axes:
        dim = draw(st.integers(-2, len(shape) - 1))
        if dim == -2:
            unreduced.append(axis)
        elif dim >= 0:
            devices = prod(mesh.shape[name] for name in [*entries[dim], axis])
            if shape[dim] % devices == 0:
                entries[dim].append(axis)
    return P(*map(tuple, entries), unreduced=tuple(unreduced))


def drawn_tensor(data, shape):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    return torch.randn(shape, dtype=F64, generator=generator)


LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 9])
MESHES = [
    fs.make_mesh({"a": 2}),
    fs.make_mesh({"a": 3}),
    fs.make_mesh({"a": 2, "b": 2}),
    fs.make_mesh({"a": 1, "b": 3}),
    fs.make_mesh({"a": 2, "b": 1, "c": 2}),
]


def where_larger(a, b):
    return torch.where(a > b, a, b)


def mse_if_second_broadcasts(a, b):
    """Return the loss of b expanded to the shape of a; their product, where it cannot be."""
    if a.shape == torch.broadcast_shapes(a.shape, b.shape):
        return F.mse_loss(a, b.expand_as(a))
    return a * b


BINARY = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "maximum": torch.maximum,
    "where": where_larger,
    "mse": mse_if_second_broadcasts,
}


def logsumexp(x, d):
    return x.logsumexp(d) if x.shape[d] else x.exp()  # -inf of no numbers


def amax(x, d):
    return x.amax(d) if x.shape[d] else x.sin()  # of no numbers it raises


def second_half(x, d):
    start = x.shape[d] // 2
    return x.narrow(d, start, x.shape[d] - start)


def square_matrix(x, d):
    return x @ x.transpose(-1, -2) if x.ndim > 1 else x @ x


def halves(x, d):
    can_split = x.shape[0] % 2 == 0 and x.numel()
    return x.unflatten(0, (-1, 2)) if can_split else x.neg()


UNARY = {
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "sum all": lambda x, d: x.sum(),
    "softmax": lambda x, d: x.softmax(d),
    "logsumexp": logsumexp,
    "cumsum": lambda x, d: x.cumsum(d),
    "amax": amax,
    "transpose": lambda x, d: x.transpose(0, d),
    "flatten": lambda x, d: x.flatten(d),
    "flat": lambda x, d: x.reshape(-1),
    "slice": second_half,
    "index": lambda x, d: x[..., 1:],
    "split": lambda x, d: x.split(2, d),
    "chunk": lambda x, d: x.chunk(3, d),
    "stack": lambda x, d: torch.stack([x, x * 2], d),
    "cat": lambda x, d: torch.cat([x, x.sin()], d),
    "matmul": square_matrix,
    "einsum": lambda x, d: torch.einsum("...i,...i->...", x, x),
    "unsqueeze": lambda x, d: x.unsqueeze(d).squeeze(),
    "var": lambda x, d: x.var(d, unbiased=False),
    "norm": lambda x, d: (x * x + 1).norm(dim=d),
    "flip": lambda x, d: x.flip(d),
    "expand": lambda x, d: x.expand(2, *x.shape),
    "repeat": lambda x, d: x.repeat(*[2] * x.ndim),
    "layer_norm": lambda x, d: F.layer_norm(x, x.shape[-1:]),
    "halves": halves,
}


@pytest.mark.filterwarnings("ignore:var():UserWarning")
@given(st.data())
def test_drawn_unary_operation_equals_unsharded(data):
    mesh = data.draw(st.sampled_from(MESHES))
    shape = data.draw(st.lists(LENGTHS, min_size=1, max_size=3))
    f = UNARY[data.draw(st.sampled_from(sorted(UNARY)))]
    dim = data.draw(st.integers(0, len(shape) - 1))
    x = drawn_tensor(data, shape)
    spec = data.draw(arrays(mesh, shape))

    check(lambda x: f(x, dim), [x], [spec], mesh)


@pytest.mark.filterwarnings("ignore:var():UserWarning")
@given(st.data())
def test_drawn_broadcasting_equals_unsharded(data):
    """Shapes are the last lengths of one shape, of which some are 1."""
    mesh = data.draw(st.sampled_from(MESHES))
    full = data.draw(st.lists(LENGTHS, max_size=3))
    xs = []
    specs = []
    for _ in range(2):
        start = data.draw(st.integers(0, len(full)))
        shape = []
        for length in full[start:]:
            is_broadcast = data.draw(st.integers(0, 4)) == 0
            shape.append(1 if is_broadcast else length)
        xs.append(drawn_tensor(data, shape))
        specs.append(data.draw(arrays(mesh, shape)))
    f = BINARY[data.draw(st.sampled_from(sorted(BINARY)))]

    check(f, xs, specs, mesh)


@pytest.mark.filterwarnings("ignore:var():UserWarning")
@given(st.data())
def test_drawn_matmul_equals_unsharded(data):
    mesh = data.draw(st.sampled_from(MESHES))
    batch = data.draw(st.lists(LENGTHS, max_size=1))
    i, k, o = (data.draw(LENGTHS) for _ in range(3))
    left = [*batch, i, k]
    right = [k, o]
    xs = [drawn_tensor(data, left), drawn_tensor(data, right)]
    specs = [data.draw(arrays(mesh, left)), data.draw(arrays(mesh, right))]

    check(torch.matmul, xs, specs, mesh)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.bool]
)
def test_other_dtypes_keep_their_results(dtype):
    x = (torch.arange(32).reshape(8, 4) % 7).to(dtype)
    for spec in (P("data"), P(None, ("data", "model"))):
        check(lambda x: (x + x, x * x, x.sum(0), x == x, x.T), [x], [spec], MESH, order=0)


SUMS = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "batch_norm": lambda x: F.batch_norm(x.T, None, None, training=True),
    "normalize": lambda x: F.normalize(x, dim=1),
    "norm": lambda x: x.norm(dim=1),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(1, correction=0),
    "mean": lambda x: (4 * x).mean(1),
    "full mean": lambda x: (4 * x.abs()).mean(),
    "logsumexp": lambda x: x.logsumexp(1),
    "mse_loss": lambda x: F.mse_loss(x, 0 * x),
    "l1_loss": lambda x: F.l1_loss(4 * x, 0 * x),
}
"""Functions whose sums are beyond the range of float16, and whose results are within it."""


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_float16_do_not_overflow(name):
    f = SUMS[name]
    x = (60 * torch.randn(4, 512, generator=torch.Generator().manual_seed(0))).half()
    expected = f(x.double()).half()
    assert expected.isfinite().all()

    for spec in (P(None, "data"), P("model", "data"), P()):
        array = fs.device_put(x, fs.Layout(MESH, spec))
        torch.testing.assert_close(fs.unshard(f(array)), expected, rtol=4e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("var", torch.complex128),
        ("std", torch.complex64),
        ("logsumexp", torch.uint8),
        ("logsumexp", torch.bool),
    ],
)
def test_reductions_of_other_dtypes_over_sharded_dims(name, dtype):
    f = getattr(torch, name)
    drawn = torch.randn(8, 4, dtype=torch.complex64 if dtype.is_complex else None)
    x = (200 * drawn).to(dtype)
    array = fs.device_put(x, fs.Layout(MESH, P("data", "model")))
    for dim in (0, 1, (0, 1)):
        expected = f(x, dim)

        y = f(array, dim)

        assert y.dtype == expected.dtype
        torch.testing.assert_close(fs.unshard(y), expected)


# -- zeros and infinities of unreduced arrays ------------------------------------------------------

QUOTIENTS = {
    "zeros": lambda x, y: x / y,
    "zeros, in place": lambda x, y: x.clone().div_(y),
    "the number 0": lambda x, y: x / 0,
    "the number inf": lambda x, y: torch.div(x, float("inf")),
    "times inf": lambda x, y: x * float("inf"),
    "times nan": lambda x, y: float("nan") * x,
    "the number 2": lambda x, y: x / 2,
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_unreduced_array_divided_by_zero_equals_unsharded(name):
    """Shards of an unreduced array are summands: some are zero where the sum is not."""
    mesh = fs.make_mesh({"model": 2})
    ones = torch.ones(1, 2, dtype=torch.float64)
    summands = torch.zeros(2, 4, dtype=torch.float64)
    summands[0] = torch.tensor([1.0, 0.0, -1.0, 2.0])
    divisors = torch.tensor([0.0, 0.0, 0.0, -0.0], dtype=torch.float64)

    left = fs.device_put(ones, fs.Layout(mesh, P(None, "model")))
    right = fs.device_put(summands, fs.Layout(mesh, P("model")))
    sums = left @ right
    assert sums.spec.unreduced
    actual = QUOTIENTS[name](sums, fs.device_put(divisors, fs.Layout(mesh, P())))

    expected = QUOTIENTS[name](ones @ summands, divisors)
    torch.testing.assert_close(fs.unshard(actual), expected, equal_nan=True, rtol=0, atol=0)
