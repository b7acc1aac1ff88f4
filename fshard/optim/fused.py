"""When torch's fused kernels may be used: one pass over memory for a whole optimizer step.

They read tensors as plain runs of numbers, so every shard and its state must lie contiguous, on a device that has the
kernels, in a dtype that they are right for: on the CPU, torch's fused SGD is wrong in half precision.  The ends of a run
are computed by other instructions than its middle, so fused bits depend on where a tensor is cut; foreach bits do not.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.optim.cells import Cells
from fshard.optim.rules import Rule

_FULL = (torch.float32, torch.float64)
_DTYPES = {"cpu": _FULL, "cuda": (*_FULL, torch.float16, torch.bfloat16)}


def fused_or(fused: Rule, rule: Rule, wanted: bool | None) -> Rule | None:
    """Return a rule that uses a fused kernel where it can (wanted: None) or must (True); None if it is not wanted."""
    if wanted is False:
        return None

    def chosen(cells: Cells, lr: float) -> None:
        for kind in cells.kinds():
            if not (filled := kind.filled()).params:
                continue
            kind = filled.real()
            if qualifies(kind):
                fused(replace(kind, grads=[grad.contiguous() for grad in kind.grads]), lr)
            elif wanted:
                raise OptimizerError(
                    f"fused=True, but for parameters of {kind.params[0].dtype} on {kind.params[0].device} there is no fused "
                    "kernel that can be trusted, or they are not contiguous. Leave fused=None."
                )
            else:
                rule(kind, lr)

    return chosen


def qualifies(cells: Cells) -> bool:
    """Return whether a fused kernel can write these cells of one kind."""
    param = cells.params[0]
    return param.dtype in _DTYPES.get(param.device.type, ()) and all(
        x.is_contiguous() and x.dtype == param.dtype for x in chain(cells.params, *cells.state.values())
    )


def step_tensors(cells: Cells) -> list[Tensor]:
    """Return each cell's count of steps as the kernels want it: on the cell's device, one tensor for each count."""
    made = {t: torch.full((), t, dtype=torch.float32, device=cells.params[0].device) for t in set(cells.steps)}
    return [made[t] for t in cells.steps]
