"""Criteria that keep something: in stages they are called otherwise than in a loop of torch's, and a warning says so."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.transforms.criteria import IN_STAGES, watched_criterion


class Counting(nn.Module):
    """What a loss counts for depends on how often it was made."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, y, labels):
        self.calls += 1
        return (y - labels).square().mean() / self.calls


class Centred(nn.Module):
    """A centre that follows what it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, y, labels):
        self.centre.data.mul_(0.9).add_(y.detach().float().mean(0), alpha=0.1)
        return (y - labels).square().mean()


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, y, labels):
        self.losses.append((y - labels).square().mean())
        return self.losses[-1]


def within(criterion):
    return lambda y, labels: criterion(y, labels)


class Called:
    """No module."""

    __slots__ = ()

    def __init__(self):
        self.calls = 0

    def __call__(self, y, labels):
        self.calls += 1
        return (y - labels).square().mean() / self.calls

    method = __call__


class Plain(Called):
    """Has a dict of its own."""


class Slotted(Called):
    """Has none."""

    __slots__ = ("calls",)


class Frozen(nn.Module):
    """A centre that is a frozen parameter, and one in a table, which are written to where no version counts it."""

    def __init__(self, *, table=False):
        super().__init__()
        self.centre = nn.Parameter(torch.ones(2), requires_grad=False)
        self.table = {"centre": torch.ones(2)} if table else {}

    def forward(self, y, labels):
        (self.table.get("centre", self.centre)).data.mul_(0.5)
        return (y - labels).square().mean() * self.centre[0]


def by_variable():
    calls = 0

    def loss(y, labels):
        nonlocal calls
        calls += 1
        return (y - labels).square().mean() / calls

    return loss


def by_default():
    def loss(y, labels, seen=[]):  # noqa: B006
        seen.append(1)
        return (y - labels).square().mean() / len(seen)

    return loss


def by_attribute():
    def loss(y, labels):
        loss.calls += 1
        return (y - labels).square().mean() / loss.calls

    loss.calls = 0
    return loss


CALLS = {"calls": 0}


def by_global(y, labels):
    CALLS["calls"] += 1
    return (y - labels).square().mean() / CALLS["calls"]


def in_a_table():
    losses = {"main": Counting()}
    return lambda y, labels: losses["main"](y, labels)


def train(criterion, steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, **options))
    model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(8, 3)
    for _ in range(steps):
        booster.execute_pipeline(iter([(x, x[:, :2])]), model, criterion, opt)
        opt.step()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Counting, "Counting.calls"),
        (Centred, "Centred.centre"),
        (Listing, "Listing.losses"),
        (lambda: within(Counting()), "Counting.calls"),
        (lambda: Counting().forward, "Counting.calls"),
        (Plain, "Plain.calls"),
        (lambda: Plain().method, "Plain.calls"),
        (Slotted, "Slotted.calls"),
        (lambda: within(Plain()), "Plain.calls"),
        (Frozen, "Frozen.centre"),
        (lambda: Frozen(table=True), "Frozen.table"),
        (by_variable, "calls"),
        (by_default, "seen"),
        (by_attribute, "calls"),
        (lambda: by_global, "CALLS"),
        (in_a_table, "Counting.calls"),
    ],
)
def test_a_criterion_that_keeps_something_is_told_in_stages(make, name, microbatches):
    CALLS["calls"] = 0
    with pytest.warns(UserWarning, match=f"{name} was changed by the criterion") as told:
        fs.run(lambda: train(make(), microbatches=microbatches), mesh=fs.make_mesh({"pipe": 2}))
    assert len(told) == 1


def test_so_it_is_in_functional_steps():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    mesh = fs.make_mesh({"data": 1, "pipe": 2})
    booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=2, mesh=mesh))
    state = booster.init(model, torch.optim.SGD(model.parameters(), lr=0.1), Counting())
    with pytest.warns(UserWarning, match="Counting.calls was changed by the criterion") as told:
        booster.step(state, (torch.ones(4, 3), torch.zeros(4, 1)))
    assert len(told) == 1


def step_functional(plugin):
    """Take steps without stages; return how often the criterion was called."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(3, 1), Counting()
    booster = fs.Booster(plugin)
    state = booster.init(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion)
    for _ in range(2):
        state, _ = booster.step(state, (torch.ones(4, 3), torch.zeros(4, 1)))
    return criterion.calls


@pytest.mark.parametrize(
    ("plugin", "calls"),
    [
        (lambda mesh: fs.DDPPlugin(mesh=mesh), 4),
        (lambda mesh: fs.FSDPPlugin(mesh=mesh), 4),
        (lambda mesh: fs.DDPPlugin(mesh=mesh, reproducible=True, slices=4), 8),
    ],
)
def test_so_it_is_without_stages_where_one_criterion_is_called_several_times_in_a_step(plugin, calls):
    often = f"which is called {calls // 2} times in a step here"
    with pytest.warns(UserWarning, match=f"Counting.calls was changed by the criterion, {often}") as told:
        assert step_functional(plugin(fs.make_mesh({"data": 2}))) == calls
    assert len(told) == 1


def test_so_it_is_of_slices_on_a_device_of_its_own():
    plugin = fs.DDPPlugin(reproducible=True, slices=4)
    with pytest.warns(UserWarning, match="which is called 2 times in a step here"):
        assert fs.run(lambda: step_functional(plugin), mesh=fs.make_mesh({"data": 2})) == [4, 4]


def test_one_that_is_called_once_in_a_step_is_not():
    mesh, alone = fs.make_mesh({"data": 2}), fs.make_mesh({"data": 1})
    for plugin in (fs.DDPPlugin(), fs.FSDPPlugin(), fs.DDPPlugin(reproducible=True, slices=2)):
        assert fs.run(lambda plugin=plugin: step_functional(plugin), mesh=mesh) == [2, 2]
    for plugin in (fs.DDPPlugin(mesh=alone), fs.DDPPlugin(mesh=alone, reproducible=True, slices=1)):
        assert step_functional(plugin) == 2


def test_one_that_keeps_nothing_is_not():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.tensor([1.0, torch.nan]))
            self.scales, self.scale = [1.0, 2.0], 2.0

        def forward(self, y, labels):
            return (y - labels).square().mean() * self.scale * self.weight[0]

    fs.run(lambda: train(Weighted(), microbatches=2), mesh=fs.make_mesh({"pipe": 2}))


def test_what_is_none_of_its_numbers_is_not():
    """What logs, or has other types of the same numbers."""

    class Converting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(2).double())

        def forward(self, y, labels):
            logging.getLogger("a criterion").debug("called")
            self.weight = self.weight.to(y.dtype)
            return ((y - labels).square() * self.weight).mean()

    fs.run(lambda: train(within(Converting()), microbatches=2), mesh=fs.make_mesh({"pipe": 2}))


def test_one_that_is_written_anew_in_every_step_is_told_once_and_looked_at_no_longer():
    calls, looked = {"calls": 0}, []

    def main(steps):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=2))
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.ones(4, 3)
        for step in range(steps):

            def loss(y, labels, step=step):
                calls["calls"] += 1
                return (y - labels).square().mean() / (1 + step)

            booster.execute_pipeline(iter([(x, x)]), model, loss, opt)
            opt.zero_grad()
        looked.append(len(model.learner._left))

    with pytest.warns(UserWarning, match="calls was changed by the criterion") as told:
        fs.run(lambda: main(4), mesh=fs.make_mesh({"pipe": 2}))
    assert len(told) == 1 and calls["calls"] == 8 and looked == [1, 1]


def test_criteria_need_no_hash_and_equal_ones_are_not_taken_for_each_other():
    @dataclass
    class Weighted:
        factors: list = field(default_factory=list, compare=False)

        def __call__(self, y, labels):
            return self.factors[0] * (y - labels).square().mean()

    @dataclass(eq=False)
    class Hashed(Weighted):
        __hash__ = object.__hash__

        def __eq__(self, other):
            return True

    def main(kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=2))
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, losses = torch.ones(4, 3), []
        for criterion in (kind([1.0]), kind([2.0])):
            losses.append(booster.execute_pipeline(iter([(x, x)]), model, criterion, opt)["loss"].item())
            opt.zero_grad()
        return losses

    for kind in (Weighted, Hashed):
        (one, two), _ = fs.run(lambda kind=kind: main(kind), mesh=fs.make_mesh({"pipe": 2}))
        assert two == pytest.approx(2 * one)


def test_a_criterion_may_be_written_anew_in_every_step():
    """What is worked out of a schedule is not worked out again: so it is that of the criteria that stay."""

    def main(anew):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=2))
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses, runs = [], set()
        for step in range(3):
            x = torch.full((4, 3), 1.0 + step).double()
            weight = 1.0 + step
            own = (lambda y, target, weight=weight: weight * (y - target).square().mean()) if anew else None
            loss = booster.execute_pipeline(iter([(x, x)]), model, own or nn.functional.mse_loss, opt)["loss"]
            opt.zero_grad()
            losses.append(loss.item() / (weight if anew else 1.0))
            runs.add(id(model.learner._gradient(False, True)))
        return losses, len(runs)

    (new, count), _ = fs.run(lambda: main(True), mesh=fs.make_mesh({"pipe": 2}))
    (old, _), _ = fs.run(lambda: main(False), mesh=fs.make_mesh({"pipe": 2}))
    assert new == pytest.approx(old, rel=1e-12)
    assert count == 1


class Answering:
    """Has tensors of unusual kinds, and an answer of its own to whoever asks for what it has not."""

    def __init__(self):
        self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)

    def __getattr__(self, name):
        raise RuntimeError(f"there is no {name}")

    def __call__(self, y, labels):
        return (y - labels).square().mean()


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantize_per_tensor:UserWarning")
def test_a_criterion_may_hold_what_cannot_be_compared():
    fs.run(lambda: train(Answering(), microbatches=2), mesh=fs.make_mesh({"pipe": 2}))


@pytest.mark.parametrize("make", [lambda: partial(Plain().method), Plain, lambda: Plain().method])
def test_one_that_is_made_anew_in_every_step_is_looked_at_no_more_after_its_first_calls(make):
    left = {}
    for _ in range(3):
        looked_at = watched_criterion(make(), IN_STAGES, left)
        with pytest.warns(UserWarning, match="Plain.calls") if not left or any(left.values()) else nullcontext():
            looked_at(torch.ones(1), torch.ones(1))
    assert [*left.values()] == [0]
    given = make()
    assert watched_criterion(given, IN_STAGES, left) is given
