"""Two models with an optimizer each, which step in turn; noise is given by the loader."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group(backend="nccl", init_method="env://")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
data = TensorDataset(torch.arange(96.0).view(32, 3).sin(), torch.arange(64.0).view(32, 2).cos())
loader = DataLoader(data, 4, sampler=DistributedSampler(data), drop_last=True)
generator = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Linear(8, 3)).to(device)
critic = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1)).to(device)
generator = DistributedDataParallel(generator, device_ids=[device.index])
critic = DistributedDataParallel(critic, device_ids=[device.index])
opt_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
opt_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
is_kept = "--kept" in sys.argv

for real, noise in loader:
    real, noise = real.to(device), noise.to(device)
    if not is_kept:
        opt_critic.zero_grad()
    loss = critic(generator(noise).detach()).mean() - critic(real).mean()
    loss.backward()
    opt_critic.step()
    if is_kept:
        continue

    opt_generator.zero_grad()
    loss = -critic(generator(noise)).mean()
    loss.backward()
    opt_generator.step()
dist.destroy_process_group()
