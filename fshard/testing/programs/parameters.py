"""The parameters of a model of any kind, and their gradients, as full tensors by name.

nn.Module, wrapped or not        its names without those of wrappers
DTensor                          gathered by all its processes
FullyShardedDataParallel         gathered, with its original parameters or without
a dict of tensors                as it is
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Tensors = dict[str, Tensor]
_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
    r"|_forward_module|_original_module)(?=\.)"
)


def named_parameters(model: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters of a module or a dict, without the names of wrappers.

    Tied ones have all their names.
    """
    if isinstance(model, nn.Module):
        named: Iterable[tuple[str, Tensor]] = model.named_parameters(remove_duplicate=False)
    else:
        named = dict(model).items()
    return [(without_wrappers(name), x) for name, x in named if isinstance(x, Tensor)]


def frozen_names(model: Any) -> frozenset[str]:
    """Return the names of parameters that require no gradient."""
    with unsharded(model):
        return frozenset([name for name, x in named_parameters(model) if not x.requires_grad])


def tied_names(model: Any) -> dict[str, str]:
    """Return the further names of parameters that have several, with their first ones."""
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    with unsharded(model):
        for name, x in named_parameters(model):
            first = first_names.setdefault(id(x), name)
            if first != name:
                tied[name] = first
    return tied


def full_tensors(model: Any, *, gradients: bool = False) -> Tensors:
    """Return copies of the parameters of a module or a dict, or of their gradients, by name.

    A DTensor is gathered by all its processes, and so are the parameters of
    FullyShardedDataParallel.
    """
    has_original = not has_flat_parameters(model) or _uses_original_parameters(model)
    if gradients and not has_original:
        return _flat_gradients(model)
    with unsharded(model, gradients=gradients):
        tensors: Tensors = {}
        for name, x in named_parameters(model):
            if not gradients:
                tensors[name] = x
            elif x.grad is not None:
                tensors[name] = x.grad
        return gathered(tensors, dict(named_parameters(model)))


def gathered(tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Tensors:
    """Return full copies of tensors of some parameters; a DTensor that others have is 0 here.

    All processes take part, since a process may lack a gradient that others have.
    """
    sharded = [name for name, x in tensors.items() if isinstance(x, DTensor)]
    names_by_rank: list[Any] = [sharded]
    if dist.get_world_size() > 1:
        names_by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(names_by_rank, sharded)

    full: Tensors = {}
    for name, param in params.items():
        x = tensors.get(name)
        if x is None and isinstance(param, DTensor):
            peers = param.device_mesh.mesh.flatten().tolist()
            if any(name in names_by_rank[rank] for rank in peers):
                x = torch.zeros_like(param)
        if x is None:
            continue
        if isinstance(x, DTensor):
            x = x.full_tensor()
        full[name] = x.detach().to_dense() if x.is_sparse else x.detach().clone()
    return full


@contextmanager
def unsharded(model: Any, *, gradients: bool = False) -> Generator[None]:
    """Gather the parameters of FullyShardedDataParallel in the block, if there are any."""
    if not has_flat_parameters(model):
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=gradients):
        yield


def _uses_original_parameters(model: Any) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    units: list[Any] = list(FullyShardedDataParallel.fsdp_modules(model))
    return all(unit._use_orig_params for unit in units)


def _flat_gradients(model: nn.Module) -> Tensors:
    """Return full gradients of FullyShardedDataParallel without its original parameters.

    Torch gathers no such gradients. A unit has that of a shard of all its parameters in a row,
    which are padded.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    grads: Tensors = {}
    for unit_name, unit in model.named_modules():
        is_unit = isinstance(unit, FullyShardedDataParallel)
        handle = cast("Any", unit)._handle if is_unit else None
        if handle is None or handle.flat_param.grad is None:
            continue
        flat: Any = handle.flat_param
        row = flat.grad.detach().flatten()
        if handle.uses_sharded_strategy:
            shards = row.new_empty(len(row) * handle.world_size)
            dist.all_gather_single(shards, row, group=handle.process_group)
            row = shards[: flat._unpadded_unsharded_size.numel()]

        names = iter(zip(flat._fqns, flat._shapes, strict=True))
        parts = row.split(flat._numels_with_padding)
        for part, is_padding in zip(parts, flat._is_padding_mask, strict=True):
            if not is_padding:
                name, shape = next(names)
                full_name = without_wrappers(f"{unit_name}.{name}".lstrip("."))
                grads[full_name] = part.reshape(shape).clone()
    return grads


def has_flat_parameters(model: Any) -> bool:
    """Return True if a part of the model is in FullyShardedDataParallel."""
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if module is None or not isinstance(model, nn.Module):
        return False
    return any(isinstance(x, module.FullyShardedDataParallel) for x in model.modules())


def without_wrappers(name: str) -> str:
    """Return the name that a parameter has in the model itself.

    >>> without_wrappers("module.layers._orig_mod.0.weight")
    'layers.0.weight'
    """
    return _WRAPPERS.sub(r"\1", name).replace("..", ".").lstrip(".")


def local_batch_norm(model: Any) -> str:
    """Return the name of the first BatchNorm with statistics of this process; "" without one."""
    if not isinstance(model, nn.Module):
        return ""
    for name, module in model.named_modules():
        is_batch_norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        if is_batch_norm and module.training:
            return without_wrappers(name)
    return ""


def sync_hint(model: Any) -> str:
    """Describe how a wrapper of a model may have lost its reduction; "" if there is none."""
    if not isinstance(model, nn.Module):
        return ""
    modules = [*model.modules()]
    # Without an import, which programs of other wrappers do not need.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in modules:
        if fsdp is None or not isinstance(module, fsdp.FSDPModule):
            continue
        for group in cast("Any", module)._get_fsdp_state()._fsdp_param_groups:
            if not group.reduce_grads:
                return (
                    ": set_requires_gradient_sync(False) was not followed by True before the last "
                    "backward of a step"
                )
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules):
        return ": was each backward under no_sync(), or the module inside of the wrapper called?"
    return ""
