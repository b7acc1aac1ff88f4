"""Restore a checkpoint into any layout: `fs.restore`.

Each device reads what its shards need; nothing is sent.

    compare    names, shapes and dtypes of the target with those of the checkpoint
    targets    the range of each shard held here, and its memory
    read       the source verifies, and copies

All differences are one error. Nothing is written before names, shapes, dtypes and digests are
checked: a file is read twice.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.copying import Span, full_span
from fshard.checkpoint.division import span_of
from fshard.checkpoint.foreign.formats import open_source
from fshard.checkpoint.index import INDEX
from fshard.checkpoint.names import (
    NamedLeaf,
    SummandArray,
    TreePath,
    build,
    flattened,
    is_array,
    is_object,
    leaves_of,
    mesh_of_some,
    name_of,
    opened,
    shaped,
    stored_parts,
    tie_key,
)
from fshard.checkpoint.random import RandomState
from fshard.checkpoint.snapshot import as_device_of
from fshard.checkpoint.source import Source, StoredArray, Target
from fshard.errors import CheckpointError, MismatchError
from fshard.mesh.layout import Mesh, P, PyTree, dtype_name
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.global_inputs import compare_inputs
from fshard.mesh.spmd.run import local_devices
from fshard.optim.torch_optim.instance_state import InstanceState
from fshard.transforms.module.lazy import reserved
from fshard.transforms.patterns import matches, parts_of
from fshard.transforms.shard_params import Fsdp, Rules, apply_rules

Names = str | Sequence[str] | None
"""A name: the tree below it. Or patterns of names, `params.blocks.*.w`."""
Renaming = Mapping[str, str] | Callable[[str], str] | None


class Differences(NamedTuple):
    """Names that only one side has, and arrays of other shapes or dtypes."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: tuple[str, ...]

    def __bool__(self) -> bool:
        return any(iter(self))


@torch.no_grad()
def restore(
    path: str | os.PathLike[str],
    target: PyTree | Rules = None,
    *,
    mesh: Mesh | None = None,
    only: Names = None,
    rename: Renaming = None,
    strict: bool = True,
    cast: bool = False,
    trust: bool = False,
) -> Any:
    """Return the content of a folder or file, in the layouts of `target`.

    Args:
        path: a folder of `fs.save`, a model of Hugging Face or peft, safetensors,
            torch.distributed.checkpoint, torch.save.
        target: a tree: its arrays are written in place, its objects get their state, other leaves
            are replaced. Or, with `mesh`, rules of `shard_params` for all arrays; None: plain
            tensors.
        mesh: of the rules.
        only: a name: the part of the checkpoint below it, as a tree. Or patterns, or several
            names: those leaves; others of the target stay.
        rename: from stored names to the target's: {"layers.*.q_proj.*": "blocks.*.q.*"}, or a
            function of the name.
        strict: False: what only one side has stays as it is; returns (tree, differences).
        cast: convert to the target's dtypes.
        trust: True: read a folder of torch.distributed.checkpoint too, whose metadata is a pickle
            that can run any code.

    Arrays on a mesh of some devices are read by these. Other processes read the names, types and
    plain values alone.
    """
    if mesh is None and isinstance(target, P | Fsdp):
        raise ValueError(
            "restore: mesh must be that of the rules; got None. "
            "Give mesh=, or a tree to restore into."
        )
    devices = mesh_of_some(target) if mesh is None else mesh
    has_numbers = devices is not None and devices.is_member and devices.numbers is not None
    with as_device_of(devices if has_numbers else None):
        source = RenamedSource(open_source(Path(path), trust=trust), only, rename)
        if devices is not None and has_numbers:
            _compare_folders(Path(path), devices)
        return restore_from(source, f"restore {path}", target, mesh, strict=strict, cast=cast)


def _compare_folders(path: Path, mesh: Mesh) -> None:
    """Raise on all processes of a mesh of some devices unless they read one checkpoint.

    Those that have saved it wait for each other, and others do not wait for them. So a process that
    is in both meshes may read the new checkpoint of a folder, and another one the last.
    """
    index = path / INDEX
    content = path.name.encode()
    if index.is_file():
        content += index.read_bytes()
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    try:
        compare_inputs("restore", mesh, {"the checkpoint": (values,)})
    except MismatchError as error:
        raise CheckpointError(
            f"restore: {path} was written meanwhile, and the processes of {mesh} have read "
            "different checkpoints. Wait for the processes that save, before it: "
            "fs.broadcast_to(None, source=their_mesh)."
        ) from error


def restore_from(
    source: RenamedSource,
    caller: str,
    target: PyTree | Rules,
    mesh: Mesh | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
) -> Any:
    """Return the content of a source, as a device of the target's mesh."""
    source.check()
    if mesh is not None:
        target = _sharded_tree(source, target, mesh)
    elif target is None:
        target = _plain_tree(source)

    tree, close = opened(target)
    leaves, unflatten = flattened(tree)
    leaves = _separate_numbers(source, leaves)
    states = {leaf.name: _stored_state(source, leaf) for leaf in leaves if is_object(leaf.value)}
    wanted = list(leaves)
    for state in states.values():
        wanted.extend(state.leaves)

    differences, skipped = _compare(source, wanted, states, cast)
    if strict and differences:
        raise CheckpointError(f"{caller}: {_explained(differences)}")
    _read_arrays(source, [leaf for leaf in wanted if leaf.name not in skipped])

    values: list[Any] = []
    for leaf in leaves:
        value = leaf.value
        if leaf.name in states:
            states[leaf.name].load_into(leaf, skipped)
        elif leaf.name in source.values and leaf.name not in skipped:
            _, value = source.values[leaf.name]
        values.append(value)
    tree = close(unflatten(values))
    return tree if strict else (tree, differences)


# -- names ------------------------------------------------------------------------------------------------------------


class RenamedSource(Source):
    """A part of a source, under the target's names."""

    def __init__(self, source: Source, only: Names = None, rename: Renaming = None) -> None:
        self.source = source
        self.partial = source.partial
        patterns = [only] if isinstance(only, str) else list(only or ())
        subtree = only if isinstance(only, str) and "*" not in only else None
        # Patterns limit what a target may miss. A subtree is a tree of its own, of which nothing
        # may be missing.
        self.patterns = None if subtree is not None else patterns or source.partial

        arrays: dict[str, StoredArray] = {}
        values: dict[str, tuple[TreePath, Any]] = {}
        renamed = _renaming(rename)
        stored_names: dict[str, list[str]] = defaultdict(list)  # by new name
        for stored_name, full_path in source.paths.items():
            if subtree is not None:
                path = _path_below(subtree, full_path)
            else:
                path = full_path if self.is_chosen(stored_name) else None
            if path is None:
                continue

            name = name_of(path)
            new_name = renamed(name)
            stored_names[new_name].append(stored_name)
            if new_name != name:
                path = (new_name,)
            if stored_name in source.arrays:
                arrays[new_name] = source.arrays[stored_name]._replace(path=path)
            else:
                _, value = source.values[stored_name]
                values[new_name] = path, value
        self.arrays = arrays
        self.values = values

        _validate_renaming(stored_names)
        self._stored = {new_name: names[0] for new_name, names in stored_names.items()}
        new_names = {stored_name: new_name for new_name, stored_name in self._stored.items()}
        _validate_patterns(patterns, new_names, source)

        ties: dict[str, str] = {}
        for stored_name, first in source.ties.items():
            if stored_name in new_names and first in new_names:
                ties[new_names[stored_name]] = new_names[first]
        self.ties = ties

    def is_chosen(self, name: str) -> bool:
        """Return True if a pattern matches a name, or is the name of a tree above it."""
        return self.patterns is None or any(_is_within(pattern, name) for pattern in self.patterns)

    def check(self) -> None:
        self.source.check()

    def read(self, targets: Sequence[Target]) -> None:
        self.source.read([target._replace(name=self._stored[target.name]) for target in targets])


def _path_below(subtree: str, path: TreePath) -> TreePath | None:
    """Return the path within a subtree; None if the path is not in it."""
    for depth in range(len(path) + 1):
        if name_of(path[:depth]) == subtree:
            return path[depth:]
    return None


def _is_within(pattern: str, name: str) -> bool:
    return matches(pattern, name) or name.startswith(f"{pattern}.")


def _validate_renaming(stored_names: Mapping[str, Sequence[str]]) -> None:
    """Raise if several leaves get one name."""
    texts: list[str] = []
    for new_name, names in stored_names.items():
        if len(names) > 1:
            texts.append(f"{' and '.join(names)} to {new_name}")
    if texts:
        raise CheckpointError(
            f"restore: rename must give each leaf a name of its own; got {', '.join(texts)}."
        )


def _validate_patterns(
    patterns: Sequence[str], chosen_names: Mapping[str, str], source: Source
) -> None:
    """Raise if a pattern of `only=` matches no leaf."""
    unmatched: list[str] = []
    for pattern in patterns:
        if not any(_is_within(pattern, name) for name in chosen_names):
            unmatched.append(repr(pattern))
    if unmatched:
        shown = ", ".join(list(source.paths)[:8])
        raise CheckpointError(
            f"restore: only={', '.join(unmatched)} matches no leaf. The names begin with {shown}."
        )


def _renaming(rename: Renaming) -> Callable[[str], str]:
    """Return the function that renames by the first pattern that matches.

    The stars of the new name are replaced by what those of the pattern match, in their order.

    >>> _renaming({"h.*.q_proj.**": "blocks.*.q.**"})("h.3.q_proj.weight")
    'blocks.3.q.weight'
    """
    if callable(rename):
        return rename
    rules: list[tuple[re.Pattern[str], tuple[str, ...]]] = []
    for pattern, new_name in (rename or {}).items():
        rules.append((_expression(pattern), parts_of(new_name)))

    def renamed(name: str) -> str:
        for expression, new_parts in rules:
            match = expression.fullmatch(f"{name}.")
            if match:
                return _filled_in(new_parts, match.groups())
        return name

    return renamed


def _expression(pattern: str) -> re.Pattern[str]:
    """Return a pattern as a regular expression with a group for each star.

    It matches names with a dot after each component, so that `**` can match no component.
    """
    expressions: list[str] = []
    for component in parts_of(pattern):
        if component == "**":
            expressions.append(r"((?:[^.]+\.)*)")
        else:
            expressions.append(re.escape(component).replace(r"\*", "([^.]*)") + r"\.")
    return re.compile("".join(expressions))


def _filled_in(components: Sequence[str], matched_texts: Sequence[str]) -> str:
    """Return a name whose stars are replaced by texts; a star without a text is empty."""
    texts = iter(matched_texts)
    name = ""
    for component in components:
        if component == "**":
            name += next(texts, "")  # it has a dot after each of its components
        else:
            name += re.sub(r"\*", lambda _: next(texts, ""), component) + "."
    return name.removesuffix(".")


# -- the tree to restore into -----------------------------------------------------------------------------------------


def _plain_tree(source: RenamedSource) -> PyTree:
    """Return a tree of plain tensors and values, as they are stored."""
    return build([*_new_arrays(source, "cpu"), *source.values.values()])


def _sharded_tree(source: RenamedSource, rules: Rules, mesh: Mesh) -> PyTree:
    """Return a tree of values and of arrays that are sharded by rules, with new memory."""
    items = _new_arrays(source, "meta")
    sharded = leaves_of(apply_rules(build(items), rules, mesh, put=reserved))

    # `build` puts items of one container together, so the leaves may be in another order than the
    # items. A tree of their numbers, which is built alike, has this order.
    numbers = leaves_of(build([(path, number) for number, (path, _) in enumerate(items)]))
    sharded_items: list[tuple[TreePath, Any]] = []
    for number, leaf in zip(numbers, sharded, strict=True):
        path, _ = items[number.value]
        sharded_items.append((path, leaf.value))
    return build([*sharded_items, *source.values.values()])


def _new_arrays(source: RenamedSource, device: str) -> list[tuple[TreePath, Tensor]]:
    """Return the path of each array and an empty tensor for it: one tensor for tied arrays."""
    tensors: dict[str, Tensor] = {}
    for name, array in source.arrays.items():
        if name not in source.ties:
            tensors[name] = torch.empty(array.shape, dtype=array.dtype, device=device)
    ties = source.ties
    return [(array.path, tensors[ties.get(name, name)]) for name, array in source.arrays.items()]


def _separate_numbers(source: RenamedSource, leaves: Sequence[NamedLeaf]) -> list[NamedLeaf]:
    """Return leaves of which numbers that are one tensor get memory of their own.

    A new optimizer may count the steps of all its parameters in one tensor, while the stored counts
    differ. Larger arrays that are one tensor are tied, and have one content.
    """
    ids: set[int] = set()
    result: list[NamedLeaf] = []
    for leaf in leaves:
        x = leaf.value
        is_number = isinstance(x, Tensor) and x.ndim == 0
        if is_number and id(x) in ids and leaf.name in source.arrays:
            leaf = NamedLeaf(leaf.path, torch.empty_like(x))
        ids.add(id(x))
        result.append(leaf)
    return result


# -- the state of objects ---------------------------------------------------------------------------------------------


class StoredState(NamedTuple):
    """The stored leaves of the state of an object, with memory for its arrays.

    `like` is the state that the object has, whose tuples and Counters the loaded state gets.
    """

    leaves: list[NamedLeaf]
    like: Any

    def load_into(self, leaf: NamedLeaf, skipped: set[str]) -> None:
        """Load the state, whose arrays have been read, into the object of a leaf."""
        depth = len(leaf.path)
        items = [(x.path[depth:], x.value) for x in self.leaves if x.name not in skipped]
        if items:  # strict=False: without stored state the object stays as it is
            leaf.value.load_state_dict(shaped(build(items), self.like))


def _stored_state(source: RenamedSource, leaf: NamedLeaf) -> StoredState:
    """Return the stored state of an object."""
    if isinstance(leaf.value, InstanceState):
        # Its `state_dict` is not used: before the first step it has no state.
        return StoredState(_instance_state_leaves(source, leaf.value, leaf.path), {})

    like = leaf.value.state_dict()
    current: dict[str, NamedLeaf] = {}
    for x in leaves_of(like):
        state_leaf = NamedLeaf((*leaf.path, *x.path), x.value)
        current[state_leaf.name] = state_leaf

    stored: dict[str, NamedLeaf] = {}
    for name, path in _paths_below(source, leaf.path):
        array = source.arrays.get(name)
        if array is None:
            _, value = source.values[name]
        else:
            value = current[name].value if name in current else None
            # A random state gets the rows of all devices that have saved, however many there are.
            if isinstance(leaf.value, RandomState) or not is_array(value):
                value = torch.empty(array.shape, dtype=array.dtype)
        stored[name] = NamedLeaf(path, value)

    # A tied array may be stored under one of its names alone, as Hugging Face does. The object
    # must get it under all.
    keys = {tie_key(x.value) for x in stored.values() if is_array(x.value)}
    leaves = list(stored.values())
    for name, x in current.items():
        if name not in stored and is_array(x.value) and tie_key(x.value) in keys:
            leaves.append(x)
    return StoredState(leaves, like)


def _instance_state_leaves(
    source: RenamedSource, state: InstanceState, object_path: TreePath
) -> list[NamedLeaf]:
    """Return the stored leaves of the state of an optimizer class of one's own, with new memory.

    State of unknown parameters is left out, and so unexpected.
    """
    leaves: list[NamedLeaf] = []
    for name, path in _paths_below(source, object_path):
        array = source.arrays.get(name)
        if array is None:
            _, value = source.values[name]
        else:
            parameter = name_of(path[len(object_path) + 1 :])  # after the key of the state
            value = state.state_memory(parameter, array.shape, array.dtype)
            if value is None:
                continue
        leaves.append(NamedLeaf(path, value))
    return leaves


def _paths_below(source: RenamedSource, object_path: TreePath) -> Iterator[tuple[str, TreePath]]:
    """Yield the names and paths of the stored leaves at a path and below it."""
    depth = len(object_path)
    for name, path in source.paths.items():
        if path[:depth] == object_path:
            yield name, path


# -- differences ------------------------------------------------------------------------------------------------------


def _compare(
    source: RenamedSource,
    wanted: Sequence[NamedLeaf],
    states: Mapping[str, StoredState],
    cast: bool,
) -> tuple[Differences, set[str]]:
    """Return the differences of target and checkpoint, and the names of leaves not to be read."""
    values = {leaf.name: leaf.value for leaf in wanted if not is_object(leaf.value)}
    stored_names = source.paths.keys()

    missing = _missing_names(source, values, stored_names)
    for name, state in states.items():
        if not state.leaves and source.is_chosen(name):
            missing.append(name)
    misfits: dict[str, str] = {}
    for name, x in values.items():
        misfit = _misfit(source, name, x, cast) if name in stored_names else None
        if misfit is not None:
            misfits[name] = misfit

    unexpected = _unexpected_names(source, values, stored_names)
    differences = Differences(tuple(missing), tuple(unexpected), tuple(misfits.values()))
    return differences, {*missing, *misfits}


def _missing_names(
    source: RenamedSource, values: Mapping[str, Any], stored_names: Set[str]
) -> list[str]:
    """Return the names of the target's leaves that are not stored under any of their names."""
    absent: list[str] = []
    for name, x in values.items():
        if x is None or name in stored_names:
            continue  # None is nothing to restore
        if source.is_chosen(name):
            absent.append(name)
    if not absent:
        return []

    stored_keys: set[tuple[Any, ...]] = set()
    for name, x in values.items():
        if is_array(x) and name in stored_names:
            stored_keys.add(tie_key(x))
    missing: list[str] = []
    for name in absent:
        x = values[name]
        if not (is_array(x) and tie_key(x) in stored_keys):
            missing.append(name)
    return missing


def _unexpected_names(
    source: RenamedSource, values: Mapping[str, Any], stored_names: Set[str]
) -> list[str]:
    """Return the sorted names of stored leaves that the target has under none of their names."""
    ties = source.ties
    used_names = {ties.get(name, name) for name in values}
    for name, (_, value) in source.values.items():
        if value in (None, {}, []):
            used_names.add(name)  # nothing to restore: the target may be without it
    return sorted(
        name for name in stored_names - values.keys() if ties.get(name, name) not in used_names
    )


def _misfit(source: RenamedSource, name: str, x: Any, cast: bool) -> str | None:
    """Return the text of an error if a stored leaf does not fit the target's."""
    stored = source.arrays.get(name)
    if stored is None:
        return f"{name} must be an array; got a value" if is_array(x) else None
    if not is_array(x):
        return f"{name} must be a value; got an array"

    # The number of summands is that of the devices, which may differ: see `_summand_reads`.
    is_summed = isinstance(x, SummandArray) and tuple(x.shape[1:]) == stored.shape[1:]
    if tuple(x.shape) != stored.shape and not is_summed:
        return f"{name} must have shape {tuple(x.shape)}; got {stored.shape}"
    if x.dtype != stored.dtype and not cast:
        expected, actual = dtype_name(x.dtype), dtype_name(stored.dtype)
        return f"{name} must have dtype {expected}; got {actual} (cast=True converts it)"
    if any(isinstance(array, Tensor) and array.is_meta for _, array in stored_parts(x)):
        return f"{name} must have memory; got a meta tensor: give rules and mesh="
    return None


def _explained(differences: Differences) -> str:
    """Return differences in words."""
    missing, unexpected, misshaped = differences
    texts: list[str] = []
    if missing:
        texts.append(f"missing in the checkpoint: {_listed(missing, ', ')}")
    if unexpected:
        texts.append(f"unexpected in the checkpoint: {_listed(unexpected, ', ')}")
    if misshaped:
        texts.append(_listed(misshaped, "; "))
    fix = "Give only=, rename= or strict=False to restore a part."
    outer_of_stored, outer_of_wanted = _path_of_scale(unexpected), _path_of_scale(missing)
    if outer_of_stored is not None:
        texts.append(
            'the checkpoint has the state of loss_scaled (precision="fp16"), and the target has that '
            "of an optimizer without a loss scale"
        )
        if outer_of_stored.removesuffix(".") not in missing:  # an object finds no renamed leaves
            fix = _fix_of_scale(f"{outer_of_stored}inner.**", f"{outer_of_stored}**")
    elif outer_of_wanted is not None:
        texts.append(
            "the checkpoint has the state of an optimizer without a loss scale, and the target has "
            'that of loss_scaled (precision="fp16")'
        )
        if f"{outer_of_wanted}inner" not in missing:
            fix = _fix_of_scale(f"{outer_of_wanted}**", f"{outer_of_wanted}inner.**")
    elif _has_state(missing) and _has_state(unexpected):
        texts.append("the state is of another optimizer")
    return f"{'. '.join(texts)}. {fix}"


def _path_of_scale(names: Sequence[str]) -> str | None:
    """Return the path, with its dot, of a state of `loss_scaled` by the names of its numbers.

    None if there is none.
    """
    for name in names:
        prefix = name.removesuffix("scale")
        if prefix != name and f"{prefix}patience" in names:
            return prefix
    return None


def _fix_of_scale(stored: str, wanted: str) -> str:
    renaming = f'{{"{stored}": "{wanted}"}}'
    return f"Give fs.restore rename={renaming} and strict=False to restore all but the scale."


def _listed(names: Sequence[str], comma: str) -> str:
    """Return the first names, and the number of the others."""
    shown = [name or "a leaf without a name" for name in names[:20]]
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"{comma.join(shown)}{more}"


def _has_state(names: Sequence[str]) -> bool:
    return any(name.startswith("state.") for name in names)


# -- reads ------------------------------------------------------------------------------------------------------------


class ShardRead(NamedTuple):
    """The ranges to read for one shard.

    `finish` moves them into the shard after the read; None: the shard's own memory is read into.
    """

    targets: Sequence[Target]
    finish: Callable[[], object] | None = None


def _read_arrays(source: RenamedSource, leaves: Sequence[NamedLeaf]) -> None:
    """Read all stored arrays of some leaves into their shards, tied ones once."""
    untied: dict[tuple[Any, ...], NamedLeaf] = {}
    for leaf in leaves:
        if leaf.name in source.arrays and is_array(leaf.value):
            untied[tie_key(leaf.value)] = leaf

    targets: list[Target] = []
    finishes: list[Callable[[], object]] = []
    for leaf in untied.values():
        for shard_read in _shard_reads(leaf, source.arrays[leaf.name].shape):
            targets.extend(shard_read.targets)
            if shard_read.finish is not None:
                finishes.append(shard_read.finish)
    source.read(targets)  # at once: it reads each block of a file for all targets
    for finish in finishes:
        finish()


def _shard_reads(leaf: NamedLeaf, stored_shape: tuple[int, ...]) -> Iterator[ShardRead]:
    """Yield the reads of the shards of an array that are held here."""
    if tuple(leaf.value.shape) != stored_shape:
        yield from _summand_reads(leaf, stored_shape[0])
        return
    for offset, x in stored_parts(leaf.value):
        for span, shard in _spans(x):
            if shard.numel():
                yield _shard_read(leaf.name, span.moved(offset), shard.detach())


def _shard_read(name: str, span: Span, shard: Tensor) -> ShardRead:
    """Return the read of one shard: by way of a contiguous copy if its elements have gaps."""
    if shard.is_contiguous():
        return ShardRead([Target(name, span, shard.view(-1))])
    memory = torch.empty_like(shard, memory_format=torch.contiguous_format)
    return ShardRead([Target(name, span, memory.view(-1))], lambda: shard.copy_(memory))


def _summand_reads(leaf: NamedLeaf, count: int) -> Iterator[ShardRead]:
    """Yield the reads of an unreduced array of which another number of summands is stored.

    The first device reads all, and its summand is their total; those of the others are 0.
    """
    for span, shard in _spans(leaf.value):
        rows = torch.zeros(count, shard.numel(), dtype=shard.dtype)
        summand, *block = span.block
        targets: list[Target] = []
        if summand[0] == 0 and shard.numel():
            for row in range(count):
                row_span = Span(((row, row + 1), *block), span.start, span.stop)
                targets.append(Target(leaf.name, row_span, rows[row]))

        def add(shard: Tensor = shard, rows: Tensor = rows) -> None:
            shard.copy_(rows.sum(0).view(shard.shape))

        yield ShardRead(targets, add)


def _spans(x: Any) -> list[tuple[Span, Tensor]]:
    """Return the ranges of an array that are held here, and their shards."""
    if not isinstance(x, Sharded):
        return [(full_span(x.shape), x)]
    if not x.is_local:
        return []
    x.check()
    devices = local_devices(x.mesh)
    pairs = zip(devices, x.shards, strict=True)
    return [(span_of(x.layout, x.shape, device), shard) for device, shard in pairs]
