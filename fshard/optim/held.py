"""What no copy of an optimizer can do: steps of one object, state that is no parameter's, parameters that it knows itself."""

from __future__ import annotations

import dis
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.optim.copies import is_method
from fshard.optim.foreign import is_torchs

_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque, weakref.WeakSet)


def refuse_replaced(given: torch.optim.Optimizer) -> None:
    """Raise if the methods of an optimizer are not those of its class, but for a scheduler that notes its steps."""
    cls, own = type(given), vars(given)
    step = own.get("step")
    noted = getattr(step, "_wrapped_by_lr_sched", False) and getattr(step, "__wrapped__", None) is cls.step
    if (step is not None and not noted) or "zero_grad" in own:
        name = "zero_grad" if "zero_grad" in own else "step"
        raise OptimizerError(
            f"{cls.__name__}: the {name} of this one optimizer has been replaced. Write a class with that {name}."
        )
    if is_torchs(cls) and not inspect.unwrap(cls.step).__module__.startswith("torch.optim."):
        raise OptimizerError(
            f"{cls.__name__}: the step of torch's own class has been replaced. Write a subclass with that step."
        )


def refuse_hooks_of_all(given: torch.optim.Optimizer) -> None:
    """Raise if there are hooks of all optimizers' steps: boosted ones need not be stepped by torch, or more than once."""
    module: Any = sys.modules[torch.optim.Optimizer.__module__]
    hooks = (*module._global_optimizer_pre_hooks.values(), *module._global_optimizer_post_hooks.values())
    if any(not str(getattr(hook, "__module__", "")).startswith(("torch.", "fshard.")) for hook in hooks):
        raise OptimizerError(
            f"{type(given).__name__}: hooks of the steps of all optimizers are not called. Call them beside step()."
        )


def refuse_shared(given: torch.optim.Optimizer) -> None:
    """Raise if what an optimizer steps, or remembers, is another's or no parameter's."""
    if missing := [name for name in ("param_groups", "state") if name not in vars(given)]:
        raise OptimizerError(
            f"{type(given).__name__}: its {' and '.join(missing)} belong to another optimizer. Boost that one."
        )
    if shared := [f"state[{key!r}]" for key in given.state if not isinstance(key, Tensor)]:
        raise OptimizerError(
            f"{type(given).__name__}: {', '.join(shared)} would be lost. What is kept from step to step are tensors and "
            "numbers in state[param]."
        )


def refuse_held(given: torch.optim.Optimizer) -> None:
    """Raise naming where an optimizer has its parameters, or knows them by id(): a copy has others."""
    params = {id(x) for group in given.param_groups for x in group["params"]}
    others = ("state", "param_groups", "step")
    own = {name: x for name, x in vars(given).items() if name not in others and not is_method(x, given)}
    groups = {
        f'param_groups[{at}]["{name}"]': x
        for at, group in enumerate(given.param_groups)
        for name, x in group.items()
        if name != "params"
    }
    if held := [name for name, x in (own | groups | _containers_of(type(given))).items() if _holds(x, params, given)]:
        raise OptimizerError(
            f"{type(given).__name__} holds parameters of the model in {', '.join(held)}, and these go when it is boosted. Its "
            "step() is to find them in param_groups."
        )


def _holds(x: Any, params: set[int], given: object) -> bool:
    """Return whether any of these tensors, or its id, is reached from an object, but not by way of the optimizer."""
    left, seen = [x], {id(given)}
    while left:
        x = left.pop()
        if isinstance(x, Tensor):
            if id(x) in params:
                return True
        elif isinstance(x, int):
            if x in params:
                return True
        elif id(x) not in seen and not isinstance(x, type | ModuleType):
            seen.add(id(x))
            left += _inside(x)
    return False


def _inside(x: Any) -> Iterator[Any]:
    """Yield what an object leads to, through attributes, containers and what a function was made with."""
    yield from vars(x).values() if hasattr(x, "__dict__") else ()
    yield from x.values() if isinstance(x, Mapping) else ()
    yield from x if isinstance(x, _CONTAINERS) else ()
    if isinstance(x, MethodType):
        yield x.__self__
    if isinstance(x, FunctionType):
        yield from (value for value in _closure(x).values() if isinstance(value, (*_CONTAINERS, Tensor, FunctionType)))
    if isinstance(x, partial):
        yield from (x.func, x.args, x.keywords)
    if isinstance(x, weakref.ref):
        yield x()


def _containers_of(cls: type) -> dict[str, Any]:
    """Return containers that functions of a class, and of those that it is made of, have from around them, by their names."""
    found: dict[str, Any] = {}
    for f in (f for of in cls.__mro__ if not of.__module__.startswith("torch.") for f in vars(of).values()):
        f = inspect.unwrap(f) if callable(f) else f
        if isinstance(f, FunctionType):
            names = {name: f.__globals__[name] for name in _globals(f.__code__) if name in f.__globals__}
            found |= {f"{name} of {f.__qualname__}": x for name, x in (names | _closure(f)).items()}
    return {name: x for name, x in found.items() if isinstance(x, _CONTAINERS)}


def _closure(f: FunctionType) -> dict[str, Any]:
    """Return the variables of functions around one that it reads; those that have no value yet are left out."""
    found: dict[str, Any] = {}
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the names of a module that code reads."""
    yield from (one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)
