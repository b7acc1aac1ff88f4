"""`init_params`: the values of the plain function, laid out."""

import pytest
import torch
from torch import nn
from torch.nn import init

import fshard as fs
from fshard import P

MODULES = {
    "Linear": lambda: nn.Linear(5, 3),
    "Embedding": lambda: nn.Embedding(5, 3, padding_idx=0),
    "Transformer": lambda: nn.Transformer(8, 2, 1, 2, 16, batch_first=True),
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
}


def initialised(make):
    """Make a module and overwrite its weights, as models do."""
    params = dict(make().named_parameters())
    for w in params.values():
        if w.ndim > 1:
            init.trunc_normal_(w, std=0.02)
    return params


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", MODULES)
def test_init_params_equals_the_plain_function(kind):
    def init_fn():
        return initialised(MODULES[kind])

    own = fs.nn.init_params(init_fn, fs.fsdp("data"), mesh=fs.make_mesh({"data": 2}), seed=3)
    torch.manual_seed(3)
    expected = init_fn()
    assert own.keys() == expected.keys()
    assert all(torch.equal(fs.unshard(own[name]), w) for name, w in expected.items())


def test_init_params_with_seed_restores_the_generator():
    mesh, before = fs.make_mesh({"data": 2}), torch.get_rng_state()
    own = fs.nn.init_params(lambda: torch.randn(4), P(), mesh=mesh, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    again = fs.nn.init_params(lambda: torch.randn(4), P(), mesh=mesh)
    assert torch.equal(fs.unshard(own), fs.unshard(again))
    assert not torch.equal(torch.get_rng_state(), before)


def test_init_params_keeps_ties_and_frozen_leaves():
    def init_fn():
        w = torch.randn(3, 3)
        return {"first": w, "last": w, "fixed": torch.randn(2)}

    own = fs.nn.init_params(init_fn, fs.fsdp("data"), mesh=fs.make_mesh({"data": 2}), frozen="fixed")
    assert own["first"] is own["last"] and own["fixed"].layout.frozen


def test_init_params_on_abstract_mesh_takes_no_memory():
    mesh = fs.make_mesh({"data": 1024}, runtime="abstract")
    own = fs.nn.init_params(lambda: torch.randn(1 << 20, 1 << 20), fs.fsdp("data"), mesh=mesh)
    assert own.shape == (1 << 20, 1 << 20) and own.shards[0].is_meta
