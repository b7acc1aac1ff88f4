"""Train a diffusion transformer to draw shapes, and let it draw some.

    python examples/diffusion.py                                   four virtual devices, ZeRO-3
    python examples/diffusion.py --devices 1
    fshard run --processes 2 examples/diffusion.py                 two processes

The loss draws noise. In reproducible mode its draws are seeded by the step and the slice of the
batch, so the losses have the same bits on 1, 2, 4 or 8 devices.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P

SIDE, PATCH, WIDTH, LAYERS, HEADS = 16, 4, 64, 3, 4


# -- pictures: a disc, a square or a cross, of some size, at some place ----------------------------


def batch_of(number, size):
    """Draw pictures, from -1 to 1. Every process draws the same ones."""
    draw = torch.Generator().manual_seed(number)
    kind = torch.randint(3, (size, 1, 1), generator=draw)
    radius = torch.randint(3, 6, (size, 1, 1), generator=draw)
    centre = torch.randint(5, SIDE - 5, (size, 2, 1), generator=draw)
    dy = (torch.arange(SIDE)[:, None] - centre[:, :1]).abs()  # (size, side, side) when combined
    dx = (torch.arange(SIDE)[None, :] - centre[:, 1:]).abs()

    disc = dy.square() + dx.square() <= radius.square()
    square = (dy <= radius - 1) & (dx <= radius - 1)
    cross = ((dy <= 1) & (dx <= radius)) | ((dx <= 1) & (dy <= radius))
    is_ink = torch.where(kind == 0, disc, torch.where(kind == 1, square, cross))
    return 2.0 * is_ink - 1  # (size, side, side)


# -- the model, for one device -----------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block whose norms are scaled and shifted by the time."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.of_time = nn.Linear(WIDTH, 6 * WIDTH)
        # Each block begins as the identity.
        nn.init.zeros_(self.of_time.weight)
        nn.init.zeros_(self.of_time.bias)

    def forward(self, x, time):
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = self.of_time(F.silu(time))[
            :, None
        ].chunk(6, -1)  # (batch, 1, width) each
        y = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)  # (batch, heads, patches, width / heads)
        x = x + gate * self.out(y.transpose(1, 2).flatten(2))
        y = F.layer_norm(x, (WIDTH,)) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.mlp(y)


class DiT(nn.Module):
    """From noisy pictures and their times to the direction from picture to noise."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.out = nn.Linear(WIDTH, PATCH * PATCH)

    def forward(self, pictures, time):
        x = F.unfold(pictures[:, None], PATCH, stride=PATCH).mT  # (batch, patches, patch * patch)
        rates = torch.exp(-math.log(1000) * torch.arange(WIDTH // 2) / (WIDTH // 2))
        angles = 1000 * time[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))  # (batch, width)
        x = self.patches(x) + self.positions
        for block in self.blocks:
            x = block(x, time)
        y = self.out(F.layer_norm(x, (WIDTH,))).mT
        return F.fold(y, (SIDE, SIDE), PATCH, stride=PATCH)[:, 0]


@torch.no_grad()
def drawn(model, count, steps=40):
    """Return pictures that the model draws: from noise, along the direction that it predicts."""
    x = torch.randn(count, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    for step in range(steps, 0, -1):
        x = x - model(x, torch.full((count,), step / steps)) / steps
    return x


# -- the training, on many ---------------------------------------------------------------------------


def main():
    args = options()
    mesh = fs.make_mesh({"data": fs.mesh.process_count(default=args.devices)})
    torch.manual_seed(0)
    model = DiT()
    apply, params, buffers = fs.functionalize(model)

    def loss_fn(params, pictures):
        noise = torch.randn_like(pictures)
        time = torch.rand(len(pictures))
        noisy = torch.lerp(pictures, noise, time[:, None, None])
        direction, _ = apply(params, buffers, noisy, time)
        return F.mse_loss(direction, noise - pictures)

    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    opt = fs.optim.adamw(
        fs.optim.schedules.warmup_cosine(2e-3, warmup=args.steps // 10, steps=args.steps)
    )
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=3)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True, donate=True)
    state = opt.init(params)
    is_first = fs.mesh.process_index() == 0
    for number in range(1, args.steps + 1):
        params, state, metrics = step(params, state, batch_of(number, args.batch))
        if is_first and (number % max(args.steps // 10, 1) == 0 or number == 1):
            print(f"step {number:4}   loss {metrics['loss'].item():.9g}")  # nine digits: every bit

    model.load_state_dict(fs.unshard(params))
    if is_first:
        for rows in zip(*drawn(model, 4).tolist(), strict=True):
            print("  ".join("".join("·#"[x > 0] for x in row) for row in rows))


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4, help="virtual ones")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
