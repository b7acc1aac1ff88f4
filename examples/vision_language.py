"""Train a model of vision and language in one pipeline, whose stages are unlike each other.

    python examples/vision_language.py                                       three stages, two pipelines
    python examples/vision_language.py --stages 1 --data 1                   one device, the same losses
    fshard run --processes 2 examples/vision_language.py --stages 2 --data 1

An encoder of pictures feeds a decoder of words. Layers are a row; `--balance` is the number of layers
of each stage, or a measure, such as "time": a layer of the encoder is wider than one of the decoder,
so equal numbers of layers would leave devices idle.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P

SIDE, PATCH, SEEN, WIDTH = 16, 4, 96, 48
WORDS = ("counts:", "none", "one", "two", "three")


def batch_of(number, size):
    """Draw pictures of dots and bars, and their two numbers. Every process draws the same ones."""
    draw = torch.Generator().manual_seed(number)
    pictures = torch.zeros(size, SIDE, SIDE)
    counts = torch.randint(4, (size, 2), generator=draw)
    for picture, (dots, bars) in zip(pictures, counts.tolist(), strict=True):
        cells = torch.randperm((SIDE // PATCH) ** 2, generator=draw)[: dots + bars].tolist()
        for index, cell in enumerate(cells):
            y, x = PATCH * (cell // 4), PATCH * (cell % 4)
            width = 2 if index < dots else PATCH
            picture[y + 1 : y + 3, x : x + width] = 1
    following = 1 + counts
    words = torch.cat([torch.zeros_like(following[:, :1]), following[:, :1]], 1)
    return {"pictures": pictures, "words": words, "next": following}  # (size, 2) words


# The model is a row of layers: each takes what the one before returns.


class Patches(nn.Module):
    """From pictures and words to embedded patches and words."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, SEEN)
        self.positions = nn.Parameter(0.1 * torch.randn((SIDE // PATCH) ** 2, SEEN))

    def forward(self, inputs):
        pictures, words = inputs
        x = F.unfold(pictures[:, None], PATCH, stride=PATCH).mT  # (batch, patches, patch * patch)
        return self.embed(x) + self.positions, words


class Attention(nn.Module):
    """A transformer block, causal or not."""

    def __init__(self, width, is_causal):
        super().__init__()
        self.is_causal = is_causal
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Seeing(Attention):
    """A block of the encoder, which passes the words on."""

    def forward(self, inputs):
        x, words = inputs
        return super().forward(x), words


class Join(nn.Module):
    """From patches and words to one row: the patches, then the words."""

    def __init__(self):
        super().__init__()
        self.of_patches = nn.Linear(SEEN, WIDTH)
        self.words = nn.Embedding(len(WORDS), WIDTH)

    def forward(self, inputs):
        x, words = inputs
        return torch.cat(
            [self.of_patches(x), self.words(words)], 1
        )  # (batch, patches + words, width)


def last_words(x):
    return x[:, -2:]


def new_layers():
    torch.manual_seed(0)
    seeing = [Seeing(SEEN, is_causal=False) for _ in range(2)]
    speaking = [Attention(WIDTH, is_causal=True) for _ in range(4)]
    head = [last_words, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(WORDS))]
    return [Patches(), *seeing, Join(), *speaking, *head]


def inputs(batch):
    return batch["pictures"], batch["words"]


def loss(scores, batch):
    is_right = (scores.argmax(-1) == batch["next"]).all(1)
    return F.cross_entropy(scores.flatten(0, 1), batch["next"].flatten()), is_right.float().mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--stages", type=int, default=3)
    add("--balance", default="time", help="or uniform, parameters, or 2,3,6")
    add("--data", type=int, default=2, help="pipelines beside each other")
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=32)
    args = parser.parse_args()

    schedule = fs.pipeline_schedule("1f1b", stages=args.stages, microbatches=4)
    mesh = fs.make_mesh({"pipe": args.stages, "data": args.data})
    balance = args.balance
    if balance[0].isdigit():
        balance = [int(count) for count in balance.split(",")]
    sample = inputs(batch_of(0, 4))
    stages = fs.pipeline.split_stages(new_layers(), args.stages, balance, sample=sample)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(2e-3), mesh=mesh, axis="data", stage=3)
    how = {"schedule": schedule, "loss": loss, "inputs": inputs, "has_aux": True}
    step = fs.train_step(stages, opt, mesh=mesh, batch=P("data"), donate=True, **how)
    state = opt.init(params)

    is_first = fs.mesh.process_index() == 0
    if is_first:
        print(f"layers of the stages: {[len(stage) for stage in stages]}")
    for number in range(1, args.steps + 1):
        params, state, metrics = step(params, state, batch_of(number, args.batch))
        if is_first and (number % max(args.steps // 10, 1) == 0 or number == 1):
            print(f"step {number:4}   loss {metrics['loss']:.6f}   right {metrics['aux']:.0%}")


if __name__ == "__main__":
    main()
