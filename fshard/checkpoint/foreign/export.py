"""Write parameters as files of other libraries: `fs.export`. A tree is saved beside the target, and then converted.

export     all processes save the tree, of LoRA under other names; the first converts it, the others wait
convert    from any source: one array at a time, written aside, fsynced and renamed
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import accumulate, pairwise
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
from fshard.checkpoint.names import build, leaves_of, name_of, opened
from fshard.checkpoint.save import next_token, snapshot, write
from fshard.checkpoint.snapshot import calling_device
from fshard.checkpoint.source import SavedFolder, Source, Target
from fshard.errors import CheckpointError
from fshard.mesh.collectives.api import pmax
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.arithmetic import strides
from fshard.mesh.runtimes.launchers import process_count, process_index
from fshard.mesh.spmd.scope import here
from fshard.transforms.module.lora import LowRank
from fshard.transforms.options import integer, one_of

Format = Literal["hf", "dcp", "torch", "safetensors", "peft"]
Merge = tuple[LowRank, str, str]
"""A layer whose difference is added to its weight, and the names of both factors of the difference."""
_GROUP = 4 << 20
"""Bytes of small arrays that are loaded at a time."""


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
    """Write arrays in any layouts as a file or folder that other libraries read. Called by all processes.

    Meanwhile the disk has two more copies of them beside the target, for "hf" one and a file.

    Args:
        path: a file ("torch", "safetensors"), which is replaced; else a folder, which must be new or empty.
        params: a tree of arrays; for "torch" and "dcp" with numbers and strings too.
        to: "hf": safetensors for `from_pretrained`, tied parameters once; "dcp": torch.distributed.checkpoint; "torch":
            torch.save; "safetensors": one file; "peft": LoRA weights alone.
        model: of `fs.nn.lora`, with these parameters: its differences are merged into the weights; "peft" needs it.
        config: for "hf", of the model: transformers' object or a dict, written to config.json; by default that of the module.
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
    errors = one_of("to", to, "hf", "dcp", "torch", "safetensors", "peft") + integer(
        "shard_size", shard_size
    )
    errors += ["config is for to='hf'"] if config is not None and to != "hf" else []
    errors += (
        ["to='peft' needs model=, the module of fs.nn.lora"]
        if model is None and to == "peft"
        else []
    )
    if errors:
        raise ValueError(f"export: {'; '.join(errors)}.")
    tree, merges = opened(params)[0], dict[str, Merge]()
    if model is not None:
        arrays = {leaf.name: leaf.value for leaf in leaves_of(tree)}
        if missing := [name for name, _ in model.named_parameters() if name not in arrays]:
            text = f"{', '.join(missing[:20])} are missing"
            raise CheckpointError(f"export: params must be those of model; {text}.")
        if to == "peft":
            tree, config = _adapters(arrays, model)
        else:
            tree, merges = _merged(arrays, model)
    module = getattr(params, "module", params) if model is None else model  # of a boosted model
    if (
        to == "hf"
        and config is None
        and hasattr(module_config := getattr(module, "config", None), "save_pretrained")
    ):
        config = module_config
    target, token = Path(path).absolute(), next_token()
    folder = target.with_name(f".{target.name}.{token}")
    tree_snapshot = snapshot(folder, token, tree)
    order = [str(key) for key in tree] if isinstance(tree, dict) else []
    content = Content(SavedFolder(folder, tree_snapshot.index), order, merges)
    _validate_export(target, to, content)  # on all processes alike
    is_writer, failure = calling_device()[2] == 0, None
    try:
        write(folder, tree_snapshot, token, timeout)
        if is_writer:
            convert(Content(SavedFolder(folder), order, merges), target, to, config, shard_size)
    except Exception as error:
        failure = error
    try:
        text = _wait(token, "" if failure is None else str(failure) or repr(failure), timeout)
    finally:
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)
        if failure is not None:
            raise failure
    if text:
        raise CheckpointError(text)


def _wait(token: str, failure: str, timeout: float) -> str:
    """Wait until all processes are done; return how the first has failed."""
    scope = here()
    if scope is not None and scope.mesh.runtime == "virtual":
        has_failed = pmax(torch.tensor(float(bool(failure))), tuple(scope.axes))
        return "export failed on another device" if has_failed else ""
    if not dist.is_initialized():
        return failure
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    keys = [f"fshard/export/{token}/{number}" for number in range(process_count())]
    store.set(keys[process_index()], failure)
    store.wait(keys, timedelta(seconds=timeout))
    return store.get(keys[0]).decode()


@dataclass(frozen=True)
class Content:
    """The arrays of a source to write: by `order` of the first entries of their paths, and weights with their differences."""

    source: Source
    order: Sequence[str] = ()
    merges: Mapping[str, Merge] = field(default_factory=dict[str, Merge])

    @cached_property
    def stored(self) -> dict[str, str]:
        """All names in order, each with the first name of the same array."""
        ranks, arrays = {key: rank for rank, key in enumerate(self.order)}, self.source.arrays
        factors = {name for _, *names in self.merges.values() for name in names}
        firsts, result = dict[Any, str](), dict[str, str]()
        names = [name for name in arrays if name not in factors]
        for name in sorted(names, key=lambda name: ranks.get(name_of(arrays[name].path[:1]), 0)):
            key = self.source.ties.get(name, name), name in self.merges and self.merges[name][0]
            result[name] = firsts.setdefault(key, name)
        return result

    @property
    def untied(self) -> list[str]:
        return [name for name, first in self.stored.items() if name == first]

    def size(self, name: str) -> int:
        return prod(self.source.arrays[name].shape) * self.source.arrays[name].dtype.itemsize

    def groups(self, names: Sequence[str], size: int) -> list[list[str]]:
        """Return names in groups of at most some bytes, or of one array."""
        groups, free = list[list[str]](), 0
        for name in names:
            if not groups or self.size(name) > free:
                groups.append([])
                free = size
            groups[-1].append(name)
            free -= self.size(name)
        return groups

    def loaded(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield arrays in order, in memory."""
        for group in self.groups(names, _GROUP):
            sources = {
                x: self.source.arrays[x]
                for name in group
                for x in (name, *self.merges.get(name, ())[1:])
            }
            arrays = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in sources.items()}
            self.source.read(
                [Target(name, full_span(x.shape), x.view(-1)) for name, x in arrays.items()]
            )
            for name in group:
                merge = self.merges.get(name)
                if merge:
                    yield (
                        merge[0]
                        .merged(arrays.pop(name), arrays[merge[1]], arrays[merge[2]])
                        .contiguous()
                    )
                else:
                    yield arrays.pop(name)
            del arrays


def convert(
    content: Content, target: Path, to: Format, config: Any = None, shard_size: int = 5 * 10**9
) -> None:
    """Write content in a format, one array at a time: see `export`."""
    _validate_export(target, to, content)
    folder = target.absolute().with_name(f".{target.name}.{secrets.token_hex(5)}")
    result, scratch = folder / "result", folder / "arrays"
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
    """Raise if the target is shares, or the format cannot have the content."""
    is_file, source = to in ("torch", "safetensors"), content.source
    if (
        target.is_dir()
        if is_file
        else target.exists() and (target.is_file() or any(target.iterdir()))
    ):
        kind = "a file" if is_file else "a new or empty folder"
        raise CheckpointError(f"{target} must be {kind}; it is there already.")
    source.check()
    errors = [f"{name} is a {type(value).__name__}" for name, (_, value) in source.values.items()]
    dtypes = {name: source.arrays[name].dtype for name in content.untied}
    legal = DTYPES.keys() - {torch.complex128}
    errors += [f"{name} has dtype {dtype}" for name, dtype in dtypes.items() if dtype not in legal]
    if errors and to not in ("torch", "dcp"):
        text = "; ".join(errors[:20])
        raise CheckpointError(
            f"export to {to!r}: arrays of the dtypes of safetensors are needed; {text}."
        )


# -- formats ----------------------------------------------------------------------------------------------------------


def _write_safetensors(
    path: Path, scratch: Path, content: Content, to: Format, config: Any, size: int
) -> None:
    """Write a file; or a folder of files, with an index if they are several, and a configuration."""
    names = sorted(
        content.untied, key=lambda name: -content.source.arrays[name].dtype.itemsize
    )  # aligned
    groups, config_name = [names], PEFT_CONFIG if to == "peft" else "config.json"
    if to == "hf":
        groups = content.groups(names, size) or [names]
    if to != "safetensors":
        path.mkdir()
    paths = [{"safetensors": path, "hf": path / SAFETENSORS, "peft": path / PEFT}.get(to, path)]
    if len(groups) > 1:
        paths = [
            path / f"model-{n:05}-of-{len(groups):05}.safetensors"
            for n in range(1, len(groups) + 1)
        ]
        files = {
            name: file.name for file, group in zip(paths, groups, strict=True) for name in group
        }
        index = {"metadata": {"total_size": sum(map(content.size, names))}, "weight_map": files}
        (path / f"{SAFETENSORS}.index.json").write_text(json.dumps(index, indent=2))
    for file, group in zip(paths, groups, strict=True):
        save_file(_mapped(scratch, content, group), file, metadata={"format": "pt"})
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(path)
    elif config is not None:
        (path / config_name).write_text(json.dumps(config, indent=2))


def _mapped(path: Path, content: Content, names: Sequence[str]) -> dict[str, Tensor]:
    """Return arrays as tensors over a new file, which need no other memory."""
    with path.open("wb") as file:
        file.writelines(map(bytes_of, content.loaded(names)))
    memory: Any = UntypedStorage.from_file(str(path), False, path.stat().st_size)
    ends, result = [*accumulate(map(content.size, names), initial=0)], dict[str, Tensor]()
    for name, (start, end) in zip(names, pairwise(ends), strict=True):
        array = content.source.arrays[name]
        x = torch.empty(0, dtype=array.dtype)
        mapped = (
            x.set_(memory[start:end], 0, array.shape, strides(array.shape)) if start < end else x
        )
        result[name] = mapped.reshape(array.shape)
    return result


def _mapped_tree(path: Path, content: Content) -> Any:
    """Return the tree of all arrays, mapped, and values."""
    mapped = _mapped(path, content, content.untied)
    items = [
        (content.source.arrays[name].path, mapped[first]) for name, first in content.stored.items()
    ]
    return build([*items, *content.source.values.values()])


def _write_dcp(folder: Path, tree: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    tree = (
        tree
        if isinstance(tree, dict)
        else dict(enumerate(tree if isinstance(tree, list) else [tree]))
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # that it is one process
            save(tree, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} is not written: {str(error).splitlines()[-1]}") from error


# -- LoRA -------------------------------------------------------------------------------------------------------------


def _merged(arrays: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], dict[str, Merge]]:
    """Return parameters by the names of `fs.nn.merge_lora`, and the factors of differences, and what to merge."""
    modules, names = (
        dict(model.named_modules(remove_duplicate=False)),
        {id(x): n for n, x in model.named_parameters()},
    )
    params, result, merges = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict[str, Any](),
        dict[str, Merge](),
    )
    for name, x in params.items():
        parent, _, attribute = name.rpartition(".")
        path = parent.removesuffix("base_layer").removesuffix(".")
        layer, new = modules[path], name
        if isinstance(layer, LowRank) and path != parent:
            new = f"{path}.{attribute}".removeprefix(".")
            if x is layer.base_layer.weight:
                factors = [f"{path}.{factor}".removeprefix(".") for factor in ("lora_A", "lora_B")]
                merges[new] = layer, factors[0], factors[1]
        result[new] = arrays[names[id(x)]]
    return {**result, **{name: x for name, x in arrays.items() if name not in params}}, merges


def _adapters(arrays: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trained parameters by peft's names, and the configuration of their adapter."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}
    if not layers:
        raise CheckpointError(
            "export to peft: model must be one of fs.nn.lora; got one without LoRA weights."
        )
    adapters = dict[str, Any]()
    for name, x in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        new = name
        if path in layers:
            is_embedding = isinstance(layers[path].base_layer, nn.Embedding)
            new = (
                f"{path}.{attribute.replace('lora_', 'lora_embedding_')}"
                if is_embedding
                else f"{name}.weight"
            )
        if path in layers or x.requires_grad:
            adapters[f"base_model.model.{new}"] = arrays[name]
    config = next(iter(layers.values())).config
    targets = config.target_modules
    return adapters, {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None)
        or None,
        "inference_mode": True,
        **{key: getattr(config, key) for key in ("r", "lora_alpha", "lora_dropout", "bias")},
        "target_modules": targets
        if isinstance(targets, str)
        else [*(layers if targets is None else targets)],
        "modules_to_save": [*config.modules_to_save] or None,
        "fan_in_fan_out": any(
            type(layer.base_layer).__name__ == "Conv1D" for layer in layers.values()
        ),
    }
