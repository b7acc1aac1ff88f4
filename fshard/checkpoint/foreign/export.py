"""Write parameters as files of other libraries: `fs.export`. A tree is saved beside the target, and then converted.

export     all processes save the tree; the first converts it, the others wait
convert    from any source: one array at a time, written aside, fsynced and renamed
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fshard.checkpoint.copying import Span
from fshard.checkpoint.files import attempt, bytes_of, disk, make_folder
from fshard.checkpoint.foreign.formats import DTYPE_OF, PEFT, PEFT_CONFIG, SAFETENSORS, block_of, views
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import build, name_of, opened
from fshard.checkpoint.save import next_token, snapshot, write
from fshard.checkpoint.source import OwnFolder, Source, Target
from fshard.errors import CheckpointError
from fshard.mesh.collectives.api import pmax
from fshard.mesh.layout import PyTree
from fshard.mesh.runtimes.launchers import process_count, process_index
from fshard.mesh.spmd.scope import here
from fshard.transforms.module.lora import LowRank
from fshard.transforms.options import integer, one_of

Format = Literal["hf", "dcp", "torch", "safetensors", "peft"]
_TOGETHER = 4 << 20
"""Bytes of small arrays that are loaded at a time."""
_DTYPES = {dtype: name for name, dtype in DTYPE_OF.items()}


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

    Args:
        path: a file ("torch", "safetensors"), which is replaced; else a folder, which must be new or empty.
        params: a tree of arrays; for "torch" and "dcp" with numbers and strings too.
        to: "hf": safetensors for `from_pretrained`, tied parameters once; "dcp": torch.distributed.checkpoint; "torch":
            torch.save; "safetensors": one file; "peft": LoRA weights alone.
        model: of `fs.nn.lora`, with these parameters: its differences are merged into the weights; "peft" needs it.
        config: for "hf", of the model: transformers' object or a dict, written to config.json; by default `model.config`.
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
    if config is None and hasattr(own := getattr(model, "config", None), "save_pretrained"):
        config = own
    target, token, tree, scope = Path(path).absolute(), next_token(), opened(params)[0], here()
    order = [str(key) for key in tree] if isinstance(tree, dict) else []
    taken, folder = snapshot(tree), target.with_name(f".{target.name}.{token}")
    _content(OwnFolder(folder, taken.index), target, to, model, order)  # raises on all processes alike
    is_writer, failed = (process_index() if scope is None else scope.device) == 0, None
    try:
        write(folder, taken, token, timeout)
        if is_writer:
            convert(OwnFolder(folder), target, to, model, order, config, shard_size)
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


def convert(
    source: Source, target: Path, to: Format, model: nn.Module | None = None, order: Sequence[str] = (),
    config: Any = None, shard_size: int = 5 * 10**9,
) -> None:  # fmt: skip
    """Write what a source has in a format, one array at a time: see `export`."""
    arrays, adapter = _content(source, target, to, model, order)
    folder = target.absolute().with_name(f".{target.name}.{secrets.token_hex(5)}")
    made = folder / "made"
    writers: dict[Format, Callable[[], None]] = {
        "hf": lambda: _write_folder(made, source, _hf_files(arrays, shard_size), "config.json", config),
        "dcp": lambda: _write_dcp(made, _mapped_tree(folder / "arrays", source, arrays)),
        "torch": lambda: _write_torch(made, _mapped_tree(folder / "arrays", source, arrays)),
        "safetensors": lambda: _write_safetensors(made, source, arrays),
        "peft": lambda: _write_folder(made, source, {PEFT: arrays}, PEFT_CONFIG, adapter),
    }

    def act() -> None:
        make_folder(folder)
        writers[to]()
        for one in (*made.rglob("*"), made):
            disk.fsync_folder(one)
        disk.rename(made, target)
        disk.fsync_folder(target.absolute().parent)

    try:
        attempt(act, f"{target} is not written")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _content(
    source: Source, target: Path, to: Format, model: nn.Module | None, order: Sequence[str]
) -> tuple[list[ExportArray], dict[str, Any] | None]:
    """Return what to write, and peft's configuration; raise if the target is taken, or the format cannot have it."""
    is_file = to in ("torch", "safetensors")
    if target.is_dir() if is_file else target.exists() and (target.is_file() or any(target.iterdir())):
        kind = "a file" if is_file else "a new or empty folder"
        raise CheckpointError(f"{target} must be {kind}; it is there already.")
    source.check()
    arrays, adapter = arrays_of(source, order), None
    if model is not None and to == "peft":
        arrays, adapter = adapters(arrays, model)
    elif model is not None:
        arrays = merged(arrays, model)
    if to in ("torch", "dcp"):
        return arrays, None
    values = source.values.values() if adapter is None else ()
    wrong = [f"{name_of(path)} is a {type(value).__name__}" for path, value in values]
    wrong += [f"{one.name} has dtype {one.dtype}" for one in arrays if one.dtype not in _DTYPES]
    if wrong:
        text = "; ".join(wrong[:20])
        raise CheckpointError(f"export to {to!r}: arrays of the dtypes of safetensors are needed; {text}.")
    return sorted(untied(arrays), key=lambda one: -one.dtype.itemsize), adapter  # aligned


class ExportArray(NamedTuple):
    """An array to write: that of a source with a name, or what `join` makes of several. Tied ones differ in their path."""

    path: TreePath
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[str, ...]
    join: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def key(self) -> Any:
        return self.parts, self.join

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def arrays_of(source: Source, order: Sequence[str]) -> list[ExportArray]:
    """Return the arrays of a source, by `order` of the first entries of their paths."""
    numbers = {entry: number for number, entry in enumerate(order)}
    ties = {name: of for name, of in source.ties.items() if of in source.arrays}
    arrays = [ExportArray(*one, (ties.get(name, name),)) for name, one in source.arrays.items()]
    return sorted(arrays, key=lambda one: numbers.get(name_of(one.path[:1]), 0))


def untied(arrays: Iterable[ExportArray]) -> list[ExportArray]:
    """Return the first of tied arrays."""
    first: dict[Any, ExportArray] = {}
    return [one for one in arrays if first.setdefault(one.key, one) is one]


def grouped(arrays: Sequence[ExportArray], size: int) -> list[list[ExportArray]]:
    """Return arrays in groups of at most some bytes, or of one."""
    groups, room = list[list[ExportArray]](), 0
    for one in arrays:
        if not groups or one.size > room:
            groups.append([])
            room = size
        groups[-1].append(one)
        room -= one.size
    return groups


def loaded(source: Source, arrays: Sequence[ExportArray]) -> Iterator[Tensor]:
    """Yield arrays in order, in memory."""
    for group in grouped(arrays, _TOGETHER):
        stored = {name: source.arrays[name] for one in group for name in one.parts}
        made = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in stored.items()}
        source.read([Target(name, Span(block_of(x.shape), 0, x.numel()), x.view(-1)) for name, x in made.items()])
        for one in group:
            x = one.join(*[made[name] for name in one.parts]) if one.join else made[one.parts[0]]
            yield x.contiguous()
        made = x = None  # freed before the next ones


# -- formats ----------------------------------------------------------------------------------------------------------


def _write_arrays(path: Path, source: Source, arrays: Sequence[ExportArray], header: bytes = b"") -> list[int]:
    """Write the bytes of arrays; return where each begins, and the end."""
    with path.open("xb") as file:
        file.writelines(chain([header], map(bytes_of, loaded(source, arrays))))
    return [*accumulate((one.size for one in arrays), initial=len(header))]


def _write_safetensors(path: Path, source: Source, arrays: Sequence[ExportArray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for one in arrays:
        place = [start, start := start + one.size]
        header[one.name] = {"dtype": _DTYPES[one.dtype], "shape": [*one.shape], "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _write_arrays(path, source, arrays, len(text).to_bytes(8, "little") + text)


def _write_folder(
    folder: Path, source: Source, files: Mapping[str, Sequence[ExportArray]], name: str, config: Any
) -> None:
    """Write safetensors files, with an index if they are several, and a configuration."""
    folder.mkdir()
    where = {one.name: file for file, group in files.items() for one in group}
    for file, group in files.items():
        _write_safetensors(folder / file, source, group)
    if len(files) > 1:
        total = {"total_size": sum(one.size for group in files.values() for one in group)}
        index = json.dumps({"metadata": total, "weight_map": where}, indent=2)
        (folder / f"{SAFETENSORS}.index.json").write_text(index)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    elif config is not None:
        (folder / name).write_text(json.dumps(config, indent=2))


def _hf_files(arrays: Sequence[ExportArray], size: int) -> dict[str, Sequence[ExportArray]]:
    groups = grouped(arrays, size)
    if len(groups) < 2:
        return {SAFETENSORS: arrays}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, 1)}


def _mapped_tree(path: Path, source: Source, arrays: Sequence[ExportArray]) -> Any:
    """Return a tree of tensors in a new file, which need no other memory, and values."""
    own = untied(arrays)
    starts = _write_arrays(path, source, own)
    places = [(start, one.dtype, one.shape) for start, one in zip(starts, own, strict=False)]
    made = dict(zip([one.key for one in own], views(path, places), strict=True))
    return build([*((one.path, made[one.key]) for one in arrays), *source.values.values()])


def _write_torch(path: Path, tree: Any) -> None:
    with path.open("xb") as file:
        torch.save(tree, file)


def _write_dcp(folder: Path, tree: Any) -> None:
    from torch.distributed import checkpoint as dcp

    tree = tree if isinstance(tree, dict) else dict(enumerate(tree if isinstance(tree, list) else [tree]))
    try:
        with warnings.catch_warnings(action="ignore"):  # that it is one process
            dcp.save(tree, checkpoint_id=folder, no_dist=True)
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{folder} is not written: {str(error).splitlines()[-1]}") from error


# -- LoRA -------------------------------------------------------------------------------------------------------------


def merged(arrays: Sequence[ExportArray], model: nn.Module) -> list[ExportArray]:
    """Return parameters with the differences of `fs.nn.lora` in their weights, by the names of `fs.nn.merge_lora`."""
    known, modules = _of_model(arrays, model), dict(model.named_modules(remove_duplicate=False))
    names, made = dict(model.named_parameters(remove_duplicate=False)), list[ExportArray]()
    for name, x in names.items():
        above, _, last = name.rpartition(".")
        layer, own = modules[above.removesuffix("base_layer").removesuffix(".")], known[id(x)]
        if isinstance(modules[above], LowRank):
            continue
        if isinstance(layer, LowRank):
            name = name.removesuffix(f"base_layer.{last}") + last
            if x is layer.base_layer.weight:
                low = known[id(layer.lora_A)], known[id(layer.lora_B)]
                own = own._replace(parts=(*own.parts, *low[0].parts, *low[1].parts), join=layer.merged)
        made.append(own._replace(path=(name,)))
    return untied([*made, *(one for one in arrays if one.name not in names)])


def adapters(arrays: Sequence[ExportArray], model: nn.Module) -> tuple[list[ExportArray], dict[str, Any]]:
    """Return the trained parameters by peft's names, and the configuration of their adapter."""
    known, made = _of_model(arrays, model), list[ExportArray]()
    layers = {name: part for name, part in model.named_modules() if isinstance(part, LowRank)}
    if not layers:
        raise CheckpointError("export to peft: model must be one of fs.nn.lora; got one without LoRA weights.")
    for name, x in model.named_parameters():
        above, _, last = name.rpartition(".")
        if above in layers:
            is_embedding = isinstance(layers[above].base_layer, nn.Embedding)
            name = f"{above}.{last.replace('lora_', 'lora_embedding_')}" if is_embedding else f"{name}.weight"
        if above in layers or x.requires_grad:
            made.append(known[id(x)]._replace(path=(f"base_model.model.{name}",)))
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


def _of_model(arrays: Sequence[ExportArray], model: nn.Module) -> Mapping[int, ExportArray]:
    """Return the arrays of a model's parameters, by the identity of each."""
    known = {one.name: one for one in arrays}
    if missing := [name for name, _ in model.named_parameters() if name not in known]:
        raise CheckpointError(f"export: params must be those of model; {', '.join(missing[:20])} are missing.")
    return {id(x): known[name] for name, x in model.named_parameters()}
