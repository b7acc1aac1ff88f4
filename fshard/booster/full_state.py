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

from fshard.checkpoint.names import (
    JoinedArray,
    NamedLeaf,
    build,
    flattened,
    is_array,
    leaves_of,
    name_of,
    stored_parts,
)
from fshard.errors import OptimizerError
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import unshard
from fshard.optim.torch_optim.classes import CLASSES
from fshard.optim.torch_optim.instance_state import ByKey
from fshard.optim.torch_optim.instances import (
    GroupsSource,
    InstanceSource,
    OptimizerSource,
    TorchSource,
)
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
    for start, array in stored_parts(x):
        rows = value[
            tuple([slice(i, i + length) for i, length in zip(start, array.shape, strict=True)])
        ]
        fill(array, rows) if isinstance(array, Sharded) else array.copy_(rows)


def full_state(source: OptimizerSource, state: PyTree, names: FirstNames) -> dict[str, Any]:
    """Return the full state of an optimizer in torch's form; all devices must call it."""
    leaves = [*{leaf.name: leaf for leaf in _by_first_name(full_leaves(state), names)}.values()]
    if not isinstance(source, TorchSource):
        return {"state": build([(leaf.path, leaf.value) for leaf in leaves])}
    slots, beside = _by_number(source, leaves)
    values: Any = (
        _of_instance(source) if isinstance(source, InstanceSource) else _of_class(source, slots)
    )
    sections = dict[str, dict[str, Any]]()  # which torch's form does not have
    for leaf in beside:
        if leaf.path[-1] != "count":
            key = "compress" if leaf.path[0] == "compress" else "loss_scale"
            sections.setdefault(key, {})[leaf.name] = leaf.value
    return {**source.state_dict(), "state": values, **sections}


def loaded_state(
    source: OptimizerSource, init: PyTree, names: FirstNames, state_dict: Mapping[str, Any]
) -> PyTree:
    """Return the state that `full_state` has returned, in the layouts of an initial one, whose memory it takes."""
    leaves, unflatten = flattened(init)
    leaves, of_instance = _by_first_name(leaves, names), ByKey()
    arrays = {leaf.name: leaf.value for leaf in leaves if is_array(leaf.value)}
    values: dict[str, Any] = {**state_dict.get("loss_scale", {}), **state_dict.get("compress", {})}
    if isinstance(source, InstanceSource):
        of_instance, errors = _to_instance(source, state_dict["state"])
    elif isinstance(source, GroupsSource):
        errors = _to_class(source, leaves, state_dict["state"], values)
    else:
        values = {leaf.name: leaf.value for leaf in leaves_of(state_dict["state"])}
        errors = [
            f"{x.name} is missing" for x in leaves if x.name not in values and x.value is not None
        ]
    errors += [
        f"{name} is unknown" for name, x in values.items() if name not in arrays and is_array(x)
    ]
    errors += [
        f"{name} must have shape {tuple(x.shape)}; got {tuple(values[name].shape)}"
        for name, x in arrays.items()
        if name in values and tuple(values[name].shape) != tuple(x.shape)
    ]
    if errors:
        raise OptimizerError(
            f"load_state_dict: the state must be that of this optimizer: {'; '.join(errors)}."
        )
    if isinstance(source, TorchSource):
        source.load_state_dict(state_dict)
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
        NamedLeaf(
            (*leaf.path[:-1], *[names.get(str(key), key) for key in leaf.path[-1:]]), leaf.value
        )
        for leaf in leaves
    ]


# -- torch's form -----------------------------------------------------------------------------------------------------

Slots = dict[int, dict[str, NamedLeaf]]
"""The leaves of each parameter, by its number and their keys in torch's form."""


def _by_number(source: TorchSource, leaves: Sequence[NamedLeaf]) -> tuple[Slots, list[NamedLeaf]]:
    """Return the leaves that torch's form has for each parameter, and all other arrays."""
    numbers, kind = _numbers(source), CLASSES.get(type(source.optimizer))
    keys, slots, beside = () if kind is None else (*kind.state, "step"), Slots(), list[NamedLeaf]()
    for leaf in leaves:
        key, name = map(str, ("", "", *leaf.path)[-2:])
        if key in keys and name in numbers and leaf.value is not None:
            slots.setdefault(numbers[name], {})[key] = leaf
        elif is_array(leaf.value):
            beside.append(leaf)
    return slots, beside


def _numbers(source: TorchSource) -> dict[str, int]:
    return {name: number for number, name in enumerate(chain(*source.groups()))}


def _of_class(source: TorchSource, slots: Slots) -> dict[int, dict[str, Any]]:
    """Return full tensors by the numbers of parameters that have had a step, or that begin with state, as Adagrad's."""
    kind, state = type(source.optimizer), dict[int, dict[str, Any]]()
    for number, leaves in slots.items():
        step = leaves["step"] if CLASSES[kind].counts else leaves.pop("step")
        if leaves and (kind is torch.optim.Adagrad or int(step.value) > 0):
            state[number] = {key: leaf.value for key, leaf in leaves.items()}
    return state


def _to_class(
    source: GroupsSource,
    leaves: Sequence[NamedLeaf],
    state: Mapping[int, Any],
    values: dict[str, Any],
) -> list[str]:
    """Add full tensors of torch's form to `values`, by the names of leaves; list the parameters that have others."""
    slots, beside = _by_number(source, leaves)
    errors, steps = list[str](), defaultdict[str, int](int)
    for number, expected in slots.items():
        tensors = dict(state.get(number, {}))
        if tensors and not CLASSES[type(source.optimizer)].counts:
            tensors["step"] = 1.0
        if tensors and tensors.keys() != expected.keys():
            keys, got = (", ".join(sorted(each)) for each in (expected, tensors))
            errors.append(f"parameter {number} must have {keys}; got {got}")
        elif tensors:
            values |= {leaf.name: torch.as_tensor(tensors[key]) for key, leaf in expected.items()}
            group = name_of(expected["step"].path[:-2])
            steps[group] = max(steps[group], int(tensors["step"]))
    values |= {
        x.name: torch.tensor(steps[name_of(x.path[:-1])]) for x in beside if x.path[-1] == "count"
    }
    return errors


def _of_instance(source: InstanceSource) -> dict[int, dict[Any, Any]]:
    """Return full tensors and values of a class of one's own by the numbers of parameters."""
    numbers, state = _numbers(source), dict[int, dict[Any, Any]]()
    for key, values in unshard(source.state.state_dict()).items():
        for name, x in values.items():
            state.setdefault(numbers[name], {})[key] = (
                x.detach().clone() if isinstance(x, Tensor) else x
            )
    return dict(sorted(state.items()))


def _to_instance(
    source: InstanceSource, state: Mapping[int, Mapping[Any, Any]]
) -> tuple[ByKey, list[str]]:
    """Return arrays and values by the names of parameters, and the errors of those that do not fit these."""
    names, by_key = {number: name for name, number in _numbers(source).items()}, ByKey()
    errors = [f"parameter {number} is unknown" for number in state.keys() - names.keys()]
    for name, key, x in [
        (names.get(number, ""), key, x) for number, each in state.items() for key, x in each.items()
    ]:
        array = source.state.state_memory(name, x.shape, x.dtype) if isinstance(x, Tensor) else None
        if array is not None and tuple(array.shape) != tuple(x.shape):
            errors.append(
                f"{key} of {name} must have shape {tuple(array.shape)}; got {tuple(x.shape)}"
            )
        elif array is not None:
            put(array, x)
        by_key.setdefault(key, {})[name] = x if array is None else array
    return by_key, errors
