"""DistributedDataParallel by torch.multiprocessing.spawn, with a trainer class, accumulation and a
compiled model.
"""

import os
import sys

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Numbers(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, loader, optimizer, rank, bug):
        self.rank = rank
        self.model = DDP(torch.compile(model.to(rank)), device_ids=[rank])
        self.loader = loader
        self.optimizer = optimizer
        self.bug = bug

    def train(self, epochs):
        for epoch in range(epochs):
            size = len(next(iter(self.loader))[0])
            print(f"[GPU{self.rank}] epoch {epoch} | batch size {size} | steps {len(self.loader)}")
            self.loader.sampler.set_epoch(epoch)
            for number, (source, targets) in enumerate(self.loader):
                source, targets = source.to(self.rank), targets.to(self.rank)
                is_last = number % 2 == 1
                # The mistake: the microbatch that should reduce is the one that does not.
                self.model.require_backward_grad_sync = is_last != (self.bug == "sync")
                loss = F.mse_loss(self.model(source), targets) / 2
                loss.backward()
                if is_last:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            if self.rank == 0:
                torch.save(self.model.module.state_dict(), "/nowhere/checkpoint.pt")


def main(rank, world_size, bug):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    torch.cuda.set_device(rank)
    init_process_group(backend="nccl", rank=rank, world_size=world_size)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    data = Numbers(64)
    loader = DataLoader(
        data, batch_size=4, pin_memory=True, shuffle=False, sampler=DistributedSampler(data)
    )
    Trainer(model, loader, optimizer, rank, bug).train(2)
    destroy_process_group()


if __name__ == "__main__":
    bug = sys.argv[1] if len(sys.argv) > 1 else ""
    world_size = torch.cuda.device_count()
    mp.spawn(main, args=(world_size, bug), nprocs=world_size)
