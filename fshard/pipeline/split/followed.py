"""`FollowedModule`: a module whose stages are copies, which get what is set on it later.

    module.eval()                              the modes of copies are those of the module
    module.scale = 3.0                         attributes that are assigned, or deleted
    module.blocks[0].register_forward_hook(f)  hooks that are registered, or removed

An object that is changed in place, such as a list, was copied with the stage: it is not followed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from fshard.errors import ModuleError
from fshard.pipeline.split.block_stage import AbsentBlock, BlockStage

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""The attributes of a module that hold its hooks by number; a number is never used again."""

_OF_ONE_MODULE = {
    "_parameters",
    "_buffers",
    "_modules",
    "_flat_weights",  # the parameters of a recurrent layer
    "_compiled_call_impl",  # stages run uncompiled
    *HOOKS,
}


class FollowedModule:
    """A module, and the copies of its modules in stages.

    Args:
        module: the module that was split.
        stages: of `split_stages`; a layer that they run itself needs nothing.
    """

    def __init__(self, module: nn.Module, stages: Sequence[nn.Module]) -> None:
        self._absent = list[AbsentBlock]()
        copies = self._copies_by_path(stages)
        self._parts = list[FollowedPart]()
        for path, part in module.named_modules():
            others = [copy for copy in copies[path] if copy is not part]
            self._parts.append(FollowedPart(path or type(module).__name__, part, others))

        # A list of layers, which are called without it.
        self._layer_list: nn.Module | None = None
        if not any(isinstance(stage, BlockStage) for stage in stages):
            self._layer_list = module

    def _copies_by_path(self, stages: Sequence[nn.Module]) -> dict[str, list[nn.Module]]:
        copies = defaultdict[str, list[nn.Module]](list)
        for stage in stages:
            if not isinstance(stage, BlockStage):
                continue
            for path, part in stage.named_modules(remove_duplicate=False):
                copies[path].append(part)
                if not isinstance(part, AbsentBlock):
                    continue

                # The block that it finds shapes with is a copy, too.
                self._absent.append(part)
                block: nn.Module = vars(part)["_block"]
                for name, inner in block.named_modules(remove_duplicate=False):
                    copies[f"{path}.{name}" if name else path].append(inner)
        return copies

    def follow(self) -> None:
        """Set on the copies what was set on the module since the last call."""
        if self._layer_list is not None and has_hooks(self._layer_list):
            raise ModuleError(
                f"hooks of {type(self._layer_list).__name__} must be registered on its layers, "
                "which are called in stages without it. Register them on the first or the last "
                "layer: model.module[-1]."
            )
        has_changes = [part.follow() for part in self._parts]  # all of them: no early exit
        if any(has_changes):
            for block in self._absent:
                block.forget_shapes()


class FollowedPart:
    """A module inside of a followed one, with its copies."""

    def __init__(self, path: str, source: nn.Module, copies: Sequence[nn.Module]) -> None:
        self._path = path
        self._source = source
        self._copies = copies
        self._record()

    def _record(self) -> None:
        """Record the attributes and hooks that the copies have now."""
        values = vars(self._source)
        self._attributes = _attributes_of(self._source)
        self._hooks = _hooks_of(self._source)
        # The same again, in the form that is compared fastest.
        self._values = list(values.values())
        self._hook_dicts = [values[name] for name in self._hooks]

    def _is_unchanged(self) -> bool:
        """Compare attributes by identity, in one pass: every step does, for each module."""
        values = vars(self._source).values()
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            return False
        return [*map(list, self._hook_dicts)] == [*self._hooks.values()]

    def follow(self) -> bool:
        """Set on the copies what has changed; return False if nothing has."""
        if self._is_unchanged():
            return False

        attributes = _attributes_of(self._source)
        absent = object()  # an attribute may be None
        new_values = dict[str, Any]()
        for name, x in attributes.items():
            if self._attributes.get(name, absent) is not x:
                new_values[name] = x
        removed = self._attributes.keys() - attributes.keys()

        if self._copies:
            for name, x in new_values.items():
                self._validate(name, x)
        for copy in self._copies:
            self._set(copy, new_values, removed)
        self._record()
        return True

    def _set(self, copy: nn.Module, new_values: Mapping[str, Any], removed: set[str]) -> None:
        if isinstance(copy, AbsentBlock):
            copy.training = self._source.training  # it reads other attributes from its block
            return
        values = vars(copy)
        values.update(new_values)
        for name in removed:
            values.pop(name, None)
        for name, keys_before in self._hooks.items():
            _set_hooks(values[name], vars(self._source)[name], keys_before)

    def _validate(self, name: str, value: Any) -> None:
        """Raise if an attribute would refer to other modules than those of a stage."""
        is_of_module = any([_refers_to_module(x) for x in tree_leaves(value)])
        if name == "forward" or is_of_module:
            raise ModuleError(
                f"{self._path}.{name} must be set before boost, since stages run copies of the "
                "module, which do not have the same modules and parameters; got "
                f"{type(value).__name__}, set after boost. Set it before."
            )


def _refers_to_module(x: object) -> bool:
    """Return True for a module, a parameter, and a method of a module."""
    if isinstance(x, nn.Module | nn.Parameter):
        return True
    return isinstance(getattr(x, "__self__", None), nn.Module)


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks of calls or of gradients."""
    return any(vars(module).get(name) for name in HOOKS)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in vars(module).items() if name not in _OF_ONE_MODULE}


def _hooks_of(module: nn.Module) -> dict[str, list[int]]:
    values = vars(module)
    return {name: [*values[name]] for name in HOOKS if name in values}


def _set_hooks(
    hooks: dict[int, Any], source: Mapping[int, Any], keys_before: Sequence[int]
) -> None:
    """Give a copy the hooks of its source, and those that were removed from the source no longer.

    Hooks that the copy's forward registered itself stay, last.
    """
    copied = dict(hooks)
    registered = dict[int, Any]()
    for key, hook in copied.items():
        is_of_source = key in source or key in keys_before
        if not is_of_source:
            registered[key] = hook

    hooks.clear()
    for key, hook in source.items():
        hooks[key] = copied.get(key, hook)  # a method was copied with its module
    hooks.update(registered)
