"""Mistakes with the Booster: one error each, that names all that is wrong."""

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
    "no plugin": (lambda: fs.Booster(plugin="ddp"), "plugin must be a plugin, .* got 'ddp'"),
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
    "no step": (lambda: fs.Booster().step((), ()), "step needs a state: call state = booster.init"),
    "a state of another": (lambda: fs.Booster().step(other(), ()), "step needs a state: call state = booster.init"),
    "torch's clipping": (
        lambda: clipped_by_torch(),
        r"its parameters have no .grad. Clip them by booster.clip_grad_norm\(optimizer, max_norm\)",
    ),
    "saved as it is": (
        lambda: with_optimizer()[1].state_dict(),
        r"Call model.unwrap\(\).state_dict\(\) on all devices",
    ),
    "loaded afterwards": (lambda: with_optimizer()[1].load_state_dict({}), "Load before the model is boosted"),
    "no pipeline": (lambda: piped(), "the model must be cut into stages, by HybridParallelPlugin"),
    "no memory": (
        lambda: fs.Booster().boost(nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(2)))),
        r"0.weight, 0.bias, 1.weight and 1 more of the model have no memory.* fs.lazy\(Block, config\)",
    ),
    "no forward": (lambda: unforwarded(), "the model must be called after the last step"),
    "no loss": (lambda: losing(torch.ones(())), "does not depend on the model"),
    "many losses": (lambda: losing(None), r"got one of shape \(5, 2\)"),
    "a loss that is no tensor": (lambda: losing(1.0), "the loss must be a tensor .*; got 1.0"),
    "no criterion": (
        lambda: without_criterion((torch.ones(2, 3), torch.ones(2, 2))),
        "without a criterion a batch is a dict of the model's arguments, not a tuple. Give one to init",
    ),
    "no iterator": (
        lambda: in_two_stages(list, nn.MSELoss()),
        "data_iter must be an iterator, iter\\(dataloader\\); got list",
    ),
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


def other():
    one = model()
    return fs.Booster().init(one, torch.optim.SGD(one.parameters(), lr=0.1), nn.MSELoss())


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


def without_criterion(batch):
    one = model()
    booster = fs.Booster()
    booster.step(booster.init(one, sgd(one)), batch)


def in_two_stages(given, criterion):
    def main():
        one = model()
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=1))
        one, opt, *_ = booster.boost(one, sgd(one))
        booster.execute_pipeline(given([(torch.ones(2, 3), torch.ones(2, 2))]), one, criterion, opt)

    fs.run(main, mesh=fs.make_mesh({"data": 1, "pipe": 2}))


def unstepped():
    with_optimizer()[2].step()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_configuration_is_one_error(name):
    bad, message = BAD[name]
    with pytest.raises(fs.errors.FshardError, match=message):
        fs.run(bad, mesh=fs.make_mesh({"data": 1})) if name in INSIDE else bad()


INSIDE = {*[*BAD][[*BAD].index("no optimizer") :]} - {"no step", "no criterion for stages", "no iterator"}


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_boosted_optimizer_that_is_copied_is_one_error_and_harms_no_other(copied):
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


MISGIVEN = {
    "a row of schedulers of another": (
        lambda g: (g.other, sgd(g.other), nn.MSELoss(), None, g.row),
        "boost: lr_scheduler writes into another optimizer: SequentialLR is to be made of this one.",
    ),
    "everything": (
        lambda g: (model, nn.MSELoss(), g.opt, None, g.opt.param_groups),
        "boost: the model is a module, not function: for a function there is fs.train_step; MSELoss is no pair of init and "
        "update. Write fs.optim.adamw(...), or make one of a class of torch: fs.optim.from_torch(torch.optim.RMSprop, lr=...); "
        "criterion is called, SGD cannot be; lr_scheduler has a step(), list has none.",
    ),
}


class Five:
    """What boost may be given."""

    def __init__(self):
        self.one, self.other = model(), model()
        self.opt = sgd(self.one)
        self.steps = torch.optim.lr_scheduler.StepLR(self.opt, 1)
        self.row = torch.optim.lr_scheduler.SequentialLR(
            self.opt, [self.steps, torch.optim.lr_scheduler.StepLR(self.opt, 2)], [1]
        )
        self.foreign = torch.optim.lr_scheduler.StepLR(sgd(self.other), 1)


@pytest.mark.parametrize("name", MISGIVEN)
def test_what_boost_cannot_take_is_named_at_once(name):
    give, message = MISGIVEN[name]
    with pytest.raises(fs.errors.ModuleError) as found:
        fs.run(lambda: fs.Booster().boost(*give(Five())), mesh=fs.make_mesh({"data": 1}))
    assert str(found.value) == message


def test_schedulers_of_any_maker_are_taken():
    class Third:
        def step(self):
            pass

    def main():
        given, third = Five(), Third()
        *_, row = fs.Booster().boost(given.one, given.opt, nn.MSELoss(), [1], given.row)
        *_, last = fs.Booster().boost(given.other, sgd(given.other), None, None, third)
        return row is given.row, last is third

    assert fs.run(main, mesh=fs.make_mesh({"data": 1})) == [(True, True)]


BOOSTED = "the model has been boosted already, perhaps by another device: each device makes its own, inside of main"
TWICE = {
    "both": (lambda b, m, o: b.boost(m, o), f"boost: {BOOSTED}; the optimizer has been boosted already"),
    "the model": (lambda b, m, o: fs.Booster(fs.FSDPPlugin()).boost(m), f"boost: {BOOSTED}"),
    "its structure": (lambda b, m, o: b.boost(m.module), f"boost: {BOOSTED}"),
    "the optimizer": (lambda b, m, o: b.boost(model(), o), "boost: the optimizer has been boosted already"),
    "a new optimizer": (lambda b, m, o: b.boost(m, sgd(m)), f"boost: {BOOSTED}"),
    "to begin with": (lambda b, m, o: b.init(m, sgd(m), nn.MSELoss()), f"init: {BOOSTED}"),
    "a lazy one": (
        lambda b, m, o: b.boost(nn.Sequential(nn.LazyLinear(3)), sgd(model())),
        "boost: 0.weight, 0.bias of the model has no shape yet: run it once on an example first",
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_what_was_boosted_before_or_has_no_shape_is_told(name):
    act, message = TWICE[name]
    with pytest.raises(fs.errors.ModuleError, match=re.escape(message)):
        fs.run(lambda: act(*with_optimizer()), mesh=fs.make_mesh({"data": 1}))
