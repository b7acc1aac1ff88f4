"""`InFloat64`: a program computes in float64 what it would compute in float32.

    x.float()                        float64
    torch.zeros(2, dtype=float32)    float64
    a float32 tensor from a file     float64, from its first use on
    x.to(torch.bfloat16)             bfloat16, and noted: rounding explains more of a difference

Programs name float32 in many places: losses, norms and positions are computed in it, data sets are
stored in it. A default dtype of float64 alone leaves a program of mixed dtypes, which torch refuses
or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_LOWER = (torch.float32, torch.bfloat16, torch.float16)
"""What a program may compute in besides float64."""

_READS_BITS = {Tensor.view}
"""Functions with a dtype that says how bits are read, not what is computed."""

_BACKWARDS = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
"""Functions that run what programs hook into a backward."""


class InFloat64(TorchFunctionMode):
    """Gives functions of torch float64 for float32.

    Args:
        in_forward: the lower dtypes that functions of torch have returned.
        in_backward: those while a backward ran. A program that computes in float64 and has bfloat16
            in its backward alone sums gradients in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_forward = set[torch.dtype]()
        self.in_backward = set[torch.dtype]()
        self._seen = self.in_forward

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            return self._run_backward(func, args, kwargs)
        if func in _READS_BITS:
            return func(*args, **kwargs)

        if func is Tensor.float:
            func = Tensor.double
        arguments = [self.argument(x) for x in args]
        named = {name: self.argument(x) for name, x in kwargs.items()}
        return self._result(func(*arguments, **named))

    def argument(self, x: Any) -> Any:
        """Return what a function of torch is given for an argument."""
        if x is torch.float32:
            return torch.float64
        if isinstance(x, list | tuple):
            for tensor in cast(Sequence[Any], x):
                _widen(tensor)
        else:
            _widen(x)
        return x

    def _result(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            _widen(x)
            if x.dtype in _LOWER:
                self._seen.add(x.dtype)
        return x

    def _run_backward(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a backward under this mode.

        Torch takes a mode away while a function runs that the mode was called for. A backward runs
        what belongs to programs: hooks of gradients, and layers that are computed again.
        """
        engine = torch.autograd._engine_run_backward

        def run(*arguments: Any, **options: Any) -> Any:
            with self:
                return engine(*arguments, **options)

        outer = self._seen
        self._seen = self.in_backward
        torch.autograd._engine_run_backward = run
        try:
            return func(*args, **kwargs)
        finally:
            torch.autograd._engine_run_backward = engine
            self._seen = outer


def _widen(x: Any) -> None:
    """Convert a tensor of float32 where it is stored, unless it was computed from others.

    Such a tensor is from outside of torch's functions: a file, NumPy, another process.
    """
    is_own = type(x) in (Tensor, nn.Parameter)
    if is_own and x.dtype is torch.float32 and x.grad_fn is None:
        x.data = x.data.double()
