"""Rows of elementwise operations with broadcasting: every dim of the result is shardable.

Most are rows of names. Those that are linear in some inputs have a function that returns these groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.array.rules import Rule, alike, arrays_in, rule

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

Groups = Sequence[Sequence[Any]]


def elementwise(linear: Callable[..., Groups] | None = None) -> Callable[..., Rule]:
    """Return the rule of an elementwise operation, given the inputs in which it is linear."""

    def rule_of(results: Any, *args: Any, **kwargs: Any) -> Rule:
        arrays = arrays_in(args, kwargs)
        groups = linear(*args, **kwargs) if linear is not None else ()
        return alike(",".join(["..."] * len(arrays)) + "->...", *arrays, linear=groups, is_elementwise=True)

    return rule_of


rule(_NAMES)(elementwise())
rule("neg negative positive clone contiguous conj conj_physical resolve_conj")(elementwise(lambda x, **_: [(x,)]))
rule("detach real imag .real .imag .data", is_view=True)(elementwise(lambda x: [(x,)]))


def _cast(x: Any, *args: Any, **kwargs: Any) -> Groups:
    """Casts are linear unless they round."""
    y = x.to(*args, **kwargs)
    return [(x,)] if torch.promote_types(x.dtype, y.dtype) == y.dtype else []


rule("to type")(elementwise(_cast))
for _name in ("double", "float", "half", "bfloat16"):
    _dtype = getattr(torch, _name)
    rule(_name)(elementwise(lambda x, _dtype=_dtype, **_: _cast(x, _dtype)))


def _is_zero(x: Any) -> bool:
    return not isinstance(x, Tensor) and x == 0


def _product(x: Any, y: Any, **_: Any) -> Groups:
    return [(one,) for one in (x, y) if isinstance(one, Tensor)]


def _sum(x: Any, y: Any, *args: Any, **_: Any) -> Groups:
    """A constant would be added once per device."""
    return [(x, y)] if isinstance(x, Tensor) and isinstance(y, Tensor) else []


def _quotient(x: Any, y: Any, rounding_mode: str | None = None, **_: Any) -> Groups:
    return [(x,)] if isinstance(x, Tensor) and rounding_mode is None else []


def _choice(condition: Any, x: Any = None, y: Any = None) -> Groups:
    return [arrays_in(x, y)] if all(isinstance(one, Tensor) or _is_zero(one) for one in (x, y)) else []


rule("mul multiply")(elementwise(_product))
rule("add sub subtract rsub lerp")(elementwise(_sum))
rule("div divide true_divide")(elementwise(_quotient))
rule("where")(elementwise(_choice))
rule("masked_fill")(elementwise(lambda x, mask, value: [(x,)] if _is_zero(value) else []))
