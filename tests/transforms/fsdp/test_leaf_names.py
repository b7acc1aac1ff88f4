"""Messages about trees of one leaf, which has no name, and about leaves by their names."""

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import LayoutError, ModuleError

MESH = fs.make_mesh({"data": 2})
W = torch.ones(4, 4)
X = torch.ones(4, 4)


def gradient(loss=lambda w, x: (x @ w).square().mean(), params=W, x=X, rules=None, **options):
    sharded = fs.shard_params(params, fs.fsdp("data") if rules is None else rules, mesh=MESH)
    return fs.value_and_grad(loss, mesh=MESH, batch=P("data"), **options)(sharded, x)


def with_buffers(result, buffers):
    sharded = fs.shard_params(W, P(), mesh=MESH)
    loss = lambda w, b, x: ((x @ w).mean(), result)  # noqa: E731
    return fs.value_and_grad(loss, mesh=MESH, batch=P("data"), has_buffers=True)(
        sharded, buffers, X
    )


def write_in_place(w, x):
    w.mul_(2)
    return (x @ w).mean()


UNNAMED = {
    "frozen": (lambda: gradient(frozen="zz"), ValueError, "The leaves are one without a name"),
    "batch": (lambda: gradient(x=X.to_sparse()), LayoutError, "^batch: device_put"),
    "batch of another kind": (lambda: gradient(x=X.to_sparse()), LayoutError, "to_dense"),
    "gradients": (lambda: gradient(gradients=lambda layout: 3), TypeError, "for the parameter; got 3"),
    "a write": (lambda: gradient(write_in_place), ModuleError, "in place: the parameter"),
    "sharded buffers": (
        lambda: with_buffers(W, fs.device_put(W, fs.Layout(MESH, P("data")))),
        LayoutError,
        "the buffer has P",
    ),
    "a buffer of text": (lambda: with_buffers("text", W), TypeError, "^the buffer must be a tensor"),
    "no rule": (lambda: gradient(rules={"w": P()}), LayoutError, "the parameter|without a name"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNNAMED)
def test_message_about_a_leaf_without_a_name_has_a_subject(name):
    call, error, words = UNNAMED[name]
    with pytest.raises(error, match=words) as raised:
        call()
    assert not any(gap in str(raised.value) for gap in (": :", "  ", " .", ", ,", "for ;", "; has"))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_trained_float8_parameter_raises_with_its_name(stage):
    params = {"w": torch.ones(4, 4), "narrow": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    rules = fs.fsdp("data") if stage == 3 else P()
    sharded = fs.shard_params(params, rules, mesh=MESH)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=MESH, axis="data", stage=stage)

    def loss(params, x):
        return (x @ params["w"] @ params["narrow"].float()).square().mean()

    step = fs.train_step(loss, opt, mesh=MESH, batch=P("data"))
    with pytest.raises(TypeError, match="narrow is float8_e4m3fn.*frozen="):
        step(sharded, opt.init(sharded), X)

    frozen = fs.train_step(loss, opt, mesh=MESH, batch=P("data"), frozen=["narrow"])
    params, _, _ = frozen(sharded, opt.init(sharded), X)
    assert fs.typeof(params["narrow"]).dtype is torch.float8_e4m3fn
