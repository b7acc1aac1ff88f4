"""Lightning Fabric: setup, setup_dataloaders, a manual loop."""

import sys

import lightning_fabric as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    bug = sys.argv[1] if len(sys.argv) > 1 else ""
    fabric = L.Fabric(accelerator="cuda", devices=2, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=bug != "sampler")
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):
            is_accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating or bug == "sync"):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss / 2)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                fabric.print(f"{epoch} {number}/{len(loader)} {loss.item():.3f}")
    fabric.save("/nowhere/state.ckpt", {"model": model})


if __name__ == "__main__":
    main()
