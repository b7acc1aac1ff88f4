"""The end of calls on a backend where the host waits for none: their table, the abort, the error of
the next call or of the end.

A fake stream goes on or does not; the store is one in memory, or lost.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard.mesh.runtimes import process
from fshard.mesh.runtimes.nccl import HangWatch
from tests.helpers.processes import run_processes


class Store(dist.HashStore):
    """A store that is there until it is lost."""

    is_lost = False

    def check(self, keys):
        if self.is_lost:
            raise dist.DistNetworkError("Connection reset by peer")
        return super().check(keys)


@contextmanager
def joined(patch, timeout=1):
    """Be a process of two, over a backend whose stream goes on only if `runs`; `left` has the calls
    that leave its groups.
    """
    state = SimpleNamespace(runs=True, left=[])
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: state.runs))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    destroy = dist.destroy_process_group

    def all_reduce(*_, **__):
        if state.left:
            raise RuntimeError("this group was aborted")
        return SimpleNamespace(wait=lambda: None)

    patch.setattr(dist, "all_reduce", all_reduce)

    def leave(name):
        state.left.append(name)
        if dist.is_initialized():
            destroy()

    for module, name in (
        (dist, "destroy_process_group"),
        (dist.distributed_c10d, "_abort_process_group"),
    ):
        patch.setattr(module, name, lambda name=name: leave(name))
    state.mesh = fs.make_mesh({"d": 2}, device="cpu", timeout=timeout)
    state.process = process._state.world
    state.store = Store()
    state.process._hang_watch = HangWatch(state.process._works, stream, state.store)
    try:
        yield state
    finally:
        process._state.world = None
        state.process._hang_watch.stop()
        if dist.is_initialized():
            destroy()


@pytest.fixture
def world(monkeypatch):
    with joined(monkeypatch) as state:
        yield state


def start(world):
    return fs.run(lambda: fs.psum.start(torch.ones(3), "d"), mesh=world.mesh)[0]


def wait_for_abort(world):
    until = time.monotonic() + 20
    while not world.left and time.monotonic() < until:
        time.sleep(0.02)
    assert world.left == ["_abort_process_group"]


@pytest.mark.parametrize("is_hanging", [True, False], ids=["hangs", "a process has failed"])
def test_call_that_cannot_end_is_written_aborted_and_raised(is_hanging, world, capfd):
    """A collective is waited for, but its stream goes no further; or another process has failed."""
    fs.run(lambda: fs.pmax(torch.ones(2), "d"), mesh=world.mesh)
    time.sleep(0.3)  # the stream reaches two marks after it
    world.runs = not is_hanging
    handle, later = start(world), start(world)
    error, text = fs.errors.CollectiveTimeoutError, "A call did not end within 0.9 s."
    if not is_hanging:
        error, text = fs.errors.LostProcessError, "Process 1 has failed."
        world.store.set("failure", text)
    handle.wait()
    wait_for_abort(world)
    with pytest.raises(error, match=text):
        later.wait()  # it was started before
    with pytest.raises(error, match=text):
        start(world)
    written = capfd.readouterr().err
    assert text in written and "psum of float32[3] over d" in written and "test_hangs.py" in written
    assert "pmax" not in written


def test_known_loss_ends_the_groups_at_once(world, capfd):
    """Within less than the limit, and without the table of calls: the program goes on."""
    world.runs = False
    handle = start(world)
    process.watch_losses(lambda: "Process 3 has ended.")
    wait_for_abort(world)
    with pytest.raises(fs.errors.LostProcessError, match="Process 3 has ended"):
        handle.wait()
    assert capfd.readouterr().err == "fshard: Process 3 has ended.\n"


def test_mark_behind_an_abort_raises(world):
    """Where groups are aborted the device reaches all marks, with garbage before them."""
    watch = world.process._hang_watch
    reached = SimpleNamespace(query=lambda: True)
    watch.wait(reached)
    process.watch_losses(lambda: "Process 3 has ended.")
    wait_for_abort(world)
    with pytest.raises(fs.errors.LostProcessError, match="Process 3 has ended"):
        watch.wait(reached)


def test_mark_that_is_never_reached_raises(world):
    process.watch_losses(lambda: "Process 3 has ended.")
    never = SimpleNamespace(query=lambda: False)
    with pytest.raises(fs.errors.LostProcessError, match="Process 3 has ended"):
        world.process._hang_watch.wait(never)


def test_call_in_time_is_not_ended(world):
    start(world)
    time.sleep(1.3)
    assert not world.left
    process.leave()
    assert world.left == ["destroy_process_group"]


def test_leave_after_an_error_aborts_and_publishes(world):
    process.leave(waiting=False)
    assert world.left == ["_abort_process_group"]
    assert world.store.get("failure").startswith(b"Process 0 has failed")


# -- a store that is lost, with the process that has it --------------------------------------------


def test_lost_store_and_hanging_stream_is_a_lost_process(world, capfd):
    world.store.is_lost = True
    time.sleep(0.3)
    assert not world.left  # rank 0 may just be done
    world.runs = False
    began = time.monotonic()
    start(world)
    wait_for_abort(world)
    assert time.monotonic() - began < 0.8  # the limit is 0.9 s
    with pytest.raises(fs.errors.LostProcessError, match="process with the store"):
        start(world)
    assert "psum of float32[3] over d" in capfd.readouterr().err


def test_lost_store_and_stream_that_runs_is_no_error(world):
    world.store.is_lost = True
    start(world)
    time.sleep(1.2)
    process.leave()
    assert world.left == ["destroy_process_group"]


def test_failure_of_the_process_with_the_store_is_read_before_it_ends(monkeypatch):
    """Another process, which looks at the store at the same interval, has read why before rank 0
    has left.
    """
    with joined(monkeypatch, timeout=10) as world:
        works = SimpleNamespace(error=None, timeout=world.process.timeout, recent=[])
        stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: True))
        other = HangWatch(works, stream, world.store)
        process.leave(waiting=False)
        assert str(works.error).startswith("Process 0 has failed")
        other.stop()


# -- the end of a process whose last calls hang ----------------------------------------------------


def hang(world):
    """Start a call that never ends."""
    world.runs = False
    return start(world)


def hang_until_abort(world):
    hang(world).wait()
    wait_for_abort(world)  # as the program reads its loss


def hang_and_exit(world):
    hang_until_abort(world)
    sys.exit(0)


def hang_and_catch(world):
    hang_until_abort(world)
    try:
        start(world)
    except fs.errors.CollectiveTimeoutError:
        sys.exit(75)


def hang_and_make_another_mesh(world):
    """Begin anew in the same process: the old error is over."""
    hang_until_abort(world)
    with pytest.raises(fs.errors.CollectiveTimeoutError):
        start(world)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    fs.make_mesh({"d": 2}, device="cpu")


ENDS = {  # programs, their exit codes, and whether the error is written once more as a traceback
    "ends": (lambda world: start(world).wait(), 0, False),
    "hangs, unseen": (hang, 1, True),
    "hangs, exit 0": (hang_and_exit, 1, True),
    "hangs, caught": (hang_and_catch, 75, False),
    "hangs, new mesh": (hang_and_make_another_mesh, 0, False),
}


def be_a_script(name, path):
    """Run a program as a script runs, and end as Python ends."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    signal.alarm(60)
    with pytest.MonkeyPatch.context() as patch, joined(patch) as world:
        # The groups of one program are its own.
        process._state.has_made_groups = name != "hangs, exit 0"
        code = 0
        try:
            ENDS[name][0](world)
        except SystemExit as error:
            code = error.code
        atexit._run_exitfuncs()
        os._exit(code)


def test_exit_code_of_a_process_whose_calls_hang_is_not_zero(tmp_path):
    context = multiprocessing.get_context("forkserver")
    scripts = {}
    for name in ENDS:
        scripts[name] = context.Process(target=be_a_script, args=(name, tmp_path / name))
        scripts[name].start()
    for name, (_, code, is_written) in ENDS.items():
        scripts[name].join()
        text = (tmp_path / name).read_text()
        assert scripts[name].exitcode == code, (name, text)
        assert ("Traceback" in text and "CollectiveTimeoutError" in text) == is_written, (
            name,
            text,
        )


def hang_in_a_task():
    with pytest.MonkeyPatch.context() as patch, joined(patch) as world:
        hang_until_abort(world)
        kept = process._state.world
    process._state.world = kept


def test_launched_process_whose_last_call_hangs_raises():
    with pytest.raises(fs.errors.CollectiveTimeoutError, match="did not end within"):
        run_processes(hang_in_a_task, 1)
