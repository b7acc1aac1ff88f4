"""Grade an answer on hidden cases: its results are those of the program, or of a known mistake."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from optree import tree_leaves
from torch import Tensor

from fshard.testing.grading.answers import Answer, PerDevice, WrongAnswer, call
from fshard.testing.grading.sameness import is_same
from fshard.testing.grading.words import shown


@dataclass(frozen=True)
class Mistake:
    """A wrong answer, and the hint to everyone who answers so.

    Args:
        hint: names the mistake, and where to look.
        answer: the function, called as the learner's is.
    """

    hint: str
    answer: Answer


def mistake(hint: str) -> Callable[[Answer], Mistake]:
    """Return a decorator that makes a `Mistake` of a wrong answer."""

    def with_hint(answer: Answer) -> Mistake:
        return Mistake(hint, answer)

    return with_hint


@dataclass(frozen=True)
class Cases:
    """The cases on which an answer is graded; call it with an answer to grade.

    Args:
        cases: the values of each case.
        truth: from the values of a case to the right result, computed by the program. Remarks name
            the values as its parameters.
        mistakes: the first whose results are those of the answer gives its hint.
        run: calls an answer for the values of a case, and returns the result to compare. By default
            the values are the arguments of the answer.
    """

    cases: Sequence[tuple[Any, ...]]
    truth: Callable[..., Any]
    mistakes: tuple[Mistake, ...]
    run: Callable[..., Any] = call

    def __call__(self, answer: Answer) -> None:
        """Raise `WrongAnswer` unless the results of an answer are right in all cases."""
        results: Any = [self._result(answer, case) for case in self.cases]
        expected = [self.truth(*case) for case in self.cases]
        if is_same(results, expected):
            return

        leaves = tree_leaves(results, none_is_leaf=True)
        if any(leaf is None for leaf in leaves):
            raise WrongAnswer("The answer returns None. Is a `return` missing?")

        for known in self.mistakes:
            known_results = [self.run(known.answer, *case) for case in self.cases]
            if is_same(results, known_results):
                raise WrongAnswer(known.hint)

        for case, result, right in zip(self.cases, results, expected, strict=True):
            if not is_same(result, right):
                place, result_text, right_text = _first_difference(result, right)
                raise WrongAnswer(
                    f"For {self._described(case)}{place} the answer is {result_text}; the program"
                    f" has {right_text}."
                )

    def _result(self, answer: Answer, case: tuple[Any, ...]) -> Any:
        try:
            return self.run(answer, *case)
        except (Exception, KeyboardInterrupt) as error:
            error.add_note(f"for {self._described(case)}")
            raise

    def _described(self, case: tuple[Any, ...]) -> str:
        names = inspect.signature(self.truth).parameters
        values = [f"{name} = {shown(value)}" for name, value in zip(names, case, strict=True)]
        return ", ".join(values)


def _first_difference(x: Any, y: Any) -> tuple[str, str, str]:
    """Return where two results first differ, and the two values there."""
    are_per_device = isinstance(x, PerDevice)
    are_sequences = isinstance(x, (list, tuple)) and isinstance(y, (list, tuple))
    are_nested = are_sequences and any(isinstance(item, (Tensor, list, tuple)) for item in y)
    if (are_per_device or are_nested) and len(x) == len(y):
        for number, (left, right) in enumerate(zip(x, y, strict=True)):
            if is_same(left, right):
                continue
            place, left_text, right_text = _first_difference(left, right)
            if are_per_device:
                place = f", on device {number},{place}"
            return place, left_text, right_text
    return _difference_of_values(x, y)


def _difference_of_values(x: Any, y: Any) -> tuple[str, str, str]:
    are_tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
    if not are_tensors or x.shape != y.shape or x.ndim == 0:
        return "", shown(x), shown(y)
    differs = ~torch.isclose(x.double(), y.double(), rtol=1e-4, atol=1e-5)
    index = differs.nonzero()[0].tolist()
    return f" at {index}", f"{float(x[*index]):g}", f"{float(y[*index]):g}"
