"""A pipeline of two stages: clipping by the norm of all, the loss printed by the last stage."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset


def clip(params, max_norm, bug):
    if bug == "clip":
        nn.utils.clip_grad_norm_(params, max_norm)
        return
    total = sum(p.grad.square().sum() for p in params)
    dist.all_reduce(total)
    for p in params:
        p.grad.mul_((max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", default="")
    args = parser.parse_args()
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    torch.manual_seed(0)

    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    per_stage = len(layers) // size
    names = [str(i) for i in range(rank * per_stage, (rank + 1) * per_stage)]
    model = nn.Sequential()
    for name in names:
        model.add_module(name, layers[int(name)])
    model.to(device)
    stage = PipelineStage(model, rank, size, device)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 4))

    for x, y in DataLoader(data, 8):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            output = schedule.step(target=y, losses=losses)
        clip([*model.parameters()], 1e-2, args.bug)
        optimizer.step()
        if rank == size - 1:
            print("loss", sum(losses).item() / len(losses))
            if args.bug == "output":
                print("mean", output.mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
