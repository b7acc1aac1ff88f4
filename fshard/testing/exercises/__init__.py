"""The exercises of the notebooks: a file a notebook, each with questions, hints and checks.

Each exercise of a topic reads from top to bottom: the right result, the mistakes that are made
most, the question. To add one:

1. Write the right result, computed by the library, as a function of the sizes of a case.
2. Write two mistakes or more, each the wrong answer of a learner below its hint, `@mistake("...")`.
3. Write the `Exercise`, with `grade=Cases(cases=..., truth=..., mistakes=...)`, and name it in
   `EXERCISES`. If the answer runs on devices, or its arguments are not the sizes themselves, `run=`
   calls it. If an answer may be right in several ways, `grade` is a function that raises
   `WrongAnswer`.
4. Write a solution, and two wrong answers with a part of the hint that they must get, in the file
   of the topic in `tests/testing/exercises`. Solutions are in the tests alone.
5. Add two cells at the end of the notebook: the question, and an answer that returns `...`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from fshard.testing.grading import Exercise

TOPICS = (
    "meshes",
    "collectives",
    "zero",
    "pipelines",
    "booster",
    "tensor",
    "sequences",
    "checkpoints",
    "memory",
    "slow_links",
    "experts",
    "plans",
    "reinforcement",
    "failures",
    "from_nothing",
)
"""In the order of the notebooks."""


def exercises(topic: str) -> tuple[Exercise, ...]:
    """Return the exercises of a topic, in order.

    >>> [one.name for one in exercises("zero")][0]
    'zero.flat_bytes'
    """
    if topic not in TOPICS:
        raise ValueError(f"exercises: topic must be one of {', '.join(TOPICS)}; got {topic!r}.")
    return import_module(f"fshard.testing.exercises.{topic}").EXERCISES


def exercise(name: str) -> Exercise:
    """Return an exercise: its question, `hint()`, and `check(answer)`.

    The check runs the answer on sizes and meshes that the question does not name, and returns a
    remark: why it matters, or the mistake. It never raises.

    Args:
        name: such as "zero.flat_bytes": a topic and an exercise of it.

    >>> one = exercise("zero.flat_bytes")
    >>> one.check(lambda numbers, n, stage: 16 * numbers).is_right
    False
    """
    topic = name.partition(".")[0]
    names = [one.name for one in exercises(topic)]
    if name not in names:
        raise ValueError(f"exercise: name must be one of {', '.join(names)}; got {name!r}.")
    found = exercises(topic)[names.index(name)]
    return replace(found, hints_shown=0)
