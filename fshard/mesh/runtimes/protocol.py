"""What a runtime has to be: one small class.

A *world* carries tensors between the devices of a group.  Everything above it (layouts, shard_map, collectives,
gradients, ledgers) is the same code on all runtimes, so a fourth runtime is another class like this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from fshard.mesh.moves import Wired
    from fshard.mesh.scope import Group
    from fshard.source import Site


class Pending(Protocol):
    """Something under way.  `wait` may be called once."""

    def wait(self) -> tuple[Tensor, ...]:
        """Return the results, when they are there."""
        ...


class Lane(Protocol):
    """A short way for messages of one shape and dtype, to and from one device."""

    def send(self, x: Tensor) -> bool:
        """Send a tensor, if it can go this way; return whether it could."""
        ...

    def take(self) -> Tensor:
        """Wait for the next message, which is like this."""
        ...


class World(Protocol):
    """The devices that can reach each other, seen from one of them."""

    @property
    def has_values(self) -> bool:
        """Whether tensors hold data: False where only shapes travel."""
        ...

    @property
    def has_roads(self) -> bool:
        """Whether `road` may find one."""
        ...

    def road(self, move: Wired, group: Group, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return a short way to run one collective on tensors of this shape and dtype, if there is one."""
        ...

    def current(self) -> World:
        """Return the world that the calling thread is in: this one, unless threads come and go."""
        ...

    def start(
        self,
        move: Wired,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        into: tuple[Tensor, ...] | None = None,
    ) -> Pending:
        """Begin one collective on tensors of one dtype; the result is a tensor for each.

        `into`, of flat pieces that are gathered: contiguous tensors that may become the results, each perhaps shorter than what
        comes by what fills the last pieces up.  The pieces may lie in them, each in its place.
        """
        ...

    def send(self, xs: tuple[Tensor, ...], group: Group, to: int, site: Site) -> None:
        """Send tensors to the device at index `to`, without waiting for it."""
        ...

    def lane(self, like: Tensor, group: Group, place: int, site: Site) -> Lane | None:
        """Return a short way for messages like this tensor to and from the device at `place`, if there is one."""
        ...

    def part(self, group: Group, error: BaseException) -> None:
        """Tell the other devices of a group that this one has failed, if they would not learn it otherwise."""
        ...

    def receive(self, likes: tuple[Tensor, ...], group: Group, source: int, site: Site) -> Pending:
        """Begin to receive what the device at index `source` sends next: tensors like these."""
        ...
