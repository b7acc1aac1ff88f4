"""The state of a boosted optimizer: as it is saved, and in the form of torch's `state_dict`.

ours     {"exp_avg": {"w": x, "bias": y}, "step": {"w": 3, "bias": 3}, "count": 3}     with several groups {0: ..., 1: ...}
torch    {"state": {0: {"exp_avg": x, "step": 3}, 1: {"exp_avg": y, "step": 3}}, "param_groups": [...]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.booster.stored import StoredForm, full, put
from fshard.checkpoint.names import NamedLeaf, flattened, is_array, shaped
from fshard.errors import OptimizerError
from fshard.mesh.layout import PyTree
from fshard.optim.torch_classes import CLASSES
from fshard.optim.torch_instances import GroupsSource, InstanceSource, OptimizerSource


class Groups:
    """The options of an optimizer's groups; schedulers write some of them."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = groups

    def state_dict(self) -> list[dict[str, Any]]:
        return [{name: x for name, x in group.items() if name != "params"} for group in self._groups]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        if len(state) != len(self._groups):
            raise OptimizerError(f"param_groups must be {len(self._groups)}; got {len(state)}.")
        for group, own, new in zip(self._groups, self.state_dict(), state, strict=True):
            group |= shaped({name: x for name, x in new.items() if name != "params"}, own)


def stored_state(source: OptimizerSource, form: StoredForm, state: PyTree) -> dict[str, Any]:
    """Return what is saved of an optimizer."""
    _refuse_own_class(source)
    groups = {"groups": Groups(source.given.param_groups)} if isinstance(source, GroupsSource) else {}
    return {"state": form.stored(state), **groups}


def full_state(source: OptimizerSource, form: StoredForm, state: PyTree) -> dict[str, Any]:
    """Return what an optimizer's `state_dict` returns: of a pure one the full state, by the names of parameters."""
    _refuse_own_class(source)
    leaves, unflatten = flattened(form.stored(state))
    values = full({leaf.name: leaf.value for leaf in leaves})
    if not isinstance(source, GroupsSource):
        return {"state": unflatten([values[leaf.name] for leaf in leaves])}
    names, groups, start = source.groups(), Groups(source.given.param_groups).state_dict(), 0
    for group, own in zip(groups, names, strict=True):
        group["params"] = [*range(start, start + len(own))]
        start += len(own)
    made = {"state": _by_number(type(source.given), names, values), "param_groups": groups}
    scaling = {name: x for name, x in values.items() if "inner.count" in values and not name.startswith("inner.")}
    return made | ({"loss_scale": scaling} if scaling else {})


def loaded_state(source: OptimizerSource, form: StoredForm, init: PyTree, given: Mapping[str, Any]) -> PyTree:
    """Return the state that `full_state` has made, in the layouts of an initial one, whose memory it takes."""
    _refuse_own_class(source)
    tree = form.stored(init)
    own = {leaf.name: leaf.value for leaf in flattened(tree)[0]}
    if isinstance(source, GroupsSource):
        values = _by_leaf(type(source.given), source.groups(), own, given["state"]) | dict(given.get("loss_scale", {}))
        Groups(source.given.param_groups).load_state_dict(given["param_groups"])
    else:
        values = {leaf.name: leaf.value for leaf in flattened(given["state"])[0]}
        if missing := sorted(own.keys() - values.keys()):
            raise OptimizerError(f"load_state_dict: the state must have {', '.join(missing)}.")
    return form.own(with_values(tree, values), init)


def _refuse_own_class(source: OptimizerSource) -> None:
    if isinstance(source, InstanceSource):
        raise OptimizerError(
            f"{type(source.given).__name__}, an optimizer of your own class, has its state on this device alone, and it cannot "
            "be saved. Save optimizer.optim.state yourself, or write a pair: fs.optim.Optimizer(init, update)."
        )


def _by_number(kind: type, groups: Sequence[Sequence[str]], values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return state by the numbers of parameters, as torch has it, of full state by the names of leaves."""
    made = dict[int, dict[str, Any]]()
    for number, (_, leaves) in enumerate(_entries(groups, values)):
        found = {slot: values[leaf] for slot, leaf in leaves.items() if values[leaf] is not None}
        has_begun = kind is torch.optim.Adagrad or int(found["step"]) > 0
        if not CLASSES[kind].counts:
            del found["step"]
        if found and has_begun:
            made[number] = found
    return made


def _by_leaf(
    kind: type, groups: Sequence[Sequence[str]], own: Mapping[str, Any], state: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return full state by the names of leaves, of torch's form; `own` has all leaves."""
    values, wrong = dict[str, Any](), list[str]()
    for number, (prefix, leaves) in enumerate(_entries(groups, own)):
        given = dict(state.get(number, {}))
        if given and not CLASSES[kind].counts:
            given["step"] = torch.tensor(1.0)
        wanted = {slot for slot, leaf in leaves.items() if own[leaf] is not None} if given else set[str]()
        if wanted != given.keys():
            wrong.append(f"parameter {number} must have {', '.join(sorted(wanted))}; got {', '.join(sorted(given))}")
            continue
        values |= {leaves[slot]: torch.as_tensor(x) for slot, x in given.items()}
        count = max(int(values.get(f"{prefix}count", 0)), int(given.get("step", 0)))
        values[f"{prefix}count"] = torch.tensor(count)
    if wrong:
        raise OptimizerError(f"load_state_dict: the state must be that of {kind.__name__}: {'; '.join(wrong)}.")
    return values


def _entries(groups: Sequence[Sequence[str]], values: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Return for each parameter of all groups the prefix of its group, and the name of the leaf of each slot."""
    made = list[tuple[str, dict[str, str]]]()
    for group, names in enumerate(groups):
        prefix = next(p for p in ("", "inner.", f"{group}.", f"inner.{group}.") if f"{p}count" in values)
        slots = {leaf[len(prefix) :].partition(".")[0] for leaf in values if leaf.startswith(prefix)} - {"count"}
        made += [(prefix, {slot: f"{prefix}{slot}.{name}" for slot in sorted(slots)}) for name in names]
    return made


def with_values(tree: PyTree, values: Mapping[str, Any]) -> PyTree:
    """Write full tensors to a stored tree, by the names of leaves; others stay. Return the tree, with other numbers."""
    leaves, unflatten = flattened(tree)
    known = {leaf.name: leaf.value for leaf in leaves}
    wrong = [f"{name} is unknown" for name in values.keys() - known.keys()]
    wrong += [
        f"{name} must have shape {tuple(known[name].shape)}; got {tuple(x.shape)}"
        for name, x in values.items()
        if is_array(known.get(name)) and tuple(known[name].shape) != tuple(x.shape)
    ]
    if wrong:
        raise OptimizerError(f"load_state_dict: {'; '.join(sorted(wrong))}.")

    def written(leaf: NamedLeaf) -> Any:
        x, value = leaf.value, values.get(leaf.name, leaf.value)
        if leaf.name not in values or not is_array(x):
            return value
        if isinstance(x, Tensor) and x.ndim == 0:  # one tensor may be the count of many parameters
            return value.to(x.device, x.dtype, copy=True)
        put(x, value)
        return x

    return unflatten(list(map(written, leaves)))
