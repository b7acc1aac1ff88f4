"""On an abstract mesh a function may make and reach for tensors as anywhere; only what asks for a
value is refused.
"""

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap

import fshard as fs
from fshard import P

CONSTANT = torch.ones(2)
LINEAR = torch.nn.Linear(2, 3)


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight


BODIES = {
    "arange": lambda x: x * torch.arange(x.shape[0]),
    "an explicit device": lambda x: x + torch.ones(2, device="cpu"),
    "a device context": lambda x: x + in_context(),
    "values": lambda x: x + torch.tensor([1.0, 2.0]),
    "numpy": lambda x: x + torch.from_numpy(np.ones(2)),
    "random numbers": lambda x: (
        x + torch.rand(2) + torch.rand(2, generator=torch.Generator().manual_seed(1))
    ),
    "a new result": lambda x: torch.ones(2),
    "a result from outside": lambda x: CONSTANT,
    "a collective of what is new": lambda x: fs.psum(torch.ones(2), "data"),
    "a collective of what is outside": lambda x: fs.all_gather(CONSTANT, "data"),
    "func.grad": lambda x: grad(lambda x: (x * torch.ones(2)).sum())(x),
    "func.vmap": lambda x: vmap(lambda x: x * torch.ones(()) + torch.arange(3.0))(x),
    "a module": lambda x: torch.nn.Linear(2, 3)(x),
    "a module from outside": lambda x: LINEAR(x),
    "a module with parameters": lambda x: functional_call(Scale(), {"weight": x}, (x,)),
    "a list of tensors": lambda x: torch.cat([x, CONSTANT]),
}


def in_context():
    with torch.device("cpu"):
        return torch.ones(2)


@pytest.mark.parametrize("name", BODIES)
def test_abstract_mesh_functions_return_virtual_shapes(name):
    results = []
    for runtime in ("virtual", "abstract"):
        mesh = fs.make_mesh({"data": 4}, runtime=runtime)
        mapped = fs.shard_map(BODIES[name], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        with torch.no_grad(), fs.ledger() as comm:
            y = mapped(torch.ones(8))
            (first, *_) = fs.run(lambda: BODIES[name](torch.ones(2)), mesh=mesh)
        results.append((fs.typeof(y), fs.typeof(first), comm.bytes(0)))
        assert runtime == "virtual" or y.shards[0].is_meta
    assert results[0] == results[1]


ASKS = {
    "item": lambda x: x.sum().item(),
    "__bool__": lambda x: x if x.sum() > 0 else -x,
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: torch.ones(2).tolist(),
    "nonzero": lambda x: (x + CONSTANT).nonzero(),
}


@pytest.mark.parametrize("name", ASKS)
def test_abstract_mesh_reading_a_value_raises(name):
    mesh = fs.make_mesh({"data": 4}, runtime="abstract")
    words = rf"{name} at tests/mesh/runtimes/test_abstract.py:\d+ in .* needs the value of a tensor of shape .* have none"
    with pytest.raises(fs.errors.LayoutError, match=words):
        fs.shard_map(ASKS[name], mesh=mesh, in_specs=P("data"), out_specs=P("data"))(torch.ones(8))
    with pytest.raises(fs.errors.LayoutError, match=words):
        fs.run(lambda: ASKS[name](torch.ones(2)), mesh=mesh)


def test_abstract_mesh_other_errors_are_unchanged():
    mesh = fs.make_mesh({"data": 4}, runtime="abstract")
    with pytest.raises(RuntimeError, match="Attempting to broadcast a dimension of length 3"):
        fs.run(lambda: torch.ones(2) + torch.ones(3), mesh=mesh)


def test_tensors_outside_abstract_mesh_have_values():
    fs.run(lambda: torch.ones(2), mesh=fs.make_mesh({"data": 4}, runtime="abstract"))
    assert torch.ones(2).tolist() == [1, 1]
