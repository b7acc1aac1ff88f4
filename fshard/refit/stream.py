"""Yield parameters one by one, as full tensors with the names of a checkpoint: `fs.refit.stream`.

params                     names of a checkpoint            in memory
layers.0.q  f32[4@data]    layers.0.q                       q
experts.up  f32[2, 4, 4]   experts.0.up and experts.1.up    experts.up
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fshard.checkpoint.foreign.export import merged_parameters, module_config
from fshard.checkpoint.names import JoinedArray, is_array, tie_key
from fshard.errors import RefitError
from fshard.mesh.layout import PyTree
from fshard.mesh.reshard.device_put import unshard
from fshard.refit.leaves import named_leaves
from fshard.transforms.module.lora import LowRank

Rename = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""A function from a state dict to another one, such as that of an adapter of checkpoints."""


def stream(
    params: PyTree,
    names: Literal["hf", "params"] | Rename = "hf",
    *,
    model: nn.Module | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the full tensor of each parameter, for engines that take an iterable.

    One leaf is unsharded at a time, and freed when the caller has dropped it: the memory beyond the
    shards is that of the largest leaf. On a process mesh all processes must take all items, since
    unsharding communicates.

    Args:
        params: a tree of arrays, a module, or a boosted model.
        names: "hf": those of a published checkpoint, tied parameters once; fused experts are a
            tensor each, if the module is one of transformers. "params": paths, joined by dots. Or
            a function from a dict of tensors to another one, called with as few leaves as it can
            convert by themselves.
        model: the module with these parameters, where `params` is none. Differences of
            `fs.nn.lora` in it are merged into the weights.

    >>> import torch, fshard as fs
    >>> params = fs.shard_params({"q": torch.ones(2, 3), "k": torch.ones(1, 3)}, mesh=fs.make_mesh({"data": 2}))
    >>> [(name, tuple(x.shape)) for name, x in fs.refit.stream(params)]
    [('q', (2, 3)), ('k', (1, 3))]
    """
    module = _module_of(params, model)
    arrays = _arrays(params)
    merges: Mapping[str, Any] = {}
    if module is not None and any(isinstance(layer, LowRank) for layer in module.modules()):
        arrays, merges = merged_parameters(arrays, module)
        factors = {name for _, *pair in merges.values() for name in pair}
        arrays_by_name = arrays
        arrays = {name: x for name, x in arrays.items() if name not in factors}
    else:
        arrays_by_name = arrays

    if names == "hf":
        arrays = _untied(arrays)
    convert = _conversion(names, module)

    def tensor(name: str) -> Tensor:
        if name not in merges:
            return _full_tensor(arrays_by_name[name])
        layer, *pair = merges[name]
        weight, a, b = [_full_tensor(arrays_by_name[leaf]) for leaf in (name, *pair)]
        return layer.merged(weight, a, b)

    return _converted(arrays, tensor, convert)


def _converted(
    arrays: Mapping[str, Any], tensor: Callable[[str], Tensor], convert: Rename | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of arrays, group by group."""
    with torch.no_grad():
        for group in _groups(arrays, convert):
            results = {name: tensor(name) for name in group}
            if convert is not None:
                results = dict(convert(results))
            while results:
                name = next(iter(results))
                yield name, results.pop(name)


def _groups(arrays: Mapping[str, Any], convert: Rename | None) -> Sequence[Sequence[str]]:
    """Return the names of leaves that are converted together: of which a result is made.

    A function that joins leaves returns the same name for each alone.
    """
    if convert is None:
        return [[name] for name in arrays]
    groups: list[list[str]] = []
    group_of_result: dict[str, list[str]] = {}
    for name, x in arrays.items():
        results = convert({name: torch.empty(x.shape, dtype=x.dtype, device="meta")})
        if not results:
            raise RefitError(
                f"refit.stream: names must return a tensor for each leaf; got none for {name}. "
                "Leave it out of params if it has no name."
            )
        shared = [group_of_result[result] for result in results if result in group_of_result]
        group = shared[0] if shared else []
        if not shared:
            groups.append(group)
        group.append(name)
        for result in results:
            group_of_result[result] = group
    return groups


def _conversion(names: Any, module: nn.Module | None) -> Rename | None:
    """Return the function to the names of a checkpoint; None if these are those of the leaves."""
    if callable(names):
        return names
    if names not in ("hf", "params"):
        raise RefitError(
            f"refit.stream: names must be 'hf', 'params' or a function; got {names!r}. "
            "'hf' has the names of published checkpoints."
        )
    if names == "params" or module_config(module) is None:
        return None

    from transformers.core_model_loading import revert_weight_conversion

    def convert(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return revert_weight_conversion(module, tensors)

    return convert


def _module_of(params: PyTree, model: nn.Module | None) -> nn.Module | None:
    """Return the module that has the parameters; of a boosted model its own."""
    if model is not None:
        return model
    module = getattr(params, "module", params)
    return module if isinstance(module, nn.Module) else None


def _arrays(params: PyTree) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for leaf in named_leaves(params):
        if not is_array(leaf.value):
            kind = type(leaf.value).__name__
            raise RefitError(
                f"refit.stream: {leaf.name} must be an array; got a {kind}. Give the parameters."
            )
        arrays[leaf.name] = leaf.value
    return arrays


def _untied(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays without those that are tied to an earlier one."""
    firsts: dict[Any, str] = {}
    for name, x in arrays.items():
        firsts.setdefault(tie_key(x), name)
    return {name: arrays[name] for name in firsts.values()}


def _full_tensor(x: Any) -> Tensor:
    if isinstance(x, JoinedArray):
        return torch.cat([_full_tensor(array) for array in x.parts], x.dim)
    if isinstance(x, Tensor):
        return x.detach()
    return unshard(x)
