"""Folders and files of other libraries as sources, read by the libraries that own their formats.

safetensors, Hugging Face, peft    arrays are mapped into memory: only what is copied is read
torch.save                         the same, with weights_only=True
torch.distributed.checkpoint       one array at a time. Its metadata is a pickle, which can run any code when it is read: only
                                   if it is trusted, and only in folders without another format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fshard.checkpoint.copying import copy, full_span
from fshard.checkpoint.index import INDEX
from fshard.checkpoint.names import NamedLeaf, TreePath, leaves_of, name_of, validate_unique
from fshard.checkpoint.source import SavedFolder, Source, StoredArray, Target, explain_absence
from fshard.errors import CheckpointError

SAFETENSORS, TORCH, DCP = "model.safetensors", "pytorch_model.bin", ".metadata"
PEFT, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def open_source(path: Path, *, trust: bool = False) -> Source:
    """Return the arrays of a folder or file of any format; of one that can run code only if `trust` is True."""
    readers: Mapping[str, Callable[[Path], Source]] = {
        INDEX: lambda _: SavedFolder(path),
        SAFETENSORS: lambda file: ForeignFiles(_by_name(load_file(file))),
        f"{SAFETENSORS}.index.json": lambda file: ForeignFiles(_by_name(_indexed(file, load_file))),
        TORCH: lambda file: ForeignFiles(_torch_leaves(file)),
        f"{TORCH}.index.json": lambda file: ForeignFiles(_by_name(_indexed(file, _torch_load))),
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
    if (path / DCP).is_file():
        if not trust:
            raise CheckpointError(
                f"{path} must be trusted to be read; its {DCP} is a pickle of torch.distributed.checkpoint, which can run "
                "any code. If you know who wrote it, give trust=True to fs.restore, or --trust to fshard checkpoint verify "
                "or convert."
            )
        with _named_errors(path / DCP):
            return _distributed_checkpoint(path / DCP)
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
    """Leaves of foreign files: tensors, values, and arrays that are loaded when they are read."""

    def __init__(
        self,
        leaves: Iterable[NamedLeaf],
        loaders: Sequence[tuple[StoredArray, Callable[[], Tensor]]] = (),
        partial: Sequence[str] | None = None,
    ) -> None:
        self.arrays = {name_of(stored.path): stored for stored, _ in loaders}
        self._load = {name_of(stored.path): load for stored, load in loaders}
        values, ties, firsts = dict[str, tuple[TreePath, Any]](), dict[str, str](), dict[Any, str]()
        for name, path, x in ((leaf.name, leaf.path, leaf.value) for leaf in leaves):
            if not isinstance(x, Tensor):
                values[name] = path, x
                continue
            self.arrays[name], self._load[name] = (
                StoredArray(path, tuple(x.shape), x.dtype),
                x.detach,
            )
            key = (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.numel() else name
            if (first := firsts.setdefault(key, name)) != name:
                ties[name] = first
        self.values, self.ties, self.partial = values, ties, partial

    def read(self, targets: Sequence[Target]) -> None:
        for copies in (False, True):  # all arrays are loaded once before any target is written
            for name in dict.fromkeys(target.name for target in targets):
                x = self._load[name]().reshape(-1)
                span = full_span(self.arrays[name].shape)
                for target in targets if copies else ():
                    if target.name == name:
                        copy(span, x, target.span, target.memory)


def _by_name(tensors: Mapping[str, Tensor]) -> list[NamedLeaf]:
    return [NamedLeaf((name,), x) for name, x in tensors.items()]


def _indexed(index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all files that an index of Hugging Face names."""
    file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
    if outside := [file for file in file_of.values() if Path(file).name != file]:
        raise CheckpointError(
            f"{index}: files must be in its folder; got {', '.join(map(repr, outside[:20]))}."
        )
    files = [index.parent / file for file in dict.fromkeys(file_of.values())]
    tensors = {file.name: read(file) for file in files if file.is_file()}
    missing = [
        f"{name} in {file}" for name, file in file_of.items() if name not in tensors.get(file, {})
    ]
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
        tensors[
            name.removesuffix(".weight")
            if name.endswith((".lora_A.weight", ".lora_B.weight"))
            else name
        ] = x
    return ForeignFiles(_by_name(tensors), partial=["**.lora_A", "**.lora_B", *tensors])


def _torch_load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _torch_leaves(path: Path) -> list[NamedLeaf]:
    leaves = leaves_of(_torch_load(path))
    validate_unique(leaves, str(path))
    tensors = [(leaf.name, leaf.value) for leaf in leaves if isinstance(leaf.value, Tensor)]
    if unfit := [
        f"{name} is {x.layout}"
        for name, x in tensors
        if x.layout != torch.strided or x.is_quantized
    ]:
        raise CheckpointError(f"{path}: tensors must be dense; got {', '.join(unfit[:20])}.")
    return leaves


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

    paths = {name: tuple(path) for name, path in (metadata.planner_data or {}).items()}
    loaders, names = list[tuple[StoredArray, Callable[[], Tensor]]](), list[str]()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            x = StoredArray(paths.get(name, (name,)), tuple(entry.size), entry.properties.dtype)
            loaders.append(
                (x, lambda name=name, x=x: load({name: torch.empty(x.shape, dtype=x.dtype)})[name])
            )
        else:
            names.append(name)
    items = load(dict.fromkeys(names))
    leaves = [
        NamedLeaf((*paths.get(name, (name,)), *x.path), x.value)
        for name in names
        for x in leaves_of(items[name])
    ]
    return ForeignFiles(leaves, loaders)
