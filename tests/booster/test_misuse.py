"""Misuse of the Booster raises one error with its fix."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import fshard as fs

MESH = fs.make_mesh({"data": 2, "pipe": 2})


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


BAD = {
    "outside": (
        lambda: fs.Booster(fs.DDPPlugin(mesh=MESH)).boost(model()),
        r"a loop must run as one device of .*\. Call it inside of fs.run\(main, mesh=mesh\), or under torchrun",
    ),
    "no optimizer": (lambda: fs.Booster().boost(model(), "adamw"), "boost: str is no pair of init and update"),
    "a class": (lambda: fs.Booster().boost(model(), torch.optim.SGD), "SGD is no pair of init and update"),
    "another model's optimizer": (
        lambda: fs.Booster().boost(model(), torch.optim.SGD(model().parameters(), lr=0.1)),
        r"SGD: in param_groups\[0\] are tensors that are no parameters of the model",
    ),
    "an optimizer with a search": (lambda: boosted(torch.optim.LBFGS), "LBFGS.*calls the loss function several times"),
    "a function": (
        lambda: fs.Booster().boost(model),
        "boost: the model is a module, not function: for a function there is",
    ),
    "the optimizer that was": (lambda: not_boosted(), "optimizer must be what boost has returned; got SGD"),
    "torch's backward": (
        lambda: by_torch(),
        r"loss.backward\(\) reached sharded parameters.* Call booster.backward\(loss, optimizer\).",
    ),
    "torch's clipping": (
        lambda: clipped_by_torch(),
        r"its parameters have no .grad. Clip them by booster.clip_grad_norm\(optimizer, max_norm\)",
    ),
    "no pipeline": (lambda: piped(), "the model must be cut into stages, by HybridParallelPlugin"),
    "no memory": (
        lambda: fs.Booster().boost(nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(2)))),
        r"0.weight, 0.bias, 1.weight, 1.bias must be described; .* Make its layer by fs.lazy",
    ),
    "no forward": (lambda: unforwarded(), "the model must be called after the last step"),
    "no loss": (lambda: losing(torch.ones(())), "the loss must be a tensor of one number"),
    "many losses": (lambda: losing(None), "the loss must be a tensor of one number"),
    "a loss that is no tensor": (lambda: losing(1.0), "the loss must be a tensor of one number"),
    "no gradients": (lambda: unstepped(), "there are no gradients. Call the model, then booster.backward"),
}


def boosted(cls):
    one = model()
    return fs.Booster().boost(one, cls(one.parameters()))


def piped():
    one, *_ = fs.Booster().boost(model())
    fs.Booster().execute_pipeline(iter([]), one, nn.MSELoss())


def with_optimizer():
    one = model()
    booster = fs.Booster()
    one, opt, *_ = booster.boost(one, torch.optim.SGD(one.parameters(), lr=0.1))
    return booster, one, opt


def not_boosted():
    one = model()
    opt = torch.optim.SGD(one.parameters(), lr=0.1)
    booster = fs.Booster()
    one, *_ = booster.boost(one, opt)
    booster.backward(one(torch.ones(5, 3)).mean(), opt)


def by_torch():
    booster, one, opt = with_optimizer()
    booster.backward(one(torch.ones(5, 3)).mean(), opt)
    opt.step()
    one(torch.ones(5, 3)).mean().backward()
    opt.step()


def clipped_by_torch():
    booster, one, opt = with_optimizer()
    booster.backward(one(torch.ones(5, 3)).mean(), opt)
    nn.utils.clip_grad_norm_(one.parameters(), 1.0)


def unforwarded():
    booster, _, opt = with_optimizer()
    booster.backward(torch.ones((), requires_grad=True), opt)


def losing(loss):
    booster, one, opt = with_optimizer()
    output = one(torch.ones(5, 3))
    booster.backward(output if loss is None else loss, opt)


def unstepped():
    with_optimizer()[2].step()


@pytest.mark.parametrize("name", BAD)
def test_booster_misuse_raises(name):
    bad, message = BAD[name]
    with pytest.raises((fs.errors.FshardError, ValueError, TypeError), match=message):
        fs.run(bad, mesh=fs.make_mesh({"data": 1})) if name in INSIDE else bad()


INSIDE = {*[*BAD][[*BAD].index("no optimizer") :]}


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copying_boosted_optimizer_raises(copied):
    def main(act):
        booster, one, opt = with_optimizer()
        act(opt)
        booster.backward(one(torch.ones(5, 3)).mean(), opt)
        opt.step()

    mesh = fs.make_mesh({"data": 1})
    with pytest.raises(
        fs.errors.OptimizerError, match=r"a boosted optimizer is sharded, so it cannot be copied or pickled"
    ):
        fs.run(main, copied, mesh=mesh)
    fs.run(main, lambda opt: None, mesh=mesh)


def sgd(one):
    return torch.optim.SGD(one.parameters(), lr=0.1)


BOOSTED = "the model or the optimizer has been boosted already"
TWICE = {
    "both": (lambda b, m, o: b.boost(m, o), BOOSTED),
    "the model": (lambda b, m, o: fs.Booster(fs.FSDPPlugin()).boost(m), BOOSTED),
    "its structure": (lambda b, m, o: b.boost(m.module), BOOSTED),
    "the optimizer": (lambda b, m, o: b.boost(model(), o), BOOSTED),
    "to begin with": (lambda b, m, o: b.init(m, sgd(m), nn.MSELoss()), BOOSTED),
    "a lazy one": (
        lambda b, m, o: b.boost(nn.Sequential(nn.LazyLinear(3))),
        "0.weight, 0.bias must have a shape; the module is lazy. Run it once on an example first",
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_boosting_twice_or_uninitialized_module_raises(name):
    act, message = TWICE[name]
    with pytest.raises(fs.errors.ModuleError, match=re.escape(message)):
        fs.run(lambda: act(*with_optimizer()), mesh=fs.make_mesh({"data": 1}))
