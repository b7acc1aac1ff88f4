"""Write parameters as files of other libraries: `fs.export`.

A tree is saved beside the target, and then converted:

    export     all processes save the tree, of LoRA under other names; the first converts it, the
               others wait
    convert    from any source: one array at a time, written aside, fsynced and renamed
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, UntypedStorage, nn

from fshard.checkpoint.copying import full_span
from fshard.checkpoint.files import DTYPES, bytes_of, disk, make_folder, named_errors
from fshard.checkpoint.foreign.formats import PEFT, PEFT_CONFIG, SAFETENSORS
from fshard.checkpoint.form import calling_device
from fshard.checkpoint.names import (
    TreePath,
    build,
    leaves_of,
    mesh_of_some,
    name_of,
    opened,
)
from fshard.checkpoint.save import next_token, snapshot, write
from fshard.checkpoint.snapshot import as_device_of
from fshard.checkpoint.source import SavedFolder, Source, Target
from fshard.errors import CheckpointError
from fshard.mesh.collectives.api import pmax
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.arithmetic import strides
from fshard.mesh.spmd.scope import here
from fshard.transforms.module.lora import LowRank
from fshard.transforms.options import integer, one_of

Format = Literal["hf", "dcp", "torch", "safetensors", "peft"]
Merge = tuple[LowRank, str, str]
"""A layer whose difference is added to its weight, and the names of both factors of it."""
_GROUP = 4 << 20
"""Bytes of small arrays that are loaded at a time: a source verifies a block of a file, of as many
bytes, at each read."""


@torch.no_grad()
def export(
    path: str | os.PathLike[str],
    params: PyTree,
    to: Format = "hf",
    *,
    model: nn.Module | None = None,
    config: Any = None,
    shard_size: int = 5 * 10**9,
    timeout: float = 600,
) -> None:
    """Write arrays in any layouts as a file or folder that other libraries read.

    Called by all processes; outside of the mesh of the arrays it returns at once. Meanwhile the
    disk has two more copies of the arrays beside the target,
    for "hf" one and a file.

    Args:
        path: a file ("torch", "safetensors"), which is replaced; else a folder, which must be new
            or empty.
        params: a tree of arrays; for "torch" and "dcp" with numbers and strings too.
        to: "hf": safetensors for `from_pretrained`, tied parameters once; "dcp":
            torch.distributed.checkpoint; "torch": torch.save; "safetensors": one file; "peft": LoRA
            weights alone.
        model: of `fs.nn.lora`, with these parameters: its differences are merged into the weights;
            "peft" needs it.
        config: for "hf", of the model: transformers' object or a dict, written to config.json; by
            default that of the module.
        shard_size: bytes per file, for "hf".
        timeout: seconds to wait for other processes.

    >>> import tempfile, torch, fshard as fs
    >>> from fshard import P
    >>> w = fs.device_put(torch.arange(4.0), fs.Layout(fs.make_mesh({"data": 4}), P("data")))
    >>> path = tempfile.mkdtemp() + "/w.safetensors"
    >>> fs.export(path, {"w": w}, to="safetensors")
    >>> fs.restore(path)
    {'w': tensor([0., 1., 2., 3.])}
    """
    _validate_options(to, model, config, shard_size)
    mesh = mesh_of_some(params)
    if mesh is not None and not mesh.is_member:
        return
    with as_device_of(mesh):
        _export_here(Path(path).absolute(), params, to, model, config, shard_size, timeout)


def _export_here(
    target: Path,
    params: PyTree,
    to: Format,
    model: nn.Module | None,
    config: Any,
    shard_size: int,
    timeout: float,
) -> None:
    """Write arrays as a process of their mesh."""
    tree, _ = opened(params)
    merges: dict[str, Merge] = {}
    if model is not None:
        arrays = {leaf.name: leaf.value for leaf in leaves_of(tree)}
        _validate_parameters(arrays, model)
        if to == "peft":
            tree, config = _adapters(arrays, model)
        else:
            tree, merges = merged_parameters(arrays, model)
    if to == "hf" and config is None:
        module = getattr(params, "module", params) if model is None else model  # of a boosted model
        config = module_config(module)

    token = next_token()
    folder = target.with_name(f".{target.name}.{token}")
    tree_snapshot = snapshot(folder, token, tree)
    order = [str(key) for key in tree] if isinstance(tree, dict) else []
    content = Content(SavedFolder(folder, tree_snapshot.index), order, merges)
    _validate_export(target, to, content)  # before anything is written, on all processes alike

    _, device = calling_device()
    is_writer = device == 0
    failure: Exception | None = None
    try:
        write(folder, tree_snapshot, token, timeout)
        if is_writer:
            # Read from the folder: the index now has the files.
            written = Content(SavedFolder(folder), order, merges)
            convert(written, target, to, config, shard_size)
    except Exception as error:
        failure = error
    try:
        failure_text = "" if failure is None else str(failure) or repr(failure)
        first_failure = _wait(token, failure_text, timeout)
    finally:
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)
        if failure is not None:
            raise failure
    if first_failure:
        raise CheckpointError(first_failure)


def _validate_options(to: Format, model: nn.Module | None, config: Any, shard_size: int) -> None:
    errors = one_of("to", to, "hf", "dcp", "torch", "safetensors", "peft")
    errors += integer("shard_size", shard_size)
    if config is not None and to != "hf":
        errors.append("config is for to='hf'")
    if model is None and to == "peft":
        errors.append("to='peft' needs model=, the module of fs.nn.lora")
    if errors:
        raise ValueError(f"export: {'; '.join(errors)}.")


def _validate_parameters(arrays: Mapping[str, Any], model: nn.Module) -> None:
    missing = [name for name, _ in model.named_parameters() if name not in arrays]
    if missing:
        raise CheckpointError(
            f"export: params must be those of model; {', '.join(missing[:20])} are missing."
        )


def module_config(module: Any) -> Any:
    """Return the configuration of transformers that a module has; None without one."""
    config = getattr(module, "config", None)
    return config if hasattr(config, "save_pretrained") else None


def _wait(token: str, failure: str, timeout: float) -> str:
    """Wait until all processes are done; return how the first has failed."""
    scope = here()
    if scope is not None and scope.mesh.runtime == "virtual":
        has_failed = pmax(torch.tensor(float(bool(failure))), tuple(scope.axes))
        return "export failed on another device" if has_failed else ""
    mesh, device = calling_device()
    if mesh is None:
        return failure
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    keys = [f"fshard/export/{token}/{number}" for number in range(mesh.size)]
    store.set(keys[device], failure)
    store.wait(keys, timedelta(seconds=timeout))
    return store.get(keys[0]).decode()


@dataclass(frozen=True)
class Content:
    """The arrays of a source to write.

    Args:
        source: of the arrays.
        order: the first entries of their paths, in the order in which they are written.
        merges: by name the weights to which a difference is added, whose factors are not written.
    """

    source: Source
    order: Sequence[str] = ()
    merges: Mapping[str, Merge] = field(default_factory=dict[str, Merge])

    @cached_property
    def stored(self) -> dict[str, str]:
        """All names in order, each with the first name of the same array."""
        factors: set[str] = set()
        for _, *merge_factors in self.merges.values():
            factors.update(merge_factors)
        names = [name for name in self.source.arrays if name not in factors]

        firsts: dict[Any, str] = {}
        stored: dict[str, str] = {}
        for name in sorted(names, key=self._rank_of):
            # Tied weights of which one alone has a difference are two arrays.
            layer = self.merges[name][0] if name in self.merges else None
            key = self.source.ties.get(name, name), layer
            stored[name] = firsts.setdefault(key, name)
        return stored

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {key: rank for rank, key in enumerate(self.order)}

    def _rank_of(self, name: str) -> int:
        path = self.source.arrays[name].path
        return self._ranks.get(name_of(path[:1]), 0)

    @property
    def untied(self) -> list[str]:
        return [name for name, first in self.stored.items() if name == first]

    def size(self, name: str) -> int:
        """Return the bytes of an array."""
        array = self.source.arrays[name]
        return prod(array.shape) * array.dtype.itemsize

    def groups(self, names: Sequence[str], size: int) -> list[list[str]]:
        """Return names in groups of at most some bytes, or of one array."""
        groups: list[list[str]] = []
        free = 0
        for name in names:
            if not groups or self.size(name) > free:
                groups.append([])
                free = size
            groups[-1].append(name)
            free -= self.size(name)
        return groups

    def loaded(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield arrays in order, in memory: at a time those of one group."""
        for group in self.groups(names, _GROUP):
            tensors = self._read(group)
            for name in group:
                if name not in self.merges:
                    yield tensors.pop(name)  # without a name here: the caller alone has it
                    continue
                layer, *factors = self.merges[name]
                a, b = (tensors[factor] for factor in factors)
                yield layer.merged(tensors.pop(name), a, b).contiguous()
                del a, b
            del tensors  # else its factors live while the next group is read

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return arrays, and the factors of their differences, by name."""
        tensors: dict[str, Tensor] = {}
        for name in names:
            _, *factors = self.merges.get(name, (None,))
            for source_name in (name, *factors):
                array = self.source.arrays[source_name]
                tensors[source_name] = torch.empty(array.shape, dtype=array.dtype)
        targets: list[Target] = []
        for name, x in tensors.items():
            targets.append(Target(name, full_span(x.shape), x.view(-1)))
        self.source.read(targets)
        return tensors


def convert(
    content: Content, target: Path, to: Format, config: Any = None, shard_size: int = 5 * 10**9
) -> None:
    """Write content in a format, one array at a time: see `export`."""
    _validate_export(target, to, content)
    folder = target.absolute().with_name(f".{target.name}.{secrets.token_hex(5)}")
    result = folder / "result"
    scratch = folder / "arrays"
    try:
        with named_errors(f"{target} is not written"):
            make_folder(folder)
            if to == "dcp":
                _write_dcp(result, _mapped_tree(scratch, content))
            elif to == "torch":
                torch.save(_mapped_tree(scratch, content), result)
            else:
                _write_safetensors(result, scratch, content, to, config, shard_size)
            for path in (*result.rglob("*"), result):
                disk.fsync_folder(path)
            disk.rename(result, target)
            disk.fsync_folder(target.absolute().parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _validate_export(target: Path, to: Format, content: Content) -> None:
    """Raise if the target is there already, or the format cannot have the content."""
    source = content.source
    is_file = to in ("torch", "safetensors")
    if is_file:
        is_taken = target.is_dir()  # a file is replaced
    else:
        is_taken = target.exists() and (target.is_file() or any(target.iterdir()))
    if is_taken:
        kind = "a file" if is_file else "a new or empty folder"
        raise CheckpointError(f"{target} must be {kind}; it is there already.")

    source.check()
    if to in ("torch", "dcp"):
        return
    errors: dict[str, str] = {}
    for name, (_, value) in source.values.items():
        errors[name] = f"{name} is of type {type(value).__name__}"
    dtypes = DTYPES.keys() - {torch.complex128}
    for name in content.untied:
        dtype = source.arrays[name].dtype
        if dtype not in dtypes:
            errors[name] = f"{name} has dtype {dtype}"
    if errors:
        texts = list(errors.values())[:20]
        raise CheckpointError(
            f"export to {to!r}: the content must be arrays of the dtypes of safetensors; got "
            f"{'; '.join(texts)}. {_part_to_export(source, errors)}"
        )


def _part_to_export(source: Source, wrong_names: Collection[str]) -> str:
    """Return which parts of a source safetensors can have, as the fix of an error."""
    parts: dict[str, None] = {}  # a set in order
    wrong_parts: set[str] = set()
    for name, path in source.paths.items():
        part = name_of(path[:1])
        parts[part] = None
        if name in wrong_names:
            wrong_parts.add(part)
    legal_parts = [part for part in parts if part not in wrong_parts]
    if not legal_parts:
        return "Export to 'torch' or 'dcp', which have all values."
    return f"Export a part, on the command line with --only: {' or '.join(legal_parts[:8])}."


# -- formats ----------------------------------------------------------------------------------------------------------


def _write_safetensors(
    path: Path, scratch: Path, content: Content, to: Format, config: Any, size: int
) -> None:
    """Write a file; or a folder of files, with an index of several, and a configuration."""
    # Larger dtypes come first, so that every element is aligned.
    names = sorted(content.untied, key=lambda name: -content.source.arrays[name].dtype.itemsize)
    if to == "safetensors":
        _write_file(path, scratch, content, names)
        return

    path.mkdir()
    if to == "peft":
        _write_file(path / PEFT, scratch, content, names)
        _write_config(path / PEFT_CONFIG, config)
        return

    groups = content.groups(names, size) or [names]
    if len(groups) == 1:
        files = {SAFETENSORS: names}
    else:
        files: dict[str, list[str]] = {}
        for number, group in enumerate(groups, 1):
            files[f"model-{number:05}-of-{len(groups):05}.safetensors"] = group
        _write_weight_map(path, content, files)
    for file, group in files.items():
        _write_file(path / file, scratch, content, group)
    _write_config(path / "config.json", config)


def _write_file(path: Path, scratch: Path, content: Content, names: Sequence[str]) -> None:
    save_file(_mapped(scratch, content, names), path, metadata={"format": "pt"})


def _write_weight_map(folder: Path, content: Content, files: Mapping[str, Sequence[str]]) -> None:
    """Write the index of several files: which has which array."""
    weight_map: dict[str, str] = {}
    for file, names in files.items():
        weight_map |= dict.fromkeys(names, file)
    total_size = sum(map(content.size, weight_map))
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / f"{SAFETENSORS}.index.json").write_text(json.dumps(index, indent=2))


def _write_config(path: Path, config: Any) -> None:
    """Write the configuration of a model, if there is one: transformers' object or a dict."""
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(path.parent)
    elif config is not None:
        path.write_text(json.dumps(config, indent=2))


def _mapped(path: Path, content: Content, names: Sequence[str]) -> dict[str, Tensor]:
    """Return arrays as tensors over a new file, which need no other memory."""
    with path.open("wb") as file:
        # By map, which has no name: a loop would keep an array while the next one is loaded.
        file.writelines(map(bytes_of, content.loaded(names)))
    memory: Any = UntypedStorage.from_file(str(path), False, path.stat().st_size)

    mapped: dict[str, Tensor] = {}
    start = 0
    for name in names:
        array = content.source.arrays[name]
        end = start + content.size(name)
        x = torch.empty(0, dtype=array.dtype)
        if start < end:
            x.set_(memory[start:end], 0, array.shape, strides(array.shape))
        mapped[name] = x.reshape(array.shape)
        start = end
    return mapped


def _mapped_tree(path: Path, content: Content) -> Any:
    """Return the tree of all arrays, mapped, and values."""
    mapped = _mapped(path, content, content.untied)
    items: list[tuple[TreePath, Any]] = []
    for name, first in content.stored.items():
        items.append((content.source.arrays[name].path, mapped[first]))
    return build([*items, *content.source.values.values()])


def _write_dcp(folder: Path, tree: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    if not isinstance(tree, dict):  # torch saves dicts alone
        tree = dict(enumerate(tree if isinstance(tree, list) else [tree]))
    try:
        with warnings.catch_warnings(action="ignore"):  # that it is one process
            save(tree, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} is not written: {str(error).splitlines()[-1]}") from error


# -- LoRA -------------------------------------------------------------------------------------------------------------


def merged_parameters(
    arrays: Mapping[str, Any], model: nn.Module
) -> tuple[dict[str, Any], dict[str, Merge]]:
    """Return parameters by the names of `fs.nn.merge_lora`, and what to merge."""
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(x): name for name, x in model.named_parameters()}

    merged: dict[str, Any] = {}
    merges: dict[str, Merge] = {}
    for name, x in params.items():
        # Of a layer q_proj, `q_proj.base_layer.weight` becomes `q_proj.weight`.
        parent, _, attribute = name.rpartition(".")
        path = parent.removesuffix("base_layer").removesuffix(".")
        layer = modules[path]
        new_name = name
        if isinstance(layer, LowRank) and path != parent:
            new_name = _joined(path, attribute)
            if x is layer.base_layer.weight:
                merges[new_name] = layer, _joined(path, "lora_A"), _joined(path, "lora_B")
        merged[new_name] = arrays[first_names[id(x)]]
    buffers = {name: array for name, array in arrays.items() if name not in params}
    return merged | buffers, merges


def _joined(path: str, attribute: str) -> str:
    """Return the name of an attribute of a module; "" is the path of the model."""
    return f"{path}.{attribute}" if path else attribute


def _adapters(arrays: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trained parameters by peft's names, and the configuration of their adapter."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}
    if not layers:
        raise CheckpointError(
            "export to peft: model must be one of fs.nn.lora; got one without LoRA weights."
        )
    adapters: dict[str, Any] = {}
    for name, x in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        if path in layers:
            if isinstance(layers[path].base_layer, nn.Embedding):
                peft_name = f"{path}.{attribute.replace('lora_', 'lora_embedding_')}"
            else:
                peft_name = f"{name}.weight"
            adapters[f"base_model.model.{peft_name}"] = arrays[name]
        elif x.requires_grad:  # of a module to save
            adapters[f"base_model.model.{name}"] = arrays[name]
    return adapters, _peft_config(model, layers)


def _peft_config(model: nn.Module, layers: Mapping[str, LowRank]) -> dict[str, Any]:
    """Return the configuration that peft reads beside the weights."""
    config = next(iter(layers.values())).config
    targets = config.target_modules
    if targets is None:
        targets = layers
    base_model = getattr(getattr(model, "config", None), "_name_or_path", None)
    base_layers = [layer.base_layer for layer in layers.values()]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model or None,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "bias": config.bias,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "modules_to_save": list(config.modules_to_save) or None,
        # Conv1D, of transformers' GPT-2, stores its weight as (inputs, outputs).
        "fan_in_fan_out": any(type(layer).__name__ == "Conv1D" for layer in base_layers),
    }
