"""torch.compile around fshard, inside it, and both: the same values and gradients, and nothing of fshard is looked into."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import fshard as fs
from fshard import P
from fshard.mesh.runtimes.thread_state import batches_nested
from fshard.testing import run_processes

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # asked for by Dynamo

MESH = fs.make_mesh({"data": 2})
CUT = fs.Layout(MESH, P("data"))
X = torch.arange(1.0, 9.0)
OPT = fs.partition_optimizer(fs.optim.adam(0.1), mesh=MESH, axis="data", stage=1)


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(f, backend="eager")


def body(x):
    place = fs.axis_index("data") * 0.5
    return fs.psum((x * x).sum(), "data") / fs.axis_size("data") + (x * place).sum()


def started(x):
    return fs.psum.start(x * x, "data").wait()


def mapped(f):
    spec = P("data")
    return fs.shard_map(lambda x: f(x).reshape(1) * x, mesh=MESH, in_specs=spec, out_specs=spec, check=False)


def whole_run(x):
    return fs.run(lambda: body(x) * started(x), mesh=MESH)[1]


def placed(x):
    y = fs.reshard(fs.device_put(x, CUT), fs.Layout(MESH, P.flat("data")))
    return fs.unshard(y) * fs.unshard(fs.from_local(lambda data: torch.full((4,), float(data)), CUT))


def trained(x):
    def loss_fn(params, batch):
        return (params["w"] * batch).square().mean()

    params = fs.shard_params({"w": torch.ones(())}, P(), mesh=MESH)
    step = fs.train_step(loss_fn, OPT, mesh=MESH, batch=P("data"))
    params, _, metrics = step(params, OPT.init(params), x)
    return (
        fs.unshard(params)["w"] + metrics["loss"] + fs.value_and_grad(loss_fn, mesh=MESH, batch=P("data"))(params, x)[0]
    )


CALLS = {"shard_map": lambda x: fs.unshard(mapped(body)(x)), "run": whole_run, "placing": placed, "train_step": trained}


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in CALLS.items()])
def test_what_is_compiled_around_fshard_does_not_look_into_it(call):
    around = compiled(lambda x: call(x.sin()) + 1)
    for _ in range(2):
        torch.testing.assert_close(around(X), call(X.sin()) + 1, rtol=0, atol=0)
        assert batches_nested() == 0
    assert counters["frames"]["total"] <= 14  # the functions of this test, and what they go on with after each call


def test_a_gradient_goes_through_what_is_compiled_around_inside_and_both():
    def gradient(f):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)[0]

    def on_mesh(f):
        return lambda x: fs.unshard(mapped(f)(x))

    expected = gradient(on_mesh(body))
    for way in (
        lambda: compiled(on_mesh(body)),
        lambda: on_mesh(compiled(body)),
        lambda: compiled(on_mesh(compiled(body))),
    ):
        f = way()
        for _ in range(2):
            torch.testing.assert_close(gradient(f), expected)
            torch.testing.assert_close(f(X), on_mesh(body)(X))
    x = X.clone().requires_grad_()
    (x * x).sum().backward()  # it was refused in the whole process
    assert batches_nested() == 0


def on_processes() -> list[Any]:
    mesh = fs.make_mesh({"data": 2})

    def on_mesh(f):
        g = fs.shard_map(lambda x: f(x).reshape(1) * x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return lambda x: fs.unshard(g(x)).tolist()

    return [
        on_mesh(body)(X),
        on_mesh(compiled(body))(X),
        compiled(on_mesh(body))(X),
        compiled(on_mesh(compiled(body)))(X),
    ]


def test_processes_compile_around_inside_and_both():
    for plain, *others in run_processes(on_processes, 2):
        assert others == [plain] * 3
