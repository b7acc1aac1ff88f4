"""Models of lazy layers are boosted: each tensor is made where its pieces lie, with the bits of the model that was built."""

import random
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard import P
from fshard.testing.processes import run_processes
from fshard.transforms import lazy

WIDE = 8


class Block(nn.Module):
    """Has what a layer may have; counts where it is made."""

    made: ClassVar[list[str]] = []

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        nn.init.trunc_normal_(self.inner.weight, std=0.3)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.randn(width))
        self.fixed = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("shift", torch.rand(width), persistent=False)
        self.table, self.rows = torch.arange(width) * torch.rand(width), [torch.ones(width), torch.rand(width)]
        self.drop = nn.Dropout(0.1)
        self.made.append(torch.empty(()).device.type)

    def forward(self, x):
        y = self.norm(self.inner(x) * self.table + self.shift) * self.rows[1]
        return x + self.drop(torch.tanh(y) * self.scale * self.fixed)


class Net(nn.Module):
    """Blocks between layers of which two are tied; `make` makes a block."""

    def __init__(self, make=Block):
        super().__init__()
        self.copies = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, 0.1, batch_first=True), 2)
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, WIDE))
        self.blocks = nn.Sequential(*(make(WIDE) for _ in range(4)))
        self.again, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.last.weight = self.again.weight

    def forward(self, x):
        return self.last(self.again(self.blocks(self.first(self.copies(x[:, None])[:, 0]))))


def described(width):
    return fs.lazy(Block, width)


def a_row():
    return nn.Sequential(fs.lazy(nn.Linear, 4, WIDE), *map(described, [WIDE] * 3), fs.lazy(nn.Linear, WIDE, WIDE))


KINDS = {
    "whole": lambda: fs.lazy(Net),
    "layers": lambda: Net(described),
    "nested": lambda: fs.lazy(Net, described),
    "row": a_row,
}
PLUGINS = {
    "ddp": lambda kind: fs.DDPPlugin(seed=3),
    "zero2": lambda kind: fs.ZeroPlugin(stage=2),
    "fsdp": lambda kind: fs.FSDPPlugin(seed=3),
    "stages": lambda kind: fs.HybridParallelPlugin(
        pipeline=2, zero_stage=3, microbatches=2, schedule="interleaved", **({} if kind == "row" else HALF)
    ),
}
HALF = {"blocks": "blocks", "sample": torch.ones(2, 4)}


def trained_of(params):
    return [x for x in params if x.requires_grad]


def adamw(params):
    return torch.optim.AdamW(trained_of(params), lr=0.01)


def trained(kind, plugin, *, built, make_optimizer=adamw, functional=False, mesh=None):
    """Return losses and the model after three steps; `built`: the model is built before."""
    torch.manual_seed(1)  # for layers that are not lazy
    plugin = PLUGINS[plugin](kind) if isinstance(plugin, str) else plugin
    model, booster = KINDS[kind](), fs.Booster(plugin=plugin)
    if built:
        model = fs.built(model, seed=plugin.seed)
    optimizer, criterion, losses = make_optimizer(model.parameters()), nn.MSELoss(), []
    draws = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 4, generator=draws), torch.randn(8, WIDE, generator=draws)) for _ in range(3)]
    if functional:
        state = booster.init(model, optimizer, criterion)
        for batch in data:
            state, metrics = booster.step(state, batch)
            losses.append(float(metrics["loss"]))
        trees = fs.unshard(state.params if isinstance(state.params, list) else [state.params])
        return losses, {name: x for tree in trees for name, x in tree.items()}
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion)
    for x, y in data:
        if plugin.in_stages():
            losses.append(booster.execute_pipeline(iter([(x, y)]), model, criterion, optimizer)["loss"].item())
        else:
            size = 8 // plugin.laid_on().size
            place = dist.get_rank() if dist.is_initialized() else fs.axis_index("data")
            here = slice(place * size, (place + 1) * size)
            loss = criterion(model(x[here]), y[here])
            booster.backward(loss, optimizer)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: x.detach() for name, x in model.unwrap().state_dict().items()}


def same(one, other):
    (losses, tensors), (others, expected) = one, other
    assert losses == others and tensors.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in tensors.items())
    assert not any(x.is_meta for x in tensors.values())


CASES = [(kind, plugin, False) for kind in KINDS for plugin in PLUGINS]
CASES += [(kind, "stages", True) for kind in KINDS] + [
    ("nested", plugin, True) for plugin in PLUGINS if plugin != "stages"
]


@pytest.mark.parametrize(("kind", "plugin", "functional"), CASES)
def test_a_lazy_model_trains_as_the_one_that_was_built(kind, plugin, functional):
    stages = plugin == "stages"
    mesh = fs.make_mesh({"data": 2, "pipe": 2}) if stages else fs.make_mesh({"data": 2})

    def both():
        return [trained(kind, plugin, built=built, functional=functional) for built in (False, True)]

    for own, expected in fs.run(both, mesh=mesh):
        same(own, expected)


def in_processes(plugin):
    own = trained("layers", plugin, built=False)
    return own, trained("layers", plugin, built=True), made_here(plugin)


def noted(made):
    if not torch.empty(()).is_meta:
        made.append(1)
    return nn.Linear(4, 4)


def made_here(plugin):
    """Return how many of four layers this process makes."""
    made: list[int] = []
    model = nn.Sequential(*(fs.lazy(noted, made) for _ in range(4)))
    fs.Booster(plugin=PLUGINS[plugin]("row")).boost(model)
    return len(made)


@pytest.mark.parametrize("plugin", ["fsdp", "stages"])
def test_so_in_processes_and_a_stage_makes_its_own_blocks_alone(plugin, four):
    found = four.run(in_processes, plugin)
    for own, expected, made in found:
        same(own, expected)
        assert made == {"fsdp": 4, "stages": 2}[plugin]


CLASSES = [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor]


@pytest.mark.parametrize("cls", CLASSES)
def test_optimizers_of_torch_have_parameters_without_memory(cls):
    def groups(params):
        first, *others = (x for x in params if x.requires_grad)
        options = {"initial_accumulator_value": 0.3} if cls is torch.optim.Adagrad else {}
        return cls([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1, **options)

    def both():
        return [trained("row", "fsdp", built=built, make_optimizer=groups) for built in (False, True)]

    same(*fs.run(both, mesh=fs.make_mesh({"data": 2}))[0])


class Alive:
    """Counts tensors that were handed over and are still there."""

    def __init__(self, monkeypatch, where):
        self.most, self._alive, self._fill = 0, [], lazy.fill
        monkeypatch.setattr(where, "fill", self)

    def __call__(self, laid, made):
        self._alive.append(weakref.ref(made))
        self.most = max(self.most, sum(x() is not None for x in self._alive))
        self._fill(laid, made)

    def __len__(self):
        return len(self._alive)


@pytest.mark.parametrize("plugin", ["fsdp", "stages"])
def test_no_device_has_two_whole_tensors_at_once(plugin, monkeypatch):
    alive = Alive(monkeypatch, fs.transforms.laying)
    mesh = fs.make_mesh({"data": 2, "pipe": 2}) if plugin == "stages" else fs.make_mesh({"data": 1})

    def boosted():
        fs.Booster(plugin=PLUGINS[plugin]("whole")).boost(fs.lazy(Net))

    fs.run(boosted, mesh=mesh)
    assert len(alive) > 20 and alive.most == 1


def test_a_module_is_laid_tensor_after_tensor(monkeypatch):
    alive, mesh = Alive(monkeypatch, fs.transforms.rules), fs.make_mesh({"data": 2})
    model = Net(described)
    params = fs.shard_params(model, fs.fsdp("data"), mesh=mesh, seed=5)
    expected = dict(fs.built(model, seed=5).named_parameters())
    assert params.keys() == expected.keys() and alive.most == 1
    assert all(torch.equal(fs.unshard(params[name]), x) for name, x in expected.items())
    assert params["blocks.0.fixed"].layout.frozen and not params["blocks.0.scale"].layout.frozen
    with pytest.raises(fs.LayoutError, match="seed= draws lazy layers of a module; a tree of tensors has none"):
        fs.shard_params({"w": torch.ones(1)}, P(), mesh=mesh, seed=0)
    with pytest.raises(fs.LayoutError, match="a meta tensor .* has no values.*seed=0"):
        fs.shard_params(model, fs.fsdp("data"), mesh=mesh)
    with pytest.raises(fs.ModuleError, match="shard_params of Linear: weight, bias has no memory, and nobody says"):
        fs.shard_params(nn.Linear(2, 2, device="meta"), P(), mesh=mesh, seed=0)
    assert fs.unshard(fs.shard_params(nn.Linear(1, 1), P(), mesh=mesh, seed=0)).keys() == {"weight", "bias"}


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def of_wide_tensors():
    return nn.ParameterList(nn.Parameter(torch.randn(1 << 20) * 0.02) for _ in range(64))


def most_resident():
    model, most, before = fs.lazy(of_wide_tensors), 0, resident()

    def take(name, made):
        nonlocal most
        most = max(most, resident() - before)

    lazy.draw(model, 0, lazy.without_memory(model), take)
    return most


def test_memory_that_was_let_go_goes_back():
    """Between draws of 4 MiB small things come to lie, so the C library would keep nearly all of 256 MiB."""
    (most,) = run_processes(most_resident, 1)
    assert 0 < most < 128 << 20


def from_file(path):
    layer = nn.Linear(4, WIDE)
    if not layer.weight.is_meta:
        layer.load_state_dict(torch.load(path))
    return layer


def test_a_layer_may_be_read_from_a_file(tmp_path):
    torch.save(nn.Linear(4, WIDE).state_dict(), tmp_path / "layer.pt")
    expected = torch.load(tmp_path / "layer.pt")

    def boosted():
        model = nn.Sequential(fs.lazy(from_file, tmp_path / "layer.pt"), fs.lazy(nn.Linear, WIDE, 2))
        return fs.Booster(plugin=fs.FSDPPlugin(seed=1)).boost(model)[0].unwrap(), fs.built(model, seed=1)

    for model, built in fs.run(boosted, mesh=fs.make_mesh({"data": 2})):
        assert torch.equal(model[0].weight, expected["weight"]) and torch.equal(model[0].bias, expected["bias"])
        assert torch.equal(model[1].weight, built[1].weight)


def test_what_a_factory_raises_is_raised():
    def broken():
        if torch.empty(()).is_meta:
            return nn.Linear(2, 2)
        raise KeyError("mine")

    booster = fs.Booster(plugin=fs.FSDPPlugin(mesh=fs.make_mesh({"data": 2})))
    with pytest.raises(KeyError, match="mine"):
        booster.init(fs.lazy(broken), fs.optim.sgd(0.1))


def test_what_was_done_to_a_lazy_layer_counts():
    def boosted():
        model = nn.Sequential(fs.lazy(nn.Linear, 4, 4), fs.lazy(nn.Linear, 4, 4).double(), fs.lazy(Block, 4).eval())
        model[0].weight.requires_grad_(False)
        stand_in = fs.Booster(plugin=fs.FSDPPlugin()).boost(model, torch.optim.SGD(model[1].parameters(), lr=0.1))[0]
        bare = stand_in.module
        assert bare[1].weight.dtype is torch.float64 and not bare[2].training and not bare[0].weight.requires_grad
        assert bare[0].weight.device == torch.device("cpu") and not bare[2].table.is_meta
        return stand_in.unwrap(), fs.built(model, seed=0)

    for model, built in fs.run(boosted, mesh=fs.make_mesh({"data": 2})):
        assert not model[0].weight.requires_grad and not model[2].training
        for one, other in zip(model.parameters(), built.parameters(), strict=True):
            assert one.dtype is other.dtype and torch.equal(one, other)
        assert torch.equal(model[2].rows[1], built[2].rows[1])


def test_two_models_of_a_booster_are_drawn_otherwise():
    def boosted():
        booster = fs.Booster()
        first, second = (booster.boost(fs.lazy(nn.Linear, 4, 4))[0].unwrap() for _ in range(2))
        return first.weight, second.weight

    for first, second in fs.run(boosted, mesh=fs.make_mesh({"data": 2})):
        assert torch.equal(first, fs.built(fs.lazy(nn.Linear, 4, 4), seed=0).weight)
        assert not torch.equal(first, second)


def test_lora_of_lazy_layers():
    def boosted():
        torch.manual_seed(0)
        booster = fs.Booster(plugin=fs.FSDPPlugin())
        model = booster.enable_lora(nn.Sequential(fs.lazy(nn.Linear, 4, 4)), fs.LoraConfig(r=2))
        return booster.boost(model, adamw(model.parameters()))[0](torch.ones(2, 4)), fs.built(model, seed=0)

    for output, built in fs.run(boosted, mesh=fs.make_mesh({"data": 2})):
        assert torch.equal(output, built(torch.ones(2, 4)))


def test_who_advises_a_plugin_gives_one_that_takes_the_model():
    model, mesh = nn.Sequential(*(fs.lazy(nn.Linear, 64, 64) for _ in range(8))), fs.make_mesh({"data": 4})
    plugin = fs.auto_plugin(model, mesh, memory=200_000)
    assert isinstance(plugin, fs.FSDPPlugin)

    def boosted():
        return fs.Booster(plugin=plugin).boost(model)[0](torch.ones(1, 64))

    assert torch.equal(fs.run(boosted, mesh=mesh)[0], fs.built(model, seed=0)(torch.ones(1, 64)))


def test_measured_balances_ask_for_memory():
    layers = nn.Sequential(*(fs.lazy(nn.Linear, 2, 2) for _ in range(2)))
    for balance in ("time", "memory"):
        with pytest.raises(
            fs.LayoutError, match=f'balance="{balance}" is measured, and weight, bias, weight .4 in all'
        ):
            fs.split_stages(layers, 2, balance, sample=torch.ones(1, 2))


def test_what_nobody_describes_is_named_before_anything_is_made():
    Block.made.clear()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), fs.lazy(Block, 2))
        model[1].extra = nn.Parameter(torch.ones(2))
    with pytest.raises(
        fs.ModuleError, match=r"boost: 0\.weight, 0\.bias, 1\.extra of the model have no memory, and nobody"
    ):
        fs.Booster(plugin=fs.DDPPlugin(mesh=fs.make_mesh({"data": 1}))).boost(model)
    assert Block.made == ["meta"]


class Row(NamedTuple):
    x: torch.Tensor


class Holding(nn.Module):
    """Keeps tensors in what an attribute leads to."""

    def __init__(self, make, take):
        super().__init__()
        self.linear, self.held, self.take = nn.Linear(4, 4), make(), take

    def forward(self, x):
        return self.linear(x) * self.take(self.held)


HOLDERS = {
    "object": (lambda: SimpleNamespace(x=torch.rand(4), rows=[torch.rand(4)]), lambda held: held.x + held.rows[0]),
    "tuples": (lambda: {"a": ((torch.rand(4), 1),), 3: Row(torch.rand(4))}, lambda held: held["a"][0][0] + held[3].x),
    "deque": (lambda: deque([torch.rand(4)]), lambda held: held[0]),
    "partial": (lambda: partial(torch.mul, torch.rand(4)), lambda held: held(2.0)),
}


@pytest.mark.parametrize("plugin", ["fsdp", "stages"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_tensors_are_made_wherever_a_copy_has_its_own(holder, plugin):
    KINDS["holding"] = lambda: nn.Sequential(fs.lazy(Holding, *HOLDERS[holder]), fs.lazy(nn.Linear, 4, WIDE))
    mesh = fs.make_mesh({"data": 2, "pipe": 2}) if plugin == "stages" else fs.make_mesh({"data": 2})
    two = fs.HybridParallelPlugin(pipeline=2, zero_stage=3, microbatches=2)

    def both():
        return [trained("holding", two if plugin == "stages" else plugin, built=built) for built in (False, True)]

    for own, expected in fs.run(both, mesh=mesh):
        same(own, expected)


def in_a_function():
    x = torch.rand(4)
    return lambda: x


@pytest.mark.parametrize("make", [in_a_function, lambda: {torch.rand(4)}, lambda: [nn.Linear(4, 4)]])
def test_tensors_that_nobody_would_make_are_told(make):
    model = nn.Sequential(fs.lazy(Holding, make, len))
    mesh = fs.make_mesh({"data": 1})
    for begin in (fs.Booster(fs.DDPPlugin(mesh=mesh)).boost, partial(fs.built, seed=0)):
        with pytest.raises(
            fs.ModuleError, match=r"of Sequential: 0\.held leads to tensors without memory that nobody would"
        ):
            begin(model)
    model[0].held = None
    fs.built(model, seed=0)


class Teaching(nn.Module):
    """Refers to itself and to all that is around it, as is usual."""

    def __init__(self):
        super().__init__()
        self.linear = fs.lazy(nn.Linear, 4, 4)
        self.back, self.named, self.first = [self], {"linear": self.linear}, lambda x: self.linear(x)

    def forward(self, x):
        return self.first(x)


def test_who_leads_to_parameters_of_the_model_is_not():
    model = nn.Sequential(fs.lazy(Teaching))
    built = fs.built(model, seed=0)
    assert built[0].named["linear"] is built[0].linear and not built[0].first(torch.ones(4)).is_meta


class ByOthers(nn.Module):
    """Draws by numpy and by Python."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(np.random.rand(4), dtype=torch.float32))
        self.order = nn.Parameter(torch.tensor(random.sample(range(4), 4)), requires_grad=False)

    def forward(self, x):
        return x[:, self.order] * self.weight


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_numpy_and_python_draw_by_the_name_of_the_layer_too(plugin):
    KINDS["others"] = lambda: nn.Sequential(fs.lazy(ByOthers), fs.lazy(ByOthers), fs.lazy(nn.Linear, 4, WIDE))

    def both():
        return [trained("others", plugin, built=built) for built in (False, True)]

    for own, expected in fs.run(both, mesh=fs.make_mesh({"data": 2})):
        same(own, expected)
        assert not torch.equal(expected[1]["0.weight"], expected[1]["1.weight"])
    model, states = KINDS["others"](), (random.getstate(), np.random.get_state()[1].tolist())
    fs.built(model, seed=0)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


class Counted(nn.Module):
    count: ClassVar[list[int]] = []

    def __init__(self):
        super().__init__()
        self.count.append(1)
        self.register_parameter(f"weight{len(self.count)}", nn.Parameter(torch.ones(2)))


def test_a_factory_that_makes_something_else_the_second_time_is_told():
    model = nn.Sequential(fs.lazy(Counted))
    with pytest.raises(
        fs.ModuleError, match=r"fs.built of Sequential: 0\.weight1 was not made again\. The factory of a lazy layer"
    ):
        fs.built(model, seed=0)


def test_who_looks_at_numbers_is_told_what_to_do():
    def deep(device):
        return nn.ModuleList(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.5, 3, device=device))

    with pytest.raises(RuntimeError) as error:
        fs.lazy(deep, None)
    assert 'make those that it looks at with device="cpu"' in error.value.__notes__[0]
    assert [layer.p for layer in fs.lazy(deep, "cpu")] == [0, 0.25, 0.5]


def test_hooks_of_parameters_stay_in_what_is_built():
    def hooked():
        layer = nn.Linear(2, 1)
        layer.weight.register_hook(lambda grad: grad * 2)
        layer.bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", None))
        return layer

    layer = fs.built(fs.lazy(hooked), seed=0)
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad.tolist() == [[2, 2]] and layer.bias.grad is None


class Momentum(torch.optim.Optimizer):
    """Begins with a state, which the constructor makes by something that may stand nowhere else."""

    def __init__(self, params, lr, make=torch.zeros_like):
        super().__init__(params, {"lr": lr})
        for param in (x for group in self.param_groups for x in group["params"]):
            self.state[param]["kept"] = make(param)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (x for x in group["params"] if x.grad is not None):
                kept = self.state[param]["kept"].mul_(0.9).add_(param.grad)
                param.add_(kept, alpha=-group["lr"])


class Plain(Momentum):
    def __init__(self, params, lr):
        super().__init__(params, lr)


class Slow(Momentum):
    def __init__(self, params, lr):
        super().__init__(params, lr, lambda param: param.detach().clone())


class Renamed(Momentum):
    def __init__(self, params, rate):
        super().__init__(params, rate)


OWN = [
    (lambda params: Momentum(params, 0.1, partial(torch.full_like, fill_value=0.3)), "was made without memory"),
    (lambda params: Slow(params, 0.1), 'state\\[param\\]\\["kept"\\] would be lost'),
    (lambda params: Renamed(params, rate=0.1), "was made without memory"),
]


def test_a_state_of_ones_own_optimizer_is_made_anew_where_its_options_say_how():
    def both():
        return [
            trained("row", "fsdp", built=built, make_optimizer=lambda params: Plain(trained_of(params), 0.1))
            for built in (False, True)
        ]

    same(*fs.run(both, mesh=fs.make_mesh({"data": 2}))[0])


@pytest.mark.parametrize(("make", "message"), OWN)
def test_and_refused_where_they_do_not(make, message):
    model, booster = a_row(), fs.Booster(fs.FSDPPlugin(mesh=fs.make_mesh({"data": 2})))
    with pytest.raises(fs.OptimizerError, match=message):
        booster.init(model, make(model.parameters()), nn.MSELoss())


def test_templates_without_memory_of_models_that_are_not_lazy_stay():
    class Shaped(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.template, self.templates = torch.empty(3, device="meta"), {torch.empty(2, device="meta")}

        def forward(self, x):
            return super().forward(x) * len(self.template) * len(self.templates)

    def boosted():
        torch.manual_seed(0)
        model = Shaped()
        expected = model(torch.ones(1, 4))
        return torch.equal(fs.Booster(plugin=fs.FSDPPlugin()).boost(model)[0](torch.ones(1, 4)), expected)

    assert fs.run(boosted, mesh=fs.make_mesh({"data": 2})) == [True, True]
