"""Versions between processes: drawn layouts and loaders, misuse on one process, and what fails leaves all as they were.

The oracle is the full tensors, cast: each process has them, and compares the elements that it has with theirs.
"""

from __future__ import annotations

import random
import re
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import fshard as fs
from fshard import P
from fshard.errors import RefitError
from fshard.mesh.runtimes import watch
from tests.helpers.processes import Processes, run_processes
from tests.mesh.runtimes import fake_device, nccl_rules
from tests.refit.engine import Rank
from tests.refit.families import FAMILIES

# -- drawn arrays ----------------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf")]
CASES = 12


def full_values(draw, version):
    """Return the full tensors of a version: of all kinds of dtypes and shapes, tied and frozen ones among them."""
    generator = torch.Generator().manual_seed(version)
    full = {"a": torch.randn(12, 8, generator=generator)}
    full["list"] = [torch.randn(shape, generator=generator) for shape in ((7,), ())]
    full["a"].view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    full["a"].view(torch.int32).view(-1)[6] = 0x7F800001 + version  # a NaN with bits of its own
    full["nested"] = {
        "empty": torch.zeros(0, 4),
        "mask": torch.rand(8, generator=generator) < 0.5,
        "steps": torch.randint(2**40, (8, 2), generator=generator),
        "complex": torch.randn(4, 2, dtype=torch.complex64, generator=generator),
        "half": torch.randn(8, 3, generator=generator).half(),
        "double": torch.randn(4, 3, dtype=torch.float64, generator=generator),
    }
    for x in full["list"]:
        x += version
    return full


def drawn_layout(draw, mesh, x):
    """Return any layout of a tensor on a mesh of one or two axes."""
    axes = mesh.axis_names
    kinds = ["replicated", "flat", "at"]
    kinds += [f"dim {dim}" for dim in range(x.ndim) if x.shape[dim] % mesh.shape[axes[0]] == 0]
    kind = draw.choice(kinds)
    memory = draw.choice(["device", "device", "host"])
    if kind == "replicated" or x.ndim == 0:
        spec = P()
    elif kind == "flat":
        spec = P.flat(*axes, shape=tuple(x.shape))
    elif kind == "at":
        spec = P(at={axes[-1]: draw.randrange(mesh.shape[axes[-1]])})
    else:
        dim = int(kind[4:])
        spec = P(*([None] * dim), axes[0])
    return fs.Layout(mesh, spec, memory=memory)


def drawn_layouts(draw, mesh, full):
    return tree_map(lambda x: drawn_layout(draw, mesh, x), full)


def compare_drawn(seed):
    """Send three versions of drawn arrays; compare each."""
    draw = random.Random(seed)
    shapes = [({"x": 2}, (0, 1)), ({"x": 2, "y": 2}, (0, 1, 2, 3)), ({"x": 3}, (3, 0, 1))]
    shapes += [({"x": 2}, (2, 3)), ({"x": 1}, (2,)), ({"x": 2, "y": 2}, (2, 0, 3, 1))]
    meshes = []
    for _ in range(2):
        axes, devices = draw.choice(shapes)
        meshes.append(fs.make_mesh(axes, devices=devices))
    trainer, engine = meshes
    full = full_values(draw, 1)
    sources = drawn_layouts(draw, trainer, full)
    targets = drawn_layouts(draw, engine, full)
    dtype = draw.choice([None, torch.bfloat16, torch.float64])
    delta = draw.choice([False, True])

    params = fs.device_put(full, sources)
    refit = fs.refit.Refit(params, targets, dtype=dtype, delta=delta)
    for version in (1, 2, 5):
        full = full_values(draw, version)
        weights = refit.send(version, fs.device_put(full, sources))
        if engine.is_member:
            equal_bits(fs.unshard(weights), full, dtype)
    assert refit.version == 5


def equal_bits(actual, full, dtype):
    """Raise unless trees have equal bits; of values that were cast, any NaN is as good as another."""
    for x, y in zip(tree_leaves(actual), tree_leaves(full), strict=True):
        is_cast = dtype is not None and y.dtype.is_floating_point and y.dtype != dtype
        expected = y.to(dtype) if is_cast else y
        assert x.dtype == expected.dtype
        assert x.shape == expected.shape
        if is_cast:
            assert torch.equal(x.isnan(), expected.isnan())
            x = x.nan_to_num(7)
            expected = expected.nan_to_num(7)
        assert torch.equal(bits(x), bits(expected))


def bits(x):
    return x.contiguous().view(-1).view(torch.uint8) if x.numel() else x


@pytest.mark.parametrize("seed", range(CASES))
def test_drawn_layouts_between_processes_arrive_to_the_bit(four: Processes, seed):
    four.run(compare_drawn, seed)


# -- loaders ---------------------------------------------------------------------------------------------------


def compare_loader(family, devices, delta, dtype):
    """Send two versions to an engine with a loader of its own; compare each with a load of it."""
    full = {name: x.detach() for name, x in FAMILIES[family].model().state_dict().items()}
    if family == "gpt2":
        full.pop("lm_head.weight")  # tied to the embedding
    trainer = fs.make_mesh({"x": 2}, devices=(0, 1))
    mesh = fs.make_mesh({"z": 2}, devices=devices)
    layouts = {
        name: fs.Layout(trainer, P.flat("x", shape=tuple(x.shape))) for name, x in full.items()
    }
    params = fs.device_put(full, layouts)
    engine = traced = None
    if mesh.is_member:
        rank = Rank(devices.index(fs.mesh.process_index()), 2)
        engine = FAMILIES[family].engine(rank).to(dtype)
        traced = fs.refit.trace(engine.load_weights, params, engine)
    refit = fs.refit.Refit(params, traced, mesh=mesh, into=engine, delta=delta)
    for version in (1, 2):
        for x in full.values():
            x.view(-1)[0] += version
        refit.send(version, fs.device_put(full, layouts))
        if engine is not None:
            expected = FAMILIES[family].engine(rank).to(dtype)
            expected.load_weights(full.items())
            for x, y in zip(engine.parameters(), expected.parameters(), strict=True):
                assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("family", "devices", "delta", "dtype"),
    [
        ("llama", (2, 3), False, torch.bfloat16),
        ("llama", (1, 0), True, torch.float32),
        ("gpt2", (3, 0), True, torch.bfloat16),
        ("qwen3_moe", (1, 2), False, torch.float32),
    ],
)
def test_loaders_of_processes_get_every_version(four: Processes, family, devices, delta, dtype):
    four.run(compare_loader, family, devices, delta, dtype)


# -- trainers --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A model with a tied, a frozen and a plain parameter, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.inner.bias.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.inner(self.embed(tokens)))


def send_of_a_training(delta):
    """Train with donated parameters, and send each version to two engines at once."""
    torch.manual_seed(0)
    model = Tied()
    trainer = fs.make_mesh({"data": 2}, devices=(0, 1))
    one = fs.make_mesh({"model": 2}, devices=(2, 3))
    other = fs.make_mesh({"model": 2}, devices=(1, 2))
    forward, params, _ = fs.functionalize(model)
    params = fs.shard_params(params, P.flat("data"), mesh=trainer)
    tokens = torch.arange(8)

    def loss_of(params, tokens):
        return forward(params, {}, tokens)[0].square().mean()

    step = fs.train_step(loss_of, fs.optim.sgd(0.1), mesh=trainer, batch=P("data"), donate=True)
    state = step.init(params)

    def source():
        return {"model": params, "head": params["embed.weight"]}

    refits = [
        fs.refit.Refit(source(), fs.Layout(one, P("model")), delta=delta),
        fs.refit.Refit(source(), fs.Layout(other), dtype=torch.bfloat16, delta=delta),
    ]
    for version in (1, 2, 3):
        params, state, _ = step(params, state, tokens)
        full = fs.unshard(params)
        for refit in refits:
            weights = refit.send(version, source())
            assert weights["head"] is weights["model"]["embed.weight"]
            served = fs.unshard(weights["model"])
            if trainer.is_member and weights["head"].is_local:
                for name, x in served.items():
                    assert torch.equal(x, full[name].to(x.dtype)), name


@pytest.mark.parametrize("delta", [False, True])
def test_versions_of_a_step_with_donated_tied_and_frozen_parameters(four: Processes, delta):
    four.run(send_of_a_training, delta)


# -- misuse ----------------------------------------------------------------------------------------------------


def two_meshes(**options):
    return fs.make_mesh({"x": 2}, devices=(0, 1), **options), fs.make_mesh({"z": 2}, devices=(2, 3))


def misused(how, victim, check):
    """Send a version, then one that a process spoils, then one more; return errors and their seconds."""
    trainer, engine = two_meshes()
    full = {"a": torch.arange(8.0), "b": torch.arange(4.0)}
    params = fs.device_put(full, fs.Layout(trainer, P("x")))
    refit = fs.refit.Refit(params, fs.Layout(engine, P("z")), check=check, delta=how == "delta")
    before = refit.send(1, params)
    is_victim = fs.mesh.process_index() == victim
    version = 2
    tree = params
    if is_victim:
        if how == "version":
            version = 7
        elif how == "old version":
            version = 1
        elif how == "tree":
            tree = {"a": params["a"], "c": params["b"]}
        elif how == "allocation":
            refit._engine.new_shards = refit._engine.validate = _raise
        elif how == "middle":
            refit._all_rounds[0].outgoing = _raise
    begin = time.monotonic()
    with pytest.raises(Exception) as error:
        refit.send(version, tree)
    seconds = time.monotonic() - begin
    assert refit.version == 1
    for name, x in before.items():
        if engine.is_member:
            assert torch.equal(fs.unshard(x), full[name])
    # The links of all are as they were, those between the two meshes too.
    doubled = fs.reshard({name: 2 * x for name, x in params.items()}, fs.Layout(engine, P("z")))
    if engine.is_member:
        assert torch.equal(fs.unshard(doubled["a"]), 2 * full["a"])
    if how in ("version", "old version", "tree"):
        later = refit.send(8, {name: x + 1 for name, x in params.items()})
        if engine.is_member:
            assert torch.equal(fs.unshard(later["b"]), full["b"] + 1)
    return f"{type(error.value).__name__}: {error.value}", seconds


def _raise(*_):
    raise MemoryError("no memory")


TEXTS = {
    "version": "version must be one number on all devices; got ",
    "old version": "version must be an integer above the current one, 1; got 1",
    "tree": "b is missing",
    "allocation": "no memory",
    "middle": "no memory",
}


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("how", TEXTS)
def test_misuse_on_one_process_raises_on_all_at_once(four: Processes, how, victim):
    results = four.run(misused, how, victim, True)
    for rank, (text, seconds) in enumerate(results):
        assert TEXTS[how] in text
        assert seconds < 5
        if how != "version" and rank != victim:
            assert f"process {victim}: " in text
            assert "All processes keep version 1" in text


def misused_while_decisions_are_read_late(*arguments):
    """The same, where the others still wait in a round when process 1 has failed and looks at them."""
    watch.READ_INTERVAL = 0.005 if fs.mesh.process_index() == 1 else 0.5
    return misused(*arguments)


def test_processes_that_have_not_read_a_decision_are_in_no_deadlock():
    results = run_processes(
        misused_while_decisions_are_read_late,
        4,
        "middle",
        1,
        True,
        environment={"FSHARD_CHECK": "1"},
    )
    for text, _ in results:
        assert TEXTS["middle"] in text


@pytest.mark.parametrize("how", ["version", "tree", "middle"])
def test_misuse_on_one_process_raises_on_all_under_the_check(how):
    results = run_processes(misused, 4, how, 1, True, environment={"FSHARD_CHECK": "1"})
    for text, seconds in results:
        assert TEXTS[how] in text
        assert seconds < 5


def late():
    """Let one process come too late for a version, and then send one with all."""
    trainer, engine = two_meshes(timeout=2)
    params = fs.device_put({"a": torch.arange(8.0)}, fs.Layout(trainer, P("x")))
    refit = fs.refit.Refit(params, fs.Layout(engine, P("z")))
    if fs.mesh.process_index() == 1:
        time.sleep(3)
    with pytest.raises(RefitError, match="process 1 has not come within 2 s"):
        refit.send(1, params)
    weights = refit.send(1, params)
    if engine.is_member:
        assert torch.equal(fs.unshard(weights["a"]), torch.arange(8.0))


@pytest.mark.parametrize("environment", [{}, {"FSHARD_CHECK": "1"}, {"FSHARD_DIRECT": "0"}])
def test_process_that_does_not_send_is_named_after_the_limit(environment):
    run_processes(late, 4, environment=environment)


def other_lines():
    """Send from two lines of the program; return the error."""
    trainer, engine = two_meshes()
    params = fs.device_put({"a": torch.arange(8.0)}, fs.Layout(trainer, P("x")))
    refit = fs.refit.Refit(params, fs.Layout(engine, P("z")))
    here = partial(refit.send, 1)
    if fs.mesh.process_index() == 1:
        here = lambda params: refit.send(1, params)  # noqa: E731
    with pytest.raises(fs.errors.FshardError) as error:
        here(params)
    assert refit.version is None
    assert refit.send(1, params)["a"].shape == (8,)
    return str(error.value)


@pytest.mark.parametrize("environment", [{}, {"FSHARD_CHECK": "1"}])
def test_send_from_other_lines_raises_on_all(environment):
    lines = "another call at test_processes|Only the lines differ|met in one collective"
    for text in run_processes(other_lines, 4, environment=environment):
        assert re.search(lines, text)


def restarted():
    """Make the Refit of one process anew after a version: the next version is sent in full."""
    trainer, engine = two_meshes()
    params = fs.device_put({"a": torch.arange(800.0)}, fs.Layout(trainer, P("x")))
    refit = fs.refit.Refit(params, fs.Layout(engine, P("z")), delta=True)
    refit.send(1, params)
    if fs.mesh.process_index() == 2:
        refit.version = refit._base = None
    with fs.ledger() as comm:
        weights = refit.send(2, {"a": params["a"] + 1})
    if engine.is_member:
        assert torch.equal(fs.unshard(weights["a"]), torch.arange(800.0) + 1)
    sent = [
        size for (sender, _), size in refit.plan.links.items() if sender == fs.mesh.process_index()
    ]
    assert sum(comm.links.values()) == sum(sent)


def test_delta_is_sent_in_full_where_one_process_has_no_version(four: Processes):
    four.run(restarted)


# -- GPUs ------------------------------------------------------------------------------------------------------


def on_a_device(delta):
    """Send two versions between meshes of a device that is no CPU."""
    fake_device.install()
    trainer, engine = two_meshes()
    full = {"a": torch.arange(24.0).view(8, 3), "b": torch.arange(4), "c": torch.ones(4)}
    sources = {name: fs.Layout(trainer, P("x")) for name in full}
    targets = {name: fs.Layout(engine, P("z")) for name in full}
    refit = fs.refit.Refit(fs.device_put(full, sources), targets, delta=delta)
    for version in (1, 2):
        full["a"][version] += 1
        full["b"][version] += 1
        full["c"][version] += 1
        weights = refit.send(version, fs.device_put(full, sources))
        for name, x in weights.items():
            if engine.is_member:
                assert x.shards[0].device.type == fake_device.NAME
                assert torch.equal(fs.unshard(x).cpu(), full[name])


@pytest.mark.parametrize("delta", [False, True])
def test_versions_between_meshes_of_a_device_arrive(delta):
    environment = {"FSHARD_BACKEND": fake_device.BACKEND}
    run_processes(nccl_rules.Ruled(on_a_device), 4, delta, environment=environment)
