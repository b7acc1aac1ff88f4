"""Routers: the experts of each token, and their weights; losses that keep the experts evenly used."""

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
        bias: of each expert, added where experts are chosen but not to the weights: DeepSeek-V3's balancing without a loss.
        groups, top_groups: experts are chosen from the best groups only, by the sum of each group's two best.
        normalize: the weights of a token sum to 1.
        scale: of the weights.

    >>> route(torch.tensor([[0.0, 2.0, 1.0]]), 2).experts
    tensor([[1, 2]])
    """
    count = logits.shape[-1]
    if not 0 < top_k <= count or score not in ("softmax", "sigmoid") or count % groups:
        raise ValueError(
            f'route: top_k must be from 1 to the {count} experts, score "softmax" or "sigmoid", and groups must divide the '
            f"experts; got {top_k=}, {score=}, {groups=}."
        )
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    choice = (scores if bias is None else scores + bias).detach()
    if top_groups is not None and top_groups < groups:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(min(2, count // groups), -1).values.sum(-1).topk(top_groups, -1).indices
        is_kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=choice.device).scatter(
            -1, best, True
        )
        choice = grouped.masked_fill(~is_kept[..., None], -inf).flatten(-2)
    experts = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights * scale, scores)


def balance_loss(routing: Routing, axes: Axes = ()) -> Tensor:
    """Return the loss that is 1 where experts are evenly used: experts x the sum of their loads times their mean scores.

    Loads and means are those of the tokens of all devices along `axes`, those of the batch: equal on any mesh.

    >>> balance_loss(Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), torch.full((2, 2), 0.5)))
    tensor(1.)
    """
    count = routing.scores.shape[-1]
    scores = routing.scores / routing.scores.sum(-1, keepdim=True)
    used = torch.zeros_like(scores).scatter(-1, routing.experts, 1.0)
    totals = torch.cat([used.sum(0), scores.sum(0), scores.new_full((1,), float(len(scores)))])
    totals = psum(totals, axes) if axes else totals
    load, mean, tokens = totals.split([count, count, 1])
    return count * ((load / load.sum()).detach() * (mean / tokens.detach())).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean of the squared log-sums of exponentials of tokens' logits, which keeps logits small.

    >>> z_loss(torch.zeros(3, 1))
    tensor(0.)
    """
    return logits.logsumexp(-1).square().mean()
