"""Copies of modules that share tensors with the original, and of tensors that share memory.

Tensors share memory until one of them is written to.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fshard.errors import ModuleError

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module, instead: Mapping[int, Any]) -> Module:
    """Copy a module by `copy.deepcopy`, with some objects replaced, by their ids.

    >>> layer = nn.Linear(2, 2)
    >>> copy = copied(layer, {id(layer.weight): layer.weight})
    >>> copy.weight is layer.weight, copy.bias is layer.bias
    (True, False)
    """
    memo = dict(instead)
    # torch does not copy a computed tensor, such as that of weight_norm.
    for submodule in module.modules():
        for leaf in tree_leaves(list(vars(submodule).values())):
            tensors = getattr(leaf, "shards", [leaf])  # the shards of an array, or the leaf itself
            for x in tensors:
                if isinstance(x, Tensor) and not x.is_leaf:
                    memo.setdefault(id(x), x.detach().clone())
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ModuleError(
            f"{type(module).__name__} must support copy.deepcopy; got {type(error).__name__}: "
            f"{error}. Make what cannot be copied in forward, or give the class a __deepcopy__."
        ) from error


_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_lazy_clone: Any = _C._VariableFunctions._lazy_clone
_transform_now: Any = _C._functorch.peek_interpreter_stack


def lazy_copy(x: Any) -> Any:
    """Return a copy to write to; its memory is copied at the first write.

    >>> x = torch.zeros(2)
    >>> copy = lazy_copy(x)
    >>> untouched(copy), untouched(copy.add_(1)), x
    (True, False, tensor([0., 0.]))
    """
    if not isinstance(x, Tensor):
        return x
    is_transformed = _transform_now() is not None  # then a tensor may have no memory of its own
    if type(x) is not Tensor or is_transformed:
        return x.clone()
    try:
        return _lazy_clone(x)
    except RuntimeError:  # memory that is not torch's own, numpy's for instance
        return x.clone()


def untouched(copy: Any) -> bool:
    """Return True if a lazy copy has not been written to."""
    return type(copy) is Tensor and _transform_now() is None and _C._is_cow_tensor(copy)
