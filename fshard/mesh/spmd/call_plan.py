"""Plan the arguments and results of a `shard_map` call, cached per structure, shapes and layouts.

Specs, structure, layouts and shapes determine a recipe, which is pure data. All checks of arguments are made here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import apply
from fshard.mesh.layout import (
    Layout,
    Mesh,
    P,
    PyTree,
    Structure,
    broadcast_prefix,
    flatten,
    flatten_with_paths,
    is_dense,
    no_dense,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import collected
from fshard.mesh.reshard.execute import STAY, ReshardPlan, plan_reshard, take
from fshard.mesh.spmd.check_equal import Guard
from fshard.mesh.spmd.run import local_devices
from fshard.mesh.spmd.scope import require
from fshard.source import Site


@dataclass(frozen=True)
class Promise:
    """Axes along which a value and its gradient must be equal, and the error text if they are not."""

    axes: tuple[str, ...]
    value: str
    gradient: str

    def hold(self, x: Tensor, site: Site) -> Tensor:
        """Compare by value now, and by cotangent in the backward."""
        scope = require("fs.shard_map")
        if not scope.world.has_values:
            return x
        group = scope.group(self.axes, "fs.shard_map")
        (x,) = apply(Guard(group, site, self.value, forward=True), (x,))
        if x.is_floating_point() or x.is_complex():
            (x,) = apply(Guard(group, site, self.gradient), (x,))
        return x


@dataclass(frozen=True)
class Transfer:
    """The plan of one tensor: its index, its layout, and how it is resharded.

    `layout`: inside (arguments) or of the result. `shard_shape`: shape of the first local shard of an argument. `slices`:
    slices of a plain argument, one per local device, if slicing is all that is needed.
    """

    place: int
    path: str
    shape: tuple[int, ...]
    layout: Layout
    way: ReshardPlan = STAY
    promise: Promise | None = None
    shard_shape: tuple[int, ...] = ()
    slices: tuple[tuple[slice, ...], ...] | None = None

    @property
    def work(self) -> bool:
        return bool(self.way.steps) or self.promise is not None

    def enter(self, x: Tensor, site: Site, *, cut: bool) -> Tensor:
        """Make one device's shard of an argument, which may be `cut` already."""
        if not cut or self.slices is None:
            x = take(x, self.way, site)
        return self.hold(x, site)

    def hold(self, x: Tensor, site: Site) -> Tensor:
        """Raise unless a device's shard matches its spec."""
        return x if self.promise is None else self.promise.hold(x, site)


@dataclass(frozen=True)
class ArgumentRecipe:
    """The tensors among the arguments of a call, and how to call with others instead."""

    entries: tuple[Transfer, ...]
    structure: Structure
    keywords: tuple[str, ...]
    work: bool

    def call(self, f: Callable[..., PyTree], leaves: list[Any]) -> PyTree:
        """Call a function with these leaves."""
        values = unflatten(self.structure, leaves)
        positional = len(values) - len(self.keywords)
        return f(*values[:positional], **dict(zip(self.keywords, values[positional:], strict=True)))


@dataclass(frozen=True)
class ResultRecipe:
    """The tensors among the results of a call."""

    entries: tuple[Transfer, ...]
    work: bool
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
        checked: bool,
    ) -> None:
        self.f, self.name, self.mapped, self.checked = f, name, mapped, checked
        self.in_specs, self.out_specs = in_specs, out_specs
        self._arguments: dict[Any, ArgumentRecipe] = {}
        self._results: dict[Any, ResultRecipe] = {}
        self.audited: set[int] = set()  # the recipes of arguments, by id, for which gradients have been looked at

    def of_arguments(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ArgumentRecipe, list[Any]]:
        """Return the recipe for these arguments, and their leaves."""
        given = [*args, *kwargs.values()]
        leaves, structure = flatten(given, sharded_is_leaf=True, none_is_leaf=True)
        key = mesh, structure, tuple(kwargs), tuple(map(_signature, leaves))
        recipe = self._arguments.get(key)
        if recipe is None:
            names = _names(self.f, len(args), tuple(kwargs))
            entries = self._entries(mesh, names, given)
            recipe = _kept(self._arguments)[key] = ArgumentRecipe(
                entries, structure, tuple(kwargs), any(entry.work for entry in entries)
            )
        return recipe, leaves

    def _entries(self, mesh: Mesh, names: list[str], given: list[Any]) -> tuple[Transfer, ...]:
        specs = self._per_argument(names)
        entries: list[Transfer] = []
        place = 0
        with collected(f"shard_map of {self.name}") as attempt:
            for name, value, spec in zip(names, given, specs, strict=True):
                paths, leaves, _ = flatten_with_paths(value, sharded_is_leaf=True, none_is_leaf=True)
                own: list[Any] = []
                with attempt(f"argument {name}"):
                    own = _broadcast(spec, value)
                for at, leaf, leaf_spec in zip(paths, leaves, own, strict=False):
                    with attempt(f"argument {name}{at}"):
                        if isinstance(leaf, Tensor | Sharded):
                            entries.append(self._argument(mesh, place, name + at, leaf, leaf_spec))
                        elif isinstance(leaf, np.ndarray) and isinstance(leaf_spec, P):
                            raise LayoutError(
                                "it is a numpy array, which is not cut. Give torch.from_numpy(...) of it."
                            )
                    place += 1
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
            raise LayoutError(f"{what}: in_specs is a P or a tuple; found {type(specs).__name__}.")
        if len(specs) != len(names):
            raise LayoutError(
                f"{what}: {len(names)} arguments ({', '.join(names)}) but {len(specs)} in_specs. Give one each, or a P for all."
            )
        return list(specs)

    def _argument(self, mesh: Mesh, place: int, path: str, value: Tensor | Sharded, spec: Any) -> Transfer:
        layout, before, shape = self._checked(mesh, value, spec, "spec"), Layout(mesh), tuple(value.shape)
        if isinstance(value, Sharded):
            before = value.layout
            if before.mesh != mesh:
                raise LayoutError(
                    f"it is on {before.mesh}, but shard_map runs on {mesh}. Unshard it first: fs.unshard(x)."
                )
        layout.check(shape)
        promise = self._promise(
            spec,
            f"argument {path} of {self.name}, with spec {spec}, has to be equal along {{axes}}, but its values differ. "
            "Shard it in its spec, or make it equal",
            f"argument {path} of {self.name}, with spec {spec}, is equal along {{axes}}, so its gradient has to be; but it "
            f"was used with each device's own data. Write {path} = fs.pvary({path}, {{axes}}) before that use",
        )
        shard_shape, way, slices = (
            before.local_shape(shape, local_devices(mesh)[0]),
            plan_reshard(before, layout, shape),
            None,
        )
        if way.slices and isinstance(value, Tensor):
            ranges = [layout.ranges(shape, device) for device in local_devices(mesh)]
            slices = tuple(tuple(slice(*one) for one in each) for each in ranges)
        return Transfer(place, path, shape, layout, way, promise, shard_shape, slices)

    def _checked(self, mesh: Mesh, value: Tensor | Sharded, spec: Any, what: str) -> Layout:
        """Return the layout of a tensor with this spec, or raise."""
        if not isinstance(spec, P):
            raise LayoutError(
                f"is a tensor, but its {what} is {spec!r}. Give P() for one that is the same on all devices."
            )
        if isinstance(value, Tensor) and not is_dense(value):
            raise LayoutError(f"{no_dense(value)}.")
        return self._layout(mesh, spec)

    def _layout(self, mesh: Mesh, spec: P) -> Layout:
        """Return the layout of a spec; raise if it names axes of an inner shard_map."""
        foreign = [axis for axis in spec.axes if axis in mesh.axis_names and axis not in self.mapped]
        if foreign:
            raise LayoutError(f"{spec} names {', '.join(foreign)}, which this shard_map is not mapped over.")
        return Layout(mesh, spec)

    def _promise(self, spec: P, value: str, gradient: str) -> Promise | None:
        """Return the axes along which a spec promises equal values."""
        axes = tuple(axis for axis in self.mapped if axis not in spec.axes)
        return Promise(axes, value, gradient) if self.checked and axes else None

    def of_results(self, mesh: Mesh, result: PyTree) -> tuple[ResultRecipe, Structure, list[Any]]:
        """Return the recipe for one device's result, its structure and its leaves."""
        leaves, structure = flatten(result, none_is_leaf=True)
        key = mesh, structure, tuple(map(_signature, leaves))
        recipe = self._results.get(key)
        if recipe is None:
            recipe = _kept(self._results)[key] = self._result(mesh, result)
        return recipe, structure, leaves

    def _result(self, mesh: Mesh, result: PyTree) -> ResultRecipe:
        paths, leaves, _ = flatten_with_paths(result, sharded_is_leaf=True, none_is_leaf=True)
        entries: list[Transfer] = []
        with collected(f"shard_map of {self.name}") as attempt:
            specs: list[Any] = []
            with attempt("result"):
                specs = _broadcast(self.out_specs, result)
            for place, (path, leaf, spec) in enumerate(zip(paths, leaves, specs, strict=False)):
                with attempt(f"result{path}"):
                    if isinstance(leaf, Sharded):
                        raise LayoutError(
                            f"it is a Sharded on {leaf.mesh}, which only the devices there can use. "
                            "Return fs.unshard(x), or x.local for the own shard."
                        )
                    if isinstance(leaf, Tensor):
                        entries.append(self._result_entry(mesh, place, path, leaf, spec))
        uneven = any(entry.layout.spec.is_flat or entry.layout.spec.at for entry in entries)
        return ResultRecipe(tuple(entries), any(entry.work for entry in entries), uneven)

    def _result_entry(self, mesh: Mesh, place: int, path: str, leaf: Tensor, spec: Any) -> Transfer:
        layout = self._checked(mesh, leaf, spec, "out_spec")
        promise = self._promise(
            spec,
            f"result{path} of {self.name}, with out_spec {spec}, has to be equal along {{axes}}, but its values differ. "
            "Reduce it with fs.psum or fs.pmean (if it is a gradient: mark the argument with fs.pvary where its use begins), "
            "or shard it in its out_spec",
            f"the gradient of result{path} of {self.name}, with out_spec {spec}, has to be equal along {{axes}}, but differs",
        )
        return Transfer(place, path, layout.global_shape(leaf.shape), layout, promise=promise)


def _kept(recipes: dict[Any, Any]) -> dict[Any, Any]:
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
    return leaf.shape, leaf.layout, leaf.is_inference()


def _names(f: Callable[..., Any], positional: int, keywords: tuple[str, ...]) -> list[str]:
    """Return the parameter names of positional arguments, followed by the keywords given."""
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):  # builtins may have no signature
        parameters = {}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [name for name, one in parameters.items() if one.kind in kinds]
    return known[:positional] + [str(place) for place in range(len(known), positional)] + list(keywords)


def _broadcast(specs: PyTree, tree: PyTree) -> list[Any]:
    """Return the spec of every leaf of a tree, from a prefix tree of specs."""
    try:
        return broadcast_prefix(specs, tree, none_is_leaf=True)
    except ValueError:
        _, structure = flatten(tree, sharded_is_leaf=True, none_is_leaf=True)
        raise LayoutError(f"the specs {specs!r} are no prefix of the tree {structure}.") from None
