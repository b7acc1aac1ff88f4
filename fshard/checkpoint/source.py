"""Sources of arrays: the shares that devices have stored, such as folders of `fs.save`, read in ranges.

`foreign` has the sources of other formats, and opens all.

    target        of array w: a range of one of its blocks, and the memory for it
    read ranges   of file A-0: bytes 0 to 96;   of file A-1: bytes 0 to 32
    blocks        each is read once: verified, and copied from into all targets that need some of it
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.copying import Span, copy
from fshard.checkpoint.files import BLOCK, BlockReader
from fshard.checkpoint.index import INDEX, Index, WriterFiles, read_index, read_manifest
from fshard.checkpoint.names import TreePath, name_of
from fshard.errors import CheckpointError

THREADS = 4
"""Files that are read at a time."""


class StoredArray(NamedTuple):
    """An array of a source."""

    path: TreePath
    shape: tuple[int, ...]
    dtype: torch.dtype


class Target(NamedTuple):
    """A range of an array's block, in global indices, and the flat memory for its elements."""

    name: str
    span: Span
    memory: Tensor


class Source:
    """Arrays and values by name, in a file or folder.

    `ties`: arrays that are the same as another, and the name of that one.
    `partial`: patterns of the leaves of a model that it has; None: all.
    """

    arrays: Mapping[str, StoredArray]
    values: Mapping[str, tuple[TreePath, Any]]
    ties: Mapping[str, str]
    partial: Sequence[str] | None = None

    @property
    def paths(self) -> dict[str, TreePath]:
        """The paths of all arrays and values."""
        paths = {name: array.path for name, array in self.arrays.items()}
        for name, (path, _) in self.values.items():
            paths[name] = path
        return paths

    def check(self) -> None:
        """Raise if what is to be read is not complete."""

    def read(self, targets: Sequence[Target]) -> None:
        """Fill the memory of all targets, after all of what they need is verified."""
        raise NotImplementedError


@dataclass(frozen=True)
class ReadRange:
    """A range of a file that a target needs some of.

    Args:
        byte: where it begins after the header.
        dtype: of its elements.
        span: the range of an array's block that it has.
        target: which needs some of it.
    """

    byte: int
    dtype: torch.dtype
    span: Span
    target: Target

    @property
    def size(self) -> int:
        return (self.span.stop - self.span.start) * self.dtype.itemsize


class IndexedSource(Source):
    """The shares that devices have stored, by their common index.

    Where the shares of devices are, and how they are read, is a matter of the classes below it.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        arrays: dict[str, StoredArray] = {}
        ties: dict[str, str] = {}
        self._entries: dict[str, list[int]] = defaultdict(list)  # several for a fused weight
        for number, entry in enumerate(self.index.arrays):
            self._entries[entry.name].append(number)
            arrays[entry.name] = StoredArray(entry.path, entry.full_shape, entry.dtype)
        for path, first in self.index.ties:
            name = name_of(path)
            arrays[name] = arrays[first]._replace(path=path)
            ties[name] = first
        self.arrays = arrays
        self.ties = ties
        self.values = {name_of(path): (path, value) for path, value in self.index.values}

    def ranges(self, targets: Sequence[Target]) -> dict[int, list[ReadRange]]:
        """Return the ranges to read of the share of each device."""
        shares: dict[int, list[ReadRange]] = defaultdict(list)
        for target in targets:
            for number in self._entries[self.ties.get(target.name, target.name)]:
                dtype = self.index.arrays[number].dtype
                for device, byte, span in self.index.division.ranges(number, target.span):
                    shares[device].append(ReadRange(byte, dtype, span, target))
        return shares


class SavedFolder(IndexedSource):
    """A folder that `fs.save` has written."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        super().__init__(index or read_index(folder))
        self.folder = folder

    def check(self) -> None:
        errors: list[str] = []
        for writer in self.index.writers:
            path = self.folder / writer.data
            size = path.stat().st_size if path.is_file() else "no such file"
            if size != writer.size:
                errors.append(f"{writer.data} must have {writer.size} bytes; got {size}")
            if not (self.folder / writer.manifest).is_file():
                errors.append(f"{writer.manifest} is missing")
        if errors:
            raise CheckpointError(
                f"{self.folder} is not complete: {'; '.join(errors)}. Restore another checkpoint."
            )

    def read(self, targets: Sequence[Target]) -> None:
        files = sorted(self.ranges(targets).items())
        # All files are verified before a target is written: a training state that is in use must
        # not be half of another one.
        self._for_each_file(self._verify, files)
        self._for_each_file(self._copy, files)

    def _for_each_file(
        self,
        act: Callable[[int, Sequence[ReadRange]], None],
        files: Sequence[tuple[int, Sequence[ReadRange]]],
    ) -> None:
        """Read files in threads; raise the errors of all as one."""
        with ThreadPoolExecutor(THREADS) as pool:
            futures = [pool.submit(act, device, ranges) for device, ranges in files]
        errors: list[BaseException] = []
        for future in futures:
            error = future.exception()
            if error is not None:
                errors.append(error)
        if errors:
            raise CheckpointError("\n".join(map(str, errors))) from errors[0]

    def _verify(self, device: int, ranges: Sequence[ReadRange]) -> None:
        """Verify the blocks that targets need of the file of one writer."""
        writer = self.index.writers[device]
        blocks = self._blocks(writer, ranges)
        with closing(self._reader(writer)) as reader:
            for number in sorted(blocks):
                reader.verify(number)

    def _copy(self, device: int, ranges: Sequence[ReadRange]) -> None:
        """Copy the elements that targets need of the file of one writer."""
        writer = self.index.writers[device]
        blocks = self._blocks(writer, ranges)
        with closing(self._reader(writer)) as reader:
            for number in sorted(blocks):
                block = reader.block(number)
                for needed in blocks[number]:
                    _copy_from(block, number * BLOCK - writer.header, needed)

    def _blocks(
        self, writer: WriterFiles, ranges: Sequence[ReadRange]
    ) -> dict[int, list[ReadRange]]:
        """Return the ranges by the number of each block that has some of them."""
        blocks: dict[int, list[ReadRange]] = defaultdict(list)
        for needed in ranges:
            begin = writer.header + needed.byte
            end = begin + needed.size
            if end > writer.size:
                raise CheckpointError(f"{self.folder / writer.data} has no bytes {begin} to {end}.")
            for number in range(begin // BLOCK, (end - 1) // BLOCK + 1):
                blocks[number].append(needed)
        return blocks

    def _reader(self, writer: WriterFiles) -> BlockReader:
        digests = read_manifest(self.folder, writer)
        return BlockReader(self.folder / writer.data, writer.size, digests)


def _copy_from(block: memoryview, begin: int, needed: ReadRange) -> None:
    """Copy the elements that a block of a file, from a byte after the header on, has of a range."""
    itemsize = needed.dtype.itemsize
    # No element is in two blocks: headers, and the ranges before of larger dtypes, keep it aligned.
    start = max(0, (begin - needed.byte) // itemsize)
    stop = min(needed.size, begin + len(block) - needed.byte) // itemsize
    offset = needed.byte + start * itemsize - begin
    values = torch.frombuffer(block, dtype=needed.dtype, count=stop - start, offset=offset)

    span = needed.span.clip(needed.span.start + start, needed.span.start + stop)
    copy(span, values, needed.target.span, needed.target.memory)


def explain_absence(path: Path) -> str:
    """Describe a path that is no checkpoint, for messages."""
    if not path.exists():
        folder = next(parent for parent in path.parents if parent.exists())
        shown = ", ".join(sorted(os.listdir(folder))[:8])
        return f"it does not exist; {folder} has {shown or 'nothing'}"
    if path.is_file():
        return "it is a file"

    names = sorted(os.listdir(path))
    steps = [name for name in names if (path / name / INDEX).is_file()]
    if steps:
        return f"it has the checkpoints {', '.join(steps[:8])}"
    return f"it has no {INDEX}, but {', '.join(names[:8]) or 'nothing'}"
