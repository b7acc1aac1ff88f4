"""Optimizers that are pairs of functions on trees of plain tensors.

The oracle is the pair itself on one device.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optree import tree_map

import fshard as fs
from fshard import P, optim
from fshard.mesh.layout import flatten
from fshard.testing import certify, check_elementwise
from tests.optim.helpers.optimizers import by_step, by_update, put_tree, same, trees
from tests.optim.helpers.per_device_rules import (
    MOMENTUM,
    ROWS,
    State,
    momentum_update,
)


def momentum_step(grads, state, params):
    updates, state = momentum_update(grads, state, params)
    return tree_map(lambda p, u: p + u, params, updates), state


class Bare(NamedTuple):
    init: object
    update: object


PAIRS = {
    "momentum": MOMENTUM,
    "momentum of owners": replace(MOMENTUM, sharding="owners"),
    "a step of its own": replace(MOMENTUM, step=momentum_step),
    "rows": ROWS,
    "nothing but a pair": Bare(ROWS.init, ROWS.update),
}


def alone(opt, params, steps):
    """Run a pair on one device, each parameter by itself, without fshard.

    `count` goes on without gradients too.
    """
    at = optim.leaves.Leaves.of(params)
    results = []
    for i, (x, first) in enumerate(zip(at.leaves, at.firsts, strict=True)):
        if i != first:
            results.append(results[first])
            continue
        state = opt.init([x])
        for t, grads in enumerate(steps, 1):
            grad = at.beside(grads, "grads")[i]
            if isinstance(state, State):
                state = state._replace(count=torch.tensor(t - 1.0))
            if grad is not None and not optim.leaves.is_frozen(x):
                (update,), state = opt.update([grad], state, [x])
                x = x + update
        results.append(x)
    return results


def with_ties(tree):
    """Add a parameter that is there twice, one that is frozen, and one of whole numbers."""
    leaves, _ = flatten(tree)
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    return {"tree": tree, "tie": leaves[0], "frozen": frozen, "numbers": torch.arange(3)}


def with_gradients(steps):
    firsts = [optim.leaves.Leaves.of(one).leaves[0] for one in steps]
    return [
        {"tree": one, "tie": tie, "frozen": None, "numbers": None}
        for one, tie in zip(steps, firsts, strict=True)
    ]


def layouts_of(tree):
    return [str(x) for x in flatten(fs.mesh.layouts(tree), none_is_leaf=True)[0]]


@pytest.mark.parametrize("name", PAIRS)
@given(
    tree=trees((torch.float32, torch.float64)),
    n=st.sampled_from([1, 2, 4]),
    stage=st.sampled_from([0, 1, 2, 3]),
    run=st.sampled_from([by_step, by_update]),
)
@settings(max_examples=15)
def test_pair_on_shards_equals_one_device(name, tree, n, stage, run):
    params = with_ties(tree[0])
    steps = with_gradients(tree[1])
    mesh = fs.make_mesh({"data": n})
    opt = fs.partition_optimizer(PAIRS[name], mesh=mesh, axis="data", stage=stage)
    sharded = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    layout = opt.gradients(sharded["numbers"].layout)
    after, state = run(opt, sharded, [put_tree(grads, layout) for grads in steps])
    assert layouts_of(state) == layouts_of(opt.init(sharded))
    assert same(flatten(fs.unshard(after))[0], alone(PAIRS[name], params, steps))


def trained(opt, stage, n=2, **options):
    """Return parameters and state after three steps.

    Without a stage, the optimizer is not divided.
    """
    mesh = fs.make_mesh({"data": n})
    torch.manual_seed(0)
    full = {"w": torch.randn(6, 6), "h": torch.randn(6, 2), "idle": torch.ones(5)}
    x = torch.randn(8, 6)
    y = torch.randn(8, 2)
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(full, rules, mesh=mesh)
    if stage is None:
        (state,) = optim.chain(opt).init(params)
    else:
        opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
        state = opt.init(params)

    def loss_fn(p, batch):
        return (torch.tanh(batch[0] @ p["w"]) @ p["h"] - batch[1]).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    for _ in range(3):
        params, state, _ = step(params, state, (x, y))
    return fs.unshard(params), state


def by_names_init(params):
    m = {k: None if x is None else torch.zeros_like(x) for k, x in params.items()}
    return {"m": m, "count": torch.tensor(0)}


def by_names_update(grads, state, params):
    m = dict.fromkeys(grads)
    updates = dict.fromkeys(grads)
    for k, g in grads.items():
        if g is not None:
            m[k] = 0.5 * state["m"][k] + g
            updates[k] = -0.1 * m[k] / m[k].norm()
    return updates, {"m": m, "count": state["count"] + 1}


BY_NAMES = optim.Optimizer(by_names_init, by_names_update)


def combined(pair):
    half = optim.by_label({"a": pair, "b": optim.sgd(0.1)}, {"w": "a", "h": "b", "idle": "a"})
    inside = optim.accumulate(optim.with_master_weights(half), 2)
    return optim.ema(
        optim.skip_if_not_finite(optim.chain(optim.clip_by_global_norm(1.0), inside)), 0.5
    )


ALONE = {"m": MOMENTUM, "rows": ROWS, "by names": BY_NAMES}


@pytest.mark.parametrize("name", [*ALONE, "combined m", "combined rows"])
def test_train_step_accepts_pair_in_every_stage(name):
    pair = ALONE[name] if name in ALONE else combined(ALONE[name.removeprefix("combined ")])
    expected, _ = trained(pair, 0, 1)
    for stage in (None, 0, 1, 2, 3) if name in ALONE else (0, 1, 2, 3):
        params, _ = trained(pair, stage, donate=stage == 1)
        for key, x in params.items():
            torch.testing.assert_close(x, expected[key], rtol=1e-5, atol=1e-6)


def between_processes():
    cases = itertools.product(("m", "rows"), (1, 3))
    return {(name, stage): trained(ALONE[name], stage) for name, stage in cases}


def types(state):
    leaves = optim.leaves.Leaves.of(state).leaves
    return ["None" if x is None else str(fs.typeof(x)) for x in leaves]


def test_pair_in_processes_equals_virtual_devices(two):
    """A process knows the shapes of state that another one owns."""
    for (name, stage), (params, state) in two.run(between_processes)[0].items():
        expected, virtual = trained(ALONE[name], stage)
        assert all(torch.equal(x, expected[key]) for key, x in params.items())
        assert types(state) == types(virtual)


def test_params_like_state_has_params_layouts():
    """Of h, idle and w: their moments, numbers of rows and steps, at their owners.

    Then one number.
    """
    _, state = trained(ROWS, 3)
    assert types(state) == [
        "f32[6, 2]{at:data=1}",
        "f32[5]{at:data=1}",
        "f32[6, 6]{at:data=0}",
        "f32[6]{at:data=1}",
        "f32[5]{at:data=1}",
        "f32[6]{at:data=0}",
        "f32[]{at:data=1}",
        "f32[]{at:data=1}",
        "f32[]{at:data=0}",
        "f32[]",
    ]

    _, state = trained(MOMENTUM, 1)
    assert types(state) == ["f32[6, 2]{flat:data}", "f32[5]{flat:data}", "f32[6, 6]{flat:data}"]


def test_number_state_beside_flat_shards_is_replicated():
    def init(params):
        return tree_map(lambda x: torch.tensor(0.0), params)

    def update(grads, state, params):
        return grads, tree_map(lambda count: count + 1, state)

    mesh = fs.make_mesh({"data": 2})
    full = {"w": torch.ones(4), "v": torch.ones(2, 2)}
    params = fs.shard_params(full, fs.fsdp("data"), mesh=mesh)
    opt = optim.chain(optim.Optimizer(init, update, sharding="flat"))

    _, state = opt.update({"w": params["w"], "v": None}, opt.init(params), params)

    assert types(state) == ["f32[]", "f32[]"]
    assert fs.unshard(state) == ({"w": torch.tensor(1.0), "v": torch.tensor(0.0)},)


def test_abstract_mesh_init_returns_owner_layouts():
    mesh = fs.make_mesh({"data": 4}, runtime="abstract")
    params = fs.shard_params({"w": torch.ones(8, 8), "v": torch.ones(8)}, P(), mesh=mesh)
    opt = fs.partition_optimizer(ROWS, mesh=mesh, axis="data", stage=1)
    assert sorted(types(opt.init(params)))[:3] == [
        "f32[8, 8]{at:data=0}",
        "f32[8]{at:data=0}",
        "f32[8]{at:data=1}",
    ]


def test_certify_and_check_elementwise_accept_pairs():
    params = {"w": torch.randn(3, 3), "v": torch.randn(3)}
    x = torch.randn(4, 3)

    def loss_fn(p, x):
        return (x @ p["w"] * p["v"]).square().mean()

    for pair in (MOMENTUM, ROWS):
        certify(loss_fn, params, x, pair, fs.make_mesh({"data": 2})).check()

    check_elementwise(MOMENTUM)
    by_norm_of_each = optim.Optimizer(
        lambda p: (),
        lambda grads, state, params: (tree_map(lambda g: g / (1 + g.norm()), grads), state),
        sharding="flat",
    )
    with pytest.raises(AssertionError, match='has sharding="flat"'):
        check_elementwise(by_norm_of_each)


# -- updates that couple leaves, and pairs without state -------------------------------------------


def by_norm(norm):
    """Return an update that divides all gradients by a norm of theirs."""

    def update(grads, state, params):
        total = norm(grads)
        return tree_map(lambda g: -0.1 * g / total, grads), state

    return update


def norm_of_owned(grads):
    """Return the norm of the gradients that a device owns, which is not that of all."""
    norms = [x.norm() for x in flatten(grads)[0]]
    return torch.stack(norms or [torch.ones(())]).norm()


def by_global_norm(devices, sharding, stage):
    """Train two steps; return the parameters, of which the first device owns one."""
    mesh = fs.make_mesh({"data": devices, "model": 2})
    update = by_norm(lambda grads: optim.global_norm(grads).float())
    pair = optim.Optimizer(lambda params: (), update, sharding=sharding)
    opt = fs.partition_optimizer(pair, mesh=mesh, axis="data", stage=stage)

    draw = torch.Generator().manual_seed(0)
    full = {
        "w": torch.randn(5, 4, generator=draw),
        "v": torch.randn(7, generator=draw),
        "u": torch.randn(3, generator=draw),
        "frozen": torch.ones(2),
    }
    full["tie"] = full["v"]
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(full, rules, mesh=mesh, frozen="frozen")

    def loss_fn(p, x):
        y = (x @ p["w"]).square().mean()
        return y + (p["v"] + p["tie"]).square().sum() + p["u"].sin().sum()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    state = opt.init(params)
    for seed in range(2):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        params, state, _ = step(params, state, x)
    return fs.unshard(params)


COUPLED = [*(("owners", stage) for stage in range(4)), ("flat", 1), ("flat", 3)]


@pytest.mark.parametrize(("sharding", "stage"), COUPLED)
def test_global_norm_in_an_update_is_right_in_every_stage(sharding, stage):
    torch.testing.assert_close(by_global_norm(2, sharding, stage), by_global_norm(1, "owners", 0))


def test_check_elementwise_detects_coupled_leaves():
    def norm_of_a_list(grads):
        return optim.global_norm([*grads.values()])

    pair = optim.Optimizer(lambda params: (), by_norm(norm_of_owned))
    message = r"must update each leaf by itself.*\n?.*global_norm\(tree\)"
    with pytest.raises(AssertionError, match=message):
        check_elementwise(pair)

    check_elementwise(replace(pair, update=by_norm(optim.global_norm)))
    check_elementwise(ROWS)

    message = "the tree of global_norm must be a tree of the structure"
    with pytest.raises(optim.OptimizerError, match=message):
        check_elementwise(replace(pair, update=by_norm(norm_of_a_list)))


@pytest.mark.parametrize("state", [(), None, {}], ids=str)
@pytest.mark.parametrize(
    "params", [{"w": torch.ones(4)}, (torch.ones(4),), [torch.ones(4)], torch.ones(4)], ids=type
)
def test_pair_without_state_trains(params, state):
    def update(grads, state, params):
        return tree_map(torch.neg, grads), state

    for stage, sharding in [(0, "owners"), (1, "owners"), (3, "owners"), (3, "flat")]:
        opt = optim.Optimizer(lambda p: state, update, sharding=sharding)
        after = trained_once(optim.ema(opt, 0.9), params, stage)
        assert all(torch.equal(x, torch.full((4,), -3.0)) for x in flatten(after)[0])


def trained_once(opt, params, stage):
    mesh = fs.make_mesh({"data": 2})
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    arrays = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)

    def loss_fn(p, x):
        (w,) = flatten(p)[0]
        return (x * w.sum()).mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    after, _, _ = step(arrays, opt.init(arrays), torch.full((4,), 4.0))
    return fs.unshard(after)
