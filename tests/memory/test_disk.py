"""Tensors over unlinked files: folders, round trips, errors, resident memory."""

import gc
import os

import pytest
import torch

from fshard.errors import DiskError
from fshard.memory import disk
from fshard.memory.disk import copy, empty_on_disk, file_of, is_on_disk


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (5,), (3, 1000), (0, 4)])
def test_values_return_from_disk(disk_folder, dtype, shape):
    """The file, the mapping and the tensor have the same bytes, whichever was written."""
    values = torch.randint(0, 2, shape).to(dtype)
    x = empty_on_disk(shape, dtype)
    assert (
        x.shape == shape and x.dtype == dtype and not x.any() and is_on_disk(x) == bool(x.numel())
    )
    copy(values, x)
    assert torch.equal(x, values)
    result = torch.empty(shape, dtype=dtype)
    copy(x, result)
    assert torch.equal(result, values)
    x.fill_(1)
    copy(x, result)
    assert torch.equal(result, torch.ones(shape, dtype=dtype))


def test_views_are_copied_at_their_offsets(disk_folder):
    x = empty_on_disk((6, 4), torch.float32)
    y = torch.arange(24.0).view(6, 4)
    copy(y[:3], x[:3])
    copy(y[3:].T.contiguous().T, x[3:])
    assert torch.equal(x, y)
    copy(y[:, 1] + 1, x[:, 1])  # not contiguous in the file
    assert torch.equal(x[:, 1], y[:, 1] + 1) and torch.equal(x[:, 2:], y[:, 2:])
    single = torch.zeros(4)[1::4]  # of one element, with a stride
    copy(x[2, :1], single)
    assert single == y[2, 0]
    result = torch.zeros(4, 6)
    copy(x[2:4], result.T[2:4])
    assert torch.equal(result.T[2:4], x[2:4]) and not result.T[4:].any()


def test_files_are_reserved_unlinked_and_freed(disk_folder):
    gc.collect()  # of earlier tests
    before = descriptors()
    x = empty_on_disk((1 << 20,), torch.float32)
    assert os.fstat(file_of(x).descriptor).st_blocks * 512 >= 1 << 22
    assert list(disk_folder.iterdir()) == [] and descriptors() > before
    view = x[5:]
    del x
    assert is_on_disk(view)
    del view
    gc.collect()
    assert descriptors() == before and not disk._files


@pytest.mark.parametrize(
    ("folder", "complaint"),
    [
        (None, "is not set"),
        ("/no/such/folder", "No such file or directory"),
        ("/proc", "must be a writable folder"),
        ("/dev/shm", "tmpfs, which is memory"),
    ],
)
def test_unusable_folders_raise(monkeypatch, folder, complaint):
    monkeypatch.delenv("FSHARD_DISK", raising=False)
    if folder is not None:
        monkeypatch.setenv("FSHARD_DISK", folder)
    before = descriptors()
    with pytest.raises(DiskError, match=f"FSHARD_DISK.*{complaint}.*export FSHARD_DISK="):
        empty_on_disk((3,), torch.float32)
    assert descriptors() == before


def test_a_disk_too_small_raises_with_both_numbers(disk_folder):
    with pytest.raises(
        DiskError,
        match=r"must have 4,398,046,511,104 more bytes .*\(1099511627776,\); got [0-9,]+ ",
    ):
        empty_on_disk((1 << 40,), torch.float32)
    assert not disk._files


@pytest.mark.parametrize(("call", "verb"), [("preadv", "Reading"), ("pwritev", "Writing")])
def test_failed_reads_and_writes_name_the_file(disk_folder, monkeypatch, call, verb):
    x = empty_on_disk((9,), torch.float32)
    y = torch.zeros(9)

    def broken(descriptor, buffers, offset):
        raise OSError(5, "Input/output error")

    pair = (x, y) if call == "preadv" else (y, x)
    monkeypatch.setattr(disk.os, call, broken)
    with pytest.raises(
        DiskError,
        match=f"{verb} the .* 36 bytes in FSHARD_DISK={disk_folder} failed at byte 0: Input/output",
    ):
        copy(*pair)


def test_a_short_file_raises(disk_folder):
    x = empty_on_disk((9,), torch.float32)
    os.ftruncate(file_of(x).descriptor, 8)
    with pytest.raises(DiskError, match="Reading .* at byte 8: the file has ended"):
        copy(x, torch.zeros(9))


def test_partial_reads_and_writes_go_on(disk_folder, monkeypatch):
    for call in ("preadv", "pwritev"):
        whole = getattr(os, call)
        monkeypatch.setattr(
            disk.os,
            call,
            lambda fd, buffers, offset, whole=whole: whole(fd, [buffers[0][:5]], offset),
        )
    x = empty_on_disk((9,), torch.float32)
    y = torch.arange(9.0)
    result = torch.empty(9)
    copy(y, x)
    copy(x, result)
    assert torch.equal(result, y)
