"""Routers: the experts of each token, and their weights; losses that keep the experts evenly used.

With `route(logits, top_k=2)`, one token:

    logits     0.0   2.0   1.0
    scores     0.09  0.67  0.24     softmax
    experts          1     2        the two largest
    weights          0.73  0.27     their scores, divided by the sum of both
"""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.api import psum
from fshard.mesh.layout import Axes

Score = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The experts of tokens, with their weights.

    Args:
        experts: the numbers of each token's experts.  (tokens, top_k)
        weights: of their results.  (tokens, top_k)
        scores: of all experts, which the losses use.  (tokens, experts)
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: Score = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Choose the `top_k` experts of each token.

    Args:
        logits: of each token and expert.  (tokens, experts)
        top_k: experts of a token.
        score: how logits become weights.
        bias: of each expert, added where experts are chosen but not to the weights: DeepSeek-V3's
            balancing without a loss.
        groups, top_groups: experts are chosen from the best groups only, by the sum of each group's
            two best.
        normalize: the weights of a token sum to 1.
        scale: of the weights.

    >>> route(torch.tensor([[0.0, 2.0, 1.0]]), 2).experts
    tensor([[1, 2]])
    """
    count = logits.shape[-1]
    if not 0 < top_k <= count or score not in ("softmax", "sigmoid") or count % groups:
        raise ValueError(
            f'route: top_k must be from 1 to the {count} experts, score "softmax" or "sigmoid", '
            f"and groups must divide the experts; got {top_k=}, {score=}, {groups=}."
        )
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()

    # The choice is not differentiable, the weights are.
    choice_scores = scores.detach()
    if bias is not None:
        choice_scores = choice_scores + bias.detach()
    if top_groups is not None and top_groups < groups:
        choice_scores = _of_best_groups(choice_scores, groups, top_groups)
    experts = choice_scores.topk(top_k, -1).indices

    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights * scale, scores)


def _of_best_groups(scores: Tensor, groups: int, top_groups: int) -> Tensor:
    """Return scores with -inf for the experts that are not in the best groups."""
    grouped = scores.unflatten(-1, (groups, -1))
    experts_of_group = grouped.shape[-1]
    group_scores = grouped.topk(min(2, experts_of_group), -1).values.sum(-1)
    best = group_scores.topk(top_groups, -1).indices
    is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~is_best[..., None], -inf).flatten(-2)


def balance_loss(routing: Routing, axes: Axes = ()) -> Tensor:
    """Return the loss that is 1 where experts are evenly used.

    It is the number of experts times the sum of their loads times their mean scores. Loads and
    means are those of the tokens of all devices along `axes`, those of the batch: equal on any
    mesh. It is 0 without tokens.

    >>> scores = torch.full((2, 2), 0.5)
    >>> balance_loss(Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), scores))
    tensor(1.)
    """
    count = routing.scores.shape[-1]
    scores = routing.scores / routing.scores.sum(-1, keepdim=True)
    is_used = torch.zeros_like(scores).scatter(-1, routing.experts, 1.0)
    tokens = scores.new_full((1,), float(len(scores)))
    totals = torch.cat([is_used.sum(0), scores.sum(0), tokens])
    if axes:
        totals = psum(totals, axes)

    load, score_sums, tokens = totals.split([count, count, 1])
    # The load is a count, without a gradient; the scores move it.
    load = load.detach()
    # Without tokens both are 0, and so is the loss: of one token on they are at least 1.
    load = load / load.sum().clamp(min=1)
    means = score_sums / tokens.detach().clamp(min=1)
    return count * (load * means).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean of the squared log-sums of exponentials of tokens' logits.

    It keeps logits small. It is 0 without tokens.

    >>> z_loss(torch.zeros(3, 1))
    tensor(0.)
    """
    if not logits.numel():
        return logits.sum()  # no tokens, whose mean would be nan
    return logits.logsumexp(-1).square().mean()
