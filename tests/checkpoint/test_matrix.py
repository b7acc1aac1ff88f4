"""From any layout to any layout: leaves are restored bit for bit, and training goes on so.

The oracles are the saved trees, compared as bytes, and the run that was not interrupted.
"""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard import P, optim
from fshard.checkpoint.index import read_index
from fshard.checkpoint.names import is_array, leaves_of
from fshard.mesh.layout import map_leaves
from fshard.mesh.spmd.run import local_devices
from tests.helpers.processes import run_processes
from tests.transforms.stages.head import Head

# -- trees of all kinds of leaves ------------------------------------------------------------------

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
)
SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (5, 3), (8, 4), (2, 3, 5))


def random_bits(shape, dtype, generator):
    """Return a tensor of random bytes: NaNs with payloads, -0.0 and subnormal numbers too."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    high = 2 if dtype == torch.bool else 256
    values = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return values.view(dtype).reshape(shape)


@cache
def odd_tree():
    """Return three shapes of each dtype, and a tie."""
    generator = torch.Generator().manual_seed(0)
    tree = {}
    for n, dtype in enumerate(DTYPES):
        for more in (0, 1, 4):
            shape = SHAPES[(3 * n + more) % len(SHAPES)]
            name = str(dtype).removeprefix("torch.")
            tree[f"{name} {shape}"] = random_bits(shape, dtype, generator)
    tied = random_bits((4, 4), torch.float32, generator)
    tree["tie"] = {"a": tied, "b": [tied]}
    return tree


def by_index(spec_of):
    """Return a function that shards the leaves of the tree by `spec_of(index, shape)`."""

    def place(axes):
        mesh = fs.make_mesh(axes)
        arrays = {}

        def placed(x):
            if id(x) not in arrays:
                spec = spec_of(len(arrays), tuple(x.shape))
                arrays[id(x)] = put(x, fs.Layout(mesh, spec, unit="u"))
            return arrays[id(x)]

        return map_leaves(placed, odd_tree())

    return place


def put(x, layout):
    """Shard a leaf, also in an uneven layout, as layouts of parameters are."""
    shape = tuple(x.shape)
    shards = []
    for device in local_devices(layout.mesh):
        if not layout.has_any(device):
            shard = x.new_empty(layout.local_shape(shape, device))
            shards.append(shard.reshape(-1) if layout.spec.is_flat else shard)
            continue

        shard = x[tuple(slice(*bounds) for bounds in layout.block(shape, device))]
        if layout.spec.is_flat:
            start, stop = layout.ranges(shape, device)[0]
            shard = shard.reshape(-1)[start:stop]
        shards.append(shard.clone())
    return fs.Sharded(shape, layout, tuple(shards))


def last_dims(*axes):
    """Return the spec of an array whose last dims are sharded over some axes."""

    def spec_of(index, shape):
        count = min(len(axes), len(shape))
        return P(*[None] * (len(shape) - count), *axes[len(axes) - count :])

    return spec_of


def first_dim(axis):
    return lambda index, shape: P(axis) if shape else P()


def flat_and_last_dim(index, shape):
    return last_dims("model")(index, shape).replace(flat="data")


def rows_at_owners(index, shape):
    owner = {("y", "z"): index % 4}
    return P("x", at=owner) if shape else P(at=owner)


def plain(_):
    """Return the tree of clones, with its ties."""
    clones = {}
    return map_leaves(lambda x: clones.setdefault(id(x), x.clone()), odd_tree())


replicated = by_index(lambda *_: P())
flat = by_index(lambda *_: P.flat("data"))
owners = by_index(lambda n, _: P(at={"data": n % 4}))
two_stages = by_index(lambda n, _: P.flat("data", at={"pipe": n % 2}))
four_stages = by_index(lambda n, _: P(at={"pipe": n % 4}))
LAYOUTS = {
    "plain": (plain, None),
    "data=1": (replicated, {"data": 1}),
    "data=2": (replicated, {"data": 2}),
    "zero data=2": (flat, {"data": 2}),
    "zero data=3": (flat, {"data": 3}),
    "zero data=4": (flat, {"data": 4}),
    "zero data=8": (flat, {"data": 8}),
    "hybrid": (flat, {"rows": 2, "data": 3}),
    "rows": (by_index(first_dim("data")), {"data": 4}),
    "model": (by_index(last_dims("model")), {"model": 3}),
    "model 2d": (by_index(last_dims("x", "y")), {"x": 2, "y": 2}),
    "model, zero": (by_index(flat_and_last_dim), {"data": 2, "model": 2}),
    "owners": (owners, {"data": 4}),
    "owners of rows": (by_index(rows_at_owners), {"x": 2, "y": 2, "z": 2}),
    "two stages": (two_stages, {"pipe": 2, "data": 2}),
    "four stages": (four_stages, {"pipe": 4, "data": 2}),
}


def made(name):
    make, axes = LAYOUTS[name]
    return make(axes)


def shards(tree):
    """All shards of all leaves by their names."""
    return {leaf.name: getattr(leaf.value, "shards", [leaf.value]) for leaf in leaves_of(tree)}


def bits(x):
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def blank(tree):
    """Fill all shards with other bytes."""
    for values in shards(tree).values():
        for x in values:
            if x.numel():
                bits(x).fill_(1)
    return tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of each layout."""
    top = tmp_path_factory.mktemp("matrix")
    for name in LAYOUTS:
        fs.save(top / name, made(name))
    return top


def differing_leaves(names, folders):
    """Restore all checkpoints into some layouts; list the leaves whose bits differ."""
    differences = []
    for name in names:
        expected = shards(made(name))
        target = made(name)
        for path in folders:
            restored = shards(fs.restore(path, blank(target)))
            assert restored.keys() == expected.keys()
            for key, values in restored.items():
                pairs = zip(map(bits, values), map(bits, expected[key]), strict=True)
                if not all(torch.equal(x, y) for x, y in pairs):
                    differences.append((name, path.name, key))
    return differences


@pytest.mark.parametrize("target", LAYOUTS)
def test_every_leaf_is_restored_bit_for_bit(target, folder):
    assert not differing_leaves([target], [folder / name for name in LAYOUTS])


def test_checkpoints_of_all_layouts_have_the_same_bytes_in_total(folder):
    """Each byte is written once, and ties once."""
    leaves, _ = fs.mesh.layout.flatten(odd_tree())
    bytes_of_leaves = {id(x): x.nbytes for x in leaves}
    total = sum(bytes_of_leaves.values())

    for name in LAYOUTS:
        writers = read_index(folder / name).writers
        assert sum(writer.size - writer.header for writer in writers) == total


# -- processes -------------------------------------------------------------------------------------


ON_FOUR = ("zero data=4", "rows", "model 2d", "model, zero", "owners", "two stages")
ON_TWO = ("data=2", "zero data=2")


def save_on_processes(top, names):
    for name in names:
        fs.save(Path(top) / f"processes {name}", made(name))


def test_processes_restore_what_others_and_virtual_devices_saved(folder):
    run_processes(save_on_processes, 4, str(folder), ON_FOUR)
    run_processes(save_on_processes, 2, str(folder), ON_TWO)
    every = sorted(folder.iterdir())
    assert len(every) == 16 + 8
    assert run_processes(differing_leaves, 4, ON_FOUR, every) == [[]] * 4
    assert run_processes(differing_leaves, 2, ON_TWO, every) == [[]] * 2
    assert not differing_leaves(["plain", "zero data=3", "owners of rows"], every)


# -- training --------------------------------------------------------------------------------------


def model():
    """Return a model with a tie of its first and last stage, a frozen bias and a 0-d weight."""
    torch.manual_seed(0)
    words = nn.Embedding(7, 5)
    layers = [nn.Linear(5, 5) if n % 2 == 0 else nn.Tanh() for n in range(6)]
    return nn.Sequential(words, *layers, Head(words.weight))


def frozen(path):
    return re.search(r"\b3\W+bias", path) is not None


def is_of_a_linear_layer(path, x):
    return "1.weight" in path or "3.weight" in path


def optimizer(owners):
    if not owners:
        return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, fused=False))
    opts = {True: optim.muon(0.1), False: optim.adamw(0.1)}
    return optim.by_label(opts, is_of_a_linear_layer)


def entropy(y, batch):
    return F.cross_entropy(y, batch[1])


def begin(axes, zero, stages=0, rules=None, owners=False, schedule="1f1b"):
    """Return the step, parameters and state of a run."""
    mesh = fs.make_mesh(axes)
    opt = fs.partition_optimizer(optimizer(owners), mesh=mesh, axis="data", stage=zero)
    if rules is None:
        rules = fs.fsdp("data") if zero == 3 else P()
    options = {"mesh": mesh, "batch": P("data"), "reproducible": True}

    if stages:
        schedule = fs.pipeline_schedule(schedule, stages=stages, microbatches=8 // axes["data"])
        modules = fs.pipeline.split_stages(model(), stages, "uniform")
        params = fs.shard_stages(modules, rules, mesh=mesh, schedule=schedule, frozen=frozen)
        step = fs.train_step(modules, opt, schedule=schedule, loss=entropy, **options)
        return step, {"params": params, "state": opt.init(params)}

    apply, params, buffers = fs.functionalize(model())

    def loss_fn(params, batch):
        y, _ = apply(params, buffers, batch[0])
        return entropy(y, batch)

    params = fs.shard_params(params, rules, mesh=mesh, frozen=frozen)
    step = fs.train_step(loss_fn, opt, slices=8, **options)
    return step, {"params": params, "state": opt.init(params)}


def train(step, run, numbers):
    """Take the steps of these numbers."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        words = torch.randint(0, 7, (24, 2), generator=generator)
        params, state, _ = step(run["params"], run["state"], (words[:, 0], words[:, 1]))
        run = {"params": params, "state": state}
    return run


def by_name(run):
    """Return the unsharded arrays by name, without 7.weight, which is tied to 0.weight."""
    arrays = {}
    for leaf in leaves_of(run):
        if is_array(leaf.value) and not leaf.name.endswith("7.weight"):
            arrays[leaf.name] = fs.unshard(leaf.value)
    return arrays


RULES_OF_MODEL = {"*1.weight": P("model"), "**": P()}
ZBV = {"stages": 4, "schedule": "zbv"}
RUNS = {
    "one": {"axes": {"data": 1}, "zero": 0},
    "zero 0": {"axes": {"data": 4}, "zero": 0},
    "zero 1": {"axes": {"data": 2}, "zero": 1},
    "zero 2": {"axes": {"data": 8}, "zero": 2},
    "zero 3": {"axes": {"data": 4}, "zero": 3},
    "hybrid": {"axes": {"rows": 2, "data": 2}, "zero": 3},
    "model": {"axes": {"data": 2, "model": 2}, "zero": 3, "rules": RULES_OF_MODEL},
    "two stages": {"axes": {"pipe": 2, "data": 2}, "zero": 3, "stages": 2},
    "four stages": {"axes": {"pipe": 4, "data": 1}, "zero": 0, "stages": 4},
    "two stages a device": {"axes": {"pipe": 2, "data": 1}, "zero": 0, **ZBV},
}
"""Runs whose bits are equal in reproducible mode."""


KINDS = {False: [*RUNS], True: ["one", "zero 2", "zero 3", "two stages"]}
"""The runs with AdamW, and those with Muon at owners."""


CASES = [(False, name) for name in KINDS[False]]
CASES += [(True, name) for name in KINDS[True]]


@pytest.mark.parametrize(("owners", "target"), CASES)
def test_next_steps_are_those_of_the_uninterrupted_run(target, owners, runs):
    checkpoints = runs(owners)
    step, into = begin(**RUNS[target], owners=owners)
    saved, expected = uninterrupted(owners)
    run = into
    for name in KINDS[owners]:
        run = fs.restore(checkpoints / name, into)
        arrays = by_name(run)
        assert arrays.keys() == saved.keys(), name
        assert all(torch.equal(arrays[key], saved[key]) for key in saved), name

    arrays = by_name(train(step, run, range(2, 5)))

    assert all(torch.equal(arrays[key], expected[key]) for key in expected)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that makes checkpoints of all runs after two steps, by their optimizer."""

    @cache
    def saved(owners):
        folder = tmp_path_factory.mktemp("runs")
        for name in KINDS[owners]:
            step, run = begin(**RUNS[name], owners=owners)
            fs.save(folder / name, train(step, run, range(2)))
        return folder

    return saved


@cache
def uninterrupted(owners):
    """Return the arrays of the run on one device after two steps, and after five."""
    step, run = begin(**RUNS["one"], owners=owners)
    run = train(step, run, range(2))
    return by_name(run), by_name(train(step, run, range(2, 5)))
