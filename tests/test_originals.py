"""An optimizer that has the parameters of what was boosted, and was not boosted itself, says that its steps do nothing."""

import gc

import pytest
import torch
from torch import nn

import fshard as fs


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def boost(model, opt):
    booster = fs.Booster(fs.ZeroPlugin(stage=1))
    boosted, opt, *_ = booster.boost(model, opt)
    return booster, boosted, opt


def on_two(main):
    return fs.run(main, mesh=fs.make_mesh({"data": 2}))


@pytest.mark.parametrize("early", [False, True], ids=["made after boosting", "made before"])
def test_a_second_optimizer_of_the_original_is_refused(early):
    def main():
        model = two_layers()
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        second = torch.optim.AdamW(model[2].parameters()) if early else None
        booster, boosted, opt = boost(model, first)
        second = second or torch.optim.AdamW(model[2].parameters())
        booster.backward(boosted(torch.ones(2, 3)).sum(), opt)
        opt.step()
        second.step()

    with pytest.raises(fs.OptimizerError, match=r"AdamW.step\(\) has no gradients of 2.weight, .*one optimizer"):
        on_two(main)


def test_many_names_are_counted():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))

    def main():
        mine = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
        boost(mine, None)
        torch.optim.SGD(mine.parameters(), lr=0.1).step()

    with pytest.raises(fs.OptimizerError, match="0.weight, 0.bias, 1.weight and 5 more"):
        on_two(main)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # nobody has boosted that one


def test_the_original_may_be_trained_by_itself():
    def main():
        model = two_layers()
        boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [x.detach().clone() for x in model.parameters()]
        model[0](torch.ones(2, 3)).sum().backward()  # a gradient for some of them
        own.step()
        own.zero_grad()

        def closure():
            own.zero_grad()
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            return loss

        own.step(closure)
        return [bool((x != y).any()) for x, y in zip(before, model.parameters(), strict=True)]

    assert on_two(main) == [[True] * 4] * 2


def test_nothing_keeps_what_was_boosted():
    """Nor does it wait for the collector of garbage, with the memory of a whole model."""

    def main():
        model = two_layers()
        boost(model, None)
        return torch.utils.weak.weakref.ref(model[0].weight)

    gc.collect()
    gc.disable()
    try:
        assert [weak() for weak in on_two(main)] == [None, None]
    finally:
        gc.enable()
