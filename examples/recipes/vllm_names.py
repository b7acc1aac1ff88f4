"""Write a trained Llama for vLLM: as a folder of Hugging Face, or in vLLM's own names and layouts.

    python examples/recipes/vllm_names.py --folder runs/vllm --ranks 2
    fshard run --processes 2 examples/recipes/vllm_names.py --folder runs/vllm

`hf` is what vLLM and other engines read, `LLM("runs/vllm/hf")`: their loaders stack and shard the
weights. `sharded` has what each rank of vLLM keeps, in the files of load_format="sharded_state": q, k
and v are one matrix, and gate and up another; rows of the vocabulary are padded to a multiple of 64.
To send weights to a running engine, see the guide of refit: a trace of its loader replaces this table.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import torch
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM

import fshard as fs
from fshard import P

STACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""By the name of a layer: the matrix of vLLM that it is a part of, and its place there."""

ROW_PARALLEL = ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")
VOCABULARY_MULTIPLE = 64


def vllm_weights(weights, config, rank, ranks):
    """Return the weights of a rank of vLLM, by its names.

    Args:
        weights: pairs of a name and a full tensor, those of transformers' Llama.
        config: of the model.
        rank, ranks: of tensor parallelism.
    """
    parts = defaultdict(dict)
    for name, x in weights:
        path, layer = name.removesuffix(".weight").rpartition(".")[::2]
        target, place = STACKED.get(layer, (layer, 0))
        full_name = f"{path}.{target}.weight" if path else f"{target}.weight"
        parts[full_name][place] = shard_of(x, layer, config, rank, ranks)
    return {
        name: torch.cat([shards[place] for place in sorted(shards)])
        for name, shards in parts.items()
    }


def shard_of(x, layer, config, rank, ranks):
    """Return the part of a full weight that a rank keeps: a copy, so that the weight is freed."""
    if layer in ROW_PARALLEL:
        return x.chunk(ranks, 1)[rank].clone()
    if layer in VOCABULARY:
        missing = -len(x) % VOCABULARY_MULTIPLE
        return pad(x, (0, 0, 0, missing)).chunk(ranks)[rank].clone()
    if layer in ("k_proj", "v_proj"):
        # Ranks that are more than the heads of keys have copies of them.
        copies = max(1, ranks // config.num_key_value_heads)
        return x.chunk(ranks // copies)[rank // copies].clone()
    if layer in STACKED:
        return x.chunk(ranks)[rank].clone()
    return x.clone()


def trained(mesh, config, steps=2):
    """Return the parameters of a Llama after some steps of ZeRO-3."""
    torch.manual_seed(0)
    apply, params, buffers = fs.functionalize(LlamaForCausalLM(config))
    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(1e-3), mesh=mesh, axis="data", stage=3)
    tokens = torch.randint(config.vocab_size, (8, 12))

    def loss_fn(params, tokens):
        return apply(params, buffers, input_ids=tokens, labels=tokens)[0].loss

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    state = opt.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state, tokens)
    return params


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2, help="of vLLM's tensor parallelism")
    args = parser.parse_args()
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    mesh = fs.make_mesh({"data": fs.mesh.process_count(default=2)})
    params = trained(mesh, config)

    fs.export(args.folder / "hf", params, to="hf", config=config)
    for rank in range(args.ranks):
        # All processes unshard one weight after another, and call `export`, by which one writes.
        weights = vllm_weights(fs.refit.stream(params), config, rank, args.ranks)
        file = args.folder / "sharded" / f"model-rank-{rank}-part-0.safetensors"
        file.parent.mkdir(exist_ok=True)
        fs.export(file, weights, to="safetensors")
        if fs.mesh.process_index() == 0:
            print(file)
            for name, x in weights.items():
                if "layers.1" not in name:
                    print(f"  {name:48} {tuple(x.shape)}")


if __name__ == "__main__":
    main()
