"""Restore a checkpoint into any layout: `fs.restore`. Each device reads what its shards need; nothing is sent.

    names      of the target's leaves and of what is stored: missing, unexpected, other shapes and dtypes are one error
    targets    the range of each shard held here, and its memory
    source     reads, verifies and copies

Nothing is written to before names, shapes, dtypes and digests are checked: a file is read twice.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.copying import Span
from fshard.checkpoint.division import span_of
from fshard.checkpoint.foreign.formats import open_source
from fshard.checkpoint.names import (
    NamedLeaf,
    SummandArray,
    build,
    flattened,
    is_array,
    is_object,
    leaves_of,
    name_of,
    opened,
    shaped,
    stored_parts,
)
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.source import Source, StoredArray, Target
from fshard.errors import CheckpointError
from fshard.mesh.layout import Mesh, P, PyTree
from fshard.mesh.layout.layout import dtype_name
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.spmd.run import local_devices
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
        return bool(self.missing or self.unexpected or self.misshaped)


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
) -> Any:
    """Return the content of a folder or file, in the layouts of `target`.

    Args:
        path: a folder of `fs.save`, a model of Hugging Face or peft, safetensors, torch.distributed.checkpoint, torch.save.
        target: a tree: its arrays are written in place, its objects get their state, other leaves are replaced. Or, with
            `mesh`, rules of `shard_params` for all arrays; None: plain tensors.
        mesh: of the rules.
        only: a name: the part of the checkpoint below it, as a tree. Or patterns, or several names: those leaves; others of
            the target stay.
        rename: from stored names to the target's: {"layers.*.q_proj.*": "blocks.*.q.*"}, or a function of the name.
        strict: False: what only one side has stays as it is; returns (tree, differences).
        cast: convert to the target's dtypes.
    """
    if mesh is None and isinstance(target, P | Fsdp):
        raise ValueError("restore: mesh must be that of the rules; got None. Give mesh=, or a tree to restore into.")
    source = RenamedSource(open_source(Path(path)), only, rename)
    source.check()
    if mesh is not None:
        target = _tree_of(source, lambda tree: apply_rules(tree, target, mesh, put=reserved))
    elif target is None:
        target = _tree_of(source)
    result, differences = fill(source, target, strict=strict, cast=cast, what=f"restore {path}")
    return result if strict else (result, differences)


class RenamedSource:
    """A part of a source, under the target's names."""

    def __init__(self, source: Source, only: Names = None, rename: Renaming = None) -> None:
        self.source, self.partial = source, source.partial
        under = only if isinstance(only, str) and "*" not in only else None
        self.patterns = None if under is not None else [only] if isinstance(only, str) else only or source.partial
        self.arrays: dict[str, StoredArray] = {}
        self.values: dict[str, tuple[TreePath, Any]] = {}
        self._stored: dict[str, str] = {}
        sources: dict[str, list[str]] = defaultdict(list)
        for name, path in [(name, at) for found in (source.arrays, source.values) for name, (at, *_) in found.items()]:
            if (under is None and not self.is_chosen(name)) or (below := _below_name(path, under)) is None:
                continue
            new = _renamed(name_of(below), rename)
            path = below if new == name_of(below) else (new,)
            sources[new].append(name)
            self._stored[new] = name
            if name in source.arrays:
                self.arrays[new] = source.arrays[name]._replace(path=path)
            else:
                self.values[new] = path, source.values[name][1]
        if several := [f"{' and '.join(names)} to {new}" for new, names in sources.items() if len(names) > 1]:
            raise CheckpointError(f"restore: rename must give each leaf a name of its own; got {', '.join(several)}.")
        chosen, given = self._stored.values(), [only] if isinstance(only, str) else only or []
        if unmatched := [repr(one) for one in given if not any(_is_within(one, name) for name in chosen)]:
            known = ", ".join([*source.arrays, *source.values][:8])
            raise CheckpointError(
                f"restore: only={', '.join(unmatched)} matches no leaf. The names begin with {known}."
            )
        found = {old: new for new, old in self._stored.items()}
        self.ties = {found[old]: found[of] for old, of in source.ties.items() if old in found and of in found}

    def is_chosen(self, name: str) -> bool:
        """Return True if a pattern matches a name, or is the name of a tree above it."""
        return self.patterns is None or any(_is_within(one, name) for one in self.patterns)

    def check(self) -> None:
        self.source.check()

    def read(self, targets: Sequence[Target]) -> None:
        self.source.read([target._replace(name=self._stored[target.name]) for target in targets])


def _is_within(pattern: str, name: str) -> bool:
    return matches(pattern, name) or name.startswith(f"{pattern}.")


def _below_name(path: TreePath, name: str | None) -> TreePath | None:
    """Return the rest of a path after a name; None if the path does not begin with it."""
    if name is None:
        return path
    return next((path[n:] for n in range(len(path) + 1) if name_of(path[:n]) == name), None)


def _renamed(name: str, rename: Renaming) -> str:
    """Return a name as the first pattern that matches it renames it: stars of the new name are what those of the old matched.

    >>> _renamed("h.3.q_proj.weight", {"h.*.q_proj.**": "blocks.*.q.**"})
    'blocks.3.q.weight'
    """
    if callable(rename):
        return rename(name)
    for old, new in (rename or {}).items():
        parts = [re.escape(part).replace(r"\*", "([^.]*)") + r"\." for part in parts_of(old)]
        pattern = "".join(parts).replace(r"([^.]*)([^.]*)\.", r"((?:[^.]+\.)*)")
        if found := re.fullmatch(pattern, f"{name}."):
            parts = re.split(r"(\*\*\.|\*)", "".join(f"{part}." for part in parts_of(new)))
            stars = [*found.groups(), *[""] * len(parts)]
            return "".join(stars.pop(0) if part.startswith("*") else part for part in parts).removesuffix(".")
    return name


def _tree_of(source: RenamedSource, place: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    """Return a tree of what is stored: of plain tensors, or of the arrays that `place` makes of those without memory."""
    where = "cpu" if place is None else "meta"
    own = {name: one for name, one in source.arrays.items() if source.ties.get(name, name) == name}
    made = {name: torch.empty(one.shape, dtype=one.dtype, device=where) for name, one in own.items()}
    items = [(one.path, made[source.ties.get(name, name)]) for name, one in source.arrays.items()]
    if place is not None:  # a tree of arrays alone
        order = leaves_of(build([(path, number) for number, (path, _) in enumerate(items)]))
        pairs = zip(order, leaves_of(place(build(items))), strict=True)
        items = [(items[number.value][0], leaf.value) for number, leaf in pairs]
    return build([*items, *source.values.values()])


def fill(source: Any, tree: PyTree, *, strict: bool, cast: bool, what: str) -> tuple[PyTree, Differences]:
    """Read a source into a tree: return the tree, and what is only on one side."""
    tree, closed = opened(tree)
    leaves, unflatten = flattened(tree)
    leaves = _apart(source, leaves)
    below = _below(source, [leaf for leaf in leaves if is_object(leaf.value)])
    wanted = [*leaves, *(one for found in below.values() for one in found)]
    differences, misshaped = _compare(source, wanted, below, cast)
    if strict and differences:
        raise CheckpointError(f"{what}: {_explained(differences)}")
    unfit = {*differences.missing, *misshaped}
    fit, after = [leaf for leaf in wanted if leaf.name not in unfit], list[Callable[[], object]]()
    once = {_key(leaf.value): leaf for leaf in fit if is_array(leaf.value) and leaf.name in source.arrays}
    source.read([one for leaf in once.values() for one in _targets(leaf, source.arrays[leaf.name].shape, after)])
    for act in after:
        act()
    result = list[Any]()
    for leaf in leaves:
        if leaf.name in below:
            found = [(one.path[len(leaf.path) :], one.value) for one in below[leaf.name] if one.name not in unfit]
            if found:
                like = {} if hasattr(leaf.value, "state_memory") else leaf.value.state_dict()
                leaf.value.load_state_dict(shaped(build(found), like))
        is_value = leaf.name in source.values and leaf.name not in unfit | below.keys()
        result.append(source.values[leaf.name][1] if is_value else leaf.value)
    return closed(unflatten(result)), differences


def _apart(source: Any, leaves: Sequence[NamedLeaf]) -> list[NamedLeaf]:
    """Return leaves of which numbers that are one tensor get memory of their own: counts of steps may differ."""
    seen, found = set[int](), list[NamedLeaf]()
    for leaf in leaves:
        x = leaf.value
        again = isinstance(x, Tensor) and x.ndim == 0 and leaf.name in source.arrays and id(x) in seen
        seen.add(id(x))
        found.append(NamedLeaf(leaf.path, torch.empty_like(x)) if again else leaf)
    return found


def _below(source: Any, objects: Sequence[NamedLeaf]) -> dict[str, list[NamedLeaf]]:
    """Return the stored leaves of the state of each object, with memory for its arrays: the object's own, or new."""
    below: dict[str, list[NamedLeaf]] = {}
    for leaf in objects:
        memory = getattr(leaf.value, "state_memory", None)  # of an object whose own state may be empty
        state = {} if memory is not None else leaf.value.state_dict()
        inner = [NamedLeaf((*leaf.path, *one.path), one.value) for one in leaves_of(state)]
        own = {one.name: one.value for one in inner}
        found = below.setdefault(leaf.name, [])
        for name, (path, *_) in {**source.arrays, **source.values}.items():
            if path[: len(leaf.path)] == leaf.path:
                value = source.values[name][1] if name in source.values else own.get(name)
                stored, is_free = source.arrays.get(name), getattr(leaf.value, "takes_any_shape", False)
                if stored is not None and memory is not None:
                    value = memory(name_of(path[len(leaf.path) + 1 :]), stored.shape, stored.dtype)
                elif stored is not None and (is_free or not is_array(value)):
                    value = torch.empty(stored.shape, dtype=stored.dtype)
                if stored is None or value is not None:  # else it is unexpected
                    found.append(NamedLeaf(path, value))
        known, tied = {one.name for one in found}, {_key(one.value) for one in found if is_array(one.value)}
        found += [one for one in inner if one.name not in known and is_array(one.value) and _key(one.value) in tied]
    return below


def _compare(
    source: Any, wanted: Sequence[NamedLeaf], below: Mapping[str, Sequence[NamedLeaf]], cast: bool
) -> tuple[Differences, set[str]]:
    """Return the differences between what is stored and what is wanted, and the names of misshaped leaves."""
    names = {leaf.name: leaf.value for leaf in wanted if not is_object(leaf.value)}
    stored = {*source.arrays, *source.values}
    tied = {_key(x) for name, x in names.items() if name in stored and is_array(x)}
    missing = [name for name, x in names.items() if name not in stored and x is not None]
    missing = [name for name in missing if not is_array(names[name]) or _key(names[name]) not in tied]
    missing += [name for name, found in below.items() if not found]
    filled = {source.ties.get(name, name) for name in names}
    filled |= {name for name, (_, value) in source.values.items() if value in (None, {}, [])}  # nothing to restore
    unexpected = [name for name in stored - names.keys() if source.ties.get(name, name) not in filled]
    texts = {name: text for name, x in names.items() if name in stored and (text := _unfit(source, name, x, cast))}
    missing = tuple(filter(source.is_chosen, missing))
    return Differences(missing, tuple(sorted(unexpected)), tuple(texts.values())), {*texts}


def _key(x: Any) -> tuple[Any, ...]:
    """Return a key that is equal for tied arrays."""
    return tuple([key_of(part) for _, part in stored_parts(x)])


def _unfit(source: Any, name: str, x: Any, cast: bool) -> str | None:
    """Return how a stored leaf differs from the target's."""
    stored = source.arrays.get(name)
    if (stored is None) == is_array(x):
        kinds = ("an array", "a value") if stored is None else ("a value", "an array")
        return f"{name} must be {kinds[0]}; got {kinds[1]}"
    if stored is None:
        return None
    if tuple(x.shape) != stored.shape and not (isinstance(x, SummandArray) and tuple(x.shape[1:]) == stored.shape[1:]):
        return f"{name} must have shape {tuple(x.shape)}; got {stored.shape}"
    if x.dtype != stored.dtype and not cast:
        return f"{name} must have dtype {dtype_name(x.dtype)}; got {dtype_name(stored.dtype)} (cast=True converts it)"
    if any(isinstance(part, Tensor) and part.is_meta for _, part in stored_parts(x)):
        return f"{name} must have memory; got a meta tensor: give rules and mesh="
    return None


def _explained(found: Differences) -> str:
    """Return differences in words."""
    texts = list[str]()
    for what, names in (("missing", found.missing), ("unexpected", found.unexpected)):
        if names:
            texts.append(f"{what} in the checkpoint: {', '.join(names[:20])}{_more(names)}")
    if found.misshaped:
        texts.append(f"{'; '.join(found.misshaped[:20])}{_more(found.misshaped)}")
    kinds = [{name.split(".")[1] for name in names if name.startswith("state.")} for names in found[:2]]
    if all(kinds):
        texts.append("the state is of another optimizer")
    return f"{'. '.join(texts)}. Give only=, rename= or strict=False to restore a part."


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 20} more" if len(names) > 20 else ""


def _targets(leaf: NamedLeaf, stored: tuple[int, ...], after: list[Callable[[], object]]) -> Iterator[Target]:
    """Yield the ranges of an array that are held here, with their memory."""
    if tuple(leaf.value.shape) != stored:
        yield from _summand_targets(leaf, stored[0], after)
        return
    pairs = [(at, *pair) for at, x in stored_parts(leaf.value) for pair in _spans(x)]
    for at, span, shard in pairs:
        if any(at):
            block = tuple([(a + start, b + start) for (a, b), start in zip(span.block, at, strict=True)])
            span = Span(block, span.start, span.stop)
        shard = shard.detach()
        if not shard.numel():
            continue
        if not shard.is_contiguous():
            buffer = torch.empty(shard.numel(), dtype=shard.dtype, device=shard.device)
            after.append(lambda shard=shard, buffer=buffer: shard.copy_(buffer.view(shard.shape)))
            yield Target(leaf.name, span, buffer)
        else:
            yield Target(leaf.name, span, shard.view(-1))


def _summand_targets(leaf: NamedLeaf, count: int, after: list[Callable[[], object]]) -> Iterator[Target]:
    """Yield the ranges of all summands of an array, of which the first device gets the total."""
    for span, shard in _spans(leaf.value):
        rows, (first, *block) = torch.zeros(count, shard.numel(), dtype=shard.dtype), span.block
        if first[0] == 0 and shard.numel():
            for row in range(count):
                yield Target(leaf.name, Span(((row, row + 1), *block), span.start, span.stop), rows[row])
        after.append(lambda shard=shard, rows=rows: shard.copy_(rows.sum(0).view(shard.shape)))


def _spans(x: Any) -> list[tuple[Span, Tensor]]:
    """Return the ranges of an array that are held here."""
    if isinstance(x, Sharded):
        x.check()
        devices = local_devices(x.mesh)
        return [(span_of(x.layout, x.shape, device), shard) for device, shard in zip(devices, x.shards, strict=True)]
    return [(Span(tuple([(0, length) for length in x.shape or (1,)]), 0, x.numel()), x)]
