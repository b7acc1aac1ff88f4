"""A module as a function gives what the module gives, and nobody sees that it was run."""

import copy
import gc
import weakref
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, jvp, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.transforms.functionalize import functionalize
from fshard.transforms.randomness import keyed_random
from fshard.transforms.remat import remat
from fshard.transforms.replica import Blueprint, ModuleError

D = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
]


# -- modules that are hard ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(D, D)
        self.head = nn.Linear(D, D, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x.argmax(-1)) + x)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.unused = nn.Linear(2, 2)
        self.again = self.layer

    def forward(self, x):
        return self.again(self.layer(x).relu_())


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(D, D).requires_grad_(False)
        self.head = nn.Linear(D, D)

    def forward(self, x):
        return self.head(self.backbone(x))


class Buffers(nn.Module):
    """Integers, no saving, a new shape, a new buffer, one that was None, one that becomes None."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.ones(D, dtype=torch.bool), persistent=False)
        self.register_buffer("seen", torch.zeros(0, D))
        self.register_buffer("later", None)
        self.register_buffer("tied", self.mask)
        self.register_buffer("gone", torch.ones(1))

    def forward(self, x):
        self.count += 1
        self.seen = torch.cat([self.seen, x.detach()])
        self.later = self.seen.sum(0) if self.later is None else self.later * 0.5
        self.gone = None
        self.mask.data[int(self.count) % D] = False
        if not hasattr(self, "fresh"):
            self.register_buffer("fresh", torch.ones(D))
        self.fresh.add_(1)
        return x * self.weight * self.tied + self.later + self.fresh


class Lists(nn.Module):
    """Parameters and submodules that stand in containers of the module's own, and in what points to it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.ws = nn.ParameterList([torch.randn(D), torch.randn(D)])
        self.named = nn.ParameterDict({"scale": torch.randn(D)})
        self.plain = [self.a, (self.b, "name"), {"w": self.ws[0]}]
        self.act = partial(self.scaled, by=2.0)
        self.product = partial(torch.nn.functional.linear, weight=self.a.weight)
        self.closed = lambda x: self.b(x)
        self.parent = weakref.ref(self)
        self.helper = Helper(self.a)
        self.constant = torch.full((D,), 3.0)
        object.__setattr__(self, "hidden", self.b.weight)

    def scaled(self, x, by):
        return x * by * self.ws[1]

    def forward(self, x):
        first, (second, _), tail = self.plain
        x = self.act(second(first(x))) * tail["w"] + self.named["scale"]
        x = self.product(self.closed(x)) + self.parent().a(x) + self.helper.run(x)
        return torch.nn.functional.linear(x, self.hidden) + self.constant


class Helper:
    def __init__(self, layer):
        self.layer = layer

    def run(self, x):
        return self.layer(x)


class Settings(OrderedDict):
    """Entries that are attributes too, and are not to be changed: as diffusers keeps what a model was made from."""

    def __init__(self, **entries):
        for key, value in entries.items():
            super().__setitem__(key, value)
        self.__dict__.update(entries)

    def refuse(self, *args, **kwargs):
        raise TypeError("this does not change")

    __setitem__ = __delitem__ = update = pop = clear = refuse


class Steps(list):
    """A list that is not to be changed."""

    __setitem__ = __delitem__ = append = extend = clear = Settings.refuse


class Configured(nn.Module):
    """Finds its parts in containers that refuse to be written to."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.settings, self.steps = Settings(first=self.a, scale=self.a.bias, by=2), Steps([self.b])

    def forward(self, x):
        y = self.settings["first"](x) * self.settings["by"] + self.settings["scale"]
        return self.steps[0](y) + self.settings.first(x) * self.settings.scale


class Stateful(nn.Module):
    """Remembers much in plain attributes, and reads it in the next call."""

    steps = 1

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.calls, self.mean, self.odd, self.table, self.seen = 0, 0.0, False, None, torch.zeros(D)
        self.latest, self.smooth = None, None

    def forward(self, x):
        self.calls += 1
        self.steps = self.steps * 2
        self.odd = not self.odd
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        self.seen.mul_(0.5).add_(x.mean(0))
        if self.table is None:
            self.table = torch.linspace(0, 1, D)
        if not hasattr(self, "first"):
            self.first = x.detach()[0]
        keep(self, x)
        self.latest = self.layer(x)  # with its graph: nothing that another call could use
        self.smooth = self.latest if self.smooth is None else 0.9 * self.smooth.detach() + 0.1 * self.latest
        y = self.smooth.detach() + self.latest * self.calls + self.mean * self.seen + self.table * self.steps
        return (y if self.odd else -y) + self.first + self.kept


def keep(module, x):
    module.kept = getattr(module, "kept", 0) + x.detach().sum()


class Inner(nn.Module):
    """Takes a gradient in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.layer(x).tanh().sum(), x, create_graph=True)
        return g + self.layer(x)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(D, D, 2, **options)

    def forward(self, x):
        y, _ = self.rnn(x.unsqueeze(0))
        return y.squeeze(0)[..., :D]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(0)
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.encoder(y).squeeze(0)


class Checkpointed(nn.Module):
    """Runs its blocks again in backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.run = self.block

    def block(self, x, place):
        return self.blocks[place](x).tanh()

    def forward(self, x):
        x = checkpoint(self.run, x, 0, use_reentrant=False)
        x = checkpoint(lambda x: self.block(x, 1), x, use_reentrant=False)
        return checkpoint(self.blocks[0], x, use_reentrant=False)


def hooked():
    module = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    module[0].register_forward_pre_hook(lambda module, args: (args[0] + module.bias,))
    module.register_forward_hook(lambda module, args, y: y + module[0].bias)
    return module


def pruned():
    module = nn.Linear(D, D)
    prune.l1_unstructured(module, "weight", 0.5)
    return module


def symmetric():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    module = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    parametrize.register_parametrization(module[0], "weight", Symmetric())
    return module


MODULES = {
    "linear": lambda: nn.Linear(D, D),
    "sequential with in-place relu": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D)),
    "batch norm": lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)),
    "batch norm, cumulative": lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, momentum=None)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(D, D)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(D, D)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(D, D)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(D, D)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(D, D)),
    "parametrized": symmetric,
    "pruned": pruned,
    "hooks": hooked,
    "lstm": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn with weight norm": lambda: Recurrent(nn.RNN),
    "attention": Attention,
    "tied": Tied,
    "twice": Twice,
    "frozen": Frozen,
    "buffers": Buffers,
    "lists": Lists,
    "containers that refuse": Configured,
    "stateful": Stateful,
    "gradient in forward": Inner,
    "checkpoints in forward": Checkpointed,
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, D)), nn.Conv1d(1, D, D), nn.BatchNorm1d(D), nn.Flatten()),
}
each_module = pytest.mark.parametrize("kind", MODULES)


def double(x):
    return x.double() if x.is_floating_point() else x


def made(kind, seed=0):
    torch.manual_seed(seed)
    return MODULES[kind]()


def close(got, expected):
    torch.testing.assert_close(got, expected)


def snapshot(module):
    """Everything that could have changed: names, objects, values, versions, attributes."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    own = [(name, id(x), x._version, x.detach().clone()) for name, x in tensors]
    attributes = [(name, key, id(value)) for name, part in module.named_modules() for key, value in vars(part).items()]
    return own, attributes


def assert_untouched(module, before):
    own, attributes = snapshot(module)
    assert attributes == before[1]
    assert [entry[:3] for entry in own] == [entry[:3] for entry in before[0]]
    for (name, *_, now), (*_, then) in zip(own, before[0], strict=True):
        assert torch.equal(now, then), name


@each_module
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_two_calls_give_what_two_calls_of_the_module_give(kind, train):
    module, plain = made(kind).train(train), made(kind).train(train)
    apply, params, buffers = functionalize(module)
    before = snapshot(module)
    x = torch.randn(3, D)
    for _ in range(2):
        plain.zero_grad()
        expected = plain(x)
        expected.square().sum().backward()
        output, after = apply(params, buffers, x)
        close(output, expected)
        wanted = {name: p for name, p in params.items() if p.requires_grad}
        gradients = torch.autograd.grad(output.square().sum(), list(wanted.values()), allow_unused=True)
        for name, g in zip(wanted, gradients, strict=True):
            own = plain.get_parameter(name).grad
            assert (g is None) == (own is None), name
            close(g, own)
        for name, b in plain.named_buffers():
            close(after[name], b)
        assert {name for name in after if ":" not in name} - {"gone"} == dict(plain.named_buffers()).keys()
        buffers = after
    assert_untouched(module, before)


def test_what_is_kept_in_plain_attributes():
    apply, params, buffers = functionalize(nn.Sequential(Stateful(), Stateful()))
    assert not buffers
    output, first = apply(params, buffers, torch.ones(3, D))
    names = ["calls", "first", "kept", "mean", "odd", "seen", "smooth", "steps", "table"]
    assert sorted(first) == [f"{number}.{name}:kept" for number in "01" for name in names]
    assert first["0.calls:kept"].item() == 1 and first["0.odd:kept"].item() is True and not output.isnan().any()
    _, after = apply(params, first, torch.ones(3, D))
    assert sorted(after) == [f"{number}.{name}:kept" for number in "01" for name in names]
    assert after["0.table:kept"] is first["0.table:kept"]  # nobody has written to it
    assert torch.equal(first["0.seen:kept"], torch.ones(1, D)) and torch.equal(
        after["0.seen:kept"], torch.full((1, D), 1.5)
    )


def test_an_attribute_may_be_none_again():
    class Alternating(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = None

        def forward(self, x):
            y = x if self.last is None else x + self.last
            self.last = x.sum() if self.last is None else None
            return y

    apply, params, buffers = functionalize(Alternating())
    plain, x = Alternating(), torch.ones(2)
    for _ in range(4):
        output, buffers = apply(params, buffers, x)
        assert torch.equal(output, plain(x))


class Forgetful(nn.Module):
    """Remembers what is neither a number nor a tensor, and leaves a loss behind."""

    def __init__(self):
        super().__init__()
        self.layer, self.log, self.inner, self.name = nn.Linear(D, D), [], OrderedDict(counts={"n": 0}), "first"
        self.loss, self.penalty, self.unread, self.map, self.own, self.hash = 0.0, torch.zeros(()), None, None, [], 1
        self.losses = []

    def forward(self, x):
        self.log.append(len(self.log))
        self.inner["counts"]["n"] += 1
        y = self.layer(x)
        self.loss, self.penalty = y.mean(), y.abs().mean()
        self.unread, self.map, self.losses = [x], y, {"aux": [y.mean()]}
        self.own = []
        self.own.append(y)
        self.hash = self.hash << 60
        self.shape = x.shape
        return self.sum(y) if self.name == "first" else y

    def sum(self, y):
        self.name = "second"
        return sum(self.own)[: self.shape[0]]


def test_what_is_lost_is_told_when_it_is_read():
    apply, params, buffers = functionalize(Forgetful())
    _, buffers = apply(params, buffers, torch.ones(3, D))
    with pytest.warns(UserWarning, match="Forgetful") as told:
        _, after = apply(params, buffers, torch.ones(3, D))
    lost, left = [str(one.message) for one in told]
    assert lost.startswith("Forgetful.log, Forgetful.inner, Forgetful.hash was changed by a forward")
    assert left.startswith("A forward leaves Forgetful.loss, Forgetful.penalty, Forgetful.losses behind with its graph")
    assert not after


class Reading(nn.Module):
    """Sets attributes in one place, and reads them in another."""

    def __init__(self):
        super().__init__()
        self.layer, self.center, self.scale = nn.Linear(D, D), torch.zeros(D), 0.5
        self.bent = lambda x: x * self.scale
        self.layer.factor = 1.0
        self.layer.register_forward_hook(count_up)

    def forward(self, x):
        y = self.bent(self.layer(x))
        out = y - self.center.detach()
        self.update(y)
        return outside(self, out)

    def update(self, y):
        self.center = y.mean(0)
        self.scale = self.scale_now()

    def scale_now(self):
        return 2.0


def count_up(module, args, output):
    module.factor += 1
    return output * module.factor


def outside(module, x):
    return x * module.scale


@pytest.mark.parametrize("train", [True, False])
def test_who_reads_an_attribute_does_not_matter(train):
    module = Reading().train(train)
    apply, params, buffers = functionalize(module)
    plain, x = copy.deepcopy(module), torch.randn(3, D)
    plain.bent = lambda x: x * plain.scale
    for _ in range(4):
        output, buffers = apply(params, buffers, x)
        close(output, plain(x))
        buffers = {name: b.detach() for name, b in buffers.items()}


def test_a_mode_that_a_forward_sets_is_kept():
    class Freezing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(D), 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                self.norm.eval()
            return self.norm(x)

    apply, params, buffers = functionalize(Freezing())
    plain, x = Freezing(), torch.randn(3, D)
    for _ in range(4):
        output, buffers = apply(params, buffers, x)
        close(output, plain(x))
    assert buffers["norm.num_batches_tracked"] == plain.norm.num_batches_tracked == 1


def test_plain_tensors_that_share_memory_stay_together():
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = torch.zeros(2, D)
            self.first, self.second = self.whole.unbind(0)

        def forward(self, x):
            self.first.add_(1)
            self.second.add_(2)
            return x + self.whole.sum()

    apply, params, buffers = functionalize(Sharing())
    plain, x = Sharing(), torch.randn(3, D)
    for _ in range(2):
        close(apply(params, buffers, x)[0], plain(x))
    for _ in range(2):
        with pytest.warns(UserWarning, match="Sharing.first, Sharing.second, Sharing.whole was changed by a forward"):
            output, _ = apply(params, buffers, x)
        close(output, plain(x))


class Holder:
    def __init__(self):
        self.counts = {"n": [0]}


def in_a_dict():
    return {"a": torch.zeros(1)}


@pytest.mark.parametrize("held", [Holder, in_a_dict, lambda: numpy.zeros(2)], ids=["object", "dict", "array"])
def test_who_keeps_something_in_an_object_is_told(held):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = held()

        def forward(self, x):
            if isinstance(self.held, Holder):
                self.held.counts["n"][0] += 1
            elif isinstance(self.held, dict):
                self.held["a"].add_(1)
            else:
                self.held += 1
            return x * 1

    apply, params, buffers = functionalize(Counting())
    apply(params, buffers, torch.ones(2))
    if held is not in_a_dict:  # these are put back: the next call does not find them
        apply(params, buffers, torch.ones(2))
    with pytest.warns(UserWarning, match=r"^Counting.held was changed by a forward, .* or shared by all slices"):
        apply(params, buffers, torch.ones(2))


def test_an_object_that_is_completed_once_is_no_state():
    class Configured(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(kind=None)

        def forward(self, x):
            if self.config.kind is None:
                self.config.kind = "regression"
            return x

    apply, params, buffers = functionalize(Configured())
    for _ in range(3):
        apply(params, buffers, torch.ones(1))


def test_a_forward_that_replaces_what_it_is_made_of():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.bend = nn.Linear(D, D), nn.Identity()

        def forward(self, x, what):
            if what == "module":
                self.bend = nn.Tanh()
            if what == "parameter":
                self.layer.bias = nn.Parameter(torch.ones(D))
            return self.bend(self.layer(x))

    apply, params, buffers = functionalize(Replacing())
    with pytest.warns(UserWarning, match="^Replacing's submodules was changed by a forward"):
        apply(params, buffers, torch.ones(D), "module")
    with pytest.raises(
        fs.ModuleError, match="apply of Replacing: its forward binds the parameter layer.bias to another"
    ):
        apply(params, buffers, torch.ones(D), "parameter")
    apply(params, buffers, torch.ones(D), None)


def test_a_forward_that_deletes_a_buffer():
    class Deleting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.ones(1))

        def forward(self, x):
            del self.seen
            return x

    apply, params, buffers = functionalize(Deleting())
    with pytest.raises(fs.ModuleError, match="apply of Deleting: its forward deletes the buffer seen"):
        apply(params, buffers, torch.ones(1))


def test_views_of_what_is_registered_are_refused():
    module = nn.Linear(D, D)
    module.row = module.weight.detach()[0]
    module.others = [module.bias.detach()]
    with pytest.raises(
        fs.ModuleError, match=r"functionalize of Linear: others, row are views of parameters or buffers"
    ):
        functionalize(module)


def test_slots_of_a_module():
    class Slotted(nn.Module):
        __slots__ = ("scale",)

        def __init__(self):
            super().__init__()
            self.scale, self.calls = 2.0, 0

        def forward(self, x):
            self.calls += 1
            return x * self.scale * self.calls

    apply, params, buffers = functionalize(Slotted())
    plain, x = Slotted(), torch.ones(2)
    for _ in range(3):
        output, buffers = apply(params, buffers, x)
        close(output, plain(x))


@each_module
def test_other_tensors_can_be_passed(kind):
    module, other = made(kind).eval(), made(kind, seed=1).eval()
    apply, _, _ = functionalize(module)
    _, params, buffers = functionalize(other)
    x = torch.randn(3, D)
    close(apply(params, buffers, x)[0], other(x))


@each_module
def test_nothing_is_left_in_the_pool(kind):
    """Neither the module, nor what was passed, is kept alive by apply."""
    module = made(kind)
    apply, params, buffers = functionalize(module)
    x = torch.randn(3, D)
    params = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    buffers = {name: b.clone() for name, b in buffers.items()}
    # Some keep a computed weight as an attribute, and with it its graph; torch keeps a parametrized module by its class.
    if "norm" not in kind and kind not in ("pruned", "orthogonal", "parametrized"):
        own = [weakref.ref(p) for p in module.parameters()]
        del module
        gc.collect()
        assert not any(p() is not None for p in own)
    apply(params, buffers, x)
    given = [weakref.ref(t) for t in (*params.values(), *buffers.values())]
    del params, buffers
    gc.collect()
    assert not any(t() is not None for t in given)


# -- handles --------------------------------------------------------------------------------------------------------


class Lazy:
    """No tensor: makes one when an operation asks for it."""

    def __init__(self, x):
        self.x, self.asked = x, 0

    def __getattr__(self, name):
        return getattr(self.x, name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        def real(x):
            if isinstance(x, cls):
                x.asked += 1
                return x.x
            return type(x)(map(real, x)) if isinstance(x, tuple | list) else x

        return func(*real(args), **{key: real(x) for key, x in (kwargs or {}).items()})


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("wrap", [Lazy, lambda x: x.as_subclass(Subclass)], ids=["object", "subclass"])
@pytest.mark.parametrize(
    "kind", ["linear", "batch norm", "lstm", "tied", "twice", "conv", "weight norm", "old weight norm", "gru"]
)
def test_parameters_may_be_handles(kind, wrap):
    module = made(kind).eval()
    apply, params, buffers = functionalize(module)
    x = torch.randn(3, D)
    handles = {name: wrap(p) for name, p in params.items()}
    output, _ = apply(handles, buffers, x)
    close(torch.Tensor(output), module(x))
    if wrap is Lazy:
        assert all(h.asked for name, h in handles.items() if "unused" not in name)


# -- the rest of the contract ---------------------------------------------------------------------------------------


def test_what_is_returned():
    module = nn.Module()
    module.net = Tied()
    module.frozen = nn.Linear(1, 1, bias=False).requires_grad_(False)
    module.register_buffer("counter", torch.tensor(3), persistent=False)
    _, params, buffers = functionalize(module)
    assert {name: p.requires_grad for name, p in params.items()} == {
        "net.embedding.weight": True,
        "frozen.weight": False,
    }
    assert all(p.is_leaf for p in params.values())
    assert [type(p) for p in params.values()] == [
        torch.Tensor,
        nn.Parameter,
    ]  # a plain tensor does not say that it is frozen
    assert params["net.embedding.weight"].data_ptr() == module.net.embedding.weight.data_ptr()
    assert buffers == {"counter": torch.tensor(3)}


def test_a_buffer_that_is_not_written_to_is_handed_back():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(D))
            self.register_buffer("count", torch.zeros(D))

        def forward(self, x):
            self.count.data.add_(1)  # no version counter sees this
            return x * self.mask

    apply, params, buffers = functionalize(Masked())
    _, after = apply(params, buffers, torch.ones(D))
    assert after["mask"] is buffers["mask"]
    assert torch.equal(after["count"], torch.ones(D)) and torch.equal(buffers["count"], torch.zeros(D))


def test_buffers_in_numpys_memory():
    apply, params, buffers = functionalize(nn.BatchNorm1d(D))
    buffers = {name: torch.from_numpy(b.numpy().copy()) for name, b in buffers.items()}
    _, after = apply(params, buffers, torch.randn(3, D))
    assert not buffers["running_mean"].any() and after["running_mean"].any()


def test_a_forward_that_raises_leaves_nothing_behind():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x, fail):
            self.count += 1
            self.seen = x
            if fail:
                raise KeyError("no")
            return self.weight * x

    module = Fails()
    apply, params, buffers = functionalize(module)
    before = snapshot(module)
    for fail in (True, False, True, False):
        if fail:
            with pytest.raises(KeyError):
                apply(params, buffers, torch.ones(D), fail=True)
        else:
            _, after = apply(params, buffers, torch.ones(D), fail=False)
            assert after["count"] == 1 and after.keys() <= {"count", "seen:kept"}
    assert_untouched(module, before)


def test_what_leads_nowhere_is_shared_and_what_leads_back_is_not():
    class Slotted:
        __slots__ = ("layer",)

    module = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    module.generator, module.lock, module.config = torch.Generator(), Lock(), SimpleNamespace(width=D)
    module.slotted = Slotted()
    module.slotted.layer = module[0]
    found = []
    module.register_forward_pre_hook(lambda own, args: found.append(own))
    apply, params, buffers = functionalize(module)
    apply(params, buffers, torch.ones(1, D))
    (replica,) = found
    assert replica is not module and replica[0] is not module[0]
    assert replica.slotted.layer is replica[0]
    for name in ("generator", "lock", "config"):
        assert getattr(replica, name) is getattr(module, name)


def test_training_and_eval_are_followed():
    module = nn.Sequential(nn.Dropout(1.0), nn.Linear(D, D))
    apply, params, buffers = functionalize(module)
    x = torch.ones(2, D)
    for mode in (True, False, True):
        module.train(mode)
        close(apply(params, buffers, x)[0], module(x))
    module.train()
    module[0].eval()
    close(apply(params, buffers, x)[0], module(x))


def test_calls_within_calls():
    class Nest(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x, inside):
            y = self.layer(x)
            return y + (inside(x) if inside else 0) + self.layer(x)

    module = Nest()
    apply, params, buffers = functionalize(module)
    other = {name: p.detach() * 2 for name, p in params.items()}
    x = torch.randn(2, D)
    got, _ = apply(params, buffers, x, lambda x: apply(other, buffers, x, None)[0])
    close(got, 2 * module.layer(x) + 4 * module.layer(x))


@pytest.mark.parametrize("again", [remat, lambda f: partial(checkpoint, f, use_reentrant=False)])
def test_what_a_checkpoint_runs_again_does_not_change_the_buffers_that_were_returned(again):
    class Normalised(nn.BatchNorm1d):
        def forward(self, x):
            return again(super().forward)(x)

    apply, params, buffers = fs.functionalize(Normalised(3))
    y, after = apply(params, buffers, torch.randn(4, 3))
    known = {name: x.clone() for name, x in after.items()}
    y.square().sum().backward()
    assert all(torch.equal(after[name], x) for name, x in known.items()) and known["num_batches_tracked"] == 1


def test_many_steps_with_checkpoints_in_forward_use_their_own_parameters():
    module = Checkpointed()
    apply, params, buffers = functionalize(module)
    x = torch.randn(3, D)
    runs = []
    for scale in (1.0, 2.0, 3.0):
        own = {name: (p.detach() * scale).requires_grad_() for name, p in params.items()}
        runs.append((scale, own, apply(own, buffers, x)[0]))
    for scale, own, output in reversed(runs):
        plain = copy.deepcopy(module)
        with torch.no_grad():
            for p in plain.parameters():
                p.mul_(scale)
        plain(x).sum().backward()
        gradients = torch.autograd.grad(output.sum(), list(own.values()))
        close(gradients, tuple(plain.get_parameter(name).grad for name in own))


@each_module
def test_remat_of_apply(kind):
    apply, params, buffers = functionalize(made(kind))
    x = torch.randn(3, D)
    wanted = [p for p in params.values() if p.requires_grad]

    def gradients(apply):
        output, after = apply(params, buffers, x)
        kept = {
            name: b for name, b in after.items() if name != "latest:kept"
        }  # of which a first call does not know yet
        return torch.autograd.grad(output.sum(), wanted, allow_unused=True), kept

    close(gradients(remat(apply)), gradients(apply))


@pytest.mark.parametrize("kind", ["linear", "tied", "twice", "lists", "batch norm", "parametrized", "weight norm"])
def test_transforms_of_torch_func(kind):
    module = made(kind)
    apply, params, buffers = functionalize(module)
    params = {name: p.detach() for name, p in params.items()}
    x = torch.randn(3, D)

    def loss(params, x):
        output, after = apply(params, buffers, x)
        return output.square().sum(), after

    gradients, after = grad(loss, has_aux=True)(params, x)
    y, _ = (own := made(kind))(x), None
    y.square().sum().backward()
    for name, g in gradients.items():
        p = own.get_parameter(name)
        close(g, torch.zeros_like(p) if p.grad is None else p.grad)
    for name, b in own.named_buffers():
        close(after[name], b)
    if kind != "weight norm":  # torch knows no forward derivative of it
        value, tangent = jvp(lambda p: loss(p, x)[0], (params,), (params,))
        close(value, y.square().sum())
        close(tangent, sum((gradients[name] * p).sum() for name, p in params.items()))
    if "norm" not in kind:
        stacked = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
        got = vmap(lambda p: apply(p, buffers, x)[0])(stacked)
        close(got[1], apply({name: 2 * p for name, p in params.items()}, buffers, x)[0])


def test_replicas_are_used_again(monkeypatch):
    built = []
    build = Blueprint.build
    monkeypatch.setattr(Blueprint, "build", lambda self: built.append(build(self)) or built[-1])
    apply, params, buffers = functionalize(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)))
    x = torch.randn(3, D)
    for f in (apply, remat(apply), remat(apply, "dots")):
        for _ in range(3):
            f(params, buffers, x)[0].sin().sum().backward()
    with pytest.raises(RuntimeError):
        apply(params, buffers, torch.ones(3, D + 1))
    apply(params, buffers, x)
    assert len(built) <= 2  # one more after the error, whose traceback may still refer to the first


def test_real_threads():
    apply, params, buffers = functionalize(made("lists"))
    x = torch.randn(3, D)

    def work(scale):
        own = {name: p.detach() * scale for name, p in params.items()}
        return [apply(own, buffers, x)[0] for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, [1.0, 2.0, 3.0, 4.0]))
    for scale, result in zip([1.0, 2.0, 3.0, 4.0], results, strict=True):
        for y in result:
            close(y, work(scale)[0])


@dataclass
class ModelOutput:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


def test_a_model_in_the_style_of_hugging_face():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = namedtuple("Config", "hidden vocabulary")(D, 7)
            self.embedding = nn.Embedding(7, D)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True) for _ in range(2))
            self.head = nn.Linear(D, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.gradient_checkpointing = True

        def forward(self, tokens, *, attention_mask=None, labels=None):
            assert self.dtype == torch.float32
            x = self.embedding(tokens)
            for layer in self.layers:
                run = partial(layer.__call__, src_key_padding_mask=~attention_mask)
                x = checkpoint(run, x, use_reentrant=False) if self.gradient_checkpointing else run(x)
            logits = self.head(x)
            loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return ModelOutput(logits, loss)

        @property
        def dtype(self):
            return next(self.parameters()).dtype

    torch.manual_seed(0)
    model = Model()
    apply, params, buffers = functionalize(model)
    assert len(params) == len(list(model.parameters())) and "head.weight" not in params
    tokens = torch.randint(7, (2, 5))
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    torch.manual_seed(1)
    model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    torch.manual_seed(1)
    output, _ = apply(params, buffers, tokens, attention_mask=mask, labels=tokens)
    gradients = torch.autograd.grad(output.loss, list(params.values()))
    for name, g in zip(params, gradients, strict=True):
        close(g, model.get_parameter(name).grad)


@given(st.data())
@settings(max_examples=30)
def test_any_tree_of_modules(data):
    """Modules that share submodules and tensors at random, called in any order."""
    torch.manual_seed(0)
    leaves = [nn.Linear(D, D) for _ in range(3)] + [nn.BatchNorm1d(D)]
    for _ in range(data.draw(st.integers(0, 2))):
        i, j = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        leaves[i].weight = leaves[j].weight
    tree = st.recursive(
        st.integers(0, 3).map(lambda i: leaves[i]),
        lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda parts: nn.Sequential(*parts)),
        max_leaves=6,
    )
    module = nn.Sequential(data.draw(tree))
    plain = copy.deepcopy(module)
    apply, params, buffers = functionalize(module)
    x = torch.randn(5, D)
    output, after = apply(params, buffers, x)
    expected = plain(x)
    close(output, expected)
    close(after, dict(plain.named_buffers()))
    expected.square().sum().backward()
    gradients = torch.autograd.grad(output.square().sum(), list(params.values()))
    for name, g in zip(params, gradients, strict=True):
        close(g, plain.get_parameter(name).grad)


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_lazy_module_has_to_be_run_first():
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(
        ModuleError, match="^functionalize of Sequential: 0.weight, 0.bias, 1.weight, 1.bias, "
    ) as error:
        functionalize(module)
    assert str(error.value).endswith(
        "have no shape yet, since the module is lazy. Run it once on an example first: module(example)."
    )
    module(torch.ones(2, 5))
    functionalize(module)


def test_names_that_are_not_the_modules():
    apply, params, buffers = functionalize(nn.BatchNorm1d(D))
    with pytest.raises(ModuleError) as error:
        apply({"weight": params["weight"], "wieght": params["bias"]}, {"a.b": torch.ones(1)}, torch.ones(2, D))
    assert str(error.value) == (
        'apply of BatchNorm1d: params["bias"] is missing; buffers["num_batches_tracked"] is missing; '
        'buffers["running_mean"] is missing; buffers["running_var"] is missing; params["wieght"] is no parameter of it; '
        'buffers["a.b"] is no buffer of it. Pass trees with the names that functionalize returned, (params, buffers) in '
        "this order."
    )
    with pytest.raises(ModuleError, match="is missing"):
        apply(buffers, params, torch.ones(2, D))


def test_a_tensor_where_no_other_can_be_put():
    module = nn.Linear(D, D)
    module.pair = (module.weight, 1)
    with pytest.raises(ModuleError) as error:
        functionalize(module)
    assert str(error.value) == (
        'functionalize of Linear: no other tensor can be put where "weight" stands, a tuple. Keep it in a list or a dict, '
        "or look it up in forward: self.weight."
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module():
    with pytest.raises(ModuleError, match="0 is compiled by torch.jit"):
        functionalize(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))


# -- random draws ---------------------------------------------------------------------------------------------------


def test_draws_depend_on_the_key_alone():
    def draw(*key):
        with keyed_random(*key):
            return torch.rand(4)

    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0), (0, 0, 0, "a"), (0, 0, 0, 0)]
    draws = [draw(*key) for key in keys]
    torch.rand(3)
    for key, drawn in zip(keys, draws, strict=True):
        assert torch.equal(draw(*key), drawn)
    assert len({tuple(drawn.tolist()) for drawn in draws}) == len(keys)


def test_the_generator_goes_on_as_before():
    torch.manual_seed(0)
    a = torch.rand(2)
    torch.manual_seed(0)
    with keyed_random(3), keyed_random(4):
        torch.rand(5)
    assert torch.equal(torch.rand(2), a)
    torch.manual_seed(0)
    with pytest.raises(TypeError), keyed_random(3):
        torch.rand("five")
    assert torch.equal(torch.rand(2), a)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_dropout_is_the_same_on_any_number_of_devices(devices):
    """Slices are spread over devices; each is keyed by its own number, and a collective stands in between."""
    apply, params, buffers = functionalize(nn.Dropout(0.5))
    x = torch.ones(4, 8)

    def run_slices(x):
        own = x.shape[0]
        out = []
        for place in range(own):
            with keyed_random(7, 0, fs.axis_index("data") * own + place):
                first = apply(params, buffers, x[place])[0]
                fs.psum(first, "data")  # other devices run in the middle of it
                out.append(first + apply(params, buffers, x[place])[0])
        return torch.stack(out)

    f = fs.shard_map(run_slices, mesh=fs.make_mesh({"data": devices}), in_specs=P("data"), out_specs=P("data"))
    expected = []
    for place in range(4):
        with keyed_random(7, 0, place):
            expected.append(sum(apply(params, buffers, x[place])[0] for _ in range(2)))
    assert torch.equal(fs.unshard(f(x)), torch.stack(expected))
    assert any(0 < mean < 4 for mean in torch.stack(expected).flatten().tolist())


# -- on devices -----------------------------------------------------------------------------------------------------


class Parallel(nn.Module):
    """Has collectives in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x):
        self.x = x
        y = fs.psum(self.first(x), "data")
        return self.second(self.norm(fs.pvary(y, "data") + self.x))


def test_devices_call_one_apply_each_with_its_own_parameters():
    torch.manual_seed(0)
    module = Parallel()
    apply, params, buffers = functionalize(module)
    before = snapshot(module)
    x = torch.randn(3, D)

    def main():
        own = {name: (p.detach() * (1 + fs.axis_index("data"))).requires_grad_() for name, p in params.items()}
        output, after = apply(own, buffers, x)
        return output, after, torch.autograd.grad(output.sum(), list(own.values()))

    results = fs.run(main, mesh=fs.make_mesh({"data": 4}))
    total = sum((1 + i) * module.first(x) for i in range(4))
    for i, (output, after, gradients) in enumerate(results):
        norm = copy.deepcopy(module.norm)
        with torch.no_grad():
            norm.weight.mul_(1 + i)
            norm.bias.mul_(1 + i)
        close(output, (1 + i) * module.second(norm(total + x)))
        close(after["norm.running_mean"], norm.running_mean)
        assert all(torch.isfinite(g).all() for g in gradients)
    assert_untouched(module, before)


class Normed(nn.Module):
    def __init__(self, dims, **options):
        super().__init__()
        kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims]
        self.first, self.norm = nn.Linear(D, D), kind(3, **options)
        self.second = nn.Linear(D, 1)

    def forward(self, x):
        y = self.first(x)  # (batch, channels, ...) as they come
        y = self.norm(y[:, :3] if y.ndim == 2 else y)
        return self.second(nn.functional.pad(y, (0, 1)) if y.ndim == 2 else y)


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=["default", "cumulative", "not affine", "not tracked"],
)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_synchronised_batch_norm_is_that_of_the_whole_batch(dims, options, train):
    torch.manual_seed(0)
    module = Normed(dims, **options).double().train(train)
    x = torch.randn(8, *{2: (D,), 3: (3, D), 4: (3, 2, D)}[dims], dtype=torch.float64) + 100
    apply, params, buffers = functionalize(module, sync_batchnorm="data")

    def device(params, x):
        params = {name: p.requires_grad_() for name, p in params.items()}
        output, after = apply(fs.pvary(params, "data"), buffers, x)
        loss = fs.psum(output.sin().sum(), "data")
        return loss, torch.autograd.grad(loss, list(params.values()), materialize_grads=True, allow_unused=True), after

    step = fs.shard_map(device, mesh=fs.make_mesh({"data": 4}), in_specs=(P(), P("data")), out_specs=P())
    loss, gradients, after = step({name: p.detach() for name, p in params.items()}, x)
    expected = module(x).sin().sum()
    expected.backward()

    def same(got, expected):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)

    same(fs.unshard(loss), expected)
    for name, g in zip(params, gradients, strict=True):
        same(fs.unshard(g), module.get_parameter(name).grad)
    for name, b in module.named_buffers():
        same(fs.unshard(after[name]), b)


def test_synchronised_batch_norm_of_uneven_batches_far_from_zero():
    """Single precision, a mean of ten thousand, and a device without any rows."""
    torch.manual_seed(0)
    module = nn.BatchNorm1d(D)
    x = torch.randn(6, D) + 1e4
    apply, params, buffers = functionalize(module, sync_batchnorm="data")
    cuts = [0, 1, 4, 4, 6]

    def main():
        place = fs.axis_index("data")
        return apply(params, buffers, x[cuts[place] : cuts[place + 1]])

    results = fs.run(main, mesh=fs.make_mesh({"data": 4}))
    expected = nn.functional.batch_norm(x.double(), None, None, training=True).float()
    torch.testing.assert_close(torch.cat([y for y, _ in results]), expected, rtol=1e-3, atol=1e-3)
    variance = (0.9 + 0.1 * x.double().var(0)).float()
    for _, after in results:
        torch.testing.assert_close(after["running_var"], variance, rtol=1e-4, atol=1e-4)


def test_what_another_branch_reads_later_is_kept():
    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.center = torch.zeros(D)

        def forward(self, x):
            if not self.training:
                return x - self.center
            self.center = x.mean(0)
            return x - self.center

    module, plain, x = Centered(), Centered(), torch.randn(3, D)
    apply, params, buffers = functionalize(module)
    for _ in range(3):
        output, buffers = apply(params, buffers, x)
        close(output, plain(x))
    module.eval(), plain.eval()
    output, buffers = apply(params, buffers, 2 * x)
    close(output, plain(2 * x))
    close(buffers["center:kept"][0], x.mean(0))


def test_large_containers_are_shared():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.vocabulary, self.short = {str(number): number for number in range(10_000)}, {"a": 1}
            self.given = None

        def forward(self, x):
            given.append((self.vocabulary, self.short))
            return x * self.vocabulary["3"]

    module, given = Tokens(), []
    apply, params, buffers = functionalize(module)
    output, _ = apply(params, buffers, torch.ones(2))
    assert output.tolist() == [3.0, 3.0]
    ((vocabulary, short),) = given
    assert vocabulary is module.vocabulary and short == module.short and short is not module.short
