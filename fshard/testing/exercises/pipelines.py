"""Exercises of the notebook "A pipeline is a list of actions"."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import fshard as fs
from fshard.pipeline import Schedule
from fshard.testing.grading import Exercise, WrongAnswer, as_function, grade_cases


@cache
def _bubble(stages: int, microbatches: int) -> Fraction:
    schedule = fs.pipeline_schedule("gpipe", stages=stages, microbatches=microbatches)
    return Fraction(schedule.simulate().bubble)


BUBBLE = Exercise(
    "pipelines.bubble",
    "Which part of the time is a device of GPipe idle, with `stages` equal stages, a device each,"
    " and `microbatches`? Write the formula, without a simulation.",
    "answer(stages, microbatches)",
    (
        "Look at the last device: it waits for K - 1 forwards of others, and at the end for K - 1"
        " backwards.",
        "In all a step takes M + K - 1 forwards and as many backwards.",
        "(K - 1) / (M + K - 1).",
    ),
    "So the bubble is a matter of microbatches: four for each stage leave less than a fifth.",
    lambda answer: grade_cases(
        answer,
        "answer(stages, microbatches)",
        [(2, 3), (5, 7), (8, 8)],
        _bubble,
        {
            "That is the idle time relative to the work. Of the entire time it is less: idle and"
            " work are both in it.": lambda stages, microbatches: (stages - 1) / microbatches,
            "That is in percent. The bubble is a part of 1, such as 1/4.": (
                lambda stages, microbatches: 100 * _bubble(stages, microbatches)
            ),
            "That is the part in which it works. The bubble is the rest.": (
                lambda stages, microbatches: microbatches / (microbatches + stages - 1)
            ),
            "The first microbatch of the last device waits for K - 1 stages, not for K.": (
                lambda stages, microbatches: stages / (microbatches + stages)
            ),
            "A step takes M + K - 1 forwards: the last microbatch starts after M - 1 others.": (
                lambda stages, microbatches: (stages - 1) / (microbatches + stages)
            ),
        },
    ),
)


def _least_microbatches(stages: int, limit: float) -> int:
    microbatches = 1
    while _bubble(stages, microbatches) > limit:
        microbatches += 1
    return microbatches


ENOUGH = Exercise(
    "pipelines.enough",
    "With how many microbatches, at least, is the bubble of 1F1B with `stages` stages at most"
    " `limit`, a `Fraction` such as 1/5?",
    "answer(stages, limit)",
    (
        "1F1B has the bubble of GPipe: (K - 1) / (M + K - 1).",
        'Try numbers: `fs.pipeline_schedule("1f1b", ...).simulate().bubble`, from 1 on.',
        "Or solve for M, and round up.",
    ),
    "More stages need more microbatches, and the global batch limits their number.",
    lambda answer: grade_cases(
        answer,
        "answer(stages, limit)",
        [(2, Fraction(1, 4)), (4, Fraction(1, 5)), (5, Fraction(3, 10)), (3, Fraction(1, 8))],
        _least_microbatches,
        {
            "One too few in some cases: round up, not down or to the nearest.": (
                lambda stages, limit: int((stages - 1) * (1 - limit) / limit)
            ),
            "At the limit itself the bubble is small enough, so this is one too many.": (
                lambda stages, limit: int((stages - 1) * (1 - limit) / limit) + 1
            ),
            "This limits the idle time relative to the work. The bubble is relative to the entire"
            " time.": lambda stages, limit: -(-(stages - 1) // limit),
        },
    ),
)


@cache
def _held(stage: int, stages: int, microbatches: int) -> Any:
    schedule = fs.pipeline_schedule("1f1b", stages=stages, microbatches=microbatches)
    return schedule.simulate().peak_activations[stage]


HELD = Exercise(
    "pipelines.held",
    "Of how many microbatches does `stage` (0, 1, ...) of 1F1B hold the activations at most?",
    "answer(stage, stages, microbatches)",
    (
        "The last stage runs each backward directly after its forward.",
        "The stage before it is one forward ahead of it.",
        "K - s, unless there are fewer microbatches than that.",
    ),
    "GPipe holds all M. So 1F1B made deep pipelines possible, at the same bubble.",
    lambda answer: grade_cases(
        answer,
        "answer(stage, stages, microbatches)",
        [(0, 4, 8), (1, 4, 2), (3, 4, 8), (2, 6, 9), (0, 5, 3)],
        _held,
        {
            "Right with many microbatches. But a stage cannot hold more than there are.": (
                lambda stage, stages, microbatches: stages - stage
            ),
            "That is GPipe, whose backwards begin after all forwards.": (
                lambda stage, stages, microbatches: microbatches
            ),
            "It is the other way: the last stage holds one, the first one most.": (
                lambda stage, stages, microbatches: min(stage + 1, microbatches)
            ),
            "The last stage holds one while it runs, not none.": (
                lambda stage, stages, microbatches: min(stages - stage - 1, microbatches)
            ),
        },
    ),
)


def _grade_written(answer: Any) -> None:
    function = as_function(answer, "answer(microbatches)")
    for microbatches in (2, 5):
        text = function(microbatches)
        if not isinstance(text, str):
            raise WrongAnswer("The answer must return a text: two lines of actions, as in 0F0,0B0.")
        _grade_text(text, microbatches)


def _grade_text(text: str, microbatches: int) -> None:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if len(lines) != 2:
        raise WrongAnswer(f"There are two devices, so two lines; got {len(lines)}.")
    cells = ",".join(lines).replace(" ", "").split(",")
    wanted = {f"{s}{kind}{m}" for s in range(2) for kind in "FB" for m in range(microbatches)}
    missing = sorted(wanted - set(cells))
    if missing:
        raise WrongAnswer(f"With {microbatches} microbatches the action `{missing[0]}` is missing.")
    try:
        schedule = Schedule.from_csv(text.strip(), name="answer")
        schedule.verify()
    except fs.errors.ScheduleError as error:
        reason = " ".join(str(error).split())[:240]
        raise WrongAnswer(
            f"With {microbatches} microbatches it cannot run: {reason}"
            " The schedule's `verify()` has all of it."
        ) from None
    held = tuple(schedule.simulate().peak_activations)
    if held[0] > 2 or held[1] > 1:
        raise WrongAnswer(
            f"It runs, but with {microbatches} microbatches the devices hold {held[0]} and"
            f" {held[1]}"
            " activations; 2 and 1 are possible. A backward must come as early as it can."
        )
    best = fs.pipeline_schedule("1f1b", stages=2, microbatches=microbatches).simulate().makespan
    if schedule.simulate().makespan > best:
        raise WrongAnswer(
            "It runs, but takes longer than needed: device 0 waits for each microbatch to return."
            " It may run one forward ahead."
        )


WRITTEN = Exercise(
    "pipelines.written",
    "Write a schedule: two lines, the actions of two devices, for stages 0 and 1 and any number of"
    " microbatches. `0F3` is the forward of microbatch 3 in stage 0, `1B3` its backward in stage 1;"
    " cells are separated by commas. Device 0 may hold two activations, device 1 one; and no other"
    " such schedule is faster.",
    "answer(microbatches)",
    (
        "Device 1 alternates: 1F0, 1B0, 1F1, 1B1, ...",
        "Device 0 runs one forward ahead: 0F0, 0F1, 0B0, 0F2, 0B1, ...",
        "Its last action is the last backward, after which no forward is left.",
    ),
    "A schedule is text, so it can be reviewed, drawn and proven before a cluster runs it.",
    _grade_written,
)

EXERCISES = (BUBBLE, ENOUGH, HELD, WRITTEN)
