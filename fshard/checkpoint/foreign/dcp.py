"""Read folders of torch.distributed.checkpoint. Their metadata is a pickle, read without torch's classes: it runs no code."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fshard.checkpoint.foreign.mapped import ForeignFiles, Found, read_bytes, refuse_outside, torch_load
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import leaves_of
from fshard.checkpoint.source import Stored
from fshard.errors import CheckpointError

METADATA = ".metadata"
_Place = tuple[Path, int, int]
"""A file, the first byte, and the number of bytes."""


def dcp_folder(folder: Path) -> ForeignFiles:
    """Return the arrays and values of a folder of torch.distributed.checkpoint."""
    data = read_bytes(folder / METADATA)
    arrays, values = list[Found](), list[tuple[TreePath, Any]]()
    try:
        found = _unpickled(data)
        places, paths = _places(folder, found.storage_data), found.planner_data or {}
        for name, one in found.state_dict_metadata.items():
            path = tuple([entry for entry in paths.get(name, (name,)) if isinstance(entry, str | int)])
            if hasattr(one, "chunks"):
                arrays.append(_array(path, one, places[name]))
            else:
                inner = leaves_of(torch_load(*places[name][()]))
                values += [((*path, *leaf.path), leaf.value) for leaf in inner]
    except CheckpointError:
        raise
    except Exception as error:  # of pickle, or of a record without a field
        text = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder / METADATA} must be of torch.distributed.checkpoint; got {text}.") from None
    return ForeignFiles(arrays, values)


def _places(folder: Path, found: Mapping[Any, Any]) -> Mapping[str, Mapping[Any, _Place]]:
    """Return where the chunks of each array are, by their first index."""
    names, wrong = {at.relative_path for at in found.values()}, list[str]()
    refuse_outside(folder / METADATA, names)
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else 0 for name in names}
    places: dict[str, dict[Any, _Place]] = defaultdict(dict)
    for key, at in found.items():
        (start, size), room = _counts((at.offset, at.length)), sizes[at.relative_path]
        places[key.fqn][tuple(getattr(key, "offset", None) or ())] = folder / at.relative_path, start, size
        if start + size > room or getattr(at, "transform_descriptors", None):
            wrong.append(f"{key.fqn} at {start} of {at.relative_path}, {size} of {room} bytes")
    if wrong:
        text = "; ".join(wrong[:20])
        raise CheckpointError(f"{folder}: data must be in its files as torch.save writes it; got {text}.")
    return places


def _array(path: TreePath, one: Any, places: Mapping[Any, _Place]) -> Found:
    """Return an array whose chunks fill it."""
    dtype, shape = one.properties.fields[0], _counts(one.size)
    chunks, count = list[Any](), 0
    for each in one.chunks:
        offsets, sizes = _counts(each.offsets), _counts(each.sizes)
        block = tuple([(at, at + size) for at, size in zip(offsets, sizes, strict=True)])
        place = places[offsets if offsets in places else ()]
        is_outside = any(stop > length for (_, stop), length in zip(block, shape, strict=True))
        if is_outside or prod(sizes) * dtype.itemsize > place[2]:
            raise ValueError(f"a chunk of {path} at {offsets} of {sizes} in {place[2]} bytes")
        chunks += [(block or ((0, 1),), partial(_chunk, place, dtype, sizes))] if prod(sizes) else []
        count += prod(sizes)
    if count != prod(shape):
        raise ValueError(f"{path} of {shape} with the chunks {[block for block, _ in chunks]}")
    return Found(Stored(path, shape, dtype), chunks)


def _chunk(place: _Place, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Load the elements of a chunk."""
    x = torch_load(*place)
    if not isinstance(x, Tensor) or (x.dtype, x.shape, x.layout) != (dtype, shape, torch.strided):
        raise CheckpointError(f"{place[0]}: at byte {place[1]} must be {dtype} {shape}; got {x}.")
    return x


def _counts(numbers: Any) -> tuple[int, ...]:
    if any(type(x) is not int or x < 0 for x in numbers):
        raise ValueError(f"the sizes {numbers!r}")
    return tuple(numbers)


def _unpickled(data: bytes) -> Any:
    """Return a pickle as records: of a class, whatever it is, only the fields are read."""

    class Record:  # of this pickle alone, which may change it
        def __init__(self, *_: Any) -> None: ...

        def __setstate__(self, state: Any) -> None:
            vars(self).update(state if isinstance(state, dict) else {"fields": state})

    in_python: Any = pickle._Unpickler  # type: ignore  # which allocates nothing before it has the bytes, but in this:
    acts = {key: act for key, act in in_python.dispatch.items() if key != pickle.BYTEARRAY8[0]}

    class Unpickler(in_python):
        dispatch = acts

        def find_class(self, module: str, name: str) -> Any:
            dtype = vars(torch).get(name) if module == "torch" else None
            known = {"Size": tuple, "OrderedDict": dict}
            return dtype if isinstance(dtype, torch.dtype) else known.get(name, Record)

    return Unpickler(io.BytesIO(data)).load()
