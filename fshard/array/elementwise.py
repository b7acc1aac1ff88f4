"""Rows of elementwise operations with broadcasting: every dim of the result is shardable.

Most are rows of names. Those that are linear in some arrays have a function that returns these groups of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fshard.array.rules import Rule, rule

_NAMES = """
abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh addcdiv addcmul
bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min
clip copysign cos cosh deg2rad digamma elu eq erf erfc erfinv exp exp2 expm1 fill fix float_power floor floor_divide fmax fmin
fmod frac frexp ge gelu gt greater greater_equal hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac
isclose isfinite isinf isnan isneginf isposinf isreal ldexp le leaky_relu less less_equal lgamma log log10 log1p log2
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid log_sigmoid lt maximum minimum mish
nan_to_num ne nextafter not_equal polygamma pow rad2deg reciprocal relu relu6 remainder round rpow rdiv rfloordiv
rmod rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink
threshold trunc xlogy special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit
special_expm1 special_gammaln special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_logit special_ndtr
special_ndtri special_psi special_sinc special_xlog1py special_xlogy special_zeta special_bessel_j0 special_bessel_j1
lshift rshift and or xor polar long int bool short char byte
special_digamma special_polygamma special_multigammaln special_round
"""



def elementwise(linear: Callable[..., Any] = lambda *args, **kwargs: ()) -> Callable[..., Rule]:
    """Return the rule of an elementwise operation, given the groups of arrays in which it is linear."""
    return lambda results, *args, **kwargs: Rule("...*->...", linear(*args, **kwargs))


def _is_exact(before: torch.dtype, after: torch.dtype) -> bool:
    """Casts are linear unless they round."""
    return torch.promote_types(before, after) == after


def _is_zero(x: Any) -> bool:
    return not isinstance(x, Tensor) and x == 0


def _both(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    """A number would be added once per device."""
    return [(0, 1)] if isinstance(x, Tensor) and isinstance(y, Tensor) else ()


def _numerator(x: Any, y: Any, rounding_mode: str | None = None, **kwargs: Any) -> Any:
    return [(0,)] if isinstance(x, Tensor) and rounding_mode is None else ()


def _choices(condition: Any, x: Any = None, y: Any = None) -> Any:
    arrays = [one for one in (x, y) if isinstance(one, Tensor)]
    return [range(1, 1 + len(arrays))] if all(isinstance(one, Tensor) or _is_zero(one) for one in (x, y)) else ()


rule(_NAMES)(elementwise())
rule("neg negative positive clone contiguous conj conj_physical resolve_conj")(elementwise(lambda x, **_: "each"))
rule("detach real imag .real .imag .data", is_view=True)(elementwise(lambda x: "each"))
rule("to type")(elementwise(lambda x, *args, **more: "each" if _is_exact(x.dtype, x.to(*args, **more).dtype) else ()))
for _name in ("double", "float", "half", "bfloat16"):
    rule(_name)(elementwise(lambda x, _to=getattr(torch, _name), **_: "each" if _is_exact(x.dtype, _to) else ()))
rule("mul multiply")(elementwise(lambda x, y, **_: "each"))
rule("add sub subtract rsub lerp")(elementwise(_both))
rule("div divide true_divide")(elementwise(_numerator))
rule("where")(elementwise(_choices))
rule("masked_fill")(elementwise(lambda x, mask, value: [(0,)] if _is_zero(value) else ()))
