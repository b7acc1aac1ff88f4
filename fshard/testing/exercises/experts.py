"""Exercises of the notebook "Experts on sixteen devices"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import (
    Exercise,
    PerDevice,
    WrongAnswer,
    grade_cases,
    on_devices,
)

_CHOICES = ((5, 4, 2), (7, 6, 3), (4, 3, 1))


def _logits(tokens: int, experts: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))


def _weights(tokens: int, experts: int, k: int) -> Tensor:
    return fs.experts.route(_logits(tokens, experts), k).weights


def _unnormalized(tokens: int, experts: int, k: int) -> Tensor:
    return fs.experts.route(_logits(tokens, experts), k, normalize=False).weights


def _run_route(function: Any, tokens: int, experts: int, k: int) -> Any:
    result = function(_logits(tokens, experts), k)
    if isinstance(result, Tensor) and not result.is_floating_point():
        raise WrongAnswer("These are the numbers of the experts. Return their weights.")
    return result


WEIGHTS = Exercise(
    "experts.weights",
    "A router has the `logits` (tokens, experts). Return the weights of the `k` experts of each"
    " token, (tokens, k), the largest first: their shares of the softmax, such that those of a"
    " token"
    " sum to 1.",
    "answer(logits, k)",
    (
        "`topk` returns values and indices.",
        "The softmax of the chosen logits alone sums to 1.",
    ),
    "Softmax then top-k, or top-k then softmax: after normalizing, they are the same numbers.",
    lambda answer: grade_cases(
        answer,
        "answer(logits, k)",
        _CHOICES,
        _weights,
        {
            "They do not sum to 1: the experts that were not chosen have the rest. Divide by the"
            " sum"
            " of those that were.": _unnormalized,
            "These are the logits themselves. Weights are positive and sum to 1.": (
                lambda tokens, experts, k: _logits(tokens, experts).topk(k, 1).values
            ),
            "All experts have the same weight. Those with larger logits have more.": (
                lambda tokens, experts, k: torch.full((tokens, k), 1 / k)
            ),
            "The largest comes first: as `topk` returns them.": (
                lambda tokens, experts, k: _weights(tokens, experts, k).flip(1)
            ),
            "These are the weights of all experts. Only k of them get the token.": (
                lambda tokens, experts, k: _logits(tokens, experts).softmax(1)
            ),
        },
        run=_run_route,
        names="tokens, experts, k",
    ),
)


def _counts(n: int) -> list[list[int]]:
    """Return how many rows each device (a row) sends to each (a column)."""
    return torch.randint(0, 5, (n, n), generator=torch.Generator().manual_seed(n)).tolist()


def _exchanged(counts: list[list[int]], width: int, device: int) -> int:
    """Count the bytes that a device sends, by the ledger."""
    n = len(counts)
    mesh = fs.make_mesh({"expert": n})
    matrix = torch.tensor(counts)

    def on_device() -> None:
        rows = torch.ones(int(matrix[fs.axis_index("expert")].sum()), width)
        fs.all_to_all(rows, "expert", counts=matrix)

    with fs.ledger() as comm:
        fs.run(on_device, mesh=mesh)
    return int(comm.bytes(device, collective="all_to_all"))


def _row_bytes(counts: list[list[int]], width: int) -> list[int]:
    return [4 * width * x for row in counts for x in row]


EXCHANGE = Exercise(
    "experts.exchange",
    "`counts[i][j]` is the number of tokens of device i that device j's experts get. How many bytes"
    " does `device` send, with tokens of `width` float32 numbers?",
    "answer(counts, width, device)",
    (
        "It sends its row of the matrix.",
        "Its own tokens for its own experts stay where they are.",
    ),
    "The bytes depend on the data: a router that prefers one device's experts floods its links.",
    lambda answer: grade_cases(
        answer,
        "answer(counts, width, device)",
        [(_counts(3), 4, 0), (_counts(3), 4, 2), (_counts(4), 2, 1)],
        _exchanged,
        {
            "It includes the tokens for the device's own experts, which are not sent.": (
                lambda counts, width, device: 4 * width * sum(counts[device])
            ),
            "That is what the device receives: a column. It sends its row.": (
                lambda counts, width, device: (
                    4 * width * (sum(row[device] for row in counts) - counts[device][device])
                )
            ),
            "That is a number of elements. A float32 has 4 bytes.": (
                lambda counts, width, device: width * (sum(counts[device]) - counts[device][device])
            ),
            "Those are tokens. Each has `width` numbers of 4 bytes.": (
                lambda counts, width, device: sum(counts[device]) - counts[device][device]
            ),
            "That is sent by all devices together.": (
                lambda counts, width, device: sum(_row_bytes(counts, width))
            ),
        },
    ),
)


def _usage(n: int) -> tuple[PerDevice, PerDevice]:
    """Return loads (tokens of each expert) and mean scores of each device's tokens."""
    draw = torch.Generator().manual_seed(n)
    loads = PerDevice(torch.rand(4, generator=draw).softmax(0) for _ in range(n))
    scores = PerDevice(torch.randn(4, generator=draw).softmax(0) for _ in range(n))
    return loads, scores


def _balance(n: int) -> list[Tensor]:
    loads, scores = _usage(n)
    mean_load = torch.stack([*loads]).mean(0)
    mean_score = torch.stack([*scores]).mean(0)
    return [4 * (mean_load * mean_score).sum()] * n


def _mean_of_balances(n: int) -> list[Tensor]:
    loads, scores = _usage(n)
    losses = [4 * (f * p).sum() for f, p in zip(loads, scores, strict=True)]
    return [torch.stack(losses).mean()] * n


def _own_balances(n: int) -> list[Tensor]:
    loads, scores = _usage(n)
    return [4 * (f * p).sum() for f, p in zip(loads, scores, strict=True)]


BALANCE = Exercise(
    "experts.balance",
    "The loss that keeps experts evenly used is E * sum(load * score), over E experts: `load` is"
    " the"
    " fraction of the tokens that an expert gets, `score` its mean score. A device has both of its"
    ' own tokens, as vectors; devices along "data" have as many. Return the loss of the batch, on'
    " each device.",
    "answer(load, score)",
    (
        "Is the mean of products the product of means?",
        "Average `load` and `score` over devices first, then multiply.",
    ),
    "With the mean of local losses the model depends on the number of devices: a loss that is no"
    " sum"
    " over tokens must be made of sums that are.",
    lambda answer: grade_cases(
        answer,
        "answer(load, score)",
        [(2,), (4,)],
        _balance,
        {
            "This is the mean of the devices' losses, which depends on how tokens are divided:"
            " the mean of products is not the product of means.": _mean_of_balances,
            "This is the loss of the device's own tokens.": _own_balances,
            "The factor E is missing, by which the loss is 1 if all are evenly used.": (
                lambda n: [x / 4 for x in _balance(n)]
            ),
            "Loads and scores are summed over devices, so the loss is n * n times too large.": (
                lambda n: [n * n * x for x in _balance(n)]
            ),
        },
        run=lambda function, n: on_devices(function, fs.make_mesh({"data": n}), *_usage(n)),
        names="devices",
    ),
)

EXERCISES = (WEIGHTS, EXCHANGE, BALANCE)
