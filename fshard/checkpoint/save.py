"""Save a tree: `fs.save`. Each device writes its share of its shards to a file of its own; nothing is sent.

snapshot     the share of each device held here, and the index: `TreeSnapshot`
write        data, fsync, manifest, fsync            by each device
commit       the index aside, fsync, rename, fsync   by whichever device first sees all manifests; the others wait for it

Each device has a lock until its save has ended, and a folder has one during a commit: another job that saves in the folder
removes only what no process writes.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
import time
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
from fshard.checkpoint.snapshot import TreeSnapshot, snapshot_of
from fshard.errors import CheckpointError
from fshard.mesh.collectives.api import broadcast, pmax
from fshard.mesh.layout import PyTree
from fshard.mesh.runtimes.process import has_ended
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
    """Save a tree of arrays, numbers, strings and objects with a `state_dict`, to be restored in any layout.

    Called by all processes. The folder is a checkpoint from the moment when all have written; if one fails or does not
    arrive, all raise, and what the folder had before is unchanged.

    Args:
        path: a folder, which is made.
        tree: arrays in any layouts; plain tensors, which are equal on all processes; values of JSON; objects with
            `state_dict` and `load_state_dict`.
        metrics: a tree, of which the numbers are saved with it; those of device 0 if they differ.
        timeout: seconds to wait for the other processes, and for another job that commits in the folder.

    >>> import tempfile, torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> x = fs.device_put(torch.arange(8.0), fs.Layout(mesh, P("data")))
    >>> folder = tempfile.mkdtemp()
    >>> fs.save(folder, {"x": x, "steps": 3})
    >>> fs.restore(folder)
    {'x': tensor([0., 1., 2., 3., 4., 5., 6., 7.]), 'steps': 3}
    """
    token = next_token()
    write(Path(path), snapshot(Path(path), token, tree, metrics), token, timeout)


@torch.no_grad()
def snapshot(
    folder: Path, token: str, tree: PyTree, metrics: Mapping[str, Any] | None = None
) -> TreeSnapshot:
    """Return the snapshot of a tree. If that raises, a mark in the folder stops the other processes."""
    try:
        return snapshot_of(tree, metrics)
    except BaseException as error:
        if run_token():
            _mark_failed(folder, token, dist.get_rank(), error)
        raise


_counts: dict[str, Iterator[int]] = {}


def run_token() -> str:
    """Return a name that all processes of this run share; "" for a process without others."""
    if not dist.is_initialized():
        return ""
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return store.compare_set("fshard/checkpoint", "", secrets.token_hex(5)).decode()


def next_token() -> str:
    """Return a name for the files of the next save, which no other save has: the same on all processes."""
    scope = here()
    if scope is not None and scope.mesh.runtime == "virtual":
        number = torch.tensor([int(secrets.token_hex(7), 16)])
        return f"{int(broadcast(number, tuple(scope.axes))):014x}"
    run = run_token()
    return f"{run}{next(_counts.setdefault(run, count())):x}" if run else secrets.token_hex(7)


def write(folder: Path, tree: TreeSnapshot, token: str, timeout: float) -> None:
    """Write the shares of the devices held here, and wait until the checkpoint is complete."""
    device, failure = min(tree.shares), None
    with ExitStack() as locks:
        try:
            check_not_committing(folder)
            with named_errors(f"{folder} cannot be made"):
                make_folder(folder)
                if (index := folder / INDEX).is_file() and not index.read_bytes().startswith(
                    b'{"xxh3":'
                ):
                    raise CheckpointError(
                        f"{index} must be that of a checkpoint, or absent. Save elsewhere."
                    )
            for writer in tree.shares:
                with named_errors(f"{folder}: device {writer} cannot write"):
                    _write_share(folder, tree, writer, token, locks)
        except BaseException as error:
            failure = error
            with suppress(OSError):
                for name in [f"{token}-{writer}" for writer in tree.shares]:  # to free a full disk
                    if not (folder / f"{name}.json").exists():
                        disk.unlink(folder / f"{name}.safetensors")
            _mark_failed(folder, token, device, error)
        meet()
        if failure is not None:
            raise failure
        with named_errors(f"{folder} cannot be committed"):
            _commit(folder, tree.index, token, device, timeout)


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
    arrays, ranges = tree.index.arrays, tree.shares[device]
    header = header_of((arrays[x.array].data_name, arrays[x.array].dtype, x.shape) for x in ranges)
    file = DigestWriter(folder / f"{token}-{device}.safetensors")
    locks.callback(file.release)
    file.write(header)
    for values in (x.values for x in ranges):
        if values.device.type == "cpu":
            file.write(bytes_of(values))
            continue
        for chunk in values.split(max(1, _STEP // values.itemsize)):
            file.write(bytes_of(chunk.cpu()))
    file.close()
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


def _commit(folder: Path, index: Index, token: str, device: int, timeout: float) -> None:
    """Write the index as soon as all manifests are there, or wait for the device that does."""
    manifests = {f"{token}-{writer}.json": writer for writer in range(index.devices)}
    check, end = time.monotonic() + 1, time.monotonic() + timeout
    while True:
        names = {*os.listdir(folder)}
        _check_marks(folder, token, names)
        missing = [writer for name, writer in manifests.items() if name not in names]
        if not missing:
            break
        if hasattr(sys, "last_value") and not threading.main_thread().is_alive():
            raise CheckpointError(
                f"{folder} is not saved: this process ended by an error before all had written."
            )
        reason = ""
        if time.monotonic() > end:
            reason = (
                f"after {timeout} s there is no manifest of devices {', '.join(map(str, missing))}."
            )
        elif time.monotonic() > check:
            check = time.monotonic() + 1
            ended = [
                str(writer)
                for writer in missing
                if _has_ended(folder, index, token, writer, device)
            ]
            reason = f"the processes of devices {', '.join(ended)} have ended." if ended else ""
        if reason:
            _mark_failed(folder, token, device, reason)  # so that those do not commit it later
            raise CheckpointError(f"{folder} is not saved: {reason}")
        time.sleep(PAUSE)
    try:
        with locked_folder(folder, end - time.monotonic()):
            if not _is_committed(folder, token):
                _check_marks(folder, token, os.listdir(folder))  # a device may not wait any more
                _write_index(folder, index, token, device)
            _validate_files(folder, token, index, {INDEX})
    except FolderLockedError as error:
        if not _is_committed(folder, token):
            _mark_failed(folder, token, device, error)
            raise CheckpointError(f"{folder} is not saved after {timeout} s: {error}") from error


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


def _has_ended(folder: Path, index: Index, token: str, writer: int, device: int) -> bool:
    """Return True if the process of a writer has ended: its link is closed, or its lock free, where locks work."""
    lock, own_lock = (folder / f"{token}-{number}.lock" for number in (writer, device))
    is_unlocked = lock.exists() and not is_locked(lock) and is_locked(own_lock)
    is_process = dist.is_initialized() and index.devices == dist.get_world_size()
    return is_unlocked or (is_process and has_ended(writer))


def _validate_files(folder: Path, token: str, index: Index, names: set[str]) -> None:
    files = {
        f"{token}-{device}.{kind}"
        for device in range(index.devices)
        for kind in ("safetensors", "json")
    }
    if missing := sorted((files | names) - {*os.listdir(folder)}):
        raise CheckpointError(
            f"{folder} is not saved: another job uses it, and has removed {', '.join(missing)}."
        )


def _write_index(folder: Path, index: Index, token: str, device: int) -> None:
    """Compare the manifests of all devices, and rename the index into its place."""
    manifests = [read_sealed(folder / f"{token}-{writer}.json") for writer in range(index.devices)]
    text_digest = digest(index.text.encode())
    if unequal := [str(writer) for writer, x in enumerate(manifests) if x["index"] != text_digest]:
        raise CheckpointError(
            f"{folder} is not saved: devices {', '.join(unequal)} have other names, shapes, layouts or values than "
            f"device {device}. Plain tensors and values must be equal on all."
        )
    if differences := _differences(index, [manifest["replicas"] for manifest in manifests]):
        raise CheckpointError(
            f"{folder} is not saved: replicated arrays must be equal on all devices; got others of "
            f"{'; '.join(differences[:20])}. Average or broadcast them; save random states as fs.RandomState()."
        )
    _validate_files(folder, token, index, set())
    disk.fsync_folder(folder)  # with the names of all files
    writers = [
        WriterFiles(
            f"{name}.safetensors",
            x["size"],
            x["header"],
            f"{name}.json",
            digest(as_text(x).encode()),
        )
        for name, x in (
            (f"{token}-{writer}", manifest) for writer, manifest in enumerate(manifests)
        )
    ]
    aside, metrics = folder / f"{token}-{device}.index", manifests[0]["metrics"]
    write_file(
        aside,
        sealed(f'{index.text[:-1]},"metrics":{as_text(metrics)},"writers":{as_text(writers)}}}'),
    )
    disk.rename(aside, folder / INDEX)
    disk.fsync_folder(folder)
    with suppress(OSError):  # the next save removes them
        for name in ended_saves(folder):
            if not name.startswith(f"{token}-"):
                disk.unlink(folder / name)


def _differences(index: Index, replicas: Sequence[Sequence[str]]) -> list[str]:
    """Return the arrays whose shards differ between devices that have the same one, by their digests, and these devices."""
    texts = list[str]()
    for number, entry in enumerate(
        index.arrays if any(row != replicas[0] for row in replicas) else ()
    ):
        firsts, unequal = dict[int, int](), defaultdict[int, list[int]](list)
        for device, row in enumerate(replicas if entry.replicas > 1 else ()):
            first = firsts.setdefault(entry.shard_number(device), device)
            if row[number] != replicas[first][number]:
                unequal[first].append(device)
        texts += [
            f"{entry.name} on devices {', '.join(map(str, [first, *row]))}"
            for first, row in unequal.items()
        ]
    return texts


def ended_saves(folder: Path) -> list[str]:
    """Return the files of saves of which no process is in progress, complete or not."""
    files = [name for name in sorted(os.listdir(folder)) if _SAVE_FILE.fullmatch(name)]
    # Locks are listed after the files: a lock is made before the files of its save.
    locks = [name for name in os.listdir(folder) if name.endswith(".lock")]
    locked = {name.partition("-")[0] for name in locks if is_locked(folder / name)}
    return [name for name in files if name.partition("-")[0] not in locked]
