"""New optimizers exactly like one that was made, of any class, without its constructor: nobody knows what that takes.

    given    its class and attributes    param_groups of the model's parameters    state: none, or as __init__ made it
    copy     the same                    one group, of other parameters            the same for these

Whether a copy does what the given one would do is found out in `trials`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from math import prod
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.optim.contract import Optimizer
from fshard.optim.foreign import Foreign, is_torchs

_RATE = 0.125
"""A learning rate that moves parameters, where a schedule may begin with 0; each group has another part of it."""


@dataclass(frozen=True)
class Group:
    """A group of an optimizer that was made.

    Args:
        given: the optimizer.
        at: the number of the group.
        begun: what its constructor has put into the state of each parameter, made for another.
        more: options that come before those of the group.
        cut: names of options that have an item for each parameter: a copy has those of its own.
    """

    given: torch.optim.Optimizer
    at: int
    begun: dict[str, Callable[[Tensor], Any]]
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    cut: frozenset[str] = frozenset()

    @staticmethod
    def of(given: torch.optim.Optimizer, at: int) -> Group:
        return Group(given, at, _begun(given, at))

    @property
    def options(self) -> dict[str, Any]:
        """What stands in the group now."""
        return self.given.param_groups[self.at]

    def by_place(self) -> frozenset[str]:
        """Return the names of options that have as many items as the group has parameters."""
        n = len(self.options["params"])
        return frozenset(name for name, x in self.options.items() if type(x) in (list, tuple) and len(x) == n) - {
            "params"
        }

    def cutting(self, names: Iterable[str]) -> Group:
        """Return the group with these options cut, as far as it has them."""
        return replace(self, cut=self.by_place() & {*names})

    def moving(self) -> Group:
        """Return the group with a learning rate that moves parameters, and without a kernel that rounds by the place."""
        group = self.options
        more: dict[str, Any] = {"fused": False} if group.get("fused") else {}
        if (lr := group.get("lr")) is not None:
            rate = _RATE / (1 + self.at)
            more["lr"] = torch.full_like(lr, rate) if isinstance(lr, Tensor) else rate
        return replace(self, more=more)

    def pure(self, examples: Iterable[Tensor], elementwise: bool, place: Callable[[str], int]) -> Optimizer:
        """Return the pure optimizer whose steps are those of copies; `place` is that of a parameter, by its path."""

        def make(params: list[Tensor], more: dict[str, Any], places: Sequence[int]) -> torch.optim.Optimizer:
            fused = {name: x for name, x in more.items() if name == "fused"}  # the learning rate is read off the group
            return copied([(self, params, places)], fused)

        name = type(self.given).__name__
        of = Foreign(make, name, f"{name} cannot be made", is_torchs(type(self.given)))
        fused, by_path = bool(self.options.get("fused")), place if self.cut else None
        return of.pure(lambda count: 0.0, examples, elementwise=elementwise, fused=fused, place=by_path)

    def filled(self, params: list[Tensor], places: Sequence[int], more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the group with other parameters, which stand for those at some places."""
        options = {**self.options, **self.more, **more, "params": params}
        return options | {name: type(x := options[name])(x[place] for place in places) for name in self.cut}


def copied(
    groups: Iterable[tuple[Group, list[Tensor], Sequence[int]]], more: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer like the given one that has these groups of these parameters, of some places."""
    groups = [*groups]
    given = groups[0][0].given
    new = object.__new__(type(given))
    own: dict[str, Any] = vars(new)
    for name, x in vars(given).items():
        if is_method(x, given):
            x = MethodType(x.__func__, new)
        is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        own[name] = dict[int, Any]() if is_hooks else x
    own.pop("step", None)  # a scheduler's
    own["state"] = state = defaultdict[Tensor, dict[str, Any]](dict[str, Any])
    own["param_groups"] = [group.filled(params, places, more) for group, params, places in groups]
    for group, params, _ in groups:
        for param in params if group.begun else ():
            state[param] = {name: make(param) for name, make in group.begun.items()}
    return new


def is_method(x: Any, given: torch.optim.Optimizer) -> TypeGuard[MethodType]:
    """Return whether something is a method of an optimizer."""
    return isinstance(x, MethodType) and x.__self__ is given


def _begun(given: torch.optim.Optimizer, at: int) -> dict[str, Callable[[Tensor], Any]]:
    """Return what the constructor has put into the state of the parameters of a group, as it would for others.

    That is a number for each, or a tensor of one number; raise if it is anything else.
    """
    given = _made_small(given, at)
    params = sorted(given.param_groups[at]["params"], key=lambda param: -param.ndim)
    states = [(param, given.state.get(param, {})) for param in params]
    found: dict[str, Callable[[Tensor], Any]] = {}
    wrong: dict[str, None] = {}
    for name in dict.fromkeys(name for _, state in states for name in state):
        made = [_maker(param, state.get(name)) for param, state in states]
        found[name] = lambda param, make=made[0]: make and make(param)
        for (param, state), make in zip(states, made, strict=True):
            if name not in state or make is None or made[0] is None or not same(made[0](param), state[name]):
                wrong[f'state[param]["{name}"]'] = None
    if wrong:
        raise OptimizerError(
            f"{type(given).__name__}: {', '.join(wrong)} would be lost, which is not one number for all parameters. "
            "Boost it before its first step, and let step() make its state where state[param] is empty."
        )
    return found


def _made_small(given: torch.optim.Optimizer, at: int) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and options for small tensors, if the state that it begins with has no memory.

    What its constructor was given is known if all of that stands in its defaults.
    """
    group = given.param_groups[at]
    begun = (x for param in group["params"] for x in given.state.get(param, {}).values())
    if not any(isinstance(x, Tensor) and x.is_meta for x in begun):
        return given
    kind: Any = type(given)
    small = [_counted([min(n, 2) for n in param.shape], param.dtype) for param in group["params"]]
    try:
        _, *options = signature(kind).parameters.values()
        one = kind(small, **{option.name: given.defaults[option.name] for option in options})
    except Exception:  # of any kind: its constructor is the user's own
        one = None
    if one is None:
        raise OptimizerError(
            f"{kind.__name__}: its state was made without memory, as its parameters are, and another with the same options "
            "would not begin alike or cannot be made. Let step() make its state where state[param] is empty, or keep all that "
            "the constructor is given in defaults."
        )
    one.param_groups[:0] = [{"params": []}] * at
    return one


def _counted(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of several numbers: a state that is made of them is not one number."""
    return torch.arange(1, prod(shape) + 1).to(dtype).reshape(tuple(shape))


def _maker(param: Tensor, value: Any) -> Callable[[Tensor], Any] | None:
    """Return what makes a state like this one for another parameter."""
    if not isinstance(value, Tensor):
        return (lambda other: value) if value is None or isinstance(value, int | float) else None
    dtype = None if value.dtype == param.dtype else value.dtype
    fill = float(value.flatten()[0]) if value.numel() and not value.is_complex() else 0.0
    if value.shape == param.shape and bool((value == fill).all()):
        return lambda other: torch.full_like(other, fill, dtype=dtype, requires_grad=False)
    return (lambda other: value.detach().clone()) if value.ndim == 0 else None


def moves(x: Tensor) -> bool:
    """Return whether a parameter has anything that steps could move."""
    return x.numel() > 0 and (x.is_floating_point() or x.is_complex())


def device_of(x: Tensor) -> torch.device:
    """Return where a parameter lies, or one like it would."""
    return torch.device("cpu") if x.is_meta else x.device


def same(one: Any, other: Any) -> bool:
    """Return whether tensors have the same dtype, shape and numbers, or other things are equal."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and bool(one == other)
    same = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    return same and bool(((one == other) | (one.isnan() & other.isnan())).all())
