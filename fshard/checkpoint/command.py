"""The commands on checkpoints: `fshard checkpoint inspect | verify | convert`.

They need no mesh and no processes. `inspect` prints

    name      shape  dtype    layout
    params.w  [8]    float32  P('data')
    steps            int      3
    1 arrays, 8 elements, 32 bytes; 1 values
    written by 2 devices: data=2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path

from fshard.checkpoint.files import BlockReader
from fshard.checkpoint.foreign.export import Content, convert
from fshard.checkpoint.foreign.formats import open_source
from fshard.checkpoint.index import Index, WriterFiles, read_manifest
from fshard.checkpoint.restore import RenamedSource
from fshard.checkpoint.source import SavedFolder, Source
from fshard.errors import CheckpointError
from fshard.mesh.layout import dtype_name
from fshard.tables import aligned
from fshard.transforms.patterns import matches


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
    converting.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="a pattern of names and the new name, as often as needed: h.**=layers.**",
    )
    return parser


def run(words: Sequence[str]) -> int:
    """Run a command on a checkpoint; return the exit status."""
    options = _parser().parse_args(words)
    if options.command == "verify":
        return _verify(options.path, options.trust)
    if options.command == "convert":
        source = open_source(options.path, trust=options.trust)
        renaming = _renaming(options.rename, RenamedSource(source, options.only))
        renamed = RenamedSource(source, options.only, renaming)
        convert(Content(renamed), options.out, options.to)
        _print([f"{options.out}: {_counts(renamed)}"])
        return 0
    _print(_table(options.path, open_source(options.path)))
    return 0


def _renaming(texts: Sequence[str], source: Source) -> dict[str, str]:
    """Return the new names by the patterns of the old ones; raise if a text is of no use."""
    renaming: dict[str, str] = {}
    for text in texts:
        pattern, _, new_name = text.partition("=")
        if not pattern or not new_name:
            raise CheckpointError(
                f"convert: --rename must be OLD=NEW, such as h.**=layers.**; got {text!r}."
            )
        if pattern in renaming:
            raise CheckpointError(
                f"convert: --rename must have each name once; got {pattern} twice."
            )
        if not any([matches(pattern, name) for name in source.paths]):
            shown = ", ".join(list(source.paths)[:8])
            raise CheckpointError(
                f"convert: --rename {pattern!r} matches no name. The names begin with {shown}."
            )
        renaming[pattern] = new_name
    return renaming


def _print(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _verify(path: Path, trust: bool) -> int:
    """Compare all bytes with their digests; without digests, headers with the sizes of files."""
    # Errors are collected, so that one run names all files and bytes that are not as written.
    errors: list[str] = []
    text = "it has no digests; headers and sizes agree"
    with _collected(errors):
        source = open_source(path, trust=trust)
        if isinstance(source, SavedFolder):
            writers = source.index.writers
            total = sum(writer.size for writer in writers)
            text = f"{total:,} bytes are as they were written"
            for writer in writers:
                _verify_file(path, writer, errors)
    _print(errors or [f"{path}: {text}"])
    return 1 if errors else 0


def _verify_file(folder: Path, writer: WriterFiles, errors: list[str]) -> None:
    """Compare the bytes of the file of one writer with their digests; add all errors to a list."""
    with _collected(errors):
        digests = read_manifest(folder, writer)
        with closing(BlockReader(folder / writer.data, writer.size, digests)) as reader:
            for number in range(len(digests)):
                with _collected(errors):
                    reader.verify(number)


@contextmanager
def _collected(errors: list[str]) -> Generator[None]:
    """Add an error to a list instead of raising it."""
    try:
        yield
    except CheckpointError as error:
        errors.append(str(error))


def _table(path: Path, source: Source) -> Iterator[str]:
    """Yield the lines of a table of what a folder or file has."""
    index = source.index if isinstance(source, SavedFolder) else None
    layouts = {name: f"is {first}" for name, first in source.ties.items()}
    if index is not None:
        layouts |= {entry.name: str(entry.layout.spec) for entry in index.arrays}
    yield from aligned(_rows(source, layouts))

    yield _counts(source)
    if index is not None:
        yield from _origin(path, index)


def _counts(source: Source) -> str:
    """Return the numbers of arrays, elements, bytes and values; tied arrays count once."""
    elements = 0
    size = 0
    untied = [x for name, x in source.arrays.items() if name not in source.ties]
    for x in untied:
        elements += prod(x.shape)
        size += prod(x.shape) * x.dtype.itemsize
    counts = f"{len(untied)} arrays, {elements:,} elements, {size:,} bytes"
    return f"{counts}; {len(source.values)} values"


def _rows(source: Source, layouts: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: a title, arrays, values."""
    rows = [("name", "shape", "dtype", "layout")]
    for name, x in source.arrays.items():
        rows.append((name, str(list(x.shape)), dtype_name(x.dtype), layouts.get(name, "")))
    for name, (_, value) in source.values.items():
        rows.append((name, "", type(value).__name__, repr(value)))
    return rows


def _origin(path: Path, index: Index) -> Iterator[str]:
    """Yield the step, the meshes and the metrics of a folder of `fs.save`."""
    meshes: dict[str, None] = {}  # a set in order
    for entry in index.arrays:
        axes = [f"{axis}={size}" for axis, size in entry.layout.mesh.axes]
        meshes[", ".join(axes)] = None
    origin = f"written by {index.devices} devices: {'; '.join(meshes)}"
    folder = path.resolve().name
    if folder.isdecimal():  # of `Checkpoints`, which names folders by their step
        origin = f"step {folder}, {origin}"
    yield origin
    for metric, value in index.metrics.items():
        yield f"{metric}: {value:g}"
