"""Norms and dots over all elements of a tree, for every layout.

The oracles are torch's norm of all elements in one row, in float64, and sums of fractions.
"""

from fractions import Fraction
from math import hypot, inf, isnan, nan

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fshard as fs
import fshard.testing.strategies
from fshard import P, optim
from fshard.errors import LayoutError, OptimizerError
from fshard.optim.exact_sum import columns_of, number_of
from fshard.optim.norms import norm_later
from tests.optim.helpers.optimizers import leaves_of, tensor


@pytest.mark.parametrize("order", [1, 2, 3.0])
@pytest.mark.parametrize("exact", [None, True])
def test_global_norm_counts_leaf_replicated_over_two_of_three_axes_once(order, exact):
    mesh = fs.make_mesh({"a": 2, "b": 2, "c": 2})
    specs = [P("a"), P("b"), P("c"), P(("c", "a"))]
    leaves = [torch.arange(4.0) + 10 * i for i in range(4)]
    tree = [fs.device_put(x, fs.Layout(mesh, s)) for x, s in zip(leaves, specs, strict=True)]

    actual = optim.global_norm(tree, order, exact=exact if order == 2 else None)

    expected = torch.linalg.vector_norm(torch.cat(leaves).double(), order)
    torch.testing.assert_close(actual, expected)


def test_global_norm_equals_torch_and_counts_ties_once():
    xs = [tensor((5, 3), torch.float32, 0), tensor((7,), torch.float32, 1)]
    expected = torch.nn.utils.get_total_norm(xs)
    torch.testing.assert_close(optim.global_norm(xs).float(), expected)
    assert torch.equal(optim.global_norm([*xs, xs[0], None]), optim.global_norm(xs))
    assert optim.global_norm({}) == 0


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("order", [0.5, 1, 2, 3.0, inf])
@given(data=st.data())
@settings(max_examples=20)
def test_norm_of_any_order_equals_torch(order, data):
    strategies = fs.testing.strategies
    mesh = data.draw(strategies.meshes())
    full = []
    tree = []
    is_sharded = False
    for _ in range(data.draw(st.integers(0, 4))):
        shape = data.draw(strategies.shapes_for(mesh))
        x = data.draw(strategies.dyadic(shape, data.draw(st.sampled_from(DTYPES))))
        full.append(x)
        if data.draw(st.booleans()):
            layout = data.draw(strategies.layouts(mesh, shape, unreduced=False))
            is_sharded |= any(mesh.shape[axis] > 1 for axis in layout.spec.sharded_axes)
            x = fs.device_put(x, layout)
        tree.append(x)

    with fs.ledger() as comm:
        actual = optim.global_norm(tree, order)

    zero = torch.zeros(1, dtype=torch.float64)
    row = torch.cat([zero, *(x.abs().flatten().double() for x in full)])
    expected = torch.linalg.vector_norm(row, order)
    torch.testing.assert_close(actual, expected)
    assert comm.calls() == is_sharded

    # Clipping multiplies by limit / norm.
    clipped, _ = optim.clip_by_global_norm(0.5, order).update(tree, (), None)
    factor = min(0.5 / (expected.item() + 1e-6), 1.0)
    torch.testing.assert_close([fs.unshard(x) for x in clipped], [x * factor for x in full])

    def inside():
        arrays = [fs.device_put(x, fs.Layout(mesh, P())) for x in full]
        return optim.global_norm(arrays, order)

    torch.testing.assert_close(fs.run(inside, mesh=mesh)[0], expected)


NUMBERS = st.floats(0, allow_infinity=False, max_value=2.0**1000)


@given(st.lists(NUMBERS, max_size=40), st.data())
@settings(max_examples=200)
def test_exact_sum_is_independent_of_order(numbers, data):
    mixed = torch.tensor(data.draw(st.permutations(numbers)), dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), max_size=4)))
    pieces = [columns_of(piece) for piece in mixed.tensor_split(cuts)]
    actual = number_of(torch.stack(pieces).sum(0))
    assert torch.equal(actual, number_of(columns_of(torch.tensor(numbers, dtype=torch.float64))))
    exact = sum(map(Fraction, numbers))
    assert abs(Fraction(actual.item()) - exact) <= exact * Fraction(2) ** -50


@given(
    st.lists(st.floats(-1e150, 1e150) | st.floats(-1, 1), max_size=20),
    st.integers(0, 20),
    st.booleans(),
)
def test_float64_norm_equals_hypot(numbers, cut, exact):
    assume(not any(0 < abs(x) < 1e-140 for x in numbers))  # whose squares are no normal numbers
    x = torch.tensor(numbers, dtype=torch.float64)
    actual = optim.global_norm([x[:cut], x[cut:].clone()], exact=exact).item()
    assert actual == pytest.approx(hypot(*numbers), rel=1e-14)


@pytest.mark.parametrize("strange", [inf, 1e200, nan])
def test_nonfinite_float64_norm_is_nonfinite(strange):
    x = tensor((100_000,), torch.float64, 0)
    x[70_000] = strange
    actual = optim.global_norm([x, tensor((3,), torch.float64, 1)]).item()
    assert isnan(actual) if isnan(strange) else actual == inf


@given(st.data())
@settings(max_examples=60)
def test_norm_error_is_bounded_and_exact_is_zero(data):
    draw = data.draw
    mesh = fs.make_mesh(draw(st.sampled_from([{"a": 3}, {"a": 8}, {"a": 2, "b": 2}])))
    shapes = [(5,), (33, 17), (), (1000,)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    scale = 10.0 ** draw(st.integers(-15, 15))
    first_seed = draw(st.integers(0, 99))
    tree = []
    for seed, shape in enumerate(shapes, first_seed):
        tree.append((tensor(shape, torch.float64, seed) * scale).to(dtype))
    axes = draw(st.permutations(mesh.axis_names))
    sharded = fs.device_put(tree, fs.Layout(mesh, P.flat(*axes)))

    numbers = torch.cat([leaf.reshape(-1) for leaf in tree]).tolist()
    exact = sum(Fraction(x) ** 2 for x in numbers)
    epsilon = Fraction(2) ** -53

    # A norm has an error of a rounding a number.
    for leaves in (tree, sharded):
        square = Fraction(optim.global_norm(leaves).item()) ** 2
        assert abs(square - exact) <= 2 * len(numbers) * exact * epsilon

    # The exact one has that of the result alone, on any layout.
    of_tree = optim.global_norm(tree, exact=True)
    of_shards = optim.global_norm(sharded, exact=True)
    assert torch.equal(of_tree, of_shards)
    assert abs(Fraction(of_shards.item()) ** 2 - exact) <= 4 * exact * epsilon

    if dtype is torch.float64:  # which shows all bits
        assert torch.equal(optim.global_norm(tree), optim.global_norm(sharded))
    rounded = optim.global_norm(tree).float()
    assert abs(rounded - optim.global_norm(sharded).float()) <= rounded * 2.0**-23


# -- in a step -------------------------------------------------------------------------------------


def one_step(opt, stage, *, by_hand=False, **options):
    """Take one step; return the parameters and the norm in the metrics."""
    mesh = fs.make_mesh({"data": 2})
    tree = {"u": tensor((5, 3), torch.float32, 0), "v": tensor((3, 2), torch.float32, 1)}
    params = fs.shard_params(tree, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    batch = tensor((8, 5), torch.float32, 7)
    spec = {"mesh": mesh, "batch": P("data")}

    def loss_fn(p, x):
        return (x @ p["u"] @ p["v"]).square().mean()

    if by_hand:
        _, grads = fs.value_and_grad(loss_fn, **spec, gradients=opt.gradients)(params, batch)
        params = opt.step(grads, opt.init(params), params)[0]
        metrics = {}
    else:
        params, _, metrics = fs.train_step(loss_fn, opt, **spec, **options)(
            params, opt.init(params), batch
        )
    return leaves_of(fs.unshard(params)), metrics.get("grad_norm")


CLIP = optim.clip_by_global_norm(0.1)


@pytest.mark.parametrize("options", [{}, {"reproducible": True}, {"donate": True}], ids=str)
@pytest.mark.parametrize("rule", [optim.adamw, optim.muon])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_step_returns_norm_before_clipping(rule, stage, options):
    params, norm = one_step(optim.chain(CLIP, rule(0.1)), stage, **options)
    _, unclipped = one_step(rule(0.1), stage, **options)
    torch.testing.assert_close(norm, unclipped)
    if "reproducible" not in options:
        by_hand, _ = one_step(optim.chain(CLIP, rule(0.1)), stage, by_hand=True)
        assert all(map(torch.equal, params, by_hand))


def test_norms_in_reproducible_step_are_exact():
    is_exact = []
    sgd = optim.sgd(0.1)

    def comparing(grads, state, params):
        exact = optim.global_norm(grads, exact=True)
        is_exact.append(torch.equal(optim.global_norm(grads), exact))
        updates, _ = sgd.update(grads, sgd.init(params), params)
        return updates, state

    def loss_fn(p, x):
        return (x @ p["w"]).square().mean()

    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"w": tensor((37, 41), torch.float32, 3)}, fs.fsdp("data"), mesh=mesh)
    opt = optim.Optimizer(lambda params: (), comparing, sharding="flat", takes="arrays")
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True)
    step(params, (), tensor((8, 37), torch.float32, 7))

    assert is_exact == [True]


def test_norm_later_uses_gradients_before_donation():
    grads = [torch.tensor([3.0, 4.0])]
    norm = norm_later(grads, exact=True)
    grads[0].mul_(2)
    assert optim.global_norm(grads) == 10 and norm() == 5


# -- inner products --------------------------------------------------------------------------------


DOT_MESH = fs.make_mesh({"data": 2, "model": 2})
DOT_LAYOUTS = {
    "replicated": P(),
    "dims": P("model", "data"),
    "flat": P.flat("data"),
    "flat over all": P.flat("data", "model"),
    "at an owner": P(at={"data": 1}),
    "unreduced": P(None, "model", unreduced="data"),
}


def dot_operands(dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 6, 4, generator=generator, dtype=torch.float64).to(dtype)


def laid_out(x, spec):
    """Return an array of a layout; an unreduced one is a sum of two different summands."""
    if not spec.unreduced:
        return fs.device_put(x, fs.Layout(DOT_MESH, spec))
    padded = torch.nn.functional.pad(x, (0, 2))
    left = fs.device_put(padded, fs.Layout(DOT_MESH, P(None, "data")))
    right = fs.device_put(torch.eye(6, 4, dtype=x.dtype), fs.Layout(DOT_MESH, P("data", "model")))
    return left @ right


@pytest.mark.parametrize("first", DOT_LAYOUTS)
@pytest.mark.parametrize("second", ["replicated", "flat", "at an owner", "unreduced"])
def test_global_dot_of_any_layouts_is_the_serial_dot(first, second):
    x, y = dot_operands(torch.float64)
    pair = laid_out(x, DOT_LAYOUTS[first]), laid_out(y, DOT_LAYOUTS[second])
    assert [bool(array.spec.unreduced) for array in pair] == [
        name == "unreduced" for name in (first, second)
    ]
    torch.testing.assert_close(optim.global_dot({"w": pair[0]}, {"w": pair[1]}), (x * y).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128])
def test_global_dot_with_itself_is_the_squared_norm(dtype):
    x, y = dot_operands(dtype)
    tree = {"x": laid_out(x, P.flat("data")), "y": [laid_out(y, P()), None], "z": x}
    dot = optim.global_dot(tree, tree)
    assert dot.dtype == torch.float64
    torch.testing.assert_close(dot, optim.global_norm(tree) ** 2)


def test_global_dot_counts_tied_pairs_once_and_sends_one_psum():
    x, y = dot_operands(torch.float64)
    a = laid_out(x, P.flat("data"))
    b = laid_out(y, P.flat("data"))
    with fs.ledger() as comm:
        actual = optim.global_dot([a, a, b], [b, b, a])
    assert comm.calls() == 1
    torch.testing.assert_close(actual, 2 * (x * y).sum())


def test_global_dot_of_other_shapes_raises():
    with pytest.raises(LayoutError, match="must have the shape of"):
        optim.global_dot([torch.ones(2)], [torch.ones(3)])
    with pytest.raises(OptimizerError, match="structure"):
        optim.global_dot([torch.ones(2)], torch.ones(2))


def test_global_dot_in_an_update_is_over_all_shards():
    x, y = dot_operands(torch.float64)
    params = {"x": laid_out(x, P.flat("data"))}
    dots = []

    def update(grads, state, params):
        dots.append(optim.global_dot(grads, params))
        return grads, state

    own = optim.Optimizer(lambda p: (), update, sharding="flat")
    opt = fs.partition_optimizer(own, mesh=DOT_MESH, axis="data", stage=3)
    opt.update({"x": laid_out(y, P.flat("data"))}, (), params)
    for dot in dots:
        torch.testing.assert_close(dot, (x * y).sum())


@pytest.mark.parametrize("spec", [P(), P("model", "data"), P.flat("data"), P(at={"data": 1})])
def test_norms_and_dots_have_derivatives(spec):
    x, y = dot_operands(torch.float64)
    a = laid_out(x, spec)
    b = laid_out(y, spec)

    def serial(x):
        return (x * y).sum() * x.norm() + x.abs().pow(3).sum() ** (1 / 3)

    def sharded(a):
        norms = optim.global_norm({"a": a}) * optim.global_dot({"a": a}, {"a": b})
        return norms + optim.global_norm([a], 3)

    expected = torch.func.grad(serial)(x)
    by_func = fs.array.lift(torch.func.grad)(sharded)(a)
    torch.testing.assert_close(fs.unshard(by_func), expected)
    leaf = a.detach().clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(sharded(leaf), [leaf])
    torch.testing.assert_close(fs.unshard(by_autograd), expected)


def test_norm_of_zero_has_derivative_zero():
    a = laid_out(torch.zeros(6, 4, dtype=torch.float64), P.flat("data"))
    actual = fs.array.lift(torch.func.grad)(lambda a: optim.global_norm([a]))(a)
    assert not fs.unshard(actual).any()
