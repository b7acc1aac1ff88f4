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
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fshard.checkpoint.files import attempt, bytes_of, disk, make_folder
from fshard.checkpoint.foreign.content import ExportArray, adapters, arrays_of, grouped, loaded, merged, untied
from fshard.checkpoint.foreign.formats import PEFT, PEFT_CONFIG, SAFETENSORS
from fshard.checkpoint.foreign.mapped import DTYPE_OF, map_file, view
from fshard.checkpoint.names import build, name_of, opened
from fshard.checkpoint.save import next_token, snapshot, write
from fshard.checkpoint.source import OwnFolder, Source
from fshard.errors import CheckpointError
from fshard.mesh.collectives.api import pmax
from fshard.mesh.layout import PyTree
from fshard.mesh.runtimes.launchers import process_count, process_index
from fshard.mesh.spmd.scope import here
from fshard.transforms.options import integer, one_of

Format = Literal["hf", "dcp", "torch", "safetensors", "peft"]
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
        "hf": lambda: _write_hf(made, source, arrays, config, shard_size),
        "dcp": lambda: _write_dcp(made, _mapped_tree(folder / "arrays", source, arrays)),
        "torch": lambda: _write_torch(made, _mapped_tree(folder / "arrays", source, arrays)),
        "safetensors": lambda: _write_safetensors(made, source, arrays),
        "peft": lambda: _write_peft(made, source, arrays, adapter),
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


# -- formats ----------------------------------------------------------------------------------------------------------


def _write_json(path: Path, x: Any) -> None:
    path.write_text(f"{json.dumps(x, indent=2)}\n")


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


def _write_hf(folder: Path, source: Source, arrays: Sequence[ExportArray], config: Any, shard_size: int) -> None:
    folder.mkdir()
    files = grouped(arrays, shard_size) or [[]]
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [SAFETENSORS]
    for name, group in zip(names, files, strict=True):
        _write_safetensors(folder / name, source, group)
    if len(files) > 1:
        where = {one.name: name for name, group in zip(names, files, strict=True) for one in group}
        total = {"total_size": sum(one.size for one in arrays)}
        _write_json(folder / f"{SAFETENSORS}.index.json", {"metadata": total, "weight_map": where})
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    elif config is not None:
        _write_json(folder / "config.json", config)


def _write_peft(folder: Path, source: Source, arrays: Sequence[ExportArray], config: Any) -> None:
    folder.mkdir()
    _write_safetensors(folder / PEFT, source, arrays)
    _write_json(folder / PEFT_CONFIG, config)


def _mapped_tree(path: Path, source: Source, arrays: Sequence[ExportArray]) -> Any:
    """Return a tree of tensors in a new file, which need no other memory, and values."""
    own = untied(arrays)
    starts, room = _write_arrays(path, source, own), map_file(path)
    made = {
        (one.parts, one.join): view(room, start, one.dtype, one.shape)
        for one, start in zip(own, starts[:-1], strict=True)
    }
    return build([*((one.path, made[one.parts, one.join]) for one in arrays), *source.values.values()])


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
