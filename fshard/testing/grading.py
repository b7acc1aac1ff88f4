"""Exercises: a question, hints by step, and a check that runs the learner's answer.

    question ─> answer ─> run on hidden cases ─> equal to the program? ─> right: why it matters
                                                     │
                                                     └─> equal to a known mistake? ─> its hint
                                                             │
                                                             └─> the first case that differs

An answer is never compared as text. It is called with sizes, meshes and tensors that the learner
has not seen, and its results are compared with those of the library: layouts, values, gradients,
bytes of the ledger. A mistake is a function, too: an answer that returns what the mistake returns
in all cases gets the hint of this mistake.

An answer that raises, waits forever for other devices, has another type, or changes its arguments
gets a remark, never a traceback.
"""

from __future__ import annotations

import dis
import html
import inspect
import math
import re
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import fshard as fs

Case = tuple[Any, ...]
"""The arguments of one call of an answer."""


class WrongAnswer(Exception):
    """A mistake in an answer; its text names the mistake and where to look."""


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
        return _box(_COLOURS[self.kind], f"<b>{self.kind.capitalize()}.</b> {_marked(self.text)}")


@dataclass(repr=False)
class Exercise:
    """A question that the program grades.

    Args:
        name: such as "zero.flat_bytes": the topic, and the exercise.
        question: in one paragraph, with code in backticks.
        form: of the answer, such as "answer(n, stage)"; the learner's own names may differ.
        hints: from a nudge to nearly the solution.
        why: one sentence for who has answered: why it matters.
        grade: raises `WrongAnswer` for an answer that is none.
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
            self.grade(answer)
        except WrongAnswer as mistake:
            return Remark("not yet", str(mistake))
        except SystemExit:
            return Remark("not yet", "The answer ends the program. Return the result instead.")
        except KeyboardInterrupt:
            return Remark("not yet", "The check was stopped. Does a loop of the answer end?")
        except Exception as error:  # of the learner's code: all kinds are expected
            return Remark("not yet", _text_of_error(error))
        return Remark("right", self.why)

    def __repr__(self) -> str:
        return f"Exercise {self.name}. {self.question}\nThe answer: {self.form}"

    def _repr_html_(self) -> str:
        form = f"<p>The answer: <code>{html.escape(self.form)}</code></p>"
        title = f"<b>Exercise</b> <code>{html.escape(self.name)}</code><br>"
        return _box(_COLOURS["hint"], title + _marked(self.question) + form)


def _returns_ellipsis(answer: Any) -> bool:
    """Return True for a function that only returns `...`, as the cell of an open exercise does."""
    if not isinstance(answer, FunctionType):
        return False
    steps = [step for step in dis.get_instructions(answer) if step.opname != "RESUME"]
    return len(steps) <= 2 and steps[0].argval is ...


# -- grading an answer ----------------------------------------------------------------------------


def grade_cases(
    answer: Any,
    form: str,
    cases: Sequence[Case],
    truth: Callable[..., Any],
    mistakes: Mapping[str, Callable[..., Any]],
    run: Callable[..., Any] | None = None,
    names: str = "",
) -> None:
    """Run an answer in hidden cases and compare it with the truth, then with known mistakes.

    Args:
        answer: the learner's function.
        form: its form, such as "answer(rows, mesh)"; the names are those of a case's values.
        cases: the arguments of each call.
        truth: from the arguments to the right result, computed by the program.
        mistakes: by hint: functions from the arguments to the result of a mistake.
        run: calls the answer with the arguments of a case; by default `call`.
        names: of a case's values, such as "devices", if they are not those of the form.
    """
    function = as_function(answer, form)
    run = run or call
    case_form = f"({names})" if names else form
    results: list[Any] = []
    for case in cases:
        try:
            results.append(run(function, *case))
        except (Exception, KeyboardInterrupt) as error:
            error.add_note(f"for {_described(case_form, case)}")
            raise
    grade_results(results, case_form, cases, truth, mistakes)


def grade_results(
    results: Sequence[Any],
    form: str,
    cases: Sequence[Case],
    truth: Callable[..., Any],
    mistakes: Mapping[str, Callable[..., Any]],
) -> None:
    """Compare the results of an answer with the truth, then with known mistakes."""
    expected = [truth(*case) for case in cases]
    if is_same(results, expected):
        return
    if any(result is None for result in tree_leaves(list(results))):
        raise WrongAnswer("The answer returns None. Is a `return` missing?")
    for text, mistake in mistakes.items():
        if is_same(results, [mistake(*case) for case in cases]):
            raise WrongAnswer(text)
    for case, result, right in zip(cases, results, expected, strict=True):
        if not is_same(result, right):
            place, got, wanted = _first_difference(result, right)
            where = _described(form, case) + place
            raise WrongAnswer(f"For {where} the answer is {got}; the program has {wanted}.")


def as_function(answer: Any, form: str) -> Callable[..., Any]:
    """Return the answer if it is a function of as many arguments as its form has."""
    if not callable(answer) or isinstance(answer, type):
        raise WrongAnswer(f"The answer must be a function, `{form}`; got {_shown(answer)}.")
    if inspect.iscoroutinefunction(answer) or inspect.isgeneratorfunction(answer):
        raise WrongAnswer("The answer must be a plain function: `def` with `return`.")
    names = _names(form)
    try:
        inspect.signature(answer).bind(*names)
    except ValueError:
        return answer  # a builtin without a signature
    except TypeError:
        raise WrongAnswer(
            f"The answer is called as `{form}`, with {len(names)} arguments; "
            f"yours is `{inspect.signature(answer)}`."
        ) from None
    return answer


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call an answer with copies of its arguments, and check that it leaves them as they are."""
    given = _copied(args)
    result = function(*given)
    for x, before in zip(given, args, strict=True):
        if not is_same(x, before):
            raise WrongAnswer(
                "The answer changes one of its arguments in place, and the caller's value with "
                "it. Make a new value: `x = x + 1`, not `x += 1` or `x.add_(1)`."
            )
    return result


def on_devices(function: Callable[..., Any], mesh: fs.Mesh, *values: Any) -> PerDevice:
    """Call an answer on each device of a mesh; return the results in mesh order.

    Args:
        function: of one device's values.
        mesh: virtual devices.
        values: arrays, of which a device gets its shard, lists with a value for each device, and
            values that all devices get.
    """

    def on_device() -> Any:
        number = fs.axis_index(mesh.axis_names)
        own = [_of_device(value, number) for value in values]
        return call(function, *own)

    return PerDevice(fs.run(on_device, mesh=mesh))


def loss_and_gradient(function: Callable[..., Any], weight: Tensor, *args: Any) -> tuple[Any, Any]:
    """Call an answer that returns a loss; return it and its gradient with respect to `weight`."""
    leaf = weight.detach().clone().requires_grad_()
    loss = function(leaf, *args)
    if not isinstance(loss, Tensor) or loss.shape != ():
        raise WrongAnswer("The answer must return a loss: a tensor of one number.")
    if not loss.requires_grad:
        raise WrongAnswer("The loss has no gradient: does it use its first argument, undetached?")
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    if gradient is None:
        raise WrongAnswer("The loss does not depend on its first argument.")
    return loss.detach(), gradient


class PerDevice(list[Any]):
    """A value for each device of a mesh, in mesh order."""


def _of_device(value: Any, number: int) -> Any:
    if isinstance(value, fs.Sharded):
        return value.shards[number]
    if isinstance(value, PerDevice):
        return value[number]
    return value


def sent(run: Callable[[], Any], collective: str | None = None) -> int | Fraction:
    """Return the bytes that a device sends in a run, of one collective or of all."""
    with fs.ledger() as comm:
        run()
    total = comm.bytes() if collective is None else comm.bytes(collective=collective)
    return Fraction(total)


def is_same(x: Any, y: Any) -> bool:
    """Return True for equal values: floats within rounding, and sequences of any type."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return _is_same_tensor(x, y)
    if isinstance(x, fs.P) or isinstance(y, fs.P):
        return x == y
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return set(x) == set(y) and all(is_same(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(map(is_same, x, y))
    if _is_number(x) and _is_number(y):
        return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)
    return type(x) is type(y) and bool(x == y)


def _is_same_tensor(x: Any, y: Any) -> bool:
    if isinstance(x, fs.Sharded) or isinstance(y, fs.Sharded):
        return x is y
    try:
        x = torch.as_tensor(x).detach()
        y = torch.as_tensor(y).detach()
    except (TypeError, ValueError, RuntimeError):
        return False
    if x.shape != y.shape:
        return False
    return torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def _is_number(x: Any) -> TypeGuard[int | float | Fraction]:
    return isinstance(x, (int, float, Fraction))


def _copied(args: Case) -> Case:
    def copy(x: Any) -> Any:
        if isinstance(x, Tensor) and not isinstance(x, fs.Sharded):
            return x.detach().clone().requires_grad_(x.requires_grad)
        return x

    return tree_map(copy, args)


# -- words ----------------------------------------------------------------------------------------

_COLOURS = {
    "right": "#4c78a8",
    "not yet": "#f58518",
    "not answered yet": "#8888",
    "hint": "#8888",
}

_CAUSES: dict[type[Exception], str] = {
    fs.errors.DeadlockError: "Some devices wait in a collective that others never call. All devices"
    " must call the same collectives in the same order: look for an `if` around one.",
    fs.errors.MismatchError: "The devices met in one collective with different calls: other shapes,"
    " or another collective. Look for what depends on `fs.axis_index`.",
    fs.errors.PromiseError: "The devices return different values where equal ones are promised."
    " A sum (`fs.psum`) or a mark (`fs.pvary`) is missing.",
    RecursionError: "The answer calls itself without an end.",
}


def _text_of_error(error: Exception) -> str:
    """Return the error of an answer in a sentence: its cause, its line, its case."""
    for kind, cause in _CAUSES.items():
        if isinstance(error, kind):
            return cause
    message = str(error).partition("\n")[0][:300].rstrip(".")
    text = f"The answer raises {type(error).__name__}: {message}."
    line = _line_of(error)
    if line:
        text += f" The line is `{line}`."
    cases = [note for note in vars(error).get("__notes__", []) if note.startswith("for ")]
    if cases:
        text += f" It is called {cases[0]}."
    return text


def _line_of(error: Exception) -> str:
    """Return the last line of the learner's own code in a traceback."""
    packages = (str(Path(fs.__file__).parent), *sysconfig.get_paths().values())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if not frame.filename.startswith(packages)]
    return (lines[-1] or "") if lines else ""


def _first_difference(x: Any, y: Any) -> tuple[str, str, str]:
    """Return where two results first differ, and the two values there."""
    place = ""
    is_pair = isinstance(x, (list, tuple)) and isinstance(y, (list, tuple))
    is_nested = is_pair and any(isinstance(item, (Tensor, list, tuple)) for item in y)
    if (is_nested or isinstance(x, PerDevice)) and len(x) == len(y):
        for number, (left, right) in enumerate(zip(x, y, strict=True)):
            if not is_same(left, right):
                if isinstance(x, PerDevice):
                    place = f", on device {number},"
                inner, left_text, right_text = _first_difference(left, right)
                return place + inner, left_text, right_text
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.ndim > 0:
        differs = ~torch.isclose(x.double(), y.double(), rtol=1e-4, atol=1e-5)
        index = differs.nonzero()[0].tolist()
        return f" at {index}", f"{float(x[*index]):g}", f"{float(y[*index]):g}"
    return place, _shown(x), _shown(y)


def _names(form: str) -> list[str]:
    inside = form.partition("(")[2].rpartition(")")[0]
    return [name.strip() for name in inside.split(",") if name.strip()]


def _described(form: str, case: Case) -> str:
    parts = [f"{name} = {_shown(x)}" for name, x in zip(_names(form), case, strict=False)]
    return ", ".join(parts)


def _shown(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, fs.Sharded):
        return str(fs.typeof(value))
    if isinstance(value, fs.Mesh):
        return f"a mesh of {dict(value.shape)}"
    if isinstance(value, Tensor) and value.numel() > 8:
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Tensor):
        return str(value.tolist())
    text = repr(value) if not isinstance(value, Fraction) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _marked(text: str) -> str:
    """Return text as HTML, with code in backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _box(colour: str, content: str) -> str:
    style = f"border-left:4px solid {colour};padding:4px 10px;max-width:44em;line-height:1.5"
    return f'<div style="{style}">{content}</div>'
