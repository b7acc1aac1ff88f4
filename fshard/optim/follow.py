"""Which parameters a result is made of, found by following them through an optimizer's functions.

The functions are run once on placeholders: tensors of the true shapes without memory, each with a mark.  Whatever an
operation is given, its results have all of those marks.

    w, its gradient: {w}     m = 0.9 m + g: {w}     norm = g.norm(): {w}     count + 1: none     g_w.norm() + g_v.norm(): {w, v}

So it is known which state goes with which parameter, whatever its shape and wherever in the tree it stands, and whether
any parameter's update looks at another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fshard.errors import OptimizerError

_READ: Any = torch.ops.aten._local_scalar_dense.default  # pyright: ignore[reportUnknownMemberType]
Marks = frozenset[int]


class Following(TorchDispatchMode):
    """A context in which marks are passed on.

    >>> with Following() as following:
    ...     w, v = following.placeholder((2,), torch.float32, 0), following.placeholder((2,), torch.float32, 1)
    ...     norm, count = w.norm() + 1, torch.zeros(()) + 1
    ...     both = w + v
    >>> [sorted(following.marks(x)) for x in (norm, count, both)], both.device.type
    ([[0], [], [0, 1]], 'meta')
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._marks: dict[int, Marks] = {}
        self._kept: list[Tensor] = []  # an id is that of one tensor as long as it lives

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype, mark: int) -> Tensor:
        """Return a tensor without memory that has a mark."""
        return self.marked(torch.empty(shape, dtype=dtype, device="meta"), mark)

    def marked(self, x: Tensor, mark: int) -> Tensor:
        """Give a tensor a mark; return it."""
        self._add([x], frozenset((mark,)))
        return x

    def marks(self, x: Any) -> Marks:
        """Return the marks of something: those of the tensors that it was made of."""
        return self._marks.get(id(x), frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _tensors((args, kwargs))
        if func is _READ and self.marks(given[0]):
            raise OptimizerError("it looks at values of gradients or parameters on the host (if, float, item)")
        result = func(*_without_memory(args, given), **_without_memory(_on_meta(func, args, kwargs, given), given))
        lists = [x for x in args if isinstance(x, list | tuple) and _tensors(x)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if "_foreach_" in str(func):  # each of a list by itself
            for column in zip(*lists, result if isinstance(result, list | tuple) else lists[0], strict=False):  # pyright: ignore[reportUnknownArgumentType]
                self._add(_tensors(column), self._union(_tensors(column)))
        else:
            written = [given[0]] if func._schema.is_mutable else []
            self._add([*_tensors(result), *written], self._union(given))
        return result

    def _union(self, xs: Sequence[Tensor]) -> Marks:
        return frozenset[int]().union(*map(self.marks, xs))

    def _add(self, xs: Sequence[Tensor], marks: Marks) -> None:
        self._kept += xs
        self._marks.update((id(x), self.marks(x) | marks) for x in xs)


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, given: list[Tensor]) -> dict[str, Any]:
    """Let what is made anew have no memory either; but numbers, of which the host may want to know the value, have."""
    new = not given and "device" in (kwargs or {}) and bool(args) and args[0] != []
    return {**(kwargs or {}), "device": "meta"} if new else kwargs or {}


def _without_memory(args: Any, given: list[Tensor]) -> Any:
    """Let tensors with values go where the others have none; numbers may stay."""
    if not any(x.is_meta for x in given):
        return args
    return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) and x.ndim and not x.is_meta else x, args)  # pyright: ignore[reportUnknownLambdaType]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
