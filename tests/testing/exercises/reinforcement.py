"""Answers to the exercises of reinforcement learning: right ones, and wrong ones by their hint."""

import torch


def advantage(rewards, group):
    rows = rewards.view(-1, group)
    return ((rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-4)).flatten()


def over_all(rewards, group):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def without_epsilon(rewards, group):
    rows = rewards.view(-1, group)
    return ((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)).flatten()


def centred(rewards, group):
    rows = rewards.view(-1, group)
    return (rows - rows.mean(1, keepdim=True)).flatten()


def clipped(logp, old, advantage, clip, pick=torch.minimum):
    ratio = (logp - old).exp()
    return -pick(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


def clipped_alone(logp, old, advantage, clip):
    return -((logp - old).exp().clamp(1 - clip, 1 + clip) * advantage).mean()


def logp(logits, tokens):
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def unshifted(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


SOLUTIONS = {
    "reinforcement.advantage": advantage,
    "reinforcement.clipped": lambda now, old, a, clip: clipped(now, old, a, clip),
    "reinforcement.logp": logp,
}

WRONG = {
    "reinforcement.advantage": {
        "all prompts": over_all,
        "deviation is 0": without_epsilon,
        "not divided": centred,
        "Flatten": lambda rewards, group: advantage(rewards, group).view(-1, group),
    },
    "reinforcement.clipped": {
        "The sign": lambda now, old, a, clip: -clipped(now, old, a, clip),
        "Clipped alone": clipped_alone,
        "not clipped": lambda now, old, a, clip: -((now - old).exp() * a).mean(),
        "optimistic": lambda now, old, a, clip: clipped(now, old, a, clip, torch.maximum),
    },
    "reinforcement.logp": {
        "own token. They": unshifted,
        "too little": lambda logits, tokens: unshifted(logits, tokens)[:, 1:],
        "from 1 on": lambda logits, tokens: unshifted(logits, tokens)[:, :-1],
        "are logits": lambda x, t: x[:, :-1].gather(-1, t[:, 1:, None]).squeeze(-1),
        "probabilities": lambda logits, tokens: logp(logits, tokens).exp(),
    },
}
