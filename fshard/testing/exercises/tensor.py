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
    Exercise,
    PerDevice,
    WrongAnswer,
    grade_cases,
    loss_and_gradient,
    on_devices,
    sent,
)

_ROWS, _WIDTH, _HIDDEN = 4, 12, 24


def _sent_by_pair(up: P, down: P, n: int) -> Fraction:
    """Count the bytes of a forward of two linear layers with these layouts on arrays."""
    mesh = fs.make_mesh({"t": n})
    x = fs.device_put(torch.ones(_ROWS, _WIDTH), fs.Layout(mesh, P()))
    w1 = fs.device_put(torch.ones(_HIDDEN, _WIDTH), fs.Layout(mesh, up))
    w2 = fs.device_put(torch.ones(_WIDTH, _HIDDEN), fs.Layout(mesh, down))
    return Fraction(sent(lambda: fs.unshard(F.linear(torch.relu(F.linear(x, w1)), w2))))


def _grade_pair(answer: Any) -> None:
    is_pair = isinstance(answer, tuple) and not isinstance(answer, P) and len(answer) == 2
    if not is_pair or not all(isinstance(spec, P) for spec in answer):
        raise WrongAnswer("The answer must be a pair of specs, `(P(...), P(...))`.")
    up, down = answer
    if not up.axes or not down.axes:
        raise WrongAnswer("A weight without an axis is stored in full on each device.")
    for n in (2, 3):
        best = Fraction(2 * (n - 1), n) * 4 * _ROWS * _WIDTH
        count = _sent_by_pair(up, down, n)
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
    "tensor.pair",
    "`F.linear(torch.relu(F.linear(x, up)), down)` runs on arrays; `x` is replicated. Choose"
    " layouts"
    ' of the two weights, each (out, in), over the axis "t", such that each device stores its share'
    " and the forward sends as little as possible: one sum of the result.",
    "answer = (P(...), P(...))",
    (
        "`relu` needs full values, not summands: the first product must not sum over a sharded"
        " dim.",
        'So the first weight is sharded along its outputs: `P("t")`. Along which dim is its'
        " result?",
        "The second weight is sharded along what it sums over: dim 1.",
    ),
    "Megatron's pair: one all-reduce for two products, of the narrow tensor, not of the wide one.",
    _grade_pair,
)


def _given(n: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n)
    return torch.randn(4, 6, generator=draw), torch.randn(6, 2 * n, generator=draw)


def _run_column(function: Any, n: int) -> list[Any]:
    x, w = _given(n)

    def on_device(x: Tensor, shard: Tensor) -> tuple[Any, Any]:
        return loss_and_gradient(lambda x: fs.psum(function(x, shard).square().sum(), "t"), x)

    return on_devices(on_device, fs.make_mesh({"t": n}), x, PerDevice(w.chunk(n, 1)))


def _column(n: int) -> list[Any]:
    x, w = _given(n)
    return [((x @ w).square().sum(), 2 * (x @ w) @ w.T)] * n


def _column_unmarked(n: int) -> list[Any]:
    x, w = _given(n)
    loss = (x @ w).square().sum()
    return [(loss, 2 * (x @ part) @ part.T) for part in w.chunk(n, 1)]


COLUMN = Exercise(
    "tensor.column",
    'Write a column-parallel layer on a device: `x` is equal on all devices along "t", `shard` has'
    " the device's columns of a weight (in, out). Return the device's columns of `x @ w`. The check"
    " takes the gradient with respect to `x`, which must be equal on all devices, and right.",
    "answer(x, shard)",
    (
        "Forward, nothing is sent. And backward?",
        "Each device contributes the gradient of its own columns. Which mark has a sum as its"
        " backward?",
        '`fs.pvary(x, "t") @ shard`.',
    ),
    "Megatron calls it f: the identity forward, an all-reduce backward. Forgotten, it trains on,"
    " a little wrong.",
    lambda answer: grade_cases(
        answer,
        "answer(x, shard)",
        [(2,), (3,)],
        _column,
        {
            "The forward is right. But the gradient of `x` has the device's own columns alone, so"
            " devices differ. Mark `x` where it meets the shard: its backward must be a sum.": (
                _column_unmarked
            ),
            "The devices' columns are different ones: to add them mixes features. Forward, nothing"
            " is summed.": lambda n: _run_column(lambda x, shard: fs.psum(x @ shard, "t"), n),
            "All devices have all columns. The next layer sums over those of the device alone.": (
                lambda n: _run_column(lambda x, shard: fs.all_gather(x @ shard, "t", dim=1), n)
            ),
        },
        run=_run_column,
        names="devices",
    ),
)


def _fused(width: int, n: int, device: int) -> Tensor:
    """Return the rows of q, k and v of a device: its share of each of the three."""
    return torch.arange(3 * width).view(3, n, -1)[:, device].flatten()


QKV = Exercise(
    "tensor.qkv",
    "A fused weight has 3 * `width` rows: those of q, then of k, then of v. It is sharded over `n`"
    " devices, by heads. Which rows does `device` have, in order? Return their numbers.",
    "answer(width, n, device)",
    (
        "With its heads a device needs q, k and v of these heads.",
        "It has a range of q's rows, the same range of k's, and of v's.",
        "`torch.arange(3 * width).view(3, n, -1)[:, device].flatten()`, or three ranges.",
    ),
    "A contiguous third would give one device all queries: the most frequent mistake of loaders.",
    lambda answer: grade_cases(
        answer,
        "answer(width, n, device)",
        [(8, 2, 0), (8, 2, 1), (12, 3, 1), (4, 4, 3)],
        _fused,
        {
            "That is a contiguous range of all rows: on two devices the first has all queries and"
            " half of the keys. Shard q, k and v apart.": (
                lambda width, n, device: torch.arange(3 * width).view(n, -1)[device]
            ),
            "That are the rows of q alone. k and v of these heads are needed, too.": (
                lambda width, n, device: torch.arange(width).view(n, -1)[device]
            ),
            "Every n-th row: heads are contiguous, so a device has ranges of rows.": (
                lambda width, n, device: torch.arange(device, 3 * width, n)
            ),
        },
    ),
)


@cache
def _sent_by_layers(tokens: int, width: int, n: int) -> int | Fraction:
    """Count the bytes of a pair of layers, forward and backward, on devices without values."""
    mesh = fs.make_mesh({"t": n}, runtime="abstract")
    mode = fs.tensor.mode("1d", ("t",), mesh)
    x = torch.empty(tokens, width, device="meta")
    w = torch.empty(4 * width, width, device="meta")
    specs = P(), mode.weight, mode.next.weight

    def step(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x = x.requires_grad_()
        hidden = fs.tensor.column(x, up, "t")
        return torch.autograd.grad(fs.tensor.row(hidden, down, "t").sum(), x)[0]

    run = fs.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check=False)
    return sent(lambda: run(x, w, w.T))


BYTES = Exercise(
    "tensor.bytes",
    "How many bytes does a device send for one pair of layers in 1d tensor parallelism, forward and"
    " backward, with `tokens` x `width` activations in float32, a hidden width of 4 * `width`, and"
    " `n` devices?",
    "answer(tokens, width, n)",
    (
        "One `psum` forward, in the second layer, one backward, in the first.",
        "Of which tensor? Of the narrow one: (tokens, width).",
        "2 (n - 1)/n times 4 bytes times the elements, twice.",
    ),
    "It does not depend on the weights, and hardly on n: so this axis stays within a machine.",
    lambda answer: grade_cases(
        answer,
        "answer(tokens, width, n)",
        [(16, 8, 2), (24, 12, 3), (64, 16, 8)],
        _sent_by_layers,
        {
            "That is the forward. The backward sums the gradient of the input.": (
                lambda tokens, width, n: _sent_by_layers(tokens, width, n) / 2
            ),
            "The hidden layer is never sent: it is sharded between the two products.": (
                lambda tokens, width, n: 4 * _sent_by_layers(tokens, width, n)
            ),
            "That is a number of elements. A float32 has 4 bytes.": (
                lambda tokens, width, n: _sent_by_layers(tokens, width, n) / 4
            ),
            "Each device sends (n - 1)/n of the bytes, twice for a `psum`.": (
                lambda tokens, width, n: 8 * tokens * width
            ),
        },
    ),
)


def _logits(n: int) -> tuple[Tensor, Tensor]:
    """Return logits, some of them large, and labels of all devices' words."""
    draw = torch.Generator().manual_seed(n)
    logits = 30 * torch.randn(6, 3 * n, generator=draw)
    logits[0] += 200
    return logits, torch.randint(3 * n, (6,), generator=draw)


def _cross_entropy(n: int) -> list[Tensor]:
    logits, labels = _logits(n)
    return [F.cross_entropy(logits, labels, reduction="none")] * n


def _log_sums(n: int) -> list[Tensor]:
    logits, _ = _logits(n)
    return [torch.logsumexp(logits, 1)] * n


def _run_loss(function: Any, n: int) -> list[Any]:
    logits, labels = _logits(n)
    shards = PerDevice(logits.chunk(n, 1))
    results = on_devices(function, fs.make_mesh({"t": n}), shards, labels)
    for result in results:
        if isinstance(result, Tensor) and not result.isfinite().all():
            raise WrongAnswer(
                "It overflows: `exp` of a logit of 300 is infinite. Subtract the maximum of all"
                " devices first, by `fs.pmax`."
            )
    return results


VOCABULARY = Exercise(
    "tensor.vocabulary",
    'The words of the head are sharded over "t": a device has its columns of the `logits` (rows,'
    " words / n), and all `labels` as numbers of words. Return the cross entropy of each row,"
    " without gathering the logits. They may be as large as 300.",
    "answer(logits, labels)",
    (
        "log-sum-exp minus the logit of the label. Both are sums over devices.",
        "The label of a row is on one device: `labels - offset` is in range there alone; others add"
        " zero.",
        'For large logits subtract `fs.pmax(logits.amax(1), "t")` before `exp`.',
    ),
    "Rows x words logits are the largest tensor of many models. So they are never in one place.",
    lambda answer: grade_cases(
        answer,
        "answer(logits, labels)",
        [(2,), (3,)],
        _cross_entropy,
        {
            "That is the log-sum-exp. The logit of the label is missing, from the device that has"
            " it.": _log_sums,
            "That is the mean over rows; here each row has its own.": (
                lambda n: [x.mean() for x in _cross_entropy(n)]
            ),
            "The sign is wrong: log-sum-exp minus the logit of the label.": (
                lambda n: [-x for x in _cross_entropy(n)]
            ),
        },
        run=_run_loss,
        names="devices",
    ),
)

EXERCISES = (PAIR, COLUMN, QKV, BYTES, VOCABULARY)
