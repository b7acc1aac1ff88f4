"""Checks of a Booster's arguments: one error with everything that is wrong, before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fshard.booster.torch_style import BoostedOptimizer, Model
from fshard.errors import FshardError, ModuleError
from fshard.optim.torch_instances import OptimizerSource, optimizer_source
from fshard.transforms.module.lazy import undescribed

BOOSTED = WeakSet[nn.Module]()
"""Modules that run in place."""


def taken(
    who: str, model: Any, optimizer: Any, criterion: Any = None, dataloader: Any = None, lr_scheduler: Any = None
) -> OptimizerSource:
    """Return the source of an optimizer for a model's parameters; raise with all that is invalid.

    >>> taken("boost", nn.Linear(2, 2), None, "mse", lr_scheduler="cosine")
    Traceback (most recent call last):
    fshard.errors.ModuleError: boost: criterion is called, 'mse' cannot be; lr_scheduler has a step(), 'cosine' has none.
    """
    wrong, lost, source = (
        [*_of_model(model), *(_without_memory(model) if who == "boost" else ())],
        None,
        OptimizerSource(),
    )
    if isinstance(optimizer, BoostedOptimizer):
        wrong.append("the optimizer has been boosted already: make one of model.unwrap().parameters()")
    elif not (wrong and isinstance(optimizer, torch.optim.Optimizer)):
        try:
            source = optimizer_source(optimizer, {} if wrong else dict(model.named_parameters()), who)
        except FshardError as error:
            lost = error
    others = [*_of_others(optimizer, criterion, dataloader, lr_scheduler)]
    if lost is not None and not wrong + others:
        raise lost
    errors = [*wrong, *([] if lost is None else [str(lost).removeprefix(f"{who}: ").rstrip(".")]), *others]
    if errors:
        raise ModuleError(f"{who}: {'; '.join(errors)}.")
    return source


def _of_model(model: Any) -> Iterator[str]:
    if not isinstance(model, nn.Module):
        yield f"the model is a module, not {type(model).__name__}: for a function there is fs.train_step"
        return
    if model in BOOSTED or isinstance(model, Model):
        yield "the model has been boosted already, perhaps by another device: each device makes its own, inside of main"
    if lazy := [name for name, x in _registered(model) if is_lazy(x)]:
        yield f"{', '.join(lazy)} of the model has no shape yet: run it once on an example first: model(example)"
    if compiled := [path or "the model" for path, part in model.named_modules() if _is_compiled(part)]:
        yield (
            f"{', '.join(compiled)} is compiled, and a compiled module does not gather its parameters: compile functions "
            "that it calls, those of parameters as fs.with_unsharded_params(torch.compile(fn))"
        )


def _registered(model: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(model, nn.Module):
        yield from (*model.named_parameters(), *model.named_buffers())


def _without_memory(model: Any) -> Iterator[str]:
    registered = {name for name, _ in _registered(model)}
    missing = [name for name in undescribed(model) if name in registered] if registered else []
    if missing:
        several = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        yield (
            f"{', '.join(missing[:3])}{several} of the model have no memory: describe its layers by fs.lazy(Block, config)"
        )


def _is_compiled(part: nn.Module) -> bool:
    """Return True if a module with parameters is compiled, by torch.compile or in place."""
    own = vars(part)
    wrapped = "_torchdynamo_orig_callable" in own or own.get("_compiled_call_impl") is not None
    return wrapped and any(True for _ in part.parameters())


def _of_others(optimizer: Any, criterion: Any, dataloader: Any, lr_scheduler: Any) -> Iterator[str]:
    if criterion is not None and not callable(criterion):
        yield f"criterion is called, {_shown(criterion)} cannot be"
    if not (dataloader is None or hasattr(dataloader, "__iter__") or hasattr(dataloader, "__getitem__")):
        yield f"dataloader is iterated, {_shown(dataloader)} cannot be"
    if lr_scheduler is None:
        return
    if not callable(getattr(lr_scheduler, "step", None)):
        yield f"lr_scheduler has a step(), {_shown(lr_scheduler)} has none"
    elif getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
        yield f"lr_scheduler writes into another optimizer: {type(lr_scheduler).__name__} is to be made of this one"


def _shown(x: Any) -> str:
    return repr(x) if isinstance(x, str | int | float) else type(x).__name__
