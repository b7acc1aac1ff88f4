"""The end of calls on a backend where the host waits for none: their table, the abort, and the error of the next call."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard.mesh.runtimes import deadline, process, watch


def completed():
    return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


@pytest.fixture
def world(monkeypatch):
    """The works of a process of two, over a backend that records calls, and the calls that leave its groups."""
    found = SimpleNamespace(work=completed(), left=[], store=dist.HashStore())
    for module in (deadline, watch):
        monkeypatch.setattr(module, "open_store", lambda: found.store)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: found.work)
    for module, name in ((deadline, "abort_groups"), (process, "abort_groups"), (dist, "destroy_process_group")):
        monkeypatch.setattr(module, name, lambda name=name: found.left.append(name))
    found.mesh = fs.make_mesh({"d": 2}, device="cpu", timeout=1)
    yield found
    process._state["world"] = None
    destroy()


def start(world):
    return fs.run(lambda: fs.psum.start(torch.ones(3), "d"), mesh=world.mesh)[0]


def wait_for_abort(world):
    until = time.monotonic() + 20
    while not world.left and time.monotonic() < until:
        time.sleep(0.02)


ENDS = {
    "collective": (fs.errors.CollectiveTimeoutError, "a call did not end within 0.9 s"),
    "stream": (fs.errors.CollectiveTimeoutError, "a call did not end within 0.9 s"),
    "process": (fs.errors.LostProcessError, "process 1 has failed: KeyError: 'x'"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_call_that_cannot_end_is_written_aborted_and_raised(kind, world, monkeypatch, capfd):
    """A collective never completes, or was waited for and its stream never goes on, or another process has failed."""
    error, text = ENDS[kind]
    handles = [start(world)]  # it completes
    if kind == "stream":
        handles.pop().wait()
        monkeypatch.setattr(deadline.Deadline, "_mark", lambda _: SimpleNamespace(query=lambda: False))
    elif kind == "collective":
        world.work = SimpleNamespace(wait=lambda: None, is_completed=lambda: False)
    time.sleep(0.2)
    handles.append(start(world))
    if kind == "process":
        world.store.set("failure", text)
    wait_for_abort(world)
    assert world.left == ["abort_groups"]
    with pytest.raises(error, match=text):
        start(world)
    with pytest.raises(error, match=text):
        handles[-1].wait()
    written = capfd.readouterr().err
    assert text in written and "psum of float32[3] over d" in written and "test_deadline.py" in written


def test_call_in_time_is_not_ended(world):
    start(world)
    time.sleep(1.5)
    assert not world.left
    process.leave()
    assert world.left == ["destroy_process_group"]


def test_leave_after_an_error_aborts_and_publishes(world):
    process._state["world"].part(SimpleNamespace(size=2, members=(0, 1)), KeyError("x"))
    process.leave(waiting=False)
    assert world.left == ["abort_groups"]
    assert world.store.get("failure") == b"process 0 has failed: KeyError: 'x'"
