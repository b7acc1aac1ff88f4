"""Means over the slices of all devices: of the loss, and of what a loss function returns beside it.

Every slice has a number that it counts for.  All numbers of a step go into one vector in float64, which one psum adds up:

    (loss x count, count, aux x count)  of each slice  ->  one tree of sums  ->  psum  ->  divided by the count of all
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.scope import Group
from fshard.mesh.tree import PyTree, Structure, flatten_with_paths, unflatten
from fshard.source import Site
from fshard.transforms.agree import summed
from fshard.transforms.rules import named, parts_of


class Found(NamedTuple):
    """What one slice has found, or the mean of what all have, and what it counts for."""

    loss: Tensor
    weight: Tensor
    aux: PyTree
    buffers: dict[str, Tensor]


def together(found: list[Found], more: list[float], group: Group | None, site: Site) -> tuple[Found, list[float]]:
    """Average what was found; return also the sums of the devices' other numbers."""
    flat = [_numbers({"aux": one.aux, "buffers": one.buffers}) for one in found]
    near = found[0].loss.device
    rows = [
        _weighted([one.loss, torch.ones(()), *leaves], one.weight, near)
        for one, (leaves, _) in zip(found, flat, strict=True)
    ]
    own = _tree_sum(rows)
    sums = summed(torch.cat([own, torch.tensor(more, dtype=torch.float64, device=near)]), group, site)
    total, weight, *_ = sums
    if not sums.is_meta:
        more = sums[own.numel() :].tolist()
    leaves, structure = flat[0]
    means = (sums[2 : own.numel()] / weight).split([x.numel() for x in leaves])
    rest = unflatten(structure, [_like(x, mean) for mean, x in zip(means, leaves, strict=True)])
    loss = (total / weight).to(torch.promote_types(found[0].loss.dtype, torch.float32))
    return Found(loss, weight, rest["aux"], rest["buffers"]), more


def _like(x: Tensor, mean: Tensor) -> Tensor:
    """Return a mean in the shape and dtype of what it is the mean of; whole numbers are rounded."""
    return (mean if x.is_floating_point() else mean.round()).reshape(x.shape).to(x)


def _weighted(xs: list[Tensor], weight: Tensor, near: torch.device) -> Tensor:
    """Return numbers times what they count for; what counts for nothing is 0, even if it is not finite."""
    row = torch.cat([x.detach().to(near, torch.float64).reshape(-1) for x in xs])
    return torch.where(weight == 0, 0.0, row * weight)


def _tree_sum(rows: list[Tensor]) -> Tensor:
    """Add up what the slices have found, in the tree in which their gradients are added."""
    while len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)] + rows[len(rows) // 2 * 2 :]
    return rows[0]


def _numbers(aux: PyTree) -> tuple[list[Tensor], Structure]:
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
    return [torch.as_tensor(x) for x in leaves], structure
