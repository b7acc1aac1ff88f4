"""Loops over loaders under every plugin and in stages: equal bits on all meshes, and the weights that torch trains."""

import gc
import weakref
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from tests.sampled import in_pairs

PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 1": partial(fs.ZeroPlugin, stage=1),
    "zero 2": partial(fs.ZeroPlugin, stage=2),
    "fsdp": fs.FSDPPlugin,
    "fsdp, whole kept": partial(fs.FSDPPlugin, reshard_after_forward=False),
}


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


class Patches(nn.Module):
    """Patches of a picture, a token for the whole of it, attention: a ViT as small as can be."""

    def __init__(self):
        super().__init__()
        self.patch, self.whole = nn.Conv1d(1, 8, 1), nn.Parameter(torch.zeros(1, 1, 8))
        self.places = nn.Parameter(torch.randn(4, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, x):
        y = self.patch(x[:, None]).transpose(1, 2)
        y = torch.cat([self.whole.expand(len(y), -1, -1), y], 1) + self.places
        return self.head(self.norm(self.block(y))[:, 0])


class Tables(nn.Module):
    """Embeddings of features, of which a batch uses few rows, beside numbers: a DLRM as small as can be."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(20, 4), nn.Embedding(7, 4)])
        self.bottom, self.top = nn.Linear(3, 4), nn.Linear(12, 11)

    def forward(self, x):
        features = [table((x[:, at] * 5).long().abs() % table.num_embeddings) for at, table in enumerate(self.tables)]
        return self.top(torch.cat([*features, self.bottom(x)], 1))


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


class Words(nn.Module):
    """The beginning of a row of layers: tokens, and places."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8))

    def forward(self, tokens):
        return self.embed(tokens) + self.places


def layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True)


def row_of_words():
    """A GPT as a row of layers, of which the first and the last share a weight: they stand in two stages."""
    first, head = Words(), nn.Linear(8, 11, bias=False)
    head.weight = first.embed.weight
    return nn.Sequential(first, layer(), layer(), head, nn.AdaptiveAvgPool2d((1, None)), nn.Flatten())


MODELS = {
    "row of words": row_of_words,
    "mlp": lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 11)),
    "convnet": convnet,
    "attention": Attention,
    "tables": Tables,
    "patches": Patches,
}


def data(name, count):
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(count, 3, generator=draw)
    if name in ("attention", "row of words"):
        x = torch.randint(11, (count, 5), generator=draw)
    return TensorDataset(x, torch.randint(11, (count,), generator=draw))


def trained(n, name, plugin, count=48, batch_size=16, **options):
    """Return what each device has after two epochs of torch's loop: the model's state, and the losses of all devices."""
    mesh = fs.make_mesh({"data": n})

    def main():
        torch.manual_seed(1)
        model = MODELS[name]()
        opt = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        booster = fs.Booster(plugin=PLUGINS[plugin](**options))
        loader = DataLoader(data(name, count), batch_size=batch_size, shuffle=True)
        model, opt, criterion, loader, schedule = booster.boost(model, opt, nn.CrossEntropyLoss(), loader, schedule)
        losses = []
        for _ in range(2):
            for x, y in loader:
                loss = criterion(model(x), y)
                booster.backward(loss, opt)
                booster.clip_grad_norm(opt, 1.0)
                opt.step()
                opt.zero_grad()
                schedule.step()
                losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            output = model(data(name, count).tensors[0][:4])
        return {k: v.clone() for k, v in model.unwrap().state_dict().items()}, output, losses

    return fs.run(main, mesh=mesh)


@cache
def on_one_device(name):
    """Return what one device has in reproducible mode."""
    return trained(1, name, "ddp", reproducible=True)[0]


def by_torch(name, count=48, batch_size=16):
    """Return the state of a model that torch alone has trained, on the same batches."""
    torch.manual_seed(1)
    model = MODELS[name]()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    samples = data(name, count).tensors
    for epoch in range(2):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(batch_size):
            loss = nn.functional.cross_entropy(model(samples[0][rows]), samples[1][rows])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            schedule.step()
    return model.state_dict()


FAMILIES = ("convnet", "attention", "tables", "patches")


@pytest.mark.parametrize(("name", "plugin", "n"), in_pairs(FAMILIES, [*PLUGINS][1:], (2, 4)))
def test_reproducible_loop_has_equal_bits_on_all_meshes(name, plugin, n):
    expected, output, _ = on_one_device(name)
    for state, same, _ in trained(n, name, plugin, reproducible=True):
        assert all(torch.equal(x, expected[key]) for key, x in state.items())
        assert torch.equal(output, same)


@pytest.mark.parametrize(("plugin", "count", "name"), in_pairs(PLUGINS, (48, 39, 33), ("mlp", "tables")))
def test_loop_trains_as_torch_on_one_device(plugin, count, name):
    expected = by_torch(name, count)
    for state, *_ in trained(4, name, plugin, count):
        for key, x in state.items():
            torch.testing.assert_close(x, expected[key], rtol=1e-3, atol=1e-5)


# -- stages ---------------------------------------------------------------------------------------------------------


def trained_in_stages(name, pipeline, count=48, batch_size=16, outputs=False, **options):
    """Return what each device has after two epochs of execute_pipeline."""

    def main():
        torch.manual_seed(1)
        model = MODELS[name]()
        opt = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=pipeline, **options))
        loader = DataLoader(data(name, count), batch_size=batch_size, shuffle=True)
        model, opt, criterion, loader, schedule = booster.boost(model, opt, nn.CrossEntropyLoss(), loader, schedule)
        losses = []
        for _ in range(2):
            batches = iter(loader)
            for _ in range(len(loader)):
                result = booster.execute_pipeline(batches, model, criterion, opt, return_outputs=outputs)
                booster.clip_grad_norm(opt, 1.0)
                opt.step()
                opt.zero_grad()
                schedule.step()
                losses.append(result["loss"].item())
        model.eval()
        with torch.no_grad():
            tested = booster.execute_pipeline(
                iter([data(name, count)[:4]]), model, criterion, return_loss=False, return_outputs=True
            )
        return {k: v.clone() for k, v in model.unwrap().state_dict().items()}, tested["outputs"], losses

    return fs.run(main, mesh=fs.make_mesh({"data": 2, "pipe": 2}))


@pytest.mark.parametrize(("schedule", "zero_stage"), [("gpipe", 0), ("1f1b", 1), ("zbv", 3)])
def test_reproducible_stages_equal_unsplit_model_bitwise(zero_stage, schedule):
    expected, output, losses = on_one_device("mlp")
    how = {"zero_stage": zero_stage, "schedule": schedule, "microbatches": 4, "reproducible": True}
    for state, same, lost in trained_in_stages("mlp", 2, **how):
        assert all(torch.equal(x, expected[key]) for key, x in state.items())
        torch.testing.assert_close(same, output)
        torch.testing.assert_close(torch.tensor(lost), torch.tensor(losses))


@pytest.mark.parametrize(
    ("name", "zero_stage", "schedule"),
    [
        ("convnet", 1, "1f1b"),
        ("convnet", 2, "zbv"),
        ("row of words", 3, "gpipe"),
    ],
)
def test_reproducible_stages_of_each_family_equal_unsplit_model(name, zero_stage, schedule):
    expected, output, _ = on_one_device(name)
    how = {"zero_stage": zero_stage, "schedule": schedule, "microbatches": 4, "reproducible": True}
    for state, same, _ in trained_in_stages(name, 2, **how):
        assert [key for key, x in state.items() if not torch.equal(x, expected[key])] == []
        torch.testing.assert_close(same, output)


@pytest.mark.parametrize("how", ["a group of its own", "in no group", "frozen"])
def test_weight_shared_by_stages_trains_by_its_group(how):
    """The second stage knows the weight by another name than the model's."""

    def start():
        torch.manual_seed(1)
        model = row_of_words().double()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        tied = model[3].weight
        others = [x for x in model.parameters() if x is not tied]
        if how == "frozen":
            tied.requires_grad_(False)
        groups = [
            {"params": others},
            *([{"params": [tied], "lr": 0.3, "momentum": 0.5}] * (how == "a group of its own")),
        ]
        return model, torch.optim.SGD(groups, lr=0.1)

    x, y = data("row of words", 16).tensors
    whole, opt = start()
    for _ in range(3):
        nn.functional.cross_entropy(whole(x), y).backward()
        opt.step(), whole.zero_grad()

    def main():
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, zero_stage=2, microbatches=2))
        model, opt, criterion, *_ = booster.boost(*start(), nn.CrossEntropyLoss())
        for _ in range(3):
            booster.execute_pipeline(iter([(x, y)]), model, criterion, opt)
            opt.step(), opt.zero_grad()
        return model.unwrap()

    for found in fs.run(main, mesh=fs.make_mesh({"data": 2, "pipe": 2})):
        assert found[3].weight is found[0].embed.weight
        for name, w in whole.named_parameters():
            torch.testing.assert_close(dict(found.named_parameters())[name], w, msg=name, check_stride=False)


@pytest.mark.parametrize("count", [48, 39])
def test_stages_train_as_torch_on_one_device(count):
    expected = by_torch("mlp", count)
    for state, *_ in trained_in_stages("mlp", 2, count, microbatches=3, zero_stage=1, outputs=True):
        for key, x in state.items():
            torch.testing.assert_close(x, expected[key], rtol=1e-3, atol=1e-5)


# -- the loop as torch's users write it -------------------------------------------------------------------------------


def loop(n, plugin, make, rounds, optimizer=None, scheduler=None, **options):
    """Return the state of a model on each device after what `rounds` does with (booster, model, optimizer, scheduler)."""

    def main():
        torch.manual_seed(1)
        model = make()
        opt = (optimizer or (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))(model)
        schedule = scheduler and scheduler(opt)
        booster = fs.Booster(plugin=PLUGINS[plugin](**options))
        model, opt, _, _, schedule = booster.boost(model, opt, lr_scheduler=schedule)
        rounds(booster, model, opt, schedule)
        return {key: x.clone() for key, x in model.unwrap().state_dict().items()}

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


def rows(count, seed=3):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def own(x):
    n, at = fs.axis_size("data"), fs.axis_index("data")
    return x.chunk(n)[at]


def close(states, expected):
    for state in states:
        for key, x in expected.items():
            torch.testing.assert_close(state[key], x, rtol=1e-4, atol=1e-6)


def test_no_sync_backward_sends_nothing():
    def rounds(booster, model, opt, _):
        booster.backward(model(own(rows(8))).sum(), opt)  # agrees on the order
        opt.step()
        with booster.no_sync(model, opt), fs.ledger() as comm:
            booster.backward(model(own(rows(8))).sum(), opt)
        assert not comm.calls()
        opt.step()

    loop(2, "zero 1", lambda: nn.Linear(3, 2), rounds)


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
    def start():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    x = rows(8, 0).double()
    model, opt = start()
    model(x).square().sum(1).mean().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order)
    opt.step()

    def loss_of(y, _=None):
        return y.square().sum(1).mean()

    def main():
        staged = fs.HybridParallelPlugin(pipeline=2, microbatches=2, zero_stage=2)
        booster = fs.Booster(staged if plugin == "stages" else PLUGINS[plugin]())
        model, opt, *_ = booster.boost(*start())
        if plugin == "stages":
            booster.execute_pipeline(iter([x]), model, loss_of, opt)
        else:
            booster.backward(loss_of(model(own(x))), opt)
        norm = booster.clip_grad_norm(opt, 0.1, norm_type=order, error_if_nonfinite=True)
        opt.step()
        return norm, model.unwrap().state_dict()

    mesh = fs.make_mesh({"data": 2, "pipe": 2} if plugin == "stages" else {"data": n})
    for norm, state in fs.run(main, mesh=mesh):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-6, atol=1e-9)


def test_clip_grad_norm_error_if_nonfinite_raises():
    def main(fails):
        booster = fs.Booster()
        model = nn.Linear(3, 2)
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
        booster.backward((model(torch.ones(2, 3)) * torch.inf).sum(), opt)
        return booster.clip_grad_norm(opt, 1.0, error_if_nonfinite=fails).isfinite().item()

    mesh = fs.make_mesh({"data": 2})
    assert fs.run(main, False, mesh=mesh) == [False, False]
    with pytest.raises(
        fs.errors.OptimizerError, match="clip_grad_norm: the norm of the gradients must be finite; got (nan|inf)"
    ):
        fs.run(main, True, mesh=mesh)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_boosted_module_keeps_shapes_without_memory(kind):
    def main():
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).half()
        first = weakref.ref(model[0].weight)
        boosted, opt, *_ = fs.Booster(fs.FSDPPlugin()).boost(model, kind(model.parameters(), lr=0.1))
        del model
        gc.collect()
        parameter = next(boosted.parameters())
        told = parameter.shape, parameter.dtype, parameter.device.type, sum(x.numel() for x in boosted.parameters())
        nbytes = parameter.untyped_storage().nbytes()
        return first() is None, told, opt.param_groups[0]["params"][0] is parameter, nbytes

    told = (2, 3), torch.float16, "cpu", 12
    assert fs.run(main, mesh=fs.make_mesh({"data": 2})) == [(True, told, True, 2)] * 2


@pytest.mark.parametrize(("plugin", "precision"), [("zero 2", "bf16"), ("fsdp", "fp16")])
def test_half_precision_keeps_float32_parameters(plugin, precision):
    losses, dtypes = [], set()

    def rounds(booster, model, opt, _):
        for _ in range(30):
            loss = (model(own(rows(8))) - 1).square().mean()
            dtypes.add(model(own(rows(8))).dtype)
            booster.backward(loss, opt)
            booster.clip_grad_norm(opt, 10.0)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())

    for state in loop(2, plugin, lambda: nn.Linear(3, 2), rounds, precision=precision):
        assert {x.dtype for x in state.values()} == {torch.float32}
    assert dtypes == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert losses[-1] < 0.2 * losses[0]


# -- the functional form, processes, errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "zero_stage", "inside"), [(nn.LayerNorm, 3, True), (nn.BatchNorm1d, 0, False), (nn.BatchNorm1d, 3, True)]
)
def test_functional_step_trains_stages_as_torch(inside, zero_stage, norm):
    """Of BatchNorm each microbatch has its own mean: what is compared with is two microbatches of two devices, by hand."""

    def start():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 6), norm(6), nn.Tanh(), nn.Linear(6, 11)).double()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    x, y = torch.randn(8, 3).double(), torch.arange(8)
    model, opt = start()
    for _ in range(3):
        loss = (
            sum(nn.functional.cross_entropy(model(xs), ys) for xs, ys in zip(x.chunk(4), y.chunk(4), strict=True)) / 4
        )
        loss.backward()
        opt.step(), opt.zero_grad()
    mesh = fs.make_mesh({"data": 2, "pipe": 2})

    def main():
        plugin = fs.HybridParallelPlugin(mesh=mesh, pipeline=2, zero_stage=zero_stage, microbatches=2)
        booster = fs.Booster(plugin=plugin)
        state = booster.init(*start(), nn.CrossEntropyLoss())
        for _ in range(3):
            state, metrics = booster.step(state, (x, y))
        return metrics["loss"], {name: w for stage in fs.unshard(state.params) for name, w in stage.items()}

    for found, params in fs.run(main, mesh=mesh) if inside else [main()]:
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(params, {name: w.detach() for name, w in model.named_parameters()})


def test_processes_equal_virtual_devices_bitwise(two):
    plugin = "fsdp"
    expected = trained(2, "convnet", plugin, reproducible=True)
    for rank, ((state, output, losses),) in enumerate(two.run(trained, 2, "convnet", plugin, reproducible=True)):
        assert all(torch.equal(x, expected[rank][0][key]) for key, x in state.items())
        assert torch.equal(output, expected[rank][1])
        assert losses == expected[rank][2]


@pytest.mark.parametrize(("stages", "n"), [(False, 2), (True, 1)])
def test_fp16_overflow_is_skipped_despite_clip_grad_value(stages, n):
    """A clipped infinite gradient is finite; torch's scaler looks before."""

    def main():
        model = nn.Sequential(nn.Identity(), nn.Linear(3, 1, bias=False))
        nn.init.ones_(model[1].weight)
        plugin = (
            fs.HybridParallelPlugin(pipeline=2, microbatches=1, precision="fp16")
            if stages
            else fs.FSDPPlugin(precision="fp16")
        )
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
        found = []
        for size in (0.5, 3e4, 0.5):
            x = torch.full((4, 3), size)
            if stages:
                booster.execute_pipeline(iter([(x, x)]), model, lambda y, _: y.float().mean(), opt)
            else:
                booster.backward(model(x).float().mean(), opt)
            booster.clip_grad_value(opt, 0.25)
            opt.step(), opt.zero_grad()
            found.append((model.unwrap()[1].weight[0, 0].item(), opt.scale))
        return found

    mesh = fs.make_mesh({"data": n, "pipe": 2} if stages else {"data": n})
    for found in fs.run(main, mesh=mesh):
        assert found == [(0.875, 2.0**16), (0.875, 2.0**15), (0.75, 2.0**15)]
