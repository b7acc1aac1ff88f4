"""Convert layouts to and from the types of spmd_types, which annotate local tensors.

A type has a kind for each axis of the mesh, and the axes of each sharded dim. On a mesh of axes
"data" and "model":

    P("data", "model")              {data: V, model: V}    PartitionSpec(data, model)
    P(("model", "data"))            {data: V, model: V}    PartitionSpec((model, data), None)
    P("data", unreduced="model")    {data: V, model: P}    PartitionSpec(data, None)
    P()                             {data: R, model: R}

A type also fixes how gradients are shared, which a layout does not. So two kinds are replicated
here: R, whose gradients are unreduced, and I ("invariant"), whose gradients are replicated too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fshard.errors import LayoutError
from fshard.mesh.layout.layout import Layout
from fshard.mesh.layout.mesh import Mesh
from fshard.mesh.layout.spec import Axes, P, as_axes, as_written

if TYPE_CHECKING:  # it is optional, and imports torch's distributed package
    from spmd_types.types import PartitionSpec, SpmdType


def to_spmd_type(layout: Layout, ndim: int, *, invariant: Axes = ()) -> SpmdType:
    """Return the type of spmd_types for a tensor of `ndim` dims that has a layout.

    Its axes are names, which `spmd_types.set_current_mesh` resolves, as for
    `assert_type(x.local, fs.mesh.to_spmd_type(x.layout, x.ndim))`. Raises for layouts that are
    fshard's own: flat, `at=`, host and disk, zigzag order, and those of FSDP units.

    Args:
        layout: of the tensor.
        ndim: the number of its dims.
        invariant: replicated axes along which its gradients are replicated too. Along other
            replicated axes they are unreduced.

    >>> import fshard as fs
    >>> mesh = fs.make_mesh({"data": 4, "model": 2})
    >>> type = fs.mesh.to_spmd_type(fs.Layout(mesh, fs.P("data", unreduced="model")), ndim=2)
    >>> type.local_type, type.partition_spec
    ({'data': V, 'model': P}, PartitionSpec('data', None))
    >>> fs.mesh.from_spmd_type(type, mesh)
    Layout(Mesh(data=4, model=2; 8 devices, virtual, cpu), P("data", unreduced="model"))
    """
    from spmd_types import types

    _check_has_type(layout, ndim)
    invariant_axes = layout.mesh.check_axes(as_axes(invariant), "to_spmd_type: invariant")
    not_replicated = [axis for axis in invariant_axes if axis not in layout.replicated_axes]
    if not_replicated:
        raise LayoutError(
            f"to_spmd_type: invariant must be axes along which the tensor is replicated; got "
            f"{as_written(tuple(not_replicated))}, of {layout.spec}. Leave it out."
        )

    kinds: dict[Any, Any] = {}
    for axis in layout.mesh.axis_names:
        if axis in layout.spec.split_axes:
            kinds[axis] = types.V
        elif axis in layout.spec.unreduced:
            kinds[axis] = types.P
        elif axis in invariant_axes:
            kinds[axis] = types.I
        else:
            kinds[axis] = types.R
    if not layout.spec.split_axes:
        return types.SpmdType(kinds)

    entries = [_entry(axes) for axes in layout.spec.dims(ndim)]
    return types.SpmdType(kinds, types.PartitionSpec(*entries))


def _check_has_type(layout: Layout, ndim: int) -> None:
    """Raise if spmd_types has no type for a layout of a tensor of `ndim` dims."""
    if not isinstance(layout, Layout):
        raise TypeError(
            f"to_spmd_type: layout must be a Layout; got {type(layout).__name__}. Give x.layout."
        )
    spec = layout.spec
    if len(spec.entries) > ndim:
        raise LayoutError(
            f"to_spmd_type: ndim must be at least {len(spec.entries)}, the entries of {spec}; "
            f"got {ndim}. Give the number of dims of the unsharded tensor."
        )

    # Each of these would be lost, so that no way led back to the same layout.
    own: list[str] = []
    if spec.is_flat:
        own.append("it is flat")
    if spec.at:
        own.append("it has at=")
    if spec.shape is not None:
        own.append("it has shape=")
    if layout.memory != "device":
        own.append(f'its memory is "{layout.memory}"')
    if layout.mesh.zigzag in spec.split_axes:
        own.append(f'"{layout.mesh.zigzag}" is in zigzag order')
    if layout.unit is not None:
        own.append("it has a unit")
    if layout.frozen:
        own.append("it is frozen")
    if own:
        raise LayoutError(
            f"to_spmd_type: layout must be one that spmd_types has; got {layout}: "
            f"{', '.join(own)}. Reshard the array, fs.reshard(x, fs.Layout(mesh, P(...)))."
        )


def _entry(axes: tuple[str, ...]) -> Any:
    """Return the entry of a PartitionSpec for the axes of one dim."""
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes


def from_spmd_type(spmd_type: SpmdType, mesh: Mesh) -> Layout:
    """Return the layout of a tensor that has a type of spmd_types, on a mesh.

    Of an annotated tensor the type is
    `spmd_types.SpmdType(spmd_types.get_local_type(x), spmd_types.get_partition_spec(x))`. Raises
    for types that fix no layout: V without a dim, and axes of the mesh without a kind.

    Args:
        spmd_type: of the tensor. Axes are names of the mesh, or the MeshAxis or process group of
            one.
        mesh: the devices.
    """
    from spmd_types import types

    if not isinstance(spmd_type, types.SpmdType):
        raise TypeError(
            "from_spmd_type: spmd_type must be a spmd_types.SpmdType; got "
            f"{type(spmd_type).__name__}. "
            "Write spmd_types.SpmdType(local_type, partition_spec)."
        )
    if not isinstance(mesh, Mesh):
        raise TypeError(f"from_spmd_type: mesh must be a Mesh; got {type(mesh).__name__}.")

    kinds = _kinds_by_name(spmd_type, mesh)
    dims = _dims_by_partition_spec(spmd_type.partition_spec or (), kinds, mesh)
    _add_shards(dims, kinds)
    sharded = {axis for axes in dims.values() for axis in axes}

    unreduced: list[str] = []
    for axis, size in mesh.shape.items():
        kind = kinds.get(axis)
        if kind is types.P:
            unreduced.append(axis)
        # Of an axis of one device types have nothing to state.
        elif size > 1 and axis not in sharded and kind not in (types.R, types.I):
            raise _no_layout(axis, kind)

    entries = [dims.get(dim, ()) for dim in range(max(dims, default=-1) + 1)]
    return Layout(mesh, P(*entries, unreduced=tuple(unreduced)))


def _kinds_by_name(spmd_type: SpmdType, mesh: Mesh) -> dict[str, Any]:
    """Return the kind of each axis that a type names: R, I, V, P or a dim to shard, S(0)."""
    names = _names_of_groups(mesh)
    kinds: dict[str, Any] = {}
    for axis, kind in spmd_type.local_type.items():
        name = _name_of(axis, mesh, names)
        if name is None:
            continue
        if kinds.setdefault(name, kind) != kind:
            raise LayoutError(
                f'from_spmd_type: spmd_type must have one kind for "{name}"; got '
                f"{kinds[name]!r} and {kind!r}. Name each axis once."
            )
    return kinds


def _names_of_groups(mesh: Mesh) -> dict[Any, str]:
    """Return the name of each axis whose devices have numbers at equal distances.

    A key is the MeshAxis that spmd_types makes of the axis's process group.
    """
    from spmd_types import (
        MeshAxis,  # pyright: ignore[reportPrivateImportUsage]  # it has no __all__
    )

    names: dict[Any, str] = {}
    for name, (size, stride) in mesh.steps.items():
        if size == 1:
            continue
        numbers = [mesh.devices[index * stride] for index in range(size)]
        distance = numbers[1] - numbers[0]
        if numbers == [*range(numbers[0], numbers[-1] + 1, max(distance, 1))]:
            names[MeshAxis.of(size, distance)] = name
    return names


def _name_of(axis: Any, mesh: Mesh, names: dict[Any, str]) -> str | None:
    """Return the name of an axis of a type; None for a group of one device."""
    from spmd_types.types import normalize_axis

    if isinstance(axis, str):
        mesh.check_axes(axis, "from_spmd_type")
        return axis
    group = normalize_axis(axis)
    if group.size() == 1:
        return None
    if group not in names:
        raise LayoutError(
            f"from_spmd_type: spmd_type must have axes of {mesh}; got {group}. Give the mesh that "
            "it was made for, or names of axes."
        )
    return names[group]


def _dims_by_partition_spec(
    partition_spec: PartitionSpec | tuple[()], kinds: dict[str, Any], mesh: Mesh
) -> dict[int, tuple[str, ...]]:
    """Return the axes of each dim that a PartitionSpec shards, major to minor."""
    from spmd_types.types import V

    names = _names_of_groups(mesh)
    dims: dict[int, tuple[str, ...]] = {}
    for dim, entry in enumerate(partition_spec):
        axes = entry if isinstance(entry, tuple) else (entry,)
        for axis in axes:
            name = None if axis is None else _name_of(axis, mesh, names)
            if name is None:
                continue
            if kinds.get(name, V) is not V:
                raise LayoutError(
                    f'from_spmd_type: spmd_type must have V for "{name}", which shards dim {dim}; '
                    f"got {kinds[name]!r}. Leave it out of the PartitionSpec."
                )
            dims[dim] = (*dims.get(dim, ()), name)
    return dims


def _add_shards(dims: dict[int, tuple[str, ...]], kinds: dict[str, Any]) -> None:
    """Add the dims that kinds shard, S(0), to the axes of each dim."""
    from spmd_types.types import Shard

    for name, kind in kinds.items():
        if not isinstance(kind, Shard):
            continue
        if kind.dim < 0:
            raise LayoutError(
                f'from_spmd_type: the dim of "{name}" must be counted from 0; got {kind}. Write '
                "its number."
            )
        if kind.dim in dims:
            axes = as_written((*dims[kind.dim], name))
            raise LayoutError(
                f"from_spmd_type: the axes of dim {kind.dim}, {axes}, must have an order; got "
                f"{kind} of each. Write a spmd_types.PartitionSpec."
            )
        dims[kind.dim] = (name,)


def _no_layout(axis: str, kind: Any) -> LayoutError:
    """Return the error of an axis whose kind fixes no layout."""
    if kind is None:
        return LayoutError(
            f'from_spmd_type: spmd_type must have a kind for "{axis}"; got none. Add it: '
            f'"{axis}": spmd_types.R, if the tensor is replicated along it.'
        )
    return LayoutError(
        f'from_spmd_type: spmd_type must have the dim that "{axis}" shards; got V alone, which no '
        f"layout has. Write spmd_types.S(dim), or a spmd_types.PartitionSpec."
    )
