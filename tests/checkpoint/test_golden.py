"""Folders of earlier versions: their names and bytes are frozen.

`python -m tests.checkpoint.test_golden` writes the folder again, once for each new version of the
format.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.checkpoint.index import read_index, read_sealed
from fshard.checkpoint.names import leaves_of
from fshard.checkpoint.save import snapshot, write

GOLDEN = Path(__file__).parent / "golden" / "1"
TOKEN = "0123456789abcd"
"""Instead of a random one."""


class State(NamedTuple):
    exp_avg: object
    step: object


def numbers(*shape, dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel()) % 23).reshape(shape).to(dtype)


def tree():
    """Stages, ties, every kind of layout, uneven shards, 0-d and empty arrays, fields, keys,
    values.
    """
    mesh = fs.make_mesh({"pipe": 2, "data": 2})

    def put(x, spec):
        return fs.device_put(x, fs.Layout(mesh, spec))

    tied = put(numbers(6, 4), P("data", at={"pipe": 0}))
    params = [
        {"0.weight": tied, "1.bias": put(numbers(7), P.flat("data", at={"pipe": 0}))},
        {
            "2.weight": put(numbers(4, 6, dtype=torch.bfloat16), P(None, "data", at={"pipe": 1})),
            "3.weight": tied,
        },
    ]
    state = State({"owner": put(numbers(5, 3), P(at={("pipe", "data"): 3}))}, torch.tensor(9.0))
    layouts = {
        "flat": put(numbers(4, 5, dtype=torch.float64), P("pipe", flat="data")),
        "both": put(numbers(8, dtype=torch.complex64), P(("data", "pipe"))),
        "replicated": put(numbers(3, 3, dtype=torch.int16), P()),
        "scalar": put(torch.tensor(True), P()),
        "empty": put(torch.empty(0, 2), P()),
        "float8": put(numbers(5).to(torch.float8_e5m2), P()),
        "host": numbers(11, dtype=torch.uint8),
    }
    values = {"none": None, "number": 1.5, "text": "ü", "list": [1, [], {}], 5: {True: "key"}}
    return {"params": params, "state": state, "rest": layouts, "values": values}


def store(path):
    write(path, snapshot(path, TOKEN, tree(), {"loss": 0.25}), TOKEN, 60)


NAMES = {
    "params": ["0.weight", "1.bias", "2.weight", "3.weight"],
    "rest": ["both", "empty", "flat", "float8", "host", "replicated", "scalar"],
    "state": ["exp_avg.owner", "step"],
    "values": ["5.True", "list.0", "list.1", "list.2", "none", "number", "text"],
}


@pytest.mark.parametrize("folder", sorted(GOLDEN.parent.iterdir()), ids=lambda folder: folder.name)
def test_golden_folder_restores_bit_for_bit(folder):
    into = tree()
    expected = {leaf.name: fs.unshard(leaf.value) for leaf in leaves_of(tree())}
    assert sorted(expected) == [f"{top}.{name}" for top, names in NAMES.items() for name in names]
    for leaf in leaves_of(into):
        for x in getattr(
            leaf.value, "shards", [leaf.value] if isinstance(leaf.value, torch.Tensor) else []
        ):
            x.fill_(1)
    for restored in (fs.restore(folder, into), fs.restore(folder)):
        leaves = {leaf.name: fs.unshard(leaf.value) for leaf in leaves_of(restored)}
        assert leaves.keys() == expected.keys()
        for name, x in leaves.items():
            is_equal = (
                torch.equal(x, expected[name])
                if isinstance(x, torch.Tensor)
                else x == expected[name]
            )
            assert is_equal and type(x) is type(expected[name]), name
    assert read_index(folder).metrics == {"loss": 0.25}


def test_todays_files_are_those_of_the_golden_folder(tmp_path):
    store(tmp_path)
    files = sorted(file.name for file in GOLDEN.iterdir())
    assert files == sorted(file.name for file in tmp_path.iterdir())
    for name in files:
        if name.endswith(".safetensors"):
            assert (GOLDEN / name).read_bytes() == (tmp_path / name).read_bytes(), name
        else:
            assert read_sealed(GOLDEN / name) == read_sealed(tmp_path / name), name


def test_golden_data_files_are_safetensors():
    torch_safe = pytest.importorskip("safetensors.torch")
    sizes = {}
    for path in sorted(GOLDEN.glob("*.safetensors")):
        for name, x in torch_safe.load_file(path).items():
            sizes[name] = sizes.get(name, 0) + x.numel() * x.element_size()
    tied = "params.3.weight"
    arrays = {
        leaf.name: leaf.value
        for leaf in leaves_of(tree())
        if hasattr(leaf.value, "shape") and leaf.name != tied
    }
    assert sizes == {
        name: fs.unshard(x).nbytes for name, x in arrays.items() if fs.unshard(x).nbytes
    }


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    store(GOLDEN)
