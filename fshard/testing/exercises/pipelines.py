"""Exercises of the notebook "A pipeline is a list of actions"."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import fshard as fs
from fshard.pipeline import Schedule
from fshard.testing.grading import Answer, Cases, Exercise, WrongAnswer, mistake

__all__ = ["EXERCISES"]


# -- the bubble of GPipe --------------------------------------------------------------------------


@cache
def bubble(stages: int, microbatches: int) -> Fraction:
    schedule = fs.pipeline_schedule("gpipe", stages=stages, microbatches=microbatches)
    return Fraction(schedule.simulate().bubble)


@mistake(
    "That is the idle time relative to the work. Of the entire time it is less: idle and work are"
    " both in it."
)
def idle_by_work(stages: int, microbatches: int) -> float:
    return (stages - 1) / microbatches


@mistake("That is in percent. The bubble is a part of 1, such as 1/4.")
def bubble_in_percent(stages: int, microbatches: int) -> Fraction:
    return 100 * bubble(stages, microbatches)


@mistake("That is the part in which it works. The bubble is the rest.")
def part_of_work(stages: int, microbatches: int) -> float:
    return microbatches / (microbatches + stages - 1)


@mistake("The first microbatch of the last device waits for K - 1 stages, not for K.")
def with_a_wait_for_all_stages(stages: int, microbatches: int) -> float:
    return stages / (microbatches + stages)


@mistake("A step takes M + K - 1 forwards: the last microbatch starts after M - 1 others.")
def with_one_forward_more(stages: int, microbatches: int) -> float:
    return (stages - 1) / (microbatches + stages)


BUBBLE = Exercise(
    name="pipelines.bubble",
    question=(
        "Which part of the time is a device of GPipe idle, with `stages` equal stages, a device"
        " each, and `microbatches`? Write the formula, without a simulation."
    ),
    form="answer(stages, microbatches)",
    hints=(
        "Look at the last device: it waits for K - 1 forwards of others, and at the end for K - 1"
        " backwards.",
        "In all a step takes M + K - 1 forwards and as many backwards.",
        "(K - 1) / (M + K - 1).",
    ),
    why="So the bubble is a matter of microbatches: four for each stage leave less than a fifth.",
    grade=Cases(
        cases=[(2, 3), (5, 7), (8, 8)],
        truth=bubble,
        mistakes=(
            idle_by_work,
            bubble_in_percent,
            part_of_work,
            with_a_wait_for_all_stages,
            with_one_forward_more,
        ),
    ),
)


# -- enough microbatches --------------------------------------------------------------------------


def least_microbatches(stages: int, limit: Fraction) -> int:
    microbatches = 1
    while bubble(stages, microbatches) > limit:
        microbatches += 1
    return microbatches


@mistake("One too few in some cases: round up, not down or to the nearest.")
def rounded_down(stages: int, limit: Fraction) -> int:
    return int((stages - 1) * (1 - limit) / limit)


@mistake("At the limit itself the bubble is small enough, so this is one too many.")
def one_above_rounded_down(stages: int, limit: Fraction) -> int:
    return int((stages - 1) * (1 - limit) / limit) + 1


@mistake(
    "This limits the idle time relative to the work. The bubble is relative to the entire time."
)
def limited_by_work(stages: int, limit: Fraction) -> int:
    return -(-(stages - 1) // limit)


ENOUGH = Exercise(
    name="pipelines.enough",
    question=(
        "With how many microbatches, at least, is the bubble of 1F1B with `stages` stages at most"
        " `limit`, a `Fraction` such as 1/5?"
    ),
    form="answer(stages, limit)",
    hints=(
        "1F1B has the bubble of GPipe: (K - 1) / (M + K - 1).",
        'Try numbers: `fs.pipeline_schedule("1f1b", ...).simulate().bubble`, from 1 on.',
        "Or solve for M, and round up.",
    ),
    why="More stages need more microbatches, and the global batch limits their number.",
    grade=Cases(
        cases=[
            (2, Fraction(1, 4)),
            (4, Fraction(1, 5)),
            (5, Fraction(3, 10)),
            (3, Fraction(1, 8)),
        ],
        truth=least_microbatches,
        mistakes=(rounded_down, one_above_rounded_down, limited_by_work),
    ),
)


# -- activations that 1F1B holds ------------------------------------------------------------------


@cache
def held(stage: int, stages: int, microbatches: int) -> Any:
    schedule = fs.pipeline_schedule("1f1b", stages=stages, microbatches=microbatches)
    return schedule.simulate().peak_activations[stage]


@mistake("Right with many microbatches. But a stage cannot hold more than there are.")
def held_with_many_microbatches(stage: int, stages: int, microbatches: int) -> int:
    return stages - stage


@mistake("That is GPipe, whose backwards begin after all forwards.")
def held_by_gpipe(stage: int, stages: int, microbatches: int) -> int:
    return microbatches


@mistake("It is the other way: the last stage holds one, the first one most.")
def held_the_other_way(stage: int, stages: int, microbatches: int) -> int:
    return min(stage + 1, microbatches)


@mistake("The last stage holds one while it runs, not none.")
def held_between_actions(stage: int, stages: int, microbatches: int) -> int:
    return min(stages - stage - 1, microbatches)


HELD = Exercise(
    name="pipelines.held",
    question=(
        "Of how many microbatches does `stage` (0, 1, ...) of 1F1B hold the activations at most?"
    ),
    form="answer(stage, stages, microbatches)",
    hints=(
        "The last stage runs each backward directly after its forward.",
        "The stage before it is one forward ahead of it.",
        "K - s, unless there are fewer microbatches than that.",
    ),
    why="GPipe holds all M. So 1F1B made deep pipelines possible, at the same bubble.",
    grade=Cases(
        cases=[(0, 4, 8), (1, 4, 2), (3, 4, 8), (2, 6, 9), (0, 5, 3)],
        truth=held,
        mistakes=(
            held_with_many_microbatches,
            held_by_gpipe,
            held_the_other_way,
            held_between_actions,
        ),
    ),
)


# -- a schedule as text ---------------------------------------------------------------------------


def grade_written(answer: Answer) -> None:
    for microbatches in (2, 5):
        text = answer(microbatches)
        if not isinstance(text, str):
            raise WrongAnswer("The answer must return a text: two lines of actions, as in 0F0,0B0.")
        check_all_actions(text, microbatches)
        grade_schedule(text, microbatches)


def check_all_actions(text: str, microbatches: int) -> None:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if len(lines) != 2:
        raise WrongAnswer(f"There are two devices, so two lines; got {len(lines)}.")

    cells = ",".join(lines).replace(" ", "").split(",")
    for action in ("0B", "0F", "1B", "1F"):
        for microbatch in range(microbatches):
            cell = f"{action}{microbatch}"
            if cell not in cells:
                raise WrongAnswer(
                    f"With {microbatches} microbatches the action `{cell}` is missing."
                )


def grade_schedule(text: str, microbatches: int) -> None:
    try:
        schedule = Schedule.from_csv(text.strip(), name="answer")
        schedule.verify()
    except fs.errors.ScheduleError as error:
        reason = " ".join(str(error).split())[:240]
        raise WrongAnswer(
            f"With {microbatches} microbatches it cannot run: {reason}"
            " The schedule's `verify()` has all of it."
        ) from None

    simulation = schedule.simulate()
    held = tuple(simulation.peak_activations)
    if held[0] > 2 or held[1] > 1:
        raise WrongAnswer(
            f"It runs, but with {microbatches} microbatches the devices hold {held[0]} and"
            f" {held[1]} activations; 2 and 1 are possible. A backward must come as early as it"
            " can."
        )

    best = fs.pipeline_schedule("1f1b", stages=2, microbatches=microbatches)
    if simulation.makespan > best.simulate().makespan:
        raise WrongAnswer(
            "It runs, but takes longer than needed: device 0 waits for each microbatch to return."
            " It may run one forward ahead."
        )


WRITTEN = Exercise(
    name="pipelines.written",
    question=(
        "Write a schedule: two lines, the actions of two devices, for stages 0 and 1 and any number"
        " of microbatches. `0F3` is the forward of microbatch 3 in stage 0, `1B3` its backward in"
        " stage 1; cells are separated by commas. Device 0 may hold two activations, device 1 one;"
        " and no other such schedule is faster."
    ),
    form="answer(microbatches)",
    hints=(
        "Device 1 alternates: 1F0, 1B0, 1F1, 1B1, ...",
        "Device 0 runs one forward ahead: 0F0, 0F1, 0B0, 0F2, 0B1, ...",
        "Its last action is the last backward, after which no forward is left.",
    ),
    why="A schedule is text, so it can be reviewed, drawn and proven before a cluster runs it.",
    grade=grade_written,
)

EXERCISES = (BUBBLE, ENOUGH, HELD, WRITTEN)
