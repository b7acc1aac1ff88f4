"""The testing kit: real processes, and the pytest plugin."""

import os
import signal
import sys
import time

import pytest
import torch

import fshard as fs
from fshard.testing.processes import Processes, run_processes
from tests.helpers.ended import gone

# -- processes -------------------------------------------------------------------------------------


class TwoNumbersError(Exception):
    """An error that pickle cannot make again: it passes one argument on and wants two."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def rank():
    return int(os.environ["RANK"])


def total(n):
    return fs.run(
        lambda: fs.psum(torch.tensor([1.0, rank()]), "data"), mesh=fs.make_mesh({"data": n})
    )[0]


def fail(n, who, error):
    total(n)
    if rank() == who:
        sys.stderr.write("a last word")
        raise error
    total(n)


def fail_unportably():
    raise TwoNumbersError(1, 2)


def hang(who):
    if rank() == who:
        time.sleep(100)


def die(n, who, code):
    total(n)
    if rank() == who:
        os._exit(code) if code else os.kill(os.getpid(), signal.SIGKILL)
    total(n)


def stay_away(n, who):
    total(n)
    if rank() != who:
        total(n)


def send_and_end():
    mesh = fs.make_mesh({"data": 2})

    def device():
        if fs.axis_index("data") == 0:
            fs.send(torch.ones(1 << 20), "data", to=1)
            return None
        time.sleep(0.5)
        return fs.recv(torch.empty(1 << 20), "data", source=0).sum().item()

    return fs.run(device, mesh=mesh)[0]


def identify():
    return os.getpid()


def notes(error):
    return "\n".join(error.value.__notes__)


def test_run_processes_ends_its_processes():
    results = run_processes(identify, 2)
    assert len(set(results)) == 2
    assert all(gone(pid) for pid in results)


def test_processes_failure_raises_first_with_others_as_notes():
    with Processes(2) as pool:
        with pytest.raises(KeyError, match="oops") as error:
            pool.run(fail, 2, 1, KeyError("oops"))
        again = pool.run(total, 2)  # the pool goes on
    said = notes(error)
    assert "in process 1 of 2:\nTraceback" in said
    assert "in fail\n    raise error" in said
    assert "process 1 wrote to stderr:\na last word" in said
    assert "then process 0 failed:\nLostProcessError" in said, said
    assert [x.tolist() for x in again] == [[2, 1], [2, 1]]


def test_what_pickle_cannot_send_raises(two):
    with pytest.raises(RuntimeError, match="TwoNumbersError: 1 and 2") as error:
        two.run(fail_unportably)
    assert "in fail_unportably" in notes(error)
    with pytest.raises(AttributeError, match="pickle") as error:
        two.run(lambda: None)
    assert "must be at the top level of a module" in notes(error)


def test_processes_hang_raises_with_stacks():
    with Processes(2) as pool:
        pids = pool.run(identify)
        pool.timeout = 1
        with pytest.raises(
            RuntimeError, match="process 1 of 2 did not finish hang within 1 s"
        ) as error:
            pool.run(hang, 1)
        pool.timeout = 60
        assert "in hang" in notes(error)
        assert all(gone(pid) for pid in pids)
        assert [x.tolist() for x in pool.run(total, 2)] == [[2, 1], [2, 1]]


@pytest.mark.parametrize(
    ("code", "words"), [(3, "ended with exit code 3"), (0, "was killed by SIGKILL")]
)
def test_processes_death_is_the_reported_cause(code, words):
    with pytest.raises(RuntimeError, match=f"process 1 of 2 {words}") as error:
        run_processes(die, 2, 2, 1, code)
    assert "then process 0 failed" in notes(error)


def test_collective_with_finished_process_raises():
    with pytest.raises(
        fs.errors.LostProcessError, match=r"psum of float32\[2\] over data .* cannot end"
    ):
        run_processes(stay_away, 2, 2, 0)
    with pytest.raises(fs.errors.DeadlockError, match="process 0: has finished"):
        run_processes(stay_away, 2, 2, 0, environment={"FSHARD_CHECK": "1"})


def test_message_of_ended_process_arrives():
    assert run_processes(send_and_end, 2) == [None, float(1 << 20)]


# -- the plugin ------------------------------------------------------------------------------------

TESTS = """
import os
import pytest, torch
import fshard as fs
from fshard import P

@pytest.fixture
def costly():
    with open("set-up", "a") as file:
        file.write(str(os.getpid()) + "\\n")

@pytest.mark.mesh(data=2)
def test_marked(mesh, costly):
    assert mesh.runtime == os.environ.get("EXPECTED")
    x = fs.device_put(torch.arange(4.0), fs.Layout(mesh, P("data")))
    total = fs.shard_map(lambda x: fs.psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P())(x)
    assert fs.unshard(total) == 6

@pytest.mark.mesh(data=2)
@pytest.mark.parametrize("k", [1, 2])
def test_false(mesh, k):
    print("the value is", k)
    assert k == 1, "k is not one"

@pytest.mark.mesh(data=2)
@pytest.mark.xfail(raises=KeyError)
def test_expected(mesh):
    raise KeyError("expected")

def test_skipped(mesh):
    assert dict(mesh.shape) == {"data": 4}
    pytest.skip("not today")

@pytest.mark.mesh(data=2)
def test_one_device_fails(mesh):
    if os.environ.get("RANK") == "1" or mesh.runtime == "virtual":
        raise ZeroDivisionError("only here")
    fs.run(lambda: fs.psum(torch.ones(2), "data"), mesh=mesh)

def test_plain():
    assert "RANK" not in os.environ
"""


@pytest.mark.parametrize(("runtime", "expected"), [("virtual", "virtual"), ("gloo", "process")])
def test_plugin_runs_tests_on_both_runtimes(pytester, monkeypatch, runtime, expected):
    monkeypatch.setenv("EXPECTED", expected)
    pytester.makepyfile(TESTS)
    run = pytester.runpytest_subprocess if runtime == "gloo" else pytester.runpytest_inprocess
    result = run(f"--mesh-runtime={runtime}", "--strict-markers", "-W", "error", "-rfsx")
    result.assert_outcomes(passed=3, failed=2, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*the value is 2*" if runtime == "gloo" else "*assert k == 1*",
            "*ZeroDivisionError: only here*",
            "FAILED*test_false?2?*",
            "FAILED*test_one_device_fails*",
            "SKIPPED*.py:*: not today",
        ]
    )
    assert len((pytester.path / "set-up").read_text().split()) == {"virtual": 1, "gloo": 2}[runtime]


def test_plugin_processes_draw_equal_examples(pytester):
    pytester.makepyfile(
        """
        import pytest, torch
        import fshard as fs
        from hypothesis import given, settings, strategies as st

        @pytest.mark.mesh(data=2)
        def test_drawn(mesh):
            @settings(deadline=None, max_examples=30)
            @given(st.integers())
            def check(k):
                k = torch.tensor([k % 1000])
                assert fs.run(lambda: fs.psum(k, "data"), mesh=mesh)[0] == 2 * k
            check()
        """
    )
    pytester.runpytest_inprocess("--mesh-runtime=gloo").assert_outcomes(passed=1)


CERTIFIED = """
import torch
from torch import nn

def program(rank, world):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 3).chunk(world)[rank]
    return model, lambda model, x: model(x).square().mean(), x, lambda: (opt.step(), opt.zero_grad())

def mistaken(rank, world):
    model, loss, x, step = program(rank, world)
    return model, lambda model, x: world * loss(model, x), x, step

def test_right(certified):
    certified(program, {"data": 2}, steps=1)

def test_wrong(certified):
    certified(mistaken, {"data": 2}, steps=1)
"""


def test_plugin_writes_the_certificates_of_tests_that_pass_and_fail(pytester):
    pytester.makepyfile(test_training=CERTIFIED)
    result = pytester.runpytest_subprocess("--certificates=found/certificates")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*is 2 times that of one device: the size*"])
    folder = pytester.path / "found" / "certificates"
    names = sorted([path.name for path in folder.iterdir()])
    right, wrong = "test_training-py-test_right.1", "test_training-py-test_wrong.1"
    assert names == [f"{right}.html", f"{right}.json", f"{wrong}.html", f"{wrong}.json"]
    assert '"ok": true' in (folder / f"{right}.json").read_text()
    assert "First failure" in (folder / f"{wrong}.html").read_text()
