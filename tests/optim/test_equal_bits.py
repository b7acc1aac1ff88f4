"""Decision 012, for the optimizer: its bits do not depend on the sharding of the parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from tests.optim.helpers.optimizers import FOREIGN, by_step, by_torch, leaves_of, same, tensor

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("cls", FOREIGN, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_from_torch_computes_16_bits_in_float32(cls, dtype):
    params, grads = ([tensor((n,), dtype, seed + n) for n in (5, 64, 77)] for seed in (0, 100))
    actual, _ = by_step(optim.from_torch(cls, **FOREIGN[cls]), params, [grads])
    wide = by_torch(cls, [x.float() for x in params], [[g.float() for g in grads]], **FOREIGN[cls])
    assert same(leaves_of(actual), [x.to(dtype) for x in wide])


@given(slices=st.integers(1, 24), n=st.integers(2, 8), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_any_slices_equal_one_device_or_raise(slices, n, seed):
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(7, 7, generator=draw)
    x = torch.randn(30, 7, generator=draw)

    def grad(n):
        mesh = fs.make_mesh({"data": n})
        options = {"reproducible": True, "slices": slices}
        loss = fs.grad(
            lambda w, x: (x @ w).tanh().square().mean(), mesh=mesh, batch=P("data"), **options
        )
        return fs.unshard(loss(fs.shard_params(w, P(), mesh=mesh), x))

    if slices % n or (slices // n).bit_count() > 1:
        with pytest.raises(ValueError, match=f"{slices} slices"):
            grad(n)
    else:
        assert torch.equal(grad(n), grad(1))
