"""Copies of modules that share tensors with the original, and of tensors that share memory until a write."""

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
    >>> made = copied(layer, {id(layer.weight): layer.weight})
    >>> made.weight is layer.weight, made.bias is layer.bias
    (True, False)
    """
    memo = dict(instead)
    for part in module.modules():
        for leaf in tree_leaves([*vars(part).values()]):
            for x in getattr(leaf, "shards", [leaf]):  # of an array, and of a tensor itself
                is_computed = isinstance(x, Tensor) and not x.is_leaf
                if is_computed:  # such as weight_norm's, which torch does not copy
                    memo.setdefault(id(x), x.detach().clone())
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ModuleError(
            f"{type(module).__name__} must support copy.deepcopy; got {type(error).__name__}: {error}. "
            "Make what cannot be copied in forward, or give the class a __deepcopy__."
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
    if not isinstance(x, Tensor) or type(x) is not Tensor or _transform_now() is not None:
        return x.clone() if isinstance(x, Tensor) else x
    try:
        return _lazy_clone(x)
    except RuntimeError:  # memory that is not torch's own, numpy's for instance
        return x.clone()


def untouched(copy: Any) -> bool:
    """Return True if a lazy copy has not been written to."""
    return type(copy) is Tensor and _transform_now() is None and _C._is_cow_tensor(copy)
