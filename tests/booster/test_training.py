"""Loops over loaders under every plugin and in stages: equal bits on all meshes, and the weights
that torch trains.
"""

import gc
import weakref
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard.errors import OptimizerError
from tests.booster.loops import PLUGINS, Loop, assert_close, mesh_of, on_devices, unequal_bits
from tests.helpers.sampled import in_pairs


class Attention(nn.Module):
    """Embeddings tied to the head, attention, dropout: a GPT as small as can be."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens))).mean(1)


class Tables(nn.Module):
    """Embeddings of features, of which a batch uses few rows, beside numbers: a DLRM as small as
    can be.
    """

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(20, 4), nn.Embedding(7, 4)])
        self.bottom = nn.Linear(3, 4)
        self.top = nn.Linear(12, 11)

    def forward(self, x):
        features = [
            table((x[:, i] * 5).long().abs() % table.num_embeddings)
            for i, table in enumerate(self.tables)
        ]
        return self.top(torch.cat([*features, self.bottom(x)], 1))


class Words(nn.Module):
    """The first of a row of layers: words, and a parameter for each position."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(5, 8))

    def forward(self, tokens):
        return self.embed(tokens) + self.positions


def row_of_words(dropout=0.25):
    """A GPT as a row of layers, of which the first and the last share a weight: they are in two
    stages.
    """
    first = Words()
    head = nn.Linear(8, 11, bias=False)
    head.weight = first.embed.weight
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True) for _ in "ab"]
    return nn.Sequential(first, *blocks, head, nn.AdaptiveAvgPool2d((1, None)), nn.Flatten())


def convnet():
    return nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv1d(1, 4, 2),
        nn.BatchNorm1d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(8, 11),
    )


def mlp():
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 11))


MODELS = {
    "convnet": convnet,
    "attention": Attention,
    "tables": Tables,
    "row of words": row_of_words,
    "mlp": mlp,
}
STAGES = {
    f"{schedule}, zero {zero_stage}": partial(
        fs.HybridParallelPlugin,
        pipeline=2,
        schedule=schedule,
        zero_stage=zero_stage,
        microbatches=4,
    )
    for schedule, zero_stage in (("gpipe", 3), ("1f1b", 1), ("zbv", 2))
}
KEPT = {"fsdp, unsharded kept": partial(fs.FSDPPlugin, reshard_after_forward=False)}


def data(name, count):
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(count, 3, generator=draw)
    if name in ("attention", "row of words"):
        x = torch.randint(11, (count, 5), generator=draw)
    return TensorDataset(x, torch.randint(11, (count,), generator=draw))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def halved(opt):
    return torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)


def train(loop):
    """Train two epochs; return the state."""
    for _ in range(2):
        for batch in loop.loader:
            loop.step(*batch, clip=1.0)
            loop.schedule.step()
    return loop.state()


def trained(name, plugin, n, count=48):
    """Return what each device has learnt in two epochs, and its output of four samples."""
    loader = DataLoader(data(name, count), 16, shuffle=True)
    x = data(name, 4).tensors[0]

    def body(loop):
        return train(loop), loop.output(x)

    return on_devices(body, plugin, n, MODELS[name], adamw, schedule=halved, loader=loader)


@cache
def by_torch(name, count):
    """Return what torch alone learns from the same batches."""
    batches = [
        data(name, count)[rows]
        for epoch in range(2)
        for rows in torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).split(16)
    ]
    loop = Loop(MODELS[name], None, adamw, schedule=halved)
    for batch in batches:
        loop.step(*batch, clip=1.0)
        loop.schedule.step()
    return loop.state()


@cache
def on_one_device(name):
    return trained(name, fs.DDPPlugin(reproducible=True), 1)[0]


@pytest.mark.parametrize(
    ("name", "plugin", "n"),
    [
        *in_pairs(("convnet", "attention", "tables"), ("zero 1", "zero 2", "fsdp", *KEPT), (2, 4)),
        ("mlp", "1f1b, zero 1", 4),
        ("convnet", "zbv, zero 2", 4),
        ("row of words", "gpipe, zero 3", 4),
    ],
)
def test_reproducible_loop_has_equal_bits_on_all_meshes(name, plugin, n):
    """With dropout, buffers and tied weights; in stages too."""
    expected, expected_output = on_one_device(name)
    for state, output in trained(name, (PLUGINS | KEPT | STAGES)[plugin](reproducible=True), n):
        assert unequal_bits(state, expected) == []
        torch.testing.assert_close(output, expected_output)


@pytest.mark.parametrize(
    ("plugin", "count", "name"),
    [*in_pairs((*PLUGINS, *KEPT), (48, 39, 33), ("mlp", "tables")), ("1f1b, zero 1", 39, "mlp")],
)
def test_loop_trains_as_torch_on_one_device(plugin, count, name):
    """Batches of 16, the last of 7 and of 1 rows: fewer than devices and microbatches."""
    name = "mlp" if plugin == "stages" else name
    results = trained(name, (PLUGINS | KEPT | STAGES)[plugin](), 4, count)
    assert_close([state for state, _ in results], by_torch(name, count), 1e-4)


@pytest.mark.parametrize("group", ["of its own", "none", "frozen"])
def test_weight_shared_by_stages_trains_by_its_group(group):
    """The second stage knows the weight by another name than the model's."""

    def sgd(model):
        tied, rest = model[3].weight, [x for x in model.parameters() if x is not model[3].weight]
        tied.requires_grad_(group != "frozen")
        groups = [{"params": rest}, {"params": [tied], "lr": 0.3, "momentum": 0.5}]
        return torch.optim.SGD(groups[: 2 if group == "of its own" else 1], lr=0.1)

    def body(loop):
        for _ in range(3):
            loop.step(*data("row of words", 16).tensors)
        return loop.state()

    def make():
        return row_of_words(0.0).double()

    assert_close(
        on_devices(body, PLUGINS["stages"](), 4, make, sgd), body(Loop(make, None, sgd)), 1e-9
    )


# -- clipping, precision, memory -------------------------------------------------------------------


def rows(count, seed=3):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def two_layers():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def squares(y, _=None):
    return y.square().sum(1).mean()


@pytest.mark.parametrize(
    ("plugin", "n", "order"),
    [
        ("ddp", 2, 1),
        ("zero 2", 4, 3),
        ("fsdp", 2, torch.inf),
        ("fsdp", 4, 2.0),
        ("stages", 4, 2.0),
        ("stages", 4, "inf"),
    ],
)
def test_clip_grad_norm_equals_torch_for_any_norm(plugin, n, order):
    def body(loop):
        loop.accumulate(loop.part(rows(8).double()))
        clip = partial(nn.utils.clip_grad_norm_, loop.model.parameters())
        if loop.booster is not None:
            clip = partial(loop.booster.clip_grad_norm, loop.opt, error_if_nonfinite=True)
        norm = clip(max_norm=0.1, norm_type=order)
        loop.step()
        return {"norm": norm, **loop.state()}

    def make():
        return two_layers().double()

    expected = body(Loop(make, None, sgd, criterion=squares))
    assert_close(
        on_devices(body, PLUGINS[plugin](), n, make, sgd, criterion=squares), expected, 1e-6
    )


def test_clip_grad_norm_error_if_nonfinite_raises():
    def body(loop, fails):
        loop.backward((loop.model(torch.ones(2, 3)) * torch.inf).sum())
        return (
            loop.booster.clip_grad_norm(loop.opt, 1.0, error_if_nonfinite=fails).isfinite().item()
        )

    assert on_devices(partial(body, fails=False), fs.DDPPlugin(), 2, two_layers) == [False, False]
    with pytest.raises(
        OptimizerError, match="the norm of the gradients must be finite; got (nan|inf)"
    ):
        on_devices(partial(body, fails=True), fs.DDPPlugin(), 2, two_layers)


def test_no_sync_backward_sends_nothing():
    def body(loop):
        loop.backward(loop.model(loop.part(rows(8))).sum())  # devices agree on the order
        loop.step()
        with fs.ledger() as comm:
            loop.backward(loop.model(loop.part(rows(8))).sum(), sync=False)
        loop.step()
        return comm.calls()

    assert on_devices(body, fs.ZeroPlugin(stage=1), 2, two_layers) == [0, 0]


@pytest.mark.parametrize(("plugin", "precision"), [("zero 2", "bf16"), ("fsdp", "fp16")])
def test_half_precision_keeps_float32_parameters(plugin, precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def body(loop):
        losses = []
        for _ in range(30):
            loss = (loop.model(loop.part(rows(8))) - 1).square().mean()
            assert loop.model(loop.part(rows(8))).dtype is dtype
            loop.backward(loss)
            losses.append(loss.item())
            norm = loop.booster.clip_grad_norm(loop.opt, 10.0)
            loop.step()
        return losses[-1] / losses[0], norm.item(), {x.dtype for x in loop.state().values()}

    for fall, norm, dtypes in on_devices(
        body, PLUGINS[plugin](precision=precision), 2, lambda: nn.Linear(3, 2)
    ):
        assert fall < 0.2 and norm < 10 and dtypes == {torch.float32}


@pytest.mark.parametrize("plugin", [fs.FSDPPlugin, PLUGINS["stages"]])
def test_fp16_overflow_is_skipped_despite_clip_grad_value(plugin):
    """A clipped infinite gradient is finite; torch's scaler looks before."""

    def ones():
        model = nn.Sequential(nn.Identity(), nn.Linear(3, 1, bias=False))
        nn.init.ones_(model[1].weight)
        return model

    def body(loop):
        steps = []
        for size in (0.5, 3e4, 0.5):
            loop.accumulate(torch.full((4, 3), size))
            loop.booster.clip_grad_value(loop.opt, 0.25)
            loop.step()
            steps.append((loop.state()["1.weight"][0, 0].item(), loop.opt.scale))
        return steps

    steps = on_devices(
        body, plugin(precision="fp16"), 2, ones, sgd, criterion=lambda y, _: y.float().mean()
    )
    assert steps == [[(0.875, 2.0**16), (0.875, 2.0**15), (0.75, 2.0**15)]] * 2


@pytest.mark.parametrize("plugin", [fs.FSDPPlugin, PLUGINS["stages"]])
def test_fp16_overflow_of_a_float16_loss_halves_the_applied_scale(plugin):
    """2^16 in the state is 2^15 in a loss of float16."""

    def body(loop):
        scales = []
        for size in (0.5, 3e4, 0.5):
            loop.accumulate(torch.full((4, 3), size))
            loop.step()
            scales.append(loop.opt.scale)
        return scales

    def linear():
        return nn.Sequential(nn.Identity(), nn.Linear(3, 1, bias=False))

    def criterion(y, _):
        return y.square().mean()

    actual = on_devices(body, plugin(precision="fp16"), 2, linear, sgd, criterion=criterion)
    assert actual == [[2.0**15, 2.0**14, 2.0**14]] * 2


@pytest.mark.parametrize("is_half_first", [True, False])
def test_losses_of_a_step_with_two_applied_scales_raise(is_half_first):
    """Gradients of one step are divided by one scale."""

    def body(loop):
        losses = [loop.model(torch.ones(2, 3)).mean() for _ in range(2)]
        losses[is_half_first] = losses[is_half_first].float()
        for loss in losses:
            loop.booster.backward(loss, loop.opt)

    with pytest.raises(ValueError, match="hold"):
        on_devices(body, fs.FSDPPlugin(precision="fp16"), 2, lambda: nn.Linear(3, 1), sgd)


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_statistics_stay_float32_in_16_bits(precision, pipeline):
    def make():
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 11))

    def body(loop):
        for batch in DataLoader(data("mlp", 24), 8):
            loop.step(*batch)
        return loop.state(), loop.output(rows(8)).float()

    state, output = body(Loop(make, None, sgd))
    plugin = fs.HybridParallelPlugin(precision=precision, pipeline=pipeline, microbatches=1)
    for trained, trained_output in fs.run(
        lambda: body(Loop(make, plugin, sgd)), mesh=fs.make_mesh({"data": 1, "pipe": pipeline})
    ):
        torch.testing.assert_close(trained, state, rtol=0.05, atol=0.02)
        torch.testing.assert_close(trained_output, output, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_boosted_module_keeps_shapes_without_memory(kind):
    def main():
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).half()
        first = weakref.ref(model[0].weight)
        boosted, opt, *_ = fs.Booster(fs.FSDPPlugin()).boost(
            model, kind(model.parameters(), lr=0.1)
        )
        del model
        gc.collect()
        x = next(boosted.parameters())
        shape = x.shape, x.dtype, x.device.type, sum(x.numel() for x in boosted.parameters())
        return (
            first() is None,
            shape,
            opt.param_groups[0]["params"][0] is x,
            x.untyped_storage().nbytes(),
        )

    expected = True, ((2, 3), torch.float16, "cpu", 12), True, 2
    assert fs.run(main, mesh=fs.make_mesh({"data": 2})) == [expected] * 2


# -- the functional form in stages -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "zero_stage", "inside"),
    [(nn.LayerNorm, 3, True), (nn.BatchNorm1d, 0, False), (nn.BatchNorm1d, 3, True)],
)
def test_functional_step_trains_stages_as_torch(inside, zero_stage, norm):
    """Each microbatch has its own mean of BatchNorm: compared with are two microbatches of two
    devices, in plain torch.
    """

    def make():
        return nn.Sequential(nn.Linear(3, 6), norm(6), nn.Tanh(), nn.Linear(6, 11)).double()

    x = rows(8).double()
    y = torch.arange(8)
    serial = Loop(make, None, adamw)
    for _ in range(3):
        losses = [serial.accumulate(*pair) for pair in zip(x.chunk(4), y.chunk(4), strict=True)]
        for w in serial.model.parameters():
            w.grad /= 4
        serial.step()
    plugin = fs.HybridParallelPlugin(pipeline=2, microbatches=2, zero_stage=zero_stage)
    mesh = mesh_of(plugin, 4)

    def main():
        booster = fs.Booster(
            fs.HybridParallelPlugin(mesh=mesh, pipeline=2, zero_stage=zero_stage, microbatches=2)
        )
        torch.manual_seed(1)
        model = make()
        state = booster.init(model, adamw(model), nn.CrossEntropyLoss())
        for _ in range(3):
            state, metrics = booster.step(state, (x, y))
        return metrics["loss"], {
            name: w for stage in fs.unshard(state.params) for name, w in stage.items()
        }

    for loss, params in fs.run(main, mesh=mesh) if inside else [main()]:
        torch.testing.assert_close(loss, sum(losses) / 4)
        torch.testing.assert_close(
            params, {name: w.detach() for name, w in serial.model.named_parameters()}
        )


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "stages"])
def test_outputs_in_inference_mode_are_those_without_gradients(plugin):
    def main():
        loop = Loop(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), PLUGINS[plugin]())
        x = torch.ones(4, 3)
        with torch.inference_mode():
            output = loop.output(x)
        return torch.equal(output, loop.output(x))

    assert all(fs.run(main, mesh=mesh_of(PLUGINS[plugin](), 2)))
