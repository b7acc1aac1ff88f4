"""Exercises of the notebook "Experts on sixteen devices"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import (
    Answer,
    Cases,
    Exercise,
    PerDevice,
    WrongAnswer,
    mistake,
    on_devices,
)

__all__ = ["EXERCISES"]


# -- the weights of a router ----------------------------------------------------------------------


def logits_of(tokens: int, experts: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))


def run_route(answer: Answer, tokens: int, experts: int, k: int) -> Any:
    """Return the weights, and True if a router learns by them."""
    result = answer(logits_of(tokens, experts).requires_grad_(), k)
    if result is None:
        return None
    if not isinstance(result, Tensor):
        raise WrongAnswer("The answer must be a tensor: a router learns by its gradient.")
    if not result.is_floating_point():
        raise WrongAnswer("These are the numbers of the experts. Return their weights.")
    return result.detach(), result.requires_grad


def weights(tokens: int, experts: int, k: int) -> tuple[Tensor, bool]:
    return fs.experts.route(logits_of(tokens, experts), k).weights, True


@mistake("The weights are right, and detached: without their gradient the router never learns.")
def detached_weights(logits: Tensor, k: int) -> Tensor:
    return fs.experts.route(logits.detach(), k).weights


@mistake(
    "They do not sum to 1: the experts that were not chosen have the rest. Divide by the sum of"
    " those that were."
)
def weights_among_all_experts(logits: Tensor, k: int) -> Tensor:
    return fs.experts.route(logits, k, normalize=False).weights


@mistake("These are the logits themselves. Weights are positive and sum to 1.")
def largest_logits(logits: Tensor, k: int) -> Tensor:
    return logits.topk(k, 1).values


@mistake("All experts have the same weight. Those with larger logits have more.")
def equal_weights(logits: Tensor, k: int) -> Tensor:
    return torch.full((len(logits), k), 1 / k)


@mistake("The largest comes first: as `topk` returns them.")
def smallest_first(logits: Tensor, k: int) -> Tensor:
    return fs.experts.route(logits, k).weights.flip(1)


@mistake("These are the weights of all experts. Only k of them get the token.")
def weights_of_all_experts(logits: Tensor, k: int) -> Tensor:
    return logits.softmax(1)


WEIGHTS = Exercise(
    name="experts.weights",
    question=(
        "A router has the `logits` (tokens, experts). Return the weights of the `k` experts of each"
        " token, (tokens, k), the largest first: their shares of the softmax, such that those of a"
        " token sum to 1."
    ),
    form="answer(logits, k)",
    hints=(
        "`topk` returns values and indices.",
        "The softmax of the chosen logits alone sums to 1.",
    ),
    why="Softmax then top-k, or top-k then softmax: after normalizing, they are the same numbers.",
    grade=Cases(
        cases=[(5, 4, 2), (7, 6, 3), (4, 3, 1)],
        truth=weights,
        mistakes=(
            detached_weights,
            weights_among_all_experts,
            largest_logits,
            equal_weights,
            smallest_first,
            weights_of_all_experts,
        ),
        run=run_route,
    ),
)


# -- the bytes of an exchange ---------------------------------------------------------------------


def counts_of(n: int) -> list[list[int]]:
    """Return how many rows each device (a row) sends to each (a column)."""
    return torch.randint(0, 5, (n, n), generator=torch.Generator().manual_seed(n)).tolist()


def sent_by_device(counts: list[list[int]], width: int, device: int) -> int:
    """Count the bytes that a device sends, by the ledger."""
    mesh = fs.make_mesh({"expert": len(counts)})
    matrix = torch.tensor(counts)

    def on_device() -> None:
        count = int(matrix[fs.axis_index("expert")].sum())
        fs.all_to_all(torch.ones(count, width), "expert", counts=matrix)

    with fs.ledger() as comm:
        fs.run(on_device, mesh=mesh)
    return int(comm.bytes(device, collective="all_to_all"))


@mistake("It includes the tokens for the device's own experts, which are not sent.")
def sent_with_own_tokens(counts: list[list[int]], width: int, device: int) -> int:
    return 4 * width * sum(counts[device])


@mistake("That is what the device receives: a column. It sends its row.")
def received_by_device(counts: list[list[int]], width: int, device: int) -> int:
    column = [row[device] for row in counts]
    return 4 * width * (sum(column) - column[device])


@mistake("That is a number of elements. A float32 has 4 bytes.")
def sent_elements(counts: list[list[int]], width: int, device: int) -> int:
    row = counts[device]
    return width * (sum(row) - row[device])


@mistake("Those are tokens. Each has `width` numbers of 4 bytes.")
def sent_tokens(counts: list[list[int]], width: int, device: int) -> int:
    row = counts[device]
    return sum(row) - row[device]


@mistake("That is sent by all devices together.")
def sent_by_all_devices(counts: list[list[int]], width: int, device: int) -> int:
    tokens = sum(sum(row) for row in counts)
    return 4 * width * tokens


EXCHANGE = Exercise(
    name="experts.exchange",
    question=(
        "`counts[i][j]` is the number of tokens of device i that device j's experts get. How many"
        " bytes does `device` send, with tokens of `width` float32 numbers?"
    ),
    form="answer(counts, width, device)",
    hints=(
        "It sends its row of the matrix.",
        "Its own tokens for its own experts stay where they are.",
    ),
    why=(
        "The bytes depend on the data: a router that prefers one device's experts floods its links."
    ),
    grade=Cases(
        cases=[(counts_of(3), 4, 0), (counts_of(3), 4, 2), (counts_of(4), 2, 1)],
        truth=sent_by_device,
        mistakes=(
            sent_with_own_tokens,
            received_by_device,
            sent_elements,
            sent_tokens,
            sent_by_all_devices,
        ),
    ),
)


# -- a loss that balances experts -----------------------------------------------------------------


def loads_and_scores(devices: int) -> tuple[PerDevice, PerDevice]:
    """Return loads (tokens of each expert) and mean scores of each device's tokens."""
    draw = torch.Generator().manual_seed(devices)
    loads = PerDevice(torch.rand(4, generator=draw).softmax(0) for _ in range(devices))
    scores = PerDevice(torch.randn(4, generator=draw).softmax(0) for _ in range(devices))
    return loads, scores


def run_balance(answer: Answer, devices: int) -> PerDevice:
    loads, scores = loads_and_scores(devices)
    return on_devices(answer, fs.make_mesh({"data": devices}), loads, scores)


def balance(devices: int) -> list[Tensor]:
    loads, scores = loads_and_scores(devices)
    mean_load = torch.stack(loads).mean(0)
    mean_score = torch.stack(scores).mean(0)
    return [4 * (mean_load * mean_score).sum()] * devices


@mistake(
    "This is the mean of the devices' losses, which depends on how tokens are divided: the mean of"
    " products is not the product of means."
)
def mean_of_losses(load: Tensor, score: Tensor) -> Tensor:
    loss = len(load) * (load * score).sum()
    return fs.pmean(loss, "data")


@mistake("This is the loss of the device's own tokens.")
def local_loss(load: Tensor, score: Tensor) -> Tensor:
    return len(load) * (load * score).sum()


@mistake("The factor E is missing, by which the loss is 1 if all are evenly used.")
def loss_without_factor(load: Tensor, score: Tensor) -> Tensor:
    mean_load, mean_score = fs.pmean((load, score), "data")
    return (mean_load * mean_score).sum()


@mistake("Loads and scores are summed over devices, so the loss is n * n times too large.")
def loss_of_sums(load: Tensor, score: Tensor) -> Tensor:
    total_load, total_score = fs.psum((load, score), "data")
    return len(load) * (total_load * total_score).sum()


BALANCE = Exercise(
    name="experts.balance",
    question=(
        "The loss that keeps experts evenly used is E * sum(load * score), over E experts: `load`"
        " is the fraction of the tokens that an expert gets, `score` its mean score. A device has"
        ' both of its own tokens, as vectors; devices along "data" have as many. Return the loss of'
        " the batch, on each device."
    ),
    form="answer(load, score)",
    hints=(
        "Is the mean of products the product of means?",
        "Average `load` and `score` over devices first, then multiply.",
    ),
    why=(
        "With the mean of local losses the model depends on the number of devices: a loss that is"
        " no sum over tokens must be made of sums that are."
    ),
    grade=Cases(
        cases=[(2,), (4,)],
        truth=balance,
        mistakes=(mean_of_losses, local_loss, loss_without_factor, loss_of_sums),
        run=run_balance,
    ),
)

EXERCISES = (WEIGHTS, EXCHANGE, BALANCE)
