"""Exercises of the notebook "Reinforcement learning on two meshes"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fshard.testing.grading import Answer, Cases, Exercise, WrongAnswer, mistake

__all__ = ["EXERCISES"]


# -- the advantages of GRPO -----------------------------------------------------------------------


def rewards_of(count: int, group: int) -> Tensor:
    """Return rewards of which the first group has equal ones."""
    rewards = torch.rand(count, generator=torch.Generator().manual_seed(count))
    rewards[:group] = 0.5
    return rewards


def run_advantage(answer: Answer, count: int, group: int) -> Any:
    result = answer(rewards_of(count, group), group)
    if isinstance(result, Tensor) and result.isnan().any():
        raise WrongAnswer(
            "It is not a number where all rewards of a group are equal: their deviation is 0. Add"
            " 1e-4 to it."
        )
    return result


def advantages(count: int, group: int) -> Tensor:
    return normalized_rows(rewards_of(count, group), group).flatten()


def normalized_rows(rewards: Tensor, group: int) -> Tensor:
    rows = rewards.view(-1, group)
    deviation = rows.std(1, keepdim=True)
    return (rows - rows.mean(1, keepdim=True)) / (deviation + 1e-4)


@mistake(
    "Mean and deviation are those of all prompts: an easy prompt then looks like a good answer."
    " Take those of each group."
)
def normalized_over_all_prompts(rewards: Tensor, group: int) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


@mistake("The rewards are centred, but not divided by the deviation of their group.")
def centred(rewards: Tensor, group: int) -> Tensor:
    rows = rewards.view(-1, group)
    return (rows - rows.mean(1, keepdim=True)).flatten()


@mistake("The result has a row for each prompt. Flatten it.")
def not_flattened(rewards: Tensor, group: int) -> Tensor:
    return normalized_rows(rewards, group)


ADVANTAGE = Exercise(
    name="reinforcement.advantage",
    question=(
        "`rewards` is a vector; each `group` of answers to one prompt stands together. Return"
        " GRPO's advantages, a vector: by how much a reward exceeds the mean of its group, divided"
        " by the group's standard deviation (torch's) plus 1e-4."
    ),
    form="answer(rewards, group)",
    hints=(
        "View the rewards as (prompts, group).",
        "Mean and deviation of dim 1, with `keepdim=True`; then flatten.",
    ),
    why="A prompt that is always solved, or never, then teaches nothing, instead of a NaN.",
    grade=Cases(
        cases=[(6, 3), (8, 4), (4, 2)],
        truth=advantages,
        mistakes=(normalized_over_all_prompts, centred, not_flattened),
        run=run_advantage,
    ),
)


# -- the clipped loss of PPO ----------------------------------------------------------------------


def tokens_of_policy(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities now and when the tokens were drawn, and advantages."""
    draw = torch.Generator().manual_seed(seed)
    logp, old = torch.randn(2, 8, generator=draw)
    advantage = torch.randn(8, generator=draw)
    return logp, old, advantage


def run_clipped(answer: Answer, seed: int, clip: float) -> Any:
    logp, old, advantage = tokens_of_policy(seed)
    return answer(logp, old, advantage, clip)


def clipped_loss(seed: int, clip: float) -> Tensor:
    logp, old, advantage = tokens_of_policy(seed)
    return -mean_of_smaller(logp, old, advantage, clip)


def mean_of_smaller(logp: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return the mean of the smaller of both products, to be maximized."""
    ratio = (logp - old).exp()
    near = ratio.clamp(1 - clip, 1 + clip)
    return torch.minimum(ratio * advantage, near * advantage).mean()


@mistake("The sign: a loss is minimized, so likelier good tokens must make it smaller.")
def wrong_sign(logp: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    return mean_of_smaller(logp, old, advantage, clip)


@mistake(
    "Clipped alone the gradient is 0 outside of the range, also where the ratio should come back."
    " Take the minimum of both products."
)
def clipped_alone(logp: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    near = (logp - old).exp().clamp(1 - clip, 1 + clip)
    return -(near * advantage).mean()


@mistake("The ratio is not clipped.")
def not_clipped(logp: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    ratio = (logp - old).exp()
    return -(ratio * advantage).mean()


@mistake("The maximum is the optimistic one of both.")
def mean_of_larger(logp: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    ratio = (logp - old).exp()
    near = ratio.clamp(1 - clip, 1 + clip)
    return -torch.maximum(ratio * advantage, near * advantage).mean()


CLIPPED = Exercise(
    name="reinforcement.clipped",
    question=(
        "Write the clipped loss of PPO: `logp` and `old` are the log-probabilities of the tokens"
        " now and when they were drawn, `advantage` that of each token. The ratio of probabilities"
        " is clipped to 1 - `clip` ... 1 + `clip`; of the two products the pessimistic one counts."
        " Return the mean, to be minimized."
    ),
    form="answer(logp, old, advantage, clip)",
    hints=(
        "The ratio is `(logp - old).exp()`.",
        "Pessimistic is the smaller of `ratio * advantage` and `ratio.clamp(...) * advantage`.",
        "A loss is minimized, so it is the negative mean.",
    ),
    why=(
        "Clipped alone, a token that became much likelier by a bad update could never be taken"
        " back."
    ),
    grade=Cases(
        cases=[(1, 0.2), (2, 0.1), (3, 0.4)],
        truth=clipped_loss,
        mistakes=(wrong_sign, clipped_alone, not_clipped, mean_of_larger),
        run=run_clipped,
    ),
)


# -- the log-probabilities of tokens --------------------------------------------------------------


def logits_and_tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(length)
    logits = torch.randn(rows, length, 5, generator=draw)
    tokens = torch.randint(5, (rows, length), generator=draw)
    return logits, tokens


def run_logp(answer: Answer, rows: int, length: int) -> Any:
    logits, tokens = logits_and_tokens(rows, length)
    return answer(logits, tokens)


def log_probabilities(rows: int, length: int) -> Tensor:
    logits, tokens = logits_and_tokens(rows, length)
    return chosen(logits[:, :-1].log_softmax(-1), tokens[:, 1:])


def chosen(values: Tensor, tokens: Tensor) -> Tensor:
    """Return of each row the value of its token."""
    return values.gather(-1, tokens[..., None]).squeeze(-1)


@mistake("The logits of a position are scored against its own token. They are for the next one.")
def not_shifted(logits: Tensor, tokens: Tensor) -> Tensor:
    return chosen(logits.log_softmax(-1), tokens)


@mistake("Shifted by one too little: the last logits have no next token here.")
def not_shifted_after_the_first(logits: Tensor, tokens: Tensor) -> Tensor:
    return chosen(logits[:, 1:].log_softmax(-1), tokens[:, 1:])


@mistake(
    "The logits of a position are scored against its own token, and the last is left out. Take the"
    " tokens from 1 on."
)
def not_shifted_before_the_last(logits: Tensor, tokens: Tensor) -> Tensor:
    return chosen(logits[:, :-1].log_softmax(-1), tokens[:, :-1])


@mistake("These are logits. A log-probability is their `log_softmax`.")
def logits_of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    return chosen(logits[:, :-1], tokens[:, 1:])


@mistake("These are probabilities. Take their logarithm, by `log_softmax`.")
def probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return chosen(logits[:, :-1].softmax(-1), tokens[:, 1:])


LOGP = Exercise(
    name="reinforcement.logp",
    question=(
        "A model returns `logits` (rows, length, words) for `tokens` (rows, length): those at a"
        " position are for the next token. Return the log-probabilities of the tokens after the"
        " first, (rows, length - 1)."
    ),
    form="answer(logits, tokens)",
    hints=(
        "The logits at position t predict the token at t + 1.",
        "`logits[:, :-1]` and `tokens[:, 1:]`.",
        "`log_softmax(-1)`, then `gather(-1, ...)`, which needs a last dim of 1.",
    ),
    why="Learner and engine must agree on this number: their ratio is 1 before the first update.",
    grade=Cases(
        cases=[(2, 4), (3, 6)],
        truth=log_probabilities,
        mistakes=(
            not_shifted,
            not_shifted_after_the_first,
            not_shifted_before_the_last,
            logits_of_tokens,
            probabilities,
        ),
        run=run_logp,
    ),
)

EXERCISES = (ADVANTAGE, CLIPPED, LOGP)
