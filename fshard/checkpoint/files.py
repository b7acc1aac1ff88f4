"""Files of a checkpoint: written once, fsynced, and verified block by block when they are read.

A data file is a safetensors file, and a manifest has a digest (XXH3) of every 4 MiB of it:

    length of the header | header (JSON) | bytes of the tensors in order
    digest of block 0          | digest of block 1          | ...

Every change of the disk is a method of `disk`, so that a test can let each of them fail. Locks are
files of their own: see `Lock`.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from fshard.errors import CheckpointError

BLOCK = 1 << 22
"""Bytes per digest: part of the format."""
_SMALL = 1 << 16
"""Bytes from which on a tensor is written directly from its memory.

Smaller ones are collected, so that a model of many small tensors is not as many calls of the disk.
"""
_CACHED = 1 << 18
"""Bytes that are digested and then written at a time: the processor's cache still has them."""

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "F32", torch.complex128: "F64",
}  # fmt: skip
"""The dtypes of safetensors; a complex tensor is written as pairs of real numbers."""


class Disk:
    """The changes that a checkpoint makes to the disk, one method for each kind."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def open_new(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def open_lock(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def write(self, file: int, data: memoryview) -> int:
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        os.fsync(file)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def fsync_folder(self, path: Path) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


disk = Disk()


@contextmanager
def named_errors(text: str) -> Generator[None]:
    """Raise errors of the disk as checkpoint errors that begin with a text."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{text}: {reason} ({error.filename or 'disk'}).") from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and wait until they are on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        disk.make_folder(path)
        disk.fsync_folder(path.parent)


class DigestWriter:
    """A new file whose bytes are digested as they are written."""

    def __init__(self, path: Path) -> None:
        self._file = _opened(disk.open_new, path)
        self._pending = bytearray()  # small data that is not written yet
        self._hash = xxhash.xxh3_64()  # of the last block, which is not full
        self.size = 0
        self.digests: list[str] = []

    def write(self, data: memoryview | bytes) -> None:
        if len(data) < _SMALL:
            self._pending += data
            if len(self._pending) >= BLOCK:
                self._flush()
            return
        self._flush()
        self._write(memoryview(data))

    def close(self) -> None:
        """Write what is left, and wait until it is on the disk."""
        self._flush()
        if self.size % BLOCK:
            self.digests.append(self._hash.hexdigest())
        disk.fsync(self._file)

    def release(self) -> None:
        """Close the file, complete or not."""
        _close(self._file)

    def _flush(self) -> None:
        if self._pending:
            self._write(memoryview(self._pending))
            self._pending = bytearray()

    def _write(self, data: memoryview) -> None:
        while len(data):
            space = BLOCK - self.size % BLOCK
            chunk = data[: min(_CACHED, space)]
            self._hash.update(chunk)
            self.size += len(chunk)
            if self.size % BLOCK == 0:
                self.digests.append(self._hash.hexdigest())
                self._hash.reset()
            _write_all(self._file, chunk)
            data = data[len(chunk) :]


def _write_all(file: int, data: memoryview) -> None:
    while len(data):
        count = disk.write(file, data)  # it may write less than all
        data = data[count:]


# -- locks ------------------------------------------------------------------------------------------------------------

PAUSE = 0.002
"""Seconds between two looks at a lock, or at a folder."""
LOCK = "index.lock"
"""The lock of a folder, in which one thread of all processes writes the index, or removes files."""

# Note [Files that a child closes]
# A lock belongs to the open file, which a fork shares: a child that keeps it, such as a worker of a
# DataLoader, keeps the lock after its parent has ended the save. It keeps the bytes of a file that
# is removed, too. So a child closes `_files`, and no fork may come between the opening of a file
# and its entry there: `_fork_guard` is taken before each fork.

_fork_guard = threading.RLock()
_files: set[int] = set()
_holders: set[tuple[int, str]] = set()
"""Threads that take or have the lock of a folder, and that folder."""


def _opened(open_file: Callable[[Path], int], path: Path) -> int:
    """Open a file that children of this process close: see Note [Files that a child closes]."""
    with _fork_guard:
        file = open_file(path)
        _files.add(file)
    return file


def _close(file: int) -> None:
    """Close a file, unless this is a child in which it is closed."""
    with _fork_guard:
        if file in _files:
            _files.remove(file)
            os.close(file)


def _close_in_child() -> None:
    for file in _files:
        with suppress(OSError):
            os.close(file)
    _files.clear()
    _holders.clear()
    _fork_guard.release()


os.register_at_fork(
    before=_fork_guard.acquire,
    after_in_parent=_fork_guard.release,
    after_in_child=_close_in_child,
)


class Lock:
    """A file of mode 0600 that is locked until it is released, or its process ends.

    `release` removes the file.

    Not a lock of the folder, or of a file of data: all who may read those could lock them, and stop
    every save.
    """

    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self._file = file

    @staticmethod
    def take(path: Path) -> Lock | None:
        """Make and lock a file, and write there who has it; return None if another has it."""
        while True:
            file = _opened(disk.open_lock, path)
            try:
                with suppress(_NoLocks):
                    _flock(file, fcntl.LOCK_EX)
                # Else the one who had the lock has removed its file since it was opened here, and a
                # new file of this name may be locked by another.
                if _is_named(file, path):
                    with suppress(OSError):  # the text is only for errors
                        os.ftruncate(file, 0)
                        os.pwrite(file, _this_process().encode(), 0)
                    return Lock(path, file)
            except BlockingIOError:
                _close(file)
                return None
            except BaseException:
                _close(file)
                raise
            _close(file)

    def release(self) -> None:
        """Remove the file, and unlock it: in this order, so that no two have locks of one name."""
        try:
            if self._file in _files:  # a child leaves the file of its parent
                with suppress(OSError):  # what stays is unlocked: the next one takes it
                    disk.unlink(self._path)
        finally:
            _close(self._file)


class _NoLocks(Exception):
    """The file system has no locks."""


def _flock(file: int, kind: int) -> None:
    """Lock a file without waiting; raise BlockingIOError if another has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        raise _NoLocks from None


def _is_named(file: int, path: Path) -> bool:
    """Return True if a path still names an open file."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(file))


def _this_process() -> str:
    return f"process {os.getpid()} of {socket.gethostname()}"


def is_locked(path: Path) -> bool:
    """Return True if a `Lock` of this path is held, by any process."""
    try:
        with path.open("rb") as file:
            _flock(file.fileno(), fcntl.LOCK_SH)
    except (BlockingIOError, PermissionError):  # another user's, which may be held
        return True
    except (OSError, _NoLocks):
        return False
    return False


class FolderLockedError(CheckpointError):
    """The lock of a folder is not free before the limit."""


def check_not_committing(folder: Path) -> None:
    """Raise in a handler of a signal that interrupts a commit of this folder in the same thread.

    It would wait for a lock that its own thread has.
    """
    if (threading.get_ident(), os.path.realpath(folder)) in _holders:
        raise CheckpointError(
            f"{folder} must not be saved while this thread commits a save there; got a save that "
            "interrupts it, as from the handler of a signal. Set a flag in the handler and save "
            "after the step, as fs.Checkpoints does on SIGTERM, or save to another folder."
        )


@contextmanager
def locked_folder(folder: Path, timeout: float) -> Generator[None]:
    """Take the lock of a folder; wait up to some seconds for another thread or process."""
    check_not_committing(folder)
    path = folder / LOCK
    deadline = time.monotonic() + timeout
    holder = threading.get_ident(), os.path.realpath(folder)
    lock: Lock | None = None
    _holders.add(holder)  # before the lock is taken: a signal is handled between any two lines
    try:
        while (lock := Lock.take(path)) is None:
            if time.monotonic() > deadline:
                raise FolderLockedError(
                    f"{path} must be free within the limit of time; got one that {_owner(path)} "
                    "has. Wait until it has saved, or end it."
                )
            time.sleep(PAUSE)
        yield
    finally:
        try:
            if lock is not None:
                lock.release()
        finally:
            _holders.discard(holder)


def _owner(path: Path) -> str:
    """Return who has a lock, in words."""
    try:
        return path.read_text() or "another process"
    except PermissionError:
        return f"a process of user {path.stat().st_uid}"
    except OSError:
        return "another process"


# -- small files, digests, headers ------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> None:
    """Write a small file aside, and rename it when its bytes are on the disk.

    Its name may not be: the folder is not fsynced.
    """
    aside = path.with_name(f"{path.name}.tmp")
    disk.unlink(aside)
    file = disk.open_new(aside)
    try:
        _write_all(file, memoryview(data))
        disk.fsync(file)
    finally:
        os.close(file)
    disk.rename(aside, path)


def digest(data: bytes | memoryview) -> str:
    """Return the digest of bytes in memory.

    >>> digest(b"abc")
    '78af5f94892f3950'
    """
    return xxhash.xxh3_64_hexdigest(data)


def bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of a tensor in the host's memory, without a copy if it is contiguous."""
    array: Any = _as_bytes(x).numpy()
    return memoryview(array)


def _as_bytes(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj().resolve_neg().reshape(-1)
    if x.stride(0) != 1:  # it is 0 in an expanded number, which cannot be viewed as bytes
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)


def digest_of(x: Tensor) -> str:
    """Return a digest of the bits of a tensor.

    Those of a GPU are not copied to the host: their weighted sums are.
    """
    data = _as_bytes(x)
    if x.device.type != "cpu":
        data = _weighted_sums(data)
    return digest(bytes_of(data))


def _weighted_sums(data: Tensor) -> Tensor:
    """Return the sum of each block of bytes with odd weights, modulo 2**64, on the host.

    One byte that differs changes the sum, since an odd weight times a byte is not 0 modulo 2**64.
    """
    weights = _weights(data.device)
    sums: list[Tensor] = []
    for block in data.split(BLOCK):
        sums.append((block.to(torch.int64) * weights[: len(block)]).sum())
    return torch.stack(sums).cpu()


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(-(1 << 62), 1 << 62, (BLOCK,), generator=draw) * 2 + 1).to(device)


def header_of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """Return the header of a safetensors file, of tensors in the order of their bytes."""
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in tensors:
        size = dtype.itemsize * prod(shape)
        written_shape = [*shape]
        if dtype.is_complex:
            written_shape.append(2)  # real and imaginary part
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": written_shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size

    text = json.dumps(header, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % 16  # elements of up to 16 bytes begin at a multiple of their size
    text += b" " * padding
    return len(text).to_bytes(8, "little") + text


class BlockReader:
    """A file that is mapped in blocks: only those in use count as memory."""

    def __init__(self, path: Path, size: int, digests: Sequence[str]) -> None:
        self.path = path
        self.size = size
        self._digests = digests
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        length = os.fstat(self._file).st_size
        if length != size:
            self.close()
            raise CheckpointError(f"{path} must have {size} bytes; got {length}.")

    def block(self, number: int) -> memoryview:
        """Map a block: a private copy of each page that is written to."""
        # A page of a file that is shorter than its map ends the process by SIGBUS.
        if os.fstat(self._file).st_size != self.size:
            raise CheckpointError(f"{self.path} became shorter while it was read.")
        start = number * BLOCK
        stop = min(start + BLOCK, self.size)
        # A map begins at a multiple of the page size, of which BLOCK is one, but in tests.
        margin = start % mmap.ALLOCATIONGRANULARITY
        # torch warns of memory that it must not write to, so it is a copy on write.
        mapped = mmap.mmap(
            self._file, stop - start + margin, access=mmap.ACCESS_COPY, offset=start - margin
        )
        return memoryview(mapped)[margin:]

    def verify(self, number: int) -> None:
        """Raise unless a block has its digest."""
        block = self.block(number)
        if digest(block) != self._digests[number]:
            start = number * BLOCK
            raise CheckpointError(
                f"{self.path}: bytes {start} to {start + len(block)} are not those that were "
                "written (their digest differs). Restore another checkpoint."
            )

    def close(self) -> None:
        os.close(self._file)
