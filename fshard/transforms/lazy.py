"""Layers that are described first, and built later where they are needed: no device ever has the whole model.

    lazy(nn.Linear, 8, 8)        a Linear without memory, which knows how it is made        count it, cut it, name it
    built(stage, seed=0)         the stage with memory, each layer drawn by (seed, its name)

A layer's draws depend on the seed and on its name in the whole model alone: not on who builds it, when, or what else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fshard.copying import copied
from fshard.errors import ModuleError
from fshard.transforms.randomness import keyed_random

Args = ParamSpec("Args")
Module = TypeVar("Module", bound=nn.Module)
_RECIPE = "_fshard_recipe"


def lazy(factory: Callable[Args, Module], *args: Args.args, **kwargs: Args.kwargs) -> Module:
    """Return the module that a factory makes, without memory; `built` gives it some.

    >>> layer = lazy(nn.Linear, 1_000_000, 1_000_000)
    >>> layer.weight.shape, layer.weight.device
    (torch.Size([1000000, 1000000]), device(type='meta'))
    """
    with torch.device("meta"):
        made = factory(*args, **kwargs)
    if not isinstance(made, nn.Module):
        raise ModuleError(f"fs.lazy takes what makes a module; {factory!r} has made {type(made).__name__}.")
    unknown = [name for name, x in made.named_parameters() if is_lazy(x)]
    if unknown:
        raise ModuleError(
            f"fs.lazy: {', '.join(unknown)} of {type(made).__name__} has no shape before a first call, so nobody can tell what "
            "it is without building it. Say its sizes: nn.Linear for nn.LazyLinear."
        )
    vars(made)[_RECIPE] = partial(factory, *args, **kwargs)
    return made


def built(module: Module, *, seed: int) -> Module:
    """Return a module, a stage for instance, with its lazy layers built; what has memory already is shared.

    >>> import fshard as fs
    >>> first, second = fs.split_stages([lazy(nn.Linear, 2, 64), nn.ReLU(), lazy(nn.Linear, 64, 1)], 2, "parameters")
    >>> [(name, tuple(x.shape)) for name, x in built(second, seed=0).named_parameters()]
    [('2.weight', (1, 64)), ('2.bias', (1,))]
    """
    known = {id(x): x for _, x in _tensors(module) if not x.is_meta}
    made = copied(module, {**known})
    for name, part in made.named_modules():
        recipe = vars(part).get(_RECIPE)
        if recipe is not None:
            with keyed_random(seed, name):
                _fill(part, recipe(), known)
    missing = [name for name, x in _tensors(made) if x.is_meta]
    if missing:
        raise ModuleError(
            f"fs.built of {type(module).__name__}: {', '.join(missing)} has no memory, and nobody says how it is made. "
            "Make its layer by fs.lazy."
        )
    return made


def _fill(part: nn.Module, real: nn.Module, known: dict[int, Tensor]) -> None:
    """Put the tensors of a module into one like it; those that are tied stay so."""
    for name, x in _tensors(real):
        path, _, key = name.rpartition(".")
        owner: Any = part.get_submodule(path)
        setattr(owner, key, known.setdefault(id(getattr(owner, key)), x))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
