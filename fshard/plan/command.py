"""`fshard calibrate`: measure this machine, and write its numbers into a file for `fs.plan.cluster`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from fshard.launching.launch import launch
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.launchers import process_count
from fshard.plan.calibrate import calibrate
from fshard.plan.cluster import Cluster


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
