"""`auto_plugin`: the simplest plugin that fits, by what devices hold."""

import threading
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.booster.advice import budget
from fshard.mesh.layout import flatten
from fshard.optim.torch_instances import optimizer_source

MESH = fs.make_mesh({"data": 4})


def layers(count=8, width=100, device="meta"):
    return nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(count)))


def rows_of(plugin):
    """Return the numbers of a table, by the names of its rows."""
    head, *rows = plugin.why.splitlines()
    names = head.removeprefix("bytes a device").split()[:6]
    counted = [row for row in rows if row.endswith(("fits", "too much"))]
    numbers = {row[:20].strip(): [int(x.replace(",", "")) for x in row[20:].split()[:6]] for row in counted}
    return {name: dict(zip(names, row, strict=True)) for name, row in numbers.items()}


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (1_300_000, fs.DDPPlugin),
        (900_000, partial(fs.ZeroPlugin, stage=1)),
        (700_000, partial(fs.ZeroPlugin, stage=2)),
        (450_000, fs.FSDPPlugin),
        (400_000, partial(fs.HybridParallelPlugin, pipeline=4, microbatches=8, zero_stage=1)),
    ],
)
def test_simplest_plugin_that_fits_is_returned(memory, expected):
    advised = fs.auto_plugin(layers(), MESH, memory)
    assert advised == expected(mesh=None if "Hybrid" in type(advised).__name__ else MESH)
    *rows, last = advised.why.splitlines()[1:]
    assert last.endswith("fits")
    assert all(row.endswith("too much") for row in rows)


def test_model_that_fits_in_no_way_raises_with_the_table():
    with pytest.raises(
        fs.errors.LayoutError, match="fits in no way:\nbytes a device .*\nDDP, stage 0 .*1,292,800  too much"
    ):
        fs.auto_plugin(layers(), MESH, 1000)
    assert isinstance(fs.auto_plugin(layers(), MESH, 2_000_000, activations=1000), fs.DDPPlugin)


# -- what is counted, and what boosted runs hold -----------------------------------------------------------------------


def plain():
    return nn.Sequential(*(nn.Linear(30 + at, 31 + at) for at in range(4)))


def frozen():
    model = plain()
    model[:3].requires_grad_(False)
    return model


def lora():
    return fs.Booster().enable_lora(plain(), fs.nn.LoraConfig(r=2))


def tied():
    model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(4)))
    model[3].weight = model[0].weight
    return model


MODELS = {"plain": plain, "frozen": frozen, "lora": lora, "tied": tied}
OPTIMIZERS = {
    "of all": lambda model: torch.optim.AdamW(model.parameters()),
    "of what is trained": lambda model: torch.optim.AdamW([x for x in model.parameters() if x.requires_grad]),
    "of the last": lambda model: torch.optim.AdamW([x for x in model.parameters() if x.requires_grad][-1:]),
    "a pure one": lambda model: fs.optim.adamw(),
}
PAIRS = [
    ("plain", "of all"),
    ("plain", "of the last"),
    ("frozen", "of all"),
    ("frozen", "a pure one"),
    ("lora", "of what is trained"),
    ("tied", "of all"),
    ("tied", "of the last"),
]
PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 1": partial(fs.ZeroPlugin, stage=1),
    "zero 2": partial(fs.ZeroPlugin, stage=2),
    "fsdp": fs.FSDPPlugin,
    "stages, zero 1": partial(fs.HybridParallelPlugin, pipeline=2, microbatches=4, zero_stage=1),
    "stages, zero 3": partial(fs.HybridParallelPlugin, pipeline=2, microbatches=4, zero_stage=3),
    "stages in loops": partial(
        fs.HybridParallelPlugin, pipeline=2, microbatches=4, zero_stage=1, schedule="interleaved", chunks=2
    ),
}


def mesh_of(plugin, runtime="virtual"):
    return fs.make_mesh({"data": 2, "pipe": 2} if plugin.in_stages() else {"data": 4}, runtime=runtime)


def counted(plugin, model, opt, activations=0):
    how = plugin.arranged(mesh_of(plugin, "abstract"))
    return budget(how, model, optimizer_source(opt, dict(model.named_parameters()), "counted"), activations)


def held(tree):
    """Return the bytes of a device in a tree of what it has."""
    found = {id(x.shards[0]): x for x in flatten(tree, sharded_is_leaf=True)[0] if isinstance(x, fs.Sharded)}
    return sum(x.shards[0].nbytes for x in found.values())


def step(plugin, model, opt, width=30, look=lambda: None):
    """Return for the calling device the bytes of parameters, gradients and state in a step, and what `look` has seen in it."""
    booster, batch, seen = fs.Booster(plugin), torch.randn(16, width), []
    model, opt, *_ = booster.boost(model, opt)

    def loss(y, _=None):
        seen.extend([] if seen else [look()])
        return y.float().square().mean()

    if plugin.in_stages():
        booster.execute_pipeline(iter([batch]), model, loss, opt)
    else:
        booster.backward(loss(model(batch)), opt)
    return held(model.gradient.params), held(opt.grads), held(opt.state), seen


@pytest.mark.filterwarnings("ignore:seen was changed by the criterion")
@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_counted_bytes_are_what_devices_hold(model, plugin, optimizer):
    made, plugin = MODELS[model], PLUGINS[plugin]()

    def main():
        torch.manual_seed(0)
        own = made()
        return step(plugin, own, OPTIMIZERS[optimizer](own))

    found = fs.run(main, mesh=mesh_of(plugin))
    one = made()
    budgeted = counted(plugin, one, OPTIMIZERS[optimizer](one))
    grads = [grads for params, grads, state, _ in found if (params, state) == (budgeted.parameters, budgeted.state)]
    assert grads
    if plugin.zero() == 0:
        assert budgeted.gradients == grads[0]
    else:
        assert grads[0] <= budgeted.gradients <= grads[0] + sum(x.nbytes for x in one.parameters() if x.requires_grad)


def test_copies_are_unsharded_units_and_parameters_in_another_dtype():
    """4 layers of 32 x 33 elements; of sharded ones two units are unsharded at a time, or a device's stage."""
    layer = 32 * 33
    expected = {
        "ddp": (0, 8 * layer),
        "zero 1": (0, 8 * layer),
        "zero 2": (0, 8 * layer),
        "fsdp": (8 * layer, 4 * layer),
        "stages, zero 1": (0, 4 * layer),
        "stages, zero 3": (8 * layer, 4 * layer),
        "stages in loops": (0, 4 * layer),
    }
    for name, plugin in PLUGINS.items():
        found = [counted(plugin(precision=x), layers(4, 32), fs.optim.sgd()).copies for x in (None, "bf16")]
        assert tuple(found) == expected[name], name


LIVE = defaultdict(int)
PEAKS = defaultdict(int)


class Noting(nn.Linear):
    """A layer whose rows are noted from its forward to its backward, of each device by itself."""

    def forward(self, x):
        device, rows = threading.get_ident(), len(x)
        LIVE[device] += rows
        PEAKS[device] = max(PEAKS[device], LIVE[device])
        y = super().forward(x)
        y.register_hook(lambda g: LIVE.update({device: LIVE[device] - rows}))
        return y


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches", "zero_stage"),
    [("1f1b", 1, 3, 1), ("1f1b", 1, 8, 3), ("gpipe", 1, 3, 3), ("interleaved", 2, 8, 1), ("bfs", 2, 1, 3)],
)
def test_counted_activations_are_those_of_the_microbatches_held(schedule, chunks, microbatches, zero_stage):
    plugin = fs.HybridParallelPlugin(
        pipeline=2, schedule=schedule, chunks=chunks, microbatches=microbatches, zero_stage=zero_stage
    )

    def main():
        model = nn.Sequential(*(Noting(4, 4) for _ in range(8)))
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters()))
        booster.execute_pipeline(iter([torch.randn(96, 4)]), model, lambda y, _: y.square().mean(), opt)
        assert LIVE.pop(threading.get_ident()) == 0
        return PEAKS.pop(threading.get_ident())

    found = max(fs.run(main, mesh=mesh_of(plugin)))
    assert counted(plugin, layers(8, 4), fs.optim.sgd(), activations=96 * 8).activations == found


def test_computing_in_bf16_counts_copies():
    memory = 360_000
    rows = rows_of(fs.auto_plugin(layers(), MESH, memory + 3_600, precision="bf16"))
    assert rows["DDP, stage 0"]["copies"] == rows["Zero, stage 2"]["copies"] == 161_600
    assert rows["FSDP, stage 3"]["copies"] == 40_400
    assert rows["Hybrid, stage 1 x 2"]["copies"] == rows["Hybrid, stage 3 x 2"]["copies"] == 80_800
    assert rows["Hybrid, stage 1 x 4"]["together"] == memory + 3_600


# -- options ----------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Embeddings, blocks, and a head that is tied to them."""

    def __init__(self, blocks=4):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(blocks))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_stages_of_a_model_with_blocks_are_counted():
    with torch.device("meta"):
        model = Words()
    sample = torch.zeros(2, 3, dtype=torch.long)
    plugin = fs.auto_plugin(model, MESH, 15_000, blocks="blocks", sample=sample, microbatches=2, zero_stage=1)
    assert (plugin.pipeline, plugin.microbatches, plugin.zero_stage, plugin.blocks) == (4, 2, 1, "blocks")

    def main():
        own = Words()
        booster = fs.Booster(plugin)
        own, opt, *_ = booster.boost(own, torch.optim.AdamW(own.parameters()))
        batch = torch.arange(24).view(8, 3) % 11
        for _ in range(2):
            booster.execute_pipeline(iter([batch]), own, lambda y, x: y.square().mean(), opt)
            grads = held(opt.grads)
            opt.step()
        return held(own.gradient.params), grads, held(opt.state)

    row = rows_of(plugin)["Hybrid, stage 1 x 4"]
    assert (row["parameters"], row["state"]) in {(params, state) for params, _, state in fs.run(main, mesh=MESH)}


REFUSED = {
    "sync_batchnorm": (
        {"sync_batchnorm": True},
        "Hybrid, stage 1 x 2 .* sync_batchnorm=True has no meaning for stages",
    ),
    "slices": ({"reproducible": True, "slices": 4}, "Hybrid, stage 1 x 2 .* slices= needs"),
    "bucket": ({"options": {"bucket": 1 << 20}}, "Hybrid, stage 1 x 2 .* options has no 'bucket'"),
    "live units": ({"options": {"live_units": 1}}, "DDP, stage 0 .* need parameters that are sharded.*\nZero, .*1"),
    "blocks": ({"blocks": "blocks", "sample": 1}, 'stage 1 x 2 .* blocks="blocks" is no list of blocks of Sequential'),
    "sample": ({"blocks": "0"}, "Hybrid, stage 1 x 2 .* blocks= are those of a module.*sample="),
    "pipeline": ({"pipeline": 3}, "Hybrid, stage 1 x 3 .* pipeline=3 does not divide the 4 devices"),
    "balance": ({"balance": [1, 2, 3, 2]}, "stage 1 x 2 .*balance=.* 2 stages.\nHybrid, stage 1 x 4 .* too much\n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plugin_that_refuses_options_has_a_row_with_the_reason(name):
    options, told = REFUSED[name]
    with pytest.raises(fs.errors.LayoutError, match=rf"auto_plugin: this model fits in no way:\n(.*\n)*.*{told}"):
        fs.auto_plugin(layers(), MESH, 1000, **options)


@pytest.mark.parametrize(
    ("options", "memory", "expected"),
    [
        ({"microbatches": 8, "schedule": "gpipe", "unit": 100_000}, 10**9, fs.DDPPlugin),
        ({"stage": 2}, 900_000, partial(fs.ZeroPlugin, stage=2)),
        ({"unit": "*"}, 450_000, partial(fs.FSDPPlugin, unit="*")),
        ({"zero_stage": 0, "microbatches": 3}, 450_000, fs.FSDPPlugin),
        (
            {"zero_stage": 0, "microbatches": 3, "pipeline": 4},
            330_000,
            partial(fs.HybridParallelPlugin, zero_stage=0, microbatches=3, pipeline=4),
        ),
    ],
)
def test_each_plugin_gets_the_options_that_it_has(options, memory, expected):
    advised = fs.auto_plugin(layers(), MESH, memory, **options)
    assert advised == expected(mesh=None if "Hybrid" in type(advised).__name__ else MESH)
