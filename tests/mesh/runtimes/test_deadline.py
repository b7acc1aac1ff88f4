"""The end of calls on a backend where the host waits for none: their table, the abort, and the error of the next call."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard.mesh.runtimes import deadline, process
from fshard.mesh.runtimes.deadline import Deadline


@pytest.fixture
def world(monkeypatch):
    """A process of two, over a backend whose works complete only if `runs`, and the calls that leave its groups."""
    found = SimpleNamespace(runs=True, left=[], store=dist.HashStore())
    found.stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: found.runs))
    monkeypatch.setattr(deadline, "open_store", lambda: found.store)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    for module, name in ((dist, "destroy_process_group"), (dist.distributed_c10d, "_abort_process_group")):
        monkeypatch.setattr(module, name, lambda name=name: found.left.append(name))
    found.mesh = fs.make_mesh({"d": 2}, device="cpu", timeout=1)
    found.process = process._state["world"]
    found.process._deadline = Deadline(found.process._operations, found.stream)
    yield found
    process._state["world"] = None
    found.process._deadline.stop()
    destroy()


def start(world):
    return fs.run(lambda: fs.psum.start(torch.ones(3), "d"), mesh=world.mesh)[0]


@pytest.mark.parametrize("is_hanging", [True, False], ids=["hangs", "a process has failed"])
def test_call_that_cannot_end_is_written_aborted_and_raised(is_hanging, world, capfd):
    """A collective is waited for, but its stream goes no further; or another process has failed."""
    fs.run(lambda: fs.pmax(torch.ones(2), "d"), mesh=world.mesh)
    time.sleep(0.3)  # the stream reaches two marks after it
    world.runs, handle = not is_hanging, start(world)
    error, text = fs.errors.CollectiveTimeoutError, "A call did not end within 0.9 s."
    if not is_hanging:
        error, text = fs.errors.LostProcessError, "process 1 has failed: KeyError: 'x'"
        world.store.set("failure", text)
    handle.wait()
    until = time.monotonic() + 20
    while not world.left and time.monotonic() < until:
        time.sleep(0.02)
    assert world.left == ["_abort_process_group"]
    with pytest.raises(error, match=text):
        start(world)
    written = capfd.readouterr().err
    assert text in written and "psum of float32[3] over d" in written and "test_deadline.py" in written
    assert "pmax" not in written


def test_call_in_time_is_not_ended(world):
    start(world)
    time.sleep(1.3)
    assert not world.left
    process.leave()
    assert world.left == ["destroy_process_group"]


def test_leave_after_an_error_aborts_and_publishes(world):
    world.process.part(SimpleNamespace(size=2, members=(0, 1)), KeyError("x"))
    process.leave(waiting=False)
    assert world.left == ["_abort_process_group"]
    assert world.store.get("failure") == b"process 0 has failed: KeyError: 'x'"
