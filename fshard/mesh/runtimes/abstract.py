"""The abstract runtime: shapes without data.

One representative device runs the program on meta tensors. Received tensors get the shapes that the move's `pack` and
`unpack` give them, so a mesh of 65,536 devices costs no more than one of 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fshard.mesh.collectives.delivery import delivered

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Purpose, Wired
    from fshard.mesh.spmd.scope import Group, Scope
    from fshard.source import Site


@dataclass(frozen=True)
class Done:
    """A result that is already there."""

    results: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """Return it."""
        return self.results


class OneProcessWorld:
    """The base of the worlds that are in one process."""

    def connect(self, members: Sequence[int], pairs: Iterable[tuple[int, int]]) -> None:
        """Do nothing: messages need no connection."""

    def part(self, group: Group, error: BaseException) -> None:
        """Do nothing: an error ends all devices."""


class AbstractWorld(OneProcessWorld):
    """Answers every collective with empty tensors of the right shape."""

    has_values = False

    def __init__(self) -> None:
        self.scopes: dict[object, Scope] = {}

    def current(self) -> AbstractWorld:
        """Return itself: it has no state."""
        return self

    def start(self, move: Wired, xs: tuple[Tensor, ...], group: Group, site: Site, purpose: Purpose = "values") -> Done:
        """Return tensors of the shapes that the collective would return."""
        return Done(tuple(delivered(move, x.to("meta"), group.size) for x in xs))

    def send(self, xs: tuple[Tensor, ...], group: Group, to: int, site: Site, purpose: Purpose = "values") -> None:
        """Send nothing: there is no receiver."""

    def receive(
        self, likes: tuple[Tensor, ...], group: Group, source: int, site: Site, purpose: Purpose = "values"
    ) -> Done:
        """Return tensors like those announced."""
        return Done(tuple(torch.empty_like(like) for like in likes))
