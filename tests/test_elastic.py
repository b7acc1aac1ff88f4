"""The elastic example ends with the bits of a run that nothing disturbed, whatever joined, failed
or stopped meanwhile.

The oracle is the same example, run from start to end by one process.
"""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
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


# -- under torchrun --------------------------------------------------------------------------------

STEPS = 60


class Job:
    """Agents of torchrun on one machine, one process each."""

    def __init__(self, folder):
        self.folder = folder
        self.agents = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]

    def start(self, count):
        """Start some agents more."""
        options = {
            "--nnodes": "1:4",
            "--nproc-per-node": "1",
            "--max-restarts": "9",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"localhost:{self.port}",
            "--rdzv-id": "elastic",
            "--rdzv-conf": "last_call_timeout=3,join_timeout=120,keep_alive_interval=1",
            "--monitor-interval": "0.1",
        }
        command = [sys.executable, "-m", "torch.distributed.run"]
        for option, value in options.items():
            command += [option, value]
        command += [str(EXAMPLE), "--folder", str(self.folder)]
        command += ["--steps", str(STEPS), "--seconds", "0.3"]
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **NEW_STORES}

        for _ in range(count):
            path = self.folder / f"agent-{len(self.agents)}.txt"
            with path.open("w") as output:
                agent = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **own},
                    start_new_session=True,
                )
            self.agents.append(agent)

    def wait_for_store(self):
        """Wait until the agents can meet."""
        while True:
            with socket.socket() as client:
                if client.connect_ex(("localhost", self.port)) == 0:
                    return
            time.sleep(0.05)

    def last_rows(self):
        """Return the last row of each process's log, by its number."""
        rows = {}
        for path in self.folder.glob("log-*.jsonl"):
            lines = path.read_text().splitlines()
            if lines:
                process = int(re.findall(r"\d+", path.name)[-1])
                rows[process] = json.loads(lines[-1])
        return rows

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
            assert all(agent.poll() in (None, 0, -9) for agent in self.agents), self.text()
            time.sleep(0.05)
        raise AssertionError(f"no {processes} processes trained: {self.last_rows()}\n{self.text()}")

    def text(self):
        """Return what the agents have printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent-*.txt")))

    def end(self):
        """Kill all agents and processes."""
        for agent in self.agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        kill(self.last_rows())


def children_of(agent):
    """Return the numbers of an agent's processes."""
    command = ["pgrep", "-P", str(agent.pid)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(process) for process in listed.stdout.split()]


def kill(processes):
    """Kill processes, of which some may have ended."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def is_alive(process):
    """Return True unless a process has ended: before its file is opened, or while it is read."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    state = text.rpartition(")")[2].split()[0]
    return state not in ("Z", "X")


def wait_for_end(processes, within):
    """Wait until processes have ended, at most some seconds."""
    end = time.monotonic() + within
    while any(map(is_alive, processes)):
        assert time.monotonic() < end, "these processes still wait for those that were killed"
        time.sleep(0.01)


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_training_goes_on_with_fewer_and_more_processes_with_equal_bits(tmp_path, train_alone):
    job = Job(tmp_path)
    try:
        job.start(1)  # the first one has the store in which the others meet
        job.wait_for_store()
        job.start(3)
        four = job.wait_for_steps(processes=4, after=0, steps=7)

        # Two nodes fail at once.
        killed = job.agents[2:]
        victims = []
        for agent in killed:
            victims += children_of(agent)
            os.kill(agent.pid, signal.SIGKILL)
        kill(victims)

        # The others end in about a second on an idle machine; without a message their group waits
        # for minutes.
        survivors = [process for process in four if process not in victims]
        assert len(survivors) == 2
        wait_for_end(survivors, within=60)
        failure = time.time()
        assert re.search(r"LostProcessError: .* by process \d", job.text())

        job.wait_for_steps(processes=2, after=failure, steps=6)
        job.start(2)
        job.wait_for_steps(processes=4, after=failure)
        for agent in job.agents:
            if agent not in killed:
                assert agent.wait(120) == 0, job.text()
    finally:
        job.end()

    lines = [line for path in tmp_path.glob("log-*") for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    assert {row["processes"] for row in rows} >= {2, 4}

    with_two = [row["step"] for row in rows if row["processes"] == 2 and row["at"] > failure]
    first = min(with_two)
    assert first > 5 and first % 5 == 1, "they did not go on from a checkpoint"

    assert_equal_bits(fs.restore(tmp_path / "end"), train_alone(tmp_path / "alone", STEPS))
