"""Locks of a folder and of saves: who can hold them, for how long, and what handlers of signals and children do."""

import fcntl
import os
import signal
import threading
import time

import pytest
import torch

import fshard as fs
from fshard.checkpoint import files
from fshard.checkpoint.files import LOCK, Lock, is_locked, locked_folder
from fshard.errors import CheckpointError


@pytest.fixture
def during_commit(monkeypatch):
    """Call a function once, when a commit has its lock and writes."""
    fsync_folder = files.Disk.fsync_folder

    def call_once(action):
        def fsync_and_call(disk, path):
            fsync_folder(disk, path)
            if (path / LOCK).exists():
                monkeypatch.setattr(files.Disk, "fsync_folder", fsync_folder)
                action(path)

        monkeypatch.setattr(files.Disk, "fsync_folder", fsync_and_call)

    return call_once


@pytest.fixture
def handler():
    """Handle SIGUSR1 by a function."""
    previous = signal.getsignal(signal.SIGUSR1)
    yield lambda action: signal.signal(signal.SIGUSR1, lambda *_: action())
    signal.signal(signal.SIGUSR1, previous)


def interrupt(_):
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.01)  # the handler runs here


@pytest.mark.parametrize("is_caught", [True, False])
def test_save_in_a_handler_during_a_commit_raises_at_once(
    is_caught, tmp_path, during_commit, handler
):
    """What it interrupts goes on if the handler catches the error; else that raises it too, and has no lock."""
    texts = list[str]()

    def save_again():
        try:
            fs.save(tmp_path, {"x": 2})
        except CheckpointError as error:
            texts.append(str(error))
            if not is_caught:
                raise

    handler(save_again)
    during_commit(interrupt)
    if is_caught:
        fs.save(tmp_path, {"x": 1})
        assert fs.restore(tmp_path) == {"x": 1}
    else:
        with pytest.raises(CheckpointError, match="handler of a signal"):
            fs.save(tmp_path, {"x": 1})
    assert "handler of a signal" in texts[0] and "Set a flag" in texts[0]
    fs.save(tmp_path, {"x": 3}, timeout=5)
    assert fs.restore(tmp_path) == {"x": 3} and len(os.listdir(tmp_path)) == 3


def test_save_in_a_handler_during_a_commit_of_another_folder_works(
    tmp_path, during_commit, handler
):
    handler(lambda: fs.save(tmp_path / "second", {"x": 2}))
    during_commit(interrupt)
    fs.save(tmp_path / "first", {"x": 1})
    assert [fs.restore(tmp_path / name)["x"] for name in ("first", "second")] == [1, 2]


def test_save_in_a_handler_waits_for_a_commit_of_another_thread(tmp_path, during_commit):
    """The thread of an asynchronous save goes on while the handler waits."""
    begun = threading.Event()

    def pause(_):
        begun.set()
        time.sleep(0.2)

    during_commit(pause)
    writer = threading.Thread(target=fs.save, args=(tmp_path, {"x": 1}))
    writer.start()
    begun.wait()
    fs.save(tmp_path, {"x": 2}, timeout=60)
    writer.join()
    assert fs.restore(tmp_path) == {"x": 2}


def test_checkpoints_save_in_a_handler_of_the_same_call_raises(tmp_path, during_commit, handler):
    folder, errors = fs.Checkpoints(tmp_path), list[CheckpointError]()

    def save_again():
        try:
            folder.save(2, {"x": 2})
        except CheckpointError as error:
            errors.append(error)

    folder.save(0, {"x": 0})
    handler(save_again)
    during_commit(interrupt)
    folder.save(1, {"x": 1})
    assert folder.steps == [0, 1] and "Set a flag" in str(errors[0])
    folder.wait()


def test_limit_counts_for_the_lock_and_its_owner_is_named(tmp_path):
    fs.save(tmp_path, {"x": 1})
    lock = Lock.take(tmp_path / LOCK)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=f"after 0.3 s.*process {os.getpid()} of "):
        fs.save(tmp_path, {"x": 2}, timeout=0.3)
    assert time.monotonic() - begin < 30
    assert fs.restore(tmp_path) == {"x": 1}
    lock.release()
    fs.save(tmp_path, {"x": 3})
    assert fs.restore(tmp_path) == {"x": 3} and len(os.listdir(tmp_path)) == 3


def test_locks_that_readers_can_take_stop_no_save(tmp_path):
    """The folder and the files of data can be locked by all who may read them."""
    folder = fs.Checkpoints(tmp_path, keep=1, timeout=10)
    folder.save(1, {"x": torch.ones(3)})
    paths = [tmp_path, tmp_path / "1", *(tmp_path / "1").iterdir()]
    readers = [os.open(path, os.O_RDONLY) for path in paths]
    for reader in readers:
        fcntl.flock(reader, fcntl.LOCK_EX)
    fs.save(tmp_path / "1", {"x": torch.ones(3) * 2}, timeout=10)
    assert len(os.listdir(tmp_path / "1")) == 3
    folder.save(2, {"x": torch.ones(3)})
    for reader in readers:
        os.close(reader)
    assert folder.steps == [2] and not (tmp_path / "1").exists()
    folder.wait()


def test_locks_are_files_that_others_cannot_open(tmp_path, during_commit):
    modes = dict[str, int]()

    def note_modes(path):
        for file in path.iterdir():
            modes[file.name.rpartition(".")[2]] = file.stat().st_mode & 0o777
            if file.suffix == ".lock":
                assert is_locked(file)

    during_commit(note_modes)
    previous = os.umask(0)
    try:
        fs.save(tmp_path, {"x": torch.ones(3)})
    finally:
        os.umask(previous)
    assert modes["lock"] == 0o600 and modes["safetensors"] == 0o644
    assert not [*tmp_path.glob("*.lock")]


def test_lock_of_another_user_is_taken_for_held(tmp_path, monkeypatch):
    def forbid(*_, **__):
        raise PermissionError(13, "Permission denied")

    fs.save(tmp_path, {"x": 1})
    (tmp_path / LOCK).touch()
    monkeypatch.setattr("pathlib.Path.open", forbid)
    assert is_locked(tmp_path / LOCK)


def test_child_of_a_commit_has_no_lock(tmp_path, during_commit):
    """The child lives on, as a worker of a DataLoader does; later saves commit, and remove what it has seen."""
    folder, children = fs.Checkpoints(tmp_path, keep=1, timeout=20), list[int]()

    def fork(_):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)

    during_commit(fork)
    folder.save(1, {"x": torch.ones(3)})
    child = children[0]
    try:
        opened = {os.readlink(f"/proc/{child}/fd/{n}") for n in os.listdir(f"/proc/{child}/fd")}
        fs.save(tmp_path / "1", {"x": 2}, timeout=20)
        assert len(os.listdir(tmp_path / "1")) == 3
        folder.save(2, {"x": torch.ones(3)})
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    assert folder.steps == [2] and os.listdir(tmp_path) == ["2"]
    folder.wait()


def test_threads_have_a_folder_one_at_a_time(tmp_path):
    """Each removes its lock, for which others wait with the file open."""
    inside, errors = list[int](), list[str]()

    def count():
        for _ in range(20):
            with locked_folder(tmp_path, 60):
                inside.append(1)
                if len(inside) > 1:
                    errors.append("two are inside")
                time.sleep(0.0005)
                inside.pop()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not os.listdir(tmp_path)


def test_lock_that_a_killed_process_left_is_taken(tmp_path):
    child = os.fork()
    if child == 0:
        Lock.take(tmp_path / LOCK)
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK).exists()
    fs.save(tmp_path, {"x": 1}, timeout=5)
    assert len(os.listdir(tmp_path)) == 3


def test_link_in_the_place_of_a_lock_raises(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(victim)
    with pytest.raises(CheckpointError, match="symbolic link"):
        fs.save(tmp_path / "run", {"x": 1})
    assert victim.read_text() == "text"
