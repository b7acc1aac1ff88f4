"""Misuse of the Booster raises one error with its fix."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_module

import fshard as fs

MESH = fs.make_mesh({"data": 2, "pipe": 2}, runtime="virtual")


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


BOOSTED = "has been boosted already"
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


def test_module_boosted_twice_or_by_two_devices_raises():
    shared = nn.Linear(2, 2)
    with pytest.raises(fs.errors.ModuleError, match="has been boosted already"):
        fs.run(lambda: fs.Booster().boost(shared), mesh=fs.make_mesh({"data": 2}))

    def twice():
        module = nn.Linear(2, 2)
        fs.Booster().boost(module)
        fs.Booster().boost(module)

    with pytest.raises(fs.errors.ModuleError, match="has been boosted already"):
        fs.run(twice, mesh=fs.make_mesh({"data": 1}))


class Sign(torch.optim.Optimizer):
    """An optimizer of one's own class, which steps itself."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for x in self.param_groups[0]["params"]:
            if x.grad is not None:
                x.add_(x.grad.sign(), alpha=-0.1)


def two_linears():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def fsdp_by_torch(path):
    """Return a module as `fully_shard` leaves it: with another class."""
    wrapped = two_linears()
    part = wrapped.get_submodule(path)
    part.__class__ = type("FSDPPart", (FSDPModule, type(part)), {})
    return wrapped


def by_data_parallel():
    return nn.Sequential(nn.DataParallel(two_linears()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(fsdp_by_torch, ""), r"got FSDPPart at ''\. Give the module before fully_shard"),
        (partial(fsdp_by_torch, "1"), r"got FSDPPart at '1'\."),
        (by_data_parallel, r"got DataParallel at '0'\. .* model.module"),
    ],
    ids=["fully_shard", "fully_shard of a layer", "parallel"],
)
def test_boosting_a_module_wrapped_by_torch_raises(make, message):
    for act in (fs.Booster().boost, lambda one: fs.Booster().init(one, sgd(one), nn.MSELoss())):
        with pytest.raises(fs.errors.ModuleError, match=message):
            fs.run(lambda act=act: act(make()), mesh=fs.make_mesh({"data": 1}))


def wrapped_on_processes():
    """Return the errors of modules that torch has wrapped by its own process group."""
    mesh = fs.mesh.to_device_mesh(fs.make_mesh({"data": 2}))
    sharded = two_linears()
    fully_shard(sharded[0], mesh=mesh)
    modules = [nn.parallel.DistributedDataParallel(two_linears()), sharded, two_linears()]
    distribute_module(modules[2], mesh)
    return [text_of(lambda one=one: fs.Booster().boost(one)) for one in modules]


def text_of(act):
    with pytest.raises(fs.errors.ModuleError) as error:
        act()
    return str(error.value)


def test_boosting_a_module_wrapped_on_processes_raises(two):
    expected = "DistributedDataParallel at ''", "FSDPLinear at '0'", "Linear at '0'"
    for texts in two.run(wrapped_on_processes):
        assert all(f"got {part}. Give" in text for part, text in zip(expected, texts, strict=True))


STALE = {
    "call": (lambda old, opt: old(torch.ones(2, 3)), fs.errors.ModuleError, "the first value that boost returned"),
    "layer": (lambda old, opt: old[2](torch.ones(2, 4)), fs.errors.ModuleError, "the first value that boost returned"),
    "copy": (lambda old, opt: copy.deepcopy(old), fs.errors.ModuleError, "model.unwrap() is a copy"),
    "save": (lambda old, opt: pickle.dumps(old.state_dict()), fs.errors.ModuleError, "model.unwrap() is a copy"),
    "write": (lambda old, opt: nn.init.zeros_(old[0].weight), fs.errors.ModuleError, "the first value that boost"),
    "step": (lambda old, opt: opt.step(), fs.errors.OptimizerError, "the second value that boost returned"),
}


def use_stale_values(plugin, kind):
    """Return the errors of the values given to `boost`, before the first step and after two."""
    old = model()
    before = copy.deepcopy(old)
    old_opt = kind(old.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(old_opt, 1)
    booster = fs.Booster(plugin)
    boosted, opt, *_ = booster.boost(old, old_opt)
    found = [errors_of_stale(old, old_opt)]
    for _ in range(2):
        if plugin.in_stages():
            booster.execute_pipeline(iter([(torch.ones(4, 3), None)]), boosted, lambda y, _: y.mean(), opt)
        else:
            booster.backward(boosted(torch.ones(2, 3)).mean(), opt)
        opt.step(), opt.zero_grad(), schedule.step()
    assert [*old.state_dict()] == [*before.state_dict()]
    assert "Placeholder(float32[4, 3])" in repr(old[0].weight)
    assert sum(x.numel() for x in old.parameters()) == sum(x.numel() for x in before.parameters())
    assert not torch.equal(boosted.unwrap()[2].bias, before[2].bias)
    return [*found, errors_of_stale(old, old_opt)]


def errors_of_stale(old, opt):
    found = {}
    for name, (use, kind, message) in STALE.items():
        with pytest.raises(kind, match=re.escape(message)):
            use(old, opt)
        found[name] = True
    return found


@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, lr=0.1), Sign], ids=["torch", "own class"])
@pytest.mark.parametrize(
    "plugin",
    [fs.DDPPlugin(), fs.FSDPPlugin(), fs.HybridParallelPlugin(pipeline=2, microbatches=2)],
    ids=["ddp", "fsdp", "stages"],
)
def test_values_given_to_boost_raise_and_name_those_returned(plugin, kind):
    mesh = fs.make_mesh({"data": 1, "pipe": 2} if plugin.in_stages() else {"data": 2})
    found = fs.run(use_stale_values, plugin, kind, mesh=mesh)
    assert found == [[dict.fromkeys(STALE, True)] * 2] * 2


def test_values_given_to_boost_raise_on_processes(two):
    assert two.run(use_stale_values, fs.FSDPPlugin(), Sign) == [[dict.fromkeys(STALE, True)] * 2] * 2


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, order=range(4)):
        for number in order:
            x = self.layers[number](x).tanh()
        return x


def evaluate_in_orders(orders):
    """Evaluate with the layers in one order on each device; return the error of the next step."""
    booster = fs.Booster(fs.FSDPPlugin(mesh=fs.make_mesh({"data": 2}), unit="layers[*]"))
    net = Ordered()
    net, opt, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with torch.no_grad():
        net(torch.ones(2, 3), orders[fs.axis_index("data")])
    booster.backward(net(torch.ones(2, 3)).mean(), opt)
    try:
        opt.step()
    except fs.errors.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("orders", [[(1, 2), (1, 2)], [(1, 2), (2, 1)], [(1,), (2,)]], ids=str)
def test_evaluation_of_other_layers_on_one_device_raises_in_the_next_step(orders):
    """Layers of one size would be mixed up in silence: their all-gathers are paired by order."""
    for text in fs.run(evaluate_in_orders, orders, mesh=fs.make_mesh({"data": 2})):
        assert ("devices gathered different units" in text) == (orders[0] != orders[1])
