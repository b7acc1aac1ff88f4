"""Join the outputs of a module for several slices, and split their cotangents in the backward.

    slice 0   [0 1]   mean 2.0                 [0 1 2]   mean 3.0        the criterion's
    slice 1   [2]     mean 5.0       ──>                                 own graph begins here

Arguments must be sliceable by their first dim, and need no gradient. Each result is detached from the graphs of the
slices; its cotangent is split, so that each slice has its own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten  # it has the output classes of other libraries' modules

from fshard.booster.announced import Counted
from fshard.errors import LayoutError
from fshard.transforms.batch import is_opaque

CotangentSplit = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""From the index of a slice and the joined cotangent: the slice's output, and its cotangent."""


def side_by_side(outputs: Sequence[Any], rows: Sequence[int]) -> tuple[list[tuple[Any, CotangentSplit]], TreeSpec]:
    """Join the outputs of slices with these numbers of samples: samples are concatenated, means averaged.

    >>> pairs, _ = side_by_side([torch.zeros(2), torch.ones(1)], [2, 1])
    >>> pairs[0][0]
    tensor([0., 0., 1.])
    """
    if not any(rows):  # an idle slice: a neighbour's sample with weight 0
        rows = [1, *rows[1:]]
    _, structure = tree_flatten(outputs[0])
    columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
    return [_joined(column, rows) for column in columns], structure


def _joined(column: Sequence[Any], rows: Sequence[int]) -> tuple[Any, CotangentSplit]:
    first = column[0]
    if not isinstance(first, Tensor):
        return first, _nowhere
    needs = any(x.requires_grad for x in column)
    if first.ndim and all(len(x) == max(row, 1) for x, row in zip(column, rows, strict=True)):
        ends = [sum(rows[: turn + 1]) for turn in range(len(rows))]
        joined = torch.cat([x.detach()[:row] for x, row in zip(column, rows, strict=True)])

        def split_cotangent(turn: int, g: Tensor) -> tuple[Tensor, Tensor]:
            return column[turn][: rows[turn]], g[ends[turn] - rows[turn] : ends[turn]].clone()

        return joined.requires_grad_(needs), split_cotangent
    if not first.ndim and first.is_floating_point():
        shares = [row / sum(rows) for row in rows]
        mean = torch.stack([x.detach() * share for x, share in zip(column, shares, strict=True)]).sum()
        return mean.requires_grad_(needs), lambda turn, g: (column[turn], g * shares[turn])
    raise LayoutError(
        f"reproducible=True: the module returned a tensor of shape {tuple(first.shape)} for a slice of {rows[0]} samples: it "
        "is neither a row for each sample nor a mean over them. Return one of these."
    )


def _nowhere(turn: int, g: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("what is no tensor has no gradient")


def refuse_unsliced(paths: Sequence[str], given: Sequence[Any], leaves: Sequence[Any], counted: Counted) -> None:
    """Raise unless the arguments of a model can be sliced by their first dim, and none needs a gradient.

    Args:
        paths, given: the arguments in (args, kwargs), objects among them.
        leaves: their tensors.
        counted: number of samples.
    """
    if wrong := [f"{path[3:]} is a {type(x).__name__}" for path, x in zip(paths, given, strict=True) if is_opaque(x)]:
        raise LayoutError(
            f"reproducible=True: arguments must be tensors, or containers of them, to be cut into slices; {', '.join(wrong)}. "
            "Make such an object in the model's forward."
        )
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if any(x.requires_grad for x in tensors):
        raise LayoutError(
            "reproducible=True: arguments of the model must not need a gradient, as the output of another call does: slices "
            "are cut off from its graph. detach() them, or leave reproducible=True out."
        )
    rows, samples = counted.rows, counted.known
    if rows is None or samples is None or rows == max(samples, 1):
        return
    if rows % max(samples, 1) or not all(x.is_contiguous() for x in tensors if x.ndim and len(x) == rows):
        raise LayoutError(
            f"reproducible=True: the first dim of arguments must have a row for each of {samples} samples, got {rows}. Give "
            "samples first (batch_first=True), or leave reproducible=True out."
        )
