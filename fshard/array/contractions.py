"""Rows of contractions: matmul, linear, einsum, convolution and attention, as subscripts.

A subscript that the output lacks is summed over: sharded inputs give an unreduced output. The operation is linear in
each input; a bias is added once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fshard.array.rules import Labels, Rule, broadcast, rule, tensors_in


def contraction(
    inputs: Sequence[tuple[Any, Labels]], output: Labels, *, bias: Any = None, bias_labels: Labels = (), **more: Any
) -> Rule:
    """Return the rule of a product of arrays that is summed over the labels that the output lacks."""
    used = {label for _, labels in inputs for label in labels if label is not None}
    groups = [(x,) if bias is None else (x, bias) for x, _ in inputs]
    added = [] if bias is None else [(bias, bias_labels)]
    return Rule(
        [*inputs, *added],
        [output],
        linear=groups,
        summed=frozenset(used - {*output}),
        added=[x for x, _ in added],
        **more,
    )


def _batched(*xs: Any) -> tuple[Labels, list[Labels]]:
    """Return the labels of broadcast batch dims: all but the last two."""
    full, labels = broadcast(*(x.shape[:-2] for x in xs))
    return tuple(f"d{dim}" for dim in range(len(full))), labels


@rule("matmul mm bmm mv dot vdot inner __matmul__")
def _matmul(x: Any, y: Any) -> Rule:
    if x.ndim == 1 or y.ndim == 1:
        rows, columns = tuple(f"r{d}" for d in range(x.ndim - 1)), tuple(f"c{d}" for d in range(y.ndim - 1))
        return contraction(
            [(x, (*rows, "k")), (y, ("k",) if y.ndim == 1 else (*columns[:-1], "k", columns[-1]))], (*rows, *columns)
        )
    batch, (first, second) = _batched(x, y)
    return contraction([(x, (*first, "i", "k")), (y, (*second, "k", "o"))], (*batch, "i", "o"))


@rule("linear")
def _linear(input: Any, weight: Any, bias: Any = None) -> Rule:
    rows = tuple(f"r{d}" for d in range(input.ndim - 1))
    out: Labels = () if weight.ndim == 1 else ("o",)
    return contraction(
        [(input, (*rows, "k")), (weight, (*out, "k"))],
        (*rows, *out),
        bias=bias,
        bias_labels=out[-bias.ndim :] if bias is not None and bias.ndim else (),
    )


@rule("addmm addbmm baddbmm addmv addr")
def _addmm(input: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Rule:
    if x.ndim == 1:
        inputs, out = [(x, ("i",)), (y, ("o",))], ("i", "o")
    elif y.ndim == 1:
        inputs, out = [(x, ("i", "k")), (y, ("k",))], ("i",)
    elif x.ndim == 3 and input.ndim <= 3:
        inputs, out = [(x, ("b", "i", "k")), (y, ("b", "k", "o"))], ("b", "i", "o")
    else:
        inputs, out = [(x, ("i", "k")), (y, ("k", "o"))], ("i", "o")
    sizes = {label: length for one, labels in inputs for label, length in zip(labels, one.shape, strict=True)}
    own = tuple(
        label if length == sizes[label] else None
        for label, length in zip(out[len(out) - input.ndim :], input.shape, strict=True)
    )
    return contraction(inputs, out, bias=input, bias_labels=own)


@rule("outer ger kron_1d")
def _outer(x: Any, y: Any) -> Rule:
    return contraction([(x, ("i",)), (y, ("o",))], ("i", "o"))


@rule("bilinear")
def _bilinear(x: Any, y: Any, weight: Any, bias: Any = None) -> Rule:
    rows = tuple(f"r{d}" for d in range(x.ndim - 1))
    inputs = [(x, (*rows, "i")), (y, (*rows, "j")), (weight, ("o", "i", "j"))]
    return contraction(inputs, (*rows, "o"), bias=bias, bias_labels=("o",))


@rule("tensordot")
def _tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Rule:
    first, second = (
        ([*range(a.ndim - dims, a.ndim)], [*range(dims)]) if isinstance(dims, int) else ([*dims[0]], [*dims[1]])
    )
    pairs = {d % b.ndim: e % a.ndim for e, d in zip(first, second, strict=True)}
    left = tuple(f"a{d}" for d in range(a.ndim))
    right = tuple(f"a{pairs[d]}" if d in pairs else f"b{d}" for d in range(b.ndim))
    kept = [label for label in left if label not in right] + [label for label in right if label not in left]
    return contraction([(a, left), (b, right)], tuple(kept))


@rule("einsum")
def _einsum(equation: str, *operands: Any) -> Rule:
    xs = tensors_in(list(operands))
    inputs, _, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    letters = "".join(terms).replace("...", "")
    widths = [x.ndim - len(term.replace("...", "")) if "..." in term else 0 for term, x in zip(terms, xs, strict=True)]
    if "->" not in equation:
        out = "..." * ("..." in inputs) + "".join(sorted(one for one in {*letters} if letters.count(one) == 1))
    full = max(widths, default=0)

    def expanded(term: str, width: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(f"e{d}" for d in range(full - width, full) if dots), *after]

    sizes: dict[str, int] = {}
    lists = [expanded(term, width) for term, width in zip(terms, widths, strict=True)]
    for labels, x in zip(lists, xs, strict=True):
        for label, length in zip(labels, x.shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), length) if length else 0
    named: list[tuple[Any, Labels]] = []
    for labels, x in zip(lists, xs, strict=True):
        repeated = {label for label in labels if labels.count(label) > 1}  # a diagonal is not local
        own = zip(labels, x.shape, strict=True)
        named.append(
            (x, tuple(None if label in repeated or length != sizes[label] else label for label, length in own))
        )
    bad = {label for labels in lists for label in labels if labels.count(label) > 1}
    named = [(x, tuple(None if label in bad else label for label in labels)) for x, labels in named]
    return contraction(named, tuple(None if label in bad else label for label in expanded(out, full)))


@rule("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
def _convolution(input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Rule:
    space = (None,) * (weight.ndim - 2)
    batch: Labels = ("n",) if input.ndim == weight.ndim else ()
    inputs: list[tuple[Any, Labels]] = [(input, (*batch, None, *space)), (weight, (None, None, *space))]
    return contraction(inputs, (*batch, None, *space), bias=bias, bias_labels=(None,))


@rule("scaled_dot_product_attention")
def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Rule:
    full, (q, k, v) = broadcast(
        *((*x.shape[:-3], 1 if enable_gqa else x.shape[-3]) if x.ndim > 2 else () for x in (query, key, value))
    )
    if enable_gqa:  # query heads are several to a head of keys and values, in order
        q, k, v = ((*labels[:-1], "h") for labels in (q, k, v))
    batch = tuple(f"d{d}" for d in range(len(full)))
    if enable_gqa:
        batch = (*batch[:-1], "h")
    row = None if is_causal else "l"
    inputs: list[tuple[Any, Labels]] = [(query, (*q, row, None)), (key, (*k, None, None)), (value, (*v, None, None))]
    if attn_mask is not None:
        shape = (*full[:-1], query.shape[-3]) if enable_gqa else full
        lengths = (*shape, query.shape[-2], key.shape[-2])[-attn_mask.ndim :] if attn_mask.ndim else ()
        labels = (*batch, row, None)[-attn_mask.ndim :] if attn_mask.ndim else ()
        inputs.append(
            (attn_mask, tuple(a if n == m else None for a, n, m in zip(labels, attn_mask.shape, lengths, strict=True)))
        )
    return Rule(inputs, [(*batch, row, None)])


def attention_with_dropout(query: Any, key: Any, value: Any, mask: Any, p: float, causal: bool, scale: Any) -> Any:
    """Compute attention by its formula, with dropout of the weights."""
    scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores + torch.zeros_like(hidden, dtype=scores.dtype).masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.nn.functional.dropout(scores.softmax(-1), p) @ value
