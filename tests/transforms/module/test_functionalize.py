"""A module as a function gives what the module gives, and nobody sees that it was run."""

import copy
import weakref
from functools import partial
from threading import Lock

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
from fshard.errors import ModuleError
from fshard.transforms.module.functionalize import functionalize
from fshard.transforms.module.remat import remat
from fshard.transforms.reproducible.randomness import keyed_random

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
    """Integers, no saving, a new shape; and private ones: one that was None, and one that the forward registers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.ones(D, dtype=torch.bool), persistent=False)
        self.register_buffer("seen", torch.zeros(0, D))
        self.register_buffer("later", None)
        self.register_buffer("tied", self.mask)

    def forward(self, x):
        self.count += 1
        self.seen = torch.cat([self.seen, x.detach()])
        self.later = self.seen.sum(0) if self.later is None else self.later * 0.5
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
        self.plain = [self.a, (self.b, "name")]
        self.act = partial(self.scaled, by=2.0)
        self.helper = Helper(self.a)
        self.constant = torch.full((D,), 3.0)

    def scaled(self, x, by):
        return x * by * self.ws[1]

    def forward(self, x):
        first, (second, _) = self.plain
        x = self.act(second(first(x))) * self.ws[0] + self.named["scale"]
        return self.helper.run(x) + self.constant


class Helper:
    def __init__(self, layer):
        self.layer = layer

    def run(self, x):
        return self.layer(x)


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
    "stateful": Stateful,
    "gradient in forward": Inner,
    "checkpoints in forward": Checkpointed,
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, D)), nn.Conv1d(1, D, D), nn.BatchNorm1d(D), nn.Flatten()),
}
each_module = pytest.mark.parametrize("kind", MODULES)


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
def test_apply_called_twice_equals_module_called_twice(kind, train):
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
        for name, b in after.items():
            close(b, plain.get_buffer(name))
        assert after.keys() == buffers.keys()
        buffers = after
    assert_untouched(module, before)


class Writing(nn.Module):
    """Writes to a parameter, one way or another."""

    def __init__(self, write, frozen=False):
        super().__init__()
        self.layer, self.write = nn.Linear(D, D).requires_grad_(not frozen), write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.layer)
        return self.layer(x)


WRITES = {
    "in place": lambda layer: layer.bias.add_(1),
    "operator": lambda layer: layer.bias.__iadd__(1),
    "bound": lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(D))),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", WRITES)
def test_forward_that_writes_to_a_parameter_raises(way, frozen):
    apply, params, buffers = functionalize(Writing(WRITES[way], frozen))
    with pytest.raises(ModuleError, match=r"apply of Writing: its forward .* parameter layer.bias"):
        apply({name: x.clone() for name, x in params.items()}, buffers, torch.ones(D))


def test_frozen_parameters_declared_as_buffers_are_updated():
    """A momentum encoder: its parameters are among the buffers, and the given ones stay as they are."""

    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.online, self.target = nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                for mine, other in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    other.mul_(0.5).add_(mine, alpha=0.5)
            return self.online(x) - self.target(x)

    module = Momentum()
    plain = copy.deepcopy(module)
    apply, params, buffers = functionalize(module, buffers="target.**")
    assert [*params] == ["online.weight", "online.bias"] and [*buffers] == ["target.weight", "target.bias"]
    before = {name: x.clone() for name, x in buffers.items()}
    x, now = torch.randn(3, D), buffers
    for _ in range(3):
        output, now = apply(params, now, x)
        close(output, plain(x))
    close(now, {name: plain.get_parameter(name).detach() for name in now})
    assert all(torch.equal(buffers[name], x) for name, x in before.items())
    with pytest.raises(ModuleError, match=r"online.weight, online.bias must be frozen"):
        functionalize(module, buffers="online.**")


def test_attributes_are_private_to_the_device_and_persist():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.log = 0, []

        def forward(self, x):
            self.calls += 1
            self.log.append(self.calls)
            return x * self.calls

    module = Counting()
    apply, params, buffers = functionalize(module)
    assert [apply(params, buffers, torch.ones(())).__getitem__(0).item() for _ in range(3)] == [1, 2, 3]

    def main():
        own = fs.axis_index("data")
        return [apply(params, buffers, torch.ones(()))[0].item() for _ in range(own + 1)][-1]

    assert fs.run(main, mesh=fs.make_mesh({"data": 3})) == [1, 2, 3]
    assert module.calls == 0 and module.log == []


def test_module_that_cannot_be_copied_raises():
    module = nn.Linear(D, D)
    module.lock = Lock()
    with pytest.raises(ModuleError, match=r"Linear must support copy.deepcopy; got TypeError"):
        functionalize(module)


def test_apply_without_grad_keeps_no_parameters():
    apply, params, buffers = functionalize(nn.Linear(D, D))
    params = {name: p.detach().clone() for name, p in params.items()}
    with torch.no_grad():
        apply(params, buffers, torch.ones(1, D))
    given = [weakref.ref(x) for x in params.values()]
    del params
    assert all(x() is None for x in given)


@each_module
def test_apply_accepts_other_tensors(kind):
    module, other = made(kind).eval(), made(kind, seed=1).eval()
    apply, _, _ = functionalize(module)
    _, params, buffers = functionalize(other)
    x = torch.randn(3, D)
    close(apply(params, buffers, x)[0], other(x))


# -- the rest of the contract ---------------------------------------------------------------------------------------


def test_apply_follows_train_and_eval():
    module = nn.Sequential(nn.Dropout(1.0), nn.Linear(D, D))
    apply, params, buffers = functionalize(module)
    x = torch.ones(2, D)
    for mode in (True, False, True):
        module.train(mode)
        close(apply(params, buffers, x)[0], module(x))
    module.train()
    module[0].eval()
    close(apply(params, buffers, x)[0], module(x))


@pytest.mark.parametrize("again", [remat, lambda f: partial(checkpoint, f, use_reentrant=False)])
def test_checkpoint_recomputation_keeps_returned_buffers(again):
    class Normalised(nn.BatchNorm1d):
        def forward(self, x):
            return again(super().forward)(x)

    apply, params, buffers = fs.functionalize(Normalised(3))
    y, after = apply(params, buffers, torch.randn(4, 3))
    known = {name: x.clone() for name, x in after.items()}
    y.square().sum().backward()
    assert all(torch.equal(after[name], x) for name, x in known.items()) and known["num_batches_tracked"] == 1


@pytest.mark.parametrize("kind", [kind for kind in MODULES if kind != "stateful"])  # which counts the recomputation
def test_remat_of_apply_has_equal_gradients(kind):
    apply, params, buffers = functionalize(made(kind))
    x = torch.randn(3, D)
    wanted = [p for p in params.values() if p.requires_grad]

    def gradients(apply):
        output, after = apply(params, buffers, x)
        return torch.autograd.grad(output.sum(), wanted, allow_unused=True), after

    again = remat(apply)
    functionalized = gradients(again)
    close(functionalized, gradients(apply))


@pytest.mark.parametrize("kind", ["linear", "tied", "twice", "lists", "batch norm", "parametrized", "weight norm"])
def test_torch_func_transforms_apply_to_the_function(kind):
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


@given(st.data())
@settings(max_examples=30)
def test_any_module_tree_equals_the_module(data):
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


def test_torch_lazy_module_raises():
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(
        ModuleError, match="^functionalize of Sequential: 0.weight, 0.bias, 1.weight, 1.bias, "
    ) as error:
        functionalize(module)
    assert "must have a shape" in str(error.value)
    module(torch.ones(2, 5))
    functionalize(module)


def test_unknown_names_raise():
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


# -- random draws ---------------------------------------------------------------------------------------------------


def test_keyed_draws_depend_on_the_key_alone():
    def draw(*key):
        with keyed_random(*key):
            return torch.rand(4)

    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0), (0, 0, 0, "a"), (0, 0, 0, 0)]
    draws = [draw(*key) for key in keys]
    torch.rand(3)
    for key, drawn in zip(keys, draws, strict=True):
        assert torch.equal(draw(*key), drawn)
    assert len({tuple(drawn.tolist()) for drawn in draws}) == len(keys)


def test_keyed_draws_restore_the_generator():
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
def test_dropout_is_equal_on_any_number_of_devices(devices):
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


def test_apply_on_several_devices_uses_own_parameters():
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
def test_synchronised_batchnorm_equals_global_batch(dims, options, train):
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


def test_synchronised_batchnorm_of_uneven_offset_batches_is_exact():
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
