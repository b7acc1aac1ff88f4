"""Schedules are those of torch.optim.lr_scheduler."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard import optim


def rates_of(make, lr, count=12):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=lr)
    scheduler = make(optimizer)
    actual = []
    for _ in range(count):
        actual.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return actual


T = torch.optim.lr_scheduler
SCHEDULES = {
    "linear": (optim.schedules.linear(0.1, 0.02, 5), lambda o: T.LinearLR(o, 1.0, 0.2, 5)),
    "step": (optim.schedules.step(0.1, every=3, factor=0.5), lambda o: T.StepLR(o, 3, 0.5)),
    "polynomial": (
        optim.schedules.polynomial(0.1, 0.0, 8, power=2),
        lambda o: T.PolynomialLR(o, 8, 2.0),
    ),
    "one_cycle": (
        optim.schedules.one_cycle(0.1, steps=12),
        lambda o: T.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=False),
    ),
    "warmup_cosine": (
        optim.schedules.warmup_cosine(0.1, warmup=0, steps=11, end=0.01),
        lambda o: T.CosineAnnealingLR(o, 11, 0.01),
    ),
    "inverse_sqrt": (
        optim.schedules.inverse_sqrt(0.1, warmup=4),
        lambda o: T.LambdaLR(o, lambda t: min(t / 4, (4 / max(t, 1)) ** 0.5)),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedules_equal_torch_schedulers(name):
    ours, theirs = SCHEDULES[name]
    assert [ours(count) for count in range(12)] == pytest.approx(rates_of(theirs, 0.1), abs=1e-12)


@given(st.integers(1, 20), st.floats(0, 1), st.integers(0, 30))
def test_one_cycle_stays_between_its_ends(steps, rise, count):
    rate = optim.schedules.one_cycle(1.0, steps=steps, rise=rise)
    assert 1.0 / 25.0 / 1e4 <= rate(count) <= 1.0
    if count >= steps:
        assert rate(count) == 1.0 / 25.0 / 1e4


def test_one_cycle_may_peak_first_or_last():
    assert optim.schedules.one_cycle(1.0, steps=10, rise=0.1)(0) == 1.0
    rising = optim.schedules.one_cycle(1.0, steps=4, rise=1.0)
    assert [rising(count) for count in (3, 4, 5)] == [1.0, 1.0 / 25.0 / 1e4, 1.0 / 25.0 / 1e4]
