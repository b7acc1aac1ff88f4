"""Shares in memory are read into any layout, by devices that have some of them each.

The oracle is the plain tensor that was saved.
"""

import json

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.checkpoint.index import index_of
from fshard.checkpoint.restore import RenamedSource, restore_from
from fshard.checkpoint.snapshot import snapshot_of
from fshard.mesh.reshard.between import mesh_of_numbers
from fshard.recovery import source as source_module
from fshard.recovery.source import SharesInMemory

LAYOUTS = [P(), P("data"), P.flat("data")]


def saved(tree):
    """Return the index of a tree, and the bytes of each device's share."""
    content = snapshot_of(tree)
    memory = {}
    for device, ranges in content.shares.items():
        memory[device] = torch.empty(sum([x.values.nbytes for x in ranges]), dtype=torch.uint8)
    content.staged(memory).wait()
    return index_of(json.loads(content.index.text)), memory


@pytest.mark.parametrize("at_once", [1 << 20, 40])
@pytest.mark.parametrize("before", LAYOUTS, ids=str)
@pytest.mark.parametrize("after", LAYOUTS, ids=str)
def test_devices_read_from_each_other(before, after, at_once, monkeypatch):
    monkeypatch.setattr(source_module, "ROUND", at_once)
    old_mesh = fs.make_mesh({"data": 4})
    tree = {
        "x": torch.arange(96.0).reshape(12, 8),
        "half": torch.arange(9.0).bfloat16(),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    put = {"half": P.flat("data"), "bytes": P()}
    layouts = {name: fs.Layout(old_mesh, put.get(name, before)) for name in tree}
    index, shares = saved(fs.device_put(tree, layouts))

    # Device 2 is lost. Each share is on one of the three that are left.
    holders = {0: 0, 1: 1, 2: 2, 3: 2}

    def main():
        mesh = fs.make_mesh({"data": 3})
        number = fs.axis_index("data")
        own = {owner: shares[owner] for owner, holder in holders.items() if holder == number}
        meeting = mesh_of_numbers(mesh.devices, mesh)
        source = SharesInMemory(index, own, holders, meeting)
        target = {
            "x": fs.device_put(torch.zeros(12, 8), fs.Layout(mesh, after)),
            "half": torch.zeros(9, dtype=torch.bfloat16),
            "bytes": fs.device_put(torch.zeros(5, dtype=torch.uint8), fs.Layout(mesh, P())),
        }
        return fs.unshard(restore_from(RenamedSource(source), "test", target))

    for result in fs.run(main, mesh=fs.make_mesh({"data": 3})):
        for name, x in tree.items():
            assert torch.equal(result[name], x), name
