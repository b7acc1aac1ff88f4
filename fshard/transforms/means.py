"""Means over the slices of all devices: of the loss, and of what a loss function returns beside it.

Every slice has a number that it counts for, known on the host.  All that is found goes into one vector in float64, which one
psum adds up; what is only known on the host goes along in another, so that nobody waits for the first:

    (loss x count, aux x count)  of each slice  ->  one tree of sums  ->  psum  ->  divided by the count of all
    (count, more numbers)                       ->  one tree of sums  ->  psum  ->  a list
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.scope import Group
from fshard.mesh.tree import PyTree, Structure, flatten_with_paths, unflatten
from fshard.source import Site
from fshard.transforms.agree import on_host, summed
from fshard.transforms.rules import named, parts_of

Row = TypeVar("Row", Tensor, float)


class Found(NamedTuple):
    """What one slice has found, or the mean of what all have, and what it counts for."""

    loss: Tensor
    weight: float
    aux: PyTree
    buffers: dict[str, Tensor]


def together(found: list[Found], more: list[float], group: Group | None, site: Site) -> tuple[Found, list[float]]:
    """Average what was found; return also the sums of the devices' other numbers."""
    near = found[0].loss.device
    flat = [_numbers({"aux": one.aux, "buffers": one.buffers}, near) for one in found]
    rows = [_weighted([one.loss, *leaves], one.weight, near) for one, (leaves, _) in zip(found, flat, strict=True)]
    weight = _tree_sum([one.weight for one in found])
    sums = _tree_sum(rows)
    if group is not None and group.size > 1:
        sums, known = summed((sums, on_host([weight, *more], near)), group, site)
        weight, *more = [weight, *more] if known.is_meta else known.tolist()
    leaves, structure = flat[0]
    loss, *means = (sums / weight).split([1, *(x.numel() for x in leaves)])
    rest = unflatten(structure, [_like(x, mean) for mean, x in zip(means, leaves, strict=True)])
    loss = loss.reshape(()).to(torch.promote_types(found[0].loss.dtype, torch.float32))
    return Found(loss, weight, rest["aux"], rest["buffers"]), more


def _like(x: Tensor, mean: Tensor) -> Tensor:
    """Return a mean in the shape and dtype of what it is the mean of; whole numbers are rounded."""
    return (mean if x.is_floating_point() else mean.round()).reshape(x.shape).to(x)


def _weighted(xs: list[Tensor], weight: float, near: torch.device) -> Tensor:
    """Return numbers times what they count for; what counts for nothing is 0, even if it is not finite."""
    row = torch.cat([x.detach().to(near, torch.float64).reshape(-1) for x in xs])
    return row * weight if weight else torch.zeros_like(row)


def _tree_sum(rows: list[Row]) -> Row:
    """Add up what the slices have found, in the tree in which their gradients are added."""
    while len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)] + rows[len(rows) // 2 * 2 :]
    return rows[0]


def _numbers(aux: PyTree, near: torch.device) -> tuple[list[Tensor], Structure]:
    """Return the leaves of what a loss function returns beside the loss, as tensors."""
    paths, leaves, structure = flatten_with_paths(aux)
    wrong = [
        f"{named(parts_of(path))} is {'complex' if isinstance(x, Tensor) else type(x).__name__}"
        for path, x in zip(paths, leaves, strict=True)
        if not isinstance(x, Tensor | int | float) or (isinstance(x, Tensor) and x.is_complex())
    ]
    if wrong:
        raise LayoutError(
            f"value_and_grad: {'; '.join(wrong)}. What is returned beside the loss is averaged: give tensors or real numbers."
        )
    return [x if isinstance(x, Tensor) else torch.full((), x, device=near) for x in leaves], structure
