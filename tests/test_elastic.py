"""The example under torchrun: processes die, others name them; it goes on with fewer and with more, with equal bits."""

import json
import os
import re
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
STEPS = 60

NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun opens a store for each start: agents that join later do not find the first one's (torch 2.13)."""


class Job:
    """Agents of torchrun on one machine, one process each."""

    def __init__(self, folder):
        self.folder, self.agents = folder, []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]

    def start(self, count):
        for _ in range(count):
            path = self.folder / f"agent-{len(self.agents)}.txt"
            command = [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    "1:4",
                    "--nproc-per-node",
                    "1",
                    "--max-restarts",
                    "9",
                ),
                *(
                    "--rdzv-backend",
                    "c10d",
                    "--rdzv-endpoint",
                    f"localhost:{self.port}",
                    "--rdzv-id",
                    "elastic",
                ),
                *(
                    "--rdzv-conf",
                    "last_call_timeout=3,join_timeout=120,keep_alive_interval=1",
                    "--monitor-interval",
                    "0.1",
                ),
                *(
                    str(ROOT / "examples" / "elastic.py"),
                    "--folder",
                    str(self.folder),
                    "--steps",
                    str(STEPS),
                    "--seconds",
                    "0.3",
                ),
            ]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                **NEW_STORES,
            }
            with path.open("w") as output:
                started = subprocess.Popen(
                    command, stdout=output, stderr=output, env=environment, start_new_session=True
                )
            self.agents.append(started)

    def meets(self):
        """Wait until the store is open."""
        while True:
            with socket.socket() as client:
                if client.connect_ex(("localhost", self.port)) == 0:
                    return
            time.sleep(0.05)

    def lines(self):
        """Return the last line of each process's log, by its number."""
        actual = {}
        for path in self.folder.glob("log-*.jsonl"):
            if rows := path.read_text().splitlines():
                actual[int(re.findall(r"\d+", path.name)[-1])] = json.loads(rows[-1])
        return actual

    def trained(self, processes, after, steps=1):
        """Wait until a number of processes have each trained some steps since a time; return their numbers."""
        end = time.time() + 100
        while time.time() < end:
            own = [
                pid
                for pid, row in self.lines().items()
                if (row["processes"], row["at"] > after, row["step"] >= steps)
                == (processes, True, True)
            ]
            if len(own) == processes:
                return own
            assert all(agent.poll() in (None, 0, -9) for agent in self.agents), self.text()
            time.sleep(0.05)
        raise AssertionError(f"no {processes} processes trained: {self.lines()}\n{self.text()}")

    def text(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent-*.txt")))

    def end(self):
        for agent in self.agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        kill(self.lines())


def kill(pids):
    """Kill processes, of which some may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid):
    """Return True unless a process has ended: before its file is opened, or while it is read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    state = text.rpartition(")")[2].split()[0]
    return state not in ("Z", "X")


def gone(pids, within):
    """Return the seconds until all of some processes have ended."""
    began = time.monotonic()
    while any(map(is_alive, pids)):
        if time.monotonic() - began > within:
            return float("inf")
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.timeout(400)
def test_training_goes_on_with_fewer_and_more_processes_with_equal_bits(tmp_path):
    job = Job(tmp_path)
    try:
        job.start(1)  # the first one has the store in which the others meet
        job.meets()
        job.start(3)
        four = job.trained(4, after=0, steps=7)
        killed = job.agents[2:]
        victims = list[int]()
        for agent in killed:  # two nodes fail at once
            children = subprocess.run(
                ["pgrep", "-P", str(agent.pid)], check=True, capture_output=True, text=True
            )
            victims += [int(pid) for pid in children.stdout.split()]
            os.kill(agent.pid, signal.SIGKILL)
        kill(victims)
        survivors = [pid for pid in four if pid not in victims]
        assert len(survivors) == 2
        assert (
            gone(survivors, within=60) < 60
        )  # 1 s on an idle machine; their group waits for minutes
        since = time.time()
        assert re.search(r"LostProcessError: .* by process \d", job.text())
        job.trained(2, after=since, steps=6)
        job.start(2)
        job.trained(4, after=since)
        for agent in job.agents[:2] + job.agents[4:]:
            assert agent.wait(120) == 0, job.text()
    finally:
        job.end()
    rows = [
        json.loads(line)
        for path in tmp_path.glob("log-*")
        for line in path.read_text().splitlines()
    ]
    numbers = {row["processes"] for row in rows}
    assert {2, 4} <= numbers
    first = min(row["step"] for row in rows if row["processes"] == 2 and row["at"] > since)
    assert first % 5 == 1 and first > 5  # after a checkpoint
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [
        sys.executable,
        str(ROOT / "examples" / "elastic.py"),
        "--folder",
        str(alone),
        "--steps",
        str(STEPS),
    ]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=100)
    one = fs.restore(alone / "end")
    other = fs.restore(tmp_path / "end")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
