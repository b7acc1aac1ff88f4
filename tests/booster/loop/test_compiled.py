"""torch.compile of a model or its blocks, before and after boost: one graph, and the losses of the
plain loop.

The oracle is the same loop in plain torch without torch.compile; the backend counts graphs and runs
them as they are.
"""

from itertools import cycle, product

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import fshard as fs
from tests.helpers.sampled import thorough

pytestmark = [
    # torch's compiler reads .grad of its inputs and hides this warning, but not where it is an
    # error
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a"),
]

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 3
PLUGINS = {"ddp": fs.DDPPlugin(), "zero 2": fs.ZeroPlugin(stage=2), "zero 3": fs.FSDPPlugin()}


class Feedforward(nn.Module):
    """A module of an own class inside of a block."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.feedforward = Feedforward()

    def forward(self, x):
        return x + self.feedforward(self.norm(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def as_it_is(model, backend):
    return model


def with_wrapped_blocks(model, backend):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return model


def with_compiled_blocks(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def compiled(model, backend):
    model.compile(backend=backend)
    return model


def with_blocks_compiled_after_boost(boosted, backend):
    with_compiled_blocks(boosted.module, backend)
    return boosted


WAYS = {
    "blocks wrapped before": (with_wrapped_blocks, as_it_is),
    "blocks in place before": (with_compiled_blocks, as_it_is),
    "model wrapped before": (wrapped, as_it_is),
    "model in place before": (compiled, as_it_is),
    "blocks in place after": (as_it_is, with_blocks_compiled_after_boost),
    "model in place after": (as_it_is, compiled),
}


def losses_of_plain_loop():
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(INPUTS), LABELS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of_boosted_loop(plugin, before, after, backend):
    model = before(Network(), backend)
    booster = fs.Booster(plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    model = after(model, backend)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(INPUTS), LABELS)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [*model.state_dict()]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


# Each way with one plugin, and each plugin with two ways.
COMBINATIONS = [*zip(WAYS, cycle(PLUGINS), strict=False)]
OTHERS = [pair for pair in product(WAYS, PLUGINS) if pair not in COMBINATIONS]


@pytest.mark.parametrize(
    ("way", "plugin"), [*COMBINATIONS, *[thorough(way, plugin) for way, plugin in OTHERS]]
)
def test_compiled_model_is_one_graph_with_the_losses_of_the_plain_loop(way, plugin):
    """All blocks are of one class, so one graph serves them: their parameters are its inputs."""
    backend = CompileCounter()
    mesh = fs.make_mesh({"data": 2})
    results = fs.run(
        lambda: losses_of_boosted_loop(PLUGINS[plugin], *WAYS[way], backend), mesh=mesh
    )
    for losses, names in results:
        torch.testing.assert_close(losses, losses_of_plain_loop())
        assert names == [*Network().state_dict()]
    assert backend.frame_count == 1


@pytest.mark.parametrize("options", [{"tensor": 2}, {"pipeline": 2, "microbatches": 2}], ids=str)
def test_compiled_blocks_run_uncompiled_by_plans_and_in_stages(options):
    plugin = fs.HybridParallelPlugin(**options, sample=INPUTS[:4], blocks="blocks")

    def boost():
        model = with_wrapped_blocks(Network(), "eager")
        fs.Booster(plugin).boost(model, torch.optim.SGD(model.parameters(), 0.1))

    with pytest.warns(UserWarning, match=r"torch.compile of blocks.0, .* has no effect"):
        fs.run(boost, mesh=fs.make_mesh({"all": 2}))


def test_block_wrapped_after_boost_raises_as_a_replaced_layer_does():
    def wrap(boosted, backend):
        with_wrapped_blocks(boosted.module, backend)
        return boosted

    with pytest.raises(fs.errors.ModuleError, match="replaced after boost"):
        fs.run(
            lambda: losses_of_boosted_loop(fs.FSDPPlugin(), as_it_is, wrap, "eager"),
            mesh=fs.make_mesh({"data": 1}),
        )
