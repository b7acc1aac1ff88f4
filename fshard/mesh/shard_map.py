"""`shard_map`: run a function once per device, on local tensors.  Everything else in fshard is built on it.

    global arrays --in_specs--> local tensors --f, on every device--> local tensors --out_specs--> global arrays

An in_spec says how a device's piece is cut from the global value, an out_spec how the pieces make up the result.  An
axis that a spec does not name is a promise: along it, all devices hold the same.  With `check=True` promises are
compared by value, forward and backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import optree
from torch import Tensor

from fshard.errors import LayoutError, MeshError, MismatchError
from fshard.mesh.differentiate import Tensors
from fshard.mesh.layout import Layout
from fshard.mesh.mapped import run_mapped
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import collected, convert, on_all, place
from fshard.mesh.promise import Guard
from fshard.mesh.scope import require
from fshard.mesh.sharded import NAMESPACE, Sharded, in_memory, is_sharded
from fshard.mesh.spec import Axes, P
from fshard.mesh.spmd import held, inside, standing
from fshard.source import Site, call_site

PyTree = Any


def shard_map(
    f: Callable[..., PyTree],
    *,
    mesh: Mesh,
    in_specs: PyTree,
    out_specs: PyTree,
    axes: Axes | None = None,
    check: bool | None = None,
) -> Callable[..., PyTree]:
    """Return a function of global arrays that runs `f` once per device, on local tensors.

    Args:
        f: a function of local tensors; it may call collectives over `axes`.
        mesh: the devices.  A mesh of some axes, `mesh["data"]`, is the whole mesh with `axes="data"`.
        in_specs: a P for all arguments, a tuple with one per argument, or a mapping by parameter name; each may be a tree
            of Ps that is a prefix of its argument.  What is no tensor is passed on as it is, whatever its spec.
        out_specs: a P, or a tree of Ps that is a prefix of the result.
        axes: the axes that f is mapped over, by default all.  The others are left to a `shard_map` inside f.
        check: compare promised equality by value.  By default on virtual meshes only.

    Arguments may be plain tensors (the global value, the same on every process) or `Sharded`, which are resharded if
    they lie otherwise.  The results are `Sharded`.  f has to be pure: it must not change its arguments.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> def matmul(a, b):
    ...     return fs.psum(a @ b, "model")
    >>> dot = fs.shard_map(matmul, mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("data"))
    >>> fs.unshard(dot(torch.ones(4, 6), torch.ones(6, 2)))[0]
    tensor([6., 6.])
    """
    mapped = mesh.axis_names if axes is None else mesh.check_axes(axes, "shard_map(axes=)")
    name = getattr(f, "__name__", type(f).__name__)

    @wraps(f, updated=())
    def on_mesh(*args: Any, **kwargs: Any) -> PyTree:
        call = _Call(f, name, standing(mesh), mapped, out_specs, check, call_site())
        return call(_bind(f, name, args, kwargs, in_specs))

    return on_mesh


# -- arguments and their specs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Argument:
    """One leaf of the arguments: where it stands, what it is, how it is to lie."""

    path: str
    value: Any
    spec: P | None


@dataclass(frozen=True)
class _Bound:
    """The arguments of one call, as leaves."""

    leaves: list[_Argument]
    structure: optree.PyTreeSpec


def _bind(f: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], in_specs: PyTree) -> _Bound:
    """Bring arguments and specs together, leaf by leaf."""
    names = _names(f, args, kwargs)
    given = [*args, *kwargs.values()]
    specs = _per_argument(name, names, in_specs)
    leaves: list[_Argument] = []
    with collected(f"shard_map of {name}") as attempt:
        for label, value, spec in zip(names, given, specs, strict=True):
            with attempt(f"argument {label}"):
                leaves += _leaves(label, value, spec)
    structure = optree.tree_structure((args, kwargs), is_leaf=is_sharded, none_is_leaf=True, namespace=NAMESPACE)
    order = optree.tree_leaves((args, kwargs), is_leaf=is_sharded, none_is_leaf=True, namespace=NAMESPACE)
    by_name = {id(leaf.value): leaf for leaf in leaves}
    return _Bound(leaves if len(order) == len(leaves) else [by_name[id(value)] for value in order], structure)


def _names(f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the parameter names of positional arguments, followed by the keywords given."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some callables written in C do not tell
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = positional[: len(args)] + [str(place) for place in range(len(positional), len(args))]
    return names + list(kwargs)


def _per_argument(name: str, names: list[str], in_specs: PyTree) -> list[PyTree]:
    """Return the spec of each argument."""
    if isinstance(in_specs, P) or in_specs is None:
        return [in_specs] * len(names)
    if isinstance(in_specs, Mapping):
        unused = [key for key in in_specs if key not in names]
        if unused:
            raise LayoutError(f"shard_map of {name}: in_specs name {unused}, but the arguments given are {names}.")
        return [in_specs.get(label) for label in names]
    if isinstance(in_specs, tuple | list):
        if len(in_specs) != len(names):
            raise LayoutError(
                f"shard_map of {name}: {len(names)} arguments ({', '.join(names)}) but {len(in_specs)} in_specs. "
                "Give one per argument in that order, one P for all, or a mapping by name."
            )
        return list(in_specs)
    raise LayoutError(f"shard_map of {name}: in_specs is a P, a tuple or a mapping by name; found {type(in_specs).__name__}.")


def _leaves(label: str, value: Any, spec: PyTree) -> list[_Argument]:
    """Return the leaves of one argument with their specs."""
    paths, leaves, _ = optree.tree_flatten_with_path(value, is_leaf=is_sharded, none_is_leaf=True, namespace=NAMESPACE)
    specs = broadcast(spec, value)
    out: list[_Argument] = []
    missing: list[str] = []
    for path, leaf, own in zip(paths, leaves, specs, strict=True):
        at = "".join(f"[{part!r}]" for part in path)
        if isinstance(leaf, Tensor | Sharded) and not isinstance(own, P):
            missing.append(f"{label}{at} is a tensor, but its spec is {own!r}")
        out.append(_Argument(label + at, leaf, own if isinstance(leaf, Tensor | Sharded) else None))
    if missing:
        raise LayoutError("; ".join(missing) + ". Give P() for a tensor that is the same on all devices.")
    return out


def broadcast(specs: PyTree, tree: PyTree) -> list[Any]:
    """Return the spec of every leaf of a tree, from a prefix tree of specs."""
    try:
        return optree.broadcast_prefix(specs, tree, is_leaf=is_sharded, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        raise LayoutError(f"the specs {specs!r} are no prefix of the tree: {error}") from None


# -- one call ---------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """One call of a mapped function: cut, run, put together."""

    f: Callable[..., PyTree]
    name: str
    mesh: Mesh
    mapped: tuple[str, ...]
    out_specs: PyTree
    check: bool | None
    site: Site

    def __post_init__(self) -> None:
        outer = inside(self.mesh)
        again = [axis for axis in self.mapped if outer is not None and axis in outer.mapped]
        if again:
            raise MeshError(
                f"shard_map of {self.name}: axis {', '.join(again)} is already mapped by the shard_map around it. "
                f"Give that one axes=(...) without it, or this one a mesh of the other axes."
            )
        self.checked = self.check if self.check is not None else self.mesh.runtime == "virtual"

    def __call__(self, bound: _Bound) -> PyTree:
        tensors = [leaf for leaf in bound.leaves if leaf.spec is not None]
        with collected(f"shard_map of {self.name}") as attempt:
            layouts: list[Layout] = []
            for leaf in tensors:
                with attempt(f"argument {leaf.path}"):
                    layouts.append(self._layout(leaf))
        columns = [
            tuple(in_memory(shard, self.mesh, "device") for shard in leaf.value.shards)
            if isinstance(leaf.value, Sharded)
            else on_all(leaf.value, layout)
            for leaf, layout in zip(tensors, layouts, strict=True)
        ]
        versions = [leaf.value._version if isinstance(leaf.value, Tensor) and not leaf.value.is_inference() else 0 for leaf in tensors]
        outputs = _Outputs(self)

        def program(device: int, xs: Tensors) -> Tensors:
            local = iter(self._enter(x, leaf, layout) for x, leaf, layout in zip(xs, tensors, layouts, strict=True))
            leaves = [leaf.value if leaf.spec is None else next(local) for leaf in bound.leaves]
            args, kwargs = optree.tree_unflatten(bound.structure, leaves)
            return outputs.take(device, self.f(*args, **kwargs))

        shards = run_mapped(self.mesh, program, columns, mapped=self.mapped, checked=self.checked)
        self._refuse_changed(tensors, versions)
        return outputs.assemble(shards)

    def _layout(self, leaf: _Argument) -> Layout:
        assert leaf.spec is not None
        foreign = [axis for axis in leaf.spec.axes if axis in self.mesh.axis_names and axis not in self.mapped]
        if foreign:
            raise LayoutError(f"{leaf.spec} names {', '.join(foreign)}, which this shard_map is not mapped over.")
        layout = Layout(self.mesh, leaf.spec)
        if isinstance(leaf.value, Sharded) and leaf.value.mesh != self.mesh:
            raise LayoutError(f"it lies on {leaf.value.mesh}, but shard_map runs on {self.mesh}. Take it off with fs.unshard.")
        layout.check(leaf.value.shape)
        return layout

    def _enter(self, x: Tensor, leaf: _Argument, layout: Layout) -> Tensor:
        """Make one device's piece of an argument."""
        if isinstance(leaf.value, Sharded):
            x = convert(x, leaf.value.layout, layout, leaf.value.shape, self.site)
        else:
            x = place(x, layout, self.site)
        return self._promise(
            x,
            layout.spec,
            f"argument {leaf.path} of {self.name}, with spec {layout.spec}, has to be equal along {{axes}}, but its values differ. "
            "Say in its spec how it is cut, or make it equal",
            f"argument {leaf.path} of {self.name}, with spec {layout.spec}, is equal along {{axes}}, so its gradient has to be; but "
            f"it was used with each device's own data. Write {leaf.path} = fs.pvary({leaf.path}, {{axes}}) before that use",
            forward=isinstance(leaf.value, Sharded) or inside(self.mesh) is None or len(held(self.mesh)) == 1,
        )

    def _promise(self, x: Tensor, spec: P, forward_words: str, backward_words: str, *, forward: bool = True) -> Tensor:
        """Hold a value, and its gradient, to being equal along the axes that its spec does not name."""
        scope = require("fs.shard_map")
        axes = tuple(axis for axis in self.mapped if axis not in spec.axes)
        if not self.checked or not axes or not scope.world.has_values:
            return x
        group = scope.group(axes, "fs.shard_map")
        named = " and ".join(f'"{axis}"' for axis in axes)
        if forward:
            (x,) = Guard(group, self.site, forward_words.format(axes=named), forward=True).apply((x,))
        if x.is_floating_point() or x.is_complex():
            (x,) = Guard(group, self.site, backward_words.format(axes=named)).apply((x,))
        return x

    def leave(self, x: Tensor, spec: P, path: str) -> Tensor:
        """Hold one device's piece of a result to what its spec promises."""
        return self._promise(
            x,
            spec,
            f"result{path} of {self.name}, with out_spec {spec}, has to be equal along {{axes}}, but its values differ. "
            "Reduce it with fs.psum or fs.pmean, or say in its out_spec how it is cut",
            f"the gradient of result{path} of {self.name}, with out_spec {spec}, has to be equal along {{axes}}, but differs",
        )

    def _refuse_changed(self, tensors: list[_Argument], versions: list[int]) -> None:
        changed = [
            leaf.path
            for leaf, version in zip(tensors, versions, strict=True)
            if isinstance(leaf.value, Tensor) and not leaf.value.is_inference() and leaf.value._version != version
        ]
        if changed:
            raise LayoutError(
                f"{self.name} changed its argument {', '.join(changed)} in place. All devices were given the same tensor, so the "
                "change was made once for each. Work on a copy: x = x.clone()."
            )


class _Outputs:
    """The results of the devices: tensors travel as shards, all else has to be the same everywhere."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.structures: dict[int, optree.PyTreeSpec] = {}
        self.static: dict[int, list[Any]] = {}
        self.paths: list[str] = []
        self.specs: list[P | None] = []

    def take(self, device: int, result: PyTree) -> Tensors:
        """Take one device's result apart."""
        paths, leaves, structure = optree.tree_flatten_with_path(result, none_is_leaf=True, namespace=NAMESPACE)
        specs = broadcast(self.call.out_specs, result)
        named = ["".join(f"[{part!r}]" for part in path) for path in paths]
        with collected(f"shard_map of {self.call.name}") as attempt:
            for path, leaf, spec in zip(named, leaves, specs, strict=True):
                with attempt(f"result{path}"):
                    self._check(leaf, spec)
        self.structures[device] = structure
        self.static[device] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.paths, self.specs = named, [spec if isinstance(leaf, Tensor) else None for leaf, spec in zip(leaves, specs, strict=True)]
        return tuple(
            self.call.leave(leaf, spec, path) for path, leaf, spec in zip(named, leaves, specs, strict=True) if isinstance(leaf, Tensor)
        )

    def _check(self, leaf: Any, spec: Any) -> None:
        if isinstance(leaf, Tensor) and not isinstance(spec, P):
            raise LayoutError(f"is a tensor, but its out_spec is {spec!r}. Give P() for one that is equal on all devices.")
        if isinstance(leaf, Tensor):
            Layout(self.call.mesh, spec)

    def assemble(self, shards: list[Tensors]) -> PyTree:
        """Put the devices' results together."""
        devices = list(self.structures)
        first = devices[0]
        for device in devices[1:]:
            if self.structures[device] != self.structures[first] or self.static[device] != self.static[first]:
                raise MismatchError(
                    f"shard_map of {self.call.name}: devices {first} and {device} return different trees or values: "
                    f"{self.static[first]} in {self.structures[first]}, and {self.static[device]} in {self.structures[device]}. "
                    "What is no tensor has to be the same on all devices."
                )
        pieces = iter(shards)
        leaves = [
            value if spec is None else self._sharded(next(pieces), spec, path)
            for value, spec, path in zip(self.static[first], self.specs, self.paths, strict=True)
        ]
        return optree.tree_unflatten(self.structures[first], leaves)

    def _sharded(self, shards: Tensors, spec: P, path: str) -> Sharded:
        layout = Layout(self.call.mesh, spec)
        shape = layout.global_shape(shards[0].shape)
        wrong = [
            f"device {layout.mesh.coordinates(device)} returns {tuple(shard.shape)} instead of {layout.local_shape(shape, device)}"
            for device, shard in zip(held(layout.mesh), shards, strict=True)
            if tuple(shard.shape) != layout.local_shape(shape, device)
        ]
        if wrong:
            raise LayoutError(
                f"shard_map of {self.call.name}: result{path} does not make up a tensor of shape {shape} as {spec}: {'; '.join(wrong)}."
            )
        return Sharded(shape, layout, shards)
