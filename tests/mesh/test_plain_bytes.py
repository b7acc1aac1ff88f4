"""Values that processes tell each other beside tensors: they come back equal, and bytes of others
call nothing.
"""

import json
import math
import pickle
from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import fshard as fs
from fshard.mesh.plain_bytes import from_bytes, to_bytes
from fshard.pipeline.schedule.actions import Kind


class Pair(NamedTuple):
    first: object
    second: object


VALUES = [
    None, True, 3, 1 << 80, 1e-300, -math.inf, "é\0", b"\0\xff", 1 + 2j, (1, [2, {3: (4,)}]), {1, 2}, frozenset({"a"}),
    torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3]), Kind.F, nn.functional.gelu.__class__, int,
    nn.functional.mse_loss, Pair(1, (2,)), fs.P("data", None), fs.Layout(fs.make_mesh({"data": 2}), fs.P("data")),
    np.float32(0.5), np.str_("a"),
]  # fmt: skip


@pytest.mark.parametrize("value", [x for x in VALUES if x is not nn.functional.gelu.__class__])
def test_plain_values_come_back_equal(value):
    result = from_bytes(to_bytes(value))
    assert result == value
    assert type(result) is type(value)
    assert hash(to_bytes(value)) == hash(to_bytes(result))


def test_structures_of_trees_come_back_equal():
    array = fs.device_put(torch.arange(4.0), fs.Layout(fs.make_mesh({"data": 2}), fs.P("data")))
    tree = {
        "array": array,
        "ordered": OrderedDict(b=1, a=(2, None)),
        "pair": Pair(1, [2]),
        "others": [defaultdict(list, {"k": 1}), deque([1], maxlen=3)],
    }
    leaves, structure = fs.mesh.flatten_shards(tree, none_is_leaf=True)
    result = from_bytes(to_bytes(structure))
    assert result == structure
    assert hash(result) == hash(structure)
    assert fs.mesh.flatten_shards(result.unflatten(leaves), none_is_leaf=True)[1] == structure


def test_numpy_arrays_come_back_equal():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    result = from_bytes(to_bytes(array))
    assert (result.dtype, result.tolist()) == (array.dtype, array.tolist())


def node(kind, data, of_class):
    """Return the message of a structure of one node without children."""
    state = ["tuple", ["tuple", ["tuple", kind, 0, data, None, of_class, 0, 1, None]], True, "fshard"]  # fmt: skip
    return ["structure", state]


POPEN = ["reference", "subprocess:Popen"]
HOSTILE = {
    "class": POPEN,
    "function": ["reference", "os:system"],
    "builtin": ["reference", "builtins:eval"],
    "named tuple": ["namedtuple", "subprocess:Popen", "true"],
    "node": node(6, POPEN, None),
    "node of a class": node(6, ["reference", "torch.nn.modules.linear:Linear"], None),
    "default": node(8, ["tuple", ["reference", "torch.nn.modules.linear:Linear"], ["list"]], None),
    "field": ["dataclass", "fshard.mesh.layout.mesh:Mesh", ["__class__", 1]],
    "no dtype": ["dtype", "load"],
    "no enum": ["enum", "fshard.mesh.layout.mesh:Mesh", "x"],
    "kind": ["object", 1],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_name_other_classes_raise(name):
    with pytest.raises(ValueError, match="A message"):
        from_bytes(json.dumps(HOSTILE[name]).encode())


class Opened:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickle_is_not_executed(tmp_path):
    with pytest.raises(ValueError, match="decode|JSON|Expecting"):
        from_bytes(pickle.dumps(Opened(tmp_path / "file")))
    assert not [*tmp_path.iterdir()]


def test_objects_of_other_kinds_raise_with_the_way_out():
    with pytest.raises(TypeError, match="got Opened. Make it a dataclass"):
        to_bytes([Opened("x")])
    with pytest.raises(TypeError, match="Define it in a module"):
        to_bytes(lambda: None)
