"""The numbers of programs with fewer layers or microbatches than a plan has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, cast

from torch import Tensor

from fshard.memory.kinds import mark
from fshard.mesh.layout import map_leaves
from fshard.mesh.layout.make import make_mesh
from fshard.parallelism.value import Parallelism
from fshard.plan.cluster import Cluster
from fshard.plan.cost import Cost, DeviceCost, cost_on_mesh
from fshard.plan.program import LayeredModel
from fshard.plan.trace import PURPOSES
from fshard.transforms.train_step import TrainStep

LOSS = "loss"
"""The mark of each microbatch's loss in a program."""


@dataclass(frozen=True)
class ProgramCost:
    """The time and the memory of a plan's program.

    Args:
        seconds: of a step.
        memory: bytes of the fullest device, by purpose.
    """

    seconds: float
    memory: dict[str, int]

    @property
    def peak(self) -> int:
        """The bytes of the fullest device."""
        return sum(self.memory.values())


def cost_of_short_program(
    model: LayeredModel, plan: Parallelism, cluster: Cluster, steps: int, layers: int
) -> Cost:
    """Return the cost of the program of some layers, in which each loss is marked."""
    losses = count()

    def marked_loss(*arguments: Any) -> Tensor:
        mark(f"{LOSS} {next(losses)}")
        return model.loss_of(*arguments)

    mesh = make_mesh(plan.axes, runtime="abstract")
    program = model.program(model.build(layers), plan, mesh, marked_loss)
    rows = plan.rows_of_step
    batch = map_leaves(lambda x: x.new_empty((rows, *x.shape[1:])), model.batch)
    arguments = [*program.arguments, batch]
    step = cast(TrainStep, program.step)
    return cost_on_mesh(step, arguments, mesh, cluster, steps=steps)


def peaks(device: DeviceCost) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes of a device at its peaks before the update, and in it, by purpose."""
    names = [event.name for event in device.used.timeline]
    update = names.index("update")
    phases = (device.used.timeline[:update], device.used.timeline[update:])
    operations = device.operations
    of_update = [event.unit == "update" for event in operations]
    first = of_update.index(True) if True in of_update else len(operations)
    parts = (operations[:first], operations[first:])
    peaks = list[dict[str, float]]()
    for marked, part in zip(phases, parts, strict=True):
        peak = max([event.peak for event in marked])
        fullest = max([event.memory for event in part], key=sum, default=(0,) * len(PURPOSES))
        sizes: dict[str, float] = dict(zip(PURPOSES, fullest, strict=True))
        sizes["under way"] = peak - sum(fullest)
        peaks.append(sizes)
    before_update, in_update = peaks
    return before_update, in_update
