"""Pipelines: schedules as data, which are drawn, simulated and verified before anything runs.

split_stages(layers, 4)                              the stages of a model
pipeline_schedule("1f1b", stages=4, microbatches=8)  a `Schedule`: a row of `Action`s per device
schedule.verify(), .simulate(), print(schedule)      proof, times and bubble, drawing
fs.train_step(stages, ..., schedule=schedule)        a training step; or `pipelined`, below it
with timeline() as run: ...                          the times of a real step
"""

from fshard.pipeline.execution.pipelined import pipelined
from fshard.pipeline.schedule.actions import Action
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.trace import timeline
from fshard.pipeline.split.stages import split_stages

__all__ = ["Action", "Schedule", "pipeline_schedule", "pipelined", "split_stages", "timeline"]
