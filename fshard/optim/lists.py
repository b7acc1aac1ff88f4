"""torch's kernels over lists of tensors, `torch._foreach_*` and `torch._fused_*`: one launch for many tensors.

They are what torch.optim itself is made of, and public in all but name; here they get names and lose the underscore.
A name that ends in an underscore writes into its first list.
"""

from __future__ import annotations

from typing import Any

import torch

_torch: Any = torch

add = _torch._foreach_add
add_ = _torch._foreach_add_
addcdiv_ = _torch._foreach_addcdiv_
addcmul_ = _torch._foreach_addcmul_
div = _torch._foreach_div
div_ = _torch._foreach_div_
lerp = _torch._foreach_lerp
lerp_ = _torch._foreach_lerp_
maximum_ = _torch._foreach_maximum_
mul_ = _torch._foreach_mul_
norm = _torch._foreach_norm
neg = _torch._foreach_neg
sign_ = _torch._foreach_sign_
sqrt = _torch._foreach_sqrt

fused_adam_ = _torch._fused_adam_
fused_adamw_ = _torch._fused_adamw_
fused_sgd_ = _torch._fused_sgd_
