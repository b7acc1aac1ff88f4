"""`Layout`: mesh, spec and memory of an array; and its type, which prints as one token.

    f32[8@data, 6@model]          dim 0 sharded over "data", dim 1 over "model"
    f32[8, 6]{flat:data}          flattened, then split over "data"
    f32[8, 6@model]{flat:data}    the shards along "model", flattened, then split over "data"
    f32[8, 6]{at:data=2}          on device 2 along "data", empty on the others
    f32[8, 6]{flat:data, at:pipe=2}   flat over "data" at coordinate 2 along "pipe", empty elsewhere
    f32[8, 6]{U:model}            unreduced: the value is the sum over "model"
    f32[8@data, 6]{host}          in host memory; {disk}: in a file

Only dense tensors have layouts: strided, one shape, every element in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.layout.arithmetic import Range
from fshard.mesh.layout.counting import MEMORIES, Memory
from fshard.mesh.layout.mesh import Mesh, run_defaults
from fshard.mesh.layout.spec import CachedHash, P
from fshard.tables import byte_text

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: f32, bf16, i64.

    >>> dtype_name(torch.bfloat16), dtype_name(torch.complex64)
    ('bf16', 'c64')
    """
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Layout(CachedHash):
    """Mesh, spec and memory kind of an array.

    Args:
        mesh: the devices.
        spec: which axes shard which dim.
        memory: "device", "host" or "disk".
        unit: the FSDP unit that a parameter belongs to; does not affect placement.
        frozen: True for a parameter that is not trained: no gradient, no optimizer state.

    >>> from fshard.mesh.layout.make import make_mesh
    >>> layout = Layout(make_mesh({"data": 4, "model": 2}), P("data", "model"))
    >>> layout.local_shape((8, 6)), layout.ranges((8, 6), device=3)
    ((2, 3), ((2, 4), (3, 6)))
    """

    mesh: Mesh
    spec: P = P()
    memory: Memory = "device"
    unit: str | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        has_mesh_and_spec = isinstance(self.mesh, Mesh) and isinstance(self.spec, P)
        if not has_mesh_and_spec:
            raise TypeError(
                'Layout: mesh and spec must be a Mesh and a P, as in Layout(mesh, P("data")); got '
                f"{type(self.mesh).__name__} and {type(self.spec).__name__}."
            )
        self.mesh.check_axes(self.spec.axes, f"Layout with {self.spec}")
        if self.memory not in MEMORIES:
            raise ValueError(
                f'Layout: memory must be "device", "host" or "disk"; got {self.memory!r}.'
            )
        # Only here are the sizes of axes known: a P has names.
        for axes, index in self.spec.at:
            n = prod(self.mesh.shape[axis] for axis in axes)
            if index >= n:
                raise LayoutError(
                    f"Layout with {self.spec}: there are {n} devices along {' x '.join(axes)}, "
                    f"which are counted from 0. Give one below {n}."
                )

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes along which every device holds the same."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.spec.axes)

    @property
    def flat_parts(self) -> int:
        """Number of ranges of a flat tensor."""
        return prod(self.mesh.shape[axis] for axis in self.spec.flat_axes or ())

    def check(self, shape: Sequence[int], name: str = "the tensor") -> None:
        """Raise if a tensor of `shape` cannot have this layout, naming every uneven dim.

        Dims of parameters, whose layouts have a unit, may be uneven.
        """
        spec = self.spec
        shape = tuple(shape)
        if spec.shape is not None and spec.shape != shape:
            raise LayoutError(
                f"{name} has shape {shape}, but its spec {spec} was written for shape {spec.shape}."
            )
        if len(spec.entries) > len(shape):
            raise LayoutError(
                f"{name} of shape {shape} must have a dim for each entry of {spec}; got "
                f"{len(shape)} for {len(spec.entries)}."
            )

        errors: list[str] = []
        for dim, (length, axes) in enumerate(zip(shape, spec.dims(len(shape)), strict=True)):
            parts = prod([self.mesh.shape[axis] for axis in axes])
            is_zigzag = self.mesh.zigzag in axes  # then each device has two chunks
            if is_zigzag and length % (2 * parts):
                errors.append(
                    f"dim {dim} has {length} elements, which must be a multiple of {2 * parts} "
                    "in zigzag order"
                )
            elif length % parts and self.unit is None:
                errors.append(
                    f"dim {dim} has {length} elements, which {parts} devices "
                    f"({' x '.join(axes)}) do not divide"
                )
        if errors:
            raise LayoutError(
                f"{name} of shape {shape} cannot have the layout {spec}: {'; '.join(errors)}. "
                "Pad, or use P.flat."
            )

    def ranges(self, shape: Sequence[int], device: int) -> tuple[Range, ...]:
        """Return the range of each dim that `device` stores of a tensor of `shape`.

        Of a flat layout it is the one range of the flattened block.
        """
        return self.spec.ranges(shape, self.mesh.shape, self.mesh.coordinates(device))

    def block(self, shape: Sequence[int], device: int) -> tuple[Range, ...]:
        """Return the range of each dim of a device's block: its shard before that is flattened."""
        return self.spec.block(shape, self.mesh.shape, self.mesh.coordinates(device))

    @cached_property
    def place(self) -> dict[str, int]:
        """Coordinates of the devices that store the tensor, along the axes of `spec.at`."""
        return self.spec.coordinates(self.mesh.shape)

    @cached_property
    def shared(self) -> Layout:
        """The first layout that is equal to this one: its id is a key that nothing compares."""
        return _shared(self)

    def has_any(self, device: int) -> bool:
        """Return True if a device stores a shard: False only for devices outside `spec.at`."""
        return not self.spec.at or self.place.items() <= self.mesh.coordinates(device).items()

    def local_shape(self, shape: Sequence[int], device: int = 0) -> tuple[int, ...]:
        """Return the shape of the shard that `device` holds of a tensor of `shape`."""
        return tuple(stop - start for start, stop in self.ranges(shape, device))

    def global_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the global shape from the shape of a shard."""
        spec = self.spec
        is_block_of_dims = not spec.is_flat and not spec.at
        if is_block_of_dims:
            lengths: list[int] = []
            for length, axes in zip(local, spec.dims(len(local)), strict=True):
                lengths.append(length * prod([self.mesh.shape[axis] for axis in axes]))
            shape = tuple(lengths)
        elif spec.shape is None:
            raise LayoutError(
                "The global shape cannot be derived from a shard of shape "
                f"{tuple(local)} with {spec}. Write it into the spec: shape=(...)."
            )
        else:
            shape = spec.shape
        self.check(shape)
        return shape

    def with_spec(self, spec: P) -> Layout:
        return Layout(self.mesh, spec, self.memory, self.unit, self.frozen)

    def with_memory(self, memory: Memory) -> Layout:
        """Return the layout of the same shards in another memory."""
        return Layout(self.mesh, self.spec, memory, self.unit, self.frozen)

    def on(self, mesh: Mesh) -> Layout:
        return Layout(mesh, self.spec, self.memory, self.unit, self.frozen)

    __hash__ = CachedHash.__hash__

    def __repr__(self) -> str:
        arguments = [repr(self.mesh), str(self.spec)]
        if self.memory != "device":
            arguments.append(f'"{self.memory}"')
        if self.unit is not None:
            arguments.append(f"unit={self.unit!r}")
        if self.frozen:
            arguments.append("frozen=True")
        return f"Layout({', '.join(arguments)})"


@lru_cache(maxsize=8192)
def _shared(layout: Layout) -> Layout:
    """Return the first of all layouts that are equal to one: that of the cache."""
    return layout


def as_layout(layout: object, mesh: Mesh | None = None, *, caller: str = "") -> Layout:
    """Return a layout; a P is one on the mesh of `use_mesh`, or else on `mesh`.

    >>> from fshard.mesh.layout.make import make_mesh
    >>> as_layout(P("data"), make_mesh({"data": 2}))
    Layout(Mesh(data=2; 2 devices, virtual, cpu), P("data"))
    """
    if isinstance(layout, Layout):
        return layout
    start = f"{caller}: " if caller else ""
    if not isinstance(layout, P):
        raise TypeError(
            f"{start}layout must be a Layout, fs.Layout(mesh, P(...)); got {type(layout).__name__}."
        )
    mesh = run_defaults().mesh or mesh
    if mesh is None:
        raise TypeError(
            f"{start}layout must have a mesh; got {layout}. Write fs.Layout(mesh, {layout}), or "
            "call it in a block: with fs.use_mesh(mesh)."
        )
    return Layout(mesh, layout)


@dataclass(frozen=True)
class ShardType:
    """The type of an array: dtype, shape, spec and memory. Prints as one token.

    >>> print(ShardType(torch.float32, (8, 6), P("data", unreduced="model")))
    f32[8@data, 6]{U:model}
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    spec: P = P()
    memory: Memory = "device"

    def __str__(self) -> str:
        spec = self.spec
        dims: list[str] = []
        for length, axes in zip(self.shape, spec.dims(len(self.shape)), strict=True):
            dims.append(f"{length}@{'+'.join(axes)}" if axes else str(length))
        text = f"{dtype_name(self.dtype)}[{', '.join(dims)}]"

        notes: list[str] = []
        if spec.flat_axes:
            notes.append(f"flat:{'+'.join(spec.flat_axes)}")
        for axes, index in spec.at:
            notes.append(f"at:{'+'.join(axes)}={index}")
        if spec.unreduced:
            notes.append(f"U:{'+'.join(spec.unreduced)}")
        if self.memory != "device":
            notes.append(self.memory)
        return text + "{" + ", ".join(notes) + "}" if notes else text

    __repr__ = __str__


# -- bytes -----------------------------------------------------------------------------------------


def global_bytes(kind: ShardType) -> int:
    """Return the bytes of the global tensor."""
    return prod(kind.shape) * kind.dtype.itemsize


def most_bytes(kind: ShardType, layout: Layout) -> int:
    """Return the bytes of the largest shard: that of the first device that stores any."""
    first = layout.mesh.index(layout.place)
    return prod(layout.local_shape(kind.shape, first)) * kind.dtype.itemsize


def is_uneven(kind: ShardType, layout: Layout) -> bool:
    """Return True if some shards are smaller than others.

    Flat ones can be, and those of devices outside the coordinates of `at` are empty.
    """
    has_devices_outside = any(layout.mesh.shape[name] > 1 for name in kind.spec.at_axes)
    is_cut_unevenly = kind.spec.is_flat and prod(kind.shape) % layout.flat_parts != 0
    return has_devices_outside or is_cut_unevenly


def bytes_on_devices(kind: ShardType, layout: Layout) -> str:
    """Return the bytes of a tensor and of its shards, as text.

    >>> from fshard.mesh.layout.make import make_mesh
    >>> layout = Layout(make_mesh({"data": 3}), P.flat("data"))
    >>> bytes_on_devices(ShardType(torch.int64, (7,), layout.spec), layout)
    '56 B, at most 24 B on each of 3 devices'
    """
    total = byte_text(global_bytes(kind))
    local = byte_text(most_bytes(kind, layout))
    if is_uneven(kind, layout):
        local = f"at most {local}"
    devices = f"on each of {layout.mesh.size:,} devices"
    if layout.mesh.size == 1:
        devices = "on the only device"
    return f"{total}, {local} {devices}"


@lru_cache(maxsize=4096)
def holders(layout: Layout) -> tuple[int, ...]:
    """Return one device for each different shard that has elements.

    It is the first device along every replicated and unreduced axis.
    """
    equal_axes = {*layout.replicated_axes, *layout.spec.unreduced}
    devices: list[int] = []
    for device in range(layout.mesh.size):
        coordinates = layout.mesh.coordinates(device)
        is_first = not any(coordinates[axis] for axis in equal_axes)
        if is_first and layout.has_any(device):
            devices.append(device)
    return tuple(devices)


def is_dense(x: Tensor) -> bool:
    """Return True if a tensor is strided and not nested, so that it can be split and sent.

    >>> is_dense(torch.eye(2)), is_dense(torch.eye(2).to_sparse())
    (True, False)
    """
    return x.layout is torch.strided and not x.is_nested


def no_dense(x: Tensor) -> str:
    """Return the message for a tensor that is not dense, with the fix."""
    if x.is_nested:
        return (
            "a nested tensor, which cannot be cut or sent. "
            "Give torch.nested.to_padded_tensor(x, 0.0), or x.unbind()"
        )
    return (
        f"a tensor of {x.layout} (shape {tuple(x.shape)}), which cannot be cut or sent. "
        "Give x.to_dense()"
    )
