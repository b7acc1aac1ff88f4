"""Train a GPT in torch's own loop, under the plugin of your choice: the loop stays, a preset decides the layouts.

    python examples/boost_gpt.py --plugin zero2                          four virtual devices
    python examples/boost_gpt.py --plugin hybrid --devices 8             two stages, each on four
    fshard run --processes 2 examples/boost_gpt.py --plugin fsdp         two processes

It learns to count on: 3 5 7 9 ... from any number, in steps of any size, around a clock.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs

HOURS, LENGTH, WIDTH, LAYERS = 24, 12, 64, 4

PLUGINS = {
    "ddp": fs.DDPPlugin(),
    "zero1": fs.ZeroPlugin(stage=1),
    "zero2": fs.ZeroPlugin(stage=2),
    "fsdp": fs.FSDPPlugin(),
    "hybrid": fs.HybridParallelPlugin(pipeline=2, zero_stage=1, microbatches=4, schedule="1f1b"),
}


# -- the data and the model, written for one device ---------------------------------------------------------------------------


def counting():
    """Return a dataset of all ways to count: numbers, and for each the one that follows."""
    start, step = torch.cartesian_prod(torch.arange(HOURS), torch.arange(1, HOURS)).T[:, :, None]
    numbers = (start + step * torch.arange(LENGTH + 1)) % HOURS
    return TensorDataset(numbers[:, :-1], numbers[:, 1:])  # (ways, length) each


class Embedding(nn.Module):
    """Embed numbers and their positions."""

    def __init__(self):
        super().__init__()
        self.numbers, self.places = nn.Embedding(HOURS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        return self.numbers(x) + self.places.weight[: x.shape[1]]


class Block(nn.Module):
    """Look around, then think, each beside what was there."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = (
            self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        )  # (batch, heads, length, -1)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.think(self.after(x))


def gpt():
    """A row of layers: a pipeline may cut it anywhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        Embedding(), *(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HOURS)
    )


def criterion(scores, following):
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


# -- the training: by each device ---------------------------------------------------------------------------------------


def main(args):
    booster = fs.Booster(plugin=PLUGINS[args.plugin])
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    loader = DataLoader(
        counting(), batch_size=48, shuffle=True
    )  # 48 samples on all devices together
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    model, optimizer, loss_fn, loader, schedule = booster.boost(
        model, optimizer, criterion, loader, schedule
    )

    staged = args.plugin == "hybrid"
    own = (
        None if staged else booster.plugin.default_mesh()
    )  # a pipeline's loss is that of all devices already
    with fs.report.Report(fs.report.Bar(steps), mesh=own) as report:
        for _ in range(args.epochs):
            batches = iter(loader)
            for _ in range(len(loader)):
                if staged:
                    loss = booster.execute_pipeline(batches, model, loss_fn, optimizer)["loss"]
                else:
                    numbers, following = next(batches)
                    loss = loss_fn(model(numbers), following)
                    booster.backward(loss, optimizer)
                booster.clip_grad_norm(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                report(loss=loss, samples=loader.samples)
    return model.unwrap()  # a copy with full parameters, on every device


@torch.no_grad()
def right(model):
    """Return how often the model knows what follows, once it has seen two numbers."""
    numbers, following = counting().tensors
    return (model(numbers).argmax(-1) == following)[:, 1:].float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plugin", choices=PLUGINS, default="zero2")
    parser.add_argument(
        "--devices", type=int, default=4, help="virtual ones; processes are as many as were started"
    )
    parser.add_argument("--epochs", type=int, default=24)
    args = parser.parse_args()

    mesh = fs.make_mesh({"data": fs.mesh.process_count(default=args.devices)})
    model, *_ = fs.run(main, args, mesh=mesh)
    if fs.mesh.process_index() == 0:
        print(f"It knows what follows in {right(model):.0%} of all places.")
