"""`Parallelism`: a value that checks itself, has a mesh and a reason, and is saved as a table."""

import json
from dataclasses import replace

import pytest

import fshard as fs
from fshard.errors import PlanError
from fshard.parallelism.value import FIELDS


def test_a_mesh_has_the_axes_of_all_sizes_and_data_is_what_is_left():
    parallelism = fs.Parallelism(pipeline=2, experts=2, sequence=2, tensor=4, tensor_mode="2d")
    sizes = {"pipe": 2, "data": 3, "expert": 2, "seq": 2, "model_i": 2, "model_j": 2}
    assert dict(parallelism.mesh(96).shape) == sizes
    assert dict(fs.Parallelism(replicas=2).mesh(8).shape) == {"pipe": 1, "replica": 2, "data": 4}
    (mesh,) = {*fs.run(lambda: fs.Parallelism(tensor=2).mesh(), mesh=fs.make_mesh({"all": 4}))}
    assert dict(mesh.shape) == {"pipe": 1, "data": 2, "model": 2}


def test_sizes_without_data_have_no_mesh_before_the_devices_are_known():
    with pytest.raises(PlanError, match="data must be a number before there is a mesh; got None"):
        assert fs.Parallelism(tensor=2).axes


MISFITS = {
    "devices": ({"tensor": 3}, {"devices": 8}, r"number of devices, 8; got 2 \* 1 \* 1 \* 1 \* 3"),
    "data": ({"data": 3}, {"devices": 8}, r"number of devices, 8; got 3 \* 1 \* 1 \* 1 \* 1 = 3"),
    "node": ({"tensor": 16}, {"node": 8}, "at most the 8 devices of a node; got 16"),
    "layers": ({"pipeline": 4, "schedule": "zbv"}, {"layers": 6}, r"layers, 6; got 4 \* 2 = 8"),
    "batch": ({"data": 4, "rows": 4}, {"batch": 40}, r"divide .* 40; got 4 \* 1 \* 1 \* 4 = 16"),
    "several": ({"tensor": 3}, {"devices": 8, "node": 2}, "number of devices.*; tensor must be"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_divide_has_a_reason(name):
    fields, numbers, reason = MISFITS[name]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(fs.Parallelism(**fields).misfit(**numbers))


def test_what_divides_has_no_reason():
    parallelism = fs.Parallelism(data=2, pipeline=2, tensor=2, rows=4)
    assert parallelism.misfit(devices=8, layers=2, batch=64, node=2) == ""


CONTRADICTIONS = {
    "square": ({"tensor": 6, "tensor_mode": "2d"}, "the nearest are 4 and 9"),
    "megatron": ({"sequence_mode": "megatron"}, 'must have tensor > 1, .* got 1, "1d" and 1'),
    "chunks of 1f1b": ({"pipeline": 2, "chunks": 2}, 'chunks must be 1 for schedule="1f1b"; got 2'),
    "chunks of a V": (
        {"pipeline": 2, "schedule": "zbv", "chunks": 4},
        'chunks must be 2 for schedule="zbv"; got 4',
    ),
    "replicas in stages": ({"pipeline": 2, "replicas": 2}, "replicas must be 1 with pipeline > 1"),
    "state in stages": ({"pipeline": 2, "state_memory": "host"}, "state_memory must be .device."),
    "several": ({"data": 0, "zero_stage": 4}, "data must be .* got 0; zero_stage must be .* got 4"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_fields_raise(name):
    fields, message = CONTRADICTIONS[name]
    with pytest.raises(PlanError, match=message):
        fs.Parallelism(**fields)


def test_a_saved_file_of_toml_or_json_is_loaded(tmp_path):
    parallelism = fs.Parallelism(pipeline=2, tensor=4, tensor_mode="2d", recompute=2, rows=2)
    parallelism.save(tmp_path / "plan.toml")
    assert fs.Parallelism.load(tmp_path / "plan.toml") == parallelism
    (tmp_path / "plan.json").write_text(json.dumps({"tensor": {"size": 2, "mode": "1d"}}))
    assert fs.Parallelism.load(tmp_path / "plan.json") == fs.Parallelism(tensor=2)


def test_a_file_of_an_older_plan_is_loaded_and_makes_a_plugin(tmp_path):
    """It has no modes of layers, so their number stands alone; and what `fshard plan` was given."""
    path = tmp_path / "plan.toml"
    path.write_text(
        "data = 2\npipeline = 2\ntensor = 2\nzero_stage = 1\nrows = 2\nmicrobatches = 4\n"
        'schedule = "zb-h1"\nchunks = 1\nrecompute = "full"\nsequence = 1\n'
        'sequence_mode = "megatron"\nexperts = 1\nreplicas = 1\nstate_memory = "device"\n'
        '\n[run]\nconfig = "config.json"\ngpu = "h100"\n'
    )
    sizes = {"data": 2, "pipeline": 2, "tensor": 2, "zero_stage": 1, "rows": 2, "microbatches": 4}
    options = {"schedule": "zb-h1", "recompute": "full", "sequence_mode": "megatron"}
    expected = fs.Parallelism(**sizes, **options)
    assert fs.Parallelism.load(path) == expected
    assert fs.parallel(path, blocks="layers").parallelism == expected


def test_the_key_of_a_layer_has_all_fields_but_those_that_change_no_layer():
    """A field that is added later is part of the key until it is named there."""
    idle = {"data", "replicas", "pipeline", "zero_stage", "microbatches", "schedule", "chunks"}
    idle |= {"state_memory"}
    chosen = fs.Parallelism(
        data=2, tensor=2, sequence=2, sequence_mode="ring", experts=2, replicas=2, zero_stage=3,
        rows=4, microbatches=4, recompute="full", state_memory="host",
    )  # fmt: skip
    key = chosen.of_layer()
    default = fs.Parallelism(data=1)
    for name in FIELDS:
        expected = default if name in idle else chosen
        assert getattr(key, name) == getattr(expected, name), name
    assert replace(chosen, data=8).of_layer() == key


def test_plugin_holds_a_parallelism_or_makes_it_of_keywords():
    parallelism = fs.Parallelism(pipeline=2, tensor=2, zero_stage=1)
    plugin = fs.HybridParallelPlugin(parallelism)
    assert plugin == fs.HybridParallelPlugin(pipeline=2, tensor=2, zero_stage=1)
    assert replace(plugin, seed=3).parallelism is parallelism and plugin.tensor == 2
    assert fs.Booster(parallelism).plugin == plugin
    with pytest.raises(ValueError, match="tensor must be fields of the parallelism; got both"):
        fs.HybridParallelPlugin(parallelism, tensor=2)
    with pytest.raises(ValueError, match="tensor must be .* got 0; seed must be .* got -1"):
        fs.HybridParallelPlugin(tensor=0, seed=-1)


def test_old_names_raise_with_the_new_ones():
    with pytest.raises(AttributeError, match=r"'plan'. Use pipeline_schedule\(\)"):
        fs.HybridParallelPlugin(pipeline=2).plan()
    with pytest.raises(AttributeError, match=r"'ModelPlan'. Use fs.Parallelism"):
        assert fs.plan.ModelPlan


def test_parallelism_with_a_foreign_keyword_names_the_word():
    with pytest.raises(
        TypeError,
        match=r"Parallelism has no 'tp_size' \(use tensor=2, sample=batch\); legal: data, pipeline",
    ):
        fs.Parallelism(tp_size=2)
    with pytest.raises(TypeError, match=r"Parallelism has no 'batch'; legal: data"):
        fs.Parallelism(batch=2)
