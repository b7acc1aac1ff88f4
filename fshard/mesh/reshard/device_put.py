"""Change the layout of tensors: `device_put`, `reshard`, `unshard`.

Each is a function of one device, made of collectives and local moves with transposes, and run on every device of the
caller. `plan` chooses the steps, `execute` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import LinearMap, Tensors, apply, recorded, transformed
from fshard.mesh.layout import (
    Layout,
    Memory,
    Mesh,
    P,
    PyTree,
    Structure,
    broadcast_prefix,
    collected,
    flatten,
    flatten_with_paths,
    is_dense,
    map_leaves,
    no_dense,
    require_mesh,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded, in_memory, key_of
from fshard.mesh.reshard.execute import ReshardPlan, go, plan_reshard
from fshard.mesh.spmd.global_inputs import compare_inputs
from fshard.mesh.spmd.outer_autograd import run_mapped
from fshard.mesh.spmd.run import inside, is_outside, local_devices, resolve_mesh
from fshard.source import Site, call_site
from fshard.uncompiled import uncompiled


@dataclass(frozen=True)
class Fanout(LinearMap):
    """Give a tensor to all n devices as a replicated value. Its cotangents are equal: one is taken."""

    n: int

    def run(self, xs: Tensors) -> Tensors:
        return xs * self.n

    def transposed(self) -> LinearMap:
        return First(self.n)


@dataclass(frozen=True)
class First(LinearMap):
    """Take a replicated value from the first of n devices; the cotangent is replicated again."""

    n: int

    def run(self, xs: Tensors) -> Tensors:
        return xs[:1]

    def transposed(self) -> LinearMap:
        return Fanout(self.n)


def spread(x: Tensor, layout: Layout) -> Sharded:
    """Return a global value as a replicated array on the mesh of a layout."""
    x = in_memory(x, layout.mesh, "device")
    shards = apply(Fanout(layout.mesh.size), (x,)) if is_outside(layout.mesh) else (x,)
    return Sharded(tuple(x.shape), Layout(layout.mesh), shards)


def shard_of(x: Tensor, layout: Layout, device: int) -> Tensor:
    """Return a view of a global value: the shard of one device."""
    ranges = layout.ranges(x.shape, device)
    if layout.spec.is_flat and layout.spec.entries:
        x = x[tuple([slice(*one) for one in layout.block(x.shape, device)])]
    flat = x.reshape(-1) if layout.spec.is_flat or not x.ndim else x
    return flat[tuple([slice(*one) for one in ranges])] if ranges else x


def sliced(x: Tensor, layout: Layout) -> Tensors:
    """Return the shards of a global value on the devices held here, as views. No gradient is recorded as of shards."""
    x = in_memory(x, layout.mesh, "device")
    devices = local_devices(layout.mesh)
    return tuple(
        [shard_of(x, layout, device) for device in devices] if layout.spec.sharded_axes else [x] * len(devices)
    )


def moves(x: Sharded, layout: Layout) -> bool:
    """Return True if an array must be resharded to have this layout in the devices' memory."""
    x.check()
    before = x.layout
    return before is not layout and (before.memory != "device" or bool(plan_reshard(before, layout, x.shape).steps))


def _each_leaf(
    what: str, tree: PyTree, layouts: PyTree, act: Callable[[int, Any, Layout], Any]
) -> tuple[list[Any], Structure]:
    """Apply a prefix tree of layouts to the leaves; `unit` and `frozen` are kept where the layout has none."""
    paths, leaves, structure = flatten_with_paths(tree, none_is_leaf=True)
    try:
        chosen = broadcast_prefix(layouts, tree, none_is_leaf=True)
    except ValueError:
        raise ValueError(f"{what}: the layouts {layouts!r} are no prefix of the tree {structure}.") from None
    chosen = [Layout(require_mesh(what), layout) if isinstance(layout, P) else layout for layout in chosen]
    results = list(leaves)
    with collected(what) as attempt:
        for place, (path, leaf, layout) in enumerate(zip(paths, leaves, chosen, strict=True)):
            if layout is None or leaf is None:
                continue
            with attempt(path):
                if not isinstance(layout, Layout):
                    raise TypeError(f"a layout must be a Layout, fs.Layout(mesh, P(...)); got {type(layout).__name__}.")
                if path and is_static(leaf, layout.spec):
                    continue
                known = leaf.layout if isinstance(leaf, Sharded) else layout
                unit, frozen = layout.unit or known.unit, layout.frozen or known.frozen
                own = Layout(resolve_mesh(layout.mesh), layout.spec, layout.memory, unit, frozen)
                results[place] = act(place, leaf, own)
    return results, structure


def is_static(leaf: Any, spec: P) -> bool:
    """Return True for a leaf that passes unchanged: a string, a function, a number that is replicated."""
    has_elements = isinstance(leaf, Number | np.generic | Set | Iterator)
    return not isinstance(leaf, Tensor | Sharded | np.ndarray) and not (has_elements and spec != P())


def refuse_unfit(leaf: Any, layout: Layout) -> None:
    """Raise if a leaf cannot have its layout."""
    if not isinstance(leaf, Tensor | Sharded):
        raise TypeError(
            f"a tensor is needed; got {type(leaf).__name__}. Write torch.as_tensor(...) around it, or give None for what is "
            "not sharded."
        )
    if isinstance(leaf, Tensor) and not is_dense(leaf):
        raise LayoutError(f"{no_dense(leaf)}.")
    layout.check(leaf.shape)


@uncompiled
def device_put(tree: PyTree, layout: PyTree) -> PyTree:
    """Shard global values: every process has the full values and keeps its shards.

    All processes of the mesh must call it. One small collective for a call compares a hash of the plain tensors, and
    different ones raise. A step shards its batch without this; inside `shard_map` and loss functions nothing is compared.

    Args:
        tree: a tensor or tree of tensors, the same on every process. A `Sharded` is resharded; one of another mesh is
            unsharded first. Tied tensors stay tied.
        layout: a layout, or a tree of layouts that is a prefix of `tree`; None leaves a leaf unchanged. A P is a layout on
            the mesh of `fs.use_mesh`.

    Leaves that are no tensors, such as strings and functions, are unchanged; numbers must be replicated, P().

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4, "model": 2})
    >>> x = device_put(torch.arange(8.0), fs.Layout(mesh, P("data")))
    >>> fs.typeof(x), x.shards[2]
    (f32[8@data], tensor([2., 3.]))
    """
    result = put_equal(tree, layout)
    paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
    pairs = zip(paths, leaves, flatten(result, none_is_leaf=True)[0], strict=True)
    tensors = [(path, x, y.mesh) for path, x, y in pairs if isinstance(x, Tensor) and isinstance(y, Sharded)]
    for mesh in dict.fromkeys([mesh for *_, mesh in tensors]):
        compare_inputs("device_put", mesh, {path: (x,) for path, x, own in tensors if own == mesh})
    return result


def put_equal(tree: PyTree, layout: PyTree) -> PyTree:
    """Shard global values as `device_put` does, without comparing those of the processes: nothing is sent."""
    site, done = call_site(), dict[object, Sharded]()

    def put(place: int, x: Any, to: Layout) -> Sharded:
        refuse_unfit(x, to)
        key = key_of(x), to
        if key not in done:
            stays = isinstance(x, Sharded) and x.mesh == to.mesh
            done[key] = reshard_all([_movable(x, to)], [to], site)[0] if stays else _put(unshard(x), to, site)
        return done[key]

    leaves, structure = _each_leaf("device_put", tree, layout, put)
    return unflatten(structure, leaves)


def layouts(tree: PyTree) -> PyTree:
    """Return the layout of every `Sharded` of a tree, None for all other leaves: for `device_put` and `reshard`.

    To continue in another ZeRO stage or on another mesh, give the state its layouts there: `device_put(state,
    layouts(optimizer.init(params)))`, with the optimizer and the parameters of that mesh.
    """
    return map_leaves(lambda x: x.layout if isinstance(x, Sharded) else None, tree)


def _put(x: Tensor, layout: Layout, site: Site) -> Sharded:
    if recorded((x,)) or transformed() or layout.spec.unreduced:
        (made,) = reshard_all([spread(x, layout)], [layout], site)
        return made
    shards = tuple(shard.clone(memory_format=torch.contiguous_format) for shard in sliced(x, layout))  # no views
    return Sharded(tuple(x.shape), layout, _placed(shards, layout, layout.memory))


def _placed(shards: Tensors, layout: Layout, memory: Memory) -> Tensors:
    """Return shards of a layout in the devices' memory, or in the host's."""
    if memory == layout.memory == "device":
        return shards
    return tuple(in_memory(shard, layout.mesh, memory) for shard in shards)


@uncompiled
def reshard(tree: PyTree, layout: PyTree) -> PyTree:
    """Change the layouts of global arrays on their mesh, by collectives: see `plan`.

    Plain tensors, which are global values, and leaves whose layout is None are returned unchanged.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> x = fs.device_put(torch.arange(16.0).reshape(4, 4), fs.Layout(mesh, P("data")))
    >>> with fs.ledger() as comm:
    ...     y = reshard(x, fs.Layout(mesh, P(None, "data")))
    >>> fs.typeof(y), comm.by_collective()
    (f32[4, 4@data], {('all_to_all', ('data',)): (1, Fraction(12, 1))})
    """
    site = call_site()
    given: dict[int, tuple[Sharded, Layout]] = {}
    has_sharded = any(isinstance(x, Sharded) for x in flatten(tree)[0])

    def note(place: int, x: Any, to: Layout) -> Any:
        if isinstance(x, Sharded) or not has_sharded:
            refuse_unfit(x, to)
            given[place] = _movable(x, to), to
        return x

    leaves, structure = _each_leaf("reshard", tree, layout, note)
    moved = reshard_all([x for x, _ in given.values()], [to for _, to in given.values()], site)
    for place, x in zip(given, moved, strict=True):
        leaves[place] = x
    return unflatten(structure, leaves)


def _movable(x: Any, layout: Layout) -> Sharded:
    if not isinstance(x, Sharded):
        raise TypeError(f"a Sharded is needed; got {type(x).__name__}. Shard tensors with fs.device_put.")
    if x.mesh != layout.mesh:
        raise LayoutError(f"the tensor is on {x.mesh} and cannot be resharded to {layout.mesh}. Use fs.device_put.")
    x.check()
    return x


def reshard_all(xs: Sequence[Sharded], layouts: Sequence[Layout], site: Site) -> list[Sharded]:
    """Reshard global arrays on their mesh; those with equal steps share collectives, tied ones stay tied."""
    firsts = _firsts(xs, layouts)
    moved = list(xs)
    for mesh, places, ways in _trips(
        tuple([x.layout for x in xs]), tuple(layouts), tuple([x.shape for x in xs]), tuple(firsts)
    ):
        given = [xs[place] for place in places]
        _refuse_owned(given, mesh)
        columns = [_placed(x.shards, x.layout, "device") for x in given]
        if any(way.steps for way in ways):

            def program(device: int, own: Tensors, ways: Sequence[ReshardPlan] = ways) -> Tensors:
                return tuple(go(own, ways, site)())

            columns = run_mapped(mesh, program, columns)
        for place, x, shards in zip(places, given, columns, strict=True):
            to = layouts[place]
            moved[place] = Sharded(x.shape, to, _placed(tuple(shards), to, to.memory))
    return [moved[first] for first in firsts]


def _firsts(xs: Sequence[Sharded], layouts: Sequence[Layout]) -> Sequence[int]:
    """Return for each array the index of the first equal one with an equal plan."""
    if len({id(x.shards[0]) for x in xs}) == len(xs):
        return range(len(xs))
    seen: dict[object, int] = {}
    return [seen.setdefault((*key_of(x), to), place) for place, (x, to) in enumerate(zip(xs, layouts, strict=True))]


@lru_cache(maxsize=256)
def _trips(
    befores: tuple[Layout, ...],
    afters: tuple[Layout, ...],
    shapes: tuple[tuple[int, ...], ...],
    firsts: tuple[int, ...],
) -> list[tuple[Mesh, list[int], list[ReshardPlan]]]:
    """Return the plans of distinct arrays by mesh: their indices in the list, and the plan of each."""
    on_mesh: dict[Mesh, list[int]] = {}
    for place in dict.fromkeys(firsts):
        if befores[place] != afters[place]:
            on_mesh.setdefault(befores[place].mesh, []).append(place)
    if strange := [mesh for mesh in on_mesh if mesh.zigzag]:
        raise LayoutError(
            f"an array must not be in zigzag order to be resharded; got one on {strange[0]}. Use plan.full(x), or "
            "fs.array.constrain."
        )
    return [
        (mesh, places, [plan_reshard(befores[place], afters[place], shapes[place]) for place in places])
        for mesh, places in on_mesh.items()
    ]


def _refuse_owned(xs: Sequence[Sharded], mesh: Mesh) -> None:
    """Raise if these depend on parameters in a loss function, where a value is no global one but the device's own."""
    scope = inside(mesh)
    if scope is not None and not scope.own.isdisjoint(mesh.axis_names) and any(recorded(x.shards) for x in xs):
        raise LayoutError(
            "a tensor that depends on parameters cannot be resharded in a loss function of value_and_grad, where every "
            "value is varying. Use collectives: fs.all_gather(x, axis) for the full tensor."
        )


@uncompiled
def unshard(tree: PyTree) -> PyTree:
    """Return global arrays as plain, full tensors; on a process mesh, on every process. Other leaves are unchanged.

    Tied tensors stay tied. To move parameters to another mesh give them to `shard_params` or `device_put` directly: a
    plain tensor has lost its unit and whether it is frozen.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> unshard(fs.device_put(torch.arange(4), fs.Layout(mesh, P("data"))))
    tensor([0, 1, 2, 3])
    """
    leaves, structure = flatten(tree)
    places = [place for place, x in enumerate(leaves) if isinstance(x, Sharded)]
    given: list[Sharded] = [leaves[place] for place in places]
    for x in given:
        x.check()
    full_tensors: dict[int, Tensor] = {}
    for place, x in zip(places, reshard_all(given, [Layout(x.mesh) for x in given], call_site()), strict=True):
        if id(x) not in full_tensors:  # tied tensors stay tied
            full_tensors[id(x)] = apply(First(len(x.shards)), x.shards)[0]
        leaves[place] = full_tensors[id(x)]
    return unflatten(structure, leaves)
