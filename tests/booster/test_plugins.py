"""Fields of plugins: one error that names all that are wrong; and the words for names of other libraries."""

import inspect
import re
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard.foreign_names import NAMES

MESH = fs.make_mesh({"data": 2, "pipe": 2})


def staged(**options):
    return fs.HybridParallelPlugin(**{"pipeline": 2, "microbatches": 2, **options})


INVALID = {
    "precision": (
        lambda: fs.DDPPlugin(precision="fp8"),
        "DDPPlugin: precision must be 'bf16', 'fp16' or None, got 'fp8'",
    ),
    "dtype of precision": (
        lambda: fs.DDPPlugin(precision=torch.float32),
        "must be 'bf16', 'fp16' or None, got torch.f",
    ),
    "unused": (lambda: fs.DDPPlugin(unused="none"), "unused must be 'skip' or 'zero', got 'none'"),
    "mesh": (
        lambda: fs.FSDPPlugin(mesh={"data": 2}, shard_axis="data"),
        "mesh must be a Mesh or None, got {'data': 2}",
    ),
    "axis": (lambda: fs.DDPPlugin(mesh=MESH, axis="rows"), 'axis=: .* has no axis "rows"'),
    "seed": (lambda: fs.DDPPlugin(seed=-1), "seed must be an integer >= 0, got -1"),
    "slices": (lambda: fs.DDPPlugin(reproducible=True, slices=True), "slices must be an integer >= 1, got True"),
    "flag": (lambda: fs.DDPPlugin(sync_batchnorm="no"), "sync_batchnorm must be True or False, got 'no'"),
    "unknown option": (lambda: fs.DDPPlugin(options={"buckt": 1}), "options has no 'buckt'; legal: bucket, in_flight"),
    "bucket": (lambda: fs.ZeroPlugin(options={"bucket": -1}), "bucket must be an integer >= 0, got -1"),
    "dtype": (lambda: fs.DDPPlugin(options={"reduce": "fp32"}), "reduce must be a torch.dtype or None, got 'fp32'"),
    "integers": (
        lambda: fs.DDPPlugin(options={"reduce": torch.int8}),
        "reduce must be a floating dtype .*, got torch.int8",
    ),
    "stage": (lambda: fs.ZeroPlugin(stage=3), "stage must be 1 or 2, got 3"),
    "unit": (lambda: fs.FSDPPlugin(unit=0), "unit must be a path pattern"),
    "shard axis": (lambda: fs.FSDPPlugin(mesh=MESH, shard_axis="rows"), 'shard_axis=: .* has no axis "rows"'),
    "zero stage": (lambda: staged(zero_stage=4), "zero_stage must be 0, 1, 2 or 3, got 4"),
    "pipeline": (lambda: staged(pipeline=0), "pipeline must be an integer >= 1, got 0"),
    "microbatches": (lambda: staged(microbatches="4"), "microbatches must be an integer >= 1, got '4'"),
    "no microbatches": (lambda: staged(microbatches=None), "microbatches must be an integer >= 1, got None"),
    "chunks": (lambda: staged(chunks=0), "chunks must be an integer >= 1, got 0"),
    "schedule": (lambda: staged(schedule="1b1f"), "There is no schedule .1b1f."),
    "balance": (lambda: staged(balance="even"), "got 'even'"),
    "sizes": (lambda: staged(balance=[1, 2, 3]), "a number of layers, at least 1, for each of 2 stages; got"),
    "measured balance": (lambda: staged(balance="time"), 'balance="time" must have a microbatch'),
    "recompute": (lambda: staged(recompute="sometimes"), "recompute must be .* or an integer >= 1, got 'sometimes'"),
    "reproducible and batchnorm": (
        lambda: fs.DDPPlugin(reproducible=True, sync_batchnorm=True),
        "sync_batchnorm=True needs all devices together, reproducible=True computes slices one by one",
    ),
    "reduction in 16 bits": (
        lambda: fs.DDPPlugin(reproducible=True, options={"reduce": torch.bfloat16}),
        "sums in 16 bits are rounded differently on other meshes",
    ),
    "shard axis elsewhere": (
        lambda: fs.FSDPPlugin(mesh=MESH, axis="data", shard_axis="pipe"),
        "shard_axis must be among axis=, got 'pipe'",
    ),
    "pipeline of another size": (lambda: staged(mesh=MESH, pipeline=4), '"pipe" of .* must have size 4, got 2'),
    "no pipeline axis": (lambda: staged(mesh=fs.make_mesh({"data": 2})), '"pipe" of .* must have size 2, got 1'),
    "stages and batchnorm": (lambda: staged(sync_batchnorm=True), "sync_batchnorm=True must have pipeline=1"),
    "option of losses": (lambda: staged(options={"bucket": 1}), "options has no 'bucket'; legal: dynamic, inputs"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_plugin_raises(name):
    make, message = INVALID[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_precision_may_be_a_dtype(dtype, name):
    assert fs.FSDPPlugin(precision=dtype) == fs.FSDPPlugin(precision=name)
    assert fs.FSDPPlugin(precision=dtype).gradient_options()["compute"] is dtype


def test_plugin_error_lists_all_invalid_fields():
    with pytest.raises(ValueError, match="precision must .*; unused must .*; seed must .*"):
        fs.FSDPPlugin(precision="fp8", unused="no", seed=-1)
    with pytest.raises(ValueError, match=r"options has no 'a'.*; .* has no axis \"rows\""):
        fs.FSDPPlugin(mesh=MESH, shard_axis="rows", options={"a": 1})
    with pytest.raises(ValueError, match="pipeline must .*; zero_stage must .*; chunks must .*"):
        staged(pipeline="2", zero_stage=5, chunks=-1)


@given(
    precision=st.sampled_from([None, "bf16", "fp8"]),
    stage=st.integers(-1, 4),
    seed=st.integers(-2, 2),
    slices=st.integers(-1, 9),
    reproducible=st.booleans(),
    sync=st.booleans(),
)
def test_any_plugin_is_valid_or_lists_its_errors(precision, stage, seed, slices, reproducible, sync):
    mesh = fs.make_mesh({"data": 2})
    count = sum([precision == "fp8", seed < 0, slices < 1, stage not in (1, 2)]) or int(reproducible and sync)
    how = {"precision": precision, "stage": stage, "seed": seed, "slices": slices, "reproducible": reproducible}
    with pytest.raises(ValueError) if count else nullcontext() as found:
        fs.ZeroPlugin(mesh=mesh, sync_batchnorm=sync, **how)
    assert not count or str(found.value).count(";") + 1 == count


# -- names of other libraries -------------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
ROWS = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
JAX = (
    "set_mesh", "AxisType", "reshard", "reduced", "smap", "ragged_all_to_all", "memory_kind", "eval_shape", "AbstractMesh",
    "roofline", "out_sharding",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_foreign_name_is_in_the_page_and_its_word_exists(name):
    word = NAMES[name]
    assert [row for row in ROWS if re.search(rf"\b{name}\b", row[0]) and word in row[1]], name
    match = re.match(r"(fs|booster)\.([\w.]+)", word)
    functions = [attrgetter(match[2])(fs if match[1] == "fs" else fs.Booster)] if match is not None else []
    keywords = [key for f in [*functions, fs.HybridParallelPlugin] for key in inspect.signature(f).parameters]
    assert {*re.findall(r"(\w+)=", word)} <= {*keywords}


@pytest.mark.parametrize("name", JAX)
def test_names_of_jax_are_in_its_table(name):
    table = PAGE.read_text(encoding="utf-8").partition("## JAX")[2]
    assert [row for row in table.splitlines() if re.search(rf"\b{name}\b", row.split(" | ")[0])]


SAVED = torch.nn.Linear(1, 1)
ERRORS = {
    "plugin": (
        lambda: fs.LowLevelZeroPlugin,
        AttributeError,
        r"no attribute 'LowLevelZeroPlugin'. Use fs.ZeroPlugin\(",
    ),
    "jax": (lambda: fs.pcast, AttributeError, "Use fs.pvary"),
    "no name": (lambda: fs.nothing, AttributeError, "no attribute 'nothing'.$"),
    "optimizer": (lambda: fs.optim.HybridAdam, AttributeError, "Use fs.optim.adamw"),
    "schedule": (lambda: fs.optim.CosineAnnealingWarmupLR, AttributeError, "Use fs.optim.schedules.warmup_cosine"),
    "keywords": (
        lambda: fs.HybridParallelPlugin(tp_size=2, pp_size=2),
        TypeError,
        r"HybridParallelPlugin has no 'tp_size' \(use tensor=2, sample=batch\), 'pp_size' \(use pipeline=2\); legal: mesh",
    ),
    "clipping": (lambda: fs.FSDPPlugin(max_norm=1.0), TypeError, r"use booster.clip_grad_norm\(optimizer, max_norm\)"),
    "saving": (lambda: fs.Booster().save_optimizer(SAVED, "x", shard=True), TypeError, r"no 'shard' \(use fs.export\("),
    "offload": (lambda: fs.ZeroPlugin(cpu_offload=True), TypeError, "no 'cpu_offload' .use offload=\"host\""),
    "no keyword": (lambda: fs.FSDPPlugin(nothing=1), TypeError, "unexpected keyword argument 'nothing'"),
    "an option": (
        lambda: fs.DDPPlugin(options={"max_norm": 1.0}),
        ValueError,
        "'max_norm' .use booster.clip_grad_norm",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_of_a_foreign_name_names_the_word(case):
    act, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message):
        act()
