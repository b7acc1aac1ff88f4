"""Train a small GPT to write sentences, on several devices, under any stage of ZeRO.

    python examples/train_gpt.py                                  ZeRO-3 on eight virtual devices
    python examples/train_gpt.py --stage 1 --devices 4
    torchrun --nproc-per-node 2 examples/train_gpt.py             two processes

The model and its loss are functions of one device. Four lines of `main` decide the layouts. With
--reproducible, every stage on 1, 2, 4 or 8 devices has the same losses, bit for bit (--log run.jsonl).
"""

import argparse
import random
from itertools import product

import torch
from optree import tree_leaves, tree_map
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import fshard as fs
from fshard import P

# -- the text: sentences in singular and plural --------------------------------------------

SENTENCES = [
    f"{count} {look} {name}{'s' * many} {act}{'s' * (not many)} {place}"
    for many, counts in enumerate([("a", "one", "the"), ("two", "three", "many")])
    for count in counts
    for look, name in product(("big", "small", "red"), ("cat", "dog", "bird", "frog"))
    for act, place in product(("sleep", "sing", "wait", "dream"), ("here", "in a tree", "at sea"))
]
CORPUS = "".join(f"{sentence}. " for sentence in random.Random(0).choices(SENTENCES, k=1000))
LETTERS = sorted(set(CORPUS))
TOKENS = torch.tensor([LETTERS.index(letter) for letter in CORPUS])


def batch_of(number, size):
    """Draw windows of the text. Every process draws the same ones: a plain tensor is the global batch."""
    starts = torch.randint(
        len(TOKENS) - LENGTH, (size, 1), generator=torch.Generator().manual_seed(number)
    )
    windows = TOKENS[starts + torch.arange(LENGTH + 1)]
    return {"x": windows[:, :-1], "y": windows[:, 1:]}  # (size, length) each


# -- the model, for one device --------------------------------------------------------------------------------------

LAYERS, WIDTH, HEADS, LENGTH = 3, 64, 4, 64


def new_params():
    draw = torch.Generator().manual_seed(0)

    def normal(rows, columns):
        return torch.randn(rows, columns, generator=draw) * 0.1

    def block():
        return {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }

    return {
        "letters": normal(len(LETTERS), WIDTH),
        "positions": normal(LENGTH, WIDTH),
        "blocks": [block() for _ in range(LAYERS)],
    }


def block(w, x):
    y = F.layer_norm(x, (WIDTH,)) @ w["qkv"]  # (batch, length, 3 * width)
    q, k, v = y.unflatten(-1, (3, HEADS, -1)).permute(
        2, 0, 3, 1, 4
    )  # (batch, heads, length, width / heads)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w["out"]
    return x + F.gelu(F.layer_norm(x, (WIDTH,)) @ w["up"]) @ w["down"]


def predict(params, x):
    """Return the scores of the letter that follows, at each place."""
    y = F.embedding(x, params["letters"]) + params["positions"][: x.shape[1]]
    for w in params["blocks"]:
        y = block(w, y)
    return (
        F.layer_norm(y, (WIDTH,)) @ params["letters"].T
    )  # (batch, length, letters): the embedding is tied


def loss_fn(params, batch):
    return F.cross_entropy(predict(params, batch["x"]).flatten(0, 1), batch["y"].flatten())


@torch.no_grad()
def write(params, length):
    """Go on after the first sentence, up to the last full stop."""
    draw = torch.Generator().manual_seed(0)
    first = x = TOKENS[: CORPUS.index(".") + 2]
    for _ in range(length):
        odds = predict(params, x[None, -LENGTH:])[0, -1].softmax(-1)
        x = torch.cat([x, torch.multinomial(odds, 1, generator=draw)])
    return "".join(LETTERS[token] for token in x[len(first) :]).rpartition(". ")[0]


# -- the training, on many ------------------------------------------------------------------------------------------


def main():
    args = options()
    mesh = fs.make_mesh({"data": fs.mesh.process_count(default=args.devices)})
    console = Console(quiet=fs.mesh.process_index() > 0, highlight=False)
    console.print(f"[bold]ZeRO-{args.stage} on {mesh}[/]\n")

    # The layouts: nothing else makes the program parallel.
    params = fs.shard_params(
        new_params(),
        fs.fsdp("data", unit=("blocks[*]", "*")) if args.stage == 3 else P(),
        mesh=mesh,
    )
    adamw = optimizer(args.steps)
    opt = fs.partition_optimizer(adamw, mesh=mesh, axis="data", stage=args.stage)
    how = {
        "accumulate": args.accumulate,
        "reproducible": args.reproducible,
        "precision": args.precision,
    }
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True, **how)

    state = opt.init(params)
    fs.visualize(params)
    writers = [fs.report.Bar(args.steps), *(fs.report.JsonLines(file) for file in args.log)]
    with fs.report.Report(*writers) as report:
        for number in range(1, args.steps + 1):
            params, state, metrics = step(params, state, batch_of(number, args.batch))
            report(metrics)

    text = write(tree_map(torch.Tensor.cpu, fs.unshard(params)), args.letters)
    right = [sentence in SENTENCES for sentence in text.split(". ")]
    console.print(
        f"\n[bold]It writes[/], {sum(right)} of {len(right)} sentences as they should be:"
    )
    console.print(f"{text}.\n")

    batch = batch_of(0, args.batch)
    _, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), gradients=opt.gradients)(
        params, batch
    )
    console.print(holdings(params, grads, state, args.stage, mesh.size))
    fs.visualize(params["blocks"][0]["up"])

    with fs.ledger() as comm:
        step(params, state, batch)
    console.print("\n[bold]A step sends[/]", str(comm), sep="\n", soft_wrap=True)
    if args.accumulate == 1 and args.precision is None and not args.reproducible:
        console.print(
            theory(args.stage, mesh.size), f"Counted: {int(comm.bytes()):,} bytes.", sep="\n"
        )

    bits = 8 % mesh.size == 0  # sums over slices of the batch are then the same ones on any mesh
    console.print(
        f"\n[bold]Is it the training of one device?[/] Two steps{' have the same bits' * bits}:"
    )
    how = {"mesh": mesh, "stages": [args.stage], "steps": 2, "reproducible": bits}
    console.print(
        str(fs.testing.certify(loss_fn, new_params(), batch, adamw, **how).check()), soft_wrap=True
    )

    console.print("\nThe same file runs on two processes of this machine, and on many of several:")
    console.print("  fshard run --processes 2 examples/train_gpt.py")
    many = "--nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    console.print(f"  torchrun {many} examples/train_gpt.py", soft_wrap=True)


def optimizer(steps):
    rate = fs.optim.schedules.warmup_cosine(1e-2, warmup=steps // 10, steps=steps)
    return fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(rate))


# -- what it takes, counted and by formula ----------------------------------------------------------------------------


def size(tree):
    return sum(leaf.nbytes for leaf in tree_leaves(tree))


def held(tree):
    """Return the bytes of a tree that one device holds."""
    leaves = tree_leaves(tree, namespace="fshard")
    return sum(leaf.shards[0].nbytes for leaf in leaves if isinstance(leaf, fs.Sharded))


def holdings(params, grads, state, stage, n):
    """Return a table of what a device holds; P is what all parameters take."""
    full, table = (
        size(new_params()),
        Table("a device holds", "bytes", "by formula", "which is", title="ZeRO is a table"),
    )
    kinds = [
        ("parameters", params, 1, 3),
        ("gradients, reduced", grads, 1, 1),
        ("optimizer state", state, 2, 1),
    ]
    for kind, tree, times, first in kinds:  # divided from this stage on
        parts = n if stage >= first else 1
        formula = f"{'2 ' * (times == 2)}P{f' / {n}' * (parts > 1)}"
        table.add_row(kind, f"{held(tree):,}", formula, f"{times * full / parts:,.0f}")
    for column in (1, 3):
        table.columns[column].justify = "right"
    return table


def theory(stage, n):
    """Describe the bytes that a device sends in a step by theory, without the few of losses and norms."""
    params = new_params()
    full = size(params)
    if stage < 3:
        return (
            f"By theory: 2 P (n - 1) / n = {2 * full * (n - 1) / n:,.0f} bytes, to sum gradients."
        )
    again = full - size(params["blocks"][-1]) - size(params["positions"])
    total = (2 * full + again) * (n - 1) / n
    return (
        f"By theory: (2 P + R) (n - 1) / n = {total:,.0f} bytes, to gather P, gather R again for the backward, and scatter "
        "gradients. R is P without the last block, which is still unsharded, and without leaves that are only added."
    )


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of ZeRO")
    parser.add_argument(
        "--devices", type=int, default=8, help="virtual ones; torchrun brings its own"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--letters", type=int, default=300, help="to write in the end")
    parser.add_argument(
        "--accumulate", type=int, default=1, help="parts of a device's batch, one after the other"
    )
    parser.add_argument(
        "--precision", choices=["bf16"], help="to compute in; parameters stay float32"
    )
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        help="a file for lines of JSON: every bit of the losses",
    )
    parser.add_argument(
        "--reproducible", action="store_true", help="equal bits on 1, 2, 4 or 8 devices"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
