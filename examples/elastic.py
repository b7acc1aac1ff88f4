"""Train on as many processes as there are; after a failure, or when more arrive, go on with another number of them.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1       # else nodes that join later wait for ever (torch 2.13)
    torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint localhost:29400 \\
        examples/elastic.py --folder runs/elastic

Start that line once for each of up to four nodes; all may be one machine. Kill a process, or start another line: torchrun
starts the processes of all nodes again, and these continue from the last checkpoint. In reproducible mode the parameters
after the last step have the bits of a run without failures, on 1, 2 or 4 processes; three round differently.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard import P

SLICES = 8
"""Parts of a batch whose gradients are added in one binary tree: on 1, 2, 4 or 8 processes it is the same."""


def batch_of(step):
    """Draw the global batch of a step, on every process."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(3 * SLICES, 32, generator=draw)
    return {"x": x, "y": x.sin().sum(1, keepdim=True)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, help="of the checkpoints and the log")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="to wait in each step, for time to kill a process",
    )
    options = parser.parse_args()

    processes = fs.mesh.process_count()
    mesh = fs.make_mesh({"data": processes})
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )
    apply, params, buffers = fs.functionalize(model)
    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    opt = fs.optim.adamw(1e-3)

    def loss_fn(params, batch):
        predicted, _ = apply(params, buffers, batch["x"])
        return nn.functional.mse_loss(predicted, batch["y"])

    slices = SLICES if SLICES % processes == 0 else processes
    step_fn = fs.train_step(
        loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True, slices=slices
    )
    folder = fs.Checkpoints(Path(options.folder) / "checkpoints", keep=2, every=options.every)
    run = {"params": params, "state": opt.init(params), "steps": 0}
    if folder.latest is not None:
        run = folder.restore(run)

    with open(Path(options.folder) / f"log-{os.getpid()}.jsonl", "a") as log:
        while run["steps"] < options.steps:
            run["params"], run["state"], metrics = step_fn(
                run["params"], run["state"], batch_of(run["steps"])
            )
            run["steps"] += 1
            line = {
                "step": run["steps"],
                "loss": float(metrics["loss"]).hex(),
                "processes": processes,
                "at": time.time(),
            }
            print(json.dumps(line), file=log, flush=True)
            folder.save(run["steps"], run, wait=False, metrics=metrics)
            time.sleep(options.seconds)
    folder.wait()
    fs.save(Path(options.folder) / "end", run["params"])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
