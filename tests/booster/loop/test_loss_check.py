"""`check="loss"` compares the loss of the first step with that of all samples on one device."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard.errors import ModuleError
from tests.booster.loops import Loop, unequal_bits

X = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(10) % 3
PADDED = Y.masked_fill(torch.arange(10) < 4, -100)


class WithLoss(nn.Module):
    """Returns its own loss, as models of transformers do; it drops activations and counts its
    calls.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, y):
        self.calls += 1
        logits = self.layer(self.dropout(x))
        return SimpleNamespace(loss=self.loss(logits, y))

    def loss(self, logits, y):
        return functional.cross_entropy(logits, y)


class Balanced(WithLoss):
    """Adds a loss that is no mean over samples, as experts do."""

    def loss(self, logits, y):
        return super().loss(logits, y) + logits.softmax(-1).mean(0).square().sum()


def linear():
    return nn.Linear(3, 3).double()


def contrastive(logits, _):
    return functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def tokens(labels):
    return (labels != -100).sum()


def trained(make, criterion, labels, weight=None, *, n, check="loss", plugin=fs.FSDPPlugin):
    """Return the states of n devices after an epoch, in batches of 5 that they share unevenly."""

    def main():
        booster = fs.Booster(plugin(), check=check)
        loader = DataLoader(TensorDataset(X, labels), 5)
        loop = Loop(make, booster, loader=loader, criterion=criterion)
        for x, y in loop.loader:
            if criterion is None:
                loss = loop.model(x, y).loss
            else:
                loss = loop.criterion(loop.model(x), y)
            booster.backward(loss / 2, loop.opt, weight=None if weight is None else weight(y))
            loop.step()
        return loop.state()

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


MEANS = {
    "a mean": (linear, functional.cross_entropy, Y, None),
    "weighted by tokens": (linear, functional.cross_entropy, PADDED, tokens),
    "a model's own": (WithLoss, None, Y, None),
}


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("name", MEANS)
def test_checked_mean_trains_as_unchecked(name, n):
    """Dropout and buffers are as without the check; with six devices one has no sample."""
    states = trained(*MEANS[name], n=n)
    for state, expected in zip(states, trained(*MEANS[name], n=n, check=None), strict=True):
        assert not unequal_bits(state, expected)


OTHERS = {
    "padded labels": (linear, functional.cross_entropy, PADDED),
    "padded labels of a model": (WithLoss, None, PADDED),
    "a sum": (linear, nn.CrossEntropyLoss(reduction="sum"), Y),
    "class weights": (
        linear,
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 9.0], dtype=torch.float64)),
        Y,
    ),
    "within the batch": (linear, contrastive, Y),
    "balanced experts": (Balanced, None, Y),
}


@pytest.mark.parametrize("name", OTHERS)
def test_check_of_a_loss_that_is_no_mean_over_samples_raises(name):
    with pytest.raises(ModuleError, match=r"the loss of all samples, .*weight=tokens"):
        trained(*OTHERS[name], n=2)


def test_check_on_one_device_accepts_any_loss():
    for make, criterion, labels in OTHERS.values():
        trained(make, criterion, labels, n=1)


def test_check_that_sees_no_loss_raises():
    def main():
        booster = fs.Booster(check="loss")
        loop = Loop(linear, booster)
        booster.backward(loop.model(X).mean(), loop.opt)

    with pytest.raises(ModuleError, match='check="loss" must see the loss. Give the criterion to'):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_check_where_it_cannot_compare_raises():
    with pytest.raises(ValueError, match="Booster: check must be 'loss' or None"):
        fs.Booster(check="all")
    stages = fs.HybridParallelPlugin(pipeline=2, microbatches=2)
    with pytest.raises(ValueError, match='boost: check="loss" must be used in a loop without st'):
        fs.run(
            lambda: fs.Booster(stages, check="loss").boost([linear()]),
            mesh=fs.make_mesh({"pipe": 2}),
        )
