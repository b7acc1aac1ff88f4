"""The end of calls on a backend where the host waits for none: their table, the abort, the error of the next call."""

import time
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard.mesh.runtimes import process
from fshard.mesh.runtimes.nccl import end_hangs


@pytest.fixture
def world(monkeypatch):
    """A process of two, over a backend whose stream goes on only if `runs`, and the calls that leave its groups."""
    state = SimpleNamespace(runs=True, left=[])
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: state.runs))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    destroy = dist.destroy_process_group

    def all_reduce(*_, **__):
        if state.left:
            raise RuntimeError("this group was aborted")
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for module, name in (
        (dist, "destroy_process_group"),
        (dist.distributed_c10d, "_abort_process_group"),
    ):
        monkeypatch.setattr(module, name, lambda name=name: state.left.append(name))
    state.mesh = fs.make_mesh({"d": 2}, device="cpu", timeout=1)
    state.process = process._state.world
    state.process._store = state.store = dist.HashStore()
    context = state.process._works, stream, state.store, state.process._has_left
    Thread(target=end_hangs, args=context, daemon=True).start()
    yield state
    process._state.world = None
    state.process._has_left.set()
    destroy()


def start(world):
    return fs.run(lambda: fs.psum.start(torch.ones(3), "d"), mesh=world.mesh)[0]


@pytest.mark.parametrize("is_hanging", [True, False], ids=["hangs", "a process has failed"])
def test_call_that_cannot_end_is_written_aborted_and_raised(is_hanging, world, capfd):
    """A collective is waited for, but its stream goes no further; or another process has failed."""
    fs.run(lambda: fs.pmax(torch.ones(2), "d"), mesh=world.mesh)
    time.sleep(0.3)  # the stream reaches two marks after it
    world.runs = not is_hanging
    handle = start(world)
    error, text = fs.errors.CollectiveTimeoutError, "A call did not end within 0.9 s."
    if not is_hanging:
        error, text = fs.errors.LostProcessError, "Process 1 has failed."
        world.store.set("failure", text)
    handle.wait()
    until = time.monotonic() + 20
    while not world.left and time.monotonic() < until:
        time.sleep(0.02)
    assert world.left == ["_abort_process_group"]
    with pytest.raises(error, match=text):
        start(world)
    written = capfd.readouterr().err
    assert text in written and "psum of float32[3] over d" in written and "test_hangs.py" in written
    assert "pmax" not in written


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
