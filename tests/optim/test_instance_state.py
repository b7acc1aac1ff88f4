"""Checkpoints of optimizers of one's own class: the steps after are those of the run that was not
interrupted.
"""

import copy
from functools import partial
from itertools import product

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard.errors import CheckpointError, OptimizerError
from tests.helpers.processes import wrapped
from tests.optim.helpers.torch_classes import (
    PLUGINS,
    Factored,
    Lars,
    Lion,
    MyAdagrad,
    groups_of,
    net,
    x_of,
)


class DampedLion(Lion):
    """Its decay falls with a number of steps, and with a number in a tensor; a string and None are
    beside them.
    """

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if "steps" not in state:
                state.update(steps=0, damping=torch.ones(()), note="begun", none=None)
            state["steps"] += 1
            state["damping"] *= 0.9
            p.mul_(1 - 0.1 * state["damping"] / state["steps"])


class CountingLars(Lars):
    """Saves its attribute."""

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.steps = state_dict["steps"]


KINDS = {kind.__name__: kind for kind in (DampedLion, Factored, MyAdagrad, CountingLars)}


def train(kind, plugin, n, steps, load=None, save=None, **options):
    """Return parameters and optimizer state, of each device, after some steps; load and save before
    and after them.

    `load` is a folder, or what another call has returned; with `first` another step is taken
    before.
    """

    def main():
        return train_here(kind, PLUGINS[plugin], n, steps, load, save, **options)

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


def train_here(kind, plugin, n, steps, load=None, save=None, first=None, **options):
    model = net()
    given = KINDS[kind](groups_of(model))
    booster = fs.Booster(plugin(**options))
    model, opt, *_ = booster.boost(model, given)

    def take(step):
        x = x_of(step).chunk(n)[dist.get_rank() if dist.is_initialized() else fs.axis_index("data")]
        booster.backward(model(x, deep=step != 0).square().mean(), opt)
        opt.step(), opt.zero_grad()
        opt.param_groups[1]["lr"] *= 0.5

    if first is not None:
        take(first)
    if isinstance(load, tuple):
        model.load_state_dict(load[0])
        opt.load_state_dict(load[1])
    elif load is not None:
        booster.load(load, model, opt)
    for step in steps:
        take(step)
    if save is not None:
        booster.save(save, model, opt)
    return copy.deepcopy((model.state_dict(), opt.state_dict()))


def by_torch(kind, steps, load=None):
    model = net()
    opt = KINDS[kind](groups_of(model))
    if load is not None:
        model.load_state_dict(load[0])
        opt.load_state_dict(load[1])
    for step in steps:
        model(x_of(step), deep=step != 0).square().mean().backward()
        opt.step(), opt.zero_grad()
        opt.param_groups[1]["lr"] *= 0.5
    return copy.deepcopy((model.state_dict(), opt.state_dict()))


def close(found, wanted, tolerance=1e-9):
    (leaves, structure), (known, known_structure) = map(optree.tree_flatten, (found, wanted))
    assert structure == known_structure
    for one, other in zip(leaves, known, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        else:
            assert one == other and type(one) is type(other)


equal = partial(close, tolerance=0)
EXACT = {"reproducible": True, "slices": 4}
CHAINS = [
    [("ddp", 1), ("zero 1", 4), ("zero 2", 2)],
    [("zero 2", 4), ("fsdp", 2), ("ddp", 1)],
    [("fsdp", 4), ("ddp", 2), ("zero 1", 1)],
]


@pytest.mark.parametrize(
    ("kind", "chain"),
    [
        *product(["DampedLion", "Factored"], CHAINS),
        ("MyAdagrad", CHAINS[0]),
        ("CountingLars", CHAINS[1]),
    ],
)
def test_run_continues_on_other_meshes_with_equal_bits(kind, chain, tmp_path):
    """Two steps on each mesh; the first does not use all layers."""
    (expected,) = train(kind, "ddp", 1, range(6), **EXACT)
    actual, load = [], None
    for part, (plugin, n) in enumerate(chain):
        actual = train(
            kind, plugin, n, range(2 * part, 2 * part + 2), load, tmp_path / f"{part}", **EXACT
        )
        load = tmp_path / f"{part}"
    for one in actual:
        equal(one, expected)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [*KINDS])
def test_state_dict_is_that_of_torch(kind, plugin):
    """Keys, shapes and values; and each continues from the other's."""
    expected = by_torch(kind, range(2))
    actual = train(kind, plugin, 2, range(2))
    for one in actual:
        close(one, expected)
    close(train(kind, plugin, 4, range(2, 4), expected)[3], by_torch(kind, range(4)))
    if kind != "Factored":  # torch loads state in the parameter's dtype, which its step refuses
        close(by_torch(kind, range(2, 4), actual[0]), by_torch(kind, range(2, 4), expected))


@pytest.mark.parametrize("kind", ["DampedLion", "Factored"])
def test_load_replaces_the_state_of_later_steps(kind, tmp_path):
    """A parameter that had no state when it was saved has none after it is loaded."""
    saved = train(kind, "zero 1", 2, range(1), save=tmp_path)[0]
    assert len(saved[1]["state"]) < len(by_torch(kind, range(2))[1]["state"])
    for load in (tmp_path, saved):
        for device in train(kind, "zero 1", 2, [], load, first=5):
            equal(device, saved)


@pytest.mark.parametrize("kind", ["DampedLion", "Factored"])
def test_loss_scale_is_saved_beside_the_state(kind, tmp_path):
    saved = train(kind, "fsdp", 2, range(3), save=tmp_path, precision="fp16")[0]
    expected = train(kind, "fsdp", 2, range(5), precision="fp16")[0]
    assert saved[1]["loss_scale"]["finite"] == 3
    for load in (tmp_path, saved):
        equal(train(kind, "fsdp", 2, range(3, 5), load, precision="fp16")[0], expected)
        equal(train(kind, "zero 1", 4, [], load, precision="fp16")[3], saved)


# -- other layouts ---------------------------------------------------------------------------------


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)
    ).double()
    model[4].weight = model[0].weight  # of the first and the last stage
    return model


def x_of_stages(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def in_stages(kind, zero_stage, steps, load=None, save=None, tensor=1):
    plugin = fs.HybridParallelPlugin(
        pipeline=2, microbatches=2, zero_stage=zero_stage, tensor=tensor, sample=x_of_stages(0)[:2]
    )

    def main():
        model = tied()
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(model, KINDS[kind](model.parameters(), lr=0.05))
        if load is not None:
            booster.load(load, model, opt)
        for step in steps:
            booster.execute_pipeline(
                iter([x_of_stages(step)]), model, lambda y, _: y.square().mean(), opt
            )
            opt.step(), opt.zero_grad()
        if save is not None:
            booster.save(save, model, opt)
        return copy.deepcopy((model.state_dict(), opt.state_dict()))

    return fs.run(main, mesh=fs.make_mesh({"pipe": 2, "data": 2 // tensor, "model": tensor}))


@pytest.mark.parametrize("kind", ["DampedLion", "Factored", "MyAdagrad"])
def test_stages_with_tied_weights_continue_as_torch_does(kind, tmp_path):
    """In stages with ZeRO 1, then with tensor parallelism and ZeRO 0, then with ZeRO 3."""
    model = tied()
    opt = KINDS[kind](model.parameters(), lr=0.05)
    for step in range(6):
        model(x_of_stages(step)).square().mean().backward()
        opt.step(), opt.zero_grad()
    in_stages(kind, 1, range(2), save=tmp_path / "1")
    in_stages(kind, 0, range(2, 4), tmp_path / "1", tmp_path / "2", tensor=2)
    for one in in_stages(kind, 3, range(4, 6), tmp_path / "2"):
        close(one, (model.state_dict(), opt.state_dict()))


def test_functional_state_is_saved(tmp_path):
    def main(plugin, steps, load=None, save=None):
        module = net()
        booster = fs.Booster(plugin(**EXACT))
        state = booster.init(module, Factored(groups_of(module)), lambda y, _: y.square().mean())
        state = state if load is None else fs.restore(load, state)
        for step in steps:
            state, _ = booster.step(state, (x_of(step), x_of(step)))
        if save is not None:
            fs.save(save, state)
        return fs.unshard(state.params)

    (expected,) = fs.run(main, fs.DDPPlugin, range(4), mesh=fs.make_mesh({"data": 1}))
    fs.run(main, fs.FSDPPlugin, range(2), None, tmp_path, mesh=fs.make_mesh({"data": 2}))
    for actual in fs.run(
        main, PLUGINS["zero 1"], range(2, 4), tmp_path, mesh=fs.make_mesh({"data": 4})
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def of_processes(folder):
    for kind in ("DampedLion", "Factored"):
        load = folder / kind / "1"
        save = folder / kind / "2"
        train_here(kind, PLUGINS["zero 1"], 2, range(2, 4), load, save, **EXACT)


def test_processes_continue_what_virtual_devices_saved(tmp_path):
    for kind in ("DampedLion", "Factored"):
        train(kind, "fsdp", 4, range(2), save=tmp_path / kind / "1", **EXACT)
    fs.launch(wrapped(of_processes), tmp_path, processes=2)
    for kind in ("DampedLion", "Factored"):
        (expected,) = train(kind, "ddp", 1, range(6), **EXACT)
        for one in train(kind, "zero 2", 4, range(4, 6), tmp_path / kind / "2", **EXACT):
            equal(one, expected)


# -- misuse ----------------------------------------------------------------------------------------


class Hoarder(Lars):
    """Has state that is no tensor or number, and some that is of no parameter."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["history"] = [1.0]
        self.state["global"] = {"steps": 1}


class Averager(Lion):
    """Claims to be elementwise, and has a mean of its shards."""

    def step(self, closure=None):
        super().step(closure)
        for p, state in self.state.items():
            state |= {"mean": float(p.mean())}


class Rower(Lion):
    """Claims to be elementwise, and has rows of its shards."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state |= {"row": torch.zeros(3, 7)}


KINDS |= {"Hoarder": Hoarder, "Averager": Averager, "Rower": Rower}


def saved_in(folder):
    """Return the state of a class with rows and columns, which is saved in a folder too."""
    return train("Factored", "ddp", 1, range(2), save=folder)[0]


def with_unknown_parameter(folder):
    saved = saved_in(folder)
    saved[1]["state"][50] = {"row": torch.ones(2)}
    train("Factored", "zero 1", 2, [], saved)


def into_another_model(folder):
    saved_in(folder)

    def main():
        module = nn.Linear(3, 5).double()
        _, opt, *_ = fs.Booster().boost(module, Factored(module.parameters()))
        fs.restore(folder, opt, only="optimizer")

    fs.run(main, mesh=fs.make_mesh({"data": 1}))


MISUSE = {
    "lists": (
        lambda folder: train("Hoarder", "zero 1", 2, range(2), save=folder),
        "Hoarder: this state cannot be saved: (?=.*'global' of no parameter must be that of a parameter)"
        "(?=.*'history' of first.weight must be a tensor, a number, a string or None; got a list)"
        ".*'history' of third.bias must be",  # the owners are different
    ),
    "numbers that differ": (
        lambda folder: train("Averager", "zero 1", 2, range(1), save=folder),
        r"'mean' of first.weight must be equal on all devices",
    ),
    "other shapes": (
        lambda folder: train("Rower", "fsdp", 2, range(1)),
        r"'row' of \S+ must have the shape of the shard, \(8,\), or of a number",
    ),
    "rows in a folder": (
        lambda folder: (saved_in(folder), train("DampedLion", "zero 1", 2, [], folder)),
        r"optimizer.state.row.first.weight must have shape \(5, 3\); got \(5,\)",
    ),
    "rows": (
        lambda folder: train("DampedLion", "zero 1", 2, [], saved_in(folder)),
        r"row of first.weight must have shape \(5, 3\); got \(5,\); column of",
    ),
    "an unknown parameter": (with_unknown_parameter, "parameter 50 is unknown"),
    "another model": (
        into_another_model,
        "unexpected in the checkpoint: state.column.first.weight, state.c",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_state_that_does_not_fit_raises(name, tmp_path):
    call, words = MISUSE[name]
    with pytest.raises((OptimizerError, CheckpointError), match=words):
        call(tmp_path)
