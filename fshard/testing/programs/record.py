"""The run of a program in one process: what it trains, recorded as full tensors on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fshard.mesh.layout import PyTree, flatten, map_leaves
from fshard.testing.verdicts import float64_by_default

Program = Callable[
    [int, "ProgramWorld"], tuple[Any, Callable[[Any, Any], Any], Any, Callable[[], object]]
]
Tensors = dict[str, Tensor]
_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)"
)


class ProgramWorld(int):
    """The number of processes, with their mesh: `world.mesh["model"]` is torch's DeviceMesh of an axis."""

    mesh: DeviceMesh


class RankRecord(NamedTuple):
    """The training of one process: full tensors, or its own shards of parameters that are sharded by hand.

    Args:
        batch: of this process.
        losses: of the steps; None where the process has none.
        start: the parameters before the first step.
        grads: of each step.
        params: after each step.
    """

    batch: PyTree
    losses: list[float | None]
    start: Tensors
    grads: list[Tensors]
    params: list[Tensors]


def record(
    program: Program, axes: Mapping[str, int], steps: int, seed: int, batch: PyTree = None
) -> RankRecord:
    """Run a program in this process, with the batch of all processes if there is one."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    rank = dist.get_rank()
    world = ProgramWorld(dist.get_world_size())
    world.mesh = mesh
    with float64_by_default():
        torch.manual_seed(1000 * seed + rank)  # so that what is not seeded by the program differs
        model, loss_fn, rank_batch, step = program(rank, world)
        if batch is None:
            batch = rank_batch
        start = full_tensors(model)

        losses: list[float | None] = []
        grads: list[Tensors] = []
        params: list[Tensors] = []
        for _ in range(steps):
            torch.manual_seed(1000 * seed + rank)  # so that a loss that draws differs too
            loss = loss_fn(model, batch)
            can_be_differentiated = isinstance(loss, Tensor) and loss.requires_grad
            if can_be_differentiated and not _has_gradients(model):
                loss.backward()
            losses.append(None if loss is None else float(loss.detach()))
            grads.append(full_tensors(model, gradients=True))
            step()
            params.append(full_tensors(model))
    detached = map_leaves(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, rank_batch)
    return RankRecord(detached, losses, start, grads, params)


def _has_gradients(model: Any) -> bool:
    """Return True if the program has called backward itself: a gradient of this process is not 0."""
    for _, x in _named(model):
        grad = x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad
        if grad is not None and grad.any():
            return True
    return False


def _named(model: Any) -> Iterable[tuple[str, Tensor]]:
    return model.named_parameters() if isinstance(model, nn.Module) else dict(model).items()


def full_tensors(model: Any, *, gradients: bool = False) -> Tensors:
    """Return copies of the parameters of a module or a dict, or of their gradients, by name.

    Names are without those of wrappers. A DTensor is gathered by all its processes.
    """
    tensors: Tensors = {}
    for name, param in _named(model):
        x = param.grad if gradients else param
        if not param.requires_grad or x is None:
            continue
        full = x.full_tensor() if isinstance(x, DTensor) else x
        tensors[_without_wrappers(name)] = full.detach().clone()
    return tensors


def _without_wrappers(name: str) -> str:
    """Return the name that a parameter has in the model itself.

    >>> _without_wrappers("module.layers._orig_mod.0.weight")
    'layers.0.weight'
    """
    return _WRAPPERS.sub(r"\1", name).replace("..", ".").lstrip(".")


def rows_of(batch: PyTree) -> int | None:
    """Return the rows of a batch: of its first tensor that has a dim."""
    for x in flatten(batch)[0]:
        if isinstance(x, Tensor) and x.ndim > 0:
            return len(x)
    return None
