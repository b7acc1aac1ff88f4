"""Lazy models train with the bits of materialized ones, and boost holds one lazy module at a time."""

import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from tests.booster.loops import PLUGINS, Loop, mesh_of, unequal_bits

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
        self.drop = nn.Dropout(0.1)
        if not self.scale.is_meta:
            self.built.add(self)
            self.alive.append(len(self.built))

    def forward(self, x):
        return x + self.drop(
            torch.tanh(self.norm(self.inner(x) * self.table + self.shift)) * self.scale * self.fixed
        )


class Net(nn.Module):
    """Blocks between other layers, of which two are tied; `make` makes a block."""

    def __init__(self, make=Block):
        super().__init__()
        self.copies = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 4, 0.1, batch_first=True), 2
        )
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, WIDE))
        self.blocks = nn.Sequential(*(make(WIDE) for _ in range(4)))
        self.again = nn.Linear(WIDE, WIDE)
        self.last = nn.Linear(WIDE, WIDE)
        self.last.weight = self.again.weight

    def forward(self, x):
        return self.last(self.again(self.blocks(self.first(self.copies(x[:, None])[:, 0]))))


def described(width):
    return fs.lazy(Block, width)


def row():
    return nn.Sequential(
        fs.lazy(nn.Linear, 4, WIDE), *map(described, [WIDE] * 3), fs.lazy(nn.Linear, WIDE, WIDE)
    )


MAKES = {
    "all": lambda: fs.lazy(Net),
    "layers": lambda: Net(described),
    "nested": lambda: fs.lazy(Net, described),
    "row": row,
}


def plugin_of(name, kind):
    of_blocks = (
        {"blocks": "blocks", "sample": torch.ones(2, 4)}
        if name == "stages" and kind != "row"
        else {}
    )
    return PLUGINS[name](**of_blocks, seed=3)


def adamw(model):
    return torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=0.01)


def adagrad(model):
    first, *rest = (x for x in model.parameters() if x.requires_grad)
    return torch.optim.Adagrad(
        [{"params": [first], "lr": 0.5}, {"params": rest}], initial_accumulator_value=0.3
    )


def adafactor(model):
    return torch.optim.Adafactor([x for x in model.parameters() if x.requires_grad], lr=0.1)


def trained(kind, name, optimizer, *, functional, materialize):
    """Return the losses of three steps, and the tensors after them; of the model that was built
    before, or a lazy one.
    """
    plugin = plugin_of(name, kind)
    draws = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 4, generator=draws), torch.randn(8, WIDE, generator=draws))
        for _ in range(3)
    ]

    def make():
        torch.manual_seed(1)  # for layers that are not lazy
        model = MAKES[kind]()
        return fs.nn.materialize(model, seed=plugin.seed) if materialize else model

    if functional:
        booster = fs.Booster(plugin)
        model = make()
        losses = []
        state = booster.init(model, optimizer(model), nn.MSELoss())
        for batch in batches:
            state, metrics = booster.step(state, batch)
            losses.append(float(metrics["loss"]))
        trees = fs.unshard(state.params if isinstance(state.params, list) else [state.params])
        return losses, {key: x for tree in trees for key, x in tree.items()}
    loop = Loop(make, plugin, optimizer, criterion=nn.MSELoss())
    return [loop.step(*map(loop.part, batch)).item() for batch in batches], loop.state()


@pytest.mark.parametrize(
    ("kind", "plugin", "functional", "optimizer"),
    [
        ("all", "ddp", False, adafactor),
        ("all", "stages", False, adamw),
        ("all", "fsdp", True, adamw),
        ("layers", "zero 2", False, adagrad),
        ("layers", "stages", True, adamw),
        ("nested", "fsdp", False, adamw),
        ("nested", "ddp", True, adamw),
        ("row", "stages", False, adamw),
        ("row", "fsdp", False, adagrad),
        ("row", "zero 2", True, adamw),
    ],
)
def test_lazy_model_trains_as_materialized_one(kind, plugin, functional, optimizer):
    def both():
        options = {"functional": functional}
        return [
            trained(kind, plugin, optimizer, materialize=materialize, **options)
            for materialize in (False, True)
        ]

    for (losses, state), (expected_losses, expected) in fs.run(
        both, mesh=mesh_of(plugin_of(plugin, kind), 4)
    ):
        assert losses == expected_losses and state.keys() == expected.keys()
        assert unequal_bits(state, expected) == []


def counting(calls):
    if not torch.empty(()).is_meta:
        calls.append(1)
    return nn.Linear(4, 4)


def layers_built_here():
    """Return how many of four layers this process builds, sharded and in two stages."""
    calls = {"fsdp": [], "stages": []}
    for name, made in calls.items():
        fs.Booster(plugin_of(name, "row")).boost(
            nn.Sequential(*(fs.lazy(counting, made) for _ in range(4)))
        )
    return [len(made) for made in calls.values()]


def test_processes_build_only_layers_of_their_stages(four):
    assert four.run(layers_built_here) == [[4, 2]] * 4


@pytest.mark.parametrize("plugin", ["fsdp", "stages"])
def test_boost_holds_one_lazy_block_at_a_time(plugin):
    Block.alive.clear()
    chosen = plugin_of(plugin, "layers")
    mesh = mesh_of(chosen, 2)
    fs.run(lambda: fs.Booster(chosen).boost(Net(described))[0] and None, mesh=mesh)
    assert len(Block.alive) >= 4 and max(Block.alive) <= mesh.size


def test_shard_params_builds_lazy_layers():
    mesh = fs.make_mesh({"data": 2})
    model = Net(described)
    Block.alive.clear()
    params = fs.shard_params(model, fs.fsdp("data"), mesh=mesh, seed=5)
    assert Block.alive == [1] * 4
    expected = dict(fs.nn.materialize(model, seed=5).named_parameters())
    assert params.keys() == expected.keys() and not unequal_bits(fs.unshard(params), expected)
    assert params["blocks.0.fixed"].layout.frozen and not params["blocks.0.scale"].layout.frozen
    assert fs.unshard(fs.shard_params(nn.Linear(1, 1), P(), mesh=mesh, seed=0)).keys() == {
        "weight",
        "bias",
    }


@pytest.mark.parametrize(
    ("tree", "options", "message"),
    [
        (
            {"w": torch.ones(1)},
            {"seed": 0},
            "seed= draws lazy layers of a module; a tree of tensors has none",
        ),
        (row(), {}, "a meta tensor .* has no values.*seed=0"),
        (
            nn.Linear(2, 2, device="meta"),
            {"seed": 0},
            "shard_params of Linear: weight, bias must be described",
        ),
    ],
    ids=["tensors", "no seed", "meta"],
)
def test_shard_params_of_meta_tensors_raises(tree, options, message):
    with pytest.raises((ValueError, fs.errors.ModuleError), match=message):
        fs.shard_params(tree, P(), mesh=fs.make_mesh({"data": 2}), **options)


def test_lazy_layer_keeps_dtype_mode_and_frozen_parameters():
    def boosted():
        model = nn.Sequential(
            fs.lazy(nn.Linear, 4, 4), fs.lazy(nn.Linear, 4, 4).double(), fs.lazy(Block, 4).eval()
        )
        model[0].weight.requires_grad_(False)
        built = fs.nn.materialize(model, seed=0)
        return fs.Booster(fs.FSDPPlugin()).boost(model, adamw(model[1]))[0].unwrap(), built

    for model, built in fs.run(boosted, mesh=fs.make_mesh({"data": 2})):
        assert model[1].weight.dtype is torch.float64
        assert not model[0].weight.requires_grad and not model[2].training
        assert not unequal_bits(model.state_dict(), built.state_dict())
        assert torch.equal(model[2].shift, built[2].shift)


def test_lazy_factory_that_reads_values_raises_with_fix():
    def deep(device):
        return nn.ModuleList(
            nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.5, 3, device=device)
        )

    with pytest.raises(RuntimeError) as error:
        fs.lazy(deep, None)
    assert 'with device="cpu"' in error.value.__notes__[0]
    assert [layer.p for layer in fs.lazy(deep, "cpu")] == [0, 0.25, 0.5]
