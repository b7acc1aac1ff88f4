"""Exports are read by the libraries whose formats they have, bit for bit.

The oracles are the readers of safetensors, transformers, torch's checkpoints and `torch.load`. An
export has one array in memory at a time.
"""

import json
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import fshard as fs
from fshard import P
from fshard.errors import CheckpointError
from tests.booster.checkpointed import PLUGINS, adamw, network
from tests.checkpoint.helpers.exported import CONFIGS, trained
from tests.checkpoint.helpers.programs import export_all, growth_of_memory, mesh
from tests.checkpoint.helpers.tiny import tensors, tiny
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def last_dim_over_both_axes(x):
    if x.ndim and x.shape[-1] % 4 == 0:
        return P(*[None] * (x.ndim - 1), ("data", "model"))
    return P()


LAYOUTS = [
    lambda x: P(),
    lambda x: P.flat("data"),
    lambda x: P.flat("data", "model"),
    last_dim_over_both_axes,
    lambda x: P(at={("data",): 1}),
]


def read_safetensors(path, like):
    return load_file(path)


def read_hf(path, like):
    """Read all files of a model; check that its index is right, and that no file is too large."""
    result = {}
    files_by_name = {}
    paths = sorted(path.glob("*.safetensors"))
    for file in paths:
        tensors = load_file(file)
        result |= tensors
        files_by_name |= dict.fromkeys(tensors, file.name)
        size = sum(x.nbytes for x in tensors.values())
        assert size <= SHARD_SIZE or len(tensors) == 1 or len(paths) == 1

    if len(paths) > 1:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == files_by_name
    return result


def read_dcp(path, like):
    tensors = {name: torch.zeros_like(x) for name, x in like.items()}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def read_torch(path, like):
    return torch.load(path, weights_only=True)


SHARD_SIZE = 200  # bytes
READERS = {"safetensors": read_safetensors, "hf": read_hf, "dcp": read_dcp, "torch": read_torch}


def assert_equal(actual, expected):
    """Assert that two dicts have the same names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype
        assert actual[name].shape == x.shape
        assert torch.equal(actual[name], x), name


@pytest.mark.parametrize("to", READERS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_exports_from_any_layout_are_read_by_other_libraries(to, data, tmp_path_factory):
    expected = data.draw(tensors())
    arrays = {}
    for name, x in expected.items():
        spec_of = data.draw(st.sampled_from(LAYOUTS))
        arrays[name] = fs.device_put(x, fs.Layout(mesh(), spec_of(x)))
    path = tmp_path_factory.mktemp("export") / "x"

    fs.export(path, arrays, to=to, shard_size=SHARD_SIZE)

    assert_equal(READERS[to](path, expected), expected)
    assert_equal(fs.restore(path, trust=True), expected)


def test_values_and_ties_are_kept_by_formats_that_have_them(tmp_path):
    x = fs.device_put(torch.arange(6.0), fs.Layout(mesh(), P("data")))
    tree = {
        "params": {"b": x, "a": x, "part": torch.arange(8.0)[2:4]},
        "steps": 3,
        "lr": [0.1, None, {"k": "text"}],
    }

    # torch.save has ties and values.
    fs.export(tmp_path / "x.pt", tree, to="torch")
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    assert read["params"]["a"] is read["params"]["b"]
    assert read["params"]["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert read["params"]["part"].tolist() == [2, 3]
    assert read["steps"] == tree["steps"]
    assert read["lr"] == tree["lr"]

    # torch's checkpoints have values, and each name of a tie.
    fs.export(tmp_path / "dcp", tree, to="dcp")
    read = {
        "params": {name: torch.zeros(6) for name in "ab"},
        "steps": 0,
        "lr": [0.0, 0, {"k": ""}],
    }
    dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert read["params"]["a"].equal(read["params"]["b"])
    assert read["params"]["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert read["steps"] == tree["steps"]
    assert read["lr"] == tree["lr"]

    # A file of safetensors has the first of the tied names.
    fs.export(tmp_path / "x.safetensors", tree["params"], to="safetensors")
    assert load_file(tmp_path / "x.safetensors").keys() == {"b", "part"}


ALL_IN_ONE = 10**9  # bytes


@pytest.mark.parametrize(("name", "size"), [("gpt2", 6000), ("llama", ALL_IN_ONE), ("bert", 6000)])
def test_from_pretrained_reads_trained_parameters(name, size, tmp_path):
    model = tiny(name).eval()
    apply, params, buffers = fs.functionalize(model)
    trained_params = {key: x + 1 for key, x in params.items()}
    params = fs.shard_params(trained_params, fs.fsdp("data"), mesh=mesh())
    tokens = torch.arange(6).reshape(1, 6)

    fs.export(tmp_path / "model", params, config=model.config, shard_size=size)

    pretrained, info = type(model).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    files = [*(tmp_path / "model").glob("*.safetensors")]
    assert len(files) == (1 if size == ALL_IN_ONE else len(files_of(params, size)))
    expected, _ = apply(fs.unshard(params), buffers, tokens)
    assert torch.equal(pretrained.eval()(tokens).logits, expected.logits)


def files_of(params, size):
    """Return the bytes of each file, filled in the order of the dict up to a size."""
    files = []
    for x in params.values():
        n = x.numel() * x.dtype.itemsize
        if files and files[-1] + n <= size:
            files[-1] += n
        else:
            files.append(n)
    return files


def test_model_gives_its_config_and_drops_ties(tmp_path):
    model = tiny("gpt2")
    state = model.state_dict()

    fs.export(tmp_path / "model", dict(model.state_dict(keep_vars=True)), model=model)
    pretrained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    assert "lm_head.weight" not in load_file(tmp_path / "model/model.safetensors")
    for name, x in pretrained.state_dict().items():
        assert torch.equal(x, state[name])

    fs.export(tmp_path / "dict", {"w": torch.ones(1)}, config={"model_type": "own"})
    assert json.loads((tmp_path / "dict/config.json").read_text()) == {"model_type": "own"}


@pytest.mark.parametrize("name", ["zero1", "fsdp", "stages", "tensor", "both"])
def test_boosted_models_are_exported_in_full(name, tmp_path):
    """Names are those of the module, and fused weights are one array, in stages too."""
    plugin, axes = PLUGINS[name]

    def program():
        model = network(counts=False)
        model, *_ = fs.Booster(plugin()).boost(model, adamw(model), torch.nn.MSELoss())
        fs.export(tmp_path / "model.pt", model, to="torch")

    fs.run(program, mesh=fs.make_mesh(axes))

    read = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_equal(read, dict(network(counts=False).state_dict()))


# -- LoRA ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_export_is_that_of_merge_lora(name, tmp_path):
    model, params = trained(CONFIGS[name])

    fs.export(tmp_path / "merged", params, model=model)

    plain = fs.nn.merge_lora(model)
    read = load_file(tmp_path / "merged/model.safetensors")
    assert_equal(read, dict(plain.named_parameters()))
    if name == "linear":
        pretrained = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "merged").eval()
        tokens = torch.arange(6).reshape(1, 6)
        assert torch.equal(pretrained(tokens).logits, plain(tokens).logits)


def test_adapters_have_the_names_and_shapes_of_peft(tmp_path):
    """They are those that peft writes for this configuration of GPT-2, by its sources."""
    model, params = trained(CONFIGS["embedding"])

    fs.export(tmp_path / "adapter", params, to="peft", model=model)

    shapes = {
        "transformer.wte.lora_embedding_A": (3, 60),
        "transformer.wte.lora_embedding_B": (16, 3),
        "transformer.ln_f.weight": (16,),
        "transformer.ln_f.bias": (16,),
    }
    for block in (0, 1):
        layer = f"transformer.h.{block}.mlp.c_fc"
        shapes[f"{layer}.lora_A.weight"] = (3, 16)
        shapes[f"{layer}.lora_B.weight"] = (64, 3)
        shapes[f"{layer}.base_layer.bias"] = (64,)
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    actual = {key.removeprefix("base_model.model."): tuple(x.shape) for key, x in tensors.items()}
    assert all(key.startswith("base_model.model.") for key in tensors)
    assert actual == shapes

    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["fan_in_fan_out"]
    assert config["inference_mode"]
    assert config["r"] == 3
    assert config["lora_alpha"] == 8
    assert config["bias"] == "lora_only"
    assert config["target_modules"] == ["wte", "c_fc"]
    assert config["modules_to_save"] == ["ln_f"]


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_are_restored_beside_any_base(name, tmp_path):
    model, params = trained(CONFIGS[name])
    fs.export(tmp_path / "adapter", params, to="peft", model=model)
    target_model, target = trained(CONFIGS[name])
    before = fs.unshard(target)

    restored = fs.unshard(fs.restore(tmp_path / "adapter", target))

    learnt = {key for key, x in target_model.named_parameters() if x.requires_grad}
    saved = fs.unshard(params)
    for key, x in restored.items():
        expected = saved[key] if key in learnt else before[key]
        assert torch.equal(x, expected)
    assert fs.restore(tmp_path / "adapter").keys() == learnt


def test_adapters_of_another_form_are_refused(tmp_path):
    model, params = trained(CONFIGS["linear"])
    fs.export(tmp_path / "adapter", params, to="peft", model=model)

    _, other_target = trained(fs.nn.LoraConfig(r=2, target_modules=["c_fc"]))
    message = r"missing in the checkpoint: .*c_fc.lora_A.*unexpected.*c_attn.lora_A"
    with pytest.raises(CheckpointError, match=message):
        fs.restore(tmp_path / "adapter", other_target)

    file = tmp_path / "adapter/adapter_config.json"
    of_other_kinds = [
        ({"peft_type": "IA3"}, "got IA3"),
        ({"use_rslora": True, "alpha_pattern": {"x": 3}}, "use_rslora=True, alpha"),
    ]
    for change, text in of_other_kinds:
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=text):
            fs.restore(tmp_path / "adapter")


# -- processes, memory, errors ---------------------------------------------------------------------


def test_processes_export_together_and_fail_together(tmp_path):
    first, second = run_processes(export_all, 2, tmp_path)

    assert first == second
    assert len(first) == 3
    assert "must be a new or empty folder" in first[0]
    assert "set is not JSON" in first[2]  # raised by the first process alone
    expected = {
        "a.w": torch.arange(12.0).reshape(4, 3),
        "b.w": torch.arange(7.0),
        "c": torch.tensor(3),
        "d": torch.ones(2),
    }
    for to, read in READERS.items():
        assert_equal(read(tmp_path / to, expected), expected)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(READERS)


def test_devices_of_a_program_export_together(tmp_path):
    def program():
        x = fs.device_put(torch.arange(4.0), fs.Layout(mesh(), P("data")))
        assert x.shards[0].shape == (2,)
        fs.export(tmp_path / "x", {"w": x}, to="safetensors")

    fs.run(program, mesh=mesh())
    assert load_file(tmp_path / "x")["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("to", READERS)
def test_export_has_one_array_in_memory_at_a_time(to, tmp_path):
    layout = fs.Layout(mesh(), P.flat("data", "model"))
    params = {}
    for n in range(32):
        params[f"{n}.w"] = fs.device_put(torch.ones(1 << 20) * n, layout)
    fs.export(tmp_path / "warm", {"w": params["0.w"]}, to=to)

    growth = growth_of_memory(lambda: fs.export(tmp_path / "x", params, to=to))

    assert growth < 64 << 20  # of 128 MB: an array and copies of it


def test_files_are_replaced(tmp_path):
    for value in (1, 2):
        fs.export(tmp_path / "x.pt", {"w": torch.tensor(value)}, to="torch")

    assert torch.load(tmp_path / "x.pt")["w"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]


COMPLEX = {name: torch.ones(1, dtype=torch.complex128) for name in "ab"}
MISUSES = [
    ({"to": "onnx"}, ValueError, "to must be"),
    ({"to": "torch", "config": {}}, ValueError, "config is for to='hf'"),
    ({"to": "peft"}, ValueError, "needs model="),
    ({"shard_size": 0}, ValueError, "shard_size must be"),
    (
        {"params": COMPLEX},
        CheckpointError,
        r"a has dtype torch.complex128; b has dtype torch.complex128",
    ),
    (
        {"to": "safetensors", "params": {"lr": [0.1], "n": 3}},
        CheckpointError,
        "lr.0 is of type float; n is of type int. Export to 'torch' or 'dcp'",
    ),
    (
        {"to": "peft", "model": torch.nn.Linear(1, 1, bias=False)},
        CheckpointError,
        "one of fs.nn.lora",
    ),
    ({"model": torch.nn.Linear(1, 1)}, CheckpointError, "bias are missing"),
    ({"path": "full"}, CheckpointError, "must be a new or empty folder"),
    ({"path": "full", "to": "dcp"}, CheckpointError, "must be a new or empty folder"),
    ({"path": "full", "to": "safetensors"}, CheckpointError, "must be a file"),
]


@pytest.mark.parametrize(("options", "kind", "text"), MISUSES)
def test_misuse_is_named_and_changes_nothing(options, kind, text, tmp_path):
    file = tmp_path / "full" / "file"
    file.parent.mkdir()
    file.write_text("mine")
    options = {"path": "x", "params": {"weight": torch.ones(1, 1)}, **options}
    path = tmp_path / options.pop("path")

    with pytest.raises(kind, match=text):
        fs.export(path, **options)

    assert [*tmp_path.rglob("*")] == [file.parent, file]


@pytest.mark.parametrize("to", ["save", "hf", "dcp", "torch", "safetensors"])
def test_strided_tensors_are_written(to, tmp_path):
    x = torch.arange(24.0).view(4, 6)
    z = torch.view_as_complex(torch.arange(6.0).view(3, 2))
    tensors = {
        "rows": x[::2],
        "column": x[:, 1],
        "expanded": torch.ones(1).expand(5),
        "diagonal": x.diagonal(),
        "real": z.real,
        "imaginary": z.imag,
        "bytes": torch.arange(9, dtype=torch.int8)[1::2],
        "turned": x.t(),
    }

    if to == "save":
        fs.save(tmp_path / "x", tensors)
    else:
        fs.export(tmp_path / "x", tensors, to=to)

    assert_equal(fs.restore(tmp_path / "x", trust=True), tensors)


def test_config_of_a_boosted_model_is_written(tmp_path):
    class Config:
        def save_pretrained(self, folder):
            (folder / "config.json").write_text("{}")

    def main():
        module = torch.nn.Linear(2, 2)
        module.config = Config()
        model, *_ = fs.Booster().boost(module)
        fs.export(tmp_path / "boosted", model)

    fs.run(main, mesh=fs.make_mesh({"data": 2}))
    assert (tmp_path / "boosted" / "config.json").exists()
