"""Train a Llama of transformers on a mesh of four axes: stages, data, tokens and layers, with ZeRO-3.

    python examples/tensor_llama.py                                      eight virtual devices: 1 x 2 x 2 x 2
    python examples/tensor_llama.py --pipeline 2                         two stages of its blocks: 2 x 1 x 2 x 2
    python examples/tensor_llama.py --seq 4 --model 1                    tokens over four, each layer on one
    fshard run --processes 4 examples/tensor_llama.py                    four processes: 1 x 1 x 2 x 2
    torchrun --nproc-per-node 2 examples/tensor_llama.py --model 1       two processes: 1 x 1 x 2 x 1

The model is unchanged. A plan shards its layers over `model` and its tokens over `seq`, in zigzag order; ZeRO shards
over `data` what is left. It learns to count on: 3 5 7 9 ... in steps of any size, around a clock. Nothing is downloaded.
"""

import argparse
from collections import Counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fshard as fs

HOURS, LENGTH = 24, 32


def llama():
    torch.manual_seed(0)  # all processes draw the same numbers
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": LENGTH,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=HOURS, pad_token_id=0, initializer_range=0.1, **sizes, **heads)
    )


def batch_of(number, size):
    """Draw ways to count. Every process draws the same global batch."""
    draw = torch.Generator().manual_seed(number)
    start, step = torch.randint(HOURS, (2, size, 1), generator=draw)
    hours = (start + step * torch.arange(LENGTH)) % HOURS
    return {
        "input_ids": hours,
        "labels": hours,
    }  # the model's loss compares with the hour that follows


def main():
    args = options()
    devices = fs.mesh.process_count(default=args.devices)
    data = devices // (args.pipeline * args.seq * args.model)
    mesh = fs.make_mesh({"pipe": args.pipeline, "data": data, "seq": args.seq, "model": args.model})
    is_first = fs.mesh.process_index() == 0
    show = print if is_first else lambda *_: None

    shared = {"tensor": args.model, "sequence": args.seq, "sequence_mode": "zigzag"}
    stages = {"pipeline": args.pipeline, "blocks": "model.layers", "microbatches": 2}
    plugin = fs.HybridParallelPlugin(
        mesh=mesh, sample=batch_of(0, 2), zero_stage=3, **shared, **stages
    )
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-2))
    booster = fs.Booster(plugin)
    state = booster.init(llama(), opt)  # the loss is the model's own

    show(f"{mesh}\n")
    trees = state.params if args.pipeline > 1 else [state.params]
    params = {name: x for tree in trees for name, x in tree.items()}
    for name in (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ):
        show(f"{name:38} {fs.typeof(params[name])}")

    show()
    for number in range(1, args.steps + 1):
        state, metrics = booster.step(state, batch_of(number, args.batch))
        if number in (1, args.steps) or number % 10 == 0:
            show(f"step {number:3}   loss {metrics['loss'].item():.4f}")

    with fs.ledger() as comm:
        booster.step(state, batch_of(0, args.batch))
    sent = Counter()
    for (kind, axes), (_, count) in comm.by_collective().items():
        sent["+".join(sorted(axes)), kind] += int(count)
    show("\nA step sends, in bytes of each device:")
    for (axes, kind), count in sorted(sent.items()):
        show(f"{axes:16} {kind:13} {count:9,}")


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", type=int, default=8, help="virtual ones; processes are as many as were started"
    )
    parser.add_argument("--pipeline", type=int, default=1, help="stages of blocks")
    parser.add_argument("--seq", type=int, default=2, help="devices that share the tokens")
    parser.add_argument("--model", type=int, default=2, help="devices that share each layer")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    return parser.parse_args()


if __name__ == "__main__":
    main()
