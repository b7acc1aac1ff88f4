"""Exercises of the notebook "Slow links"."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.testing.grading import Exercise, WrongAnswer, as_function, call, grade_cases, sent


def _sent_by_local_sgd(n: int, numbers: int, every: int) -> Fraction:
    """Count the bytes of parameters that local SGD sends in a step, on average.

    A model of twice as many parameters sends as many bytes more: so losses and norms do not count.
    """
    twice = _sent_with_metrics(n, 2 * numbers, every)
    return (twice - _sent_with_metrics(n, numbers, every)) / every


@cache
def _sent_with_metrics(n: int, numbers: int, every: int) -> Fraction:
    mesh = fs.make_mesh({"node": n, "gpu": 1})

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (params["w"].sum() * x).mean()

    inner_opt = fs.partition_optimizer(fs.optim.sgd(0.1), mesh=mesh["gpu"], axis="gpu", stage=0)
    inner = fs.train_step(loss_fn, inner_opt, mesh=mesh["gpu"], batch=P("gpu"))
    step = fs.comm.local_sgd(inner, every=every, mesh=mesh, axis="node")
    params, state = step.init(fs.shard_params({"w": torch.ones(numbers)}, P(), mesh=mesh))

    def train() -> None:
        nonlocal params, state
        for _ in range(every):
            params, state, _ = step(params, state, torch.ones(n))

    return Fraction(sent(train))


LOCAL = Exercise(
    "slow_links.local",
    "Local SGD averages the float32 parameters, `numbers` of them, of `n` nodes `every` so many"
    " steps. How many bytes does a node send for it in a step, on average?",
    "answer(n, numbers, every)",
    (
        "An average is a `psum`, divided.",
        "A `psum` of B bytes sends 2 (n - 1)/n B.",
        "And there is one in `every` steps.",
    ),
    "Ten local steps are a tenth of the bytes: more than most compressors save, at no bias.",
    lambda answer: grade_cases(
        answer,
        "answer(n, numbers, every)",
        [(2, 600, 5), (3, 900, 2), (4, 800, 1)],
        _sent_by_local_sgd,
        {
            "That is sent in a step that averages. Of `every` steps one does.": (
                lambda n, numbers, every: every * _sent_by_local_sgd(n, numbers, every)
            ),
            "An all-reduce sends twice (n - 1)/n: sums, and then their shards to all.": (
                lambda n, numbers, every: _sent_by_local_sgd(n, numbers, every) / 2
            ),
            "A float32 has 4 bytes.": (
                lambda n, numbers, every: _sent_by_local_sgd(n, numbers, every) / 4
            ),
            "The factor is 2 (n - 1)/n, not 2: a node keeps its own shard.": (
                lambda n, numbers, every: Fraction(8 * numbers, every)
            ),
        },
    ),
)


def _largest(x: Tensor) -> Tensor:
    """Keep the element of the largest absolute value."""
    keep = torch.zeros_like(x)
    at = x.abs().argmax()
    keep[at] = x[at]
    return keep


def _gradients() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(5, generator=draw) for _ in range(6)]


def _grade_feedback(answer: Any) -> None:
    function = as_function(answer, "answer(grad, residual, compress)")
    messages, residual = _rolled(function, _largest)
    total = torch.stack(_gradients()).sum(0)
    for message in messages:
        if int(message.count_nonzero()) > 1:
            raise WrongAnswer("What is sent is not compressed: send what `compress` returns.")
    lost = total - torch.stack(messages).sum(0) - residual
    if lost.abs().max() < 1e-5:
        if all(message.count_nonzero() == 0 for message in messages):
            raise WrongAnswer("Nothing is sent: everything stays in the residual.")
        expected = _rolled(_with_feedback, _largest)[0]
        if not torch.allclose(torch.stack(messages), torch.stack(expected), atol=1e-5):
            raise WrongAnswer(
                "Nothing is lost, but the residual is not used: compress the sum of the gradient"
                " and"
                " the residual."
            )
        return
    for text, mistake in _FEEDBACK_MISTAKES.items():
        wrong_messages, wrong_residual = _rolled(mistake, _largest)
        is_equal = torch.allclose(torch.stack(messages), torch.stack(wrong_messages), atol=1e-5)
        if is_equal and torch.allclose(residual, wrong_residual, atol=1e-5):
            raise WrongAnswer(text)
    raise WrongAnswer(
        "Something is lost: after six steps the sum of what was sent, plus the residual, must be"
        " the"
        f" sum of the gradients. It differs by up to {float(lost.abs().max()):.3f}."
    )


def _rolled(function: Any, compress: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the messages of six steps, and the last residual."""
    residual = torch.zeros(5)
    messages = []
    for grad in _gradients():
        pair = call(function, grad, residual, compress)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise WrongAnswer("The answer must return a pair: what is sent, and the new residual.")
        message, residual = pair
        if not all(isinstance(x, Tensor) and x.shape == (5,) for x in (message, residual)):
            raise WrongAnswer(
                "What is sent and the residual must be tensors of the gradient's shape."
            )
        messages.append(message)
    return messages, residual


def _with_feedback(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    corrected = grad + residual
    message = compress(corrected)
    return message, corrected - message


def _forgets_the_old(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    message = compress(grad + residual)
    return message, grad - message


def _never_sends(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    message = compress(grad)
    return message, grad - message


def _keeps_none(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    return compress(grad), torch.zeros_like(grad)


def _wrong_sign(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    corrected = grad + residual
    message = compress(corrected)
    return message, message - corrected


_FEEDBACK_MISTAKES = {
    "The new residual forgets the old one: it is what is left of the gradient and the residual"
    " together.": _forgets_the_old,
    "The residual is stored, but never added to a gradient.": _never_sends,
    "What is not sent is lost: the residual must keep it.": _keeps_none,
    "The sign of the residual is wrong: it is what should have been sent, minus what was.": (
        _wrong_sign
    ),
}

FEEDBACK = Exercise(
    "slow_links.feedback",
    "Write error feedback: from the gradient, the residual of the step before and the function"
    " `compress` to what is sent and the new residual. Nothing may be lost for good.",
    "answer(grad, residual, compress)",
    (
        "What was not sent is added to the next gradient, before it is compressed.",
        "The new residual is that sum minus what is sent.",
        "`corrected = grad + residual`, `message = compress(corrected)`, and the difference.",
    ),
    "With it even one element in a hundred trains; without it the notebook's `top_k` diverges.",
    _grade_feedback,
)


def _grade_ring(answer: Any) -> None:
    function = as_function(answer, "answer(n)")
    for n in (5, 8):
        matrix = function(n)
        if not isinstance(matrix, Tensor) or matrix.shape != (n, n):
            raise WrongAnswer(f"The answer must be an n x n tensor; for n = {n} it is not.")
        matrix = matrix.double()
        ones = torch.ones(n, dtype=torch.float64)
        rows = matrix.sum(1)
        columns = matrix.sum(0)
        if not torch.allclose(rows, ones) or not torch.allclose(columns, ones):
            raise WrongAnswer(
                "Rows and columns must sum to 1: a row, so that equal values stay; a column, so"
                " that"
                " the mean stays."
            )
        near = torch.eye(n, dtype=torch.bool)
        near = near | near.roll(1, 1) | near.roll(-1, 1)
        if (matrix[~near] != 0).any():
            raise WrongAnswer("A device averages with others than its two neighbours.")
        gap = 1 - float(torch.linalg.matrix_norm(matrix - 1 / n, 2))
        if gap < 1e-5:
            raise WrongAnswer(
                f"With n = {n} differences never vanish: the gap is 0. A device that gives its own"
                " value no weight only swaps with its neighbours; and one that keeps it, mixes not."
            )
        if gap < fs.comm.ring(n).gap - 1e-5:
            raise WrongAnswer(
                f"It averages, but with n = {n} the gap is {gap:.3f}; equal weights have"
                f" {fs.comm.ring(n).gap:.3f}."
            )


RING = Exercise(
    "slow_links.ring",
    "Gossip on a ring: each of `n` devices averages with the one before and the one after, in equal"
    " weights. Return the matrix (n, n) of weights: row i is what device i multiplies the values of"
    " all devices by.",
    "answer(n)",
    (
        "A row has three numbers that are not 0.",
        "The device itself is one of the three: all have the weight 1/3.",
        "`torch.eye(n)`, and the same rolled by 1 and by -1.",
    ),
    "The gap of this matrix is the speed of consensus: on a ring it falls with 1 / n^2.",
    _grade_ring,
)

EXERCISES = (LOCAL, FEEDBACK, RING)
