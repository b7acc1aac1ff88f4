"""Change the layout of tensors: `device_put`, `reshard`, `unshard`.

    device_put    a plain tensor, equal on all processes    ->    an array
    reshard       an array in one layout                    ->    an array in another, on any mesh
    unshard       an array                                  ->    a plain tensor

Each is a function of one device, made of collectives and local moves with transposes, and run on
every device of the caller. `plan` chooses the steps, `execute` runs them. To another mesh `between`
moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Number
from typing import Any

import numpy as np
import torch
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
from fshard.mesh.reshard.between import can_move_between, move_between
from fshard.mesh.reshard.execute import ReshardPlan, plan_reshard, start_reshard
from fshard.mesh.reshard.varying import is_left, leave_loss
from fshard.mesh.spmd.global_inputs import compare_inputs
from fshard.mesh.spmd.outer_autograd import run_mapped
from fshard.mesh.spmd.run import inside, is_outside, local_devices, resolve_mesh
from fshard.mesh.spmd.scope import here
from fshard.source import Site, call_site
from fshard.uncompiled import uncompiled


@dataclass(frozen=True)
class Fanout(LinearMap):
    """Give a tensor to all n devices as a replicated value.

    Its cotangents are equal: one is taken.
    """

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
    shards: Tensors = (x,)
    if is_outside(layout.mesh):
        shards = apply(Fanout(layout.mesh.size), shards)
    return Sharded(tuple(x.shape), Layout(layout.mesh), shards)


def shard_of(x: Tensor, layout: Layout, device: int) -> Tensor:
    """Return a view of a global value: the shard of one device."""
    (slices,) = _slices(layout, x.shape, (device,))
    return _shard_view(x, layout, *slices)


def sliced(x: Tensor, layout: Layout) -> Tensors:
    """Return the shards of a global value on the devices held here, as views.

    No gradient is recorded as one of shards.
    """
    if layout.memory == "device" or layout.mesh.runtime == "abstract":
        x = in_memory(x, layout.mesh, "device")
    devices = local_devices(layout.mesh)
    if not layout.spec.sharded_axes:
        return (x,) * len(devices)

    slices_of_devices = _slices(layout, x.shape, devices)
    return tuple([_shard_view(x, layout, *slices) for slices in slices_of_devices])


@lru_cache(maxsize=1024)
def _slices(
    layout: Layout, shape: tuple[int, ...], devices: tuple[int, ...]
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Return for each device the slices of its block, and those of its shard in the block.

    Only a block that is flattened needs slices of its own; else they are ().
    """
    has_flat_block = layout.spec.is_flat and bool(layout.spec.entries)
    result: list[tuple[tuple[slice, ...], tuple[slice, ...]]] = []
    for device in devices:
        block = layout.block(shape, device) if has_flat_block else ()
        shard = layout.ranges(shape, device)
        block_slices = tuple([slice(*side) for side in block])
        shard_slices = tuple([slice(*side) for side in shard])
        result.append((block_slices, shard_slices))
    return result


def _shard_view(
    x: Tensor, layout: Layout, block: tuple[slice, ...], shard: tuple[slice, ...]
) -> Tensor:
    if block:
        x = x[block]
    if not shard:
        return x  # a scalar
    if layout.spec.is_flat or not x.ndim:
        x = x.reshape(-1)  # of a scalar, a device that stores nothing has the range 0:0
    return x[shard]


def moves(x: Sharded, layout: Layout) -> bool:
    """Return True if an array must be resharded to have this layout in the devices' memory.

    The caller has checked the array.
    """
    before = x.layout
    if before is layout:
        return False
    if before.memory != "device":
        return True
    if before.shared is layout.shared:  # as a plan's: equal, at the cost of no comparison
        return False
    return bool(plan_reshard(before, layout, x.shape).steps)


def _reshard_tree(
    caller: str,
    tree: PyTree,
    layouts: PyTree,
    as_array: Callable[[Any, Layout], Sharded | None],
    *,
    may_alias: bool = False,
    dtype: torch.dtype | None = None,
) -> PyTree:
    """Reshard the leaves of a tree by a prefix tree of layouts.

    Args:
        caller: the function that errors name.
        tree: any tree.
        layouts: a layout or P for each leaf; None leaves it unchanged.
        as_array: returns a leaf as an array on the mesh of its layout; None leaves it unchanged.
        may_alias: results may share memory with the leaves.
        dtype: of the results that have floating-point numbers; None for their own.
    """
    paths, leaves, structure = flatten_with_paths(tree, none_is_leaf=True)
    try:
        targets = broadcast_prefix(layouts, tree, none_is_leaf=True)
    except ValueError:
        raise ValueError(
            f"{caller}: the layouts {layouts!r} are no prefix of the tree {structure}."
        ) from None
    meshes = {leaf.mesh for leaf in leaves if isinstance(leaf, Sharded)}
    tree_mesh = meshes.pop() if len(meshes) == 1 else None

    arrays: dict[int, Sharded] = {}  # by the index of the leaf
    new_layouts: list[Layout] = []
    with collected(caller) as attempt:
        leaves_with_targets = zip(paths, leaves, targets, strict=True)
        for index, (path, leaf, target) in enumerate(leaves_with_targets):
            if target is None or leaf is None:
                continue
            with attempt(path):
                spec = target.spec if isinstance(target, Layout) else target
                is_in_tree = path != ""
                if is_in_tree and isinstance(spec, P) and is_static(leaf, spec):
                    continue
                layout = _layout_of_leaf(leaf, target, tree_mesh)
                array = as_array(leaf, layout)
                if array is not None:
                    arrays[index] = array
                    new_layouts.append(layout)

    results = reshard_all([*arrays.values()], new_layouts, call_site(), dtype)
    if not may_alias:
        results = without_aliases(results, [leaves[index] for index in arrays])
    for index, result in zip(arrays, results, strict=True):
        leaves[index] = result
    return unflatten(structure, leaves)


def _layout_of_leaf(leaf: Any, target: Any, tree_mesh: Mesh | None) -> Layout:
    """Return the layout that a leaf gets.

    The unit of an array is kept where the layout has none, and a frozen array stays so.
    """
    if not isinstance(leaf, Sharded):
        layout = as_layout(target, tree_mesh)
        return layout.on(resolve_mesh(layout.mesh))

    layout = as_layout(target, leaf.mesh)
    unit = layout.unit or leaf.layout.unit
    frozen = layout.frozen or leaf.layout.frozen
    return Layout(resolve_mesh(layout.mesh), layout.spec, layout.memory, unit, frozen)


# Note [Results do not alias]
# What these functions return never changes with their arguments: a snapshot keeps its values when a
# step writes the parameters in place, and a write to the snapshot changes no array. A result that
# no collective has moved would be the argument's own memory, or a view of it, so it is copied: as
# many bytes as it has, once. The public functions do that. `reshard_all`, `full_values` and
# `put_equal(may_alias=True)` do not: steps call them, and only read what they return.
# torch's copy-on-write storages (`_lazy_clone`) would spare copies that are only read. But memory
# limits would not see when they become copies, and shards in page-locked memory or in files cannot
# have them.


def shares_memory(x: Sharded | Tensor, y: Sharded | Tensor) -> bool:
    """Return True if a write to one may change the other."""
    storages = {_storage(shard) for shard in _tensors(x)}
    return any(_storage(shard) in storages for shard in _tensors(y))


def without_aliases(results: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Return arrays or tensors, with copies of those that share memory with a source.

    Tied results stay tied. See Note [Results do not alias].
    """
    storages: set[int] = set()
    for source in sources:
        storages.update([_storage(x) for x in _tensors(source)])

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

    keeps_strides = x.layout.memory == "device" or transformed()
    copies = list[Tensor]()
    for device, shard in zip(local_devices(x.mesh), x.shards, strict=True):
        with owned_by(x.mesh.devices[device]):
            if keeps_strides:
                copies.append(shard.clone())
            else:
                copies.append(copy_in(x.layout.memory, shard, x.mesh.device_type))
    return Sharded(x.shape, x.layout, tuple(copies))


def is_static(leaf: Any, spec: P) -> bool:
    """Return True for a leaf that passes unchanged: a string, a function, a replicated number."""
    if isinstance(leaf, Tensor | Sharded | np.ndarray):
        return False
    # A spec with axes for numbers or for elements is a mistake, which must raise.
    has_elements = isinstance(leaf, Number | np.generic | Set | Iterator)
    return not has_elements or spec == P()


def validate_leaf(leaf: Any, layout: Layout) -> None:
    """Raise if a leaf cannot have its layout."""
    if not isinstance(leaf, Tensor | Sharded):
        raise TypeError(
            f"a tensor is needed; got {type(leaf).__name__}. Write torch.as_tensor(...) around it, "
            "or give None for what is not sharded."
        )
    if isinstance(leaf, Tensor) and not is_dense(leaf):
        raise LayoutError(f"{no_dense(leaf)}.")
    if isinstance(leaf, Sharded):
        leaf.check()
    layout.check(leaf.shape)


@uncompiled
def device_put(tree: PyTree, layout: PyTree) -> PyTree:
    """Shard global values: every process has the full values and keeps its shards.

    All processes of the mesh must call it, and those of an array's own mesh. One small collective
    for a call compares a hash of the plain tensors, and different ones raise. A step shards its
    batch without this; inside `shard_map` and loss functions nothing is compared.

    Args:
        tree: a tensor or tree of tensors, the same on every process. A `Sharded` is resharded, to
            another mesh too. Tied tensors stay tied.
        layout: a layout, or a tree of layouts that is a prefix of `tree`; None leaves a leaf
            unchanged. A P is a layout on the mesh of `fs.use_mesh`, or else of the arrays in
            `tree`.

    Leaves that are no tensors, such as strings and functions, are unchanged; numbers must be
    replicated, P().

    The result never changes with the tree, nor the tree with the result: an array that has its
    layout already is copied.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4, "model": 2})
    >>> x = device_put(torch.arange(8.0), fs.Layout(mesh, P("data")))
    >>> fs.typeof(x), x.shards[2]
    (f32[8@data], tensor([2., 3.]))
    """
    result = put_equal(tree, layout)

    # Only plain tensors are compared: the processes have shards of an array, not copies.
    paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
    results, _ = flatten(result, none_is_leaf=True)
    by_mesh: dict[Mesh, dict[str, Tensors]] = {}
    for path, leaf, array in zip(paths, leaves, results, strict=True):
        if isinstance(leaf, Tensor) and isinstance(array, Sharded):
            by_mesh.setdefault(array.mesh, {})[path] = (leaf,)
    for mesh, tensors in by_mesh.items():
        compare_inputs("device_put", mesh, tensors)
    return result


def put_equal(tree: PyTree, layout: PyTree, *, may_alias: bool = False) -> PyTree:
    """Shard global values as `device_put` does, without comparing those of the processes.

    Nothing is sent. With `may_alias`, arrays that are not moved share the memory of the given ones.
    """
    arrays: dict[object, Sharded] = {}  # one for all leaves that are tied

    def as_array(leaf: Any, target: Layout) -> Sharded:
        validate_leaf(leaf, target)
        if isinstance(leaf, Sharded):
            if _can_reshard(leaf.mesh, target.mesh):
                return leaf
            _validate_outside_of_map(leaf.mesh, target.mesh)
        key = (key_of(leaf), target)
        if key not in arrays:
            x = leaf if isinstance(leaf, Tensor) else full_values(leaf)
            arrays[key] = _shard_value(x, target)
        return arrays[key]

    return _reshard_tree("device_put", tree, layout, as_array, may_alias=may_alias)


def layouts(tree: PyTree) -> PyTree:
    """Return the layout of every `Sharded` of a tree, None for all other leaves.

    To continue in another ZeRO stage or on another mesh, give the state its layouts there:
    `device_put(state, layouts(optimizer.init(params)))`, with the optimizer and the parameters of
    that mesh.
    """
    return map_leaves(lambda x: x.layout if isinstance(x, Sharded) else None, tree)


def _shard_value(x: Tensor, layout: Layout) -> Sharded:
    """Return a global value in a layout.

    It is a replicated array, to be resharded, where autograd must record that or it becomes a sum.
    """
    if recorded((x,)) or transformed() or layout.spec.unreduced:
        return spread(x, layout)

    shards = list[Tensor]()
    for device, view in zip(local_devices(layout.mesh), sliced(x, layout), strict=True):
        with owned_by(
            layout.mesh.devices[device]
        ):  # copied: views would keep x alive, and change with it
            shards.append(copy_in(layout.memory, view, layout.mesh.device_type))
    return Sharded(tuple(x.shape), layout, tuple(shards))


@uncompiled
def reshard(tree: PyTree, layout: PyTree, *, dtype: torch.dtype | None = None) -> PyTree:
    """Change the layouts of global arrays, by collectives: see `plan`.

    Plain tensors, which are global values, and leaves whose layout is None are returned unchanged.
    An array that has its layout already is copied: a result never changes with its source.

    To layouts on another mesh, each element is sent once to each device that lacks it. All
    processes of both meshes must call it; on others it returns the types of the results at once.

    Args:
        tree: a tree of arrays.
        layout: a layout, or a tree of layouts that is a prefix of `tree`; None leaves a leaf
            unchanged. A P is a layout on the mesh of `fs.use_mesh`, or else of the arrays.
        dtype: of results with floating-point numbers. They are cast where that sends less: before
            they are sent, or after.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> x = fs.device_put(torch.arange(16.0).reshape(4, 4), fs.Layout(mesh, P("data")))
    >>> with fs.ledger() as comm:
    ...     y = reshard(x, fs.Layout(mesh, P(None, "data")))
    >>> fs.typeof(y), comm.by_collective()
    (f32[4, 4@data], {('all_to_all', ('data',)): (1, Fraction(12, 1))})
    >>> engine = fs.make_mesh({"model": 2}, devices=range(4, 6))
    >>> with fs.ledger() as comm:
    ...     z = reshard(x, fs.Layout(engine, P("model")), dtype=torch.bfloat16)
    >>> fs.typeof(z), dict(comm.links)  # (sender, receiver): bytes
    (bf16[4@model, 4], {(0, 4): 8, (1, 4): 8, (2, 5): 8, (3, 5): 8})
    """
    has_arrays = any(isinstance(x, Sharded) for x in flatten(tree)[0])

    def as_array(leaf: Any, target: Layout) -> Sharded | None:
        if not isinstance(leaf, Sharded) and has_arrays:
            return None
        validate_leaf(leaf, target)
        if not isinstance(leaf, Sharded):
            raise TypeError(
                f"a Sharded is needed; got {type(leaf).__name__}. Shard tensors with fs.device_put."
            )
        if not _can_reshard(leaf.mesh, target.mesh):
            _validate_outside_of_map(leaf.mesh, target.mesh)
            raise LayoutError(
                f"the tensor is on {leaf.mesh} and cannot be resharded to {target.mesh}. "
                "Use fs.device_put."
            )
        return leaf

    validate_dtype("reshard", dtype)
    return _reshard_tree("reshard", tree, layout, as_array, dtype=dtype)


def validate_dtype(caller: str, dtype: object) -> None:
    """Raise unless floating-point numbers can be cast to a dtype."""
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if dtype is not None and not is_float:
        raise TypeError(
            f"{caller}: dtype must be a floating-point dtype, such as torch.bfloat16; got {dtype}."
        )


def _can_reshard(before: Mesh, after: Mesh) -> bool:
    return before == after or can_move_between(before, after)


def _validate_outside_of_map(before: Mesh, after: Mesh) -> None:
    """Raise in a `shard_map` or loss function, which other devices than its own do not run."""
    scope = here()
    if scope is None or not scope.mapped or {*before.devices} == {*after.devices}:
        return
    raise LayoutError(
        f"an array on {before.grid} must be moved to {after.grid} outside of shard_map and loss "
        f"functions; got a call in one on {scope.mesh}. Move it before, and pass the result as an "
        "argument."
    )


def reshard_all(
    xs: Sequence[Sharded],
    layouts: Sequence[Layout],
    site: Site,
    dtype: torch.dtype | None = None,
) -> list[Sharded]:
    """Reshard global arrays, on their mesh or to another one.

    Those with equal steps share collectives, and tied ones stay tied. An array that has its layout
    already is returned. With a dtype, floating-point numbers are cast to it.
    """
    first_indices = _first_tied_indices(xs, layouts)
    results = list(xs)
    indices_by_meshes: dict[tuple[Mesh, Mesh], list[int]] = {}
    for index in dict.fromkeys(first_indices):
        x = xs[index]
        if x.layout != layouts[index] or _new_dtype(x, dtype) != x.dtype:
            meshes = (x.mesh, layouts[index].mesh)
            indices_by_meshes.setdefault(meshes, []).append(index)

    for (before, after), indices in indices_by_meshes.items():
        arrays = [xs[index] for index in indices]
        new_layouts = [layouts[index] for index in indices]
        if before == after:
            if dtype is not None:
                arrays = [_cast(x, _new_dtype(x, dtype)) for x in arrays]
            resharded = _reshard_on_mesh(arrays, new_layouts, before, site)
        else:
            resharded = _reshard_between(arrays, new_layouts, site, dtype)
        for index, array in zip(indices, resharded, strict=True):
            results[index] = array
    return [results[index] for index in first_indices]


def _first_tied_indices(xs: Sequence[Sharded], layouts: Sequence[Layout]) -> Sequence[int]:
    """Return for each array the index of the first equal one with an equal layout to come."""
    if len({id(x.shards[0]) for x in xs}) == len(xs):
        return range(len(xs))  # most often none is tied

    first_indices: dict[object, int] = {}
    result: list[int] = []
    for index, (x, layout) in enumerate(zip(xs, layouts, strict=True)):
        key = (*key_of(x), layout)
        result.append(first_indices.setdefault(key, index))
    return result


def _reshard_on_mesh(
    arrays: Sequence[Sharded], layouts: Sequence[Layout], mesh: Mesh, site: Site
) -> list[Sharded]:
    """Reshard arrays of one mesh together."""
    _validate_reshardable(arrays, mesh)

    # Collectives work in the devices' memory; without steps, shards move from memory to memory.
    plans: list[ReshardPlan] = []
    memories: list[Memory] = []
    columns: list[Tensors] = []
    has_steps = False
    for x, layout in zip(arrays, layouts, strict=True):
        leaf_plan = plan_reshard(x.layout, layout, x.shape)
        memory = x.layout.memory
        if leaf_plan.steps:
            memory = "device"
            has_steps = True
        plans.append(leaf_plan)
        memories.append(memory)
        columns.append(_moved_to_memory(x.shards, mesh, x.layout.memory, memory))

    if has_steps:
        columns = run_mapped(mesh, partial(_execute_plans, plans, site), columns)

    results: list[Sharded] = []
    for x, layout, memory, shards in zip(arrays, layouts, memories, columns, strict=True):
        moved = _moved_to_memory(tuple(shards), mesh, memory, layout.memory)
        results.append(Sharded(x.shape, layout, moved))
    return results


def _new_dtype(x: Sharded, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that an array is cast to: its own, if it has no floating-point numbers."""
    if dtype is None or not x.dtype.is_floating_point:
        return x.dtype
    return dtype


def _cast(x: Sharded, dtype: torch.dtype) -> Sharded:
    """Return an array whose shards are cast, in the same memory."""
    if x.dtype == dtype:
        return x
    shards = list[Tensor]()
    for device, shard in zip(local_devices(x.mesh), x.shards, strict=True):
        with owned_by(x.mesh.devices[device]):
            shards.append(in_memory(shard.to(dtype), x.mesh, x.layout.memory))
    return Sharded(x.shape, x.layout, tuple(shards))


def _reshard_between(
    arrays: Sequence[Sharded],
    layouts: Sequence[Layout],
    site: Site,
    dtype: torch.dtype | None,
) -> list[Sharded]:
    """Reshard arrays of one mesh to another: sums before and after are each mesh's own."""
    _validate_outside_of_loss(arrays, arrays[0].mesh)
    summed = reshard_all(arrays, [_without_sums(x.layout) for x in arrays], site)
    targets = [_without_sums(layout) for layout in layouts]
    dtypes = [_new_dtype(x, dtype) for x in arrays]
    moved = move_between(summed, targets, dtypes, site)
    return reshard_all(moved, layouts, site)


def _without_sums(layout: Layout) -> Layout:
    if not layout.spec.unreduced:
        return layout
    return layout.with_spec(layout.spec.replace(unreduced=()))


def _execute_plans(plans: Sequence[ReshardPlan], site: Site, device: int, xs: Tensors) -> Tensors:
    return tuple(start_reshard(xs, plans, site).wait())


def _moved_to_memory(shards: Tensors, mesh: Mesh, before: Memory, after: Memory) -> Tensors:
    """Return shards in another memory, and write their bytes into the ledger."""
    if before == after:
        return shards
    moved = list[Tensor]()
    for device, x in zip(local_devices(mesh), shards, strict=True):
        number = mesh.devices[device]
        for ledger in active():
            ledger.record_move(number, before, after, x.nbytes)
        with owned_by(number):
            moved.append(in_memory(x, mesh, after))
    return tuple(moved)


def _validate_reshardable(arrays: Sequence[Sharded], mesh: Mesh) -> None:
    """Raise if arrays of a mesh cannot be resharded on it.

    These are arrays in zigzag order, and those of a loss function.
    """
    if mesh.zigzag:
        raise LayoutError(
            f"an array must not be in zigzag order to be resharded; got one on {mesh}. "
            "Use plan.full(x), or fs.array.constrain."
        )
    _validate_outside_of_loss(arrays, mesh)


def _validate_outside_of_loss(arrays: Sequence[Sharded], mesh: Mesh) -> None:
    """Raise for arrays of a loss function, where values are varying."""
    if any(is_left(x) and recorded(x.shards) for x in arrays):
        raise LayoutError(
            "a parameter of a planned module cannot be resharded between forward and backward. "
            "Use fs.unshard(x), or operations on it."
        )

    scope = inside(mesh)
    is_varying = scope is not None and not scope.varying_axes.isdisjoint(mesh.axis_names)
    if is_varying and any(recorded(x.shards) for x in arrays):
        raise LayoutError(
            "a tensor that depends on parameters cannot be resharded in a loss function of "
            "value_and_grad, where every value is varying. Use collectives: fs.all_gather(x, axis) "
            "for the full tensor."
        )


@uncompiled
def unshard(tree: PyTree) -> PyTree:
    """Return global arrays as plain, full tensors; on a process mesh, on every process.

    Other leaves are unchanged. The tensors are copies, of replicated arrays too: write to them as
    you like. Tied tensors stay tied. To move parameters to another mesh give them to `shard_params`
    or `device_put` directly: a plain tensor has lost its unit and whether it is frozen.

    On processes outside of the mesh of an array it is None: `fs.broadcast_to` gives it to them.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> unshard(fs.device_put(torch.arange(4), fs.Layout(mesh, P("data"))))
    tensor([0, 1, 2, 3])
    """
    leaves, structure = flatten(tree)
    for index, leaf in enumerate(leaves):
        is_fused_weight = getattr(type(leaf), "computes_on_arrays", False)
        if is_fused_weight:
            leaves[index] = leaf.full()

    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Sharded)]
    outside = dict[int, Sharded]()  # by the array, so that tied ones stay tied
    arrays = list[Sharded]()
    for index in indices:
        x = leaves[index]
        if id(x) not in outside:
            outside[id(x)] = leave_loss(x)
        arrays.append(outside[id(x)])

    tensors = without_aliases(_full_tensors(arrays), arrays)
    for index, tensor in zip(indices, tensors, strict=True):
        is_local = leaves[index].is_local
        leaves[index] = tensor if is_local else None
    return unflatten(structure, leaves)


def full_values(array: Sharded) -> Tensor:
    """Return an array as a plain, full tensor to read: of a replicated array, the shard itself."""
    (tensor,) = _full_tensors([array])
    return tensor


def _full_tensors(arrays: Sequence[Sharded]) -> list[Tensor]:
    for x in arrays:
        x.check()
    replicated = reshard_all(arrays, [Layout(x.mesh) for x in arrays], call_site())

    tensors: dict[int, Tensor] = {}  # by the array, so that tied ones stay tied
    for x in replicated:
        if id(x) not in tensors:
            tensors[id(x)] = apply(First(len(x.shards)), x.shards)[0]
    return [tensors[id(x)] for x in replicated]
