"""Arguments that make no sense are refused where they are given, all at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard import optim
from fshard.optim import schedules

NAN, INF = float("nan"), float("inf")
WRONG = {
    "adam: lr=-1.0 has to be at least 0; eps=-1.0 has to be at least 0.": lambda: optim.adam(-1.0, eps=-1.0),
    "adamw: betas=(2.0, 0.9) has to be below 1.": lambda: optim.adamw(betas=(2.0, 0.9)),
    "sgd: lr=nan has to be at least 0; momentum=-1.0 has to be at least 0.": lambda: optim.sgd(NAN, momentum=-1.0),
    "lion: betas=(0.9, 1.0) has to be below 1.": lambda: optim.lion(betas=(0.9, 1.0)),
    "lamb: weight_decay=-0.1 has to be at least 0.": lambda: optim.lamb(weight_decay=-0.1),
    "torch.optim.Muon refused what it was given: Learning rate should be >= 0 but is: -1": lambda: optim.muon(-1),
    "shampoo: eps=-1.0 has to be at least 0.": lambda: optim.shampoo(eps=-1.0),
    "torch.optim.Adafactor refused what it was given: Clipping threshold d should be >= 1 but is: 0.0": lambda: (
        optim.adafactor(d=0.0)
    ),
    "clip_by_value: limit=-1.0 has to be between 0 and inf.": lambda: optim.clip_by_value(-1.0),
    "clip_by_global_norm: max_norm=-1.0 has to be between 0 and inf.": lambda: optim.clip_by_global_norm(-1.0),
    "ema: decay=1.5 has to be between 0 and 1.": lambda: optim.ema(optim.sgd(), 1.5),
    "accumulate: every=2.5 has to be an integer >= 1.": lambda: optim.accumulate(optim.sgd(), 2.5),
    "accumulate: every=0 has to be an integer >= 1.": lambda: optim.accumulate(optim.sgd(), 0),
    "schedules.linear: steps=0 has to be at least 1.": lambda: schedules.linear(1.0, 0.0, 0),
    "schedules.polynomial: steps=-1 has to be at least 1; power=-1.0 has to be at least 0.": lambda: (
        schedules.polynomial(1.0, 0.0, -1, power=-1.0)
    ),
    "schedules.cosine: steps=0 has to be at least 1.": lambda: schedules.cosine(1.0, 0.0, 0),
    "schedules.step: every=0 has to be at least 1.": lambda: schedules.step(1.0, every=0),
    "schedules.warmup_cosine: warmup=5 has to be between 0 and 3.": lambda: schedules.warmup_cosine(
        1.0, warmup=5, steps=3
    ),
    "schedules.warmup_cosine: peak=nan has to be finite; warmup=-1 has to be at least 0; steps=0 has to be at least 1.": lambda: (
        schedules.warmup_cosine(NAN, warmup=-1, steps=0)
    ),
    "schedules.constant: value=inf has to be finite.": lambda: schedules.constant(INF),
    "schedules.linear: end=inf has to be finite; steps=inf has to be finite.": lambda: schedules.linear(1.0, INF, INF),
    "schedules.step: factor=nan has to be finite; every=None has to be at least 1.": lambda: schedules.step(
        1.0, every=None, factor=NAN
    ),
    "schedules.inverse_sqrt: peak='1' has to be finite; warmup=-1 has to be at least 0.": lambda: (
        schedules.inverse_sqrt("1", warmup=-1)
    ),
    "scale: factor=nan has to be finite.": lambda: optim.scale(NAN),
    "add_decayed_weights: decay=inf has to be finite.": lambda: optim.add_decayed_weights(INF),
    "adam: betas=0.9 has to be two numbers; lr=inf has to be finite.": lambda: optim.adam(INF, betas=0.9),
    "lion: betas=(0.9,) has to be two numbers; lr='0.1' has to be at least 0.": lambda: optim.lion("0.1", betas=(0.9,)),
    "schedules.one_cycle: rise=1.5 has to be between 0 and 1; end_divisor=0 has to be above 0.": lambda: (
        schedules.one_cycle(1.0, steps=3, rise=1.5, end_divisor=0)
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_numbers_that_make_no_sense_are_named(text):
    with pytest.raises(optim.OptimizerError) as error:
        WRONG[text]()
    assert str(error.value) == text


def test_schedules_and_tensors_are_not_looked_at():
    for lr in (lambda count: -1.0, torch.tensor(-1.0)):
        opt = optim.sgd(lr, fused=False)
        params, _ = opt.step([torch.ones(1)], opt.init([torch.ones(1)]), [torch.ones(1)])
        assert params[0].item() == 2.0


@given(st.integers(1, 20), st.floats(0, 1), st.integers(0, 30))
def test_one_cycle_is_between_its_ends_for_whatever_fraction_it_rises(steps, rise, count):
    rate = schedules.one_cycle(1.0, steps=steps, rise=rise)
    assert 1.0 / 25.0 / 1e4 <= rate(count) <= 1.0
    if count >= steps:
        assert rate(count) == 1.0 / 25.0 / 1e4


def test_a_cycle_may_rise_in_its_first_step_or_to_its_last():
    assert schedules.one_cycle(1.0, steps=10, rise=0.1)(0) == 1.0
    rising = schedules.one_cycle(1.0, steps=4, rise=1.0)
    assert [rising(count) for count in (3, 4, 5)] == [1.0, 1.0 / 25.0 / 1e4, 1.0 / 25.0 / 1e4]
