"""`InFloat64`: a program computes in float64 what it would compute in float32.

    x.float()                        float64
    torch.zeros(2, dtype=float32)    float64
    a float32 tensor from a file     float64, from its first use on
    x.to(torch.bfloat16)             bfloat16, and recorded: rounding explains more of a difference

Programs name float32 in many places: losses, norms and positions are computed in it, data sets are
stored in it. A default dtype of float64 alone leaves a program of mixed dtypes, which torch refuses
or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fshard.mesh.layout import flatten

# Torch has no public way to these: a function of its engine, and operators that torch itself calls.
autograd: Any = torch.autograd
_torch: Any = torch

LOWER = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that a program may compute in besides float64."""

_READS_BITS = {Tensor.view}
"""Functions with a dtype of the bits that are read, not of a computation."""

_BACKWARDS = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
"""Functions that run what programs hook into a backward."""


class InFloat64(TorchFunctionMode):
    """Gives functions of torch float64 for float32.

    Args:
        in_forward: the lower dtypes of activations, which a gradient is taken through.
        elsewhere: those of other tensors, such as gradients and the state of an optimizer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_forward = set[torch.dtype]()
        self.elsewhere = set[torch.dtype]()

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
        if _is_drawing(func):
            return _drawn(func, args, kwargs)
        func = _WITHOUT_FLOAT64.get(func, func)
        arguments = [self.argument(x) for x in args]
        named = {name: self.argument(x) for name, x in kwargs.items()}
        return self._result(func(*arguments, **named))

    def argument(self, x: Any) -> Any:
        """Return what a function of torch is given for an argument."""
        if x is torch.float32:
            return torch.float64
        if isinstance(x, list | tuple):
            for tensor in cast(Sequence[Any], x):
                widen(tensor)
        else:
            widen(x)
        return x

    def _result(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            widen(x)
            if x.dtype in LOWER:
                dtypes = self.in_forward if x.requires_grad else self.elsewhere
                dtypes.add(x.dtype)
        return x

    def _run_backward(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a backward under this mode.

        Torch takes a mode away while a function runs that the mode was called for. A backward runs
        what belongs to programs: hooks of gradients, and layers that are computed again.
        """
        engine = autograd._engine_run_backward

        def run(*arguments: Any, **options: Any) -> Any:
            with self:
                return engine(*arguments, **options)

        autograd._engine_run_backward = run
        try:
            return func(*args, **kwargs)
        finally:
            autograd._engine_run_backward = engine


def widen(x: Any) -> None:
    """Convert a tensor of float32 where it is stored, unless it was computed from others.

    Such a tensor is from outside of torch's functions: a file, NumPy, another process.
    """
    is_own = type(x) in (Tensor, nn.Parameter)
    if is_own and x.dtype is torch.float32 and x.grad_fn is None:
        x.data = x.data.double()


# -- random numbers --------------------------------------------------------------------------------

_DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal}
_DRAWS_IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.exponential_}


def _is_drawing(func: Callable[..., Any]) -> bool:
    is_initializer = getattr(func, "__module__", "") == "torch.nn.init"
    return is_initializer or func in _DRAWS or func in _DRAWS_IN_PLACE


def _drawn(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw in float32 and convert: in float64 a program would draw other numbers than outside."""
    if func in _DRAWS:
        dtype = kwargs.get("dtype")
        is_like = func in (torch.rand_like, torch.randn_like)
        if dtype is None and is_like:
            dtype = args[0].dtype
        is_float32 = func is not torch.normal and dtype in (None, torch.float32, torch.float64)
        x = (
            func(*args, **{**kwargs, "dtype": torch.float32})
            if is_float32
            else func(*args, **kwargs)
        )
        widen(x)
        return x

    x = args[0] if args else kwargs["tensor"]
    if type(x) not in (Tensor, nn.Parameter) or x.dtype not in (torch.float32, torch.float64):
        return func(*args, **kwargs)
    narrow = torch.empty_like(x, dtype=torch.float32, requires_grad=False)
    if args:
        func(narrow, *args[1:], **kwargs)
    else:
        func(**{**kwargs, "tensor": narrow})
    with torch.no_grad():
        widen(x)
        x.copy_(narrow)
    return x


# -- functions that torch has in lower dtypes only -------------------------------------------------


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply groups of rows by a matrix each, or groups of columns, as torch does in float32.

    `offs` are the ends of the groups.
    """
    if offs is None:
        out = a @ b
    else:
        starts = [0, *offs.tolist()[:-1]]
        products: list[Tensor] = []
        for i, (start, end) in enumerate(zip(starts, offs.tolist(), strict=True)):
            if a.ndim == 2 and b.ndim == 2:
                products.append(a[:, start:end] @ b[start:end])
            elif a.ndim == 2:
                products.append(a[start:end] @ b[i])
            else:
                products.append(a[i] @ b[:, start:end])
        if a.ndim == 2 and b.ndim == 2:
            out = torch.stack(products)
        elif a.ndim == 2:
            # Rows after the last group belong to none.
            out = torch.cat(
                [*products, a.new_zeros(len(a) - starts[-1] - len(products[-1]), b.shape[-1])]
            )
        else:
            out = torch.cat(products, -1)
    if bias is not None:
        out = out + bias
    return out if out_dtype is None else out.to(out_dtype)


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients in place, and note numbers that are not finite, as GradScaler does."""
    for grad in grads:
        if not grad.isfinite().all():
            found_inf.fill_(1.0)
        grad.mul_(inverse_scale)


def _update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth: float,
    backoff: float,
    interval: int,
) -> Tensor:
    """Change the scale of GradScaler in place: less after a number that is not finite."""
    if found_inf.item():
        scale.mul_(backoff)
        growth_tracker.zero_()
        return scale
    growth_tracker.add_(1)
    if growth_tracker.item() == interval:
        scale.mul_(growth)
        growth_tracker.zero_()
    return scale


_WITHOUT_FLOAT64: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.grouped_mm: _grouped_mm,
    _torch._grouped_mm: _grouped_mm,
    _torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    _torch._amp_update_scale_: _update_scale,
}
"""Functions that torch has in lower dtypes only, with others that compute the same."""


# -- what is sent ----------------------------------------------------------------------------------

_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "gather",
    "alltoall",
    "all_to_all_single",
    "alltoall_base",
    "send",
)
"""The methods of process groups by which functions of torch.distributed send tensors."""


@dataclass
class Sends:
    """The number of elements that a process sends, and the lower dtypes of their tensors."""

    elements: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set[torch.dtype])


@contextmanager
def watched_sends(sends: Sends) -> Generator[None]:
    """Note the tensors that this process sends in the block.

    DistributedDataParallel's own reductions are not seen: they have the dtype of parameters.
    """
    group = cast("Any", dist.ProcessGroup)
    # What `getattr` returns here is bound to no group, and as an attribute never would be.
    originals = {name: vars(group)[name] for name in _COLLECTIVES if name in vars(group)}
    for name in originals:
        setattr(group, name, _noting(getattr(group, name), sends))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


def _noting(original: Callable[..., Any], sends: Sends) -> Callable[..., Any]:
    def send(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        # An upper limit: those that receive are arguments too.
        sends.elements += sum([x.numel() for x in tensors])
        sends.dtypes.update([x.dtype for x in tensors if x.dtype in LOWER])
        return original(*args, **kwargs)

    return send
