"""`Mesh`: a named grid of devices, as a value.

It holds no device, no thread and no process group, so it can be compared, hashed, printed and made anywhere.  Devices are
numbered row-major: the last axis is the fastest.

    make_mesh({"data": 2, "model": 3})        model ->
                                       data   0  1  2
                                         |    3  4  5
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
"""Where devices live: threads of this process, processes of torch.distributed, or nowhere (shapes only)."""


@dataclass(frozen=True)
class Mesh(CachedHash):
    """A named grid of devices: immutable, hashable, compared by value. Made by `make_mesh`.

    Args:
        axes: (name, size) pairs, major to minor.
        runtime: "virtual", "process" or "abstract".
        device_type: "cpu", "cuda" or, on an abstract mesh, "meta".
        parent: the (name, size) pairs of the mesh that this one was sliced from, or None.
        ranks: torch.distributed ranks of the devices in mesh order, where they are not 0, 1, 2, ...
        zigzag: an axis along which shards of arrays are in zigzag order: see `arithmetic.zigzag`. For operations on arrays.
        is_varying: arrays on it are those of a loss function: see `mesh/reshard/varying.py`.

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
    ranks: tuple[int, ...] | None = None
    zigzag: str | None = None
    is_varying: bool = False

    def __post_init__(self) -> None:
        complaints: list[str] = []
        if self.runtime not in get_args(Runtime):
            complaints.append(f'runtime "{self.runtime}" is none of {_quote(get_args(Runtime))}')
        if not self.axes:
            complaints.append('it has no axis: write make_mesh({"data": 1}) for a single device')
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not isinstance(name, str) or not name.isidentifier():
                complaints.append(f'axis name {name!r} is not a name like "data"')
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                complaints.append(
                    f"axis {name!r} has size {size!r}: a size must be an integer >= 1"
                )
        repeated = sorted({name for name in names if names.count(name) > 1}, key=str)
        if repeated:
            complaints.append(f"axis {_quote(repeated)} is named more than once")
        if complaints:
            raise MeshError("This mesh cannot be made: " + "; ".join(complaints) + ".")

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
        """Stride of each axis in the numbering of the parent mesh."""
        root = self.parent or self.axes
        strides = dict(zip(dict(root), arithmetic.strides([size for _, size in root]), strict=True))
        return MappingProxyType({name: strides[name] for name in self.axis_names})

    @cached_property
    def steps(self) -> Mapping[str, tuple[int, int]]:
        """The size and the stride of each axis."""
        return MappingProxyType({name: (size, self.strides[name]) for name, size in self.axes})

    @cached_property
    def root_size(self) -> int:
        """Number of devices of the parent mesh, or of this one without a parent."""
        return prod(size for _, size in self.parent or self.axes)

    def coordinates(self, device: int) -> dict[str, int]:
        """Return a device's coordinate along each axis: {"data": 2, "model": 1}."""
        if not 0 <= device < self.size:
            raise MeshError(
                f"{self} has no device {device!r}: its {self.size} devices are counted from 0."
            )
        return dict(
            zip(
                self.axis_names,
                arithmetic.unravel(device, [size for _, size in self.axes]),
                strict=True,
            )
        )

    def index(self, coordinates: Mapping[str, int]) -> int:
        """Return the number of the device at `coordinates`; an axis left out counts as 0."""
        self.check_axes((*coordinates,), f"mesh.index({dict(coordinates)})")
        for name, coordinate in coordinates.items():
            if not 0 <= coordinate < self.shape[name]:
                raise MeshError(
                    f'mesh.index: "{name}" has coordinates 0 to {self.shape[name] - 1}; got {coordinate}.'
                )
        return self._ravel_coordinates(coordinates)

    def _ravel_coordinates(self, coordinates: Mapping[str, int]) -> int:
        return arithmetic.ravel(
            [coordinates.get(name, 0) for name in self.axis_names], [size for _, size in self.axes]
        )

    def local_index(self, root_device: int) -> int:
        """Return the number that a device of the parent mesh has in this one."""
        return self._ravel_coordinates(
            {name: root_device // step % self.shape[name] for name, step in self.strides.items()}
        )

    def check_axes(self, axes: Axes | Iterable[str], where: str) -> tuple[str, ...]:
        """Return `axes` as a tuple, or raise naming all that this mesh does not have."""
        names = as_axes(axes)
        unbound = [name for name in names if name not in self.axis_names]
        if unbound:
            raise MeshError(
                f"{where}: {self} has no axis {_quote(unbound)}. Its axes are {_quote(self.axis_names)}."
            )
        return names

    def __getitem__(self, axes: Axes) -> Mesh:
        """Return the mesh of some axes: on each device, the row or plane it is in. All axes in order give this mesh."""
        names = self.check_axes(axes, f"mesh[{axes!r}]")
        if names == self.axis_names:
            return self
        pairs = tuple((name, self.shape[name]) for name in names)
        return Mesh(pairs, self.runtime, self.device_type, self.parent or self.axes, self.ranks)

    def __iter__(self) -> Iterator[str]:
        return iter(self.axis_names)

    __hash__ = CachedHash.__hash__

    def __str__(self) -> str:
        grid = ", ".join(f"{name}={size}" for name, size in self.axes)
        cut = (
            ""
            if self.parent is None
            else " of " + ", ".join(f"{name}={size}" for name, size in self.parent)
        )
        order = f", zigzag over {self.zigzag}" if self.zigzag else ""
        return f"Mesh({grid}{cut}; {self.runtime}, {self.device_type}{order})"

    __repr__ = __str__


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


_run_defaults: ContextVar[RunDefaults] = ContextVar("run defaults", default=RunDefaults())  # noqa: B039  # it is frozen
run_defaults = _run_defaults.get
"""Return how runs of the calling code are run."""


def fixed_order() -> AbstractContextManager[None]:
    """Sum over devices in the fixed tree within the block."""
    return setting(_run_defaults, replace(run_defaults(), has_fixed_order=True))


@contextmanager
def use_mesh(mesh: Mesh) -> Generator[Mesh]:
    """Use a mesh for the calls in the block that name none: `shard_map`, `run`, `shard_params`, and a P as a layout.

    It reaches the threads of virtual devices. `mesh=` in a call and the mesh of a `Layout` take precedence.

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
    mesh = run_defaults().mesh if mesh is None else mesh
    if isinstance(mesh, Mesh):
        return mesh
    hint = (
        "" if mesh is not None else " Write mesh=, or call it in a block: with fs.use_mesh(mesh)."
    )
    raise TypeError(
        f'{caller}: mesh must be a Mesh, such as fs.make_mesh({{"data": 4}}); got {type(mesh).__name__}.{hint}'
    )


def _quote(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
