"""What a device would hold of a model in training, counted on an abstract mesh: nothing is laid anywhere.

device 0 .. 3   [whole parameters | gradients | state]      fs.P(), stage 0
                [parameters / 4 | two units | gradients / 4, one unit | state / 4]      fs.fsdp("data"), stage 3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.tree import flatten, flatten_with_paths
from fshard.optim.contract import Optimizer
from fshard.optim.leaves import trainable
from fshard.optim.partition import Stage, partition_optimizer
from fshard.transforms.patterns import unit_of
from fshard.transforms.rules import shard_params


class Budget(NamedTuple):
    """Bytes that one device holds.

    Args:
        parameters: as they lie at rest.
        gathered: the two largest units that lie in pieces, while they are used.
        gradients: whole where they are reduced once a step (stages 0, 1); else pieces, and the largest unit's whole ones.
        state: of the optimizer, as it makes it.
    """

    parameters: int
    gathered: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def budget(
    params: Mapping[str, Tensor], rules: Any, opt: Optimizer, mesh: Mesh, axes: tuple[str, ...], stage: Stage
) -> Budget:
    """Return what a device holds if parameters lie by these rules and the optimizer is divided so.

    >>> import fshard as fs
    >>> mesh, params = fs.make_mesh({"data": 4}), {"w": torch.empty(100, 10, device="meta")}
    >>> budget(params, fs.P(), fs.optim.adamw(), mesh, ("data",), 0)
    Budget(parameters=4000, gathered=0, gradients=4000, state=8000)
    >>> budget(params, fs.P(), fs.optim.adamw(), mesh, ("data",), 1)
    Budget(parameters=4000, gathered=0, gradients=4000, state=2000)
    """
    abstract = Mesh(mesh.axes, "abstract", "meta")
    bare = {name: torch.empty_like(x, device="meta").requires_grad_(x.requires_grad) for name, x in params.items()}
    laid = shard_params(bare, rules, mesh=abstract)
    divided = partition_optimizer(opt, mesh=abstract, axis=axes, stage=stage)
    paths, leaves, _ = flatten_with_paths(laid, sharded_is_leaf=True)
    gathered, reduced, gradients = Counter[str](), Counter[str](), 0
    for path, leaf in zip(paths, leaves, strict=True):
        size, unit = prod(leaf.shape) * leaf.dtype.itemsize, leaf.layout.unit or unit_of(path)
        gathered[unit] += size if leaf.shards[0].nbytes < size else 0
        if trainable(leaf):
            layout = divided.gradients(leaf.layout) if stage > 1 else leaf.layout
            own = prod(layout.local_shape(leaf.shape, 0)) * leaf.dtype.itemsize
            gradients += own
            reduced[unit] += size if own < size else 0
    (_, largest), *_ = reduced.most_common(1) or [("", 0)]
    whole = sum(size for _, size in gathered.most_common(2))
    return Budget(
        _bytes(leaves), whole, gradients + largest, _bytes(flatten(divided.init(laid), sharded_is_leaf=True)[0])
    )


def _bytes(leaves: Sequence[Any]) -> int:
    return sum(leaf.shards[0].nbytes for leaf in leaves if isinstance(leaf, Sharded))
