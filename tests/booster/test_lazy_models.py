"""Lazy models train with the bits of materialized ones, and boost holds one lazy module at a time."""

import weakref
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard import P

WIDE = 8


class Block(nn.Module):
    """A block with frozen parameters and buffers; notes the blocks that have memory."""

    alive: ClassVar[list[int]] = []
    built: ClassVar["weakref.WeakSet[Block]"] = weakref.WeakSet()

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        nn.init.trunc_normal_(self.inner.weight, std=0.3)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.randn(width))
        self.fixed = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("shift", torch.rand(width), persistent=False)
        self.register_buffer("table", torch.arange(width) * torch.rand(width))
        self.register_buffer("row", torch.rand(width), persistent=False)
        self.drop = nn.Dropout(0.1)
        if not self.scale.is_meta:
            self.built.add(self)
            self.alive.append(len(self.built))

    def forward(self, x):
        y = self.norm(self.inner(x) * self.table + self.shift) * self.row
        return x + self.drop(torch.tanh(y) * self.scale * self.fixed)


class Net(nn.Module):
    """Blocks between other layers, of which two are tied; `make` makes a block."""

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
    """Return the losses of three steps, and the tensors after them; `built`: of the model that was built before."""
    torch.manual_seed(1)  # for layers that are not lazy
    plugin = PLUGINS[plugin](kind) if isinstance(plugin, str) else plugin
    model, booster = KINDS[kind](), fs.Booster(plugin=plugin)
    if built:
        model = fs.nn.materialize(model, seed=plugin.seed)
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
            size = 8 // plugin.default_mesh().size
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


CASES = [
    ("whole", "ddp", False),
    ("whole", "stages", False),
    ("whole", "fsdp", True),
    ("layers", "zero2", False),
    ("layers", "stages", True),
    ("nested", "fsdp", False),
    ("nested", "ddp", True),
    ("row", "stages", False),
    ("row", "zero2", True),
]


@pytest.mark.parametrize(("kind", "plugin", "functional"), CASES)
def test_lazy_model_trains_as_materialized_one(kind, plugin, functional):
    mesh = fs.make_mesh({"data": 2, "pipe": 2} if plugin == "stages" else {"data": 2})

    def both():
        return [trained(kind, plugin, built=built, functional=functional) for built in (False, True)]

    for own, expected in fs.run(both, mesh=mesh):
        same(own, expected)


def in_processes():
    return [
        (trained("layers", name, built=False), trained("layers", name, built=True), built_here(name))
        for name in ("fsdp", "stages")
    ]


def counting(made):
    if not torch.empty(()).is_meta:
        made.append(1)
    return nn.Linear(4, 4)


def built_here(plugin):
    """Return how many of four layers this process builds."""
    made: list[int] = []
    model = nn.Sequential(*(fs.lazy(counting, made) for _ in range(4)))
    fs.Booster(plugin=PLUGINS[plugin]("row")).boost(model)
    return len(made)


def test_processes_build_only_layers_of_their_stages(four):
    for sharded, staged in four.run(in_processes):
        same(*sharded[:2])
        same(*staged[:2])
        assert (sharded[2], staged[2]) == (4, 2)


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor])
def test_torch_optimizer_on_lazy_model_trains_as_materialized(cls):
    def groups(params):
        first, *others = (x for x in params if x.requires_grad)
        options = {"initial_accumulator_value": 0.3} if cls is torch.optim.Adagrad else {}
        return cls([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1, **options)

    def both():
        return [trained("row", "fsdp", built=built, make_optimizer=groups) for built in (False, True)]

    same(*fs.run(both, mesh=fs.make_mesh({"data": 2}))[0])


@pytest.mark.parametrize("plugin", ["fsdp", "stages"])
def test_boost_holds_one_lazy_block_at_a_time(plugin):
    Block.alive.clear()
    mesh = fs.make_mesh({"data": 1, "pipe": 2} if plugin == "stages" else {"data": 1})
    options = HALF | {"microbatches": 2, "pipeline": 2}
    chosen = fs.HybridParallelPlugin(**options) if plugin == "stages" else fs.FSDPPlugin()
    fs.run(lambda: fs.Booster(plugin=chosen).boost(Net(described))[0] and None, mesh=mesh)
    assert len(Block.alive) >= 4 and max(Block.alive) <= mesh.size


def test_shard_params_builds_lazy_layers():
    mesh, model = fs.make_mesh({"data": 2}), Net(described)
    Block.alive.clear()
    params = fs.shard_params(model, fs.fsdp("data"), mesh=mesh, seed=5)
    assert Block.alive == [1] * 4
    expected = dict(fs.nn.materialize(model, seed=5).named_parameters())
    assert params.keys() == expected.keys()
    assert all(torch.equal(fs.unshard(params[name]), x) for name, x in expected.items())
    assert params["blocks.0.fixed"].layout.frozen and not params["blocks.0.scale"].layout.frozen
    assert fs.unshard(fs.shard_params(nn.Linear(1, 1), P(), mesh=mesh, seed=0)).keys() == {"weight", "bias"}


def test_shard_params_of_meta_tensors_raises():
    mesh = fs.make_mesh({"data": 2})
    with pytest.raises(ValueError, match="seed= draws lazy layers of a module; a tree of tensors has none"):
        fs.shard_params({"w": torch.ones(1)}, P(), mesh=mesh, seed=0)
    with pytest.raises(ValueError, match="a meta tensor .* has no values.*seed=0"):
        fs.shard_params(Net(described), fs.fsdp("data"), mesh=mesh)
    with pytest.raises(fs.errors.ModuleError, match="shard_params of Linear: weight, bias must be described"):
        fs.shard_params(nn.Linear(2, 2, device="meta"), P(), mesh=mesh, seed=0)


def test_lazy_layer_keeps_dtype_mode_and_frozen_parameters():
    def boosted():
        model = nn.Sequential(fs.lazy(nn.Linear, 4, 4), fs.lazy(nn.Linear, 4, 4).double(), fs.lazy(Block, 4).eval())
        model[0].weight.requires_grad_(False)
        built = fs.nn.materialize(model, seed=0)
        own = fs.Booster(plugin=fs.FSDPPlugin()).boost(model, torch.optim.SGD(model[1].parameters(), lr=0.1))[0]
        return own.unwrap(), built

    for model, built in fs.run(boosted, mesh=fs.make_mesh({"data": 2})):
        assert model[1].weight.dtype is torch.float64
        assert not model[0].weight.requires_grad and not model[2].training
        for one, other in zip(model.parameters(), built.parameters(), strict=True):
            assert one.dtype is other.dtype and torch.equal(one, other)
        assert torch.equal(model[2].table, built[2].table) and torch.equal(model[2].row, built[2].row)


def test_lazy_factory_that_reads_values_raises_with_fix():
    def deep(device):
        return nn.ModuleList(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.5, 3, device=device))

    with pytest.raises(RuntimeError) as error:
        fs.lazy(deep, None)
    assert 'with device="cpu"' in error.value.__notes__[0]
    assert [layer.p for layer in fs.lazy(deep, "cpu")] == [0, 0.25, 0.5]


def test_optimizer_state_made_on_meta_device_raises():
    class Eager(torch.optim.SGD):
        """Makes its state in the constructor."""

        def __init__(self, params):
            super().__init__(params, lr=0.1)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["mean"] = torch.zeros_like(p)

    def main():
        model = nn.Sequential(fs.lazy(nn.Linear, 4, 4))
        fs.Booster(fs.FSDPPlugin()).boost(model, Eager(model.parameters()))

    message = (
        "Eager: state of a lazy parameter must be made in step\\(\\), not by the constructor; got 'mean' without memory"
    )
    with pytest.raises(fs.optim.OptimizerError, match=message):
        fs.run(main, mesh=fs.make_mesh({"data": 1}))
