"""Saved-tensor hooks around single operations: torch.func's grad, vjp, jacrev and hessian do not run where some stand.

    with hooks: y = f(x); z = torch.func.grad(g)(y); ...        refused

    with hooks, closely(): hooks[f](x);  torch.func.grad(g)(y);  hooks[...]

What a transform saves is then not seen by the hooks, and kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fshard.mesh.differentiate import transformed

_hooks: Any = torch._C._autograd  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def refused(error: RuntimeError) -> bool:
    """Return whether a transform of torch.func has met hooks."""
    return "support saved tensor hooks" in str(error)


class Closely(TorchFunctionMode):
    """Takes the innermost hooks away as long as it lasts, and lets each operation outside of transforms have them."""

    def __enter__(self) -> Any:
        self._own: tuple[Any, Any] = _hooks._top_saved_tensors_default_hooks(False)
        _hooks._pop_saved_tensors_default_hooks()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _hooks._push_saved_tensors_default_hooks(*self._own)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if transformed() or _hooks._top_saved_tensors_default_hooks(False) is not None:
            return func(*args, **(kwargs or {}))
        _hooks._push_saved_tensors_default_hooks(*self._own)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _hooks._pop_saved_tensors_default_hooks()
