"""Open folders and files of any format: fshard's, safetensors, Hugging Face, torch.save, torch.distributed.checkpoint, peft."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from fshard.checkpoint.files import DTYPES
from fshard.checkpoint.foreign.chunks import (
    Chunk,
    ForeignFiles,
    Found,
    block_of,
    opened,
    placed,
    refuse_outside,
    without_data,
)
from fshard.checkpoint.foreign.dcp import METADATA, dcp_folder
from fshard.checkpoint.index import INDEX
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import is_array, leaves_of, name_of, refuse_repeated
from fshard.checkpoint.source import OwnFolder, Source, Stored, what_is_there
from fshard.errors import CheckpointError
from fshard.mesh.layout.arithmetic import strides

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
PEFT, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_HEADER = 100 << 20
"""Bytes of the longest header that the specification of safetensors allows."""
DTYPE_OF = {**{name: dtype for dtype, name in DTYPES.items() if not dtype.is_complex}, "C64": torch.complex64}


def open_source(path: Path) -> Source:
    """Return the arrays of a folder or file of any format."""
    if path.is_file():
        with opened(path) as file:
            is_zip = file.read(4) == b"PK\3\4"
        return ForeignFiles(*torch_file(path)) if is_zip else ForeignFiles(safetensors_file(path))
    readers: Mapping[str, Callable[[Path], Source]] = {
        INDEX: lambda _: OwnFolder(path),
        METADATA: lambda _: dcp_folder(path),
        SAFETENSORS: lambda file: ForeignFiles(safetensors_file(file)),
        f"{SAFETENSORS}.index.json": lambda file: ForeignFiles(_indexed(file, safetensors_file)),
        TORCH: lambda file: ForeignFiles(*torch_file(file)),
        f"{TORCH}.index.json": lambda file: ForeignFiles(_indexed(file, lambda one: torch_file(one)[0])),
        PEFT: lambda _: _peft_folder(path),
    }
    for name, read in readers.items():
        if (path / name).is_file():
            return read(path / name)
    raise CheckpointError(f"{path} is no checkpoint: {what_is_there(path)}.")


# -- files ------------------------------------------------------------------------------------------------------------


def safetensors_file(path: Path) -> list[Found]:
    """Return the arrays of a safetensors file."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _HEADER):
            raise CheckpointError(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}.")
        header = _object(path, file.read(length))
    header.pop("__metadata__", None)
    wrong = [f"{name}: {str(one)[:80]}" for name, one in header.items() if not _fits(one, size - 8 - length)]
    if wrong:
        text = f"{'; '.join(wrong[:20])} in {size} bytes"
        raise CheckpointError(f"{path}: arrays must have a known dtype and be within the file; got {text}.")
    found = list[Found]()
    for name, one in header.items():
        dtype, shape, start = DTYPE_OF[one["dtype"]], tuple(one["shape"]), 8 + length + one["data_offsets"][0]
        chunk = Chunk(path, start, dtype, block_of(shape), strides(shape or (1,)))
        found.append(Found(Stored((name,), shape, dtype), [chunk]))
    return found


def _fits(entry: Any, room: int) -> bool:
    """Return True if an entry of a header is well formed and within the bytes after the header."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]} if dtype in DTYPE_OF:
            if any(type(x) is not int or x < 0 for x in (*shape, start, stop)):
                return False
            return stop <= room and stop - start == prod(shape) * DTYPE_OF[dtype].itemsize
        case _:
            return False


def torch_file(path: Path) -> tuple[list[Found], list[tuple[TreePath, Any]]]:
    """Return the arrays and values of a file of torch.save."""
    leaves, size = leaves_of(without_data(path)), path.stat().st_size
    refuse_repeated(leaves, str(path))
    found = [
        Found(
            Stored(leaf.path, tuple(leaf.value.shape), leaf.value.dtype), [placed(path, 0, size, leaf.value, leaf.name)]
        )
        for leaf in leaves
        if is_array(leaf.value)
    ]
    return found, [(leaf.path, leaf.value) for leaf in leaves if not is_array(leaf.value)]


def _object(path: Path, text: bytes, *keys: str) -> dict[str, Any]:
    """Return a JSON object that has some keys."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must be JSON; got {type(error).__name__}: {error}.") from None
    if not isinstance(found, dict) or not {*keys} <= found.keys():
        raise CheckpointError(f"{path} must be an object with {keys}; got {str(found)[:80]}.")
    return found


# -- folders ----------------------------------------------------------------------------------------------------------


def _indexed(index: Path, read: Callable[[Path], Sequence[Found]]) -> list[Found]:
    """Return the arrays of all files that an index of Hugging Face names."""
    where = _object(index, index.read_bytes(), "weight_map")["weight_map"]
    if not isinstance(where, dict):
        raise CheckpointError(f"{index}: weight_map must have the file of each name; got {str(where)[:80]}.")
    refuse_outside(index, where.values())
    files = dict.fromkeys(where.values())
    lost = [file for file in files if not (index.parent / file).is_file()]
    found = {(file, name_of(one.stored.path)): one for file in files if not lost for one in read(index.parent / file)}
    lost = lost or [f"{name} in {file}" for name, file in where.items() if (file, name) not in found]
    if lost:
        raise CheckpointError(f"{index} names what is not there: {', '.join(lost[:20])}.")
    return [found[file, name] for name, file in where.items()]


def _peft_folder(folder: Path) -> ForeignFiles:
    """Return the LoRA weights of an adapter of peft, by the names that `fs.nn.lora` gives them."""
    config = _object(folder / PEFT_CONFIG, (folder / PEFT_CONFIG).read_bytes(), "peft_type")
    unfit = [
        f"{key}={config[key]!r}"
        for key in ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
        if config.get(key)
    ]
    if config["peft_type"] != "LORA" or unfit:
        text = ", ".join([str(config["peft_type"]), *unfit])
        raise CheckpointError(f"{folder} must be a LoRA adapter of one rank, with alpha / r as its scale; got {text}.")
    stored = [(_of_peft(name_of(one.stored.path)), one) for one in safetensors_file(folder / PEFT)]
    found = [Found(one.stored._replace(path=(name,)), one.chunks) for name, one in stored]
    return ForeignFiles(found, partial=["**.lora_A", "**.lora_B", *(name for name, _ in stored)])


def _of_peft(name: str) -> str:
    """Return the name in a model of `fs.nn.lora`.

    >>> _of_peft("base_model.model.h.0.q.lora_A.weight"), _of_peft("base_model.model.wte.lora_embedding_B")
    ('h.0.q.lora_A', 'wte.lora_B')
    """
    name = name.removeprefix("base_model.model.").replace(".lora_embedding_", ".lora_")
    return name.removesuffix(".weight") if name.endswith((".lora_A.weight", ".lora_B.weight")) else name
