"""`init_params`: parameters that are born sharded, from a function that draws them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from fshard.mesh.mesh import Mesh
from fshard.mesh.tree import PyTree
from fshard.transforms.patterns import Choice
from fshard.transforms.randomness import drawing_from, random_state
from fshard.transforms.rules import Rules, shard_params


def init_params(
    init_fn: Callable[[], PyTree], rules: Rules, *, mesh: Mesh, seed: int | None = None, frozen: Choice = None
) -> PyTree:
    """Draw the parameters that `init_fn()` makes, and lay them out by rules.

    Args:
        init_fn: returns a tree of tensors.
        rules: see `shard_params`.
        mesh: the devices.
        frozen: which are not to be trained: see `shard_params`.
        seed: draw as after `torch.manual_seed(seed)`, and leave the generator as it was; None: draw from it as it is.

    Nothing is sent: every process draws all numbers on the host and keeps its shards.  A model that no host can hold is made
    of `lazy` layers.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> params = fs.init_params(lambda: {"w": torch.randn(2, 2), "b": torch.zeros(2)}, fs.fsdp("data"), mesh=mesh, seed=0)
    >>> fs.typeof(params["w"]), torch.equal(fs.unshard(params["w"]), torch.randn(2, 2, generator=torch.manual_seed(0)))
    (f32[2, 2]{flat:data}, True)
    """
    with drawing_from(random_state()) if seed is not None else nullcontext():
        if seed is not None:
            torch.manual_seed(seed)
        with torch.device("meta") if mesh.runtime == "abstract" else nullcontext():
            made = init_fn()
    return shard_params(made, rules, mesh=mesh, frozen=frozen)
