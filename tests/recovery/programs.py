"""Processes of an elastic run that sum their numbers in a loop, and the test that kills some.

A process appends a line to its log whenever something has changed for it:

    {"number": 2, "numbers": [0, 2, 3], "sum": 13, "at": 1234.5, ...}
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import zlib

import optree
import torch
from torch.distributed import TCPStore

import fshard as fs
from fshard import P
from fshard.errors import CollectiveTimeoutError, LostProcessError, MeshError
from fshard.mesh.runtimes import process
from fshard.mesh.shared_memory import alive, meet
from fshard.recovery.members import Members
from fshard.recovery.run_folder import RunFolder
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

    def start(self, n, main=None, machines=None):
        """Start processes: the first ones together, later ones each alone.

        `machines`: the name of a machine for each, on which it pretends to be.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fshard", "tests.recovery.trained"])  # once for all
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
            if machines is not None:
                variables["MACHINE"] = machines[rank]
            path = self.logs / f"{len(self.processes)}.jsonl"
            arguments = (main or sum_in_a_loop, path, variables, self)
            started = context.Process(target=run_process, args=arguments, daemon=True)
            started.start()
            self.processes.append(started)

    def __getstate__(self):
        return {**vars(self), "processes": [], "store": None}

    def rows(self, index):
        """Return what a process has logged."""
        path = self.logs / f"{index}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def last(self, index):
        """Return the last row of a process, {} before it."""
        rows = self.rows(index)
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
            rows = [self.last(index) for index in processes]
            self.check_errors(processes)
            return all(row.get("numbers") == [*numbers] for row in rows)

        wait_until(is_formed, SECONDS)
        rows = [self.last(index) for index in processes]
        assert [row["number"] for row in rows] == [*numbers]
        assert {row["sum"] for row in rows} == {sum(1 << number for number in numbers)}
        return rows

    def check_errors(self, processes):
        """Raise if a process has failed."""
        for index in processes:
            last = self.last(index)
            assert "error" not in last, last["error"]

    def finish(self, processes):
        """Let these processes end; nothing of the run must be left."""
        self.stop_file.touch()
        wait_until(lambda: all("end" in self.last(index) for index in processes), SECONDS)
        if self.folder is not None:
            assert [*self.folder.iterdir()] == []
        for index in processes:
            self.processes[index].join(10)
            assert self.processes[index].exitcode == 0

    def close(self):
        """Kill what is left."""
        for started in self.processes:
            started.kill()
            started.join()


def pids_in_memory():
    """Return the processes of all runs that have left a folder in memory, of other programs too."""
    pids = set()
    for folder in RunFolder.in_memory():
        generation = folder.generation(0)
        if generation is not None:
            pids |= {process.pid for process in generation.processes.values()}
    return pids


def run_process(main, path, variables, run):
    """Be a process of a run: call its main function, and log how it ends."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    log = path.open("a", buffering=1)

    def write(**row):
        log.write(json.dumps({"at": time.time(), **row}) + "\n")

    try:
        if "MACHINE" in variables:
            pretend_machine(variables["MACHINE"])
        main(run, write)
    except BaseException as error:
        traceback.print_exc()
        write(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        sys.exit(1)


def sum_in_a_loop(run, write, work=None):
    """Sum numbers until the test ends it, over all generations.

    `work` is called once in each, and what it returns is logged.
    """
    members = Members.meet(run.folder, "cpu", run.timeout)
    if members is None:
        write(end="before")
        return
    end = time.monotonic() + SECONDS
    if run.patch is not None:
        run.patch(members.number)
    while time.monotonic() < end:
        try:
            if sum_until_change(members, run, write, end, work):
                members.finish()
                write(end="finished")
                return
        except Exception as error:
            is_loss = isinstance(error, LostProcessError | CollectiveTimeoutError)
            if not is_loss and not members.has_lost():
                members.leave()
                raise
            noticed = time.time()
            del error
        else:
            noticed = time.time()
        members = members.regroup()
        write(noticed=noticed, number=members.number)
    raise TimeoutError


def sum_until_change(members, run, write, end, work):
    """Sum until processes wait to join, or it is the end: return True then."""
    mesh = fs.make_mesh({"d": len(members.numbers)})
    result = work(mesh, f"checkpoint {members.generation}") if work is not None else None
    is_known = False
    while time.monotonic() < end:
        flags = [1 << members.number, members.has_joiners(), run.stop_file.exists()]
        row = torch.tensor(flags, dtype=torch.int64)
        total, joiners, stops = fs.run(lambda: fs.psum(row, "d"), mesh=mesh)[0].tolist()  # noqa: B023
        if not is_known:
            write(
                number=members.number,
                numbers=members.numbers,
                generation=members.generation,
                rank=fs.mesh.process_index(),
                count=fs.mesh.process_count(),
                sum=total,
                work=result,
            )
            is_known = True
        if stops:
            return True
        if joiners:
            return False
        time.sleep(0.002)
    raise TimeoutError


# -- all that a world is for -----------------------------------------------------------------------


def work_in_a_loop(run, write):
    """Sum numbers until the test ends it; at first in each generation, do everything else."""
    sum_in_a_loop(run, write, lambda mesh, number: digest(everything(mesh, run.logs / number)))


def digest(tree):
    """Return a number of all bits of a tree of tensors."""
    crc = 0
    for leaf in optree.tree_leaves(tree):
        crc = zlib.crc32(leaf.contiguous().numpy().tobytes(), crc)
    return crc


def trained(mesh, stage):
    """Return the parameters after two steps of a ZeRO stage."""
    params = {"w": torch.linspace(-1, 1, 60).reshape(5, 12), "v": torch.linspace(0, 1, 12)}
    layout = fs.fsdp("d") if stage == 3 else P()
    params = fs.shard_params(params, layout, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1, fused=False), mesh=mesh, axis="d", stage=stage)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("d"))
    state = opt.init(params)
    for number in range(2):
        draw = torch.Generator().manual_seed(number)
        params, state, _ = step(params, state, torch.randn(12, 5, generator=draw))
    return fs.unshard(params)


def loss_fn(params, x):
    return (x @ params["w"]).tanh().matmul(params["v"]).square().mean()


def collectives(x):
    """Call each kind of collective on the shards of x."""
    n = fs.axis_size("d")
    total = fs.psum(x, "d") + fs.pmax(x, "d") + fs.broadcast(x, "d", source=n - 1)
    gathered = fs.psum_scatter(fs.all_gather(x, "d"), "d")
    swapped = fs.all_to_all(x, "d")
    shifted = fs.ppermute(x, "d", perm=[(i, (i + 1) % n) for i in range(n)])
    if n > 1:
        index = fs.axis_index("d")
        fs.send(x, "d", to=(index + 1) % n)
        shifted = shifted + fs.recv(x, "d", source=(index - 1) % n)
    return total + gathered + swapped + shifted


def everything(mesh, folder):
    """Return what train steps, checkpoints, reshards, loops and collectives give on a mesh."""
    results = [trained(mesh, stage) for stage in range(4)]
    tree = results[-1]
    saved = fs.device_put(tree, fs.Layout(mesh, P()))
    fs.save(folder, saved)
    restored = fs.restore(folder, P("d", shape=None), mesh=mesh)
    results.append(fs.unshard(restored))

    first = fs.make_mesh({"d": 1}, devices=[mesh.size - 1])
    x = fs.device_put(torch.arange(mesh.size * 60.0).reshape(-1, 5), fs.Layout(mesh, P("d")))
    on_first = fs.reshard(x, fs.Layout(first, P("d")))
    results.append(fs.unshard(fs.reshard(on_first, fs.Layout(mesh, P("d"))) + 1))

    function = fs.shard_map(collectives, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    results.append(fs.unshard(function(x)))
    return results


# -- processes without work, machines, errors ------------------------------------------------------


def sum_on_two(run, write):
    """Sum numbers on the first two processes until the test ends it; the others wait."""
    members = Members.meet(run.folder, "cpu", run.timeout)
    while True:
        numbers = members.numbers
        busy = numbers[:2]
        mesh = fs.make_mesh({"d": len(busy)}, devices=range(len(busy)))
        if mesh.is_member:
            try:
                total = sum_numbers(members, mesh, run, write)
                members.finish(busy)
                write(end="finished", sum=total)
                return
            except LostProcessError:
                pass
        else:
            write(number=members.number, numbers=numbers, sum=sum(1 << n for n in numbers))
            processor = time.process_time()
            change = members.wait_for_change(busy)
            write(change=change, processor=time.process_time() - processor)
            if change == "ended":
                write(end="spare")
                return
        members = members.regroup()


def sum_numbers(members, mesh, run, write):
    """Sum until it is the end; log who is there."""
    write(
        number=members.number,
        numbers=members.numbers,
        sum=sum(1 << number for number in members.numbers),
    )
    is_end = False
    while not is_end:
        row = torch.tensor([1 << members.number, run.stop_file.exists()])
        total, is_end = fs.run(lambda: fs.psum(row, "d"), mesh=mesh)[0].tolist()  # noqa: B023
        time.sleep(0.002)
    return total


def fail_in_one(run, write):
    """Sum numbers; process 1 has an error of its own and leaves, but does not end."""

    def work(mesh, name):
        if fs.mesh.process_index() == 1 and fs.mesh.process_count() == 3:
            raise ZeroDivisionError

    try:
        sum_in_a_loop(run, write, work)
    except ZeroDivisionError:
        write(failed=True)
        wait_until(run.stop_file.exists, SECONDS)
        write(end="failed")


def meet_in_folders_of_their_own(run, write):
    """Meet in a folder that is another one for each process."""
    meet_and_log_error(run.folder / os.environ["RANK"], write)


def meet_without_folder(run, write):
    meet_and_log_error(None, write)


def meet_and_log_error(folder, write):
    try:
        Members.meet(folder, "cpu", None)
    except MeshError as error:
        write(end=str(error))


def pretend_machine(name):
    """Be on a machine with a name, as far as fshard sees."""
    number = zlib.crc32(name.encode())
    meet.machine_id = lambda: number
    alive.machine_id = lambda: number


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
    owner = {"meet_again": process, "__init__": process.ProcessWorld}.get(name, RunFolder)
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
