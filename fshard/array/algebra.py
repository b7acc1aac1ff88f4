"""Rows of elementwise operations, where every dim of the result is shardable, and of products.

Most are rows of names. Those that are linear in some arrays have a function that returns these groups of arrays.
"""

from __future__ import annotations

import cmath
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fshard.array.rules import Rule, compose, equations, rule, spell
from fshard.errors import LayoutError
from fshard.mesh.layout.sharded import Sharded

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
special_digamma special_polygamma special_multigammaln special_round special_i0 special_airy_ai special_bessel_y0
special_bessel_y1 special_gammainc special_gammaincc angle complex gcd lcm mvlgamma
"""


def elementwise(linear: Callable[..., Any] = lambda *args, **kwargs: ()) -> Callable[..., Rule]:
    """Return the rule of an elementwise operation, given the groups of arrays in which it is linear."""
    return lambda results, *args, **kwargs: Rule("...*->...", linear(*args, **kwargs))


def _is_exact(before: torch.dtype, after: torch.dtype) -> bool:
    """Casts are linear unless they round."""
    return torch.promote_types(before, after) == after


def _is_zero(x: Any) -> bool:
    return not isinstance(x, Tensor) and x == 0


def _is_finite(x: Any) -> bool:
    """Return True for a finite number, and for an array: see Note [Zeros and infinities of unreduced arrays]."""
    return isinstance(x, Tensor) or cmath.isfinite(x)


def _divides_sums(divisor: Any) -> bool:
    """Return True if a sum divided by this is the sum of the quotients, for all values."""
    return not isinstance(divisor, Tensor) and divisor != 0 and cmath.isfinite(1 / divisor)


def _choices(condition: Any, x: Any = None, y: Any = None) -> Any:
    arrays = [operand for operand in (x, y) if isinstance(operand, Tensor)]
    if condition.dtype != torch.bool:  # x.where(condition, y)
        return ()
    return (
        [range(1, 1 + len(arrays))]
        if all(isinstance(operand, Tensor) or _is_zero(operand) for operand in (x, y))
        else ()
    )


rule(_NAMES)(elementwise())
compose("contiguous")(lambda x, **_: x if x.viewed is None else x.clone())
rule("neg negative positive clone conj conj_physical resolve_conj")(
    elementwise(lambda x, **_: [(0,)])
)
rule("detach real imag .real .imag .data", is_view=True)(elementwise(lambda x: [(0,)]))
rule("to type")(
    elementwise(
        lambda x, *args, **more: [(0,)] if _is_exact(x.dtype, x.to(*args, **more).dtype) else ()
    )
)


@compose("to")
def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the dtype of another array, and drop the device, which is the mesh's."""
    positional = [
        arg.dtype if isinstance(arg, Sharded) else arg
        for arg in args
        if not isinstance(arg, str | torch.device)
    ]
    named = {name: value for name, value in kwargs.items() if name != "device"}
    devices = [
        device for device in (*args, kwargs.get("device")) if isinstance(device, str | torch.device)
    ]
    if foreign := [device for device in devices if torch.device(device).type != x.device.type]:
        raise LayoutError(
            f"to: an array stays on its mesh, {x.mesh}; got {foreign[0]}. Use fs.device_put."
        )
    if (len(positional), len(named)) == (len(args), len(kwargs)) and all(
        map(operator.is_, positional, args)
    ):
        return NotImplemented
    return x.to(*positional, **named) if positional or named else x


_TO = {
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
for _name, _dtype in _TO.items():
    rule(_name)(
        elementwise(lambda x, _dtype=_dtype, **_: [(0,)] if _is_exact(x.dtype, _dtype) else ())
    )
# Note [Zeros and infinities of unreduced arrays]
# The shards of an unreduced array are summands, some of them zero where the sum is not. So an operation may wait with the
# sum only if it is finite: 1/0 is inf, but 1/0 + 0/0 is nan. A divisor that is an array may have zeros, which no plan
# can know, so division by one reduces first. A product waits, since infinite factors are rare: x * inf is nan then.
rule("mul multiply")(
    elementwise(lambda x, y, **_: "each" if _is_finite(x) and _is_finite(y) else ())
)
rule("add sub subtract rsub lerp")(  # a number would be added once per device
    elementwise(
        lambda x, y, *_, **__: [(0, 1)] if isinstance(x, Tensor) and isinstance(y, Tensor) else ()
    )
)
rule("div divide true_divide")(
    elementwise(
        lambda x, y, rounding_mode=None, **_: (
            [(0,)] if isinstance(x, Tensor) and _divides_sums(y) and not rounding_mode else ()
        )
    )
)
rule("where")(elementwise(_choices))
rule("masked_fill")(elementwise(lambda x, mask, value: [(0,)] if _is_zero(value) else ()))


# Products.

PRODUCTS = {
    "matmul mm bmm mv dot vdot __matmul__": "k,k-> k,...ko->...o ...ik,k->...i ...ik,...ko->...io",
    "linear": "...k,k->... ...k,k,+->... ...k,ok->...o ...k,ok,+o->...o",
    "addmm": "+io,ik,ko->io",
    "addbmm": "+io,bik,bko->io",
    "baddbmm": "+bio,bik,bko->bio",
    "addmv": "+i,ik,k->i",
    "addr": "+io,i,o->io",
    "outer ger": "i,o->io",
    "bilinear": "...i,...j,oij->...o ...i,...j,oij,+o->...o",
}
"""Operations that are linear in each array; a term with + is added to the product."""

for _names, _text in PRODUCTS.items():
    equations(_names, _text, "each")
for _count in (1, 2, 3):
    _s = "S" * _count
    _forms = (
        f"nC{_s},CC{_s}->nC{_s} nC{_s},CC{_s},+C->nC{_s} C{_s},CC{_s}->C{_s} C{_s},CC{_s},+C->C{_s}"
    )
    equations(f"conv{_count}d conv_transpose{_count}d", _forms, "each")
equations("functional.unfold", "nCSS->nCS CSS->CS", "each")
equations("cdist", "...iD,...jD->...ij")
equations("pairwise_distance", "...D,...D->...")
equations("bucketize", "...,B->...")
equations("one_hot", "...->...N")


@compose("one_hot")
def _one_hot(x: Any, num_classes: int = -1) -> Any:
    """Find the number of classes, where it is not given."""
    return NotImplemented if num_classes >= 0 else F.one_hot(x, int(x.max()) + 1)


@rule("tensordot")
def _tensordot(results: Any, a: Any, b: Any, dims: Any = 2, out: Any = None) -> Rule:
    first, second = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    first_term = spell(a.ndim)
    right = spell(b.ndim, dict(zip(second, (first_term[dim] for dim in first), strict=True)))
    right = "".join(
        letter if dim in {d % b.ndim for d in second} else letter.translate(_OTHER)
        for dim, letter in enumerate(right)
    )
    free = [letter for letter in first_term if letter not in right] + [
        letter for letter in right if letter not in first_term
    ]
    return Rule(f"{first_term},{right}->{''.join(free)}", "each")


_OTHER = str.maketrans("abcdefghij", "klmnopqrst")


@rule("cosine_similarity")
def _cosine_similarity(results: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Rule:
    term = spell(results[0].ndim + 1, {dim: "D"})
    return Rule(f"{term}*->{term.replace('D', '')}" if x1.ndim == x2.ndim == len(term) else "->")


@rule("einsum")
def _einsum(results: Any, equation: str, *operands: Any) -> Rule:
    equation = equation.replace(" ", "")
    if "->" not in equation:
        free = sorted(letter for letter in {*equation} - {*",."} if equation.count(letter) == 1)
        equation += f"->{'...' * ('...' in equation)}{''.join(free)}"
    if any(letter.isupper() for letter in equation):
        raise ValueError(f"einsum of arrays takes small letters; got {equation}.")
    return Rule(equation, "each")


@rule("scaled_dot_product_attention")
def _attention(
    results: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Rule:  # fmt: skip
    head = (
        "h" if enable_gqa else ""
    )  # query heads are several to a head of keys and values, in order
    row = "L" if is_causal else "l"
    terms = [f"...{head}{row}D", f"...{head}KD", f"...{head}KD"]
    if attn_mask is not None:
        terms.append(f"...{head}{row}K" if attn_mask.ndim > 2 else f"{row}K"[-attn_mask.ndim :])
    return Rule(f"{','.join(terms)}->{terms[0]}", ragged=head)


@compose("scaled_dot_product_attention")
def _attention_with_dropout(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Compute attention by its formula, with dropout of the weights."""
    if dropout_p == 0:
        return NotImplemented
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value
