"""Random generators, and objects of torch as leaves of a tree.

The oracle is the generator or object that was not saved and goes on.
"""

import copy
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import fshard as fs
from fshard import P
from fshard.checkpoint.names import JoinedArray
from fshard.errors import CheckpointError
from tests.checkpoint.helpers.programs import mesh
from tests.helpers.processes import run_processes

# -- random generators -----------------------------------------------------------------------------


class Generators:
    """A user's generators, of every kind."""

    BITS = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)

    def __init__(self, seed):
        self.torch = torch.Generator().manual_seed(seed)
        self.python = random.Random(seed)
        self.numpy = [np.random.Generator(bits(seed)) for bits in self.BITS]
        self.state = fs.RandomState(self.torch, self.python, *self.numpy)

    def draw(self):
        """Draw from all, and an odd number of those that are drawn in pairs."""
        drawn = [
            torch.rand(2).tolist(),
            torch.rand(2, generator=self.torch).tolist(),
            torch.randn(1).tolist(),
            np.random.rand(2).tolist(),
            np.random.randn(1).tolist(),
            random.random(),
            random.gauss(0, 1),
            self.python.gauss(0, 1),
        ]
        drawn += [generator.random(2).tolist() for generator in self.numpy]
        drawn += [int(generator.integers(10, dtype=np.uint32)) for generator in self.numpy]
        return drawn


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), before=st.integers(0, 3))
def test_generators_continue_with_equal_numbers(seed, before, tmp_path_factory):
    path = tmp_path_factory.mktemp("random")
    source = Generators(seed)
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    for _ in range(before):
        source.draw()
    fs.save(path, {"random": source.state})
    expected = [source.draw(), source.draw()]
    target = Generators(seed + 1)
    target.draw()
    fs.restore(path, {"random": target.state})
    assert [target.draw(), target.draw()] == expected


def run_draws(n, path, load):
    """Return two draws of each device, after its state was saved or loaded."""

    def main():
        generator = torch.Generator().manual_seed(7)
        state = fs.RandomState(generator)
        torch.manual_seed(fs.axis_index("data"))
        fs.restore(path, state) if load else fs.save(path, state)
        return torch.rand(4), torch.rand(4, generator=generator)

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 7])
def test_devices_take_their_rows_and_others_draw_other_numbers(before, after, tmp_path):
    """Of one state there are no others: all devices continue with it, as they begin with one."""
    expected = run_draws(before, tmp_path, load=False)
    drawn = run_draws(after, tmp_path, load=True)
    for (x, _), (y, _) in zip(drawn, expected, strict=False):
        assert torch.equal(x, y)
    assert len({tuple(x.tolist()) for x, _ in drawn}) == (after if before > 1 else 1)
    assert all(torch.equal(x, expected[0][1]) for _, x in drawn)  # it draws alike on all devices
    repeated = run_draws(after, tmp_path, load=True)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(drawn, repeated, strict=True))


def draw_after_saving(folder):
    torch.manual_seed(3)
    fs.save(folder, {"random": fs.RandomState()})
    return torch.rand(2)


def draw_after_restoring(folder):
    fs.make_mesh({"data": 2})
    fs.restore(folder, {"random": fs.RandomState()})
    return torch.rand(2)


def test_two_processes_continue_with_the_state_of_one(tmp_path):
    drawn = draw_after_saving(tmp_path / "one")
    assert all(
        torch.equal(x, drawn) for x in run_processes(draw_after_restoring, 2, tmp_path / "one")
    )


def test_rows_are_one_array_by_device(tmp_path):
    run_draws(3, tmp_path, load=False)
    stored = fs.restore(tmp_path)
    assert stored["rows"].shape == (3, sum(size for _, size in stored["sizes"]))
    assert [name for name, _ in stored["sizes"]][:4] == [
        "0.cpu",
        "1.RandomState",
        "2.Random",
        "3.cpu",
    ]


def test_random_state_in_a_notebook_names_its_generators():
    state = fs.RandomState(torch.Generator(), np.random.default_rng(0))
    assert repr(state) == "RandomState(torch, numpy, Python, cpu, PCG64)"


def test_other_generators_raise(tmp_path):
    fs.save(tmp_path, fs.RandomState(torch.Generator()))
    with pytest.raises(
        CheckpointError, match=r"must have the generators 0.cpu, .*, 3.cpu; got 0.cpu, .*, 3.Random"
    ):
        fs.restore(tmp_path, fs.RandomState(random.Random()))
    with pytest.raises(TypeError, match="must be of torch, numpy or Python; got int"):
        fs.RandomState(3)


# -- objects of torch ------------------------------------------------------------------------------


def sequential(opt):
    schedules = [lr_scheduler.ConstantLR(opt), lr_scheduler.MultiStepLR(opt, [1, 3])]
    return lr_scheduler.SequentialLR(opt, schedules, milestones=[4])


def chained(opt):
    return lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(opt), lr_scheduler.StepLR(opt, 3)])


RATES = [lambda step: 0.9**step, lambda step: 1.0]
SCHEDULES = {
    "step": partial(lr_scheduler.StepLR, step_size=2),
    "milestones": partial(lr_scheduler.MultiStepLR, milestones=[2, 5, 5, 9], gamma=0.5),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=RATES),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.5, step_size_up=3),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=20, three_phase=True),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=1),
    "sequential": sequential,
    "chained": chained,
}


class Run:
    """A module, an optimizer of two groups, a schedule and a loss scale, as a tree."""

    def __init__(self, schedule, kind=torch.optim.AdamW):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        matrices = [x for x in self.model.parameters() if x.ndim > 1]
        vectors = [x for x in self.model.parameters() if x.ndim <= 1]
        groups = [{"params": matrices, "lr": 0.2}, {"params": vectors}]
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.opt = kind(groups, lr=0.1, **options)
        self.schedule = SCHEDULES[schedule](self.opt)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.tree = {
            "model": self.model,
            "opt": self.opt,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "step": 0,
        }

    def step(self, number):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        self.scaler.scale(self.model(x).square().mean()).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        if isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(1.0 + number)
        else:
            self.schedule.step()

    def state(self):
        objects = (self.model, self.opt, self.schedule, self.scaler)
        return copy.deepcopy([x.state_dict() for x in objects])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_objects_are_leaves(schedule, tmp_path):
    source = Run(schedule)
    target = Run(schedule)
    for number in range(4):
        source.step(number)
    fs.save(tmp_path, {**source.tree, "step": 4})
    tree = fs.restore(tmp_path, target.tree)
    assert tree["step"] == 4
    assert tree["model"] is target.model
    for number in range(4, 9):
        assert_equal(target.state(), source.state())
        source.step(number), target.step(number)


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.ASGD]
)
def test_state_of_torch_optimizers(kind, tmp_path):
    source = Run("step", kind)
    target = Run("step", kind)
    fs.save(tmp_path, source.tree)  # without state so far
    assert_equal(fs.restore(tmp_path, target.tree)["opt"].state_dict(), source.opt.state_dict())
    for number in range(3):
        source.step(number)
    fs.save(tmp_path, source.tree)
    fs.restore(tmp_path, target.tree)
    source.step(3), target.step(3)
    assert_equal(target.state(), source.state())


def assert_equal(a, b):
    """Compare trees of numbers and tensors: values, keys, and the types of containers."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert list(a) == list(b) or {*a} == {*b}
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    else:
        assert a == b


class Stateful:
    """A loader whose state is nested, as those of torchdata are."""

    def __init__(self):
        self.state = {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


NUMBERS = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=3)
ARRAYS = st.lists(st.integers(0, 255), max_size=4).map(lambda x: torch.tensor(x, dtype=torch.uint8))


def containers(inner):
    dicts = st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
    return st.lists(inner, max_size=3) | dicts


STATES = st.recursive(VALUES | ARRAYS, containers, max_leaves=8)


@settings(max_examples=60, deadline=None)
@given(state=st.dictionaries(st.text("abc", min_size=1, max_size=2), STATES, max_size=3))
def test_state_of_any_object(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("any")
    source = Stateful()
    target = Stateful()
    source.state = state
    fs.save(path, {"loader": source, "x": torch.ones(1)})
    fs.restore(path, {"loader": target, "x": torch.zeros(1)})
    assert_equal(target.state, state)


# -- arrays in parts, and shared numbers -----------------------------------------------------------


SPECS = [P(), P("model"), P(None, "model"), P("data", "model"), P.flat("data"), P(at={"data": 1})]


def spec_for(spec, tensor):
    """Return a spec, or P() if it does not divide the dims of a tensor."""
    is_even = all(size % 2 == 0 for size in tensor.shape)
    return spec if spec.is_flat or not spec.split_axes or is_even else P()


def in_parts(x, sizes, dim, specs):
    """Return an array in parts along a dim, each with its spec."""
    arrays = []
    for tensor, spec in zip(x.split(sizes, dim), specs, strict=False):
        layout = fs.Layout(mesh(), spec_for(spec, tensor))
        arrays.append(fs.device_put(tensor.clone(), layout))
    return JoinedArray(tuple(arrays), dim)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    shift=st.integers(1, 3),
    dim=st.integers(0, 1),
    specs=st.tuples(st.sampled_from(SPECS), st.sampled_from(SPECS), st.sampled_from(SPECS)),
)
def test_parts_are_one_array(sizes, shift, dim, specs, tmp_path_factory):
    """Saved in parts, they are restored in full, and the other way round; each in any layout."""
    path = tmp_path_factory.mktemp("parts")
    shape = [3, 3]
    shape[dim] = sum(sizes)
    x = torch.arange(shape[0] * shape[1]).reshape(shape).float()
    zeros = torch.zeros(shape)
    other_specs = specs[shift:] + specs[:shift]

    def restored_in_parts():
        target = {"w": in_parts(zeros, sizes, dim, other_specs), "n": 0}
        parts = fs.restore(path, target)["w"].parts
        return torch.cat([fs.unshard(part) for part in parts], dim)

    fs.save(path, {"w": in_parts(x, sizes, dim, specs), "n": 1})
    assert torch.equal(fs.restore(path)["w"], x)
    flat = fs.device_put(zeros, fs.Layout(mesh(), P.flat("data")))
    assert torch.equal(fs.unshard(fs.restore(path, {"w": flat, "n": 0})["w"]), x)
    assert torch.equal(restored_in_parts(), x)

    fs.save(path, {"w": x, "n": 1})
    assert torch.equal(restored_in_parts(), x)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_unreduced_array_keeps_its_sum_on_any_devices(devices, tmp_path):
    def unreduced(*shards):
        layout = fs.Layout(fs.make_mesh({"data": len(shards)}), P(unreduced="data"))
        return fs.Sharded((3,), layout, tuple(shards))

    fs.save(tmp_path, {"x": unreduced(torch.tensor([1.0, 2, 3]), torch.tensor([10.0, 20, 30]))})
    target = unreduced(*(torch.full((3,), 7.0) for _ in range(devices)))
    restored = fs.restore(tmp_path, {"x": target})["x"]
    assert restored is target and sum(restored.shards).tolist() == [11, 22, 33]


def test_numbers_that_were_one_tensor_may_differ(tmp_path):
    """Counts of steps are one tensor for all parameters, until one of them is not used."""
    fs.save(tmp_path, {"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
    zero = torch.zeros(())
    restored = fs.restore(tmp_path, {"a": zero, "b": zero})
    assert (restored["a"], restored["b"]) == (1.0, 2.0)


def test_a_counter_is_a_node_of_the_tree(tmp_path):
    fs.save(tmp_path, {"seen": Counter("aab"), "steps": 7, "w": torch.ones(2)})

    restored = fs.restore(tmp_path, {"seen": Counter("ab"), "steps": 0, "w": torch.zeros(2)})

    assert restored["seen"] == Counter("aab")
    assert restored["steps"] == 7
    assert torch.equal(restored["w"], torch.ones(2))


def test_modules_that_differ_are_reported_before_anything_is_written(tmp_path):
    fs.save(tmp_path, {"w": torch.ones(2), "my m": torch.nn.Linear(2, 2)})
    target = {"w": torch.zeros(2), "my m": torch.nn.Linear(3, 2, bias=False)}
    before = target["my m"].weight.detach().clone()
    with pytest.raises(
        CheckpointError,
        match=r"unexpected in the checkpoint: my m.bias. my m.weight must have shape",
    ):
        fs.restore(tmp_path, target)
    assert torch.equal(target["w"], torch.zeros(2))
    _, differences = fs.restore(tmp_path, target, strict=False)
    assert differences.unexpected == ("my m.bias",) and torch.equal(target["my m"].weight, before)
    assert torch.equal(target["w"], torch.ones(2))
