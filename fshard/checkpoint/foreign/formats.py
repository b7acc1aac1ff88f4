"""Folders and files of other libraries as sources, read by the libraries that own their formats.

safetensors, Hugging Face, peft    arrays are mapped into memory: only what is copied is read
torch.save                         the same, with weights_only=True
torch.distributed.checkpoint       one array at a time. Its metadata is a pickle, which can run code when it is read, as by
                                   torch itself: restore folders that you trust.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fshard.checkpoint.copying import Span, copy, full_block
from fshard.checkpoint.index import INDEX
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import is_array, leaves_of, name_of, validate_unique
from fshard.checkpoint.source import SavedFolder, Source, StoredArray, Target, explain_absence
from fshard.errors import CheckpointError

SAFETENSORS, TORCH, DCP = "model.safetensors", "pytorch_model.bin", ".metadata"
PEFT, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def open_source(path: Path) -> Source:
    """Return the arrays of a folder or file of any format."""
    readers: Mapping[str, Callable[[Path], Source]] = {
        INDEX: lambda _: SavedFolder(path),
        DCP: _distributed_checkpoint,
        SAFETENSORS: lambda file: ForeignFiles(_tensors_of(load_file(file))),
        f"{SAFETENSORS}.index.json": lambda file: ForeignFiles(_tensors_of(_indexed(file, load_file))),
        TORCH: _torch_file,
        f"{TORCH}.index.json": lambda file: ForeignFiles(_tensors_of(_indexed(file, _torch_load))),
        PEFT: _peft,
    }
    if path.is_file():
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\3\4"
        with _named_errors(path):
            return readers[TORCH if is_zip else SAFETENSORS](path)
    for name, read in readers.items():
        if (path / name).is_file():
            with _named_errors(path / name):
                return read(path / name)
    raise CheckpointError(f"{path} is no checkpoint: {explain_absence(path)}.")


@contextmanager
def _named_errors(path: Path) -> Generator[None]:
    """Raise any error of a library as one that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error).partition("\n")[0].removesuffix(".")
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {text}.") from error


class ForeignFiles(Source):
    """A source: arrays, as mapped tensors or as functions that load them, and values."""

    def __init__(
        self,
        arrays: Iterable[tuple[StoredArray, Tensor | Callable[[], Tensor]]],
        values: Iterable[tuple[TreePath, Any]] = (),
        partial: Sequence[str] | None = None,
    ) -> None:
        self._tensors = {name_of(stored.path): (stored, x) for stored, x in arrays}
        self.arrays = {name: stored for name, (stored, _) in self._tensors.items()}
        self.values = {name_of(path): (path, value) for path, value in values}
        self.ties: dict[str, str] = {}
        self.partial, firsts = partial, dict[Any, str]()
        for name, (_, x) in self._tensors.items():
            if isinstance(x, Tensor) and x.numel():
                first = firsts.setdefault((x.data_ptr(), x.dtype, x.shape, x.stride()), name)
                self.ties.update({name: first} if first != name else {})

    def read(self, targets: Sequence[Target]) -> None:
        for copies in (False, True):  # all arrays are loaded once before any target is written
            for name in dict.fromkeys(target.name for target in targets):
                stored, x = self._tensors[name]
                flat = (x if isinstance(x, Tensor) else x()).reshape(-1)
                for target in targets if copies else ():
                    if target.name == name:
                        copy(Span(full_block(stored.shape), 0, flat.numel()), flat, target.span, target.memory)


def _stored(path: TreePath, x: Tensor) -> tuple[StoredArray, Tensor]:
    return StoredArray(path, tuple(x.shape), x.dtype), x.detach()


def _tensors_of(tensors: Mapping[str, Tensor]) -> list[tuple[StoredArray, Tensor]]:
    return [_stored((name,), x) for name, x in tensors.items()]


def _indexed(index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all files that an index of Hugging Face names."""
    file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
    if outside := [file for file in file_of.values() if Path(file).name != file]:
        raise CheckpointError(f"{index}: files must be in its folder; got {', '.join(map(repr, outside[:20]))}.")
    files = [index.parent / file for file in dict.fromkeys(file_of.values())]
    tensors = {file.name: read(file) for file in files if file.is_file()}
    missing = [f"{name} in {file}" for name, file in file_of.items() if name not in tensors.get(file, {})]
    if missing:
        raise CheckpointError(f"{index} names what is not there: {', '.join(missing[:20])}.")
    return {name: tensors[file][name] for name, file in file_of.items()}


def _peft(path: Path) -> ForeignFiles:
    """Return the LoRA weights of an adapter of peft, by the names that `fs.nn.lora` gives them."""
    config = json.loads(path.with_name(PEFT_CONFIG).read_text())
    options = ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
    unfit = [f"{key}={config[key]!r}" for key in options if config.get(key)]
    if config["peft_type"] != "LORA" or unfit:
        text = f"{path.parent} must be a LoRA adapter of one rank, with alpha / r as its scale"
        raise CheckpointError(f"{text}; got {', '.join([str(config['peft_type']), *unfit])}.")
    tensors = dict[str, Tensor]()
    for name, x in load_file(path).items():
        name = name.removeprefix("base_model.model.").replace(".lora_embedding_", ".lora_")
        tensors[name.removesuffix(".weight") if name.endswith((".lora_A.weight", ".lora_B.weight")) else name] = x
    return ForeignFiles(_tensors_of(tensors), partial=["**.lora_A", "**.lora_B", *tensors])


def _torch_load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _torch_file(path: Path) -> ForeignFiles:
    leaves = leaves_of(_torch_load(path))
    validate_unique(leaves, str(path))
    for leaf in leaves:
        if isinstance(leaf.value, Tensor) and (leaf.value.layout != torch.strided or leaf.value.is_quantized):
            raise CheckpointError(f"{path}: tensors must be dense; {leaf.name} is {leaf.value.layout}.")
    return _files_of((leaf.path, leaf.value) for leaf in leaves)


def _files_of(
    leaves: Iterable[tuple[TreePath, Any]], arrays: Iterable[tuple[StoredArray, Callable[[], Tensor]]] = ()
) -> ForeignFiles:
    """Return a source of leaves, and of arrays that are loaded when they are read."""
    items = [*leaves]
    tensors = [_stored(path, x) for path, x in items if is_array(x)]
    return ForeignFiles([*arrays, *tensors], [(path, x) for path, x in items if not is_array(x)])


def _distributed_checkpoint(path: Path) -> ForeignFiles:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(path.parent)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)

    def load(items: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors of a dict, and replace its other values."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(items, metadata, is_coordinator=True)
        with _named_errors(path.parent):
            reader.read_data(planner.create_local_plan(), planner).wait()
        return items

    def load_array(name: str, stored: StoredArray) -> Tensor:
        return load({name: torch.empty(stored.shape, dtype=stored.dtype)})[name]

    paths = metadata.planner_data or {}
    arrays, names = list[tuple[StoredArray, Callable[[], Tensor]]](), list[str]()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            stored = StoredArray(tuple(paths.get(name, (name,))), tuple(entry.size), entry.properties.dtype)
            arrays.append((stored, partial(load_array, name, stored)))
        else:
            names.append(name)
    items = load(dict.fromkeys(names))
    leaves = [((*paths.get(name, (name,)), *x.path), x.value) for name in names for x in leaves_of(items[name])]
    return _files_of(leaves, arrays)
