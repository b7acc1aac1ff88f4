"""Wrong arguments raise where they are given, all at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard import optim
from fshard.optim import schedules

NAN, INF = float("nan"), float("inf")
WRONG = {
    "adam: lr must be in [0, inf); got -1.0. eps must be in [0, inf); got -1.0.": lambda: optim.adam(-1.0, eps=-1.0),
    "adamw: betas must be in [0, 1); got (2.0, 0.9).": lambda: optim.adamw(betas=(2.0, 0.9)),
    "sgd: lr must be in [0, inf); got nan. momentum must be in [0, inf); got -1.0.": lambda: optim.sgd(
        NAN, momentum=-1.0
    ),
    "lion: betas must be in [0, 1); got (0.9, 1.0).": lambda: optim.lion(betas=(0.9, 1.0)),
    "lamb: weight_decay must be in [0, inf); got -0.1.": lambda: optim.lamb(weight_decay=-0.1),
    "shampoo: eps must be in [0, inf); got -1.0.": lambda: optim.shampoo(eps=-1.0),
    "clip_by_value: limit must be in [0, inf]; got -1.0.": lambda: optim.clip_by_value(-1.0),
    "clip_by_global_norm: order must be in (0, inf]; got 0.": lambda: optim.clip_by_global_norm(1.0, 0),
    "ema: decay must be in [0, 1]; got 1.5.": lambda: optim.ema(optim.sgd(), 1.5),
    "accumulate: every must be in [1, inf); got 0.": lambda: optim.accumulate(optim.sgd(), 0),
    "loss_scaled: growth must be in (1, inf); got 1.0. interval must be in [1, inf); got 0. "
    "smallest <= initial <= largest must hold, above 0; got 1.0, 0.5, 16777216.0.": lambda: optim.loss_scaled(
        optim.sgd(), growth=1.0, interval=0, initial=0.5
    ),
    "schedules.polynomial: steps must be in [1, inf); got -1. power must be in [0, inf); got -1.0.": lambda: (
        schedules.polynomial(1.0, 0.0, -1, power=-1.0)
    ),
    "schedules.cosine: steps must be in [1, inf); got 0.": lambda: schedules.cosine(1.0, 0.0, 0),
    "schedules.step: factor must be in (-inf, inf); got nan. every must be in [1, inf); got 0.": lambda: schedules.step(
        1.0, every=0, factor=NAN
    ),
    "schedules.warmup_cosine: warmup must be in [0, 3]; got 5.": lambda: schedules.warmup_cosine(
        1.0, warmup=5, steps=3
    ),
    "schedules.warmup_cosine: warmup must be in [0, inf); got -1. steps must be in [1, inf); got 0.": lambda: (
        schedules.warmup_cosine(1.0, warmup=-1, steps=0)
    ),
    "schedules.linear: end must be in (-inf, inf); got inf. steps must be in [1, inf); got inf.": lambda: (
        schedules.linear(1.0, INF, INF)
    ),
    "schedules.inverse_sqrt: warmup must be in [0, inf); got -1.": lambda: schedules.inverse_sqrt(1.0, warmup=-1),
    "schedules.one_cycle: rise must be in [0, 1]; got 1.5. end_divisor must be in (0, inf); got 0.": lambda: (
        schedules.one_cycle(1.0, steps=3, rise=1.5, end_divisor=0)
    ),
    "scale: factor must be in (-inf, inf); got nan.": lambda: optim.scale(NAN),
    "add_decayed_weights: decay must be in (-inf, inf); got inf.": lambda: optim.add_decayed_weights(INF),
}
WRONG_TYPES = {
    "lr must be a number; got '0.1'.": lambda: optim.lion("0.1"),
    "betas must be two numbers; got 0.9.": lambda: optim.adam(betas=0.9),
    "betas must be two numbers; got (0.9,).": lambda: optim.lamb(betas=(0.9,)),
    "every must be an integer; got 2.5.": lambda: optim.accumulate(optim.sgd(), 2.5),
    "every must be a number; got None.": lambda: schedules.step(1.0, every=None),
    "by_label: opts must be a dict of optimizers by label; got list.": lambda: optim.by_label([optim.sgd()], 0),
}


@pytest.mark.parametrize("text", WRONG)
def test_arguments_outside_intervals_raise_with_all(text):
    with pytest.raises(optim.OptimizerError) as error:
        WRONG[text]()
    assert str(error.value) == text and isinstance(error.value, ValueError)


@pytest.mark.parametrize("text", WRONG_TYPES)
def test_arguments_of_wrong_type_raise_type_error(text):
    with pytest.raises(TypeError) as error:
        WRONG_TYPES[text]()
    assert str(error.value) == text


def test_torch_class_with_wrong_options_raises_torchs_error():
    for make, message in [
        (lambda: optim.muon(-1), "Learning rate should be >= 0 but is: -1"),
        (lambda: optim.adafactor(d=0.0), "Clipping threshold d should be >= 1 but is: 0.0"),
        (lambda: optim.from_torch(torch.optim.SGD, lr=-1.0), "Invalid learning rate"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_schedules_and_tensors_are_not_validated():
    for lr in (lambda count: -1.0, torch.tensor(-1.0)):
        opt = optim.sgd(lr, fused=False)
        params, _ = opt.step([torch.ones(1)], opt.init([torch.ones(1)]), [torch.ones(1)])
        assert params[0].item() == 2.0


@given(st.integers(1, 20), st.floats(0, 1), st.integers(0, 30))
def test_one_cycle_stays_between_its_ends(steps, rise, count):
    rate = schedules.one_cycle(1.0, steps=steps, rise=rise)
    assert 1.0 / 25.0 / 1e4 <= rate(count) <= 1.0
    if count >= steps:
        assert rate(count) == 1.0 / 25.0 / 1e4


def test_one_cycle_may_peak_first_or_last():
    assert schedules.one_cycle(1.0, steps=10, rise=0.1)(0) == 1.0
    rising = schedules.one_cycle(1.0, steps=4, rise=1.0)
    assert [rising(count) for count in (3, 4, 5)] == [1.0, 1.0 / 25.0 / 1e4, 1.0 / 25.0 / 1e4]
