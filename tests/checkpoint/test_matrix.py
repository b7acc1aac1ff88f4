"""Any layout to any layout: every leaf bit for bit, and the next steps are those of the uninterrupted run."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard import P, optim
from fshard.checkpoint.names import is_array, leaves_of
from fshard.mesh.layout import map_leaves
from fshard.mesh.spmd.run import local_devices
from tests.helpers.processes import run_processes
from tests.transforms.stages.head import Head

# -- trees of all kinds of leaves -------------------------------------------------------------------------------------

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool,
)  # fmt: skip
SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (5, 3), (8, 4), (2, 3, 5))


def random_bits(shape, dtype, seed):
    """A tensor of random bytes: NaNs with payloads, -0.0 and subnormal numbers too."""
    size = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(
        0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=seed
    )
    return values.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


@cache
def odd_tree():
    seed = torch.Generator().manual_seed(0)
    pairs = [
        (dtype, SHAPES[(3 * n + more) % len(SHAPES)])
        for n, dtype in enumerate(DTYPES)
        for more in (0, 1, 4)
    ]
    arrays = {
        f"{str(dtype)[6:]} {shape}": random_bits(shape, dtype, seed) for dtype, shape in pairs
    }
    tied = random_bits((4, 4), torch.float32, seed)
    return {**arrays, "tie": {"a": tied, "b": [tied]}}


def by_index(make):
    """Place the leaves by a function of (index, shape): the spec of each."""

    def place(axes):
        mesh = fs.make_mesh(axes)
        done = {}

        def placed(x):
            if id(x) not in done:
                done[id(x)] = put(x, fs.Layout(mesh, make(len(done), tuple(x.shape)), unit="u"))
            return done[id(x)]

        return map_leaves(placed, odd_tree())

    return place


def put(x, layout):
    """Place a leaf, also in an uneven layout, as layouts of parameters are."""
    shards = []
    for device in local_devices(layout.mesh):
        indices = tuple(slice(*bounds) for bounds in layout.block(tuple(x.shape), device))
        shard = (
            x[indices]
            if layout.has_any(device)
            else x.new_empty(layout.local_shape(tuple(x.shape), device))
        )
        if layout.spec.is_flat:
            shard = shard.reshape(-1)
            shard = (
                shard[slice(*layout.ranges(tuple(x.shape), device)[0])]
                if layout.has_any(device)
                else shard
            )
        shards.append(shard.clone())
    return fs.Sharded(tuple(x.shape), layout, tuple(shards))


def last(*axes):
    """The spec that shards the last dims over some axes."""
    return lambda index, shape: P(
        *[None] * (len(shape) - len(axes)), *axes[len(axes) - min(len(axes), len(shape)) :]
    )


def plain(_):
    copies = {}
    return map_leaves(lambda x: copies.setdefault(id(x), x.clone()), odd_tree())


replicated = by_index(lambda *_: P())
flat = by_index(lambda *_: P.flat("data"))
LAYOUTS = {
    "plain": (plain, None),
    "data=1": (replicated, {"data": 1}),
    "data=2": (replicated, {"data": 2}),
    "zero data=2": (flat, {"data": 2}),
    "zero data=3": (flat, {"data": 3}),
    "zero data=4": (flat, {"data": 4}),
    "zero data=8": (flat, {"data": 8}),
    "hybrid": (flat, {"rows": 2, "data": 3}),
    "rows": (by_index(lambda _, shape: P(*["data"] * bool(shape))), {"data": 4}),
    "model": (by_index(last("model")), {"model": 3}),
    "model 2d": (by_index(last("x", "y")), {"x": 2, "y": 2}),
    "model, zero": (by_index(lambda n, shape: last("model")(n, shape).replace(flat="data")), {"data": 2, "model": 2}),
    "owners": (by_index(lambda n, _: P(at={"data": n % 4})), {"data": 4}),
    "owners of rows": (by_index(lambda n, s: P(*["x"] * bool(s), at={("y", "z"): n % 4})), {"x": 2, "y": 2, "z": 2}),
    "two stages": (by_index(lambda n, _: P.flat("data", at={"pipe": n % 2})), {"pipe": 2, "data": 2}),
    "four stages": (by_index(lambda n, _: P(at={"pipe": n % 4})), {"pipe": 4, "data": 2}),
}  # fmt: skip


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
    """Restore all checkpoints into some layouts; return which leaves differ."""
    differences = []
    for name in names:
        expected = shards(made(name))
        into = made(name)
        for path in folders:
            restored = shards(fs.restore(path, blank(into)))
            assert restored.keys() == expected.keys()
            differences += [
                (name, path.name, key)
                for key, values in restored.items()
                if not all(map(torch.equal, map(bits, values), map(bits, expected[key])))
            ]
    return differences


@pytest.mark.parametrize("target", LAYOUTS)
def test_every_leaf_is_restored_bit_for_bit(target, folder):
    assert not differing_leaves([target], [folder / name for name in LAYOUTS])


def test_checkpoints_of_all_layouts_have_the_same_bytes_in_total(folder):
    """Each byte is written once, and ties once."""
    sizes = {
        name: sum(
            writer.size - writer.header
            for writer in fs.checkpoint.index.read_index(folder / name).writers
        )
        for name in LAYOUTS
    }
    arrays = {id(x): x.nbytes for x in map(torch.as_tensor, fs.mesh.layout.flatten(odd_tree())[0])}
    assert {*sizes.values()} == {sum(arrays.values())}


# -- processes --------------------------------------------------------------------------------------------------------


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


# -- training ---------------------------------------------------------------------------------------------------------


def model():
    """Tied in the first and the last stage; a frozen layer, a 0-d weight, odd sizes."""
    torch.manual_seed(0)
    words = nn.Embedding(7, 5)
    layers = [nn.Linear(5, 5) if n % 2 == 0 else nn.Tanh() for n in range(6)]
    return nn.Sequential(words, *layers, Head(words.weight))


def frozen(path):
    return re.search(r"\b3\W+bias", path) is not None


MATRICES = ("1.weight", "3.weight")


def optimizer(owners):
    if not owners:
        return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, fused=False))
    labels = lambda path, x: "muon" if any(name in path for name in MATRICES) else "adamw"  # noqa: E731
    return optim.by_label({"muon": optim.muon(0.1), "adamw": optim.adamw(0.1)}, labels)


def entropy(y, batch):
    return F.cross_entropy(y, batch[1])


def begin(axes, zero, stages=0, rules=None, owners=False, schedule="1f1b"):
    """Return the step, parameters and state of a run."""
    mesh = fs.make_mesh(axes)
    opt = fs.partition_optimizer(optimizer(owners), mesh=mesh, axis="data", stage=zero)
    rules = rules or (fs.fsdp("data") if zero == 3 else P())
    common = {"mesh": mesh, "batch": P("data"), "reproducible": True}
    if stages:
        schedule = fs.pipeline_schedule(schedule, stages=stages, microbatches=8 // axes["data"])
        parts = fs.pipeline.split_stages(model(), stages, "uniform")
        params = fs.shard_stages(parts, rules, mesh=mesh, schedule=schedule, frozen=frozen)
        step = fs.train_step(parts, opt, schedule=schedule, loss=entropy, **common)
    else:
        apply, params, buffers = fs.functionalize(model())
        params = fs.shard_params(params, rules, mesh=mesh, frozen=frozen)
        step = fs.train_step(
            lambda params, batch: entropy(apply(params, buffers, batch[0])[0], batch),
            opt,
            slices=8,
            **common,
        )
    return step, {"params": params, "state": opt.init(params)}


def go(step, run, seeds):
    for number in seeds:
        seed = torch.Generator().manual_seed(number)
        words = torch.randint(0, 7, (24, 2), generator=seed)
        params, state, _ = step(run["params"], run["state"], (words[:, 0], words[:, 1]))
        run = {"params": params, "state": state}
    return run


def by_name(run):
    arrays = {leaf.name: fs.unshard(leaf.value) for leaf in leaves_of(run) if is_array(leaf.value)}
    return {
        name: x for name, x in arrays.items() if not name.endswith("7.weight")
    }  # tied to 0.weight


RUNS = {
    "one": {"axes": {"data": 1}, "zero": 0},
    "zero 0": {"axes": {"data": 4}, "zero": 0},
    "zero 1": {"axes": {"data": 2}, "zero": 1},
    "zero 2": {"axes": {"data": 8}, "zero": 2},
    "zero 3": {"axes": {"data": 4}, "zero": 3},
    "hybrid": {"axes": {"rows": 2, "data": 2}, "zero": 3},
    "model": {
        "axes": {"data": 2, "model": 2},
        "zero": 3,
        "rules": {"*1.weight": P("model"), "**": P()},
    },
    "two stages": {"axes": {"pipe": 2, "data": 2}, "zero": 3, "stages": 2},
    "four stages": {"axes": {"pipe": 4, "data": 1}, "zero": 0, "stages": 4},
    "two stages a device": {
        "axes": {"pipe": 2, "data": 1},
        "zero": 0,
        "stages": 4,
        "schedule": "zbv",
    },
}
"""Runs whose bits are equal in reproducible mode."""


KINDS = {False: [*RUNS], True: ["one", "zero 2", "zero 3", "two stages"]}
"""The runs with AdamW, and those with Muon at owners."""


@pytest.mark.parametrize(
    ("owners", "target"), [(owners, name) for owners, names in KINDS.items() for name in names]
)
def test_next_steps_are_those_of_the_uninterrupted_run(target, owners, runs):
    top = runs(owners)
    step, into = begin(**RUNS[target], owners=owners)
    saved, expected = uninterrupted(owners)
    for name in KINDS[owners]:
        run = fs.restore(top / name, into)
        arrays = by_name(run)
        assert arrays.keys() == saved.keys() and all(
            torch.equal(arrays[key], saved[key]) for key in arrays
        ), name
    arrays = by_name(go(step, run, range(2, 5)))
    assert all(torch.equal(arrays[key], expected[key]) for key in expected)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Checkpoints of all runs after two steps, by their optimizer."""

    @cache
    def saved(owners):
        top = tmp_path_factory.mktemp("runs")
        for name in KINDS[owners]:
            fs.save(top / name, go(*begin(**RUNS[name], owners=owners), range(2)))
        return top

    return saved


@cache
def uninterrupted(owners):
    step, run = begin(**RUNS["one"], owners=owners)
    run = go(step, run, range(2))
    return by_name(run), by_name(go(step, run, range(2, 5)))
