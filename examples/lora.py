"""Teach a Llama of transformers something else by LoRA, whose layers are this library's or peft's.

    python examples/lora.py                                        four virtual devices, ZeRO-3
    python examples/lora.py --adapter peft --devices 2             the layers of peft
    fshard run --processes 2 examples/lora.py --folder runs/lora   two processes; keeps the adapter

First the model learns to count up around a clock. Then its weights are frozen, and differences of
rank 4 learn to count down. Frozen parameters are sharded too; they have no gradients and no
optimizer state. Nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fshard as fs
from fshard import P

HOURS, LENGTH, RANK = 24, 16, 4
TARGETS = ["q_proj", "v_proj", "down_proj"]


def batch_of(number, size, direction):
    """Draw rows of hours. Every process draws the same ones."""
    draw = torch.Generator().manual_seed(number)
    start = torch.randint(HOURS, (size, 1), generator=draw)
    hours = (start + direction * torch.arange(LENGTH)) % HOURS
    return {"input_ids": hours, "labels": hours}


def new_llama():
    torch.manual_seed(0)  # all processes draw the same numbers
    config = LlamaConfig(
        vocab_size=HOURS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        pad_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def with_adapter(model, adapter):
    """Return the model with LoRA layers, of which alone the parameters require gradients."""
    torch.manual_seed(1)
    if adapter == "peft":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=16, target_modules=TARGETS))
    return fs.nn.lora(model, fs.nn.LoraConfig(r=RANK, lora_alpha=16, target_modules=TARGETS))


def train(model, mesh, args, *, direction, rate):
    """Train those parameters of a model that require gradients; return all of them, sharded."""
    apply, params, buffers = fs.functionalize(model)
    trained = sum(x.numel() for x in model.parameters() if x.requires_grad)
    total = sum(x.numel() for x in model.parameters())
    show(f"\ncount by {direction:+}: {trained:,} of {total:,} parameters are trained")

    def loss_fn(params, batch):
        output, _ = apply(params, buffers, **batch)
        return output.loss

    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(rate), mesh=mesh, axis="data", stage=3)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    state = opt.init(params)
    for number in range(1, args.steps + 1):
        batch = batch_of(number, args.batch, direction)
        params, state, metrics = step(params, state, batch)
        if number % max(args.steps // 5, 1) == 0 or number == 1:
            show(f"step {number:4}   loss {metrics['loss'].item():.6f}")

    # Into the module, for what follows.
    for name, value in fs.unshard(params).items():
        model.get_parameter(name).data.copy_(value)
    return params


@torch.no_grad()
def counted(model, count=8):
    """Return the hours by which a model goes on after 12, 12 + 1 or 12 - 1 as it has learnt."""
    hours = [12]
    for _ in range(count):
        scores = model(input_ids=torch.tensor([hours])).logits[0, -1]
        hours.append(scores.argmax().item())
    return " ".join(map(str, hours))


def main():
    args = options()
    mesh = fs.make_mesh({"data": fs.mesh.process_count(default=args.devices)})
    model = new_llama()
    train(model, mesh, args, direction=1, rate=1e-2)
    show(counted(model))

    tuned = with_adapter(model, args.adapter)
    params = train(tuned, mesh, args, direction=-1, rate=1e-2)
    show(counted(tuned))
    if args.folder is not None:
        # What peft reads: PeftModel.from_pretrained(model, folder).
        if args.adapter == "peft":
            tuned.save_pretrained(args.folder, is_main_process=fs.mesh.process_index() == 0)
        else:
            fs.export(args.folder, params, to="peft", model=tuned)


def show(text):
    if fs.mesh.process_index() == 0:
        print(text)


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", choices=["own", "peft"], default="own")
    parser.add_argument("--devices", type=int, default=4, help="virtual ones")
    parser.add_argument("--steps", type=int, default=60, help="of each of the two trainings")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="of the adapter, which peft reads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
