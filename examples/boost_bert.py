"""Train a BERT of transformers in torch's own loop, under the plugin of your choice.

    python examples/boost_bert.py --plugin fsdp                          four virtual devices
    python examples/boost_bert.py --plugin hybrid --devices 8            split between its blocks into two stages
    python examples/boost_bert.py --plugin zero1 --lora 4                only adapters of rank 4 are trained
    fshard run --processes 2 examples/boost_bert.py                      two processes

It learns which sentences are right: "two dogs sleep", "one dog sleeps".  Nothing is downloaded.
"""

import argparse
from itertools import product

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import fshard as fs

# -- the data -------------------------------------------------------------------------------------------------------

ONE, MANY = ("one", "this", "every"), ("two", "these", "many")
LOOKS, NAMES, ACTS = (
    ("big", "small", "red", "old"),
    ("cat", "dog", "bird", "frog"),
    ("sleep", "sing", "wait", "dream"),
)
PLURAL = {word: f"{word}s" for word in (*NAMES, *ACTS)}
WORDS = [*ONE, *MANY, *LOOKS, *NAMES, *ACTS, *PLURAL.values()]


def sentences():
    """Return all sentences as a dataset of dicts: a sentence is right if count, name and act agree."""
    rows = []
    for count, look, name, act, names, acts in product(
        ONE + MANY, LOOKS, NAMES, ACTS, (False, True), (False, True)
    ):
        words = [count, look, PLURAL[name] if names else name, PLURAL[act] if acts else act]
        agree = names == (count in MANY) and acts != (count in MANY)
        tokens = torch.tensor([WORDS.index(word) for word in words])
        rows.append({"input_ids": tokens, "labels": torch.tensor(int(agree))})
    return rows


def bert():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    config = BertConfig(
        vocab_size=len(WORDS),
        max_position_embeddings=8,
        num_labels=2,
        initializer_range=0.1,
        **sizes,
    )
    return BertForSequenceClassification(config)


SAMPLE = {
    name: torch.stack([row[name] for row in sentences()[:2]]) for name in ("input_ids", "labels")
}
PLUGINS = {
    "ddp": fs.DDPPlugin(),
    "zero1": fs.ZeroPlugin(stage=1),
    "zero2": fs.ZeroPlugin(stage=2),
    "fsdp": fs.FSDPPlugin(unit="bert.encoder.layer[*]"),
    "hybrid": fs.HybridParallelPlugin(
        pipeline=2, zero_stage=1, microbatches=2, sample=SAMPLE, blocks="bert.encoder.layer"
    ),
}


# -- the training: by each device -----------------------------------------------------------------------------------


def main(args):
    booster = fs.Booster(plugin=PLUGINS[args.plugin])
    model = bert()
    if args.lora:
        config = fs.nn.LoraConfig(
            r=args.lora,
            lora_alpha=16,
            target_modules=["query", "value"],
            modules_to_save=["classifier"],
        )
        model = booster.enable_lora(model, lora_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if not args.lora else 1e-2)
    loader = DataLoader(
        sentences(), batch_size=64, shuffle=True
    )  # 64 sentences on all devices together
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)

    staged = args.plugin == "hybrid"
    own = (
        None if staged else booster.plugin.default_mesh()
    )  # a pipeline's loss is that of all devices already
    with fs.report.Report(fs.report.Bar(args.epochs * len(loader)), mesh=own) as report:
        for _ in range(args.epochs):
            batches = iter(loader)
            for _ in range(len(loader)):
                if staged:
                    loss = booster.execute_pipeline(
                        batches, model, lambda output, batch: output.loss, optimizer
                    )["loss"]
                else:
                    batch = next(batches)
                    loss = model(**batch).loss
                    booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                report(loss=loss, samples=loader.samples)
    return model.unwrap()  # a copy with full parameters, on every device


@torch.no_grad()
def right(model):
    """Return how often the model knows whether a sentence is right."""
    tokens, labels = (
        torch.stack([row[name] for row in sentences()]) for name in ("input_ids", "labels")
    )
    return (model.eval()(input_ids=tokens).logits.argmax(-1) == labels).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plugin", choices=PLUGINS, default="fsdp")
    parser.add_argument(
        "--devices", type=int, default=4, help="virtual ones; processes are as many as were started"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--lora", type=int, default=0, help="the rank of what is trained; 0: all is"
    )
    args = parser.parse_args()

    mesh = fs.make_mesh({"data": fs.mesh.process_count(default=args.devices)})
    model, *_ = fs.run(main, args, mesh=mesh)
    if fs.mesh.process_index() == 0:
        print(f"It judges {right(model):.0%} of all sentences rightly.")
