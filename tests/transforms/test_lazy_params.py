"""Parameters inside a loss function are tensors to whoever asks, and to modules, torch.func and
autograd Functions.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from tests.helpers.processes import run_processes
from tests.transforms.helpers.gradients import Product, assert_equal, serial, sharded
from tests.transforms.module.zoo import MODULES, D

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

STAGES, N = (0, 3), {"data": 2}


def rules(stage: int) -> Any:
    return fs.fsdp("data") if stage == 3 else P()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- what a handle is ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_lazy_param_knows_metadata_before_unshard(stage):
    mesh = fs.make_mesh({"data": 2})
    own = fs.shard_params({"w": torch.ones(4, 3), "fixed": torch.ones(2)}, rules(stage), mesh=mesh)
    gathered = []

    def loss_fn(p, x):
        w = p["w"]
        fixed = p["fixed"]
        assert isinstance(w, Tensor)
        with fs.ledger() as comm:
            known = (
                w.shape,
                w.size(),
                w.size(1),
                w.ndim,
                w.dim(),
                w.numel(),
                len(w),
                w.dtype,
                w.device,
                w.is_cuda,
            )
            assert known == (
                (4, 3),
                (4, 3),
                3,
                2,
                2,
                12,
                4,
                torch.float32,
                torch.device("cpu"),
                False,
            )
            assert (w.requires_grad, fixed.requires_grad) == (True, False)
            assert (w.is_floating_point(), w.element_size(), w.nbytes) == (True, 4, 48)
            assert repr(w) == "LazyParam(float32[4, 3])" and {w: 1}[w] == 1
        gathered.append(comm.calls())
        copies = (
            w.data,
            w.detach(),
            torch.utils._pytree.tree_map(lambda x: x + 0, {"a": [w]})["a"][0],
        )
        assert all(torch.equal(x, torch.ones(4, 3)) for x in copies)
        assert [x.requires_grad for x in copies] == [False, False, True]
        return (w @ x[0, :3] + fixed.sum()).mean()

    run = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), frozen=lambda path: path == "fixed"
    )
    run(own, torch.ones(2, 3))
    assert gathered == [0, 0]


def per_sample(p, x):
    one = grad(lambda w, x: (w @ x @ p["v"]).sin().sum())
    return vmap(one, in_dims=(None, 0))(p["w"], x).square().sum((1, 2)).mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "operators": lambda p, x: ((x @ p["w"] @ p["v"].T) ** 2).mean(),
    "a Function": lambda p, x: (Product.apply(Product.apply(x, p["w"]), p["v"].T) ** 2).mean(),
    "a Function and operators": lambda p, x: (
        (Product.apply(x @ p["w"], p["w"]) @ p["v"]).sin().mean()
    ),
    "vmap over samples": lambda p, x: vmap(lambda x, w: (w @ x @ p["v"]).sin().sum(), (0, None))(
        x, p["w"]
    ).mean(),
    "vmap over rows": lambda p, x: (
        vmap(lambda row: (row @ p["v"]).sin().sum())(p["w"]).mean() * x.mean()
    ),
    "jvp": lambda p, x: (
        jvp(lambda w: (x @ w @ p["v"]).sin(), (p["w"],), (p["v"],))[1].sum(1).mean()
    ),
    "checkpoint": lambda p, x: checkpoint(
        lambda w, x: (x @ w).sin() @ p["v"], p["w"], x, use_reentrant=False
    ).mean(),
}


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"reproducible": True, "slices": 4}], ids=str
)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", LOSSES)
def test_lazy_param_gets_gradients_by_every_path(name, stage, options):
    params = {"w": draw(3, 3), "v": draw(3, 3, seed=1)}
    x = draw(8, 3, seed=2)
    actual = sharded(LOSSES[name], params, x, N, stage, live_units=1, **options)
    assert_equal(actual, serial(LOSSES[name], params, x))


# -- torch.func ------------------------------------------------------------------------------------


def of_captured(p, x):
    """The derivative by what is no parameter; parameters come from outside, one of them as a view."""
    w = p["w"].T
    one = grad(lambda x: (x @ w).sin().sum() * (p["v"] @ x).cos().sum())
    return vmap(one)(x).square().sum(1).mean()


def of_jacobians(p, x):
    jacobian = vmap(
        jacrev(lambda w, v, row: (row @ w @ v).tanh(), argnums=(0, 1)), in_dims=(None, None, 0)
    )
    return sum(each.square().sum((1, 2, 3)) for each in jacobian(p["w"], p["v"], x)).mean()


def of_hessians(p, x):
    curvature = vmap(hessian(lambda v, row: (row @ v).sin().sum()), in_dims=(None, 0))(p["v"], x)
    return (curvature.square().sum((1, 2, 3, 4)) * (x @ p["w"].T).sum(1)).mean()


def of_pullbacks(p, x):
    def one(row):
        y, pull = vjp(lambda p: (row @ p["w"] @ p["v"]).sin(), p)
        return sum(g.square().sum() for g in pull(y)[0].values())

    return vmap(one)(x).mean()


def between(p, x):
    """Transforms among operations that know nothing of them, and of the same parameters."""
    x = torch.tanh(F.linear(x, p["w"], p["v"][0]))
    return (
        per_sample(p, x + vmap(grad(lambda row: (row @ p["v"].T).sin().sum()))(x))
        + (x @ p["w"]).mean()
    )


TRANSFORMED = [per_sample, of_captured, of_jacobians, of_hessians, of_pullbacks, between]
OPTIONS = [
    {},
    {"accumulate": 2},
    {"reproducible": True, "slices": 4},
    {"reshard_after_forward": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_fn", TRANSFORMED, ids=lambda fn: fn.__name__)
def test_torch_func_works_in_every_zero_stage(loss_fn, options):
    params = {"w": draw(3, 3), "v": draw(3, 3, seed=1)}
    x = draw(8, 3, seed=2)
    expected = serial(loss_fn, params, x)
    for stage in STAGES:
        assert_equal(sharded(loss_fn, params, x, N, stage, live_units=1, **options), expected)


def per_sample_with_dropout(p, x):
    return per_sample(p, F.dropout(x, 0.5))


def test_step_that_runs_again_for_torch_func_draws_once():
    params = {"w": draw(3, 3), "v": draw(3, 3, seed=1)}
    x = draw(8, 3, seed=2)
    results = []
    for stage in STAGES:
        mesh = fs.make_mesh(N)
        shards = fs.shard_params(params, rules(stage), mesh=mesh)
        step = fs.value_and_grad(per_sample_with_dropout, mesh=mesh, batch=P("data"))
        torch.manual_seed(5)
        results.append([(loss, fs.unshard(g)) for loss, g in (step(shards, x), step(shards, x))])
    torch.testing.assert_close(*results)


def torch_func_on_a_process():
    """Return the losses of two steps and an evaluation under ZeRO-3, with units of one parameter."""
    params = {"w": draw(3, 3), "v": draw(3, 3, seed=1)}
    x = draw(8, 3, seed=2)
    mesh = fs.make_mesh(N)
    shards = fs.shard_params(params, fs.fsdp("data", unit=["w", "v"]), mesh=mesh)
    results = []
    for loss_fn in (per_sample, of_hessians):
        step = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))
        gradients = [fs.unshard(step(shards, x)[1]) for _ in range(3)]
        evaluate = fs.evaluate(loss_fn, mesh=mesh, batch=P("data"))
        results.append((evaluate(shards, x), *gradients))
    return results


def test_torch_func_under_zero3_works_on_processes():
    params = {"w": draw(3, 3), "v": draw(3, 3, seed=1)}
    x = draw(8, 3, seed=2)
    for results in run_processes(torch_func_on_a_process, 2, timeout=170):
        for loss_fn, (loss, *gradients) in zip((per_sample, of_hessians), results, strict=True):
            torch.testing.assert_close(loss, loss_fn(params, x))
            for gradient in gradients:
                torch.testing.assert_close(gradient, grad(loss_fn)(params, x))


def test_kept_part_inside_remat_still_recomputes():
    kept = []

    def loss_fn(p, x):
        def block(w, x):
            x = fs.with_unsharded_params(lambda w, x: x @ w, keep=True)(w, x)
            saved = torch.exp(x)
            kept.append(weakref.ref(saved))
            return saved * 1

        y = fs.remat(block)(p["w"], x)
        kept.append(kept[-1]() is None)
        return y.mean()

    sharded(loss_fn, {"w": draw(3, 3)}, draw(8, 3, seed=2), {"data": 1}, 3)
    assert kept[1] is True


# -- torch.compile ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo looks at it
def test_compiled_loss_gets_unsharded_parameters():
    params = {"w": draw(3, 3), "v": draw(3, 3, seed=1)}
    x = draw(8, 3, seed=2)
    plain = LOSSES["operators"]
    expected = serial(plain, params, x)
    full = torch.compile(plain, backend="eager", fullgraph=True)
    part = torch.compile(lambda w, x: x @ w, backend="eager")
    marked = fs.with_unsharded_params(part)
    for stage in STAGES:
        assert_equal(sharded(full, params, x, N, stage), expected)
        assert_equal(
            sharded(lambda p, x: ((marked(p["w"], x) @ p["v"].T) ** 2).mean(), params, x, N, stage),
            expected,
        )
        with pytest.raises(
            ValueError,
            match=r"torch.compile cannot trace .* fs.with_unsharded_params\(torch.compile\(fn\)\)",
        ):
            sharded(lambda p, x: ((part(p["w"], x) @ p["v"].T) ** 2).mean(), params, x, N, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_collective_accepts_lazy_param(stage):
    x = draw(4, 3)

    def loss_fn(p, x):
        moved = (
            fs.psum_scatter(fs.all_gather(p["w"], "data"), "data"),
            fs.all_to_all([p["w"]], "data")[0],
        )
        return (sum(moved).square().mean() + fs.psum.start(p["w"], "data").wait().mean()) * x.mean()

    def same(p, x):
        return loss_fn({"w": p["w"] * 1}, x)

    assert_equal(sharded(loss_fn, {"w": x}, x, N, stage), sharded(same, {"w": x}, x, N, stage))


# -- functional_call -------------------------------------------------------------------------------


NAMES = ["linear", "convolutions", "tied words", "attention", "lstm"]


def by_functional_call(
    name: str, stage: int, n: int = 2, wrap: Callable[..., Any] = lambda fn: fn
) -> list[Tensor]:
    """Return a module's gradients, minus those of the module itself on the whole batch."""
    torch.manual_seed(0)
    module = MODULES[name]().double()
    x = draw(8, D, seed=1)
    params = {key: value.detach() for key, value in module.named_parameters()}
    called = wrap(lambda p, x: functional_call(module, p, (x,)))
    _, actual = sharded(
        lambda p, x: called(p, x).sin().square().mean(), params, x, {"data": n}, stage, live_units=1
    )
    module(x).sin().square().mean().backward()
    return [
        g - module.get_parameter(key).grad for g, key in zip(actual, sorted(params), strict=True)
    ]


def assert_zero(differences):
    assert differences and max(x.abs().max().item() for x in differences) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_functional_call_accepts_lazy_params(name):
    assert_zero(by_functional_call(name, 0))
    assert_zero(by_functional_call(name, 3, n=1))
    assert_zero(by_functional_call(name, 3, wrap=fs.with_unsharded_params))


class Changing(nn.Module):
    """Does something to its layer before it calls it."""

    def __init__(self, do):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.fixed = nn.Linear(3, 1).requires_grad_(False)
        self.do = do

    def forward(self, x):
        self.do(self)
        return self.fixed(self.layer(x))


def of_one_step(do, plugin):
    def main():
        model = Changing(do)
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.layer.parameters(), lr=0.1))
        booster.backward(model(torch.ones(2, 3)).sum(), opt)
        opt.step()

    fs.run(main, mesh=fs.make_mesh({"data": 2}))


PLUGINS = [fs.DDPPlugin, fs.FSDPPlugin, lambda: fs.DDPPlugin(reproducible=True, slices=2)]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_lazy_param_is_leaf_without_grad(plugin):
    """Without the warning of torch that tensors in the middle of a graph have none."""

    def do(module):
        assert all(x.is_leaf and x.grad is None and x.grad_fn is None for x in module.parameters())
        module.zero_grad()
        module.layer.requires_grad_(True), module.fixed.requires_grad_(False)

    of_one_step(do, plugin())
