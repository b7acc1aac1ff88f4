"""Fields of plugins, the parallel configuration, and names of other libraries.

One error names all invalid fields. A row of a table is a call, and a text that the error matches.
Sizes of axes and rows of the page on migrating are compared with the numbers of Colossal-AI's page.
"""

import inspect
import re
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard.foreign_names import NAMES
from fshard.parallelism.modes import model_axes

DATA = fs.make_mesh({"data": 2})
PIPE = fs.make_mesh({"data": 2, "pipe": 2})
SAVED = torch.nn.Linear(1, 1)


def staged(**options):
    """Make a plugin with two stages, if the options have no other number."""
    return fs.HybridParallelPlugin(**{"pipeline": 2, "microbatches": 2, **options})


def everything_invalid():
    pipeline = {"size": "2", "n": 1}
    tensor = {"size": 6, "mode": "2d", "rows": 2}
    fs.parallel({"pipe": 2, "data": 0, "pipeline": pipeline, "tensor": tensor})


def parallel(**config):
    return fs.parallel(config)


def tensor(size, mode, **config):
    return fs.parallel({"tensor": {"size": size, "mode": mode, **config}})


FIELDS = {
    "precision": (
        lambda: fs.DDPPlugin(precision="fp8"),
        "DDPPlugin: precision must be 'bf16', 'fp16' or None, got 'fp8'",
    ),
    "its dtype": (
        lambda: fs.DDPPlugin(precision=torch.float32),
        "must be 'bf16', 'fp16' or None, got torch.f",
    ),
    "unused": (lambda: fs.DDPPlugin(unused="none"), "unused must be 'skip' or 'zero', got 'none'"),
    "mesh": (
        lambda: fs.FSDPPlugin(mesh={"data": 2}, shard_axis="data"),
        "mesh must be a Mesh or None, got {'data': 2}",
    ),
    "axis": (lambda: fs.DDPPlugin(mesh=PIPE, axis="rows"), 'axis=: .* has no axis "rows"'),
    "seed": (lambda: fs.DDPPlugin(seed=-1), "seed must be an integer >= 0, got -1"),
    "slices": (
        lambda: fs.DDPPlugin(reproducible=True, slices=True),
        "slices must be an integer >= 1, got True",
    ),
    "flag": (
        lambda: fs.DDPPlugin(sync_batchnorm="no"),
        "sync_batchnorm must be True or False, got 'no'",
    ),
    "option": (
        lambda: fs.DDPPlugin(options={"buckt": 1}),
        "options has no 'buckt'; legal: bucket, in_flight",
    ),
    "bucket": (
        lambda: fs.ZeroPlugin(options={"bucket": -1}),
        "bucket must be an integer >= 0, got -1",
    ),
    "reduce": (
        lambda: fs.DDPPlugin(options={"reduce": "fp32"}),
        "reduce must be a torch.dtype or None, got 'fp32'",
    ),
    "integers": (
        lambda: fs.DDPPlugin(options={"reduce": torch.int8}),
        "must be a floating dtype .*, got torch.int8",
    ),
    "stage": (
        lambda: fs.ZeroPlugin(stage=3),
        "stage must be 1 or 2, got 3; ZeRO-3 is fs.FSDPPlugin",
    ),
    "unit": (lambda: fs.FSDPPlugin(unit=0), "unit must be a path pattern"),
    "shard axis": (
        lambda: fs.FSDPPlugin(mesh=PIPE, shard_axis="rows"),
        'shard_axis=: .* has no axis "rows"',
    ),
    "zero stage": (lambda: staged(zero_stage=4), "zero_stage must be 0, 1, 2 or 3, got 4"),
    "pipeline": (lambda: staged(pipeline=0), "pipeline must be an integer >= 1, got 0"),
    "microbatches": (
        lambda: staged(microbatches="4"),
        "microbatches must be an integer >= 1, got '4'",
    ),
    "chunks": (lambda: staged(chunks=0), "chunks must be an integer >= 1, got 0"),
    "schedule": (lambda: staged(schedule="1b1f"), "There is no schedule .1b1f."),
    "balance": (lambda: staged(balance="even"), "got 'even'"),
    "sizes": (
        lambda: staged(balance=[1, 2, 3]),
        "a number of layers, at least 1, for each of 2 stages; got",
    ),
    "measured": (lambda: staged(balance="time"), 'balance="time" must have a microbatch'),
    "recompute": (
        lambda: staged(recompute="sometimes"),
        "recompute must be .* or an integer >= 1, got 'sometimes'",
    ),
    "several": (
        lambda: fs.FSDPPlugin(precision="fp8", unused="no", seed=-1),
        "precision must .*; unused .*; seed must .*",
    ),
    "several of stages": (
        lambda: staged(pipeline="2", zero_stage=5, chunks=-1),
        "pipeline must .*; zero_stage must .*; chunks must .*",
    ),
}

CONTRADICTIONS = {
    "batchnorm by slices": (
        lambda: fs.DDPPlugin(reproducible=True, sync_batchnorm=True),
        "sync_batchnorm=True needs all devices together, reproducible=True computes slices one by one",
    ),
    "sums in 16 bits": (
        lambda: fs.DDPPlugin(reproducible=True, options={"reduce": torch.bfloat16}),
        "sums in 16 bits are rounded differently on other meshes",
    ),
    "axes": (
        lambda: fs.FSDPPlugin(mesh=PIPE, axis="data", shard_axis="pipe"),
        "must be among axis=, got 'pipe'",
    ),
    "several contradictions": (
        lambda: fs.FSDPPlugin(mesh=PIPE, shard_axis="rows", options={"a": 1}),
        r"options has no 'a'.*; .* has no axis \"rows\"",
    ),
    "pipe axis": (lambda: staged(mesh=PIPE, pipeline=4), '"pipe" of .* must have size 4, got 2'),
    "no pipe axis": (lambda: staged(mesh=DATA), '"pipe" of .* must have size 2, got 1'),
    "no model axis": (
        lambda: fs.HybridParallelPlugin(tensor=2, mesh=DATA),
        '"model" of .* must have size 2',
    ),
    "data": (
        lambda: fs.HybridParallelPlugin(data=3, mesh=DATA),
        "data must be that of .*, 2, got 3",
    ),
    "batchnorm of stages": (
        lambda: staged(sync_batchnorm=True),
        "sync_batchnorm=True must have pipeline=1",
    ),
    "batchnorm of tensor": (
        lambda: staged(pipeline=1, tensor=2, sync_batchnorm=True),
        "must have pipeline=1, tensor=1",
    ),
    "options of losses": (
        lambda: staged(options={"bucket": 1}),
        "options has no 'bucket'; legal: dynamic, inputs",
    ),
    "square": (
        lambda: staged(tensor=6, tensor_mode="2d"),
        "must be a square .* got 6: the nearest are 4 and 9",
    ),
    "cube": (lambda: staged(tensor=9, tensor_mode="3d"), "tensor must be a cube .* 8 and 27"),
    "modes": (
        lambda: staged(tensor=0, sequence_mode="rings"),
        "tensor must be an integer .*; sequence_mode must be ",
    ),
    "depth": (
        lambda: staged(tensor=2, tensor_depth=2),
        'tensor_depth=2 has no meaning for tensor_mode="1d"',
    ),
    "megatron": (
        lambda: staged(sequence=2, sequence_mode="megatron"),
        'must have tensor > 1, .* got 1, "1d" and 2',
    ),
}

CONFIGURATION = {
    "no mode": (
        lambda: parallel(tensor=4),
        r"must have a mode: write tensor=dict\(size=4, mode=...\), .*'3d', 'sequence'",
    ),
    "no mode of a dict": (
        lambda: parallel(tensor={"size": 2}),
        "must have a mode: write .*size=2, mode=",
    ),
    "no size": (
        lambda: parallel(tensor={"mode": "2d"}),
        "tensor must be an integer >= 1, got None",
    ),
    "mode": (
        lambda: tensor(4, "4d"),
        "the mode of tensor must be '1d', .* or 'sequence', got '4d'",
    ),
    "depth of 2.5d": (
        lambda: tensor(9, "2.5d", depth=2),
        "tensor_depth=2 times a square .* 8 and 18",
    ),
    "depth of a sequence": (
        lambda: tensor(4, "sequence", depth=2),
        "tensor_depth=2 has no meaning for",
    ),
    "microbatches of a configuration": (
        lambda: fs.parallel({"pipeline": 2}, microbatches=0),
        "microbatches must be an integer >= 1, got 0",
    ),
    "no table": (
        lambda: parallel(parallel=2),
        "must be a dict of data, experts, pipeline and tensor, got 2",
    ),
    "Python file": (
        lambda: fs.parallel("config.py"),
        r"must be a dict or a file of TOML or JSON; got .*config.py.*Use fs.parallel\(dict\(",
    ),
    "many": (
        everything_invalid,
        "^parallel: tensor has no 'rows'; .*; pipeline has no 'n'; .*; parallel has no 'pipe'; .*"
        "data must be an integer >= 1, got 0; pipeline must be .* got '2'",
    ),
}

FOREIGN = {
    "plugin": (
        lambda: fs.LowLevelZeroPlugin,
        r"no attribute 'LowLevelZeroPlugin'. Use fs.ZeroPlugin\(",
    ),
    "jax": (lambda: fs.pcast, "Use fs.pvary"),
    "no name": (lambda: fs.nothing, "no attribute 'nothing'.$"),
    "optimizer": (lambda: fs.optim.HybridAdam, "Use fs.optim.adamw"),
    "learning rate": (
        lambda: fs.optim.CosineAnnealingWarmupLR,
        "Use fs.optim.schedules.warmup_cosine",
    ),
    "keywords": (
        lambda: fs.HybridParallelPlugin(tp_size=2, pp_size=2),
        r"HybridParallelPlugin has no 'tp_size' \(use tensor=2, sample=batch\), "
        r"'pp_size' \(use pipeline=2\); legal: mesh",
    ),
    "clipping": (
        lambda: fs.FSDPPlugin(max_norm=1.0),
        r"use booster.clip_grad_norm\(optimizer, max_norm\)",
    ),
    "saving": (
        lambda: fs.Booster().save_optimizer(SAVED, "x", shard=True),
        r"no 'shard' \(use fs.export\(",
    ),
    "offload": (lambda: fs.ZeroPlugin(cpu_offload=True), "no 'cpu_offload' .use offload=\"host\""),
    "no keyword": (
        lambda: fs.FSDPPlugin(nothing=1),
        "FSDPPlugin has no 'nothing'; legal: mesh, axis",
    ),
    "option of others": (
        lambda: fs.DDPPlugin(options={"max_norm": 1.0}),
        "'max_norm' .use booster.clip_grad_norm",
    ),
}
INVALID = {**FIELDS, **CONTRADICTIONS, **CONFIGURATION, **FOREIGN}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_options_raise(name):
    make, message = INVALID[name]
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        make()


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_precision_may_be_a_dtype(dtype, name):
    plugin = fs.FSDPPlugin(precision=dtype)

    assert plugin == fs.FSDPPlugin(precision=name)
    assert plugin.gradient_options()["compute"] is dtype


class Sizes(NamedTuple):
    """Sizes of a plugin, by its fields."""

    pipeline: int = 1
    tensor: int = 1
    tensor_mode: str = "1d"
    sequence: int = 1


CONFIGURATIONS = {
    "nothing": ({}, Sizes()),
    "both": (
        {"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "2d"}},
        Sizes(pipeline=2, tensor=4, tensor_mode="2d"),
    ),
    "a number": (
        {"pipeline": 2, "tensor": {"size": 4, "mode": "1d"}},
        Sizes(pipeline=2, tensor=4),
    ),
    "2.5d": (
        {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
        Sizes(tensor=8, tensor_mode="2.5d"),
    ),
    "3d": ({"tensor": {"size": 8, "mode": "3d"}}, Sizes(tensor=8, tensor_mode="3d")),
    "sequence": ({"tensor": {"size": 4, "mode": "sequence"}}, Sizes(sequence=4)),
    "named": ({"parallel": {"pipeline": 2, "tensor": 1}}, Sizes(pipeline=2)),
}
"""Samples of Colossal-AI's page.

Sizes of pipeline and tensor, the mode, and the size of sequence.
"""


def sizes_of(plugin):
    return Sizes(plugin.pipeline, plugin.tensor, plugin.tensor_mode, plugin.sequence)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_parallel_configuration(name):
    config, expected = CONFIGURATIONS[name]

    plugin = fs.parallel(config, zero_stage=1, microbatches=4)

    assert sizes_of(plugin) == expected
    assert plugin.zero_stage == 1
    assert plugin.sequence_mode == ("rsa" if plugin.sequence > 1 else "gather")


TOML = """data = 1
pipeline = 2
[tensor]
size = 8
mode = "2.5d"
depth = 2
"""
TOML_IN_A_TABLE = "[parallel]\n" + TOML.replace("[tensor]", "[parallel.tensor]")


@pytest.mark.parametrize("text", [TOML, TOML_IN_A_TABLE], ids=["", "parallel"])
def test_parallel_configuration_of_toml(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)

    for file in (path, str(path)):
        plugin = fs.parallel(file, microbatches=2)
        assert sizes_of(plugin) == Sizes(pipeline=2, tensor=8, tensor_mode="2.5d")
        assert plugin.tensor_depth == 2
        assert plugin.data == 1


def test_data_is_inferred_from_the_devices():
    mesh = fs.make_mesh({"all": 16})

    def axes_of(**config):
        meshes = fs.run(lambda: fs.parallel(config, microbatches=4).default_mesh(), mesh=mesh)
        return dict(meshes[0].shape)

    of_2d = axes_of(pipeline=2, tensor={"size": 4, "mode": "2d"})
    assert [*of_2d.items()] == [("pipe", 2), ("data", 2), ("model_i", 2), ("model_j", 2)]
    of_sequence = axes_of(tensor={"size": 4, "mode": "sequence"})
    assert [*of_sequence.items()] == [("pipe", 1), ("data", 4), ("seq", 4), ("model", 1)]

    message = r"data \* .* the number of devices, 16; got 3 \* 2 \* 1 \* 1 \* 1 = 6"
    with pytest.raises(ValueError, match=message):
        axes_of(data=3, pipeline=2)
    message = r"must be the number of devices, 16; got 1 \* 1 \* 1 \* 1 \* 9 = 9"
    with pytest.raises(ValueError, match=message):
        axes_of(tensor={"size": 9, "mode": "2d"})

    fs.parallel({"data": 3})  # outside of a run, the number of devices is not known


@given(
    size=st.integers(1, 200),
    mode=st.sampled_from(["1d", "2d", "2.5d", "3d"]),
    depth=st.integers(1, 5),
)
def test_sizes_are_legal_or_between_the_nearest(size, mode, depth):
    if mode != "2.5d":
        depth = 1
    power = {"1d": 1, "2d": 2, "2.5d": 2, "3d": 3}[mode]
    legal = [depth * q**power for q in range(1, 201)]

    if size in legal:
        axes = model_axes(size, mode, depth)
        assert prod(axes.values()) == size
        assert len({*axes.values()} - {depth}) <= 1
        return

    below = [n for n in legal if n < size]
    above = [n for n in legal if n > size]
    nearest = (below[-1], above[0]) if below else (above[0], above[1])
    message = f"got {size}: the nearest are {nearest[0]} and {nearest[1]}"
    with pytest.raises(ValueError, match=message):
        model_axes(size, mode, depth)


# -- names of other libraries ----------------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
ROWS = []
for line_of_page in PAGE.read_text(encoding="utf-8").splitlines():
    if line_of_page.startswith("| "):
        ROWS.append(line_of_page.split(" | "))
JAX = (
    "set_mesh",
    "AxisType",
    "reshard",
    "reduced",
    "smap",
    "ragged_all_to_all",
    "memory_kind",
    "eval_shape",
    "AbstractMesh",
    "roofline",
    "out_sharding",
)


def keywords_of(word):
    """Return the keywords of the function that a word names, and of the plugin of all options."""
    functions = [fs.HybridParallelPlugin]
    match = re.match(r"(fs|booster)\.([\w.]+)", word)
    if match is not None:
        owner = fs if match[1] == "fs" else fs.Booster
        functions.append(attrgetter(match[2])(owner))

    keywords = set()
    for function in functions:
        keywords |= {*inspect.signature(function).parameters}
    return keywords


@pytest.mark.parametrize("name", NAMES)
def test_foreign_name_is_in_the_page_and_its_word_exists(name):
    word = NAMES[name]

    rows = [row for row in ROWS if re.search(rf"\b{name}\b", row[0])]
    assert any(word in row[1] for row in rows), name
    assert {*re.findall(r"(\w+)=", word)} <= keywords_of(word)


@pytest.mark.parametrize("name", JAX)
def test_names_of_jax_are_in_its_table(name):
    _, _, table = PAGE.read_text(encoding="utf-8").partition("## JAX")

    first_cells = [row.split(" | ")[0] for row in table.splitlines()]

    assert any(re.search(rf"\b{name}\b", cell) for cell in first_cells)
