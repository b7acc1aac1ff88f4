"""Norms over all elements of a tree, for every layout."""

from fractions import Fraction
from math import hypot, inf, isnan, nan

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fshard as fs
import fshard.testing.strategies
from fshard import P, optim
from fshard.optim.contract import ArrayOptimizer
from fshard.optim.exact_sum import columns_of, number_of
from fshard.optim.norms import norm_later
from tests.optim.optimizers import leaves_of, tensor


@pytest.mark.parametrize("order", [1, 2, 3.0])
@pytest.mark.parametrize("exact", [None, True])
def test_global_norm_counts_leaf_replicated_over_two_of_three_axes_once(order, exact):
    mesh = fs.make_mesh({"a": 2, "b": 2, "c": 2})
    specs = [P("a"), P("b"), P("c"), P(("c", "a"))]
    tree = [
        fs.device_put(torch.arange(4.0) + 10 * i, fs.Layout(mesh, spec))
        for i, spec in enumerate(specs)
    ]
    expected = torch.linalg.vector_norm(
        torch.cat([torch.arange(4.0) + 10 * i for i in range(4)]).double(), order
    )
    torch.testing.assert_close(
        optim.global_norm(tree, order, exact=exact if order == 2 else None), expected
    )


def test_global_norm_equals_torch_and_counts_ties_once():
    xs = [tensor((5, 3), torch.float32, 0), tensor((7,), torch.float32, 1)]
    expected = torch.nn.utils.get_total_norm(xs)
    torch.testing.assert_close(optim.global_norm(xs).float(), expected)
    assert torch.equal(optim.global_norm([*xs, xs[0], None]), optim.global_norm(xs))
    assert optim.global_norm({}) == 0


@pytest.mark.parametrize("order", [0.5, 1, 2, 3.0, inf])
@given(data=st.data())
@settings(max_examples=20)
def test_norm_of_any_order_equals_torch(order, data):
    mesh = data.draw(fs.testing.strategies.meshes())
    whole, tree, cut = [], [], False
    for _ in range(data.draw(st.integers(0, 4))):
        shape = data.draw(fs.testing.strategies.shapes_for(mesh))
        dtype = data.draw(
            st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
        )
        x = data.draw(fs.testing.strategies.dyadic(shape, dtype))
        whole.append(x)
        if data.draw(st.booleans()):
            layout = data.draw(fs.testing.strategies.layouts(mesh, shape, unreduced=False))
            cut |= any(mesh.shape[axis] > 1 for axis in layout.spec.sharded_axes)
            x = fs.device_put(x, layout)
        tree.append(x)
    together = torch.cat(
        [torch.zeros(1, dtype=torch.float64), *(x.abs().flatten().double() for x in whole)]
    )
    expected = torch.linalg.vector_norm(together, order)
    with fs.ledger() as comm:
        found = optim.global_norm(tree, order)
    torch.testing.assert_close(found, expected)
    assert comm.calls() == cut
    torch.testing.assert_close(
        [fs.unshard(x) for x in optim.clip_by_global_norm(0.5, order).update(tree, (), None)[0]],
        [(x * min(0.5 / (expected.item() + 1e-6), 1.0)) for x in whole],
    )
    inside = fs.run(
        lambda: optim.global_norm([fs.device_put(x, fs.Layout(mesh, P())) for x in whole], order),
        mesh=mesh,
    )
    torch.testing.assert_close(inside[0], expected)


NUMBERS = st.floats(0, allow_infinity=False, max_value=2.0**1000)


@given(st.lists(NUMBERS, max_size=40), st.data())
@settings(max_examples=200)
def test_exact_sum_is_independent_of_order(numbers, data):
    mixed = torch.tensor(data.draw(st.permutations(numbers)), dtype=torch.float64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), max_size=4)))
    pieces = [columns_of(piece) for piece in mixed.tensor_split(cuts)]
    found = number_of(torch.stack(pieces).sum(0))
    assert torch.equal(found, number_of(columns_of(torch.tensor(numbers, dtype=torch.float64))))
    exact = sum(map(Fraction, numbers))
    assert abs(Fraction(found.item()) - exact) <= exact * Fraction(2) ** -50


@given(
    st.lists(st.floats(-1e150, 1e150) | st.floats(-1, 1), max_size=20),
    st.integers(0, 20),
    st.booleans(),
)
def test_float64_norm_equals_hypot(numbers, cut, exact):
    assume(not any(0 < abs(x) < 1e-140 for x in numbers))  # whose squares are no normal numbers
    x = torch.tensor(numbers, dtype=torch.float64)
    found = optim.global_norm([x[:cut], x[cut:].clone()], exact=exact).item()
    assert found == pytest.approx(hypot(*numbers), rel=1e-14)


@pytest.mark.parametrize("strange", [inf, 1e200, nan])
def test_nonfinite_float64_norm_is_nonfinite(strange):
    x = tensor((100_000,), torch.float64, 0)
    x[70_000] = strange
    found = optim.global_norm([x, tensor((3,), torch.float64, 1)]).item()
    assert isnan(found) if isnan(strange) else found == inf


@given(st.data())
@settings(max_examples=60)
def test_norm_error_is_bounded_and_exact_is_zero(data):
    mesh, draw = (
        fs.make_mesh(data.draw(st.sampled_from([{"a": 3}, {"a": 8}, {"a": 2, "b": 2}]))),
        data.draw,
    )
    shapes, dtype = (
        [(5,), (33, 17), (), (1000,)],
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])),
    )
    scale = 10.0 ** draw(st.integers(-15, 15))
    tree = [
        (tensor(shape, torch.float64, seed) * scale).to(dtype)
        for seed, shape in enumerate(shapes, draw(st.integers(0, 99)))
    ]
    cut = fs.device_put(tree, fs.Layout(mesh, P.flat(*draw(st.permutations(mesh.axis_names)))))
    count = sum(x.numel() for x in tree)
    exact = sum(Fraction(x) ** 2 for leaf in tree for x in leaf.reshape(-1).tolist())
    for laid_out in (tree, cut):
        found = Fraction(optim.global_norm(laid_out).item()) ** 2
        assert abs(found - exact) <= 2 * count * exact * Fraction(2) ** -53
    alone, ours = (optim.global_norm(laid_out, exact=True) for laid_out in (tree, cut))
    assert (
        torch.equal(alone, ours)
        and abs(Fraction(ours.item()) ** 2 - exact) <= 4 * exact * Fraction(2) ** -53
    )
    if dtype is torch.float64:  # which shows all bits
        assert torch.equal(optim.global_norm(tree), optim.global_norm(cut))
    rounded = [optim.global_norm(laid_out).float() for laid_out in (tree, cut)]
    assert abs(rounded[0] - rounded[1]) <= rounded[0] * 2.0**-23


# -- in a step ---------------------------------------------------------------------------------------------------------


def one_step(opt, stage, *, by_hand=False, **options):
    """Take one step; return the parameters and the norm in the metrics."""
    mesh = fs.make_mesh({"data": 2})
    tree = {"u": tensor((5, 3), torch.float32, 0), "v": tensor((3, 2), torch.float32, 1)}
    params = fs.shard_params(tree, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    batch, spec = tensor((8, 5), torch.float32, 7), {"mesh": mesh, "batch": P("data")}

    def loss_fn(p, x):
        return (x @ p["u"] @ p["v"]).square().mean()

    if by_hand:
        _, grads = fs.value_and_grad(loss_fn, **spec, gradients=opt.gradients)(params, batch)
        params, metrics = opt.step(grads, opt.init(params), params)[0], {}
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
    found = list[bool]()

    def noting(grads, state, params):
        found.append(torch.equal(optim.global_norm(grads), optim.global_norm(grads, exact=True)))
        return optim.sgd(0.1).update(grads, optim.sgd(0.1).init(params), params)[0], state

    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"w": tensor((37, 41), torch.float32, 3)}, fs.fsdp("data"), mesh=mesh)
    opt = ArrayOptimizer(lambda params: (), noting, elementwise=True)
    step = fs.train_step(
        lambda p, x: (x @ p["w"]).square().mean(),
        opt,
        mesh=mesh,
        batch=P("data"),
        reproducible=True,
    )
    step(params, (), tensor((8, 37), torch.float32, 7))
    assert found == [True]


def test_norm_later_uses_gradients_before_donation():
    grads = [torch.tensor([3.0, 4.0])]
    norm = norm_later(grads, exact=True)
    grads[0].mul_(2)
    assert optim.global_norm(grads) == 10 and norm() == 5
