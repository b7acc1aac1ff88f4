"""Criteria that keep something from one call to the next: a count, running centres.  In stages they are called otherwise.

              calls in a step         who is called
torch         one                     the module that the loop has
in stages     one a microbatch        the one on the last stage's device; on others nobody
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.copying import contents_of
from fshard.transforms.holders import INTERNAL, are_same, holds, items_of

Criterion = Callable[[Any, Any], Tensor]
_LOOKS = 16
"""In so many first calls it is looked whether a criterion keeps something."""


class _Noted(NamedTuple):
    """What an attribute or a buffer was, and held."""

    x: Any
    items: list[Any]
    values: Tensor | None

    def is_as_noted(self, now: Any) -> bool:
        """Return whether it is the same, and holds the same."""
        if not are_same([self.x], [now]) or (holds(now) and not are_same(items_of(now), self.items)):
            return False
        return self.values is None or torch.allclose(self.values, now.detach(), rtol=0, atol=0, equal_nan=True)


def watched_criterion(criterion: Criterion) -> Criterion:
    """Return a criterion that warns once if a call changes what modules in it keep; it is looked at in its first calls.

    >>> watched_criterion(nn.functional.mse_loss) is nn.functional.mse_loss
    True
    """
    parts = [own for module in _modules_in(criterion) for own in module.named_modules(prefix=type(module).__name__)]
    looks = _LOOKS if parts else 0
    if not looks:
        return criterion

    def call(y: Any, labels: Any) -> Tensor:
        nonlocal looks
        if not looks:
            return criterion(y, labels)
        looks -= 1
        before = {name: _noted(x) for name, x in _kept_by(parts)}
        loss = criterion(y, labels)
        after = dict(_kept_by(parts))
        changed = [name for name, x in before.items() if name not in after or not x.is_as_noted(after[name])]
        changed += after.keys() - before.keys()
        if changed:
            looks = 0  # it is told once
            _warn(sorted(changed))
        return loss

    return call


def _modules_in(criterion: Any) -> Iterator[nn.Module]:
    """Yield the module that a criterion is, or those that it has at hand."""
    held: list[Any] = [criterion]
    if isinstance(criterion, MethodType):
        held = [criterion.__self__]
    elif isinstance(criterion, partial):
        held = [criterion.func, *criterion.args, *criterion.keywords.values()]
    elif isinstance(criterion, FunctionType):
        held = [x for cell in criterion.__closure__ or () for x in contents_of(cell)]
    yield from (x for x in held if isinstance(x, nn.Module))


def _kept_by(parts: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes and buffers of modules that are not without memory."""
    for path, part in parts:
        own = vars(part)
        yield from ((f"{path}.{key}", x) for key, x in own.items() if key not in INTERNAL)
        yield from ((f"{path}.{key}", x) for key, x in own["_buffers"].items() if x is None or type(x) is Tensor)


def _noted(x: Any) -> _Noted:
    values = x.detach().clone() if type(x) is Tensor and x.layout is torch.strided and not x.is_meta else None
    return _Noted(x, items_of(x) if holds(x) else [], values)


def _warn(names: list[str]) -> None:
    warnings.warn(
        f"{', '.join(names)} was changed by the criterion, which in stages is called once for each microbatch and not for a "
        "step, and on the devices of the last stage alone. Keep that in the loop, of the loss and the outputs that "
        "execute_pipeline returns, or in a layer of the model.",
        stacklevel=2,
    )
