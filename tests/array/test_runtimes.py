"""The same program on virtual, process and abstract meshes: equal values, gradients, layouts and
bytes.
"""

import torch
from torch.nn import functional as F

import fshard as fs
from fshard import P
from tests.helpers.processes import run_processes


def program(runtime=None):
    """Compute a small network with most kinds of communication; return values, types and bytes."""
    mesh = fs.make_mesh({"data": 2, "model": 2}, runtime=runtime)
    draw = torch.Generator().manual_seed(0)

    def put(*shape, spec):
        return fs.device_put(
            torch.randn(*shape, generator=draw, dtype=torch.float64), fs.Layout(mesh, spec)
        )

    x = put(8, 6, spec=P("data", "model"))
    w = put(6, 4, spec=P("model")).requires_grad_()
    v = put(4, 4, spec=P(None, "model")).requires_grad_()
    z = put(8, 4, spec=P.flat("data")).requires_grad_()
    torch.manual_seed(3)
    with fs.ledger() as comm:
        h = F.dropout(torch.relu(x @ w), 0.3)
        y = (h @ v).softmax(-1) + z.logsumexp(0) + F.layer_norm(h, (4,))
        loss = F.mse_loss(y, y.detach().T.reshape(8, 4)) + F.cross_entropy(y, y.detach().argmax(1))
        loss.backward()
    results = [loss.detach(), y.detach(), w.grad, v.grad, z.grad]
    types = [str(fs.typeof(r)) for r in (h, y, *results)]
    values = [fs.unshard(r) for r in results] if runtime != "abstract" else []
    return types, values, comm.bytes(), comm.calls()


def test_processes_equal_virtual_devices():
    types, values, _, calls = program("virtual")
    for other_types, other_values, _, other_calls in run_processes(program, 4, timeout=170):
        assert (other_types, other_calls) == (types, calls)
        torch.testing.assert_close(other_values, values)


def test_abstract_mesh_counts_bytes_and_has_layouts():
    types, _, sent, calls = program("virtual")
    assert program("abstract")[0] == types
    assert program("abstract")[2:] == (sent, calls)


def test_abstract_forward_on_65536_devices():
    mesh = fs.make_mesh({"data": 4096, "model": 16}, runtime="abstract")
    x = fs.array.zeros(8192, 64, layout=fs.Layout(mesh, P("data")))
    w = fs.array.zeros(64, 256, layout=fs.Layout(mesh, P(None, "model")))
    v = fs.array.zeros(256, 64, layout=fs.Layout(mesh, P("model")))
    with fs.ledger() as comm:
        y = F.gelu(x @ w) @ v + 0
    assert str(fs.typeof(y)) == "f32[8192@data, 64]"
    assert comm.bytes() == 2 * 15 * 2 * 64 * 4 / 16


def random_without_seed():
    mesh = fs.make_mesh({"data": 2})
    torch.manual_seed(torch.distributed.get_rank())
    try:
        fs.array.randn(4, layout=fs.Layout(mesh, P("data")))
    except fs.errors.MismatchError as error:
        return str(error)
    return "drawn"


def test_processes_with_other_seeds_raise():
    assert all(
        "torch.manual_seed" in text for text in run_processes(random_without_seed, 2, timeout=170)
    )
