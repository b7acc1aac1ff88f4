"""A loop of Lightning Fabric, and the same loop of the Booster: the lines that differ.

    python examples/recipes/fabric.py                              two virtual devices, ZeRO-2
    python examples/recipes/fabric.py --library fabric             Fabric itself, one device
    fshard run --processes 2 examples/recipes/fabric.py

| Fabric                                    | Booster                                        |
|-------------------------------------------|------------------------------------------------|
| Fabric(strategy=...), fabric.launch()     | Booster(plugin), fs.run                        |
| fabric.setup, fabric.setup_dataloaders    | booster.boost                                  |
| fabric.backward(loss)                     | booster.backward(loss, optimizer)              |
| fabric.clip_gradients(model, optimizer)   | booster.clip_grad_norm(optimizer, norm)        |
| fabric.all_reduce(loss)                   | booster.mean(loss, loader.samples)             |
| fabric.save(path, state)                  | booster.save(path, model, optimizer)           |
| a batch size of each device               | a batch size of all devices together           |
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs


def parts():
    """Return a model, its optimizer and a loader, for one device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(64, 6)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=16)
    return model, optimizer, loader


def by_fabric():
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer, loader = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


def by_booster():
    booster = fs.Booster(fs.ZeroPlugin(stage=2))
    model, optimizer, loader = parts()
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        booster.backward(loss, optimizer)
        booster.clip_grad_norm(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(booster.mean(loss.detach(), loader.samples).item())
    return losses


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", choices=["fshard", "fabric"], default="fshard")
    parser.add_argument("--devices", type=int, default=2, help="virtual ones")
    args = parser.parse_args()
    if args.library == "fabric":
        losses = by_fabric()
    else:
        mesh = fs.make_mesh({"data": fs.mesh.process_count(default=args.devices)})
        losses, *_ = fs.run(by_booster, mesh=mesh)
    if fs.mesh.process_index() == 0:
        for number, loss in enumerate(losses, 1):
            print(f"step {number}   loss {loss:.6f}")


if __name__ == "__main__":
    main()
