"""Models in stages: lists of layers, layers in place, recomputation, accumulation."""

import pytest
import torch
from torch import nn

import fshard as fs
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
        layers, booster = layers_and_function(), fs.Booster(plugin)
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
