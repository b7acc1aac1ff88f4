"""`fs.Checkpoints`: which checkpoints are kept, saves in the background, and the end of a process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.checkpoint import files
from fshard.checkpoint.folder import remove
from fshard.errors import CheckpointError
from fshard.mesh.runtimes import process
from tests.helpers.processes import run_processes


def tree(step):
    return {"w": torch.full((5,), float(step)), "steps": step}


# -- retention -------------------------------------------------------------------------------------


def kept(steps, losses, keep, keep_every, best):
    """Return the steps that are there after each is saved in turn, by the rules as they are
    written.
    """
    steps_on_disk = []
    for index, step in enumerate(steps):
        steps_on_disk.append(step)
        loss_of = dict(zip(steps[: index + 1], losses, strict=False))
        stay = {*steps_on_disk[-keep:]}
        stay |= {step for step in steps_on_disk if keep_every and step % keep_every == 0}
        if best:
            sign = -1 if best.startswith("-") else 1
            stay.add(min(steps_on_disk, key=lambda step: (sign * loss_of[step], step)))
        steps_on_disk = [step for step in steps_on_disk if step in stay]
    return steps_on_disk


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
    st.integers(1, 3),
    st.sampled_from([None, 2, 3]),
    st.sampled_from([None, "loss", "-loss"]),
)
def test_the_last_every_kth_and_the_best_are_kept(tmp_path_factory, losses, keep, keep_every, best):
    path = tmp_path_factory.mktemp("folder")
    folder = fs.Checkpoints(path, keep=keep, keep_every=keep_every, best=best)
    steps = [*range(1, len(losses) + 1)]
    for step, loss in zip(steps, losses, strict=True):
        folder.save(step, tree(step), metrics={"loss": torch.tensor(float(loss)), "other": 1})
    assert (
        folder.steps == kept(steps, losses, keep, keep_every, best) and folder.latest == steps[-1]
    )
    again = fs.Checkpoints(path)
    assert again.steps == folder.steps
    assert all(again.restore(step=step)["steps"] == step for step in again.steps)
    assert sorted(os.listdir(path)) == sorted(map(str, folder.steps))


def test_a_deleted_checkpoint_loses_its_index_first(tmp_path, monkeypatch):
    fs.save(tmp_path / "1", tree(1))
    order = []
    for name in ("unlink", "remove_folder", "fsync_folder"):
        act = getattr(files.Disk, name)
        monkeypatch.setattr(
            files.Disk,
            name,
            lambda self, path, act=act, name=name: (
                order.append((name, path.name)),
                act(self, path),
            ),
        )
    remove(tmp_path / "1")
    assert (
        order[:2] == [("unlink", "index.json"), ("fsync_folder", "1")]
        and not (tmp_path / "1").exists()
    )


def test_saves_that_did_not_end_are_removed_by_a_later_one(tmp_path):
    folder = fs.Checkpoints(tmp_path, keep=1)
    folder.save(1, tree(1))
    (tmp_path / "1" / "index.json").unlink()
    assert folder.latest is None
    folder.save(2, tree(2))
    assert os.listdir(tmp_path) == ["2"]


def test_a_run_from_an_earlier_step_keeps_its_own_checkpoints_and_the_later_ones(tmp_path):
    for step in (1, 2, 8, 9):
        fs.Checkpoints(tmp_path, keep=2).save(step, tree(step))
    folder = fs.Checkpoints(tmp_path, keep=2)
    for step in (2, 3, 4, 5):
        folder.save(step, tree(-step))
    assert folder.steps == [4, 5, 8, 9]
    assert folder.restore(tree(0), step=5)["steps"] == -5


def test_other_files_and_folders_stay(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "rank0.log").write_text("mine")
    (tmp_path / "2").write_text("mine")
    folder = fs.Checkpoints(tmp_path, keep=1)
    folder.save(1, tree(1))
    fs.export(tmp_path / "1" / "hf", tree(1)["w"], to="torch")
    for step in (5, 6):
        folder.save(step, tree(step))
        (tmp_path / str(step) / "20240101-results.json").write_text("mine")
        fs.save(tmp_path / str(step), tree(step))
    assert folder.steps == [6] and (tmp_path / "6" / "20240101-results.json").exists()
    assert {*map(str, (tmp_path / "1").iterdir())} == {str(tmp_path / "1" / "hf")}
    assert (tmp_path / "0" / "rank0.log").exists() and (tmp_path / "2").exists()


def test_a_moved_and_linked_step_restores_and_outlives_its_link(tmp_path):
    folder = fs.Checkpoints(tmp_path, keep=1)
    folder.save(3, tree(3))
    (tmp_path / "3").rename(tmp_path / "best")
    (tmp_path / "3").symlink_to("best")
    assert folder.restore()["steps"] == 3
    folder.save(5, tree(5))
    assert (
        sorted(os.listdir(tmp_path)) == ["5", "best"]
        and fs.restore(tmp_path / "best")["steps"] == 3
    )


def test_an_index_of_another_program_stays(tmp_path):
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must be that of a checkpoint, or absent"):
        fs.save(tmp_path, tree(1))
    assert (tmp_path / "index.json").read_text() == "{}"


def test_the_best_of_metrics_in_a_tree_and_not_nan(tmp_path):
    folder = fs.Checkpoints(tmp_path, keep=1, best="aux.loss")
    for step, loss in enumerate([float("nan"), 0.5, 0.2, 0.9]):
        folder.save(
            step,
            tree(step),
            metrics={"aux": {"loss": torch.tensor(loss), "logits": torch.ones(2), "text": "x"}},
        )
    assert folder.steps == [2, 3]
    with pytest.raises(ValueError, match="metrics must have 'aux.loss', which is `best`; got los"):
        folder.save(4, tree(4), metrics={"los": 1.0})


def test_every(tmp_path):
    folder = fs.Checkpoints(tmp_path, keep=9, every=3)
    for step in range(8):
        folder.save(step, tree(step), wait=False)
    folder.wait()
    assert folder.steps == [0, 3, 6]


def test_errors_of_arguments_and_of_an_empty_folder(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"keep must be an integer >= 1, got 0; every must .*got 'x'; keep_every .*-1",
    ):
        fs.Checkpoints(tmp_path, keep=0, every="x", keep_every=-1)
    folder = fs.Checkpoints(tmp_path / "none")
    with pytest.raises(
        CheckpointError, match=r"none has no checkpoint: it does not exist; .* has nothing"
    ):
        folder.restore()
    with pytest.raises(ValueError, match=r"step must be an integer >= 0, got -1"):
        folder.save(-1, {})


# -- in the background -----------------------------------------------------------------------------


@pytest.fixture
def go(monkeypatch):
    """Let all writes wait for this event."""
    event = threading.Event()
    write = files.Disk.write
    monkeypatch.setattr(
        files.Disk, "write", lambda *arguments: (event.wait(20), write(*arguments))[1]
    )
    return event


def trained(mesh):
    params = fs.shard_params(
        {"w": torch.randn(7, 6), "b": torch.randn(6)}, fs.fsdp("data"), mesh=mesh
    )
    opt = fs.optim.adamw(0.1)
    step = fs.train_step(
        lambda p, x: ((x @ p["w"] + p["b"]) ** 2).mean(),
        opt,
        mesh=mesh,
        batch=P("data"),
        donate=True,
    )
    return step, params, opt.init(params)


def test_ten_donated_steps_during_a_slow_write_do_not_change_what_is_saved(tmp_path, go):
    step, params, state = trained(fs.make_mesh({"data": 2}))
    x = torch.randn(8, 7)
    params, state, _ = step(params, state, x)
    saved = fs.unshard({"params": params, "state": state})
    saved = optree.tree_map(torch.clone, saved)
    folder = fs.Checkpoints(tmp_path)
    folder.save(1, {"params": params, "state": state}, wait=False)
    for _ in range(10):
        params, state, _ = step(params, state, x)
    assert folder.latest is None
    go.set()
    folder.wait()
    restored = folder.restore()
    flat, structure = optree.tree_flatten(restored)
    expected, saved_structure = optree.tree_flatten(saved)
    assert structure == saved_structure and all(map(torch.equal, flat, expected))
    assert not torch.equal(restored["params"]["w"], fs.unshard(params)["w"])


def test_save_beside_training_waits_for_a_gpu_once_in_the_writer(tmp_path, gpu):
    """The call starts the copies alone; the parameters may be written to behind them on the stream."""
    folder = fs.Checkpoints(tmp_path)
    params = {name: torch.full((5,), value) for name, value in (("w", 1.0), ("v", 2.0))}
    folder.save(1, params, wait=False)
    for x in params.values():
        x.zero_()
    folder.wait()
    folder.save(2, params, wait=False)
    folder.wait()
    assert gpu.log.count("host waits") == 2
    assert threading.current_thread() not in gpu.waiting_threads
    assert {name: x.tolist() for name, x in folder.restore(step=1).items()} == {
        "w": [1.0] * 5,
        "v": [2.0] * 5,
    }


def test_a_second_save_waits_for_the_first_and_errors_surface_at_the_next_call(
    tmp_path, monkeypatch, go
):
    folder = fs.Checkpoints(tmp_path, keep=5)
    folder.save(1, tree(1), wait=False)
    threading.Timer(0.2, go.set).start()
    folder.save(2, tree(2), wait=False)
    assert 1 in folder.steps
    folder.wait()
    monkeypatch.setattr(
        files.Disk,
        "fsync",
        lambda self, file: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    folder.save(3, tree(3), wait=False)
    with pytest.raises(CheckpointError, match=r"3: device 0 cannot write: No space left on device"):
        folder.save(4, tree(4))
    monkeypatch.undo()
    folder.save(5, tree(5))
    assert folder.steps == [1, 2, 5]


PROGRAM = """
import os, sys, time, torch
import fshard as fs

folder = fs.Checkpoints(sys.argv[1], every=int(sys.argv[2]), keep=100)
for step in range(1, int(sys.argv[3]) + 1):
    time.sleep(0.01)
    folder.save(step, {"w": torch.full((100_000,), float(step)), "steps": step}, wait=False)
    if step == 2:
        print("ready", flush=True)
"""


def started(tmp_path, every, steps):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path, str(every), str(steps)], stdout=subprocess.PIPE
    )


def test_a_process_that_exits_writes_what_was_saved_last(tmp_path):
    with started(tmp_path, 3, 3) as process:
        assert process.wait(60) == 0
    assert fs.Checkpoints(tmp_path).steps == [3]


def test_sigterm_saves_at_the_end_of_the_next_step(tmp_path):
    with started(tmp_path, 1_000_000, 100_000) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    folder = fs.Checkpoints(tmp_path)
    (step,) = folder.steps
    assert step >= 3 and folder.restore()["steps"] == step


def test_sigterm_ends_a_process_of_two_folders_and_acts_as_before_after_wait(tmp_path):
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    try:
        a, b = (fs.Checkpoints(tmp_path / name, every=1_000_000) for name in "ab")
        for step in range(1, 9):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            for folder in (a, b):
                if not ended:
                    folder.save(step, tree(step))
        assert ended and (a.steps, b.steps) == ([3], [])
        last = fs.Checkpoints(tmp_path / "c", every=1_000_000)
        last.save(1, tree(1))
        last.wait()
        ended.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended
    finally:
        signal.signal(signal.SIGTERM, before)


def stopped(path):
    """Train until this process is stopped by a signal that only the first one gets; the steps must
    be equal.
    """
    mesh = fs.make_mesh({"data": 2})
    rank = torch.distributed.get_rank()
    folder = fs.Checkpoints(path, every=1_000_000)
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(step))
    try:
        x = fs.device_put(torch.zeros(4), fs.Layout(mesh, P("data")))
        for step in range(1, 1000):
            if step == 5 and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            fs.run(lambda: fs.psum(torch.ones(1), "data"), mesh=mesh)
            folder.save(step, {"x": x, "steps": step}, wait=False)
            if ended:
                return ended[0]
    finally:
        signal.signal(signal.SIGTERM, before)
    return None


def test_all_processes_save_the_same_step_if_one_is_stopped(tmp_path):
    assert run_processes(stopped, 2, tmp_path) == [6, 6]
    assert fs.Checkpoints(tmp_path).steps == [6]
    assert os.listdir(tmp_path) == ["6"]


def saved_in_background(path):
    mesh = fs.make_mesh({"data": 2})
    folder = fs.Checkpoints(path, keep=2)
    for step in range(1, 6):
        x = fs.device_put(torch.arange(11.0) * step, fs.Layout(mesh, P.flat("data")))
        folder.save(step, {"x": x}, wait=False, metrics={"loss": step})
    folder.wait()
    back = folder.restore({"x": fs.device_put(torch.zeros(11), fs.Layout(mesh, P()))})
    return folder.steps, back["x"].local.tolist()


def test_processes_save_in_the_background(tmp_path):
    for steps, x in run_processes(saved_in_background, 2, tmp_path):
        assert 5 in steps and x == [5.0 * i for i in range(11)]
    assert fs.Checkpoints(tmp_path).steps == [4, 5]
    assert json.loads((tmp_path / "5" / "index.json").read_text())["checkpoint"]["metrics"] == {
        "loss": 5.0
    }


def test_virtual_devices_save_in_the_background(tmp_path):
    mesh = fs.make_mesh({"data": 4})

    def loop():
        x = fs.device_put(torch.arange(8.0), fs.Layout(mesh, P("data")))
        folder = fs.Checkpoints(tmp_path, timeout=20)
        for step in range(3):
            folder.save(step, {"x": x * step}, wait=False)
        folder.wait()
        return folder.steps

    assert fs.run(loop, mesh=mesh) == [[0, 1, 2]] * 4
    assert torch.equal(fs.restore(tmp_path / "2")["x"], 2 * torch.arange(8.0))


def left_while_saved(path):
    """Save on a mesh of some processes, leave their world, and do what happens at the exit."""
    mesh = fs.make_mesh({"data": 1}, devices=[0])
    if not mesh.is_member:
        return None
    x = fs.device_put(torch.arange(4.0), fs.Layout(mesh, P("data")))
    at_exit = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atexit.register", at_exit.append)
        fs.Checkpoints(path).save(1, {"x": x}, wait=False)
    process.leave(waiting=False)
    (join,) = at_exit
    join()
    return fs.Checkpoints(path).steps


def test_a_process_that_has_left_the_world_of_its_save_waits_for_it_at_the_exit(tmp_path):
    assert run_processes(left_while_saved, 2, tmp_path) == [[1], None]


def bad(path):
    """Save a leaf that the second process cannot save."""
    fs.make_mesh({"data": 2})
    began = time.monotonic()
    leaf = object() if torch.distributed.get_rank() else 1.0
    with pytest.raises(CheckpointError) as error:
        fs.save(path, {"x": leaf}, timeout=60)
    return str(error.value), time.monotonic() - began


def test_a_leaf_that_one_process_cannot_save_fails_the_others_at_once(tmp_path):
    (first, seconds), (second, _) = run_processes(bad, 2, tmp_path / "x")
    assert (
        "another device failed: These leaves cannot be saved: x must be" in first
        and second in first
    )
    assert seconds < 30


def test_folder_is_printed_as_its_steps_with_bytes_and_metrics(tmp_path):
    folder = fs.Checkpoints(tmp_path, keep=2)
    for step, loss in enumerate([0.5, 0.25, 0.125]):
        folder.save(step, {"w": torch.ones(3)}, metrics={"loss": loss})
    size = sum(file.stat().st_size for file in (tmp_path / "2").glob("*.safetensors"))
    assert folder.table().texts() == [("1", f"{size}", "0.25"), ("2", f"{size}", "0.125")]
    assert "<td" in folder._repr_html_() and str(tmp_path) in repr(folder)
