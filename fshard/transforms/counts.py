"""The weight of a part of the batch: its number of samples, or what `weight=` returns for the part or for each sample.

A part of weight 0 adds nothing, even if its loss is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.tree import PyTree

Weight = Callable[[PyTree], Tensor | int | float]


class Count(NamedTuple):
    """The weight of a slice, what its gradient is multiplied by, and the weight of each sample if that is known."""

    weight: float
    share: float
    each: Tensor | None = None


def refuse_weights(weights: Sequence[float]) -> None:
    """Raise if a weight is negative or not finite."""
    wrong = [str(weight) for weight in weights if not 0 <= weight < inf]
    if wrong:
        raise LayoutError(
            f"weight= gave {', '.join(wrong)}: what a part of the batch counts for is finite and at least 0."
        )


def something(total: float) -> float:
    """Return the weight of the whole batch, which must not be 0."""
    if not total:
        raise LayoutError("weight= gave 0 for all of the batch, which has no mean loss then. Leave the batch out.")
    return total


def weights_of(weight: Any, samples: int | None) -> Tensor:
    """Return the weight of a part, or of each of its samples, in float64."""
    if isinstance(weight, Real) or (isinstance(weight, Tensor) and (weight.numel() == 1 or weight.shape == (samples,))):
        found = torch.as_tensor(weight, dtype=torch.float64)
        return found if found.shape == (samples,) else found.reshape(())
    found = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
    raise LayoutError(
        f"weight= has to return one number for a part of the batch, or one for each sample; found {found}."
    )


def added(weights: Tensor) -> Tensor:
    """Add up the weights of samples; if one is negative, return that, for `refuse_weights`."""
    return torch.where((weights < 0).any(), weights.amin(), weights.sum())


def weighted(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of losses; a loss of weight 0 need not be finite."""
    total = weights.sum()
    shares = (weights / torch.where(total > 0, total, 1)).to(losses)
    return torch.where(weights > 0, losses * shares, 0).sum()
