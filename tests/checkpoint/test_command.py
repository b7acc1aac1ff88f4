"""`fshard checkpoint`: what a checkpoint has, what is damaged in it, and the same in another
format.
"""

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.command import main


def save(path, columns):
    """Save step 120 on four devices; two names are one array."""
    w = torch.arange(5.0 * columns).reshape(5, columns)
    w = fs.device_put(w, fs.Layout(fs.make_mesh({"data": 4}), P.flat("data")))
    tree = {
        "params": {"head.w": w, "wte.w": w, "b": torch.ones(3, dtype=torch.bfloat16)},
        "steps": 120,
        "name": "gpt",
    }
    fs.save(path, tree, metrics={"loss": 0.25})


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "120", 4)
    return tmp_path / "120"


def test_inspect_prints_a_table(saved, capsys):
    assert main(["checkpoint", "inspect", str(saved)]) == 0
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["name", "shape", "dtype", "layout"]
    assert ["params.b", "[3]", "bf16", "P()"] in lines
    assert [line[0] for line in lines if 'P.flat("data")' in " ".join(line)] == ["params.head.w"]
    assert " ".join(lines[-3]) == "2 arrays, 23 elements, 86 bytes; 2 values"
    assert " ".join(lines[-2]) == "step 120, written by 4 devices: device=4; data=4"
    assert " ".join(lines[-1]) == "loss: 0.25"


def test_verify_names_each_damaged_range_and_missing_file(tmp_path, capsys):
    saved = tmp_path / "120"
    save(saved, 1 << 20)  # more than 4 MiB a device
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert "bytes are as they were written" in capsys.readouterr().out
    files = sorted(saved.glob("*.safetensors"))
    for offset in (10, (4 << 20) + 5):
        flip(files[0], offset)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].unlink()
    sorted(saved.glob("*.json"))[-2].write_text("{}")
    assert main(["checkpoint", "verify", str(saved)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert (
        f"{files[0]}: bytes 0 to {4 << 20} are not" in lines[0]
        and f"bytes {4 << 20} to" in lines[1]
    )
    assert files[1].name in lines[2] and "must have" in lines[2] and files[2].name in lines[3]
    flip(saved / "index.json", 100)
    assert main(["checkpoint", "verify", str(saved)]) == 1
    assert "index.json is not as it was written" in capsys.readouterr().out


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_convert_chains_all_formats(saved, tmp_path, capsys):
    """Tied arrays are written once by the formats that have no values."""
    path = saved
    want = fs.restore(saved, only="params")
    for to, only in (("torch", []), ("hf", ["--only", "params"]), ("dcp", []), ("safetensors", [])):
        words = ["checkpoint", "convert", "--trust", "--to", to, *only]
        assert main([*words, str(path), str(tmp_path / to)]) == 0
        path = tmp_path / to
        converted = fs.restore(path, trust=True)
        if to == "torch":
            assert [converted["steps"], converted["name"]] == [120, "gpt"]
            converted = converted["params"]
        names = {*want} if to == "torch" else {*want} - {"wte.w"}
        assert converted.keys() == names and all(
            torch.equal(x, want[name]) for name, x in converted.items()
        )
        assert main(["checkpoint", "inspect", str(path)]) == (2 if to == "dcp" else 0)
        assert main(["checkpoint", "verify", "--trust", str(path)]) == 0
        assert "no digests" in capsys.readouterr().out


def test_convert_prints_what_it_has_written(saved, tmp_path, capsys):
    out = tmp_path / "hf"
    only = ["--only", "params"]
    assert main(["checkpoint", "convert", "--to", "hf", *only, str(saved), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 arrays, 23 elements, 86 bytes; 0 values\n"
    values = tmp_path / "all.pt"
    assert main(["checkpoint", "convert", "--to", "torch", str(saved), str(values)]) == 0
    assert capsys.readouterr().out == f"{values}: 2 arrays, 23 elements, 86 bytes; 2 values\n"


def test_convert_of_values_to_safetensors_names_the_parts_without(saved, tmp_path, capsys):
    out = tmp_path / "hf"
    assert main(["checkpoint", "convert", "--to", "hf", str(saved), str(out)]) == 2
    error = capsys.readouterr().err
    assert "name is of type str; steps is of type int" in error
    assert "with --only: params" in error and not out.exists()


def test_convert_renames_by_patterns(saved, tmp_path):
    out = tmp_path / "renamed"
    words = ["--to", "hf", "--only", "params", "--rename", "*.w=layers.*.weight"]
    words += ["--rename", "b=bias"]
    assert main(["checkpoint", "convert", *words, str(saved), str(out)]) == 0
    stored = fs.restore(saved, only="params")
    written = fs.restore(out)
    assert written.keys() == {"layers.head.weight", "bias"}  # tied arrays are written once
    assert torch.equal(written["layers.head.weight"], stored["head.w"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["b"], "--rename must be OLD=NEW, such as h.**=layers.**; got 'b'"),
        (["=x"], "--rename must be OLD=NEW, such as h.**=layers.**; got '=x'"),
        (["b=x", "b=y"], "--rename must have each name once; got b twice"),
        (["nothing=x"], "--rename 'nothing' matches no name"),
    ],
    ids=" ".join,
)
def test_convert_with_wrong_rename_is_one_line(saved, tmp_path, capsys, words, message):
    options = ["--to", "hf", "--only", "params"]
    for word in words:
        options += ["--rename", word]
    assert main(["checkpoint", "convert", *options, str(saved), str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_errors_are_lines_with_a_status(tmp_path, capsys):
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 2
    assert "is no checkpoint" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "convert", str(tmp_path), "x"])
    assert main(["--help"]) == 0 and "checkpoint convert" in capsys.readouterr().out
