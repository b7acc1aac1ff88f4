"""Misuse of the Booster raises one error with its fix.

A row of a table is a function, with or without a loop of a boosted model, and a text of the error.
"""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_module
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.errors import FshardError, MismatchError, ModuleError, OptimizerError
from tests.booster.loops import PLUGINS, Loop, mesh_of, on_devices


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Sign(torch.optim.Optimizer):
    """An optimizer of the user's own class, which steps itself."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for x in self.param_groups[0]["params"]:
            if x.grad is not None:
                x.add_(x.grad.sign(), alpha=-0.1)


def own_class(module):
    return Sign(module.parameters())


def stepped(cls, **options):
    """Return a module and its optimizer, which has taken a step."""
    module = model()
    opt = cls(module.parameters(), lr=0.1, **options)
    module(torch.ones(2, 3)).sum().backward()
    opt.step()
    return module, opt


class Reentrant(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


class Eager(torch.optim.SGD):
    """Makes its state in the constructor."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for p in self.param_groups[0]["params"]:
            self.state[p]["mean"] = torch.zeros_like(p)


def wrapped_by_fsdp(path):
    """Return a module as `fully_shard` leaves it: with another class."""
    module = model()
    layer = module.get_submodule(path)
    layer.__class__ = type("FSDPPart", (FSDPModule, type(layer)), {})
    return module


def boost(*args):
    return fs.Booster().boost(*args)


def boost_own(module, make=sgd):
    return boost(module, make(module))


def init(module):
    return fs.Booster().init(module, sgd(module), nn.MSELoss())


def unboosted_optimizer(loop):
    module = model()
    opt = sgd(module)
    boosted, *_ = boost(module, opt)
    loop.booster.backward(boosted(X).mean(), opt)


def after_a_step(loop):
    loop.backward(loop.model(X).mean())
    loop.step()
    loop.model(X).mean().backward()


def torch_clips(loop):
    loop.backward(loop.model(X).mean())
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def clips_groups(loop):
    loop.backward(loop.model(X).mean())
    params = []
    for group in loop.opt.param_groups:
        params += group["params"]
    nn.utils.clip_grad_norm_(params, 1.0)


def freezes_in_a_step(loop):
    loop.model(X)
    loop.model.module[0].requires_grad_(False)


def own_learning_rate(loop):
    loop.opt.param_groups[0]["lr"] = 0.1 + fs.axis_index("data")
    loop.backward(loop.model(X).mean())
    loop.opt.step()


def writes_in_the_loop(loop):
    loss = loop.model(X).mean()
    with torch.no_grad():
        next(loop.model.parameters()).mul_(0.5)
    loop.backward(loss)


def sets_a_gradient(loop):
    next(loop.model.parameters()).grad = X


def executes_a_pipeline(loop):
    loop.booster.execute_pipeline(iter([]), loop.model, nn.MSELoss())


def backward_of(make_loss):
    """Return a function that runs a backward of the loss of a result."""

    def call(loop):
        y = loop.model(X)
        loop.backward(make_loss(y))

    return call


def without_memory():
    boost(nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")))


def eager_state_of_a_lazy_layer():
    boost_own(nn.Sequential(fs.lazy(nn.Linear, 4, 4)), lambda model: Eager(model.parameters()))


def search():
    boost_own(model(), lambda model: torch.optim.LBFGS(model.parameters()))


X = torch.ones(5, 3)
BOOSTED, FIXED = "has been boosted already", "which it had before functionalize or boost"
HOOKS = "Gradient hooks of parameters would not be called"
NUMBER = "the loss must be a tensor of one number"
COPY = "a boosted optimizer is sharded, so it cannot be copied or pickled"
OF_BOOST = {
    "no optimizer": (lambda: boost(model(), "adamw"), "boost: str is no pair of init and update"),
    "a class": (lambda: boost(model(), torch.optim.SGD), "SGD is no pair of init and update"),
    "another model's": (
        lambda: boost(model(), sgd(model())),
        r"param_groups\[0\] are tensors that are no parameters of",
    ),
    "a search": (
        search,
        "LBFGS.*calls the loss function",
    ),
    "a function": (
        lambda: boost(model),
        "boost: the model is a module, not function: for a function there is",
    ),
    "no model": (lambda: boost(None), "model must be a module, or a list of layers; got None"),
    "a number": (
        lambda: boost([nn.ReLU(), 3]),
        r"layers must be modules and functions; got layers\[1\] is int",
    ),
    "no memory": (
        without_memory,
        r"0.weight, 0.bias, 1.weight, 1.bias must be described; .* Make its layer by fs.lazy",
    ),
    "a lazy module": (
        lambda: boost(nn.Sequential(nn.LazyLinear(3))),
        "0.weight, 0.bias must have a shape; .*Run it once",
    ),
    "Adam has stepped": (
        lambda: boost(*stepped(torch.optim.Adam)),
        "has taken steps already.*before its first step",
    ),
    "SGD has stepped": (
        lambda: boost(*stepped(torch.optim.SGD, momentum=0.9)),
        "has taken steps already",
    ),
    "state without memory": (
        eager_state_of_a_lazy_layer,
        r"Eager: state of a lazy parameter must be made in step\(\), .* got 'mean' without memory",
    ),
    "fully_shard": (
        lambda: boost_own(wrapped_by_fsdp("")),
        r"got FSDPPart at ''\. Give the module before fully_shard",
    ),
    "fully_shard of a layer": (lambda: init(wrapped_by_fsdp("2")), r"got FSDPPart at '2'\."),
    "DataParallel": (
        lambda: boost_own(nn.Sequential(nn.DataParallel(model()))),
        r"DataParallel at '0'\. .* model.module",
    ),
}

OF_A_BOOSTED_MODEL = {
    "boosted: both": (lambda loop: boost(loop.model, loop.opt), BOOSTED),
    "boosted: the model": (lambda loop: boost(loop.model), BOOSTED),
    "boosted: its module": (lambda loop: boost(loop.model.module), BOOSTED),
    "boosted: the optimizer": (lambda loop: boost(model(), loop.opt), BOOSTED),
    "boosted: by init": (lambda loop: init(loop.model), BOOSTED),
    "optimizer of torch": (
        unboosted_optimizer,
        "optimizer must be what boost has returned; got SGD",
    ),
    "backward of torch": (
        after_a_step,
        r"loss.backward\(\) reached sharded parameters.* Call booster.backward\(loss, opt",
    ),
    "clipping of torch": (
        torch_clips,
        r"its parameters have no .grad. Clip them by booster.clip_grad_norm\(optimizer, m",
    ),
    "clipping of the groups": (clips_groups, r"its parameters have no .grad. Clip them by"),
    "a gradient": (
        sets_a_gradient,
        "its parameters have no .grad",
    ),
    "freezing": (lambda loop: loop.model.requires_grad_(False), FIXED),
    "freezing in a step": (freezes_in_a_step, FIXED),
    "a hook": (lambda loop: loop.model.module[0].weight.register_hook(print), HOOKS),
    "writing": (
        writes_in_the_loop,
        r"the loop before the optimizer's step, writes to .*model.load_state_dict",
    ),
    "no stages": (
        executes_a_pipeline,
        "the model must be cut into stages, by HybridParallelPlugin",
    ),
    "no forward": (
        lambda loop: loop.backward(torch.ones((), requires_grad=True)),
        "must be called after the last step",
    ),
    "no graph": (backward_of(lambda y: torch.ones(())), NUMBER),
    "many losses": (backward_of(lambda y: y), NUMBER),
    "a float": (backward_of(lambda y: 1.0), NUMBER),
    "no gradients": (
        lambda loop: loop.opt.step(),
        "there are no gradients. Call the model, then booster.backward",
    ),
    "deepcopy": (lambda loop: copy.deepcopy(loop.opt), COPY),
    "copy": (lambda loop: copy.copy(loop.opt), COPY),
    "pickle": (lambda loop: pickle.dumps(loop.opt), COPY),
    "reentrant": (
        lambda loop: boost(Reentrant(3, 3))[0](X),
        r"reentrant checkpoint.*use_reentrant=False",
    ),
}
INVALID = {**OF_BOOST, **OF_A_BOOSTED_MODEL}


@pytest.mark.parametrize("name", INVALID)
def test_misuse_raises(name):
    call, message = INVALID[name]
    needs_loop = name in OF_A_BOOSTED_MODEL

    def main():
        if needs_loop:
            call(Loop(model, fs.DDPPlugin(), sgd))
        else:
            call()

    with pytest.raises((FshardError, ValueError, TypeError), match=message):
        fs.run(main, mesh=fs.make_mesh({"data": 1}))


def test_boost_outside_or_of_a_shared_module_raises():
    mesh = fs.make_mesh({"data": 2})
    shared = model()
    message = r"a loop must run as one device of .*\. Call it inside of fs.run\(main, mesh=mesh\), or under torchrun"
    for call in (
        lambda booster: booster.boost(model()),
        lambda booster: booster.mean(torch.ones(())),
    ):
        with pytest.raises(fs.errors.ScopeError, match=message):
            call(fs.Booster(fs.DDPPlugin(mesh=mesh)))
    with pytest.raises(ModuleError, match=BOOSTED):
        fs.run(lambda: boost(shared), mesh=mesh)


def errors_on_processes():
    """Return the errors of modules that torch has wrapped by its own process group."""
    mesh = fs.mesh.to_device_mesh(fs.make_mesh({"data": 2}))
    sharded = model()
    distributed = model()
    fully_shard(sharded[0], mesh=mesh)
    distribute_module(distributed, mesh)
    texts = []
    for module in (nn.parallel.DistributedDataParallel(model()), sharded, distributed):
        with pytest.raises(ModuleError) as error:
            boost(module)
        texts.append(str(error.value))
    return texts


def test_boosting_a_module_wrapped_on_processes_raises(two):
    for of_ddp, of_fsdp, of_dtensor in two.run(errors_on_processes):
        assert "got DistributedDataParallel at ''. Give" in of_ddp
        assert "got FSDPLinear at '0'. Give" in of_fsdp
        assert "got Linear at '0'. Give" in of_dtensor


def test_other_learning_rates_on_each_device_raise():
    def main():
        own_learning_rate(Loop(model, fs.DDPPlugin(), sgd))

    message = r"options of the optimizer's groups must be the same.*booster.mean\(loss\)"
    with pytest.raises(MismatchError, match=message):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_gradient_that_is_set_under_a_plan_raises_like_the_others():
    def main():
        plugin = fs.HybridParallelPlugin(tensor=2, sample=torch.ones(4, 3))
        loop = Loop(model, plugin, sgd)
        weight, errors = loop.module[0].weight, []
        loop.model(torch.ones(4, 3))
        for param in (weight, loop.module[0].weight):  # a placeholder, and one in a step
            with pytest.raises(ModuleError) as error:
                param.grad = torch.ones(4, 3)
            errors.append(str(error.value))
        return errors

    for errors in fs.run(main, mesh=fs.make_mesh({"tensor": 2})):
        assert all("its parameters have no .grad" in text for text in errors)


# -- the values given to boost, used afterwards ----------------------------------------------------


FIRST_VALUE = "the first value that boost returned"
A_COPY = "model.unwrap() is a copy"
WRITTEN = "with booster.parameters(model) as shards: ...; or full values: model.load_state_dict("


def replaces_data(old, opt):
    old[0].weight.data = torch.zeros(4, 3)


STALE = {
    "call": (lambda old, opt: old(torch.ones(2, 3)), ModuleError, FIRST_VALUE),
    "layer": (lambda old, opt: old[2](torch.ones(2, 4)), ModuleError, FIRST_VALUE),
    "copy": (lambda old, opt: copy.deepcopy(old), ModuleError, A_COPY),
    "save": (lambda old, opt: pickle.dumps(old.state_dict()), ModuleError, A_COPY),
    "write": (lambda old, opt: nn.init.zeros_(old[0].weight), ModuleError, WRITTEN),
    "data": (replaces_data, ModuleError, WRITTEN),
    "step": (lambda old, opt: opt.step(), OptimizerError, "the second value that boost returned"),
}


@pytest.mark.parametrize("optimizer", [sgd, own_class])
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "stages"])
def test_values_given_to_boost_raise_and_name_those_returned(plugin, optimizer):
    """Before the first step and after two; schedulers of the optimizer work."""

    def main():
        old = model()
        before = copy.deepcopy(old)
        old_opt = optimizer(old)
        schedule = torch.optim.lr_scheduler.StepLR(old_opt, 1)
        options = {"criterion": lambda y, _: y.mean()}
        loop = Loop(lambda: old, PLUGINS[plugin](), lambda _: old_opt, **options)
        for steps in (0, 2):
            for _ in range(steps):
                loop.step(torch.ones(4, 3))
                schedule.step()
            for use, kind, message in STALE.values():
                with pytest.raises(kind, match=re.escape(message)):
                    use(old, old_opt)

        # The old module has the names and shapes of before, and no values.
        assert [*old.state_dict()] == [*before.state_dict()]
        assert [x.shape for x in old.parameters()] == [x.shape for x in before.parameters()]
        assert "Placeholder(float32[4, 3])" in repr(old[0].weight)
        return torch.equal(loop.state()["2.bias"], before[2].bias)

    assert fs.run(main, mesh=mesh_of(PLUGINS[plugin](), 2)) == [False, False]


# -- devices that run other layers -----------------------------------------------------------------


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, order=range(4)):
        for number in order:
            x = self.layers[number](x).tanh()
        return x


@pytest.mark.parametrize("orders", [[(1, 2), (1, 2)], [(1, 2), (2, 1)], [(1,), (2,)]], ids=str)
def test_evaluation_of_other_layers_on_one_device_raises_in_the_next_step(orders):
    """Layers of one size would be mixed up in silence: their all-gathers are paired by order."""

    def body(loop):
        with torch.no_grad():
            loop.model(torch.ones(2, 3), orders[fs.axis_index("data")])
        loop.backward(loop.model(torch.ones(2, 3)).mean())
        try:
            loop.step()
        except MismatchError as error:
            return "devices gathered different units" in str(error)
        return False

    results = on_devices(body, fs.FSDPPlugin(unit="layers[*]"), 2, Ordered)
    assert results == [orders[0] != orders[1]] * 2


@pytest.mark.parametrize("name", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_around_the_step_of_a_boosted_optimizer_raise(name):
    with pytest.raises(OptimizerError, match="Call the function before or after optimizer.step"):
        on_devices(lambda loop: getattr(loop.opt, name)(lambda *_: None), fs.DDPPlugin(), 2, model)


@pytest.mark.parametrize("plugin", [fs.DDPPlugin(), fs.ZeroPlugin(stage=2), fs.FSDPPlugin()])
@pytest.mark.parametrize("read", ["reduce", "clip by norm", "clip by value"])
def test_backward_after_gradients_are_read_raises(plugin, read):
    def body(loop):
        loop.backward(loop.model(X).sum())
        if read == "reduce":
            loop.opt.reduce_gradients()
        elif read == "clip by norm":
            loop.opt.clip_grad_by_norm(1.0)
        else:
            loop.opt.clip_grad_by_value(1.0)
        with pytest.raises(OptimizerError, match="all losses of a step must come before"):
            loop.backward(loop.model(X).sum())
        loop.opt.zero_grad()
        loop.backward(loop.model(X).sum())
        loop.opt.step()

    on_devices(body, plugin, 2, model)


def test_gradients_are_read_by_a_method_that_communicates():
    def body(loop):
        loop.backward(loop.model(X).sum())
        with pytest.raises(AttributeError, match="reduce_gradients"):
            _ = loop.opt.grads
        grads = loop.opt.reduce_gradients()
        assert loop.opt.reduce_gradients() is grads
        return {name: fs.unshard(g).shape for name, g in grads.items()}

    (shapes, _) = on_devices(body, fs.ZeroPlugin(stage=2), 2, model)
    assert shapes["0.weight"] == (4, 3)


@pytest.mark.parametrize("plugin", ["fsdp", fs.FSDPPlugin, {"stage": 3}], ids=str)
def test_booster_of_no_plugin_raises_with_the_way_out(plugin):
    with pytest.raises(
        TypeError, match=r"plugin must be a plugin, such as fs.FSDPPlugin\(\).*; got"
    ):
        fs.Booster(plugin)
