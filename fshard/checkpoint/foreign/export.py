"""Write parameters as files of other libraries: `fs.export`. One array at a time is unsharded, and one process writes it.

content    names, shapes and dtypes, and how to load each array
stream     the arrays in order; all processes unshard them, the writer of a format draws them
commit     written aside, fsynced, renamed; the other processes wait for it
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fshard.checkpoint.files import attempt, bytes_of, disk
from fshard.checkpoint.foreign.content import Content, ExportArray, adapters, content_of, merged
from fshard.checkpoint.foreign.dcp import METADATA
from fshard.checkpoint.foreign.formats import DTYPE_OF, PEFT, PEFT_CONFIG, SAFETENSORS, torch_file
from fshard.checkpoint.names import build, name_of
from fshard.checkpoint.save import next_token
from fshard.errors import CheckpointError
from fshard.mesh.collectives.api import pmax
from fshard.mesh.layout import PyTree
from fshard.mesh.runtimes.launchers import process_index
from fshard.mesh.spmd.scope import here
from fshard.transforms.options import integer, one_of

Format = Literal["hf", "dcp", "torch", "safetensors", "peft"]
Write = Callable[[Path, Content, Iterator[Tensor]], None]
_DTYPES = {dtype: name for name, dtype in DTYPE_OF.items()}
_failures: dict[str, str] = {}


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
        timeout: seconds to wait for the process that writes.

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
    content, adapter = content_of(params), {}
    if model is not None:
        if to == "peft":
            content, adapter = adapters(content, model)
        else:
            content = merged(content, model)
        own = getattr(model, "config", None)
        config = own if config is None and hasattr(own, "save_pretrained") else config
    write_content(path, content, to, config=config, shard_size=shard_size, adapter=adapter, timeout=timeout)


def write_content(
    path: str | os.PathLike[str],
    content: Content,
    to: Format,
    *,
    config: Any = None,
    shard_size: int = 5 * 10**9,
    adapter: Any = None,
    timeout: float = 600,
) -> None:
    """Write content in a format, on one process; the others help to load it and wait."""
    if to in ("hf", "safetensors", "peft"):
        _refuse_others(content, to)
        content = content._replace(entries=sorted(content.entries, key=lambda one: -one.dtype.itemsize))  # aligned
    writers: dict[str, Write] = {
        "hf": lambda at, given, xs: _write_hf(at, given.entries, xs, config, shard_size),
        "dcp": _write_dcp,
        "torch": _write_torch,
        "safetensors": lambda at, given, xs: _write_safetensors(at, given.entries, xs),
        "peft": lambda at, given, xs: _write_peft(at, given.entries, xs, adapter),
    }
    target, token = Path(path).absolute(), next_token()
    aside = target.with_name(f".{target.name}.{token}")
    stream, failed = (_on_host(one.load()) for one in content.entries), None
    scope = here()
    is_writer = (process_index() if scope is None else scope.device) == 0
    if is_writer:
        try:
            attempt(
                lambda: _write(target, aside, to, lambda: writers[to](aside, content, stream)),
                f"{target} is not written",
            )
        except Exception as error:
            failed = error
            shutil.rmtree(aside, ignore_errors=True)
            aside.unlink(missing_ok=True)
    deque(stream, maxlen=0)  # all processes unshard all arrays
    _wait(token, is_writer, failed, timeout)


def _write(target: Path, aside: Path, to: Format, write: Callable[[], None]) -> None:
    is_file = to in ("torch", "safetensors")
    if target.is_dir() if is_file else target.exists() and (target.is_file() or any(target.iterdir())):
        raise CheckpointError(
            f"{target} must be {'a file' if is_file else 'a new or empty folder'}; it is there already."
        )
    disk.make_folder(target.parent if is_file else aside)
    write()
    if not is_file:
        disk.fsync_folder(aside)
    disk.rename(aside, target)
    disk.fsync_folder(target.parent)


def _wait(token: str, is_writer: bool, failed: Exception | None, timeout: float) -> None:
    """Wait until the writer is done, and raise everywhere if it failed."""
    scope, text = here(), "" if failed is None else str(failed)
    if scope is not None and scope.mesh.runtime == "virtual":
        _failures.update({token: text} if text else {})  # devices are threads
        pmax(torch.zeros(1), tuple(scope.axes))
        text = _failures.get(token, "")
    elif dist.is_initialized():
        store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        key = f"fshard/export/{token}"
        if is_writer:
            store.set(key, text)
        store.wait([key], timedelta(seconds=timeout))
        text = store.get(key).decode()
    if failed is not None:
        raise failed
    if text:
        raise CheckpointError(text)


def _on_host(x: Tensor) -> Tensor:
    """Return a tensor in memory of its own on the host."""
    x = x.detach().cpu().contiguous()
    return x if x.untyped_storage().nbytes() == x.numel() * x.itemsize else x.clone()


def _refuse_others(content: Content, to: Format) -> None:
    """Raise, naming all leaves that safetensors cannot have."""
    wrong = [f"{name_of(path)} is a {type(value).__name__}" for path, value in content.values]
    wrong += [f"{one.name} has dtype {one.dtype}" for one in content.entries if one.dtype not in _DTYPES]
    if wrong:
        raise CheckpointError(
            f"export to {to!r}: arrays of the dtypes of safetensors are needed; {'; '.join(wrong[:20])}."
        )


@contextmanager
def _created(path: Path) -> Generator[IO[bytes]]:
    """Open a new file, and fsync it at the end."""
    with os.fdopen(disk.open_new(path), "wb") as file:
        yield file
        file.flush()
        disk.fsync(file.fileno())


def _write_json(path: Path, x: Any) -> None:
    with _created(path) as file:
        file.write(json.dumps(x, indent=2).encode() + b"\n")


# -- formats ----------------------------------------------------------------------------------------------------------


def _write_safetensors(path: Path, entries: Sequence[ExportArray], stream: Iterator[Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for one in entries:
        place = [start, start := start + one.size]
        header[one.name] = {"dtype": _DTYPES[one.dtype], "shape": [*one.shape], "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _created(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in entries:
            file.write(bytes_of(next(stream)))


def _write_hf(
    folder: Path, entries: Sequence[ExportArray], stream: Iterator[Tensor], config: Any, shard_size: int
) -> None:
    files, size = list[list[ExportArray]](), 0
    for one in entries:
        if not files or size + one.size > shard_size:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.size
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [SAFETENSORS]
    for name, group in zip(names, files or [[]], strict=True):
        _write_safetensors(folder / name, group, stream)
    if len(files) > 1:
        where = {one.name: name for name, group in zip(names, files, strict=True) for one in group}
        total = {"total_size": sum(one.size for one in entries)}
        _write_json(folder / f"{SAFETENSORS}.index.json", {"metadata": total, "weight_map": where})
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    elif config is not None:
        _write_json(folder / "config.json", config)


def _write_peft(folder: Path, entries: Sequence[ExportArray], stream: Iterator[Tensor], config: Any) -> None:
    _write_safetensors(folder / PEFT, entries, stream)
    _write_json(folder / PEFT_CONFIG, config)


def _write_torch(path: Path, content: Content, stream: Iterator[Tensor]) -> None:
    """Write a file of torch.save with room for the arrays, and then each into its place."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        arrays = {one.name: torch.empty(one.shape, dtype=one.dtype) for one in content.entries}
    items = [(one.path, arrays[one.name]) for one in content.entries]
    items += [(tied, arrays[name]) for tied, name in content.ties]
    with _created(path) as file, torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(build([*items, *content.values]), file)
    places = {name_of(one.stored.path): one.chunks[0].start for one in torch_file(path)[0]}
    with path.open("r+b") as file:
        for one in content.entries:
            file.seek(places[one.name])
            file.write(bytes_of(next(stream)))
        file.flush()
        disk.fsync(file.fileno())


def _write_dcp(folder: Path, content: Content, stream: Iterator[Tensor]) -> None:
    """Write what `dcp.save` of one process writes; tied arrays share their bytes."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]

    tied = defaultdict[str, list[Any]](list)
    for path, of in content.ties:
        tied[of].append(path)
    found, paths, places = dict[str, Any](), dict[str, Any](), dict[Any, Any]()

    def add(path: Any, what: Any, start: int, size: int, key: Any) -> None:
        plain = tuple([str(entry[0]) if isinstance(entry, list) else entry for entry in path])
        found[name_of(path)], paths[name_of(path)] = what, plain
        places[dcp.MetadataIndex(name_of(path), *key)] = _StorageInfo("__0_0.distcp", start, size)

    with _created(folder / "__0_0.distcp") as file:
        for one in content.entries:
            start, zeros = file.tell(), torch.Size([0] * len(one.shape))
            torch.save(next(stream), file)
            chunk = dcp.ChunkStorageMetadata(zeros, torch.Size(one.shape))
            for path in (one.path, *tied[one.name]):
                what = dcp.TensorStorageMetadata(dcp.TensorProperties(one.dtype), torch.Size(one.shape), [chunk])
                add(path, what, start, file.tell() - start, (zeros, 0))
        for path, value in content.values:
            start, data = file.tell(), io.BytesIO()
            torch.save(value, data)
            file.write(data.getvalue())
            add(path, dcp.BytesStorageMetadata(), start, file.tell() - start, ())
    with _created(folder / METADATA) as file:
        pickle.dump(dcp.Metadata(found, paths, places, dcp.StorageMeta(), version="1.0.0"), file)
