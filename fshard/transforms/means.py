"""Means and sums over the slices of all devices: of the loss, and of what a loss function returns beside it.

Every slice has a number that it counts for, known on the host.  All that is found goes into one vector in float64, which one
psum adds up; what is only known on the host goes along in another, so that nobody waits for the first:

    (loss x weight, means x weight, counts)  of each slice  ->  one tree of sums  ->  psum  ->  divided by the weight of all
    (weight, more numbers)                                  ->  one tree of sums  ->  psum  ->  a list
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fshard.mesh.scope import Group
from fshard.source import Site
from fshard.transforms.agree import on_host, summed

Row = TypeVar("Row", Tensor, float)


class Found(NamedTuple):
    """What one slice has found, or all have together: what it counts for, what is averaged, and what is added up."""

    loss: Tensor
    weight: float
    means: list[Tensor]
    counts: list[Tensor]


def together(
    found: list[Found], more: list[float], group: Group | None, many: int, site: Site
) -> tuple[Found, list[float]]:
    """Average and add up what was found; return also the sums of the devices' other numbers.

    `many` devices count for the same samples.
    """
    first, near = found[0], found[0].loss.device
    weight = tree_sum([one.weight for one in found])
    sums = tree_sum([_row(one, near) for one in found])
    if group is not None and group.size > 1:
        sums, known = summed((sums, on_host([weight, *more], near)), group, site)
        weight, *more = [weight, *more] if known.is_meta else known.tolist()
    loss, *rest = sums.split([1, *(x.numel() for x in (*first.means, *first.counts))])
    means = [_like(x, total / weight) for x, total in zip(first.means, rest, strict=False)]
    counts = [_like(x, total / many) for x, total in zip(first.counts, rest[len(means) :], strict=True)]
    loss = (loss / weight).reshape(()).to(torch.promote_types(first.loss.dtype, torch.float32))
    return Found(loss, weight / many, means, counts), more


def _like(x: Tensor, value: Tensor) -> Tensor:
    """Return a value in the shape and dtype of what it was made of; whole numbers are rounded."""
    return (value if x.is_floating_point() else value.round()).reshape(x.shape).to(x)


def _row(one: Found, near: torch.device) -> Tensor:
    """Return numbers times what they count for; what counts for nothing is 0, even if it is not finite."""
    means, counts = _vector([one.loss, *one.means], near), _vector(one.counts, near)
    row = torch.cat([means * one.weight, counts])
    return row if one.weight else torch.zeros_like(row)


def _vector(xs: Sequence[Tensor], near: torch.device) -> Tensor:
    empty = torch.zeros(0, dtype=torch.float64, device=near)
    return torch.cat([empty, *(x.detach().to(near, torch.float64).reshape(-1) for x in xs)])


def tree_sum(rows: list[Row]) -> Row:
    """Add up what the slices have found, in the tree in which their gradients are added."""
    while len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)] + rows[len(rows) // 2 * 2 :]
    return rows[0]
