"""Leaves that are no tensors pass through device_put, reshard, unshard and shard_map."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fshard as fs
from fshard import P

MESH = fs.make_mesh({"data": 2})
SHARDED = fs.Layout(MESH, P("data"))


@dataclasses.dataclass
class Block:
    weight: Any
    activation: Callable[..., Any] = torch.relu
    name: str = "block"
    heads: int = dataclasses.field(default=4, metadata={"static": True})
    rate: float = dataclasses.field(default=0.5, metadata={"static": True})
    bias: Any = None


def static(block):
    return block.activation, block.name, block.heads, block.rate, block.bias


@pytest.mark.parametrize(
    "layout", [SHARDED, {"block": SHARDED, "label": None}], ids=["one", "prefix"]
)
def test_device_put_static_leaves_pass_unchanged(layout):
    tree = {"block": Block(torch.arange(4.0)), "label": "adam"}
    put = fs.device_put(tree, layout)
    moved = fs.reshard(put, {"block": fs.Layout(MESH, P()), "label": None})
    back = fs.unshard(moved)
    assert (
        str(fs.typeof(put["block"].weight)) == "f32[4@data]"
        and str(fs.typeof(moved["block"].weight)) == "f32[4]"
    )
    assert torch.equal(back["block"].weight, torch.arange(4.0))
    assert all(
        static(each["block"]) == static(tree["block"]) and each["label"] == "adam"
        for each in (put, moved, back)
    )


def test_shard_map_static_leaves_reach_function():
    seen = []

    def f(block):
        seen.append(static(block))
        return dataclasses.replace(block, weight=block.activation(block.weight))

    block = Block(torch.tensor([-1.0, 2.0]))
    result = fs.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(block)
    assert seen == [static(block)] * 2 and static(result) == static(block)
    assert fs.unshard(result.weight).tolist() == [0, 2]


@pytest.mark.parametrize("value", ["text", 3.0, {"x": np.ones(2)}], ids=["text", "number", "numpy"])
def test_device_put_without_tensor_raises(value):
    with pytest.raises(TypeError, match="a tensor is needed; got"):
        fs.device_put(value, SHARDED)


def test_device_put_of_none_returns_none():
    assert fs.device_put(None, SHARDED) is None and fs.reshard(None, SHARDED) is None
