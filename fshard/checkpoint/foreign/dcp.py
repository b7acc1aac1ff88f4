"""Read folders of torch.distributed.checkpoint. Their metadata is a pickle, read without torch's classes: it runs no code."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint.foreign.chunks import Chunk, ForeignFiles, Found, opened, refuse_outside, without_data
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import leaves_of
from fshard.checkpoint.source import Stored
from fshard.errors import CheckpointError

METADATA = ".metadata"
_RECORDS = {
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta",
    "MetadataIndex", "_StorageInfo", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "PosixPath", "WindowsPath",
}  # fmt: skip
"""Classes of which only the fields are read."""


def dcp_folder(folder: Path) -> ForeignFiles:
    """Return the arrays and values of a folder of torch.distributed.checkpoint."""
    with opened(folder / METADATA) as file:
        data = file.read()
    try:
        found = _unpickled(data)
        places = _places(folder, found.storage_data)
        paths: Mapping[str, Any] = found.planner_data or {}
        arrays, values = list[Found](), list[tuple[TreePath, Any]]()
        for name, one in found.state_dict_metadata.items():
            path = tuple([entry for entry in paths.get(name, (name,)) if isinstance(entry, str | int)])
            if hasattr(one, "chunks"):
                arrays.append(_array(path, one, places[name]))
            else:
                inner = leaves_of(without_data(*places[name][()]))
                values += [((*path, *leaf.path), leaf.value) for leaf in inner]
    except CheckpointError:
        raise
    except Exception as error:  # of pickle, or of a record without a field
        text = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder / METADATA} must be of torch.distributed.checkpoint; got {text}.") from None
    return ForeignFiles(arrays, values)


def _places(folder: Path, found: Mapping[Any, Any]) -> Mapping[str, Mapping[Any, tuple[Path, int, int]]]:
    """Return file, first byte and size of each chunk, by the name of its array and its first index in that."""
    refuse_outside(folder / METADATA, {at.relative_path for at in found.values()})
    sizes = {name: _size(folder / name) for name in {at.relative_path for at in found.values()}}
    wrong = list[str]()
    places: dict[str, dict[Any, tuple[Path, int, int]]] = defaultdict(dict)
    for key, at in found.items():
        start, size = _counts((at.offset, at.length))
        places[key.fqn][tuple(getattr(key, "offset", None) or ())] = folder / at.relative_path, start, size
        if start + size > sizes[at.relative_path] or getattr(at, "transform_descriptors", None):
            wrong.append(f"{key.fqn} at {start} of {at.relative_path}, {size} of {sizes[at.relative_path]} bytes")
    if wrong:
        raise CheckpointError(
            f"{folder}: data must be in its files as torch.save writes it; got {'; '.join(wrong[:20])}."
        )
    return places


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _array(path: TreePath, one: Any, places: Mapping[Any, tuple[Path, int, int]]) -> Found:
    """Return an array whose chunks fill it."""
    dtype, shape = one.properties.fields[0], _counts(one.size)
    chunks = list[Chunk]()
    for each in one.chunks:
        offsets, sizes = _counts(each.offsets), _counts(each.sizes)
        block = tuple([(at, at + size) for at, size in zip(offsets, sizes, strict=True)])
        file, start, size = places[offsets if offsets in places else ()]
        if (
            any(stop > length for (_, stop), length in zip(block, shape, strict=True))
            or prod(sizes) * dtype.itemsize > size
        ):
            raise ValueError(f"a chunk of {path} at {offsets} of {sizes} in {size} bytes")
        if prod(sizes):
            chunks.append(Chunk(file, start, dtype, block or ((0, 1),), archive=size))
    if sum(prod(chunk.shape) for chunk in chunks) != prod(shape):
        raise ValueError(f"{path} of {shape} with the chunks {[chunk.block for chunk in chunks]}")
    return Found(Stored(path, shape, dtype), chunks)


def _counts(numbers: Any) -> tuple[int, ...]:
    if any(type(x) is not int or x < 0 for x in numbers):
        raise ValueError(f"the sizes {numbers!r}")
    return tuple(numbers)


def _unpickled(data: bytes) -> Any:
    """Return a pickle as records of fields."""

    class Record:
        def __init__(self, *_: Any) -> None: ...

        def __setstate__(self, state: Any) -> None:
            vars(self).update(state if isinstance(state, dict) else {"fields": state})

    known = {
        ("torch", "Size"): tuple,
        ("collections", "OrderedDict"): dict,
        ("torch.serialization", "_get_layout"): Record,
    }
    in_python: Any = pickle._Unpickler  # type: ignore  # which allocates nothing before it has the bytes, but in this:
    acts = {key: act for key, act in in_python.dispatch.items() if key != pickle.BYTEARRAY8[0]}

    class Unpickler(in_python):
        dispatch = acts

        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in known:
                return known[module, name]
            if name in _RECORDS and module.partition(".")[0] in ("torch", "pathlib"):
                return Record
            if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
                return dtype
            raise CheckpointError(
                f"metadata must be of torch.distributed.checkpoint; got a pickle with {module}.{name}."
            )

    return Unpickler(io.BytesIO(data)).load()
