"""Train on the mesh that accelerate has made: its DeviceMesh is a mesh here, with its groups.

    fshard run --processes 4 examples/recipes/accelerate_mesh.py
    torchrun --nproc-per-node 2 examples/recipes/accelerate_mesh.py

`fs.mesh.from_device_mesh` takes any DeviceMesh, and `fs.mesh.to_device_mesh` gives one back. Axes keep
accelerate's names: here "dp_replicate" has copies, and ZeRO-3 shards along "dp_shard" (HSDP).
"""

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.parallelism_config import ParallelismConfig
from torch import nn

import fshard as fs
from fshard import P


def main():
    processes = PartialState(cpu=True).num_processes  # accelerate starts torch.distributed
    replicas = 2 if processes % 4 == 0 else 1
    config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=processes // replicas)
    mesh = fs.mesh.from_device_mesh(config.build_device_mesh("cpu"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    x = torch.randn(16, 8)
    batch = {"x": x, "y": x.sin().sum(1, keepdim=True)}
    apply, full, buffers = fs.functionalize(model)

    def loss_fn(params, batch):
        predicted, _ = apply(params, buffers, batch["x"])
        return nn.functional.mse_loss(predicted, batch["y"])

    params = fs.shard_params(full, fs.fsdp("dp_shard"), mesh=mesh)
    opt = fs.optim.adamw(1e-2)
    sharded_opt = fs.partition_optimizer(opt, mesh=mesh, axis="dp_shard", stage=3)
    step = fs.train_step(loss_fn, sharded_opt, mesh=mesh, batch=P(mesh.axis_names))
    state = sharded_opt.init(params)
    losses = []
    for _ in range(5):
        params, state, metrics = step(params, state, batch)
        losses.append(metrics["loss"].item())

    # The same steps on one device, in this process.
    plain, plain_state = full, opt.init(full)
    for loss in losses:
        grads, expected = torch.func.grad_and_value(loss_fn)(plain, batch)
        torch.testing.assert_close(torch.tensor(loss), expected.detach())
        plain, plain_state = opt.step(grads, plain_state, plain)
    if dist.get_rank() == 0:
        print(mesh)
        for number, loss in enumerate(losses, 1):
            print(f"step {number}   loss {loss:.6f}")


if __name__ == "__main__":
    main()
