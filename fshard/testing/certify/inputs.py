"""Inputs whose sums have no rounding, and so the same bits in any order."""

from __future__ import annotations

from typing import Any

import torch

from fshard.mesh.tree import PyTree
from fshard.optim.leaves import Leaves
from fshard.testing.certify.beside import frozen_as, is_floating


def dyadic(tree: PyTree, seed: int) -> PyTree:
    """Draw all floating tensors of a tree anew, as multiples of 1/8 from -1 to 1; all else stays as it is.

    Sums of 8,000,000 of them, and of 250,000 products of two, are exact in float32 in any order.  So what is linear has
    the same bits on any layout.

    >>> import torch
    >>> drawn = dyadic({"w": torch.ones(2, 3), "count": torch.tensor(3)}, seed=0)
    >>> drawn["w"], drawn["count"]
    (tensor([[-0.1250, -0.6250,  0.5000],
            [ 1.0000, -0.7500, -1.0000]]), tensor(3))
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(x: Any) -> Any:
        if not is_floating(x):
            return x
        real = torch.view_as_real(x) if x.is_complex() else x
        numbers = (torch.randint(-8, 9, real.shape, generator=generator) / 8).to(real)
        return frozen_as(x, torch.view_as_complex(numbers) if x.is_complex() else numbers)

    return Leaves.of(tree).mapped(drawn)
