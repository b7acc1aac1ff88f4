"""Layers that are described first, and built later where they are needed: no device ever has the whole model.

    lazy(nn.Linear, 8, 8)        a Linear without memory, which knows how it is made        count it, cut it, name it
    built(stage, seed=0)         the stage with memory, each layer drawn by (seed, its name)
    draw(model, 0, names, cut)   tensor after tensor, each handed over and let go

A layer's draws depend on the seed and on its name in the whole model alone: not on who builds it, when, or what else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fshard.transforms.old_copying import copied, held_by_attributes, reached_from
from fshard.errors import ModuleError
from fshard.mesh.layout import Layout
from fshard.mesh.placing import device_put
from fshard.mesh.sharded import Sharded
from fshard.mesh.spmd import held
from fshard.transforms.history import noted
from fshard.transforms.holders import ATOMS, INTERNAL, tensors_at
from fshard.transforms.randomness import folded, keyed_random

Args = ParamSpec("Args")
Module = TypeVar("Module", bound=nn.Module)
_RECIPE = "_fshard_recipe"


class _Recipe(NamedTuple):
    """How a layer is made, and the names of tensors that it has then."""

    make: Callable[[], nn.Module]
    names: frozenset[str]


def lazy(factory: Callable[Args, Module], *args: Args.args, **kwargs: Args.kwargs) -> Module:
    """Return the module that a factory makes, without memory; what trains it, or `built`, gives it some.

    It may be a layer or a whole model.  A factory that reads files, or does else what cannot be done without memory, makes all
    of its module at once: make a lazy layer of each part then.

    >>> layer = lazy(nn.Linear, 1_000_000, 1_000_000)
    >>> layer.weight.shape, layer.weight.device
    (torch.Size([1000000, 1000000]), device(type='meta'))
    """
    if not callable(factory) or isinstance(factory, nn.Module):
        found = "a module that is made already" if isinstance(factory, nn.Module) else repr(factory)
        raise ModuleError(
            f"fs.lazy takes what makes a module, and its arguments: fs.lazy(nn.Linear, 8, 8); found {found}."
        )
    try:
        with torch.device("meta"):
            made = factory(*args, **kwargs)
    except Exception as error:
        error.add_note(
            'fs.lazy calls a factory without memory first, as in torch.device("meta"), where no number can be looked at. Let '
            'it make those that it looks at with device="cpu", or make a lazy layer of each part.'
        )
        raise
    if not isinstance(made, nn.Module):
        raise ModuleError(f"fs.lazy takes what makes a module; {factory!r} has made {type(made).__name__}.")
    unknown = [name for name, x in made.named_parameters() if is_lazy(x)]
    if unknown:
        raise ModuleError(
            f"fs.lazy: {', '.join(unknown)} of {type(made).__name__} has no shape before a first call, so nobody can tell what "
            "it is without building it. Say its sizes: nn.Linear for nn.LazyLinear."
        )
    vars(made)[_RECIPE] = _Recipe(partial(factory, *args, **kwargs), frozenset(dict(_tensors(made))))
    return made


def built(module: Module, *, seed: int) -> Module:
    """Return a module, a stage for instance, with its lazy layers built; what has memory already is shared.

    >>> import fshard as fs
    >>> first, second = fs.split_stages([lazy(nn.Linear, 2, 64), nn.ReLU(), lazy(nn.Linear, 64, 1)], 2, "parameters")
    >>> [(name, tuple(x.shape)) for name, x in built(second, seed=0).named_parameters()]
    [('2.weight', (1, 64)), ('2.bias', (1,))]
    """
    _refuse_hidden("fs.built", module)
    own = dict(_tensors(module))
    known = {id(x): x for x in own.values() if not x.is_meta}

    def take(name: str, made: Tensor) -> None:
        known[id(own[name])] = _like(own[name], made)

    draw(module, seed, without_memory(module), take, "fs.built", at_once=True)
    return copied(module, {**known})


def _like(x: Tensor, made: Tensor) -> Tensor:
    """Return numbers as a parameter, if they were made for one."""
    if not isinstance(x, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=x.requires_grad)
    vars(parameter).update(vars(x))
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (registered := getattr(x, hooks)) is not None:
            setattr(parameter, hooks, registered)
    return parameter


def without_memory(module: nn.Module) -> list[str]:
    """Return the names of all tensors of a module that have no memory; "path.key[0]" is one that an attribute leads to."""
    return [name for name, x in _tensors(module) if x.is_meta]


def undescribed(module: nn.Module) -> list[str]:
    """Return the names of those without memory of which nobody says how they are made."""
    known = {id(x) for _, part, recipe in _described(module) for name, x in _tensors(part) if name in recipe.names}
    return [name for name, x in _tensors(module) if x.is_meta and id(x) not in known]


def drawn_attributes(module: nn.Module, seed: int, near: torch.device) -> dict[int, Tensor]:
    """Return what plain attributes of lazy layers hold, by the ids of what stands for it without memory."""
    _refuse_hidden("fs.lazy", module)
    known = {id(x) for x in (*module.parameters(), *module.buffers())}
    strange = {*undescribed(module)}  # which stay as they are
    own = {name: x for name, x in _tensors(module) if x.is_meta and id(x) not in known and name not in strange}
    drawn: dict[int, Tensor] = {}

    def take(name: str, made: Tensor) -> None:
        drawn[id(own[name])] = _like(own[name], made.to(near))

    draw(module, seed, own, take)
    return drawn


def standing_for(module: nn.Module, whole: nn.Module) -> dict[int, Tensor]:
    """Return what plain attributes of a structure hold, by the ids of what stands for it in a part of the model."""
    there, own = ({id(x) for x in (*one.parameters(), *one.buffers())} for one in (whole, module))
    known = {name: x for name, x in _tensors(whole) if id(x) not in there}
    return {id(x): known[name] for name, x in _tensors(module) if x.is_meta and id(x) not in own and name in known}


def forget_recipes(module: Module) -> Module:
    """Return a module whose layers know no more how they are made."""
    for _, part, _ in [*_described(module)]:
        del vars(part)[_RECIPE]
    return module


def _described(module: nn.Module) -> Iterator[tuple[str, nn.Module, _Recipe]]:
    """Yield the lazy layers of a module with their paths, and how they are made."""
    return ((path, part, vars(part)[_RECIPE]) for path, part in module.named_modules() if _RECIPE in vars(part))


def draw(
    module: nn.Module,
    seed: int,
    names: Collection[str],
    take: Callable[[str, Tensor], None],
    who: str = "fs.lazy",
    *,
    at_once: bool = False,
) -> None:
    """Make tensors of lazy layers, those of some names, and hand each over, by the first of its names.

    It is one tensor after the other, unless all of a layer are made `at_once`; their numbers are the same.
    """
    wanted = {*names}
    left = {id(x): name for name, x in reversed([*_tensors(module)]) if name in wanted and x.is_meta}
    for path, part, recipe in _described(module) if left else ():
        own = {key: x for key, x in _tensors(part) if id(x) in left and key in recipe.names}

        def hand_over(key: str, made: Tensor, own: Mapping[str, Tensor] = own) -> None:
            x = own.get(key)
            if x is not None and x.shape == made.shape and id(x) in left:
                take(left[id(x)], made.detach().to(x.dtype))
                del left[id(x)]

        if own:
            make = partial(_wanted, recipe.make, own.keys())
            with _drawn_by(seed, path):
                done = not at_once and _one_by_one(make, hand_over)
            if not done:
                with _drawn_by(seed, path):
                    for key, x in make().items():
                        hand_over(key, x)
    if left:
        raise ModuleError(f"{who} of {type(module).__name__}: {_complaint(module, left)}")


def _complaint(module: nn.Module, left: Mapping[int, str]) -> str:
    """Say what is wrong with tensors that were not made, by their ids and names."""
    open_ones, names = {*undescribed(module)}, [*left.values()][::-1]
    if unknown := [name for name in names if name in open_ones]:
        return f"{', '.join(unknown)} has no memory, and nobody says how it is made. Make its layer by fs.lazy."
    return (
        f"{', '.join(names)} was not made again. The factory of a lazy layer is called once without memory and once more for "
        "its numbers, and has to make the same both times: tensors that it keeps elsewhere, or names that it counts, are not."
    )


@contextmanager
def _drawn_by(seed: int, path: str) -> Generator[None]:
    """Draw all random numbers by a layer's name, those of numpy and of Python too."""
    python, of_numpy, key = random.getstate(), np.random.get_state(), folded(seed, path)
    random.seed(key)
    np.random.seed(key % (1 << 32))
    try:
        with keyed_random(seed, path):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)


def _refuse_hidden(who: str, module: nn.Module) -> None:
    """Raise if there are tensors without memory where a copy would not have others."""
    known = {id(x) for _, x in _tensors(module)}

    def counts(x: Any) -> bool:
        alike = isinstance(x, (*ATOMS, ModuleType, type, torch.optim.Optimizer))
        ours = type(x).__module__.startswith("fshard.")  # stages have shapes of others
        return isinstance(x, Tensor) or not (alike or ours)

    def hidden(found: Iterable[Any]) -> bool:
        return any(isinstance(x, Tensor) and x.is_meta and id(x) not in known for x in found)

    all_held = [*held_by_attributes(module, counts)]
    modules = (x for x in (*module.modules(), *all_held) if isinstance(x, nn.Module))
    if any(_RECIPE in vars(x) for x in modules) and hidden(all_held):
        found = (
            f"{path}.{key}".removeprefix(".")
            for path, part in module.named_modules()
            for key, x in vars(part).items()
            if key not in INTERNAL and hidden(reached_from([x], counts))
        )
        raise ModuleError(
            f"{who} of {type(module).__name__}: {', '.join(found)} leads to tensors without memory that nobody would make: in "
            "a function, a set, or a module that is no submodule. Keep them in an attribute, a list or a dict; a module may "
            "be built before, by fs.built."
        )


def _wanted(recipe: Callable[[], nn.Module], keys: Collection[str]) -> dict[str, Tensor]:
    """Make a layer; return some of its tensors, but for those of lazy layers in it, which have recipes of their own."""
    return {key: x for key, x in _tensors(recipe()) if key in keys and not x.is_meta}


def _one_by_one(make: Callable[[], dict[str, Tensor]], hand_over: Callable[[str, Tensor], None]) -> bool:
    """Hand tensors over as they are made, each alone; return whether that could be."""
    try:
        history, made = noted(make)
        keys = [*made]
        with torch.no_grad():
            history.repeat([*made.values()], lambda number, x: hand_over(keys[number], _real(x)))
    except Exception:  # of any kind: what is wrong without that is wrong again when all are made at once
        return False
    return True


def _real(x: Tensor) -> Tensor:
    """Return a tensor, or raise if that has come out without memory again."""
    if x.is_meta:
        raise ModuleError("fs.lazy: it is not known what led to a tensor.")
    return x


def reserved(x: Any, layout: Layout) -> Sharded:
    """Lay a leaf on a mesh; one without memory gets pieces to be filled, see `fill`."""
    if not (isinstance(x, Tensor) and x.is_meta and layout.mesh.runtime != "abstract"):
        return device_put(x, layout)
    shapes = [layout.local_shape(x.shape, device) for device in held(layout.mesh)]
    near = layout.mesh.device_type
    return Sharded(tuple(x.shape), layout, tuple(torch.empty(shape, dtype=x.dtype, device=near) for shape in shapes))


def fill(x: Sharded, made: Tensor) -> None:
    """Give reserved pieces their numbers, those of the whole."""
    for own, piece in zip(x.shards, device_put(made, x.layout).shards, strict=True):
        own.copy_(piece)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, part in module.named_modules():
        for key, x in vars(part).items():
            if key not in INTERNAL and key != _RECIPE:
                yield from tensors_at(x, f"{path}.{key}".removeprefix("."))
