"""Schedules, drawn by name and sizes."""

from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units

NAMES = [
    "gpipe",
    "1f1b",
    "interleaved",
    "bfs",
    "zb-h1",
    "zb-h2",
    "zbv",
    "v-half",
    "v-min",
    "dualpipe-v",
]


def some_schedule(draw):
    """Draw a schedule that can run."""
    schedule = pipeline_schedule(
        draw.choice(NAMES), stages=draw.randint(1, 5), microbatches=draw.randint(1, 4)
    )
    if draw.random() < 0.5:
        schedule = with_messages(schedule)
    return with_units(schedule, live=draw.randint(1, 3)) if draw.random() < 0.3 else schedule
