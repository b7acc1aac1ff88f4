"""Every optimizer is pure, keeps its state's types and its ties, and equals the formula of its
paper.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard import optim
from fshard.optim.contract import copied
from tests.helpers.sampled import examples
from tests.optim.helpers.optimizers import (
    ALL,
    by_step,
    by_update,
    example,
    leaves_of,
    same,
    skeleton,
    tensor,
    trees,
)


@pytest.mark.parametrize("name", ALL)
@given(st.data())
@settings(max_examples=examples(8))
def test_update_keeps_state_types_and_arguments(name, data):
    opt = ALL[name]
    params, steps = data.draw(trees())
    state = opt.init(params)
    for grads in steps:
        before = copied((params, state, grads))
        updates, after = opt.update(grads, state, params)
        assert skeleton(after) == skeleton(state)
        assert same(before, (params, state, grads))
        params = optim.apply_updates(params, updates)
        state = after


@pytest.mark.parametrize("name", ALL)
def test_step_state_equals_update_state(name):
    opt = ALL[name]
    params, steps = example()
    first = steps[:1]
    assert same(by_step(opt, params, first)[1], by_update(opt, params, first)[1])
    for a, b in zip(
        *(leaves_of(run(opt, params, steps)) for run in (by_step, by_update)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "from_torch"])
@given(st.data())
@settings(max_examples=examples(10))
def test_update_equals_step_bits_within_factor_two(name, data):
    params, steps = data.draw(trees())
    stepped, updated = (run(ALL[name], params, steps[:1])[0] for run in (by_step, by_update))
    for p, a, b in zip(*map(leaves_of, (params, stepped, updated)), strict=True):
        near = (a.double() >= p.double() / 2) & (a.double() <= p.double() * 2)
        near |= (a.double() <= p.double() / 2) & (a.double() >= p.double() * 2)
        assert torch.equal(a[near], b[near])


@pytest.mark.parametrize("name", ALL)
def test_frozen_leaves_stay_and_ties_step_once(name):
    """A leaf without a gradient, integers, None; a tied leaf is one."""
    opt = ALL[name]
    w = tensor((2, 3), torch.float32, 0)
    g = tensor((2, 3), torch.float32, 1)
    idle = {"a": tensor((2, 3), torch.float32, 2), "n": torch.arange(3), "none": None}
    grads = dict.fromkeys(idle)
    for run in (by_step, by_update):
        after, state = run(opt, {**idle, "w": w, "tie": w}, [{**grads, "w": g, "tie": g}] * 3)
        (alone,), _ = run(opt, [w], [[g]] * 3)
        assert torch.equal(after["w"], alone) and torch.equal(after["tie"], alone)
        assert same({key: after[key] for key in idle}, idle)
    if isinstance(state, dict) and "step" in state:
        assert [int(state["step"][key]) for key in ("a", "w")] == [0, 3]


def test_step_keeps_requires_grad():
    opt = optim.adamw(0.1)
    params = [torch.ones(2, requires_grad=True)]
    grads = [torch.ones(2)]
    for (after,), _ in (by_update(opt, params, [grads]), opt.step(grads, opt.init(params), params)):
        assert after.requires_grad and after.is_leaf


# -- formulas --------------------------------------------------------------------------------------


def test_lamb_equals_its_formula():
    p = tensor((3, 4), torch.float64, 0)
    g = tensor((3, 4), torch.float64, 1)
    opt = optim.lamb(0.1, (0.9, 0.99), 1e-6, 0.01)
    after, _ = by_step(opt, [p], [[g]])
    u = g / (g.square().sqrt() + 1e-6) + 0.01 * p
    torch.testing.assert_close(after[0], p - 0.1 * p.norm() / u.norm() * u)


def test_lion_equals_its_formula():
    params, steps = example(torch.float64)
    p = params["c"]["d"]
    m = torch.zeros(5, dtype=torch.float64)
    for grads in steps:
        g = grads["c"]["d"]
        p = p - 0.1 * 0.2 * p - 0.1 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    after, state = by_step(optim.lion(0.1, (0.9, 0.99), weight_decay=0.2), params, steps)
    torch.testing.assert_close((after["c"]["d"], state["exp_avg"]["c"]["d"]), (p, m))


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (3, 2, 2), (9, 3)])
def test_shampoo_equals_its_formula(shape):
    p, *grads = (tensor(shape, torch.float64, seed) for seed in range(4))
    after, _ = by_step(
        optim.shampoo(0.1, momentum=0.5, weight_decay=0.1, eps=0.01, longest=8),
        [p],
        [[g] for g in grads],
    )
    rows = shape[0] if shape else 1
    columns = p.numel() // (shape[0] if shape else 1)
    left, right = (0.01 * torch.eye(n, dtype=p.dtype) for n in (rows, columns))
    used = [1 < n <= 8 for n in (rows, columns)]
    b = torch.zeros_like(p)
    for g in grads:
        u = g.reshape(rows, columns)
        left = left + u @ u.T
        right = right + u.T @ u
        for on, at in zip(used, (0, 1), strict=True):
            if on:
                u_, s, v = torch.linalg.svd((left, right)[at])
                root = u_ @ torch.diag(s ** (-1 / (2 * sum(used)))) @ v
                u = root @ u if at == 0 else u @ root
        b = 0.5 * b + u.reshape(shape)
        p = p - 0.1 * 0.1 * p - 0.1 * b
    torch.testing.assert_close(after[0], p)
