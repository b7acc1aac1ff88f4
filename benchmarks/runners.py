"""Runners of a pipeline: fshard's interpreter and torch.distributed.pipelining, on the same stages; and their overhead alone.

    compute    0 1 | 2 3            gpipe, 1f1b        n stages of two blocks on n processes
               0 | 1 | 2 | 3        interleaved, zbv   2 n stages of one block
    latency    one block in each stage

Blocks are those of models.py, written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import SEED, Gpt, Mlp, Model, Params, Unit, UnitModule, part
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import fshard as fs
from fshard.pipeline.schedule.schedule import Schedule

SCHEDULES: dict[str, tuple[int, Callable[..., Any]]] = {
    "gpipe": (1, ScheduleGPipe),
    "1f1b": (1, Schedule1F1B),
    "interleaved": (2, ScheduleInterleaved1F1B),
    "zbv": (2, ScheduleZBVZeroBubble),
}
"""The number of stages of a process, and torch's class."""

Step = Callable[[], Tensor | None]
"""Make a step; return the loss on the devices that have it."""


@dataclass(frozen=True)
class Task:
    """A workload: the blocks of a model on each process, and the rows of a microbatch."""

    model: Model
    blocks: int
    microbatches: int
    rows: int
    length: int
    width: int

    def data(self) -> tuple[Tensor, Tensor]:
        """Return the global batch and its targets."""
        shape = (self.microbatches * self.rows, self.length, self.width)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
        return x, x.roll(1, dims=-1)


COMPUTE = Task(
    Gpt(256, 8, depth=8, vocabulary=8, length=64).model(),
    2,
    microbatches=8,
    rows=2,
    length=64,
    width=256,
)
LATENCY = Task(
    Mlp(narrow=64, wide=256, depth=8).model(), 1, microbatches=32, rows=1, length=16, width=64
)


@dataclass(frozen=True)
class Pipeline:
    """A task, cut as a schedule wants it, on n processes."""

    task: Task
    name: str
    n: int
    device: torch.device | str = "cpu"

    @property
    def schedule(self) -> Schedule:
        """Ours; torch makes its own of the same name."""
        stages = self.n * SCHEDULES[self.name][0]
        return fs.pipeline_schedule(self.name, stages=stages, microbatches=self.task.microbatches)

    @property
    def own(self) -> list[int]:
        """The stages of this process."""
        return [
            stage for stage, place in enumerate(self.schedule.placement) if place == dist.get_rank()
        ]

    @property
    def unit(self) -> Unit:
        """A block."""
        return self.task.model.units["blocks.0"]

    @property
    def blocks(self) -> int:
        """How many a stage has."""
        return max(1, self.task.blocks // SCHEDULES[self.name][0])

    def data(self) -> tuple[Tensor, Tensor]:
        """Return the global batch and its targets, on the device."""
        x, target = self.task.data()
        return x.to(self.device), target.to(self.device)

    def params(self, stage: int) -> list[Params]:
        """Return those of a stage, a dict for each block."""
        drawn = {name: x.to(self.device) for name, x in self.task.model.init(SEED).items()}
        return [
            part(drawn, f"blocks.{stage * self.blocks + place}") for place in range(self.blocks)
        ]

    def modules(self) -> dict[int, nn.Module]:
        """Return the stages of this process, as torch wants them."""
        return {
            stage: Blocks([UnitModule(self.unit, one) for one in self.params(stage)])
            for stage in self.own
        }


class Blocks(nn.Module):
    """A stage as a module."""

    def __init__(self, units: list[UnitModule]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        for unit in self.units:
            x = unit(x, {})
        return x


# -- the runners ---------------------------------------------------------------------------------------------------


def fshard(pipeline: Pipeline, mesh: fs.Mesh) -> tuple[Step, Callable[[], list[Tensor]]]:
    """Return a step of ours, and what gives the gradients that it has made."""
    unit, schedule, task = pipeline.unit, pipeline.schedule, pipeline.task

    def stage(params: list[Params], x: Tensor) -> Tensor:
        for own in params:
            x = unit(own, x, {})
        return x

    def first(params: list[Params], microbatch: tuple[Tensor, Tensor]) -> Tensor:
        return stage(params, microbatch[0])

    run = fs.pipeline.pipelined(
        [first] + [stage] * (schedule.stages - 1), schedule, ours_to_minimise, mesh=mesh
    )
    params = [
        pipeline.params(number) if number in pipeline.own else None
        for number in range(schedule.stages)
    ]
    x, target = (
        tensor
        if stage in pipeline.own
        else tensor.new_empty(()).expand(tensor.shape)  # as torch's: who does not need it
        for tensor, stage in zip(pipeline.data(), (0, schedule.stages - 1), strict=True)
    )
    found: Any = None

    def step() -> Tensor | None:
        nonlocal found
        found = None
        found = run(
            params,
            list(zip(x.chunk(task.microbatches), target.chunk(task.microbatches), strict=True)),
        )
        return found.loss

    def gradients() -> list[Tensor]:
        return [
            g for stage in pipeline.own for block in found.gradients[stage] for g in block.values()
        ]

    return step, gradients


def ours_to_minimise(y: Tensor, microbatch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(y, microbatch[1])


def torchs(pipeline: Pipeline, mesh: fs.Mesh) -> tuple[Step, Callable[[], list[Tensor]]]:
    """Return a step of torch's, and what gives the gradients that it has made."""
    return torchs_of(pipeline, pipeline.modules())


def torchs_of(
    pipeline: Pipeline, modules: dict[int, nn.Module]
) -> tuple[Step, Callable[[], list[Tensor]]]:
    """Return the same for stages that the caller has."""
    chunks, make = SCHEDULES[pipeline.name]
    count = pipeline.n * chunks
    stages = [
        PipelineStage(module, stage, count, torch.device(pipeline.device))
        for stage, module in modules.items()
    ]
    run = make(stages if chunks > 1 else stages[0], pipeline.task.microbatches, loss_fn=F.mse_loss)
    x, target = pipeline.data()
    inputs, targets = [x] * (0 in modules), target if count - 1 in modules else None

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        for module in modules.values():
            module.zero_grad()
        run.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return torch.stack(losses).mean() if losses else None

    def gradients() -> list[Tensor]:
        return [
            p.grad for module in modules.values() for p in module.parameters() if p.grad is not None
        ]

    return step, gradients


# -- what stages cost alone ----------------------------------------------------------------------------------------


def bound(pipelines: list[Pipeline], cores: int) -> list[float]:
    """Return the seconds in which each schedule could be done at best, by what its stages cost now, without any messages.

    As many processes measure at a time as there are cores.  No schedule is faster than all its work on all cores.
    """
    own: dict[int, tuple[float, float, float]] = {}
    rank = dist.get_rank()
    for turn in range(-(-dist.get_world_size() // cores)):
        dist.barrier()
        if rank // cores == turn:
            own = {rank: _block_costs(pipelines[0])}
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, own)
    costs = {place: one for table in tables for place, one in table.items()}
    return [_best(pipeline, costs, cores) for pipeline in pipelines]


def _best(pipeline: Pipeline, costs: dict[int, tuple[float, float, float]], cores: int) -> float:
    schedule = pipeline.schedule
    f, i, w = (
        [costs[place][kind] * pipeline.blocks for place in schedule.placement] for kind in range(3)
    )
    alone = schedule.simulate(forward=f, backward_input=i, backward_weight=w).makespan
    return max(float(alone), sum(f + i + w) * schedule.microbatches / cores)


def _block_costs(pipeline: Pipeline, times: int = 5) -> tuple[float, float, float]:
    """Return the seconds of F, I and W of a block, by autograd alone; gradients are added to those that are there."""
    module = UnitModule(pipeline.unit, pipeline.params(0)[0])
    x = pipeline.data()[0][: pipeline.task.rows]
    rows: list[tuple[float, float, float]] = []
    for _ in range(times):
        given, clock = x.clone().requires_grad_(), [time.perf_counter()]
        y = module(given, {})
        clock.append(time.perf_counter())
        torch.autograd.grad(y, given, x, retain_graph=True)
        clock.append(time.perf_counter())
        y.backward(x)
        clock.append(time.perf_counter())
        f, i, b = (after - before for before, after in pairwise(clock))
        rows.append((f, i, max(b - i, 0.0)))
    f, i, w = (median(row[kind] for row in rows[1:]) for kind in range(3))
    return f, i, w
