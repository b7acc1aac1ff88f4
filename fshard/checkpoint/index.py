"""The index of a checkpoint, and the manifest of each writer: JSON with a digest of itself.

    index.json      version, devices, layouts, arrays (path, shape, dtype, layout), ties, values; metrics, all writers
    A-3.json        the manifest of device 3: its data file A-3.safetensors, the size, the digests of every 4 MiB, metrics

`A` is the token of one save, so that no save writes to a file of another. A folder without an index is no checkpoint.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from fshard.checkpoint.copying import are_tiles
from fshard.checkpoint.division import ArrayEntry, Division
from fshard.checkpoint.files import BLOCK, DTYPES, digest
from fshard.checkpoint.names import PLAIN, NamedLeaf, is_array, name_of, stored_parts
from fshard.checkpoint.names import Path as TreePath
from fshard.errors import CheckpointError
from fshard.mesh.layout import Layout, P
from fshard.mesh.layout.layout import is_dense, no_dense
from fshard.mesh.layout.mesh import Mesh
from fshard.mesh.layout.sharded import Sharded

VERSION = 1
INDEX = "index.json"
_FILE = re.compile(r"[0-9a-f]+-[0-9]+\.(safetensors|json)")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class WriterFiles(NamedTuple):
    """The files of one device: of its data, the size and length of the header; the digest of its manifest."""

    data: str
    size: int
    header: int
    manifest: str
    digest: str


@dataclass(frozen=True)
class Index:
    """The content of a checkpoint.

    Args:
        devices: number of writers.
        arrays: in the order of the tree.
        ties: the paths of arrays that are stored under another name, and that name.
        values: the other leaves and their paths.
        metrics: of the step; those of device 0 are stored.
        writers: by device; empty until all have written.
    """

    devices: int
    arrays: Sequence[ArrayEntry]
    ties: Sequence[tuple[TreePath, str]]
    values: Sequence[tuple[TreePath, Any]]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    writers: Sequence[WriterFiles] = ()

    @cached_property
    def division(self) -> Division:
        return Division(self.arrays)

    def body(self) -> str:
        """Return the part that all writers must have in common, as text."""
        layouts: dict[Layout, int] = {}
        arrays = [
            [
                [*one.path],
                [*one.shape],
                str(one.dtype).removeprefix("torch."),
                layouts.setdefault(one.layout, len(layouts)),
                *([[*one.offset], [*one.full_shape]] if one.shape != one.full_shape else []),
            ]
            for one in self.arrays
        ]
        return as_text(
            {
                "version": VERSION,
                "devices": self.devices,
                "layouts": [_written(layout) for layout in layouts],
                "arrays": arrays,
                "ties": [[[*path], name] for path, name in self.ties],
                "values": [[[*path], value] for path, value in self.values],
            }
        )


def as_text(x: Any) -> str:
    """Return JSON without spaces."""
    return json.dumps(x, separators=(",", ":"))


def sealed(text: str) -> bytes:
    """Return JSON with its digest."""
    return f'{{"xxh3":"{digest(text.encode())}","checkpoint":{text}}}\n'.encode()


def read_sealed(path: Path) -> Any:
    """Return the JSON of a sealed file; raise if it is not as it was written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    head, mark, rest = data.partition(b',"checkpoint":')
    text = rest.removesuffix(b"}\n")
    if not mark or head + mark + text + b"}\n" != data or head != b'{"xxh3":"%s"' % digest(text).encode():
        raise CheckpointError(f"{path} is not as it was written (its digest differs). Restore another checkpoint.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, error) from error


def read_index(folder: Path) -> Index:
    """Return the index of a checkpoint; raise if there is none, one of a later version, or one that `save` does not write."""
    found = read_sealed(folder / INDEX)
    if isinstance(found, dict) and found.get("version") != VERSION:
        raise CheckpointError(f"{folder}: version {found.get('version')} must be {VERSION}, which this fshard reads.")
    try:
        index = _parsed(found)
        _validate(index)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise _invalid(folder / INDEX, error) from error
    return index


def _invalid(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is not what fs.save writes ({type(error).__name__}: {error}). Restore another checkpoint."
    )


def _parsed(found: Any) -> Index:
    layouts = dict(enumerate(map(_layout, found["layouts"])))
    arrays = list[ArrayEntry]()
    for path, shape, dtype, layout, *part in found["arrays"]:
        offset, full = part or ([0] * len(shape), shape)
        entry = ArrayEntry(
            name_of(path), tuple(path), tuple(shape), _DTYPES[dtype], layouts[layout], tuple(offset), tuple(full)
        )
        arrays.append(entry)
    ties = [(tuple(path), name) for path, name in found["ties"]]
    values = [(tuple(path), value) for path, value in found["values"]]
    writers = [WriterFiles(*one) for one in found["writers"]]
    return Index(found["devices"], arrays, ties, values, dict(found["metrics"]), writers)


def _validate(index: Index) -> None:
    """Raise if an index names files outside of its folder, or does not fit the sizes of its files."""
    sizes = [(one.size, one.header) for one in index.writers]
    numbers = {length for one in index.arrays for length in (*one.shape, *one.offset, *one.full_shape)}
    paths = [*(one.path for one in index.arrays), *(path for path, _ in (*index.ties, *index.values))]
    entries = [*chain(*paths)]
    layouts = {one.layout for one in index.arrays}
    parts: dict[str, list[ArrayEntry]] = defaultdict(list)
    for one in index.arrays:
        parts[one.name].append(one)
    checks = {
        "names of files": all(_FILE.fullmatch(name) for one in index.writers for name in (one.data, one.manifest)),
        "numbers": all(type(one) is int and 0 <= one < 1 << 60 for one in {*numbers, *chain(*sizes), index.devices}),
        "paths": all(isinstance(one, str | int) or (len(one) == 1 and isinstance(one[0], PLAIN)) for one in entries),
        "values": all(_is_json(value) for _, value in index.values),
        "metrics": all(isinstance(one, int | float) for one in index.metrics.values()),
        "ties": all(name in parts for _, name in index.ties),
        "devices": {len(sizes), *(one.mesh.size for one in layouts)} == {index.devices},
        "parts": all(
            prod(one.full_shape) < 1 << 60
            and len(one.shape) == len(one.offset) == len(one.full_shape) >= len(one.layout.spec.entries)
            for one in index.arrays
        )
        and all(map(_are_tiles, parts.values())),
        "sizes": sum(prod(one.shape) * one.itemsize for one in index.arrays)
        == sum(size - head for size, head in sizes),
    }
    if wrong := [what for what, is_right in checks.items() if not is_right]:
        raise ValueError(f"wrong {', '.join(wrong)}")


def _are_tiles(parts: Sequence[ArrayEntry]) -> bool:
    """Return True if the parts of an array are disjoint and cover it."""
    blocks = [[(start, start + length) for start, length in zip(one.offset, one.shape, strict=True)] for one in parts]
    return len({one.full_shape for one in parts}) == 1 and are_tiles([*map(tuple, blocks)], parts[0].full_shape)


def read_manifest(folder: Path, writer: WriterFiles) -> list[str]:
    """Return the digests of a writer's data, of the manifest that the index means."""
    path = folder / writer.manifest
    found = read_sealed(path)
    if digest(as_text(found).encode()) != writer.digest:
        raise CheckpointError(f"{path} is not the manifest that the index names. Restore another checkpoint.")
    try:
        digests = [bytes.fromhex(one).hex() for one in found["digests"]]
        if (found["size"], len(digests)) != (writer.size, -(-writer.size // BLOCK)):
            raise ValueError(f"{len(digests)} digests of {found['size']} bytes")
    except (LookupError, TypeError, ValueError) as error:
        raise _invalid(path, error) from error
    return digests


def _written(layout: Layout) -> Any:
    spec = layout.spec
    dims = [list(axes) for axes in spec.dims(len(spec.entries))]
    flat = None if spec.flat_axes is None else [*spec.flat_axes]
    return [[*map(list, layout.mesh.axes)], dims, flat, [[[*axes], place] for axes, place in spec.at]]


def _layout(written: Any) -> Layout:
    axes, dims, flat, at = written
    mesh = Mesh(tuple((name, size) for name, size in axes), "abstract", "meta")
    return Layout(mesh, P(*map(tuple, dims), flat=flat, at={tuple(names): place for names, place in at}))


@lru_cache(maxsize=1024)
def storable(layout: Layout) -> Layout:
    """Return a layout as an index has it: on the full mesh, without units and memory."""
    mesh = Mesh(layout.mesh.parent or layout.mesh.axes, "abstract", "meta")
    return Layout(mesh, layout.spec.shapeless)


def validate_storable(leaves: Sequence[NamedLeaf]) -> None:
    """Raise, naming all leaves that a checkpoint cannot have."""
    arrays = [(one.name, x) for one in leaves if is_array(one.value) for _, x in stored_parts(one.value)]
    values = [(one.name, one.value) for one in leaves if not is_array(one.value)]
    keys = [(one.name, entry[0]) for one in leaves for entry in one.path if isinstance(entry, list)]
    wrong = [f"{name} has dtype {x.dtype}" for name, x in arrays if x.dtype not in DTYPES]
    wrong += [
        f"{name} has the key {key!r}, which must be a string or number" for name, key in keys if not _is_json(key)
    ]
    plain = [(name, x) for name, x in arrays if not isinstance(x, Sharded)]
    wrong += [f"{name} is {no_dense(x)}" for name, x in plain if not is_dense(x)]
    wrong += [f"{name} is a meta tensor, which has no values" for name, x in plain if x.is_meta]
    wrong += [f"{name} must be a value of JSON; got {type(x).__name__}" for name, x in values if not _is_json(x)]
    if wrong:
        raise CheckpointError(f"These leaves cannot be saved: {'; '.join(wrong)}.")


def _is_json(x: Any) -> bool:
    return isinstance(x, PLAIN) or (isinstance(x, dict | list) and not x)
