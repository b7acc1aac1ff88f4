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


def test_handles_may_be_waited_for_in_any_order(two, four):
    assert all(two.run(wait_in_many_orders) + four.run(wait_in_many_orders))


def test_a_message_may_be_waited_for_while_a_sum_is_under_way(two, four):
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


def test_a_started_collective_has_the_tangents_of_one_that_is_called(two):
    assert all(two.run(tangents_of_started_calls))


def receive_in_many_orders():
    """Three messages, of which the last is received at once; and what travels back."""

    def loss(xs, order):
        if fs.axis_index("d") == 0:
            return sum(fs.send(x, "d", to=1) for x in xs)
        handles = {place: fs.recv.start(xs[place], "d", source=0) for place in (0, 1)}
        if order == "last first":
            last, got = fs.recv(xs[2], "d", source=0), {place: handles[place].wait() for place in (0, 1)}
        else:
            got = {place: handles[place].wait() for place in order}
            last = fs.recv(xs[2], "d", source=0)
        return (got[0] + 10 * got[1] + 100 * last).sum()

    def main(order):
        xs = [torch.full((3,), place + 1.0, requires_grad=True) for place in range(3)]
        value = loss(xs, order)
        own = torch.autograd.grad(value, xs)
        plain = tuple(x.detach() for x in xs)
        also = torch.func.grad(lambda xs: loss(xs, order))(plain)
        primal, tangent = torch.func.jvp(lambda *xs: loss(xs, order), plain, tuple(2 * x for x in plain))
        return [value.item(), primal.item(), tangent.item()], [[x[0].item() for x in found] for found in (own, also)]

    mesh = fs.make_mesh({"d": 2})
    return [fs.run(main, order, mesh=mesh) for order in ((0, 1), (1, 0), "last first")]


def test_messages_come_in_the_order_in_which_receives_were_started(two):
    sender, receiver = ([0, 0, 0], [[1, 10, 100]] * 2), ([963, 963, 1926], [[0, 0, 0]] * 2)
    assert receive_in_many_orders() == [[sender, receiver]] * 3
    assert two.run(receive_in_many_orders) == [[[sender]] * 3, [[receiver]] * 3]


def test_a_cotangent_comes_after_what_was_started_before_it():
    def main():
        x = torch.ones(2, requires_grad=True)
        if fs.axis_index("d") == 0:
            token = fs.send(x, "d", to=1)
            handle = fs.recv.start(x, "d", source=1)
            own = torch.autograd.grad(token, x)[0]
            later = handle.wait()
            return own, torch.autograd.grad(later.sum(), x)[0], later.detach()
        got = fs.recv(x, "d", source=0)
        token = fs.send(7 * x, "d", to=0)
        return torch.autograd.grad((3 * got).sum() + 0 * x.sum(), x), torch.autograd.grad(token, x)[0]

    (cotangent, zero, later), (_, back) = fs.run(main, mesh=fs.make_mesh({"d": 2}))
    assert [x.tolist() for x in (cotangent, zero, later, back)] == [[3, 3], [0, 0], [7, 7], [7, 7]]


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


def test_what_fails_in_the_helper_is_raised_where_it_is_waited_for():
    text, _ = run_processes(wait_in_vain, 2, environment={"FSHARD_DIRECT": "0"}, timeout=60)
    assert "psum of float32[5000000]" in text and "test_async_handles.py" in text and "within 1 s" in text


def wait_for_the_first_of_two():
    """Process 0 waits for a sum that others begin when another is done: one that was started last, and has rounds."""
    mesh = fs.make_mesh({"a": 2, "b": 2}, timeout=10)

    def main():
        x = torch.ones(2)
        fs.psum(x, ("a", "b"))
        if fs.axis_index(("a", "b")) == 0:
            near, far = fs.psum.start(x, "a"), fs.psum.start(x, ("a", "b"))
            return near.wait()[0].item(), far.wait()[0].item()
        far = fs.psum(x, ("a", "b"))
        return fs.psum(x, "a")[0].item(), far[0].item()

    return fs.run(main, mesh=mesh)[0]


def test_what_was_started_last_goes_on_while_another_is_waited_for(four):
    assert four.run(wait_for_the_first_of_two) == [(2.0, 4.0)] * 4
