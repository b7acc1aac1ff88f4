"""torch's kernels over lists of tensors: one launch for many.

They are `torch._foreach_*` and `torch._fused_*`.

torch.optim itself is made of them, and they are public in all but name; here they lose the
underscore. A name that ends in an underscore writes to its first list.

All of them give an element the same bits at any index of its tensor, which shards need, except
`add(alpha=)` in 16 bits on a CPU. It rounds alpha to 16 bits, then the sum in the middle of a
tensor, and at its end the product as well. `add_multiple` rounds the sum alone, as torch does on
other devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_torch: Any = torch

add = _torch._foreach_add
add_ = _torch._foreach_add_
addcdiv_ = _torch._foreach_addcdiv_
addcmul = _torch._foreach_addcmul
addcmul_ = _torch._foreach_addcmul_
clamp_max_ = _torch._foreach_clamp_max_
clamp_min = _torch._foreach_clamp_min
copy_ = _torch._foreach_copy_
div = _torch._foreach_div
div_ = _torch._foreach_div_
lerp = _torch._foreach_lerp
lerp_ = _torch._foreach_lerp_
maximum_ = _torch._foreach_maximum_
mul = _torch._foreach_mul
mul_ = _torch._foreach_mul_
norm = _torch._foreach_norm
neg = _torch._foreach_neg
sign_ = _torch._foreach_sign_
sqrt = _torch._foreach_sqrt

fused_adam_ = _torch._fused_adam_
fused_adamw_ = _torch._fused_adamw_


def add_multiple(xs: list[Tensor], ys: list[Tensor], factor: float) -> Any:
    """Return each x with a multiple of its y added: of lists of one device and dtype.

    >>> add_multiple([torch.ones(2)], [torch.ones(2)], 2.0)
    (tensor([3., 3.]),)
    """
    if any(map(rounds_by_index, xs)):
        return addcmul(xs, ys, _ones(xs), factor)
    return add(xs, ys, alpha=factor)


def add_multiple_(xs: list[Tensor], ys: list[Tensor], factor: float) -> None:
    """Add to each x a multiple of its y."""
    if any(map(rounds_by_index, xs)):
        addcmul_(xs, ys, _ones(xs), factor)
    else:
        add_(xs, ys, alpha=factor)


def rounds_by_index(x: Tensor) -> bool:
    """Return True if the bits of torch's `add(alpha=)` depend on the index of an element."""
    return x.is_cpu and x.dtype in (torch.bfloat16, torch.float16)


def _ones(xs: list[Tensor]) -> list[Tensor]:
    return [torch.ones((), dtype=x.dtype) for x in xs]


def fused_sgd_(params: list[Tensor], *lists: list[Tensor], **options: Any) -> None:
    """Take a step of SGD in place; torch has no such kernel for tensors without values."""
    if not params[0].is_meta:
        _torch._fused_sgd_(params, *lists, **options)
