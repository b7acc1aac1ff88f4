"""Files that other libraries wrote are restored in any layout, bit for bit; malformed ones allocate
nothing and run nothing.
"""

import itertools
import json
import os
import pickle
import struct
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import fshard as fs
from fshard import P
from fshard.checkpoint.copying import Span
from fshard.checkpoint.foreign.formats import open_source
from fshard.checkpoint.source import Target
from fshard.command import main
from fshard.errors import CheckpointError
from tests.checkpoint.helpers.programs import growth_of_memory, mesh, save_dtensors
from tests.checkpoint.helpers.tiny import tensors, tiny
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
RULES = [
    P(),
    fs.fsdp("data"),
    fs.fsdp(("data", "model")),
    lambda name, x: P(*[None] * (x.ndim - 1), "model") if x.ndim and x.shape[-1] % 2 == 0 else P(),
]


def write_safetensors(path, tensors):
    save_file({name: x.contiguous() for name, x in tensors.items()}, path / "x.safetensors")
    return path / "x.safetensors"


def write_torch(path, tensors):
    torch.save(tensors, path / "x.pt")
    return path / "x.pt"


def write_dcp(path, tensors):
    dcp.save(dict(tensors), checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def write_hf(path, tensors, safe=True):
    contiguous = {name: x.contiguous() for name, x in tensors.items()}
    (path / "hf").mkdir()
    save_torch_state_dict(contiguous, path / "hf", max_shard_size=300, safe_serialization=safe)
    return path / "hf"


WRITERS = {
    "safetensors": write_safetensors,
    "torch": write_torch,
    "dcp": write_dcp,
    "hf": write_hf,
    "hf in pickles": lambda path, tensors: write_hf(path, tensors, safe=False),
}


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_foreign_arrays_are_restored_in_any_layout(writer, data, tmp_path_factory):
    want = data.draw(tensors())
    path = WRITERS[writer](tmp_path_factory.mktemp("foreign"), want)
    for restored in (
        fs.restore(path, trust=True),
        fs.unshard(fs.restore(path, data.draw(st.sampled_from(RULES)), mesh=mesh(), trust=True)),
    ):
        assert restored.keys() == want.keys()
        for name, x in want.items():
            assert (
                restored[name].dtype == x.dtype
                and restored[name].shape == x.shape
                and torch.equal(restored[name], x)
            )


@pytest.mark.parametrize(("name", "size"), [("gpt2", "5KB"), ("llama", "1GB"), ("bert", "5KB")])
def test_folders_of_transformers_are_restored_with_ties(name, size, tmp_path):
    model = tiny(name)
    target_model = tiny(name)
    model.save_pretrained(tmp_path, max_shard_size=size)
    want = dict(model.named_parameters())
    params = fs.shard_params(fs.functionalize(tiny(name))[1], fs.fsdp("data"), mesh=mesh())
    for restored in (
        fs.restore(tmp_path, fs.fsdp("data"), mesh=mesh()),
        fs.restore(tmp_path, params),
    ):
        assert restored.keys() == want.keys()
        assert all(torch.equal(x, want[key]) for key, x in fs.unshard(restored).items())
    fs.restore(
        tmp_path, target_model
    )  # a module, whose state_dict has tied weights under two names
    assert all(
        torch.equal(x, model.state_dict()[key]) for key, x in target_model.state_dict().items()
    )


def test_state_dict_with_ties_fits_parameters_that_have_them_once(tmp_path):
    model = tiny("gpt2")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    params = fs.functionalize(tiny("gpt2"))[1]
    assert "lm_head.weight" in model.state_dict() and "lm_head.weight" not in params
    restored = fs.restore(tmp_path / "model.pt", params)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in restored.items())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    torch.save(model.state_dict(), tmp_path / "untied.pt")
    with pytest.raises(CheckpointError, match="unexpected in the checkpoint: lm_head.weight"):
        fs.restore(tmp_path / "untied.pt", params)


def test_trees_of_torch_formats_keep_values_and_containers(tmp_path):
    tree = {
        "model": {"a.w": torch.ones(2)},
        "optim": [{"lr": 0.1, "betas": (0.9, 0.99), "step": torch.zeros(())}],
        "n": None,
    }
    torch.save({**tree, 3: "x"}, tmp_path / "x.pt")
    dcp.save(dict(tree), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert fs.restore(tmp_path / "x.pt").pop(3) == "x"
    for path in (tmp_path / "x.pt", tmp_path / "dcp"):
        restored = fs.restore(path, trust=True)
        assert [restored["n"], restored["model"]["a.w"].tolist()] == [None, [1, 1]]
        assert restored["optim"] == [{"lr": 0.1, "betas": [0.9, 0.99], "step": torch.zeros(())}]
        target = {
            "n": 1,
            "model": {"a.w": torch.zeros(2)},
            "optim": [{"lr": 0, "betas": (0, 0), "step": torch.ones(())}],
        }
        assert fs.restore(path, target, strict=False, trust=True)[0]["optim"] == [
            {"lr": 0.1, "betas": (0.9, 0.99), "step": torch.zeros(())}
        ]
        assert fs.restore(path, only="optim", trust=True)[0]["betas"] == [0.9, 0.99]


def test_rules_are_for_arrays_alone(tmp_path):
    tree = [{"w": torch.ones(4)}, 3, {"w": torch.zeros(2), "lr": 0.1}]
    torch.save(tree, tmp_path / "x.pt")
    restored = fs.restore(tmp_path / "x.pt", [P("data"), P()], mesh=mesh())
    assert [fs.typeof(restored[0]["w"]).spec, restored[1], restored[2]["lr"]] == [P("data"), 3, 0.1]
    assert fs.unshard(restored[0]["w"]).equal(torch.ones(4)) and fs.unshard(restored[2]["w"]).equal(
        torch.zeros(2)
    )


def test_chunks_of_dtensors_are_joined(tmp_path):
    run_processes(save_dtensors, 2, tmp_path)
    for rules in RULES:
        restored = fs.unshard(fs.restore(tmp_path, rules, mesh=mesh(), trust=True))
        assert all(
            torch.equal(restored[name], torch.arange(35.0).reshape(5, 7))
            for name in ("rows", "columns")
        )


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_ranges_are_read_without_the_rest_of_a_file(tmp_path):
    count = 1 << 30  # 4 GB, that take no room on the disk
    header = json.dumps(
        {"big": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
    ).encode()
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(4 * (count - 2), os.SEEK_CUR)
        file.write(struct.pack("<2f", 1.5, 2.5))
    into = torch.empty(3)
    target = Target("big", Span(((0, count),), count - 3, count), into)
    assert (
        growth_of_memory(lambda: open_source(tmp_path / "x.safetensors").read([target]), "VmRSS")
        < 16 << 20
    )
    assert into.tolist() == [0, 1.5, 2.5]


# -- only, rename ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        ({"h.*.q_proj.**": "blocks.*.q.**"}, ["blocks.0.q.w.x", "blocks.1.q.w.x", "h.0.k_proj.b"]),
        ({"h.*.*_proj.*": "*.*.*"}, ["0.k.b", "h.0.q_proj.w.x", "h.1.q_proj.w.x"]),
        (
            {"**.x": "**.y", "**": "all.**"},
            ["all.h.0.k_proj.b", "h.0.q_proj.w.y", "h.1.q_proj.w.y"],
        ),
        (str.upper, ["H.0.K_PROJ.B", "H.0.Q_PROJ.W.X", "H.1.Q_PROJ.W.X"]),
    ],
)
def test_stars_of_a_new_name_are_what_the_old_ones_matched(rename, names, tmp_path):
    torch.save(
        {name: torch.ones(1) for name in ("h.0.q_proj.w.x", "h.1.q_proj.w.x", "h.0.k_proj.b")},
        tmp_path / "x.pt",
    )
    assert sorted(fs.restore(tmp_path / "x.pt", rename=rename)) == names


def test_second_name_of_a_tied_array_is_restored_alone(tmp_path):
    x = torch.ones(2)
    torch.save({"a": x, "b": x}, tmp_path / "x.pt")
    fs.save(tmp_path / "own", {"a": x, "b": x})
    for path in (tmp_path / "x.pt", tmp_path / "own"):
        restored = fs.restore(path)
        assert restored["a"] is restored["b"] and restored["a"].equal(x)
        assert fs.restore(path, only=["b"])["b"].equal(x) and fs.restore(path, only="b").equal(x)
        assert fs.unshard(fs.restore(path, P("data"), mesh=mesh(), only=["b"]))["b"].equal(x)


def test_only_takes_names_of_trees_and_patterns(tmp_path):
    torch.save(
        {"a": {"w": torch.ones(1), "b": torch.ones(1)}, "c": {"w": torch.ones(1)}, "n": 1},
        tmp_path / "x.pt",
    )
    assert [*fs.restore(tmp_path / "x.pt", only="a")] == ["b", "w"]
    restored = fs.restore(tmp_path / "x.pt", only=["a", "n"])
    assert [*restored] == ["a", "n"] and [*restored["a"]] == ["b", "w"]
    target = {"a": {"w": torch.zeros(1), "b": torch.zeros(1)}, "c": {"w": torch.zeros(1)}, "n": 0}
    assert fs.restore(tmp_path / "x.pt", target, only="**.w")["n"] == 0
    assert [target["a"]["w"].item(), target["a"]["b"].item(), target["c"]["w"].item()] == [1, 0, 1]
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: d.w"):
        fs.restore(tmp_path / "x.pt", {**target, "d": {"w": torch.zeros(1)}}, only="**.w")
    with pytest.raises(CheckpointError, match="unexpected in the checkpoint: c.w"):
        fs.restore(tmp_path / "x.pt", {"a": target["a"]}, only="**.w")


# -- malformed files -------------------------------------------------------------------------------


def header(shape=(2,), dtype="F32"):
    return json.dumps({"w": {"dtype": dtype, "shape": [*shape], "data_offsets": [0, 8]}}).encode()


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"\xff\xfe", header((3,)), header(dtype="F33"), 1 << 62]
)
def test_malformed_safetensors_raise(text, tmp_path):
    text, length = (b"{}", text) if isinstance(text, int) else (text, len(text))
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        fs.restore(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        *[
            ({"weight_map": {"w": name}}, "must be in its folder")
            for name in ("../a", "/etc/passwd", "b/a.safetensors")
        ],
        ({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}, "v in a.safetensors"),
        ({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}, "v in b.safetensors"),
        ({"weight_map": [1]}, "cannot be read"),
        ({}, "weight_map"),
    ],
)
def test_index_names_existing_files_of_its_folder(content, text, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=text):
        fs.restore(tmp_path)


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


FOLDERS = itertools.count()


@pytest.mark.parametrize("writer", ["safetensors", "torch", "dcp", "hf"])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_files_are_refused_and_damaged_ones_allocate_no_more_than_they_hold(
    writer, data, tmp_path_factory
):
    # DCP writes the path of its folder, so all have names of one length: else the sizes of what is
    # drawn next depend on how many folders were made before.
    folder = tmp_path_factory.mktemp(f"damaged-{writer}-{next(FOLDERS):06}", numbered=False)
    path = WRITERS[writer](folder, data.draw(tensors(1)))
    files = [path] if path.is_file() else sorted(path.iterdir())
    file = data.draw(st.sampled_from(files))
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointError):
        fs.restore(path, trust=True)
    byte = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    file.write_bytes(content[:byte] + bytes([content[byte] ^ 1 << bit]) + content[byte + 1 :])
    try:
        restored = fs.restore(path, trust=True)
    except CheckpointError:
        return
    size = sum(x.stat().st_size for x in files)
    assert all(
        x.numel() * x.itemsize <= size for x in restored.values() if isinstance(x, torch.Tensor)
    )


def test_torch_files_with_code_sparse_tensors_or_the_old_format_raise(tmp_path):
    marker = tmp_path / "ran"
    torch.save({"w": torch.ones(2), "x": Evil(marker)}, tmp_path / "code.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    for name, text in (
        ("code.pt", "Weights only"),
        ("old.pt", "old.pt"),
        ("sparse.pt", "must be dense; got w is"),
    ):
        with pytest.raises(CheckpointError, match=text):
            fs.restore(tmp_path / name)
    assert not marker.exists()


@pytest.fixture
def planted(tmp_path):
    """Return the mark of code that has run, and the metadata of DCP that runs it."""
    return tmp_path / "ran", pickle.dumps(Evil(tmp_path / "ran"))


@pytest.mark.parametrize("writer", ["safetensors", "torch", "hf", "hf in pickles", "save"])
def test_metadata_of_dcp_beside_another_format_is_not_read(writer, planted, tmp_path):
    """Not if it is trusted either: the other format has the arrays."""
    marker, metadata = planted
    folder = tmp_path / "folder"
    x = torch.ones(2)
    folder.mkdir()
    if writer == "save":
        fs.save(folder, {"w": x})
    else:
        path = WRITERS[writer](folder, {"w": x})
        if path.is_file():
            path.rename(folder / {"torch": "pytorch_model.bin"}.get(writer, "model.safetensors"))
        else:
            folder = path
    (folder / ".metadata").write_bytes(metadata)
    for options in ({}, {"trust": True}):
        assert fs.restore(folder, **options)["w"].equal(x)
    assert not marker.exists()


def test_dcp_is_read_only_if_it_is_trusted(planted, tmp_path):
    marker, metadata = planted
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match="trust=True"):
        fs.restore(tmp_path / "dcp")
    assert fs.restore(tmp_path / "dcp", trust=True)["w"].equal(torch.ones(2))
    (tmp_path / "dcp" / ".metadata").write_bytes(metadata)
    with pytest.raises(CheckpointError, match="trust=True"):
        fs.restore(tmp_path / "dcp", {"w": torch.zeros(2)}, strict=False)
    with pytest.raises(CheckpointError, match="trust=True"):
        fs.restore(tmp_path / "dcp", P(), mesh=mesh())
    assert not marker.exists()


@pytest.mark.parametrize("command", ["inspect", "verify", "convert --to safetensors"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_commands_run_no_code_of_a_folder(command, is_alone, planted, tmp_path, capsys):
    marker, metadata = planted
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".metadata").write_bytes(metadata)
    if not is_alone:
        write_safetensors(folder, {"w": torch.ones(2)}).rename(folder / "model.safetensors")
    out = [str(tmp_path / "out")] if "convert" in command else []
    status = main(["checkpoint", *command.split(), str(folder), *out])
    printed = capsys.readouterr()
    assert (status != 0) == is_alone
    assert ("--trust" in printed.out + printed.err) == is_alone
    assert not marker.exists()


def test_commands_read_dcp_that_is_trusted(tmp_path, capsys):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = str(tmp_path / "dcp")
    out = str(tmp_path / "out")
    assert main(["checkpoint", "verify", "--trust", path]) == 0
    assert main(["checkpoint", "convert", "--to", "safetensors", "--trust", path, out]) == 0
    assert fs.restore(out)["w"].equal(torch.ones(2))
    with pytest.raises(SystemExit):
        main(["checkpoint", "inspect", "--trust", path])
    assert "unrecognized" in capsys.readouterr().err


def test_dcp_value_with_tensors_inside(tmp_path):
    value = (torch.arange(3.0), {"k": torch.zeros(1)}, 3)
    dcp.save({"w": torch.ones(2), "value": value}, checkpoint_id=tmp_path, no_dist=True)
    restored = fs.restore(tmp_path, trust=True)["value"]
    assert torch.equal(restored[0], value[0]) and restored[1:] == [{"k": torch.zeros(1)}, 3]
