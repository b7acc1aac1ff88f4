"""Exercises of the notebook "Long sequences"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import Exercise, PerDevice, grade_cases, on_devices


def _chunks(device: int, n: int) -> list[int]:
    order = fs.tensor.zigzag(torch.arange(2 * n), n, dim=0)
    return order.chunk(n)[device].tolist()


CHUNKS = Exercise(
    "sequences.chunks",
    "Zigzag cuts the tokens into 2 n chunks, 0 to 2 n - 1. Which two does `device` of `n` have?",
    "answer(device, n)",
    (
        "An early one and a late one, such that the work of all devices is equal.",
        "The later the first one, the earlier the second one: their sum is the same for all.",
        "`device` and `2 * n - 1 - device`.",
    ),
    "Without it the last device of a causal ring works twice as long as the mean.",
    lambda answer: grade_cases(
        answer,
        "answer(device, n)",
        [(0, 2), (1, 3), (4, 5)],
        _chunks,
        {
            "These are neighbours, the natural order: the last device would have most work.": (
                lambda device, n: [2 * device, 2 * device + 1]
            ),
            "The second chunk is later on later devices, too, so the last still has most work.": (
                lambda device, n: [device, device + n]
            ),
            "Chunks are numbered from 0, so the last one is 2 n - 1.": (
                lambda device, n: [device, 2 * n - device]
            ),
        },
    ),
)


def _scores(device: int, n: int, tokens: int) -> int:
    seen = torch.ones(tokens, tokens).tril()
    return int(seen.chunk(n)[device].sum())


SCORES = Exercise(
    "sequences.scores",
    "`tokens` are sharded over `n` devices in their natural order. How many scores does `device`"
    " compute in causal attention, one for each query of its own and each key that it sees?",
    "answer(device, n, tokens)",
    (
        "Token t, counted from 0, sees t + 1 keys.",
        "Add that over the device's tokens: `range(device * tokens // n, (device + 1) * tokens"
        " // n)`.",
    ),
    "Device n - 1 has almost twice the mean, and a step takes as long as its slowest device.",
    lambda answer: grade_cases(
        answer,
        "answer(device, n, tokens)",
        [(0, 2, 8), (1, 3, 12), (3, 4, 16)],
        _scores,
        {
            "That is without the causal mask, where each query sees all keys.": (
                lambda device, n, tokens: tokens * tokens // n
            ),
            "A token sees itself, too: t + 1 keys.": (
                lambda device, n, tokens: _scores(device, n, tokens) - tokens // n
            ),
            "These are the scores among the device's own tokens. It also sees those of the devices"
            " before it.": lambda device, n, tokens: _scores(0, n, tokens),
            "That is the mean of all devices. In the natural order they differ.": (
                lambda device, n, tokens: tokens * (tokens + 1) / 2 / n
            ),
        },
    ),
)


def _halves(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return attention over two halves of the keys, with their log-sums, and over all keys."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 4, 6, generator=draw)
    scores = 8 * seed * q @ k.T
    parts = []
    for half in (slice(0, 2), slice(2, 4)):
        part = scores[:, half]
        parts += [part.softmax(1) @ v[half], part.logsumexp(1)]
    return parts[0], parts[1], parts[2], parts[3], scores.softmax(1) @ v


def _run_merge(function: Any, seed: int) -> Any:
    return function(*_halves(seed)[:4])


def _merged_by_exp(seed: int) -> Tensor:
    out1, log1, out2, log2, _ = _halves(seed)
    w1 = log1.exp()[:, None]
    w2 = log2.exp()[:, None]
    return (out1 * w1 + out2 * w2) / (w1 + w2)


MERGE = Exercise(
    "sequences.merge",
    "A ring has attended over two sets of keys: `out1` and `out2` (queries, features) are the two"
    " results, `log1` and `log2` (queries) the logarithms of the sums of `exp(score)` that they"
    " were divided by. Return the result over all keys. Scores may be in the hundreds.",
    "answer(out1, log1, out2, log2)",
    (
        "The sum over all keys is exp(log1) + exp(log2), and each result has its share of it.",
        "`exp` of hundreds overflows. The share of the first is"
        " exp(log1) / (exp(log1) + exp(log2)) = sigmoid(log1 - log2).",
        "`w = torch.sigmoid(log1 - log2)[:, None]`.",
    ),
    "This line is ring attention, flash attention, and decoding with a sharded cache.",
    lambda answer: grade_cases(
        answer,
        "answer(out1, log1, out2, log2)",
        [(1,), (2,), (20,)],
        lambda seed: _halves(seed)[4],
        {
            "Right for small scores; for large ones `exp` overflows. Only the difference of the two"
            " logarithms matters.": _merged_by_exp,
            "The mean weighs both halves alike. The half with larger scores has the larger"
            " share.": (lambda seed: (_halves(seed)[0] + _halves(seed)[2]) / 2),
            "Each result is already divided by the sum of its half: the two do not add up.": (
                lambda seed: _halves(seed)[0] + _halves(seed)[2]
            ),
            "The weights are swapped: the first result gets the share of the second.": (
                lambda seed: torch.lerp(
                    _halves(seed)[0],
                    _halves(seed)[2],
                    torch.sigmoid(_halves(seed)[1] - _halves(seed)[3])[:, None],
                )
            ),
        },
        run=_run_merge,
        names="seed",
    ),
)


def _ids(n: int) -> Tensor:
    return torch.arange(2 * 3 * n).view(2, 3 * n)


def _positions(n: int) -> list[Tensor]:
    return [*torch.arange(3 * n).chunk(n)]


POSITIONS = Exercise(
    "sequences.positions",
    'Tokens are sharded over "seq" in their natural order: a device has `ids` (batch, tokens / n).'
    " Return the positions of its tokens in the entire sequence, a vector.",
    "answer(ids)",
    (
        "The first device's positions begin at 0. And those of the second?",
        '`fs.axis_index("seq")` times the number of own tokens is the first position.',
    ),
    "Without it rotary embeddings restart on each device, and the loss is only a little worse.",
    lambda answer: grade_cases(
        answer,
        "answer(ids)",
        [(2,), (3,)],
        _positions,
        {
            "All devices begin at 0. Where does the sequence of this device begin?": (
                lambda n: [torch.arange(3)] * n
            ),
            "The offset is the index of the device times its number of tokens, not the index.": (
                lambda n: [torch.arange(3) + i for i in range(n)]
            ),
            "dim 0 is the batch. Tokens are dim 1.": (
                lambda n: [torch.arange(2) + 2 * i for i in range(n)]
            ),
            "These are the positions of all tokens. Return those of the device's own.": (
                lambda n: [torch.arange(3 * n)] * n
            ),
        },
        run=lambda function, n: on_devices(
            function, fs.make_mesh({"seq": n}), PerDevice(_ids(n).chunk(n, 1))
        ),
        names="devices",
    ),
)

EXERCISES = (CHUNKS, SCORES, MERGE, POSITIONS)
