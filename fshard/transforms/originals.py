"""Parameters that were given, and in whose place others are trained, as a plugin lays them: what is done to them by mistake.

first, second = SGD(model.head.parameters(), lr=0.1), SGD(model.body.parameters(), lr=0.01)
model, first, *_ = booster.boost(model, first)
first.step(); second.step()                     second has what was given: no gradient comes there, and nothing is stepped
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fshard.errors import OptimizerError

_names: Any = WeakIdKeyDictionary()


def note_originals(module: nn.Module) -> None:
    """Note that others are trained in the place of a module's parameters."""
    _watch_optimizers()
    for name, x in module.named_parameters():
        _names[x] = name


def originals_among(xs: Iterable[Tensor]) -> str:
    """Return the names of those of some tensors that were given, and are not what is trained."""
    return ", ".join(sorted({_names[x] for x in xs if x in _names}))


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_idle)


def _refuse_idle(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an optimizer is to step what was given, and there is no gradient of any of it."""
    if len(args) > 1 or kwargs:  # a closure, which makes gradients
        return
    names: list[str] = []
    for x in (x for group in optimizer.param_groups for x in group["params"]):
        if x in _names:
            if x.grad is not None:
                return
            names.append(_names[x])
    if names:
        told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise OptimizerError(
            f"{type(optimizer).__name__}.step() has no gradients of {told}: these are the parameters that were given, and not "
            "those that are trained, which lie as the plugin says. One model has one optimizer: boost it with one that has a "
            "group for each part, or with fs.optim.by_label(...) where parts want different ones."
        )
