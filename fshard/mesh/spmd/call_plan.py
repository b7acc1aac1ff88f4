"""Plan the arguments and results of a `shard_map` call, cached per structure, shapes and layouts.

Specs, structure, layouts and shapes determine a plan, which is pure data: a `PlannedTensor` for
each tensor. All checks of arguments are made here, before anything runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
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

UNEQUAL_ARGUMENT = (
    "must be equal along {axes}, but its values differ. Shard it in its spec, or make it equal"
)
UNEQUAL_ARGUMENT_GRADIENT = (
    "is equal along {{axes}}, so its gradient must be; but it was used with each device's own "
    "data. Write {path} = fs.pvary({path}, {{axes}}) before that use"
)
UNEQUAL_RESULT = (
    "its values differ. Reduce it with fs.psum or fs.pmean (if it is a gradient: mark the argument "
    "with fs.pvary where its use begins), or shard it in its out_spec. fs.replicated declares a "
    "result that is equal by construction. Random draws differ along the axes of all specs: in "
    "fs.keyed_random(seed) they are equal"
)

MOST_PLANS = 512
"""A bound for the plans of one function, whose arguments may have a new shape in each call."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of a call.

    Args:
        index: among the leaves.
        path: in the tree, for errors.
        shape: the global shape.
        layout: inside (of an argument), or outside (of a result).
        equal_axes: the axes along which values and gradient must be equal.
        value_error: the text if values are not; "" where one tensor is passed to all devices.
        gradient_error: the text if gradients are not.
    """

    index: int
    path: str
    shape: tuple[int, ...]
    layout: Layout
    equal_axes: tuple[str, ...]
    value_error: str
    gradient_error: str

    def checked(self, x: Tensor, site: Site) -> Tensor:
        """Compare a shard with those that must be equal: values now, cotangents in the backward."""
        if not self.equal_axes:
            return x
        scope = require("fs.shard_map")
        if not scope.world.has_values:
            return x

        group = scope.group(self.equal_axes, "fs.shard_map")
        if self.value_error:
            (x,) = apply(Guard(group, site, self.value_error, forward=True), (x,))
        if x.is_floating_point() or x.is_complex():
            (x,) = apply(Guard(group, site, self.gradient_error), (x,))
        return x


Counts = WeakKeyDictionary[object, int]
"""For each caller a number. Weak, so that no count keeps a caller alive."""


@dataclass(frozen=True, eq=False)
class CallFamily:
    """The plans of calls whose arguments differ in sizes alone, as with a cache that grows.

    Args:
        called: by how many of its plans each caller has called. A caller is a device's scope, or
            the family where there is none.
        recorded: by how many in calls that autograd recorded.
    """

    called: Counts = field(default_factory=Counts, repr=False)
    recorded: Counts = field(default_factory=Counts, repr=False)


@dataclass(frozen=True, eq=False)
class ArgumentPlan:
    """The tensors among the arguments of a call, and how to call with others instead.

    Args:
        entries: the tensors.
        keywords: the names of the last arguments.
        named_axes: those that the spec of any argument or result names; along the others all values
            are equal.
        family: of the plans for other sizes.
        callers: those that have called by the plan; True once autograd has recorded a call. Weak,
            so that a plan keeps no scope alive.
    """

    entries: tuple[PlannedTensor, ...]
    keywords: tuple[str, ...]
    named_axes: tuple[str, ...]
    family: CallFamily
    callers: WeakKeyDictionary[object, bool] = field(
        default_factory=WeakKeyDictionary[object, bool], repr=False
    )

    def shards(self, leaves: list[Any], site: Site, *, recorded: bool) -> list[Tensors]:
        """Return the shards of each tensor in its layout inside, on the devices held here."""
        columns: list[Tensors] = [()] * len(self.entries)
        moved: list[int] = []
        arrays: list[Sharded] = []
        layouts: list[Layout] = []
        for number, entry in enumerate(self.entries):
            x = leaves[entry.index]
            shards = _shards_in_place(x, entry.layout, recorded=recorded)
            if shards is not None:
                columns[number] = shards
                continue
            moved.append(number)
            arrays.append(spread(x, entry.layout) if isinstance(x, Tensor) else x)
            layouts.append(entry.layout)

        # All at once, so that they share collectives.
        if moved:
            resharded = reshard_all(arrays, layouts, site)
            for number, array in zip(moved, resharded, strict=True):
                columns[number] = array.shards
        return columns

    def arguments(
        self, structure: Structure, leaves: list[Any], shards: Tensors
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments and keywords of a call, with these shards for the tensors."""
        leaves = list(leaves)
        for x, entry in zip(shards, self.entries, strict=True):
            leaves[entry.index] = x
        values: list[Any] = unflatten(structure, leaves)
        positional = len(values) - len(self.keywords)
        keywords = dict(zip(self.keywords, values[positional:], strict=True))
        return values[:positional], keywords


def _shards_in_place(x: Tensor | Sharded, layout: Layout, *, recorded: bool) -> Tensors | None:
    """Return the shards of a value in a layout; None if they must be made by a reshard."""
    if isinstance(x, Sharded):
        return None if moves(x, layout) else x.shards
    # Views of the global value. They record no gradient, and of a sum each device has a summand.
    if recorded or layout.spec.unreduced:
        return None
    return sliced(x, layout)


@dataclass(frozen=True, eq=False)
class ResultPlan:
    """The tensors among the results of a call.

    Devices with one plan return shards of equal shapes and dtypes, unless it is uneven.
    """

    entries: tuple[PlannedTensor, ...]
    uneven: bool
    """True if devices may return shards of different shapes."""


class CallPlans:
    """The plans of one mapped function."""

    def __init__(
        self,
        f: Callable[..., PyTree],
        name: str,
        in_specs: PyTree,
        out_specs: PyTree,
        mapped: tuple[str, ...],
    ) -> None:
        self.f = f
        self.name = name
        self.mapped = mapped
        self.in_specs = _validate_specs(f"shard_map of {name}: in_specs", in_specs)
        self.out_specs = _validate_specs(f"shard_map of {name}: out_specs", out_specs)
        self._arguments: dict[Any, ArgumentPlan] = {}
        self._families: dict[Any, CallFamily] = {}
        self._results: dict[Any, ResultPlan] = {}

    def of_arguments(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ArgumentPlan, Structure, list[Any]]:
        """Return the plan for these arguments, their structure and their leaves.

        Structures that compare equal, as of {1: x} and {True: x}, share a plan, which holds none.
        """
        values = [*args, *kwargs.values()]
        leaves, structure = flatten(values, none_is_leaf=True)
        keywords = tuple(kwargs)
        call = mesh, is_outside(mesh), structure, keywords
        key = *call, tuple(map(_cache_key, leaves))
        plan = self._arguments.get(key)
        if plan is None:
            names = _argument_names(self.f, len(args), keywords)
            entries = self._plan_arguments(mesh, names, values)
            # Families are never dropped: devices that are not at one call must count alike.
            family_key = *call, tuple(map(_sizeless_key, leaves))
            family = self._families.setdefault(family_key, CallFamily())
            plan = ArgumentPlan(entries, keywords, self._named_axes(entries), family)
            if len(self._arguments) >= MOST_PLANS:
                self._arguments.clear()
            self._arguments[key] = plan
        return plan, structure, leaves

    def _named_axes(self, entries: tuple[PlannedTensor, ...]) -> tuple[str, ...]:
        """Return the mapped axes that the spec of any argument or result names."""
        specs = [entry.layout.spec for entry in entries]
        specs += [spec for spec in flatten(self.out_specs)[0] if isinstance(spec, P)]
        named: set[str] = set()
        for spec in specs:
            named.update(spec.axes)
        return tuple([axis for axis in self.mapped if axis in named])

    def _plan_arguments(
        self, mesh: Mesh, names: list[str], values: list[Any]
    ) -> tuple[PlannedTensor, ...]:
        entries: list[PlannedTensor] = []
        index = 0
        # One error names all arguments that do not fit.
        with collected(f"shard_map of {self.name}") as attempt:
            specs = self._spec_per_argument(names)
            for name, value, spec in zip(names, values, specs, strict=True):
                leaves: list[tuple[str, Any, Any]] = []
                with attempt(f"argument {name}"):
                    leaves += _leaves_with_specs(value, spec)
                for path, leaf, leaf_spec in leaves:
                    with attempt(f"argument {name}{path}"):
                        if isinstance(leaf, Tensor | Sharded):
                            entry = self._plan_argument(mesh, index, name + path, leaf, leaf_spec)
                            entries.append(entry)
                        else:
                            _validate_static(leaf, leaf_spec)
                    index += 1

            # Specs of results too, before anything runs.
            paths, specs, _ = flatten_with_paths(self.out_specs)
            for path, spec in zip(paths, specs, strict=True):
                if isinstance(spec, P):
                    with attempt(f"out_specs{path}"):
                        self._layout_of_spec(mesh, spec)
        return tuple(entries)

    def _spec_per_argument(self, names: list[str]) -> list[PyTree]:
        specs = self.in_specs
        if isinstance(specs, P) or specs is None:
            return [specs] * len(names)
        if not isinstance(specs, tuple | list) or len(specs) != len(names):
            raise ValueError(
                f"shard_map of {self.name}: in_specs must be a tuple with one entry for each of "
                f"the {len(names)} arguments ({', '.join(names)}), or be a P for all; "
                f"got {specs!r}."
            )
        return list(specs)

    def _plan_argument(
        self, mesh: Mesh, index: int, path: str, value: Tensor | Sharded, spec: Any
    ) -> PlannedTensor:
        if spec is None and isinstance(value, Sharded):
            spec = value.spec
        layout = self._layout_of_tensor(mesh, value, spec, "spec")
        shape = tuple(value.shape)
        if isinstance(value, Sharded) and value.mesh != mesh:
            raise LayoutError(
                f"it is on {value.mesh}, but shard_map runs on {mesh}. Move it first: "
                "fs.device_put(x, fs.Layout(mesh, spec))."
            )
        layout.check(shape)

        subject = f"argument {path} of {self.name}, with spec {spec},"
        gradient_error = f"{subject} {UNEQUAL_ARGUMENT_GRADIENT.format(path=path)}"
        # Outside of a virtual mesh there is one tensor, so its values cannot differ.
        is_single = isinstance(value, Tensor) and is_outside(mesh)
        value_error = "" if is_single else f"{subject} {UNEQUAL_ARGUMENT}"
        equal_axes = unnamed(self.mapped, layout.spec)
        return PlannedTensor(index, path, shape, layout, equal_axes, value_error, gradient_error)

    def _layout_of_tensor(
        self, mesh: Mesh, value: Tensor | Sharded, spec: Any, role: str
    ) -> Layout:
        """Return the layout of a tensor with this spec, or raise."""
        if not isinstance(spec, P):
            raise TypeError(
                f"is a tensor, but its {role} is None. "
                "Give P() for one that is the same on all devices."
            )
        if isinstance(value, Tensor) and not is_dense(value):
            raise LayoutError(f"{no_dense(value)}.")
        return self._layout_of_spec(mesh, spec)

    def _layout_of_spec(self, mesh: Mesh, spec: P) -> Layout:
        """Return the layout of a spec; raise if it names axes of an inner shard_map."""
        axes_of_mesh = [axis for axis in spec.axes if axis in mesh.axis_names]
        foreign = [axis for axis in axes_of_mesh if axis not in self.mapped]
        if foreign:
            raise LayoutError(
                f"{spec} names {', '.join(foreign)}, which this shard_map is not mapped over."
            )
        return Layout(mesh, spec)

    def of_results(self, mesh: Mesh, result: PyTree) -> tuple[ResultPlan, Structure, list[Any]]:
        """Return the plan for one device's result, its structure and its leaves."""
        leaves, structure = flatten(result, none_is_leaf=True)
        key = mesh, structure, tuple(map(_cache_key, leaves))
        plan = self._results.get(key)
        if plan is None:
            entries = self._plan_results(mesh, result)
            specs = [entry.layout.spec for entry in entries]
            uneven = any(spec.is_flat or spec.at for spec in specs)
            plan = ResultPlan(entries, uneven)
            if len(self._results) >= MOST_PLANS:
                self._results.clear()
            self._results[key] = plan
        return plan, structure, leaves

    def _plan_results(self, mesh: Mesh, result: PyTree) -> tuple[PlannedTensor, ...]:
        entries: list[PlannedTensor] = []
        with collected(f"shard_map of {self.name}") as attempt:
            leaves: list[tuple[str, Any, Any]] = []
            with attempt("result"):
                leaves += _leaves_with_specs(result, self.out_specs)
            for index, (path, leaf, spec) in enumerate(leaves):
                with attempt(f"result{path}"):
                    if isinstance(leaf, Sharded):
                        raise LayoutError(
                            f"it is a Sharded on {leaf.mesh}, which only the devices there can "
                            "use. Return fs.unshard(x), or x.local for the own shard."
                        )
                    if isinstance(leaf, Tensor):
                        entries.append(self._plan_result(mesh, index, path, leaf, spec))
        return tuple(entries)

    def _plan_result(
        self, mesh: Mesh, index: int, path: str, leaf: Tensor, spec: Any
    ) -> PlannedTensor:
        layout = self._layout_of_tensor(mesh, leaf, spec, "out_spec")
        shape = layout.global_shape(leaf.shape)
        equal_axes = unnamed(self.mapped, spec)
        subject = f"result{path} of {self.name}, with out_spec {spec}, must be equal along {{axes}}"
        value_error = f"{subject}, but {UNEQUAL_RESULT}"
        gradient_error = f"the gradient of {subject}, but differs"
        return PlannedTensor(index, path, shape, layout, equal_axes, value_error, gradient_error)


def _validate_specs(caller: str, specs: PyTree) -> PyTree:
    """Return a tree of Ps and Nones, with the specs of its Layouts; raise for other leaves."""
    paths, leaves, structure = flatten_with_paths(specs, none_is_leaf=True)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, P | Layout | None):
            hint = f" Write P({leaf!r})." if isinstance(leaf, str) else ""
            raise TypeError(f"{caller}{path} must be a P, a Layout or None; got {leaf!r}.{hint}")
    leaves = [leaf.spec if isinstance(leaf, Layout) else leaf for leaf in leaves]
    return unflatten(structure, leaves)


def _validate_static(leaf: Any, spec: Any) -> None:
    """Raise for a leaf that is no tensor, but has a spec that shards it."""
    if isinstance(spec, P) and not is_static(leaf, spec):
        raise TypeError(
            f"it is a {type(leaf).__name__}, which is not sharded. Write torch.as_tensor(...) "
            "around it, or give None as its spec to pass it unchanged."
        )


def unnamed(mapped: tuple[str, ...], spec: P) -> tuple[str, ...]:
    """Return the mapped axes that a spec does not name: along these a value is replicated."""
    return tuple([axis for axis in mapped if axis not in spec.axes])


def _cache_key(leaf: Any) -> Any:
    """Return the cache key of a leaf.

    It is the shape, dtype and layout of tensors and arrays, and the type of anything else.
    """
    if isinstance(leaf, Sharded):
        return leaf.layout.shared, leaf.shape, getattr(leaf.shards[0], "dtype", None)
    if not isinstance(leaf, Tensor) or leaf.is_nested:  # which has no shape
        return type(leaf)
    return leaf.shape, leaf.dtype, leaf.layout


def _sizeless_key(leaf: Any) -> Any:
    """Return the cache key of a leaf with the number of its dims in place of their sizes."""
    key = _cache_key(leaf)
    if not isinstance(key, tuple):
        return key
    parts: tuple[Any, ...] = key
    return tuple([len(part) if isinstance(part, tuple) else part for part in parts])


def _argument_names(f: Callable[..., Any], positional: int, keywords: tuple[str, ...]) -> list[str]:
    """Return the parameter names of positional arguments, followed by the keywords given."""
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):  # builtins may have no signature
        parameters = {}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in parameters.items() if parameter.kind in kinds]
    numbers = [str(number) for number in range(len(names), positional)]  # of `*args`
    return [*names[:positional], *numbers, *keywords]


def _leaves_with_specs(tree: PyTree, specs: PyTree) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the leaf and its spec for all leaves; the specs are a prefix tree."""
    paths, leaves, structure = flatten_with_paths(tree, none_is_leaf=True)
    try:
        leaf_specs = broadcast_prefix(specs, tree, none_is_leaf=True)
    except ValueError:
        raise ValueError(f"the specs {specs!r} are no prefix of the tree {structure}.") from None
    yield from zip(paths, leaves, leaf_specs, strict=True)
