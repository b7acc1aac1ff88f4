"""Arrays in the files of other libraries, mapped into memory: only what is copied is read.

No file is trusted: places are compared with the size of a file, and what torch.save wrote is read with `weights_only`.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from fshard.checkpoint.copying import Span, copy, overlap
from fshard.checkpoint.division import Block
from fshard.checkpoint.files import DTYPES
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import is_array, leaves_of, name_of, refuse_repeated
from fshard.checkpoint.source import Stored, Target
from fshard.errors import CheckpointError

DTYPE_OF = {**{name: dtype for dtype, name in DTYPES.items() if not dtype.is_complex}, "C64": torch.complex64}
_HEADER = 100 << 20
"""Bytes of the longest header that the specification of safetensors allows."""


class Found(NamedTuple):
    """An array and its blocks: a mapped tensor, or functions that load them."""

    stored: Stored
    blocks: Sequence[tuple[Block, Tensor | Callable[[], Tensor]]]


class ForeignFiles:
    """A source: arrays in files that were checked when they were opened, and values."""

    def __init__(
        self, found: Iterable[Found], values: Iterable[tuple[TreePath, Any]] = (), partial: Sequence[str] | None = None
    ) -> None:
        known = {name_of(one.stored.path): one for one in found}
        self.arrays = {name: one.stored for name, one in known.items()}
        self.values = {name_of(path): (path, value) for path, value in values}
        self._blocks, self.partial = {name: one.blocks for name, one in known.items()}, partial
        first, self.ties = dict[Any, str](), dict[str, str]()
        for name, blocks in self._blocks.items():
            x = blocks[0][1] if blocks else None
            if isinstance(x, Tensor) and x.numel():
                of = first.setdefault((x.data_ptr(), x.dtype, x.shape, x.stride()), name)
                self.ties.update({name: of} if of != name else {})

    def check(self) -> None: ...

    def read(self, targets: Sequence[Target]) -> None:
        for name in dict.fromkeys(target.name for target in targets):
            for block, x in self._blocks[name]:
                span = Span(block, 0, prod(stop - start for start, stop in block))
                near = [one for one in targets if one.name == name and overlap(span, one.span) != (0, 0)]
                flat = (x if isinstance(x, Tensor) else x()).reshape(-1) if near else torch.empty(0)
                for target in near:
                    copy(span, flat, target.span, target.into)


def mapped(path: TreePath, x: Tensor) -> Found:
    """Return an array that is one tensor."""
    return Found(Stored(path, tuple(x.shape), x.dtype), [(block_of(x.shape), x)])


def block_of(shape: Sequence[int]) -> Block:
    """Return the block of a full array."""
    return tuple([(0, length) for length in shape]) or ((0, 1),)


def map_file(path: Path) -> UntypedStorage:
    """Return the bytes of a file, which are read where they are used."""
    return UntypedStorage.from_file(str(path), False, path.stat().st_size)


def view(room: UntypedStorage, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the array at a byte of a mapped file."""
    x, size = torch.empty(0, dtype=dtype), prod(shape) * dtype.itemsize
    return x.set_(room[start : start + size], 0, shape) if size else x.reshape(shape)


def read_bytes(path: Path, start: int = 0, size: int = -1) -> bytes:
    """Return bytes of a file."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def read_object(path: Path, text: bytes, *keys: str) -> dict[str, Any]:
    """Return a JSON object that has some keys."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must be JSON; got {type(error).__name__}: {error}.") from None
    if not isinstance(found, dict) or not {*keys} <= found.keys():
        raise CheckpointError(f"{path} must be an object with {keys}; got {str(found)[:80]}.")
    return found


def refuse_outside(by: Path, files: Iterable[Any]) -> None:
    """Raise if names are not those of files in the folder of the file that has them."""
    outside = [file for file in files if not isinstance(file, str) or file in ("", ".", "..") or {*"/\\\0"} & {*file}]
    if outside:
        raise CheckpointError(f"{by}: files must be in its folder; got {', '.join(map(repr, outside[:20]))}.")


def safetensors_file(path: Path) -> list[Found]:
    """Return the arrays of a safetensors file."""
    length, size = int.from_bytes(read_bytes(path, 0, 8), "little"), path.stat().st_size
    if not 2 <= length <= min(size - 8, _HEADER):
        raise CheckpointError(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}.")
    header, begin = read_object(path, read_bytes(path, 8, length)), 8 + length
    header.pop("__metadata__", None)
    wrong = [f"{name}: {str(one)[:80]}" for name, one in header.items() if not _fits(one, size - begin)]
    if wrong:
        text = f"{'; '.join(wrong[:20])} in {size} bytes"
        raise CheckpointError(f"{path}: arrays must have a known dtype and be within the file; got {text}.")
    room = map_file(path)
    parts = [(name, one["data_offsets"][0], DTYPE_OF[one["dtype"]], one["shape"]) for name, one in header.items()]
    return [mapped((name,), view(room, begin + start, dtype, shape)) for name, start, dtype, shape in parts]


def _fits(entry: Any, room: int) -> bool:
    """Return True if an entry of a header is well formed and within the bytes after the header."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]} if dtype in DTYPE_OF:
            are_counts = all(type(x) is int and x >= 0 for x in (*shape, start, stop))
            return are_counts and stop <= room and stop - start == prod(shape) * DTYPE_OF[dtype].itemsize
        case _:
            return False


def torch_load(path: Path, start: int = 0, size: int | None = None) -> Any:
    """Return what torch.save wrote to a file, mapped; or to a range of it, in memory."""
    part: Any = path if size is None else io.BytesIO(read_bytes(path, start, size))
    try:
        with zipfile.ZipFile(part) as archive:
            if any(one.compress_type or one.file_size > path.stat().st_size for one in archive.infolist()):
                raise zipfile.BadZipFile("it is compressed.")
        if size is not None:
            part.seek(0)
        return torch.load(part, map_location="cpu", weights_only=True, mmap=size is None)
    except Exception as error:  # of zipfile, pickle or torch, by what is wrong
        text = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} must be a file that torch.load reads with weights_only=True; got {text} "
            "Save tensors and plain values, such as a state_dict."
        ) from None


def torch_file(path: Path) -> tuple[list[Found], list[tuple[TreePath, Any]]]:
    """Return the arrays and values of a file of torch.save."""
    leaves, size = leaves_of(torch_load(path)), path.stat().st_size
    refuse_repeated(leaves, str(path))
    arrays = [(leaf.path, leaf.value) for leaf in leaves if is_array(leaf.value)]
    for at, x in arrays:
        if x.layout != torch.strided or x.is_quantized or x.device.type != "cpu" or x.numel() * x.itemsize > size:
            text = f"{tuple(x.shape)} of {x.dtype}, {x.layout}, quantized: {x.is_quantized}, on {x.device}"
            raise CheckpointError(f"{path}: {name_of(at)} must be within {size} bytes, and strided; got {text}.")
    return [mapped(at, x.detach()) for at, x in arrays], [
        (leaf.path, leaf.value) for leaf in leaves if not is_array(leaf.value)
    ]
