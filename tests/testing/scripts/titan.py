"""torchtitan's debug models, fully_shard with tensor parallelism, in a loop as its trainer's.

Its kernels of triton, which are for GPUs alone, and its trainer, which imports data sets, are
replaced by empty modules.
"""

import argparse
import os
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class _Absent(ModuleType):
    """A module of which nothing is used."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"Config": type("Config", (), {})})


for name in ("distributed.minimal_async_ep.kernels", "trainer"):
    sys.modules[f"torchtitan.{name}"] = _Absent(name)

import spmd_types as spmd  # noqa: E402
from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.spmd_types import annotate_input_spmd_types  # noqa: E402


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama3")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--backend", default="partial_dtensor")
    parser.add_argument("--vocabulary", type=int, default=128)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")

    parallelism = ParallelismConfig(
        tensor_parallel_degree=args.tp,
        expert_parallel_degree=args.ep,
        spmd_backend=args.backend,
    )
    parallel_dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    parallel_dims.build_mesh()
    dist_utils.set_spmd_backend(args.backend)
    spec = import_module(f"torchtitan.models.{args.model}").model_registry("debugmodel")
    config = spec.model
    config.layers = config.layers[:2]
    config.vocab_size = args.vocabulary
    config.tok_embeddings.num_embeddings = args.vocabulary
    config.lm_head.out_features = args.vocabulary
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = config.build()
    training = TrainingConfig(mixed_precision_param="float32")
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, fused=True)

    batch_degree, batch_rank = 1, 0
    if parallel_dims.dp_enabled:
        batch_mesh = parallel_dims.get_mesh("batch")
        batch_degree, batch_rank = batch_mesh.size(), batch_mesh.get_local_rank()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocabulary, (16, 17), generator=draw)
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:], torch.arange(16).expand(16, 16))
    sampler = DistributedSampler(data, batch_degree, batch_rank, shuffle=False)
    context = dist_utils.get_spmd_context(parallel_dims=parallel_dims)
    for inputs, labels, positions in DataLoader(data, 2, sampler=sampler):
        optimizer.zero_grad()
        count = torch.tensor(labels.numel() * batch_degree, device="cuda")
        inputs, labels, positions = inputs.cuda(), labels.cuda(), positions.cuda()
        masks = model.get_attention_masks(positions=positions)
        extra = {"positions": positions, "attention_masks": masks}
        if args.backend == "spmd_types":
            inputs, labels, extra = annotate_input_spmd_types(parallel_dims, inputs, labels, extra)
        with context():
            logits = model(inputs, **extra)
            loss = cross_entropy_loss(logits, labels, global_vocab_size=args.vocabulary) / count
            with spmd.no_typecheck():
                loss.backward()
        dist_utils.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        print(loss.item())


if __name__ == "__main__":
    main()
