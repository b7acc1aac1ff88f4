"""Rows of elementwise operations with broadcasting: every dim of the result is shardable.

Most are rows of names. Those that are linear in some inputs have a function that names these, for given arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.array.rules import TABLE, Row, Rule, all_letters, broadcast, tensors_in, words

_NONLINEAR = """
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

LinearIn = Callable[..., Sequence[Sequence[Any]]]


def _first(x: Any, *args: Any, **kwargs: Any) -> Sequence[Sequence[Any]]:
    return [(x,)]


def _cast(x: Any, *args: Any, **kwargs: Any) -> Sequence[Sequence[Any]]:
    """Casts are linear unless they round."""
    y = x.to(*args, **kwargs)
    return [(x,)] if y.dtype == x.dtype or torch.promote_types(x.dtype, y.dtype) == y.dtype else []


def _each(x: Any, y: Any, **kwargs: Any) -> Sequence[Sequence[Any]]:
    return [(one,) for one in (x, y) if isinstance(one, Tensor)]


def _both(x: Any, y: Any, *args: Any, **kwargs: Any) -> Sequence[Sequence[Any]]:
    """Return both inputs, unless one is a constant, which would be added once per device."""
    return [(x, y)] if isinstance(x, Tensor) and isinstance(y, Tensor) else []


def _numerator(x: Any, y: Any, rounding_mode: str | None = None, **kwargs: Any) -> Sequence[Sequence[Any]]:
    return [(x,)] if isinstance(x, Tensor) and rounding_mode is None and y is not x else []


def _where(condition: Any, x: Any = None, y: Any = None) -> Sequence[Sequence[Any]]:
    return (
        [[one for one in (x, y) if isinstance(one, Tensor)]]
        if all(isinstance(z, Tensor) or z == 0 for z in (x, y))
        else []
    )


def _filled(x: Any, mask: Any, value: Any) -> Sequence[Sequence[Any]]:
    return [(x,)] if not isinstance(value, Tensor) and value == 0 else []


_LINEAR: dict[str, LinearIn] = {
    **dict.fromkeys(
        words("neg negative positive clone contiguous conj conj_physical resolve_conj real imag detach"), _first
    ),
    **dict.fromkeys(words("to type"), _cast),
    "double": lambda x, **kwargs: _cast(x, torch.float64),
    "float": lambda x, **kwargs: _cast(x, torch.float32),
    "half": lambda x, **kwargs: _cast(x, torch.float16),
    "bfloat16": lambda x, **kwargs: _cast(x, torch.bfloat16),
    **dict.fromkeys(words("mul multiply"), _each),
    **dict.fromkeys(words("add sub subtract rsub lerp"), _both),
    **dict.fromkeys(words("div divide true_divide"), _numerator),
    "where": _where,
    "masked_fill": _filled,
}


def _pointwise(linear: LinearIn | None) -> Callable[..., Rule]:
    def rule_of(*args: Any, **kwargs: Any) -> Rule:
        arrays = tensors_in([list(args), kwargs])
        full, labels = broadcast(*(x.shape for x in arrays))
        groups = linear(*args, **kwargs) if linear is not None and len({id(x) for x in arrays}) == len(arrays) else ()
        return Rule(
            list(zip(arrays, labels, strict=True)),
            [all_letters(full)],
            linear=[g for g in groups if g],
            is_elementwise=True,
        )

    return rule_of


for _name in _NONLINEAR.split():
    TABLE[_name] = Row(_pointwise(None))
for _name, _linear in _LINEAR.items():
    TABLE[_name] = Row(_pointwise(_linear), is_view=_name in ("detach", "real", "imag"))
TABLE[".real"], TABLE[".imag"], TABLE[".data"] = TABLE["real"], TABLE["imag"], TABLE["detach"]
