"""Pipelines: schedules as data, which are drawn, simulated and proven before anything runs."""

from fshard.pipeline.execution.pipelined import pipelined
from fshard.pipeline.schedule.actions import Action
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.trace import timeline
from fshard.pipeline.split.stages import split_stages

__all__ = ["Action", "Schedule", "pipeline_schedule", "pipelined", "split_stages", "timeline"]
