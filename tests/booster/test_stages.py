"""Models in stages: lists of layers, layers in place, recomputation, accumulation."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import ModuleError
from tests.booster.loops import Loop, assert_close, on_devices, unequal_bits


def layers(*more):
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), *more).double()


def rows(count, seed=5):
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed)).double()


def steps(loop):
    """Take two steps, each along the gradients of two batches; return the state."""
    for seed in range(2):
        loop.accumulate(rows(4, seed), rows(4))
        loop.step(rows(4, seed + 7), rows(4))
    return loop.state()


def staged(body, make, *, microbatches=2, **options):
    """Return what two devices, each with a stage, return of a body."""
    plugin = fs.HybridParallelPlugin(pipeline=2, microbatches=microbatches, **options)
    return on_devices(body, plugin, 2, make, criterion=nn.functional.mse_loss)


def test_gradients_of_batches_add_up():
    assert_close(staged(steps, layers), steps(Loop(layers, criterion=nn.functional.mse_loss)))


@pytest.mark.parametrize("recompute", ["always", "except_last", 1, 2])
def test_recomputed_stages_have_equal_bits(recompute):
    expected, *_ = staged(steps, lambda: layers(nn.Dropout(0.5)))
    for state in staged(steps, lambda: layers(nn.Dropout(0.5)), recompute=recompute):
        assert unequal_bits(state, expected) == []


def test_stages_run_given_layers_in_place():
    calls = []

    def make():
        model = layers(nn.BatchNorm1d(5))
        for number, layer in enumerate(model):
            layer.register_forward_hook(
                lambda layer, args, output, number=number: calls.append(number)
            )
        return model.double()

    def body(loop):
        before = loop.state()
        loop.step(rows(4), rows(4, 6))
        return unequal_bits(loop.state(), before)

    for changed in staged(body, make):
        assert {"0.weight", "2.weight", "3.running_mean", "3.num_batches_tracked"} <= {*changed}
    assert sorted(calls) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("recompute", ["never", 1])
def test_eval_mode_of_stage_layer_takes_effect(recompute):
    def body(loop):
        loop.model.module[1].eval()
        loop.step(rows(4), rows(4))
        loop.output(rows(4))
        return [loop.state()[f"{number}.num_batches_tracked"].item() for number in (1, 3)]

    def make():
        return nn.Sequential(
            nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5)
        ).double()

    assert staged(body, make, recompute=recompute) == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (lambda: iter([]), r"must have a batch for each call.*iter\(loader\) for each epoch"),
        (lambda: [(rows(4), rows(4))], r"must be an iterator; got list.*iter\(loader\)"),
    ],
)
def test_batches_that_are_no_iterator_or_at_its_end_raise(batches, message):
    def body(loop):
        with pytest.raises((ValueError, TypeError), match=message):
            loop.booster.execute_pipeline(batches(), loop.model, loop.criterion, loop.opt)

    staged(body, layers)


def layers_and_function():
    """Return the layers of DeepSpeed's page on pipelines: a list with a function in it."""
    torch.manual_seed(0)
    return [nn.Conv2d(1, 2, 3), nn.ReLU(), lambda x: torch.flatten(x, 1), nn.Linear(8, 2)]


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_list_of_layers_trains_as_a_sequence(pipeline, functional):
    batch = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2

    def sgd(layers):
        return torch.optim.SGD([x for i in (0, 3) for x in layers[i].parameters()], lr=0.1)

    def main():
        plugin = fs.HybridParallelPlugin(pipeline=pipeline, microbatches=3)
        if not functional:
            loop = Loop(layers_and_function, plugin, sgd)
            loop.step(*batch)
            return loop.state()
        layers = layers_and_function()
        booster = fs.Booster(plugin)
        state, _ = booster.step(booster.init(layers, sgd(layers), nn.CrossEntropyLoss()), batch)
        params = fs.unshard(state.params)
        return {
            name: x for tree in ([params] if pipeline == 1 else params) for name, x in tree.items()
        }

    first, relu, _, last = layers_and_function()
    serial = Loop(lambda: nn.Sequential(first, relu, nn.Flatten(), last), None, sgd)
    serial.step(*batch)
    states = fs.run(main, mesh=fs.make_mesh({"pipe": pipeline, "data": 1}))
    assert_close(states, serial.state(), 1e-5)


# -- set after boost -------------------------------------------------------------------------------


class Layered(nn.Module):
    """Has dropout within its blocks, and around them; a scale, and a list that its forward fills."""

    def __init__(self):
        super().__init__()
        self.scale, self.sizes = 1.0, []
        self.before = nn.Dropout(0.5)
        self.after = nn.Dropout(0.5)
        blocks = (nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)
        self.double()

    def forward(self, x):
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x) * self.scale


def evaluated(loop):
    """Return the loss of a batch, without gradients."""
    with torch.no_grad():
        if loop.is_staged:
            return loop.accumulate(rows(4), rows(4, 6))
        return loop.criterion(loop.model(rows(4)), rows(4, 6))


def everything_in_eval_mode(model):
    model.eval()


def each_dropout_in_eval_mode(model):
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.eval()


def other_rates(model):
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0


def other_scale(model):
    model.eval()
    model.scale = 3.0


def hooks(model):
    model.eval()
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda block, args, y, number=number: (number + 2) * y)
        block[0].register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    model.register_forward_hook(lambda model, args, y: y + 1)
    model.blocks[1].register_forward_hook(lambda block, args, y: y - 5, prepend=True)


def hooks_with_arguments(model):
    model.eval()
    model.blocks[2].register_forward_hook(
        lambda block, args, kwargs, y: y + args[0], with_kwargs=True
    )
    model.blocks[1].register_full_backward_hook(lambda block, before, after: (before[0] / 3,))
    model.blocks[2].register_full_backward_pre_hook(lambda block, gs: (2 * gs[0],))


CHANGES = [
    everything_in_eval_mode,
    each_dropout_in_eval_mode,
    other_rates,
    other_scale,
    hooks,
    hooks_with_arguments,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_first", [True, False])
def test_change_after_boost_takes_effect_in_stages(change, is_first):
    def body(loop):
        if not is_first:
            loop.module.eval()
            loop.step(rows(4, 9), rows(4))
            loop.module.train()
        change(loop.module)
        losses = [
            evaluated(loop),
            loop.step(rows(4), rows(4, 6)),
            loop.accumulate(rows(4), rows(4, 6)),
        ]
        return loop.state() | {"losses": torch.stack(losses)}

    expected = body(Loop(Layered, criterion=nn.functional.mse_loss))
    given = {"blocks": "blocks", "sample": rows(2)}
    assert_close(staged(body, Layered, **given), expected)
    assert_close(staged(body, Layered, recompute=1, **given), expected)


@pytest.mark.parametrize("recompute", ["never", "always", 1])
def test_modes_alternate_as_on_one_device(recompute):
    def body(loop):
        results = []
        for _ in range(2):
            loop.model.train()
            dropped = loop.accumulate(rows(4), rows(4, 6))
            loop.model.eval()
            kept = evaluated(loop)
            results += [(dropped != kept).item(), kept]
        return results

    expected = body(Loop(Layered, criterion=nn.functional.mse_loss))
    given = {"blocks": "blocks", "sample": rows(2), "recompute": recompute}
    for result in staged(body, Layered, **given):
        torch.testing.assert_close([*map(float, result)], [*map(float, expected)])
        assert result[0]
        assert result[2]


def test_removed_hook_has_no_effect_in_stages():
    def body(loop):
        handle = loop.module.blocks[0].register_forward_hook(lambda block, args, y: 3 * y)
        loop.model.eval()
        losses = [evaluated(loop)]
        handle.remove()
        return torch.stack([*losses, evaluated(loop)])

    expected = body(Loop(Layered, criterion=nn.functional.mse_loss))
    for result in staged(body, Layered, blocks="blocks", sample=rows(2)):
        torch.testing.assert_close(result, expected)


INVALID_CHANGES = {
    "a method": (
        lambda loop: setattr(loop.module, "call", loop.module.forward),
        r"Layered.call must be set before boost, since stages run copies",
    ),
    "a list of layers": (
        lambda loop: setattr(loop.module, "order", [*loop.module.blocks]),
        r"Layered.order must be set before boost",
    ),
    "another forward": (
        lambda loop: setattr(loop.module.blocks[0], "forward", torch.sin),
        r"blocks.0.forward must be set before boost",
    ),
    "a hook of the boosted model": (
        lambda loop: loop.model.register_forward_hook(lambda model, args, y: 2 * y),
        r"hooks of a model in stages must be registered on the module .* on model.module",
    ),
}


@pytest.mark.parametrize("name", INVALID_CHANGES)
def test_change_that_stages_cannot_follow_raises(name):
    change, message = INVALID_CHANGES[name]

    def body(loop):
        change(loop)
        loop.accumulate(rows(4), rows(4, 6))

    with pytest.raises(ModuleError, match=message):
        staged(body, Layered, blocks="blocks", sample=rows(2))


def test_hook_of_a_list_of_layers_raises():
    def body(loop):
        loop.module.register_forward_hook(lambda model, args, y: 2 * y)
        loop.accumulate(rows(4), rows(4, 6))

    with pytest.raises(ModuleError, match="hooks of Sequential must be registered on its layers"):
        staged(body, layers)
