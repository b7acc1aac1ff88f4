"""The flags of both programs, and what they share: the mesh, the model, the text, the optimizer."""

import argparse
from pathlib import Path

import torch
from bpe import Tokenizer
from corpus import PackedRows, held_out_split, read_documents
from llama import Llama, Sizes

import fshard as fs


def parse(description):
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mesh", help="such as data=4,model=2; axes: replica, data, expert, model")
    add("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO")
    add("--reproducible", action="store_true", help="equal bits on 1, 2, 4 or 8 devices")
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: of the matrices")
    add("--experts", type=int, default=0, help="of each layer, in place of its MLP")
    add("--diloco", type=int, default=0, help="steps between outer steps along the axis replica")
    add("--folder", type=Path, default=Path("runs/pretrain"), help="checkpoints and report.jsonl")
    add("--every", type=int, default=50, help="steps between evaluations, and between checkpoints")
    add("--steps", type=int, default=800)
    add("--batch", type=int, default=16, help="rows of a step, on all devices together")
    add("--length", type=int, default=128, help="tokens of a row")
    add("--rate", type=float, default=3e-3, help="the highest learning rate")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--vocabulary", type=int, default=1024)
    add("--documents", type=int, help="number of documents; default: all")
    add("--words", type=int, default=200, help="tokens to write at the end")
    return parser.parse_args()


def make_mesh(args):
    """Return the mesh of --mesh; by default all processes, or four virtual devices, along "data"."""
    if args.mesh is None:
        return fs.make_mesh({"data": fs.mesh.process_count(default=4)})
    axes = {}
    for part in args.mesh.split(","):
        name, _, size = part.partition("=")
        axes[name] = int(size)

    if unknown := set(axes) - {"replica", "data", "expert", "model"}:
        raise SystemExit(f"--mesh must have axes replica, data, expert and model; got {unknown}.")
    if ("replica" in axes) != (args.diloco > 0):
        raise SystemExit("--diloco must be given with an axis replica: --mesh replica=2,data=2.")
    if "expert" in axes and not args.experts:
        raise SystemExit("--mesh with an axis expert must have experts: give --experts 4.")
    if {"expert", "model"} <= set(axes):
        # The loss that balances experts is not there in a model whose layers are planned.
        raise SystemExit("--mesh must not have both expert and model. Leave one of them out.")
    return fs.make_mesh(axes)


def load_text(args):
    """Return the tokenizer, and the documents to train on and to evaluate on, as tokens."""
    training, held_out = held_out_split(read_documents(args.documents))
    tokenizer = Tokenizer.train(training, args.vocabulary)
    return tokenizer, encoded(tokenizer, training), encoded(tokenizer, held_out)


def encoded(tokenizer, texts):
    """Return each text as its tokens and the end token."""
    return [[*tokenizer.encode(text), tokenizer.end] for text in texts]


def rows_of(documents, args):
    """Return the stream of rows of some documents, one token longer than the model reads."""
    return PackedRows(documents, args.length + 1)


def new_model(tokenizer, args):
    torch.manual_seed(0)  # all processes draw the same numbers
    sizes = Sizes(
        vocabulary=tokenizer.size,
        layers=args.layers,
        width=args.width,
        heads=args.width // 32,
        kv_heads=max(args.width // 64, 1),
        hidden=args.width * 11 // 4,
        experts=args.experts,
    )
    return Llama(sizes)


def new_optimizer(args):
    """Return AdamW with warm-up; or Muon of the matrices of the blocks beside it."""

    def rate(peak):
        return fs.optim.schedules.warmup_cosine(
            peak, warmup=args.steps // 10, steps=args.steps, end=peak / 10
        )

    opt = fs.optim.adamw(rate(args.rate), betas=(0.9, 0.95), weight_decay=0.1)
    if args.optimizer == "muon":
        # Each matrix is updated in full by its owner: `partition_optimizer` sees that Muon needs it.
        matrices = fs.optim.muon(rate(args.rate), adjust_lr_fn="match_rms_adamw")
        opt = fs.optim.by_label({"matrix": matrices, "other": opt}, label)
    return opt


def label(path, leaf):
    is_matrix = "blocks" in path and len(leaf.shape) == 2
    return "matrix" if is_matrix else "other"
