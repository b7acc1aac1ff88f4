"""The Booster: torch's loop under every plugin trains what one device trains."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs

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


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 11)),
    "convnet": convnet,
    "attention": Attention,
    "tables": Tables,
}


def data(name, count):
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(count, 3, generator=draw)
    if name == "attention":
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_reproducible_loops_have_equal_bits_on_all_meshes(name, plugin):
    ((expected, output, _),) = trained(1, name, "ddp", reproducible=True)
    for n in (2, 4):
        for state, same, _ in trained(n, name, plugin, reproducible=True):
            assert all(torch.equal(x, expected[key]) for key, x in state.items())
            assert torch.equal(output, same)


@pytest.mark.parametrize("count", [48, 39, 33], ids="{} samples".format)
@pytest.mark.parametrize("name", ["mlp", "tables"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_loops_train_what_torch_trains_on_one_device(name, plugin, count):
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


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_stages_have_the_bits_of_the_whole_model(zero_stage, schedule):
    ((expected, output, losses),) = trained(1, "mlp", "ddp", reproducible=True)
    how = {"zero_stage": zero_stage, "schedule": schedule, "microbatches": 4, "reproducible": True}
    for state, same, lost in trained_in_stages("mlp", 2, **how):
        assert all(torch.equal(x, expected[key]) for key, x in state.items())
        torch.testing.assert_close(same, output)
        torch.testing.assert_close(torch.tensor(lost), torch.tensor(losses))


@pytest.mark.parametrize("count", [48, 39])
def test_stages_train_what_torch_trains_on_one_device(count):
    expected = by_torch("mlp", count)
    for state, *_ in trained_in_stages("mlp", 2, count, microbatches=3, zero_stage=1, outputs=True):
        for key, x in state.items():
            torch.testing.assert_close(x, expected[key], rtol=1e-3, atol=1e-5)
