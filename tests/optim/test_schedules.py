"""Schedules are those of torch.optim.lr_scheduler."""

import pytest
import torch

from fshard import optim
from fshard.optim.contract import copied
from tests.optim.optimizers import WHEN, by_step, example, same


def rates_of(make, lr, count=12):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


T = torch.optim.lr_scheduler
SCHEDULES = {
    "linear": (optim.schedules.linear(0.1, 0.02, 5), lambda o: T.LinearLR(o, 1.0, 0.2, 5)),
    "step": (optim.schedules.step(0.1, every=3, factor=0.5), lambda o: T.StepLR(o, 3, 0.5)),
    "polynomial": (optim.schedules.polynomial(0.1, 0.0, 8, power=2), lambda o: T.PolynomialLR(o, 8, 2.0)),
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


def test_schedule_resumes_from_any_count():
    params, steps = example()
    opt = optim.adamw(WHEN, fused=False)
    middle, state = by_step(opt, params, steps[:2])
    for grads in steps[2:]:
        middle, state = opt.step(copied(grads), state, middle)
    assert same(middle, by_step(opt, params, steps)[0])
