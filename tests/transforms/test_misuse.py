"""Arguments that users mix up raise errors that name the argument or leaf, and the fix.

A row of a table is a call, and a text that the error matches. Configurations in trees of parameters
pass through a step; torch's own optimizer on plain tensors is the oracle.
"""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P

MESH = fs.make_mesh({"data": 2})
SGD = fs.optim.sgd(0.1)
PLAIN = {"w": torch.ones(4, 2)}
X = torch.ones(4, 4)


def loss_fn(params, x):
    return (x @ params["w"]).square().mean()


def sharded(params=PLAIN, stage=3, mesh=MESH):
    return fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)


def is_plain(params):
    """Return whether parameters have to be sharded before a call."""
    return isinstance(params, dict) and any(isinstance(x, torch.Tensor) for x in params.values())


def gradient(loss_fn=loss_fn, params=PLAIN, batch=X, stage=3, spec=P("data"), mesh=MESH, **options):  # noqa: B008
    """Return loss and gradient of parameters that are sharded, unless they are arrays already."""
    if is_plain(params):
        params = sharded(params, stage, mesh)
    return fs.value_and_grad(loss_fn, mesh=mesh, batch=spec, **options)(params, batch)


def step(loss_fn=loss_fn, opt=SGD, batch=X, stage=0, **options):
    """Take a step."""
    if isinstance(opt, fs.optim.Optimizer):
        opt = fs.partition_optimizer(opt, mesh=MESH, axis="data", stage=stage)
    params = sharded(stage=stage)
    run = fs.train_step(loss_fn, opt, mesh=MESH, batch=P("data"), **options)
    return run(params, opt.init(params), batch)


def returning(*result):
    return lambda params, x: result if len(result) > 1 else result[0]


def with_aux(**aux):
    return lambda params, x: (loss_fn(params, x), aux)


def with_buffers(params, buffers, x):
    return loss_fn(params, x), {**buffers, "other": x.sum()}


def kept_parameter():
    kept = []

    def keeping(params, x):
        kept.append(params["w"])
        return loss_fn(params, x)

    gradient(keeping)
    return kept[0] + 1


def writing(recorded):
    def write(params, x):
        with torch.set_grad_enabled(recorded):
            params["w"].add_(1.0)
        return loss_fn(params, x)

    return write


def of_weights(*weights):
    """Return a function that takes a step on samples of these weights."""
    batch = {"x": X, "w": torch.tensor(weights)}

    def mean(params, batch):
        return (batch["x"] @ params["w"]).mean()

    def weight(batch):
        return batch["w"].amax() + batch["w"].amin()

    return partial(step, mean, batch=batch, weight=weight)


def gradient_of_plain_parameters():
    fs.value_and_grad(loss_fn, mesh=MESH, batch=P("data"))(PLAIN, X)


def step_with_swapped_arguments():
    adam = fs.optim.adam(0.1)
    fs.train_step(loss_fn, adam, mesh=MESH, batch=P("data"))(adam.init(PLAIN), sharded(), X)


def gradient_of_many_plain_parameters():
    params = {name: torch.ones(4, 2) for name in "abcdefg"}
    fs.value_and_grad(loss_fn, mesh=MESH, batch=P("data"))(params, X)


def gradient_with_swapped_arguments():
    fs.value_and_grad(loss_fn, mesh=MESH, batch=P("data"))(X, sharded())


def gradient_with_buffers(loss_fn):
    options = {"mesh": MESH, "batch": P("data"), "has_buffers": True}
    fs.value_and_grad(loss_fn, **options)(sharded(), {}, X)


def step_with_two_lengths():
    batch = {"x": X, "y": torch.arange(8.0)}
    step(lambda params, batch: loss_fn(params, batch["x"]), batch=batch)


def gradient_of_a_batch_without_samples():
    batch = {"a": X, "b": torch.ones(2)}
    gradient(batch=batch, spec=P(), accumulate=2)


def evaluate_stages_with_options_of_losses():
    fs.evaluate([loss_fn] * 2, mesh=PIPE, batch=P("data"), **STAGES, accumulate=2, slices=4)


def evaluate_a_loss_with_options_of_stages():
    fs.evaluate(loss_fn, mesh=MESH, batch=P("data"), loss=loss_fn)


def train_step_of(loss_fn, **options):
    return fs.train_step(loss_fn, SGD, **options)


CALLERS = {
    "train_step": train_step_of,
    "value_and_grad": fs.value_and_grad,
    "evaluate": fs.evaluate,
}
STAGES = {"schedule": fs.pipeline_schedule("1f1b", stages=2, microbatches=2), "loss": loss_fn}
PIPE = fs.make_mesh({"pipe": 2, "data": 2})
UNEVEN = fs.make_mesh({"data": 3, "seq": 2})
OPTIONS = {
    "unknown options": (
        lambda: step(acumulate=2, wieght=3),
        "train_step has no option acumulate, wieght. .*weight, accumulate",
    ),
    "numbers": (
        lambda: gradient(accumulate=2.0, prefetch=-1),
        "accumulate must be an integer >= 1, got 2.0; prefetch must be an integer >= 0, got -1",
    ),
    "an optimizer of torch": (
        lambda: step(opt=torch.optim.SGD([torch.ones(1)], lr=0.1)),
        r"train_step: SGD is no pair of init and update. .*fs.optim.from_torch",
    ),
    "stage": (lambda: step(stage=4), "stage must be 0, 1, 2 or 3, as in ZeRO; got 4"),
    "scale": (lambda: step(precision="fp16"), "needs a scaled loss"),
    "slices": (
        lambda: gradient(reproducible=True, slices=3),
        "cuts the batch into 3 slices, which 2 devices do not share",
    ),
    "reduce": (
        lambda: gradient(reproducible=True, reduce=torch.bfloat16),
        "reduce=torch.bfloat16: sums in 16 bits are rounded differently",
    ),
}

PARAMETERS = {
    "plain parameters": (
        gradient_of_plain_parameters,
        "w is Tensor. Put the parameters on that mesh",
    ),
    "many plain parameters": (
        gradient_of_many_plain_parameters,
        r"a is Tensor; b is Tensor; c is Tensor; and 4 others of the 7. Put the parameters",
    ),
    "swapped arguments of a step": (
        step_with_swapped_arguments,
        r"train_step on .*: count is Tensor.*; the arguments of a step are \(params, state, batch\)",
    ),
    "swapped arguments": (
        gradient_with_swapped_arguments,
        r"params must be sharded parameters; got plain .* Swap the two",
    ),
    "integers": (
        lambda: gradient(params={"w": torch.ones(4, 2, dtype=torch.int64)}),
        r"parameters must be floating-point .*; w is int64. Shard x.float",
    ),
    "a parameter of another step": (kept_parameter, "w is a parameter of a step that is over"),
}

LOSSES = {
    "a tensor": (
        lambda: gradient(returning(torch.ones(2, 2))),
        r"return one number, .*; got a tensor of shape \(2, 2\)",
    ),
    "a pair": (
        lambda: gradient(returning(torch.ones(()), {})),
        "one number, .*got tuple. Give has_aux=True",
    ),
    "no pair": (lambda: step(has_aux=True), r"must return \(loss, aux\); got a Tensor"),
    "no buffers": (
        lambda: gradient_with_buffers(lambda params, buffers, x: loss_fn(params, x)),
        r"must return \(loss, buffers\); got a Tensor",
    ),
    "another buffer": (
        lambda: gradient_with_buffers(with_buffers),
        "must return the buffers that it was given; other was not given",
    ),
    "a complex loss": (
        lambda: step(lambda p, x: p["w"].sum() * 1j),
        "a number of torch.complex64, which has no gradient",
    ),
    "a detached loss": (
        lambda: step(lambda p, x: loss_fn(p, x).detach()),
        "depends on no parameter that is trained",
    ),
    "a loss of the batch": (
        lambda: step(lambda p, x: x.mean()),
        "train_step: the loss depends on no parameter",
    ),
}

BATCHES = {
    "an array": (
        lambda: step(batch={"x": X.numpy()}),
        r"batch: x: a ndarray is not sharded. Write torch.as_tensor",
    ),
    "no samples": (lambda: step(batch=torch.ones(0, 4)), "the batch has no samples"),
    "two lengths": (
        step_with_two_lengths,
        "must have the same samples; got 4 over data, 8 over data. Replicate",
    ),
    "nothing to split": (
        gradient_of_a_batch_without_samples,
        "must be split into 2 slices, but has no tensor whose first dim is sharded",
    ),
    "another dim": (
        lambda: gradient(batch=torch.ones(4, 3), mesh=UNEVEN, spec=P("data", "seq")),
        "dim 1 has 3 elements, which 2 devices",
    ),
}

WEIGHTS = {
    "losses of samples": (
        lambda: step(lambda p, x: (x @ p["w"]).sum(1), weight=len),
        r"one number, or without weight= one for each sample; got .* \(2,\)\. Take its mean",
    ),
    "weights": (
        lambda: step(weight=lambda x: torch.ones(3)),
        r"one number for a part of the batch; got .* \(3,\)",
    ),
}

METRICS = {
    "rows": (
        lambda: gradient(with_aux(best=torch.ones(3)), aux="rows"),
        r"best is of shape \(3,\), but there are 2 samples",
    ),
    "words": (
        lambda: gradient(with_aux(best=torch.ones(3), name="x"), aux="mean"),
        "name is a str",
    ),
    "complex": (lambda: gradient(with_aux(fine=1, z=torch.tensor(1j)), aux="mean"), "z is complex"),
    "prefix": (
        lambda: gradient(with_aux(best=1, fine=1), aux={"best": "mean"}),
        "must be a prefix of the metrics",
    ),
    "reduction": (
        lambda: gradient(with_aux(fine=1), aux="median"),
        'aux must be "mean", "sum" or "rows", or .*median',
    ),
    "a matrix": (
        lambda: gradient(with_aux(mean=X), has_aux=True),
        r"in aux=; mean is of shape \(4, 4\). Give aux=",
    ),
}

OF_STAGES = {
    "options of losses": (
        evaluate_stages_with_options_of_losses,
        "evaluate has no option accumulate, slices. With a schedule it has: ",
    ),
    "options of stages": (
        evaluate_a_loss_with_options_of_stages,
        "evaluate has no option loss. Without a schedule it has: ",
    ),
}
MISUSE = {**OPTIONS, **PARAMETERS, **LOSSES, **BATCHES, **WEIGHTS, **METRICS, **OF_STAGES}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_raises_and_names_the_fix(name):
    call, words = MISUSE[name]
    with pytest.raises((fs.errors.FshardError, ValueError, TypeError), match=words):
        call()


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"reproducible": True, "slices": 4}], ids=str
)
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((0.0, 0.0, 0.0, 0.0), "weight= gave 0 for all of the batch"),
        ((1.0, 2.0, -1.0, -1.0), "weight= must return finite numbers of at least 0; got "),
        ((float("nan"), 1.0, 1.0, 1.0), "of at least 0; got nan"),
        ((1.0, float("inf"), 1.0, 1.0), "of at least 0; got inf"),
    ],
)
def test_weights_without_a_mean_raise(weights, words, options):
    with pytest.raises(ValueError, match=words):
        of_weights(*weights)(donate=True, **options)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (1, {"compute": torch.bfloat16}), (2, {}), (3, {"live_units": 1})],
)
def test_inplace_parameter_write_in_loss_raises(stage, options, recorded):
    with pytest.raises(fs.errors.ModuleError, match=r"writes to a parameter in place: w\. "):
        step(writing(recorded), stage=stage, **options)


def check_dtypes(call, name):
    """Assert that dtypes without gradients, or of 8 bits, raise."""
    options = {"mesh": MESH, "batch": P("data")}
    for dtype in (torch.int8, torch.bool, torch.complex64, torch.float8_e5m2):
        message = f"{name} must be a floating dtype of at least 16 bits, got {dtype}"
        with pytest.raises(ValueError, match=message):
            call(loss_fn, **options, **{name: dtype})
        with pytest.raises(ValueError, match=message):
            call([loss_fn] * 2, mesh=PIPE, batch=P("data"), **{name: dtype}, **STAGES)


@pytest.mark.parametrize("caller", CALLERS)
def test_entrances_validate_their_arguments(caller):
    call = CALLERS[caller]
    options = {"mesh": MESH, "batch": P("data")}

    for spec in (None, "data"):
        message = f"{caller}: batch must be a P, .*; got {spec!r}. Write batch=P"
        with pytest.raises(TypeError, match=message):
            call(loss_fn, mesh=MESH, batch=spec)

    arguments = [sharded(), (), None] if caller == "train_step" else [sharded(), None]
    message = r"the batch must be a tree of tensors, sharded by P\(.data.\); got None"
    with pytest.raises(TypeError, match=message):
        call(loss_fn, **options)(*arguments)

    message = rf"{caller}: loss_fn must be a function .* module Linear. Write app"
    with pytest.raises(TypeError, match=message):
        call(torch.nn.Linear(4, 2), **options)

    if caller != "evaluate":
        check_dtypes(call, "reduce")
        check_dtypes(call, "compute")


def test_loss_with_swapped_arguments_names_the_order():
    with pytest.raises((TypeError, IndexError)) as error:
        gradient(lambda x, params: (x @ params["w"]).mean(), batch=[X])
    note = "value_and_grad: The loss function is called as loss_fn(params, batch)."
    assert note in error.value.__notes__

    with pytest.raises(ValueError) as error:
        gradient(lambda params, x: params["w"])
    assert "is called as" not in "".join(getattr(error.value, "__notes__", []))


# -- torch.compile, and configurations -------------------------------------------------------------


def test_compiled_module_is_functionalized_under_its_own_names():
    module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    x = torch.randn(3, 4)

    apply, params, buffers = fs.functionalize(torch.compile(module, backend="eager"))
    y, _ = apply(params, buffers, x)

    assert list(params) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(y, module(x))


def test_compiled_step_runs_as_the_step():
    run = fs.train_step(loss_fn, SGD, mesh=MESH, batch=P("data"))
    compiled = torch.compile(run, backend="eager")
    params = sharded()
    state = SGD.init(params)

    with pytest.warns(UserWarning, match=r"torch.compile\(step\) has no effect"):
        compiled(params, state, X)
    actual, _, _ = compiled(params, state, X)  # a warning is an error: there is no second one

    expected, _, _ = run(params, state, X)
    assert torch.equal(fs.unshard(actual["w"]), fs.unshard(expected["w"]))


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
    """Return the fields that are no parameters."""
    return params.act, params.name, params.scale, params.layers, params.flags


@pytest.mark.parametrize("stage", [1, 3])
def test_static_leaves_pass_through_a_training_step(stage):
    config = Config(torch.ones(4, 2), torch.relu, "mlp", 0.5, 3, {"bias": True})
    params = sharded(config, stage)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=MESH, axis="data", stage=stage)
    run = fs.train_step(configured, opt, mesh=MESH, batch=P("data"))
    state = opt.init(params)
    w = torch.ones(4, 2, requires_grad=True)
    expected = torch.optim.AdamW([w], lr=0.1)

    for _ in range(2):
        params, state, metrics = run(params, state, X)

        expected.zero_grad()
        loss = configured(dataclasses.replace(config, w=w), X)
        loss.backward()
        expected.step()
        torch.testing.assert_close(metrics["loss"], loss.detach())
        assert static(params) == static(config)
    torch.testing.assert_close(fs.unshard(params.w), w.detach())

    # A gradient has None for what is no parameter.
    _, grads = gradient(configured, params)
    assert static(grads) == (None, None, None, None, {"bias": None})
    assert fs.unshard(grads.w).shape == (4, 2)
