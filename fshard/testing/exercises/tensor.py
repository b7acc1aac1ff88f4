"""Exercises of the notebook "Who holds and sends what: tensor parallelism"."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.testing.grading import (
    Answer,
    Cases,
    Exercise,
    PerDevice,
    WrongAnswer,
    loss_and_gradient,
    mistake,
    on_devices,
    sent,
)

__all__ = ["EXERCISES"]


# -- the layouts of a pair of weights -------------------------------------------------------------

ROWS, WIDTH, HIDDEN = 4, 12, 24


def sent_by_pair(up: P, down: P, n: int) -> Fraction:
    """Count the bytes of a forward of two linear layers with these layouts on arrays."""
    mesh = fs.make_mesh({"t": n})
    x = fs.device_put(torch.ones(ROWS, WIDTH), fs.Layout(mesh, P()))
    w1 = fs.device_put(torch.ones(HIDDEN, WIDTH), fs.Layout(mesh, up))
    w2 = fs.device_put(torch.ones(WIDTH, HIDDEN), fs.Layout(mesh, down))

    def forward() -> None:
        hidden = torch.relu(F.linear(x, w1))
        fs.unshard(F.linear(hidden, w2))

    return sent(forward)


def grade_pair(answer: Any) -> None:
    is_pair = isinstance(answer, tuple) and not isinstance(answer, P) and len(answer) == 2
    if not is_pair or not all(isinstance(spec, P) for spec in answer):
        raise WrongAnswer("The answer must be a pair of specs, `(P(...), P(...))`.")
    up, down = answer
    if not up.axes or not down.axes:
        raise WrongAnswer("A weight without an axis is stored in full on each device.")

    for n in (2, 3):
        best = Fraction(2 * (n - 1), n) * 4 * ROWS * WIDTH
        count = sent_by_pair(up, down, n)
        if count <= best:
            continue
        if (up, down) == (P(None, "t"), P("t")):
            raise WrongAnswer(
                "Rows, then columns: the hidden layer, the widest tensor, is summed before the"
                f" nonlinearity. That sends {int(count)} bytes on {n} devices; {int(best)} are"
                " enough in the other order."
            )
        raise WrongAnswer(
            f"It sends {int(count)} bytes on {n} devices; {int(best)} are enough. What the first"
            " layer produces must be sharded like what the second one sums over."
        )


PAIR = Exercise(
    name="tensor.pair",
    question=(
        "`F.linear(torch.relu(F.linear(x, up)), down)` runs on arrays; `x` is replicated. Choose"
        ' layouts of the two weights, each (out, in), over the axis "t", such that each device'
        " stores its share and the forward sends as little as possible: one sum of the result."
    ),
    form="answer = (P(...), P(...))",
    hints=(
        "`relu` needs full values, not summands: the first product must not sum over a sharded"
        " dim.",
        'So the first weight is sharded along its outputs: `P("t")`. Along which dim is its'
        " result?",
        "The second weight is sharded along what it sums over: dim 1.",
    ),
    why=(
        "Megatron's pair: one all-reduce for two products, of the narrow tensor, not of the wide"
        " one."
    ),
    grade=grade_pair,
)


# -- a column-parallel layer ----------------------------------------------------------------------


def input_and_weight(devices: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(devices)
    x = torch.randn(4, 6, generator=draw)
    w = torch.randn(6, 2 * devices, generator=draw)
    return x, w


def run_column(answer: Answer, devices: int) -> PerDevice:
    """Return the loss and the gradient of the input on each device."""
    x, w = input_and_weight(devices)

    def loss(x: Tensor, shard: Tensor) -> Tensor:
        columns = answer(x, shard)
        return fs.psum(columns.square().sum(), "t")

    def on_device(x: Tensor, shard: Tensor) -> tuple[Any, Any]:
        return loss_and_gradient(loss, x, shard)

    shards = PerDevice(w.chunk(devices, 1))
    return on_devices(on_device, fs.make_mesh({"t": devices}), x, shards)


def column_on_one_device(devices: int) -> list[tuple[Tensor, Tensor]]:
    x, w = input_and_weight(devices)
    y = x @ w
    loss = y.square().sum()
    gradient = 2 * y @ w.T
    return [(loss, gradient)] * devices


@mistake(
    "The forward is right. But the gradient of `x` has the device's own columns alone, so devices"
    " differ. Mark `x` where it meets the shard: its backward must be a sum."
)
def unmarked_input(x: Tensor, shard: Tensor) -> Tensor:
    return x @ shard


@mistake(
    "The devices' columns are different ones: to add them mixes features. Forward, nothing is"
    " summed."
)
def sum_of_columns(x: Tensor, shard: Tensor) -> Tensor:
    return fs.psum(x @ shard, "t")


@mistake("All devices have all columns. The next layer sums over those of the device alone.")
def all_columns(x: Tensor, shard: Tensor) -> Tensor:
    return fs.all_gather(x @ shard, "t", dim=1)


COLUMN = Exercise(
    name="tensor.column",
    question=(
        'Write a column-parallel layer on a device: `x` is equal on all devices along "t", `shard`'
        " has the device's columns of a weight (in, out). Return the device's columns of `x @ w`."
        " The check takes the gradient with respect to `x`, which must be equal on all devices, and"
        " right."
    ),
    form="answer(x, shard)",
    hints=(
        "Forward, nothing is sent. And backward?",
        "Each device contributes the gradient of its own columns. Which mark has a sum as its"
        " backward?",
        '`fs.pvary(x, "t") @ shard`.',
    ),
    why=(
        "Megatron calls it f: the identity forward, an all-reduce backward. Forgotten, it trains"
        " on, a little wrong."
    ),
    grade=Cases(
        cases=[(2,), (3,)],
        truth=column_on_one_device,
        mistakes=(unmarked_input, sum_of_columns, all_columns),
        run=run_column,
    ),
)


# -- the rows of a fused weight -------------------------------------------------------------------


def rows_by_heads(width: int, n: int, device: int) -> Tensor:
    rows = torch.arange(3 * width).view(3, n, -1)
    return rows[:, device].flatten()


@mistake(
    "That is a contiguous range of all rows: on two devices the first has all queries and half of"
    " the keys. Shard q, k and v apart."
)
def contiguous_rows(width: int, n: int, device: int) -> Tensor:
    return torch.arange(3 * width).view(n, -1)[device]


@mistake("Those are the rows of q alone. k and v of these heads are needed, too.")
def rows_of_q(width: int, n: int, device: int) -> Tensor:
    return torch.arange(width).view(n, -1)[device]


@mistake("Every n-th row: heads are contiguous, so a device has ranges of rows.")
def every_nth_row(width: int, n: int, device: int) -> Tensor:
    return torch.arange(device, 3 * width, n)


QKV = Exercise(
    name="tensor.qkv",
    question=(
        "A fused weight has 3 * `width` rows: those of q, then of k, then of v. It is sharded over"
        " `n` devices, by heads. Which rows does `device` have, in order? Return their numbers."
    ),
    form="answer(width, n, device)",
    hints=(
        "With its heads a device needs q, k and v of these heads.",
        "It has a range of q's rows, the same range of k's, and of v's.",
        "`torch.arange(3 * width).view(3, n, -1)[:, device].flatten()`, or three ranges.",
    ),
    why=(
        "A contiguous third would give one device all queries: the most frequent mistake of"
        " loaders."
    ),
    grade=Cases(
        cases=[(8, 2, 0), (8, 2, 1), (12, 3, 1), (4, 4, 3)],
        truth=rows_by_heads,
        mistakes=(contiguous_rows, rows_of_q, every_nth_row),
    ),
)


# -- the bytes of a pair of layers ----------------------------------------------------------------


@cache
def sent_by_layers(tokens: int, width: int, n: int) -> Fraction:
    """Count the bytes of a pair of layers, forward and backward, on devices without values."""
    mesh = fs.make_mesh({"t": n}, runtime="abstract")
    mode = fs.tensor.mode("1d", ("t",), mesh)
    x = torch.empty(tokens, width, device="meta")
    w = torch.empty(4 * width, width, device="meta")
    specs = P(), mode.weight, mode.next.weight

    def step(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x = x.requires_grad_()
        hidden = fs.tensor.column(x, up, "t")
        loss = fs.tensor.row(hidden, down, "t").sum()
        return torch.autograd.grad(loss, x)[0]

    run = fs.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check=False)
    return sent(lambda: run(x, w, w.T))


@mistake("That is the forward. The backward sums the gradient of the input.")
def sent_forward(tokens: int, width: int, n: int) -> Fraction:
    return sent_by_layers(tokens, width, n) / 2


@mistake("The hidden layer is never sent: it is sharded between the two products.")
def sent_with_hidden_width(tokens: int, width: int, n: int) -> Fraction:
    return 4 * sent_by_layers(tokens, width, n)


@mistake("That is a number of elements. A float32 has 4 bytes.")
def sent_elements(tokens: int, width: int, n: int) -> Fraction:
    return sent_by_layers(tokens, width, n) / 4


@mistake("Each device sends (n - 1)/n of the bytes, twice for a `psum`.")
def full_bytes(tokens: int, width: int, n: int) -> int:
    return 8 * tokens * width


BYTES = Exercise(
    name="tensor.bytes",
    question=(
        "How many bytes does a device send for one pair of layers in 1d tensor parallelism, forward"
        " and backward, with `tokens` x `width` activations in float32, a hidden width of 4 *"
        " `width`, and `n` devices?"
    ),
    form="answer(tokens, width, n)",
    hints=(
        "One `psum` forward, in the second layer, one backward, in the first.",
        "Of which tensor? Of the narrow one: (tokens, width).",
        "2 (n - 1)/n times 4 bytes times the elements, twice.",
    ),
    why="It does not depend on the weights, and hardly on n: so this axis stays within a machine.",
    grade=Cases(
        cases=[(16, 8, 2), (24, 12, 3), (64, 16, 8)],
        truth=sent_by_layers,
        mistakes=(sent_forward, sent_with_hidden_width, sent_elements, full_bytes),
    ),
)


# -- the cross entropy of sharded words -----------------------------------------------------------


def logits_and_labels(devices: int) -> tuple[Tensor, Tensor]:
    """Return logits, some of them large, and labels of all devices' words."""
    draw = torch.Generator().manual_seed(devices)
    logits = 30 * torch.randn(6, 3 * devices, generator=draw)
    logits[0] += 200
    labels = torch.randint(3 * devices, (6,), generator=draw)
    return logits, labels


def run_vocabulary(answer: Answer, devices: int) -> PerDevice:
    logits, labels = logits_and_labels(devices)
    shards = PerDevice(logits.chunk(devices, 1))
    results = on_devices(answer, fs.make_mesh({"t": devices}), shards, labels)
    for result in results:
        if isinstance(result, Tensor) and not result.isfinite().all():
            raise WrongAnswer(
                "It overflows: `exp` of a logit of 300 is infinite. Subtract the maximum of all"
                " devices first, by `fs.pmax`."
            )
    return results


def cross_entropy(devices: int) -> list[Tensor]:
    logits, labels = logits_and_labels(devices)
    return [F.cross_entropy(logits, labels, reduction="none")] * devices


@mistake("That is the log-sum-exp. The logit of the label is missing, from the device that has it.")
def log_sum_exp(logits: Tensor, labels: Tensor) -> Tensor:
    return fs.all_gather(logits, "t", dim=1).logsumexp(1)


@mistake("That is the mean over rows; here each row has its own.")
def mean_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    full = fs.all_gather(logits, "t", dim=1)
    return F.cross_entropy(full, labels)


@mistake("The sign is wrong: log-sum-exp minus the logit of the label.")
def negative_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    full = fs.all_gather(logits, "t", dim=1)
    return -F.cross_entropy(full, labels, reduction="none")


VOCABULARY = Exercise(
    name="tensor.vocabulary",
    question=(
        'The words of the head are sharded over "t": a device has its columns of the `logits`'
        " (rows, words / n), and all `labels` as numbers of words. Return the cross entropy of each"
        " row, without gathering the logits. They may be as large as 300."
    ),
    form="answer(logits, labels)",
    hints=(
        "log-sum-exp minus the logit of the label. Both are sums over devices.",
        "The label of a row is on one device: `labels - offset` is in range there alone; others"
        " add zero.",
        'For large logits subtract `fs.pmax(logits.amax(1), "t")` before `exp`.',
    ),
    why=(
        "Rows x words logits are the largest tensor of many models. So they are never in one place."
    ),
    grade=Cases(
        cases=[(2,), (3,)],
        truth=cross_entropy,
        mistakes=(log_sum_exp, mean_of_rows, negative_cross_entropy),
        run=run_vocabulary,
    ),
)

EXERCISES = (PAIR, COLUMN, QKV, BYTES, VOCABULARY)
