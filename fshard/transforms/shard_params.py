"""Layouts of parameters: `shard_params` and its rules.

Rules must be complete: a leaf without a rule, a rule without a leaf, two rules that disagree about
a leaf, and a leaf that cannot have its layout are errors. Nothing is replicated by default.

    P("data")                                         the same for all leaves
    {"emb": P("model"), "blocks": P()}                a prefix tree
    {"blocks[*].attn.w": P(None, "model"), "**": P()} patterns, anchored at both ends
    lambda path, leaf: ...                            from a path and a leaf (its shape and dtype)
    fsdp("data")                                      all flat, in units; also in place of a P
    fsdp("data", within={...})                        each shard along other axes flat

The order of patterns does not matter: those with `**` apply to leaves that no other matches, and
`**` alone to the rest. They may use any notation of paths (see `patterns`); a function gets
`blocks[3].w`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError, ModuleError
from fshard.memory.kinds import claim, made_for
from fshard.mesh.layout import (
    Layout,
    Memory,
    Mesh,
    P,
    PyTree,
    as_axes,
    broadcast_prefix,
    flatten,
    flatten_with_paths,
    require_mesh,
    unflatten,
)
from fshard.mesh.layout.counting import MEMORIES
from fshard.mesh.layout.sharded import key_of
from fshard.mesh.reshard.device_put import collected, put_equal, validate_leaf
from fshard.mesh.spmd.global_inputs import compare_inputs, samples_of
from fshard.optim.leaves import is_frozen, without_static
from fshard.randomness import drawing_from, random_state
from fshard.transforms.module.lazy import draw, fill, reserved
from fshard.transforms.patterns import (
    Choice,
    chosen,
    default_units,
    listed,
    matches,
    matches_parts,
    named,
    parts_of,
    titled,
)
from fshard.uncompiled import uncompiled

Rules = Any
"""A P, a prefix tree of Ps, a mapping of path patterns to Ps, a function of (path, leaf), or `fsdp(...)`."""


@dataclass(frozen=True)
class Fsdp:
    """The rules of `fsdp`."""

    axes: tuple[str, ...]
    unit: str | tuple[str, ...] | int | None
    within: Rules = field(default=None, repr=False, compare=False)

    def units(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[str]:
        """Return the unit of every leaf."""
        if self.unit is None:
            return _merge_small_units(default_units(paths), leaves)
        if isinstance(self.unit, int):
            return _units_by_size(leaves, self.unit)
        patterns = (self.unit,) if isinstance(self.unit, str) else self.unit
        return _units_by_patterns(patterns, paths)


MERGED_BYTES = 1 << 20
"""Maximal size of default units that are merged.

A collective for less costs more to start than to send.
"""


def _merge_small_units(units: Sequence[str], leaves: Sequence[Any]) -> list[str]:
    """Merge default units that follow each other, up to `MERGED_BYTES`.

    The merged unit has the name of its first one.
    """
    sizes: dict[str, int] = {}
    for unit, leaf in zip(units, leaves, strict=True):
        sizes[unit] = sizes.get(unit, 0) + _size_of(leaf)

    merged_names: dict[str, str] = {}
    merged_name = ""
    merged_size = 0
    for unit, size in sizes.items():
        if not merged_name or merged_size + size > MERGED_BYTES:
            merged_name = unit
            merged_size = 0
        merged_names[unit] = merged_name
        merged_size += size
    return [merged_names[unit] for unit in units]


def _units_by_size(leaves: Sequence[Any], size: int) -> list[str]:
    """Put leaves into units, in their order, each closed once it has reached a size in bytes."""
    units: list[str] = []
    number = 0
    unit_size = 0
    for leaf in leaves:
        if unit_size >= size:
            number += 1
            unit_size = 0
        units.append(f"unit {number}")
        unit_size += _size_of(leaf)
    return units


def _size_of(leaf: Any) -> int:
    """Return the number of bytes of a leaf, of which no device needs values."""
    return leaf.dtype.itemsize * prod(leaf.shape)


def _units_by_patterns(patterns: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Assign leaves to the innermost unit whose pattern matches; others to their default one."""
    units = default_units(paths)
    used: set[str] = set()
    for index, path in enumerate(paths):
        parts = parts_of(path)
        # From the outside inwards, so that the innermost unit is the last.
        for end in range(1, len(parts) + 1):
            for pattern in patterns:
                if matches_parts(parts_of(pattern), parts[:end]):
                    units[index] = named(parts[:end])
                    used.add(pattern)
    unused = [f'"{pattern}"' for pattern in patterns if pattern not in used]
    if unused:
        raise ValueError(
            f"fsdp: no leaf is in a unit {' or '.join(unused)}. {listed(paths)}; "
            "a pattern begins where their paths do."
        )
    return units


def units_of(module: nn.Module, *kinds: type[nn.Module]) -> tuple[str, ...]:
    """Return the paths of the modules of some classes in a module, as units for `fsdp`.

    Each is a unit; a nested one takes its parameters from the outer. Names are those of the
    parameters that `functionalize` returns.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    >>> units_of(model, torch.nn.Linear)
    ('0', '2')
    """
    # A tied parameter has one name here: it is in the unit of its first owner.
    paths = [f".{name}" for name, _ in module.named_parameters()]
    units: list[str] = []
    for name, child in module.named_modules():
        if name and isinstance(child, kinds):
            has_params = any(path.startswith(f".{name}.") for path in paths)
            if has_params:
                units.append(name)
    if not units:
        present = sorted({type(child).__name__ for child in module.modules()})
        requested = " or ".join([kind.__name__ for kind in kinds]) or "of no class"
        raise ModuleError(
            f"units_of: {type(module).__name__} has no {requested} with parameters inside. "
            f"Its modules are {', '.join(present)}."
        )
    return tuple(units)


def fsdp(
    axis: str | tuple[str, ...],
    *,
    unit: str | Sequence[str] | int | None = None,
    within: Rules = None,
) -> Fsdp:
    """Return rules that flatten every parameter and shard it over `axis`: ZeRO-3.

    Args:
        axis: an axis, or several from major to minor. Along other axes parameters are replicated:
            on a mesh of {"node": 4, "data": 8}, `fsdp("data")` shards inside a node and replicates
            across nodes (HSDP).
        unit: parameters that are gathered and reduced together: a path pattern ("layers[*]") or
            several, of which the innermost counts
            (`units_of(module, nn.TransformerEncoderLayer)`), a size in bytes, or None for a unit
            per repeated block: the first index in a path whose siblings are similar. Then units
            that follow each other are merged up to 1 MiB: to start a collective for less costs more
            than to send it.
        within: rules that shard dims of the parameters along other axes, the `local=` ones of a
            step: each shard of P(None, "model") is flattened and sharded over `axis`. Complete, as
            all rules.

    >>> fsdp("data")
    Fsdp(axes=('data',), unit=None)
    """
    units: Any = unit
    if isinstance(unit, Iterable) and not isinstance(unit, str):
        units = tuple(unit)
    is_size = type(units) is int and units > 0
    are_texts = isinstance(units, tuple) and all(isinstance(pattern, str) for pattern in units)
    is_patterns = isinstance(units, str) or (are_texts and bool(units))
    if units is not None and not is_size and not is_patterns:
        raise ValueError(
            "fsdp: unit must be a path pattern, several, or a positive number of bytes; "
            f'got {unit!r}. Write fsdp(..., unit="blocks[*]"), unit=20_000_000, or leave it out '
            "for a unit per repeated block."
        )
    return Fsdp(as_axes(axis), units, within)


@uncompiled
def shard_params(
    params: nn.Module | PyTree,
    rules: Rules,
    *,
    mesh: Mesh | None = None,
    frozen: Choice = None,
    seed: int | None = None,
    memory: Memory | Mapping[str, Memory] = "device",
) -> PyTree:
    """Shard parameters on a mesh by rules: every process has the full values and keeps its shards.

    All processes must call it: their tensors are compared, by hashes in one collective, and
    different ones raise.

    Args:
        params: a tree of tensors, the same on every process; a tied tensor is sharded once. A
            `Sharded`, of this or another mesh, is resharded and stays frozen if it was. Strings,
            numbers and functions (a dataclass's configuration) pass through. Or a module, whose
            parameters are taken by their names.
        rules: see the module: a P, a tree of Ps, patterns, a function, or `fsdp(...)`.
        mesh: the devices; by default those of `fs.use_mesh`.
        frozen: parameters that are not trained: a path pattern, several, or a function of the path.
            They are sharded as the others, and never have a gradient or optimizer state. Parameters
            that do not require grad are frozen anyway.
        seed: of the `lazy` layers of a module, which are built one at a time; each device keeps its
            shards.
        memory: of the shards, "device", "host" or "disk"; or patterns, as rules:
            {"blocks.**": "host", "**": "device"}.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> params = {"w": torch.zeros(3, 3), "b": torch.zeros(3)}
    >>> params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    >>> fs.typeof(params["w"]), [tuple(shard.shape) for shard in params["w"].shards]
    (f32[3, 3]{flat:data}, [(3,), (3,), (3,), (0,)])
    """
    mesh = require_mesh("shard_params", mesh)
    if not isinstance(params, nn.Module):
        if seed is not None:
            raise ValueError(
                "shard_params: seed= draws lazy layers of a module; a tree of tensors has none. "
                "Leave it out."
            )
        tensors, restore = without_static(params)
        sharded = apply_rules(tensors, rules, mesh, frozen, memory=memory)
        compare_inputs("shard_params", mesh, samples_of(tensors))
        return restore(sharded)

    tree = dict(params.named_parameters())
    put = put_equal if seed is None else reserved
    sharded = apply_rules(tree, rules, mesh, frozen, put, memory)
    compare_inputs("shard_params", mesh, samples_of(tree))
    if seed is not None and mesh.runtime != "abstract":
        draw(params, seed, tree.keys(), lambda name, x: fill(sharded[name], x), "shard_params")
    return sharded


def apply_rules(
    params: PyTree,
    rules: Rules,
    mesh: Mesh,
    frozen: Choice = None,
    put: Callable[[Any, Layout], Any] = put_equal,
    memory: Memory | Mapping[str, Memory] = "device",
) -> PyTree:
    """Give parameters their layouts by rules, each by `put`."""
    leaves, structure = flatten(params)
    layouts = layouts_of(params, rules, mesh, frozen, memory=memory)
    return unflatten(structure, put_all(leaves, layouts, put))


@torch.no_grad()
@made_for("parameters")
def put_all(
    leaves: Sequence[Any], layouts: Iterable[Layout], put: Callable[[Any, Layout], Any]
) -> list[Any]:
    """Give each parameter its layout by `put`, a tied one once."""
    claim([leaf for leaf in leaves if isinstance(leaf, Tensor)], "source")
    arrays: dict[tuple[int, ...], Any] = {}
    for leaf, layout in zip(leaves, layouts, strict=True):
        if key_of(leaf) not in arrays:
            arrays[key_of(leaf)] = put(leaf, layout)
    return [arrays[key_of(leaf)] for leaf in leaves]


def layouts_of(
    params: PyTree,
    rules: Rules,
    mesh: Mesh,
    frozen: Choice,
    caller: str = "shard_params",
    memory: Memory | Mapping[str, Memory] = "device",
) -> list[Layout]:
    """Return the layout of every leaf, or raise naming all that cannot have theirs."""
    paths, leaves, _ = flatten_with_paths(params)
    if isinstance(rules, P | Fsdp):
        mesh.check_axes(rules.axes, f"{caller} with {rules}")
    are_frozen = chosen(frozen, paths, "frozen")
    specs, units = _specs_and_units(params, rules, paths, leaves)
    kinds = _memory_kinds(memory, paths)

    layouts: list[Layout] = []
    first_layouts: dict[tuple[int, ...], Layout] = {}  # of each parameter, however often it is tied
    with collected(caller) as attempt:
        columns = (paths, leaves, specs, units, are_frozen, kinds)
        for path, leaf, spec, unit, is_chosen, kind in zip(*columns, strict=True):
            with attempt(path):
                is_fixed = is_chosen or is_frozen(leaf)
                layout = Layout(mesh, _validated_spec(spec), kind, unit, is_fixed)
                validate_leaf(leaf, layout)
                first_layout = first_layouts.setdefault(key_of(leaf), layout)
                _validate_tied(layout, first_layout)
                layouts.append(layout)
    return layouts


def _validate_tied(layout: Layout, first_layout: Layout) -> None:
    """Raise if a leaf has another layout than the first leaf that it is tied to."""
    if layout.spec != first_layout.spec:
        raise LayoutError(
            f"it is tied to a leaf with layout {first_layout.spec}, and cannot have {layout.spec}."
        )
    if layout.memory != first_layout.memory:
        raise LayoutError(
            f"it is tied to a leaf in {first_layout.memory} memory, and cannot be in "
            f"{layout.memory}."
        )
    if layout.frozen != first_layout.frozen:
        raise LayoutError(
            "of it and a leaf that it is tied to, one is frozen. Freeze both: they are one."
        )


def _specs_and_units(
    params: PyTree, rules: Rules, paths: Sequence[str], leaves: Sequence[Any]
) -> tuple[list[Any], list[str]]:
    """Return the spec and the unit of each leaf; an `Fsdp` among the rules becomes a flat spec."""
    specs = _leaf_specs(params, rules, paths, leaves)
    units = default_units(paths)
    fsdp_rules = dict.fromkeys([spec for spec in specs if isinstance(spec, Fsdp)])  # a set in order
    for number, rule in enumerate(fsdp_rules):
        indices = [index for index, spec in enumerate(specs) if spec == rule]
        rule_paths = [paths[index] for index in indices]
        rule_leaves = [leaves[index] for index in indices]
        rule_units = rule.units(rule_paths, rule_leaves)

        # Equal rules share units, and may differ in `within`: those specs are found by identity.
        inner_specs: dict[int, list[Any]] = {}
        for index in indices:
            spec = specs[index]
            if spec.within and id(spec) not in inner_specs:
                inner_specs[id(spec)] = _leaf_specs(params, spec.within, paths, leaves)

        for index, unit in zip(indices, rule_units, strict=True):
            row = inner_specs.get(id(specs[index]))
            inner_spec = P() if row is None else _validated_spec(row[index])
            specs[index] = _flattened(inner_spec, rule.axes)
            # Units by size have numbers, which begin at 0 in each rule.
            needs_number = number > 0 and isinstance(rule.unit, int)
            units[index] = f"{unit} of rule {number}" if needs_number else unit
    return specs, units


def _flattened(spec: P, axes: tuple[str, ...]) -> P:
    """Return a spec that is flat along axes too, but those that shard its dims already."""
    further_axes = [axis for axis in axes if axis not in spec.axes]
    return spec.replace(flat=(*(spec.flat_axes or ()), *further_axes))


def _leaf_specs(
    params: PyTree, rules: Rules, paths: Sequence[str], leaves: Sequence[Any]
) -> list[Any]:
    """Return the spec of each leaf by the rules."""
    if isinstance(rules, P | Fsdp):
        return [rules] * len(leaves)
    if callable(rules):
        pairs = zip(paths, leaves, strict=True)
        return [rules(named(parts_of(path)), leaf) for path, leaf in pairs]
    try:
        return broadcast_prefix(rules, params)
    except ValueError:
        if isinstance(rules, Mapping) and all(isinstance(x, P | Fsdp) for x in rules.values()):
            fix = '"**": P() replicates what no other rule is for'
            return _match_patterns(rules, paths, [], fix)
        raise ValueError(
            f"the rules {rules!r} are neither a prefix of the parameters nor patterns."
        ) from None


def _memory_kinds(memory: Any, paths: Sequence[str]) -> list[Memory]:
    """Return the memory kind of each path, or raise with all unknown kinds and unused patterns."""
    if memory in MEMORIES:
        return [memory] * len(paths)
    rules: Mapping[str, Any] = memory if isinstance(memory, Mapping) else {"**": memory}
    unknown = [kind for kind in dict.fromkeys(rules.values()) if kind not in MEMORIES]
    errors = [f'memory must be "device", "host" or "disk"; got {kind!r}' for kind in unknown]
    fix = '"**": "device" is for what no other pattern is for'
    return _match_patterns(rules, paths, errors, fix)


def _match_patterns(
    rules: Mapping[str, Any], paths: Sequence[str], errors: list[str], fix: str
) -> list[Any]:
    """Return the value of each path, or raise with the errors given, and those of patterns.

    Patterns without `**` take precedence over those with it, and `**` alone is last.
    """
    for rule in rules:
        if not any(matches(rule, path) for path in paths):
            errors.append(f'no leaf is for the rule "{rule}"')

    values: list[Any] = []
    for path in paths:
        matching = [rule for rule in rules if matches(rule, path)]
        if not matching:
            errors.append(f"no rule is for {titled(path)}")
            continue
        lowest_rank = min(map(_rank, matching))
        best = [rule for rule in matching if _rank(rule) == lowest_rank]
        if len({rules[rule] for rule in best}) > 1:
            clash = " and ".join([f'"{rule}" ({rules[rule]})' for rule in best])
            errors.append(f"{clash} disagree about {titled(path)}")
        values.append(rules[best[0]])
    if errors:
        raise LayoutError(f"{'; '.join(errors)}. {listed(paths)}; {fix}.")
    return values


def _rank(pattern: str) -> int:
    """Return 0 for a pattern without `**`, 1 for one with it, and 2 for `**` alone."""
    parts = parts_of(pattern)
    if "**" not in parts:
        return 0
    return 2 if {*parts} == {"**"} else 1


def _validated_spec(spec: Any) -> P:
    if not isinstance(spec, P):
        raise TypeError(f"A rule must give a P per leaf, P() where it is replicated; got {spec!r}.")
    if spec.unreduced:
        raise LayoutError(
            f"{spec} is a sum that is not made yet, which no parameter is. Leave unreduced= out."
        )
    return spec


def init_params(
    init_fn: Callable[[], PyTree],
    rules: Rules,
    *,
    mesh: Mesh,
    seed: int | None = None,
    frozen: Choice = None,
) -> PyTree:
    """Draw the parameters that `init_fn()` makes, and shard them by rules.

    Args:
        init_fn: returns a tree of tensors.
        rules: see `shard_params`.
        mesh: the devices.
        frozen: parameters that are not trained: see `shard_params`.
        seed: draw as after `torch.manual_seed(seed)`, and restore the generator; None: draw from
            its current state.

    Every process draws all numbers on the host and keeps its shards; different ones raise. A model
    that no host can hold is made of `lazy` layers.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> params = fs.nn.init_params(lambda: torch.randn(2, 2), fs.fsdp("data"), mesh=mesh, seed=0)
    >>> drawn = torch.randn(2, 2, generator=torch.Generator().manual_seed(0))
    >>> fs.typeof(params), torch.equal(fs.unshard(params), drawn)
    (f32[2, 2]{flat:data}, True)
    """
    generator = drawing_from(random_state()) if seed is not None else nullcontext()
    memory = torch.device("meta") if mesh.runtime == "abstract" else nullcontext()
    with generator:
        if seed is not None:
            torch.manual_seed(seed)
        with memory:
            params = init_fn()
    return shard_params(params, rules, mesh=mesh, frozen=frozen)
