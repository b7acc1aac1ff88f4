"""Loss scaling: the scale goes up and down as torch's GradScaler's does, within limits and with patience."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard import optim

FINITE = st.lists(st.booleans(), max_size=30)


def scales(opt, finite):
    """The scale after each step, and what the parameter is in the end."""
    params, state, found = [torch.zeros(())], opt.init([torch.zeros(())]), []
    for good in finite:
        grads = [state["scale"].clone() if good else torch.tensor(torch.inf)]
        params, state = opt.step(grads, state, params)
        found.append(state["scale"].item())
    assert params[0] == -sum(finite) and state["skipped"] == finite.count(False)
    return found


@given(FINITE, st.integers(1, 4), st.sampled_from([2.0, 4.0]), st.sampled_from([0.5, 0.25]))
def test_the_scale_is_torchs(finite, interval, growth, backoff):
    scale, tracker, expected = torch.tensor(2.0**10), torch.tensor(0, dtype=torch.int32), []
    for good in finite:
        torch._amp_update_scale_(scale, tracker, torch.tensor(0.0 if good else 1.0), growth, backoff, interval)
        expected.append(scale.item())
    limits = {"smallest": 2.0**-100, "largest": 2.0**100}
    opt = optim.loss_scaled(
        optim.sgd(1.0), initial=2.0**10, growth=growth, backoff=backoff, interval=interval, **limits
    )
    assert scales(opt, finite) == expected


@given(FINITE)
def test_the_scale_stays_within_its_limits(finite):
    opt = optim.loss_scaled(optim.sgd(1.0), initial=4.0, interval=1, smallest=2.0, largest=8.0)
    assert all(2.0 <= scale <= 8.0 for scale in scales(opt, finite))


def test_patience_is_spent_once_and_growing_restores_it():
    opt = optim.loss_scaled(optim.sgd(1.0), initial=64.0, interval=2, hysteresis=3)
    bad, good = [False], [True]
    assert scales(opt, bad * 4 + good * 2 + bad * 3) == [64, 64, 32, 16, 16, 32, 32, 32, 16]


def test_numbers_that_make_no_sense_are_all_named():
    with pytest.raises(optim.OptimizerError) as error:
        optim.loss_scaled(optim.sgd(1.0), growth=1.0, backoff=1.0, interval=0, initial=1.0, smallest=2.0)
    assert str(error.value) == (
        "loss_scaled: growth=1.0 has to be above 1; backoff=1.0 has to lie between 0 and 1; interval=0 and hysteresis=1 have "
        "to be at least 1; smallest=2.0, initial=1.0, largest=16777216.0 out of order."
    )
