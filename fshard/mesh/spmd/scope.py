"""The scope of the calling code: the device and the axes that it can name; a runtime's interface.

Inside `shard_map` and `run` every thread (virtual) or process has a scope, which gives collectives
the *group* of devices along their axes. Axes are stored as (size, stride) in the numbering of the
full mesh, so axes of an outer and an inner `shard_map` combine, and a group is three integers per
axis on any mesh. On a mesh a=2, b=3, whose devices are numbered

        b=0  1  2
    a=0   0  1  2       a is (2, 3), b is (3, 1)
    a=1   3  4  5       the group of device 4 along b: base 3, index 1, members 3 4 5

A *world* moves tensors between the devices of a group; all code above it is the same on all
runtimes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fshard.ambient import setting
from fshard.errors import ScopeError
from fshard.mesh.layout import Axes, Mesh, as_axes
from fshard.mesh.layout.arithmetic import ravel, unravel
from fshard.mesh.layout.counting import ActivationMemory
from fshard.source import Site

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Purpose, Wired
    from fshard.mesh.layout.mesh import Runtime


@dataclass(eq=False)
class Group:
    """The devices along some axes through one device, major to minor as the axes were named.

    Args:
        axes: the names.
        dims: (size, stride) of each axis in the numbering of the full mesh.
        base: the device with coordinate 0 along every axis.
        index: of the calling device in the group.
        size: the number of devices.
        device: the number of the calling device in the mesh.
        world: the runtime.
        numbers: of all devices of the mesh in the world, if they are not 0, 1, 2, ...
    """

    axes: tuple[str, ...]
    dims: tuple[tuple[int, int], ...]
    base: int
    index: int
    size: int
    device: int
    world: World
    numbers: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal on all devices of the group, and only there."""
        if self.numbers is None:
            return self.base, self.dims
        return self.members

    @property
    def number(self) -> int:
        """The number of the calling device in the world."""
        return self.device if self.numbers is None else self.numbers[self.device]

    def member(self, index: int) -> int:
        """Return the device number, in the full mesh, of the device at `index` of the group."""
        coordinates = unravel(index, [size for size, _ in self.dims])
        offsets = [
            coordinate * stride
            for coordinate, (_, stride) in zip(coordinates, self.dims, strict=True)
        ]
        return self.base + sum(offsets)

    def number_of(self, index: int) -> int:
        """Return the number in the world of the device at `index` of the group."""
        device = self.member(index)
        return device if self.numbers is None else self.numbers[device]

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The numbers in the world of all devices of the group, in its order."""
        return tuple([self.number_of(index) for index in range(self.size)])

    @property
    def represents_all(self) -> bool:
        """True if the device is that of an abstract mesh, and represents all of the group."""
        return self.world.represents(self.axes)


Notice = Callable[[str, Group, "Purpose"], None]
"""Gets the name and group of every collective of the user's code; raises if it is not allowed.

For cotangents: the code that called it also differentiates it, itself.
"""


@dataclass(frozen=True)
class SliceState:
    """The slice of the batch that a device's loss function runs on."""

    is_idle: bool = False
    """It has no samples, and runs on those of another slice."""

    moments: list[Any] | None = None
    """The sums of BatchNorm layers, which append them; None unless statistics are of all slices."""


class UserCall(NamedTuple):
    """A call of a collective by the user.

    In a loss function it is on one slice of the batch; in the code of `fs.run` `slice` is None.
    """

    name: str
    slice: SliceState | None


class Scope:
    """The device that a thread or process runs as: set by `shard_map` and `run`.

    Attributes:
        world: the runtime.
        mesh: the innermost mesh.
        device: the number of the device in the full mesh.
        mapped: the axes of all `shard_map`s around the code; () in the code of `fs.run`.
        checked: compare what is promised to be equal.
        axes: (size, stride) of each axis that can be named.
        inner: scopes of the same device on other meshes, by their arguments: see `as_one_device`.
        varying_axes: the axes along which every value is varying, in a loss function.
        notice: gets the collectives of the user's code.
        slice: the slice of the batch that the code runs on.
        activations: the memory of named ones.
        is_for_shapes: the code runs on meta tensors, and its collectives reach no device.
    """

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
        self.checked = checked
        self.inner: dict[object, Scope] = {}
        self.notice: Notice | None = None
        self._groups: dict[Axes, Group] = {}

        # A `shard_map` in a loss function or another `shard_map` has what holds around it.
        self.mapped = mapped
        self.axes: Mapping[str, tuple[int, int]] = mesh.steps
        self.varying_axes: frozenset[str] = frozenset()
        self.slice = SliceState()
        self.activations: Mapping[str, ActivationMemory] = {}
        self.is_for_shapes = False
        if outer is not None:
            self.mapped = mapped + outer.mapped
            self.axes = {**outer.axes, **mesh.steps}
            self.varying_axes = outer.varying_axes
            self.slice = outer.slice
            self.activations = outer.activations
            self.is_for_shapes = outer.is_for_shapes
        self.mapped_axes = frozenset(self.mapped)

    @property
    def number(self) -> int:
        """The number of the device in the world."""
        numbers = self.mesh.numbers
        return self.device if numbers is None else numbers[self.device]

    def replaced(self, **fields: Any) -> Scope:
        """Return a scope of the same device and axes, with other values of some fields."""
        # Groups are those of the same device; inner scopes would have the old values.
        scope = Scope.__new__(Scope)
        vars(scope).update(vars(self), inner={}, **fields)
        return scope

    def group(self, axes: Axes, caller: str) -> Group:
        """Return the group along `axes` through this device."""
        try:
            group = self._groups.get(axes)
        except TypeError:  # axes is a list, which has no hash
            axes = _axis_names(axes, caller)
            group = None
        if group is None:
            group = self._new_group(_axis_names(axes, caller), caller)
            self._groups[axes] = group
        return group

    def _new_group(self, names: tuple[str, ...], caller: str) -> Group:
        unbound = [name for name in names if name not in self.axes]
        is_named_twice = len(set(names)) < len(names)
        if unbound or is_named_twice or not names:
            if is_named_twice and not unbound:
                problem = "an axis is named twice"
            else:
                bound = ", ".join([f'"{name}"' for name in self.axes])
                problem = f"the axes bound here are {bound}"
            shown = ", ".join([f'"{name}"' for name in names]) or "no axis"
            raise ScopeError(
                f"{caller} over {shown}: {problem}. "
                "Name axes of the mesh that shard_map or run was given."
            )

        dims = tuple([self.axes[name] for name in names])
        base, index, size = _group_position(self.device, dims)
        return Group(names, dims, base, index, size, self.device, self.world, self.mesh.numbers)

    def user_call(self, name: str) -> UserCall | None:
        """Return a call in a loss function or in the code of `fs.run`.

        Return None in `shard_map`, where no step has a part.
        """
        if self.varying_axes:
            return UserCall(name, self.slice)
        if self.mapped:
            return None
        return UserCall(name, None)

    def called_group(self, axes: Axes, caller: str) -> Group:
        """Return the group of a collective that the user's code calls, and notify the observer."""
        group = self.group(axes, caller)
        if self.notice is not None:
            self.notice(caller, group, "values")
        return group


# Virtual devices have a new scope in each run, whose groups would be computed again.
@lru_cache(maxsize=8192)
def _group_position(device: int, dims: tuple[tuple[int, int], ...]) -> tuple[int, int, int]:
    """Return the base of the group through a device, the device's index, and the group's size.

    Device 4 of the module's picture, along b = (3, 1): coordinate 4 // 1 % 3 = 1, base 4 - 1 = 3.
    """
    sizes = [size for size, _ in dims]
    coordinates = [device // stride % size for size, stride in dims]
    base = device
    for coordinate, (_, stride) in zip(coordinates, dims, strict=True):
        base -= coordinate * stride
    return base, ravel(coordinates, sizes), prod(sizes)


def _axis_names(axes: Axes, caller: str) -> tuple[str, ...]:
    try:
        return as_axes(axes)
    except TypeError as error:
        raise TypeError(f"{caller}: {error}") from None


def outside() -> AbstractContextManager[None]:
    """Run a block as outside of `run`: on virtual meshes of its own."""
    return entered(None)


def loss_scope(
    axes: Iterable[str],
    notice: Notice | None = None,
    *,
    is_idle: bool = False,
    moments: list[Any] | None = None,
    activations: Mapping[str, ActivationMemory] | None = None,
) -> AbstractContextManager[None]:
    """Run a loss function, in which every value is varying along axes.

    `notice` gets the collectives that it calls: see `fshard.transforms.loss_collectives`. `is_idle`
    and `moments` describe its slice. `activations` is the memory of named ones, in place of the
    policies of `fs.remat`.
    """
    scope = require("a loss function").replaced(
        varying_axes=frozenset(axes),
        notice=notice,
        slice=SliceState(is_idle, moments),
        activations=activations or {},
    )
    return entered(scope)


def run_for_shapes() -> AbstractContextManager[None]:
    """Run a block of another stage on meta tensors: its devices are not there to communicate.

    Outside of a run, where a model is split, no code can communicate.
    """
    scope = here()
    if scope is None:
        return nullcontext()
    return entered(scope.replaced(is_for_shapes=True))


def loss_along(group: Group) -> Scope | None:
    """Return the scope of the loss function whose values are varying along axes of a group.

    Return None outside of one.
    """
    scope = here()
    if scope is None or scope.varying_axes.isdisjoint(group.axes):
        return None
    return scope


@contextmanager
def parting(group: Group) -> Generator[None]:
    """Report an exception in the block to the devices of a group that wait for this one."""
    try:
        yield
    except BaseException as error:
        group.world.current().report_failure(group, error)
        raise


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)
here = _scope.get
"""Return the scope of the calling thread, None outside `shard_map` and `run`.

It is the method itself, since each collective reads the scope several times.
"""


def require(caller: str) -> Scope:
    """Return the scope of the calling thread; raise outside `shard_map` and `run`."""
    scope = here()
    if scope is None:
        raise ScopeError(
            f"{caller} was called outside shard_map and run, where no device and no axis is known. "
            "Call it in the function that you give to fs.shard_map or fs.run."
        )
    return scope


def entered(scope: Scope | None) -> AbstractContextManager[None]:
    """Make `scope` the calling thread's for a while."""
    return setting(_scope, scope)


class Pending(Protocol):
    """An operation in progress: `wait`, which may be called once, returns the results.

    `into` are contiguous tensors that the results are for. Those that a transport unpacks, it may
    unpack into their memory; the caller copies the others.
    """

    def wait(self, into: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]: ...


class MessageCount:
    """The number of messages of a route, counted at one end, and the lines of the last ones."""

    def __init__(self) -> None:
        self._count = 0
        self._sites: deque[Site] = deque(maxlen=256)

    def add(self, site: Site) -> int:
        """Count one more message; return its number, from 1 on."""
        self._count += 1
        self._sites.append(site)
        return self._count

    def site_of(self, number: int) -> Site | None:
        """Return the line of a message; None if it is not one of the last ones."""
        index = number - self._count - 1  # -1 is the last message
        return self._sites[index] if -len(self._sites) <= index < 0 else None


MessageCounts = defaultdict[tuple[tuple[int, ...], int, int, bool], MessageCount]
"""By group, sender, receiver, and whether the messages are counted where they are sent.

By group, since messages that never arrive end the calls of their group, and of no other.
"""


class World(Protocol):
    """The devices that can reach each other, seen from one of them."""

    @property
    def has_values(self) -> bool:
        """True if tensors have data; False on an abstract mesh."""
        ...

    @property
    def runtime(self) -> Runtime:
        """The kind of devices."""
        ...

    @property
    def message_counts(self) -> MessageCounts:
        """The counts of `fs.send` and `fs.recv`, at the ends that this world sees."""
        ...

    def current(self) -> World: ...

    def represents(self, axes: tuple[str, ...]) -> bool:
        """Return True if the calling device represents all devices along some axes."""
        ...

    def start(
        self,
        move: Wired,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        purpose: Purpose = "values",
        dtype: torch.dtype | None = None,
    ) -> Pending:
        """Start one collective on tensors; the result has one tensor for each.

        They have one dtype, or are cast to `dtype` first.
        """
        ...

    def send(
        self,
        xs: tuple[Tensor, ...],
        group: Group,
        to: int,
        site: Site,
        purpose: Purpose = "values",
        number: int | None = None,
    ) -> None:
        """Send tensors to the device at index `to`.

        `number` is that of the message whose cotangents they are: both ends must agree on it.
        """
        ...

    def report_failure(self, group: Group, error: BaseException) -> None:
        """Report to the other devices of a group that this one failed, if they cannot detect it."""
        ...

    def receive(
        self,
        likes: tuple[Tensor, ...],
        group: Group,
        source: int,
        site: Site,
        purpose: Purpose = "values",
        number: int | None = None,
    ) -> Pending:
        """Start receiving the next message of the device at index `source`.

        It has tensors with the shapes and dtypes of `likes`. `number` is that of the message whose
        cotangents it must have.
        """
        ...
