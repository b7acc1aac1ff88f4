"""`Mesh`: a named grid of devices, as a value.

It holds no device, no thread and no process group, so it can be compared, hashed, printed and made
anywhere. Devices are numbered row-major: the last axis is the fastest.

    make_mesh({"data": 2, "model": 3})        model ->
                                       data   0  1  2
                                         |    3  4  5

A mesh of some devices has their numbers in the world: those of processes, or of virtual devices.
Meshes may be disjoint, overlap, or have the same devices in another order.

    make_mesh({"model": 2}, devices=(4, 5))   model ->
                                              4  5
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Literal, get_args

from fshard.ambient import setting
from fshard.errors import MeshError
from fshard.mesh.layout import arithmetic
from fshard.mesh.layout.spec import Axes, CachedHash, as_axes

Runtime = Literal["virtual", "process", "abstract"]
"""The kind of devices: threads of this process, processes of torch.distributed, or shapes only."""


# Note [Outside of a mesh]
# One program text runs on all processes, or as all virtual devices of a run. On those that are not
# among the devices of a mesh, `make_mesh` returns its abstract twin: equal but for the runtime.
# Arrays on it have a type and no values, functions on it run on shapes without waiting, and nothing
# of it is counted. So each process has the type of every array in the program, and calls that name
# two meshes, such as a reshard from one to another, know both ends everywhere. Plain values of the
# mesh, such as a loss, are None there: `fs.broadcast_to` gives them to others.
#
# Random keys are drawn there too, as often as on the devices, so that torch's generators stay alike
# on all processes. See also Note [Steps outside of a mesh].
#
#     process               0          1          2
#     mesh of 0 and 1       process    process    abstract
#     mesh of 2             abstract   abstract   process


@dataclass(frozen=True)
class Mesh(CachedHash):
    """A named grid of devices: immutable, hashable, compared by value. Made by `make_mesh`.

    Args:
        axes: (name, size) pairs, major to minor.
        runtime: "virtual", "process" or "abstract".
        device_type: "cpu", "cuda" or, on an abstract mesh, "meta".
        parent: the (name, size) pairs of the mesh that this one was sliced from, or None.
        numbers: of the devices in the world, in mesh order, where they are not 0, 1, 2, ... On a
            process mesh these are ranks. Of a sliced mesh they are those of `parent`.
        zigzag: an axis along which shards of arrays are in zigzag order: see `arithmetic.zigzag`.
            For operations on arrays.
        is_varying: arrays on it are those of a loss function: see `mesh/reshard/varying.py`.
        world: the number of the world of processes: those that have left one for another, as in an
            elastic run, make other meshes there. So arrays of the two do not mix.
        is_member: False on a process, or in a virtual device of a run, that is not among the
            devices. There the mesh is abstract: see Note [Outside of a mesh].

    >>> mesh = Mesh((("data", 4), ("model", 2)), "virtual", "cpu")
    >>> mesh.size, mesh.axis_names, dict(mesh.shape)
    (8, ('data', 'model'), {'data': 4, 'model': 2})
    >>> mesh["model"].size
    2
    """

    axes: tuple[tuple[str, int], ...]
    runtime: Runtime
    device_type: str
    parent: tuple[tuple[str, int], ...] | None = None
    numbers: tuple[int, ...] | None = None
    zigzag: str | None = None
    is_varying: bool = False
    is_member: bool = True
    world: int = 0

    def __post_init__(self) -> None:
        errors: list[str] = []
        if self.runtime not in get_args(Runtime):
            errors.append(f'runtime "{self.runtime}" is none of {_quote(get_args(Runtime))}')
        if not self.axes:
            errors.append('it has no axis: write make_mesh({"data": 1}) for a single device')
        for name, size in self.axes:
            if not isinstance(name, str) or not name.isidentifier():
                errors.append(f'axis name {name!r} is not a name like "data"')
            is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 1
            if not is_size:
                errors.append(f"axis {name!r} has size {size!r}: a size must be an integer >= 1")

        names = [name for name, _ in self.axes]
        repeated = sorted({name for name in names if names.count(name) > 1}, key=str)
        if repeated:
            errors.append(f"axis {_quote(repeated)} is named more than once")
        if self.numbers is not None and not errors:
            errors += _errors_of_numbers(self.numbers, self.root_size)
        if errors:
            raise MeshError("This mesh cannot be made: " + "; ".join(errors) + ".")

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def shape(self) -> Mapping[str, int]:
        """The size of each axis, major to minor, as a read-only mapping."""
        return MappingProxyType(dict(self.axes))

    @cached_property
    def size(self) -> int:
        return prod(size for _, size in self.axes)

    @cached_property
    def strides(self) -> Mapping[str, int]:
        """Stride of each axis in the numbering of the parent mesh.

        It is 3 for the axis "data" of 2 x 3 devices, in `mesh["data"]` too.
        """
        root = self.parent or self.axes
        root_names = [name for name, _ in root]
        root_strides = arithmetic.strides([size for _, size in root])
        strides = dict(zip(root_names, root_strides, strict=True))
        return MappingProxyType({name: strides[name] for name in self.axis_names})

    @cached_property
    def steps(self) -> Mapping[str, tuple[int, int]]:
        """The size and the stride of each axis."""
        return MappingProxyType({name: (size, self.strides[name]) for name, size in self.axes})

    @cached_property
    def root_size(self) -> int:
        """Number of devices of the parent mesh, or of this one without a parent."""
        return prod(size for _, size in self.parent or self.axes)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the devices in the world, in mesh order; of a sliced mesh its parent's."""
        if self.numbers is not None:
            return self.numbers
        return tuple(range(self.root_size))

    @cached_property
    def root(self) -> Mesh:
        """The mesh that this one was sliced from, or this one."""
        if self.parent is None:
            return self
        return replace(self, axes=self.parent, parent=None, zigzag=None, is_varying=False)

    @cached_property
    def first_row(self) -> Mesh:
        """The devices of a sliced mesh that the first device is among, as a mesh of their own."""
        numbers: list[int] = []
        for device in range(self.size):
            coordinates = self.coordinates(device)
            offsets = [coordinates[axis] * stride for axis, stride in self.strides.items()]
            numbers.append(self.devices[sum(offsets)])
        if numbers == [*range(self.size)]:
            return replace(self, parent=None, numbers=None)  # as a mesh of all that many devices
        return replace(self, parent=None, numbers=tuple(numbers))

    @property
    def grid(self) -> str:
        """Axes and devices in words, which are equal inside and outside of the mesh."""
        axes = _grid(self.axes)
        if self.numbers is None:
            return axes
        return f"{axes} on {shortened(self.numbers)}"

    def has_devices_of(self, other: Mesh) -> bool:
        """Return True if two meshes, or those they were sliced from, number the same devices."""
        return self.numbers == other.numbers and self.root_size == other.root_size

    def coordinates(self, device: int) -> dict[str, int]:
        """Return a device's coordinate along each axis: {"data": 2, "model": 1}."""
        if not 0 <= device < self.size:
            raise MeshError(
                f"{self} has no device {device!r}: its {self.size} devices are counted from 0."
            )
        indices = arithmetic.unravel(device, [size for _, size in self.axes])
        return dict(zip(self.axis_names, indices, strict=True))

    def index(self, coordinates: Mapping[str, int]) -> int:
        """Return the number of the device at `coordinates`; an axis left out counts as 0."""
        self.check_axes((*coordinates,), f"mesh.index({dict(coordinates)})")
        for name, coordinate in coordinates.items():
            if not 0 <= coordinate < self.shape[name]:
                raise MeshError(
                    f'mesh.index: "{name}" has coordinates 0 to {self.shape[name] - 1}; '
                    f"got {coordinate}."
                )
        return self._ravel_coordinates(coordinates)

    def _ravel_coordinates(self, coordinates: Mapping[str, int]) -> int:
        indices = [coordinates.get(name, 0) for name in self.axis_names]
        return arithmetic.ravel(indices, [size for _, size in self.axes])

    def local_index(self, root_device: int) -> int:
        """Return the number that a device of the parent mesh has in this one."""
        # Device 5 of 2 x 3, with strides 3 and 1, is at (5 // 3 % 2, 5 // 1 % 3), which is (1, 2).
        coordinates: dict[str, int] = {}
        for name, stride in self.strides.items():
            coordinates[name] = root_device // stride % self.shape[name]
        return self._ravel_coordinates(coordinates)

    def check_axes(self, axes: Axes | Iterable[str], where: str) -> tuple[str, ...]:
        """Return `axes` as a tuple, or raise naming all that this mesh does not have."""
        names = as_axes(axes)
        unbound = [name for name in names if name not in self.axis_names]
        if unbound:
            raise MeshError(
                f"{where}: {self} has no axis {_quote(unbound)}. "
                f"Its axes are {_quote(self.axis_names)}."
            )
        return names

    def __getitem__(self, axes: Axes) -> Mesh:
        """Return the mesh of some axes: on each device, the row or plane it is in.

        All axes in order give this mesh.
        """
        names = self.check_axes(axes, f"mesh[{axes!r}]")
        if names == self.axis_names:
            return self
        pairs = tuple((name, self.shape[name]) for name in names)
        return replace(self.root, axes=pairs, parent=self.parent or self.axes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.axis_names)

    __hash__ = CachedHash.__hash__

    def __str__(self) -> str:
        return f"Mesh({self._axes_text}; {self._kind_text})"

    def __repr__(self) -> str:
        count = "1 device" if self.size == 1 else f"{self.size:,} devices"
        return f"Mesh({self._axes_text}; {count}, {self._kind_text})"

    @property
    def _axes_text(self) -> str:
        parent = f" of {_grid(self.parent)}" if self.parent is not None else ""
        return f"{self.grid}{parent}"

    @property
    def _kind_text(self) -> str:
        kind = f"{self.runtime}, {self.device_type}"
        if not self.is_member:
            kind = "without this device"
        order = f", zigzag over {self.zigzag}" if self.zigzag else ""
        return f"{kind}{order}"


@dataclass(frozen=True, slots=True)
class RunDefaults:
    """The defaults of runs, where their own arguments leave them open.

    Args:
        mesh: the mesh of calls that name none: see `use_mesh`.
        has_fixed_order: sums over devices add in one order, the fixed tree, on any transport. See
            `fshard.mesh.spmd.deterministic`.
    """

    mesh: Mesh | None = None
    has_fixed_order: bool = False


_run_defaults: ContextVar[RunDefaults] = ContextVar(
    "run defaults",
    default=RunDefaults(),  # noqa: B039  # it is frozen
)
run_defaults = _run_defaults.get
"""Return how runs of the calling code are run."""


def fixed_order() -> AbstractContextManager[None]:
    """Sum over devices in the fixed tree within the block."""
    return setting(_run_defaults, replace(run_defaults(), has_fixed_order=True))


@contextmanager
def use_mesh(mesh: Mesh) -> Generator[Mesh]:
    """Use a mesh for the calls in the block that name none.

    These are `shard_map`, `run`, `shard_params`, and a P as a layout. It reaches the threads of
    virtual devices. `mesh=` in a call and the mesh of a `Layout` take precedence.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> with use_mesh(fs.make_mesh({"data": 2})):
    ...     print(fs.typeof(fs.device_put(torch.zeros(4), P("data"))))
    f32[4@data]
    """
    defaults = replace(run_defaults(), mesh=require_mesh("use_mesh", mesh))
    with setting(_run_defaults, defaults):
        yield mesh


def require_mesh(caller: str, mesh: object = None) -> Mesh:
    """Return a mesh, by default that of `use_mesh`; raise if there is none."""
    if mesh is None:
        mesh = run_defaults().mesh
    if isinstance(mesh, Mesh):
        return mesh
    hint = ""
    if mesh is None:
        hint = " Write mesh=, or call it in a block: with fs.use_mesh(mesh)."
    raise TypeError(
        f'{caller}: mesh must be a Mesh, such as fs.make_mesh({{"data": 4}}); '
        f"got {type(mesh).__name__}.{hint}"
    )


def _grid(axes: Iterable[tuple[str, int]]) -> str:
    return ", ".join([f"{name}={size}" for name, size in axes])


def _errors_of_numbers(numbers: tuple[int, ...], count: int) -> list[str]:
    errors: list[str] = []
    if len(numbers) != count:
        errors.append(f"it has {count} devices, but {len(numbers)} numbers: {numbers}")
    repeated = sorted({number for number in numbers if numbers.count(number) > 1})
    if repeated:
        errors.append(f"device {repeated[0]} is named more than once")
    if min(numbers, default=0) < 0:
        errors.append(f"device {min(numbers)} is negative: devices are counted from 0")
    return errors


def shortened(numbers: tuple[int, ...]) -> str:
    """Return numbers of devices in words, ranges by their ends.

    >>> shortened((4, 5, 6, 7)), shortened((3, 1, 0))
    ('4 to 7', '3, 1, 0')
    """
    first = numbers[0]
    last = numbers[-1]
    if len(numbers) > 2 and numbers == tuple(range(first, last + 1)):
        return f"{first} to {last}"
    shown = [str(number) for number in numbers[:8]]
    if len(numbers) > 8:
        shown.append("...")
    return ", ".join(shown)


def _quote(names: Iterable[str]) -> str:
    return ", ".join([f'"{name}"' for name in names])
