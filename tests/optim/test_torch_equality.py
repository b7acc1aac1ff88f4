"""Optimizers equal torch.optim bit by bit: its fused kernels by default, its foreach kernels
without.
"""

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard import optim
from tests.optim.helpers.optimizers import (
    FUSED,
    TWINS,
    WHEN,
    by_step,
    by_torch,
    example,
    leaves_of,
    same,
    suited,
    tensor,
    trees,
)

NAMES_OF_FUSED = [name for name, (make, *_) in TWINS.items() if make in FUSED]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TWINS)
def test_step_equals_torch_optim(name, dtype, foreach):
    """With foreach also a schedule, which is read before each step."""
    make, cls, options = TWINS[name]
    params, steps = suited(make, *example(dtype))
    kernel = {} if make is optim.muon else {"foreach": foreach and make is not optim.adafactor}
    ours = {
        **options,
        **({"lr": WHEN} if foreach else {}),
        **({"fused": False} if make in FUSED else {}),
    }
    expected = by_torch(cls, params, steps, WHEN if foreach else None, **options, **kernel)
    assert same(leaves_of(by_step(make(**ours), params, steps)[0]), expected)


@pytest.mark.parametrize("name", NAMES_OF_FUSED)
@given(st.data())
@settings(max_examples=30)
def test_step_on_any_tree_equals_torch(name, data):
    make, cls, options = TWINS[name]
    params, steps = data.draw(trees((torch.float32, torch.float64)))
    expected = by_torch(cls, params, steps, foreach=False, **options)
    assert same(leaves_of(by_step(make(**options, fused=False), params, steps)[0]), expected)


@pytest.mark.parametrize("name", NAMES_OF_FUSED)
@given(st.data())
@settings(max_examples=30)
def test_default_step_equals_torch_fused_kernels(name, data):
    make, cls, options = TWINS[name]
    params, steps = data.draw(trees((torch.float32, torch.float64)))
    columns = zip(*(optim.leaves.Leaves.of(tree).leaves for tree in (params, *steps)), strict=True)
    alone = [
        by_torch(cls, [p], [[g] for g in grads], fused=True, **options) for p, *grads in columns
    ]
    expected = [
        p for (p,) in alone
    ]  # torch's fused SGD takes no leaves together that have made different numbers of steps
    for fused in (None, True):
        assert same(leaves_of(by_step(make(**options, fused=fused), params, steps)[0]), expected)


@pytest.mark.parametrize("name", NAMES_OF_FUSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_step_of_other_dtypes_equals_torch_foreach(name, dtype):
    """Where multiples are added in 16 bits, that is in the middle of a tensor, and of factors that
    16 bits hold.
    """
    make, cls, options = TWINS[name]
    options = options if make is optim.sgd else {"eps": 1e-3, **options}
    if (
        dtype.itemsize == 2 and make is not optim.adamw and ("decay" in name or make is optim.sgd)
    ):  # it adds multiples
        held = {"lr", "weight_decay", "momentum", "dampening"}
        options = {
            key: ceil(value * 128) / 128 if key in held else value for key, value in options.items()
        }
        params, *steps = ([tensor((n,), dtype, 10 * t + n) for n in (64, 192)] for t in range(6))
    else:
        params, steps = example(dtype)
    expected = by_torch(cls, params, steps, foreach=True, **options)
    assert same(leaves_of(by_step(make(**options, fused=False), params, steps)[0]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_add_multiple_rounds_16_bits_once(dtype):
    p = tensor((77,), dtype, 0)
    g = tensor((77,), dtype, 1)
    (actual,), _ = by_step(optim.sgd(0.0123), [p], [[g]])
    assert torch.equal(actual, (p.double() - 0.0123 * g.double()).to(dtype))
    (added,), _ = optim.add_decayed_weights(0.0123).update([g], (), [p])
    assert torch.equal(added, (g.double() + 0.0123 * p.double()).to(dtype))


def test_fused_step_accepts_any_gradient_strides():
    p = tensor((4, 6), torch.float32, 0)
    g = tensor((6, 4), torch.float32, 1).T
    for make in FUSED:
        fused, plain = (
            by_step(make(0.1, fused=fused), [p], [[g]])[0][0] for fused in (True, False)
        )
        torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize(
    "make", [optim.adafactor, lambda lr: optim.from_torch(torch.optim.Adafactor, lr=lr)]
)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_adafactor_uses_eps_of_each_dtype(make, dtypes):
    """Gradients are between the eps of both, so the first parameter's, which torch takes for all,
    would be seen.
    """
    params = [tensor((4, 3), dtype, 0) for dtype in dtypes]
    grads = [tensor((4, 3), dtype, 1) * 1e-4 for dtype in dtypes]
    together, _ = by_step(make(0.1), params, [grads])
    for p, g, actual in zip(params, grads, leaves_of(together), strict=True):
        (alone,), _ = by_step(make(0.1), [p], [[g]])
        assert torch.equal(actual, alone)
