"""The one holder of what is current in a thread.

Each field has typed accessors in the module of its concept, which alone reads and sets it. A new thread has the
defaults; the threads of virtual devices take over the fields in `INHERITED` from their caller.
"""

from __future__ import annotations

import threading
from typing import Any


class Ambient(threading.local):
    """The current values of one thread."""

    scope: Any = None  # the device that the thread runs as: fshard.mesh.spmd.scope
    representative: Any = None  # of an abstract mesh, the device that the thread runs as: fshard.mesh.runtimes.abstract
    mesh: Any = None  # of `use_mesh`: fshard.mesh.layout.mesh
    ledgers: Any = None  # those that count; None: all open ones: fshard.mesh.collectives.ledger
    fixed_order: bool = False  # sums are reproducible: fshard.mesh.spmd.deterministic
    absent: bool = (
        False  # a block of another stage runs for its shapes: fshard.pipeline.split.block_stage
    )
    counters: Any = ()  # of storages: fshard.memory.limit
    purpose: Any = None  # of new storages, and the source line behind it: fshard.memory.limit
    memory: Any = None  # the kind of new storages: fshard.mesh.layout.kinds
    offload: Any = None  # where optimizer state is stored and updated: fshard.memory.state
    owner: Any = None  # the device that new storages are made for, outside of its scope: the same
    activations: Any = (
        None  # what becomes of named ones, in place of a policy: fshard.transforms.module.remat
    )
    regions: Any = ()  # recomputed regions around the caller: fshard.transforms.module.remat
    explicit: bool = False  # implicit communication of arrays raises: fshard.array.dispatch
    constants: bool = (
        False  # plain tensors that meet arrays are equal everywhere: fshard.array.modules
    )
    reduces: bool = False  # partial sums of arrays are reduced at once: fshard.tensor.run
    plan: Any = None  # of the module that runs: fshard.tensor.run
    observer: Any = None  # is called with each operation on arrays: fshard.tensor.follow


ambient = Ambient()

INHERITED = ("mesh", "ledgers", "fixed_order", "counters", "purpose", "offload", "activations")


def inherited() -> dict[str, Any]:
    """Return the fields that a device's thread takes over from the calling one."""
    return {name: getattr(ambient, name) for name in INHERITED}


def inherit(fields: dict[str, Any]) -> None:
    """Set fields of the calling thread."""
    vars(ambient).update(fields)


class setting:
    """Set fields of the calling thread within the context; a class, since a generator costs three times as much."""

    __slots__ = ("_before", "_fields")

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._before = {name: getattr(ambient, name) for name in self._fields}
        vars(ambient).update(self._fields)

    def __exit__(self, *error: object) -> None:
        vars(ambient).update(self._before)
