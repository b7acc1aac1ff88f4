"""Rows of products, convolution and attention, as subscripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fshard.array.rules import Rule, alike, arrays_in, compose, product, rule, spell


@rule("matmul mm bmm mv dot vdot __matmul__")
def _matmul(results: Any, x: Any, y: Any) -> Rule:
    if x.ndim == 1:
        return product("k,k->" if y.ndim == 1 else "k,...ko->...o", x, y)
    return product("...ik,k->...i" if y.ndim == 1 else "...ik,...ko->...io", x, y)


@rule("linear")
def _linear(results: Any, input: Any, weight: Any, bias: Any = None) -> Rule:
    out = "o" * (weight.ndim - 1)
    if bias is None:
        return product(f"...k,{out}k->...{out}", input, weight)
    return product(f"...k,{out}k,{out[: bias.ndim]}->...{out}", input, weight, bias, has_bias=True)


@rule("addmm addbmm baddbmm addmv addr")
def _addmm(results: Sequence[Any], input: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Rule:
    batch = "b" * (x.ndim - 2)
    left, right = ("i", "o") if x.ndim == 1 else (f"{batch}ik", "k" if y.ndim == 1 else f"{batch}ko")
    out = (left + right[len(batch) :]).replace("k", "")[-results[0].ndim :]  # addbmm sums over b
    return product(f"{left},{right},{out[len(out) - input.ndim :]}->{out}", x, y, input, has_bias=True)


@rule("outer ger")
def _outer(results: Any, x: Any, y: Any) -> Rule:
    return product("i,o->io", x, y)


@rule("bilinear")
def _bilinear(results: Any, x: Any, y: Any, weight: Any, bias: Any = None) -> Rule:
    if bias is None:
        return product("...i,...j,oij->...o", x, y, weight)
    return product("...i,...j,oij,o->...o", x, y, weight, bias, has_bias=True)


@rule("tensordot")
def _tensordot(results: Any, a: Any, b: Any, dims: Any = 2, out: Any = None) -> Rule:
    given = ([*range(a.ndim - dims, a.ndim)], [*range(dims)]) if isinstance(dims, int) else dims
    left = spell(a.ndim)
    pairs = {d % b.ndim: left[e] for e, d in zip(*given, strict=True)}
    right = spell(b.ndim).translate(str.maketrans("abcdefghij", "klmnopqrst"))
    right = "".join(pairs.get(d, letter) for d, letter in enumerate(right))
    kept = [one for one in left if one not in right] + [one for one in right if one not in left]
    return product(f"{left},{right}->{''.join(kept)}", a, b)


@compose("inner")
def _inner(x: Any, y: Any) -> Any:
    return torch.tensordot(x, y, ([-1], [-1])) if x.ndim and y.ndim else x * y


@rule("einsum")
def _einsum(results: Any, equation: str, *operands: Any) -> Rule:
    equation = equation.replace(" ", "")
    if "->" not in equation:
        once = sorted(one for one in {*equation} - {*",."} if equation.count(one) == 1)
        equation += f"->{'...' * ('...' in equation)}{''.join(once)}"
    if not equation.islower():
        raise ValueError(f"einsum of arrays takes small letters; got {equation}.")
    return product(equation, *arrays_in(operands))


@rule("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
def _convolution(results: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Rule:
    batch, space = "n" * (input.ndim - weight.ndim + 1), "S" * (weight.ndim - 2)
    terms = [f"{batch}C{space}", "C" * weight.ndim]
    if bias is None:
        return product(f"{','.join(terms)}->{terms[0]}", input, weight)
    return product(f"{','.join(terms)},C->{terms[0]}", input, weight, bias, has_bias=True)


@rule("cdist")
def _cdist(results: Any, x1: Any, x2: Any, *args: Any, **kwargs: Any) -> Rule:
    return alike("...iD,...jD->...ij", x1, x2)


@rule("pairwise_distance")
def _pairwise_distance(results: Any, x1: Any, x2: Any, *args: Any, keepdim: bool = False, **kwargs: Any) -> Rule:
    return alike("...D,...D->...D" if keepdim else "...D,...D->...", x1, x2)


@rule("cosine_similarity")
def _cosine_similarity(results: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Rule:
    ndim = results[0].ndim + 1
    own = spell(ndim, {dim: "D"})
    return alike(f"{own[ndim - x1.ndim :]},{own[ndim - x2.ndim :]}->{own.replace('D', '')}", x1, x2)


@rule("scaled_dot_product_attention")
def _attention(
    results: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Rule:  # fmt: skip
    head = "h" if enable_gqa else ""  # query heads are several to a head of keys and values, in order
    row = "L" if is_causal else "l"
    arrays, terms = [query, key, value], [f"...{head}{row}D", f"...{head}KD", f"...{head}KD"]
    if attn_mask is not None:
        arrays.append(attn_mask)
        terms.append(f"...{head}{row}K" if attn_mask.ndim > 2 else f"{row}K"[-attn_mask.ndim :])
    return alike(f"{','.join(terms)}->{terms[0]}", *arrays, ragged=head)


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
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value
