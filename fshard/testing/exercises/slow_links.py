"""Exercises of the notebook "Slow links"."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.testing.grading import Answer, Cases, Exercise, WrongAnswer, call, mistake, sent

__all__ = ["EXERCISES"]


# -- the bytes of local SGD -----------------------------------------------------------------------


def sent_by_local_sgd(n: int, numbers: int, every: int) -> Fraction:
    """Count the bytes of parameters that local SGD sends in a step, on average.

    A model of twice as many parameters sends as many bytes more: so losses and norms do not count.
    """
    once = sent_with_metrics(n, numbers, every)
    twice = sent_with_metrics(n, 2 * numbers, every)
    return (twice - once) / every


@cache
def sent_with_metrics(n: int, numbers: int, every: int) -> Fraction:
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

    return sent(train)


@mistake("That is sent in a step that averages. Of `every` steps one does.")
def sent_when_averaged(n: int, numbers: int, every: int) -> Fraction:
    return every * sent_by_local_sgd(n, numbers, every)


@mistake("An all-reduce sends twice (n - 1)/n: sums, and then their shards to all.")
def sent_by_one_half(n: int, numbers: int, every: int) -> Fraction:
    return sent_by_local_sgd(n, numbers, every) / 2


@mistake("A float32 has 4 bytes.")
def sent_elements(n: int, numbers: int, every: int) -> Fraction:
    return sent_by_local_sgd(n, numbers, every) / 4


@mistake("The factor is 2 (n - 1)/n, not 2: a node keeps its own shard.")
def sent_with_own_shard(n: int, numbers: int, every: int) -> Fraction:
    return Fraction(8 * numbers, every)


LOCAL = Exercise(
    name="slow_links.local",
    question=(
        "Local SGD averages the float32 parameters, `numbers` of them, of `n` nodes `every` so many"
        " steps. How many bytes does a node send for it in a step, on average?"
    ),
    form="answer(n, numbers, every)",
    hints=(
        "An average is a `psum`, divided.",
        "A `psum` of B bytes sends 2 (n - 1)/n B.",
        "And there is one in `every` steps.",
    ),
    why="Ten local steps are a tenth of the bytes: more than most compressors save, at no bias.",
    grade=Cases(
        cases=[(2, 600, 5), (3, 900, 2), (4, 800, 1)],
        truth=sent_by_local_sgd,
        mistakes=(sent_when_averaged, sent_by_one_half, sent_elements, sent_with_own_shard),
    ),
)


# -- error feedback -------------------------------------------------------------------------------


def largest(x: Tensor) -> Tensor:
    """Compress a vector to the element of the largest absolute value."""
    message = torch.zeros_like(x)
    index = x.abs().argmax()
    message[index] = x[index]
    return message


def gradients() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(5, generator=draw) for _ in range(6)]


def run_feedback(answer: Answer) -> tuple[Tensor, Tensor]:
    """Return the messages of six steps, a row each, and the last residual."""
    residual = torch.zeros(5)
    messages: list[Tensor] = []
    for grad in gradients():
        pair = call(answer, grad, residual, largest)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise WrongAnswer("The answer must return a pair: what is sent, and the new residual.")
        message, residual = pair
        if not all(isinstance(x, Tensor) and x.shape == (5,) for x in (message, residual)):
            raise WrongAnswer(
                "What is sent and the residual must be tensors of the gradient's shape."
            )
        messages.append(message)
    return torch.stack(messages), residual


def with_feedback(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    corrected = grad + residual
    message = compress(corrected)
    return message, corrected - message


@mistake(
    "The new residual forgets the old one: it is what is left of the gradient and the residual"
    " together."
)
def forgets_the_old(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    message = compress(grad + residual)
    return message, grad - message


@mistake("The residual is stored, but never added to a gradient.")
def never_adds(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    message = compress(grad)
    return message, grad - message


@mistake("What is not sent is lost: the residual must keep it.")
def keeps_none(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    return compress(grad), torch.zeros_like(grad)


@mistake("The sign of the residual is wrong: it is what should have been sent, minus what was.")
def wrong_sign(grad: Tensor, residual: Tensor, compress: Any) -> tuple[Tensor, Tensor]:
    corrected = grad + residual
    message = compress(corrected)
    return message, message - corrected


FEEDBACK_MISTAKES = (forgets_the_old, never_adds, keeps_none, wrong_sign)


def grade_feedback(answer: Answer) -> None:
    messages, residual = run_feedback(answer)
    if (messages.count_nonzero(1) > 1).any():
        raise WrongAnswer("What is sent is not compressed: send what `compress` returns.")

    # If nothing is lost, a right answer still has to send what error feedback sends.
    total = torch.stack(gradients()).sum(0)
    lost = total - messages.sum(0) - residual
    if lost.abs().max() < 1e-5:
        if messages.count_nonzero() == 0:
            raise WrongAnswer("Nothing is sent: everything stays in the residual.")
        expected, _ = run_feedback(with_feedback)
        if not torch.allclose(messages, expected, atol=1e-5):
            raise WrongAnswer(
                "Nothing is lost, but the residual is not used: compress the sum of the gradient"
                " and the residual."
            )
        return

    for known in FEEDBACK_MISTAKES:
        known_messages, known_residual = run_feedback(known.answer)
        has_messages = torch.allclose(messages, known_messages, atol=1e-5)
        if has_messages and torch.allclose(residual, known_residual, atol=1e-5):
            raise WrongAnswer(known.hint)
    raise WrongAnswer(
        "Something is lost: after six steps the sum of what was sent, plus the residual, must be"
        f" the sum of the gradients. It differs by up to {float(lost.abs().max()):.3f}."
    )


FEEDBACK = Exercise(
    name="slow_links.feedback",
    question=(
        "Write error feedback: from the gradient, the residual of the step before and the function"
        " `compress` to what is sent and the new residual. Nothing may be lost for good."
    ),
    form="answer(grad, residual, compress)",
    hints=(
        "What was not sent is added to the next gradient, before it is compressed.",
        "The new residual is that sum minus what is sent.",
        "`corrected = grad + residual`, `message = compress(corrected)`, and the difference.",
    ),
    why="With it even one element in a hundred trains; without it the notebook's `top_k` diverges.",
    grade=grade_feedback,
)


# -- gossip on a ring -----------------------------------------------------------------------------


def grade_ring(answer: Answer) -> None:
    for n in (5, 8):
        matrix = answer(n)
        if not isinstance(matrix, Tensor) or matrix.shape != (n, n):
            raise WrongAnswer(f"The answer must be an n x n tensor; for n = {n} it is not.")
        grade_weights(matrix.double(), n)
        grade_gap(matrix.double(), n)


def grade_weights(matrix: Tensor, n: int) -> None:
    ones = torch.ones(n, dtype=torch.float64)
    rows = matrix.sum(1)
    columns = matrix.sum(0)
    if not torch.allclose(rows, ones) or not torch.allclose(columns, ones):
        raise WrongAnswer(
            "Rows and columns must sum to 1: a row, so that equal values stay; a column, so that"
            " the mean stays."
        )
    itself = torch.eye(n, dtype=torch.bool)
    is_near = itself | itself.roll(1, 1) | itself.roll(-1, 1)
    if (matrix[~is_near] != 0).any():
        raise WrongAnswer("A device averages with others than its two neighbours.")


def grade_gap(matrix: Tensor, n: int) -> None:
    gap = 1 - float(torch.linalg.matrix_norm(matrix - 1 / n, 2))
    best_gap = fs.comm.ring(n).gap
    if gap < 1e-5:
        raise WrongAnswer(
            f"With n = {n} differences never vanish: the gap is 0. A device that gives its own"
            " value no weight only swaps with its neighbours; and one that keeps it, mixes not."
        )
    if gap < best_gap - 1e-5:
        raise WrongAnswer(
            f"It averages, but with n = {n} the gap is {gap:.3f}; equal weights have"
            f" {best_gap:.3f}."
        )


RING = Exercise(
    name="slow_links.ring",
    question=(
        "Gossip on a ring: each of `n` devices averages with the one before and the one after, in"
        " equal weights. Return the matrix (n, n) of weights: row i is what device i multiplies the"
        " values of all devices by."
    ),
    form="answer(n)",
    hints=(
        "A row has three numbers that are not 0.",
        "The device itself is one of the three: all have the weight 1/3.",
        "`torch.eye(n)`, and the same rolled by 1 and by -1.",
    ),
    why="The gap of this matrix is the speed of consensus: on a ring it falls with 1 / n^2.",
    grade=grade_ring,
)

EXERCISES = (LOCAL, FEEDBACK, RING)
