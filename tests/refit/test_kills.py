"""A process that is killed while a version is sent leaves all others with one and the same version.

The oracle is the loader of the engine: each survivor compares what it serves with a load of the version.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import time

import pytest
import torch

from tests.helpers.sampled import THOROUGH
from tests.refit.killed import send_until_one_fails

PROCESSES = 4
KILLS = 100 if THOROUGH else 3

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["fshard", "tests.refit.killed"])


@pytest.fixture
def start(tmp_path):
    """Start the processes; return them when each has two versions. The killed one is the parent's."""
    started = []

    def start(kind):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(PROCESSES):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(PROCESSES),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
            }
            process = context.Process(target=run_process, args=(tmp_path, kind, variables))
            process.start()
            started.append(process)
        end = time.time() + 240
        while len([*tmp_path.glob("ready-*")]) < PROCESSES:
            assert all(process.is_alive() for process in started), outputs(tmp_path)
            assert time.time() < end, "the processes have not started"
            time.sleep(0.01)
        return started

    yield start
    for process in started:
        process.kill()
        process.join()


def run_process(folder, kind, variables):
    """Be one of the processes, whose output is in a file."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    output = os.open(folder / f"output-{variables['RANK']}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    send_until_one_fails(folder, delta=kind == "delta")


def outputs(folder):
    return "\n".join([path.read_text() for path in sorted(folder.glob("output-*"))])


@pytest.mark.parametrize("kill", range(KILLS))
def test_kill_in_a_send_leaves_one_version_everywhere(start, tmp_path, kill):
    draw = random.Random(kill)
    victim = kill % PROCESSES  # trainers and engines, the process with the store among them
    processes = start(draw.choice(["delta", "full"]))

    time.sleep(draw.random() * 0.2)
    os.kill(processes[victim].pid, signal.SIGKILL)
    killed = time.time()
    for process in processes:
        process.join(60)

    results = {}
    for rank in {*range(PROCESSES)} - {victim}:
        path = tmp_path / f"result-{rank}"
        assert path.exists(), outputs(tmp_path)
        results[rank] = json.loads(path.read_text())
    assert len({result["version"] for result in results.values()}) == 1, results
    assert all(result["has_version"] is not False for result in results.values()), results
    seconds = max(result["end"] for result in results.values()) - killed
    neighbour = victim ^ 1  # of the same mesh, which has lost it
    works = {rank: x["works"] for rank, x in results.items() if rank != neighbour}
    assert all(value is True for value in works.values()), (works, results)
    assert seconds < 10  # a tenth of it on processors that do nothing else
