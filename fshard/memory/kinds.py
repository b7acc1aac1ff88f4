"""Kinds of memory, and the purposes that storages are made for.

A layout names a kind: `layout.with_memory("host")`. `device_put`, `reshard` and `shard_params(memory=)` copy shards from
one memory to another; collectives run on shards in the devices' memory.

A purpose is set around code that makes storages, or claimed for storages that exist. Both cost nothing without a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

from torch import Tensor

from fshard.ambient import ambient, setting
from fshard.memory.disk import empty_on_disk
from fshard.memory.pool import empty_on_host
from fshard.mesh.layout import Memory, PyTree, flatten
from fshard.mesh.layout.kinds import makers
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import local_devices
from fshard.source import Site

Args = ParamSpec("Args")
Result = TypeVar("Result")
Purpose = Literal[
    "parameters", "gradients", "state", "unsharded", "activations", "buffers", "source", "other"
]
"""The purpose that a storage was made for: "other" outside of steps, such as batches.

"source" are the plain, full tensors that parameters are sharded from: the caller has them, no device needs them.
"""

ActivationMemory = Literal["device", "host", "recomputed"]
"""The memory of an activation with a name from the forward to the backward."""


def purpose(name: Purpose | None, site: Site | None = None) -> AbstractContextManager[None]:
    """Count the storages that are made in the block for a purpose, None for that of an operation's arguments.

    `site` is the line of those without a user's line.
    """
    if not ambient.counters:
        return nullcontext()
    before = ambient.purpose
    return setting(purpose=(name, site or (before and before[1])))


def made_for(name: Purpose) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """Decorate a function whose new storages are for a purpose."""

    def decorate(function: Callable[Args, Result]) -> Callable[Args, Result]:
        @wraps(function)
        def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            if not ambient.counters:
                return function(*args, **kwargs)
            with purpose(name):
                return function(*args, **kwargs)

        return run

    return decorate


def mark(name: str) -> None:
    """Begin an entry in the timelines of open limits: a use of a unit, or the update."""
    for counter in ambient.counters:
        counter.usage.mark(name)


def note_move(source: Memory, target: Memory, count: int) -> None:
    """Count the bytes of a copy in the current entries of timelines."""
    for counter in ambient.counters:
        for event in counter.usage.timeline[-1:]:
            event.moved[source, target] += count


def note_kept(name: str, count: int) -> None:
    """Count the bytes of a named activation that is saved on the device; negative ones when the backward takes it."""
    for counter in ambient.counters:
        counter.usage.keep(name, count)


def claim(tree: PyTree, name: Purpose) -> None:
    """Count the storages of a tree for a purpose, in the memories of its layouts, even those from before the limit."""
    counters = ambient.counters
    for leaf in flatten(tree)[0] if counters else ():
        if isinstance(leaf, Sharded):
            shards = [
                (device, leaf.layout.memory, x)
                for device, x in zip(local_devices(leaf.mesh), leaf.shards, strict=True)
            ]
        else:
            shards = [(None, None, leaf)] if isinstance(leaf, Tensor) else []
        for device, memory, x in shards:
            for counter in counters:
                counter.claim(x, device, memory, name)


makers.update({"disk": empty_on_disk, "host": empty_on_host})
