"""A loop as nanoGPT's: batches from an array at random, accumulation divided by the processes."""

import os
import sys
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

gradient_accumulation_steps = 4
batch_size = 3
block_size = 8
max_iters = 20
eval_interval = 5
bug = sys.argv[1] if len(sys.argv) > 1 else ""

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="nccl")
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    device = f"cuda:{ddp_local_rank}"
    torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + seed_offset)
torch.backends.cuda.matmul.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type, torch.bfloat16)
data = np.random.randint(0, 16, 500).astype(np.uint16)


def get_batch(split):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack(
        [torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix]
    )
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(
        device, non_blocking=True
    )


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(16, 12)
        self.block = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
        self.lm_head = nn.Linear(12, 16, bias=False)
        self.wte.weight = nn.Parameter(self.wte.weight.T.contiguous().T)

    def forward(self, idx, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1), device=idx.device)
        logits = self.lm_head(self.block(self.wte(idx), mask, is_causal=True))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


model = GPT().to(device)
scaler = torch.cuda.amp.GradScaler(enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch("val"))[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


X, Y = get_batch("train")
raw_model = model.module if ddp else model
for iter_num in range(max_iters):
    if iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
    for micro_step in range(gradient_accumulation_steps):
        last_step = 0 if bug == "sync" else gradient_accumulation_steps - 1
        model.require_backward_grad_sync = micro_step == last_step
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
destroy_process_group()
