"""Criteria that keep something from one call to another: a count, running centres.  They may be called more often here.

                     calls in a step                  who is called
torch                one                              the one that the loop has
in stages            one a microbatch                 the one on the last stage's device; on others nobody
functional steps     one a slice and device at hand   one for all devices of a virtual mesh outside of `run`

What they keep stands in modules, in objects of the user's own, or in variables of functions: closures, defaults, globals.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.copying import CONTAINERS, MANY, contents_of, slots_of
from fshard.transforms.holders import ATOMS, INTERNAL, are_same, holds, is_array, items_of

Criterion = Callable[[Any, Any], Tensor]
Part = tuple[str, Any]
"""A module, an object or a function, and what stands before the names of what it keeps."""
_LOOKS = 16
"""In so many first calls it is looked whether a criterion keeps something."""
_LARGE = 1 << 20
"""Tensors of more elements are not copied to be compared: whoever writes to them counts up their version."""
_LIBRARIES = {"torch", "fshard", "numpy", "builtins"} | (
    sys.stdlib_module_names - {"types", "argparse"}
)  # of a SimpleNamespace
"""Whose functions and objects are no criteria that keep something: loggers, clocks, optimizers."""


class _Noted(NamedTuple):
    """What an attribute, a buffer or a variable was, and held."""

    x: Any
    items: list[Any]
    values: list[Tensor | None]

    def is_as_noted(self, now: Any) -> bool:
        """Return whether it is the same, and holds the same."""
        if isinstance(self.x, Tensor) and self.values[0] is not None and isinstance(now, Tensor):
            return _are_equal(self.values[0], now)
        if not are_same([self.x], [now]) or (holds(now) and not are_same(items_of(now), self.items)):
            return False
        pairs = zip(self.values, _tensors_in(now, self.items), strict=True)
        return all(values is None or _are_equal(values, x) for values, x in pairs)


IN_STAGES = (
    "in stages is called once for each microbatch and not for a step, and on the devices of the last stage alone"
)
"""How often a criterion is called there, and where."""


def watched_criterion(criterion: Criterion, often: str, left: dict[Any, int] | None = None) -> Criterion:
    """Return a criterion that warns once if a call changes what it keeps; it is looked at in its first calls.

    `often` tells how it is called; `left` has how many looks are left, by the code of functions and the type of objects:
    those that are made anew in every step have it in common.

    >>> watched_criterion(nn.functional.mse_loss, IN_STAGES) is nn.functional.mse_loss
    True
    """
    key, left = _kind_of(criterion), {} if left is None else left
    looks = left.setdefault(key, _LOOKS)
    parts = [*_parts_of(criterion)] if looks else []
    if not parts:
        return criterion

    def call(y: Any, labels: Any) -> Tensor:
        if not left[key]:
            return criterion(y, labels)
        left[key] -= 1
        before = {name: _noted(x) for name, x in _kept_by(parts)}
        loss = criterion(y, labels)
        after = dict(_kept_by(parts))
        changed = [name for name, x in before.items() if name not in after or not x.is_as_noted(after[name])]
        changed += after.keys() - before.keys()
        if changed:
            left[key] = 0  # it is told once
            _warn(sorted(changed), often)
        return loss

    return call


def _kind_of(criterion: Any) -> Any:
    """Return the code of a function, or of what a partial or a method calls; of an object its type."""
    while isinstance(criterion, partial | MethodType):
        criterion = criterion.func if isinstance(criterion, partial) else criterion.__func__
    return criterion.__code__ if isinstance(criterion, FunctionType) else type(criterion)


def _parts_of(criterion: Any) -> Iterator[Part]:
    """Yield what a criterion is, or has at hand, if it may keep something."""
    seen, left = dict[int, Any](), [criterion]
    while left and len(seen) < MANY:
        x = left.pop(0)
        if id(x) in seen:
            continue
        seen[id(x)] = x  # held, so that no other object gets its id
        if isinstance(x, nn.Module):
            yield from x.named_modules(prefix=type(x).__name__)
        elif isinstance(x, FunctionType):
            variables = {} if _is_of_a_library(x) else dict(_variables_of(x))
            left += variables.values()
            if variables:
                yield "", x
        elif isinstance(x, MethodType):
            left += [x.__self__, x.__func__]
        elif isinstance(x, partial):
            left += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, (*CONTAINERS, tuple)):
            left += [] if len(x) > MANY else dict.values(x) if isinstance(x, dict) else x
        elif not isinstance(x, type | Tensor) and not _is_of_a_library(type(x)):
            left += _attributes_of(x).values()
            yield f"{type(x).__name__}.", x


def _is_of_a_library(x: Any) -> bool:
    return str(getattr(x, "__module__", "")).partition(".")[0] in _LIBRARIES


def _variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function finds by its names, in closures, defaults, attributes and globals, if that may be changed."""
    code, defaults = function.__code__, function.__defaults__ or ()
    free = zip(code.co_freevars, function.__closure__ or (), strict=True)
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    own = {
        **{name: function.__globals__[name] for name in code.co_names if name in function.__globals__},
        **{name: x for name, cell in free for x in contents_of(cell)},
        **dict(zip(names, defaults, strict=True)),
        **(function.__kwdefaults__ or {}),
        **vars(function),
    }
    yield from ((name, x) for name, x in own.items() if not isinstance(x, type))


def _attributes_of(x: Any) -> dict[str, Any]:
    return {**getattr(x, "__dict__", {}), **dict(slots_of(x))}


def _kept_by(parts: list[Part]) -> Iterator[tuple[str, Any]]:
    """Yield what is kept in attributes, buffers, frozen parameters and variables."""
    for path, part in parts:
        if isinstance(part, nn.Module):
            own = vars(part)
            tensors = chain(own["_buffers"].items(), own["_parameters"].items())
            yield from ((f"{path}.{key}", x) for key, x in own.items() if key not in INTERNAL)
            yield from ((f"{path}.{key}", x) for key, x in tensors if x is None or _is_plain(x))
        else:
            held = _variables_of(part) if isinstance(part, FunctionType) else _attributes_of(part).items()
            yield from ((path + key, x) for key, x in held if _is_data(x))


def _is_plain(x: Any) -> bool:
    """Return whether something is a tensor that nobody trains."""
    return type(x) is Tensor or (type(x) is nn.Parameter and not x.requires_grad)


def _is_data(x: Any) -> bool:
    """Return whether something is a value or holds values: an object beside a criterion may be changed by anybody."""
    return type(x) in ATOMS or _is_plain(x) or isinstance(x, CONTAINERS) or is_array(x)


def _noted(x: Any) -> _Noted:
    items = items_of(x) if holds(x) else []
    return _Noted(x, items, [_copy(each) for each in _tensors_in(x, items)])


def _tensors_in(x: Any, items: list[Any]) -> list[Tensor]:
    return [each for each in (x, *items) if isinstance(each, Tensor)]


def _copy(x: Tensor) -> Tensor | None:
    dense = x.layout is torch.strided and not (x.is_meta or x.is_nested or x.is_quantized)
    comparable = _is_plain(x) and dense and x.numel() <= _LARGE
    return x.detach().clone() if comparable else None


def _are_equal(values: Tensor, x: Tensor) -> bool:
    """Return whether a tensor has the values that were noted, in whatever dtype."""
    if values.shape != x.shape or values.device != x.device:
        return False
    wide = torch.promote_types(values.dtype, x.dtype)
    return torch.allclose(values.to(wide), x.detach().to(wide), rtol=0, atol=0, equal_nan=True)


def _warn(names: list[str], often: str) -> None:
    warnings.warn(
        f"{', '.join(names)} was changed by the criterion, which {often}. Keep that in the loop, of the loss and the outputs "
        "that come back, or in a layer of the model.",
        stacklevel=2,
    )
