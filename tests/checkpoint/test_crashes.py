"""Faults at every change of the disk: the last committed checkpoint loads with its values, and
nothing else does.
"""

import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard.checkpoint import files
from fshard.checkpoint.files import LOCK, Lock, is_locked, locked_folder
from fshard.errors import CheckpointError
from tests.checkpoint.helpers.versions import loaded, tree
from tests.helpers.processes import HAS_RULES, run_processes
from tests.helpers.sampled import thorough

MODULES = [import_module(f"fshard.checkpoint.{name}") for name in ("files", "save", "folder")]


# -- a disk that fails, and forgets ----------------------------------------------------------------


class Crash(BaseException):
    """The process is gone."""


class FragileDisk(files.Disk):
    """A disk below a root, which fails at its n-th change, and knows what has been fsynced of files
    and folders.

    Args:
        root: a folder.
        fail_at: the number of the change that fails.
        gone: True if nothing runs after that, as in a crash; False: that change alone raises an OSError.
    """

    def __init__(self, root, fail_at=None, *, gone=False):
        self.root, self.fail_at, self.gone = root, fail_at, gone
        self.calls = []
        self.lock = threading.Lock()
        self.bytes = {}  # of files by inode, as fsynced
        self.entries = {}  # of folders by inode, as fsynced: inodes, True for a folder
        self.last = {}  # bytes of files by inode, fsynced or not
        for path in [root, *sorted(root.rglob("*"))]:
            if path.is_dir():
                self.entries[path.stat().st_ino] = self._now(path)
            else:
                self.bytes[path.stat().st_ino] = self.last[path.stat().st_ino] = path.read_bytes()

    def _now(self, path):
        return {entry.name: (entry.stat().st_ino, entry.is_dir()) for entry in path.iterdir()}

    def _turn(self, name):
        with self.lock:
            self.calls.append(name)
            number = len(self.calls) - 1
        if (
            self.fail_at is None
            or number < self.fail_at
            or (number > self.fail_at and not self.gone)
        ):
            return
        raise Crash if self.gone else OSError(errno.ENOSPC, "No space left on device")

    def make_folder(self, path):
        self._turn("make_folder")
        super().make_folder(path)

    def open_new(self, path):
        self._turn("open_new")
        return super().open_new(path)

    def write(self, file, data):
        try:
            self._turn("write")
        except (Crash, OSError):
            if len(self.calls) == (self.fail_at or 0) + 1:
                super().write(file, data[: len(data) // 2])
            raise
        done = super().write(file, data)
        self.last[os.fstat(file).st_ino] = Path(f"/proc/self/fd/{file}").read_bytes()
        return done

    def fsync(self, file):
        self._turn("fsync")
        inode = os.fstat(file).st_ino
        self.bytes[inode] = self.last.get(inode, b"")

    def rename(self, old, new):
        self._turn("rename")
        super().rename(old, new)

    def unlink(self, path):
        self._turn("unlink")
        super().unlink(path)

    def remove_folder(self, path):
        self._turn("remove_folder")
        super().remove_folder(path)

    def fsync_folder(self, path):
        self._turn("fsync_folder")
        self.entries[path.stat().st_ino] = self._now(path)

    def lose(self, loss):
        """Return a copy of the root without what was not fsynced: "bytes" of files, "names" in
        folders, "some" names, "all".
        """
        top, entries = self.root.stat().st_ino, {}
        for path in [self.root, *self.root.rglob("*")]:
            if path.is_dir():
                entries[path.stat().st_ino] = self._now(path)
        contents = self.last if loss == "names" else self.bytes
        choose = random.Random(len(self.calls))

        def build(path, number):
            path.mkdir()
            old = self.entries.get(number, {})
            new = entries.get(number, {})
            names = new if loss == "bytes" else old
            if loss == "some":
                sides = {name: choose.choice([old, new]) for name in sorted({*old, *new})}
                names = {name: side[name] for name, side in sides.items() if name in side}
            for name, (inner, is_folder) in names.items():
                if is_folder:
                    build(path / name, inner)
                else:
                    (path / name).write_bytes(contents.get(inner, b""))

        copy = self.root.with_name(f"{self.root.name}-{loss}")
        build(copy, top)
        return copy


class QuickDisk(files.Disk):
    """A disk that does not wait."""

    def fsync(self, file):
        pass

    def fsync_folder(self, path):
        pass


LOSSES = ("bytes", "names", "some", "all")


@pytest.fixture
def use(monkeypatch):
    """Put another disk in the place of the real one."""

    def use(disk):
        for module in MODULES:
            monkeypatch.setattr(module, "disk", disk)
        return disk

    return use


def saved(path, value, devices, inside):
    """Save, by one process for all devices or by each device itself."""
    if inside:
        fs.run(
            lambda: fs.save(path, tree(value, devices), timeout=20),
            mesh=fs.make_mesh({"data": devices}),
        )
    else:
        fs.save(path, tree(value, devices))


CASES = pytest.mark.parametrize(
    ("devices", "inside", "exists"),
    [(1, False, False), (1, False, True), thorough(2, False, True), (2, True, True)],
)
"""Writers, whether each is a device inside of `fs.run`, and whether there is a checkpoint already.
"""

# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["crash", "error"])
@CASES
def test_fault_at_any_change_keeps_the_last_checkpoint(
    fault, devices, inside, exists, tmp_path, use
):
    """An error before the commit is raised, and the folder has what it had; after it the new
    checkpoint loads.
    """
    use(QuickDisk())
    before = tmp_path / "before"
    failure = None
    (before / "runs").mkdir(parents=True)
    if exists:
        saved(before / "runs" / "7", 1, devices, inside=False)
    for number in range(1000):
        root = tmp_path / str(number)
        failure = None
        shutil.copytree(before, root)
        disk = use(FragileDisk(root, number, gone=fault == "crash"))
        try:
            saved(root / "runs" / "7", 2, devices, inside)
        except (Crash, CheckpointError) as error:
            failure = error
        use(QuickDisk())
        assert failure is None or fault == "crash" or "No space left" in str(failure)
        for copy in (root, *map(disk.lose, LOSSES if fault == "crash" else ())):
            assert loaded(copy / "runs" / "7") in (
                (2,) if failure is None else (1, 2) if exists else (None, 2)
            ), disk.calls
        saved(root / "runs" / "7", 3, devices, inside=False)  # which removes what the other left
        assert (
            loaded(root / "runs" / "7") == 3
            and len([*(root / "runs" / "7").iterdir()]) == 2 * devices + 1
        )
        if number >= len(disk.calls):
            break
    kinds = {
        "open_new",
        "write",
        "fsync",
        "rename",
        "fsync_folder",
        "unlink" if exists else "make_folder",
    }
    assert failure is None and number > 10 and kinds <= {*disk.calls}


def test_failed_save_frees_the_disk(tmp_path, use):
    disk = use(FragileDisk(tmp_path))
    fs.save(tmp_path, tree(1))
    write = disk.calls.index("fsync")
    before = {*tmp_path.iterdir()}
    use(FragileDisk(tmp_path, write))
    with pytest.raises(CheckpointError, match="No space left"):
        fs.save(tmp_path, tree(2))
    assert all(file.stat().st_size < 1000 for file in {*tmp_path.iterdir()} - before)
    assert loaded(tmp_path) == 1


def test_crash_while_checkpoints_are_removed_leaves_complete_ones(tmp_path, use):
    """Retention: a checkpoint that is being removed is none, and others are complete."""
    use(QuickDisk())
    before = tmp_path / "before"
    ended = False
    number = 0
    for step in (1, 2):
        fs.Checkpoints(before / "run", keep=2).save(step, tree(step))
    while not ended:
        root = tmp_path / str(number)
        shutil.copytree(before, root)
        disk = use(FragileDisk(root, number, gone=True))
        try:
            fs.Checkpoints(root / "run", keep=2).save(3, tree(3))
            ended = True
        except Crash:
            number += 1
        use(QuickDisk())
        for copy in (root, *map(disk.lose, LOSSES)):
            steps = fs.Checkpoints(copy / "run").steps
            assert [loaded(copy / "run" / str(step)) for step in steps] == steps
            assert steps[-2:] == [2, 3] if ended else steps in ([1, 2], [1, 2, 3], [2, 3])
    assert {"remove_folder", "unlink"} <= {*disk.calls}


# -- two jobs --------------------------------------------------------------------------------------


class RacingDisk(QuickDisk):
    """A disk on which two threads take turns at random: one of them has the next few changes, the
    other waits.
    """

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.turn = 0
        self.left = 0
        self.done = set()
        self.condition = threading.Condition()
        for name in (
            "open_new",
            "write",
            "rename",
            "unlink",
            "fsync_folder",
            "fsync",
            "remove_folder",
        ):
            setattr(
                self,
                name,
                lambda *args, name=name: (self._wait(), getattr(QuickDisk, name)(self, *args))[1],
            )

    def _wait(self):
        with self.condition:
            job = int(threading.current_thread().name)
            self.condition.wait_for(lambda: self.turn == job or self.done, timeout=0.01)
            self.left -= 1
            if self.left < 0:
                self.turn = self.chance.randrange(2)
                self.left = self.chance.randrange(6)
            self.condition.notify_all()


def race(disk, jobs):
    """Run two jobs by turns; return their errors."""
    errors = []

    def run(number):
        try:
            jobs[number]()
        except Exception as error:
            errors.append(error)
        with disk.condition:
            disk.done.add(number)
            disk.condition.notify_all()

    threads = [
        threading.Thread(target=run, args=(number,), name=str(number)) for number in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_two_jobs_in_one_folder_leave_a_checkpoint_or_raise(tmp_path, use):
    """200 races of saves, and of saves with the retention of another job."""
    trees, failed = [tree(1, 2), tree(2, 2)], 0
    for seed in range(200):
        path = tmp_path / str(seed)
        first = partial(fs.save, path / "7", trees[0], timeout=5)
        second = partial(fs.save, path / "7", trees[1], timeout=5)
        if seed % 4 == 0:
            second = partial(fs.Checkpoints(path, keep=1).save, 9, trees[1])
        errors = race(use(RacingDisk(seed)), [first, second])
        values = [loaded(path / name) for name in ("7", "9")]
        assert errors or values in ([[1, None], [2, None]] if seed % 4 else [[1, 2], [None, 2]]), (
            seed,
            values,
        )
        failed += bool(errors)
        assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert failed <= 10


# -- processes -------------------------------------------------------------------------------------


def one_fails(path):
    """A save of which process 1 cannot write its data; then one that process 1 does not call; the
    errors of both.
    """
    import torch.distributed as dist

    arrays = tree(2, 2)
    texts = list[str]()
    rank = dist.get_rank()
    for module in MODULES:
        module.disk = FragileDisk(Path(path).parent, 3 if rank else None)
    try:
        fs.save(path, arrays, timeout=20)
    except CheckpointError as error:
        texts.append(str(error))
    for module in MODULES:
        module.disk = files.Disk()
    dist.barrier()
    if rank == 0:
        try:
            fs.save(path, arrays, timeout=0.2)
        except CheckpointError as error:
            texts.append(str(error))
    dist.barrier()
    if rank == 1:  # it arrives after the other has given up
        try:
            fs.save(path, arrays, timeout=0.2)
        except CheckpointError as error:
            texts.append(str(error))
    return texts


def test_failed_and_late_processes_raise_everywhere_and_commit_nothing(tmp_path):
    path = tmp_path / "7"
    fs.save(path, tree(1))
    first, second = run_processes(one_fails, 2, str(path))
    assert "No space left" in second[0] and "device 1 cannot write" in second[0]
    assert "another device failed" in first[0] and "No space left" in first[0]
    assert "after 0.2 s there is no manifest of devices 1" in first[1]
    assert "another device failed" in second[1] and "no manifest of devices 1" in second[1]
    assert loaded(path) == 1


def dies(path, is_direct):
    """Save, but not on process 1: it ends before it has a file, or before its file is complete."""
    arrays = tree(2, 2)
    disk = files.Disk()
    if torch.distributed.get_rank():
        disk.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        for module in MODULES:
            module.disk = disk
        if is_direct:
            os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        fs.save(path / "7", arrays, timeout=60)
    except CheckpointError as error:
        (path / "error").write_text(f"{time.monotonic() - began:.1f} {error}")


def test_a_process_that_ended_is_noticed_within_two_seconds(link, tmp_path):
    is_direct = link == {} and not HAS_RULES
    with pytest.raises(Exception, match="SIGKILL|ended"):
        run_processes(dies, 2, tmp_path, is_direct, environment=link)
    seconds, _, text = (tmp_path / "error").read_text().partition(" ")
    assert (
        "the processes of devices 1 have ended" in text and float(seconds) < 4
    )  # 1 to 2 on an idle machine


KILLED = """
import mmap, os, random, signal, sys, time
from pathlib import Path
import torch, fshard as fs
from tests.checkpoint.helpers.versions import loaded, tree

path, done, value = sys.argv[1], mmap.mmap(-1, 8), 0
for turn in range(50):
    child = os.fork()
    if child == 0:
        while True:
            value += 1
            fs.save(path, tree(value, 2))
            done[:] = value.to_bytes(8, "little")
    time.sleep(random.Random(turn).uniform(0.005, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    ended = int.from_bytes(done, "little")
    value = loaded(Path(path)) or 0
    assert value in (ended, ended + 1), (value, ended)
    done[:] = value.to_bytes(8, "little")
fs.save(path, tree(0, 2))
print(value, len(os.listdir(path)))
"""


def test_fifty_killed_processes_leave_the_last_checkpoint(tmp_path):
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "7")]
    out = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert out.returncode == 0, out.stderr
    value, count = map(int, out.stdout.split())
    assert value > 10 and count == 5


# -- locks: who can hold them, for how long, and what handlers of signals and children do ----------


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
    """The interrupted save goes on if the handler catches the error; else that raises it too, and has
    no lock.
    """
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
    folder = fs.Checkpoints(tmp_path)
    errors = list[CheckpointError]()

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


def files_below(folder, process):
    """Return the open files of a process in a folder."""
    files = []
    for number in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(f"/proc/{process}/fd/{number}"))
    return [path for path in files if path.startswith(str(folder))]


def test_child_of_a_commit_has_no_lock(tmp_path, during_commit):
    """The child lives on, as a worker of a DataLoader does; later saves commit, and remove what it
    has seen.
    """
    folder = fs.Checkpoints(tmp_path, keep=1, timeout=20)
    children = list[int]()

    def fork(_):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)

    during_commit(fork)
    folder.save(1, {"x": torch.ones(3)})
    child = children[0]
    try:
        opened = files_below(tmp_path, child)
        deadline = time.monotonic() + 20
        while opened and time.monotonic() < deadline:  # until the child has run its handlers
            time.sleep(0.01)
            opened = files_below(tmp_path, child)
        fs.save(tmp_path / "1", {"x": 2}, timeout=20)
        assert len(os.listdir(tmp_path / "1")) == 3
        folder.save(2, {"x": torch.ones(3)})
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert opened == []
    assert folder.steps == [2] and os.listdir(tmp_path) == ["2"]
    folder.wait()


def test_threads_have_a_folder_one_at_a_time(tmp_path):
    """Each removes its lock, for which others wait with the file open."""
    inside = list[int]()
    errors = list[str]()

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
