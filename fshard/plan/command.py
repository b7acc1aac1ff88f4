"""`fshard plan`: rank the layouts of a model of Hugging Face. `fshard calibrate`: measure this machine, for its cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from fshard.launching.launch import launch
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.launchers import process_count
from fshard.optim.rules.adam import adamw
from fshard.optim.wrappers import with_master_weights
from fshard.plan.calibrate import calibrate
from fshard.plan.cluster import PRESETS, Cluster, cluster
from fshard.plan.models import Transformer
from fshard.plan.search import search


def run_plan(arguments: Sequence[str]) -> int:
    """Search, print the table, and write the best plan if a file is given; return the exit status."""
    parser = argparse.ArgumentParser(prog="fshard plan", description="Rank meshes and options of training a model.")
    parser.add_argument("config", help="config.json of a Llama, Mistral, Qwen or GPT-2, or its folder")
    parser.add_argument("--devices", type=int, required=True, help="their number")
    parser.add_argument("--gpu", required=True, help=f"{', '.join(PRESETS)}, or a file of fshard calibrate")
    parser.add_argument("--node", type=int, help="devices of a node")
    parser.add_argument("--global-batch", type=int, required=True, help="samples of a step")
    parser.add_argument("--sequence", type=int, help="tokens of a sample; default: the most that the model takes")
    parser.add_argument("-o", "--out", help="a TOML file for the best plan: fs.plan.ModelPlan.load")
    options = parser.parse_args(arguments)
    plans = search(
        Transformer.from_config(options.config, sequence=options.sequence),
        devices=options.devices,
        cluster=cluster(options.gpu, node=options.node),
        global_batch=options.global_batch,
        optimizer=with_master_weights(adamw(3e-4)),
    )
    sys.stdout.write(f"{plans}\n")
    if options.out is not None:
        plans[0].plan.save(options.out)
    return 0


def run_calibrate(arguments: Sequence[str]) -> int:
    """Measure, write, and print the path; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="fshard calibrate", description="Measure this machine in about half a minute."
    )
    cores = torch.cuda.device_count() or max((os.cpu_count() or 1) // 2, 1)
    parser.add_argument("--processes", type=int, default=cores, help="that compute at once (%(default)s)")
    parser.add_argument("-o", "--out", default="cluster.toml", help="the file to write (%(default)s)")
    options = parser.parse_args(arguments)
    machine = launch(_measured, processes=options.processes)[0]
    machine.save(options.out)
    sys.stdout.write(f"{options.out}\n")
    return 0


def _measured() -> Cluster:
    torch.set_num_threads(1)
    return calibrate(make_mesh({"all": process_count()}))
