"""Exercises of the notebook "Long sequences"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import Answer, Cases, Exercise, PerDevice, mistake, on_devices

__all__ = ["EXERCISES"]


# -- the chunks of a device -----------------------------------------------------------------------


def zigzag_chunks(device: int, n: int) -> list[int]:
    order = fs.tensor.zigzag(torch.arange(2 * n), n, dim=0)
    return order.chunk(n)[device].tolist()


@mistake("These are neighbours, the natural order: the last device would have most work.")
def natural_chunks(device: int, n: int) -> list[int]:
    return [2 * device, 2 * device + 1]


@mistake("The second chunk is later on later devices, too, so the last still has most work.")
def chunks_with_equal_distance(device: int, n: int) -> list[int]:
    return [device, device + n]


@mistake("Chunks are numbered from 0, so the last one is 2 n - 1.")
def chunks_numbered_from_1(device: int, n: int) -> list[int]:
    return [device, 2 * n - device]


CHUNKS = Exercise(
    name="sequences.chunks",
    question=(
        "Zigzag cuts the tokens into 2 n chunks, 0 to 2 n - 1. Which two does `device` of `n` have?"
    ),
    form="answer(device, n)",
    hints=(
        "An early one and a late one, such that the work of all devices is equal.",
        "The later the first one, the earlier the second one: their sum is the same for all.",
        "`device` and `2 * n - 1 - device`.",
    ),
    why="Without it the last device of a causal ring works twice as long as the mean.",
    grade=Cases(
        cases=[(0, 2), (1, 3), (4, 5)],
        truth=zigzag_chunks,
        mistakes=(natural_chunks, chunks_with_equal_distance, chunks_numbered_from_1),
    ),
)


# -- the scores of a device -----------------------------------------------------------------------


def causal_scores(device: int, n: int, tokens: int) -> int:
    mask = torch.ones(tokens, tokens).tril()
    return int(mask.chunk(n)[device].sum())


@mistake("That is without the causal mask, where each query sees all keys.")
def scores_without_mask(device: int, n: int, tokens: int) -> int:
    return tokens * tokens // n


@mistake("A token sees itself, too: t + 1 keys.")
def scores_of_earlier_tokens(device: int, n: int, tokens: int) -> int:
    return causal_scores(device, n, tokens) - tokens // n


@mistake(
    "These are the scores among the device's own tokens. It also sees those of the devices before"
    " it."
)
def scores_of_own_tokens(device: int, n: int, tokens: int) -> int:
    return causal_scores(0, n, tokens)


@mistake("That is the mean of all devices. In the natural order they differ.")
def mean_scores(device: int, n: int, tokens: int) -> float:
    return tokens * (tokens + 1) / 2 / n


SCORES = Exercise(
    name="sequences.scores",
    question=(
        "`tokens` are sharded over `n` devices in their natural order. How many scores does"
        " `device` compute in causal attention, one for each query of its own and each key that it"
        " sees?"
    ),
    form="answer(device, n, tokens)",
    hints=(
        "Token t, counted from 0, sees t + 1 keys.",
        "Add that over the device's tokens: `range(device * tokens // n, (device + 1) * tokens //"
        " n)`.",
    ),
    why="Device n - 1 has almost twice the mean, and a step takes as long as its slowest device.",
    grade=Cases(
        cases=[(0, 2, 8), (1, 3, 12), (3, 4, 16)],
        truth=causal_scores,
        mistakes=(
            scores_without_mask,
            scores_of_earlier_tokens,
            scores_of_own_tokens,
            mean_scores,
        ),
    ),
)


# -- merge the results over two sets of keys ------------------------------------------------------


def scores_and_values(seed: int) -> tuple[Tensor, Tensor]:
    """Return the scores of four queries and keys, larger for a larger seed, and the values."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 4, 6, generator=draw)
    return 8 * seed * q @ k.T, v


def run_merge(answer: Answer, seed: int) -> Any:
    scores, v = scores_and_values(seed)
    scores1, scores2 = scores.chunk(2, 1)
    v1, v2 = v.chunk(2)
    out1 = scores1.softmax(1) @ v1
    out2 = scores2.softmax(1) @ v2
    return answer(out1, scores1.logsumexp(1), out2, scores2.logsumexp(1))


def attention_over_all_keys(seed: int) -> Tensor:
    scores, v = scores_and_values(seed)
    return scores.softmax(1) @ v


@mistake(
    "Right for small scores; for large ones `exp` overflows. Only the difference of the two"
    " logarithms matters."
)
def merged_by_exp(out1: Tensor, log1: Tensor, out2: Tensor, log2: Tensor) -> Tensor:
    w1 = log1.exp()[:, None]
    w2 = log2.exp()[:, None]
    return (out1 * w1 + out2 * w2) / (w1 + w2)


@mistake("The mean weighs both halves alike. The half with larger scores has the larger share.")
def mean_of_halves(out1: Tensor, log1: Tensor, out2: Tensor, log2: Tensor) -> Tensor:
    return (out1 + out2) / 2


@mistake("Each result is already divided by the sum of its half: the two do not add up.")
def sum_of_halves(out1: Tensor, log1: Tensor, out2: Tensor, log2: Tensor) -> Tensor:
    return out1 + out2


@mistake("The weights are swapped: the first result gets the share of the second.")
def swapped_weights(out1: Tensor, log1: Tensor, out2: Tensor, log2: Tensor) -> Tensor:
    share1 = torch.sigmoid(log1 - log2)[:, None]
    return torch.lerp(out1, out2, share1)


MERGE = Exercise(
    name="sequences.merge",
    question=(
        "A ring has attended over two sets of keys: `out1` and `out2` (queries, features) are the"
        " two results, `log1` and `log2` (queries) the logarithms of the sums of `exp(score)` that"
        " they were divided by. Return the result over all keys. Scores may be in the hundreds."
    ),
    form="answer(out1, log1, out2, log2)",
    hints=(
        "The sum over all keys is exp(log1) + exp(log2), and each result has its share of it.",
        "`exp` of hundreds overflows. The share of the first is exp(log1) / (exp(log1) +"
        " exp(log2)) = sigmoid(log1 - log2).",
        "`w = torch.sigmoid(log1 - log2)[:, None]`.",
    ),
    why="This line is ring attention, flash attention, and decoding with a sharded cache.",
    grade=Cases(
        cases=[(1,), (2,), (20,)],
        truth=attention_over_all_keys,
        mistakes=(merged_by_exp, mean_of_halves, sum_of_halves, swapped_weights),
        run=run_merge,
    ),
)


# -- the positions of a device's tokens -----------------------------------------------------------


def run_positions(answer: Answer, devices: int) -> PerDevice:
    ids = torch.arange(2 * 3 * devices).view(2, 3 * devices)
    shards = PerDevice(ids.chunk(devices, 1))
    return on_devices(answer, fs.make_mesh({"seq": devices}), shards)


def positions(devices: int) -> list[Tensor]:
    return [*torch.arange(3 * devices).chunk(devices)]


@mistake("All devices begin at 0. Where does the sequence of this device begin?")
def positions_from_0(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1])


@mistake("The offset is the index of the device times its number of tokens, not the index.")
def positions_from_index(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]) + fs.axis_index("seq")


@mistake("dim 0 is the batch. Tokens are dim 1.")
def positions_of_rows(ids: Tensor) -> Tensor:
    rows = ids.shape[0]
    return torch.arange(rows) + rows * fs.axis_index("seq")


@mistake("These are the positions of all tokens. Return those of the device's own.")
def positions_of_all(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1] * fs.axis_size("seq"))


POSITIONS = Exercise(
    name="sequences.positions",
    question=(
        'Tokens are sharded over "seq" in their natural order: a device has `ids` (batch, tokens /'
        " n). Return the positions of its tokens in the entire sequence, a vector."
    ),
    form="answer(ids)",
    hints=(
        "The first device's positions begin at 0. And those of the second?",
        '`fs.axis_index("seq")` times the number of own tokens is the first position.',
    ),
    why="Without it rotary embeddings restart on each device, and the loss is only a little worse.",
    grade=Cases(
        cases=[(2,), (3,)],
        truth=positions,
        mistakes=(positions_from_0, positions_from_index, positions_of_rows, positions_of_all),
        run=run_positions,
    ),
)

EXERCISES = (CHUNKS, SCORES, MERGE, POSITIONS)
