"""Kinds of memory, and the purposes that storages are made for.

A layout names a kind: `layout.with_memory("host")`. `device_put`, `reshard` and
`shard_params(memory=)` copy shards from one memory to another; collectives run on shards in the
devices' memory.

A purpose is set around code that makes storages, or claimed for storages that exist. Both cost
nothing without a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import Tensor

from fshard.memory.disk import empty_on_disk
from fshard.memory.pool import empty_on_host
from fshard.mesh.layout import Memory, PyTree, flatten
from fshard.mesh.layout.counting import Purpose, counting, counting_by
from fshard.mesh.layout.kinds import makers
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import local_devices
from fshard.source import Site

Args = ParamSpec("Args")
Result = TypeVar("Result")


def purpose(name: Purpose | None, site: Site | None = None) -> AbstractContextManager[None]:
    """Count the storages made in the block for a purpose; None: that of an operation's arguments.

    `site` is the line of those without a user's line.
    """
    current = counting()
    if not current.counters:
        return nullcontext()
    return counting_by(replace(current, purpose=name, site=site or current.site))


def made_for(name: Purpose) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """Decorate a function whose new storages are for a purpose."""

    def decorate(function: Callable[Args, Result]) -> Callable[Args, Result]:
        @wraps(function)
        def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            if not counting().counters:
                return function(*args, **kwargs)
            with purpose(name):
                return function(*args, **kwargs)

        return run

    return decorate


def mark(name: str) -> None:
    """Begin an entry in the timelines of open limits: a use of a unit, or the update."""
    for counter in counting().counters:
        counter.mark(name)


def note_move(source: Memory, target: Memory, count: int) -> None:
    """Count the bytes of a copy in the current entries of timelines."""
    for counter in counting().counters:
        counter.note_move(source, target, count)


def note_kept(name: str, count: int) -> None:
    """Count the bytes of a named activation that is saved on the device.

    They are negative when the backward takes it.
    """
    for counter in counting().counters:
        counter.note_kept(name, count)


def claim(tree: PyTree, name: Purpose) -> None:
    """Count the storages of a tree for a purpose, even those from before the limit.

    Each is counted in the memory of its layout.
    """
    counters = counting().counters
    if not counters:
        return
    leaves, _ = flatten(tree)
    for leaf in leaves:
        if isinstance(leaf, Sharded):
            devices = local_devices(leaf.mesh)
            for device, shard in zip(devices, leaf.shards, strict=True):
                for counter in counters:
                    counter.claim(shard, device, leaf.layout.memory, name)
        elif isinstance(leaf, Tensor):
            for counter in counters:
                counter.claim(leaf, purpose=name)


makers.update({"disk": empty_on_disk, "host": empty_on_host})
