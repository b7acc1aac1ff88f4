"""Answers to the exercises of long sequences: the right ones, and wrong ones by their hint."""

import torch

import fshard as fs


def scores(device, n, tokens, itself=1):
    own = range(device * tokens // n, (device + 1) * tokens // n)
    return sum(t + itself for t in own)


def merge(out1, log1, out2, log2):
    w = torch.sigmoid(log1 - log2)[:, None]
    return w * out1 + (1 - w) * out2


def merge_by_exp(out1, log1, out2, log2):
    w1 = log1.exp()[:, None]
    w2 = log2.exp()[:, None]
    return (w1 * out1 + w2 * out2) / (w1 + w2)


def positions(ids):
    own = ids.shape[1]
    return torch.arange(own) + own * fs.axis_index("seq")


SOLUTIONS = {
    "sequences.chunks": lambda device, n: (device, 2 * n - 1 - device),
    "sequences.scores": scores,
    "sequences.merge": merge,
    "sequences.positions": positions,
}

WRONG = {
    "sequences.chunks": {
        "natural order": lambda device, n: (2 * device, 2 * device + 1),
        "later on later": lambda device, n: (device, device + n),
        "numbered from 0": lambda device, n: (device, 2 * n - device),
    },
    "sequences.scores": {
        "causal mask": lambda device, n, tokens: tokens * tokens // n,
        "itself": lambda device, n, tokens: scores(device, n, tokens, itself=0),
        "own tokens": lambda device, n, tokens: scores(0, n, tokens),
        "mean of all": lambda device, n, tokens: tokens * (tokens + 1) / 2 / n,
    },
    "sequences.merge": {
        "overflows": merge_by_exp,
        "weighs both": lambda out1, log1, out2, log2: (out1 + out2) / 2,
        "already divided": lambda out1, log1, out2, log2: out1 + out2,
        "swapped": lambda out1, log1, out2, log2: merge(out1, log2, out2, log1),
        "raises": lambda out1, log1, out2, log2: log1 * out1 + log2 * out2,
    },
    "sequences.positions": {
        "begin at 0": lambda ids: torch.arange(ids.shape[1]),
        "not the index": lambda ids: torch.arange(ids.shape[1]) + fs.axis_index("seq"),
        "Tokens are dim 1": lambda ids: torch.arange(len(ids)) + len(ids) * fs.axis_index("seq"),
        "all tokens": lambda ids: torch.arange(ids.shape[1] * fs.axis_size("seq")),
    },
}
