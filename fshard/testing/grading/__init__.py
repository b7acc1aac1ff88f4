"""Grading: the check of an exercise runs the learner's answer.

    question ─> answer ─> run on hidden cases ─> equal to the program? ─> right: why it matters
                                                     │
                                                     └─> equal to a known mistake? ─> its hint
                                                             │
                                                             └─> the first case that differs

exercise   a question with its hints, and the remarks on answers: `Exercise`, `Remark`
cases      compares an answer with the program on hidden cases: `Cases`, `mistake`
answers    calls an answer, on one device or on many, and counts bytes: `call`, `on_devices`
sameness   compares results: `is_same`
words      shows values and errors in one sentence

An answer is never compared as text. It is called with sizes, meshes and tensors that the learner
has not seen, and its results are compared with those of the library: layouts, values, gradients,
bytes of the ledger. A mistake is a wrong answer with a hint: an answer with the same results in all
cases gets the hint.

An answer that raises, waits forever for other devices, has another type, or changes its arguments
gets a remark, never a traceback.
"""

from fshard.testing.grading.answers import (
    Answer,
    PerDevice,
    WrongAnswer,
    call,
    loss_and_gradient,
    on_devices,
    sent,
    stored,
)
from fshard.testing.grading.cases import Cases, Mistake, mistake
from fshard.testing.grading.exercise import Exercise, Remark
from fshard.testing.grading.sameness import is_same

__all__ = [
    "Answer",
    "Cases",
    "Exercise",
    "Mistake",
    "PerDevice",
    "Remark",
    "WrongAnswer",
    "call",
    "is_same",
    "loss_and_gradient",
    "mistake",
    "on_devices",
    "sent",
    "stored",
]
