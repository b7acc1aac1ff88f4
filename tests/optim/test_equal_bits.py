"""Decision 012, for the optimizer: its bits do not depend on the sharding of the parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from tests.optim.optimizers import FOREIGN, by_step, by_torch, leaves_of, same, tensor
from tests.sampled import in_pairs

HALVES = (torch.bfloat16, torch.float16)


def trained(opt, dtype, n, stage, steps=3):
    mesh, shapes = fs.make_mesh({"data": n}), {"w": (37, 29), "b": (29,), "v": (29, 11)}
    whole = {name: tensor(shape, dtype, i) for i, (name, shape) in enumerate(shapes.items())}
    x = tensor((16, 37), dtype, 9)
    params = fs.shard_params(whole, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    divided = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)

    def loss_fn(p, x):
        return (torch.tanh(x @ p["w"] + p["b"]) @ p["v"]).square().mean()

    step = fs.train_step(loss_fn, divided, mesh=mesh, batch=P("data"), reproducible=True)
    state, seen = divided.init(params), []
    for _ in range(steps):
        params, state, metrics = step(params, state, x)
        seen.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    return fs.unshard(params), seen


STEPS = {
    "sgd": optim.sgd(0.01),
    "chain": optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.01, momentum=0.9, nesterov=True)),
    "adam": optim.adam(0.01, eps=1e-4, weight_decay=0.1),
    "lamb": optim.lamb(0.01, weight_decay=0.1),
    "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1)),
    "from_torch": optim.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.9, weight_decay=0.1),
    "fused": optim.from_torch(torch.optim.Adam, lr=0.1, eps=1e-4, fused=True),
    "with numbers": optim.ema(optim.from_torch(torch.optim.NAdam, lr=0.1, eps=1e-4), 0.5),
}


@pytest.mark.parametrize(("name", "dtype"), in_pairs(STEPS, (*HALVES, torch.float64)))
def test_steps_are_equal_on_all_meshes(name, dtype):
    expected, seen = trained(STEPS[name], dtype, 1, 0)
    for n, stage in ((1, 3), (2, 1), (4, 2), (8, 3)):
        found, again = trained(STEPS[name], dtype, n, stage)
        assert same(found, expected) and again == seen


@pytest.mark.parametrize("cls", FOREIGN, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_from_torch_computes_16_bits_in_float32(cls, dtype):
    params, grads = ([tensor((n,), dtype, seed + n) for n in (5, 64, 77)] for seed in (0, 100))
    found, _ = by_step(optim.from_torch(cls, **FOREIGN[cls]), params, [grads])
    wide = by_torch(cls, [x.float() for x in params], [[g.float() for g in grads]], **FOREIGN[cls])
    assert same(leaves_of(found), [x.to(dtype) for x in wide])


@given(slices=st.integers(1, 24), n=st.integers(2, 8), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_any_slices_equal_one_device_or_raise(slices, n, seed):
    draw = torch.Generator().manual_seed(seed)
    w, x = torch.randn(7, 7, generator=draw), torch.randn(30, 7, generator=draw)

    def grad(n):
        mesh, options = fs.make_mesh({"data": n}), {"reproducible": True, "slices": slices}
        loss = fs.grad(lambda w, x: (x @ w).tanh().square().mean(), mesh=mesh, batch=P("data"), **options)
        return fs.unshard(loss(fs.shard_params(w, P(), mesh=mesh), x))

    if slices % n or (slices // n).bit_count() > 1:
        with pytest.raises(ValueError, match=f"{slices} slices"):
            grad(n)
    else:
        assert torch.equal(grad(n), grad(1))
