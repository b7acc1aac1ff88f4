"""The state of an optimizer as full tensors: `state_dict` gathers it, `load_state_dict` writes it.

sharded   {"exp_avg": {"w": x, "bias": y}, "step": {"w": 3, "bias": 3}, "count": 3}
          with several groups {0: ..., 1: ...}
torch     {"state": {0: {"exp_avg": x, "step": 3}, 1: {"exp_avg": y, "step": 3}},
           "param_groups": [...]}
pure      {"state": {"exp_avg": {"w": x, "bias": y}, ...}}
          by the first names of tied parameters
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
    """Return the leaves of a tree as full tensors; all devices must call it.

    Each has memory of its own, so that a caller may write to it.
    """
    return [NamedLeaf(leaf.path, _full(leaf.value)) for leaf in leaves_of(unshard(tree))]


def _full(x: Any) -> Any:
    if isinstance(x, JoinedArray):
        if any(part is None for part in x.parts):
            return None  # outside of the mesh
        return torch.cat([*x.parts], x.dim)
    return x.detach().clone() if isinstance(x, Tensor) else x


@torch.no_grad()
def put(x: Any, value: Tensor) -> None:
    """Write a full tensor to an array."""
    for start, array in stored_parts(x):
        part = [slice(i, i + length) for i, length in zip(start, array.shape, strict=True)]
        rows = value[tuple(part)]
        if isinstance(array, Sharded):
            fill(array, rows)
        else:
            array.copy_(rows)


def full_state(source: OptimizerSource, state: PyTree, names: FirstNames) -> dict[str, Any]:
    """Return the full state of an optimizer in torch's form; all devices must call it."""
    # Tied parameters have a leaf in each stage; the last one is as good as the first.
    by_name = {leaf.name: leaf for leaf in _by_first_name(full_leaves(state), names)}
    leaves = [*by_name.values()]
    if not isinstance(source, TorchSource):
        return {"state": build([(leaf.path, leaf.value) for leaf in leaves])}

    slots, others = _by_number(source, leaves)
    values: Any
    if isinstance(source, InstanceSource):
        values = _of_instance(source)
    else:
        values = _of_class(source, slots)
    return {**source.state_dict(), "state": values, **_sections(others)}


def _sections(leaves: Sequence[NamedLeaf]) -> dict[str, dict[str, Any]]:
    """Return the arrays for which torch's form has no place, in sections of fshard's own.

    The steps of a parameter are the count, so that a count needs no place. All arrays but those of
    compression are in "loss_scale": the names of checkpoints stay.
    """
    sections = dict[str, dict[str, Any]]()
    for leaf in leaves:
        if leaf.path[-1] == "count":
            continue
        key = "compress" if leaf.path[0] == "compress" else "loss_scale"
        sections.setdefault(key, {})[leaf.name] = leaf.value
    return sections


def loaded_state(
    source: OptimizerSource, init: PyTree, names: FirstNames, state_dict: Mapping[str, Any]
) -> PyTree:
    """Return the state that `full_state` has returned, in the layouts of an initial state.

    The arrays of the initial state are written to and returned.
    """
    leaves, unflatten = flattened(init)
    leaves = _by_first_name(leaves, names)
    values: dict[str, Any] = {**state_dict.get("loss_scale", {}), **state_dict.get("compress", {})}
    of_instance = ByKey()
    if isinstance(source, InstanceSource):
        of_instance, errors = _to_instance(source, state_dict["state"])
    elif isinstance(source, GroupsSource):
        errors = _to_class(source, leaves, state_dict["state"], values)
    else:
        values = {leaf.name: leaf.value for leaf in leaves_of(state_dict["state"])}
        missing = [x.name for x in leaves if x.name not in values and x.value is not None]
        errors = [f"{name} is missing" for name in missing]
    errors += _misfits(leaves, values)
    if errors:
        raise OptimizerError(
            "load_state_dict: the state must be that of this optimizer: "
            f"{'; '.join(errors)}.{_scale_fix(source, leaves, values)}"
        )

    if isinstance(source, TorchSource):
        source.load_state_dict(state_dict)
    if isinstance(source, InstanceSource):
        source.state.load_state_dict(of_instance)
    return unflatten([_written(leaf.value, values.get(leaf.name, leaf.value)) for leaf in leaves])


def _scale_fix(
    source: OptimizerSource, leaves: Sequence[NamedLeaf], values: Mapping[str, Any]
) -> str:
    """Return the way out if only one of state and optimizer has a loss scale; else nothing."""
    is_in_state = values.keys() >= _SCALE
    is_in_optimizer = {leaf.name for leaf in leaves} >= _SCALE
    if is_in_state == is_in_optimizer:
        return ""
    if is_in_optimizer:
        return (
            ' It has no loss scale, and this optimizer has that of precision="fp16". Load '
            '{"state": {**optimizer.state_dict()["state"], "inner": state_dict["state"]}}.'
        )
    without = '{"state": state_dict["state"]["inner"]}'
    if isinstance(source, TorchSource):
        without = 'state_dict without its entry "loss_scale"'
    return (
        f' It has the loss scale of precision="fp16", and this optimizer has none. Load {without}.'
    )


_SCALE = {"scale", "patience"}
"""Names of numbers in the state of `loss_scaled`."""


def _misfits(leaves: Sequence[NamedLeaf], values: Mapping[str, Any]) -> list[str]:
    """List the values that are arrays of no leaf, or that have another shape than theirs."""
    arrays = {leaf.name: leaf.value for leaf in leaves if is_array(leaf.value)}
    errors = list[str]()
    for name, value in values.items():
        if name not in arrays and is_array(value):
            errors.append(f"{name} is unknown")
    for name, array in arrays.items():
        expected = tuple(array.shape)
        if name in values and tuple(values[name].shape) != expected:
            errors.append(f"{name} must have shape {expected}; got {tuple(values[name].shape)}")
    return errors


def _written(x: Any, value: Any) -> Any:
    """Write a full tensor to a leaf; return the leaf, or a new one of a number.

    One number may be the count of many parameters, so that a write to it would change all.
    """
    if value is x or not is_array(x):
        return value
    is_number = isinstance(x, Tensor) and x.ndim == 0
    if is_number:
        return value.to(x.device, x.dtype, copy=True)
    put(x, value)
    return x


def _by_first_name(leaves: Sequence[NamedLeaf], names: FirstNames) -> list[NamedLeaf]:
    """Rename the leaves of tied parameters, which have several names in stages."""
    renamed = list[NamedLeaf]()
    for leaf in leaves:
        path = leaf.path
        if path:
            path = (*path[:-1], names.get(str(path[-1]), path[-1]))
        renamed.append(NamedLeaf(path, leaf.value))
    return renamed


# -- torch's form ----------------------------------------------------------------------------------

Slots = dict[int, dict[str, NamedLeaf]]
"""The leaves of each parameter, by its number and their keys in torch's form."""


def _by_number(source: TorchSource, leaves: Sequence[NamedLeaf]) -> tuple[Slots, list[NamedLeaf]]:
    """Return the leaves that torch's form has for each parameter, and all other arrays."""
    numbers = _numbers(source)
    kind = CLASSES.get(type(source.optimizer))
    keys = () if kind is None else (*kind.state, "step")
    slots = Slots()
    others = list[NamedLeaf]()
    for leaf in leaves:
        # "exp_avg", "w" of the path of an average; a count has one entry.
        key, name = map(str, ("", "", *leaf.path)[-2:])
        if key in keys and name in numbers and leaf.value is not None:
            slots.setdefault(numbers[name], {})[key] = leaf
        elif is_array(leaf.value):
            others.append(leaf)
    return slots, others


def _numbers(source: TorchSource) -> dict[str, int]:
    return {name: number for number, name in enumerate(chain(*source.groups()))}


def _of_class(source: TorchSource, slots: Slots) -> dict[int, dict[str, Any]]:
    """Return full tensors by the numbers of parameters, as a class of torch has them.

    It has those of parameters that have had a step; Adagrad's begin with theirs.
    """
    kind = type(source.optimizer)
    state = dict[int, dict[str, Any]]()
    for number, leaves in slots.items():
        step = leaves["step"]
        if not CLASSES[kind].counts:
            del leaves["step"]
        has_state = kind is torch.optim.Adagrad or int(step.value) > 0
        if leaves and has_state:
            state[number] = {key: leaf.value for key, leaf in leaves.items()}
    return state


def _to_class(
    source: GroupsSource,
    leaves: Sequence[NamedLeaf],
    state: Mapping[int, Any],
    values: dict[str, Any],
) -> list[str]:
    """Add full tensors of torch's form to `values`, by the names of leaves.

    Returns:
        the errors: the parameters whose state has other keys.
    """
    slots, others = _by_number(source, leaves)
    counts_steps = CLASSES[type(source.optimizer)].counts
    errors = list[str]()
    steps = defaultdict[str, int](int)  # of each group, the most of its parameters
    for number, expected in slots.items():
        tensors = dict(state.get(number, {}))
        if not tensors:
            continue  # it has had no step
        if not counts_steps:
            tensors["step"] = 1.0
        if tensors.keys() != expected.keys():
            keys = ", ".join(sorted(expected))
            errors.append(f"parameter {number} must have {keys}; got {', '.join(sorted(tensors))}")
            continue
        for key, leaf in expected.items():
            values[leaf.name] = torch.as_tensor(tensors[key])
        group = name_of(expected["step"].path[:-2])
        steps[group] = max(steps[group], int(tensors["step"]))
    for leaf in others:
        if leaf.path[-1] == "count":
            values[leaf.name] = torch.tensor(steps[name_of(leaf.path[:-1])])
    return errors


def _of_instance(source: InstanceSource) -> dict[int, dict[Any, Any]]:
    """Return full tensors and values of a class of one's own, by the numbers of parameters."""
    numbers = _numbers(source)
    state = dict[int, dict[Any, Any]]()
    for key, values in unshard(source.state.state_dict()).items():
        for name, x in values.items():
            state.setdefault(numbers[name], {})[key] = _full(x)
    return dict(sorted(state.items()))


def _to_instance(
    source: InstanceSource, state: Mapping[int, Mapping[Any, Any]]
) -> tuple[ByKey, list[str]]:
    """Return arrays and values by the names of parameters, and the errors of those that misfit."""
    names = {number: name for name, number in _numbers(source).items()}
    by_key = ByKey()
    errors = [f"parameter {number} is unknown" for number in state.keys() - names.keys()]
    for number, values in state.items():
        name = names.get(number, "")
        for key, x in values.items():
            array = None
            if isinstance(x, Tensor):
                array = source.state.state_memory(name, x.shape, x.dtype)
            by_key.setdefault(key, {})[name] = x if array is None else array
            if array is None:
                continue
            if tuple(array.shape) == tuple(x.shape):
                put(array, x)
            else:
                errors.append(
                    f"{key} of {name} must have shape {tuple(array.shape)}; got {tuple(x.shape)}"
                )
    return by_key, errors
