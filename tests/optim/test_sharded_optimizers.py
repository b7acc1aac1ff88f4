"""Optimizers on shards equal optimizers on full tensors, by bits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from fshard.optim.leaves import Leaves
from fshard.optim.sharding import ByLeaf, kinds_of
from tests.helpers.sampled import examples
from tests.optim.helpers.optimizers import (
    ALL,
    ELEMENTWISE,
    FOREIGN,
    WHOLE,
    by_step,
    by_update,
    flat_tree,
    leaves_of,
    put_tree,
    same,
    tensor,
)

ANY = dict(ELEMENTWISE)
for torch_class, torch_options in FOREIGN.items():
    if not torch_options.get("fused"):
        opt_of_torch = optim.from_torch(torch_class, **torch_options)
        ANY[f"from_torch({torch_class.__name__})"] = opt_of_torch
ANY |= {
    "adam, maximize": optim.adam(0.01, weight_decay=0.1, maximize=True, fused=False),
    "sgd, all": optim.sgd(
        0.03, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True, fused=False
    ),
    "RMSprop, decay": optim.from_torch(
        torch.optim.RMSprop, lr=0.01, momentum=0.9, weight_decay=0.1
    ),
}
SIZES = [{"a": 2, "b": 2}, {"a": 1, "b": 3}, {"a": 8, "b": 1}]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SPECS_OF_MATRIX = [P.flat("b"), P(), P("a"), P("a", "b"), P(None, ("b", "a"))]


@pytest.mark.parametrize("name", ANY)
@given(data=st.data())
@settings(max_examples=examples(6))
def test_shards_of_any_layout_equal_full_tensors(name, data):
    """To the bit: each leaf flat, in several dims, or replicated; a gradient may be missing."""
    opt = ANY[name]
    assert opt.sharding == "flat"
    mesh = fs.make_mesh(data.draw(st.sampled_from(SIZES)))
    dtype = data.draw(st.sampled_from(DTYPES))
    shapes = [(data.draw(st.integers(1, 300)),), (8, 24), (), (0, 3)]
    specs = [P.flat("a", "b"), data.draw(st.sampled_from(SPECS_OF_MATRIX)), P(), P.flat("b")]
    layouts = [fs.Layout(mesh, spec) for spec in specs]

    def drawn(seed):
        return [tensor(shape, dtype, 10 * seed + i) for i, shape in enumerate(shapes)]

    def sharded(leaves):
        arrays = []
        for x, layout in zip(leaves, layouts, strict=True):
            arrays.append(None if x is None else fs.device_put(x, layout))
        return arrays

    params = drawn(0)
    steps = [drawn(seed) for seed in range(1, 5)]
    steps[1][data.draw(st.integers(0, 3))] = None
    run = data.draw(st.sampled_from([by_step, by_update]))

    actual = run(opt, sharded(params), [sharded(grads) for grads in steps])

    assert same(fs.unshard(actual), run(opt, params, steps))


def test_tied_flat_shards_step_once():
    mesh = fs.make_mesh({"data": 2})
    w = fs.device_put(torch.ones(5), fs.Layout(mesh, P.flat("data")))
    g = fs.Sharded((5,), fs.Layout(mesh, P.flat("data", shape=(5,))), w.shards)
    opt = optim.sgd(0.5, momentum=0.5)
    g = fs.Sharded(g.shape, g.layout, tuple(shard.clone() for shard in g.shards))
    (one, other), _ = opt.step([g, g], opt.init([w, w]), [w, w])
    assert fs.unshard(one).tolist() == [0.5] * 5 and one is other


def test_clip_by_global_norm_on_shards_equals_full_tensors():
    opt = WHOLE["clip_by_global_norm"]
    assert opt.sharding == "flat"
    layout = fs.Layout(fs.make_mesh({"data": 4}), P.flat("data"))
    params = flat_tree()
    steps = [flat_tree(10), flat_tree(20)]
    with fs.ledger() as comm:
        sharded = by_step(
            opt, put_tree(params, layout), [put_tree(grads, layout) for grads in steps]
        )
    assert comm.calls() == 2
    for a, b in zip(
        leaves_of(fs.unshard(sharded)), leaves_of(by_step(opt, params, steps)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_replicated_shards_sharing_memory_step_once():
    layout = fs.Layout(fs.make_mesh({"data": 3}))
    x = torch.ones(2)
    g = torch.ones(2)
    param = fs.Sharded((2,), layout, (x, x, x))
    grad = fs.Sharded((2,), layout, (g, g, g))
    opt = optim.sgd(0.5)

    (after,), _ = opt.step([grad], opt.init([param]), [param])

    assert [shard.tolist() for shard in after.shards] == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("name", ["adafactor", "shampoo", "lamb", "muon"])
def test_matrix_optimizers_accept_replicated_leaves(name):
    opt = WHOLE[name]
    layout = fs.Layout(fs.make_mesh({"data": 2}))
    params = flat_tree()
    steps = [flat_tree(10), flat_tree(20)]
    sharded = by_step(opt, put_tree(params, layout), [put_tree(grads, layout) for grads in steps])
    assert same(fs.unshard(sharded), by_step(opt, params, steps))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_lamb_norms_take_one_collective(devices):
    opt = optim.lamb(0.1, weight_decay=0.1)
    layout = fs.Layout(fs.make_mesh({"data": devices}), P.flat("data"))
    params = flat_tree()
    grads = flat_tree(10)
    sharded = put_tree(params, layout)
    shards = put_tree(grads, layout)
    state = opt.init(sharded)
    with fs.ledger() as comm:
        updates, _ = opt.update(shards, state, sharded)
    assert comm.calls() == (devices > 1)
    expected, _ = opt.update(grads, opt.init(params), params)
    for a, b in zip(leaves_of(fs.unshard(updates)), leaves_of(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


NOT_OF_MATRICES = [name for name in ALL if name not in ("adafactor", "shampoo", "muon")]


@pytest.mark.parametrize("name", NOT_OF_MATRICES)
def test_step_on_abstract_mesh_keeps_layouts(name):
    mesh = fs.make_mesh({"data": 4}, runtime="abstract")
    params = fs.device_put(flat_tree(), fs.Layout(mesh, P.flat("data")))
    state = ALL[name].init(params)
    for _ in range(2):
        params, state = optim.step_of(ALL[name])(params, state, params)
    assert all(x.spec == P.flat("data") for x in params.values())


def owners_of(frozen):
    """Return the owner of each trained parameter's state.

    Those at `frozen` indices are not trained.
    """
    mesh = fs.make_mesh({"data": 3})
    leaves = []
    for index, shape in enumerate([(8, 5), (4, 4), (3, 4), (5, 2), (2, 2)]):
        is_trained = index not in frozen
        leaves.append(torch.nn.Parameter(torch.ones(shape), requires_grad=is_trained))
    params = fs.shard_params(leaves, P(), mesh=mesh)
    opt = fs.partition_optimizer(optim.muon(0.1), mesh=mesh, axis="data", stage=1)
    state = opt.init(params)["momentum_buffer"]
    return {i: x.spec.at for i, x in enumerate(state) if x is not None}


@pytest.mark.parametrize("frozen", [{0}, {1, 2}, {0, 3, 4}])
def test_owners_are_unchanged_by_freezing(frozen):
    """Else the state of a parameter would move, or be lost, when another one is frozen or trained
    again.
    """
    everywhere = owners_of(set())
    assert owners_of(frozen) == {i: at for i, at in everywhere.items() if i not in frozen}


# -- the kind of shards, as a value ----------------------------------------------------------------

MATRIX_AND_VECTOR = {"w": torch.ones(4, 3), "b": torch.ones(4)}
BY_NDIM = optim.by_label(
    {True: optim.muon(0.1), False: optim.adamw(0.1)}, lambda path, leaf: leaf.ndim == 2
)
ALL_FLAT = {"b": "flat", "w": "flat"}
ALL_OWNED = {"b": "owners", "w": "owners"}
BY_KIND = {"b": "flat", "w": "owners"}


def kinds(opt):
    return dict(
        zip(
            sorted(MATRIX_AND_VECTOR),
            kinds_of(opt.sharding, Leaves.of(MATRIX_AND_VECTOR)),
            strict=True,
        )
    )


KINDS = {
    "flat": (optim.adamw(0.1), ALL_FLAT),
    "owners": (optim.shampoo(0.1), ALL_OWNED),
    "by label": (BY_NDIM, BY_KIND),
    "chain": (optim.chain(optim.clip_by_value(1.0), BY_NDIM), BY_KIND),
    "chain with a matrix optimizer": (optim.chain(BY_NDIM, optim.shampoo(0.1)), ALL_OWNED),
    "wrapped": (optim.ema(optim.accumulate(BY_NDIM, 2), 0.9), BY_KIND),
}


@pytest.mark.parametrize("name", KINDS)
def test_sharding_of_combined_optimizer_is_the_strictest(name):
    opt, expected = KINDS[name]
    assert kinds(opt) == expected


def test_labels_of_equal_kinds_need_no_function_of_the_leaves():
    assert not isinstance(optim.masked(optim.sgd(0.1), {"w": True, "b": False}).sharding, ByLeaf)
    assert isinstance(BY_NDIM.sharding, ByLeaf)


def test_unknown_sharding_raises():
    with pytest.raises(optim.OptimizerError, match='sharding must be "flat" .* got True'):
        optim.Optimizer(lambda params: (), lambda g, s, p: (g, s), sharding=True)


def test_old_keywords_raise_and_name_the_new_ones():
    mesh = fs.make_mesh({"data": 2})
    with pytest.raises(TypeError, match='elementwise= has another name. Write sharding="flat"'):
        optim.Optimizer(lambda params: (), lambda g, s, p: (g, s), elementwise=True)
    with pytest.raises(TypeError, match="unit= has another name. Write sharding="):
        fs.partition_optimizer(optim.sgd(0.1), mesh=mesh, axis="data", stage=1, unit="matrix")
    with pytest.raises(AttributeError, match='Write opt.sharding == "flat"'):
        _ = optim.sgd(0.1).elementwise


def test_optimizer_on_another_mesh_makes_the_state_of_that_mesh():
    meshes = [fs.make_mesh({"data": n}) for n in (2, 4)]
    opts = [fs.partition_optimizer(BY_NDIM, mesh=m, axis="data", stage=1) for m in meshes]
    params = fs.shard_params(MATRIX_AND_VECTOR, P(), mesh=meshes[1])
    moved = opts[0].on_mesh(meshes[1]).init(params)
    made = opts[1].init(params)
    assert str(fs.mesh.layouts(moved)) == str(fs.mesh.layouts(made))


def test_missing_gradients_count_as_zero_where_nothing_is_skipped():
    mesh = fs.make_mesh({"data": 2})
    opt = fs.partition_optimizer(optim.adamw(0.1), mesh=mesh, axis="data", stage=1)
    opt = opt.replaced(missing="zero")
    params = fs.shard_params(MATRIX_AND_VECTOR, P(), mesh=mesh)
    grads = {
        "w": fs.device_put(MATRIX_AND_VECTOR["w"], opt.gradients(params["w"].layout)),
        "b": None,
    }
    after, _ = opt.step(grads, opt.init(params), params)
    decayed = MATRIX_AND_VECTOR["b"] * (1 - 0.1 * 1e-2)
    torch.testing.assert_close(fs.unshard(after["b"]), decayed)


def test_pair_keeps_its_functions_when_it_is_replaced():
    def update(grads, state, params):
        return grads, state

    opt = replace(optim.Optimizer(lambda params: (), update), sharding="flat")
    assert opt.update is update
    assert opt.sharding == "flat"
