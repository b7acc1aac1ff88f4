"""Lazy modules: described on the meta device, given memory later, one at a time.

    lazy(nn.Linear, 8, 8)      a Linear on the meta device that remembers its factory      count it, split it, name it
    built(model, seed=0)       a copy of the model with memory
    draw(model, 0, ...)        calls the factories one after the other and hands over what they make

A lazy module is drawn by (seed, its path in the model), so its values depend neither on the mesh nor on the plugin.  The
peak of memory is that of the largest lazy module: a model that fits on no device is written with lazy blocks,
`nn.Sequential(*(fs.lazy(Block, config) for _ in range(n)))`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from fshard.errors import ModuleError
from fshard.mesh.layout import Layout
from fshard.mesh.placing import device_put
from fshard.mesh.sharded import Sharded
from fshard.mesh.spmd import held
from fshard.transforms.randomness import folded, keyed_random

Args = ParamSpec("Args")
Module = TypeVar("Module", bound=nn.Module)
_RECIPE = "_fshard_recipe"
_OF_TORCH = frozenset(vars(nn.Module()))


def lazy(factory: Callable[Args, Module], *args: Args.args, **kwargs: Args.kwargs) -> Module:
    """Call a module's factory on the meta device; boosting the module, or `built`, calls it again with memory.

    Args:
        factory: makes a layer or a whole model.  It is called with random generators seeded by the module's path, and has
            to make the same tensors both times.
        args, kwargs: what it is called with.

    A whole model is built whole, on the host, once.  Describe its blocks by `lazy` to bound the memory by one of them.

    >>> layer = lazy(nn.Linear, 1_000_000, 1_000_000)
    >>> layer.weight.shape, layer.weight.device
    (torch.Size([1000000, 1000000]), device(type='meta'))
    """
    if not callable(factory) or isinstance(factory, nn.Module):
        found = f"a {type(factory).__name__} that exists" if isinstance(factory, nn.Module) else repr(factory)
        raise ModuleError(f"fs.lazy: factory must be a callable; got {found}. Write fs.lazy(nn.Linear, 8, 8).")
    try:
        with torch.device("meta"):
            made = factory(*args, **kwargs)
    except Exception as error:
        error.add_note(
            "fs.lazy calls the factory on the meta device first, where tensors have no values. Make the tensors that it "
            'reads with device="cpu", or describe smaller modules by fs.lazy.'
        )
        raise
    if not isinstance(made, nn.Module):
        raise ModuleError(f"fs.lazy: factory must return a module; {factory!r} returned a {type(made).__name__}.")
    if unknown := [name for name, x in made.named_parameters() if is_lazy(x)]:
        raise ModuleError(
            f"fs.lazy: parameters must have shapes; {', '.join(unknown)} of {type(made).__name__} get theirs in a first "
            "call. Write nn.Linear for nn.LazyLinear."
        )
    vars(made)[_RECIPE] = partial(factory, *args, **kwargs)
    return made


def built(module: Module, *, seed: int) -> Module:
    """Copy a module, or a stage, and build its lazy modules; tensors that have memory are shared with the copy.

    >>> import fshard as fs
    >>> first, second = fs.split_stages([lazy(nn.Linear, 2, 64), nn.ReLU(), lazy(nn.Linear, 64, 1)], 2, "parameters")
    >>> [(name, tuple(x.shape)) for name, x in built(second, seed=0).named_parameters()]
    [('2.weight', (1, 64)), ('2.bias', (1,))]
    """
    own = dict(_tensors(module))
    shared = [x for x in own.values() if not x.is_meta] + [vars(part)[_RECIPE] for _, part in _described(module)]
    made: dict[int, Any] = {id(x): x for x in shared}  # what deepcopy puts in the place of each
    wanted = {**_registered(module), **_lazy_attributes(module)}
    draw(module, seed, wanted, lambda name, x: made.update({id(own[name]): x}), "fs.built")
    return forget_recipes(deepcopy(module, made))


def undescribed(module: nn.Module) -> list[str]:
    """List the parameters and buffers on the meta device that no factory makes."""
    known = {id(x) for _, part in _described(module) for _, x in _tensors(part)}
    return [name for name, x in _registered(module).items() if x.is_meta and id(x) not in known]


def build_attributes(module: nn.Module, seed: int) -> None:
    """Build the tensors in plain attributes of lazy modules, in place; parameters and buffers stay on the meta device."""
    own, made = _lazy_attributes(module), dict[int, Tensor]()
    draw(module, seed, own, lambda name, x: made.update({id(own[name]): x}))
    for attributes in map(vars, module.modules() if made else ()):
        for key in attributes.keys() - _OF_TORCH - {_RECIPE}:
            attributes[key] = tree_map(lambda x: made.get(id(x), x), attributes[key])


def forget_recipes(module: Module) -> Module:
    """Drop the factories of a module's lazy modules; return the module."""
    for _, part in [*_described(module)]:
        del vars(part)[_RECIPE]
    return module


def draw(
    module: nn.Module, seed: int, names: Collection[str], take: Callable[[str, Tensor], None], who: str = "fs.lazy"
) -> None:
    """Build the lazy modules that make the named tensors, one at a time; call `take(name, tensor)` for each tensor.

    A tied tensor is handed over once, under its first name.  Nothing that a factory makes outlives the next one.
    """
    wanted = {*names}
    left = {id(x): name for name, x in reversed([*_tensors(module)]) if name in wanted and x.is_meta}
    for path, part in _described(module):
        if any(id(x) in left for _, x in _tensors(part)):
            _draw_one(part, seed, path, left, take)
    if left:
        raise ModuleError(
            f"{who} of {type(module).__name__}: {', '.join([*left.values()][::-1])} must be made by the factory of a lazy "
            "module, with the same name and shape each time it is called. Describe the module by fs.lazy(Block, config)."
        )


def _draw_one(part: nn.Module, seed: int, path: str, left: dict[int, str], take: Callable[[str, Tensor], None]) -> None:
    """Call the factory of a lazy module; hand over those of its tensors that are left."""
    with _seeded(seed, path):
        made = dict(_tensors(vars(part)[_RECIPE]()))
    for name, x in _tensors(part):
        new = made.pop(name, None)
        if id(x) in left and new is not None and new.shape == x.shape and not new.is_meta:
            if isinstance(new, nn.Parameter):
                new.data = new.data.to(x.dtype)
                new.requires_grad_(x.requires_grad)
            else:
                new = new.detach().to(x.dtype)
            take(left.pop(id(x)), new)


@contextmanager
def _seeded(seed: int, path: str) -> Generator[None]:
    """Seed the generators of torch, numpy and Python by a path; restore them afterwards."""
    python, of_numpy, key = random.getstate(), np.random.get_state(), folded(seed, path)
    random.seed(key)
    np.random.seed(key % (1 << 32))
    try:
        with keyed_random(seed, path):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)


def reserved(x: Any, layout: Layout) -> Sharded:
    """Lay out a leaf; allocate the local shards of one on the meta device, for `fill`."""
    if not (isinstance(x, Tensor) and x.is_meta and layout.mesh.runtime != "abstract"):
        return device_put(x, layout)
    shapes = [layout.local_shape(x.shape, device) for device in held(layout.mesh)]
    near = layout.mesh.device_type
    return Sharded(tuple(x.shape), layout, tuple(torch.empty(shape, dtype=x.dtype, device=near) for shape in shapes))


@torch.no_grad()
def fill(x: Sharded, made: Tensor) -> None:
    """Copy the local shards of a full tensor into reserved ones."""
    for own, shard in zip(x.shards, device_put(made.detach(), x.layout).shards, strict=True):
        own.copy_(shard)


# -- the tensors of a module --------------------------------------------------------------------------------------------


def _described(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the lazy modules in a module with their paths, outer ones first."""
    return ((path, part) for path, part in module.named_modules() if _RECIPE in vars(part))


def _registered(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and the tensors in plain attributes and containers there, by name."""
    yield from _registered(module).items()
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in _OF_TORCH and key != _RECIPE:
                found, _ = tree_flatten_with_path(value)
                yield from (
                    (f"{path}.{key}{keystr(at)}".removeprefix("."), x) for at, x in found if isinstance(x, Tensor)
                )


def _lazy_attributes(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors on the meta device in plain attributes of lazy modules."""
    registered = {id(x) for x in _registered(module).values()}
    lazies = {id(x) for _, part in _described(module) for _, x in _tensors(part)} - registered
    return {name: x for name, x in _tensors(module) if x.is_meta and id(x) in lazies}
