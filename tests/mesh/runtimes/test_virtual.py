"""The virtual runtime: deterministic, never hanging, leaving nothing behind."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.mesh.layout.arithmetic import tree_sum


def run(main, **axes):
    return fs.run(main, mesh=fs.make_mesh(axes))


def line_of(text):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line and "line_of" not in line)


# -- a mismatch never hangs -----------------------------------------------------------------------------------------


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
    waiting = f'waits in psum over "data" of f32[3] at tests/mesh/runtimes/test_virtual.py:{line} in main'
    assert f"device (data=0) to device (data=40): {waiting}" in text


def test_devices_waiting_for_each_other_raise_deadlock():
    def main():
        first, second = ("a", "b") if fs.axis_index("a") == fs.axis_index("b") else ("b", "a")
        fs.psum(torch.ones(2), first)
        fs.psum(torch.ones(2), second)

    with pytest.raises(fs.errors.DeadlockError, match="4 of 4 wait") as error:
        run(main, a=2, b=2)
    assert str(error.value).count("waits in psum over") == 3  # two neighbours that wait in the same are one line


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (lambda: fs.psum(torch.ones(2), "d"), lambda: fs.psum(torch.ones(3), "d"), ["f32[2]", "f32[3]"]),
        (lambda: fs.psum(torch.ones(2), "d"), lambda: fs.psum(torch.ones(2).double(), "d"), ["f32[2]", "f64[2]"]),
        (
            lambda: fs.psum(torch.ones(2), "d"),
            lambda: fs.all_gather(torch.ones(2), "d"),
            ["psum over", "all_gather(dim=0) over"],
        ),
        (
            lambda: fs.all_gather(torch.ones(2, 2), "d"),
            lambda: fs.all_gather(torch.ones(2, 2), "d", dim=1),
            ["dim=0", "dim=1"],
        ),
        (
            lambda: fs.broadcast(torch.ones(2), "d"),
            lambda: fs.broadcast(torch.ones(2), "d", source=1),
            ["source=0", "source=1"],
        ),
    ],
)
def test_different_collectives_in_one_group_raise_mismatch(mine, theirs, words):
    with pytest.raises(fs.errors.MismatchError, match="met in one collective") as error:
        run(lambda: mine() if fs.axis_index("d") == 0 else theirs(), d=2)
    assert all(word in str(error.value) for word in [*words, "device (d=0)", "device (d=1)", "test_virtual.py"])


def test_recv_without_send_raises_deadlock():
    with pytest.raises(fs.errors.DeadlockError, match=r"recv of f32\[2\] from device \(d=1\)"):
        run(lambda: fs.recv(torch.ones(2), "d", source=1) if fs.axis_index("d") == 0 else None, d=2)


def test_send_without_recv_raises_mismatch():
    with pytest.raises(
        fs.errors.MismatchError, match=r"never received:\n  f32\[2\] sent by device \(d=0\) at .*test_virtual.py"
    ):
        run(lambda: fs.send(torch.ones(2), "d", to=1) if fs.axis_index("d") == 0 else None, d=2)


def test_recv_of_unexpected_message_raises_mismatch():
    def main():
        if fs.axis_index("d") == 0:
            fs.send(torch.ones(2), "d", to=1)
        else:
            fs.recv(torch.ones(3), "d", source=0)

    with pytest.raises(
        fs.errors.MismatchError, match=r"expects recv of f32\[3\].*but received f32\[2\] sent by device \(d=0\)"
    ):
        run(main, d=2)


def test_backward_of_some_devices_only_raises():
    def main():
        x = torch.ones(2, requires_grad=fs.axis_index("d") == 0)
        y = fs.all_gather(x, "d").sum()
        if y.requires_grad:
            torch.autograd.grad(y, x)

    with pytest.raises(fs.errors.DeadlockError, match="psum_scatter"):
        run(main, d=2)


def test_collective_outside_shard_map_raises_scope_error():
    with pytest.raises(fs.errors.ScopeError, match=r"fs\.psum was called outside shard_map and run"):
        fs.psum(torch.ones(1), "data")
    with pytest.raises(fs.errors.ScopeError, match='the axes bound here are "data"'):
        run(lambda: fs.psum(torch.ones(1), "model"), data=2)
    with pytest.raises(fs.errors.ScopeError, match="an axis is named twice"):
        run(lambda: fs.psum(torch.ones(1), ("data", "data")), data=2)


# -- a device that fails ------------------------------------------------------------------------------------------


def test_device_error_has_device_note_and_traceback():
    def broken():
        raise KeyError("lost")  # here

    def main():
        fs.psum(torch.ones(1), "a")
        if fs.axis_index(("a", "b")) == 3:
            broken()
        fs.psum(torch.ones(1), ("a", "b"))

    with pytest.raises(KeyError, match="lost") as error:
        run(main, a=2, b=2)
    assert error.value.__notes__ == ["raised on device (a=1, b=1) of Mesh(a=2, b=2; virtual, cpu)"]
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
    assert sorted(unwound) in ([0, 1, 2], [0, 1, 2, 3])  # a device that has not begun has nothing to unwind


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
    mesh, before = fs.make_mesh({"d": 4}), threading.active_count()

    def main():
        while True:
            fs.psum(torch.ones(1), "d")

    assert interrupt(main, mesh) == []
    assert threading.active_count() == before
    assert fs.run(lambda: fs.psum(torch.tensor(1), "d").item(), mesh=mesh) == [4] * 4


def test_interrupted_device_without_collective_ends_at_its_next_one():
    mesh, before, is_over = fs.make_mesh({"d": 4}), threading.active_count(), threading.Event()

    def main():
        is_over.wait()
        fs.psum(torch.ones(1), "d")

    assert interrupt(main, mesh) == ["A device still runs. It ends at its next collective."]
    assert threading.active_count() == before + 4
    is_over.set()
    while threading.active_count() > before:
        time.sleep(0.01)


# -- a thread behaves as its caller would -------------------------------------------------------------------------


def test_device_threads_have_the_callers_torch_settings():
    def main():
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.empty(1).device.type,
        )

    assert run(main, d=2) == [(True, False, False, "cpu")] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert run(main, d=2) == [(False, False, True, "cpu")] * 2
        assert run(lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, d=2) == [torch.bfloat16] * 2
    with torch.inference_mode(), torch.device("meta"):
        assert run(main, d=2) == [(False, True, False, "meta")] * 2
    assert run(main, d=2) == [(True, False, False, "cpu")] * 2


def test_device_threads_have_the_callers_hooks_and_context():
    from contextvars import ContextVar

    color, seen = ContextVar("color", default="none"), []
    color.set("blue")

    def main():
        x = torch.ones(2, requires_grad=True)
        (x * x).sum().backward()
        return color.get()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x, lambda x: x):
        assert run(main, d=2) == ["blue"] * 2
    assert len(seen) >= 4


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
        return first, second, torch.randn(3)

    torch.manual_seed(7)
    expected = torch.randn(3), torch.randn(3)
    torch.manual_seed(7)
    results = run(main, d=3)
    for first, second, _ in results:
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])
    assert not torch.equal(results[0][2], results[1][2])
    torch.manual_seed(0)
    torch.randn(3)
    assert torch.equal(results[0][2], (torch.manual_seed(0), torch.randn(3))[1])


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


def test_run_of_256_devices_sums_indices():
    def main():
        x = torch.tensor(float(fs.axis_index(("a", "b"))))
        return fs.psum(x, "a").item(), fs.psum(x, ("a", "b")).item()

    results = run(main, a=16, b=16)
    assert all(total == 255 * 128 for _, total in results)
    assert results[17][0] == sum(16 * row + 1 for row in range(16))


def test_collective_results_share_no_memory():
    def main():
        mine = torch.full((3,), float(fs.axis_index("d")))
        results = [
            fs.psum(mine, "d"),
            fs.broadcast(mine, "d"),
            fs.all_gather(mine, "d"),
            fs.ppermute(mine, "d", [(0, 1), (1, 0)]),
            fs.pmax(mine, "d"),
        ]
        kept = [result.clone() for result in results]
        fs.psum(mine, "d")
        for result in results:
            result += 100 * (1 + fs.axis_index("d"))
        mine -= 5
        fs.psum(mine, "d")
        return all(
            torch.equal(result, copy + 100 * (1 + fs.axis_index("d")))
            for result, copy in zip(results, kept, strict=True)
        )

    assert run(main, d=2) == [True, True]


def test_psum_adds_in_the_fixed_tree():
    xs = [torch.randn(50) for _ in range(5)]
    assert torch.equal(tree_sum(xs), ((xs[0] + xs[1]) + (xs[2] + xs[3])) + xs[4])
    halves = [x.bfloat16() for x in xs]
    assert torch.equal(tree_sum(halves), tree_sum([x.float() for x in halves]).bfloat16())


def test_run_inside_a_device_of_another_mesh_works():
    def main():
        inner = fs.Mesh((("x", 3),), "virtual", "cpu")
        return sum(fs.run(lambda: fs.axis_index("x"), mesh=inner)) + fs.axis_index("d")

    assert run(main, d=2) == [3, 4]


def test_make_mesh_inside_run_is_the_runs_mesh():
    def main():
        mesh = fs.make_mesh({"rows": 2, "columns": 3})
        x = fs.device_put(torch.arange(6.0).reshape(2, 3), fs.Layout(mesh, P("rows", "columns")))
        double = fs.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("rows", "columns"), out_specs=P("rows", "columns"))
        return x.local.item(), fs.unshard(double(x)).sum().item()

    assert run(main, d=6) == [(float(d), 30.0) for d in range(6)]
    with pytest.raises(fs.errors.MeshError, match="has 4 devices, but this code runs on one of 6"):
        run(lambda: fs.make_mesh({"d": 4}), d=6)


def test_gradient_outside_the_run_raises_scope_error():
    kept = []

    def main():
        x = torch.ones(2, requires_grad=True)
        kept.append((fs.all_gather(x, "d").sum(), x))

    run(main, d=2)
    with pytest.raises(fs.errors.ScopeError, match="differentiated outside the function that called it"):
        torch.autograd.grad(*kept[0])


# -- what a review found ------------------------------------------------------------------------------------------


def test_started_collective_of_one_device_raises_mismatch():
    with pytest.raises(
        fs.errors.MismatchError,
        match=r"started, but not by all devices of their group:\n  psum over .* at .*test_virtual",
    ):
        run(lambda: fs.psum.start(torch.ones(1), "d") if fs.axis_index("d") == 0 else None, d=2)


def test_check_collectives_from_different_lines_raise():
    def main():
        if fs.axis_index("d") == 0:
            first = fs.psum(torch.tensor(1.0), "d")
            second = fs.psum(torch.tensor(10.0), "d")
        else:
            second = fs.psum(torch.tensor(10.0), "d")
            first = fs.psum(torch.tensor(1.0), "d")
        return first.item(), second.item()

    with pytest.raises(fs.errors.MismatchError, match="Only the lines differ"):
        fs.run(main, mesh=fs.make_mesh({"d": 2}), check=True)
    assert run(main, d=2) == [(11, 11)] * 2


def test_psum_scatter_results_share_no_memory():
    def main():
        x = torch.ones(4, requires_grad=True)
        y = fs.psum_scatter(x, "d")
        y += 1
        return y.tolist(), torch.autograd.grad(y.sum(), x)[0].tolist()

    assert run(main, d=2) == [([3, 3], [1, 1, 1, 1])] * 2
    x = torch.ones(2)
    run(lambda: fs.psum_scatter(x, "d").add_(1), d=1)
    assert x.tolist() == [1, 1]


def test_psum_of_narrow_dtypes_rounds_once():
    def main():
        small = torch.tensor([0.5, 1.5]).to(torch.float8_e4m3fn)
        unsigned = torch.tensor([40000], dtype=torch.int32).to(torch.uint16)
        return (
            fs.psum(small, "d").float().tolist(),
            fs.psum(unsigned, "d").int().tolist(),
            fs.pmax(small, "d").float().tolist(),
        )

    assert run(main, d=2) == [([1.0, 3.0], [80000 - 65536], [0.5, 1.5])] * 2


def test_one_device_run_advances_the_callers_random_state():
    mesh = fs.make_mesh({"d": 1})
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    (inside,) = fs.run(lambda: torch.rand(2), mesh=mesh)
    assert torch.equal(torch.cat([inside, torch.rand(1)]), expected)


def test_one_device_run_deadlock_and_error_name_the_device():
    mesh = fs.make_mesh({"d": 1})
    with pytest.raises(fs.errors.DeadlockError, match="recv of"):
        fs.run(lambda: fs.recv(torch.ones(1), "d", source=0), mesh=mesh)
    with pytest.raises(ZeroDivisionError) as error:
        fs.run(lambda: 1 / 0, mesh=mesh)
    assert "raised on" in error.value.__notes__[0]


def test_run_after_changed_settings_has_the_callers_settings():
    mesh = fs.make_mesh({"d": 4})
    x = torch.arange(4.0)

    def leave(x):
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        return x + 0

    def look(x):
        found = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), str(torch.ones(1).device)]
        assert found == [True, False, "cpu"], found
        return x + 0

    fs.shard_map(leave, mesh=mesh, in_specs=fs.P("d"), out_specs=fs.P("d"))(x)
    seen = fs.shard_map(look, mesh=mesh, in_specs=fs.P("d"), out_specs=fs.P("d"))(x)
    assert torch.equal(fs.unshard(seen), x)


def test_run_leaves_no_thread():
    before = threading.active_count()
    run(lambda: fs.axis_index("d"), d=5)
    assert threading.active_count() == before
