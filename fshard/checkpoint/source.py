"""Sources of arrays: fshard's own folders, read in ranges; `foreign` has those of other formats, and opens all.

A target names an array, the range of one of its blocks, and the memory for it. A source reads each block of a file once,
verifies it, and copies what each target needs of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fshard.checkpoint.copying import Span, copy
from fshard.checkpoint.files import BLOCK, BlockReader
from fshard.checkpoint.index import INDEX, Index, read_index, read_manifest
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import name_of
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
    into: Tensor


class Source(Protocol):
    """Arrays and values by name, in a file or folder.

    `ties`: arrays that are others under a second name. `partial`: patterns of what it has of a model; None: all.
    """

    @property
    def ties(self) -> Mapping[str, str]: ...

    @property
    def partial(self) -> Sequence[str] | None: ...

    @property
    def arrays(self) -> Mapping[str, StoredArray]: ...

    @property
    def values(self) -> Mapping[str, tuple[TreePath, Any]]: ...

    def check(self) -> None:
        """Raise if what is to be read is not complete."""
        ...

    def read(self, targets: Sequence[Target]) -> None:
        """Fill the memory of all targets, after all of what they need is verified."""
        ...


@dataclass(frozen=True)
class ReadRange:
    """A range of a file that a target needs some of: of an array's block, from one byte after the header on."""

    byte: int
    dtype: torch.dtype
    span: Span
    target: Target

    @cached_property
    def size(self) -> int:
        return (self.span.stop - self.span.start) * self.dtype.itemsize


class OwnFolder:
    """A folder that `fs.save` has written."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder, self.index = folder, index or read_index(folder)
        self._entries: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(self.index.arrays):
            self._entries[one.name].append(number)
        first = {name: self.index.arrays[numbers[0]] for name, numbers in self._entries.items()}
        self.arrays = {name: StoredArray(one.path, one.full_shape, one.dtype) for name, one in first.items()}
        self.arrays |= {name_of(path): self.arrays[of]._replace(path=path) for path, of in self.index.ties}
        self.values = {name_of(path): (path, value) for path, value in self.index.values}
        self.ties, self.partial = {name_of(path): of for path, of in self.index.ties}, None

    def check(self) -> None:
        wrong = list[str]()
        for one in self.index.writers:
            path = self.folder / one.data
            size = path.stat().st_size if path.is_file() else None
            if size != one.size:
                wrong.append(f"{one.data} must have {one.size} bytes; got {'no such file' if size is None else size}")
            if not (self.folder / one.manifest).is_file():
                wrong.append(f"{one.manifest} is missing")
        if wrong:
            raise CheckpointError(f"{self.folder} is not complete: {'; '.join(wrong)}. Restore another checkpoint.")

    def parts(self, targets: Sequence[Target]) -> dict[int, list[ReadRange]]:
        """Return the ranges to read of the file of each writer."""
        found: dict[int, list[ReadRange]] = defaultdict(list)
        for target in targets:
            for number in self._entries[self.ties.get(target.name, target.name)]:
                dtype = self.index.arrays[number].dtype
                for device, byte, span in self.index.division.ranges(number, target.span):
                    found[device].append(ReadRange(byte, dtype, span, target))
        return found

    def read(self, targets: Sequence[Target]) -> None:
        files = self.parts(targets)
        for copies in (False, True):
            with ThreadPoolExecutor(THREADS) as pool:
                done = [pool.submit(self._read_file, *file, copies) for file in sorted(files.items())]
            if failed := [error for one in done if (error := one.exception())]:
                raise CheckpointError("\n".join(map(str, failed))) from failed[0]

    @torch.no_grad()
    def _read_file(self, device: int, parts: Sequence[ReadRange], copies: bool) -> None:
        """Verify, or copy, what targets need of the file of one writer."""
        writer = self.index.writers[device]
        in_block: dict[int, list[ReadRange]] = defaultdict(list)
        for part in parts:
            begin = writer.header + part.byte
            if begin + part.size > writer.size:
                raise CheckpointError(f"{self.folder / writer.data} has no bytes {begin} to {begin + part.size}.")
            for number in range(begin // BLOCK, (begin + part.size - 1) // BLOCK + 1):
                in_block[number].append(part)
        reader = BlockReader(self.folder / writer.data, writer.size, read_manifest(self.folder, writer))
        try:
            for number, inside in sorted(in_block.items()):
                if not copies:
                    reader.verify(number)
                    continue
                block = reader.block(number)
                for part in inside:
                    _copy_from(block, number * BLOCK - writer.header, part)
        finally:
            reader.close()


def _copy_from(block: memoryview, begin: int, part: ReadRange) -> None:
    """Copy what a block of a file, from a byte after the header on, has of a part."""
    each = part.dtype.itemsize
    first = max(0, (begin - part.byte) // each)
    last = min(part.size // each, (begin + len(block) - part.byte) // each)
    place = part.byte + first * each - begin
    values = torch.frombuffer(block, dtype=part.dtype, count=last - first, offset=place)
    copy(part.span.part(part.span.start + first, part.span.start + last), values, part.target.span, part.target.into)


def what_is_there(path: Path) -> str:
    """Describe a path that is no checkpoint, for messages."""
    if not path.exists():
        near = path.parent
        while not near.exists():
            near = near.parent
        found = ", ".join(sorted(one.name for one in near.iterdir())[:8]) or "nothing"
        return f"it does not exist; {near} has {found}"
    if path.is_file():
        return "it is a file"
    names = sorted(one.name for one in path.iterdir())
    steps = [name for name in names if (path / name / INDEX).is_file()]
    if steps:
        return f"it has the checkpoints {', '.join(steps[:8])}"
    return f"it has no {INDEX}, but {', '.join(names[:8]) or 'nothing'}"
