"""The elastic example ends with the bits of a run that nothing disturbed, whatever joined, failed
or stopped meanwhile.

The oracle is the same example, run from start to end by one process.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import fshard as fs

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "elastic.py"

NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun opens a store for each start: agents that join later do not find the first one's (torch
2.13).
"""


@pytest.fixture
def train_alone(monkeypatch):
    """Run the example in this process, from the last checkpoint of a folder if it has one; return
    its parameters.
    """

    def train(folder, steps):
        folder.mkdir(exist_ok=True)
        arguments = ["--folder", str(folder), "--steps", str(steps)]
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return fs.restore(folder / "end")

    return train


def assert_equal_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(actual[name], parameter), name


def test_training_that_stopped_goes_on_with_equal_bits(tmp_path, train_alone):
    """After step 7, from the checkpoint of step 5."""
    train_alone(tmp_path / "stopped", steps=7)

    resumed = train_alone(tmp_path / "stopped", steps=12)

    assert_equal_bits(resumed, train_alone(tmp_path / "alone", steps=12))


STEPS = 60


class Job:
    """Programs that start processes of the example, and what these have logged."""

    def __init__(self, folder):
        self.folder = folder
        self.programs = []

    def start_program(self, command):
        """Start a program that starts processes of the example."""
        options = ["--folder", str(self.folder), "--steps", str(STEPS), "--seconds", "0.3"]
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **NEW_STORES}
        path = self.folder / f"program-{len(self.programs)}.txt"
        with path.open("w") as output:
            program = subprocess.Popen(
                [*command, str(EXAMPLE), *options],
                stdout=output,
                stderr=output,
                env={**os.environ, **own},
                start_new_session=True,
            )
        self.programs.append(program)

    def last_rows(self):
        """Return the last row of each process's log, by its number."""
        return {row["process"]: row for row in self.rows()}

    def wait_for_steps(self, processes, after, steps=1):
        """Wait until a number of processes have each trained some steps since a time; return their
        numbers.
        """

        def has_trained(row):
            is_new = row["processes"] == processes and row["at"] > after
            return is_new and row["step"] >= steps

        end = time.time() + 100
        while time.time() < end:
            trained = [process for process, row in self.last_rows().items() if has_trained(row)]
            if len(trained) == processes:
                return trained
            assert all(program.poll() in (None, 0, -9) for program in self.programs), self.text()
            time.sleep(0.05)
        raise AssertionError(f"no {processes} processes trained: {self.last_rows()}\n{self.text()}")

    def text(self):
        """Return what the programs have printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("program-*.txt")))

    def end(self):
        """Kill all programs and processes."""
        for program in self.programs:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        kill(self.last_rows())

    def rows(self):
        """Return what all processes have logged."""
        rows = []
        for path in self.folder.glob("log-*.jsonl"):
            for line in path.read_text().splitlines():
                rows.append(json.loads(line))
        return rows


def children_of(program):
    """Return the numbers of a program's processes."""
    command = ["pgrep", "-P", str(program.pid)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(process) for process in listed.stdout.split()]


def kill(processes):
    """Kill processes, of which some may have ended."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


# -- fshard run --elastic --------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.end()


def start_processes(job, count):
    """Start processes, which go on when others die."""
    run = [sys.executable, "-m", "fshard", "run", "--elastic", "--processes", str(count)]
    job.start_program(run)


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_survivors_go_on_in_the_same_processes_with_equal_bits(job, train_alone):
    start_processes(job, 4)
    four = job.wait_for_steps(processes=4, after=0, steps=3)

    # Three are left: two train, and one waits.
    failure = time.time()
    kill(four[:1])
    two = job.wait_for_steps(processes=2, after=failure, steps=6)
    assert {*two} < {*four[1:]}

    start_processes(job, 1)
    again_four = job.wait_for_steps(processes=4, after=failure)
    assert {*four[1:]} < {*again_four}
    for program in job.programs:
        assert program.wait(120) == 0, job.text()

    # A step that was interrupted is repeated, and no other.
    steps_of_one = Counter(row["step"] for row in job.rows() if row["process"] == two[0])
    assert [*steps_of_one] == [*range(1, STEPS + 1)]
    assert sum(steps_of_one.values()) <= STEPS + 1
    assert_equal_bits(fs.restore(job.folder / "end"), train_alone(job.folder / "alone", STEPS))


# -- under torchrun --------------------------------------------------------------------------------


def start_agents(job, port, count):
    """Start agents of torchrun on one machine, one process each."""
    options = {
        "--nnodes": "1:4",
        "--nproc-per-node": "1",
        "--max-restarts": "9",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"localhost:{port}",
        "--rdzv-id": "elastic",
        "--rdzv-conf": "last_call_timeout=3,join_timeout=120,keep_alive_interval=1",
        "--monitor-interval": "0.1",
    }
    command = [sys.executable, "-m", "torch.distributed.run"]
    for option, value in options.items():
        command += [option, value]
    for _ in range(count):
        job.start_program(command)


def free_port():
    """Return the number of a port at which no program listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def wait_for_store(port):
    """Wait until agents can meet."""
    while True:
        with socket.socket() as client:
            if client.connect_ex(("localhost", port)) == 0:
                return
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_processes_that_torchrun_restarts_go_on_from_a_checkpoint(job, train_alone):
    """Survivors go on by themselves; when agents are added, torchrun ends all and starts them again."""
    port = free_port()
    start_agents(job, port, 1)  # the first one has the store in which the others meet
    wait_for_store(port)
    start_agents(job, port, 3)
    four = job.wait_for_steps(processes=4, after=0, steps=7)

    # Two nodes fail at once.
    killed = job.programs[2:]
    victims = []
    for agent in killed:
        victims += children_of(agent)
        os.kill(agent.pid, signal.SIGKILL)
    failure = time.time()
    kill(victims)
    two = job.wait_for_steps(processes=2, after=failure, steps=6)
    assert {*two} == {*four} - {*victims}

    start_agents(job, port, 2)
    again_four = job.wait_for_steps(processes=4, after=failure)
    assert {*again_four}.isdisjoint(four)
    for agent in job.programs:
        if agent not in killed:
            assert agent.wait(120) == 0, job.text()

    # torchrun sends SIGTERM, on which the next step is saved.
    first = min(row["step"] for row in job.rows() if row["process"] == again_four[0])
    last_of_two = max(row["step"] for row in job.rows() if row["process"] == two[0])
    assert first == last_of_two + 1, "they did not go on from the last checkpoint"

    assert_equal_bits(fs.restore(job.folder / "end"), train_alone(job.folder / "alone", STEPS))
