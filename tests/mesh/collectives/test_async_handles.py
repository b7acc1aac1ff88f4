"""Handles: several collectives under way, waited for in whatever order, over both kinds of links."""

import os
import time

import torch

import fshard as fs
from tests.helpers.processes import run_processes
from tests.helpers.sampled import THOROUGH

CALLS = [  # the collective, how many elements (None: all), its options
    (fs.psum, 900, {}),
    (fs.psum, 50_000, {}),  # by doubling
    (fs.psum, None, {}),
    (fs.all_gather, None, {}),
    (fs.psum_scatter, None, {}),
    (fs.all_to_all, None, {}),
    (fs.broadcast, None, {"source": 0}),
    (fs.all_gather, 12, {"to": "replicated"}),
    (fs.pmean, 12, {}),
    (fs.pmax, 12, {}),
    (fs.pmin, 12, {}),
    (fs.pvary, 12, {}),
]


def wait_in_many_orders(n):
    def main():
        index = fs.axis_index("d")
        x = torch.arange(100_000.0 * n) + index
        calls = [(collective, x[:size], options) for collective, size, options in CALLS]
        calls.append((fs.ppermute, x, {"perm": [(i, (i + 1) % n) for i in range(n)]}))
        calls.append((fs.broadcast, x, {"source": n - 1}))
        expected = [collective(x, "d", **options) for collective, x, options in calls]
        for turn in range(12 if THOROUGH else 4):
            handles = [collective.start(x, "d", **options) for collective, x, options in calls]
            order = torch.randperm(
                len(handles), generator=torch.Generator().manual_seed(turn + index)
            )
            assert all(torch.equal(handles[number].wait(), expected[number]) for number in order)
            assert handles[0].wait() is handles[0].wait()
        x = x[:12].div(6).requires_grad_()
        losses = [
            sum(
                (collective(x * x, "d", **options) ** 2).mean() for collective, _, options in calls
            ),
            sum(
                (collective.start(x * x, "d", **options).wait() ** 2).mean()
                for collective, _, options in calls
            ),
        ]
        gradients = [torch.autograd.grad(loss, x, create_graph=True)[0] for loss in losses]
        torch.testing.assert_close(*gradients)
        torch.testing.assert_close(*[torch.autograd.grad((g * g).sum(), x)[0] for g in gradients])
        return True

    return fs.run(main, mesh=fs.make_mesh({"d": n}))


def test_handles_waited_in_any_order_are_exact(two, four):
    runs = (
        [wait_in_many_orders(n) for n in (1, 2, 3)]
        + two.run(wait_in_many_orders, 2)
        + four.run(wait_in_many_orders, 4)
    )
    assert all(map(all, runs))


def wait_for_a_message_in_between():
    def main():
        x = torch.ones(5_000_000)
        index = fs.axis_index("d")
        handle = fs.psum.start(x, "d")
        if index == 0:
            fs.recv(torch.empty(3), "d", source=1)
            return handle.wait().sum().item()
        total = handle.wait().sum().item()
        if index == 1:
            fs.send(torch.ones(3), "d", to=0)
        return total

    return fs.run(main, mesh=fs.make_mesh({"d": int(os.environ["WORLD_SIZE"])}))[0]


def test_recv_during_started_psum_completes(two, four):
    assert two.run(wait_for_a_message_in_between) == [1e7] * 2
    assert four.run(wait_for_a_message_in_between) == [2e7] * 4


def wait_in_vain():
    mesh = fs.make_mesh({"d": 2}, timeout=1)

    def main():
        if fs.axis_index("d") == 1:
            time.sleep(2.5)
            return "came too late"
        handle = fs.psum.start(torch.ones(5_000_000), "d")
        fs.all_gather.start(
            torch.ones(3), "d"
        )  # something else: from now on a helper carries the sum on
        try:
            handle.wait()
        except fs.errors.CollectiveTimeoutError as error:
            return str(error)

    return fs.run(main, mesh=mesh)[0]


def test_helper_error_is_raised_at_wait():
    text, _ = run_processes(wait_in_vain, 2, environment={"FSHARD_DIRECT": "0"}, timeout=60)
    assert (
        "psum of float32[5000000]" in text
        and "test_async_handles.py" in text
        and "within 1 s" in text
    )


def wait_for_the_first_of_two():
    """Process 0 waits for a sum that others begin when another is done: one that was started last,
    and has rounds.
    """
    mesh = fs.make_mesh({"a": 2, "b": 2}, timeout=10)

    def main():
        def start(axes):
            return fs.psum.start(torch.ones(2), axes)

        fs.psum(torch.ones(2), ("a", "b"))
        if fs.axis_index(("a", "b")) == 0:
            near = start("a")
            far = start(("a", "b"))
            return near.wait()[0].item(), far.wait()[0].item()
        far = start(("a", "b")).wait()
        return start("a").wait()[0].item(), far[0].item()

    return fs.run(main, mesh=mesh)[0]


def test_started_collective_progresses_during_other_wait(four):
    assert four.run(wait_for_the_first_of_two) == [(2.0, 4.0)] * 4
