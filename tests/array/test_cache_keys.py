"""Operations called twice with arguments that compare equal: a cached call must not be another
one's.

The oracle is torch, on the same tensors in the same order.
"""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.array import dispatch
from fshard.mesh.spmd.deterministic import deterministic
from tests.array.oracle import put, tensors

F64 = torch.float64
MESH = fs.make_mesh({"data": 2, "model": 2})
LAYOUTS = [P(), P("data"), P("model", "data"), P.flat("data")]
X = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
EQUAL_NUMBERS = [(1, 1.0, True), (0, 0.0, False, -0.0)]
OPERATIONS = {
    "var": lambda x, v: x.var(v),
    "var_keepdim": lambda x, v: x.var(0, v, True),
    "std": lambda x, v: x.std(v),
    "sum": lambda x, v: x.sum(v),
    "sum_keepdim": lambda x, v: x.sum(0, v),
    "add_to_integers": lambda x, v: x.long() + v,
    "multiply_integers": lambda x, v: x.long() * v,
    "multiply_bools": lambda x, v: (x > 0) * v,
    "power": lambda x, v: x.long() ** v,
    "divide_by_array": lambda x, v: v / x,
    "where": lambda x, v: torch.where(x > 0, x.long(), v),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "full_like": lambda x, v: torch.full_like(x.long(), v),
    "new_full": lambda x, v: x.new_full((2, 2), v),
    "copysign": lambda x, v: x.copysign(v),
    "clamp": lambda x, v: x.long().clamp(v),
    "fill": lambda x, v: x.clone().fill_(v),
    "norm": lambda x, v: x.norm(v),
    "allclose": lambda x, v: torch.isclose(x, x, v),
}


def outcome(f, *args):
    """Return the unsharded results of a call, or the type of its error."""
    try:
        return [fs.unshard(y) if isinstance(y, fs.Sharded) else y for y in tensors(f(*args))]
    except (TypeError, RuntimeError, IndexError) as error:
        return type(error)


def assert_same(actual, expected):
    if isinstance(expected, type) or isinstance(actual, type):
        assert actual == expected
        return
    for y, z in zip(actual, expected, strict=True):
        torch.testing.assert_close(y, z, equal_nan=True)
        if z.is_floating_point():
            assert torch.equal(y.signbit() & (y == 0), z.signbit() & (z == 0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", LAYOUTS[2:], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_that_compare_equal_have_own_results(name, spec):
    f = OPERATIONS[name]
    for numbers in EQUAL_NUMBERS:
        for first in numbers:
            x = put(X, MESH, spec)
            dispatch._calls.clear()
            for number in (first, *numbers):
                assert_same(outcome(f, x, number), outcome(f, X, number))


CASTS = ["float", "double", "half", "bfloat16", "int", "long", "bool"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("spec", [P("data"), P.flat("data"), P(unreduced="data")], ids=str)
def test_casts_of_arrays_of_one_layout_and_several_dtypes_have_own_dtypes(spec):
    layout = fs.Layout(MESH, spec)
    for first, second in pairwise([*DTYPES, *reversed(DTYPES)]):
        for dtype in (first, second):
            x = X.to(dtype)
            array = fs.Sharded((4, 4), layout, put(x, MESH, spec).shards)
            for cast in CASTS:
                actual = getattr(array, cast)()
                expected = getattr(x, cast)()
                assert actual.dtype == expected.dtype
                if not spec.unreduced:
                    assert torch.equal(fs.unshard(actual), expected)
            for other in DTYPES:
                assert array.to(other).dtype == other


def test_functions_of_one_name_have_own_results():
    a, b, c = X > 0.5, X.T > 0, X.abs() > 0.3
    for spec in LAYOUTS:
        x, y, z = (put(mask, MESH, spec) for mask in (a, b, c))
        for _ in range(2):
            assert torch.equal(fs.unshard(torch.where(x, y, z)), torch.where(a, b, c))
            assert torch.equal(fs.unshard(x.where(y, z)), a.where(b, c))


@pytest.mark.parametrize("spec", LAYOUTS[:3], ids=str)
def test_unfold_of_functional_and_of_tensors_have_own_results(spec):
    x = torch.arange(144.0).reshape(4, 4, 3, 3)
    array = put(x, MESH, spec)
    for _ in range(2):
        torch.testing.assert_close(fs.unshard(F.unfold(array, 2)), F.unfold(x, 2))
        torch.testing.assert_close(fs.unshard(array.unfold(2, 2, 1)), x.unfold(2, 2, 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.kl_div(x, x, 2),
        lambda x: torch.binary_cross_entropy_with_logits(x, x, None, None, 2),
        lambda x: torch.embedding(x, put(torch.tensor([1, 0]), MESH, P())),
        lambda x: torch.batch_norm(x, x[0], x[0], x[0], x[0], False, 0.1, 1e-5, False),
    ],
)
def test_functions_of_torch_with_other_arguments_than_functional_raise(call):
    with pytest.raises(fs.errors.LayoutError, match=r"torch\.nn\.functional"):
        call(put(X, MESH, P("data")))


def test_default_dtype_counts_in_each_call():
    before = torch.get_default_dtype()
    i = put(X.long(), MESH, P("data"))
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for f in (
                lambda x: x / 2,
                lambda x: x * 1.5,
                lambda x: x.sqrt(),
                lambda x: x.sigmoid(),
                lambda x: x.logsumexp(0),
                lambda x: x.float().mean(0, dtype=None),
                lambda x: torch.where(x > 0, 1.0, 2.0),
            ):
                assert f(i).dtype == f(X.long()).dtype
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("spec", LAYOUTS[:3], ids=str)
def test_autocast_counts_in_each_call(spec):
    x = X.float()
    array = put(x, MESH, spec)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for f in (
                lambda x: x @ x,
                lambda x: F.linear(x, x),
                lambda x: (x @ x).relu(),
                lambda x: (x @ x).sum(),
                lambda x: (x @ x).softmax(0),
            ):
                assert f(array).dtype == f(x).dtype


def test_devices_by_name_and_by_object_are_the_same():
    x = put(X, MESH, P("data"))
    for device in ("cpu", torch.device("cpu"), "cpu"):
        assert x.to(device) is x
        assert x.to(device, torch.float32).dtype is torch.float32
        assert torch.zeros_like(x, device=device).dtype is F64


# Sums of unreduced arrays, which several operations share.


def grad_modes():
    return {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }


@pytest.mark.parametrize("second", grad_modes())
@pytest.mark.parametrize("first", grad_modes())
def test_sums_of_one_grad_mode_are_not_used_in_another(first, second):
    w = put(X, MESH, P("data")).requires_grad_()
    y = put(X, MESH, P(None, "data")) @ w
    assert y.spec.unreduced
    with grad_modes()[first]():
        torch.relu(y)
    with grad_modes()[second]():
        z = torch.relu(y)

    assert z.requires_grad == (second == "grad")
    assert z.shards[0].is_inference() == (second == "inference_mode")
    if second == "grad":
        z.sum().backward()
        expected = X.T @ ((X @ X) > 0).to(F64)
        torch.testing.assert_close(fs.unshard(w.grad), expected)


def test_sums_made_before_an_array_requires_grad_are_made_again():
    y = (put(X, MESH, P(None, "data")) @ put(X, MESH, P("data"))).detach()
    scale = torch.ones((), dtype=F64, requires_grad=True)
    torch.relu(y)
    y.requires_grad_()
    (torch.relu(y) * scale).sum().backward()
    torch.testing.assert_close(fs.unshard(y.grad), ((X @ X) > 0).to(F64))


def test_sums_made_without_a_fixed_order_are_made_again_within():
    y = put(X, MESH, P(None, "data")) @ put(X, MESH, P("data"))
    with fs.ledger() as comm:
        torch.relu(y)
        with deterministic(True, "cpu"):
            torch.relu(y)
            torch.relu(y)
    assert comm.calls() == 2
