"""Optimizers of full matrices, divided among owners, do what they do on one device.

The oracle is the same optimizer on plain tensors (`run_alone`), or training on one device, by bits.
"""

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
from tests.helpers.processes import ONE_LINK
from tests.helpers.sampled import examples
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


TORCH_MUON = optim.masked(optim.from_torch(torch.optim.Muon, lr=0.1), is_not_empty)
TORCH_ADAM = optim.from_torch(torch.optim.Adam, foreach=False)
MUON_OR_SKIP = optim.skip_if_not_finite(optim.masked(optim.muon(0.1), is_matrix))
MUON_AND_ADAMW = matrices_and_others(optim.muon(0.1), adamw())
OPTIMIZERS = {
    "muon": optim.masked(optim.muon(0.1), is_matrix),
    "shampoo": optim.shampoo(0.1, momentum=0.9),
    "adafactor": optim.adafactor(0.1, weight_decay=0.1),
    "lamb": optim.lamb(0.1, weight_decay=0.1),
    "sgd": optim.sgd(0.1, momentum=0.9, fused=False),
    "adamw": adamw(),
    "muon and adamw": MUON_AND_ADAMW,
    "shampoo and lion": matrices_and_others(optim.shampoo(0.1), optim.lion(0.01)),
    "lamb and adafactor": matrices_and_others(optim.lamb(0.1), optim.adafactor(0.1)),
    "torch's muon and adam": matrices_and_others(TORCH_MUON, TORCH_ADAM),
    "torch's adafactor": optim.masked(optim.from_torch(torch.optim.Adafactor), is_not_empty),
    "clipped": optim.chain(optim.clip_by_value(0.5), MUON_AND_ADAMW),
    "accumulated": optim.accumulate(optim.shampoo(0.1), every=2),
    "averaged, if finite": optim.ema(MUON_OR_SKIP, 0.9),
    "masters": optim.with_master_weights(MUON_AND_ADAMW),
}


def numbers(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def trees(draw):
    """Draw matrices and other tensors, and for three steps a gradient of each, or None."""
    seeds = st.integers(0, 2**20)
    matrices = st.tuples(st.integers(1, 9), st.integers(1, 9))
    others = st.sampled_from([(), (1,), (5,), (17,), (0, 3), (4, 0), (2, 3, 4), (33, 17)])
    named = st.dictionaries(st.sampled_from("abcdefg"), st.one_of(matrices, others), min_size=1)
    shapes = draw(named)

    params = {name: numbers(shape, draw(seeds)) for name, shape in shapes.items()}
    steps = []
    for _ in range(3):
        grads = {}
        for name, shape in shapes.items():
            has_gradient = draw(st.integers(0, 4)) > 0
            grads[name] = numbers(shape, draw(seeds)) if has_gradient else None
        steps.append(grads)
    return params, steps


def run_on(mesh, opt, stage, params, steps, sharding=None):
    """Take steps with an optimizer that is divided among devices; return parameters and state."""
    divided = fs.partition_optimizer(
        opt, mesh=mesh, axis=mesh.axis_names, stage=stage, sharding=sharding
    )
    rules = fs.fsdp(mesh.axis_names) if stage == 3 else P()
    params = fs.shard_params(params, rules, mesh=mesh)
    state = divided.init(params)
    for grads in steps:
        arrays = {}
        for name, g in grads.items():
            layout = divided.gradients(params[name].layout)
            arrays[name] = None if g is None else fs.device_put(g, layout)
        params, state = pure_step(divided)(arrays, state, params)
    return params, state


def run_alone(opt, params, steps):
    """Take steps on plain tensors."""
    params = copied(params)
    state = opt.init(params)
    for grads in steps:
        params, state = pure_step(opt)(grads, state, params)
    return params, state


def same(actual, expected):
    """Return whether arrays have the structure, dtypes and bits of plain tensors."""
    xs, structure = flatten(fs.unshard(actual))
    ys, expected_structure = flatten(expected)
    if structure != expected_structure:
        return False
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(xs, ys, strict=True))


MESHES = [{"data": 2}, {"data": 1}, {"data": 4}, {"data": 8}, {"data": 2, "node": 3}]


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(st.data())
@settings(max_examples=examples(6))
def test_partitioned_optimizer_equals_one_device(name, data):
    params, steps = data.draw(trees())
    mesh = fs.make_mesh(data.draw(st.sampled_from(MESHES)))
    stage = data.draw(st.sampled_from([0, *STAGES]))
    sharding = data.draw(st.sampled_from([None, "owners"]))

    actual = run_on(mesh, OPTIMIZERS[name], stage, params, steps, sharding)

    assert same(actual, run_alone(OPTIMIZERS[name], params, steps))


CASES = [
    ("muon and adamw", 1),
    ("muon and adamw", 2),
    ("muon and adamw", 3),
    ("shampoo", 1),
    ("lamb", 2),
    ("adafactor", 3),
]


def fixed():
    """Return a tree of all kinds of shapes, and its gradients of three steps."""
    shapes = {
        "a": (6, 4),
        "b": (5, 7),
        "bias": (9,),
        "c": (3, 3),
        "empty": (0, 3),
        "number": (),
        "stack": (2, 3, 4),
    }
    trees = []
    for step in range(4):
        trees.append({k: numbers(s, 10 * step + i) for i, (k, s) in enumerate(shapes.items())})
    params, *steps = trees
    return params, steps


def on_processes(n):
    """Return trained parameters and state, and their types, which name the owner of each leaf."""
    params, steps = fixed()
    mesh = fs.make_mesh({"node": n // 2, "data": 2})
    results = [run_on(mesh, OPTIMIZERS[name], stage, params, steps) for name, stage in CASES]
    return [fs.unshard(result) for result in results], [str(types(result)) for result in results]


@ONE_LINK
def test_partitioned_optimizer_between_processes_equals_one_device(two, four):
    expected = [run_alone(OPTIMIZERS[name], *fixed()) for name, _ in CASES]

    for n, pool in ((2, two), (4, four)):
        _, types_of_virtual = on_processes(n)
        for results, types_of_process in pool.run(on_processes, n):
            assert all(map(same, results, expected))
            assert types_of_process == types_of_virtual


def loss_fn(params, x):
    """Return a loss with another gradient for every sample."""
    leaves = [leaf for leaf in flatten(params)[0] if leaf.numel()]
    sums = x.sum(1)
    loss = 0
    for index, leaf in enumerate(leaves):
        loss = loss + ((leaf.sin().sum() + 1) * (index + sums).cos()).mean()
    return loss


def types(tree):
    leaves, structure = flatten(tree)
    return structure, [fs.typeof(x) for x in leaves]


def steps_of_training(opt, mesh, stage, params, batches, **options):
    """Train reproducibly; return parameters, state and metrics. Types may not change."""
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
@settings(max_examples=examples(2))
def test_training_any_tree_equal_bits_and_layouts(name, data):
    opt = {**ALL, **OPTIMIZERS}[name]
    params, _ = data.draw(trees())
    if not any(x.numel() for x in params.values()):
        params["a"] = torch.ones(2, 2)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    params = {name: x.to(dtype) for name, x in params.items()}
    batches = [numbers((16, 2), data.draw(st.integers(0, 99))) for _ in range(2)]

    # Up to 8 slices of the batch, on one device or several.
    n = data.draw(st.sampled_from([2, 1, 4, 8]))
    possible = [slices for slices in (1, 2, 4, 8) if slices * n <= 8]
    accumulate = data.draw(st.sampled_from(possible))
    stage = data.draw(st.sampled_from([0, *STAGES]))
    precision = data.draw(st.sampled_from([None, None, "bf16"]))
    donate = data.draw(st.booleans())

    one = fs.make_mesh({"data": 1})
    expected = steps_of_training(opt, one, 0, params, batches, precision=precision)
    mesh = fs.make_mesh({"data": n})
    options = {"accumulate": accumulate, "precision": precision, "donate": donate}
    actual = steps_of_training(opt, mesh, stage, params, batches, **options)

    assert same(actual, fs.unshard(expected))


# -- who holds what --------------------------------------------------------------------------------


def loads_of(sizes, owners, n):
    """Return the sum of the sizes of each owner."""
    loads = [0] * n
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    return loads


@given(st.lists(st.integers(0, 50)), st.integers(1, 9))
def test_owners_have_balanced_loads(sizes, n):
    owners = assign_owners(sizes, n)

    loads = loads_of(sizes, owners, n)
    assert sum(loads) == sum(sizes)
    assert max(loads) <= Fraction(sum(sizes), n) + max(sizes, default=0)
    assert assign_owners(sizes, n) == owners


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_at_owners_or_in_flat_ranges(stage):
    """State of matrices is at their owners, that of the bias (9) and the number (1) in ranges."""
    n = 4
    shapes = {
        "a": (6, 4),
        "bias": (9,),
        "c": (3, 3),
        "d": (5, 7),
        "e": (2, 2),
        "f": (7, 2),
        "number": (),
    }
    mesh = fs.make_mesh({"data": n})
    params = placed({name: numbers(shape, 0) for name, shape in shapes.items()}, stage, mesh)
    opt = matrices_and_others(optim.muon(), optim.adamw())
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)

    state = opt.init(params)

    sizes = [prod(shape) for shape in shapes.values() if len(shape) == 2]
    owners = assign_owners(sizes, n)
    loads = loads_of(sizes, owners, n)
    matrices, _ = flatten(state[True]["momentum_buffer"])
    assert [x.spec for x in matrices] == [P(at={"data": owner}) for owner in owners]
    for device in range(n):
        assert sum(x.shards[device].numel() for x in matrices) == loads[device]
        of_bias = [3, 3, 3, 0][device]
        of_number = [1, 0, 0, 0][device]
        for name in ("exp_avg", "exp_avg_sq"):
            vectors, _ = flatten(state[False][name])
            assert [x.shards[device].numel() for x in vectors] == [of_bias, of_number]

    # No shard is a view of more memory.
    tensors = flatten_shards(state)[0]
    assert sum(x.untyped_storage().nbytes() for x in tensors) == sum(x.nbytes for x in tensors)


def test_state_of_other_shape_follows_its_matrix():
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"a": torch.ones(4, 3), "b": torch.ones(2, 3)}, P(), mesh=mesh)
    opt = fs.partition_optimizer(optim.shampoo(longest=3), mesh=mesh, axis="data", stage=1)

    state = opt.init(params)

    left = state["left"]
    right = state["right"]
    assert left["a"] is None
    assert str(fs.typeof(left["b"])) == "f32[2, 2]{at:data=1}"
    assert str(fs.typeof(right["a"])) == "f32[3, 3]{at:data=0}"
    assert str(fs.typeof(right["b"])) == "f32[3, 3]{at:data=1}"
    assert [x.shape for x in right["b"].shards] == [(0, 0), (3, 3)]


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_tied_matrices_share_owner_and_integers_stay(at_once, monkeypatch):
    monkeypatch.setattr(optim.sharded.optimizer, "AT_ONCE", at_once)
    mesh = fs.make_mesh({"data": 2})
    w = torch.ones(3, 2)
    tree = {"a": w, "b": torch.ones(2, 2), "c": w, "steps": torch.tensor([3])}
    params = fs.shard_params(tree, P(), mesh=mesh)
    opt = fs.partition_optimizer(optim.shampoo(0.5), mesh=mesh, axis="data", stage=1)
    g = fs.device_put(torch.ones(3, 2), fs.Layout(mesh, P.flat("data")))

    state = opt.init(params)
    after, _ = opt.step({"a": g, "b": None, "c": g, "steps": None}, state, params)

    assert state["left"]["a"] is state["left"]["c"]
    assert state["left"]["steps"] is None
    assert after["a"] is after["c"]
    assert fs.unshard(after["steps"]).tolist() == [3]


@pytest.mark.parametrize("spec", [P(None, "model"), P("model"), P(("data", "model"))])
def test_sharded_matrices_are_assembled_at_owner(spec):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    w = numbers((4, 8), 0)
    g = numbers((4, 8), 1)
    muon = optim.muon(0.1)
    opt = fs.partition_optimizer(muon, mesh=mesh, axis="data", stage=1)
    params = fs.shard_params({"w": w}, {"w": spec}, mesh=mesh)
    grads = {"w": fs.device_put(g, opt.gradients(params["w"].layout))}

    after, state = opt.step(grads, opt.init(params), params)

    expected, _ = pure_step(muon)({"w": g}, muon.init({"w": w}), {"w": w})
    assert after["w"].spec == spec
    assert same(after, expected)
    sizes = [x.numel() for x in state["momentum_buffer"]["w"].shards]
    assert sizes.count(32) == 1


# -- what is sent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_update_at_owners_sends_minimal_bytes(stage):
    """Of 8 equal matrices each owner has two, and each device has a quarter of all in ranges.

    An exchange of n devices sends (n-1)/n of the n-th part that each of them has.
    """
    n = 4
    matrices = 8
    mesh = fs.make_mesh({"data": n})
    opt = fs.partition_optimizer(optim.shampoo(), mesh=mesh, axis="data", stage=stage)
    params = placed({str(i): numbers((4, 6), i) for i in range(matrices)}, stage, mesh)
    state = opt.init(params)
    g = numbers((4, 6), 9)
    grads = {k: fs.device_put(g, opt.gradients(x.layout)) for k, x in params.items()}

    with fs.ledger() as comm:
        opt.step(grads, state, params)

    size = matrices * 24 * 4
    exchange = Fraction((n - 1) * size, n * n)
    axes = ("data",)
    if stage == 3:
        expected = {("all_to_all", axes): (2, 3 * exchange)}
    else:
        gather = Fraction((n - 1) * size, n)
        expected = {("all_to_all", axes): (2, 2 * exchange), ("all_gather", axes): (1, gather)}
    assert comm.by_collective() == expected


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1),
    st.integers(2, 5),
    st.integers(1, 300),
)
@settings(max_examples=50)
def test_owner_exchange_any_round_limit_is_exact(shapes, n, at_once):
    mesh = fs.make_mesh({"data": n})
    full = [numbers(shape, seed) for seed, shape in enumerate(shapes)]
    flat = fs.Layout(mesh, P.flat("data"))
    owned = [fs.Layout(mesh, P(at={"data": index % n})) for index in range(len(full))]

    with pytest.MonkeyPatch.context() as patch, fs.ledger() as comm:
        patch.setattr(fs.mesh.reshard.execute, "AT_ONCE", at_once)
        collected = fs.reshard(fs.device_put(full, flat), owned)
        spread = fs.reshard(collected, flat)

    assert all(map(torch.equal, fs.unshard(collected), full))
    assert all(map(torch.equal, fs.unshard(spread), full))

    # There are several rounds only if an owner has more bytes than the limit.
    bytes_of_owners = [4 * sum(w.numel() for w in full[owner::n]) for owner in range(n)]
    assert comm.calls() <= 2 * len(full)
    assert comm.calls() <= 2 or max(bytes_of_owners) > at_once


def test_direct_exchange_above_limit_runs_in_rounds(monkeypatch):
    monkeypatch.setattr(fs.mesh.reshard.execute, "AT_ONCE", 32)
    mesh = fs.make_mesh({"data": 2})
    xs = [torch.arange(8.0), torch.ones(8), torch.zeros(8)]
    flat = fs.device_put(xs, fs.Layout(mesh, P.flat("data")))
    owned = [fs.Layout(mesh, P(at={"data": owner})) for owner in (0, 1, 0)]

    with fs.ledger() as comm:
        fs.reshard(flat, owned)

    assert comm.calls() == 2
    assert comm.bytes() == 2 * 16
