"""Direct links, among processes of one machine: who is found, what they tell each other, and what they do not break."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.mesh.runtimes.process import ProcessWorld, leave
from fshard.mesh.shared_memory import meet
from fshard.mesh.shared_memory.transport import SharedMemory
from tests.helpers.processes import Processes, run_processes
from tests.mesh.shared_memory.messages import UNEVEN, uneven_message

pytestmark = pytest.mark.skipif(
    meet._libc() is None, reason="this system does not read other processes' memory"
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Processes]:
    """Two processes with a direct link."""
    with Processes(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    """Three processes with direct links."""
    with Processes(3) as pool:
        yield pool


def mapped(main, **shape):
    shape = shape or {"d": int(os.environ["WORLD_SIZE"])}
    return fs.run(main, mesh=fs.make_mesh(shape))[0]


def kind_of_link():
    mapped(lambda: fs.psum(torch.ones(1), "d"))
    return [
        type(link).__name__ for link in ProcessWorld.of(fs.make_mesh({"d": 2}))._transports.values()
    ]


def one_may_not_read():
    if os.environ["RANK"] == "1":
        meet._can_read = lambda libc, row: False
    return kind_of_link(), mapped(lambda: fs.psum(torch.ones(1), "d").item())


def one_is_elsewhere():
    if os.environ["RANK"] == "2":
        meet.machine_id = lambda: 12345
    mesh = fs.make_mesh({"a": 3})
    total = fs.run(lambda: fs.psum(torch.ones(1), "a").item(), mesh=mesh)[0]
    return sorted(ProcessWorld.of(mesh).peers.by_rank), total


@pytest.mark.parametrize(
    ("main", "environment", "expected"),
    [
        (kind_of_link, {}, [["SharedMemory"]] * 2),
        (kind_of_link, {"FSHARD_DIRECT": "0"}, [["Gloo"]] * 2),
        (one_may_not_read, {}, [(["Gloo"], 2.0)] * 2),
        (one_is_elsewhere, {}, [([1], 3.0), ([0], 3.0), ([], 3.0)]),
    ],
)
def test_link_is_direct_between_processes_that_can_read_each_other(main, environment, expected):
    assert run_processes(main, len(expected), environment=environment) == expected


# -- calls that differ --------------------------------------------------------------------------------------------

ONES = {
    "f32": torch.ones(4),
    "i32": torch.ones(4, dtype=torch.int32),
    "2x2": torch.ones(2, 2),
    "large": torch.ones(1 << 20),
}
DIFFERENT = {
    "dtype": lambda first: fs.psum(ONES["f32" if first else "i32"], "d"),
    "shape": lambda first: fs.psum(ONES["f32" if first else "2x2"], "d"),
    "axes": lambda first: fs.psum(ONES["f32"], "d" if first else ("d", "e")),
    "collective": lambda first: fs.psum(ONES["f32"], "d") if first else fs.pmax(ONES["f32"], "d"),
    "size": lambda first: fs.all_gather(ONES["f32" if first else "large"], "d"),
    "dim": lambda first: fs.all_to_all(ONES["2x2"], "d", split_dim=int(first)),
    "large": lambda first: fs.psum(ONES["large"] if first else ONES["large"].int(), "d"),
    "message": lambda first: exchange(torch.float32 if first else torch.int32),
}
"""Calls that differ between two processes on one line raise; `test_process` has calls on two lines."""


def exchange(dtype):
    other = 1 - fs.axis_index("d")
    fs.send(torch.ones(3, dtype=dtype), "d", to=other)
    return fs.recv(torch.ones(3, dtype=dtype), "d", source=other)


def call_differently(kind):
    try:
        mapped(lambda: DIFFERENT[kind](fs.axis_index("d") == 0), d=2, e=1)
    except fs.errors.MismatchError as error:
        leave(waiting=False)
        return str(error)
    return None


def differentiate_unevenly(f):
    return lambda: f(torch.tensor([1.0, 2.0], requires_grad=True), fs.axis_index("d") == 0)


def uneven_between_processes(f):
    try:
        mapped(differentiate_unevenly(f))
    except fs.errors.MismatchError as error:
        leave(waiting=False)
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("f", UNEVEN, ids=lambda f: f.__name__)
def test_uneven_differentiation_raises_mismatch(pair, f):
    told = [text for text in pair.run(uneven_between_processes, f) if text is not None]
    assert len(told) == (1 if f is uneven_message else 2)  # a sender does not wait for its receiver
    with pytest.raises(fs.errors.MismatchError) as error:
        fs.run(differentiate_unevenly(f), mesh=fs.make_mesh({"d": 2}))
    for text in [*told, str(error.value)]:
        assert "what some devices of a group differentiate, all must" in text
        assert f"for {UNEVEN[f]}" in text and "for values" in text


@pytest.mark.parametrize("kind", DIFFERENT)
def test_mismatched_calls_raise_without_check(pair, kind):
    for rank, text in enumerate(pair.run(call_differently, kind)):
        assert (
            text.count("test_direct.py:") == 2 and f"process {1 - rank} makes another call" in text
        )


# -- what is under way --------------------------------------------------------------------------------------------


def many_under_way(count, size):
    def main():
        index = fs.axis_index("d")
        handles = [
            fs.all_gather.start(torch.full((size,), index + 10.0 * call), "d")
            for call in range(count)
        ]
        for call in reversed(range(count)):
            expected = torch.tensor(
                [other + 10.0 * call for other in range(fs.axis_size("d"))]
            ).repeat_interleave(size)
            assert torch.equal(handles[call].wait(), expected), call
        return True

    return mapped(main)


def test_started_collectives_beyond_ring_size_complete(pair, three):
    assert all(pair.run(many_under_way, 400, 4000) + three.run(many_under_way, 60, 100_000))


def leave_early():
    """One process leaves; what the others send each other arrives; what was sent to it is an error of its sender."""

    def main():
        index = fs.axis_index("d")
        x = torch.ones(16_000)
        fs.psum(x, "d")
        if index == 0:
            fs.send(x, "d", to=2)
            fs.recv(x, "d", source=2)  # now it may go
            time.sleep(0.5)
            for _ in range(400):
                fs.send(x, "d", to=1)
        elif index == 1:
            time.sleep(1)
            assert sum(fs.recv(x, "d", source=0).sum().item() for _ in range(400)) == 400 * 16_000
        else:
            time.sleep(0.2)  # so that the message to it is there, and is left unread
            fs.send(x, "d", to=0)

    mapped(main)


def test_process_that_leaves_does_not_disturb_others():
    with pytest.raises(fs.errors.MismatchError, match="never received") as error:
        run_processes(leave_early, 3)
    assert not any("then process" in note for note in error.value.__notes__)


def messages_of_all_sizes():
    def main():
        index = fs.axis_index("d")
        other = 1 - fs.axis_index("d")
        sizes = [1, 20_000, 0, 300_000, 5, 1 << 20, 3]
        for size in sizes:
            fs.send(torch.full((size,), 1.0 + index), "d", to=other)
        handles = [fs.recv.start(torch.empty(size), "d", source=other) for size in sizes]
        for size, handle in zip(sizes, handles, strict=True):
            assert torch.equal(handle.wait(), torch.full((size,), 1.0 + other))
        return fs.psum(torch.ones(1), "d").item()

    return mapped(main)


def test_messages_of_all_sizes_arrive_in_order(pair):
    assert pair.run(messages_of_all_sizes) == [2.0, 2.0]


def change_at_once():
    def main():
        index = fs.axis_index("d")
        n = fs.axis_size("d")
        for size in (100, 70_000, 400_001):
            x = torch.empty(n * size)
            for turn in range(20):
                x.fill_(turn + index)
                got = [
                    (fs.psum(x, "d"), float(sum(turn + other for other in range(n)))),
                    (fs.psum_scatter(x, "d"), float(sum(turn + other for other in range(n)))),
                    (fs.broadcast(x, "d", source=turn % n), float(turn + turn % n)),
                    (
                        fs.ppermute(x, "d", [(one, (one + 1) % n) for one in range(n)]),
                        float(turn + (index - 1) % n),
                    ),
                ]
                gathered = fs.all_gather(x[:size], "d"), fs.all_to_all(x, "d")
                x.fill_(-1.0)  # what was given may be changed as soon as the call has returned
                assert all(y.eq(value).all() for y, value in got)
                for y in gathered:
                    assert torch.equal(y, torch.arange(float(n)).add(turn).repeat_interleave(size))
        return True

    return mapped(main)


@pytest.mark.parametrize("n", [2, 3])
def test_arguments_changed_after_the_call_keep_results(pair, three, n):
    assert all({2: pair, 3: three}[n].run(change_at_once))


# -- those who go -------------------------------------------------------------------------------------------------


def die_while_others_wait(size):
    def main():
        fs.psum(torch.ones(2), "d")
        if fs.axis_index("d") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            fs.psum(torch.ones(size), "d")
        except fs.errors.LostProcessError as error:
            with open(os.environ["FSHARD_TEST_TELLS"], "w") as file:
                file.write(str(error))
            raise

    return mapped(main)


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_killed_process_raises_lost_process_error(tmp_path, size):
    answer = tmp_path / "answer"
    with pytest.raises(RuntimeError):
        run_processes(
            die_while_others_wait,
            2,
            size,
            environment={"FSHARD_TEST_TELLS": str(answer)},
            timeout=30,
        )
    assert f"psum of float32[{size}]" in answer.read_text()


def fail_half_way():
    """The source gives up and changes what it had offered; the other, who comes later, must not get that."""
    mesh = fs.make_mesh({"d": 2}, timeout=1)

    def main():
        x = torch.ones(200_000)
        if fs.axis_index("d") == 1:
            time.sleep(2.5)
        try:
            return fs.broadcast(x, "d").unique().tolist()
        except fs.errors.CollectiveTimeoutError:
            x.fill_(-7.0)
            time.sleep(3)
            return "gave up"
        except fs.errors.LostProcessError:
            return "was told"

    return fs.run(main, mesh=mesh)[0]


def test_tensor_of_a_failed_collective_is_not_read():
    assert run_processes(fail_half_way, 2, timeout=20) == ["gave up", "was told"]


def native_groups_still_work():
    mesh = fs.make_mesh({"d": 2})
    world = ProcessWorld.of(mesh)
    ours = mapped(lambda: fs.psum(torch.ones(3), "d"))
    theirs = torch.ones(3)
    dist.all_reduce(theirs)
    return torch.equal(ours, theirs) and isinstance(world._transports[0, 1], SharedMemory)


def test_torch_collectives_beside_direct_links_work(pair):
    assert all(pair.run(native_groups_still_work))
