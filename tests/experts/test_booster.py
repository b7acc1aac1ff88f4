"""`HybridParallelPlugin(experts=)`: the functional step and torch's loop train as plain torch does."""

from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional

import fshard as fs
from tests.experts.models import MODELS, ids, model_of

ROWS, WIDTH = 8, 6


def network():
    torch.manual_seed(0)
    layers = [
        nn.Linear(WIDTH, WIDTH),
        *(fs.nn.MoE(WIDTH, 5, experts=4, top_k=2, axis="expert") for _ in range(3)),
    ]
    return nn.Sequential(*layers).double()


def square(output, target):
    return (output - target).square().mean()


def data(step):
    draw = torch.Generator().manual_seed(step)
    return tuple(torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))


def serial():
    model = network()
    losses = []
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        x, y = data(step)
        loss = square(model(x), y)
        opt.zero_grad(set_to_none=False)
        loss.backward()
        losses.append(loss.detach())
        opt.step()
    return torch.stack(losses), model.state_dict()


SAMPLE = (torch.ones(ROWS, WIDTH, dtype=torch.float64),)
PLUGINS = {
    "experts": ({"experts": 2}, 2),
    "zero 1": ({"experts": 2, "zero_stage": 1}, 4),
    "zero 3": ({"experts": 4, "zero_stage": 3}, 4),
    "stages": ({"experts": 2, "pipeline": 2, "microbatches": 2}, 4),
    "stages, zero 3": ({"experts": 2, "pipeline": 2, "microbatches": 2, "zero_stage": 3}, 8),
    "tensor": ({"experts": 2, "tensor": 2, "sample": SAMPLE}, 4),
    "tensor, zero 3": ({"experts": 2, "tensor": 2, "zero_stage": 3, "sample": SAMPLE}, 8),
    "tensor, stages": (
        {"experts": 2, "tensor": 2, "pipeline": 2, "microbatches": 2, "sample": SAMPLE[0]},
        8,
    ),
    "tensor without experts": ({"tensor": 2, "sample": SAMPLE}, 4),
}


def mesh_of(options, n):
    sizes = {
        "pipe": options.get("pipeline", 1),
        "expert": options.get("experts", 1),
        "model": options.get("tensor", 1),
    }
    sizes = {
        "pipe": sizes["pipe"],
        "data": n // prod(sizes.values()),
        "expert": sizes["expert"],
        "model": sizes["model"],
    }
    return fs.make_mesh(
        {axis: size for axis, size in sizes.items() if axis in ("pipe", "data") or size > 1}
    )


def looped(plugin):
    model = network()
    losses = []
    booster = fs.Booster(plugin)
    axes = plugin.axes()
    boosted, opt, *_ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), lr=0.05), criterion=square
    )
    for step in range(3):
        x, y = (part.chunk(fs.axis_size(axes))[fs.axis_index(axes)] for part in data(step))
        loss = square(boosted(x), y)
        booster.backward(loss, opt)
        loss = fs.pmean(loss.detach(), axes)
        losses.append(loss)
        opt.step()
        opt.zero_grad()
    return torch.stack(losses), boosted.unwrap().state_dict()


@pytest.mark.parametrize("name", [name for name in PLUGINS if "stages" not in name])
def test_loops_train_as_plain_torch(name):
    options, n = PLUGINS[name]
    losses, params = serial()
    mesh = mesh_of(options, n)
    for result, state in fs.run(looped, fs.HybridParallelPlugin(**options), mesh=mesh):
        torch.testing.assert_close(result, losses)
        for key, x in state.items():
            torch.testing.assert_close(x, params[key])


@pytest.mark.parametrize("name", PLUGINS)
def test_functional_steps_train_as_plain_torch(name):
    options, n = PLUGINS[name]
    mesh = mesh_of(options, n)
    losses, params = serial()
    model = network()
    booster = fs.Booster(fs.HybridParallelPlugin(mesh=mesh, **options))
    state = booster.init(model, torch.optim.AdamW(model.parameters(), lr=0.05), square)
    for step in range(3):
        state, metrics = booster.step(state, data(step))
        torch.testing.assert_close(metrics["loss"], losses[step])
    trees = state.params if isinstance(state.params, list | tuple) else [state.params]
    after = [x for tree in trees for x in fs.unshard(tree).values()]
    for x, y in zip(after, params.values(), strict=True):
        torch.testing.assert_close(x, y)


TRANSFORMERS = {
    "experts": ({"experts": 2, "zero_stage": 1}, 4),
    "tensor": ({"tensor": 2}, 4),
    "experts, tensor": ({"experts": 2, "tensor": 2, "zero_stage": 3}, 8),
    "stages": ({"pipeline": 2}, 4),
    "stages, experts": ({"pipeline": 2, "experts": 2, "zero_stage": 1}, 8),
}


def entropy(output, batch):
    return functional.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten())


@pytest.mark.parametrize("layout", TRANSFORMERS)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_in_the_booster(name, layout):
    """Losses and parameters of three steps of SGD, which add up the gradients."""
    options, n = TRANSFORMERS[layout]
    model = model_of(name)
    reference = model_of(name)
    batch = {"input_ids": ids()}
    if "stages" in layout:
        model.config.use_cache = False
        options = {**options, "microbatches": 2, "sample": batch, "blocks": "model.layers"}
    elif "tensor" in layout:
        options = {**options, "sample": batch}
    booster = fs.Booster(fs.HybridParallelPlugin(mesh=mesh_of(options, n), **options))
    state = booster.init(model, torch.optim.SGD(model.parameters(), lr=0.5), entropy)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(3):
        state, metrics = booster.step(state, batch)
        loss = entropy(reference(**batch), batch)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        torch.testing.assert_close(metrics["loss"].double(), loss.detach(), rtol=1e-6, atol=0.0)
    trees = state.params if isinstance(state.params, list | tuple) else [state.params]
    after = {key: x for tree in trees for key, x in fs.unshard(tree).items()}
    for key, x in reference.named_parameters():
        torch.testing.assert_close(after[key], x.detach(), rtol=0.0, atol=2e-7)


def test_wrong_options_raise():
    plugin = fs.parallel({"experts": 2, "pipeline": 2}, microbatches=2)
    assert (plugin.experts, plugin.pipeline) == (2, 2)
    with pytest.raises(ValueError, match=r'"expert" of .* must have size 2, got 4'):
        fs.HybridParallelPlugin(experts=2, mesh=fs.make_mesh({"data": 2, "expert": 4}))
    plain = nn.Linear(2, 2)
    booster = fs.Booster(
        fs.HybridParallelPlugin(experts=2, mesh=fs.make_mesh({"pipe": 1, "data": 1, "expert": 2}))
    )
    with pytest.raises(fs.errors.ModuleError, match="Linear must have layers of experts"):
        booster.init(plain, torch.optim.SGD(plain.parameters(), lr=0.1), square)
