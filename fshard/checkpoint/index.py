"""The index of a checkpoint, and the manifest of each writer: JSON with a digest of itself.

    index.json    version, devices, layouts, arrays, ties, values; metrics, all writers
    A-3.json      the manifest of device 3: its data file A-3.safetensors, the size, the digests of
                  every 4 MiB, metrics

`A` is the token of one save, so that no save writes to a file of another. A folder without an index
is no checkpoint. An index of one array:

    {"xxh3": "...", "checkpoint": {"version": 1, "devices": 2,
        "layouts": [[[["data", 2]], [["data"]], null, []]],          axes, dims, flat axes, device
        "arrays": [[["params", "w"], [8], "float32", 0]],            path, shape, dtype, layout
        "ties": [], "values": [[["steps"], 3]], "metrics": {}, "writers": [...]}}
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
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
# JSON of another form than that of an index raises any of these where it is read.
_ERRORS_OF_CONTENT = (
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class WriterFiles(NamedTuple):
    """The files of one device: data, its size, its header's length; manifest and its digest."""

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
        return f'{self._head},"values":{as_text(self.values)}}}'

    @cached_property
    def _head(self) -> str:
        """The text before the values."""
        layouts: dict[Layout, int] = {}
        arrays: list[Any] = []
        for entry in self.arrays:
            layout = layouts.setdefault(entry.layout, len(layouts))
            array = [entry.path, entry.shape, _DTYPE_NAMES[entry.dtype], layout]
            if entry.shape != entry.full_shape:  # a part of a fused weight
                array += [entry.offset, entry.full_shape]
            arrays.append(array)
        head = as_text(
            {
                "version": VERSION,
                "devices": self.devices,
                "layouts": [_layout_text(layout) for layout in layouts],
                "arrays": arrays,
                "ties": self.ties,
            }
        )
        return head[:-1]

    def with_values(
        self, values: Sequence[tuple[TreePath, Any]], metrics: dict[str, float]
    ) -> Index:
        """Return the index of the same arrays with other values."""
        index = replace(self, values=values, metrics=metrics)
        # They are of the arrays alone.
        index.__dict__.update(division=self.division, _head=self._head)
        return index


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
    is_sealed = mark and data == head + mark + text + b"}\n"  # with nothing else
    if not is_sealed or head != b'{"xxh3":"%s"' % digest(text).encode():
        raise CheckpointError(
            f"{path} is not as it was written (its digest differs). Restore another checkpoint."
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, error) from error


def read_index(folder: Path) -> Index:
    """Return the index of a checkpoint.

    Raises if there is none, one of a later version, or one that `save` does not write.
    """
    content = read_sealed(folder / INDEX)
    if isinstance(content, dict) and content.get("version") != VERSION:
        raise CheckpointError(
            f"{folder}: version {content.get('version')} must be {VERSION}, "
            "which this fshard reads."
        )
    try:
        index = index_of(content)
        _validate(index)
    except _ERRORS_OF_CONTENT as error:
        raise _invalid(folder / INDEX, error) from error
    return index


def index_of(content: Any) -> Index:
    """Return the index whose JSON is `content`; raise some error if it is that of none.

    The text that all writers have in common is one without metrics and writers.
    """
    # A dict, where a list would take -1 for its last layout.
    layouts = dict(enumerate(map(_layout, content["layouts"])))
    arrays: list[ArrayEntry] = []
    for path, shape, dtype, layout, *fused in content["arrays"]:
        offset, full_shape = fused or ([0] * len(shape), shape)
        entry = ArrayEntry(
            name=name_of(path),
            path=tuple(path),
            shape=tuple(shape),
            dtype=_DTYPES[dtype],
            layout=layouts[layout],
            offset=tuple(offset),
            full_shape=tuple(full_shape),
        )
        arrays.append(entry)
    ties = [(tuple(path), first) for path, first in content["ties"]]
    values = [(tuple(path), value) for path, value in content["values"]]
    metrics = dict(content.get("metrics", ()))
    writers = [WriterFiles(*files) for files in content.get("writers", ())]
    return Index(content["devices"], arrays, ties, values, metrics, writers)


def _invalid(path: Path, error: Exception) -> CheckpointError:
    text = f"{path} is not what fs.save writes ({type(error).__name__}: {error})."
    return CheckpointError(f"{text} Restore another checkpoint.")


# Note [An index is not trusted]
# The digest of an index finds accidents, not intent: anyone can write an index with its digest. So
# its names may not leave the folder, and its numbers must fit each other and the files, before any
# of them is used to read or to allocate memory.


def _validate(index: Index) -> None:
    """Raise ValueError for an index that `save` does not write.

    See Note [An index is not trusted].
    """
    names = {entry.name for entry in index.arrays}
    device_counts = {entry.layout.mesh.size for entry in index.arrays} | {len(index.writers)}
    errors: list[str] = []
    if not all(map(_has_valid_names, index.writers)):
        errors.append("names of files")
    if not all(map(_is_size, _numbers(index))):
        errors.append("numbers")
    if not all(map(_is_path, _paths(index))):
        errors.append("paths")
    if not all(_is_json(value) for _, value in index.values):
        errors.append("values")
    if not all(isinstance(x, int | float) for x in index.metrics.values()):
        errors.append("metrics")
    if not all(name in names for _, name in index.ties):
        errors.append("ties")
    if device_counts != {index.devices}:
        errors.append("devices")
    if not _has_all_parts(index.arrays):
        errors.append("parts")
    if not _fits_files(index):
        errors.append("sizes")
    if errors:
        raise ValueError(f"wrong {', '.join(errors)}")


def _has_valid_names(files: WriterFiles) -> bool:
    return bool(_FILE.fullmatch(files.data) and _FILE.fullmatch(files.manifest))


def _numbers(index: Index) -> set[Any]:
    """Return all numbers of an index that are sizes."""
    numbers = {index.devices}
    for entry in index.arrays:
        numbers.update(entry.shape, entry.offset, entry.full_shape, [prod(entry.full_shape)])
    for files in index.writers:
        numbers.update([files.size, files.header])
    return numbers


def _is_size(x: Any) -> bool:
    """Return True for a number of elements or bytes that may be."""
    # numpy computes with such numbers in 64 bits. No reason is known for this very limit, which
    # no disk reaches.
    return type(x) is int and 0 <= x < 1 << 60


def _paths(index: Index) -> list[TreePath]:
    paths = [entry.path for entry in index.arrays]
    return paths + [path for path, _ in (*index.ties, *index.values)]


def _is_path(path: TreePath) -> bool:
    for key in path:
        is_other_key = not isinstance(key, str | int)
        if is_other_key and not (len(key) == 1 and isinstance(key[0], PLAIN)):
            return False
    return True


def _fits_files(index: Index) -> bool:
    """Return True if the files have as many bytes as the arrays."""
    array_bytes = 0
    for entry in index.arrays:
        array_bytes += prod(entry.shape) * entry.itemsize
    return array_bytes == sum([files.size - files.header for files in index.writers])


def _has_all_parts(entries: Sequence[ArrayEntry]) -> bool:
    """Return True if all arrays are stored in full: the parts of each in order, without gaps."""
    parts: dict[str, list[ArrayEntry]] = defaultdict(list)
    for entry in entries:
        parts[entry.name].append(entry)
    return all(map(_are_joined, parts.values()))


def _are_joined(parts: Sequence[ArrayEntry]) -> bool:
    """Return True if the parts of an array follow each other along one dim, and have all of it."""
    full_shape = parts[0].full_shape
    if max([len(entry.layout.spec.entries) for entry in parts]) > len(full_shape):
        return False
    if prod(full_shape) == 0 or not full_shape:
        # A number, or an array without elements: no dim of it can be divided.
        elements = sum([prod(entry.shape) for entry in parts])
        has_one_shape = all(entry.full_shape == full_shape for entry in parts)
        return has_one_shape and elements == prod(full_shape)

    dim = _joined_dim(parts, full_shape)
    end = 0
    for entry in parts:
        length = entry.shape[dim]
        shape = (*full_shape[:dim], length, *full_shape[dim + 1 :])
        offset = tuple([end if i == dim else 0 for i in range(len(full_shape))])
        if (entry.shape, entry.offset, entry.full_shape) != (shape, offset, full_shape):
            return False
        end += length
    return end == full_shape[dim]


def _joined_dim(parts: Sequence[ArrayEntry], full_shape: tuple[int, ...]) -> int:
    """Return the first dim along which a part is shorter than the array; 0 without any."""
    for entry in parts:
        for dim, length in enumerate(full_shape):
            if entry.shape[dim] != length:
                return dim
    return 0


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
        block_count = -(-writer.size // BLOCK)  # rounded up
        if content["size"] != writer.size or len(digests) != block_count:
            raise ValueError(f"{len(digests)} digests of {content['size']} bytes")
    except (LookupError, TypeError, ValueError) as error:
        raise _invalid(path, error) from error
    return digests


def _layout_text(layout: Layout) -> list[Any]:
    """Return the JSON of a layout, which `_layout` reads."""
    spec = layout.spec
    dims = spec.dims(len(spec.entries))
    return [layout.mesh.axes, dims, spec.flat_axes, spec.at]


def _layout(content: Any) -> Layout:
    axes, dims, flat, device = content
    mesh = Mesh(tuple([(name, size) for name, size in axes]), "abstract", "meta")
    at = {tuple(names): index for names, index in device}
    return Layout(mesh, P(*map(tuple, dims), flat=flat, at=at))


@lru_cache(maxsize=1024)
def storable(layout: Layout) -> Layout:
    """Return a layout as an index has it: on the full mesh, without units and memory."""
    mesh = Mesh(layout.mesh.parent or layout.mesh.axes, "abstract", "meta")
    return Layout(mesh, layout.spec.shapeless)


def validate_storable(leaves: Sequence[NamedLeaf]) -> None:
    """Raise, naming all leaves that a checkpoint cannot have."""
    errors: list[str] = []
    for leaf in leaves:
        for key in leaf.path:
            if isinstance(key, list) and not _is_json(key[0]):
                text = f"{leaf.name} has the key {key[0]!r}, which must be a string or number"
                errors.append(text)
        if is_array(leaf.value):
            for _, x in stored_parts(leaf.value):
                errors += _unstorable(leaf.name, x)
        elif not _is_json(leaf.value):
            kind = type(leaf.value).__name__
            errors.append(f"{leaf.name} must be a value of JSON; got {kind}")
    if errors:
        raise CheckpointError(f"These leaves cannot be saved: {'; '.join(errors)}.")


def _unstorable(name: str, x: Any) -> list[str]:
    """Return why an array cannot be saved."""
    errors: list[str] = []
    if x.dtype not in DTYPES:
        errors.append(f"{name} has dtype {x.dtype}")
    if isinstance(x, Sharded):
        return errors
    if not is_dense(x):
        errors.append(f"{name} is {no_dense(x)}")
    elif x.is_meta:
        errors.append(f"{name} is a meta tensor, which has no values")
    return errors


def _is_json(x: Any) -> bool:
    """Return True for a leaf that JSON has: a plain value or an empty container."""
    return isinstance(x, PLAIN) or (isinstance(x, dict | list) and not x)
