"""Models that keep things as research code does: in branches, beside what they compute, in classes with rules of their own.

What they keep depends on no data, or is a mean of it, so every plugin has to find the losses of torch's loop on the whole batch, without a warning.
"""

import copy
import warnings
from contextlib import suppress
from functools import partialmethod
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import fshard as fs
from tests.loops import momentum

STEPS, ROWS, WIDTH = 5, 8, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.n = nn.Linear(WIDTH, WIDTH), 0
        self.setup()

    def setup(self):
        pass

    def cached(self, x):
        return torch.full((WIDTH,), 1 / (1 + self.n), dtype=x.dtype)


class Refreshed(Layer):
    """Sets what it reads in every third call alone."""

    def setup(self):
        self.cache = None

    def forward(self, x):
        if self.n % 3 == 0:
            self.cache = self.cached(x)
        self.n += 1
        return self.layer(x) * self.cache


class WarmedUp(Layer):
    """Stops setting what it goes on reading."""

    def setup(self):
        self.cache = None

    def forward(self, x):
        if self.n <= 2:
            self.cache = self.cached(x)
        self.n += 1
        return self.layer(x) * self.cache


class Late(Layer):
    """Begins to set what it has read from the start."""

    def setup(self):
        self.cache = 1.0

    def forward(self, x):
        if self.n > 0:
            self.cache = 1 / (2 + self.n)
        self.n += 1
        return self.layer(x) * self.cache


class Early(Late):
    """Stops setting a number that it goes on reading."""

    def forward(self, x):
        self.n += 1
        if self.n <= 2:
            self.cache = 1 / (1 + self.n)
        return self.layer(x) * self.cache


class Alternating(Layer):
    """Sets in one call what it reads in the next."""

    def setup(self):
        self.cache = 1.0

    def forward(self, x):
        self.n += 1
        if self.n % 2:
            self.cache = 1 / (1 + self.n)
            return self.layer(x)
        return self.layer(x) * self.cache


class Flagged(Layer):
    """Has an attribute every other time."""

    def forward(self, x):
        y = self.layer(x)
        if hasattr(self, "flag"):
            y = y * 2 * self.flag
            del self.flag
        else:
            self.flag = 1
        return y


class Lazy(Layer):
    """Makes a tensor, a function, a shape and a name in its first call."""

    def setup(self):
        self.table = self.function = self.shape = self.name = None

    def forward(self, x):
        if self.table is None:
            self.table, self.function = torch.full((WIDTH,), 0.5, dtype=x.dtype), lambda t: t * 2
            self.shape, self.name = (2, WIDTH // 2), "made"
        y = self.function(self.layer(x) * self.table).unflatten(1, self.shape).flatten(1)
        return y * (1 if self.name == "made" else 0)


class Logging(Layer):
    """Leaves behind what somebody may want to look at."""

    def setup(self):
        self.norm = 0.0

    def forward(self, x):
        y = self.layer(x)
        self.norm, self.given, self.mean, self.shape = y.detach().norm().item(), x, y.mean(), tuple(x.shape)
        return y


class Exact(Layer):
    """Asks whether it is just this class."""

    def forward(self, x):
        self.n += 1
        return self.layer(x) * (1 + 0.1 * self.n) * (2 if type(self) is Exact else 1) * FACTORS[type(self)]


FACTORS = {Exact: 0.5}


class Superior(Exact):
    """Calls super() the short way that breaks in subclasses."""

    def forward(self, x):
        self.n += 1
        return super(type(self), self).forward(x)


FACTORS[Superior] = 1.5


class Registered(Layer):
    """Whose subclasses have to have a name, once."""

    names: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, name):
        assert name not in Registered.names
        Registered.names.append(name)


class Named(Registered, name="named"):
    def forward(self, x):
        self.n += 1
        return self.layer(x) * self.n


class Limited(Layer):
    """Whose attribute is a property."""

    @property
    def n(self):
        return vars(self)["n"]

    @n.setter
    def n(self, value):
        vars(self)["n"] = min(value, 2)

    def forward(self, x):
        y = self.layer(x) * (1 + 0.1 * self.n)
        self.n = self.n + 1
        return y


class Direct(Layer):
    """Reads by its dict what it sets as an attribute."""

    def forward(self, x):
        self.last = self.__dict__.get("last", 0) + 1
        return self.layer(x) * self.last


class Copying(Layer):
    """Sets an attribute of a copy, which is of the same class."""

    def forward(self, x):
        other = copy.copy(self)
        other.n = 7
        self.n += 1
        return self.layer(x) * self.n


class Writing(Layer):
    """Keeps a tensor in a layer of torch's."""

    def forward(self, x):
        last = getattr(self.layer, "last", None)
        self.layer.last = torch.full((WIDTH,), 0.5, dtype=x.dtype) if last is None else last * 1.5
        return self.layer(x) * self.layer.last


class Defaulted(Layer):
    """Whose count begins in its class."""

    count = 1

    def forward(self, x):
        self.count += 1
        return self.layer(x) * self.count * type(self).count


class Registering(Layer):
    """Makes a buffer in the place of an attribute."""

    def setup(self):
        self.cache = None

    def forward(self, x):
        if self.cache is None:
            del self.cache
            self.register_buffer("cache", self.cached(x))
        return self.layer(x) * self.cache


class Dispatching(Layer):
    """Finds its method by a part of its name."""

    def forward(self, x, mode="train"):
        return getattr(self, f"forward_{mode}")(x)

    def forward_train(self, x):
        y = self.layer(x) * (1 + self.n)
        self.n = 0.5 * self.n + 1
        return y


class Bound(Dispatching):
    """Holds its method."""

    def setup(self):
        self.function = self.forward_train

    def forward(self, x):
        return self.function(x)


class Partial(Dispatching):
    """Has a method that is another one with some arguments."""

    def scaled(self, x, scale):
        return self.forward_train(x) * scale

    halved = partialmethod(scaled, scale=0.5)

    def forward(self, x):
        return self.halved(x)


class Operating(Layer):
    """Is used as Python alone uses it."""

    def __getitem__(self, i):
        return self.n + i

    def __matmul__(self, x):
        return self.layer(x) * self[1]

    def forward(self, x):
        y = self @ x
        self.n = 0.5 * self[0] + 1
        return y


class Trying(Layer):
    """Goes on with what it has if it fails."""

    def setup(self):
        self.cache = 1.0

    def compute(self, x):
        self.n += 1
        if self.n % 2:
            raise ValueError
        return x.mean().item()

    def forward(self, x):
        try:
            self.cache = self.compute(x)
        except ValueError:
            self.n += 0
        return self.layer(x) * (self.cache if self.n % 2 else 1)


class Suppressing(Trying):
    def forward(self, x):
        with suppress(ValueError):
            self.cache = self.compute(x)
        return self.layer(x) * (self.cache if self.n % 2 else 1)


class Choosing(Layer):
    """Has its methods in a table, of which it calls one."""

    def setup(self):
        self.cache = 1.0

    def set(self, x):
        self.cache = 1 / (1 + self.n)
        return self.layer(x)

    def use(self, x):
        return self.layer(x) * self.cache

    def forward(self, x):
        function = {0: self.set, 1: self.use}[self.n % 2]
        self.n += 1
        return function(x)


class Generating(Layer):
    """Makes a generator that sets something when it is used."""

    def parts(self, x):
        self.n = self.n_of_step + 1
        yield self.layer(x)

    def setup(self):
        self.n_of_step = 0

    def forward(self, x):
        parts = self.parts(x)
        scale = 1 + self.n
        self.n_of_step += 1
        return sum(parts) * scale


class Static(Layer):
    """Sets something of another object."""

    @staticmethod
    def prepare(other):
        other.n = 3

    def forward(self, x):
        self.prepare(SimpleNamespace())
        y, self.steps = self.layer(x) * (1 + self.n), getattr(self, "steps", 0) + 1
        self.n = 1 / self.steps
        return y


def plain(function):
    def call(self, *args):
        return function(self, *args)

    return call


class Decorated(Layer):
    """Whose decorator does not say what it has decorated."""

    @plain
    def forward(self, x):
        y = self.layer(x) * (1 + self.n)
        self.n = 0.5 * self.n + 1
        return y

    def reset(self):
        self.n = 0


class Child(Layer):
    def setup(self):
        self.mean = 0.0

    def forward(self, x):
        self.n += 1
        self.mean = 1 / self.n
        return self.layer(x)


class Parent(Layer):
    """Reads of another module, by a name that tensors have too."""

    def setup(self):
        self.child = Child()

    def forward(self, x):
        y = self.layer(x) * (1 + self.child.mean)
        return self.child(y)


class Augmented(Layer):
    """Only adds to what it keeps, and by the name of what tensors have."""

    def setup(self):
        self.T, self.sum = 1.0, 0.0

    def forward(self, x):
        self.T *= 0.9
        self.sum += 2
        return self.layer(x)


KINDS = [
    Dispatching,
    Bound,
    Partial,
    Operating,
    Trying,
    Suppressing,
    Choosing,
    Generating,
    Static,
    Decorated,
    Parent,
    Augmented,
    Refreshed,
    WarmedUp,
    Late,
    Early,
    Alternating,
    Flagged,
    Lazy,
    Logging,
    Exact,
    Superior,
    Named,
    Limited,
    Direct,
    Copying,
    Writing,
    Defaulted,
    Registering,
]


def make(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind(), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def batch(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(y, _):
    return y.square().mean()


def nothing(module, step):
    pass


def serial(kind, between=nothing):
    model, losses = make(kind), []
    opt = momentum(model)
    for step in range(STEPS):
        loss = loss_of(model(batch(step)), None)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        between(model, step)
    return losses, model


def loop(kind, plugin, between=nothing):
    model, losses = make(kind), []
    booster = fs.Booster(plugin=plugin)
    model, opt, *_ = booster.boost(model, momentum(model))
    for step in range(STEPS):
        loss = loss_of(model(batch(step).chunk(fs.axis_size("data"))[fs.axis_index("data")]), None)
        booster.backward(loss, opt)
        opt.step()
        opt.zero_grad()
        losses.append(fs.pmean(loss.detach(), "data").item())
        between(model.module, step)
    return losses, model


def in_stages(kind, plugin, between=nothing):
    model, losses = make(kind), []
    booster = fs.Booster(plugin=plugin)
    model, opt, loss, *_ = booster.boost(model, momentum(model), loss_of)
    for step in range(STEPS):
        x = batch(step)
        losses.append(booster.execute_pipeline(iter([(x, x)]), model, loss, opt)["loss"].item())
        opt.step()
        opt.zero_grad()
        between(model.module, step)
    return losses, model


def functional(kind, plugin):
    booster = fs.Booster(plugin=plugin)
    state, losses = booster.init(model := make(kind), momentum(model), loss_of), []
    for step in range(STEPS):
        x = batch(step)
        state, metrics = booster.step(state, (x, x))
        losses.append(metrics["loss"].item())
    return losses, None


WAYS = {
    "ddp": (loop, lambda: fs.DDPPlugin(), {"data": 2}),
    "fsdp": (loop, lambda: fs.FSDPPlugin(), {"data": 2}),
    "alone": (loop, lambda: fs.DDPPlugin(), {"data": 1}),
    "reproducible": (loop, lambda: fs.DDPPlugin(reproducible=True), {"data": 2}),
    "stages": (in_stages, lambda: fs.HybridParallelPlugin(pipeline=2, microbatches=2), {"pipe": 2}),
    "stages and data": (in_stages, lambda: fs.HybridParallelPlugin(pipeline=2, microbatches=2), {"pipe": 2, "data": 2}),
    "functional": (functional, lambda: fs.ZeroPlugin(stage=1), {"data": 2}),
    "functional stages": (functional, lambda: fs.HybridParallelPlugin(pipeline=2, microbatches=2), {"pipe": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_is_as_in_torch(kind, way):
    run, plugin, mesh = WAYS[way]
    expected, _ = serial(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for losses, _ in fs.run(lambda: run(kind, plugin()), mesh=fs.make_mesh(mesh)):
            torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)
    assert Registered.names == ["named"] and Defaulted.__dict__["count"] == 1 and "n" not in vars(Exact)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Lazy])  # whose name is left behind
def test_buffers_are_all_that_is_remembered(kind):
    module, x = make(kind), batch(0)
    apply, params, start = fs.functionalize(module)
    buffers, outputs = start, []
    for _ in range(STEPS):
        again, _, _ = fs.functionalize(module)
        output, after = apply(params, buffers, x)
        for other in (again, apply):
            found, _ = other(params, buffers, x)
            assert torch.equal(found, output)
        outputs, buffers = [*outputs, output], after
    output, _ = apply(params, start, x)
    assert torch.equal(output, outputs[0])


class Coding(Layer):
    """Keeps activations from one call of a step to the next."""

    def setup(self):
        self.memory = None

    def forward(self, x, encode=True):
        if encode:
            self.memory = torch.tanh(self.layer(x))
            return self.memory * 1.0
        return self.layer(x) * self.memory.detach()


@pytest.mark.filterwarnings("ignore:memory is kept from call to call, and seems to have a row for each sample")
@pytest.mark.parametrize("way", ["alone", "ddp", "fsdp", "reproducible"])
def test_what_one_call_of_a_step_keeps_for_another(way):
    _, plugin, mesh = WAYS[way]

    def run(model, opt, backward, part):
        losses = []
        for step in range(STEPS):
            x = part(batch(step))
            loss = (model(x) if step < 2 else model(x) + model(x, encode=False)).square().mean()
            backward(loss, opt)
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        return losses

    def make():
        torch.manual_seed(0)
        return Coding().double()

    def main():
        booster = fs.Booster(plugin=plugin())
        model, opt, *_ = booster.boost(model := make(), momentum(model))
        part = run(model, opt, booster.backward, lambda x: x.chunk(fs.axis_size("data"))[fs.axis_index("data")])
        return [fs.pmean(loss, "data").item() for loss in part]

    model = make()
    expected = run(model, momentum(model), lambda loss, _: loss.backward(), lambda x: x)
    for losses in fs.run(main, mesh=fs.make_mesh(mesh)):
        torch.testing.assert_close(losses, [loss.item() for loss in expected], rtol=1e-9, atol=1e-10)


class Naming(Layer):
    """Goes on by what is no number."""

    def setup(self):
        self.scales, self.activation = (1.0,), torch.tanh

    def forward(self, x):
        y = self.activation(self.layer(x)) * self.scales[0]
        self.scales, self.activation = (
            (self.scales[0] * 0.5,),
            torch.relu if self.activation is torch.tanh else torch.tanh,
        )
        return y


def test_what_goes_on_by_what_is_no_number_is_told():
    apply, params, buffers = fs.functionalize(make(Naming))
    _, buffers = apply(params, buffers, batch(0))
    with pytest.warns(UserWarning, match="^Naming.scales, Naming.activation was changed by a forward"):
        apply(params, buffers, batch(0))


class Comparing(Layer):
    """Compares its weight with what is the same weight."""

    def forward(self, x):
        other = getattr(self, "other", None)
        self.other = self.layer.weight.detach()
        return self.layer(x) + (0 if other is None else (other - self.layer.weight).abs().sum())


def test_what_refers_to_a_parameter_is_not_kept():
    apply, params, buffers = fs.functionalize(make(Comparing))
    _, buffers = apply(params, buffers, batch(0))
    assert not buffers
    with pytest.warns(UserWarning, match=r"^Comparing.other was changed by a forward"):
        apply(params, buffers, batch(0))


def in_forward(module, step):
    module[0].forward = lambda x: x * step


def test_a_forward_that_is_replaced_counts():
    for way in ("alone", "reproducible"):
        expected, found = with_changes(way, in_forward)
        for losses in found:
            torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)


def with_changes(way, between):
    """Return what a loop finds in which something is done to the model between its steps, and what torch's does."""
    run, plugin, mesh = WAYS[way]
    expected, _ = serial(Scaled, between)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return expected, fs.run(lambda: run(Scaled, plugin(), between)[0], mesh=fs.make_mesh(mesh))


class Scaled(Layer):
    """Reads a number in an object, in a dict and in a list; and what was left."""

    def setup(self):
        self.options, self.table, self.row = SimpleNamespace(scale=1.0), {"inner": {"scale": 1.0}}, [1.0]
        self.norm, self.factor = 0.0, torch.ones(WIDTH, dtype=torch.float64)

    def forward(self, x):
        y = self.layer(x) * self.options.scale * self.table["inner"]["scale"] * sum(self.row) * self.factor
        self.norm, self.n = y.detach().norm().item(), self.n + 1
        self.factor = self.factor * 1.5
        return y * self.n


def in_object(module, step):
    module[0].options.scale = 1 / (2 + step)


def in_dict(module, step):
    module[0].table["inner"]["scale"] = 1 / (2 + step)


def in_list(module, step):
    module[0].row.append(0.5)


def in_kept(module, step):
    module[0].factor.mul_(0.5)


def in_count(module, step):
    module[0].n += 5


def in_number(module, step):
    module[0].options = SimpleNamespace(scale=0.5 + step)


@pytest.mark.parametrize("between", [in_object, in_dict, in_list, in_kept, in_count, in_number])
@pytest.mark.parametrize("way", ["alone", "ddp", "reproducible"])
def test_what_is_changed_within_an_attribute_counts_from_the_next_call_on(between, way):
    expected, found = with_changes(way, between)
    for losses in found:
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("between", [in_object, in_dict, in_list, in_kept, in_count, in_number])
@pytest.mark.parametrize("way", ["stages", "stages and data"])
def test_what_is_changed_counts_in_stages(between, way):
    expected, found = with_changes(way, between)
    for losses in found:
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("functional")])
def test_what_only_is_added_to_is_added_to(way):
    run, plugin, mesh = WAYS[way]
    expected = serial(Augmented)[1][0]

    def main():
        return run(Augmented, plugin())[1].unwrap()[0]

    for module in fs.run(main, mesh=fs.make_mesh(mesh)):
        torch.testing.assert_close((module.T, module.sum), (expected.T, expected.sum))


def test_what_is_left_behind_is_shown():
    def main():
        model, seen = make(Logging), []
        booster = fs.Booster(plugin=fs.DDPPlugin())
        model, opt, *_ = booster.boost(model, momentum(model))
        for step in range(STEPS):
            booster.backward(loss_of(model(batch(step)), None), opt)
            opt.step()
            opt.zero_grad()
            seen.append((model.module[0].norm, model.module[0].mean, model.module[0].given, model.module[0].shape))
        return seen

    (found,) = fs.run(main, mesh=fs.make_mesh({"data": 1}))
    model = make(Logging)
    opt = momentum(model)
    for step, (norm, mean, given, shape) in enumerate(found):
        loss_of(model(batch(step)), None).backward()
        opt.step()
        opt.zero_grad()
        torch.testing.assert_close((norm, mean), (model[0].norm, model[0].mean))
        assert mean.requires_grad and torch.equal(given, batch(step)) and shape == (ROWS, WIDTH)


# -- what hooks keep in torch's own layers ----------------------------------------------------------------------------


def averaged(layer, args, y):
    layer.seen = layer.seen * 0.9
    return y * layer.seen


def written(layer, args, y):
    layer.seen.mul_(0.9)
    return y * layer.seen


def toggled(layer, args, y):
    layer.seen = None if layer.seen is not None else torch.full((WIDTH,), 0.5, dtype=y.dtype)
    return y if layer.seen is None else y * layer.seen


def row_of_linears(hook):
    torch.manual_seed(0)
    row = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    for layer in row:
        layer.seen = torch.ones(WIDTH, dtype=torch.float64)
        layer.register_forward_hook(hook)
    return row


@pytest.mark.parametrize("hook", [averaged, written, toggled])
@pytest.mark.parametrize("stages", [False, True])
def test_what_hooks_keep_in_layers_of_torch_is_kept(hook, stages, recwarn):
    def xs(step):
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)

    def main():
        plugin = fs.HybridParallelPlugin(pipeline=2, microbatches=2) if stages else fs.DDPPlugin()
        row, booster = row_of_linears(hook), fs.Booster(plugin)
        model, opt, loss, *_ = booster.boost(row, momentum(row), lambda y, _: y.square().mean())
        losses = []
        for step in range(STEPS):
            if stages:
                found = booster.execute_pipeline(iter([(xs(step),) * 2]), model, loss, opt)["loss"]
            else:
                found = loss(model(xs(step)), None)
                booster.backward(found, opt)
            opt.step(), opt.zero_grad()
            losses.append(found.item())
        return losses

    plain, expected = row_of_linears(hook), []
    opt = momentum(plain)
    for step in range(STEPS):
        loss = plain(xs(step)).square().mean()
        loss.backward()
        opt.step(), opt.zero_grad()
        expected.append(loss.item())
    for losses in fs.run(main, mesh=fs.make_mesh({"pipe": 2} if stages else {"data": 1})):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)
    assert not recwarn
