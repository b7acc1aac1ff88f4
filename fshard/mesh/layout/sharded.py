"""`Sharded`: the global array, as the shards that this process holds.

On a virtual mesh that is a shard for every device, on a process mesh one. A `Sharded` is a leaf of
trees, and its operations are those of a global tensor: see `fshard.array`. `flatten_shards` reaches
its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from numbers import Number
from typing import Any

import optree
import torch
import torch.utils._pytree as torch_trees
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout.array_methods import ArrayMethods
from fshard.mesh.layout.counting import Memory
from fshard.mesh.layout.host_copies import GPUS, is_on_host, start_read, upload
from fshard.mesh.layout.kinds import copy_in, empty_in, memory_of
from fshard.mesh.layout.layout import (
    Layout,
    ShardType,
    as_layout,
    bytes_on_devices,
    dtype_name,
    is_dense,
    no_dense,
)
from fshard.mesh.layout.mesh import Mesh
from fshard.mesh.layout.spec import Axes, P, as_axes
from fshard.mesh.layout.tree import NAMESPACE, PyTree, Structure, flatten, map_leaves, unflatten
from fshard.mesh.spmd.global_inputs import compare_inputs
from fshard.mesh.spmd.run import agree, inside, local_devices, resolve_mesh, without_values
from fshard.uncompiled import uncompiled


@dataclass(eq=False, repr=False)
class Sharded(ArrayMethods):
    """A global array on a mesh.

    Args:
        shape: the global shape.
        layout: its layout.
        shards: the local shards, in device order.

    It may be pickled and saved with `torch.save`: each process saves its own shards. To load it,
    name its classes: `with torch.serialization.safe_globals(fs.mesh.SAFE_GLOBALS)`, then
    `x = torch.load(file)`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> x = fs.device_put(torch.arange(4.0), fs.Layout(fs.make_mesh({"data": 2}), P("data")))
    >>> x
    Sharded f32[4@data] on Mesh(data=2; virtual, cpu), 16 B, 8 B on each of 2 devices
    >>> torch.utils._pytree.tree_map(lambda array: float(array.sum()), {"x": x})
    {'x': 6.0}
    """

    shape: tuple[int, ...]
    layout: Layout
    shards: tuple[Tensor, ...]

    @property
    def is_donated(self) -> bool:
        """True once a step has taken the memory for its results: each use of the array raises."""
        return "shards" not in self.__dict__

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0].dtype

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def is_local(self) -> bool:
        """False on a process outside of the mesh, where the array is a type without values."""
        return self.layout.mesh.is_member

    @property
    def spec(self) -> P:
        return self.layout.spec

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def local(self) -> Tensor:
        """The calling device's own shard: on a process mesh, and inside `shard_map` and `run`."""
        scope = inside(self.mesh)
        if scope is not None and scope.notice is not None:
            for axis in scope.axes.keys() & self.spec.axes:
                scope.called_group(axis, "the local shard")
        if len(self.shards) == 1:
            return self.shards[0]
        devices = local_devices(self.mesh)
        if len(devices) == 1:
            return self.shards[devices[0]]
        raise LayoutError(
            f"{self!r} holds the shards of {len(self.shards)} devices here, so none is the local "
            "one. Take x.shards[device]."
        )

    def check(self) -> None:
        """Raise if the shards do not fit the layout: a mapped function was not elementwise."""
        self.check_view()
        devices = local_devices(self.mesh)
        if len(self.shards) != len(devices):
            if len(self.shards) > 1:
                origin = "outside of"
                use = "inside"
            else:
                origin = "inside of"
                use = "outside"
            raise LayoutError(
                f"{self!r} was made {origin} fs.run and is used {use}. Make it where it is used. "
                "In shard_map, pass it as an argument, or take its local shard: x.local."
            )
        _validate_shards("The shards of this Sharded", self.shards)
        shapes = tuple([tuple(shard.shape) for shard in self.shards])
        if shapes != _local_shapes(self.layout.shared, self.shape, devices):
            different_shapes = ", ".join([str(shape) for shape in sorted(set(shapes))])
            raise LayoutError(
                f"The shards of this Sharded have shapes {different_shapes}, which are not those "
                f"of a tensor of shape {self.shape} as {self.spec}. "
                "Trees of shards are for elementwise functions."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle; raise for a donated array, which has no values."""
        assert self.shards is not None  # raises by `__getattr__`
        return self.__dict__

    def __repr__(self) -> str:
        if self.is_donated:
            return f"Sharded of shape {self.shape}, donated, on {self.mesh}"
        # In a tree of specs or names, an array's shards are no tensors.
        kinds = [type(shard).__name__ for shard in self.shards if not isinstance(shard, Tensor)]
        if kinds:
            return f"Sharded {kinds[0]} on {self.mesh}"
        kind = typeof(self)
        return f"Sharded {kind} on {self.mesh}, {bytes_on_devices(kind, self.layout)}"


def abstract_array(shape: Sequence[int], layout: Layout, dtype: torch.dtype) -> Sharded:
    """Return an array without values on an abstract mesh, of device 0."""
    shard = torch.empty(layout.local_shape(tuple(shape), 0), dtype=dtype, device="meta")
    return Sharded(tuple(shape), layout, (shard,))


def only_arrays(tree: PyTree) -> PyTree:
    """Return a tree with None in place of tensors and numbers, but not of arrays.

    Outside of a mesh these are its plain values: see Note [Outside of a mesh].
    """
    return map_leaves(lambda x: None if isinstance(x, Tensor | Number) else x, tree)


def donated(arguments: PyTree, results: PyTree) -> PyTree:
    """Return results, and mark the arguments whose memory they have: each use of these raises.

    A frozen array is not donated, since no step writes it. Nor is an abstract one: it has no
    memory. One that requires grad is a variable, such as a parameter of a module: a step writes to
    it in place, as torch's do.
    """
    arrays: dict[int, Sharded] = {}
    for leaf in flatten(arguments)[0]:
        if not isinstance(leaf, Sharded):
            continue
        layout = leaf.layout
        if layout.frozen or layout.mesh.runtime == "abstract":
            continue
        is_variable = leaf.shards[0].requires_grad  # that of the array takes microseconds
        if not is_variable:
            arrays[id(leaf)] = leaf
    if not arrays:
        return results

    # A result that is an argument itself must stay usable: it becomes another object.
    leaves, structure = flatten(results)
    successors: dict[int, Sharded] = {}  # by the argument, so that tied ones stay tied
    for leaf in leaves:
        key = id(leaf)
        if key in arrays and key not in successors:
            successors[key] = Sharded(leaf.shape, leaf.layout, leaf.shards)

    for x in arrays.values():
        del x.shards  # the mark: see `is_donated`
    if not successors:  # as in most steps, whose results need not be put together again
        return results
    return unflatten(structure, [successors.get(id(leaf), leaf) for leaf in leaves])


def _validate_shards(caller: str, shards: Sequence[Any]) -> None:
    """Raise unless shards are dense tensors of one dtype."""
    dtypes: set[torch.dtype | None] = set()
    for x in shards:
        is_dense_tensor = isinstance(x, Tensor) and is_dense(x)
        dtypes.add(x.dtype if is_dense_tensor else None)
    if len(dtypes) <= 1 and None not in dtypes:
        return

    kinds: set[str] = set()
    for x in shards:
        is_dense_tensor = isinstance(x, Tensor) and is_dense(x)
        kinds.add(dtype_name(x.dtype) if is_dense_tensor else type(x).__name__)
    raise LayoutError(f"{caller} are not dense tensors of one dtype: {', '.join(sorted(kinds))}.")


def stack(x: Sharded, axes: Axes, mesh: Mesh | None = None) -> Sharded:
    """Return an array with a first dim for the values that devices have along `axes`, in place.

    The values are varying or unreduced. 2 replicas of shape (8,) are an array of shape (2, 8).
    """
    names = as_axes(axes)
    mesh = mesh or x.mesh
    count = prod([mesh.shape[axis] for axis in names])
    shape = (count, *x.shape)
    entries = (names, *x.spec.entries)
    return _with_reshaped_shards(x, shape, entries, names, mesh)


def unstack(x: Sharded, axes: Axes, mesh: Mesh | None = None) -> Sharded:
    """Return the array whose varying values along `axes` are the first dim of an array, in place.

    It is the inverse of `stack`.
    """
    names = as_axes(axes)
    count = prod([x.mesh.shape[axis] for axis in names])
    is_stacked = x.ndim > 0 and x.spec.dims(1)[0] == names and x.shape[0] == count
    if not is_stacked:
        raise LayoutError(
            f"replicas must have a first dim along {axes}, as the `init` of their step makes; "
            f"got {x!r}."
        )
    return _with_reshaped_shards(x, x.shape[1:], x.spec.entries[1:], names, mesh or x.mesh)


def _with_reshaped_shards(
    x: Sharded, shape: tuple[int, ...], entries: Any, axes: tuple[str, ...], mesh: Mesh
) -> Sharded:
    layout = _layout_with_entries(x.layout, entries, axes, mesh)
    shapes = _local_shapes(layout, shape, local_devices(mesh))
    pairs = zip(x.shards, shapes, strict=True)
    shards = tuple([shard.reshape(local_shape) for shard, local_shape in pairs])
    return Sharded(shape, layout, shards)


@lru_cache(maxsize=4096)
def _layout_with_entries(layout: Layout, entries: Any, axes: tuple[str, ...], mesh: Mesh) -> Layout:
    unreduced = tuple([axis for axis in layout.spec.unreduced if axis not in axes])
    spec = layout.spec.replace(entries=entries, unreduced=unreduced, shape=None)
    return Layout(mesh, spec, layout.memory, layout.unit, layout.frozen)


@lru_cache(maxsize=4096)
def _local_shapes(
    layout: Layout, shape: tuple[int, ...], devices: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    return tuple(layout.local_shape(shape, device) for device in devices)


@dataclass(frozen=True, eq=False)
class ArrayNode:
    """An array as a node of trees: its shards are leaves."""

    array: Sharded


def _flatten_node(node: ArrayNode) -> Any:
    return node.array.shards, (node.array.shape, node.array.layout)


def _unflatten_array(context: Any, shards: Any) -> Sharded:
    shape, layout = context
    return Sharded(shape, layout, tuple(shards))


_o: Any = optree
_o.register_pytree_node(ArrayNode, _flatten_node, _unflatten_array, namespace=NAMESPACE)
torch_trees.register_pytree_node(
    ArrayNode, _flatten_node, lambda shards, context: ArrayNode(_unflatten_array(context, shards))
)


def flatten_shards(tree: PyTree, *, none_is_leaf: bool = False) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree, with shards in place of arrays, and its structure.

    The structure puts arrays together again.

    >>> import torch, fshard as fs
    >>> x = fs.device_put(torch.arange(4.0), fs.Layout(fs.make_mesh({"data": 2}), fs.P("data")))
    >>> leaves, structure = fs.mesh.flatten_shards({"w": x})
    >>> fs.unshard(structure.unflatten([shard * 2 for shard in leaves]))
    {'w': tensor([0., 2., 4., 6.])}
    """
    leaves, structure = flatten(tree, none_is_leaf=none_is_leaf)
    if Sharded not in map(type, leaves):
        return leaves, structure
    nodes = [ArrayNode(x) if isinstance(x, Sharded) else x for x in leaves]
    return flatten(unflatten(structure, nodes), none_is_leaf=none_is_leaf)


def key_of(x: Any) -> tuple[int, ...]:
    """Return a key that is equal for tied leaves: the identity of their tensors."""
    if isinstance(x, Sharded):
        return tuple(map(id, x.shards))
    return () if x is None else (id(x),)


def typeof(x: PyTree) -> Any:
    """Return dtype, shape and layout of a tensor, which prints as one token.

    Of a tree, return the tree of these; leaves that are no tensors, such as numbers, stay as they
    are.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> layout = fs.Layout(fs.make_mesh({"data": 4, "model": 2}), P("data", "model"))
    >>> typeof(fs.device_put(torch.zeros(8, 6), layout))
    f32[8@data, 6@model]
    >>> typeof({"w": torch.zeros(8, 6), "step": 3})
    {'w': f32[8, 6], 'step': 3}
    """
    if isinstance(x, Sharded | Tensor):
        return _type_of(x)

    leaves, structure = flatten(x, none_is_leaf=True)
    if not any(isinstance(leaf, Sharded | Tensor) for leaf in leaves):
        raise TypeError(f"typeof: x must be a tensor or a tree of tensors; got {type(x).__name__}.")
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Sharded | Tensor):
            leaves[index] = _type_of(leaf)
    return unflatten(structure, leaves)


def _type_of(x: Sharded | Tensor) -> ShardType:
    if isinstance(x, Sharded):
        return ShardType(x.dtype, x.shape, x.spec, x.layout.memory)
    if not is_dense(x):
        raise TypeError(f"typeof: x must be a Sharded or a dense tensor; got {no_dense(x)}.")
    return ShardType(x.dtype, tuple(x.shape))


@uncompiled
def from_local(
    shard: Tensor | Callable[..., Tensor], layout: Layout | P, *, shape: Sequence[int] | None = None
) -> Sharded:
    """Build a global array from each device's local shard.

    Nothing is sent, but along axes that `layout` does not name: replicas are compared there by a
    hash, in one small collective, and different ones raise. Processes compare their shapes only
    under `FSHARD_CHECK=1`.

    Args:
        shard: this process's shard, on a process mesh or inside `run`; on a virtual mesh from
            outside, a function of the device's coordinates, `shard(data=0, model=1)`. A function
            works everywhere.
        layout: of the global array; a P is one on the mesh of `fs.use_mesh`.
        shape: the global shape; needed for flat layouts only.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> fs.unshard(fs.from_local(lambda data: torch.full((2,), data), fs.Layout(mesh, P("data"))))
    tensor([0, 0, 1, 1])
    """
    layout = as_layout(layout, caller="from_local")
    layout = layout.on(resolve_mesh(layout.mesh))
    mesh = layout.mesh
    devices = local_devices(mesh)
    if isinstance(shard, Tensor) and len(devices) > 1:
        raise LayoutError(
            f"from_local got one shard for the {len(devices)} devices of {mesh}. Give a function "
            f"of the coordinates, from_local(lambda {', '.join(mesh.axis_names)}: ..., layout), or "
            "call it inside fs.run."
        )

    shards: list[Tensor] = []
    for device in devices:
        shards.append(shard(**mesh.coordinates(device)) if callable(shard) else shard)
    _validate_shards("from_local: the shards", shards)
    full_shape = tuple(shape) if shape is not None else layout.global_shape(shards[0].shape)
    layout.check(full_shape, "the tensor")
    local_shapes = _local_shapes(layout, full_shape, devices)
    for device, x, local_shape in zip(devices, shards, local_shapes, strict=True):
        if tuple(x.shape) != local_shape:
            raise LayoutError(
                f"from_local: the shard of device {mesh.coordinates(device)} must have shape "
                f"{local_shape}, that of a tensor of shape {full_shape} as {layout.spec}; "
                f"got {tuple(x.shape)}."
            )

    copies = list[Tensor]()
    for x in shards:
        stored = in_memory(x, mesh, layout.memory)
        if stored is x:  # a copy, since the array never changes with x
            is_plain = layout.memory == "device" or transformed()
            stored = x.clone() if is_plain else copy_in(layout.memory, x, mesh.device_type)
        copies.append(stored)
    array = Sharded(full_shape, layout, tuple(copies))
    agree(mesh, f"from_local of {typeof(array)}")
    if layout.replicated_axes:
        compare_inputs("from_local", mesh, {"": array.shards}, layout.replicated_axes)
    return array


def in_memory(x: Tensor, mesh: Mesh, memory: Memory) -> Tensor:
    """Return a shard in the memory that its layout names: itself, or a copy."""
    if mesh.device_type == "meta":
        x = without_values(x, mesh)
    if x.is_meta and mesh.device_type != "meta":
        raise LayoutError(
            f"a meta tensor (shape {tuple(x.shape)}) has no values to lay on {mesh}. "
            'Take runtime="abstract" to count without them. Those of fs.lazy layers are made by a '
            "seed: shard_params(model, ..., seed=0), shard_stages(..., seed=0)."
        )

    has_gpu = mesh.device_type in GPUS
    if has_gpu and memory == "device":
        return _on_gpu(x, mesh)
    if memory == "device" and x.device.type != mesh.device_type:
        return x.to(mesh.device_type)
    if transformed():
        return x
    if has_gpu and memory == "host":
        return _beside_gpu(x, mesh)
    if memory_of(x, mesh.device_type) == memory:
        return x
    return copy_in(memory, x, mesh.device_type)


def _on_gpu(x: Tensor, mesh: Mesh) -> Tensor:
    if is_on_host(x) and _is_uploadable(x):
        return upload(x)
    return x.to(mesh.device_type)  # this process's GPU: x may be on another


def _beside_gpu(x: Tensor, mesh: Mesh) -> Tensor:
    """Return a tensor in page-locked memory of the host: other memory is slow to copy."""
    if x.is_pinned():
        return x
    target = empty_in("host", x.shape, x.dtype, mesh.device_type)
    (copy,) = start_read([x], [target])()
    return copy


UPLOADED = 1 << 30
"""The most bytes of a tensor that is copied through pinned memory, which torch keeps for the next.

A batch has less, as a rule. A larger tensor is a parameter's: it is copied once, and may block.
"""


def _is_uploadable(x: Tensor) -> bool:
    """Return True if a tensor of the host is copied to a GPU without a wait of the host."""
    has_gradient = x.requires_grad and torch.is_grad_enabled()
    is_recorded = has_gradient or transformed()  # `upload` has no gradient
    return is_dense(x) and not is_recorded and x.nbytes <= UPLOADED
