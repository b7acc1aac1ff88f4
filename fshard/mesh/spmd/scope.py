"""Where the calling code stands: on which device, and which axes it can name; and what a runtime has to be.

Inside `shard_map` and `run` every thread (virtual) or process has a scope.  A collective asks it for the *group* of
devices along its axes.  Axes are kept as (size, stride) in the numbering of the whole mesh, so that axes bound by an
outer and an inner `shard_map` combine, and a group is three integers per axis however large the mesh.  A *world* carries
tensors between the devices of a group; everything above it is the same code on all runtimes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from fshard.errors import LayoutError, ScopeError
from fshard.mesh.layout import Axes, Mesh, as_axes
from fshard.mesh.layout.arithmetic import ravel, unravel
from fshard.source import Site

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Wired


@dataclass(eq=False)
class Group:
    """The devices along some axes through one device, major to minor as the axes were named.

    `dims` are (size, stride) of each axis in the numbering of the whole mesh, `base` the device that has place 0 along every
    axis, `index` the calling device's place in the group, `device` its number in the mesh, `ranks` the processes' if not these.
    """

    axes: tuple[str, ...]
    dims: tuple[tuple[int, int], ...]
    base: int
    index: int
    size: int
    device: int
    world: World
    ranks: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """A key that is equal on all devices of the group, and only there."""
        return self.base, self.dims

    def member(self, index: int) -> int:
        """Return the number, in the whole mesh, of the device at `index` of the group."""
        places = unravel(index, [size for size, _ in self.dims])
        return self.base + sum(place * stride for place, (_, stride) in zip(places, self.dims, strict=True))

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks (or numbers) of all devices of the group, in its order."""
        numbers = (self.member(index) for index in range(self.size))
        return tuple(numbers) if self.ranks is None else tuple(self.ranks[number] for number in numbers)


Notice = Callable[[str, Group], None]
"""Is told what is asked for, by name, of a group; raises if that may not be."""


class Scope:
    """The place of one device: what `shard_map` and `run` set up, and collectives look up."""

    def __init__(
        self,
        world: World,
        mesh: Mesh,
        device: int,
        outer: Scope | None = None,
        *,
        mapped: tuple[str, ...] = (),
        checked: bool = False,
    ) -> None:
        self.world = world
        self.mesh = mesh
        self.device = device
        self.mapped = mapped + (outer.mapped if outer else ())
        self.checked = checked
        self.mapped_axes = frozenset(self.mapped)
        self.axes: Mapping[str, tuple[int, int]] = {**outer.axes, **mesh.steps} if outer else mesh.steps
        self._groups: dict[Axes, Group] = {}
        self.roads: dict[object, Callable[[Tensor], Tensor] | None] | None = {} if world.has_roads else None
        self.inner: dict[object, Scope] = {}
        self.own: frozenset[str] = outer.own if outer else frozenset()
        self.notice: Notice | None = None

    def group(self, axes: Axes, what: str) -> Group:
        """Return the group along `axes` through this device."""
        try:
            found = self._groups.get(axes)
        except TypeError:  # a list of axes, say
            axes, found = _names(axes, what), None
        if found is None:
            found = self._groups[axes] = self._make(_names(axes, what), what)
        return found

    def asked(self, axes: Axes, what: str) -> Group:
        """Return the group that the user's code asks something of; whoever wants to know is told."""
        found = self.group(axes, what)
        if self.notice is not None:
            self.notice(what, found)
        return found

    def _make(self, names: tuple[str, ...], what: str) -> Group:
        unknown = [name for name in names if name not in self.axes]
        if unknown or not names or len(set(names)) < len(names):
            known = ", ".join(f'"{name}"' for name in self.axes)
            asked = ", ".join(f'"{name}"' for name in names) or "no axis"
            problem = "an axis is named twice" if names and not unknown else f"the axes bound here are {known}"
            raise ScopeError(f"{what} over {asked}: {problem}. Name axes of the mesh that shard_map or run was given.")
        dims = tuple([self.axes[name] for name in names])
        return Group(names, dims, *_group_through(self.device, dims), self.device, self.world, self.mesh.ranks)


@lru_cache(maxsize=8192)
def _group_through(device: int, dims: tuple[tuple[int, int], ...]) -> tuple[int, int, int]:
    """Return the first device of the group through a device, the device's own place in it, and the group's size."""
    sizes = [size for size, _ in dims]
    places = [device // stride % size for size, stride in dims]
    base = device - sum(place * stride for place, (_, stride) in zip(places, dims, strict=True))
    return base, ravel(places, sizes), prod(sizes)


def _names(axes: Axes, what: str) -> tuple[str, ...]:
    try:
        return as_axes(axes)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from None


class _Here(threading.local):
    scope: Scope | None = None


_here = _Here()


@contextmanager
def owning(axes: Iterable[str], notice: Notice | None = None) -> Generator[None]:
    """Let every value along some axes be the calling device's own for a while: see `fshard.transforms.agree`."""
    scope = require("a loss function")
    before = scope.own, scope.notice, scope.roads
    scope.own, scope.notice, scope.roads = frozenset(axes), notice, None  # nobody would notice what goes by a road
    try:
        yield
    finally:
        scope.own, scope.notice, scope.roads = before


@contextmanager
def parting(group: Group) -> Generator[None]:
    """Tell the others of a group if what is done here fails, where they wait for it."""
    try:
        yield
    except BaseException as error:
        group.world.current().part(group, error)
        raise


def here() -> Scope | None:
    """Return the scope of the calling thread, None outside `shard_map` and `run`."""
    return _here.scope


def require(what: str) -> Scope:
    """Return the scope of the calling thread, or raise saying that `what` needs one."""
    scope = _here.scope
    if scope is None:
        raise ScopeError(
            f"{what} was called outside shard_map and run, where no device and no axis is known. "
            "Call it in the function that you give to fs.shard_map or fs.run."
        )
    return scope


def enter(scope: Scope | None) -> Scope | None:
    """Make `scope` the calling thread's, and return the one before."""
    before, _here.scope = _here.scope, scope
    return before


@contextmanager
def entered(scope: Scope | None) -> Generator[None]:
    """Make `scope` the calling thread's for a while."""
    before = enter(scope)
    try:
        yield
    finally:
        enter(before)


class Pending(Protocol):
    """Something under way: `wait`, which may be called once, returns the results when they are there."""

    def wait(self) -> tuple[Tensor, ...]: ...


class Lane(Protocol):
    """A short way for messages of one shape and dtype, to and from one device.  `send` returns whether it could."""

    def send(self, x: Tensor) -> bool: ...

    def take(self) -> Tensor: ...


class World(Protocol):
    """The devices that can reach each other, seen from one of them."""

    @property
    def has_values(self) -> bool:
        """Whether tensors hold data: False where only shapes travel."""
        ...

    @property
    def has_roads(self) -> bool: ...

    def road(self, move: Wired, group: Group, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return a short way to run one collective on tensors of this shape and dtype, if there is one."""
        ...

    def current(self) -> World: ...

    def start(
        self, move: Wired, xs: tuple[Tensor, ...], group: Group, site: Site, into: tuple[Tensor, ...] | None = None
    ) -> Pending:
        """Begin one collective on tensors of one dtype; the result is a tensor for each.

        `into`, of flat shards that are gathered: contiguous tensors that may become the results, each perhaps shorter than what
        comes by what fills the last shards up.  The shards may lie in them, each in its place.
        """
        ...

    def send(self, xs: tuple[Tensor, ...], group: Group, to: int, site: Site) -> None: ...

    def lane(self, like: Tensor, group: Group, place: int, site: Site) -> Lane | None:
        """Return a short way for messages like this tensor to and from the device at `place`, if there is one."""
        ...

    def part(self, group: Group, error: BaseException) -> None:
        """Tell the other devices of a group that this one has failed, if they would not learn it otherwise."""
        ...

    def receive(self, likes: tuple[Tensor, ...], group: Group, source: int, site: Site) -> Pending:
        """Begin to receive what the device at index `source` sends next: tensors like these."""
        ...
