"""Copies of modules: hooks, closures and patched methods go with them, and the original is left alone."""

import copy
import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.copying import copied

D = 4


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(D, D), nn.Linear(D, D), 1.0
        self.point()

    def forward(self, x):
        return self.b(self.a(x))


class Patched(Pair):
    def point(self):
        old = self.a.forward
        self.a.forward = lambda x: torch.tanh(old(x))


class Wrapped(Pair):
    def point(self):
        old = self.a.forward

        @functools.wraps(old)
        def forward(x):
            return old(x).tanh()

        self.a.forward = forward


class Table(Pair):
    def point(self):
        self.table = {"a": lambda x: self.a(x)}

    def forward(self, x):
        return self.b(self.table["a"](x))


class Row(Pair):
    def point(self):
        self.row = [lambda x: self.a(x), (lambda x: self.b(x), "b")]

    def forward(self, x):
        return self.row[1][0](self.row[0](x))


class Nested(Pair):
    def point(self):
        def inner(x):
            return self.a(x)

        self.outer = lambda x: inner(x) * 2

    def forward(self, x):
        return self.b(self.outer(x))


class Defaults(Pair):
    def point(self):
        self.first = lambda x, layer=self.a: layer(x)
        self.second = functools.partial(lambda x, *, layer: layer(x), layer=self.b)

    def forward(self, x):
        return self.second(self.first(x))


class Weak(Pair):
    def point(self):
        self.layer = weakref.ref(self.a)

    def forward(self, x):
        return self.b(self.layer()(x))


class HookList(Pair):
    def point(self):
        self.features = []
        self.a.register_forward_hook(lambda module, inputs, output: self.features.append(output))

    def forward(self, x):
        self.features = []
        y = self.b(self.a(x))
        return y + sum(x.square() for x in self.features)


class HookDict(Pair):
    def point(self):
        self.features = {}

        def save(name):
            def hook(module, inputs, output):
                self.features[name] = output

            return hook

        for name, layer in self.named_children():
            layer.register_forward_hook(save(name))

    def forward(self, x):
        return self.b(self.a(x)) + self.features["a"] ** 2


class PreHook(Pair):
    def point(self):
        self.a.register_forward_pre_hook(lambda module, inputs: (inputs[0] * self.gain,))

    def forward(self, x):
        self.gain = self.gain * 0.5
        return self.b(self.a(x))


class Helped(Pair):
    """A closure has an object that has the module."""

    def point(self):
        class Helper:
            def __init__(self, module):
                self.module, self.calls = module, []

            def run(self, x):
                return self.module.a(x)

        helper = Helper(self)
        self.run = lambda x: helper.run(x)

    def forward(self, x):
        return self.b(self.run(x))


class SharedList(Pair):
    """A closure has the list itself, and not the module that it is of."""

    def point(self):
        features = self.features = []
        self.a.register_forward_hook(lambda module, inputs, output: features.append(output))

    def forward(self, x):
        self.features.clear()
        return self.b(self.a(x)) + sum(x.square() for x in self.features)


class SharedDict(Pair):
    def point(self):
        self.features = {}
        save = functools.partial(lambda store, module, inputs, output: store.update(a=output), self.features)
        self.a.register_forward_hook(save)

    def forward(self, x):
        y = self.b(self.a(x))
        return y + self.features.pop("a", torch.zeros(())) ** 2


class SharedObject(Pair):
    def point(self):
        options = self.options = SimpleNamespace(gain=1.0)
        self.scale = lambda x: x * options.gain

    def forward(self, x):
        self.options.gain = 0.5
        return self.b(self.scale(self.a(x)))


KINDS = [Patched, Wrapped, Table, Row, Nested, Defaults, Weak, HookList, HookDict, PreHook, Helped]
KINDS += [SharedList, SharedDict, SharedObject]


def made(kind):
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_leads_to_itself_alone(kind):
    original = made(kind)
    x = torch.randn(3, D, generator=torch.Generator().manual_seed(1))
    expected = made(kind)(x)
    copy_ = copied(original)
    again = copied(copy_)
    with torch.no_grad():
        for each in original.parameters():
            each.fill_(torch.nan)
    state = {key: value for key, value in vars(original).items() if key in ("gain", "features")}
    assert torch.equal(copy_(x), expected)
    assert all(vars(original)[key] is value and (key != "features" or not value) for key, value in state.items())
    copy_(x).sum().backward()
    assert all(each.grad is not None for each in copy_.parameters())
    with torch.no_grad():
        for each in copy_.parameters():
            each.fill_(torch.nan)
    again(x).sum().backward()
    assert not any(each.grad.isnan().any() for each in again.parameters())


def test_what_leads_nowhere_is_shared():
    seen, log = [], {}
    module = made(Pair_)
    module.a.register_forward_hook(lambda *_: seen.append(1))
    module.b.register_forward_hook(lambda *_: log.update(calls=len(seen), by=module.gain))
    copied(module)(torch.ones(1, D))
    assert seen == [1] and log == {"calls": 1, "by": 1.0}


class Pair_(Pair):
    def point(self):
        pass


class Stubborn:
    def __init__(self, module):
        self.module = module

    def __deepcopy__(self, memo):
        return self


def test_what_is_not_copied_is_told():
    module = made(Pair_)
    module.stubborn = Stubborn(module)
    with pytest.warns(UserWarning, match=r"^stubborn of Pair_ still leads to the module that was given"):
        copied(module)


class Cached(Pair):
    """Has a method behind a cache of functools."""

    def point(self):
        self.calls, self.table = 0, functools.lru_cache(4)(self.computed)

    def computed(self, n):
        return torch.arange(n) * self.a.bias.detach()

    def forward(self, x):
        return self.b(self.a(x)) + self.table(D)


def test_a_cache_of_functools_is_made_anew():
    original = made(Cached)
    made_ = copied(original)
    with torch.no_grad():
        made_.a.bias.fill_(2.0)
    assert made_.table(D).tolist() != original.table(D).tolist()
    assert made_.table.cache_info().maxsize == 4 and original.table.cache_info().currsize == 1


class Extractor:
    """Notes what a layer has made, for a loop to look at."""

    def __init__(self, model):
        self.model, self.calls, self.feature, self.all = model, 0, None, {}

        def hook(module, inputs, output):
            self.feature, self.all["a"] = output, output.detach()
            self.calls += 1

        model.a.register_forward_hook(hook)


@pytest.mark.parametrize("before", [False, True])
def test_an_object_in_which_a_hook_notes_things_is_shared(before):
    def main():
        model = made(Pair_)
        extractor = Extractor(model)
        if before:
            model(batch(7))
            extractor.calls = 0
        booster = fs.Booster()
        with pytest.warns(UserWarning, match="a._forward_hooks of Pair_ still leads to the module that was given"):
            boosted, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
        losses = []
        for step in range(3):
            loss = boosted(batch(step)).square().mean() + extractor.feature.square().mean()
            booster.backward(loss, opt)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses, extractor.calls, [*extractor.all]

    model = made(Pair_)
    extractor, expected = Extractor(model), []
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        loss = model(batch(step)).square().mean() + extractor.feature.square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        expected.append(loss.item())
    (found,) = fs.run(main, mesh=fs.make_mesh({"data": 1}))
    assert found == (pytest.approx(expected), 3, ["a"])


def losses(kind, plugin, n):
    def main():
        model = made(kind)
        original = copy.deepcopy([*model.parameters()])
        booster = fs.Booster(plugin=plugin)
        boosted, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
        found = trained(boosted, opt, lambda loss: booster.backward(loss, opt), n, fs.axis_index("data"))
        assert all(map(torch.equal, original, model.parameters()))
        back = boosted.unwrap()
        with torch.no_grad():
            for x in model.parameters():
                x.fill_(torch.nan)
        return [found, back(batch(9)).square().mean().item()]

    return fs.run(main, mesh=fs.make_mesh({"data": n}))[0]


def batch(seed):
    return torch.randn(8, D, generator=torch.Generator().manual_seed(seed))


def trained(model, opt, backward, n=1, place=0):
    found = []
    for step in range(3):
        loss = model(batch(step).chunk(n)[place]).square().mean()
        backward(loss)
        opt.step()
        opt.zero_grad()
        found.append(fs.pmean(loss.detach(), "data").item() if n > 1 else loss.item())
    return found


@pytest.mark.filterwarnings("ignore:.*(features|options) was changed by a forward")  # its entries outlast a call
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("plugin", "n"), [(fs.DDPPlugin(), 1), (fs.FSDPPlugin(), 2)])
def test_models_that_point_to_themselves_train(kind, plugin, n):
    model = made(kind)
    expected = trained(model, torch.optim.SGD(model.parameters(), lr=0.5), lambda loss: loss.backward())
    expected.append(model(batch(9)).square().mean().item())
    found, last = losses(kind, plugin, n)
    torch.testing.assert_close([*found, last], expected)


class Unlike(Pair):
    """Attributes of which a copy would find the original's layers and parameters, or none."""

    def point(self):
        self.scales = {self.a.weight: 2.0, self.b.weight: 3.0}
        self.b.inner = [SimpleNamespace(rates=weakref.WeakKeyDictionary({self.a: 2.0}))]
        self.by_name = weakref.WeakValueDictionary(a=self.a)
        self.known = weakref.WeakSet([self.b])
        self.act = functools.singledispatch(lambda x: self.a(x))


def test_what_would_go_on_with_the_original_is_one_error_at_boost():
    with pytest.raises(fs.ModuleError) as found:
        fs.run(lambda: fs.Booster().boost(Unlike()), mesh=fs.make_mesh({"data": 1}))
    assert str(found.value).splitlines()[0] == (
        "Unlike cannot be copied: scales has parameters as keys of a dict; by_name has layers in a weak dict or set; known has "
        "layers in a weak dict or set; act has a function of functools.singledispatch; b.inner has layers in a weak dict or set, "
        "and a copy would not find its own there. Keep them by names: a dict of strings, and self.get_parameter(name) or "
        "self.get_submodule(name) in forward."
    )


class Alike(Pair):
    """The same kinds, of which none leads to a layer or a parameter of the module."""

    def point(self):
        self.parent, self.layers = [self], {self.a: 2.0}
        self.noted, self.act = weakref.WeakKeyDictionary({Pair: 1}), functools.singledispatch(torch.tanh)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.optimizer.state[self.a.weight] = {}

    def forward(self, x):
        return self.act(self.a(x)) * self.layers[self.a]


def test_of_the_same_kinds_what_leads_to_no_layer_is_boosted():
    def main():
        model, _, *_ = fs.Booster().boost(Alike())
        return model(torch.ones(2, D)).shape

    assert fs.run(main, mesh=fs.make_mesh({"data": 1})) == [(2, D)]
