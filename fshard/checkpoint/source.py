"""Sources of arrays: fshard's own folders, read in ranges; `foreign` has those of other formats, and opens all.

A target names an array, the range of one of its blocks, and the memory for it. A source reads each block of a file once,
verifies it, and copies what each target needs of it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.copying import Span, copy
from fshard.checkpoint.files import BLOCK, BlockReader
from fshard.checkpoint.index import INDEX, Index, read_index, read_manifest
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

    `ties`: arrays that are the same as another, and its name. `partial`: patterns of what it has of a model; None: all.
    """

    arrays: Mapping[str, StoredArray]
    values: Mapping[str, tuple[TreePath, Any]]
    ties: Mapping[str, str]
    partial: Sequence[str] | None = None

    @property
    def paths(self) -> dict[str, TreePath]:
        """The paths of all arrays and values."""
        return {name: path for name, (path, *_) in [*self.arrays.items(), *self.values.items()]}

    def check(self) -> None:
        """Raise if what is to be read is not complete."""

    def read(self, targets: Sequence[Target]) -> None:
        """Fill the memory of all targets, after all of what they need is verified."""
        raise NotImplementedError


@dataclass(frozen=True)
class ReadRange:
    """A range of a file that a target needs some of: of an array's block, from one byte after the header on."""

    byte: int
    dtype: torch.dtype
    span: Span
    target: Target

    @property
    def size(self) -> int:
        return (self.span.stop - self.span.start) * self.dtype.itemsize


class SavedFolder(Source):
    """A folder that `fs.save` has written."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder, self.index = folder, index or read_index(folder)
        self._entries: dict[str, list[int]] = defaultdict(list)
        for number, entry in enumerate(self.index.arrays):
            self._entries[entry.name].append(number)
        arrays = {
            entry.name: StoredArray(entry.path, entry.full_shape, entry.dtype)
            for entry in self.index.arrays
        }
        self.arrays = arrays | {
            name_of(path): arrays[first]._replace(path=path) for path, first in self.index.ties
        }
        self.values = {name_of(path): (path, value) for path, value in self.index.values}
        self.ties = {name_of(path): first for path, first in self.index.ties}

    def check(self) -> None:
        errors = list[str]()
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

    def ranges(self, targets: Sequence[Target]) -> dict[int, list[ReadRange]]:
        """Return the ranges to read of the file of each writer."""
        files: dict[int, list[ReadRange]] = defaultdict(list)
        for target in targets:
            for number in self._entries[self.ties.get(target.name, target.name)]:
                dtype = self.index.arrays[number].dtype
                for device, byte, span in self.index.division.ranges(number, target.span):
                    files[device].append(ReadRange(byte, dtype, span, target))
        return files

    def read(self, targets: Sequence[Target]) -> None:
        files = self.ranges(targets)
        for copies in (False, True):
            with ThreadPoolExecutor(THREADS) as pool:
                futures = [
                    pool.submit(self._read_file, *file, copies) for file in sorted(files.items())
                ]
            if errors := [error for future in futures if (error := future.exception())]:
                raise CheckpointError("\n".join(map(str, errors))) from errors[0]

    @torch.no_grad()
    def _read_file(self, device: int, ranges: Sequence[ReadRange], copies: bool) -> None:
        """Verify, or copy, what targets need of the file of one writer."""
        writer = self.index.writers[device]
        by_block: dict[int, list[ReadRange]] = defaultdict(list)
        for needed in ranges:
            begin = writer.header + needed.byte
            end = begin + needed.size
            if end > writer.size:
                raise CheckpointError(f"{self.folder / writer.data} has no bytes {begin} to {end}.")
            for number in range(begin // BLOCK, (end - 1) // BLOCK + 1):
                by_block[number].append(needed)
        reader = BlockReader(
            self.folder / writer.data, writer.size, read_manifest(self.folder, writer)
        )
        with closing(reader):
            for number in sorted(by_block):
                if not copies:
                    reader.verify(number)
                    continue
                block = reader.block(number)
                for needed in by_block[number]:
                    _copy_from(block, number * BLOCK - writer.header, needed)


def _copy_from(block: memoryview, begin: int, needed: ReadRange) -> None:
    """Copy what a block of a file, from a byte after the header on, has of a range."""
    byte, itemsize, target = needed.byte, needed.dtype.itemsize, needed.target
    start = max(0, (begin - byte) // itemsize)
    stop = min(needed.size // itemsize, (begin + len(block) - byte) // itemsize)
    offset = byte + start * itemsize - begin
    values = torch.frombuffer(block, dtype=needed.dtype, count=stop - start, offset=offset)
    copy(
        needed.span.clip(needed.span.start + start, needed.span.start + stop),
        values,
        target.span,
        target.memory,
    )


def explain_absence(path: Path) -> str:
    """Describe a path that is no checkpoint, for messages."""
    if not path.exists():
        folder = next(parent for parent in path.parents if parent.exists())
        return f"it does not exist; {folder} has {', '.join(sorted(os.listdir(folder))[:8]) or 'nothing'}"
    if path.is_file():
        return "it is a file"
    names = sorted(os.listdir(path))
    if steps := [name for name in names if (path / name / INDEX).is_file()]:
        return f"it has the checkpoints {', '.join(steps[:8])}"
    return f"it has no {INDEX}, but {', '.join(names[:8]) or 'nothing'}"
