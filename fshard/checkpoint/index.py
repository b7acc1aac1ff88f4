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
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from fshard.checkpoint.division import ArrayEntry, Division
from fshard.checkpoint.files import BLOCK, DTYPES, digest
from fshard.checkpoint.names import PLAIN, NamedLeaf, TreePath, is_array, name_of, stored_parts
from fshard.errors import CheckpointError
from fshard.mesh.layout import Layout, Mesh, P, is_dense, no_dense
from fshard.mesh.layout.sharded import Sharded

VERSION = 1
INDEX = "index.json"
_FILE = re.compile(r"[0-9a-f]+-[0-9]+\.(safetensors|json)")
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


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

    @cached_property
    def text(self) -> str:
        """The part that all writers must have in common, as JSON."""
        layouts: dict[Layout, int] = {}
        arrays = list[Any]()
        for path, shape, dtype, layout, offset, full in (entry[1:] for entry in self.arrays):
            fused = [offset, full] if shape != full else []
            arrays.append(
                [path, shape, _DTYPE_NAMES[dtype], layouts.setdefault(layout, len(layouts)), *fused]
            )
        return as_text(
            {
                "version": VERSION,
                "devices": self.devices,
                "layouts": [
                    [x.mesh.axes, x.spec.dims(len(x.spec.entries)), x.spec.flat_axes, x.spec.at]
                    for x in layouts
                ],
                "arrays": arrays,
                "ties": self.ties,
                "values": self.values,
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
    head, mark, body = data.partition(b',"checkpoint":')
    text = body.removesuffix(b"}\n")
    if (
        not mark
        or head + mark + text + b"}\n" != data
        or head != b'{"xxh3":"%s"' % digest(text).encode()
    ):
        raise CheckpointError(
            f"{path} is not as it was written (its digest differs). Restore another checkpoint."
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, error) from error


def read_index(folder: Path) -> Index:
    """Return the index of a checkpoint; raise if there is none, one of a later version, or one that `save` does not write."""
    content = read_sealed(folder / INDEX)
    if isinstance(content, dict) and content.get("version") != VERSION:
        raise CheckpointError(
            f"{folder}: version {content.get('version')} must be {VERSION}, which this fshard reads."
        )
    try:
        layouts = dict(enumerate(map(_layout, content["layouts"])))  # a dict: no index below 0
        arrays = list[ArrayEntry]()
        for path, shape, dtype, layout, *fused in content["arrays"]:
            offset, full = fused or ([0] * len(shape), shape)
            sizes = tuple(shape), _DTYPES[dtype], layouts[layout], tuple(offset), tuple(full)
            arrays.append(ArrayEntry(name_of(path), tuple(path), *sizes))
        ties, values = (
            [(tuple(path), x) for path, x in content[key]] for key in ("ties", "values")
        )
        writers = [WriterFiles(*files) for files in content["writers"]]
        index = Index(content["devices"], arrays, ties, values, dict(content["metrics"]), writers)
        _validate(index)
    except (
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ) as error:
        raise _invalid(folder / INDEX, error) from error
    return index


def _invalid(path: Path, error: Exception) -> CheckpointError:
    text = f"{path} is not what fs.save writes ({type(error).__name__}: {error})."
    return CheckpointError(f"{text} Restore another checkpoint.")


def _validate(index: Index) -> None:
    """Raise if an index names files outside of its folder, or does not fit the sizes of its files."""
    arrays, writers = index.arrays, index.writers
    numbers = {
        *chain(*((*x.shape, *x.offset, *x.full_shape, prod(x.full_shape)) for x in arrays)),
        index.devices,
    }
    numbers |= {size for files in writers for size in (files.size, files.header)}
    keys = [*chain(*(x.path for x in arrays), *(path for path, _ in (*index.ties, *index.values)))]
    fused: dict[str, list[ArrayEntry]] = defaultdict(list)
    for entry in arrays:
        fused[entry.name].append(entry)
    checks = {
        "names of files": all(
            _FILE.fullmatch(name) for files in writers for name in (files.data, files.manifest)
        ),
        "numbers": all(type(x) is int and 0 <= x < 1 << 60 for x in numbers),
        "paths": all(
            isinstance(key, str | int) or (len(key) == 1 and isinstance(key[0], PLAIN))
            for key in keys
        ),
        "values": all(_is_json(value) for _, value in index.values),
        "metrics": all(isinstance(x, int | float) for x in index.metrics.values()),
        "ties": all(name in fused for _, name in index.ties),
        "devices": {len(writers), *(x.layout.mesh.size for x in arrays)} == {index.devices},
        "parts": all(map(_are_joined, fused.values())),
        "sizes": sum(prod(x.shape) * x.itemsize for x in arrays)
        == sum(x.size - x.header for x in writers),
    }
    if errors := [name for name, is_valid in checks.items() if not is_valid]:
        raise ValueError(f"wrong {', '.join(errors)}")


def _are_joined(parts: Sequence[ArrayEntry]) -> bool:
    """Return True if the parts of an array follow each other along one dim, and have all of it."""
    full = parts[0].full_shape
    dim = next((dim for x in parts for dim in range(len(full)) if x.shape[dim] != full[dim]), 0)
    if max(len(x.layout.spec.entries) for x in parts) > len(full):
        return False
    if not (full and prod(full)):
        return {x.full_shape for x in parts} == {full} and sum(
            prod(x.shape) for x in parts
        ) == prod(full)
    ends = [*accumulate([x.shape[dim] for x in parts], initial=0)]
    expected = [
        (
            (*full[:dim], x.shape[dim], *full[dim + 1 :]),
            tuple([end * (i == dim) for i in range(len(full))]),
            full,
        )
        for x, end in zip(parts, ends, strict=False)
    ]
    return ends[-1] == full[dim] and [(x.shape, x.offset, x.full_shape) for x in parts] == expected


def read_manifest(folder: Path, writer: WriterFiles) -> list[str]:
    """Return the digests of a writer's data, of the manifest that the index means."""
    path = folder / writer.manifest
    content = read_sealed(path)
    if digest(as_text(content).encode()) != writer.digest:
        raise CheckpointError(
            f"{path} is not the manifest that the index names. Restore another checkpoint."
        )
    try:
        digests = [bytes.fromhex(text).hex() for text in content["digests"]]
        if (content["size"], len(digests)) != (writer.size, -(-writer.size // BLOCK)):
            raise ValueError(f"{len(digests)} digests of {content['size']} bytes")
    except (LookupError, TypeError, ValueError) as error:
        raise _invalid(path, error) from error
    return digests


def _layout(content: Any) -> Layout:
    axes, dims, flat, device = content
    mesh = Mesh(tuple((name, size) for name, size in axes), "abstract", "meta")
    return Layout(
        mesh, P(*map(tuple, dims), flat=flat, at={tuple(names): index for names, index in device})
    )


@lru_cache(maxsize=1024)
def storable(layout: Layout) -> Layout:
    """Return a layout as an index has it: on the full mesh, without units and memory."""
    mesh = Mesh(layout.mesh.parent or layout.mesh.axes, "abstract", "meta")
    return Layout(mesh, layout.spec.shapeless)


def validate_storable(leaves: Sequence[NamedLeaf]) -> None:
    """Raise, naming all leaves that a checkpoint cannot have."""
    errors = list[str]()
    for leaf in leaves:
        keys = [key[0] for key in leaf.path if isinstance(key, list) and not _is_json(key[0])]
        errors += [
            f"{leaf.name} has the key {key!r}, which must be a string or number" for key in keys
        ]
        if not is_array(leaf.value):
            kind = type(leaf.value).__name__
            errors += (
                [] if _is_json(leaf.value) else [f"{leaf.name} must be a value of JSON; got {kind}"]
            )
            continue
        for _, x in stored_parts(leaf.value):
            if x.dtype not in DTYPES:
                errors.append(f"{leaf.name} has dtype {x.dtype}")
            if not isinstance(x, Sharded) and not is_dense(x):
                errors.append(f"{leaf.name} is {no_dense(x)}")
            elif not isinstance(x, Sharded) and x.is_meta:
                errors.append(f"{leaf.name} is a meta tensor, which has no values")
    if errors:
        raise CheckpointError(f"These leaves cannot be saved: {'; '.join(errors)}.")


def _is_json(x: Any) -> bool:
    return isinstance(x, PLAIN) or (isinstance(x, dict | list) and not x)
