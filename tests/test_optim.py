"""Optimizers: equal to torch.optim bit for bit, pure, and the same on shards as on whole tensors."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
import fshard.testing.strategies
from fshard import P, optim
from fshard.mesh.tree import flatten
from fshard.optim.contract import copied


class Layer(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor


WHEN = optim.schedules.warmup_cosine(0.1, warmup=2, steps=6)

# name -> (how ours is made, torch's class, the options of both)
TWINS = {
    "sgd": (optim.sgd, torch.optim.SGD, {"lr": 0.1}),
    "sgd, decay": (optim.sgd, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd, momentum": (optim.sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "maximize": True}),
    "sgd, nesterov": (
        optim.sgd,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True},
    ),
    "adam": (optim.adam, torch.optim.Adam, {"lr": 0.01}),
    "adam, decay": (
        optim.adam,
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1, "maximize": True},
    ),
    "adam, amsgrad": (optim.adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (optim.adamw, torch.optim.AdamW, {"lr": 0.01}),
    "adamw, amsgrad": (
        optim.adamw,
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
    ),
    "adafactor": (optim.adafactor, torch.optim.Adafactor, {"lr": 0.01}),
    "adafactor, decay": (
        optim.adafactor,
        torch.optim.Adafactor,
        {"lr": 0.1, "beta2_decay": -0.5, "eps": (1e-6, 1e-2), "d": 1.5, "weight_decay": 0.1, "maximize": True},
    ),
    "muon": (optim.muon, torch.optim.Muon, {"lr": 0.01}),
    "muon, plain": (optim.muon, torch.optim.Muon, {"lr": 0.1, "nesterov": False, "momentum": 0.9, "weight_decay": 0.0}),
}
FUSED = (optim.sgd, optim.adam, optim.adamw)
FOREIGN = {
    torch.optim.Adadelta: {},
    torch.optim.Adagrad: {"initial_accumulator_value": 0.5, "lr_decay": 0.1},
    torch.optim.Adam: {"foreach": True, "amsgrad": True},
    torch.optim.AdamW: {"fused": True},
    torch.optim.Adamax: {},
    torch.optim.ASGD: {"t0": 2},
    torch.optim.NAdam: {},
    torch.optim.RAdam: {"lr": 0.05},
    torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
    torch.optim.Rprop: {},
    torch.optim.SGD: {"momentum": 0.9, "dampening": 0.5, "lr": 0.1, "foreach": True, "nesterov": False},
}

# Every optimizer and combinator: name -> optimizer. What holds for all is tested by walking this table.
ELEMENTWISE = {
    "sgd": optim.sgd(0.1, fused=False),
    "sgd, nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=False),
    "adam": optim.adam(WHEN, weight_decay=0.1, fused=False),
    "adamw": optim.adamw(WHEN, amsgrad=True, fused=False),
    "lion": optim.lion(0.01, weight_decay=0.1),
    "scale": optim.scale(WHEN),
    "clip_by_value": optim.clip_by_value(0.5),
    "add_decayed_weights": optim.add_decayed_weights(0.1),
    "chain": optim.chain(optim.clip_by_value(0.5), optim.add_decayed_weights(0.1), optim.sgd(0.1, fused=False)),
    "chain of transformations": optim.chain(optim.adamw(0.1), optim.scale(0.5)),
    "masked": optim.masked(optim.adamw(0.1, fused=False), lambda path, leaf: leaf is not None and leaf.ndim > 1),
    "masked transformation": optim.masked(optim.scale(-1.0), lambda path, leaf: leaf is not None and leaf.ndim > 1),
    "by_label": optim.by_label(
        {"a": optim.adam(0.1, fused=False), "b": optim.sgd(0.1)},
        lambda path, leaf: "a" if "a" in path else "b",
        every=False,
    ),
    "skip_if_not_finite": optim.skip_if_not_finite(optim.adamw(0.1, fused=False)),
    "accumulate": optim.accumulate(optim.adamw(0.1, fused=False), every=2),
    "ema": optim.ema(optim.adamw(0.1, fused=False), 0.9),
    "with_master_weights": optim.with_master_weights(optim.adamw(0.1, fused=False)),
    "from_torch": optim.from_torch(torch.optim.NAdam, lr=WHEN, foreach=False),
    "nested": optim.ema(
        optim.skip_if_not_finite(
            optim.accumulate(
                optim.with_master_weights(optim.chain(optim.clip_by_value(1.0), optim.adam(0.1, fused=False))), 2
            )
        ),
        0.5,
    ),
}
WHOLE = {
    "clip_by_global_norm": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, fused=False)),
    "lamb": optim.lamb(0.1, weight_decay=0.1),
    "adafactor": optim.adafactor(0.1),
    "muon": optim.by_label(
        {"muon": optim.muon(0.1), "adamw": optim.adamw(0.1, fused=False)},
        lambda path, leaf: "muon" if leaf is not None and leaf.ndim == 2 else "adamw",
        every=False,
    ),
    "shampoo": optim.shampoo(0.1, momentum=0.9),
}
ALL = {**ELEMENTWISE, **WHOLE}


# -- trees --------------------------------------------------------------------------------------------------------

SHAPES = [(), (0,), (1,), (3,), (5,), (2, 3), (0, 2), (7, 5), (17,), (2, 2, 3)]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def tensor(shape, dtype, seed):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@st.composite
def trees(draw, dtypes=FLOATS):
    """A nest of containers over tensors, and a gradient for each, sometimes None, for each of three steps."""
    seeds = st.integers(0, 2**20)
    one = st.builds(tensor, st.sampled_from(SHAPES), st.sampled_from(dtypes), seeds)
    params = draw(
        st.recursive(
            one,
            lambda inner: st.one_of(
                st.lists(inner, min_size=1, max_size=3),
                st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
                st.builds(Layer, inner, inner),
                st.tuples(inner),
            ),
            max_leaves=5,
        )
    )
    at = optim.leaves.Leaves.of(params)
    steps = [
        at.rebuild([None if draw(st.integers(0, 4)) == 0 else tensor(x.shape, x.dtype, draw(seeds)) for x in at.leaves])
        for _ in range(3)
    ]
    return params, steps


def example(dtype=torch.float32):
    """A fixed tree: nested, 0-d, empty, odd sizes; five gradients, some of them None."""
    params = {
        "a": [tensor((7, 5), dtype, 0), Layer(tensor((33, 17), dtype, 1), tensor((17,), dtype, 2))],
        "b": (tensor((), dtype, 3), tensor((0, 3), dtype, 4)),
        "c": {"d": tensor((5,), dtype, 5)},
    }
    at = optim.leaves.Leaves.of(params)
    steps = [at.rebuild([tensor(x.shape, dtype, 10 * t + i) for i, x in enumerate(at.leaves)]) for t in range(1, 6)]
    return params, steps


def leaves_of(tree):
    return flatten(tree)[0]


def same(one, other):
    """Whether two trees have the same structure, types, dtypes and bits (NaN equals NaN)."""
    (a, at), (b, bt) = flatten(one), flatten(other)
    return at == bt and all(
        x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())
        for x, y in zip(a, b, strict=True)
    )


def by_update(opt, params, steps):
    state = opt.init(params)
    for grads in steps:
        updates, state = opt.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def by_step(opt, params, steps):
    params = copied(params)
    state = opt.init(params)
    for grads in steps:
        params, state = optim.step_of(opt)(copied(grads), state, params)
    return params, state


def by_torch(cls, params, steps, schedule=None, **options):
    params = copied(params)
    own = [torch.nn.Parameter(x) for x in leaves_of(params)]
    optimizer = cls(own, **options)
    for count, grads in enumerate(steps):
        if schedule:
            optimizer.param_groups[0]["lr"] = schedule(count)
        for p, g in zip(own, optim.leaves.Leaves.of(grads).leaves, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    return [p.detach() for p in own]


# -- the same bits as torch.optim -----------------------------------------------------------------------------------


def suited(make, params, steps):
    """Leave out what torch's class does not take."""
    if make is optim.muon:
        return params["a"][0], [grads["a"][0] for grads in steps]
    if make is optim.adafactor:
        return {**params, "b": params["b"][:1]}, [{**grads, "b": grads["b"][:1]} for grads in steps]
    return params, steps


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TWINS)
def test_steps_have_the_bits_of_torch(name, dtype, foreach):
    make, cls, options = TWINS[name]
    params, steps = suited(make, *example(dtype))
    kernel = {} if make is optim.muon else {"foreach": foreach and make is not optim.adafactor}
    ours = make(**options, **({"fused": False} if make in FUSED else {}))
    expected = by_torch(cls, params, steps, **options, **kernel)
    assert same(leaves_of(by_step(ours, params, steps)[0]), expected)


@pytest.mark.parametrize("name", [name for name, twin in TWINS.items() if twin[0] in FUSED])
@given(st.data())
@settings(max_examples=30)
def test_steps_on_any_tree_have_the_bits_of_torch(name, data):
    make, cls, options = TWINS[name]
    params, steps = data.draw(trees((torch.float32, torch.float64)))
    expected = by_torch(cls, params, steps, foreach=False, **options)
    assert same(leaves_of(by_step(make(**options, fused=False), params, steps)[0]), expected)


@pytest.mark.parametrize("name", [name for name, twin in TWINS.items() if twin[0] in FUSED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_other_dtypes_have_the_bits_of_torch_foreach(name, dtype):
    make, cls, options = TWINS[name]
    options = options if make is optim.sgd else {"eps": 1e-3, **options}
    params, steps = example(dtype)
    expected = by_torch(cls, params, steps, foreach=True, **options)
    assert same(leaves_of(by_step(make(**options, fused=False), params, steps)[0]), expected)


@pytest.mark.parametrize("name", TWINS)
def test_a_schedule_is_read_before_each_step(name):
    make, cls, options = TWINS[name]
    params, steps = suited(make, *example())
    options = {**options, "lr": 0.1}
    ours = make(**{**options, "lr": WHEN}, **({"fused": False} if make in FUSED else {}))
    expected = by_torch(cls, params, steps, WHEN, **options, **({} if make is optim.muon else {"foreach": False}))
    assert same(leaves_of(by_step(ours, params, steps)[0]), expected)


@pytest.mark.parametrize("cls", FOREIGN, ids=lambda cls: cls.__name__)
@given(st.data())
@settings(max_examples=10)
def test_foreign_optimizers_have_torchs_bits(cls, data):
    params, steps = data.draw(trees((torch.float32, torch.float64)))
    expected = by_torch(cls, params, steps, **FOREIGN[cls])
    assert same(leaves_of(by_step(optim.from_torch(cls, **FOREIGN[cls]), params, steps)[0]), expected)


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_foreign_optimizers_of_matrices(cls):
    params, steps = suited(optim.muon, *example())
    opt = optim.from_torch(cls, lr=0.1)
    assert not opt.elementwise
    assert same(leaves_of(by_step(opt, params, steps)[0]), by_torch(cls, params, steps, lr=0.1))


@pytest.mark.parametrize("name", [name for name, twin in TWINS.items() if twin[0] in FUSED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_fused_steps_are_foreach_steps_within_rounding(name, dtype):
    make, _, options = TWINS[name]
    params, steps = example(dtype)
    fused, plain = (by_step(make(**options, fused=fused), params, steps)[0] for fused in (None, False))
    for a, b in zip(leaves_of(fused), leaves_of(plain), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [name for name, twin in TWINS.items() if twin[0] in FUSED])
@given(st.data())
@settings(max_examples=25)
def test_fused_steps_of_any_tree(name, data):
    make, _, options = TWINS[name]
    params, steps = data.draw(trees((torch.float32, torch.float64, torch.bfloat16)))
    fused, plain = (by_step(make(**options, fused=fused), params, steps) for fused in (None, False))
    for a, b in zip(leaves_of(fused), leaves_of(plain), strict=True):
        torch.testing.assert_close(a, b)


def test_fused_kernels_that_are_wrong_are_not_used():
    opt = optim.sgd(0.1, fused=True)
    params = [torch.ones(64, dtype=torch.bfloat16)]
    with pytest.raises(optim.OptimizerError) as error:
        opt.step(params, opt.init(params), params)
    assert str(error.value) == (
        "fused=True, but for parameters of torch.bfloat16 on cpu there is no fused kernel that can be trusted, "
        "or they are not contiguous. Leave fused=None."
    )


def test_fused_kernels_read_gradients_in_any_memory_order():
    p, g = tensor((4, 6), torch.float32, 0), tensor((6, 4), torch.float32, 1).T
    for make in FUSED:
        fused, plain = (by_step(make(0.1, fused=fused), [p], [[g]])[0][0] for fused in (True, False))
        torch.testing.assert_close(fused, plain)


# -- what holds for every optimizer -----------------------------------------------------------------------------


def skeleton(tree):
    leaves, structure = flatten(tree)
    return structure, [(type(x), x.dtype, x.shape) for x in leaves]


@pytest.mark.parametrize("name", ALL)
@given(st.data())
@settings(max_examples=20)
def test_state_keeps_its_type_and_nothing_given_is_changed(name, data):
    opt = ALL[name]
    params, steps = data.draw(trees())
    state = opt.init(params)
    for grads in steps:
        before = copied((params, state, grads))
        updates, after = opt.update(grads, state, params)
        assert skeleton(after) == skeleton(state)
        assert same(before, (params, state, grads))
        params, state = optim.apply_updates(params, updates), after


@pytest.mark.parametrize("name", ALL)
def test_state_of_the_donated_step_is_that_of_the_update(name):
    opt = ALL[name]
    params, steps = example()
    first = steps[:1]
    assert same(by_step(opt, params, first)[1], by_update(opt, params, first)[1])
    for a, b in zip(*(leaves_of(run(opt, params, steps)) for run in (by_step, by_update)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "from_torch"])
@given(st.data())
@settings(max_examples=25)
def test_updates_lead_to_the_bits_of_the_step_within_a_factor_of_two(name, data):
    params, steps = data.draw(trees())
    stepped, updated = (run(ALL[name], params, steps[:1])[0] for run in (by_step, by_update))
    for p, a, b in zip(*map(leaves_of, (params, stepped, updated)), strict=True):
        near = (a.double() >= p.double() / 2) & (a.double() <= p.double() * 2)
        near |= (a.double() <= p.double() / 2) & (a.double() >= p.double() * 2)
        assert torch.equal(a[near], b[near])


@pytest.mark.parametrize("name", ALL)
def test_a_parameter_without_gradient_stands_still(name):
    opt = ALL[name]
    params = {"a": tensor((2, 3), torch.float32, 0), "b": tensor((4,), torch.float32, 1)}
    grads = {"a": None, "b": tensor((4,), torch.float32, 2)}
    state = opt.init(params)
    updates, after = opt.update(grads, state, params)
    assert updates["a"] is None
    if isinstance(state, dict) and "step" in state:
        assert [int(after["step"][name]) for name in "ab"] == [0, 1]


@pytest.mark.parametrize("name", ALL)
def test_whole_numbers_and_none_are_left_alone(name):
    opt = ALL[name]
    params = {"n": torch.arange(3), "none": None, "w": tensor((2, 3), torch.float32, 0)}
    grads = {"n": None, "none": None, "w": tensor((2, 3), torch.float32, 2)}
    for run in (by_step, by_update):
        after, _ = run(opt, params, [grads, grads])
        assert torch.equal(after["n"], torch.arange(3)) and after["none"] is None


@pytest.mark.parametrize("name", ALL)
def test_tied_parameters_stay_tied(name):
    opt = ALL[name]
    w, g = tensor((2, 3), torch.float32, 0), tensor((2, 3), torch.float32, 1)
    tied, alone = ({"a1": w, "a2": w}, {"a1": g, "a2": g}), ({"a1": w}, {"a1": g})
    for run in (by_step, by_update):
        both, one = (run(opt, params, [grads] * 3)[0] for params, grads in (tied, alone))
        assert torch.equal(both["a1"], one["a1"]) and torch.equal(both["a2"], one["a1"])


def test_tied_parameters_with_two_gradients_are_an_error():
    w = torch.ones(2)
    opt = optim.sgd(0.1)
    with pytest.raises(optim.OptimizerError, match=r'params\["a"\] and params\["b"\]'):
        opt.update({"a": torch.ones(2), "b": torch.ones(2)}, opt.init({"a": w, "b": w}), {"a": w, "b": w})


def test_params_that_want_gradients_still_do_after_a_step():
    for run in (by_step, by_update):
        params = [torch.ones(2, requires_grad=True)]
        state = optim.adamw(0.1).init(params)
        act = optim.adamw(0.1).step if run is by_step else None
        if act:
            after, _ = act([torch.ones(2)], state, params)
        else:
            updates, _ = optim.adamw(0.1).update([torch.ones(2)], state, params)
            after = optim.apply_updates(params, updates)
        assert after[0].requires_grad and after[0].is_leaf


# -- shards ---------------------------------------------------------------------------------------------------------


def laid(tree, layout):
    at = optim.leaves.Leaves.of(tree)
    return at.rebuild([x if x is None else fs.device_put(x, layout) for x in at.leaves])


def flat_tree(seed=0, dtype=torch.float32):
    shapes = {"a": (7, 5), "b": (), "c": (0, 3), "d": (9,)}
    return {name: tensor(shape, dtype, seed + i) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_flat_shards_equal_the_whole(name, devices):
    opt = ELEMENTWISE[name]
    assert opt.elementwise
    layout = fs.Layout(fs.make_mesh({"data": devices}), P.flat("data"))
    params, steps = flat_tree(), [flat_tree(seed) for seed in (10, 20, 30, 40)]
    steps[1]["a"] = None
    sharded_steps = [laid(grads, layout) for grads in steps]
    for run in (by_step, by_update):
        serial = run(opt, params, steps)
        sharded = run(opt, laid(params, layout), sharded_steps)
        assert same(fs.unshard(sharded), serial)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_cut_and_replicated_shards_equal_the_whole(name):
    opt = ELEMENTWISE[name]
    mesh = fs.make_mesh({"data": 2, "model": 2})
    specs = {"a": P("data", "model"), "b": P(), "c": P(None, ("model", "data"))}
    shapes = {"a": (4, 6), "b": (3,), "c": (5, 8)}
    trees_ = [
        {n: tensor(shape, torch.float32, 10 * t + i) for i, (n, shape) in enumerate(shapes.items())} for t in range(4)
    ]
    layouts = {n: fs.Layout(mesh, spec) for n, spec in specs.items()}
    params, *steps = trees_
    for run in (by_step, by_update):
        sharded = run(opt, fs.device_put(params, layouts), [fs.device_put(grads, layouts) for grads in steps])
        assert same(fs.unshard(sharded), run(opt, params, steps))


def test_tied_shards_and_flat_specs_with_a_shape():
    mesh = fs.make_mesh({"data": 2})
    w = fs.device_put(torch.ones(5), fs.Layout(mesh, P.flat("data")))
    g = fs.Sharded((5,), fs.Layout(mesh, P.flat("data", shape=(5,))), w.shards)
    opt = optim.sgd(0.5, momentum=0.5)
    g = fs.Sharded(g.shape, g.layout, tuple(shard.clone() for shard in g.shards))
    (one, other), _ = opt.step([g, g], opt.init([w, w]), [w, w])
    assert fs.unshard(one).tolist() == [0.5] * 5 and one is other


def test_clipping_on_shards_is_clipping_the_whole():
    opt = WHOLE["clip_by_global_norm"]
    assert opt.elementwise
    layout = fs.Layout(fs.make_mesh({"data": 4}), P.flat("data"))
    params, steps = flat_tree(), [flat_tree(10), flat_tree(20)]
    with fs.ledger() as comm:
        sharded = by_step(opt, laid(params, layout), [laid(grads, layout) for grads in steps])
    assert comm.calls() == 2
    for a, b in zip(leaves_of(fs.unshard(sharded)), leaves_of(by_step(opt, params, steps)), strict=True):
        torch.testing.assert_close(a, b)


def test_replicated_shards_that_share_memory_move_once():
    mesh = fs.make_mesh({"data": 3})
    x, g = torch.ones(2), torch.ones(2)
    shared, grads = (fs.Sharded((2,), fs.Layout(mesh), (t, t, t)) for t in (x, g))
    opt = optim.sgd(0.5)
    after, _ = opt.step([grads], opt.init([shared]), [shared])
    assert [shard.tolist() for shard in after[0].shards] == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("name", ["adafactor", "shampoo", "lamb", "muon"])
def test_whole_optimizers_run_on_replicated_leaves(name):
    opt = WHOLE[name]
    layout = fs.Layout(fs.make_mesh({"data": 2}))
    params, steps = flat_tree(), [flat_tree(10), flat_tree(20)]
    sharded = by_step(opt, laid(params, layout), [laid(grads, layout) for grads in steps])
    assert same(fs.unshard(sharded), by_step(opt, params, steps))


@pytest.mark.parametrize("name", ["adafactor", "shampoo", "from_torch(Adafactor)"])
def test_whole_optimizers_refuse_pieces(name):
    opt = optim.from_torch(torch.optim.Adafactor) if "torch" in name else WHOLE[name]
    layout = fs.Layout(fs.make_mesh({"data": 2}), P.flat("data"))
    with pytest.raises(fs.LayoutError) as error:
        opt.init(laid(flat_tree(), layout))
    assert str(error.value) == (
        f"{name} needs whole matrices, but these parameters are in pieces:\n"
        '  params["a"] is Sharded f32[7, 5]{flat:data} on Mesh(data=2; virtual, cpu)\n'
        '  params["b"] is Sharded f32[]{flat:data} on Mesh(data=2; virtual, cpu)\n'
        '  params["c"] is Sharded f32[0, 3]{flat:data} on Mesh(data=2; virtual, cpu)\n'
        '  params["d"] is Sharded f32[9]{flat:data} on Mesh(data=2; virtual, cpu)\n'
        "Give each matrix to one device: fs.partition_optimizer(opt, mesh=..., axis=..., stage=...)."
    )


def test_muon_refuses_vectors():
    with pytest.raises(fs.LayoutError, match=r'params\["b"\]: it has 1 dims, not 2'):
        optim.muon().init({"a": torch.ones(2, 2), "b": torch.ones(2)})


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_lamb_takes_the_norms_of_whole_leaves_in_one_collective(devices):
    opt = optim.lamb(0.1, weight_decay=0.1)
    layout = fs.Layout(fs.make_mesh({"data": devices}), P.flat("data"))
    params, grads = flat_tree(), flat_tree(10)
    sharded, shards = laid(params, layout), laid(grads, layout)
    state = opt.init(sharded)
    with fs.ledger() as comm:
        updates, _ = opt.update(shards, state, sharded)
    assert comm.calls() == (devices > 1)
    expected, _ = opt.update(grads, opt.init(params), params)
    for a, b in zip(leaves_of(fs.unshard(updates)), leaves_of(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_lamb_is_the_formula():
    p, g = tensor((3, 4), torch.float64, 0), tensor((3, 4), torch.float64, 1)
    opt = optim.lamb(0.1, (0.9, 0.99), 1e-6, 0.01)
    after, _ = by_step(opt, [p], [[g]])
    u = g / (g.square().sqrt() + 1e-6) + 0.01 * p
    torch.testing.assert_close(after[0], p - 0.1 * p.norm() / u.norm() * u)


def train(name):
    """Three steps on shards, as any process would make them; the whole parameters and state, and the collectives."""
    mesh = fs.make_mesh({"data": 2})
    layouts = {
        "a": fs.Layout(mesh, P.flat("data")),
        "b": fs.Layout(mesh),
        "c": fs.Layout(mesh),
        "d": fs.Layout(mesh, P()),
    }
    params, *steps = (fs.device_put(flat_tree(seed), layouts) for seed in (0, 10, 20, 30))
    with fs.ledger() as comm:
        result = by_step(ALL[name], params, steps)
    return fs.unshard(result), comm.by_collective()


@pytest.mark.parametrize("name", ["adamw", "nested", "from_torch", "clip_by_global_norm", "lamb", "skip_if_not_finite"])
def test_processes_do_as_virtual_devices_do(name, two):
    (expected, sent), (own, others_sent) = train(name), two.run(train, name)[0]
    assert same(own, expected)
    assert others_sent == sent


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("adafactor", "shampoo", "muon")])
def test_steps_can_be_counted_on_an_abstract_mesh(name):
    mesh = fs.make_mesh({"data": 4}, runtime="abstract")
    params = fs.device_put(flat_tree(), fs.Layout(mesh, P.flat("data")))
    state = ALL[name].init(params)
    for _ in range(2):
        params, state = optim.step_of(ALL[name])(params, state, params)
    assert all(x.spec == P.flat("data") for x in params.values())


def test_lion_is_the_formula():
    params, steps = example(torch.float64)
    p, m = params["c"]["d"], torch.zeros(5, dtype=torch.float64)
    for grads in steps:
        g = grads["c"]["d"]
        p = p - 0.1 * 0.2 * p - 0.1 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    after, state = by_step(optim.lion(0.1, (0.9, 0.99), weight_decay=0.2), params, steps)
    torch.testing.assert_close((after["c"]["d"], state["exp_avg"]["c"]["d"]), (p, m))


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (3, 2, 2), (9, 3)])
def test_shampoo_is_the_formula(shape):
    p, *grads = (tensor(shape, torch.float64, seed) for seed in range(4))
    after, _ = by_step(
        optim.shampoo(0.1, momentum=0.5, weight_decay=0.1, eps=0.01, longest=8), [p], [[g] for g in grads]
    )
    rows, columns = (shape[0] if shape else 1), p.numel() // (shape[0] if shape else 1)
    left, right = (0.01 * torch.eye(n, dtype=p.dtype) for n in (rows, columns))
    used = [1 < n <= 8 for n in (rows, columns)]
    b = torch.zeros_like(p)
    for g in grads:
        u = g.reshape(rows, columns)
        left, right = left + u @ u.T, right + u.T @ u
        for on, at in zip(used, (0, 1), strict=True):
            if on:
                u_, s, v = torch.linalg.svd((left, right)[at])
                root = u_ @ torch.diag(s ** (-1 / (2 * sum(used)))) @ v
                u = root @ u if at == 0 else u @ root
        b = 0.5 * b + u.reshape(shape)
        p = p - 0.1 * 0.1 * p - 0.1 * b
    torch.testing.assert_close(after[0], p)


# -- norms ---------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60)
def test_global_norm_counts_every_element_once(data):
    mesh = data.draw(fs.testing.strategies.meshes())
    tree, whole, cut = [], [], False
    for _ in range(data.draw(st.integers(0, 4))):
        shape = data.draw(fs.testing.strategies.shapes_for(mesh))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex64]))
        x = data.draw(fs.testing.strategies.dyadic(shape, dtype))
        whole.append(x)
        if data.draw(st.booleans()):
            layout = data.draw(fs.testing.strategies.layouts(mesh, shape, unreduced=False))
            cut |= any(mesh.shape[axis] > 1 for axis in layout.spec.sharded_axes)
            x = fs.device_put(x, layout)
        tree.append(x)
    with fs.ledger() as comm:
        found = optim.global_norm(tree)
    expected = sum(x.to(torch.complex128).abs().square().sum() for x in whole)
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64).sqrt())
    assert comm.calls() == cut


def test_global_norm_is_torchs_and_counts_ties_once():
    xs = [tensor((5, 3), torch.float32, 0), tensor((7,), torch.float32, 1)]
    expected = torch.nn.utils.get_total_norm(xs)
    torch.testing.assert_close(optim.global_norm(xs).float(), expected)
    assert torch.equal(optim.global_norm([*xs, xs[0], None]), optim.global_norm(xs))
    assert optim.global_norm({}) == 0


def test_global_norm_refuses_open_sums_and_two_meshes():
    mesh, other = fs.make_mesh({"data": 2}), fs.make_mesh({"model": 2})
    summed = fs.device_put(torch.ones(2), fs.Layout(mesh, P(unreduced="data")))
    with pytest.raises(fs.LayoutError) as error:
        optim.global_norm({"w": summed})
    assert str(error.value) == (
        'global_norm: a norm of sums that are not made yet would be wrong: ["w"] is Sharded f32[2]{U:data} on '
        "Mesh(data=2; virtual, cpu). Reduce them first: fs.reshard(x, layout) to a layout without unreduced axes."
    )
    two = [fs.device_put(torch.ones(2), fs.Layout(m, P(m.axis_names[0]))) for m in (mesh, other)]
    with pytest.raises(fs.LayoutError, match="on 2 meshes"):
        optim.global_norm(two)


def test_clip_by_global_norm_is_torchs():
    params, (grads, *_) = example()
    own = [torch.nn.Parameter(x) for x in leaves_of(params)]
    for p, g in zip(own, leaves_of(grads), strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(own, 1.0)
    clipped, _ = optim.clip_by_global_norm(1.0).update(grads, (), params)
    for a, p in zip(leaves_of(clipped), own, strict=True):
        torch.testing.assert_close(a, p.grad)


# -- combinators ----------------------------------------------------------------------------------------------------


def test_a_chain_steps_as_its_writer_does():
    params, steps = example()
    opt = optim.chain(optim.clip_by_value(0.5), optim.adamw(0.1, fused=False))
    clipped = [optim.clip_by_value(0.5).update(grads, (), None)[0] for grads in steps]
    assert same(by_step(opt, params, steps)[0], by_step(optim.adamw(0.1, fused=False), params, clipped)[0])
    assert optim.chain(optim.adamw(0.1), optim.scale(0.5)).step is None


def test_masked_optimizers_freeze_and_masked_transformations_pass_on():
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    mask = {"w": True, "b": False}
    frozen = optim.masked(optim.sgd(0.5), mask)
    updates, _ = frozen.update(params, frozen.init(params), params)
    assert updates["b"] is None and updates["w"].tolist() == [-0.5, -0.5]
    passed = optim.masked(optim.scale(3.0), mask)
    updates, _ = passed.update(params, passed.init(params), params)
    assert updates["b"].tolist() == [1, 1] and updates["w"].tolist() == [3, 3]


def test_labels_without_optimizers_and_optimizers_without_parameters_are_errors():
    opt = optim.by_label({"a": optim.sgd(), "b": optim.sgd()}, {"w": "a", "v": "c", "u": "d"})
    with pytest.raises(optim.OptimizerError) as error:
        opt.init({"w": torch.ones(1), "v": torch.ones(1), "u": torch.ones(1)})
    assert str(error.value) == (
        "by_label has optimizers for 'a', 'b', but there is no optimizer for: params[\"u\"] is labelled 'd'; "
        "params[\"v\"] is labelled 'c' and no parameter is labelled 'b'. "
        "Every parameter needs an optimizer, and every optimizer a parameter."
    )


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_all_devices_skip_when_one_finds_a_bad_gradient(bad):
    layout = fs.Layout(fs.make_mesh({"data": 4}), P("data"))
    params = fs.device_put([torch.ones(8), torch.ones(4)], layout)
    grads = torch.ones(8)
    grads[7] = bad
    opt = optim.skip_if_not_finite(optim.adamw(0.1))
    state = opt.init(params)
    with fs.ledger() as comm:
        updates, after = opt.update(fs.device_put([grads, torch.ones(4)], layout), state, params)
    assert updates == [None, None] and after["skipped"] == 1 and same(after["inner"], state["inner"])
    assert comm.calls() == 1
    _, after = opt.update(fs.device_put([torch.ones(8), torch.ones(4)], layout), after, params)
    assert after["skipped"] == 1 and after["inner"]["count"] == 1


def test_accumulation_is_one_step_with_the_mean():
    params, steps = example(torch.float64)
    opt = optim.accumulate(optim.adamw(0.1, fused=False), every=5)
    at = optim.leaves.Leaves.of(params)
    total = steps[0]
    for grads in steps[1:]:
        total = at.rebuild([a + b for a, b in zip(leaves_of(total), leaves_of(grads), strict=True)])
    mean = optim.leaves.Leaves.of(total).mapped(lambda x: x / 5)
    assert same(by_step(opt, params, steps)[0], by_step(optim.adamw(0.1, fused=False), params, [mean])[0])


def test_the_average_of_parameters_is_kept_beside_them():
    params, steps = example(torch.float64)
    opt = optim.chain(optim.clip_by_value(1.0), optim.ema(optim.sgd(0.1, fused=False), 0.9))
    expected, moving = copied(params), copied(params)
    inner = optim.chain(optim.clip_by_value(1.0), optim.sgd(0.1, fused=False))
    state = inner.init(moving)
    for grads in steps:
        moving, state = inner.step(copied(grads), state, moving)
        for a, p in zip(leaves_of(expected), leaves_of(moving), strict=True):
            a.lerp_(p, 1 - 0.9)
    assert same(optim.ema_params(by_step(opt, params, steps)[1]), expected)
    with pytest.raises(optim.OptimizerError, match="no average"):
        optim.ema_params(state)


@given(st.data())
def test_master_weights_round_to_the_same_bits_by_update_and_by_step(data):
    params, steps = data.draw(trees((torch.bfloat16, torch.float16)))
    scale = data.draw(st.sampled_from([1e-4, 1.0, 1e2]))
    opt = optim.with_master_weights(optim.adamw(scale, fused=False))
    stepped, updated = by_step(opt, params, steps), by_update(opt, params, steps)
    assert same(stepped, updated)
    for master, p in zip(leaves_of(updated[1]["master"]), leaves_of(updated[0]), strict=True):
        assert master.dtype == torch.float32
        assert same([master.to(p.dtype)], [p])


def test_master_weights_are_a_float32_run():
    params, steps = example(torch.bfloat16)
    wide = [optim.leaves.Leaves.of(tree).mapped(lambda x: x.float()) for tree in (params, *steps)]
    _, state = by_step(optim.with_master_weights(optim.adamw(0.01, fused=False)), params, steps)
    assert same(state["master"], by_step(optim.adamw(0.01, fused=False), wide[0], wide[1:])[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.from_torch(torch.optim.LBFGS), "calls the loss function several times"),
        (lambda: optim.from_torch(torch.optim.SparseAdam), "sparse gradients"),
        (lambda: optim.from_torch(torch.optim.SGD, lr=-1.0), "Invalid learning rate"),
        (lambda: optim.from_torch(torch.optim.SGD([torch.ones(1)])), "takes a class of torch.optim"),
        (lambda: optim.from_torch(type("Mine", (torch.optim.SGD,), {})), "whether Mine is elementwise"),
        (lambda: optim.sgd(0.1, nesterov=True), "nesterov needs momentum"),
        (lambda: optim.accumulate(optim.sgd(), 0), "at least 1"),
    ],
)
def test_what_cannot_be_made_says_why(make, message):
    with pytest.raises(optim.OptimizerError, match=message):
        make()


def test_gradients_must_lie_as_their_parameters():
    mesh = fs.make_mesh({"data": 2})
    x = fs.device_put(torch.ones(4), fs.Layout(mesh, P("data")))
    opt = optim.sgd(0.1)
    params = {"v": torch.ones(2), "w": x}
    with pytest.raises(fs.LayoutError) as error:
        opt.update({"v": torch.ones(3), "w": torch.ones(4)}, opt.init(params), params)
    assert str(error.value) == (
        "grads must lie as params do, or be None:\n"
        '  ["v"]: params has a Tensor of shape (2,), grads has a Tensor of shape (3,)\n'
        '  ["w"]: params has Sharded f32[4@data] on Mesh(data=2; virtual, cpu), grads has a Tensor of shape (4,)\n'
        "Lay them alike: fs.reshard(grads, layout) or fs.device_put(params, layout)."
    )
    with pytest.raises(fs.LayoutError, match="different structure"):
        opt.update([torch.ones(2)], opt.init(params), params)


# -- schedules ------------------------------------------------------------------------------------------------------


def rates_of(make, lr, count=12):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


T = torch.optim.lr_scheduler
SCHEDULES = {
    "constant": (optim.schedules.constant(0.1), lambda o: T.LambdaLR(o, lambda _: 1.0)),
    "linear": (optim.schedules.linear(0.1, 0.02, 5), lambda o: T.LinearLR(o, 1.0, 0.2, 5)),
    "step": (optim.schedules.step(0.1, every=3, factor=0.5), lambda o: T.StepLR(o, 3, 0.5)),
    "polynomial": (optim.schedules.polynomial(0.1, 0.0, 8, power=2), lambda o: T.PolynomialLR(o, 8, 2.0)),
    "one_cycle": (
        optim.schedules.one_cycle(0.1, steps=12),
        lambda o: T.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=False),
    ),
    "warmup_cosine": (
        optim.schedules.warmup_cosine(0.1, warmup=0, steps=11, end=0.01),
        lambda o: T.CosineAnnealingLR(o, 11, 0.01),
    ),
    "inverse_sqrt": (
        optim.schedules.inverse_sqrt(0.1, warmup=4),
        lambda o: T.LambdaLR(o, lambda t: min(t / 4, (4 / max(t, 1)) ** 0.5)),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedules_are_torchs(name):
    ours, theirs = SCHEDULES[name]
    assert [ours(count) for count in range(12)] == pytest.approx(rates_of(theirs, 0.1), abs=1e-12)


def test_a_schedule_goes_on_where_a_run_was_left():
    params, steps = example()
    opt = optim.adamw(WHEN, fused=False)
    middle, state = by_step(opt, params, steps[:2])
    for grads in steps[2:]:
        middle, state = opt.step(copied(grads), state, middle)
    assert same(middle, by_step(opt, params, steps)[0])
