"""Plan the arguments and results of a `shard_map` call, cached per structure, shapes and layouts.

Specs, structure, layouts and shapes determine a recipe, which is pure data. All checks of arguments are made here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import Tensors, apply
from fshard.mesh.layout import (
    Layout,
    Mesh,
    P,
    PyTree,
    Structure,
    broadcast_prefix,
    collected,
    flatten,
    flatten_with_paths,
    is_dense,
    no_dense,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import is_static, moves, reshard_all, sliced, spread
from fshard.mesh.spmd.check_equal import Guard
from fshard.mesh.spmd.run import is_outside
from fshard.mesh.spmd.scope import require
from fshard.source import Site


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of a call: its index among the leaves, its layout inside (arguments) or outside (results).

    `equal`: axes along which its values and gradient must be equal. `value`, `gradient`: the error texts if not; no
    `value` is given where one tensor is passed to all devices.
    """

    index: int
    path: str
    shape: tuple[int, ...]
    layout: Layout
    equal: tuple[str, ...] = ()
    value: str = ""
    gradient: str = ""

    def checked(self, x: Tensor, site: Site) -> Tensor:
        """Compare a device's shard with others that must be equal: by `value` now, by cotangent in the backward."""
        if self.equal and (scope := require("fs.shard_map")).world.has_values:
            group = scope.group(self.equal, "fs.shard_map")
            if self.value:
                (x,) = apply(Guard(group, site, self.value, forward=True), (x,))
            if x.is_floating_point() or x.is_complex():
                (x,) = apply(Guard(group, site, self.gradient), (x,))
        return x


@dataclass(frozen=True, eq=False)
class ArgumentRecipe:
    """The tensors among the arguments of a call, and how to call with others instead.

    `checked`: the callers that have made a checked call, each a device's scope, or the recipe where there is none;
    True once its gradients have been audited too.
    """

    entries: tuple[PlannedTensor, ...]
    structure: Structure
    keywords: tuple[str, ...]
    checked: WeakKeyDictionary[object, bool] = field(default_factory=WeakKeyDictionary[object, bool], repr=False)

    def shards(self, leaves: list[Any], site: Site, *, recorded: bool) -> list[Tensors]:
        """Return the shards of each tensor in its layout inside, on the devices held here."""
        given = [(leaves[entry.index], entry.layout) for entry in self.entries]
        columns = [
            x.shards if isinstance(x, Sharded) and not moves(x, to) else
            sliced(x, to) if isinstance(x, Tensor) and not recorded and not to.spec.unreduced else None
            for x, to in given
        ]  # fmt: skip
        moved = [index for index, shards in enumerate(columns) if shards is None]
        xs = [spread(x, to) if isinstance(x, Tensor) else x for x, to in (given[index] for index in moved)]
        for index, x in zip(moved, reshard_all(xs, [given[index][1] for index in moved], site), strict=True):
            columns[index] = x.shards
        return [shards for shards in columns if shards is not None]

    def call(self, f: Callable[..., PyTree], leaves: list[Any]) -> PyTree:
        """Call a function with these leaves."""
        values = unflatten(self.structure, leaves)
        if not self.keywords:
            return f(*values)
        positional = len(values) - len(self.keywords)
        return f(*values[:positional], **dict(zip(self.keywords, values[positional:], strict=True)))


@dataclass(frozen=True)
class ResultRecipe:
    """The tensors among the results of a call."""

    entries: tuple[PlannedTensor, ...]
    uneven: bool
    """True if devices may return shards of different shapes."""


class Recipes:
    """The recipes of one mapped function."""

    def __init__(
        self,
        f: Callable[..., PyTree],
        name: str,
        in_specs: PyTree,
        out_specs: PyTree,
        mapped: tuple[str, ...],
    ) -> None:
        self.f, self.name, self.mapped = f, name, mapped
        self.in_specs = _validate_specs(f"shard_map of {name}: in_specs", in_specs)
        self.out_specs = _validate_specs(f"shard_map of {name}: out_specs", out_specs)
        self._arguments: dict[Any, ArgumentRecipe] = {}
        self._results: dict[Any, ResultRecipe] = {}

    def of_arguments(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ArgumentRecipe, list[Any]]:
        """Return the recipe for these arguments, and their leaves."""
        given = [*args, *kwargs.values()]
        leaves, structure = flatten(given, none_is_leaf=True)
        key = mesh, is_outside(mesh), structure, tuple(kwargs), tuple(map(_signature, leaves))
        recipe = self._arguments.get(key)
        if recipe is None:
            names = _names(self.f, len(args), tuple(kwargs))
            recipe = ArgumentRecipe(self._argument_entries(mesh, names, given), structure, tuple(kwargs))
            _bounded(self._arguments)[key] = recipe
        return recipe, leaves

    def _argument_entries(self, mesh: Mesh, names: list[str], given: list[Any]) -> tuple[PlannedTensor, ...]:
        specs = self._per_argument(names)
        entries: list[PlannedTensor] = []
        index = 0
        with collected(f"shard_map of {self.name}") as attempt:
            for name, value, spec in zip(names, given, specs, strict=True):
                paths, leaves, _ = flatten_with_paths(value, none_is_leaf=True)
                own: list[Any] = []
                with attempt(f"argument {name}"):
                    own = _broadcast(spec, value)
                for at, leaf, leaf_spec in zip(paths, leaves, own, strict=False):
                    with attempt(f"argument {name}{at}"):
                        if isinstance(leaf, Tensor | Sharded):
                            entries.append(self._argument(mesh, index, name + at, leaf, leaf_spec))
                        elif isinstance(leaf_spec, P) and not is_static(leaf, leaf_spec):
                            raise TypeError(
                                f"it is a {type(leaf).__name__}, which is not sharded. Write torch.as_tensor(...) around it, "
                                "or give None as its spec to pass it unchanged."
                            )
                    index += 1
            for at, spec in zip(*flatten_with_paths(self.out_specs)[:2], strict=True):
                if isinstance(spec, P):
                    with attempt(f"out_specs{at}"):
                        self._layout(mesh, spec)  # before anything runs
        return tuple(entries)

    def _per_argument(self, names: list[str]) -> list[PyTree]:
        """Return the spec of each argument."""
        specs, what = self.in_specs, f"shard_map of {self.name}"
        if isinstance(specs, P) or specs is None:
            return [specs] * len(names)
        if not isinstance(specs, tuple | list):
            raise TypeError(f"{what}: in_specs must be a P or a tuple with one per argument; got {specs!r}.")
        if len(specs) != len(names):
            raise ValueError(
                f"{what}: in_specs must have one entry for each of the {len(names)} arguments ({', '.join(names)}), or be "
                f"a P for all; got {len(specs)} in_specs."
            )
        return list(specs)

    def _argument(self, mesh: Mesh, index: int, path: str, value: Tensor | Sharded, spec: Any) -> PlannedTensor:
        inferred = value.spec if spec is None and isinstance(value, Sharded) else spec
        layout, shape = self._checked(mesh, value, inferred, "spec"), tuple(value.shape)
        if isinstance(value, Sharded) and value.mesh != mesh:
            raise LayoutError(f"it is on {value.mesh}, but shard_map runs on {mesh}. Unshard it first: fs.unshard(x).")
        layout.check(shape)
        what, is_one = (
            f"argument {path} of {self.name}, with spec {layout.spec},",
            isinstance(value, Tensor) and is_outside(mesh),
        )
        return PlannedTensor(
            index, path, shape, layout, unnamed(self.mapped, layout.spec),
            "" if is_one else f"{what} must be equal along {{axes}}, but its values differ. Shard it in its spec, or make "
            "it equal",
            f"{what} is equal along {{axes}}, so its gradient must be; but it was used with each device's own data. "
            f"Write {path} = fs.pvary({path}, {{axes}}) before that use",
        )  # fmt: skip

    def _checked(self, mesh: Mesh, value: Tensor | Sharded, spec: Any, what: str) -> Layout:
        """Return the layout of a tensor with this spec, or raise."""
        if not isinstance(spec, P):
            raise TypeError(f"is a tensor, but its {what} is None. Give P() for one that is the same on all devices.")
        if isinstance(value, Tensor) and not is_dense(value):
            raise LayoutError(f"{no_dense(value)}.")
        return self._layout(mesh, spec)

    def _layout(self, mesh: Mesh, spec: P) -> Layout:
        """Return the layout of a spec; raise if it names axes of an inner shard_map."""
        foreign = [axis for axis in spec.axes if axis in mesh.axis_names and axis not in self.mapped]
        if foreign:
            raise LayoutError(f"{spec} names {', '.join(foreign)}, which this shard_map is not mapped over.")
        return Layout(mesh, spec)

    def of_results(self, mesh: Mesh, result: PyTree) -> tuple[ResultRecipe, Structure, list[Any]]:
        """Return the recipe for one device's result, its structure and its leaves."""
        leaves, structure = flatten(result, none_is_leaf=True)
        key = mesh, structure, tuple(map(_signature, leaves))
        recipe = self._results.get(key)
        if recipe is None:
            recipe = _bounded(self._results)[key] = self._result(mesh, result)
        return recipe, structure, leaves

    def _result(self, mesh: Mesh, result: PyTree) -> ResultRecipe:
        paths, leaves, _ = flatten_with_paths(result, none_is_leaf=True)
        entries: list[PlannedTensor] = []
        with collected(f"shard_map of {self.name}") as attempt:
            specs: list[Any] = []
            with attempt("result"):
                specs = _broadcast(self.out_specs, result)
            for index, (path, leaf, spec) in enumerate(zip(paths, leaves, specs, strict=False)):
                with attempt(f"result{path}"):
                    if isinstance(leaf, Sharded):
                        raise LayoutError(
                            f"it is a Sharded on {leaf.mesh}, which only the devices there can use. "
                            "Return fs.unshard(x), or x.local for the own shard."
                        )
                    if isinstance(leaf, Tensor):
                        entries.append(self._result_entry(mesh, index, path, leaf, spec))
        uneven = any(entry.layout.spec.is_flat or entry.layout.spec.at for entry in entries)
        return ResultRecipe(tuple(entries), uneven)

    def _result_entry(self, mesh: Mesh, index: int, path: str, leaf: Tensor, spec: Any) -> PlannedTensor:
        layout = self._checked(mesh, leaf, spec, "out_spec")
        what = f"result{path} of {self.name}, with out_spec {spec}, must be equal along {{axes}}, but"
        return PlannedTensor(
            index, path, layout.global_shape(leaf.shape), layout, unnamed(self.mapped, spec),
            f"{what} its values differ. Reduce it with fs.psum or fs.pmean (if it is a gradient: mark the argument with "
            "fs.pvary where its use begins), or shard it in its out_spec. fs.replicated declares a result that is equal by "
            "construction",
            f"the gradient of {what} differs",
        )  # fmt: skip


def _validate_specs(what: str, specs: PyTree) -> PyTree:
    """Return a tree of Ps and Nones, with the specs of its Layouts; raise if it has other leaves."""
    paths, leaves, structure = flatten_with_paths(specs, none_is_leaf=True)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, P | Layout | None):
            hint = f" Write P({leaf!r})." if isinstance(leaf, str) else ""
            raise TypeError(f"{what}{path} must be a P, a Layout or None; got {leaf!r}.{hint}")
    return unflatten(structure, [leaf.spec if isinstance(leaf, Layout) else leaf for leaf in leaves])


def unnamed(mapped: tuple[str, ...], spec: P) -> tuple[str, ...]:
    """Return the mapped axes that a spec does not name: along these a value is replicated."""
    return tuple(axis for axis in mapped if axis not in spec.axes)


def _bounded(recipes: dict[Any, Any]) -> dict[Any, Any]:
    """Return the cache of recipes, cleared when it is full."""
    if len(recipes) >= 512:
        recipes.clear()
    return recipes


def _signature(leaf: Any) -> Any:
    """Return the cache key of a recipe: shapes of tensors, layouts of global arrays, types of anything else."""
    if isinstance(leaf, Sharded):
        return leaf.layout, leaf.shape
    if not isinstance(leaf, Tensor) or leaf.is_nested:  # which has no shape
        return type(leaf)
    return leaf.shape, leaf.layout


def _names(f: Callable[..., Any], positional: int, keywords: tuple[str, ...]) -> list[str]:
    """Return the parameter names of positional arguments, followed by the keywords given."""
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):  # builtins may have no signature
        parameters = {}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [name for name, one in parameters.items() if one.kind in kinds]
    return known[:positional] + [str(number) for number in range(len(known), positional)] + list(keywords)


def _broadcast(specs: PyTree, tree: PyTree) -> list[Any]:
    """Return the spec of every leaf of a tree, from a prefix tree of specs."""
    try:
        return broadcast_prefix(specs, tree, none_is_leaf=True)
    except ValueError:
        _, structure = flatten(tree, none_is_leaf=True)
        raise ValueError(f"the specs {specs!r} are no prefix of the tree {structure}.") from None
