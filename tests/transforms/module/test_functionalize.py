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
from torch.utils.checkpoint import CheckpointError, checkpoint

import fshard as fs
from fshard import P
from fshard.errors import ModuleError
from fshard.randomness import keyed_random
from fshard.transforms.module.functionalize import functionalize
from fshard.transforms.module.remat import remat
from tests.helpers.sampled import examples
from tests.transforms.module.zoo import MODULES, D

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
]


KINDS = [
    kind for kind in MODULES if kind != "closing"
]  # its function refers to the module that was given
each_module = pytest.mark.parametrize("kind", KINDS)


def made(kind, seed=0):
    torch.manual_seed(seed)
    return MODULES[kind]()


def close(got, expected):
    torch.testing.assert_close(got, expected)


def snapshot(module):
    """Everything that could have changed: names, objects, values, versions, attributes."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    own = [(name, id(x), x._version, x.detach().clone()) for name, x in tensors]
    attributes = [
        (name, key, id(value))
        for name, part in module.named_modules()
        for key, value in vars(part).items()
    ]
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
    module = made(kind).train(train)
    plain = made(kind).train(train)
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
        gradients = torch.autograd.grad(
            output.square().sum(), list(wanted.values()), allow_unused=True
        )
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
        self.layer = nn.Linear(D, D).requires_grad_(not frozen)
        self.write = write

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
    """A momentum encoder: its parameters are among the buffers, and the given ones stay as they
    are.
    """

    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Linear(D, D)
            self.target = nn.Linear(D, D).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                for mine, other in zip(
                    self.online.parameters(), self.target.parameters(), strict=True
                ):
                    other.mul_(0.5).add_(mine, alpha=0.5)
            return self.online(x) - self.target(x)

    module = Momentum()
    plain = copy.deepcopy(module)
    apply, params, buffers = functionalize(module, buffers="target.**")
    assert [*params] == ["online.weight", "online.bias"] and [*buffers] == [
        "target.weight",
        "target.bias",
    ]
    before = {name: x.clone() for name, x in buffers.items()}
    x = torch.randn(3, D)
    now = buffers
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
    assert [apply(params, buffers, torch.ones(())).__getitem__(0).item() for _ in range(3)] == [
        1,
        2,
        3,
    ]

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
    module = made(kind).eval()
    other = made(kind, seed=1).eval()
    apply, _, _ = functionalize(module)
    _, params, buffers = functionalize(other)
    x = torch.randn(3, D)
    close(apply(params, buffers, x)[0], other(x))


# -- the rest of the contract ----------------------------------------------------------------------


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
    assert (
        all(torch.equal(after[name], x) for name, x in known.items())
        and known["num_batches_tracked"] == 1
    )


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "stateful"]
)  # which counts the recomputation
def test_remat_of_apply_has_equal_gradients(kind, request):
    if kind == "lstm with weight norm":
        reason = "torch computes a list of weights that are no leaves by another kernel when it runs again"
        request.applymarker(pytest.mark.xfail(strict=True, raises=CheckpointError, reason=reason))
    apply, params, buffers = functionalize(made(kind))
    x = torch.randn(3, D)
    expected = [p for p in params.values() if p.requires_grad]

    def gradients(apply):
        output, after = apply(params, buffers, x)
        return torch.autograd.grad(output.sum(), expected, allow_unused=True), after

    again = remat(apply)
    functionalized = gradients(again)
    close(functionalized, gradients(apply))


@pytest.mark.parametrize(
    "kind",
    ["tied words", "called three times", "lists", "batch norm", "parametrized", "weight norm"],
)
def test_torch_func_transforms_apply_to_the_function(kind):
    module = made(kind)
    apply, params, buffers = functionalize(module)
    params = {name: p.detach() for name, p in params.items()}
    x = torch.randn(3, D)

    def loss(params, x):
        output, after = apply(params, buffers, x)
        return output.square().sum(), after

    gradients, after = grad(loss, has_aux=True)(params, x)
    y = (own := made(kind))(x)
    _ = None
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
@settings(max_examples=examples(18))
def test_any_module_tree_equals_the_module(data):
    """Modules that share submodules and tensors at random, called in any order."""
    torch.manual_seed(0)
    leaves = [nn.Linear(D, D) for _ in range(3)] + [nn.BatchNorm1d(D)]
    for _ in range(data.draw(st.integers(0, 2))):
        i = data.draw(st.integers(0, 2))
        j = data.draw(st.integers(0, 2))
        leaves[i].weight = leaves[j].weight
    tree = st.recursive(
        st.integers(0, 3).map(lambda i: leaves[i]),
        lambda inner: st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: nn.Sequential(*parts)
        ),
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


# -- refusals --------------------------------------------------------------------------------------


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
        apply(
            {"weight": params["weight"], "wieght": params["bias"]},
            {"a.b": torch.ones(1)},
            torch.ones(2, D),
        )
    assert str(error.value).endswith(
        "are a.b, bias, num_batches_tracked, running_mean, running_var, wieght."
    )
    with pytest.raises(ModuleError, match="in this order"):
        apply(buffers, params, torch.ones(2, D))


# -- random draws ----------------------------------------------------------------------------------


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


# -- on devices ------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, dims, **options):
        super().__init__()
        kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims]
        self.first = nn.Linear(4, 4)
        self.norm = kind(3, **options)
        self.second = nn.Linear(4, 1)

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
    x = torch.randn(8, *{2: (4,), 3: (3, 4), 4: (3, 2, 4)}[dims], dtype=torch.float64) + 100
    apply, params, buffers = functionalize(module, sync_batchnorm="data")

    def device(params, x):
        params = {name: p.requires_grad_() for name, p in params.items()}
        output, after = apply(fs.pvary(params, "data"), buffers, x)
        loss = fs.psum(output.sin().sum(), "data")
        return (
            loss,
            torch.autograd.grad(
                loss, list(params.values()), materialize_grads=True, allow_unused=True
            ),
            after,
        )

    step = fs.shard_map(
        device, mesh=fs.make_mesh({"data": 4}), in_specs=(P(), P("data")), out_specs=P()
    )
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
