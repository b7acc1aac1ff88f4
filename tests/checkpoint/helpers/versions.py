"""A tree whose values tell which version of a checkpoint was loaded."""

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import CheckpointError


def tree(value, devices=1):
    """Arrays on some devices, replicated and sharded, of which a wrong element would be seen, and a
    value.
    """
    mesh = fs.make_mesh({"data": devices})
    x = torch.arange(48.0) + value
    return {
        "a": fs.device_put(x, fs.Layout(mesh, P("data"))),
        "b": fs.device_put(-x, fs.Layout(mesh)),
        "large": fs.device_put(torch.full((1 << 15,), value), fs.Layout(mesh, P.flat("data"))),
        "step": value,
    }


def loaded(path):
    """The value of the checkpoint in a folder, of which all leaves must be one's; None without a
    checkpoint.
    """
    if not (path / "index.json").exists():
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            fs.restore(path)
        return None
    restored = fs.restore(path)
    value = restored["step"]
    for name, x in tree(value).items():
        assert torch.equal(torch.as_tensor(restored[name]), torch.as_tensor(fs.unshard(x))), name
    return value
