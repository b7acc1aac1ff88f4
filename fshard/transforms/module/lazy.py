"""Layers that are described first and built later, where they are needed.

    lazy(nn.Linear, 8, 8)        a Linear on the meta device, with its factory: it can be counted,
                                 split, named
    materialize(stage, seed=0)   the stage with memory, each lazy layer drawn by (seed, its name)
    draw(model, 0, names, take)  one lazy layer at a time: its tensors are passed on and freed

No device ever has the full model. A layer's draws depend only on the seed and its name in the full
model, not on the device that builds it. Memory is bounded by the largest lazy layer, so a model
that no device can hold has a lazy layer per block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fshard.copying import copied
from fshard.errors import ModuleError
from fshard.mesh.layout import Layout
from fshard.mesh.layout.kinds import empty_in, owned_by
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import put_equal
from fshard.mesh.spmd.run import local_devices
from fshard.randomness import folded, keyed_random

Args = ParamSpec("Args")
Module = TypeVar("Module", bound=nn.Module)
_RECIPE = "_fshard_recipe"


class _Recipe(NamedTuple):
    """The factory of a lazy layer, and the names of its tensors that have no memory."""

    make: Callable[[], nn.Module]
    names: frozenset[str]


def lazy(factory: Callable[Args, Module], *args: Args.args, **kwargs: Args.kwargs) -> Module:
    """Describe the module that a factory makes, on the meta device.

    It stays there until it is trained, or given to `materialize`. It may be a layer or an entire
    model; each lazy module is built in full, on the host, when its shards are taken.

    >>> layer = lazy(nn.Linear, 1_000_000, 1_000_000)
    >>> layer.weight.shape, layer.weight.device
    (torch.Size([1000000, 1000000]), device(type='meta'))
    """
    if not callable(factory) or isinstance(factory, nn.Module):
        kind = "a module that is made already" if isinstance(factory, nn.Module) else repr(factory)
        raise ModuleError(
            "fs.lazy: factory must be a function that makes a module, fs.lazy(nn.Linear, 8, 8); "
            f"got {kind}."
        )
    try:
        with torch.device("meta"):
            module = factory(*args, **kwargs)
    except Exception as error:
        error.add_note(
            "fs.lazy calls the factory on the meta device first, where no value can be read. Make "
            'tensors whose values it reads with device="cpu", or describe each layer by fs.lazy.'
        )
        raise
    if not isinstance(module, nn.Module):
        raise ModuleError(f"fs.lazy: factory must return a module; got {type(module).__name__}.")
    _validate_described(module)
    names = frozenset(name for name, x in _named_tensors(module) if x.is_meta)
    vars(module)[_RECIPE] = _Recipe(partial(factory, *args, **kwargs), names)
    return module


def _validate_described(module: nn.Module) -> None:
    """Raise naming the tensors of a described module that could not be drawn later."""
    errors: list[str] = []
    for name, param in module.named_parameters():
        if is_lazy(param):
            errors.append(f"{name} must have a shape; give its sizes, nn.Linear for nn.LazyLinear")
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            if isinstance(value, Tensor) and value.is_meta:
                name = f"{path}.{key}".removeprefix(".")
                errors.append(
                    f"{name} must be a parameter or a buffer; got a plain tensor, register_buffer "
                    "makes one"
                )
    if errors:
        raise ModuleError(f"fs.lazy of {type(module).__name__}: {'; '.join(errors)}.")


def materialize(module: Module, *, seed: int) -> Module:
    """Build the lazy layers of a module, such as a stage; tensors with memory are shared.

    >>> import fshard as fs
    >>> layers = [lazy(nn.Linear, 2, 64), nn.ReLU(), lazy(nn.Linear, 64, 1)]
    >>> first, second = fs.pipeline.split_stages(layers, 2, "parameters")
    >>> [(name, tuple(x.shape)) for name, x in materialize(second, seed=0).named_parameters()]
    [('2.weight', (1, 64)), ('2.bias', (1,))]
    """
    tensors = dict(_named_tensors(module))
    built: dict[int, Any] = {id(x): x for x in tensors.values() if not x.is_meta}

    def take(name: str, value: Tensor) -> None:
        described = tensors[name]
        if isinstance(described, nn.Parameter):
            value = nn.Parameter(value, requires_grad=described.requires_grad)
        built[id(described)] = value

    draw(module, seed, without_memory(module), take, "fs.nn.materialize")
    result = copied(module, built)
    for _, layer, _ in [*_lazy_layers(result)]:
        del vars(layer)[_RECIPE]
    return result


def without_memory(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that are on the meta device."""
    return [name for name, x in _named_tensors(module) if x.is_meta]


def _lazy_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, _Recipe]]:
    """Yield the lazy layers of a module with their paths and recipes."""
    for path, layer in module.named_modules():
        if _RECIPE in vars(layer):
            yield path, layer, vars(layer)[_RECIPE]


def draw(
    module: nn.Module,
    seed: int,
    names: Collection[str],
    take: Callable[[str, Tensor], None],
    caller: str = "fs.lazy",
) -> None:
    """Make one lazy layer after the other, and pass on their tensors of some names.

    A tied tensor is passed on once, by its first name.
    """
    names = {*names}
    undrawn: dict[int, str] = {}
    for name, x in reversed([*_named_tensors(module)]):  # so that the first name is the last
        if name in names and x.is_meta:
            undrawn[id(x)] = name
    if not undrawn:
        return

    for path, layer, recipe in _lazy_layers(module):
        tensors = dict(_named_tensors(layer))
        described = {key: x for key, x in tensors.items() if id(x) in undrawn}
        described = {key: x for key, x in described.items() if key in recipe.names}
        if not described:
            continue
        with _seeded_by_path(seed, path):
            values = dict(_named_tensors(recipe.make()))
        for key, x in described.items():
            value = values.pop(key, None)
            if value is None or value.is_meta or value.shape != x.shape:
                continue
            if id(x) in undrawn:  # a tied one is drawn by its first name alone
                take(undrawn.pop(id(x)), value.detach().to(x.dtype))
    if undrawn:
        missing = [*reversed(undrawn.values())]
        raise ModuleError(
            f"{caller} of {type(module).__name__}: {', '.join(missing)} must be described; got "
            "tensors on the meta device that no lazy layer makes again. Make its layer by fs.lazy."
        )


@contextmanager
def _seeded_by_path(seed: int, path: str) -> Generator[None]:
    """Draw all random numbers by a layer's name, those of numpy and of Python too."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    key = folded(seed, path)
    random.seed(key)
    np.random.seed(key % (1 << 32))
    try:
        with keyed_random(seed, path):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def reserved(x: Any, layout: Layout) -> Sharded:
    """Shard a leaf on a mesh; one on the meta device gets empty shards, see `fill`."""
    is_described = isinstance(x, Tensor) and x.is_meta
    if not is_described or layout.mesh.runtime == "abstract":
        return put_equal(x, layout)
    kind = layout.mesh.device_type
    shards: list[Tensor] = []
    for device in local_devices(layout.mesh):
        shape = layout.local_shape(x.shape, device)
        with owned_by(layout.mesh.devices[device]):
            shards.append(empty_in(layout.memory, shape, x.dtype, kind))
    return Sharded(tuple(x.shape), layout, tuple(shards))


def fill(x: Sharded, value: Tensor) -> None:
    """Copy a full tensor's values into empty shards."""
    source = put_equal(value, x.layout.with_memory("device"))
    for shard, source_shard in zip(x.shards, source.shards, strict=True):
        shard.copy_(source_shard)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
