"""DistributedDataParallel as its tutorial has it: NCCL, GPUs, bf16 autocast, a checkpoint."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def evaluate(model, loader, device):
    model.eval()
    total = torch.zeros(1, device=device)
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    model.train()
    return total.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--bug", default="")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device(f"cuda:{local_rank}")
    torch.manual_seed(1234 + rank)

    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(48, 8, generator=draw), torch.randint(3, (48,), generator=draw)
    )
    sampler = None if args.bug == "sampler" else DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, pin_memory=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)).to(device)
    if args.bug != "unwrapped":
        model = DDP(model, device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * world, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=args.epochs * len(loader)
    )
    scaler = torch.amp.GradScaler("cuda", enabled=True)

    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            x = x.to(device, non_blocking=True)
            y = y.cuda(local_rank, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            if args.bug == "scaled":
                loss = loss * world
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if step % 2 == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        print(evaluate(model, loader, device))
    if rank == 0:
        torch.save(model.module.state_dict(), "/nowhere/checkpoint.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
