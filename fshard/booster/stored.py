"""The form in which a boosted model and its optimizer are stored: that of one device, whatever the plugin.

    [{"0.w": x}, {"2.w": y}]      stages              {"0.w": x, "2.w": y}
    {"qkv.w": (q, k, v)}          a fused weight      {"qkv.w": JoinedArray((q, k, v), dim=0)}

Arrays stay as they are sharded. `full` gathers them, and `put` writes full tensors back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

from fshard.checkpoint.names import JoinedArray, is_array, stored_parts
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.layout.tree import NAMESPACE
from fshard.mesh.reshard.device_put import unshard
from fshard.transforms.module.lazy import fill

_trees: Any = optree


class StoredForm:
    """Converts trees with an entry for each parameter of a boosted model, and trees of such trees."""

    def __init__(self, model: Any) -> None:
        self.model, module = model, model.module
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        first: dict[int, str] = {}
        self.names = {name: first.setdefault(id(x), name) for name, x in tensors}  # a tied one has several

    # -- trees of parameters ------------------------------------------------------------------------------------------

    def stored(self, tree: PyTree) -> PyTree:
        """Return a tree in the stored form."""
        found, structure = self._flat(tree)
        return _trees.tree_unflatten(structure, [self._merged(x) if self._is_by_name(x) else x for x in found])

    def own(self, stored: PyTree, tree: PyTree) -> PyTree:
        """Return a stored tree in the form of another one."""
        found, structure = self._flat(tree)
        pairs = zip(structure.flatten_up_to(stored), found, strict=True)
        return _trees.tree_unflatten(structure, [self._cut(x, own) if self._is_by_name(own) else x for x, own in pairs])

    def _flat(self, tree: PyTree) -> tuple[list[Any], Any]:
        def is_leaf(x: Any) -> bool:
            return isinstance(x, Sharded) or self._is_by_name(x)

        return _trees.tree_flatten(tree, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE)

    def _is_by_name(self, node: Any) -> bool:
        """Return True for a tree like that of the parameters."""
        own, given = _stages(self.model.params), _stages(node)
        is_like = isinstance(node, list) == isinstance(self.model.params, list) and len(own) == len(given)
        return is_like and all(isinstance(x, dict) and x.keys() == y.keys() for x, y in zip(given, own, strict=True))

    def _merged(self, node: Any) -> dict[str, Any]:
        stages = zip(_stages(node), _stages(self.model.params), self.model._plans, strict=True)
        return {
            self.names[name]: _joined(x, params[name], plan, name)
            for tree, params, plan in stages
            for name, x in tree.items()
        }

    def _cut(self, stored: Mapping[str, Any], own: Any) -> Any:
        made = [{name: _parts(stored[self.names[name]], x) for name, x in tree.items()} for tree in _stages(own)]
        return made if isinstance(own, list) else made[0]

    # -- the module ---------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """Return what the module's `state_dict` has, in its order."""
        values = self.stored(self.model.params)
        values |= {self.names[name]: x for tree in _stages(self.model.module_buffers) for name, x in tree.items()}
        return {
            key: values[self.names[key]] if key in self.names else x
            for key, x in self.model.module.state_dict(keep_vars=True).items()
        }

    def set_module_state(self, state: Mapping[str, Any]) -> None:
        """Let the model have arrays of `module_state`, into which other values have been written."""
        model = self.model
        values = {self.names[key]: x for key, x in state.items() if key in self.names}
        model.params = self.own(values, model.params)
        own = [{key: values.get(self.names[key], x) for key, x in one.items()} for one in _stages(model.module_buffers)]
        model.set_buffers(own if isinstance(model.module_buffers, list) else own[0])
        for key in state.keys() - self.names.keys():
            model.module.get_submodule(key.rpartition(".")[0]).set_extra_state(state[key])


def _stages(tree: Any) -> list[Any]:
    return tree if isinstance(tree, list) else [tree]


def _joined(x: Any, param: Any, plan: Any, name: str) -> Any:
    """Return what is stored of the parts of a fused weight, or of state for each of them."""
    if not isinstance(x, tuple):
        return x
    if all(part is x[0] for part in x):  # the count of their steps
        return x[0]
    alike = all(is_array(part) and part.shape == own.shape for part, own in zip(x, param, strict=True))
    return JoinedArray(x, plan.parts_of(name)[1]) if alike else x


def _parts(stored: Any, own: Any) -> Any:
    if isinstance(stored, JoinedArray):
        return tuple(stored.parts)
    return (stored,) * len(own) if isinstance(own, tuple) and not isinstance(stored, tuple) else stored


# -- full tensors -----------------------------------------------------------------------------------------------------


def full(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return full tensors in place of arrays, each of its own; all devices must call it."""
    parts = {name: [x for _, x in stored_parts(value)] for name, value in values.items() if is_array(value)}
    gathered, made = unshard(parts), dict(values)
    for name, own in gathered.items():
        x = values[name]
        made[name] = torch.cat(own, x.dim) if isinstance(x, JoinedArray) else own[0].detach().clone()
    return made


def put(x: Any, value: Any) -> None:
    """Write a full tensor to an array."""
    for at, part in stored_parts(x):
        own = value
        for dim, start in enumerate(at):
            own = own.narrow(dim, start, part.shape[dim])
        fill(part, own.to(part.dtype)) if isinstance(part, Sharded) else part.copy_(own)
