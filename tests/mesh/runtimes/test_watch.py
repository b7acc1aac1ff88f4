"""`FSHARD_CHECK=1`: what would hang, or mix up bytes, is an error on every process; what is right
is not.
"""

import contextlib
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.errors import CollectiveTimeoutError, DeadlockError, LostProcessError, MismatchError
from fshard.mesh.runtimes.process import leave
from fshard.mesh.spmd.scope import require
from tests.helpers.ended import wait_until
from tests.helpers.processes import Processes, not_under_rules, run_processes
from tests.mesh.shared_memory.messages import UNEVEN, uneven_message

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)


def exchange(other):
    fs.send(torch.ones(3), "data", to=other)
    received = fs.recv(torch.ones(3), "data", source=other).sum().item()
    return received + fs.psum(torch.ones(1), "data").sum().item()


ONES = torch.ones(2)
PROGRAMS = {  # what process 0 does, what process 1 does; the error and its words
    "right": (lambda: exchange(1), lambda: exchange(0), None),
    "line": (
        lambda: fs.psum(ONES, "data"),
        lambda: fs.psum(ONES, "data"),
        MismatchError, "Only the lines differ",
    ),
    "shape": (
        lambda: fs.psum(ONES, "data"), lambda: fs.psum(torch.ones(3), "data"), MismatchError,
        "psum of float32[2] over data at", "psum of float32[3] over data at", "process 0", "process 1",
    ),
    "collective": (
        lambda: fs.psum(ONES, "data"), lambda: fs.all_gather(ONES, "data"), MismatchError,
        "psum of float32[2] over data at", "all_gather(dim=0) of float32[2] over data at",
    ),
    "another message": (
        lambda: fs.recv(ONES, "data", source=1), lambda: fs.send(torch.ones(3), "data", to=0), MismatchError,
        "expects a message of float32[2] over data at", "received a message of float32[3]",
    ),
    "nothing": (
        lambda: fs.psum(ONES, "data"), lambda: None, DeadlockError,
        "process 0: waits in psum of float32[2] over data at", "process 1: has finished",
    ),
    "no message": (
        lambda: fs.recv(ONES, "data", source=1), lambda: None, DeadlockError,
        "process 0: waits in recv of a message of float32[2] over data from process 1 at",
    ),
}  # fmt: skip


def run_program(kind):
    def main():
        fs.psum(ONES, "data")
        return PROGRAMS[kind][fs.axis_index("data")]()

    return fs.run(main, mesh=fs.make_mesh({"data": 2}))[0]


@pytest.fixture(scope="module")
def checked(link):
    with Processes(2, environment={"FSHARD_CHECK": "1", **link}, timeout=30) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_checked(link):
    with Processes(4, environment={"FSHARD_CHECK": "1", **link}, timeout=60) as pool:
        yield pool


@pytest.mark.parametrize("kind", PROGRAMS)
def test_check_wrong_program_raises_instead_of_hanging(kind, checked):
    _, _, error, *words = PROGRAMS[kind]
    if error is None:
        assert checked.run(run_program, kind) == [5.0, 5.0]
        return
    run = (
        checked.run_last if error is DeadlockError else checked.run
    )  # that takes processes that really end
    with pytest.raises(error) as raised:
        run(run_program, kind)
    assert all(word in str(raised.value) for word in words)


def test_check_of_shapes_allows_different_lines():
    run_processes(run_program, 2, "line", environment={"FSHARD_CHECK": "shapes"}, timeout=30)


def global_array(of):
    layout = fs.Layout(fs.make_mesh({"data": 2}), P("data"))
    x = fs.from_local(torch.ones(of[dist.get_rank()]), layout)
    row = fs.shard_map(
        lambda x: fs.from_local(x, layout).local, mesh=layout.mesh, in_specs=P(), out_specs=P()
    )
    return fs.unshard(x).tolist(), row(torch.ones(1)).shape


def test_check_from_local_of_unequal_shapes_raises(checked):
    assert checked.run(global_array, (2, 2)) == [([1.0] * 4, (1,))] * 2
    with pytest.raises(MismatchError) as raised:
        checked.run(global_array, (2, 3))
    assert all(
        f"process {rank}: from_local of f32[{n}@data]" in str(raised.value)
        for rank, n in [(0, 4), (1, 6)]
    )


# -- handles ---------------------------------------------------------------------------------------

CALLS = {  # what is started with a tensor of one element, and the result from the numbers of the group
    "psum": (lambda x, axes: fs.psum.start(x, axes), lambda xs: [sum(xs)]),
    "wide psum": (
        lambda x, axes: fs.psum.start(x.expand(3000).contiguous(), axes),
        lambda xs: [sum(xs)] * 3000,
    ),
    "all_gather": (lambda x, axes: fs.all_gather.start(x, axes), lambda xs: xs),
    "broadcast": (lambda x, axes: fs.broadcast.start(x, axes, source=1), lambda xs: [xs[1]]),
    "all_to_all": (
        lambda x, axes: fs.all_to_all.start(x.repeat(fs.axis_size(axes)), axes),
        lambda xs: xs,
    ),
}


def legal_order(calls, draw):
    """Return one process's steps: (call, whether it is started or waited for), in an order that
    cannot deadlock.

    Calls along the same axes are started in the order of the program, others in any. A call is
    waited for when all before it in the program have been started; so the first that is not done
    can always be done.
    """
    starts = draw.sample(range(len(calls)), len(calls))
    for axes in {axes for _, axes in calls}:
        indices = [index for index, call in enumerate(starts) if calls[call][1] == axes]
        for index, call in zip(indices, sorted(starts[index] for index in indices), strict=True):
            starts[index] = call
    steps = [(call, True) for call in starts]
    for call in draw.sample(range(len(calls)), len(calls)):
        before = [
            index for index, (started, begins) in enumerate(steps) if begins and started <= call
        ]
        steps.insert(draw.randint(max(before) + 1, len(steps)), (call, False))
    return steps


def run_in_legal_order(calls, seed):
    def main():
        handles, wrong = {}, []
        for call, begins in legal_order(calls, random.Random(10 * seed + dist.get_rank())):
            name, axes = calls[call]
            start, expected = CALLS[name]
            if begins:
                handles[call] = start(torch.tensor([100.0 * call + dist.get_rank()]), axes)
            else:
                xs = [
                    100.0 * call + member
                    for member in require("the test").group(axes, "the test").members
                ]
                result = handles[call].wait().tolist()
                wrong += [] if result == expected(xs) else [(name, axes, result)]
        return wrong

    mesh = fs.make_mesh({"a": 2, "b": 2})
    fs.run(
        lambda: fs.psum(torch.ones(1), ("a", "b")), mesh=mesh
    )  # over gloo this makes a group, for which all wait
    return fs.run(main, mesh=mesh)[0]


COMPARED_AT_START = not_under_rules("FSHARD_CHECK compares calls of NCCL when they are started")


@pytest.mark.parametrize("pool", ["four", pytest.param("four_checked", marks=COMPARED_AT_START)])
def test_check_legal_order_of_handles_does_not_raise(pool, link, request):
    pool = request.getfixturevalue(pool)
    call = st.tuples(st.sampled_from(sorted(CALLS)), st.sampled_from(["a", "b", ("a", "b")]))

    @settings(max_examples=20)
    @given(st.lists(call, min_size=2, max_size=8), st.integers(0, 10**6))
    def check(calls, seed):
        assert pool.run(run_in_legal_order, calls, seed) == [[]] * 4

    check()


def start_along_two_axes(first, second):
    """Start along a and b, devices 0 and 3 the other way round, and look at the messages between
    them meanwhile.
    """

    def main():
        other = 3 - dist.get_rank()
        x = torch.tensor([1.0 + dist.get_rank()])
        order = (first, second) if dist.get_rank() in (0, 3) else (second, first)
        handles = {axis: fs.psum.start(x, axis) for axis in order}
        fs.send(x, ("a", "b"), to=other)
        got = fs.recv(x, ("a", "b"), source=other).item()
        return got, [handles[axis].wait().item() for axis in ("a", "b")]

    mesh = fs.make_mesh({"a": 2, "b": 2})
    fs.run(lambda: fs.psum(torch.ones(1), ("a", "b")), mesh=mesh)
    return fs.run(main, mesh=mesh)[0]


@COMPARED_AT_START
def test_check_groups_started_in_different_orders_do_not_raise(four_checked):
    results = [(4.0, [4.0, 3.0]), (3.0, [6.0, 3.0]), (2.0, [4.0, 7.0]), (1.0, [6.0, 7.0])]
    assert four_checked.run(start_along_two_axes, "a", "b") == results


STARTED_WRONG = {
    "shape": (lambda x: [fs.psum.start(x, "a"), fs.psum.start(x, "b")],
              lambda x: [fs.psum.start(x, "a"), fs.psum.start(x[1:], "b")]),
    "dtype": (lambda x: [fs.broadcast.start(x, "b")], lambda x: [fs.broadcast.start(x.int(), "b")]),
    "size of a broadcast": (lambda x: [fs.broadcast.start(x, "b")], lambda x: [fs.broadcast.start(x[1:], "b")]),
    "order": (lambda x: [fs.psum.start(x, "b"), fs.all_gather.start(x, "b")],
              lambda x: [fs.all_gather.start(x, "b"), fs.psum.start(x, "b")]),
    "line": (lambda x: [fs.psum.start(x, "b")],
             lambda x: [fs.psum.start(x, "b")]),
    "another waits": (lambda x: [fs.psum.start(x, "b"), fs.psum.start(x, "a")][::-1],
                      lambda x: [fs.psum.start(x[1:], "b"), fs.psum.start(x, "a")]),
    "a later one is waited for": (lambda x: [fs.psum.start(x, "b"), fs.all_gather.start(x, "b")][::-1],
                                  lambda x: [fs.psum.start(x[1:], "b")]),
}  # fmt: skip
"""What processes 0 and 2 start, and what processes 1 and 3 start."""


def start_wrongly(kind):
    def main():
        began = time.monotonic()
        told = []
        for _ in range(2):  # the group stays closed
            try:
                for handle in STARTED_WRONG[kind][dist.get_rank() % 2](torch.ones(4)):
                    handle.wait()
            except MismatchError as error:
                told.append(str(error))
        assert time.monotonic() - began < 10
        dist.barrier()  # else one that is ahead would leave while another still sends
        return told

    try:
        return fs.run(main, mesh=fs.make_mesh({"a": 2, "b": 2}))[0]
    finally:
        leave(waiting=False)


@pytest.mark.parametrize("kind", STARTED_WRONG)
def test_check_mismatched_start_raises_on_all_waiting(kind, four_checked):
    for rank, (told, again) in enumerate(four_checked.run(start_wrongly, kind)):
        here = [f"process {other}: " for other in (rank & ~1, rank | 1)]
        assert all(told.count(text) == 1 for text in here) and told.count("test_watch.py") == 2
        assert "Only the lines differ" in told if kind == "line" else "Only" not in told
        assert told in again  # the link, if first to see it, adds that the group is lost


# -- what only some differentiate ------------------------------------------------------------------


def differentiate_unevenly(f, timeout):
    """Differentiate on process 0 alone; return what each process is told."""

    def main():
        try:
            f(torch.tensor([1.0, 2.0], requires_grad=True), fs.axis_index("d") == 0)
        except (MismatchError, CollectiveTimeoutError, LostProcessError) as error:
            return f"{type(error).__name__}: {error}"

    try:
        return fs.run(main, mesh=fs.make_mesh({"d": 2}, timeout=timeout))[0]
    finally:
        leave(waiting=False)


@pytest.mark.parametrize("f", UNEVEN, ids=lambda f: f.__name__)
def test_check_uneven_differentiation_raises_on_all_waiting(f, checked):
    told = [text for text in checked.run(differentiate_unevenly, f, 20) if text is not None]
    assert len(told) == (1 if f is uneven_message else 2)  # a sender does not wait for its receiver
    for text in told:
        assert text.startswith("MismatchError") and f" for {UNEVEN[f]}" in text
        assert "what some devices of a group differentiate, all must" in text


def differentiate_unevenly_over_gloo(f):
    environment = {"FSHARD_DIRECT": "0"}
    return run_processes(differentiate_unevenly, 2, f, 2, environment=environment, timeout=60)


def test_gloo_uneven_differentiation_raises():
    # Each of them ends with a limit of time: all wait at once.
    with ThreadPoolExecutor() as threads:
        texts = list(threads.map(differentiate_unevenly_over_gloo, UNEVEN))
    for f, told in zip(UNEVEN, texts, strict=True):
        told = [text for text in told if text is not None]
        # a sender does not wait for its receiver; but one that comes a second late finds it gone
        assert len(told) == 2 or (f is uneven_message and len(told) == 1), f
        late = ("CollectiveTimeoutError", "LostProcessError") if f is uneven_message else ()
        assert all(text.startswith(("MismatchError", *late)) for text in told), told


# -- whoever is lost -------------------------------------------------------------------------------


def call_with_process_that(fate, path):
    """Call a collective on process 0, and write its error; process 1 dies, or is there until then."""
    mesh = fs.make_mesh({"data": 2}, timeout=1)
    is_first = dist.get_rank() == 0
    if not is_first and fate == "dies":
        os._exit(3)
    if not is_first:
        wait_until(path.exists)
        return
    began = time.monotonic()
    with pytest.raises((LostProcessError, CollectiveTimeoutError)) as error:
        fs.run(lambda: fs.psum(torch.ones(2), "data"), mesh=mesh)
    path.write_text(f"{time.monotonic() - began:.0f} s {error.type.__name__}: {error.value}")


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("dies", r"[0-2] s LostProcessError: psum .* at .*test_watch"),
        ("is late", r"(?s)[1-3] s CollectiveTimeoutError: psum.*process 1: runs"),
    ],
)
def test_check_dead_or_late_process_raises(fate, words, tmp_path):
    path = tmp_path / "error"
    with contextlib.suppress(RuntimeError):
        run_processes(
            call_with_process_that, 2, fate, path, environment={"FSHARD_CHECK": "1"}, timeout=30
        )
    assert re.match(words, path.read_text()), path.read_text()
