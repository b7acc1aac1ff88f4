"""Rows of products, convolution, distances and attention, as equations."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fshard.array.rules import Rule, compose, equations, rule, spell

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
    _forms = f"nC{_s},CC{_s}->nC{_s} nC{_s},CC{_s},+C->nC{_s} C{_s},CC{_s}->C{_s} C{_s},CC{_s},+C->C{_s}"
    equations(f"conv{_count}d conv_transpose{_count}d", _forms, "each")
equations("cdist", "...iD,...jD->...ij")
equations("pairwise_distance", "...D,...D->...")
equations("bucketize", "...,B->...")
equations("one_hot", "...->...N")


@rule("tensordot")
def _tensordot(results: Any, a: Any, b: Any, dims: Any = 2, out: Any = None) -> Rule:
    first, second = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    left = spell(a.ndim)
    right = spell(b.ndim, dict(zip(second, (left[dim] for dim in first), strict=True)))
    right = "".join(one if dim in {d % b.ndim for d in second} else one.translate(_OTHER) for dim, one in enumerate(right))
    kept = [one for one in left if one not in right] + [one for one in right if one not in left]
    return Rule(f"{left},{right}->{''.join(kept)}", "each")


_OTHER = str.maketrans("abcdefghij", "klmnopqrst")

@rule("cosine_similarity")
def _cosine_similarity(results: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Rule:
    own = spell(results[0].ndim + 1, {dim: "D"})
    return Rule(f"{own}*->{own.replace('D', '')}" if x1.ndim == x2.ndim == len(own) else "->")


compose("inner")(lambda x, y: torch.tensordot(x, y, ([-1], [-1])) if x.ndim and y.ndim else x * y)


@rule("einsum")
def _einsum(results: Any, equation: str, *operands: Any) -> Rule:
    equation = equation.replace(" ", "")
    if "->" not in equation:
        once = sorted(one for one in {*equation} - {*",."} if equation.count(one) == 1)
        equation += f"->{'...' * ('...' in equation)}{''.join(once)}"
    if any(one.isupper() for one in equation):
        raise ValueError(f"einsum of arrays takes small letters; got {equation}.")
    return Rule(equation, "each")


@rule("scaled_dot_product_attention")
def _attention(
    results: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Rule:  # fmt: skip
    head = "h" if enable_gqa else ""  # query heads are several to a head of keys and values, in order
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
