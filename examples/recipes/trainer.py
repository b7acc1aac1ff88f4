"""What the Trainer of transformers has made, trained by the Booster under ZeRO-3.

    python examples/recipes/trainer.py                              two virtual devices
    python examples/recipes/trainer.py --library transformers       the Trainer itself, one device
    fshard run --processes 2 examples/recipes/trainer.py

The model, the data, the arguments, the optimizer and the schedule are the Trainer's. Only
`trainer.train()` is replaced, by a loop; the losses are those of the Trainer on one device. Its loss
is a mean over tokens, so the number of a device's tokens is the weight of its backward.
"""

import argparse
import tempfile

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fshard as fs

EPOCHS, BATCH = 2, 8


def new_trainer():
    """Return a Trainer with a tiny model, and data whose rows have unlike numbers of tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        use_cache=False,
    )
    rows = []
    for row in range(32):
        tokens = torch.randint(32, (12,))
        labels = tokens.clone()
        labels[: row % 7] = -100  # not trained on
        rows.append({"input_ids": tokens, "labels": labels})
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=1e-2,
        warmup_steps=2,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows)


def train():
    """Train as one device of the mesh; return the losses."""
    trainer = new_trainer()
    loader = DataLoader(trainer.train_dataset, BATCH, collate_fn=trainer.data_collator)
    steps = EPOCHS * len(loader)
    trainer.create_optimizer_and_scheduler(steps)

    booster = fs.Booster(fs.FSDPPlugin())
    model, optimizer, _, loader, schedule = booster.boost(
        trainer.model, trainer.optimizer, None, loader, trainer.lr_scheduler
    )
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            loss = model(**batch).loss
            tokens = (batch["labels"][:, 1:] != -100).sum()
            booster.backward(loss, optimizer, weight=tokens)
            booster.clip_grad_norm(optimizer, trainer.args.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(booster.mean(loss, tokens).item())
    return losses


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", choices=["fshard", "transformers"], default="fshard")
    parser.add_argument("--devices", type=int, default=2, help="virtual ones")
    args = parser.parse_args()
    if args.library == "transformers":
        trainer = new_trainer()
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    else:
        mesh = fs.make_mesh({"data": fs.mesh.process_count(default=args.devices)})
        losses, *_ = fs.run(train, mesh=mesh)
    if fs.mesh.process_index() == 0:
        for number, loss in enumerate(losses, 1):
            print(f"step {number}   loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
