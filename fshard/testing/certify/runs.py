"""The two kinds of pairs of runs: in float64, with a serial run by plain torch; or in reproducible mode, by fshard alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.errors import PromiseError
from fshard.optim.leaves import Leaf, Leaves, is_frozen

LOWER_DTYPES = {"precision", "compute", "reduce"}
"""Options that let a step compute or send in another dtype: runs in float64 are without them."""


class Snapshot(NamedTuple):
    """One step of a run: the gradients given to the optimizer, the parameters and buffers after it; leaves in tree order."""

    grads: list[Leaf]
    params: list[Leaf]
    buffers: list[Leaf]

    def mapped(self, f: Callable[[Leaf], Leaf]) -> Snapshot:
        """Apply a function to each leaf; tied leaves stay tied."""
        return Snapshot(*(Leaves.of(leaves).mapped(f) for leaves in self))


def repeated(run: Callable[[int], list[Snapshot]], cures: Mapping[str, str]) -> tuple[list[Snapshot], torch.dtype]:
    """Train twice, with two seeds; return a run and the lowest dtype that it casts to, or raise if the runs differ.

    `cures` has the advice by the field that differs.
    """
    with _Casts() as casts:
        first = run(0)
    for step, snapshots in enumerate(zip(first, run(1), strict=True)):
        for field, left, right in zip(Snapshot._fields, *snapshots, strict=True):
            if not all(map(_is_close, left, right)):
                raise PromiseError(
                    "certify: on one device a run must give the same results when it is repeated; got others for "
                    f"the {field} of step {step}. {cures[field]}"
                )
    return first, casts.dtype


def _is_close(x: Leaf, y: Leaf) -> bool:
    if x is None or y is None or not is_floating(x):
        return x is y or (x is not None and y is not None and torch.equal(x, y))
    return torch.allclose(x, y, 1e-4, 1e-7, equal_nan=True)  # kernels may add in another order


class _Casts(TorchDispatchMode):
    """Records the lowest dtype that floating tensors are cast to."""

    dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and is_floating(args[0]) and is_floating(result):
            self.dtype = max(self.dtype, result.dtype.to_real(), key=lambda dtype: torch.finfo(dtype).eps)
        return result


@contextmanager
def in_float64() -> Generator[None]:
    """Make float64 the dtype of new tensors, so that constants have it, too."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with note("in the run in float64: does the loss function name a dtype?"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def note(text: str) -> Generator[None]:
    """Add a note to an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(f"certify: {text}")
        raise


def is_floating(x: Any) -> TypeGuard[Tensor]:
    """Return True if x is a floating or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def widen(x: Any) -> Any:
    """Convert floating tensors to float64 (complex128), and leave all else as it is."""
    return keep_frozen(x, x.to(torch.complex128 if x.is_complex() else torch.float64)) if is_floating(x) else x


def keep_frozen(x: Tensor, new: Tensor) -> Tensor:
    """Make `new` a frozen parameter if x is one."""
    return Parameter(new.detach(), requires_grad=False) if is_frozen(x) else new
