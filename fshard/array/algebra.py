"""Rows of elementwise operations, where every dim of the result is shardable, and of products.

Most are rows of names. Those that are linear in some arrays have a function of the call's arguments
that returns the groups of these arrays, by number: `[(0, 1)]` for x + y, which may be added before
the summands of both are reduced.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fshard.array.rules import Rule, compose, equations, rule, spell
from fshard.errors import LayoutError
from fshard.mesh.layout.sharded import Sharded

_NAMES = """
abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2
atanh addcdiv addcmul bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad digamma elu eq erf
erfc erfinv exp exp2 expm1 fill fix float_power floor floor_divide fmax fmin fmod frac frexp ge gelu
gt greater greater_equal hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac
isclose isfinite isinf isnan isneginf isposinf isreal ldexp le leaky_relu less less_equal lgamma log
log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
logsigmoid log_sigmoid lt maximum minimum mish nan_to_num ne nextafter not_equal polygamma pow
rad2deg reciprocal relu relu6 remainder round rpow rdiv rfloordiv rmod rsqrt selu sgn sigmoid sign
signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold
trunc xlogy special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
special_expit special_expm1 special_gammaln special_i0e special_i1 special_i1e special_log1p
special_log_ndtr special_logit special_ndtr special_ndtri special_psi special_sinc special_xlog1py
special_xlogy special_zeta special_bessel_j0 special_bessel_j1 lshift rshift and or xor polar long
int bool short char byte special_digamma special_polygamma special_multigammaln special_round
special_i0 special_airy_ai special_bessel_y0 special_bessel_y1 special_gammainc special_gammaincc
angle complex gcd lcm mvlgamma
"""
"""Elementwise operations that are linear in no array."""


LinearGroups = Callable[..., Any]
"""A function of a call's arguments: the groups of arrays in which it is linear, as in a `Rule`."""


def _nothing(*args: Any, **kwargs: Any) -> Any:
    return ()


def _the_first(*args: Any, **kwargs: Any) -> Any:
    return [(0,)]


def elementwise(names: str, linear_in: LinearGroups = _nothing, *, is_view: bool = False) -> None:
    """Add rows of elementwise operations."""

    def make_rule(results: Any, *args: Any, **kwargs: Any) -> Rule:
        return Rule("...*->...", linear_in(*args, **kwargs))

    rule(names, is_view=is_view)(make_rule)


elementwise(_NAMES)
elementwise("neg negative positive clone conj conj_physical resolve_conj", _the_first)
elementwise("detach real imag .real .imag .data", _the_first, is_view=True)


@compose("contiguous")
def _contiguous(x: Any, **kwargs: Any) -> Any:
    """Copy a view: a write to the result must not reach the array that it is a view of."""
    return x if x.viewed is None else x.clone()


# Casts.


def _if_cast_is_exact(before: torch.dtype, after: torch.dtype) -> Any:
    """Return the groups of a cast: it is linear unless it rounds."""
    return [(0,)] if torch.promote_types(before, after) == after else ()


def _in_cast_to(dtype: torch.dtype, x: Any, **kwargs: Any) -> Any:
    return _if_cast_is_exact(x.dtype, dtype)


def _in_cast(x: Any, *args: Any, **kwargs: Any) -> Any:
    return _if_cast_is_exact(x.dtype, x.to(*args, **kwargs).dtype)


elementwise("to type", _in_cast)
elementwise("double", partial(_in_cast_to, torch.float64))
elementwise("float", partial(_in_cast_to, torch.float32))
elementwise("half", partial(_in_cast_to, torch.float16))
elementwise("bfloat16", partial(_in_cast_to, torch.bfloat16))


@compose("to")
def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the dtype of another array, and drop the device, which is the mesh's."""
    positional: list[Any] = []
    devices: list[Any] = []
    for arg in args:
        if isinstance(arg, str | torch.device):
            devices.append(arg)
        elif isinstance(arg, Sharded):
            positional.append(arg.dtype)
        else:
            positional.append(arg)
    has_arrays = any(isinstance(arg, Sharded) for arg in args)
    if not devices and not has_arrays and "device" not in kwargs:
        return NotImplemented

    named = dict(kwargs)
    device = named.pop("device", None)
    if isinstance(device, str | torch.device):
        devices.append(device)
    for device in devices:
        if torch.device(device).type != x.device.type:
            raise LayoutError(
                f"to: an array stays on its mesh, {x.mesh}; got {device}. Use fs.device_put."
            )
    return x.to(*positional, **named) if positional or named else x


# Sums and products of elements, and choices among them.
#
# Note [Zeros and infinities of unreduced arrays]
# The shards of an unreduced array are summands, some of them zero where the sum is not. So an
# operation may wait with the sum only if it is finite: 1/0 is inf, but 1/0 + 0/0 is nan. A divisor
# that is an array may have zeros, which no plan can know, so division by one reduces first. A
# product waits, since infinite factors are rare: x * inf is nan then.


def _is_zero(x: Any) -> bool:
    return not isinstance(x, Tensor) and x == 0


def _is_finite(x: Any) -> bool:
    """Return True for a finite number, and for an array.

    See Note [Zeros and infinities of unreduced arrays].
    """
    return isinstance(x, Tensor) or cmath.isfinite(x)


def _in_factors(x: Any, y: Any, **kwargs: Any) -> Any:
    return "each" if _is_finite(x) and _is_finite(y) else ()


def _in_both_terms(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the groups of a sum of arrays; a number would be added once per device."""
    are_arrays = isinstance(x, Tensor) and isinstance(y, Tensor)
    return [(0, 1)] if are_arrays else ()


def _in_dividend(x: Any, y: Any, rounding_mode: Any = None, **kwargs: Any) -> Any:
    """Return the groups of a quotient: a divisor must be a number whose reciprocal is finite.

    See Note [Zeros and infinities of unreduced arrays].
    """
    if not isinstance(x, Tensor) or isinstance(y, Tensor) or rounding_mode:
        return ()
    is_finite = y != 0 and cmath.isfinite(1 / y)
    return [(0,)] if is_finite else ()


def _in_both_choices(condition: Any, x: Any = None, y: Any = None) -> Any:
    """Return the groups of `torch.where`.

    A number would be chosen on each device, and so be added several times, unless it is 0.
    """
    if condition.dtype != torch.bool:  # x.where(condition, y): the order of arrays is another
        return ()
    choices = [choice for choice in (x, y) if isinstance(choice, Tensor)]
    others = [choice for choice in (x, y) if not isinstance(choice, Tensor)]
    if not all(_is_zero(choice) for choice in others):
        return ()
    return [range(1, 1 + len(choices))]


def _if_filled_with_zeros(x: Any, mask: Any, value: Any) -> Any:
    return [(0,)] if _is_zero(value) else ()


elementwise("mul multiply", _in_factors)
elementwise("add sub subtract rsub lerp", _in_both_terms)
elementwise("div divide true_divide", _in_dividend)
elementwise("where", _in_both_choices)
elementwise("masked_fill", _if_filled_with_zeros)


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


def _convolution_equations(count: int) -> str:
    """Return the equations of a convolution over some dims: with and without a batch and a bias.

    >>> _convolution_equations(1)
    'nCS,CCS->nCS nCS,CCS,+C->nCS CS,CCS->CS CS,CCS,+C->CS'
    """
    weight = "CC" + "S" * count
    forms: list[str] = []
    for term in ("nC" + "S" * count, "C" + "S" * count):
        forms += [f"{term},{weight}->{term}", f"{term},{weight},+C->{term}"]
    return " ".join(forms)


for _count in (1, 2, 3):
    _convolutions = f"conv{_count}d conv_transpose{_count}d"
    equations(_convolutions, _convolution_equations(_count), "each")
equations("functional.unfold", "nCSS->nCS CSS->CS", "each")
equations("cdist", "...iD,...jD->...ij")
equations("pairwise_distance", "...D,...D->...")
equations("bucketize", "...,B->...")
equations("one_hot", "...->...N")


@compose("one_hot")
def _one_hot(x: Any, num_classes: int = -1) -> Any:
    """Find the number of classes, where it is not given."""
    if num_classes >= 0:
        return NotImplemented
    return F.one_hot(x, int(x.max()) + 1)


@rule("isin")
def _isin(results: Any, *args: Any, **kwargs: Any) -> Rule:
    """Label the dims of the elements: each is compared with all test elements."""
    arguments = {**dict(zip(("elements", "test_elements"), args, strict=False)), **kwargs}
    terms: list[str] = []
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            terms.append("..." if name == "elements" else "D" * x.ndim)
    return Rule(f"{','.join(terms)}->{'...' if '...' in terms else ''}")


@rule("tensordot")
def _tensordot(results: Any, a: Any, b: Any, dims: Any = 2, out: Any = None) -> Rule:
    """Give the dims that are summed over the same letters."""
    if isinstance(dims, int):
        a_dims = range(a.ndim - dims, a.ndim)
        b_dims = range(dims)
    else:
        a_dims, b_dims = dims
    first = spell(a.ndim)
    second = list("klmnopqrst"[: b.ndim])
    for a_dim, b_dim in zip(a_dims, b_dims, strict=True):
        second[b_dim] = first[a_dim]

    free = [letter for letter in first if letter not in second]
    free += [letter for letter in second if letter not in first]
    return Rule(f"{first},{''.join(second)}->{''.join(free)}", "each")


@rule("cosine_similarity")
def _cosine_similarity(results: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Rule:
    term = spell(results[0].ndim + 1, {dim: "D"})
    if not x1.ndim == x2.ndim == len(term):
        return Rule("->")
    return Rule(f"{term}*->{term.replace('D', '')}")


@rule("einsum")
def _einsum(results: Any, equation: str, *operands: Any) -> Rule:
    """Take the equation itself; without a result, it has the letters that occur once, in order."""
    equation = equation.replace(" ", "")
    if "->" not in equation:
        letters = sorted({*equation} - {*",."})
        free = "".join([letter for letter in letters if equation.count(letter) == 1])
        dots = "..." if "..." in equation else ""
        equation += f"->{dots}{free}"
    if any(letter.isupper() for letter in equation):
        raise ValueError(f"einsum of arrays takes small letters; got {equation}.")
    return Rule(equation, "each")


# Attention.


@rule("scaled_dot_product_attention")
def _attention(
    results: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Rule:  # fmt: skip
    """Let devices share batches, heads and queries; each query needs all keys."""
    # With grouped queries, each head of keys and values has several heads of queries, in order.
    head = "h" if enable_gqa else ""
    # torch's causal mask begins at the first query, which a shard of queries does not have.
    row = "L" if is_causal else "l"
    query_term = f"...{head}{row}D"
    key_term = f"...{head}KD"
    terms = [query_term, key_term, key_term]
    if attn_mask is not None:
        # A mask of few dims broadcasts over batches and heads.
        few_dims = f"{row}K"[-attn_mask.ndim :]
        terms.append(f"...{head}{row}K" if attn_mask.ndim > 2 else few_dims)
    return Rule(f"{','.join(terms)}->{query_term}", ragged=head)


@compose("scaled_dot_product_attention")
def _attention_with_dropout(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Compute attention by its formula, with dropout of the weights."""
    if dropout_p == 0:
        return NotImplemented
    if enable_gqa:
        heads = query.shape[-3]
        key = key.repeat_interleave(heads // key.shape[-3], -3)
        value = value.repeat_interleave(heads // value.shape[-3], -3)

    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value
