"""`PlanEstimate`: what a plan of a model needs, and how long it takes, from the costs of its layers.

mesh      pipe (stages)  >  data (batch, ZeRO)  >  expert, seq, model (layers), innermost
memory    of the fullest device: parameters, gradients, state, and the larger of activations in flight and the update's casts
time      the schedule of stages, which waits for messages and gathers; then reductions, the update and gathers
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fshard.booster.hybrid import HybridParallelPlugin
from fshard.copying import copied
from fshard.errors import PlanError
from fshard.memory.state import GROUPS, LARGEST
from fshard.mesh.layout import Mesh, map_leaves
from fshard.mesh.layout.make import make_mesh
from fshard.plan.cluster import Cluster
from fshard.plan.cost import Cost, cost
from fshard.plan.layers import LayerCost, LayerTracer, ModelCost
from fshard.plan.model_plan import ModelPlan


@dataclass(frozen=True)
class PlanEstimate:
    """The time and the memory of a plan.

    Args:
        plan: it.
        tracer: of the model's layers, on a machine.
    """

    plan: ModelPlan
    tracer: LayerTracer

    @property
    def model(self) -> ModelCost:
        """The costs of the layers, and of what is around them, for a microbatch."""
        return self.tracer.cost(self.plan)

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.tracer.cluster

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.tracer.model.layers

    @cached_property
    def stages(self) -> list[LayerCost]:
        """The cost of each stage for a microbatch; the first and the last have a layer less where they do not divide."""
        count = self.plan.pipeline * self.plan.chunks
        each, more = divmod(self.layers, count)
        begin = (count - more + 1) // 2
        sizes = [each + (begin <= stage < begin + more) for stage in range(count)]
        stages = [self.model.layer.times(size) for size in sizes]
        stages[0] += self.model.first
        stages[-1] += self.model.last
        return stages

    @cached_property
    def by_device(self) -> list[LayerCost]:
        """The sum of the stages of each device along the pipeline."""
        sums = [LayerCost() for _ in range(self.plan.pipeline)]
        for stage, coordinate in zip(self.stages, self.plan.of_stages().placement, strict=True):
            sums[coordinate] += stage
        return sums

    @property
    def in_flight(self) -> int:
        """The microbatches whose activations the first device has at once, at least: see `pipeline_schedule`."""
        stages, count = self.plan.pipeline, self.plan.microbatches
        if stages == 1 or self.plan.schedule in ("v-half", "v-min", "dualpipe-v"):
            return 1
        return count if self.plan.schedule in ("gpipe", "bfs") else min(stages, count)

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Return the bytes of the fullest device, by purpose."""
        return max(
            map(self._memory_of, range(self.plan.pipeline)), key=lambda sizes: sum(sizes.values())
        )

    @property
    def peak(self) -> int:
        """The bytes of the fullest device."""
        return sum(self.memory().values())

    def _memory_of(self, coordinate: int) -> dict[str, int]:
        plan, cost = self.plan, self.by_device[coordinate]
        in_stages = plan.pipeline > 1
        sharded = [plan.zero_stage >= stage for stage in (3, 2, 1)]  # parameters, gradients, state
        sharded[1] &= not in_stages  # there they are reduced after the last microbatch
        sizes = (
            cost.parameters,
            cost.sums if plan.microbatches > 1 else cost.gradients,
            cost.state,
        )
        parameters, gradients, state = (
            size // plan.data if is_sharded else size
            for size, is_sharded in zip(sizes, sharded, strict=True)
        )
        unit = (
            max(stage.parameters for stage in self.stages)
            if in_stages
            else self.model.layer.parameters
        )
        units = min(plan.chunks, 2) if in_stages else 2
        casts = cost.casts // (plan.data if sharded[2] else 1)
        activations = int(
            self._simulation.peak_activations[coordinate] if in_stages else self.stages[0].saved
        )
        activations += self.workspace(coordinate)
        if (
            plan.state_memory == "host"
        ):  # three groups are on the device, each of a part of the state or one large leaf
            leaf = max(self.model.first.state, self.model.last.state) // (
                plan.data if sharded[2] else 1
            )
            casts, state = casts + 3 * max(min(state // GROUPS, LARGEST), leaf), 0
        return {
            "parameters": parameters,
            "gradients": gradients,
            "state": state,
            "unsharded": units * unit if sharded[0] and plan.data > 1 else 0,
            **({"activations": activations} if activations >= casts else {"update": casts}),
        }

    def workspace(self, coordinate: int) -> int:
        """Return the bytes beside the activations in flight.

        Activations of what is after the layers are freed before a layer runs. In stages a microbatch's gradients are kept until
        its backward ends, when most of its activations are free.
        """
        layer, last, schedule = self.model.layer, self.model.last, self.plan.of_stages()
        size = (
            max(layer.workspace - last.saved, last.workspace, 0)
            if coordinate == schedule.placement[-1]
            else layer.workspace
        )
        if self.plan.pipeline == 1:
            return size
        stages = [
            cost
            for cost, device in zip(self.stages, schedule.placement, strict=True)
            if device == coordinate
        ]
        return size + max(0, *(stage.gradients - stage.saved + layer.saved for stage in stages))

    # -- time -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _simulation(self) -> Any:
        """The run of the schedule, with the gathers and reductions of ZeRO-3 beside the computation."""
        is_sharded = self.plan.zero_stage == 3
        exchanges = [
            self._exchange(stage.parameters) if is_sharded else 0.0 for stage in self.stages
        ]
        forward = [
            max(stage.forward, gather) for stage, gather in zip(self.stages, exchanges, strict=True)
        ]
        backward = [
            max(stage.backward, 2 * gather)
            for stage, gather in zip(self.stages, exchanges, strict=True)
        ]
        halves = [x / 2 for x in backward]
        costs: dict[str, Any] = {
            "forward": forward,
            "backward_input": halves,
            "backward_weight": halves,
        }
        return self.plan.of_stages().simulate(
            **costs, send=self._message, activation=[stage.saved for stage in self.stages]
        )

    @property
    def _message(self) -> float:
        """The seconds of a message from one stage to the next."""
        if self.plan.pipeline == 1:
            return 0.0
        _, bandwidth, latency = self.cluster.level_between(
            0, self.plan.devices // self.plan.pipeline
        )
        return latency + self.model.message / bandwidth

    def _exchange(self, size: float, axis: str = "data") -> float:
        """Return the seconds in which devices along an axis gather bytes of this size, or reduce and scatter them."""
        n = self.mesh.get(axis, 1)
        if n == 1:
            return 0.0
        _, bandwidth, latency = self._levels[axis]
        return latency * (n - 1).bit_length() + size * (n - 1) / n / bandwidth

    @cached_property
    def _levels(self) -> dict[str, tuple[int, float, float]]:
        mesh = make_mesh(self.mesh, runtime="abstract")
        return {
            axis: self.cluster.level(mesh, (axis,))
            for axis in ("replica", "data")
            if axis in self.mesh
        }

    def approximate_seconds(self) -> float:
        """Return the seconds of a step by a formula: the work of the slowest device, and the bubble of its schedule."""
        plan, slowest = self.plan, max(cost.forward + cost.backward for cost in self.by_device)
        bubble = {
            "zb-h1": 1 / 3,
            "zb-h2": 0.0,
            "zbv": 1 / 6,
            "dualpipe-v": 1 / 6,
            "interleaved": 1 / plan.chunks,
            "bfs": 1 / plan.chunks,
        }
        idle = (plan.pipeline - 1) * bubble.get(plan.schedule, 1.0)
        return slowest * (plan.microbatches + idle) + sum(self._after().values())

    def _after(self) -> dict[str, float]:
        """Return the seconds of sums over microbatches, and those after the last backward."""
        plan, rate = self.plan, self.cluster.bandwidth * self.cluster.efficiency.memory
        slowest = max(self.by_device, key=lambda cost: cost.parameters)
        has_sums = plan.microbatches > 1
        to_host = slowest.state / self.cluster.host if plan.state_memory == "host" else 0.0
        added = (slowest.gradients + 2 * slowest.sums) * plan.microbatches / rate
        gradients = slowest.sums if has_sums else slowest.gradients
        reduce = self._exchange(gradients) if plan.zero_stage < 3 else 0.0
        reduce *= 2 if plan.zero_stage == 0 else 1
        reduce += 2 * self._exchange(gradients / (plan.data if plan.zero_stage else 1), "replica")
        gather = self._exchange(slowest.parameters) if plan.zero_stage in (1, 2) else 0.0
        beside = min(stage.backward for stage in self.stages)  # the last microbatch's
        return {
            "sums of gradients": added if has_sums else 0.0,
            "reduction": max(reduce - beside, 0.0),
            "update": max(slowest.update, to_host) / (plan.data if plan.zero_stage else 1),
            "gather": gather,
        }

    @cached_property
    def terms(self) -> dict[str, float]:
        """The seconds of a step, by what they are for."""
        work = max(cost.forward + cost.backward for cost in self.by_device) * self.plan.microbatches
        total = work if self.plan.pipeline == 1 and self.plan.zero_stage < 3 else float(self._total)
        return {"layers": work, "waits": max(total - work, 0.0), **self._after()}

    @property
    def _total(self) -> float:
        return float(self._simulation.makespan)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.terms.values())

    @property
    def flops(self) -> float:
        """The operations of all devices in a step, with those that are recomputed."""
        devices = self.plan.devices // self.plan.pipeline
        return sum(cost.flops for cost in self.by_device) * self.plan.microbatches * devices

    def utilization(self, flops: float | None = None) -> float:
        """Return the part of peak operations in bfloat16 that are done; of the model's alone, if their number is given."""
        return (flops or self.flops) / (
            self.seconds * self.plan.devices * self.cluster.peak("bf16")
        )

    def explain(self) -> str:
        """Return the terms of time and memory as text."""
        times, sizes = self.terms, self.memory()
        rows = [f"{name:22}{1e3 * x:12,.1f} ms" for name, x in times.items()]
        rows += [f"{name:22}{x / 1e9:12,.2f} GB" for name, x in sizes.items()]
        total = (
            f"{'step':22}{1e3 * self.seconds:12,.1f} ms",
            f"{'peak':22}{self.peak / 1e9:12,.2f} GB",
        )
        return "\n".join((*rows[: len(times)], total[0], *rows[len(times) :], total[1]))

    # -- the program ----------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh, for `make_mesh`."""
        return self.plan.mesh

    def save(self, path: str | Path) -> None:
        """Write the plan as a TOML file: see `ModelPlan.load`."""
        self.plan.save(path)

    def plugin(self, sample: Any = None) -> HybridParallelPlugin:
        """Return the plugin of a Booster: see `ModelPlan.plugin`."""
        return self.plan.plugin(blocks=self.tracer.model.blocks, sample=sample)

    def build(self, model: nn.Module, *, mesh: Mesh | None = None) -> tuple[Any, ...]:
        """Return the step that trains a model by the plan, with the optimizer and the loss of the search; and its arguments.

        These are the parameters, the state, and buffers if the model has any: see `train_step`.

        Args:
            model: the module, with values; it is not changed.
            mesh: with the sizes of the plan; default: `make_mesh(plan.mesh)`.
        """
        mesh = make_mesh(self.mesh) if mesh is None else mesh
        if dict(mesh.shape) != self.mesh:
            raise PlanError(
                f"plan.build: mesh must have the sizes of the plan, {self.mesh}; got {mesh}."
            )
        layered, module = (
            self.tracer.model,
            copied(model, {id(x): x for x in (*model.parameters(), *model.buffers())}),
        )
        make = layered.program if self.plan.pipeline == 1 else layered.staged_program
        step, arguments = make(module, self.plan, mesh)
        return step, *arguments

    def cost(self, model: nn.Module) -> Cost:
        """Return the cost of the program of all layers: see `fs.plan.cost`. The values of the model do not matter."""
        step, *arguments = self.build(model, mesh=make_mesh(self.mesh, runtime="abstract"))
        rows = self.plan.rows_of_step
        batch = map_leaves(lambda x: x.new_empty((rows, *x.shape[1:])), self.tracer.model.batch)
        return cost(step, *arguments, batch, cluster=self.cluster)

    def scaled(self, devices: int) -> PlanEstimate:
        """Return the plan on fewer devices: see `ModelPlan.scaled`."""
        return replace(self, plan=self.plan.scaled(devices))

    def excess(self) -> str:
        """Return by how much memory is passed, and for what; "" if the plan fits."""
        over = self.peak - self.cluster.memory
        name, size = max(self.memory().items(), key=lambda pair: pair[1])
        return (
            ""
            if over <= 0
            else f"{over / 1e9:,.2f} GB over the memory; {size / 1e9:,.2f} are for {name}"
        )
