"""Processes of an elastic run that sum their numbers in a loop, and the test that kills some.

A process appends a line to its log whenever something has changed for it:

    {"number": 2, "numbers": [0, 2, 3], "before": [0, 1, 2, 3], "sum": 13, "at": 1234.5, ...}
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback

import torch
from torch.distributed import TCPStore

import fshard as fs
from fshard.errors import CollectiveTimeoutError, LostProcessError
from fshard.mesh.runtimes import process
from fshard.recovery.meeting import Meeting
from fshard.recovery.members import Members
from tests.helpers.ended import wait_until

SECONDS = 40.0
"""How long a process lives at most."""


class Run:
    """Processes of one elastic run on this machine, and what they have logged."""

    def __init__(self, folder, environment=None, *, timeout=60.0, has_folder=True, patch=None):
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.folder = folder / "meeting" if has_folder else None
        self.stop_file = folder / "stop"
        self.environment = environment or {}
        self.timeout = timeout
        self.patch = patch
        self.processes = []
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, n, main=None):
        """Start processes: the first ones together, later ones each alone."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fshard", "tests.recovery.trained"])
        are_first = not self.processes
        for rank in range(n):
            variables = {"OMP_NUM_THREADS": "1", **self.environment}
            if are_first:
                variables |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(n),
                    "LOCAL_WORLD_SIZE": str(n),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
            path = self.logs / f"{len(self.processes)}.jsonl"
            arguments = (main or sum_in_a_loop, path, variables, self)
            started = context.Process(target=run_process, args=arguments, daemon=True)
            started.start()
            self.processes.append(started)

    def __getstate__(self):
        return {**vars(self), "processes": [], "store": None}

    def rows(self, process):
        """Return what a process has logged."""
        path = self.logs / f"{process}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def last(self, process):
        """Return the last row of a process, {} before it."""
        rows = self.rows(process)
        return rows[-1] if rows else {}

    def kill(self, *processes, by=signal.SIGKILL):
        """Kill processes; return when."""
        for index in processes:
            os.kill(self.processes[index].pid, by)
        return time.time()

    def wait_for(self, numbers, processes=None):
        """Wait until these processes, by default those with these numbers, are a generation."""
        processes = numbers if processes is None else processes

        def is_formed():
            rows = [self.last(process) for process in processes]
            self.check_errors(processes)
            return all(row.get("numbers") == [*numbers] for row in rows)

        wait_until(is_formed, SECONDS)
        rows = [self.last(process) for process in processes]
        assert [row["number"] for row in rows] == [*numbers]
        assert {row["sum"] for row in rows} == {sum(1 << number for number in numbers)}
        return rows

    def check_errors(self, processes):
        """Raise if a process has failed."""
        for process in processes:
            last = self.last(process)
            assert "error" not in last, last["error"]

    def finish(self, processes):
        """Let these processes end; nothing of the run must be left."""
        self.stop_file.touch()
        wait_until(lambda: all("end" in self.last(process) for process in processes), SECONDS)
        if self.folder is not None:
            assert [*self.folder.iterdir()] == []
        for process in processes:
            self.processes[process].join(10)
            assert self.processes[process].exitcode == 0

    def close(self):
        """Kill what is left."""
        for started in self.processes:
            started.kill()
            started.join()


def run_process(main, path, variables, run):
    """Be a process of a run: call its main function, and log how it ends."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    log = path.open("a", buffering=1)

    def write(**row):
        log.write(json.dumps({"at": time.time(), **row}) + "\n")

    try:
        main(run, write)
    except BaseException as error:
        traceback.print_exc()
        write(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        sys.exit(1)


def sum_in_a_loop(run, write):
    """Sum numbers until the test ends it, over all generations."""
    members = Members.meet(run.folder, "cpu", run.timeout)
    if members is None:
        write(end="before")
        return
    end = time.monotonic() + SECONDS
    if run.patch is not None:
        run.patch(members.number)
    while time.monotonic() < end:
        try:
            if sum_until_change(members, run, write, end):
                members.finish()
                write(end="finished")
                return
        except Exception as error:
            is_loss = isinstance(error, LostProcessError | CollectiveTimeoutError)
            if not is_loss and not members.has_lost():
                raise
            noticed = time.time()
            del error
        else:
            noticed = time.time()
        members = members.regroup()
        write(noticed=noticed, number=members.number)
    raise TimeoutError


def sum_until_change(members, run, write, end):
    """Sum until processes wait to join, or it is the end: return True then."""
    mesh = fs.make_mesh({"d": len(members.numbers)})
    is_known = False
    while time.monotonic() < end:
        flags = [1 << members.number, members.has_joiners(), run.stop_file.exists()]
        row = torch.tensor(flags, dtype=torch.int64)
        total, joiners, stops = fs.run(lambda: fs.psum(row, "d"), mesh=mesh)[0].tolist()  # noqa: B023
        if not is_known:
            write(
                number=members.number,
                numbers=members.numbers,
                before=members.before,
                generation=members.generation,
                rank=fs.mesh.process_index(),
                count=fs.mesh.process_count(),
                sum=total,
            )
            is_known = True
        if stops:
            return True
        if joiners:
            return False
        time.sleep(0.002)
    raise TimeoutError


POINTS = [
    "before mark come",
    "after mark come",
    "before decide",
    "after decide",
    "before publish_store",
    "after publish_store",
    "before mark ready",
    "after mark ready",
    "before meet_again",
    "after meet_again",
    "before __init__",
    "after __init__",
]
"""Where a process may end while generation 1 is decided on and formed."""


def die_at(point, victim, rank):
    """Let the process of a rank kill itself at a point; the others let it be the first to decide."""
    moment, name, *kinds = point.split()
    owner = {"meet_again": process, "__init__": process.ProcessWorld}.get(name, Meeting)
    original = getattr(owner, name)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def replaced(*arguments, **options):
        is_point = not kinds or arguments[1] in kinds
        if rank != victim:
            time.sleep(0.2 * (name == "decide"))
            return original(*arguments, **options)
        if is_point and moment == "before":
            die()
        result = original(*arguments, **options)
        if is_point:
            die()
        return result

    setattr(owner, name, replaced)
