"""Arrays in the files of other libraries: strided blocks, of which only the bytes that are needed are read.

No file is trusted: places are compared with the size of a file before memory is allocated, and what torch.save wrote is
read with `weights_only`, so that no code runs.
"""

from __future__ import annotations

import mmap
import os
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from io import BufferedReader, RawIOBase
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.copying import Span, copy, overlap
from fshard.checkpoint.division import Block
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import name_of
from fshard.checkpoint.source import Stored, Target
from fshard.errors import CheckpointError


class Chunk(NamedTuple):
    """A block of an array, and its elements: strided, in a file from one byte on.

    With `archive` they are in what torch.save wrote there, of that many bytes.
    """

    file: Path
    start: int
    dtype: torch.dtype
    block: Block
    strides: tuple[int, ...] = ()
    archive: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([stop - start for start, stop in self.block])

    @property
    def end(self) -> int:
        """The byte after the last element."""
        last = sum((length - 1) * step for length, step in zip(self.shape, self.strides, strict=True))
        return self.start + (last + 1) * self.dtype.itemsize if all(self.shape) else self.start


class Found(NamedTuple):
    """An array of a file, and its chunks."""

    stored: Stored
    chunks: Sequence[Chunk]


class ForeignFiles:
    """A source: arrays in files that were checked when they were opened, and values."""

    def __init__(
        self, found: Iterable[Found], values: Iterable[tuple[TreePath, Any]] = (), partial: Sequence[str] | None = None
    ) -> None:
        known = {name_of(one.stored.path): one for one in found}
        self.arrays = {name: one.stored for name, one in known.items()}
        self.values = {name_of(path): (path, value) for path, value in values}
        self.partial = partial
        self._chunks = {name: one.chunks for name, one in known.items()}
        first: dict[Any, str] = {}
        same = {name: first.setdefault((*one.chunks, one.stored.shape), name) for name, one in known.items()}
        self.ties = {name: of for name, of in same.items() if of != name and prod(self.arrays[name].shape)}

    def check(self) -> None: ...

    def read(self, targets: Sequence[Target]) -> None:
        wanted: dict[str, list[Target]] = defaultdict(list)
        for target in targets:
            wanted[target.name].append(target)
        for name, those in wanted.items():
            for chunk in self._chunks[name]:
                span = Span(chunk.block, 0, prod(chunk.shape))
                near = [target for target in those if overlap(span, target.span) != (0, 0)]
                if near:
                    values = _mapped(chunk if chunk.archive is None else _in_archive(chunk))
                    for target in near:
                        copy(span, values, target.span, target.into)


def _mapped(chunk: Chunk) -> Tensor:
    """Return the elements of a chunk in order; the file is read where they are used."""
    first = chunk.start - chunk.start % mmap.ALLOCATIONGRANULARITY
    with opened(chunk.file) as file:
        if chunk.end > os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{chunk.file} became shorter while it was read.")
        room = mmap.mmap(file.fileno(), chunk.end - first, access=mmap.ACCESS_COPY, offset=first)
    flat = torch.frombuffer(room, dtype=chunk.dtype, offset=chunk.start - first)
    return flat.as_strided(chunk.shape, chunk.strides).reshape(-1)


def opened(path: Path) -> BufferedReader:
    """Open a file to read it."""
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def block_of(shape: Sequence[int]) -> Block:
    """Return the block of a full array."""
    return tuple([(0, length) for length in shape]) or ((0, 1),)


def refuse_outside(by: Path, files: Iterable[Any]) -> None:
    """Raise if names are not those of files in the folder of the file that has them."""
    outside = [file for file in files if not isinstance(file, str) or file in ("", ".", "..") or {*"/\\\0"} & {*file}]
    if outside:
        raise CheckpointError(f"{by}: files must be in its folder; got {', '.join(map(repr, outside[:20]))}.")


# -- torch.save -------------------------------------------------------------------------------------------------------


class FileRange(RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: BufferedReader, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")[: max(0, self._size - self._at)]
        count = os.preadv(self._file.fileno(), [view], self._start + self._at)
        self._at += count
        return count


def without_data(path: Path, start: int = 0, size: int | None = None) -> Any:
    """Return what torch.save wrote to a range of a file, with meta tensors that have their place in it."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        part: Any = FileRange(file, start, size)
        try:
            with zipfile.ZipFile(part) as archive:
                if any(one.compress_type or one.file_size > size for one in archive.infolist()):
                    raise zipfile.BadZipFile("it is compressed.")
            part.seek(0)
            return torch.load(part, map_location="meta", weights_only=True)
        except Exception as error:  # of zipfile, pickle or torch, by what is wrong
            text = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{path} must be a file that torch.load reads with weights_only=True; got {text} "
                "Save tensors and plain values, such as a state_dict."
            ) from None


def placed(path: Path, begin: int, size: int, x: Any, name: str) -> Chunk:
    """Return where the elements of a tensor are that torch.save wrote to a range of a file."""
    if x.layout != torch.strided or x.is_quantized:
        raise CheckpointError(f"{path}: {name} must be a strided tensor; got {x.layout}, quantized: {x.is_quantized}.")
    start = begin + x.untyped_storage()._checkpoint_offset + x.storage_offset() * x.itemsize
    chunk = Chunk(path, start, x.dtype, block_of(x.shape), x.stride() or (1,))
    if chunk.end > begin + size or x.numel() * x.itemsize > size:
        text = f"{tuple(x.shape)} of {x.dtype} up to byte {chunk.end - begin}"
        raise CheckpointError(f"{path}: {name} must be within {size} bytes; got {text}.")
    return chunk


def _in_archive(chunk: Chunk) -> Chunk:
    """Return where the elements of a chunk are in the archive that it is stored as."""
    size = chunk.archive or 0
    x = without_data(chunk.file, chunk.start, size)
    if not isinstance(x, Tensor) or x.dtype != chunk.dtype or (tuple(x.shape) or (1,)) != chunk.shape:
        raise CheckpointError(f"{chunk.file}: at byte {chunk.start} must be {chunk.dtype} {chunk.shape}; got {x}.")
    return placed(chunk.file, chunk.start, size, x, "a chunk")
