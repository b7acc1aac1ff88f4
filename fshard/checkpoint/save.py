"""Save a tree: `fs.save`. Each device writes its share of its shards to a file of its own.

Nothing is sent. A save of two devices, of which `A` is the token:

    device 0                       device 1                       the folder is
    A-0.safetensors, fsync         A-1.safetensors, fsync         the checkpoint before
    A-0.json, fsync, rename        A-1.json, fsync, rename        the checkpoint before
    all manifests are there                                       the checkpoint before
    A-0.index, fsync
    A-0.index -> index.json        waits for index.json           this checkpoint

Whichever device first sees all manifests commits. See Note [Crash safety of a commit] and
Note [Locks of a save].
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fshard.checkpoint.files import (
    PAUSE,
    DigestWriter,
    FolderLockedError,
    Lock,
    bytes_of,
    check_not_committing,
    digest,
    disk,
    header_of,
    is_locked,
    locked_folder,
    make_folder,
    named_errors,
    write_file,
)
from fshard.checkpoint.index import INDEX, Index, WriterFiles, as_text, read_sealed, sealed
from fshard.checkpoint.names import mesh_of_some
from fshard.checkpoint.snapshot import TreeSnapshot, as_device_of, snapshot_of
from fshard.errors import CheckpointError, LostProcessError
from fshard.mesh.collectives.api import broadcast, pmax
from fshard.mesh.layout import PyTree, shortened
from fshard.mesh.runtimes.process import has_ended
from fshard.mesh.runtimes.watch import default_store
from fshard.mesh.spmd.moments import Killed, deaths, listeners
from fshard.mesh.spmd.run import reach_on
from fshard.mesh.spmd.scope import here

_SAVE_FILE = re.compile(r"[0-9a-f]{11,}-[0-9]+\.(safetensors|json|failed|index|lock)(\.tmp)?")
"""The names of the files of a save: they begin with its token."""
_STEP = 16 << 20
"""Bytes of a tensor that are copied from a GPU at a time."""


@torch.no_grad()
def save(
    path: str | os.PathLike[str],
    tree: PyTree,
    *,
    metrics: Mapping[str, Any] | None = None,
    timeout: float = 600,
) -> None:
    """Save a tree of arrays, numbers, strings and objects with a `state_dict`, for any layout.

    Called by all processes. The folder is a checkpoint from the moment when all have written; if
    one fails or does not arrive, all raise, and what the folder had before is unchanged. Of arrays
    on a mesh of some devices these write; on other processes it returns at once.

    Args:
        path: a folder, which is made.
        tree: arrays in any layouts; plain tensors, which are equal on all processes; values of
            JSON; objects with `state_dict` and `load_state_dict`.
        metrics: a tree, of which the numbers are saved with it; those of device 0 if they differ.
        timeout: seconds to wait for the other processes, and for another job that commits in the
            folder.

    >>> import tempfile, torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> x = fs.device_put(torch.arange(8.0), fs.Layout(mesh, P("data")))
    >>> folder = tempfile.mkdtemp()
    >>> fs.save(folder, {"x": x, "steps": 3})
    >>> fs.restore(folder)
    {'x': tensor([0., 1., 2., 3., 4., 5., 6., 7.]), 'steps': 3}
    """
    folder = Path(path)
    mesh = mesh_of_some(tree)
    if mesh is not None and not mesh.is_member:
        return
    with as_device_of(mesh):
        token = next_token()
        content = snapshot(folder, token, tree, metrics)
        write(folder, content, token, timeout)


@torch.no_grad()
def snapshot(
    folder: Path, token: str, tree: PyTree, metrics: Mapping[str, Any] | None = None
) -> TreeSnapshot:
    """Return the snapshot of a tree.

    If that raises, a mark in the folder stops the other processes.
    """
    try:
        return snapshot_of(tree, metrics)
    except BaseException as error:
        if run_token():
            _mark_failed(folder, token, dist.get_rank(), error)
        raise


_counts: dict[str, Iterator[int]] = {}
"""The numbers of saves to come, by the token of the run and its devices."""


def run_token() -> str:
    """Return a name that all processes of this run share; "" for a process without others."""
    if not dist.is_initialized():
        return ""
    return default_store().compare_set("fshard/checkpoint", "", secrets.token_hex(5)).decode()


def next_token() -> str:
    """Return a name for the files of the next save, which no other save has.

    It is the same on all processes.
    """
    scope = here()
    if scope is not None and scope.mesh.runtime == "virtual":
        number = torch.tensor([int(secrets.token_hex(7), 16)])
        return f"{int(broadcast(number, tuple(scope.axes))):014x}"
    run = run_token()
    if not run:
        return secrets.token_hex(7)
    # Processes call `save` alike, so they count alike, without sending anything: those of a mesh
    # of some devices count the saves of these devices.
    token = run
    if scope is not None and scope.mesh.numbers is not None:
        token += f"{zlib.crc32(repr(scope.mesh.numbers).encode()):08x}"
    number = next(_counts.setdefault(token, count()))
    return f"{token}{number:x}"


def write(folder: Path, tree: TreeSnapshot, token: str, timeout: float) -> None:
    """Write the shares of the devices held here, and wait until the checkpoint is complete."""
    device = min(tree.shares)
    failure: BaseException | None = None
    with ExitStack() as locks:
        try:
            check_not_committing(folder)
            _make_checkpoint_folder(folder)
            for writer in tree.shares:
                _reach_save(tree, writer)
                with named_errors(f"{folder}: device {writer} cannot write"):
                    _write_share(folder, tree, writer, token, locks)
        except (Killed, LostProcessError):
            raise  # a process that is killed leaves its files, and no mark
        except BaseException as error:
            failure = error
            _remove_incomplete(folder, tree, token)
            _mark_failed(folder, token, device, error)
        meet()  # also if this device has failed: the others of a virtual mesh wait for it here
        if failure is not None:
            raise failure
        _reach_save(tree, *tree.shares)
        with named_errors(f"{folder} cannot be committed"):
            _commit(folder, tree, token, device, timeout)


def _reach_save(tree: TreeSnapshot, *devices: int) -> None:
    """Reach a moment of the save as some devices."""
    if listeners and tree.mesh is not None:
        reach_on(tree.mesh, "save", devices)


def _make_checkpoint_folder(folder: Path) -> None:
    """Make a folder; raise if it has an index that `fs.save` has not written, which stays."""
    with named_errors(f"{folder} cannot be made"):
        make_folder(folder)
        index = folder / INDEX
        if index.is_file() and not index.read_bytes().startswith(b'{"xxh3":'):
            raise CheckpointError(
                f"{index} must be that of a checkpoint, or absent. Save elsewhere."
            )


def _remove_incomplete(folder: Path, tree: TreeSnapshot, token: str) -> None:
    """Remove the data of devices that have no manifest, so that a full disk is free again."""
    with suppress(OSError):
        for writer in tree.shares:
            name = f"{token}-{writer}"
            if not (folder / f"{name}.json").exists():
                disk.unlink(folder / f"{name}.safetensors")


def _mark_failed(folder: Path, token: str, device: int, error: BaseException | str) -> None:
    """Leave a file from which the other devices learn that this device has failed."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f"{token}-{device}.failed"
        aside = mark.with_name(f"{mark.name}.tmp")
        try:
            aside.write_text(str(error))
        finally:
            aside.replace(mark)  # on a full disk without its text


def meet() -> None:
    """Wait for the other devices of a virtual mesh, which run only if this one waits."""
    scope = here()
    if scope is not None and scope.mesh.runtime == "virtual":
        pmax(torch.zeros(1), tuple(scope.axes))


def _write_share(
    folder: Path, tree: TreeSnapshot, device: int, token: str, locks: ExitStack
) -> None:
    """Write the data of one device and its manifest; `locks` releases its lock."""
    lock = Lock.take(folder / f"{token}-{device}.lock")
    if lock is not None:  # no other save has a file of this name
        locks.callback(lock.release)

    arrays = tree.index.arrays
    ranges = tree.shares[device]
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for x in ranges:
        entry = arrays[x.array]
        tensors.append((entry.data_name, entry.dtype, x.shape))
    header = header_of(tensors)

    file = DigestWriter(folder / f"{token}-{device}.safetensors")
    locks.callback(file.release)
    file.write(header)
    for x in ranges:
        if x.values.device.type == "cpu":
            file.write(bytes_of(x.values))
            continue
        # A name would keep the copy of one chunk while the next one is made.
        for chunk in x.values.split(max(1, _STEP // x.values.itemsize)):
            file.write(bytes_of(chunk.cpu()))
    file.close()
    _reach_save(tree, device)

    manifest = {
        "device": device,
        "size": file.size,
        "header": len(header),
        "index": digest(tree.index.text.encode()),
        "digests": file.digests,
        "replicas": tree.replicas[device],
        "metrics": tree.index.metrics,
    }
    write_file(folder / f"{token}-{device}.json", sealed(as_text(manifest)))


# Note [Crash safety of a commit]
# A folder is a checkpoint by its index alone, and `rename` replaces that in one step. So a crash at
# any moment leaves the old checkpoint or the new one, if what an index names is on the disk before
# the index is there, and what the old index names is removed after that:
#
#     1. bytes of data and manifests are fsynced by their writers
#     2. the folder is fsynced: with the names of these files
#     3. the new index is written aside and fsynced, renamed, and the folder is fsynced
#     4. files of earlier saves are removed
#
# A device that fails leaves a mark. The one that commits looks for marks once more when it has the
# lock of the folder: a device that has marked the save does not wait any more, and has raised.


# Note [Locks of a save]
# Several jobs may save in one folder. A save has a lock for each of its devices until it ends, and
# a commit has the lock of the folder. So the job that commits removes only files of saves of which
# no process has a lock: see `ended_saves`. Where a file system has no locks, the files of a save in
# progress can be removed; then `_validate_files` raises, before the commit or after it.


def _commit(folder: Path, tree: TreeSnapshot, token: str, device: int, timeout: float) -> None:
    """Write the index as soon as all manifests are there, or wait for the device that does."""
    deadline = time.monotonic() + timeout
    index = tree.index
    _wait_for_manifests(folder, tree, token, device, timeout)
    try:
        with locked_folder(folder, deadline - time.monotonic()):
            if not _is_committed(folder, token):
                _check_marks(folder, token, os.listdir(folder))
                _write_index(folder, index, token, device)
            _validate_files(folder, token, index, {INDEX})
    except FolderLockedError as error:
        if not _is_committed(folder, token):
            _mark_failed(folder, token, device, error)
            raise CheckpointError(f"{folder} is not saved after {timeout} s: {error}") from error


def _wait_for_manifests(
    folder: Path, tree: TreeSnapshot, token: str, device: int, timeout: float
) -> None:
    """Wait until all devices have written; raise if one has failed, has ended, or is late."""
    manifests = {f"{token}-{writer}.json": writer for writer in range(tree.index.devices)}
    deadline = time.monotonic() + timeout
    next_look = time.monotonic() + 1
    while True:
        names = {*os.listdir(folder)}
        _check_marks(folder, token, names)
        missing = [writer for name, writer in manifests.items() if name not in names]
        if not missing:
            return
        _validate_not_killed(folder, tree, missing)
        # A thread that writes in the background must not keep a process that an error has ended.
        if hasattr(sys, "last_value") and not threading.main_thread().is_alive():
            raise CheckpointError(
                f"{folder} is not saved: this process ended by an error before all had written."
            )

        reason = ""
        if time.monotonic() > deadline:
            devices = ", ".join(map(str, missing))
            reason = (
                f"after {timeout} s there is no manifest of devices {devices}. All processes must "
                "call it, within timeout= seconds."
            )
        elif time.monotonic() > next_look:
            next_look = time.monotonic() + 1
            ended: list[str] = []
            for writer in missing:
                if _has_ended(folder, tree, token, writer, device):
                    ended.append(str(writer))
            if ended:
                reason = f"the processes of devices {', '.join(ended)} have ended."
        if reason:
            # Else a device that arrives later would commit what this one reports as not saved.
            _mark_failed(folder, token, device, reason)
            raise CheckpointError(f"{folder} is not saved: {reason}")
        time.sleep(PAUSE)


def _validate_not_killed(folder: Path, tree: TreeSnapshot, writers: Iterable[int]) -> None:
    """Raise if a virtual device of some writers was killed since the snapshot."""
    mesh = tree.mesh
    if mesh is None or mesh.runtime != "virtual":
        return
    lost = {mesh.devices[writer] for writer in writers}.intersection(deaths[tree.deaths :])
    if lost:
        numbers = tuple(sorted(lost))
        raise LostProcessError(
            f"{folder} is not saved: devices {shortened(numbers)} were killed.", lost=numbers
        )


def _is_committed(folder: Path, token: str) -> bool:
    """Return True if the index of a folder is of this save."""
    index = folder / INDEX
    return index.exists() and f'"{token}-0.json"'.encode() in index.read_bytes()


def _check_marks(folder: Path, token: str, names: Iterable[str]) -> None:
    """Raise if another device has left a mark that it has failed."""
    marks = [name for name in names if name.startswith(f"{token}-") and name.endswith(".failed")]
    if marks:
        texts = "; ".join((folder / name).read_text() for name in sorted(marks))
        raise CheckpointError(f"{folder} is not saved, since another device failed: {texts}")


def _has_ended(folder: Path, tree: TreeSnapshot, token: str, writer: int, device: int) -> bool:
    """Return True if the process of a writer has ended: its link is closed, or its lock is free."""
    lock = folder / f"{token}-{writer}.lock"
    if not tree.is_staying():
        # After a loss ranks are other processes. Who had not begun to write by then never does.
        if not lock.exists():
            return True
    elif tree.ranks is not None and has_ended(tree.ranks[writer]):
        return True
    own_lock = folder / f"{token}-{device}.lock"
    # A lock that this process has shows that the file system has locks.
    return lock.exists() and not is_locked(lock) and is_locked(own_lock)


def _validate_files(folder: Path, token: str, index: Index, names: set[str]) -> None:
    """Raise if a file of this save, or one of `names`, is gone: see Note [Locks of a save]."""
    expected = set(names)
    for device in range(index.devices):
        expected |= {f"{token}-{device}.safetensors", f"{token}-{device}.json"}
    missing = sorted(expected - {*os.listdir(folder)})
    if missing:
        raise CheckpointError(
            f"{folder} is not saved: another job uses it, and has removed {', '.join(missing)}."
        )


def _write_index(folder: Path, index: Index, token: str, device: int) -> None:
    """Compare the manifests of all devices, and rename the index into its place.

    The order of its steps is that of Note [Crash safety of a commit].
    """
    manifests = [read_sealed(folder / f"{token}-{writer}.json") for writer in range(index.devices)]
    _validate_manifests(folder, index, manifests, device)
    _validate_files(folder, token, index, set())
    disk.fsync_folder(folder)

    writers: list[WriterFiles] = []
    for writer, manifest in enumerate(manifests):
        name = f"{token}-{writer}"
        manifest_digest = digest(as_text(manifest).encode())
        files = WriterFiles(
            data=f"{name}.safetensors",
            size=manifest["size"],
            header=manifest["header"],
            manifest=f"{name}.json",
            digest=manifest_digest,
        )
        writers.append(files)
    metrics = as_text(manifests[0]["metrics"])
    text = f'{index.text[:-1]},"metrics":{metrics},"writers":{as_text(writers)}}}'

    aside = folder / f"{token}-{device}.index"
    write_file(aside, sealed(text))
    disk.rename(aside, folder / INDEX)
    disk.fsync_folder(folder)
    with suppress(OSError):  # the next save removes them
        for name in ended_saves(folder):
            if not name.startswith(f"{token}-"):
                disk.unlink(folder / name)


def _validate_manifests(folder: Path, index: Index, manifests: Sequence[Any], device: int) -> None:
    """Raise if devices have other indices, or other replicas, than each other."""
    text_digest = digest(index.text.encode())
    unequal: list[str] = []
    for writer, manifest in enumerate(manifests):
        if manifest["index"] != text_digest:
            unequal.append(str(writer))
    if unequal:
        raise CheckpointError(
            f"{folder} is not saved: devices {', '.join(unequal)} have other names, shapes, "
            f"layouts or values than device {device}. "
            "Plain tensors and values must be equal on all."
        )
    differences = _differences(index, [manifest["replicas"] for manifest in manifests])
    if differences:
        raise CheckpointError(
            f"{folder} is not saved: replicated arrays must be equal on all devices; got others of "
            f"{'; '.join(differences[:20])}. Average or broadcast them; save random states as "
            "fs.RandomState()."
        )


def _differences(index: Index, replicas: Sequence[Sequence[str]]) -> list[str]:
    """Return the arrays whose replicas differ, by their digests, and the devices of these."""
    if all(row == replicas[0] for row in replicas):
        return []  # so it is if arrays are replicated over all devices, or over none
    texts: list[str] = []
    for number, entry in enumerate(index.arrays):
        if entry.replicas == 1:
            continue
        firsts: dict[int, int] = {}  # the first device of each shard
        unequal: dict[int, list[int]] = defaultdict(list)
        for device, row in enumerate(replicas):
            first = firsts.setdefault(entry.shard_number(device), device)
            if row[number] != replicas[first][number]:
                unequal[first].append(device)
        for first, devices in unequal.items():
            texts.append(f"{entry.name} on devices {', '.join(map(str, [first, *devices]))}")
    return texts


def ended_saves(folder: Path) -> list[str]:
    """Return the files of saves of which no process is in progress, complete or not."""
    files = [name for name in sorted(os.listdir(folder)) if _SAVE_FILE.fullmatch(name)]
    # Locks are listed after the files: a lock is made before the files of its save.
    locks = [name for name in os.listdir(folder) if name.endswith(".lock")]
    locked_tokens = {_token_of(name) for name in locks if is_locked(folder / name)}
    return [name for name in files if _token_of(name) not in locked_tokens]


def _token_of(name: str) -> str:
    return name.partition("-")[0]
