"""Train CLIP: pictures and captions find each other among the batch of all devices.

    python examples/clip.py                                        four virtual devices
    python examples/clip.py --devices 1                            the same losses
    fshard run --processes 2 examples/clip.py                      two processes

Each device embeds its own samples, and compares them with the negatives of all: `fs.all_gather` of
the embeddings, through which gradients flow back. A loss over a device's own samples alone would
be another one on each number of devices.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P

SIDE, WIDTH = 12, 64
WORDS = ("thin", "thick", "left", "right", "high", "low", "bar", "column", "dot")
AXES = ("data",)


def batch_of(number, size):
    """Draw pictures and captions of four words. Every process draws the same ones."""
    draw = torch.Generator().manual_seed(number)
    thick, right, low = torch.randint(2, (3, size, 1, 1), generator=draw)
    kind = torch.randint(3, (size, 1, 1), generator=draw)
    dy = (torch.arange(SIDE)[:, None] - (3 + 5 * low)).abs()  # (size, side, side) when combined
    dx = (torch.arange(SIDE)[None, :] - (3 + 5 * right)).abs()
    long_y, long_x = 3 * (kind == 1), 3 * (kind == 0)
    ink = (dy <= thick + long_y) & (dx <= thick + long_x)
    pictures = ink + 0.3 * torch.randn(ink.shape, generator=draw)
    captions = torch.stack([thick, 2 + right, 4 + low, 6 + kind], 1)[:, :, 0, 0]
    return {"pictures": pictures, "captions": captions}  # (size, side, side), (size, 4)


class CLIP(nn.Module):
    """Two towers, which embed pictures and captions on one sphere."""

    def __init__(self):
        super().__init__()
        self.pictures = nn.Sequential(
            nn.Flatten(), nn.Linear(SIDE * SIDE, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.captions = nn.Sequential(
            nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pictures, captions):
        x = F.normalize(self.pictures(pictures), dim=-1)  # (batch, width)
        y = F.normalize(self.captions(self.words(captions).flatten(1)), dim=-1)
        return x, y, self.log_scale.exp()


def contrast(x, y, scale):
    """Return the loss of a device's samples, among the samples of all devices, in both directions."""
    all_x, all_y = fs.all_gather((x, y), AXES)  # (batch of all, width)
    own = len(x) * fs.axis_index(AXES) + torch.arange(len(x))
    to_captions = F.cross_entropy(scale * x @ all_y.T, own)
    to_pictures = F.cross_entropy(scale * y @ all_x.T, own)
    return (to_captions + to_pictures) / 2


def main():
    args = options()
    mesh = fs.make_mesh({"data": fs.mesh.process_count(default=args.devices)})
    torch.manual_seed(0)
    model = CLIP()
    apply, params, buffers = fs.functionalize(model)

    def loss_fn(params, batch):
        embedded, _ = apply(params, buffers, batch["pictures"], batch["captions"])
        return contrast(*embedded)

    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(1e-3), mesh=mesh, axis="data", stage=3)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    state = opt.init(params)
    is_first = fs.mesh.process_index() == 0
    for number in range(1, args.steps + 1):
        params, state, metrics = step(params, state, batch_of(number, args.batch))
        if is_first and (number % max(args.steps // 10, 1) == 0 or number == 1):
            print(f"step {number:4}   loss {metrics['loss'].item():.6f}")

    model.load_state_dict(fs.unshard(params))
    if is_first:
        show(model, batch_of(0, args.batch))


@torch.no_grad()
def show(model, batch):
    """Print how often a picture finds a caption with its words, and one picture."""
    x, y, _ = model(batch["pictures"], batch["captions"])
    found = batch["captions"][(x @ y.T).argmax(1)]
    is_right = (found == batch["captions"]).all(1)
    print(f"\nOf {len(x)} pictures {is_right.sum()} find a caption that is right. The first one:")
    for row in batch["pictures"][0].tolist():
        print("  " + "".join("·#"[value > 0.5] for value in row))
    print("  " + " ".join(WORDS[word] for word in found[0]))


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4, help="virtual ones")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
