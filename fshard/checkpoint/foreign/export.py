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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from fshard.checkpoint.copying import Span, full_block
from fshard.checkpoint.files import DTYPES, bytes_of, disk, make_folder, named_errors
from fshard.checkpoint.foreign.formats import PEFT, PEFT_CONFIG, SAFETENSORS
from fshard.checkpoint.names import build, leaves_of, name_of, opened
from fshard.checkpoint.save import next_token, snapshot, write
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
Merging = tuple[LowRank, str, str]
"""A layer whose difference is added to its weight, and the names of both parts."""
_TOGETHER = 4 << 20
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
    wrong = one_of("to", to, "hf", "dcp", "torch", "safetensors", "peft")
    wrong += integer("shard_size", shard_size)
    wrong += ["config is for to='hf'"] if config is not None and to != "hf" else []
    wrong += ["to='peft' needs model=, the module of fs.nn.lora"] if model is None and to == "peft" else []
    if wrong:
        raise ValueError(f"export: {'; '.join(wrong)}.")
    tree, merging = opened(params)[0], dict[str, Merging]()
    if model is not None:
        known = {leaf.name: leaf.value for leaf in leaves_of(tree)}
        if to == "peft":
            tree, config = _adapters(known, model)
        else:
            tree, merging = _merged(known, model)
    module = getattr(params, "module", params) if model is None else model  # of a boosted model
    if to == "hf" and config is None and hasattr(module_config := getattr(module, "config", None), "save_pretrained"):
        config = module_config
    target, token, scope = Path(path).absolute(), next_token(), here()
    folder = target.with_name(f".{target.name}.{token}")
    taken = snapshot(folder, token, tree)
    order = [str(key) for key in tree] if isinstance(tree, dict) else []
    _validate_export(target, to, Content(SavedFolder(folder, taken.index), order, merging))  # on all processes alike
    is_writer, failed = (process_index() if scope is None else scope.device) == 0, None
    try:
        write(folder, taken, token, timeout)
        if is_writer:
            convert(Content(SavedFolder(folder), order, merging), target, to, config, shard_size)
    except Exception as error:
        failed = error
    try:
        text = _wait(token, "" if failed is None else str(failed) or repr(failed), timeout)
    finally:
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)
        if failed is not None:
            raise failed
    if text:
        raise CheckpointError(text)


def _wait(token: str, failed: str, timeout: float) -> str:
    """Wait until all processes are done; return how the first has failed."""
    scope = here()
    if scope is not None and scope.mesh.runtime == "virtual":
        has_failed = pmax(torch.tensor(float(bool(failed))), tuple(scope.axes))
        return "export failed on another device" if has_failed else ""
    if not dist.is_initialized():
        return failed
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    keys = [f"fshard/export/{token}/{number}" for number in range(process_count())]
    store.set(keys[process_index()], failed)
    store.wait(keys, timedelta(seconds=timeout))
    return store.get(keys[0]).decode()


@dataclass(frozen=True)
class Content:
    """The arrays of a source to write: by `order` of the first entries of their paths, and weights with their differences."""

    source: Source
    order: Sequence[str] = ()
    merging: Mapping[str, Merging] = field(default_factory=dict[str, Merging])

    @cached_property
    def stored(self) -> dict[str, str]:
        """All names in order, each with the first one of the same array."""
        numbers, arrays = {entry: number for number, entry in enumerate(self.order)}, self.source.arrays
        low = {name for one in self.merging.values() for name in one[1:]}
        first, found = dict[Any, str](), dict[str, str]()
        names = [name for name in arrays if name not in low]
        for name in sorted(names, key=lambda name: numbers.get(name_of(arrays[name].path[:1]), 0)):
            key = self.source.ties.get(name, name), name in self.merging and self.merging[name][0]
            found[name] = first.setdefault(key, name)
        return found

    @property
    def own(self) -> list[str]:
        """Names without tied ones."""
        return [name for name, of in self.stored.items() if name == of]

    def size(self, name: str) -> int:
        return prod(self.source.arrays[name].shape) * self.source.arrays[name].dtype.itemsize

    def grouped(self, names: Sequence[str], size: int) -> list[list[str]]:
        """Return names in groups of at most some bytes, or of one."""
        groups, left = list[list[str]](), 0
        for name in names:
            if not groups or self.size(name) > left:
                groups.append([])
                left = size
            groups[-1].append(name)
            left -= self.size(name)
        return groups

    def loaded(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield arrays in order, in memory."""
        for group in self.grouped(names, _TOGETHER):
            parts = {name: self.source.arrays[name] for of in group for name in (of, *self.merging.get(of, ())[1:])}
            made = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in parts.items()}
            self.source.read(
                [Target(name, Span(full_block(x.shape), 0, x.numel()), x.view(-1)) for name, x in made.items()]
            )
            for name in group:
                one = self.merging.get(name)
                yield one[0].merged(made[name], made[one[1]], made[one[2]]).contiguous() if one else made[name]
            del made


def convert(content: Content, target: Path, to: Format, config: Any = None, shard_size: int = 5 * 10**9) -> None:
    """Write content in a format, one array at a time: see `export`."""
    _validate_export(target, to, content)
    folder = target.absolute().with_name(f".{target.name}.{secrets.token_hex(5)}")
    made, scratch = folder / "made", folder / "arrays"
    names = sorted(content.own, key=lambda name: -content.source.arrays[name].dtype.itemsize)  # aligned
    writers: dict[Format, Callable[[], None]] = {
        "hf": lambda: _write_folder(
            made, scratch, content, _hf_files(content, names, shard_size), "config.json", config
        ),
        "dcp": lambda: _write_dcp(made, _mapped_tree(scratch, content)),
        "torch": lambda: torch.save(_mapped_tree(scratch, content), made),
        "safetensors": lambda: _write_safetensors(made, scratch, content, names),
        "peft": lambda: _write_folder(made, scratch, content, {PEFT: names}, PEFT_CONFIG, config),
    }

    def act() -> None:
        make_folder(folder)
        writers[to]()
        for one in (*made.rglob("*"), made):
            disk.fsync_folder(one)
        disk.rename(made, target)
        disk.fsync_folder(target.absolute().parent)

    try:
        with named_errors(f"{target} is not written"):
            act()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _validate_export(target: Path, to: Format, content: Content) -> None:
    """Raise if the target is taken, or the format cannot have the content."""
    is_file, source = to in ("torch", "safetensors"), content.source
    if target.is_dir() if is_file else target.exists() and (target.is_file() or any(target.iterdir())):
        kind = "a file" if is_file else "a new or empty folder"
        raise CheckpointError(f"{target} must be {kind}; it is there already.")
    source.check()
    wrong = [f"{name} is a {type(value).__name__}" for name, (_, value) in source.values.items()]
    dtypes = {name: source.arrays[name].dtype for name in content.own}
    wrong += [
        f"{name} has dtype {dtype}"
        for name, dtype in dtypes.items()
        if dtype not in DTYPES or dtype == torch.complex128
    ]
    if wrong and to not in ("torch", "dcp"):
        text = "; ".join(wrong[:20])
        raise CheckpointError(f"export to {to!r}: arrays of the dtypes of safetensors are needed; {text}.")


# -- formats ----------------------------------------------------------------------------------------------------------


def _write_safetensors(path: Path, scratch: Path, content: Content, names: Sequence[str]) -> None:
    save_file(_mapped(scratch, content, names), path, metadata={"format": "pt"})


def _write_folder(
    folder: Path, scratch: Path, content: Content, files: Mapping[str, Sequence[str]], name: str, config: Any
) -> None:
    """Write safetensors files, with an index if they are several, and a configuration."""
    folder.mkdir()
    for file, names in files.items():
        _write_safetensors(folder / file, scratch, content, names)
    if len(files) > 1:
        where = {one: file for file, names in files.items() for one in names}
        index = {"metadata": {"total_size": sum(map(content.size, where))}, "weight_map": where}
        (folder / f"{SAFETENSORS}.index.json").write_text(json.dumps(index, indent=2))
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    elif config is not None:
        (folder / name).write_text(json.dumps(config, indent=2))


def _hf_files(content: Content, names: Sequence[str], size: int) -> dict[str, Sequence[str]]:
    groups = content.grouped(names, size)
    named = {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, 1)}
    return {**named} if len(groups) > 1 else {SAFETENSORS: names}


def _mapped(path: Path, content: Content, names: Sequence[str]) -> dict[str, Tensor]:
    """Return arrays as tensors over a new file, which need no other memory."""
    arrays = content.source.arrays
    with path.open("wb") as file:
        file.writelines(map(bytes_of, content.loaded(names)))
    memory: Any = UntypedStorage.from_file(str(path), False, path.stat().st_size)
    ends = [*accumulate(map(content.size, names), initial=0)]
    parts = [memory[start:end] for start, end in pairwise(ends)]
    made = {name: torch.empty(0, dtype=arrays[name].dtype) for name in names}
    for (name, x), part in zip(made.items(), parts, strict=True):
        shape = arrays[name].shape
        made[name] = x.set_(part, 0, shape, strides(shape)) if len(part) else x.reshape(shape)
    return made


def _mapped_tree(path: Path, content: Content) -> Any:
    """Return the tree of all arrays, mapped, and values."""
    made = _mapped(path, content, content.own)
    items = [(content.source.arrays[name].path, made[of]) for name, of in content.stored.items()]
    return build([*items, *content.source.values.values()])


def _write_dcp(folder: Path, tree: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    tree = tree if isinstance(tree, dict) else dict(enumerate(tree if isinstance(tree, list) else [tree]))
    try:
        with warnings.catch_warnings(action="ignore"):  # that it is one process
            save(tree, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} is not written: {str(error).splitlines()[-1]}") from error


# -- LoRA -------------------------------------------------------------------------------------------------------------


def _of_model(known: Mapping[str, Any], model: nn.Module) -> dict[int, Any]:
    """Return the arrays of a model's parameters, by the identity of each."""
    if missing := [name for name, _ in model.named_parameters() if name not in known]:
        raise CheckpointError(f"export: params must be those of model; {', '.join(missing[:20])} are missing.")
    return {id(x): known[name] for name, x in model.named_parameters()}


def _merged(known: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], dict[str, Merging]]:
    """Return parameters by the names of `fs.nn.merge_lora`, beside the differences, and what to merge."""
    modules, arrays = dict(model.named_modules(remove_duplicate=False)), _of_model(known, model)
    names, made, merging = dict(model.named_parameters(remove_duplicate=False)), dict[str, Any](), dict[str, Merging]()
    for name, x in names.items():
        above, _, last = name.rpartition(".")
        path = above.removesuffix("base_layer").removesuffix(".")
        layer = modules[path]
        if isinstance(layer, LowRank) and path != above:
            name = name.removesuffix(f"base_layer.{last}") + last
            if x is layer.base_layer.weight:
                low = [f"{path}.{part}".removeprefix(".") for part in ("lora_A", "lora_B")]
                merging[name] = layer, low[0], low[1]
        made[name] = arrays[id(x)]
    return {**made, **{name: x for name, x in known.items() if name not in names}}, merging


def _adapters(known: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trained parameters by peft's names, and the configuration of their adapter."""
    made, arrays = dict[str, Any](), _of_model(known, model)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, LowRank)}
    if not layers:
        raise CheckpointError("export to peft: model must be one of fs.nn.lora; got one without LoRA weights.")
    for name, x in model.named_parameters():
        above, _, last = name.rpartition(".")
        if above in layers:
            is_embedding = isinstance(layers[above].base_layer, nn.Embedding)
            name = f"{above}.{last.replace('lora_', 'lora_embedding_')}" if is_embedding else f"{name}.weight"
        if above in layers or x.requires_grad:
            made[f"base_model.model.{name}"] = arrays[id(x)]
    config = next(iter(layers.values())).config
    targets = config.target_modules
    return made, {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        "inference_mode": True,
        **{key: getattr(config, key) for key in ("r", "lora_alpha", "lora_dropout", "bias")},
        "target_modules": targets if isinstance(targets, str) else [*(layers if targets is None else targets)],
        "modules_to_save": [*config.modules_to_save] or None,
        "fan_in_fan_out": any(type(one.base_layer).__name__ == "Conv1D" for one in layers.values()),
    }
