"""Arguments that users mix up raise errors that name the argument or leaf and the fix; configurations pass through."""

import dataclasses
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P

MESH = fs.make_mesh({"data": 2})


def loss_fn(params, x):
    return (x @ params["w"]).square().mean()


def sharded(dtype=torch.float32):
    return fs.shard_params({"w": torch.ones(4, 2, dtype=dtype)}, fs.fsdp("data"), mesh=MESH)


def value_and_grad(loss_fn, **options):
    return fs.value_and_grad(loss_fn, mesh=MESH, batch=P("data"), **options)


def notes(error):
    return "\n".join(error.value.__notes__)


def test_swapped_arguments_of_a_gradient_raise():
    with pytest.raises(ValueError, match=r"params must be sharded parameters; got plain .* Swap the two"):
        value_and_grad(loss_fn)(torch.ones(4, 4), sharded())


def test_loss_with_swapped_arguments_names_the_order():
    with pytest.raises((TypeError, IndexError)) as error:
        value_and_grad(lambda x, params: (x @ params["w"]).mean())(sharded(), [torch.ones(4, 4)])
    assert "value_and_grad: The loss function is called as loss_fn(params, batch)." in notes(error)


@pytest.mark.parametrize("name", ["train_step", "value_and_grad", "evaluate"])
def test_batch_of_none_raises(name):
    opt = {"opt": fs.optim.sgd(0.1)} if name == "train_step" else {}
    for spec in (None, "data"):
        with pytest.raises(TypeError, match=f"{name}: batch must be a P, .*; got {spec!r}. Write batch=P"):
            getattr(fs, name)(loss_fn, mesh=MESH, batch=spec, **opt)
    run = getattr(fs, name)(loss_fn, mesh=MESH, batch=P("data"), **opt)
    with pytest.raises(TypeError, match=r"the batch must be a tree of tensors, sharded by P\(.data.\); got None"):
        run(sharded(), *([()] if opt else []), None)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_torch_func_on_resharded_params_names_the_fix(transform):
    def inner(params, x):
        return transform(loss_fn)(params, x)["w"].square().sum()

    with pytest.raises(RuntimeError, match=r"saved tensor hooks[\s\S]*fs.with_unsharded_params\(part, keep=True\)"):
        value_and_grad(inner)(sharded(), torch.ones(4, 4))
    loss, _ = value_and_grad(fs.with_unsharded_params(inner, keep=True))(sharded(), torch.ones(4, 4))
    assert loss == inner({"w": torch.ones(4, 2)}, torch.ones(2, 4))


def test_errors_of_fshard_get_no_note():
    with pytest.raises(ValueError) as error:
        value_and_grad(lambda params, x: params["w"])(sharded(), torch.ones(4, 4))
    assert "is called as" not in "".join(getattr(error.value, "__notes__", []))


def test_integer_parameters_alone_raise():
    with pytest.raises(TypeError, match=r"parameters must be floating-point .*; w is int64. Shard x.float"):
        value_and_grad(loss_fn)(sharded(torch.int64), torch.ones(4, 4))


def test_batch_of_another_dtype_runs_with_compute():
    loss, _ = value_and_grad(loss_fn, compute=torch.float32)(sharded(), torch.ones(4, 4, dtype=torch.float64))
    assert loss == 16


STAGES = {"schedule": fs.pipeline_schedule("1f1b", stages=2, microbatches=2), "loss": loss_fn}


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("name", ["reduce", "compute"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.complex64, torch.float8_e5m2])
def test_dtype_that_is_not_floating_raises(name, dtype, stages):
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    given, options = ([loss_fn] * 2, STAGES) if stages else (loss_fn, {})
    with pytest.raises(ValueError, match=f"{name} must be a floating dtype of at least 16 bits, got {dtype}"):
        fs.value_and_grad(given, mesh=mesh, batch=P("data"), **{name: dtype}, **options)


@pytest.mark.parametrize("caller", ["train_step", "value_and_grad", "evaluate"])
def test_module_as_loss_function_raises(caller):
    options = {"mesh": MESH, "batch": P("data")}
    options |= {"opt": fs.optim.sgd(0.1)} if caller == "train_step" else {}
    with pytest.raises(TypeError, match=rf"{caller}: loss_fn must be a function .* module Linear. Write app"):
        getattr(fs, caller)(torch.nn.Linear(4, 2), **options)


def test_compiled_module_is_functionalized_under_its_own_names():
    module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    apply, params, buffers = fs.functionalize(torch.compile(module, backend="eager"))
    assert list(params) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    x = torch.randn(3, 4)
    assert torch.equal(apply(params, buffers, x)[0], module(x))


def test_compiled_step_runs_as_the_step():
    opt = fs.optim.sgd(0.1)
    step = fs.train_step(loss_fn, opt, mesh=MESH, batch=P("data"))
    params, x = sharded(), torch.ones(4, 4)
    state = opt.init(params)
    plain = step(params, state, x)
    compiled_step = torch.compile(step, backend="eager")
    with pytest.warns(UserWarning, match=r"torch.compile\(step\) has no effect"):
        compiled_step(params, state, x)
    compiled = compiled_step(params, state, x)  # a warning is an error: there is no second one
    assert torch.equal(fs.unshard(plain[0]["w"]), fs.unshard(compiled[0]["w"]))
    assert "torch.compile(step)" in fs.train_step.__doc__


@dataclasses.dataclass
class Config:
    """Parameters and their configuration in one tree."""

    w: Any
    act: Any
    name: str
    scale: float
    layers: int
    flags: dict[str, Any]


def configured(params, x):
    assert (params.name, params.layers, params.flags["bias"]) == ("mlp", 3, True)
    return params.act(x @ params.w * params.scale).square().mean()


def static(params):
    return params.act, params.name, params.scale, params.layers, params.flags


@pytest.mark.parametrize("stage", [1, 3])
def test_static_leaves_pass_through_a_training_step(stage):
    given = Config(torch.ones(4, 2), torch.relu, "mlp", 0.5, 3, {"bias": True})
    params = fs.shard_params(given, fs.fsdp("data") if stage == 3 else P(), mesh=MESH)
    assert static(params) == static(given)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=MESH, axis="data", stage=stage)
    step = fs.train_step(configured, opt, mesh=MESH, batch=P("data"))
    state = opt.init(params)
    for _ in range(2):
        params, state, metrics = step(params, state, torch.ones(4, 4))
        assert static(params) == static(given)
    w = torch.ones(4, 2, requires_grad=True)
    plain = torch.optim.AdamW([w], lr=0.1, weight_decay=0.01)
    for _ in range(2):
        plain.zero_grad()
        loss = configured(dataclasses.replace(given, w=w), torch.ones(4, 4))
        loss.backward()
        plain.step()
    torch.testing.assert_close(metrics["loss"], loss.detach())
    torch.testing.assert_close(fs.unshard(params.w), w.detach())


def test_static_leaves_have_no_gradient():
    given = Config(torch.ones(4, 2), torch.relu, "mlp", 0.5, 3, {"bias": True})
    params = fs.shard_params(given, fs.fsdp("data"), mesh=MESH)
    loss, grads = value_and_grad(configured)(params, torch.ones(4, 4))
    assert loss == 4
    assert static(grads) == (None, None, None, None, {"bias": None})
    assert fs.unshard(grads.w).shape == (4, 2)
