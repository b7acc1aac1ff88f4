"""torch.compile around fshard, inside it, and both: the same values and gradients; nothing of
fshard is traced.
"""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

import fshard as fs
from fshard import P
from fshard.mesh.runtimes.thread_state import batches_nested
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # asked for by Dynamo
)

MESH = fs.make_mesh({"data": 2})  # of processes, where one imports this file
CUT = fs.Layout(MESH, P("data"))
X = torch.arange(1.0, 9.0)
OPT = fs.partition_optimizer(fs.optim.adam(0.1), mesh=MESH, axis="data", stage=1)


def compiled(f):
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(f, backend="eager")


def body(x):
    weight = fs.axis_index("data") * 0.5
    return fs.psum((x * x).sum(), "data") / fs.axis_size("data") + (x * weight).sum()


def on_mesh(f):
    spec = P("data")
    g = fs.shard_map(
        lambda x: f(x).reshape(1) * x, mesh=MESH, in_specs=spec, out_specs=spec, check=False
    )
    return lambda x: fs.unshard(g(x))


def run_on_all(x):
    return fs.run(lambda: body(x) * fs.psum.start(x * x, "data").wait(), mesh=MESH)[1]


def put(x):
    y = fs.reshard(fs.device_put(x, CUT), fs.Layout(MESH, P.flat("data")))
    return fs.unshard(y) * fs.unshard(
        fs.from_local(lambda data: torch.full((4,), float(data)), CUT)
    )


def trained(x):
    def loss_fn(params, batch):
        return (params["w"] * batch).square().mean()

    params = fs.shard_params({"w": torch.ones(())}, P(), mesh=MESH)
    step = fs.train_step(loss_fn, OPT, mesh=MESH, batch=P("data"))
    params, _, metrics = step(params, OPT.init(params), x)
    loss, _ = fs.value_and_grad(loss_fn, mesh=MESH, batch=P("data"))(params, x)
    return fs.unshard(params)["w"] + metrics["loss"] + loss


CALLS = {
    "shard_map": lambda x: on_mesh(body)(x),
    "run": run_on_all,
    "device_put": put,
    "train_step": trained,
}


@pytest.mark.filterwarnings("ignore:torch.compile.step. has no effect")
@pytest.mark.parametrize("name", CALLS)
def test_compile_around_fshard_does_not_trace_it(name, monkeypatch):
    compile_frame = convert_frame._compile
    files = []
    call = CALLS[name]

    def noted(code, *args, **kwargs):
        files.append(code.co_filename)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noted)
    around = compiled(lambda x: call(x.sin()) + 1)
    for _ in range(2):
        torch.testing.assert_close(around(X), call(X.sin()) + 1, rtol=0, atol=0)
        assert batches_nested() == 0
    assert {*files} == {__file__}  # before and after each call


def values_and_gradients():
    """Return what the program gives plain, and compiled around, inside, and both."""
    results = []
    for around, inside in product((lambda f: f, compiled), repeat=2):
        f = around(on_mesh(inside(body)))
        for _ in range(2):
            x = X.clone().requires_grad_()
            results.append([f(X), torch.autograd.grad(f(x).sum(), x)[0]])
    x = X.clone().requires_grad_()
    (x * x).sum().backward()  # it was refused in the whole process
    assert batches_nested() == 0
    return results


def test_compile_around_and_inside_on_devices_and_processes():
    for first, *results in [values_and_gradients(), *run_processes(values_and_gradients, 2)]:
        torch.testing.assert_close(results, [first] * 7)


# -- torch's loop ----------------------------------------------------------------------------------

PLUGINS = {
    "ddp": fs.DDPPlugin,
    "fsdp": fs.FSDPPlugin,
    "reproducible": partial(fs.FSDPPlugin, reproducible=True),
}


class Net(nn.Module):
    """Layers around a function that may be compiled."""

    def __init__(self, act=torch.tanh, first=None):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 1)
        self.act = act
        self.first = first

    def forward(self, x):
        y = self.a(x) if self.first is None else self.first(x, self.a.weight, self.a.bias)
        return self.b(self.act(y))


def trained_in_a_loop(
    plugin, make=Net, loss=lambda model, x: MEAN(model, x), around=lambda model: model
):
    def main():
        model = make()
        booster = fs.Booster(PLUGINS[plugin]())
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        called = around(model)
        for step in range(3):
            x = torch.arange(12.0).view(4, 3).sin() * (step + 1)
            booster.backward(loss(called, x[fs.axis_index("data") * 2 :][:2]), opt)
            opt.step(), opt.zero_grad()
        return {name: x.detach() for name, x in model.unwrap().named_parameters()}

    return fs.run(main, mesh=MESH)


MEAN = lambda model, x: (model(x) * 2).square().mean()  # noqa: E731
COMPILED = {  # options of `trained_in_a_loop`
    "around the model": lambda: {"around": compiled},
    "around the loss": lambda: {"loss": compiled(MEAN)},
    "a function inside": lambda: {"make": lambda: Net(compiled(torch.tanh))},
    "a function of parameters": lambda: {
        "make": lambda: Net(first=fs.with_unsharded_params(compiled(nn.functional.linear)))
    },
}


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("name", COMPILED)
def test_boosted_model_trains_as_without_compile(name, plugin):
    trained = trained_in_a_loop(plugin, **COMPILED[name]())
    captured = counters["stats"]["calls_captured"]
    if name != "around the model":  # which runs uncompiled, unless it is compiled in place
        assert captured >= (3 if "loss" in name else 1)  # what is made of the output
    torch.testing.assert_close(trained, trained_in_a_loop(plugin))
