"""What a part of the batch counts for: its samples, or what `weight` says, of the part or of each sample in it.

What counts for nothing adds nothing, even if its loss is no number; nothing counts less.
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
    """What a slice counts for, and what its gradient is multiplied by."""

    weight: float
    share: float
    each: Tensor | None = None
    """What each sample counts for, if that is known."""


def refuse_weights(weights: Sequence[float]) -> None:
    """Raise if something counts less than nothing, or for no number."""
    wrong = [str(weight) for weight in weights if not 0 <= weight < inf]
    if wrong:
        raise LayoutError(
            f"weight= gave {', '.join(wrong)}: what a part of the batch counts for is finite and at least 0."
        )


def something(total: float) -> float:
    """Return what the whole batch counts for."""
    if not total:
        raise LayoutError(
            "weight= gave 0 for all of the batch: its mean loss would be one over nothing. Leave the batch out."
        )
    return total


def weights_of(weight: Any, samples: int | None) -> Tensor:
    """Return what a part counts for, or each of its samples."""
    if isinstance(weight, Real) or (isinstance(weight, Tensor) and (weight.numel() == 1 or weight.shape == (samples,))):
        found = torch.as_tensor(weight, dtype=torch.float64)
        return found if found.shape == (samples,) else found.reshape(())
    found = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
    raise LayoutError(
        f"weight= has to return one number for a part of the batch, or one for each sample; found {found}."
    )


def added(weights: Tensor) -> Tensor:
    """Return what all samples count for together, or what is wrong with one of them."""
    return torch.where((weights < 0).any(), weights.amin(), weights.sum())


def weighted(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of losses that count for so much; what counts for nothing may be no number."""
    total = weights.sum()
    shares = (weights / torch.where(total > 0, total, 1)).to(losses)
    return torch.where(weights > 0, losses * shares, 0).sum()
