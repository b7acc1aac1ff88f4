"""Answers to the exercises of experts: the right ones, and wrong ones by their hint."""

import torch

import fshard as fs


def exchange(counts, width, device):
    return 4 * width * (sum(counts[device]) - counts[device][device])


def received(counts, width, device):
    return 4 * width * (sum(row[device] for row in counts) - counts[device][device])


def balance(load, score):
    load, score = fs.pmean((load, score), "data")
    return len(load) * (load * score).sum()


def summed_balance(load, score):
    load, score = fs.psum((load, score), "data")
    return len(load) * (load * score).sum()


SOLUTIONS = {
    "experts.weights": lambda logits, k: logits.topk(k, dim=1).values.softmax(1),
    "experts.exchange": exchange,
    "experts.balance": balance,
}

WRONG = {
    "experts.weights": {
        "do not sum to 1": lambda logits, k: logits.softmax(1).topk(k, 1).values,
        "logits themselves": lambda logits, k: logits.topk(k, 1).values,
        "same weight": lambda logits, k: torch.full((len(logits), k), 1 / k),
        "comes first": lambda logits, k: logits.sort(1).values[:, -k:].softmax(1),
        "of all experts": lambda logits, k: logits.softmax(1),
        "numbers of the experts": lambda logits, k: logits.topk(k, 1).indices,
        "detached": lambda logits, k: logits.detach().topk(k, 1).values.softmax(1),
    },
    "experts.exchange": {
        "own experts": lambda counts, width, device: 4 * width * sum(counts[device]),
        "receives": received,
        "4 bytes": lambda counts, width, device: exchange(counts, width, device) / 4,
        "are tokens": lambda counts, width, device: exchange(counts, width, device) / 4 / width,
        "together": lambda counts, width, device: 4 * width * sum(map(sum, counts)),
    },
    "experts.balance": {
        "mean of the devices' losses": lambda f, p: fs.pmean(len(f) * (f * p).sum(), "data"),
        "own tokens": lambda f, p: len(f) * (f * p).sum(),
        "factor E": lambda f, p: balance(f, p) / len(f),
        "n * n": summed_balance,
    },
}
