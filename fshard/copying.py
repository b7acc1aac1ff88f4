"""Copies of modules that share tensors with the original, or have others in their place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fshard.errors import ModuleError

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module, instead: Mapping[int, Any]) -> Module:
    """Copy a module by `copy.deepcopy`, with other objects in the place of some, by their ids.

    >>> layer = nn.Linear(2, 2)
    >>> made = copied(layer, {id(layer.weight): layer.weight})
    >>> made.weight is layer.weight, made.bias is layer.bias
    (True, False)
    """
    memo = dict(instead)
    for part in module.modules():
        for x in tree_leaves([*vars(part).values()]):
            if isinstance(x, Tensor) and not x.is_leaf:  # weight_norm's, say, which torch does not copy
                memo.setdefault(id(x), x.detach().clone())
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ModuleError(
            f"{type(module).__name__} must support copy.deepcopy; got {type(error).__name__}: {error}. "
            "Make what cannot be copied in forward, or give the class a __deepcopy__."
        ) from error
