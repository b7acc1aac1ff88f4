"""Memory kinds: tensors on disk are made by `fshard.memory.disk`, which is imported for the first of them.

A layout names a kind: `layout.with_memory("host")`. `device_put`, `reshard` and `shard_params(memory=)` copy shards from
one memory to another; collectives run on shards in the devices' memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch
from torch import Tensor

from fshard.mesh.layout.kinds import makers, memory_of

__all__ = ["memory_of"]


def _empty_on_disk(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor in a new file."""
    return import_module("fshard.memory.disk").empty_on_disk(shape, dtype)


makers["disk"] = _empty_on_disk
