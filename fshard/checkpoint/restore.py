"""Restore a checkpoint into any layout: `fs.restore`. Each device reads what its shards need; nothing is sent.

    compare    names, shapes and dtypes of the target with what is stored: all differences are one error
    targets    the range of each shard held here, and its memory
    read       the source verifies, and copies

Nothing is written to before names, shapes, dtypes and digests are checked: a file is read twice.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.checkpoint.copying import Span, full_span
from fshard.checkpoint.division import span_of
from fshard.checkpoint.foreign.formats import open_source
from fshard.checkpoint.names import (
    NamedLeaf,
    SummandArray,
    TreePath,
    build,
    flattened,
    is_array,
    is_object,
    leaves_of,
    name_of,
    opened,
    shaped,
    stored_parts,
    tie_key,
)
from fshard.checkpoint.random import RandomState
from fshard.checkpoint.source import Source, StoredArray, Target
from fshard.errors import CheckpointError
from fshard.mesh.layout import Mesh, P, PyTree, dtype_name
from fshard.mesh.layout.sharded import Sharded
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
        path: a folder of `fs.save`, a model of Hugging Face or peft, safetensors, torch.distributed.checkpoint, torch.save.
        target: a tree: its arrays are written in place, its objects get their state, other leaves are replaced. Or, with
            `mesh`, rules of `shard_params` for all arrays; None: plain tensors.
        mesh: of the rules.
        only: a name: the part of the checkpoint below it, as a tree. Or patterns, or several names: those leaves; others of
            the target stay.
        rename: from stored names to the target's: {"layers.*.q_proj.*": "blocks.*.q.*"}, or a function of the name.
        strict: False: what only one side has stays as it is; returns (tree, differences).
        cast: convert to the target's dtypes.
        trust: True: read a folder of torch.distributed.checkpoint too, whose metadata is a pickle that can run any code.
    """
    if mesh is None and isinstance(target, P | Fsdp):
        raise ValueError(
            "restore: mesh must be that of the rules; got None. Give mesh=, or a tree to restore into."
        )
    source = RenamedSource(open_source(Path(path), trust=trust), only, rename)
    source.check()
    if mesh is not None:
        target = _tree_of(source, lambda tree: apply_rules(tree, target, mesh, put=reserved))
    elif target is None:
        target = _tree_of(source)
    tree, close = opened(target)
    leaves, unflatten = flattened(tree)
    leaves = _separate_numbers(source, leaves)
    states = {leaf.name: _state_leaves(source, leaf) for leaf in leaves if is_object(leaf.value)}
    wanted = [*leaves, *chain(*states.values())]
    differences, unfit = _compare(source, wanted, states, cast)
    if strict and differences:
        raise CheckpointError(f"restore {path}: {_explained(differences)}")
    arrays = [
        x for x in wanted if x.name not in unfit and x.name in source.arrays and is_array(x.value)
    ]
    untied, finish = {tie_key(leaf.value): leaf for leaf in arrays}, list[Callable[[], object]]()
    source.read(
        [
            x
            for leaf in untied.values()
            for x in _targets(leaf, source.arrays[leaf.name].shape, finish)
        ]
    )
    for action in finish:
        action()
    result = list[Any]()
    for leaf in leaves:
        state = [
            (x.path[len(leaf.path) :], x.value)
            for x in states.get(leaf.name, ())
            if x.name not in unfit
        ]
        if state:
            is_instance = isinstance(leaf.value, InstanceState)  # its state may be empty
            like = {} if is_instance else leaf.value.state_dict()
            leaf.value.load_state_dict(shaped(build(state), like))
        is_value = leaf.name in source.values and leaf.name not in unfit | states.keys()
        result.append(source.values[leaf.name][1] if is_value else leaf.value)
    tree = close(unflatten(result))
    return tree if strict else (tree, differences)


class RenamedSource(Source):
    """A part of a source, under the target's names."""

    def __init__(self, source: Source, only: Names = None, rename: Renaming = None) -> None:
        self.source, self.partial = source, source.partial
        patterns = [only] if isinstance(only, str) else only or ()
        subtree = only if isinstance(only, str) and "*" not in only else None
        self.patterns = None if subtree is not None else patterns or source.partial
        self.arrays, self.values = dict[str, StoredArray](), dict[str, tuple[TreePath, Any]]()
        stored: dict[str, list[str]] = defaultdict(list)  # by new name
        for name, path in source.paths.items():
            prefixes = (
                range(len(path) + 1) if subtree is not None else [0] if self.is_chosen(name) else []
            )
            depth = next((n for n in prefixes if subtree in (None, name_of(path[:n]))), None)
            if depth is None:
                continue
            path = path[depth:]
            new = _renamed(name_of(path), rename)
            stored[new].append(name)
            path = path if new == name_of(path) else (new,)
            if name in source.arrays:
                self.arrays[new] = source.arrays[name]._replace(path=path)
            else:
                self.values[new] = path, source.values[name][1]
        if repeated := [
            f"{' and '.join(names)} to {new}" for new, names in stored.items() if len(names) > 1
        ]:
            raise CheckpointError(
                f"restore: rename must give each leaf a name of its own; got {', '.join(repeated)}."
            )
        self._stored = {new: name for new, (name,) in stored.items()}
        renamed = {name: new for new, name in self._stored.items()}
        if unmatched := [
            repr(x) for x in patterns if not any(_is_within(x, name) for name in renamed)
        ]:
            text = f"restore: only={', '.join(unmatched)} matches no leaf."
            raise CheckpointError(f"{text} The names begin with {', '.join([*source.paths][:8])}.")
        self.ties = {
            renamed[x]: renamed[y] for x, y in source.ties.items() if x in renamed and y in renamed
        }

    def is_chosen(self, name: str) -> bool:
        """Return True if a pattern matches a name, or is the name of a tree above it."""
        return self.patterns is None or any(_is_within(pattern, name) for pattern in self.patterns)

    def check(self) -> None:
        self.source.check()

    def read(self, targets: Sequence[Target]) -> None:
        self.source.read([target._replace(name=self._stored[target.name]) for target in targets])


def _is_within(pattern: str, name: str) -> bool:
    return matches(pattern, name) or name.startswith(f"{pattern}.")


def _renamed(name: str, rename: Renaming) -> str:
    """Return a name as the first pattern that matches it renames it: stars of the new name are what those of the old matched.

    >>> _renamed("h.3.q_proj.weight", {"h.*.q_proj.**": "blocks.*.q.**"})
    'blocks.3.q.weight'
    """
    if callable(rename):
        return rename(name)
    for old, new in (rename or {}).items():
        parts = [re.escape(x).replace(r"\*", "([^.]*)") + r"\." for x in parts_of(old)]
        pattern = "".join(parts).replace(r"([^.]*)([^.]*)\.", r"((?:[^.]+\.)*)")
        if match := re.fullmatch(pattern, f"{name}."):
            parts = re.split(r"(\*\*\.|\*)", "".join(f"{x}." for x in parts_of(new)))
            stars = [*match.groups(), *[""] * len(parts)]
            return "".join(stars.pop(0) if x.startswith("*") else x for x in parts).removesuffix(
                "."
            )
    return name


def _tree_of(source: RenamedSource, shard: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    """Return a tree of what is stored: of plain tensors, or of the arrays that `shard` returns for those without memory."""
    device, ties = "cpu" if shard is None else "meta", source.ties
    untied = {name: x for name, x in source.arrays.items() if name not in ties}
    memory = {
        name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in untied.items()
    }
    items = [(x.path, memory[ties.get(name, name)]) for name, x in source.arrays.items()]
    if shard is not None:  # a tree of arrays alone
        order = leaves_of(build([(path, number) for number, (path, _) in enumerate(items)]))
        pairs = zip(order, leaves_of(shard(build(items))), strict=True)
        items = [(items[number.value][0], leaf.value) for number, leaf in pairs]
    return build([*items, *source.values.values()])


def _separate_numbers(source: RenamedSource, leaves: Sequence[NamedLeaf]) -> list[NamedLeaf]:
    """Return leaves of which numbers that are the same tensor get memory of their own: counts of steps may differ."""
    ids, result = set[int](), list[NamedLeaf]()
    for leaf in leaves:
        x = leaf.value
        is_shared = (
            isinstance(x, Tensor) and x.ndim == 0 and leaf.name in source.arrays and id(x) in ids
        )
        ids.add(id(x))
        result.append(NamedLeaf(leaf.path, torch.empty_like(x)) if is_shared else leaf)
    return result


def _state_leaves(source: RenamedSource, leaf: NamedLeaf) -> list[NamedLeaf]:
    """Return the stored leaves of the state of an object, with memory for its arrays: the object's, or new."""
    memory = None
    if isinstance(leaf.value, InstanceState):  # its state may be empty
        memory = leaf.value.state_memory
    state = {} if memory is not None else leaf.value.state_dict()
    current = {
        x.name: x for x in (NamedLeaf((*leaf.path, *x.path), x.value) for x in leaves_of(state))
    }
    result, depth = dict[str, NamedLeaf](), len(leaf.path)
    for name, path in source.paths.items():
        if path[:depth] != leaf.path:
            continue
        value, stored = current[name].value if name in current else None, source.arrays.get(name)
        if stored is None:
            value = source.values[name][1]
        elif memory is not None:
            value = memory(name_of(path[depth + 1 :]), stored.shape, stored.dtype)
            if value is None:  # it is unexpected
                continue
        elif isinstance(leaf.value, RandomState) or not is_array(value):
            # A RandomState takes the rows of all devices that have saved it.
            value = torch.empty(stored.shape, dtype=stored.dtype)
        result[name] = NamedLeaf(path, value)
    tied = {tie_key(x.value) for x in result.values() if is_array(x.value)}
    names = [
        name
        for name, x in current.items()
        if name not in result and is_array(x.value) and tie_key(x.value) in tied
    ]
    return [*result.values(), *(current[name] for name in names)]


def _compare(
    source: RenamedSource,
    wanted: Sequence[NamedLeaf],
    states: Mapping[str, Sequence[NamedLeaf]],
    cast: bool,
) -> tuple[Differences, set[str]]:
    """Return the differences between what is stored and what is wanted, and the names of leaves that are not read."""
    values = {leaf.name: leaf.value for leaf in wanted if not is_object(leaf.value)}
    stored = source.paths.keys()
    tied = {tie_key(x) for name, x in values.items() if name in stored and is_array(x)}
    absent = {name: x for name, x in values.items() if name not in stored and x is not None}
    missing = [name for name, x in absent.items() if not (is_array(x) and tie_key(x) in tied)]
    missing += [name for name, state in states.items() if not state]
    used = {source.ties.get(name, name) for name in values}
    used |= {
        name for name, (_, value) in source.values.items() if value in (None, {}, [])
    }  # nothing to restore
    unexpected = sorted(
        name for name in stored - values.keys() if source.ties.get(name, name) not in used
    )
    texts = {
        name: text
        for name, x in values.items()
        if name in stored and (text := _misfit(source, name, x, cast))
    }
    differences = Differences(
        tuple(filter(source.is_chosen, missing)), tuple(unexpected), tuple(texts.values())
    )
    return differences, {*differences.missing, *texts}


def _misfit(source: RenamedSource, name: str, x: Any, cast: bool) -> str | None:
    """Return how a stored leaf differs from the target's."""
    stored = source.arrays.get(name)
    if (stored is None) == is_array(x):
        kinds = ("an array", "a value") if stored is None else ("a value", "an array")
        return f"{name} must be {kinds[0]}; got {kinds[1]}"
    if stored is None:
        return None
    if tuple(x.shape) != stored.shape and not (
        isinstance(x, SummandArray) and tuple(x.shape[1:]) == stored.shape[1:]
    ):
        return f"{name} must have shape {tuple(x.shape)}; got {stored.shape}"
    if x.dtype != stored.dtype and not cast:
        return f"{name} must have dtype {dtype_name(x.dtype)}; got {dtype_name(stored.dtype)} (cast=True converts it)"
    if any(isinstance(array, Tensor) and array.is_meta for _, array in stored_parts(x)):
        return f"{name} must have memory; got a meta tensor: give rules and mesh="
    return None


def _explained(differences: Differences) -> str:
    """Return differences in words."""
    texts = list[str]()
    starts = "missing in the checkpoint: ", "unexpected in the checkpoint: ", ""
    for start, comma, names in zip(starts, (", ", ", ", "; "), differences, strict=True):
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        shown = [name or "a leaf without a name" for name in names[:20]]
        texts += [f"{start}{comma.join(shown)}{more}"] if names else []
    if all(any(name.startswith("state.") for name in names) for names in differences[:2]):
        texts.append("the state is of another optimizer")
    return f"{'. '.join(texts)}. Give only=, rename= or strict=False to restore a part."


def _targets(
    leaf: NamedLeaf, stored: tuple[int, ...], finish: list[Callable[[], object]]
) -> Iterator[Target]:
    """Yield the ranges of an array that are held here, with their memory; `finish` gets what to do after the read."""
    if tuple(leaf.value.shape) != stored:
        yield from _summand_targets(leaf, stored[0], finish)
        return
    for offset, x in stored_parts(leaf.value):
        for span, shard in _spans(x):
            if not shard.numel():
                continue
            if any(offset):
                bounds = zip(span.block, offset, strict=True)
                block = tuple([(start + origin, stop + origin) for (start, stop), origin in bounds])
                span = Span(block, span.start, span.stop)
            memory = shard.detach()
            if not memory.is_contiguous():
                memory = torch.empty_like(memory, memory_format=torch.contiguous_format)
                finish.append(partial(shard.detach().copy_, memory))
            yield Target(leaf.name, span, memory.view(-1))


def _summand_targets(
    leaf: NamedLeaf, count: int, finish: list[Callable[[], object]]
) -> Iterator[Target]:
    """Yield the ranges of all summands of an array, of which the first device gets the total."""
    for span, shard in _spans(leaf.value):
        rows, (summands, *block) = torch.zeros(count, shard.numel(), dtype=shard.dtype), span.block
        if summands[0] == 0 and shard.numel():
            for row in range(count):
                yield Target(
                    leaf.name, Span(((row, row + 1), *block), span.start, span.stop), rows[row]
                )
        finish.append(lambda shard=shard, rows=rows: shard.copy_(rows.sum(0).view(shard.shape)))


def _spans(x: Any) -> list[tuple[Span, Tensor]]:
    """Return the ranges of an array that are held here."""
    if isinstance(x, Sharded):
        x.check()
        devices = local_devices(x.mesh)
        return [
            (span_of(x.layout, x.shape, device), shard)
            for device, shard in zip(devices, x.shards, strict=True)
        ]
    return [(full_span(x.shape), x)]
