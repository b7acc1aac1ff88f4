"""accelerate: prepare, accumulate, clip, a schedule, evaluation."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", default="")
    parser.add_argument("--dispatch", action="store_true")
    parser.add_argument("--split", action="store_true")
    args = parser.parse_args()
    config = DataLoaderConfiguration(
        dispatch_batches=args.dispatch or None, split_batches=args.split
    )
    accelerator = Accelerator(
        gradient_accumulation_steps=2, mixed_precision="bf16", dataloader_config=config
    )
    set_seed(42)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 2))
    loader = DataLoader(data, shuffle=True, batch_size=4)
    test_loader = DataLoader(data, shuffle=False, batch_size=8)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    accelerator.print(f"{len(loader)} batches, {accelerator.num_processes} processes")
    trained = accelerator.unwrap_model(model) if args.bug == "unwrapped" else model
    for epoch in range(2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(trained(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for x, y in test_loader:
                predictions, labels = accelerator.gather_for_metrics((model(x), y))
                accelerator.print(epoch, nn.functional.mse_loss(predictions, labels).item())
    accelerator.wait_for_everyone()
    accelerator.save_state("/nowhere/state")


if __name__ == "__main__":
    main()
