"""Handles: several collectives under way, waited for in whatever order, over both kinds of links."""

import os
import time

import pytest
import torch
from torch.autograd import forward_ad

import fshard as fs
from fshard.testing.processes import run_processes

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

WAITED = {
    "psum small": lambda x: fs.psum.start(x[:900], "d"),
    "psum doubling": lambda x: fs.psum.start(x[:50_000], "d"),
    "psum large": lambda x: fs.psum.start(x, "d"),
    "all_gather": lambda x: fs.all_gather.start(x, "d"),
    "psum_scatter": lambda x: fs.psum_scatter.start(x, "d"),
    "all_to_all": lambda x: fs.all_to_all.start(x, "d"),
    "ppermute": lambda x: fs.ppermute.start(x, "d", [(0, 1), (1, 0)]),
    "broadcast": lambda x: fs.broadcast.start(x, "d", source=1),
}


def wait_in_many_orders():
    def main():
        x = torch.arange(120_000.0 * fs.axis_size("d")) + fs.axis_index("d")
        expected = [start(x).wait() for start in WAITED.values()]
        for turn in range(12):
            handles = [start(x) for start in WAITED.values()]
            order = torch.randperm(len(handles), generator=torch.Generator().manual_seed(turn + fs.axis_index("d")))
            assert all(torch.equal(handles[place].wait(), expected[place]) for place in order)
        return True

    return fs.run(main, mesh=fs.make_mesh({"d": int(os.environ["WORLD_SIZE"])}))[0]


def wait_for_a_message_in_between():
    def main():
        x, index = torch.ones(5_000_000), fs.axis_index("d")
        handle = fs.psum.start(x, "d")
        if index == 0:
            fs.recv(torch.empty(3), "d", source=1)
            return handle.wait().sum().item()
        total = handle.wait().sum().item()
        if index == 1:
            fs.send(torch.ones(3), "d", to=0)
        return total

    return fs.run(main, mesh=fs.make_mesh({"d": int(os.environ["WORLD_SIZE"])}))[0]


def test_handles_waited_in_any_order_are_exact(two, four):
    assert all(two.run(wait_in_many_orders) + four.run(wait_in_many_orders))


def test_recv_during_started_psum_completes(two, four):
    assert two.run(wait_for_a_message_in_between) == [1e7] * 2
    assert four.run(wait_for_a_message_in_between) == [2e7] * 4


def tangents_of_started_calls():
    calls = {**WAITED, "pmean": lambda x: fs.pmean.start(x, "d"), "tree": lambda x: fs.psum.start({"x": x}, "d")}

    def main():
        x = torch.arange(6.0) + fs.axis_index("d")
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(6), x)
            results = {name: start(dual).wait() for name, start in calls.items()}
            results["tree"] = results["tree"]["x"]
            found = {name: forward_ad.unpack_dual(y).tangent for name, y in results.items()}
        expected = {name: start(x).wait() for name, start in calls.items()} | {"tree": fs.psum(x, "d")}
        return all(torch.equal(found[name], expected[name]) for name in calls)

    return fs.run(main, mesh=fs.make_mesh({"d": int(os.environ["WORLD_SIZE"])}))[0]


def test_start_has_tangents_of_call(two):
    assert all(two.run(tangents_of_started_calls))


def wait_in_vain():
    mesh = fs.make_mesh({"d": 2}, timeout=1)

    def main():
        if fs.axis_index("d") == 1:
            time.sleep(2.5)
            return "came too late"
        handle = fs.psum.start(torch.ones(5_000_000), "d")
        fs.all_gather.start(torch.ones(3), "d")  # something else: from now on a helper carries the sum on
        try:
            handle.wait()
        except fs.errors.CollectiveTimeoutError as error:
            return str(error)

    return fs.run(main, mesh=mesh)[0]


def test_helper_error_is_raised_at_wait():
    text, _ = run_processes(wait_in_vain, 2, environment={"FSHARD_DIRECT": "0"}, timeout=60)
    assert "psum of float32[5000000]" in text and "test_async_handles.py" in text and "within 1 s" in text


def wait_for_the_first_of_two():
    """Process 0 waits for a sum that others begin when another is done: one that was started last, and has rounds."""
    mesh = fs.make_mesh({"a": 2, "b": 2}, timeout=10)

    def main():
        def start(axes):
            return fs.psum.start(torch.ones(2), axes)

        fs.psum(torch.ones(2), ("a", "b"))
        if fs.axis_index(("a", "b")) == 0:
            near, far = start("a"), start(("a", "b"))
            return near.wait()[0].item(), far.wait()[0].item()
        far = start(("a", "b")).wait()
        return start("a").wait()[0].item(), far[0].item()

    return fs.run(main, mesh=mesh)[0]


def test_started_collective_progresses_during_other_wait(four):
    assert four.run(wait_for_the_first_of_two) == [(2.0, 4.0)] * 4
