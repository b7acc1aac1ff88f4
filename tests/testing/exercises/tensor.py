"""Answers to the exercises of tensor parallelism: the right ones, and wrong ones by their hint."""

import torch
from torch.nn import functional as F

import fshard as fs
from fshard import P


def qkv(width, n, device):
    each = width // n
    return [part * width + device * each + i for part in range(3) for i in range(each)]


def log_sum(logits):
    top = fs.pmax(logits.amax(1), "t")
    return fs.psum((logits - top[:, None]).exp().sum(1), "t").log() + top


def chosen(logits, labels):
    index = labels - fs.axis_index("t") * logits.shape[1]
    is_own = (index >= 0) & (index < logits.shape[1])
    own = logits.gather(1, index.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    return fs.psum(torch.where(is_own, own, 0.0), "t")


def vocabulary(logits, labels):
    return log_sum(logits) - chosen(logits, labels)


def overflowing(logits, labels):
    return fs.psum(logits.exp().sum(1), "t").log() - chosen(logits, labels)


SOLUTIONS = {
    "tensor.pair": (P("t"), P(None, "t")),
    "tensor.column": lambda x, shard: fs.pvary(x, "t") @ shard,
    "tensor.qkv": qkv,
    "tensor.bytes": lambda tokens, width, n: 4 * (n - 1) / n * 4 * tokens * width,
    "tensor.vocabulary": vocabulary,
}

WRONG = {
    "tensor.pair": {
        "Rows, then columns": (P(None, "t"), P("t")),
        "must be sharded like": (P("t"), P("t")),
        "without an axis": (P(), P(None, "t")),
        "pair of specs": P("t"),
    },
    "tensor.column": {
        "own columns alone": lambda x, shard: x @ shard,
        "mixes features": lambda x, shard: fs.psum(x @ shard, "t"),
        "all columns": lambda x, shard: fs.all_gather(x @ shard, "t", dim=1),
        "raises": lambda x, shard: shard @ x,
    },
    "tensor.qkv": {
        "all queries": lambda width, n, device: list(
            range(device * 3 * width // n, (device + 1) * 3 * width // n)
        ),
        "q alone": lambda width, n, device: torch.arange(width).chunk(n)[device],
        "Every n-th": lambda width, n, device: range(device, 3 * width, n),
    },
    "tensor.bytes": {
        "That is the forward": lambda t, width, n: 2 * (n - 1) / n * 4 * t * width,
        "never sent": lambda t, width, n: 4 * (n - 1) / n * 4 * t * 4 * width,
        "number of elements": lambda t, width, n: 4 * (n - 1) / n * t * width,
        "(n - 1)/n": lambda t, width, n: 2 * 4 * t * width,
    },
    "tensor.vocabulary": {
        "overflows": overflowing,
        "log-sum-exp. The logit": lambda logits, labels: log_sum(logits),
        "mean over rows": lambda logits, labels: vocabulary(logits, labels).mean(),
        "sign": lambda logits, labels: -vocabulary(logits, labels),
        "raises": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
    },
}
