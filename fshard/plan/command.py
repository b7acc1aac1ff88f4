"""The commands of plans.

fshard plan         ranks the layouts of a model of Hugging Face
fshard calibrate    measures this machine, for its cluster
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from fshard.plan.estimate import PlanEstimate
from fshard.plan.layers import LayerTracer
from fshard.plan.models import Transformer
from fshard.plan.program import layered_model
from fshard.plan.search import Plans, search

OPTIMIZER = with_master_weights(adamw(3e-4))
"""The optimizer of a search."""


def run_plan(arguments: Sequence[str]) -> int:
    """Search and print the table; write the best plan if a file is given; return the exit status."""
    options = _plan_parser().parse_args(arguments)
    run = {name: vars(options)[name] for name in _RUN}
    model, machine = model_and_machine(run)
    plans = search(
        model,
        cluster=machine,
        optimizer=OPTIMIZER,
        devices=options.devices,
        global_batch=options.global_batch,
    )
    sys.stdout.write(f"{plans}\n")
    if options.out is not None:
        plans[0].save(options.out)
        _append_run(options.out, run, plans)
    return 0


_RUN = ("config", "gpu", "node", "sequence")
"""The arguments of a search that `fshard explore` needs too: the table "run" of a plan's file."""


def _plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fshard plan", description="Rank meshes and options of training a model."
    )
    add = parser.add_argument
    add("config", help="config.json of a Llama, Mistral, Qwen or GPT-2, or its folder")
    add("--devices", type=int, required=True, help="their number")
    add("--gpu", required=True, help=f"{', '.join(PRESETS)}, or a file of fshard calibrate")
    add("--node", type=int, help="devices of a node")
    add("--global-batch", type=int, required=True, help="samples of a step")
    add("--sequence", type=int, help="tokens of a sample; default: the most that the model takes")
    add("-o", "--out", help="a TOML file for the best plan: fs.Parallelism.load, fshard explore")
    return parser


def _append_run(path: str, run: Mapping[str, Any], plans: Plans) -> None:
    """Append the arguments, with the path of the model from any folder, and the best plans."""
    table = {**run, "config": str(Path(run["config"]).resolve()), "tried": plans.tried}
    lines = ["", "[run]", *_lines(table)]
    for row in plans.rows():
        lines += ["", "[[run.plans]]", *_lines(row)]
    with Path(path).open("a", encoding="utf-8") as file:
        file.write("\n".join([*lines, ""]))


def _lines(values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of TOML; None, which TOML has not, is left out."""
    lines = list[str]()
    for name, value in values.items():
        if value is not None:
            lines.append(f"{name} = {json.dumps(value)}")
    return lines


def model_and_machine(run: Mapping[str, Any]) -> tuple[Transformer, Cluster]:
    """Return the model and the machine of a search."""
    model = Transformer.from_config(run["config"], sequence=run.get("sequence"))
    return model, cluster(run["gpu"], node=run.get("node"))


class SavedPlan(NamedTuple):
    """A plan that `fshard plan -o` has written.

    Args:
        estimate: of the plan, on its machine.
        model: the sizes of its model.
        run: the arguments and the best plans of the search.
    """

    estimate: PlanEstimate
    model: Transformer
    run: Mapping[str, Any]


def read_plan(path: str) -> SavedPlan:
    """Return the plan of a file that `fshard plan -o` has written."""
    run = read_table(path, "explore").get("run")
    if not isinstance(run, Mapping) or not {"config", "gpu"} <= run.keys():
        raise PlanError(
            f"explore: {path} must be a file of `fshard plan -o`, with config and gpu in a table "
            f"run; got {run!r:.60}."
        )
    model, machine = model_and_machine(run)
    tracer = LayerTracer(layered_model(model, None, OPTIMIZER, None, None), machine)
    return SavedPlan(PlanEstimate(Parallelism.load(path), tracer), model, run)


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
