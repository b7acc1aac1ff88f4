"""Sources of arrays: fshard's own folders, read in ranges; `foreign` has those of other formats.

A target names an array, the range of one of its blocks, and the memory for it. A source reads each block of a file once,
verifies it, and copies what each target needs of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fshard.checkpoint.copying import Span, copy
from fshard.checkpoint.files import BLOCK, read_blocks
from fshard.checkpoint.index import INDEX, Index, read_index, read_manifest
from fshard.checkpoint.names import Path as TreePath
from fshard.errors import CheckpointError


class Stored(NamedTuple):
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
    """Arrays and values by name, in a file or folder."""

    @property
    def arrays(self) -> Mapping[str, Stored]: ...

    @property
    def values(self) -> Mapping[str, tuple[TreePath, Any]]: ...

    def check(self) -> None:
        """Raise if what is to be read is not complete."""
        ...

    def read(self, targets: Sequence[Target]) -> None:
        """Fill the memory of all targets."""
        ...


class Part(NamedTuple):
    """A range of a file that a target needs some of: of an array's block, from one byte on."""

    byte: int
    dtype: torch.dtype
    span: Span
    target: Target


class OwnFolder:
    """A folder that `fs.save` has written."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder, self.index = folder, index or read_index(folder)
        self._entries: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(self.index.arrays):
            self._entries[one.name].append(number)
        first = {name: self.index.arrays[numbers[0]] for name, numbers in self._entries.items()}
        self.arrays = {name: Stored(one.path, one.full_shape, one.dtype) for name, one in first.items()}
        for path, (name, of) in zip(self.index.tied_paths, self.index.ties.items(), strict=True):
            self.arrays[name] = Stored(path, *self.arrays[of][1:])
        self.values = {name: (path, value) for name, path, value in self.index.named_values}

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

    def parts(self, targets: Sequence[Target]) -> dict[int, list[Part]]:
        """Return what to read of the file of each writer."""
        found: dict[int, list[Part]] = defaultdict(list)
        for target in targets:
            for number in self._entries[self.index.ties.get(target.name, target.name)]:
                dtype = self.index.arrays[number].dtype
                for device, byte, span in self.index.division.pieces(number, target.span):
                    found[device].append(Part(byte, dtype, span, target))
        return found

    def read(self, targets: Sequence[Target]) -> None:
        for device, parts in sorted(self.parts(targets).items()):
            writer = self.index.writers[device]
            digests = read_manifest(self.folder, writer)
            in_block: dict[int, list[Part]] = defaultdict(list)
            for part in parts:
                size = (part.span.stop - part.span.start) * part.dtype.itemsize
                begin = writer.header + part.byte
                for number in range(begin // BLOCK, (begin + size - 1) // BLOCK + 1):
                    in_block[number].append(part)
            for number, block in read_blocks(self.folder / writer.data, writer.size, digests, sorted(in_block)):
                for part in in_block[number]:
                    _copy_from(block, number * BLOCK - writer.header, part)


def _copy_from(block: memoryview, begin: int, part: Part) -> None:
    """Copy what a block of a file, which begins at a byte after the header, has of a part."""
    each = part.dtype.itemsize
    size = part.span.stop - part.span.start
    first = max(0, (begin - part.byte) // each)
    last = min(size, (begin + len(block) - part.byte) // each)
    place = part.byte + first * each - begin
    values = torch.frombuffer(block, dtype=part.dtype, count=last - first, offset=place)
    copy(part.span.part(part.span.start + first, part.span.start + last), values, part.target.span, part.target.into)


def open_source(path: Path) -> Source:
    """Return the arrays of a folder or file."""
    if (path / INDEX).is_file():
        return OwnFolder(path)
    raise CheckpointError(f"{path} is no checkpoint: {what_is_there(path)}.")


def what_is_there(path: Path) -> str:
    """Return what a path is instead of a checkpoint, for messages."""
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
