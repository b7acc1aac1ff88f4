"""Owners: optimizers of whole matrices, divided among devices, do what they do on one."""

from fractions import Fraction
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from fshard.mesh.layout import flatten
from fshard.mesh.layout.sharded import flatten_shards
from fshard.optim.contract import copied, pure_step
from fshard.optim.sharded.layouts import assign_owners
from tests.optim.helpers.optimizers import ALL
from tests.transforms.helpers.placement import placed

STAGES = (1, 2, 3)


def is_matrix(path, leaf):
    return leaf.ndim == 2


def is_not_empty(path, leaf):
    return 0 not in leaf.shape


def matrices_and_others(matrices, others):
    return optim.by_label({True: matrices, False: others}, is_matrix, every=False)


def adamw():
    return optim.adamw(0.1, fused=False)


OPTIMIZERS = {
    "muon": optim.masked(optim.muon(0.1), is_matrix),
    "shampoo": optim.shampoo(0.1, momentum=0.9),
    "adafactor": optim.adafactor(0.1, weight_decay=0.1),
    "lamb": optim.lamb(0.1, weight_decay=0.1),
    "sgd": optim.sgd(0.1, momentum=0.9, fused=False),
    "adamw": adamw(),
    "muon and adamw": matrices_and_others(optim.muon(0.1), adamw()),
    "shampoo and lion": matrices_and_others(optim.shampoo(0.1), optim.lion(0.01)),
    "lamb and adafactor": matrices_and_others(optim.lamb(0.1), optim.adafactor(0.1)),
    "torch's muon and adam": matrices_and_others(
        optim.masked(optim.from_torch(torch.optim.Muon, lr=0.1), is_not_empty),
        optim.from_torch(torch.optim.Adam, foreach=False),
    ),
    "torch's adafactor": optim.masked(optim.from_torch(torch.optim.Adafactor), is_not_empty),
    "clipped": optim.chain(optim.clip_by_value(0.5), matrices_and_others(optim.muon(0.1), adamw())),
    "accumulated": optim.accumulate(optim.shampoo(0.1), every=2),
    "averaged, if finite": optim.ema(
        optim.skip_if_not_finite(optim.masked(optim.muon(0.1), is_matrix)), 0.9
    ),
    "masters": optim.with_master_weights(matrices_and_others(optim.muon(0.1), adamw())),
}


def numbers(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def trees(draw):
    """Matrices and other tensors, and for each of three steps their gradients, some of them None."""
    seeds = st.integers(0, 2**20)
    shape = st.one_of(
        st.tuples(st.integers(1, 9), st.integers(1, 9)),
        st.sampled_from([(), (1,), (5,), (17,), (0, 3), (4, 0), (2, 3, 4), (33, 17)]),
    )
    shapes = draw(st.dictionaries(st.sampled_from("abcdefg"), shape, min_size=1))
    params = {name: numbers(own, draw(seeds)) for name, own in shapes.items()}
    grads = [
        {
            name: numbers(own, draw(seeds)) if draw(st.integers(0, 4)) else None
            for name, own in shapes.items()
        }
        for _ in range(3)
    ]
    return params, grads


def run_on(mesh, opt, stage, params, grads, sharding=None):
    """Take steps with an optimizer that is divided among the devices; return parameters and state."""
    divided = fs.partition_optimizer(
        opt, mesh=mesh, axis=mesh.axis_names, stage=stage, sharding=sharding
    )
    rules = fs.fsdp(mesh.axis_names) if stage == 3 else P()
    own = fs.shard_params(params, rules, mesh=mesh)
    state = divided.init(own)
    for each in grads:
        placed_grads = {
            k: g if g is None else fs.device_put(g, divided.gradients(own[k].layout))
            for k, g in each.items()
        }
        own, state = pure_step(divided)(placed_grads, state, own)
    return own, state


def run_alone(opt, params, grads):
    params, state = copied(params), opt.init(params)
    for each in grads:
        params, state = pure_step(opt)(each, state, params)
    return params, state


def same(ours, theirs):
    (a, at), (b, bt) = flatten(fs.unshard(ours)), flatten(theirs)
    return at == bt and all(
        torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(st.data())
@settings(max_examples=12)
def test_partitioned_optimizer_equals_one_device(name, data):
    params, grads = data.draw(trees())
    axes = data.draw(
        st.sampled_from(
            [{"data": 2}, {"data": 1}, {"data": 4}, {"data": 8}, {"data": 2, "node": 3}]
        )
    )
    stage = data.draw(st.sampled_from([0, *STAGES]))
    sharding = data.draw(st.sampled_from([None, "owners"]))
    expected = run_alone(OPTIMIZERS[name], params, grads)
    actual = run_on(fs.make_mesh(axes), OPTIMIZERS[name], stage, params, grads, sharding)
    assert same(actual, expected)


def on_processes(n):
    """Return trained parameters and state, and their types, which name the owner of each leaf."""
    params, grads = fixed()
    mesh = fs.make_mesh({"node": n // 2, "data": 2})
    results = [run_on(mesh, OPTIMIZERS[name], stage, params, grads) for name, stage in CASES]
    return [fs.unshard(result) for result in results], [str(types(result)) for result in results]


CASES = [
    *(("muon and adamw", stage) for stage in STAGES),
    ("shampoo", 1),
    ("lamb", 2),
    ("adafactor", 3),
]


def fixed():
    shapes = {
        "a": (6, 4),
        "b": (5, 7),
        "bias": (9,),
        "c": (3, 3),
        "empty": (0, 3),
        "number": (),
        "stack": (2, 3, 4),
    }
    params, *grads = [
        {k: numbers(own, 10 * t + i) for i, (k, own) in enumerate(shapes.items())} for t in range(4)
    ]
    return params, grads


def test_partitioned_optimizer_between_processes_equals_one_device(two, four):
    expected = [run_alone(OPTIMIZERS[name], *fixed()) for name, _ in CASES]
    for n, pool in ((2, two), (4, four)):
        owners = on_processes(n)[1]
        for results, types_of_process in pool.run(on_processes, n):
            assert all(same(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
            assert types_of_process == owners


def loss_fn(params, x):
    """A loss with another gradient for every sample."""
    leaves = [leaf for leaf in flatten(params)[0] if leaf.numel()]
    return sum(
        ((leaf.sin().sum() + 1) * (place + x.sum(1)).cos()).mean()
        for place, leaf in enumerate(leaves)
    )


def types(tree):
    leaves, structure = flatten(tree)
    return structure, [fs.typeof(x) for x in leaves]


def steps_of_training(opt, mesh, stage, params, batches, **options):
    divided = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    params = placed(params, stage, mesh)
    state = divided.init(params)
    step = fs.train_step(loss_fn, divided, mesh=mesh, batch=P("data"), reproducible=True, **options)
    before = types((params, state))
    metrics = {}
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        assert types((params, state)) == before
    return params, state, metrics["loss"], metrics["grad_norm"]


@pytest.mark.parametrize("name", [*ALL, *OPTIMIZERS])
@given(st.data())
@settings(max_examples=5)
def test_training_any_tree_equal_bits_and_layouts(name, data):
    opt = {**ALL, **OPTIMIZERS}[name]
    params, _ = data.draw(trees())
    if not any(x.numel() for x in params.values()):
        params["a"] = torch.ones(2, 2)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    params = {name: x.to(dtype) for name, x in params.items()}
    batches = [numbers((16, 2), data.draw(st.integers(0, 99))) for _ in range(2)]
    n = data.draw(st.sampled_from([2, 1, 4, 8]))
    accumulate = data.draw(st.sampled_from([turns for turns in (1, 2, 4, 8) if turns * n <= 8]))
    stage = data.draw(st.sampled_from([0, *STAGES]))
    precision = data.draw(st.sampled_from([None, None, "bf16"]))
    donate = data.draw(st.booleans())
    options = {"accumulate": accumulate, "precision": precision, "donate": donate}
    expected = steps_of_training(
        opt, fs.make_mesh({"data": 1}), 0, params, batches, precision=precision
    )
    actual = steps_of_training(opt, fs.make_mesh({"data": n}), stage, params, batches, **options)
    assert same(actual, fs.unshard(expected))


# -- who holds what ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50)), st.integers(1, 9))
def test_owners_have_balanced_loads(sizes, n):
    owners = assign_owners(sizes, n)
    loads = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == own)
        for own in range(n)
    ]
    assert sum(loads) == sum(sizes) and assign_owners(sizes, n) == owners
    assert max(loads) <= Fraction(sum(sizes), n) + max(sizes, default=0)


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_at_owners_or_in_flat_ranges(stage):
    n, shapes = (
        4,
        {
            "a": (6, 4),
            "bias": (9,),
            "c": (3, 3),
            "d": (5, 7),
            "e": (2, 2),
            "f": (7, 2),
            "number": (),
        },
    )
    mesh = fs.make_mesh({"data": n})
    params = placed({name: numbers(shape, 0) for name, shape in shapes.items()}, stage, mesh)
    opt = fs.partition_optimizer(
        matrices_and_others(optim.muon(), optim.adamw()), mesh=mesh, axis="data", stage=stage
    )
    state = opt.init(params)
    sizes = [prod(shape) for shape in shapes.values() if len(shape) == 2]
    owners = assign_owners(sizes, n)
    matrices = flatten(state[True]["momentum_buffer"])[0]
    assert [x.spec for x in matrices] == [P(at={"data": owner}) for owner in owners]
    for device in range(n):
        held = sum(x.shards[device].numel() for x in matrices)
        assert held == sum(
            size for size, owner in zip(sizes, owners, strict=True) if owner == device
        )
        for name in ("exp_avg", "exp_avg_sq"):
            lengths = [x.shards[device].numel() for x in flatten(state[False][name])[0]]
            assert lengths == [[3, 3, 3, 0][device], int(device == 0)]  # of the bias and the number
    tensors = flatten_shards(state)[0]
    assert sum(x.untyped_storage().nbytes() for x in tensors) == sum(x.nbytes for x in tensors)


def test_state_of_other_shape_follows_its_matrix():
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"a": torch.ones(4, 3), "b": torch.ones(2, 3)}, P(), mesh=mesh)
    state = fs.partition_optimizer(optim.shampoo(longest=3), mesh=mesh, axis="data", stage=1).init(
        params
    )
    actual = {
        name: {k: None if x is None else str(fs.typeof(x)) for k, x in state[name].items()}
        for name in ("left", "right")
    }
    assert actual == {
        "left": {"a": None, "b": "f32[2, 2]{at:data=1}"},
        "right": {"a": "f32[3, 3]{at:data=0}", "b": "f32[3, 3]{at:data=1}"},
    }
    assert [x.shape for x in state["right"]["b"].shards] == [(0, 0), (3, 3)]


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_tied_matrices_share_owner_and_integers_stay(at_once, monkeypatch):
    monkeypatch.setattr(optim.sharded.optimizer, "AT_ONCE", at_once)
    mesh = fs.make_mesh({"data": 2})
    w = torch.ones(3, 2)
    params = fs.shard_params(
        {"a": w, "b": torch.ones(2, 2), "c": w, "steps": torch.tensor([3])}, P(), mesh=mesh
    )
    opt = fs.partition_optimizer(optim.shampoo(0.5), mesh=mesh, axis="data", stage=1)
    state = opt.init(params)
    assert state["left"]["a"] is state["left"]["c"] and state["left"]["steps"] is None
    g = fs.device_put(torch.ones(3, 2), fs.Layout(mesh, P.flat("data")))
    after, _ = opt.step({"a": g, "b": None, "c": g, "steps": None}, state, params)
    assert after["a"] is after["c"]
    assert fs.unshard(after["steps"]).tolist() == [3]


@pytest.mark.parametrize("spec", [P(None, "model"), P("model"), P(("data", "model"))])
def test_sharded_matrices_are_assembled_at_owner(spec):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    w = numbers((4, 8), 0)
    g = numbers((4, 8), 1)
    opt = fs.partition_optimizer(optim.muon(0.1), mesh=mesh, axis="data", stage=1)
    params = fs.shard_params({"w": w}, {"w": spec}, mesh=mesh)
    grads = {"w": fs.device_put(g, opt.gradients(params["w"].layout))}
    state = opt.init(params)
    after, state = opt.step(grads, state, params)
    expected, _ = pure_step(optim.muon(0.1))({"w": g}, optim.muon(0.1).init({"w": w}), {"w": w})
    assert after["w"].spec == spec and same(after, expected)
    assert [x.numel() for x in state["momentum_buffer"]["w"].shards].count(32) == 1


# -- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_update_at_owners_sends_minimal_bytes(stage):
    """All owners have equally much: then n devices exchange (n-1)/n of the n-th part that each holds."""
    n, matrices = 4, 8
    mesh = fs.make_mesh({"data": n})
    opt = fs.partition_optimizer(optim.shampoo(), mesh=mesh, axis="data", stage=stage)
    params = placed({str(i): numbers((4, 6), i) for i in range(matrices)}, stage, mesh)
    state = opt.init(params)
    grads = {
        k: fs.device_put(numbers((4, 6), 9), opt.gradients(x.layout)) for k, x in params.items()
    }
    with fs.ledger() as comm:
        opt.step(grads, state, params)
    size = matrices * 24 * 4
    exchange = Fraction((n - 1) * size, n * n)
    gather = Fraction((n - 1) * size, n)
    expected = {("all_to_all", ("data",)): (2, 3 * exchange if stage == 3 else 2 * exchange)}
    if stage < 3:
        expected["all_gather", ("data",)] = (1, gather)
    assert comm.by_collective() == expected


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1),
    st.integers(2, 5),
    st.integers(1, 300),
)
@settings(max_examples=50)
def test_owner_exchange_any_round_limit_is_exact(shapes, n, at_once):
    mesh = fs.make_mesh({"data": n})
    wholes = [numbers(shape, seed) for seed, shape in enumerate(shapes)]
    flat = fs.Layout(mesh, P.flat("data"))
    owned = [fs.Layout(mesh, P(at={"data": place % n})) for place in range(len(wholes))]
    with pytest.MonkeyPatch.context() as patch, fs.ledger() as comm:
        patch.setattr(fs.mesh.reshard.execute, "AT_ONCE", at_once)
        collected = fs.reshard(fs.device_put(wholes, flat), owned)
        spread = fs.reshard(collected, flat)
    for xs in (collected, spread):
        assert all(map(torch.equal, fs.unshard(xs), wholes))
    row = max(sum(w.numel() for w in wholes[place::n]) for place in range(n)) * 4
    assert comm.calls() <= 2 * len(wholes) and (comm.calls() <= 2 or row > at_once)


def test_direct_exchange_above_limit_runs_in_rounds(monkeypatch):
    monkeypatch.setattr(fs.mesh.reshard.execute, "AT_ONCE", 32)
    mesh = fs.make_mesh({"data": 2})
    flat = fs.device_put(
        [torch.arange(8.0), torch.ones(8), torch.zeros(8)], fs.Layout(mesh, P.flat("data"))
    )
    with fs.ledger() as comm:
        fs.reshard(flat, [fs.Layout(mesh, P(at={"data": owner})) for owner in (0, 1, 0)])
    assert comm.calls() == 2 and comm.bytes() == 2 * 16
