"""Change the layout of tensors: `device_put`, `reshard`, `unshard`.

Each is a function of one device, made of collectives and local moves with transposes, and run on every device of the
caller. `plan` chooses the steps, `execute` runs them.

# Note [Results do not alias]
What these functions return never changes with their arguments: a snapshot keeps its values when a step writes the
parameters in place, and a write to the snapshot changes no array. A result that no collective has moved would be the
argument's own memory, or a view of it, so it is copied: as many bytes as it has, once. The public functions do that.
`reshard_all`, `full_values` and `put_equal(may_alias=True)` do not: steps call them, and only read what they return.
torch's copy-on-write storages (`_lazy_clone`) would spare copies that are only read. But memory limits would not see
when they become copies, and shards in page-locked memory or in files cannot have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import LinearMap, Tensors, apply, recorded, transformed
from fshard.mesh.collectives.ledger import active
from fshard.mesh.layout import (
    Layout,
    Memory,
    Mesh,
    P,
    PyTree,
    as_layout,
    broadcast_prefix,
    collected,
    flatten,
    flatten_with_paths,
    is_dense,
    map_leaves,
    no_dense,
    unflatten,
)
from fshard.mesh.layout.kinds import copy_in, owned_by
from fshard.mesh.layout.sharded import Sharded, in_memory, key_of
from fshard.mesh.reshard.execute import ReshardPlan, plan_reshard, start_reshard
from fshard.mesh.reshard.varying import is_left, leave_loss
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
    block, ranges = _slices(layout, x.shape, (device,))[0]
    return _shard_view(x, layout, block, ranges)


@lru_cache(maxsize=1024)
def _slices(
    layout: Layout, shape: tuple[int, ...], devices: tuple[int, ...]
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Return for each device the slices of its block, if that is flattened, and those of its shard."""
    is_block = layout.spec.is_flat and bool(layout.spec.entries)
    blocks = [layout.block(shape, device) if is_block else () for device in devices]
    shards = [layout.ranges(shape, device) for device in devices]
    return [
        (tuple([slice(*side) for side in block]), tuple([slice(*side) for side in shard]))
        for block, shard in zip(blocks, shards, strict=True)
    ]


def _shard_view(
    x: Tensor, layout: Layout, block: tuple[slice, ...], ranges: tuple[slice, ...]
) -> Tensor:
    x = x[block] if block else x
    flat = x.reshape(-1) if layout.spec.is_flat or not x.ndim else x
    return flat[ranges] if ranges else x


def sliced(x: Tensor, layout: Layout) -> Tensors:
    """Return the shards of a global value on the devices held here, as views. No gradient is recorded as of shards."""
    if layout.memory == "device" or layout.mesh.runtime == "abstract":
        x = in_memory(x, layout.mesh, "device")
    devices = local_devices(layout.mesh)
    if not layout.spec.sharded_axes:
        return (x,) * len(devices)
    return tuple([_shard_view(x, layout, *slices) for slices in _slices(layout, x.shape, devices)])


def moves(x: Sharded, layout: Layout) -> bool:
    """Return True if an array must be resharded to have this layout in the devices' memory."""
    x.check()
    before = x.layout
    return before is not layout and (
        before.memory != "device" or bool(plan_reshard(before, layout, x.shape).steps)
    )


def _reshard_tree(
    caller: str,
    tree: PyTree,
    layouts: PyTree,
    as_array: Callable[[Any, Layout], Sharded | None],
    *,
    may_alias: bool = False,
) -> PyTree:
    """Reshard leaves, as arrays, by a prefix tree of layouts; `unit` and `frozen` are kept where the layout has none.

    Results share no memory with the leaves, unless they `may_alias` them.
    """
    paths, leaves, structure = flatten_with_paths(tree, none_is_leaf=True)
    try:
        targets = broadcast_prefix(layouts, tree, none_is_leaf=True)
    except ValueError:
        raise ValueError(
            f"{caller}: the layouts {layouts!r} are no prefix of the tree {structure}."
        ) from None
    meshes = list(dict.fromkeys([leaf.mesh for leaf in leaves if isinstance(leaf, Sharded)]))
    tree_mesh = meshes[0] if len(meshes) == 1 else None
    arrays: dict[int, tuple[Sharded, Layout]] = {}
    with collected(caller) as attempt:
        for index, (path, leaf, to) in enumerate(zip(paths, leaves, targets, strict=True)):
            if to is None or leaf is None:
                continue
            with attempt(path):
                spec = to.spec if isinstance(to, Layout) else to
                if path and isinstance(spec, P) and is_static(leaf, spec):
                    continue
                layout = as_layout(to, leaf.mesh if isinstance(leaf, Sharded) else tree_mesh)
                before = leaf.layout if isinstance(leaf, Sharded) else layout
                unit, frozen = layout.unit or before.unit, layout.frozen or before.frozen
                layout = Layout(resolve_mesh(layout.mesh), layout.spec, layout.memory, unit, frozen)
                if (array := as_array(leaf, layout)) is not None:
                    arrays[index] = array, layout
    resharded = reshard_all(
        [x for x, _ in arrays.values()], [layout for _, layout in arrays.values()], call_site()
    )
    if not may_alias:
        resharded = without_aliases(resharded, [leaves[index] for index in arrays])
    for index, x in zip(arrays, resharded, strict=True):
        leaves[index] = x
    return unflatten(structure, leaves)


def shares_memory(x: Sharded | Tensor, y: Sharded | Tensor) -> bool:
    """Return True if a write to one may change the other."""
    storages = {_storage(shard) for shard in _tensors(x)}
    return any(_storage(shard) in storages for shard in _tensors(y))


def without_aliases(results: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Return results, arrays or tensors, with copies of those that share memory with a source; ties stay ties.

    See Note [Results do not alias].
    """
    storages = {_storage(x) for source in sources for x in _tensors(source)}
    distinct: dict[tuple[int, ...], Any] = {}
    for result in results:
        key = key_of(result)
        if key not in distinct:
            is_alias = any(_storage(x) in storages for x in _tensors(result))
            distinct[key] = _copy(result) if is_alias else result
    return [distinct[key_of(result)] for result in results]


def _tensors(x: Sharded | Tensor) -> Tensors:
    return x.shards if isinstance(x, Sharded) else (x,)


def _storage(x: Tensor) -> int:
    """Return the identity of a tensor's storage; 0 for all of them where torch.func hides them."""
    if transformed():
        return 0
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _copy(x: Sharded | Tensor) -> Sharded | Tensor:
    """Return a copy in the same memory, which autograd records."""
    if isinstance(x, Tensor):
        return x.clone()
    copies = list[Tensor]()
    for device, shard in zip(local_devices(x.mesh), x.shards, strict=True):
        with owned_by(device):
            if x.layout.memory == "device" or transformed():  # with its strides
                copies.append(shard.clone())
            else:
                copies.append(copy_in(x.layout.memory, shard, x.mesh.device_type))
    return Sharded(x.shape, x.layout, tuple(copies))


def is_static(leaf: Any, spec: P) -> bool:
    """Return True for a leaf that passes unchanged: a string, a function, a number that is replicated."""
    has_elements = isinstance(leaf, Number | np.generic | Set | Iterator)
    return not isinstance(leaf, Tensor | Sharded | np.ndarray) and not (
        has_elements and spec != P()
    )


def validate_leaf(leaf: Any, layout: Layout) -> None:
    """Raise if a leaf cannot have its layout."""
    if not isinstance(leaf, Tensor | Sharded):
        raise TypeError(
            f"a tensor is needed; got {type(leaf).__name__}. Write torch.as_tensor(...) around it, or give None for what is "
            "not sharded."
        )
    if isinstance(leaf, Tensor) and not is_dense(leaf):
        raise LayoutError(f"{no_dense(leaf)}.")
    if isinstance(leaf, Sharded):
        leaf.check()
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
            the mesh of `fs.use_mesh`, or else of the arrays in `tree`.

    Leaves that are no tensors, such as strings and functions, are unchanged; numbers must be replicated, P().

    The result never changes with the tree, nor the tree with the result: an array that has its layout already is copied.

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
    tensors = [
        (path, x, y.mesh)
        for path, x, y in pairs
        if isinstance(x, Tensor) and isinstance(y, Sharded)
    ]
    for mesh in dict.fromkeys([mesh for *_, mesh in tensors]):
        compare_inputs(
            "device_put", mesh, {path: (x,) for path, x, root in tensors if root == mesh}
        )
    return result


def put_equal(tree: PyTree, layout: PyTree, *, may_alias: bool = False) -> PyTree:
    """Shard global values as `device_put` does, without comparing those of the processes: nothing is sent.

    With `may_alias`, arrays that are not moved share the memory of the given ones.
    """
    arrays: dict[object, Sharded] = {}

    def as_array(x: Any, to: Layout) -> Sharded:
        validate_leaf(x, to)
        if isinstance(x, Sharded) and x.mesh == to.mesh:
            return x
        key = key_of(x), to
        if key not in arrays:
            arrays[key] = _shard_value(x if isinstance(x, Tensor) else full_values(x), to)
        return arrays[key]

    return _reshard_tree("device_put", tree, layout, as_array, may_alias=may_alias)


def layouts(tree: PyTree) -> PyTree:
    """Return the layout of every `Sharded` of a tree, None for all other leaves: for `device_put` and `reshard`.

    To continue in another ZeRO stage or on another mesh, give the state its layouts there: `device_put(state,
    layouts(optimizer.init(params)))`, with the optimizer and the parameters of that mesh.
    """
    return map_leaves(lambda x: x.layout if isinstance(x, Sharded) else None, tree)


def _shard_value(x: Tensor, layout: Layout) -> Sharded:
    """Return a global value in a layout; a replicated array where autograd must record the reshard, or sums are split."""
    if recorded((x,)) or transformed() or layout.spec.unreduced:
        return spread(x, layout)
    shards = list[Tensor]()
    for device, shard in zip(local_devices(layout.mesh), sliced(x, layout), strict=True):
        with owned_by(device):
            shards.append(copy_in(layout.memory, shard, layout.mesh.device_type))  # no views
    return Sharded(tuple(x.shape), layout, tuple(shards))


def _moved_to_memory(shards: Tensors, mesh: Mesh, before: Memory, after: Memory) -> Tensors:
    """Return shards in another memory, and write their bytes into the ledger."""
    if before == after:
        return shards
    moved = list[Tensor]()
    for device, x in zip(local_devices(mesh), shards, strict=True):
        for ledger in active():
            ledger.record_move(device, before, after, x.nbytes)
        with owned_by(device):
            moved.append(in_memory(x, mesh, after))
    return tuple(moved)


@uncompiled
def reshard(tree: PyTree, layout: PyTree) -> PyTree:
    """Change the layouts of global arrays on their mesh, by collectives: see `plan`.

    Plain tensors, which are global values, and leaves whose layout is None are returned unchanged. An array that has its
    layout already is copied: a result never changes with its source.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> x = fs.device_put(torch.arange(16.0).reshape(4, 4), fs.Layout(mesh, P("data")))
    >>> with fs.ledger() as comm:
    ...     y = reshard(x, fs.Layout(mesh, P(None, "data")))
    >>> fs.typeof(y), comm.by_collective()
    (f32[4, 4@data], {('all_to_all', ('data',)): (1, Fraction(12, 1))})
    """
    has_arrays = any(isinstance(x, Sharded) for x in flatten(tree)[0])

    def as_array(x: Any, to: Layout) -> Sharded | None:
        if not isinstance(x, Sharded) and has_arrays:
            return None
        validate_leaf(x, to)
        if not isinstance(x, Sharded):
            raise TypeError(
                f"a Sharded is needed; got {type(x).__name__}. Shard tensors with fs.device_put."
            )
        if x.mesh != to.mesh:
            raise LayoutError(
                f"the tensor is on {x.mesh} and cannot be resharded to {to.mesh}. Use fs.device_put."
            )
        return x

    return _reshard_tree("reshard", tree, layout, as_array)


def reshard_all(xs: Sequence[Sharded], layouts: Sequence[Layout], site: Site) -> list[Sharded]:
    """Reshard global arrays on their mesh; those with equal steps share collectives, tied ones stay tied."""
    firsts = _first_tied_indices(xs, layouts)
    resharded = list(xs)
    by_mesh: dict[Mesh, list[int]] = {}
    for index in dict.fromkeys(firsts):
        if xs[index].layout != layouts[index]:
            by_mesh.setdefault(xs[index].mesh, []).append(index)
    for mesh, indices in by_mesh.items():
        arrays = [xs[index] for index in indices]
        _validate_reshardable(arrays, mesh)
        plans = [
            plan_reshard(xs[index].layout, layouts[index], xs[index].shape) for index in indices
        ]
        kinds: list[Memory] = [
            "device" if plan.steps else x.layout.memory
            for x, plan in zip(arrays, plans, strict=True)
        ]
        columns = [
            _moved_to_memory(x.shards, mesh, x.layout.memory, kind)
            for x, kind in zip(arrays, kinds, strict=True)
        ]
        if any(plan.steps for plan in plans):
            columns = run_mapped(mesh, partial(_execute_plans, plans, site), columns)
        for index, shards, kind in zip(indices, columns, kinds, strict=True):
            to = layouts[index]
            resharded[index] = Sharded(
                xs[index].shape, to, _moved_to_memory(tuple(shards), mesh, kind, to.memory)
            )
    return [resharded[first] for first in firsts]


def _first_tied_indices(xs: Sequence[Sharded], layouts: Sequence[Layout]) -> Sequence[int]:
    """Return for each array the index of the first equal one with an equal plan."""
    if len({id(x.shards[0]) for x in xs}) == len(xs):
        return range(len(xs))
    firsts: dict[object, int] = {}
    return [
        firsts.setdefault((*key_of(x), to), index)
        for index, (x, to) in enumerate(zip(xs, layouts, strict=True))
    ]


def _execute_plans(plans: Sequence[ReshardPlan], site: Site, device: int, xs: Tensors) -> Tensors:
    return tuple(start_reshard(xs, plans, site)())


def _validate_reshardable(xs: Sequence[Sharded], mesh: Mesh) -> None:
    """Raise if arrays of a mesh cannot be resharded: in zigzag order, or in a loss function, where values are varying."""
    if mesh.zigzag:
        raise LayoutError(
            f"an array must not be in zigzag order to be resharded; got one on {mesh}. Use plan.full(x), or "
            "fs.array.constrain."
        )
    if any(is_left(x) and recorded(x.shards) for x in xs):
        raise LayoutError(
            "a parameter of a planned module cannot be resharded between forward and backward. Use fs.unshard(x), "
            "or operations on it."
        )
    scope = inside(mesh)
    is_varying = scope is not None and not scope.varying_axes.isdisjoint(mesh.axis_names)
    if is_varying and any(recorded(x.shards) for x in xs):
        raise LayoutError(
            "a tensor that depends on parameters cannot be resharded in a loss function of value_and_grad, where every "
            "value is varying. Use collectives: fs.all_gather(x, axis) for the full tensor."
        )


@uncompiled
def unshard(tree: PyTree) -> PyTree:
    """Return global arrays as plain, full tensors; on a process mesh, on every process. Other leaves are unchanged.

    The tensors are copies, of replicated arrays too: write to them as you like. Tied tensors stay tied. To move
    parameters to another mesh give them to `shard_params` or `device_put` directly: a plain tensor has lost its unit and
    whether it is frozen.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> unshard(fs.device_put(torch.arange(4), fs.Layout(mesh, P("data"))))
    tensor([0, 1, 2, 3])
    """
    leaves, structure = flatten(tree)
    for index, leaf in enumerate(leaves):
        if getattr(type(leaf), "computes_on_arrays", False):  # parts of a fused weight
            leaves[index] = leaf.full()
    indices = [index for index, x in enumerate(leaves) if isinstance(x, Sharded)]
    left = dict[int, Sharded]()  # by the array, so that tied ones stay tied
    arrays = list[Sharded]()
    for index in indices:
        x = leaves[index]
        if id(x) not in left:
            left[id(x)] = leave_loss(x)
        arrays.append(left[id(x)])
    tensors = without_aliases(_full_tensors(arrays), arrays)
    for index, x in zip(indices, tensors, strict=True):
        leaves[index] = x
    return unflatten(structure, leaves)


def full_values(array: Sharded) -> Tensor:
    """Return an array as a plain, full tensor to read: that of a replicated array is its shard."""
    return _full_tensors([array])[0]


def _full_tensors(arrays: Sequence[Sharded]) -> list[Tensor]:
    for x in arrays:
        x.check()
    replicated = reshard_all(arrays, [Layout(x.mesh) for x in arrays], call_site())
    full: dict[int, Tensor] = {}
    for x in replicated:
        if id(x) not in full:  # tied tensors stay tied
            full[id(x)] = apply(First(len(x.shards)), x.shards)[0]
    return [full[id(x)] for x in replicated]
