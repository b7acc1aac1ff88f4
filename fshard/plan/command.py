"""`fshard plan`: rank the layouts of a model of Hugging Face. `fshard calibrate`: measure this machine, for its cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fshard.errors import PlanError
from fshard.launching.launch import launch
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.launchers import process_count
from fshard.optim.rules.adam import adamw
from fshard.optim.wrappers import with_master_weights
from fshard.parallelism.tables import read_table
from fshard.parallelism.value import Parallelism
from fshard.plan.calibrate import calibrate
from fshard.plan.cluster import PRESETS, Cluster, cluster
from fshard.plan.cost import Cost
from fshard.plan.estimate import PlanEstimate
from fshard.plan.layers import LayerTracer
from fshard.plan.models import Transformer
from fshard.plan.program import layered_model
from fshard.plan.search import search

OPTIMIZER = with_master_weights(adamw(3e-4))
"""The optimizer of a search."""


def run_plan(arguments: Sequence[str]) -> int:
    """Search, print the table, and write the best plan if a file is given; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="fshard plan", description="Rank meshes and options of training a model."
    )
    parser.add_argument(
        "config", help="config.json of a Llama, Mistral, Qwen or GPT-2, or its folder"
    )
    parser.add_argument("--devices", type=int, required=True, help="their number")
    parser.add_argument(
        "--gpu", required=True, help=f"{', '.join(PRESETS)}, or a file of fshard calibrate"
    )
    parser.add_argument("--node", type=int, help="devices of a node")
    parser.add_argument("--global-batch", type=int, required=True, help="samples of a step")
    parser.add_argument(
        "--sequence", type=int, help="tokens of a sample; default: the most that the model takes"
    )
    parser.add_argument(
        "-o", "--out", help="a TOML file for the best plan: fs.Parallelism.load, fshard explore"
    )
    options = parser.parse_args(arguments)
    run = {name: getattr(options, name) for name in ("config", "gpu", "node", "sequence")}
    model, machine = model_and_machine(run)
    counts = {"devices": options.devices, "global_batch": options.global_batch}
    plans = search(model, cluster=machine, optimizer=OPTIMIZER, **counts)
    sys.stdout.write(f"{plans}\n")
    if options.out is not None:
        plans[0].save(options.out)
        run |= {"config": str(Path(options.config).resolve())}
        lines = [f"{name} = {json.dumps(x)}" for name, x in run.items() if x is not None]
        with Path(options.out).open("a", encoding="utf-8") as file:
            file.write("\n".join(["", "[run]", *lines, ""]))
    return 0


def model_and_machine(run: Mapping[str, Any]) -> tuple[Transformer, Cluster]:
    """Return the model and the machine of a search."""
    return Transformer.from_config(run["config"], sequence=run.get("sequence")), cluster(
        run["gpu"], node=run.get("node")
    )


def cost_of_plan(path: str) -> Cost:
    """Return the cost of the program of a plan that `fshard plan -o` has written."""
    run = read_table(path, "explore").get("run", {})
    if not {"config", "gpu"} <= run.keys():
        raise PlanError(
            f"explore: {path} must be a file of `fshard plan -o`, with config and gpu in a table run; got {run}."
        )
    model, machine = model_and_machine(run)
    tracer = LayerTracer(layered_model(model, None, OPTIMIZER, None, None), machine)
    return PlanEstimate(Parallelism.load(path), tracer).cost(model.build())


def run_calibrate(arguments: Sequence[str]) -> int:
    """Measure, write, and print the path; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="fshard calibrate", description="Measure this machine in about half a minute."
    )
    cores = torch.cuda.device_count() or max((os.cpu_count() or 1) // 2, 1)
    parser.add_argument(
        "--processes", type=int, default=cores, help="that compute at once (%(default)s)"
    )
    parser.add_argument(
        "-o", "--out", default="cluster.toml", help="the file to write (%(default)s)"
    )
    options = parser.parse_args(arguments)
    machine = launch(_measured, processes=options.processes)[0]
    machine.save(options.out)
    sys.stdout.write(f"{options.out}\n")
    return 0


def _measured() -> Cluster:
    torch.set_num_threads(1)
    return calibrate(make_mesh({"all": process_count()}))
