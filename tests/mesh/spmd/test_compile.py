"""torch.compile around fshard, inside it, and both: the same values and gradients, and nothing of fshard is looked into."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
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


@pytest.mark.filterwarnings("ignore:torch.compile.step. has no effect")
@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in CALLS.items()])
def test_compile_around_fshard_does_not_trace_it(call, monkeypatch):
    compile_frame, files = convert_frame._compile, list[str]()

    def noted(code, *args, **kwargs):
        files.append(code.co_filename)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noted)
    around = compiled(lambda x: call(x.sin()) + 1)
    for _ in range(2):
        torch.testing.assert_close(around(X), call(X.sin()) + 1, rtol=0, atol=0)
        assert batches_nested() == 0
    assert {*files} == {__file__}  # before and after each call


def test_gradient_through_compiled_code_around_and_inside():
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


# -- torch's loop -----------------------------------------------------------------------------------------------------

PLUGINS = {"ddp": fs.DDPPlugin, "fsdp": fs.FSDPPlugin, "reproducible": partial(fs.FSDPPlugin, reproducible=True)}


class Net(nn.Module):
    """Layers around a function that may be compiled."""

    def __init__(self, act: Callable[..., Any] = torch.tanh, first: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.act, self.first = nn.Linear(3, 4), nn.Linear(4, 1), act, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) if self.first is None else self.first(x, self.a.weight, self.a.bias)
        return self.b(self.act(y))


def trained_in_a_loop(plugin, made, loss=lambda model, x: (model(x) * 2).square().mean(), after=lambda model: model):
    def main():
        model = made()
        booster = fs.Booster(PLUGINS[plugin]())
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        called = after(model)
        for step in range(3):
            x = torch.arange(12.0).view(4, 3).sin() * (step + 1)
            booster.backward(loss(called, x[fs.axis_index("data") * 2 :][:2]), opt)
            opt.step(), opt.zero_grad()
        return {name: x.detach() for name, x in model.unwrap().named_parameters()}

    return fs.run(main, mesh=MESH)


def assert_is_plain(found, plugin):
    for params, expected in zip(found, trained_in_a_loop(plugin, Net), strict=True):
        torch.testing.assert_close(params, expected)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_compile_around_boosted_model_does_not_trace_it(plugin):
    assert_is_plain(trained_in_a_loop(plugin, Net, after=compiled), plugin)
    around = compiled(lambda model, x: (model(x) * 2).square().mean())
    assert_is_plain(trained_in_a_loop(plugin, Net, around), plugin)
    assert counters["stats"]["calls_captured"] >= 3  # what is made of the output


@pytest.mark.parametrize("plugin", PLUGINS)
def test_boosted_model_calls_compiled_functions(plugin):
    assert_is_plain(trained_in_a_loop(plugin, lambda: Net(compiled(torch.tanh))), plugin)
    assert counters["stats"]["calls_captured"] >= 1
    assert_is_plain(
        trained_in_a_loop(plugin, lambda: Net(first=fs.with_unsharded_params(compiled(nn.functional.linear)))), plugin
    )
    assert counters["stats"]["calls_captured"] >= 1


def part_compiled() -> Net:
    model = Net(compiled(nn.Tanh()))  # which has no parameters
    model.a, model.b = compiled(model.a), compiled(model.b)
    return model


def compiled_in_place() -> Net:
    model = Net()
    model.b.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("made", "parts"),
    [(part_compiled, "a"), (lambda: compiled(Net()), "the model"), (compiled_in_place, "b")],
    ids=["parts", "whole", "in place"],
)
def test_boost_of_compiled_module_raises(made, parts):
    with pytest.raises(fs.errors.ModuleError, match=rf"^boost: {parts} is compiled, .* fs.with_unsharded_params\("):
        trained_in_a_loop("ddp", made)


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


def test_compile_around_and_inside_between_processes():
    for plain, *others in run_processes(on_processes, 2):
        assert others == [plain] * 3
