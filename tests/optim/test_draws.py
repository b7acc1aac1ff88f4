"""Random draws in an optimizer of a user are those of one device.

The oracle is the run on one device from the same seed (`trained(update, 1, 0)`). Draws that would
depend on how leaves are sharded raise, and so do unequal results of replicas.
"""

from dataclasses import replace

import pytest
import torch
from optree import tree_map
from torch import nn

import fshard as fs
from fshard import P
from fshard.errors import MismatchError, OptimizerError
from fshard.testing import check_elementwise
from tests.helpers.processes import run_processes

SHAPES = {"a": (5, 3), "b": (5, 3), "c": (7,), "d": (), "f": (15,), "one": (1,)}


def each(of_leaf):
    """Return an update that is a function of the gradient and the parameter of each leaf."""

    def update(grads, state, params):
        return tree_map(of_leaf, grads, params), state

    return update


def optimizer(update, init=lambda params: (), sharding="flat"):
    """Return an optimizer, without state by default."""
    return fs.optim.Optimizer(init, update, sharding=sharding)


def rounded(grad, param):
    """Round to multiples of 1/4, up or down at random."""
    x = 4 * (param - 0.1 * grad)
    return (x + torch.rand_like(x)).floor() / 4 - param


def by_lists(grads, state, params):
    names = [name for name, grad in grads.items() if grad is not None]
    doubled = torch._foreach_mul([grads[name] for name in names], 2.0)
    noise = torch._foreach_mul([torch.randn_like(x) for x in doubled], 0.5)
    return {**dict.fromkeys(grads), **dict(zip(names, noise, strict=True))}, state


def by_own_keys(grads, state, params):
    updates = dict.fromkeys(grads)
    for name, grad in grads.items():
        if grad is not None:
            with fs.keyed_random(5, name):
                updates[name] = torch.randn_like(grad)
            with fs.keyed_random(5, name):
                repeated = torch.randn_like(grad)
            assert torch.equal(repeated, updates[name])
    return updates, state


UPDATES = {
    "randn_like": each(lambda g, p: torch.randn_like(g) - torch.rand_like(p)),
    "stochastic rounding": each(rounded),
    "a size": each(lambda g, p: torch.randn(g.shape) + torch.normal(0.0, 1.0, size=p.size())),
    "normal_": each(lambda g, p: torch.empty_like(g).normal_() + torch.empty(g.shape).uniform_()),
    "bernoulli": each(lambda g, p: torch.bernoulli(torch.sigmoid(p)) + g.bernoulli(0.3)),
    "normal of tensors": each(lambda g, p: torch.normal(g, p.abs())),
    "distributions": each(lambda g, p: torch.distributions.Laplace(g, 1.0).sample()),
    "lists": by_lists,
    "own keys": by_own_keys,
}


def trained(
    update, devices, stage, *, sharding="flat", init=lambda params: (), rules=None, axes=None
):
    """Train two steps from one seed; return the parameters."""
    torch.manual_seed(0)
    mesh = fs.make_mesh(axes or {"data": devices})
    draw = torch.Generator().manual_seed(1)
    params = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    if rules is None:
        rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(params, rules, mesh=mesh)
    opt = optimizer(update, init, sharding)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)

    def loss_fn(params, x):
        return sum(p.square().sum() for p in params.values()) * x.mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    state = opt.init(params)
    for _ in range(2):
        params, state, _ = step(params, state, torch.ones(8))
    return {name: fs.unshard(x) for name, x in params.items()}


def same(actual, expected):
    return all(torch.allclose(actual[name], x, atol=1e-5) for name, x in expected.items())


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize(("devices", "stage"), [(2, 0), (3, 1), (4, 3)])
def test_draws_of_update_equal_one_devices(name, devices, stage):
    expected = trained(UPDATES[name], 1, 0)
    assert same(trained(UPDATES[name], devices, stage), expected)
    assert same(trained(UPDATES[name], devices, stage, sharding="owners"), expected)


def test_draws_of_replicas_of_shards_equal_one_devices():
    expected = trained(UPDATES["randn_like"], 1, 0)
    assert same(trained(UPDATES["randn_like"], 4, 3, axes={"pod": 2, "data": 2}), expected)


def test_draws_of_dims_equal_one_devices():
    """A leaf, sharded by a dim and flat along another axis, gets its part of the full draw."""

    def update_of_zeros(axes, spec, stage):
        torch.manual_seed(0)
        mesh = fs.make_mesh(axes)
        params = fs.shard_params({"w": torch.zeros(4, 6)}, {"w": spec}, mesh=mesh)
        opt = optimizer(UPDATES["randn_like"])
        opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
        layout = opt.gradients(params["w"].layout)
        grads = {"w": fs.device_put(torch.zeros(4, 6), layout)}
        updates, _ = opt.update(grads, opt.init(params), params)
        return fs.unshard(updates["w"])

    columns = P(None, "model")
    expected = update_of_zeros({"data": 1, "model": 1}, P(), 0)
    assert torch.equal(update_of_zeros({"data": 2, "model": 2}, columns, 1), expected)
    assert torch.equal(update_of_zeros({"data": 1, "model": 3}, columns, 0), expected)


def test_draws_differ_by_leaf_and_step_and_repeat_by_seed():
    first = trained(UPDATES["a size"], 2, 3)
    assert same(trained(UPDATES["a size"], 2, 3), first)

    mesh = fs.make_mesh({"data": 2})
    zeros = {"a": torch.zeros(4), "b": torch.zeros(4)}
    params = fs.shard_params(zeros, P(), mesh=mesh)
    opt = optimizer(UPDATES["randn_like"])
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=0)
    draws = []
    for _ in range(2):
        updates, _ = opt.update(params, (), params)
        draws += [fs.unshard(x) for x in updates.values()]
    assert len(torch.cat(draws).unique()) == 16


def test_draws_of_stages_equal_those_of_the_full_model():
    batch = (torch.ones(8, 2), torch.ones(8, 1))

    def loss(y, batch):
        return (y - batch[1]).square().mean()

    def model():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))

    def noisy(mesh, stage):
        opt = optimizer(UPDATES["randn_like"])
        return fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)

    def after_a_step(step, opt, params):
        torch.manual_seed(0)
        after, _, _ = step(params, opt.init(params), batch)
        return fs.unshard(after)

    # The full model on one device.
    one = fs.make_mesh({"data": 1})
    apply, params, buffers = fs.functionalize(model())

    def loss_fn(params, batch):
        y, _ = apply(params, buffers, batch[0])
        return loss(y, batch)

    opt = noisy(one, 0)
    step = fs.train_step(loss_fn, opt, mesh=one, batch=P("data"))
    expected = after_a_step(step, opt, fs.shard_params(params, P(), mesh=one))

    # Three stages of two devices.
    mesh = fs.make_mesh({"pipe": 3, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=3, microbatches=2)
    stages = fs.pipeline.split_stages(model(), 3)
    opt = noisy(mesh, 1)
    options = {"mesh": mesh, "batch": P("data"), "schedule": schedule, "loss": loss}
    step = fs.train_step(stages, opt, **options)
    params = fs.shard_stages(stages, P(), mesh=mesh, schedule=schedule)
    first, second, third = after_a_step(step, opt, params)

    assert same({**first, **second, **third}, expected)


@pytest.mark.parametrize("sharding", ["flat", "owners"])
def test_draws_of_init_equal_one_devices(sharding):
    def init(params):
        return tree_map(torch.randn_like, params)

    def update(grads, state, params):
        return tree_map(lambda g, s: s - g, grads, state), state

    expected = trained(update, 1, 0, init=init)
    assert same(trained(update, 2, 1, init=init, sharding=sharding), expected)
    assert same(trained(update, 4, 3, init=init, sharding=sharding), expected)


def test_draws_in_chain_labels_and_host_memory_equal_one_devices():
    noisy = optimizer(UPDATES["randn_like"])
    opts = {"x": fs.optim.chain(noisy, fs.optim.sgd(0.1)), "y": replace(noisy, sharding="owners")}
    opt = fs.optim.by_label(opts, {"a": "x", "b": "y", "c": "y"})

    def after_a_step(devices, stage, **options):
        torch.manual_seed(0)
        mesh = fs.make_mesh({"data": devices})
        zeros = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3), "c": torch.zeros(5)}
        params = fs.shard_params(zeros, P(), mesh=mesh)
        divided = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage, **options)
        grads = {}
        for name, x in zeros.items():
            grads[name] = fs.device_put(x, divided.gradients(params[name].layout))
        params, _ = divided.step(grads, divided.init(params), params)
        return {name: fs.unshard(x) for name, x in params.items()}

    expected = after_a_step(1, 0)
    assert same(after_a_step(2, 1), expected)
    assert same(after_a_step(3, 2, state_memory="host", update_on="host"), expected)


class Langevin(torch.optim.Optimizer):
    """SGLD with momentum, as a user's optimizer class."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.5).add_(p.grad)
                p.add_(momentum + torch.randn_like(momentum), alpha=-group["lr"])
                p.data.add_(torch.randn(p.shape), alpha=group["lr"])


class ElementwiseLangevin(Langevin):
    sharding = "flat"


def boosted(cls, plugin):
    """Train two steps with a boosted optimizer; return all parameters in one row."""
    torch.manual_seed(0)
    booster = fs.Booster(plugin=plugin)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
    model, opt, *_ = booster.boost(model, cls(model.parameters()))
    x = torch.linspace(-1, 1, 32).view(8, 4)
    rows = x.chunk(fs.axis_size("data"))[fs.axis_index("data")]
    for _ in range(2):
        booster.backward(model(rows).square().mean(), opt)
        opt.step()
        opt.zero_grad()
    return torch.cat([x.reshape(-1) for x in model.state_dict().values()])


@pytest.mark.parametrize("cls", [Langevin, ElementwiseLangevin])
def test_draws_of_optimizer_class_equal_one_devices(cls):
    (expected,) = fs.run(boosted, cls, fs.DDPPlugin(), mesh=fs.make_mesh({"data": 1}))

    of_zero = fs.run(boosted, cls, fs.ZeroPlugin(stage=2), mesh=fs.make_mesh({"data": 2}))
    of_fsdp = fs.run(boosted, cls, fs.FSDPPlugin(), mesh=fs.make_mesh({"data": 4}))

    for actual in (*of_zero, *of_fsdp):
        assert torch.allclose(actual, expected, atol=1e-5)


def in_processes():
    return [trained(UPDATES["stochastic rounding"], 2, stage) for stage in (0, 3)]


def seeded_by_rank():
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"a": torch.zeros(4)}, P(), mesh=mesh)
    opt = optimizer(UPDATES["randn_like"])
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=0)
    state = opt.init(params)
    (index,) = fs.run(lambda: fs.axis_index("data"), mesh=mesh)
    torch.manual_seed(index)

    with pytest.raises(MismatchError, match="random state must be the same"):
        opt.update(params, state, params)


def test_draws_of_processes_equal_one_devices():
    expected = trained(UPDATES["stochastic rounding"], 1, 0)
    for results in run_processes(in_processes, 2):
        assert all(same(result, expected) for result in results)


def test_draws_of_processes_with_seeds_by_rank_raise():
    run_processes(seeded_by_rank, 2)


# -- draws that raise ------------------------------------------------------------------------------

GENERATOR = torch.Generator()
ONE_EACH = "one number for each element"
REFUSED = {  # a draw, a text of the error, the stage and sharding where it raises
    "an own generator": (
        lambda g, p: torch.randn(g.shape, generator=GENERATOR),
        "generator=",
        0,
        "flat",
    ),
    "plain numbers of a shard": (
        lambda g, p: torch.randn(g.numel()).view_as(g),
        "belongs to none",
        1,
        "flat",
    ),
    "randperm": (
        lambda g, p: g.flatten()[torch.randperm(g.numel())].view_as(g),
        "belongs to none",
        1,
        "flat",
    ),
    "a number for each leaf": (lambda g, p: g * torch.rand(()), "belongs to none", 1, "owners"),
    "dropout": (lambda g, p: torch.dropout(g, 0.5, True), ONE_EACH, 1, "flat"),
    "poisson": (lambda g, p: torch.poisson(g.abs()), ONE_EACH, 3, "flat"),
    "several for an element": (
        lambda g, p: torch.rand_like(torch.stack([g, g]))[0],
        "shape of its leaf",
        1,
        "flat",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_draw_that_would_depend_on_shards_raises(name):
    of_leaf, text, stage, sharding = REFUSED[name]
    trained(each(of_leaf), 1, 0, sharding=sharding)
    with pytest.raises(OptimizerError, match=text):
        trained(each(of_leaf), 2, stage, sharding=sharding)


SIZES_FROM_SHARDS = {
    "stacked": lambda x: torch.randn(2, *x.shape).mean(0),
    "doubled": lambda x: torch.randn(2 * x.numel())[: x.numel()].view_as(x),
    "one more": lambda x: torch.randn(x.numel() + 1)[1:].view_as(x),
    "a list": lambda x: torch.rand(size=[3, *x.shape])[1],
    "randint": lambda x: torch.randint(0, 2, (2, *x.shape)).sum(0),
    "in place": lambda x: torch.empty(2, *x.shape).normal_()[0],
    "initialised": lambda x: nn.init.uniform_(torch.empty(2, *x.shape))[0],
    "normal": lambda x: torch.normal(0.0, 1.0, size=(2, *x.shape))[0],
    "bernoulli": lambda x: torch.bernoulli(torch.full((2, *x.shape), 0.5)).sum(0),
    "like zeros": lambda x: torch.rand_like(torch.zeros(2, *x.shape))[0],
    "at the end": lambda x: torch.randn(*x.shape, 2)[..., 0],
    "randperm": lambda x: torch.randperm(n=x.numel() + 1)[1:].view_as(x),
    "a size and more": lambda x: torch.randn(x.shape + (2,))[..., 0],  # noqa: RUF005
    "broadcast": lambda x: torch.normal(torch.zeros(2, 1), torch.ones(1, x.numel()))[0].view_as(x),
    "a part": lambda x: torch.randn((x.numel() + 1) // 2).repeat(2)[: x.numel()].view_as(x),
}


@pytest.mark.parametrize("name", SIZES_FROM_SHARDS)
@pytest.mark.parametrize(("devices", "stage"), [(2, 1), (4, 2), (3, 3)])
def test_draw_of_size_from_a_shard_raises(name, devices, stage):
    update = each(lambda g, p: SIZES_FROM_SHARDS[name](g) - 0.1 * p)
    with pytest.raises(OptimizerError, match=r"or one number.*torch\.randn_like"):
        trained(update, devices, stage)


@pytest.mark.parametrize("name", SIZES_FROM_SHARDS)
def test_draw_of_size_from_a_full_leaf_equals_one_devices(name):
    update = each(lambda g, p: SIZES_FROM_SHARDS[name](g) - 0.1 * p)
    assert same(trained(update, 3, 0), trained(update, 1, 0))


def test_draw_of_own_key_and_size_from_a_shard_raises():
    def of_leaf(g, p):
        with fs.keyed_random(1, 2):
            return torch.randn(2, *g.shape)[0]

    with pytest.raises(OptimizerError, match="or one number"):
        trained(each(of_leaf), 2, 1)


def test_number_of_size_one_where_shards_have_one_element_raises():
    """It may be meant as a shard: leaf "one" has one element."""
    with pytest.raises(OptimizerError, match="or one number"):
        trained(each(lambda g, p: -g * torch.rand(1, 1).sum()), 2, 1)


def with_shared_numbers(draws):
    """Return an update of matrices that share numbers, each drawn in a context of a key."""

    def update(grads, state, params):
        factor = sum(draws())
        return tree_map(lambda g: -g * factor, grads), state

    return update


def keyed_numbers(*keys):
    for key in keys:
        with fs.keyed_random(5, key):
            yield torch.rand(())


def test_number_of_own_key_at_owners_equals_one_devices():
    update = with_shared_numbers(lambda: keyed_numbers(1, 2))
    expected = trained(update, 1, 0, sharding="owners")
    for devices, stage in [(2, 1), (4, 3)]:
        assert same(trained(update, devices, stage, sharding="owners"), expected)


def test_draw_of_own_key_and_size_at_owners_equals_one_devices():
    def noise(name, g):
        if g is None:
            return None
        with fs.keyed_random(5, name):
            return torch.randn(2, *g.shape)[1]

    def update(grads, state, params):
        return {name: noise(name, g) for name, g in grads.items()}, state

    expected = trained(update, 1, 0, sharding="owners")
    assert same(trained(update, 3, 2, sharding="owners"), expected)


def test_second_number_of_one_key_at_owners_raises():
    def two_numbers():
        with fs.keyed_random(5, 1):
            return [torch.rand(()), torch.rand(())]

    with pytest.raises(OptimizerError, match="the first of its key"):
        trained(with_shared_numbers(two_numbers), 2, 1, sharding="owners")


def test_number_without_a_key_at_owners_raises_and_names_the_key():
    update = with_shared_numbers(lambda: [torch.rand(())])
    with pytest.raises(OptimizerError, match=r"with fs\.keyed_random\(seed, step\): torch\.rand"):
        trained(update, 2, 1, sharding="owners")


def test_number_that_is_like_no_leaf_is_equal_on_all_devices():
    update = each(lambda g, p: -g * torch.rand(()))
    assert same(trained(update, 3, 1), trained(update, 1, 0))


def test_check_elementwise_accepts_draws_like_leaves():
    for name in ("randn_like", "stochastic rounding", "own keys"):
        check_elementwise(optimizer(UPDATES[name]))
        check_elementwise(optimizer(UPDATES[name], sharding="owners"))


def test_check_elementwise_of_draws_of_shards_raises():
    update = each(lambda g, p: torch.randn(g.numel()).view_as(g))
    with pytest.raises(OptimizerError, match=r"torch\.randn_like"):
        check_elementwise(optimizer(update))


def test_compiled_update_runs_on_shards():
    update = torch.compile(each(lambda g, p: -g * 2), backend="eager", fullgraph=True)
    assert same(trained(update, 2, 1), trained(each(lambda g, p: -g * 2), 1, 0))


# -- what replicas return --------------------------------------------------------------------------


def adapted(norm):
    """Return an update whose step size is from a sum of squares, by a norm of the gradients."""

    def update(grads, state, params):
        total = state["total"] + norm(grads)
        return tree_map(lambda g: -g / (1 + total), grads), {"total": total}

    return update


def total_of(params):
    """Return a state of one number."""
    return {"total": torch.zeros((), dtype=torch.float64)}


def shard_sum(grads):
    """Return the sum of squares of a device's shards."""
    return sum(g.double().square().sum() for g in grads.values() if g is not None)


@pytest.mark.parametrize(("devices", "stage"), [(2, 1), (4, 3)])
def test_state_number_from_a_shard_raises(devices, stage):
    with pytest.raises(OptimizerError, match=r'state\["total"\] must be equal on all devices'):
        trained(adapted(shard_sum), devices, stage, init=total_of)


def test_state_number_that_differs_from_the_second_step_on_raises():
    """As in D-adaptation, whose inner product of moves and gradients is 0 at first."""

    def init(params):
        return {**total_of(params), "count": torch.tensor(0)}

    def update(grads, state, params):
        total = state["total"] + shard_sum(grads) * (state["count"] > 0)
        return tree_map(torch.neg, grads), {"total": total, "count": state["count"] + 1}

    with pytest.raises(OptimizerError, match=r'state\["total"\] must be equal'):
        trained(update, 2, 3, init=init)


def test_state_number_of_a_leaf_from_a_shard_raises():
    def update(grads, state, params):
        return grads, tree_map(lambda g: g.norm(), grads)

    def init(params):
        return tree_map(lambda p: torch.zeros(()), params)

    with pytest.raises(OptimizerError, match=r'state\["a"\] must be equal on all devices'):
        trained(update, 2, 1, init=init)


@pytest.mark.parametrize(("devices", "stage"), [(2, 0), (3, 1), (4, 3)])
def test_state_number_from_global_norm_equals_one_devices(devices, stage):
    update = adapted(lambda grads: fs.optim.global_norm(grads).square())
    expected = trained(update, 1, 0, init=total_of)
    assert same(trained(update, devices, stage, init=total_of), expected)


def test_psum_in_update_over_shards_equals_one_devices():
    update = adapted(lambda grads: fs.psum(shard_sum(grads), "data"))
    expected = trained(adapted(shard_sum), 1, 0, init=total_of)
    assert same(trained(update, 2, 1, init=total_of), expected)
    assert same(trained(update, 4, 3, init=total_of), expected)


def test_psum_in_update_over_replicas_raises():
    over_data = adapted(lambda grads: fs.psum(shard_sum(grads), "data"))
    with pytest.raises(OptimizerError, match="is replicated, so that it would count 2 times"):
        trained(over_data, 2, 0, init=total_of)

    over_both = adapted(lambda grads: fs.psum(shard_sum(grads), ("pod", "data")))
    with pytest.raises(OptimizerError, match="got pod, along which"):
        trained(over_both, 4, 3, init=total_of, axes={"pod": 2, "data": 2})


def test_noise_by_axis_index_on_replicas_raises():
    def update(grads, state, params):
        with fs.keyed_random(1, fs.axis_index("data")):
            return tree_map(torch.randn_like, grads), state

    with pytest.raises(OptimizerError, match=r'update\["a"\] must be equal on all devices'):
        trained(update, 2, 0)


class Adapting(ElementwiseLangevin):
    """A user's class whose state has a number from the shard."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["norm"] = p.grad.norm()
                    p.sub_(p.grad, alpha=0.1)


def test_state_number_of_optimizer_class_from_a_shard_raises():
    with pytest.raises(OptimizerError, match=r"'norm' of 0\.weight must be equal"):
        fs.run(boosted, Adapting, fs.ZeroPlugin(stage=1), mesh=fs.make_mesh({"data": 2}))
