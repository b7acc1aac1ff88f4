"""fully_shard in a loop as torchtitan's: a mesh, accumulation, tokens counted among all, clipping, a
schedule.
"""

import argparse
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset


@dataclass
class Config:
    vocabulary: int = 32
    dim: int = 16
    layers: int = 2
    length: int = 8


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.RMSNorm(config.dim)
        self.up = nn.Linear(config.dim, 32, bias=False)
        self.down = nn.Linear(32, config.dim, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.5)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def forward(self, tokens):
        h = self.embedding(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h)).float()


class Text(IterableDataset):
    def __init__(self, config, rank, world):
        self.config, self.rank, self.world = config, rank, world

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.rank)
        while True:
            tokens = torch.randint(
                self.config.vocabulary, (self.config.length + 1,), generator=draw
            )
            labels = tokens[1:].clone()
            labels[: self.rank + 1] = -100
            yield {"input": tokens[:-1]}, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bug", default="")
    args = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(f"{device_type}:{int(os.environ['LOCAL_RANK'])}")
    getattr(torch, device_type).set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo")
    mesh = init_device_mesh(device_type, (world,), mesh_dim_names=("dp_shard",))
    rank = mesh["dp_shard"].get_local_rank()

    config = Config()
    with torch.device("meta"):
        model = Model(config)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    model.to_empty(device=device_type)
    with torch.no_grad():
        model.init_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 2) * (1 + math.cos(step / args.steps)) / 2
    )
    batches = iter(DataLoader(Text(config, rank, world), batch_size=2, num_workers=0))

    accumulation = 2
    for step in range(args.steps):
        optimizer.zero_grad()
        microbatches = []
        tokens = torch.tensor(0, dtype=torch.int64)
        for _ in range(accumulation):
            inputs, labels = next(batches)
            tokens += (labels != -100).sum()
            microbatches.append((inputs, labels))
        tokens = tokens.to(device)
        if args.bug != "tokens":
            dist.all_reduce(tokens, group=mesh["dp_shard"].get_group())
        else:
            tokens = tokens * world
        for inputs, labels in microbatches:
            logits = model(inputs["input"].to(device))
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels.to(device).flatten(0, 1), reduction="sum"
            )
            # fully_shard takes the mean of gradients; this is their sum over all tokens.
            (loss / tokens * world).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f} norm {norm.full_tensor().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
