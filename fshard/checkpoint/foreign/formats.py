"""Folders and files of any format as sources: safetensors, Hugging Face, peft, torch.save, torch.distributed.checkpoint.

Arrays are mapped into memory: only what is copied is read. No file is trusted: offsets are compared with the size of a file,
what torch.save wrote is read with `weights_only`, and a pickle of metadata as plain records, so that no code runs.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from fshard.checkpoint.copying import Block, Span, are_tiles, copy, overlap
from fshard.checkpoint.files import DTYPES
from fshard.checkpoint.index import INDEX
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import is_array, leaves_of, name_of, validate_unique
from fshard.checkpoint.source import OwnFolder, Source, StoredArray, Target, what_is_there
from fshard.errors import CheckpointError

SAFETENSORS, TORCH, DCP = "model.safetensors", "pytorch_model.bin", ".metadata"
PEFT, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
DTYPE_OF = {**{name: dtype for dtype, name in DTYPES.items() if not dtype.is_complex}, "C64": torch.complex64}
_HEADER = 100 << 20
"""Bytes of the longest header that the specification of safetensors allows."""
_KINDS = {
    DCP: "of torch.distributed.checkpoint",
    f"{SAFETENSORS}.index.json": "an index: its weight_map must have the file of each name",
    f"{TORCH}.index.json": "an index: its weight_map must have the file of each name",
    PEFT: f"an adapter of peft, beside {PEFT_CONFIG}",
}
_Values = list[tuple[TreePath, Any]]
_FileRange = tuple[Path, int, int]
"""A file, the first byte, and the number of bytes."""


def open_source(path: Path) -> Source:
    """Return the arrays of a folder or file of any format."""
    readers: Mapping[str, Callable[[Path], Source]] = {
        INDEX: lambda _: OwnFolder(path),
        DCP: _dcp,
        SAFETENSORS: lambda file: ForeignFiles(_safetensors(file)),
        f"{SAFETENSORS}.index.json": lambda file: ForeignFiles(_indexed(file, _safetensors)),
        TORCH: lambda file: ForeignFiles(*_torch_file(file)),
        f"{TORCH}.index.json": lambda file: ForeignFiles(_indexed(file, lambda one: _torch_file(one)[0])),
        PEFT: _peft,
    }
    if path.is_file():
        with _named_errors(path, "a safetensors file"):
            return readers[TORCH if _read(path, 0, 4) == b"PK\3\4" else SAFETENSORS](path)
    for name, read in readers.items():
        if (path / name).is_file():
            with _named_errors(path / name, _KINDS.get(name, "a safetensors file")):
                return read(path / name)
    raise CheckpointError(f"{path} is no checkpoint: {what_is_there(path)}.")


@contextmanager
def _named_errors(path: Path, what: str) -> Generator[None]:
    """Raise any error as one that names a file and what it must be."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception as error:  # of zipfile, pickle, JSON or torch, by what is wrong
        text = str(error).partition("\n")[0].removesuffix(".")
        raise CheckpointError(f"{path} must be {what}; got {type(error).__name__}: {text}.") from None


class ForeignArray(NamedTuple):
    """An array and its blocks: one mapped tensor, or functions that load them."""

    stored: StoredArray
    blocks: Sequence[tuple[Block, Tensor | Callable[[], Tensor]]]


class ForeignFiles:
    """A source: arrays in files that were checked when they were opened, and values."""

    def __init__(
        self, found: Iterable[ForeignArray], values: _Values | None = None, partial: Sequence[str] | None = None
    ) -> None:
        known = {name_of(one.stored.path): one for one in found}
        self.arrays = {name: one.stored for name, one in known.items()}
        self.values = {name_of(path): (path, value) for path, value in values or ()}
        self.ties, self.partial = dict[str, str](), partial
        self._blocks, first = {name: one.blocks for name, one in known.items()}, dict[Any, str]()
        for name, blocks in self._blocks.items():
            x = blocks[0][1] if blocks else None
            if isinstance(x, Tensor) and x.numel():
                of = first.setdefault((x.data_ptr(), x.dtype, x.shape, x.stride()), name)
                self.ties.update({name: of} if of != name else {})

    def check(self) -> None: ...

    def read(self, targets: Sequence[Target]) -> None:
        for copies in (False, True):
            for name in dict.fromkeys(target.name for target in targets):
                for block, x in self._blocks[name]:
                    span = Span(block, 0, prod(stop - start for start, stop in block))
                    near = [one for one in targets if one.name == name and overlap(span, one.span) != (0, 0)]
                    flat = (x if isinstance(x, Tensor) else x()).reshape(-1) if near else torch.empty(0)
                    for target in near if copies else ():
                        copy(span, flat, target.span, target.into)


def _mapped(path: TreePath, x: Tensor) -> ForeignArray:
    return ForeignArray(StoredArray(path, tuple(x.shape), x.dtype), [(block_of(x.shape), x)])


def block_of(shape: Sequence[int]) -> Block:
    """Return the block of a full array."""
    return tuple([(0, length) for length in shape]) or ((0, 1),)


def views(path: Path, arrays: Iterable[tuple[int, torch.dtype, Sequence[int]]]) -> list[Tensor]:
    """Return the arrays from some bytes of a file on, mapped."""
    mapped: Any = UntypedStorage.from_file(str(path), False, path.stat().st_size)
    made = list[Tensor]()
    for start, dtype, shape in arrays:
        part = mapped[start : start + prod(shape) * dtype.itemsize]
        x: Any = torch.empty(0, dtype=dtype)
        made.append(x.set_(part, 0, shape) if len(part) else x.reshape(shape))
    return made


def _read(path: Path, start: int = 0, size: int = -1) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


def _validate_inside(by: Path, files: Iterable[Any]) -> None:
    """Raise if names are not those of files in the folder of the file that has them."""
    outside = [file for file in files if not isinstance(file, str) or file in ("", ".", "..") or {*"/\\\0"} & {*file}]
    if outside:
        raise CheckpointError(f"{by}: files must be in its folder; got {', '.join(map(repr, outside[:20]))}.")


# -- safetensors, Hugging Face, peft ----------------------------------------------------------------------------------


def _safetensors(path: Path) -> list[ForeignArray]:
    length, size = int.from_bytes(_read(path, 0, 8), "little"), path.stat().st_size
    if not 2 <= length <= min(size - 8, _HEADER):
        raise CheckpointError(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}.")
    header, begin = json.loads(_read(path, 8, length)), 8 + length
    header.pop("__metadata__", None)
    wrong = [f"{name}: {str(one)[:80]}" for name, one in header.items() if not _fits(one, size - begin)]
    if wrong:
        text = f"{'; '.join(wrong[:20])} in {size} bytes"
        raise CheckpointError(f"{path}: arrays must have a known dtype and be within the file; got {text}.")
    ranges = [(begin + one["data_offsets"][0], DTYPE_OF[one["dtype"]], one["shape"]) for one in header.values()]
    return [_mapped((name,), x) for name, x in zip(header, views(path, ranges), strict=True)]


def _fits(entry: Any, available: int) -> bool:
    """Return True if an entry of a header is well formed and within the bytes after the header."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]} if dtype in DTYPE_OF:
            are_counts = all(type(x) is int and x >= 0 for x in (*shape, start, stop))
            return are_counts and stop <= available and stop - start == prod(shape) * DTYPE_OF[dtype].itemsize
        case _:
            return False


def _indexed(index: Path, read: Callable[[Path], Sequence[ForeignArray]]) -> list[ForeignArray]:
    """Return the arrays of all files that an index of Hugging Face names."""
    where: dict[str, str] = json.loads(_read(index))["weight_map"]
    _validate_inside(index, where.values())
    files = dict.fromkeys(where.values())
    lost = [file for file in files if not (index.parent / file).is_file()]
    found = {(file, name_of(one.stored.path)): one for file in files if not lost for one in read(index.parent / file)}
    lost = lost or [f"{name} in {file}" for name, file in where.items() if (file, name) not in found]
    if lost:
        raise CheckpointError(f"{index} names what is not there: {', '.join(lost[:20])}.")
    return [found[file, name] for name, file in where.items()]


def _peft(path: Path) -> ForeignFiles:
    """Return the LoRA weights of an adapter of peft, by the names that `fs.nn.lora` gives them."""
    config = json.loads(_read(path.with_name(PEFT_CONFIG)))
    others = ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
    unfit = [f"{key}={config[key]!r}" for key in others if config.get(key)]
    if config["peft_type"] != "LORA" or unfit:
        text = f"{path.parent} must be a LoRA adapter of one rank, with alpha / r as its scale"
        raise CheckpointError(f"{text}; got {', '.join([str(config['peft_type']), *unfit])}.")
    found = list[ForeignArray]()
    for stored, blocks in _safetensors(path):
        name = name_of(stored.path).removeprefix("base_model.model.").replace(".lora_embedding_", ".lora_")
        name = name.removesuffix(".weight") if name.endswith((".lora_A.weight", ".lora_B.weight")) else name
        found.append(ForeignArray(stored._replace(path=(name,)), blocks))
    return ForeignFiles(found, partial=["**.lora_A", "**.lora_B", *(one.stored.path[0] for one in found)])


# -- torch.save, torch.distributed.checkpoint -------------------------------------------------------------------------


def _torch_load(path: Path, start: int = 0, size: int | None = None) -> Any:
    """Load a file of torch.save, mapped; or a range of it, in memory."""
    with _named_errors(path, "a file that torch.load reads with weights_only=True, of tensors and plain values"):
        part: Any = path if size is None else io.BytesIO(_read(path, start, size))
        with zipfile.ZipFile(part) as archive:
            if any(one.compress_type or one.file_size > path.stat().st_size for one in archive.infolist()):
                raise ValueError("it is compressed")
        if size is not None:
            part.seek(0)
        return torch.load(part, map_location="cpu", weights_only=True, mmap=size is None)


def _torch_file(path: Path) -> tuple[list[ForeignArray], _Values]:
    leaves, size = leaves_of(_torch_load(path)), path.stat().st_size
    validate_unique(leaves, str(path))
    arrays = [(leaf.path, leaf.value) for leaf in leaves if is_array(leaf.value)]
    for at, x in arrays:
        if x.layout != torch.strided or x.is_quantized or x.device.type != "cpu" or x.numel() * x.itemsize > size:
            text = f"{tuple(x.shape)} of {x.dtype}, {x.layout}, quantized: {x.is_quantized}, on {x.device}"
            raise CheckpointError(f"{path}: {name_of(at)} must be within {size} bytes, and strided; got {text}.")
    values = [(leaf.path, leaf.value) for leaf in leaves if not is_array(leaf.value)]
    return [_mapped(at, x.detach()) for at, x in arrays], values


def _dcp(path: Path) -> ForeignFiles:
    found, arrays, values = _records(_read(path)), list[ForeignArray](), list[tuple[TreePath, Any]]()
    ranges, paths = _ranges_of(path, found.storage_data), found.planner_data or {}
    for name, one in found.state_dict_metadata.items():
        at = tuple([entry for entry in paths.get(name, (name,)) if isinstance(entry, str | int)])
        if hasattr(one, "chunks"):
            arrays.append(_dcp_array(at, one, ranges[name]))
        else:
            leaves = [((*at, *leaf.path), leaf.value) for leaf in leaves_of(_torch_load(*ranges[name][()]))]
            arrays += [_mapped(place, x) for place, x in leaves if is_array(x)]
            values += [(place, x) for place, x in leaves if not is_array(x)]
    return ForeignFiles(arrays, values)


def _ranges_of(path: Path, found: Mapping[Any, Any]) -> Mapping[str, Mapping[Any, _FileRange]]:
    """Return where the chunks of each array are, by their first index."""
    names, wrong = {at.relative_path for at in found.values()}, list[str]()
    _validate_inside(path, names)
    sizes = {name: (path.parent / name).stat().st_size if (path.parent / name).is_file() else 0 for name in names}
    ranges: dict[str, dict[Any, _FileRange]] = defaultdict(dict)
    for key, at in found.items():
        (start, size), available = _counts((at.offset, at.length)), sizes[at.relative_path]
        ranges[key.fqn][tuple(getattr(key, "offset", None) or ())] = path.parent / at.relative_path, start, size
        if start + size > available or getattr(at, "transform_descriptors", None):
            wrong.append(f"{key.fqn} at {start} of {at.relative_path}, {size} of {available} bytes")
    if wrong:
        text = "; ".join(wrong[:20])
        raise CheckpointError(f"{path.parent}: data must be in its files as torch.save writes it; got {text}.")
    return ranges


def _dcp_array(path: TreePath, one: Any, ranges: Mapping[Any, _FileRange]) -> ForeignArray:
    """Return an array whose chunks fill it."""
    dtype, shape = one.properties.fields[0], _counts(one.size)
    chunks = list[Any]()
    for each in one.chunks:
        offsets, sizes = _counts(each.offsets), _counts(each.sizes)
        block = tuple([(at, at + size) for at, size in zip(offsets, sizes, strict=True)])
        place = ranges[offsets if offsets in ranges else ()]
        is_outside = any(stop > length for (_, stop), length in zip(block, shape, strict=True))
        if is_outside or prod(sizes) * dtype.itemsize > place[2]:
            raise ValueError(f"a chunk of {path} at {offsets} of {sizes} in {place[2]} bytes")
        chunks += [(block or ((0, 1),), partial(_chunk, place, dtype, sizes))] if prod(sizes) else []
    if not are_tiles([block for block, _ in chunks], shape or (1,)):
        raise ValueError(f"{path} of {shape} with the chunks {[block for block, _ in chunks]}")
    return ForeignArray(StoredArray(path, shape, dtype), chunks)


def _chunk(at: _FileRange, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Load the elements of a chunk."""
    x = _torch_load(*at)
    if not isinstance(x, Tensor) or (x.dtype, x.shape, x.layout) != (dtype, shape, torch.strided):
        raise CheckpointError(f"{at[0]}: at byte {at[1]} must be {dtype} {shape}; got {x}.")
    return x


def _counts(numbers: Any) -> tuple[int, ...]:
    if any(type(x) is not int or x < 0 for x in numbers):
        raise ValueError(f"the sizes {numbers!r}")
    return tuple(numbers)


def _records(data: bytes) -> Any:
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
            return dtype if isinstance(dtype, torch.dtype) else {"Size": tuple, "OrderedDict": dict}.get(name, Record)

    return Unpickler(io.BytesIO(data)).load()
