"""Tensors on disk: unlinked files in the folder `FSHARD_DISK`, which end with their last tensor.

    tensor ── MAP_SHARED mapping ─┐
                                  ├── page cache ── file, reserved when it is made
    transfers ── preadv, pwritev ─┘

A tensor on disk is an ordinary tensor: what reads it, such as a checkpoint, reads the mapping.
Transfers read and write the file by its descriptor, so its pages are not resident memory of the
process; pages that became it are dropped.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fshard.errors import DiskError
from fshard.memory.pool import Pool, empty_on_host

CHUNK = 1 << 24
"""Bytes of the page-locked buffers between a file and a GPU."""


class _DiskFile(mmap.mmap):
    """An unlinked file and its mapping."""

    address: int = 0
    descriptor: int = -1
    folder: str = ""

    def __str__(self) -> str:
        file = f"the unlinked file {self.descriptor} of {len(self):,} bytes"
        return f"{file} in FSHARD_DISK={self.folder}"

    def __del__(self) -> None:
        # Called before the pages are unmapped, after which another file may get the address.
        _files.pop(self.address, None)
        if self.descriptor >= 0:
            os.close(self.descriptor)


_files: dict[int, ref[_DiskFile]] = {}
"""The files by the addresses of their mappings: those of their tensors' storages."""


def empty_on_disk(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor over a new file, whose bytes are reserved."""
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    folder = os.environ.get("FSHARD_DISK", "")
    descriptor = _new_file(folder)
    try:
        # To find out by reserving would fill the disk for a moment.
        if nbytes > _free_bytes(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        free = _free_bytes(descriptor)
        os.close(descriptor)
        raise DiskError(
            f"FSHARD_DISK={folder} must have {nbytes:,} more bytes for a tensor of shape "
            f"{tuple(shape)}; got {free:,} ({error.strerror}). Free some, or name a folder on a "
            "larger disk."
        ) from error

    file = _DiskFile(descriptor, nbytes)
    x = torch.frombuffer(file, dtype=torch.uint8)
    file.address = x.data_ptr()
    file.descriptor = descriptor
    file.folder = folder
    _files[file.address] = ref(file)
    return x.view(dtype).view(tuple(shape))


def _free_bytes(descriptor: int) -> int:
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize


def _new_file(folder: str) -> int:
    """Return the descriptor of a new unlinked file; raise unless the folder is one on a disk."""
    advice = "Write export FSHARD_DISK=/a/folder/on/a/disk"
    if not folder:
        raise DiskError(
            f"FSHARD_DISK must name a folder for tensors on disk; it is not set. {advice}."
        )
    try:
        descriptor, path = tempfile.mkstemp(dir=folder)
        os.unlink(path)
        kind = _filesystem(os.fstat(descriptor).st_dev)
    except OSError as error:
        raise DiskError(
            f"FSHARD_DISK={folder} must be a writable folder; got: {error.strerror}. {advice}."
        ) from error
    if kind in ("tmpfs", "ramfs"):
        os.close(descriptor)
        raise DiskError(
            f"FSHARD_DISK={folder} must be on a disk; got a {kind}, which is memory. {advice}."
        )
    return descriptor


@lru_cache
def _filesystem(device: int) -> str | None:
    """Return the type of the file system that is mounted from a device, if Linux lists it."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8") as lines:
            for line in lines:
                # 36 35 98:0 /root /mount/point options - ext3 /dev/root options
                mount, _, filesystem = line.partition(" - ")
                if mount.split()[2] == number:
                    return filesystem.split()[0]
    except OSError:
        pass
    return None


# -- copies --------------------------------------------------------------------------------------


def file_of(x: Tensor) -> _DiskFile | None:
    """Return the file that a tensor is over, if it is on disk."""
    if not _files or not x.is_cpu:
        return None
    mapping = _files.get(x.untyped_storage().data_ptr())
    return mapping and mapping()


def is_on_disk(x: Tensor) -> bool:
    """Return True if a tensor is over a file of `empty_on_disk`."""
    return file_of(x) is not None


def copy(source: Tensor, target: Tensor) -> None:
    """Copy between tensors of one shape and dtype, each of which may be on disk."""
    if _is_through_file(source, target):
        _through_file(source, target, reads=True)
    elif _is_through_file(target, source):
        _through_file(target, source, reads=False)
    else:
        target.copy_(source)
    drop_pages(source)
    drop_pages(target)


def _is_through_file(x: Tensor, other: Tensor) -> bool:
    """Return True if a copy between a tensor and another one reads or writes the file of the first.

    Between two tensors on disk the mappings are copied.
    """
    is_range = x.is_contiguous() and x.numel() > 0
    return is_range and is_on_disk(x) and not is_on_disk(other)


def drop_pages(x: Tensor) -> None:
    """Drop pages of a tensor on disk that were read or written as memory: they stay in the file."""
    file = file_of(x)
    if file is not None:
        file.madvise(mmap.MADV_DONTNEED)


def _through_file(x: Tensor, other: Tensor, reads: bool) -> None:
    """Read the bytes of a tensor on disk into another one, or write them from it."""
    if not other.is_contiguous():
        buffer = torch.empty_like(other, memory_format=torch.contiguous_format)
        if not reads:
            buffer.copy_(other)
        _through_file(x, buffer, reads)
        if reads:
            other.copy_(buffer)
        return

    file = file_of(x)
    assert file is not None
    offset = x.data_ptr() - file.address
    # By as_strided, since a contiguous dim of size 1 may have any stride, which `view` refuses.
    values = other.detach().as_strided((other.numel(),), (1,)).view(torch.uint8)
    if values.is_cpu:
        _transfer(file, offset, values, reads)
        return
    for chunk in values.split(CHUNK):
        buffer = _staging.take()
        on_host = buffer[: len(chunk)]
        if not reads:
            on_host.copy_(chunk)
        _transfer(file, offset, on_host, reads)
        if reads:
            chunk.copy_(on_host, non_blocking=True)
        # The next file operation runs beside this copy, in another buffer.
        _staging.release(buffer, torch.cuda.current_stream(chunk.device).record_event())
        offset += len(chunk)


_staging = Pool(lambda: empty_on_host((CHUNK,), torch.uint8))


def _transfer(file: _DiskFile, offset: int, values: Tensor, reads: bool) -> None:
    """Read or write all of some bytes on the host."""
    array: Any = values.numpy()
    memory = memoryview(array)
    operation = os.preadv if reads else os.pwritev
    while memory:
        try:
            count = operation(file.descriptor, [memory], offset)
        except OSError as error:
            raise _failure(file, offset, reads, error.strerror or str(error)) from error
        if not count:
            raise _failure(file, offset, reads, "the file has ended")
        memory = memory[count:]  # the system may read or write fewer bytes than it is given
        offset += count


def _failure(file: _DiskFile, offset: int, reads: bool, reason: str) -> DiskError:
    action = "Reading" if reads else "Writing"
    return DiskError(
        f"{action} {file} failed at byte {offset:,}: {reason}. What it stored is lost: restore a "
        "checkpoint, and examine the disk."
    )
