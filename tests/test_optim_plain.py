"""Optimizers that are pairs of plain functions on trees of plain tensors."""

import io
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

import fshard as fs
from fshard import P, optim
from fshard.mesh.tree import flatten, unflatten
from fshard.testing import certify, check_elementwise
from tests.optimizers import example, laid, same, trees


def momentum_init(params):
    return tree_map(torch.zeros_like, params)


def momentum_update(grads, state, params):
    state = tree_map(lambda m, g: 0.9 * m + g, state, grads)
    return tree_map(lambda m: -0.1 * m, state), state


MOMENTUM = optim.Optimizer(momentum_init, momentum_update, elementwise=True)


class State(NamedTuple):
    """State of all kinds: like the parameters, in a list, of another shape, numbers of each leaf and of all."""

    m: dict
    rows: list
    norms: list
    count: torch.Tensor


def rows_init(params):
    leaves, _ = flatten(params)
    rows = [torch.zeros(x.shape[0], dtype=x.dtype) if x.ndim > 1 else None for x in leaves]
    return State(
        tree_map(torch.zeros_like, params), rows, [torch.zeros((), dtype=x.dtype) for x in leaves], torch.zeros(())
    )


def rows_update(grads, state, params):
    gs, structure = flatten(grads)
    count = state.count + 1
    m = tree_map(lambda m, g: m + g, state.m, grads)
    norms = [n + g.norm() for n, g in zip(state.norms, gs, strict=True)]
    rows = [
        r if r is None else r + g.square().sum(tuple(range(1, g.ndim))) for r, g in zip(state.rows, gs, strict=True)
    ]
    sizes = [n if r is None else n + r.sum() for n, r in zip(norms, rows, strict=True)]
    updates = [-0.1 / count.item() * x / (1 + n) for x, n in zip(flatten(m)[0], sizes, strict=True)]
    return unflatten(structure, updates), State(m, rows, norms, count)


ROWS = optim.Optimizer(rows_init, rows_update)
PAIRS = {
    "momentum": MOMENTUM,
    "rows": ROWS,
    "nothing but a pair": NamedTuple("Pair", init=object, update=object)(*ROWS[:2]),
}


def alone(opt, params, steps):
    """Run a pair on one device, each parameter by itself, as it would be run if nobody had heard of meshes."""
    at = optim.leaves.Leaves.of(params)
    results = []
    for i, (x, first) in enumerate(zip(at.leaves, at.firsts(), strict=True)):
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
                x = optim.apply_updates([x], [update])[0]
        results.append(x)
    return results


def with_ties(tree):
    """Add a parameter that is there twice, one that is frozen, and one of whole numbers."""
    leaves, _ = flatten(tree)
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    return {"tree": tree, "tie": leaves[0], "frozen": frozen, "numbers": torch.arange(3)}


def with_gradients(steps):
    firsts = [optim.leaves.Leaves.of(one).leaves[0] for one in steps]
    return [{"tree": one, "tie": tie, "frozen": None, "numbers": None} for one, tie in zip(steps, firsts, strict=True)]


@pytest.mark.parametrize("name", PAIRS)
@given(tree=trees((torch.float32, torch.float64)), n=st.sampled_from([1, 2, 4]), stage=st.sampled_from([0, 1, 2, 3]))
@settings(max_examples=10)
def test_a_pair_of_plain_functions_does_on_a_mesh_what_it_does_on_one_device(name, tree, n, stage):
    pair = PAIRS[name]
    params, steps = with_ties(tree[0]), with_gradients(tree[1])
    mesh = fs.make_mesh({"data": n})
    opt = fs.partition_optimizer(pair, mesh=mesh, axis="data", stage=stage)
    placed = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    state = opt.init(placed)
    for turn, grads in enumerate(steps):
        updates, state = opt.update(laid(grads, opt.gradients(placed["numbers"].layout)), state, placed)
        placed = fs.apply_updates(placed, updates)
        if turn == 1:  # saved, and read again
            file = io.BytesIO()
            torch.save((placed, state), file)
            file.seek(0)
            placed, state = torch.load(file, weights_only=False)
    assert same(flatten(fs.unshard(placed))[0], alone(pair, params, steps))


def trained(opt, stage, n=2, **options):
    mesh = fs.make_mesh({"data": n})
    torch.manual_seed(0)
    params = {"w": torch.randn(6, 6), "h": torch.randn(6, 2), "idle": torch.ones(5)}
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage) if stage is not None else opt
    state = opt.init(params) if stage is not None else optim.chain(opt).init(params)[0]

    def loss_fn(p, batch):
        return (torch.tanh(batch[0] @ p["w"]) @ p["h"] - batch[1]).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    for _ in range(3):
        params, state, _ = step(params, state, (x, y))
    return fs.unshard(params), state


def combined(pair):
    half = optim.by_label({"a": pair, "b": optim.sgd(0.1)}, {"w": "a", "h": "b", "idle": "a"})
    inside = optim.accumulate(optim.with_master_weights(half), 2)
    return optim.ema(optim.skip_if_not_finite(optim.chain(optim.clip_by_global_norm(1.0), inside)), 0.5)


@pytest.mark.parametrize(
    "pair", [MOMENTUM, ROWS, combined(MOMENTUM), combined(ROWS)], ids=["m", "rows", "c(m)", "c(rows)"]
)
def test_train_step_takes_any_pair_in_any_stage(pair):
    expected, _ = trained(pair, 0, 1)
    for stage in (None, 0, 1, 2, 3) if pair in (MOMENTUM, ROWS) else (0, 1, 2, 3):
        params, _ = trained(pair, stage, donate=stage == 1)
        for name, x in params.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-6)


def between_processes():
    return {(name, stage): trained(PAIRS[name], stage) for name in ("momentum", "rows") for stage in (1, 3)}


def test_processes_do_what_virtual_devices_do(two):
    for (name, stage), (params, _) in two.run(between_processes)[0].items():
        expected, _ = trained(PAIRS[name], stage)
        assert all(torch.equal(x, expected[key]) for key, x in params.items())


def test_state_lies_as_the_pair_makes_it():
    _, state = trained(ROWS, 3)
    assert [
        None if x is None else str(fs.typeof(x)) for x in [*state.m.values(), *state.rows, *state.norms, state.count]
    ] == [
        *("f32[6, 6]{on:data=0}", "f32[6, 2]{on:data=1}", "f32[5]{on:data=1}"),
        *("f32[6]{on:data=1}", None, "f32[6]{on:data=0}"),  # in the order in which the functions see the leaves
        *("f32[]{on:data=1}", "f32[]{on:data=1}", "f32[]{on:data=0}"),
        "f32[]",
    ]
    _, state = trained(MOMENTUM, 1)
    assert {str(fs.typeof(x)) for x in state.values()} == {
        "f32[6, 6]{flat:data}",
        "f32[6, 2]{flat:data}",
        "f32[5]{flat:data}",
    }


def test_certify_and_check_elementwise_take_plain_pairs():
    params, x = {"w": torch.randn(3, 3), "v": torch.randn(3)}, torch.randn(4, 3)
    for pair in (MOMENTUM, ROWS):
        certify(lambda p, x: (x @ p["w"] * p["v"]).square().mean(), params, x, pair, fs.make_mesh({"data": 2})).check()
    check_elementwise(MOMENTUM)
    check_elementwise(MOMENTUM._replace(elementwise=None))  # it might say so
    with pytest.raises(AssertionError, match="says elementwise=True"):
        check_elementwise(optim.Optimizer(lambda p: (), lambda g, s, p: (tree_map(lambda g: g / (1 + g.norm()), g), s)))


def test_a_pair_with_a_step_of_its_own_writes():
    def step(grads, state, params):
        updates, state = momentum_update(grads, state, params)
        return tree_map(lambda p, u: p + u, params, updates), state

    params, steps = example()
    params = {"a": params["a"]}
    steps = [{"a": grads["a"]} for grads in steps]
    layout = fs.Layout(fs.make_mesh({"data": 2}), P.flat("data"))
    opt = optim.chain(MOMENTUM._replace(step=step))
    placed, state = fs.device_put(params, layout), None
    state = opt.init(placed)
    for grads in steps:
        placed, state = opt.step(fs.device_put(grads, layout), state, placed)
    assert same(flatten(fs.unshard(placed))[0], alone(MOMENTUM, params, steps))


def clipped(grads, state, params):
    norm = sum(g.norm() for g in flatten(grads)[0])
    return tree_map(lambda g: -g / norm, grads), state


def looking(grads, state, params):
    return tree_map(lambda g: -g / g.norm() if g.norm() > 1 else -g, grads), state


REFUSED = {
    "several": (clipped, r"the update of params\[\"h\"\], .* are made of several gradients"),
    "looking": (looking, r"it looks at values of gradients or parameters on the host \(if, float, item\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_but_in_stage_0(name):
    update, reason = REFUSED[name]
    pair = optim.Optimizer(lambda params: {"count": 0}, update)
    for stage in (1, 2, 3):
        with pytest.raises(optim.OptimizerError, match=f"cannot be divided among devices: .*{reason}"):
            trained(pair, stage)
    expected, found = trained(pair, 0, 1)[0], trained(pair, 0, 2)[0]
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name])


def test_pieces_and_a_word_that_does_not_hold_are_errors():
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"w": torch.ones(4, 2)}, P("data"), mesh=mesh)
    with pytest.raises(fs.LayoutError, match="does not say elementwise=True needs whole matrices"):
        optim.chain(ROWS).init(params)
    with pytest.raises(optim.OptimizerError, match="says elementwise=True, but makes a state of shape"):
        optim.chain(ROWS._replace(elementwise=True)).init(params)
