"""The virtual runtime: deterministic, never hanging, leaving nothing behind."""

import contextlib
import os
import signal
import threading
import time
from contextvars import ContextVar

import pytest
import torch

import fshard as fs
from fshard import P


def run(main, **axes):
    return fs.run(main, mesh=fs.make_mesh(axes))


def line_of(text):
    with open(__file__) as file:
        return next(
            number for number, line in enumerate(file, 1) if text in line and "line_of" not in line
        )


# -- a mismatch never hangs ------------------------------------------------------------------------


def test_missing_collective_of_one_in_64_raises_at_once():
    def main():
        if fs.axis_index("data") != 41:
            fs.psum(torch.ones(3), "data")  # the one that 41 leaves out

    began = time.monotonic()
    with pytest.raises(fs.errors.DeadlockError) as error:
        run(main, data=64)
    assert time.monotonic() - began < 10  # no timeout is waited for
    text = str(error.value)
    line = line_of("# the one that 41 leaves out")
    assert "63 of 64 wait, the others have finished" in text
    assert "device (data=41): has finished" in text
    waiting = (
        f'waits in psum over "data" of f32[3] at tests/mesh/runtimes/test_virtual.py:{line} in main'
    )
    assert f"device (data=0) to device (data=40): {waiting}" in text


def first_or_second(first, second):
    return lambda: first() if fs.axis_index("d") == 0 else second()


def wait_for_each_other():
    first, second = ("a", "d") if fs.axis_index("a") == fs.axis_index("d") else ("d", "a")
    fs.psum(torch.ones(2), first)
    fs.psum(torch.ones(2), second)


def differentiate_on_one():
    x = torch.ones(2, requires_grad=fs.axis_index("d") == 0)
    y = fs.all_gather(x, "d").sum()
    if y.requires_grad:
        torch.autograd.grad(y, x)


X = torch.ones(2)
SQUARE = torch.ones(2, 2)
WRONG = {  # the mesh, what each device does, the error and what it says
    "each waits for another": ({"a": 2, "d": 2}, wait_for_each_other, "DeadlockError", "4 of 4 wait", "waits in psum"),
    "a recv alone": (
        {"d": 2}, first_or_second(lambda: fs.recv(X, "d", source=1), lambda: None),
        "DeadlockError", "recv of f32[2] from device (d=1)",
    ),
    "a recv of one device": ({"d": 1}, lambda: fs.recv(X, "d", source=0), "DeadlockError", "recv of"),
    "a send alone": (
        {"d": 2}, first_or_second(lambda: fs.send(X, "d", to=1), lambda: None),
        "MismatchError", "never received:\n  f32[2] sent by device (d=0) at tests/mesh/runtimes/test_virtual.py",
    ),
    "another message": (
        {"d": 2}, first_or_second(lambda: fs.send(X, "d", to=1), lambda: fs.recv(torch.ones(3), "d", source=0)),
        "MismatchError", "expects recv of f32[3]", "but received f32[2] sent by device (d=0)",
    ),
    "a backward alone": ({"d": 2}, differentiate_on_one, "DeadlockError", "psum_scatter"),
    "a start alone": (
        {"d": 2}, first_or_second(lambda: fs.psum.start(X, "d"), lambda: None),
        "MismatchError", "started, but not by all devices of their group:\n  psum over", "test_virtual",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_program_that_cannot_go_on_raises(name):
    axes, main, error, *words = WRONG[name]
    with pytest.raises(getattr(fs.errors, error)) as raised:
        run(main, **axes)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    # two neighbours that wait in the same are one line
    assert name != "each waits for another" or str(raised.value).count("waits in psum over") == 3


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (lambda: fs.psum(X, "d"), lambda: fs.psum(torch.ones(3), "d"), ["f32[2]", "f32[3]"]),
        (lambda: fs.psum(X, "d"), lambda: fs.psum(X.double(), "d"), ["f32[2]", "f64[2]"]),
        (
            lambda: fs.psum(X, "d"),
            lambda: fs.all_gather(X, "d"),
            ["psum over", "all_gather(dim=0) over"],
        ),
        (
            lambda: fs.all_to_all(SQUARE, "d"),
            lambda: fs.all_to_all(SQUARE, "d", split_dim=1),
            ["split=0", "split=1"],
        ),
        (
            lambda: fs.broadcast(X, "d"),
            lambda: fs.broadcast(X, "d", source=1),
            ["source=0", "source=1"],
        ),
    ],
)
def test_different_collectives_in_one_group_raise(first, second, words):
    with pytest.raises(fs.errors.MismatchError, match="met in one collective") as error:
        run(first_or_second(first, second), d=2)
    assert all(
        word in str(error.value)
        for word in [*words, "device (d=0)", "device (d=1)", "test_virtual.py"]
    )


def test_collectives_on_different_lines_raise_under_check():
    def first():
        return fs.psum(torch.tensor(1.0), "d").item()

    def second():
        return fs.psum(torch.tensor(10.0), "d").item()

    main = first_or_second(lambda: (first(), second()), lambda: (second(), first()))
    with pytest.raises(fs.errors.MismatchError, match="Only the lines differ"):
        fs.run(main, mesh=fs.make_mesh({"d": 2}), check=True)
    assert run(main, d=2) == [(11, 11)] * 2


def test_gradient_outside_the_run_raises_scope_error():
    leaves = []

    def main():
        x = torch.ones(2, requires_grad=True)
        leaves.append((fs.all_gather(x, "d").sum(), x))

    run(main, d=2)
    with pytest.raises(
        fs.errors.ScopeError, match="differentiated outside the function that called it"
    ):
        torch.autograd.grad(*leaves[0])


# -- a device that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_device_error_has_device_note_and_traceback(n):
    def broken():
        raise KeyError("lost")

    def main():
        fs.psum(torch.ones(1), "a")
        if fs.axis_index(("a", "b")) == n * n - 1:
            broken()
        fs.psum(torch.ones(1), ("a", "b"))

    with pytest.raises(KeyError, match="lost") as error:
        run(main, a=n, b=n)
    assert error.value.__notes__ == [
        f"raised on device (a={n - 1}, b={n - 1}) of Mesh(a={n}, b={n}; virtual, cpu)"
    ]
    assert "broken" in [entry.name for entry in error.traceback]


def test_device_error_unwinds_the_other_devices():
    unwound = []

    def main():
        try:
            if fs.axis_index("d") == 2:
                raise KeyError("gone")
            fs.psum(torch.ones(1), "d")
        finally:
            unwound.append(fs.axis_index("d"))

    with pytest.raises(KeyError, match="gone"):
        run(main, d=4)
    assert sorted(unwound) in (
        [0, 1, 2],
        [0, 1, 2, 3],
    )  # a device that has not begun has nothing to unwind


@pytest.mark.parametrize("fail", [False, True])
def test_run_that_fails_or_returns_leaves_no_thread(fail):
    def main():
        fs.psum(torch.ones(1), "d")
        if fail and fs.axis_index("d") == 5:
            raise ValueError
        fs.psum(torch.ones(1), "d")

    before = threading.active_count()
    with contextlib.suppress(ValueError):
        run(main, d=16)
    assert threading.active_count() == before


def interrupt(main, mesh):
    """Run, and send Ctrl-C meanwhile."""
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt) as error:
        fs.run(main, mesh=mesh)
    timer.join()
    return getattr(error.value, "__notes__", [])


def test_interrupted_run_leaves_the_mesh_usable():
    mesh = fs.make_mesh({"d": 4})
    before = threading.active_count()

    def main():
        while True:
            fs.psum(torch.ones(1), "d")

    assert interrupt(main, mesh) == []
    assert threading.active_count() == before
    assert fs.run(lambda: fs.psum(torch.tensor(1), "d").item(), mesh=mesh) == [4] * 4


def test_interrupted_device_without_collective_ends_at_its_next_one():
    mesh = fs.make_mesh({"d": 4})
    before = threading.active_count()
    is_over = threading.Event()

    def main():
        is_over.wait()
        fs.psum(torch.ones(1), "d")

    assert interrupt(main, mesh) == ["A device still runs. It ends at its next collective."]
    assert threading.active_count() == before + 4
    is_over.set()
    while threading.active_count() > before:
        time.sleep(0.01)


# -- a thread behaves as its caller would ----------------------------------------------------------


def settings():
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )
    return *modes, torch.empty(1).device.type


def test_device_threads_have_the_callers_torch_settings():
    assert run(settings, d=2) == [(True, False, False, "cpu")] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert run(settings, d=2) == [(False, False, True, "cpu")] * 2
        assert run(lambda: (SQUARE @ SQUARE).dtype, d=2) == [torch.bfloat16] * 2
    with torch.inference_mode(), torch.device("meta"):
        assert run(settings, d=2) == [(False, True, False, "meta")] * 2

    def leave():
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)

    run(leave, d=2)
    assert run(settings, d=2) == [(True, False, False, "cpu")] * 2


def test_device_threads_have_the_callers_hooks_and_context():
    color = ContextVar("color", default="none")
    packed = []
    color.set("blue")

    def main():
        x = torch.ones(2, requires_grad=True)
        (x * x).sum().backward()
        return color.get()

    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(x.shape) or x, lambda x: x
    ):
        assert run(main, d=2) == ["blue"] * 2
    assert len(packed) >= 4


def test_intra_op_threads_are_one_inside_only():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert run(torch.get_num_threads, d=3) == [1] * 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_devices_draw_equal_numbers_until_seeded():
    def main():
        first = torch.randn(3)
        fs.psum(first, "d")
        second = torch.randn(3)
        torch.manual_seed(fs.axis_index("d"))
        fs.psum(first, "d")
        return torch.stack([first, second]), torch.randn(3)

    torch.manual_seed(7)
    expected = torch.stack([torch.randn(3), torch.randn(3)])
    torch.manual_seed(7)
    for index, (equal, drawn) in enumerate(run(main, d=3)):
        assert torch.equal(equal, expected)
        assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(index)))


def test_one_device_run_advances_the_callers_random_state():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    (inside,) = run(lambda: torch.rand(2), d=1)
    assert torch.equal(torch.cat([inside, torch.rand(1)]), expected)


def test_run_twice_has_equal_order_of_side_effects():
    def trace():
        order = []

        def main():
            for step in range(3):
                order.append((step, fs.axis_index("d")))
                fs.psum(torch.ones(1), "d")

        run(main, d=5)
        return order

    assert trace() == trace()


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_results_share_no_memory_with_arguments_or_each_other(n):
    def main():
        index = fs.axis_index("d")
        x = torch.arange(4.0) + fs.axis_index("d")
        ring = [(i, (i + 1) % n) for i in range(n)]
        results = [
            fs.psum(x, "d"),
            fs.pmax(x, "d"),
            fs.broadcast(x, "d"),
            fs.all_gather(x, "d"),
            fs.psum_scatter(x, "d"),
            fs.all_to_all(x, "d"),
            fs.ppermute(x, "d", ring),
        ]
        copies = [result.clone() for result in results]
        fs.psum(x, "d")
        for result in results:
            result += 100 * (1 + index)
        assert torch.equal(x, torch.arange(4.0) + index)
        x -= 5
        fs.psum(x, "d")
        return all(
            torch.equal(y, copy + 100 * (1 + index))
            for y, copy in zip(results, copies, strict=True)
        )

    assert run(main, d=n) == [True] * n


def test_psum_scatter_result_changed_in_place_has_gradient():
    def main():
        x = torch.ones(4, requires_grad=True)
        y = fs.psum_scatter(x, "d")
        y += 1
        return y.tolist(), torch.autograd.grad(y.sum(), x)[0].tolist()

    assert run(main, d=2) == [([3, 3], [1, 1, 1, 1])] * 2


def test_psum_of_narrow_dtypes_rounds_once():
    def main():
        small = torch.tensor([0.5, 1.5]).to(torch.float8_e4m3fn)
        unsigned = torch.tensor([40000], dtype=torch.int32).to(torch.uint16)
        results = fs.psum(small, "d"), fs.psum(unsigned, "d"), fs.pmax(small, "d")
        return [x.float().tolist() for x in results]

    assert run(main, d=2) == [[[1.0, 3.0], [80000 - 65536], [0.5, 1.5]]] * 2


# -- runs in runs ----------------------------------------------------------------------------------


def test_run_inside_a_device_of_another_mesh_works():
    def main():
        inner = fs.Mesh((("x", 3),), "virtual", "cpu")
        return sum(fs.run(lambda: fs.axis_index("x"), mesh=inner)) + fs.axis_index("d")

    assert run(main, d=2) == [3, 4]


def test_make_mesh_inside_run_is_the_runs_mesh():
    def main():
        mesh = fs.make_mesh({"rows": 2, "columns": 3})
        spec = P("rows", "columns")
        x = fs.device_put(torch.arange(6.0).reshape(2, 3), fs.Layout(mesh, spec))
        double = fs.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=spec, out_specs=spec)
        return x.local.item(), fs.unshard(double(x)).sum().item()

    assert run(main, d=6) == [(float(d), 30.0) for d in range(6)]
    with pytest.raises(fs.errors.MeshError, match="has 4 devices, but this code runs on one of 6"):
        run(lambda: fs.make_mesh({"d": 4}), d=6)
