"""Global arrays can be pickled, and saved and loaded by torch."""

import io
import pickle

import pytest
import torch

import fshard as fs
from fshard import P

SPECS = [P("data"), P.flat("data", "model"), P(at={("data", "model"): 1}), P(None, unreduced="model")]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sharded_saved_and_loaded_is_equal(spec):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    x = fs.device_put(torch.arange(4.0), fs.Layout(mesh, spec, unit="block", frozen=True))
    file = io.BytesIO()
    torch.save({"x": x, "step": 3}, file)
    file.seek(0)
    with torch.serialization.safe_globals(fs.mesh.SAFE_GLOBALS):
        loaded = torch.load(file, weights_only=True)["x"]
    for y in (loaded, pickle.loads(pickle.dumps(x))):
        assert (y.layout, y.shape, hash(y.layout)) == (x.layout, x.shape, hash(x.layout))
        assert all(map(torch.equal, y.shards, x.shards))
        assert torch.equal(fs.unshard(y), torch.arange(4.0))


def test_import_registers_no_safe_globals():
    assert fs.Sharded not in torch.serialization.get_safe_globals()
