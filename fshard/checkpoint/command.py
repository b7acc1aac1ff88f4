"""The commands on checkpoints: `fshard checkpoint inspect | verify | convert`. They need no mesh and no processes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from fshard.checkpoint.files import BLOCK, BlockReader
from fshard.checkpoint.foreign.export import Content, convert
from fshard.checkpoint.foreign.formats import open_source
from fshard.checkpoint.index import read_manifest
from fshard.checkpoint.names import name_of
from fshard.checkpoint.restore import RenamedSource
from fshard.checkpoint.source import SavedFolder, Source
from fshard.errors import CheckpointError
from fshard.mesh.layout.layout import dtype_name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fshard checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="names, shapes, dtypes and layouts; step and metrics")
    verify = commands.add_parser("verify", help="compare every byte with the digests of when it was written")
    converting = commands.add_parser("convert", help="write in another format, one array at a time")
    for one in (inspect, verify, converting):
        one.add_argument("path", type=Path, help="a folder of fs.save, or a file or folder that fs.restore reads")
    converting.add_argument("out", type=Path, help="a new folder; for torch and safetensors a file")
    converting.add_argument("--to", required=True, choices=("hf", "dcp", "torch", "safetensors"))
    converting.add_argument("--only", help='a name: the part below it, such as "params"')
    return parser


def run(words: Sequence[str]) -> int:
    """Run a command on a checkpoint; return the exit status."""
    options = _parser().parse_args(words)
    if options.command == "verify":
        return _verify(options.path)
    source = open_source(options.path)
    if options.command == "convert":
        convert(Content(RenamedSource(source, options.only)), options.out, options.to)
        return 0
    sys.stdout.writelines(f"{line}\n" for line in _described(options.path, source))
    return 0


def _verify(path: Path) -> int:
    """Compare all bytes with their digests; of files without digests, the headers with the sizes."""
    try:
        source = open_source(path)
        wrong = [*_wrong(source)] if isinstance(source, SavedFolder) else []
    except CheckpointError as error:
        source, wrong = None, [str(error)]
    size = sum(one.size for one in source.index.writers) if isinstance(source, SavedFolder) else None
    text = "it has no digests; headers and sizes agree" if size is None else f"{size:,} bytes are as they were written"
    sys.stdout.writelines(f"{line}\n" for line in wrong or [f"{path}: {text}"])
    return 1 if wrong else 0


def _described(path: Path, source: Source) -> Iterator[str]:
    """Yield the lines of a table of what a folder or file has."""
    index = source.index if isinstance(source, SavedFolder) else None
    layouts = {name: f"is {of}" for name, of in source.ties.items()}
    layouts |= {name_of(one.path): str(one.layout.spec) for one in (index.arrays if index is not None else ())}
    rows = [("name", "shape", "dtype", "layout")]
    for name, one in source.arrays.items():
        rows.append((name, str(list(one.shape)), dtype_name(one.dtype), layouts.get(name, "")))
    rows += [(name, "", type(value).__name__, repr(value)) for name, (_, value) in source.values.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    own = [one for name, one in source.arrays.items() if name not in source.ties]
    elements, size = sum(prod(one.shape) for one in own), sum(prod(one.shape) * one.dtype.itemsize for one in own)
    yield f"{len(own)} arrays, {elements:,} elements, {size:,} bytes; {len(source.values)} values"
    if index is not None:
        step = f"step {path.resolve().name}, " if path.resolve().name.isdecimal() else ""
        meshes = dict.fromkeys(", ".join(f"{axis}={n}" for axis, n in one.layout.mesh.axes) for one in index.arrays)
        yield f"{step}written by {index.devices} devices: {'; '.join(meshes)}"
        yield from (f"{name}: {value:g}" for name, value in index.metrics.items())


def _wrong(source: SavedFolder) -> Iterator[str]:
    """Yield the files and ranges of bytes that are not as they were written."""
    for one in source.index.writers:
        try:
            reader = BlockReader(source.folder / one.data, one.size, read_manifest(source.folder, one))
        except CheckpointError as error:
            yield str(error)
            continue
        for number in range(-(-one.size // BLOCK)):
            try:
                reader.verify(number)
            except CheckpointError as error:
                yield str(error)
        reader.close()
