"""Tensor parallelism with data parallelism: parallelize_module, fully_shard, --tp."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(x + self.down(F.relu(self.up(x))))


parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
args = parser.parse_args()
world = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cuda", (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
model = Net().cuda()
parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + mesh["dp"].get_local_rank())
for i in range(10):
    x = torch.rand(4, 6, device="cuda")
    y = x.sum(1, keepdim=True)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(i, loss.item())
dist.destroy_process_group()
