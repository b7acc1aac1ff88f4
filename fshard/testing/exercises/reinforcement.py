"""Exercises of the notebook "Reinforcement learning on two meshes"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fshard.testing.grading import Exercise, WrongAnswer, grade_cases

_GROUPS = ((6, 3), (8, 4), (4, 2))


def _rewards(count: int, group: int) -> Tensor:
    """Return rewards of which the first group has equal ones."""
    rewards = torch.rand(count, generator=torch.Generator().manual_seed(count))
    rewards[:group] = 0.5
    return rewards


def _centred(count: int, group: int) -> Tensor:
    rows = _rewards(count, group).view(-1, group)
    return rows - rows.mean(1, keepdim=True)


def _advantages(count: int, group: int) -> Tensor:
    deviation = _rewards(count, group).view(-1, group).std(1, keepdim=True)
    return (_centred(count, group) / (deviation + 1e-4)).flatten()


def _over_all(count: int, group: int) -> Tensor:
    rewards = _rewards(count, group)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def _run_advantage(function: Any, count: int, group: int) -> Any:
    result = function(_rewards(count, group), group)
    if isinstance(result, Tensor) and result.isnan().any():
        raise WrongAnswer(
            "It is not a number where all rewards of a group are equal: their deviation is 0. Add"
            " 1e-4 to it."
        )
    return result


ADVANTAGE = Exercise(
    "reinforcement.advantage",
    "`rewards` is a vector; each `group` of answers to one prompt stands together. Return GRPO's"
    " advantages, a vector: by how much a reward exceeds the mean of its group, divided by the"
    " group's standard deviation (torch's) plus 1e-4.",
    "answer(rewards, group)",
    (
        "View the rewards as (prompts, group).",
        "Mean and deviation of dim 1, with `keepdim=True`; then flatten.",
    ),
    "A prompt that is always solved, or never, then teaches nothing, instead of a NaN.",
    lambda answer: grade_cases(
        answer,
        "answer(rewards, group)",
        _GROUPS,
        _advantages,
        {
            "Mean and deviation are those of all prompts: an easy prompt then looks like a good"
            " answer. Take those of each group.": _over_all,
            "The rewards are centred, but not divided by the deviation of their group.": (
                lambda count, group: _centred(count, group).flatten()
            ),
            "The result has a row for each prompt. Flatten it.": (
                lambda count, group: _advantages(count, group).view(-1, group)
            ),
        },
        run=_run_advantage,
        names="count, group",
    ),
)


def _ratios(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logp, old = torch.randn(2, 8, generator=draw)
    advantage = torch.randn(8, generator=draw)
    return logp, old, advantage


def _clipped(seed: int, clip: float) -> Tensor:
    logp, old, advantage = _ratios(seed)
    ratio = (logp - old).exp()
    near = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage, near * advantage).mean()


def _clipped_alone(seed: int, clip: float) -> Tensor:
    logp, old, advantage = _ratios(seed)
    return -((logp - old).exp().clamp(1 - clip, 1 + clip) * advantage).mean()


def _unclipped(seed: int, clip: float) -> Tensor:
    logp, old, advantage = _ratios(seed)
    return -((logp - old).exp() * advantage).mean()


def _of_maximum(seed: int, clip: float) -> Tensor:
    logp, old, advantage = _ratios(seed)
    ratio = (logp - old).exp()
    near = ratio.clamp(1 - clip, 1 + clip)
    return -torch.maximum(ratio * advantage, near * advantage).mean()


CLIPPED = Exercise(
    "reinforcement.clipped",
    "Write the clipped loss of PPO: `logp` and `old` are the log-probabilities of the tokens now"
    " and"
    " when they were drawn, `advantage` that of each token. The ratio of probabilities is"
    " clipped to"
    " 1 - `clip` ... 1 + `clip`; of the two products the pessimistic one counts. Return the"
    " mean, to"
    " be minimized.",
    "answer(logp, old, advantage, clip)",
    (
        "The ratio is `(logp - old).exp()`.",
        "Pessimistic is the smaller of `ratio * advantage` and `ratio.clamp(...) * advantage`.",
        "A loss is minimized, so it is the negative mean.",
    ),
    "Clipped alone, a token that became much likelier by a bad update could never be taken back.",
    lambda answer: grade_cases(
        answer,
        "answer(logp, old, advantage, clip)",
        [(1, 0.2), (2, 0.1), (3, 0.4)],
        _clipped,
        {
            "The sign: a loss is minimized, so likelier good tokens must make it smaller.": (
                lambda seed, clip: -_clipped(seed, clip)
            ),
            "Clipped alone the gradient is 0 outside of the range, also where the ratio should come"
            " back. Take the minimum of both products.": _clipped_alone,
            "The ratio is not clipped.": _unclipped,
            "The maximum is the optimistic one of both.": _of_maximum,
        },
        run=lambda function, seed, clip: function(*_ratios(seed), clip),
        names="seed, clip",
    ),
)


def _tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(length)
    logits = torch.randn(rows, length, 5, generator=draw)
    return logits, torch.randint(5, (rows, length), generator=draw)


def _logp(rows: int, length: int) -> Tensor:
    logits, tokens = _tokens(rows, length)
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    return chosen.squeeze(-1)


def _unshifted(rows: int, length: int) -> Tensor:
    logits, tokens = _tokens(rows, length)
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def _raw(rows: int, length: int) -> Tensor:
    logits, tokens = _tokens(rows, length)
    return logits[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


LOGP = Exercise(
    "reinforcement.logp",
    "A model returns `logits` (rows, length, words) for `tokens` (rows, length): those at a"
    " position"
    " are for the next token. Return the log-probabilities of the tokens after the first,"
    " (rows, length - 1).",
    "answer(logits, tokens)",
    (
        "The logits at position t predict the token at t + 1.",
        "`logits[:, :-1]` and `tokens[:, 1:]`.",
        "`log_softmax(-1)`, then `gather(-1, ...)`, which needs a last dim of 1.",
    ),
    "Learner and engine must agree on this number: their ratio is 1 before the first update.",
    lambda answer: grade_cases(
        answer,
        "answer(logits, tokens)",
        [(2, 4), (3, 6)],
        _logp,
        {
            "The logits of a position are scored against its own token. They are for the next"
            " one.": (_unshifted),
            "Shifted by one too little: the last logits have no next token here.": (
                lambda rows, length: _unshifted(rows, length)[:, 1:]
            ),
            "The logits of a position are scored against its own token, and the last is left out."
            " Take the tokens from 1 on.": (lambda rows, length: _unshifted(rows, length)[:, :-1]),
            "These are logits. A log-probability is their `log_softmax`.": _raw,
            "These are probabilities. Take their logarithm, by `log_softmax`.": (
                lambda rows, length: _logp(rows, length).exp()
            ),
        },
        run=lambda function, rows, length: function(*_tokens(rows, length)),
        names="rows, length",
    ),
)

EXERCISES = (ADVANTAGE, CLIPPED, LOGP)
