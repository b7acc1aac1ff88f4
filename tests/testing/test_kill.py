"""Killed devices: every moment of programs in every mode of training, by enumeration.

The oracle of what a death leaves behind is a program on another mesh, which runs after each death:
its bits, and those of the next random draw, are those of before.
"""

import contextlib
import gc
from functools import cache

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import LostProcessError, ScopeError
from fshard.mesh.layout import flatten
from fshard.mesh.spmd.moments import PHASES
from fshard.mesh.spmd.scope import here
from tests.helpers.processes import not_under_rules, run_processes
from tests.helpers.sampled import THOROUGH
from tests.helpers.some_devices import LOOPS, PROGRAMS, run_program

STEP = {"forward", "backward", "reduce", "agree", "update", "collective"}
"""The phases of every training step on several devices; with units that are sharded, "gather" too."""

CASES = {
    "zero 0": STEP,
    "zero 1": STEP,
    "zero 2 in slices": STEP,
    "zero 3 reproducible": STEP | {"gather"},
    "compression": STEP,
    "experts": STEP | {"gather"},
    "zb-h1 with zero": STEP | {"gather"},
    "1f1b": STEP,
    "tensor parallel": STEP,
    "loop, zero": STEP,
    "loop, fsdp": STEP | {"gather"},
    "loop in stages": STEP,
    "arrays": {"collective"},
}


def run(name, *, is_nested=False):
    """Run a program; loops, and others if asked for, in `fs.run`."""
    if is_nested or name in LOOPS:
        axes, _ = (PROGRAMS | LOOPS)[name]
        return fs.run(run_program, name, mesh=fs.make_mesh(axes))
    return run_program(name)


@cache
def moments_of(name, *, is_nested=False):
    """Return the moments that each device reaches in a program."""
    with fs.testing.moments() as reached:
        run(name, is_nested=is_nested)
    return {device: tuple(row) for device, row in reached.items()}


def next_results():
    """Return the tensors of a program on other devices, and the numbers that are drawn next."""
    torch.manual_seed(0)
    _, program = PROGRAMS["zero 3 reproducible"]
    params, _, metrics = program(fs.make_mesh({"data": 2}, devices=(4, 5)))
    return [*flatten(fs.unshard((params, metrics)))[0], torch.rand(3), *settings()]


def settings():
    """Return what is set for all code of the thread, or of the process."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.autograd.is_multithreading_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        here() is None,
    )


@pytest.fixture(scope="module")
def expected_results():
    """The same before any device was killed."""
    return next_results()


def is_equal(xs, ys):
    return all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(xs, ys, strict=True)
    )


# -- every moment ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_moments_of_a_program_have_the_phases_of_its_mode(name):
    reached = moments_of(name)
    for row in reached.values():
        assert {phase for phase, _ in row} == CASES[name]
        for phase in PHASES:
            counts = [n for other, n in row if other == phase]
            assert counts == [*range(len(counts))]


@pytest.mark.parametrize(
    ("name", "is_nested"),
    [*[(name, False) for name in CASES], ("zero 3 donating in bf16", True), ("1f1b", True)],
)
def test_kill_at_any_moment_raises_and_leaves_no_trace(name, is_nested, expected_results):
    reached = moments_of(name, is_nested=is_nested)
    for device in reached:
        for moment in alternating(reached, device):
            with fs.testing.kill(device, at=moment), pytest.raises(LostProcessError) as error:
                run(name, is_nested=is_nested)
            assert error.value.lost == (device,)
            assert f"number {device}, was killed at {text_of(moment)}" in str(error.value)
    assert is_equal(next_results(), expected_results)


def alternating(reached, device):
    """Return every second moment of a device whose neighbour has the same ones and dies at the others."""
    row = reached[device]
    neighbour = device + 1 if device % 2 == 0 else device - 1
    is_alike = reached.get(neighbour) == row
    return row[device % 2 :: 2] if is_alike and not THOROUGH else row


def text_of(moment):
    phase, n = moment
    return f'("{phase}", {n})'


# -- one step ----------------------------------------------------------------------------------


def new_step(mesh):
    """Return a small ZeRO-3 step that writes to none of its arguments, and these."""
    torch.manual_seed(0)
    params = fs.shard_params({"w": torch.randn(4, 3)}, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adam(0.1), mesh=mesh, axis="data", stage=3)

    def loss_fn(params, x):
        return (torch.randn(x.shape) * x @ params["w"]).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=False)
    return step, params, opt.init(params), torch.ones(6, 4)


@pytest.mark.parametrize("is_nested", [False, True], ids=["outside", "in run"])
def test_step_after_a_kill_has_the_bits_of_a_new_one(is_nested):
    def taken(step, *arguments):
        torch.manual_seed(1)
        return flatten(fs.unshard(step(*arguments)))[0]

    def run_step(*step):
        if is_nested:
            fs.run(lambda: taken(*new_step(mesh)), mesh=mesh)
        else:
            taken(*step)

    mesh = fs.make_mesh({"data": 3})
    expected = taken(*new_step(mesh))
    with fs.testing.moments() as reached:
        run_step(*new_step(mesh))
    for device, row in reached.items():
        for moment in row:
            step = new_step(mesh)
            with fs.testing.kill(device, at=moment), pytest.raises(LostProcessError):
                run_step(*step)
            assert is_equal(taken(*step), expected)


@pytest.mark.parametrize("phase", ["reduce", "agree"])
def test_killed_step_leaves_no_tensors(phase):
    def count_of_tensors():
        gc.collect()
        return sum(type(x) is torch.Tensor for x in gc.get_objects())

    def killed():
        with fs.testing.kill(1, at=(phase, 1)), contextlib.suppress(LostProcessError):
            run_program("zero 0")
        return count_of_tensors()

    counts = [killed() for _ in range(4)]
    assert counts[-1] <= counts[1]


def test_moments_of_a_step_are_in_the_order_of_the_program():
    step, *arguments = new_step(fs.make_mesh({"data": 2}))
    step(*arguments)  # in the first step devices agree on the order of their units, too
    with fs.testing.moments() as reached:
        step(*arguments)
    row = [phase for phase, _ in reached[1]]
    assert row == [
        "forward",
        *("gather", "collective"),
        "backward",
        *("reduce", "collective"),
        *("agree", "collective"),
        *("update", "collective"),  # the sum of the norm
    ]


def test_step_of_a_single_device_dies_in_the_thread_of_the_caller():
    step, *arguments = new_step(fs.make_mesh({"data": 1}))
    with fs.testing.moments() as reached:
        step(*arguments)
    assert {phase for phase, _ in reached[0]} == {"forward", "backward", "reduce", "update"}
    for moment in reached[0]:
        with fs.testing.kill(0, at=moment), pytest.raises(LostProcessError, match="number 0"):
            step(*arguments)
    step(*arguments)


def test_killed_device_runs_no_further_line_and_unwinds():
    lines = []

    def main():
        device = fs.axis_index("data")
        try:
            with torch.no_grad():
                fs.psum(torch.ones(2), "data")
                lines.append(device)
        except Exception as error:
            lines.append(type(error).__name__)
            raise
        finally:
            lines.append(f"finally {device}")

    with fs.testing.kill(1, at="collective"), pytest.raises(LostProcessError):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))
    assert sorted(lines) == ["LostProcessError", "finally 0", "finally 1"]


# -- those that are left -----------------------------------------------------------------------


def recovering(total=4, work=None):
    """Return a function of a device that continues with the devices that are left, again and again."""

    def main():
        lost = ()
        while True:
            alive = tuple([n for n in range(total) if n not in lost])
            try:
                mesh = fs.make_mesh({"data": len(alive)}, devices=alive)
                return lost, fs.run(work or sums, mesh=mesh)[0]
            except LostProcessError as error:
                lost = error.lost

    return main


def sums():
    n = fs.axis_size("data")
    ring = [(i, (i + 1) % n) for i in range(n)]
    y = torch.ones(1)
    for _ in range(2):
        if fs.axis_index("data") == 0:
            fs.send(y, "data", to=1)
        if fs.axis_index("data") == 1:
            y = fs.recv(y, "data", source=0)
        y = fs.ppermute(fs.psum(y, "data"), "data", ring)
    return y.item()


def test_survivors_continue_in_the_same_run():
    mesh = fs.make_mesh({"data": 4})
    for device in range(4):
        for n in range(6 if device < 2 else 4):
            with fs.testing.kill(device, at=("collective", n)):
                results = fs.run(recovering(), mesh=mesh)
            assert results.pop(device) is None
            assert results == [((device,), 9.0)] * 3


def test_two_devices_die_at_once_or_one_after_the_other():
    mesh = fs.make_mesh({"data": 4})
    for n in range(4):
        with fs.testing.kill(1, 3, at=("collective", n)):
            assert fs.run(recovering(), mesh=mesh) == [((1, 3), 4.0), None] * 2
        # The second dies at the same moment, or on the way to it in the recovery.
        with fs.testing.kill(1, at=("collective", n)), fs.testing.kill(3, at=("collective", n)):
            assert fs.run(recovering(), mesh=mesh) == [((1, 3), 4.0), None] * 2


def test_survivors_train_with_the_bits_of_devices_that_have_lost_none():
    _, program = PROGRAMS["zero 2 in slices"]

    def work():
        torch.manual_seed(0)
        run_program("zb-h1 with zero")

    def main():
        try:
            work()
        except LostProcessError as error:
            alive = [n for n in range(4) if n not in error.lost]
            torch.manual_seed(0)
            mesh = fs.make_mesh({"data": 2}, devices=alive[:2])
            return fs.unshard(program(mesh)[0]) if mesh.is_member else None

    torch.manual_seed(0)
    expected = flatten(fs.unshard(program(fs.make_mesh({"data": 2}))[0]))[0]
    with fs.testing.moments() as reached:
        fs.run(work, mesh=fs.make_mesh({"data": 4}))
    for device in reached:
        for moment in reached[device][device::13]:  # other ones of each device
            with fs.testing.kill(device, at=moment):
                results = fs.run(main, mesh=fs.make_mesh({"data": 4}))
            trees = [tree for tree in results if tree is not None]
            assert len(trees) == 2
            assert all(is_equal(flatten(tree)[0], expected) for tree in trees)


def test_dead_device_stays_dead_until_the_block_ends():
    def main():
        return fs.psum(torch.ones(1), "data").item()

    mesh = fs.make_mesh({"data": 3})
    left = fs.make_mesh({"data": 2}, devices=(0, 2))
    with fs.testing.kill(1, at="collective"):
        for _ in range(2):
            with pytest.raises(LostProcessError, match=r"device \(data=1\), number 1, .* at") as e:
                fs.run(main, mesh=mesh)
            assert e.value.lost == (1,)
        with pytest.raises(LostProcessError):  # without a collective, too
            fs.run(lambda: None, mesh=mesh)
        assert fs.run(main, mesh=left) == [2.0, 2.0]
    assert fs.run(main, mesh=mesh) == [3.0, 3.0, 3.0]


def test_kill_of_a_device_of_some_names_its_number_in_the_world():
    mesh = fs.make_mesh({"data": 2, "model": 2}, devices=(5, 4, 7, 6))
    with (
        fs.testing.kill(7, at="collective"),
        pytest.raises(LostProcessError, match=r"device \(data=1, model=0\), number 7, was") as e,
    ):
        fs.run(lambda: fs.psum(torch.ones(1), "model"), mesh=mesh)
    assert e.value.lost == (7,)


# -- saves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_nested", [False, True], ids=["outside", "in run"])
@pytest.mark.parametrize("waits", [True, False])
def test_kill_in_a_save_leaves_the_checkpoint_before_or_this_one(tmp_path, is_nested, waits):
    mesh = fs.make_mesh({"data": 2})

    def save(folder, step):
        x = fs.device_put(torch.full((4,), float(step)), fs.Layout(mesh, P("data")))
        checkpoints = fs.Checkpoints(folder)
        checkpoints.save(step, {"x": x}, wait=waits)
        checkpoints.wait()

    def run_save(folder, step):
        if is_nested:
            fs.run(save, folder, step, mesh=mesh)
        else:
            save(folder, step)

    with fs.testing.moments() as reached:
        run_save(tmp_path / "all", 1)
    assert {phase for phase, _ in reached[1]} <= {"save", "collective"}
    assert reached[1].count(("save", 2)) == 1
    for device in reached:
        for number, moment in enumerate(reached[device]):
            folder = tmp_path / f"{device}-{number}"
            run_save(folder, 1)
            with fs.testing.kill(device, at=moment), pytest.raises(LostProcessError):
                run_save(folder, 2)
            checkpoints = fs.Checkpoints(folder)
            assert checkpoints.steps in ([1], [1, 2])
            assert checkpoints.restore()["x"].tolist() == [float(checkpoints.latest)] * 4


# -- processes ---------------------------------------------------------------------------------


def killed_process(device, moment):
    with fs.testing.kill(device, at=moment):
        run_program("zero 3 reproducible")


def moments_of_process():
    with fs.testing.moments() as reached:
        run_program("zero 3 reproducible")
    return dict(reached)


@not_under_rules("a process that dies there is found by its time limit")
def test_process_kills_itself_at_the_moment():
    for moment in [("forward", 9), ("reduce", 0), ("update", 2)]:
        with pytest.raises(RuntimeError, match="SIGKILL"):
            run_processes(killed_process, 2, 1, moment)


def test_moments_of_processes_are_those_of_virtual_devices():
    expected = moments_of("zero 3 reproducible", is_nested=True)
    for rank, reached in enumerate(run_processes(moments_of_process, 2)):
        assert {rank: tuple(reached[rank])} == {rank: expected[rank]}
        assert [*reached] == [rank]


# -- misuse ------------------------------------------------------------------------------------


def test_kill_with_wrong_arguments_raises():
    for arguments, at, text in [
        ((0,), "forwards", "at must be a phase"),
        ((0,), ("forward", -1), "n of at least 0"),
        ((0,), ("forward", True), "integer n of at least 0"),
        ((0,), ("forward", 1.0), "integer n of at least 0"),
        ((0,), ("forward",), r"\(phase, n\), .*; got \('forward',\)"),
        ((0,), ("forward", 0, 1), r"\(phase, n\), .*; got \('forward', 0, 1\)"),
        ((0,), ["forward", 0], r"\(phase, n\), .*; got \['forward', 0\]"),
        ((0,), None, "at must be a phase"),
        ((), "forward", "devices must be integers >= 0, .*; got none"),
        (([0, 1],), "forward", r"integers >= 0, .*; got \[0, 1\]. Write each as an argument"),
        (("0",), "forward", "integers >= 0, .*; got '0'"),
        ((0, -1), "forward", "integers >= 0, .*; got 0, -1"),
        ((True,), "forward", "integers >= 0, .*; got True"),
        ((1.0,), "forward", "integers >= 0, .*; got 1.0"),
    ]:
        with pytest.raises(ValueError, match=text), fs.testing.kill(*arguments, at=at):
            pass


def test_kill_that_no_device_reaches_raises_at_the_end():
    step, *arguments = new_step(fs.make_mesh({"data": 2}))
    with (
        pytest.raises(AssertionError, match=r'\("reduce", 3\) in the block.*"reduce" 1 times'),
        fs.testing.kill(0, at=("reduce", 3)),
    ):
        step(*arguments)


def test_kill_in_the_function_of_a_run_raises():
    def main():
        with fs.testing.kill(0, at="collective"):
            fs.psum(torch.ones(1), "data")

    with pytest.raises(ScopeError, match=r"must be around fs\.run"):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_moments_in_the_function_of_a_run_raise():
    def main():
        with fs.testing.moments():
            fs.psum(torch.ones(1), "data")

    with pytest.raises(ScopeError, match=r"moments: the block must be around fs\.run"):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_kill_is_entered_once():
    kill = fs.testing.kill(1, at="collective")
    mesh = fs.make_mesh({"data": 2})
    with kill, contextlib.suppress(LostProcessError):
        fs.run(total, mesh=mesh)
    with pytest.raises(RuntimeError, match="must be entered once"), kill:
        pass
    assert fs.run(total, mesh=mesh) == [2.0, 2.0]


def test_kill_as_a_decorator_is_of_each_call():
    @fs.testing.kill(1, at="collective")
    def run_total():
        with pytest.raises(LostProcessError):
            fs.run(total, mesh=fs.make_mesh({"data": 2}))

    run_total()
    run_total()


def total():
    return fs.psum(torch.ones(1), "data").item()


@pytest.mark.parametrize("is_outer", [True, False])
def test_nested_kill_before_whose_moment_another_died_hides_no_loss(is_outer):
    late = fs.testing.kill(2, at=("collective", 5))
    early = fs.testing.kill(1, at="collective")
    first, second = (late, early) if is_outer else (early, late)
    with pytest.raises(LostProcessError) as error, first, second:
        fs.run(total, mesh=fs.make_mesh({"data": 3}))
    assert error.value.lost == (1,)

    late = fs.testing.kill(2, at=("collective", 5))
    early = fs.testing.kill(1, at="collective")
    first, second = (late, early) if is_outer else (early, late)
    with (
        pytest.raises(AssertionError, match=r"Devices \[1\] died before"),
        first,
        second,
        contextlib.suppress(LostProcessError),
    ):
        fs.run(total, mesh=fs.make_mesh({"data": 3}))


def test_plan_on_shapes_reaches_no_moment():
    step, *arguments = new_step(fs.make_mesh({"data": 2}, runtime="abstract"))
    with fs.testing.moments() as reached:
        step(*arguments)
    assert reached == {}
