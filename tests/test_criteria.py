"""Criteria that keep something: in stages they are called otherwise than in a loop of torch's, and a warning says so."""

import pytest
import torch
from torch import nn

import fshard as fs


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
    ],
    ids=["count", "buffer", "list", "closure", "method"],
)
def test_a_criterion_that_keeps_something_is_told_in_stages(make, name, microbatches):
    with pytest.warns(UserWarning, match=f"{name} was changed by the criterion") as told:
        fs.run(lambda: train(make(), microbatches=microbatches), mesh=fs.make_mesh({"pipe": 2}))
    assert len(told) == 1


def test_one_that_keeps_nothing_is_not():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.tensor([1.0, torch.nan]))
            self.scales, self.scale = [1.0, 2.0], 2.0

        def forward(self, y, labels):
            return (y - labels).square().mean() * self.scale * self.weight[0]

    fs.run(lambda: train(Weighted(), microbatches=2), mesh=fs.make_mesh({"pipe": 2}))


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
