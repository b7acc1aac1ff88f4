"""Answers to the exercises of ZeRO: the right ones, and wrong ones by a part of their hint."""

import sys

import torch

import fshard as fs
from fshard import P


def flat_bytes(numbers, n, stage):
    params = 4 * numbers / (n if stage == 3 else 1)
    rest = 12 * numbers / (n if stage else 1)
    return params + rest


def sent(stage, n, numbers):
    rounds = 3 if stage == 3 else 2
    return rounds * (n - 1) / n * 4 * numbers


def reduce(grad):
    return fs.psum_scatter(grad, "data") / fs.axis_size("data")


def gather_at_use(shard, rows):
    w = fs.all_gather(shard, "data")
    return fs.pmean(torch.tanh(rows @ w).square().mean(), "data")


def replicated_gather(shard, rows):
    w = fs.all_gather(shard, "data", to="replicated")
    return fs.pmean(torch.tanh(rows @ w).square().mean(), "data")


def summed_loss(shard, rows):
    return fs.psum(torch.tanh(rows @ fs.all_gather(shard, "data")).square().mean(), "data")


def local_loss(shard, rows):
    return torch.tanh(rows @ fs.all_gather(shard, "data")).square().mean()


def own_rows(grad):
    n = fs.axis_size("data")
    return grad.chunk(n)[fs.axis_index("data")]


def by_psum(grad):
    n = fs.axis_size("data")
    return fs.pmean(grad, "data").chunk(n)[fs.axis_index("data")]


def on_one_device_only(grad):
    if fs.axis_index("data") == 0:
        return fs.psum_scatter(grad, "data")
    return grad


def in_place(grad):
    grad /= fs.axis_size("data")
    return fs.psum_scatter(grad, "data")


RULES = {
    "embed": P("data"),
    "blocks[*].up": P("data"),
    "blocks[*].down": P("data"),
    "**": P(),
}

SOLUTIONS = {
    "zero.flat_bytes": flat_bytes,
    "zero.sent": sent,
    "zero.reduce": reduce,
    "zero.gather_at_use": gather_at_use,
    "zero.rules": RULES,
}

WRONG = {
    "zero.flat_bytes": {
        "two running means": lambda numbers, n, stage: (
            4 * numbers / (n if stage == 3 else 1) + 8 * numbers / (n if stage else 1)
        ),
        "float32 has 4 bytes": lambda numbers, n, stage: flat_bytes(numbers, n, stage) / 4,
        "do not shard the parameters": lambda numbers, n, stage: 16 * numbers / (n if stage else 1),
        "All stages are the same": lambda numbers, n, stage: 16 * numbers,
        "must be a function": 16,
        "the program has 768": max,
        "with 3 arguments": lambda numbers, n: 16 * numbers / n,
        "ZeroDivisionError": lambda numbers, n, stage: numbers / stage,
        "return": lambda numbers, n, stage: None,
    },
    "zero.sent": {
        "twice: for the forward": lambda stage, n, numbers: 2 * (n - 1) / n * 4 * numbers,
        "(n - 1)/n of the bytes": lambda stage, n, numbers: (3 if stage == 3 else 2) * 4 * numbers,
        "all devices together": lambda stage, n, numbers: n * sent(stage, n, numbers),
        "float32 has 4 bytes": lambda stage, n, numbers: sent(stage, n, numbers) / 4,
    },
    "zero.reduce": {
        "shard of the sum": lambda grad: fs.psum_scatter(grad, "data"),
        "are enough": by_psum,
        "shard alone": lambda grad: fs.pmean(grad, "data"),
        "own gradient": own_rows,
        "divides by 4": lambda grad: fs.psum_scatter(grad, "data") / 4,
        "never call": on_one_device_only,
        "in place": in_place,
        "ends the program": lambda grad: sys.exit(1),
        "axes bound here": lambda grad: fs.psum_scatter(grad, "model"),
    },
    "zero.gather_at_use": {
        "promise that all devices": replicated_gather,
        "n times too large": summed_loss,
        "Average it": local_loss,
        "has no gradient": lambda shard, rows: fs.pmean((rows @ rows.T).mean(), "data"),
        "one number": lambda shard, rows: rows @ fs.all_gather(shard, "data"),
    },
    "zero.rules": {
        "a dict": P("data"),
        "of three blocks": {
            "embed": P("data"),
            "blocks[0].up": P("data"),
            "blocks[0].down": P("data"),
            "**": P(),
        },
        "Rules must be complete": {"embed": P("data"), "blocks[*].up": P("data")},
        "is replicated": {"embed": P("data"), "**": P()},
        "stays replicated": {"**": P("data")},
        "along dim 0": {**RULES, "blocks[*].up": P(None, "data")},
    },
}
