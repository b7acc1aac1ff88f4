"""Folders and files of other libraries as sources, read by the libraries that own their formats.

    safetensors, Hugging Face, peft    arrays are mapped into memory: only what is copied is read
    torch.save                         the same, with weights_only=True
    torch.distributed.checkpoint       one array at a time, if the folder is trusted

The metadata of torch.distributed.checkpoint is a pickle, which can run any code when it is read. So
it is read only if it is trusted, and only in folders without another format.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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

SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
DCP = ".metadata"
PEFT = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"


def open_source(path: Path, *, trust: bool = False) -> Source:
    """Return the arrays of a folder or file of any format.

    One of a format that can run code is read only if `trust` is True.
    """
    if path.is_file():
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\3\4"
        with _named_errors(path):
            return _torch_file(path) if is_zip else _safetensors_file(path)

    for name, read in _READERS.items():
        file = path / name
        if file.is_file():
            with _named_errors(file):
                return read(file)

    metadata = path / DCP
    if metadata.is_file():
        if not trust:
            raise CheckpointError(
                f"{path} must be trusted to be read; its {DCP} is a pickle of "
                "torch.distributed.checkpoint, which can run any code. If you know who wrote it, "
                "give trust=True to fs.restore, or --trust to fshard checkpoint verify or convert."
            )
        with _named_errors(metadata):
            return _distributed_checkpoint(metadata)
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
        arrays: dict[str, StoredArray] = {}
        values: dict[str, tuple[TreePath, Any]] = {}
        ties: dict[str, str] = {}
        self._load: dict[str, Callable[[], Tensor]] = {}
        for array, load in loaders:
            name = name_of(array.path)
            arrays[name] = array
            self._load[name] = load

        firsts: dict[Any, str] = {}
        for leaf in leaves:
            name = leaf.name
            x = leaf.value
            if not isinstance(x, Tensor):
                values[name] = leaf.path, x
                continue
            arrays[name] = StoredArray(leaf.path, tuple(x.shape), x.dtype)
            self._load[name] = x.detach
            # Tied tensors are one memory; those without elements may share an address by chance.
            key = (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.numel() else name
            first = firsts.setdefault(key, name)
            if first != name:
                ties[name] = first
        self.arrays = arrays
        self.values = values
        self.ties = ties
        self.partial = partial

    def read(self, targets: Sequence[Target]) -> None:
        targets_of: dict[str, list[Target]] = defaultdict(list)
        for target in targets:
            targets_of[target.name].append(target)

        # All arrays are loaded once before any target is written: a file may be broken. They are
        # loaded again, since all at once may not fit into memory.
        for name in targets_of:
            self._load[name]()
        for name, array_targets in targets_of.items():
            span = full_span(self.arrays[name].shape)
            values = self._load[name]().reshape(-1)
            for target in array_targets:
                copy(span, values, target.span, target.memory)
            del values  # else it lives while the next array is loaded


def _by_name(tensors: Mapping[str, Tensor]) -> list[NamedLeaf]:
    return [NamedLeaf((name,), x) for name, x in tensors.items()]


# -- safetensors and torch.save ---------------------------------------------------------------------------------------


def _safetensors_file(path: Path) -> ForeignFiles:
    return ForeignFiles(_by_name(load_file(path)))


def _safetensors_files(index: Path) -> ForeignFiles:
    return ForeignFiles(_by_name(_indexed(index, load_file)))


def _torch_file(path: Path) -> ForeignFiles:
    return ForeignFiles(_torch_leaves(path))


def _torch_files(index: Path) -> ForeignFiles:
    return ForeignFiles(_by_name(_indexed(index, _torch_load)))


def _indexed(index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all files that an index of Hugging Face names."""
    file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
    outside = [repr(file) for file in file_of.values() if Path(file).name != file]
    if outside:
        raise CheckpointError(
            f"{index}: files must be in its folder; got {', '.join(outside[:20])}."
        )

    tensors: dict[str, Mapping[str, Tensor]] = {}
    for file in dict.fromkeys(file_of.values()):
        if (index.parent / file).is_file():
            tensors[file] = read(index.parent / file)
    missing: list[str] = []
    for name, file in file_of.items():
        if name not in tensors.get(file, {}):
            missing.append(f"{name} in {file}")
    if missing:
        raise CheckpointError(f"{index} names what is not there: {', '.join(missing[:20])}.")
    return {name: tensors[file][name] for name, file in file_of.items()}


def _torch_load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _torch_leaves(path: Path) -> list[NamedLeaf]:
    """Return the leaves of a file of torch.save; raise unless its tensors are dense."""
    leaves = leaves_of(_torch_load(path))
    validate_unique(leaves, str(path))
    unfit: list[str] = []
    for leaf in leaves:
        x = leaf.value
        if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_quantized):
            unfit.append(f"{leaf.name} is {x.layout}")
    if unfit:
        raise CheckpointError(f"{path}: tensors must be dense; got {', '.join(unfit[:20])}.")
    return leaves


# -- peft -------------------------------------------------------------------------------------------------------------


def _peft(path: Path) -> ForeignFiles:
    """Return the LoRA weights of an adapter of peft, by the names that `fs.nn.lora` gives them."""
    config = json.loads(path.with_name(PEFT_CONFIG).read_text())
    options = ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
    unfit = [f"{key}={config[key]!r}" for key in options if config.get(key)]
    if config["peft_type"] != "LORA" or unfit:
        actual = ", ".join([str(config["peft_type"]), *unfit])
        raise CheckpointError(
            f"{path.parent} must be a LoRA adapter of one rank, with alpha / r as its scale; "
            f"got {actual}."
        )
    tensors = {_lora_name(name): x for name, x in load_file(path).items()}
    return ForeignFiles(_by_name(tensors), partial=["**.lora_A", "**.lora_B", *tensors])


def _lora_name(name: str) -> str:
    """Return the name of a weight in `fs.nn.lora`, from peft's.

    >>> _lora_name("base_model.model.layers.0.q_proj.lora_A.weight")
    'layers.0.q_proj.lora_A'
    """
    name = name.removeprefix("base_model.model.").replace(".lora_embedding_", ".lora_")
    if name.endswith((".lora_A.weight", ".lora_B.weight")):
        return name.removesuffix(".weight")
    return name


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


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

    def load_array(name: str, array: StoredArray) -> Tensor:
        return load({name: torch.empty(array.shape, dtype=array.dtype)})[name]

    # Without planner data the names are paths of one entry.
    paths = {name: tuple(path) for name, path in (metadata.planner_data or {}).items()}
    loaders: list[tuple[StoredArray, Callable[[], Tensor]]] = []
    value_names: list[str] = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            array = StoredArray(paths.get(name, (name,)), tuple(entry.size), entry.properties.dtype)
            loaders.append((array, partial(load_array, name, array)))
        else:
            value_names.append(name)

    values = load(dict.fromkeys(value_names))
    leaves: list[NamedLeaf] = []
    for name in value_names:
        for x in leaves_of(values[name]):  # a value may be a tree, with tensors too
            leaves.append(NamedLeaf((*paths.get(name, (name,)), *x.path), x.value))
    return ForeignFiles(leaves, loaders)


_READERS: Mapping[str, Callable[[Path], Source]] = {
    INDEX: lambda index: SavedFolder(index.parent),
    SAFETENSORS: _safetensors_file,
    f"{SAFETENSORS}.index.json": _safetensors_files,
    TORCH: _torch_file,
    f"{TORCH}.index.json": _torch_files,
    PEFT: _peft,
}
"""The readers of formats that run no code, by the file that a folder of the format has."""
