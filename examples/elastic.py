"""Train on as many processes as there are. When some die, or more are started, the others go on.

    fshard run --elastic --processes 4 examples/elastic.py --folder runs/elastic --seconds 0.5

Kill any of the processes: the others go on with the step after the last one that all had finished.
Start the line again in another terminal, or `--processes 1` of it: its processes take part too.
Kill all: the same line goes on from the last checkpoint in the folder. So does a launcher that
ends all processes when one dies, and starts them again, such as torchrun.

In reproducible mode the parameters after the last step have the bits of a run that lost nothing, on
1, 2, 4 or 8 processes; others wait until they are needed.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
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


def make_mesh(devices):
    """Return a mesh of devices; None for a number of them that the slices cannot be divided by."""
    if SLICES % len(devices) != 0:
        return None
    return fs.make_mesh({"data": len(devices)}, devices=devices)


def train(run, options):
    """Train from the last version of a run to the last step; called again after each change."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )
    apply, params, buffers = fs.functionalize(model)
    params = fs.shard_params(params, fs.fsdp("data"), mesh=run.mesh)
    opt = fs.optim.adamw(1e-3)

    def loss_fn(params, batch):
        predicted, _ = apply(params, buffers, batch["x"])
        return nn.functional.mse_loss(predicted, batch["y"])

    step_fn = fs.train_step(
        loss_fn, opt, mesh=run.mesh, batch=P("data"), reproducible=True, slices=SLICES
    )
    kept = {"params": params, "state": opt.init(params), "steps": 0}
    if run.latest is not None:
        kept = run.restore(kept)

    with open(Path(options.folder) / f"log-{os.getpid()}.jsonl", "a") as log:
        while kept["steps"] < options.steps:
            kept["params"], kept["state"], metrics = step_fn(
                kept["params"], kept["state"], batch_of(kept["steps"])
            )
            kept["steps"] += 1
            line = {
                "step": kept["steps"],
                "loss": float(metrics["loss"]).hex(),
                "process": os.getpid(),
                "processes": run.mesh.size,
                "at": time.time(),
            }
            print(json.dumps(line), file=log, flush=True)
            run.save(kept["steps"], kept, metrics=metrics)
            time.sleep(options.seconds)
    fs.save(Path(options.folder) / "end", kept["params"])


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

    Path(options.folder).mkdir(parents=True, exist_ok=True)
    folder = fs.Checkpoints(Path(options.folder) / "checkpoints", keep=2, every=options.every)
    elastic_train = fs.elastic(make_mesh, folder=folder, devices=1)(train)
    elastic_train(options)


if __name__ == "__main__":
    main()
