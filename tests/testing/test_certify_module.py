"""`certify_module` passes modules whose training is sharded right, and names the leaf and step
where it is not.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from fshard.tensor.layer_plans import parts_class
from fshard.testing import certify_module
from fshard.testing.certify.runs import shards_of

DRAW = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(8, 4, generator=DRAW), torch.randn(8, 2, generator=DRAW)) for _ in range(3)]
PLUGINS = {"ddp": fs.DDPPlugin(), "zero 2": fs.ZeroPlugin(stage=2), "fsdp": fs.FSDPPlugin()}


class Net(nn.Module):
    """Layers, a buffer that each call moves, and something that a test adds."""

    def __init__(self, more=nn.Identity):
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.more = more()
        self.b = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = torch.tanh(self.a(x))
        output = self.b(self.more(y - self.mean) / (1 + self.calls % 2))
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return output


class Largest(nn.Module):
    """Divides by the largest number that it has ever been given."""

    largest = 0.1

    def forward(self, x):
        self.largest = max(self.largest, x.abs().max().item())
        return x / self.largest


class Tower(nn.Module):
    """Equal layers between two others, of which the first computes on the floats of the input."""

    def __init__(self):
        super().__init__()
        self.read = nn.Conv1d(1, 6, 4)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.read(x.unsqueeze(1)).flatten(1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class FusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1)
        query, key, value = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class FusedTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([FusedAttention() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def net(more=nn.Identity):
    torch.manual_seed(3)
    return Net(more)


def certified(factory, plugin, n=2, batches=BATCHES, **options):
    options = {"loss": nn.MSELoss()} | options
    return certify_module(factory, batches, fs.make_mesh({"data": n}), plugin=plugin, **options)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_certify_module_mean_buffers_and_counters_pass(plugin, n):
    certificate = certified(net, PLUGINS[plugin], n, optimizer=adamw).check()
    assert [row.leaf for row in certificate.rows][-2:] == ["buffers.mean", "loss"]
    assert {row.verdict for row in certificate.rows} <= {"EXACT", "BOUNDED"}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_certify_module_state_in_attribute_diverges(plugin):
    first = certified(lambda: net(Largest), PLUGINS[plugin]).first
    assert first is not None and first.verdict == "DIVERGENT" and first.step == 0
    assert "register it as a buffer" in first.reason


def test_certify_module_batchnorm_must_be_synchronised():
    first = certified(lambda: net(lambda: nn.BatchNorm1d(6)), fs.FSDPPlugin()).first
    assert (
        first is not None and first.verdict == "DIVERGENT" and "sync_batchnorm=True" in first.reason
    )
    certified(lambda: net(lambda: nn.BatchNorm1d(6)), fs.FSDPPlugin(sync_batchnorm=True)).check()


def test_certify_module_dropout_needs_reproducible_mode():
    with pytest.raises(
        fs.errors.PromiseError, match="For dropout give a plugin with reproducible=True"
    ):
        certified(lambda: net(nn.Dropout), fs.FSDPPlugin())
    rows = certified(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 2)),
        fs.FSDPPlugin(reproducible=True),
    )
    assert {row.verdict for row in rows.check().rows} == {"EXACT"}


def test_certify_module_takes_loss_from_the_output():
    batches = [{"x": x, "y": y} for x, y in BATCHES]

    class Scored(nn.Sequential):
        def forward(self, x, y):
            return SimpleNamespace(loss=(super().forward(x) - y).square().mean())

    def factory():
        torch.manual_seed(1)
        return Scored(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    certified(factory, fs.DDPPlugin(), batches=batches, loss=None).check()


def test_certify_module_gives_the_loss_a_batch_that_is_a_dict():
    batches = [{"input": x} for x, _ in BATCHES]

    def factory():
        torch.manual_seed(1)
        return nn.Linear(4, 2)

    def loss(output, batch):
        return (output - batch["input"][:, :2]).square().mean()

    certified(factory, fs.DDPPlugin(), batches=batches, loss=loss).check()


@pytest.mark.parametrize("tensor", [1, 2])
def test_certify_module_takes_a_sample_in_the_dtype_of_the_module(tensor):
    def factory():
        torch.manual_seed(1)
        return Tower()

    parallelism = fs.Parallelism(data=1, pipeline=2, tensor=tensor)
    plugin = fs.HybridParallelPlugin(parallelism, sample=(BATCHES[0][0],), blocks="blocks")
    mesh = parallelism.mesh()

    certify_module(factory, BATCHES, mesh, loss=nn.MSELoss(), plugin=plugin).check()


def test_certify_module_compares_the_parts_of_a_fused_weight():
    parallelism = fs.Parallelism(data=1, pipeline=2, tensor=2)
    sample = (torch.randn(1, 3, 4, generator=DRAW),)
    plugin = fs.HybridParallelPlugin(parallelism, sample=sample, blocks="blocks")
    x = torch.randn(4, 3, 4, generator=DRAW)
    mesh = parallelism.mesh()

    def factory():
        torch.manual_seed(1)
        return FusedTower()

    certificate = certify_module(factory, [(x, x)], mesh, loss=nn.MSELoss(), plugin=plugin)

    assert certificate.ok
    verdicts = {row.leaf: row.verdict for row in certificate.rows}
    assert verdicts["blocks.0.qkv.weight"] in ("EXACT", "BOUNDED")


def test_shards_of_a_fused_weight_are_cut_from_its_parts():
    full = torch.arange(12.0).reshape(6, 2)
    mesh = fs.make_mesh({"model": 2})
    kind = parts_class(0, 2)
    parts = kind(*[fs.device_put(x, fs.Layout(mesh, P("model"))) for x in full.split([2, 4])])
    equal = shards_of(parts)

    assert [x.tolist() for x in equal.cut(full)] == [x.tolist() for x in equal.shards]
    assert float(equal.errors(full + 1).max()) == 1.0


def test_certify_module_unseeded_factory_raises():
    drawn = iter(range(10))

    def factory():
        torch.manual_seed(next(drawn))
        return Net()

    with pytest.raises(
        fs.errors.PromiseError, match="factory must build equal parameters each time"
    ):
        certified(factory, fs.DDPPlugin())
