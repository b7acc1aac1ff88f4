"""Promised equality, checked by value (`check=True`).

Types say where values are equal on all devices: a replicated argument and its gradient, what `psum` returns and its
gradient.  Under `check=True` an identity is put there that compares, forward or backward, and raises naming the
argument or the collective and the devices that differ.  It is a linear map like any other, whose transpose compares in
the other direction; so a forgotten `pvary` is an error in the backward, if the values differ.  What values do not show
is found on virtual meshes by `audit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from fshard.errors import PromiseError
from fshard.mesh.differentiate import Tensors, apply
from fshard.mesh.moves import Move, WireKind, in_a_row
from fshard.mesh.scope import Group
from fshard.mesh.spec import as_written
from fshard.source import Site


@dataclass(frozen=True)
class Compare:
    """Ask which devices hold the same as the first: a bool for each device."""

    name = "check"
    wire: ClassVar[WireKind] = "gather"

    def meaning(self, xs: list[Tensor]) -> list[Tensor]:
        """Compare all with the first."""
        same = torch.tensor([_equal(x, xs[0]) for x in xs])
        return [same for _ in xs]

    def transposed(self) -> Move:
        """Return itself: it is not differentiated."""
        return self

    def batched(self) -> Compare:
        """Return itself: it looks at all elements alike."""
        return self

    def pack(self, x: Tensor, n: int) -> Tensor:
        """Send the whole tensor."""
        return in_a_row(x)

    def unpack(self, rows: Tensor, shape: torch.Size, n: int) -> Tensor:
        """Compare what all sent with what the first did."""
        return self.meaning(list(rows.reshape(n, rows.numel() // n)))[0]

    def sent(self, size: int, index: int, n: int) -> Fraction:
        """Count nothing: a check is no part of the program."""
        return Fraction(0)

    def busiest(self, size: int, n: int) -> Fraction:
        """Count nothing."""
        return Fraction(0)


def _equal(x: Tensor, y: Tensor) -> bool:
    """Equal element by element, where a NaN equals a NaN."""
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


@dataclass(frozen=True)
class Guard:
    """An identity that compares over a group of devices.

    Args:
        group: the devices that promised to be equal.
        site: the line that promised.
        broken: what to say if the promise is broken, with "{axes}" for the group's axes.
        forward: compare values; if not, compare cotangents.
        before: whether the guard stands before the collective that it belongs to, or behind it.
    """

    group: Group
    site: Site
    broken: str
    forward: bool = False

    @property
    def before(self) -> bool:
        """A guard of values stands before its collective, one of cotangents behind it."""
        return self.forward

    def apply(self, xs: Tensors) -> Tensors:
        """Pass values through, comparing."""
        return apply(self, xs)

    def run(self, xs: Tensors) -> Tensors:
        """Compare now, if it is this direction's turn."""
        if self.forward:
            self._compare(xs)
        return xs

    def _compare(self, xs: Tensors) -> None:
        plain = tuple(x.detach() for x in xs)
        verdicts = self.group.world.current().start(Compare(), plain, self.group, self.site).wait()
        for place, verdict in enumerate(verdicts):
            if not bool(verdict.all()):
                raise PromiseError(_complaint(self, place, plain, verdict))

    def transposed(self) -> Guard:
        """Return the guard of the other direction."""
        return replace(self, forward=not self.forward)

    def batched(self) -> Guard:
        """Return itself: it looks at all elements alike."""
        return self


def _complaint(guard: Guard, place: int, xs: Sequence[Tensor], verdict: Tensor) -> str:
    same = [index for index, equal in enumerate(verdict.tolist()) if equal]
    other = [index for index, equal in enumerate(verdict.tolist()) if not equal]
    which = f" (tensor {place} of {len(xs)})" if len(xs) > 1 else ""
    along = "+".join(guard.group.axes)
    return (
        f"A promise of equality is broken: {guard.broken.replace('{axes}', as_written(guard.group.axes))}.\n"
        f"  at {guard.site}{which}: {_places(other)} along {along} differ{'s' if len(other) == 1 else ''} "
        f"from {_places(same)}"
    )


def _places(places: list[int]) -> str:
    shown = ", ".join(map(str, places[:8])) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
    return f"place {shown}" if len(places) == 1 else f"places {shown}"
