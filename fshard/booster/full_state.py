"""The state of an optimizer as full tensors: what `state_dict` gathers, and `load_state_dict` writes back.

sharded   {"exp_avg": {"w": x, "bias": y}, "step": {"w": 3, "bias": 3}, "count": 3}     with several groups {0: ..., 1: ...}
torch     {"state": {0: {"exp_avg": x, "step": 3}, 1: {"exp_avg": y, "step": 3}}, "param_groups": [...]}
pure      {"state": {"exp_avg": {"w": x, "bias": y}, ...}}                              by the first names of tied parameters
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fshard.checkpoint.names import JoinedArray, NamedLeaf, build, flattened, is_array, leaves_of, name_of, stored_parts
from fshard.errors import OptimizerError
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import unshard
from fshard.optim.torch_optim.classes import CLASSES
from fshard.optim.torch_optim.instance_state import ByKey
from fshard.optim.torch_optim.instances import GroupsSource, InstanceSource, OptimizerSource, TorchSource
from fshard.transforms.module.lazy import fill

FirstNames = Mapping[str, str]
"""The first name of each parameter, by all of its names."""


def full_leaves(tree: PyTree) -> list[NamedLeaf]:
    """Return the leaves of a tree as full tensors, each with memory of its own; all devices must call it."""

    def full(x: Any) -> Any:
        if isinstance(x, JoinedArray):
            return torch.cat([*x.parts], x.dim)
        return x.detach().clone() if isinstance(x, Tensor) else x

    return [NamedLeaf(leaf.path, full(leaf.value)) for leaf in leaves_of(unshard(tree))]


@torch.no_grad()
def put(x: Any, value: Tensor) -> None:
    """Write a full tensor to an array."""
    for start, part in stored_parts(x):
        own = value[tuple([slice(at, at + length) for at, length in zip(start, part.shape, strict=True)])]
        fill(part, own) if isinstance(part, Sharded) else part.copy_(own)


def full_state(source: OptimizerSource, state: PyTree, names: FirstNames) -> dict[str, Any]:
    """Return the full state of an optimizer in torch's form; all devices must call it."""
    leaves = [*{leaf.name: leaf for leaf in _by_first_name(full_leaves(state), names)}.values()]
    if isinstance(source, InstanceSource):
        scale = {leaf.name: leaf.value for leaf in leaves if is_array(leaf.value)}
        return {**source.state_dict(), "state": _of_instance(source)} | ({"loss_scale": scale} if scale else {})
    if not isinstance(source, GroupsSource):
        return {"state": build([(leaf.path, leaf.value) for leaf in leaves])}
    kind, (slots, others), made = type(source.optimizer), _by_number(source, leaves), dict[int, dict[str, Any]]()
    for number, own in slots.items():
        step = own.pop("step") if not CLASSES[kind].counts else own["step"]
        if own and (kind is torch.optim.Adagrad or int(step.value) > 0):
            made[number] = {slot: leaf.value for slot, leaf in own.items()}
    scale = {leaf.name: leaf.value for leaf in others if leaf.path[-1] != "count"}
    return {**source.state_dict(), "state": made} | ({"loss_scale": scale} if scale else {})


def loaded_state(source: OptimizerSource, init: PyTree, names: FirstNames, given: Mapping[str, Any]) -> PyTree:
    """Return the state that `full_state` has returned, in the layouts of an initial one, whose memory it takes."""
    leaves, unflatten = flattened(init)
    leaves = _by_first_name(leaves, names)
    own, of_instance = {leaf.name: leaf.value for leaf in leaves}, ByKey()
    if isinstance(source, InstanceSource):
        values, (of_instance, wrong) = dict(given.get("loss_scale", {})), _to_instance(source, given["state"])
    elif isinstance(source, GroupsSource):
        values, wrong = _of_torch(source, leaves, given)
    else:
        values = {leaf.name: leaf.value for leaf in leaves_of(given["state"])}
        wrong = [f"{name} is missing" for name, x in own.items() if name not in values and x is not None]
    wrong += [f"{name} is unknown" for name, x in values.items() if name not in own and is_array(x)]
    wrong += [
        f"{name} must have shape {tuple(x.shape)}; got {tuple(values[name].shape)}"
        for name, x in own.items()
        if name in values and is_array(x) and tuple(values[name].shape) != tuple(x.shape)
    ]
    if wrong:
        raise OptimizerError(f"load_state_dict: the state must be that of this optimizer: {'; '.join(wrong)}.")
    if isinstance(source, TorchSource):
        source.load_state_dict(given)
    if isinstance(source, InstanceSource):
        source.state.load_state_dict(of_instance)
    return unflatten([_written(leaf.value, values.get(leaf.name, leaf.value)) for leaf in leaves])


def _written(x: Any, value: Any) -> Any:
    """Write a full tensor to a leaf; one number may be the count of many parameters, so it is replaced."""
    if value is x or not is_array(x):
        return value
    if isinstance(x, Tensor) and x.ndim == 0:
        return value.to(x.device, x.dtype, copy=True)
    put(x, value)
    return x


def _by_first_name(leaves: Sequence[NamedLeaf], names: FirstNames) -> list[NamedLeaf]:
    """Rename the leaves of tied parameters, which have several names in stages."""
    return [
        NamedLeaf((*leaf.path[:-1], *[names.get(str(key), key) for key in leaf.path[-1:]]), leaf.value)
        for leaf in leaves
    ]


# -- torch's form -----------------------------------------------------------------------------------------------------

Slots = dict[int, dict[str, NamedLeaf]]


def _by_number(source: GroupsSource, leaves: Sequence[NamedLeaf]) -> tuple[Slots, list[NamedLeaf]]:
    """Return the leaves of each parameter, by its number in torch's form and their slots; and all others."""
    numbers = {name: number for number, name in enumerate(chain(*source.groups()))}
    slots, found, others = {*CLASSES[type(source.optimizer)].state, "step"}, Slots(), list[NamedLeaf]()
    for leaf in leaves:
        slot, name = map(str, ("", *leaf.path)[-2:])
        if slot in slots and name in numbers and leaf.value is not None:
            found.setdefault(numbers[name], {})[slot] = leaf
        elif is_array(leaf.value):
            others.append(leaf)
    return found, others


def _of_torch(
    source: GroupsSource, leaves: Sequence[NamedLeaf], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return full tensors of torch's form by the names of leaves, and the parameters that have others than these."""
    slots, others = _by_number(source, leaves)
    values, steps, wrong = dict(given.get("loss_scale", {})), defaultdict[str, int](int), list[str]()
    for number, own in slots.items():
        found = dict(given["state"].get(number, {}))
        if found and not CLASSES[type(source.optimizer)].counts:
            found["step"] = 1.0
        if not found:
            continue
        if found.keys() != own.keys():
            wrong.append(f"parameter {number} must have {', '.join(sorted(own))}; got {', '.join(sorted(found))}")
            continue
        values |= {leaf.name: torch.as_tensor(found[slot]) for slot, leaf in own.items()}
        group = name_of(own["step"].path[:-2])
        steps[group] = max(steps[group], int(found["step"]))
    values |= {leaf.name: torch.tensor(steps[name_of(leaf.path[:-1])]) for leaf in others if leaf.path[-1] == "count"}
    return values, wrong


# -- of an instance, in torch's form ----------------------------------------------------------------------------------


def _of_instance(source: InstanceSource) -> dict[int, dict[Any, Any]]:
    """Return full tensors and values by the numbers of parameters."""
    numbers, made = {name: number for number, name in enumerate(chain(*source.groups()))}, dict[int, dict[Any, Any]]()
    for key, own in unshard(source.state.state_dict()).items():
        for name, x in own.items():
            made.setdefault(numbers[name], {})[key] = x.detach().clone() if isinstance(x, Tensor) else x
    return dict(sorted(made.items()))


def _to_instance(source: InstanceSource, given: Mapping[int, Mapping[Any, Any]]) -> tuple[ByKey, list[str]]:
    """Return arrays and values by the names of parameters; and what does not fit these."""
    names, made, wrong = dict(enumerate(chain(*source.groups()))), ByKey(), list[str]()
    for number, key, x in [(number, key, x) for number, own in given.items() for key, x in own.items()]:
        name, value = names.get(number, ""), x
        if isinstance(x, Tensor) and (value := source.state.state_memory(name, x.shape, x.dtype)) is not None:
            if tuple(value.shape) == tuple(x.shape):
                put(value, x)
            else:
                wrong.append(f"{key} of {name} must have shape {tuple(value.shape)}; got {tuple(x.shape)}")
        made.setdefault(key, {})[name] = value
    return made, wrong + [f"parameter {number} is unknown" for number in given.keys() - names.keys()]
