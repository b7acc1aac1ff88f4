"""The commands on checkpoints: `fshard checkpoint inspect | verify | convert`. They need no mesh and no processes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path

from fshard.checkpoint.files import BlockReader
from fshard.checkpoint.foreign.export import Content, convert
from fshard.checkpoint.foreign.formats import open_source
from fshard.checkpoint.index import read_manifest
from fshard.checkpoint.restore import RenamedSource
from fshard.checkpoint.source import SavedFolder, Source
from fshard.errors import CheckpointError
from fshard.mesh.layout import dtype_name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fshard checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser(
        "inspect", help="names, shapes, dtypes and layouts; step and metrics"
    )
    verify = commands.add_parser(
        "verify", help="compare every byte with the digests of when it was written"
    )
    converting = commands.add_parser("convert", help="write in another format, one array at a time")
    for command in (inspect, verify, converting):
        command.add_argument(
            "path", type=Path, help="a folder of fs.save, or a file or folder that fs.restore reads"
        )
    for command in (verify, converting):
        command.add_argument(
            "--trust", action="store_true", help="read pickles of torch.distributed.checkpoint"
        )
    converting.add_argument("out", type=Path, help="a new folder; for torch and safetensors a file")
    converting.add_argument("--to", required=True, choices=("hf", "dcp", "torch", "safetensors"))
    converting.add_argument("--only", help='a name: the part below it, such as "params"')
    return parser


def run(words: Sequence[str]) -> int:
    """Run a command on a checkpoint; return the exit status."""
    options = _parser().parse_args(words)
    if options.command == "verify":
        return _verify(options.path, options.trust)
    if options.command == "convert":
        source = open_source(options.path, trust=options.trust)
        convert(Content(RenamedSource(source, options.only)), options.out, options.to)
        return 0
    source = open_source(options.path)
    sys.stdout.writelines(f"{line}\n" for line in _table(options.path, source))
    return 0


def _verify(path: Path, trust: bool) -> int:
    """Compare all bytes with their digests; of files without digests, the headers with the sizes."""
    text, errors = "it has no digests; headers and sizes agree", list[str]()
    with _collected(errors):
        source = open_source(path, trust=trust)
        writers = source.index.writers if isinstance(source, SavedFolder) else ()
        if writers:
            text = f"{sum(writer.size for writer in writers):,} bytes are as they were written"
        for writer in writers:
            with _collected(errors):
                digests = read_manifest(path, writer)
                with closing(BlockReader(path / writer.data, writer.size, digests)) as reader:
                    for number in range(len(digests)):
                        with _collected(errors):
                            reader.verify(number)
    sys.stdout.writelines(f"{line}\n" for line in errors or [f"{path}: {text}"])
    return 1 if errors else 0


@contextmanager
def _collected(errors: list[str]) -> Generator[None]:
    try:
        yield
    except CheckpointError as error:
        errors.append(str(error))


def _table(path: Path, source: Source) -> Iterator[str]:
    """Yield the lines of a table of what a folder or file has."""
    index = source.index if isinstance(source, SavedFolder) else None
    arrays = index.arrays if index is not None else ()
    layouts = {name: f"is {first}" for name, first in source.ties.items()}
    layouts |= {entry.name: str(entry.layout.spec) for entry in arrays}
    rows = [("name", "shape", "dtype", "layout")]
    for name, x in source.arrays.items():
        rows.append((name, str(list(x.shape)), dtype_name(x.dtype), layouts.get(name, "")))
    rows += [
        (name, "", type(value).__name__, repr(value)) for name, (_, value) in source.values.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    untied = [x for name, x in source.arrays.items() if name not in source.ties]
    elements, size = (
        sum(prod(x.shape) for x in untied),
        sum(prod(x.shape) * x.dtype.itemsize for x in untied),
    )
    yield f"{len(untied)} arrays, {elements:,} elements, {size:,} bytes; {len(source.values)} values"
    if index is not None:
        step = f"step {path.resolve().name}, " if path.resolve().name.isdecimal() else ""
        meshes = dict.fromkeys(
            ", ".join(f"{axis}={n}" for axis, n in entry.layout.mesh.axes) for entry in arrays
        )
        yield f"{step}written by {index.devices} devices: {'; '.join(meshes)}"
        yield from (f"{name}: {value:g}" for name, value in index.metrics.items())
