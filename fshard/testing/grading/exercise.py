"""A question that the program grades, and its remarks to the learner."""

from __future__ import annotations

import dis
import html
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

from fshard.testing.grading.answers import WrongAnswer, check_function
from fshard.testing.grading.words import box, marked, text_of_error

_COLOURS = {
    "right": "#4c78a8",
    "not yet": "#f58518",
    "not answered yet": "#8888",
    "hint": "#8888",
}


@dataclass(frozen=True, repr=False)
class Remark:
    """A sentence to the learner: the result of a check, or a hint.

    Args:
        kind: "right", "not yet", "not answered yet" or "hint".
        text: with code in backticks.
    """

    kind: Literal["right", "not yet", "not answered yet", "hint"]
    text: str

    @property
    def is_right(self) -> bool:
        """Return True if the answer passed the check."""
        return self.kind == "right"

    def __repr__(self) -> str:
        return f"{self.kind.capitalize()}: {self.text}"

    def _repr_html_(self) -> str:
        return box(_COLOURS[self.kind], f"<b>{self.kind.capitalize()}.</b> {marked(self.text)}")


@dataclass(repr=False)
class Exercise:
    """A question that the program grades.

    Args:
        name: such as "zero.flat_bytes": the topic, and the exercise.
        question: in one paragraph, with code in backticks.
        form: of the answer: a call such as "answer(n, stage)", of which the learner's own names may
            differ, or "answer = P(...)" for an answer that is no function.
        hints: from a nudge to nearly the solution.
        why: one sentence for who has answered: why it matters.
        grade: raises `WrongAnswer` for a wrong answer. It is called with what fits the form.
        hints_shown: so far.
    """

    name: str
    question: str
    form: str
    hints: tuple[str, ...]
    why: str
    grade: Callable[[Any], None]
    hints_shown: int = 0

    def hint(self) -> Remark:
        """Return the next hint; each call is a step further, the last one stays."""
        self.hints_shown = min(self.hints_shown + 1, len(self.hints))
        text = self.hints[self.hints_shown - 1]
        return Remark("hint", f"{self.hints_shown} of {len(self.hints)}: {text}")

    def check(self, answer: Any) -> Remark:
        """Run an answer on hidden cases and return a remark on it; never raise.

        Args:
            answer: as the question requests; `...`, or a function that returns it, is none yet.
        """
        if answer is None or answer is ... or _returns_ellipsis(answer):
            return Remark("not answered yet", "A hint is `exercise.hint()`.")
        try:
            if self.form.startswith("answer("):
                check_function(answer, self.form)
            self.grade(answer)
        except WrongAnswer as mistake:
            return Remark("not yet", str(mistake))
        except SystemExit:
            return Remark("not yet", "The answer ends the program. Return the result instead.")
        except KeyboardInterrupt:
            return Remark("not yet", "The check was stopped. Does a loop of the answer end?")
        except Exception as error:  # of the learner's code: all kinds are expected
            return Remark("not yet", text_of_error(error))
        return Remark("right", self.why)

    def __repr__(self) -> str:
        return f"Exercise {self.name}. {self.question}\nThe answer: {self.form}"

    def _repr_html_(self) -> str:
        form = f"<p>The answer: <code>{html.escape(self.form)}</code></p>"
        title = f"<b>Exercise</b> <code>{html.escape(self.name)}</code><br>"
        return box(_COLOURS["hint"], title + marked(self.question) + form)


def _returns_ellipsis(answer: Any) -> bool:
    """Return True for a function that only returns `...`, as the cell of an open exercise does."""
    if not isinstance(answer, FunctionType):
        return False
    steps = [step for step in dis.get_instructions(answer) if step.opname != "RESUME"]
    return len(steps) <= 2 and steps[0].argval is ...
