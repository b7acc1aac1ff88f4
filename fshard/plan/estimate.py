"""`PlanEstimate`: the memory and the time of a plan: its program's, or by formulas.

program     shorter programs of the plan, to which layers and microbatches are added: `shortened`
formulas    of the costs of a model's layers, by which a search leaves out most plans

    memory    of the fullest device: parameters, gradients, state, and the larger of activations
              and casts of the update
    time      the schedule of stages, which waits for messages and gathers; then reductions, the
              update and gathers

The formulas are in `formulas`; here are their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, cast

from torch import nn

from fshard.copying import copied
from fshard.errors import PlanError
from fshard.mesh.layout import Mesh, map_leaves
from fshard.mesh.layout.make import make_mesh
from fshard.parallelism.value import Parallelism
from fshard.pipeline.schedule.actions import Kind
from fshard.plan.cluster import Cluster, NetworkLevel
from fshard.plan.cost import Cost, cost
from fshard.plan.formulas import (
    bytes_of_device,
    costs_of_devices,
    costs_of_stages,
    exchange_seconds,
    idle_microbatches,
    layers_of_stages,
    least_bytes_of_device,
    microbatches_in_flight,
    reduces_in_backward,
    shards_params,
    sum_seconds,
    update_seconds,
    workspace_of_device,
)
from fshard.plan.layers import LayerCost, LayerTracer, ModelCost
from fshard.plan.programs.shortened import (
    ProgramCost,
    ShortPrograms,
    cost_of_program,
    fewest_layers,
    layers_of_programs,
    microbatches_of_programs,
    steps_of_programs,
)
from fshard.plan.programs.staged import (
    cost_of_stages,
    data_of_program,
    short_programs,
    size_of_stages,
)
from fshard.plan.tables.layout import layout_text
from fshard.transforms.module.lazy import without_memory

LONGEST_PROGRAM = 256
"""The layers, times microbatches, that run for one plan at most: about ten seconds."""

KEPT_GRADIENTS = 0.6
"""The bytes of gradients that a backward in two parts keeps between them, by those of activations.

These are of the outputs of products. Of drawn models they were 0.2 (experts), 0.4 (with attention's
dropout), 0.6 (a Llama) to 1.2 (a small one), and 1.7 where 8 devices share tokens: a formula that
is too large rejects plans that fit, and the program of a plan has the true bytes.
"""


@dataclass(frozen=True, repr=False)
class PlanEstimate:
    """The time and the memory of a plan: those of its program, if that is short enough to run.

    Args:
        plan: its sizes and options, with `data` as a number.
        tracer: of the model's layers, on a machine.
        by_formula: no program runs: see `program`.
    """

    plan: Parallelism
    tracer: LayerTracer = field(repr=False)
    by_formula: bool = False

    def __post_init__(self) -> None:
        if self.plan.data is None:
            raise PlanError(
                f"PlanEstimate: data of {self.plan} must be a number; got None. "
                "Give plan.on(devices)."
            )

    def __repr__(self) -> str:
        """Show the layout, and the numbers that are known: a debugger's look runs no program."""
        is_known = self.by_formula or "program" in vars(self)
        if not is_known:
            return f"PlanEstimate({layout_text(self.plan)})"
        by_formula = "~" if self.program is None else ""
        time = f"{by_formula}{self.seconds:.3g} s a step"
        memory = f"{by_formula}{self.peak / 1e9:,.3g} GB a device"
        return f"PlanEstimate({layout_text(self.plan)}: {time}, {memory})"

    # -- numbers of the model ---------------------------------------------------------------------

    @cached_property
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
        """The cost of each stage for a microbatch."""
        return costs_of_stages(self.model, self.layers_of_stages)

    @cached_property
    def layers_of_stages(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return layers_of_stages(self.layers, self.plan.stages, self.tracer.weights)

    @cached_property
    def by_device(self) -> list[LayerCost]:
        """The sum of the stages of each device along the pipeline."""
        return costs_of_devices(self.stages, self.plan.pipeline_schedule().placement)

    @property
    def in_flight(self) -> int:
        """The microbatches whose activations the first device has at once, at least."""
        return microbatches_in_flight(self.plan)

    @property
    def notes(self) -> list[str]:
        """Weights of linear layers that the plan leaves replicated, and why.

        With tensor=4 and 6 heads, for example, attention is not shared: 4 devices do not divide 6.
        """
        return self.tracer.notes(self.plan)

    # -- the program's numbers --------------------------------------------------------------------

    @property
    def program_size(self) -> int:
        """The layers, times microbatches, that run for the cost of the program."""
        if self._is_by_stages:
            return size_of_stages(self.plan, self._program_steps)
        return self._programs.size

    @cached_property
    def _programs(self) -> ShortPrograms:
        """The programs that run, if none is of four stages."""
        plan = self.plan
        least = fewest_layers(plan, has_experts=bool(self.tracer.model.experts))
        waiting = self._layers_behind_the_last_gradients
        if waiting < self.layers:
            least = max(least, waiting + 1)
        gradients = self.model.layer.parameters  # a gradient has the dtype of its parameter
        return ShortPrograms(
            layers=layers_of_programs(self.layers, plan, least, gradients),
            microbatches=microbatches_of_programs(plan, gradients),
            steps=self._program_steps,
        )

    @property
    def _layers_behind_the_last_gradients(self) -> int:
        """The layers whose gradients wait while those of what is after the layers are reduced.

        A model has a large head: while a layer's backward takes longer than its reduction, each
        layer shortens the queue of the network. It is never empty if a reduction takes longer.
        """
        if shards_params(self.plan) or not reduces_in_backward(self.plan):
            return 0
        layer = self.model.layer
        # A gradient that is no sum of several has the dtype, and the bytes, of its parameter.
        shortening = layer.backward - self._seconds_to_reduce(layer.parameters)
        if shortening <= 0:
            return 0
        return ceil(self._seconds_to_reduce(self.model.last.parameters) / shortening)

    @property
    def _is_by_stages(self) -> bool:
        """True if the program is costed from one of four stages, since that of all is longer."""
        if not self.plan.in_stages or shards_params(self.plan):
            return False
        return self.layers * cast(int, self.plan.microbatches) > size_of_stages(self.plan, 1)

    @cached_property
    def _program_steps(self) -> int:
        return steps_of_programs(self.plan, self.approximate_seconds())

    @cached_property
    def program(self) -> ProgramCost | None:
        """The cost of the program, from shorter ones; None if these are too long, or not wanted."""
        if self.by_formula or self.program_size > LONGEST_PROGRAM:
            return None
        model = self.tracer.model
        steps = self._program_steps
        if self._is_by_stages:
            layers = self.layers_of_stages
            known = self.tracer.measured_stages
            more = self._seconds_after_layers - self._with_few_data()._seconds_after_layers
            return cost_of_stages(model, self.plan, self.cluster, steps, layers, more, known)
        return cost_of_program(model, self.plan, self.cluster, self._programs)

    def _with_few_data(self) -> PlanEstimate:
        return replace(self, plan=replace(self.plan, data=data_of_program(self.plan)))

    @property
    def _seconds_after_layers(self) -> float:
        """The seconds of reductions, update and gathers, by the formulas."""
        terms = {**self._after_layers, "sums of gradients": 0.0}
        return sum(terms.values())

    @property
    def is_known(self) -> bool:
        """True if the cost of the program needs no run, since an equal one has run."""
        keys = short_programs(self.plan) if self._is_by_stages else [None]
        return all([key in self.tracer.measured_stages for key in keys])

    def memory(self) -> dict[str, int]:
        """Return the bytes of the fullest device, by purpose."""
        return self.formula_memory if self.program is None else self.program.memory

    @property
    def peak(self) -> int:
        """The bytes of the fullest device."""
        return sum(self.memory().values())

    @property
    def terms(self) -> dict[str, float]:
        """The seconds of a step, by what they are for.

        These are by the formulas; "other" is what the program takes beside them, or less.
        """
        if self.program is None:
            return self.formula_terms
        other = self.program.seconds - sum(self.formula_terms.values())
        return {**self.formula_terms, "other": other}

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.terms.values()) if self.program is None else self.program.seconds

    # -- memory -----------------------------------------------------------------------------------

    @cached_property
    def formula_memory(self) -> dict[str, int]:
        """The bytes of the fullest device by the formulas, by purpose."""
        by_device = [self._memory_of(coordinate) for coordinate in range(self.plan.pipeline)]
        return max(by_device, key=lambda sizes: sum(sizes.values()))

    def _memory_of(self, coordinate: int) -> dict[str, int]:
        in_flight = self.stages[0].saved
        if self.plan.in_stages:
            in_flight = self._most_in_flight(coordinate)
        activations = int(in_flight) + self.workspace(coordinate)
        device = self.by_device[coordinate]
        return bytes_of_device(self.plan, device, self.stages, self.model, activations)

    def _most_in_flight(self, coordinate: int) -> int:
        """Return the most bytes of activations in flight of a device along the pipeline.

        Between both parts of a backward it has those that a layer recomputes, and gradients too.
        """
        kept = [stage.saved for stage in self.stages]
        of_layer = self.tracer.cost(replace(self.plan, recompute="never")).layer.saved
        pending = round((1 + KEPT_GRADIENTS) * of_layer)
        held = most = 0
        for kind, stage, _ in self.plan.pipeline_schedule().rows[coordinate]:
            between_parts = pending * self.layers_of_stages[stage]
            if kind is Kind.F:
                held += kept[stage]
            elif kind is Kind.B:
                held -= kept[stage]
            elif kind is Kind.I:
                held += between_parts - kept[stage]
            elif kind is Kind.W:
                held -= between_parts
            most = max(most, held)
        return most

    def workspace(self, coordinate: int) -> int:
        """Return the bytes of a device beside the activations in flight."""
        placement = self.plan.pipeline_schedule().placement
        return workspace_of_device(self.plan, coordinate, self.stages, placement, self.model)

    def least_memory(self) -> int:
        """Return bytes that the fullest device has at least, without a simulation."""
        sizes = list[int]()
        for coordinate, device in enumerate(self.by_device):
            workspace = self.workspace(coordinate)
            layers = self.layers_of_stages
            size = least_bytes_of_device(
                self.plan, coordinate, device, self.model, layers, workspace
            )
            sizes.append(size)
        return max(sizes)

    # -- time -------------------------------------------------------------------------------------

    @cached_property
    def _simulation(self) -> Any:
        """The run of the schedule, with the exchanges of ZeRO-3 beside the computation."""
        forwards = list[float]()
        backwards = list[float]()
        for stage in self.stages:
            # A forward gathers parameters; a backward gathers them again, and reduces gradients.
            gather = self._exchange(stage.parameters) if shards_params(self.plan) else 0.0
            forwards.append(self._side_by_side(stage.forward, gather))
            backwards.append(self._side_by_side(stage.backward, 2 * gather))
        # Gradients of inputs and of weights are products of the same size.
        halves = [seconds / 2 for seconds in backwards]
        costs: dict[str, Any] = {
            "forward": forwards,
            "backward_input": halves,
            "backward_weight": halves,
        }
        saved = [stage.saved for stage in self.stages]
        schedule = self.plan.pipeline_schedule()
        return schedule.simulate(**costs, send=self._message_seconds, activation=saved)

    def _side_by_side(self, computation: float, collectives: float) -> float:
        """Return the seconds of a computation with collectives beside it, which slow it."""
        slowed = computation + self.cluster.efficiency.contention * collectives
        return max(slowed, collectives)

    @property
    def _message_seconds(self) -> float:
        """The seconds of a message from one stage to the next."""
        if not self.plan.in_stages:
            return 0.0
        distance = self.plan.devices // self.plan.pipeline  # "pipe" is the outermost axis
        level = self.cluster.level_between(0, distance, self.plan.devices)
        return level.latency + self.model.message / level.bandwidth

    def _exchange(self, size: float, axis: str = "data") -> float:
        """Return the seconds in which devices along an axis gather bytes, or reduce and scatter."""
        devices = self.mesh.get(axis, 1)
        if devices == 1:
            return 0.0
        level = self._levels[axis]
        return exchange_seconds(size, devices, level.bandwidth, level.latency)

    @cached_property
    def _levels(self) -> dict[str, NetworkLevel]:
        """The level of the network of each axis that reduces gradients."""
        mesh = make_mesh(self.mesh, runtime="abstract")
        axes = [axis for axis in ("replica", "data") if axis in self.mesh]
        return {axis: self.cluster.level(mesh, (axis,)) for axis in axes}

    def approximate_seconds(self) -> float:
        """Return the seconds of a step by a formula: the slowest device, and its idle time."""
        slowest = max([device.forward + device.backward for device in self.by_device])
        microbatches = cast(int, self.plan.microbatches) + idle_microbatches(self.plan)
        seconds = slowest * microbatches + sum(self._after_layers.values())
        return seconds * self.cluster.slowest(self.plan.devices)

    @cached_property
    def _after_layers(self) -> dict[str, float]:
        """The seconds of sums over microbatches, and those after the last backward."""
        largest = max(self.by_device, key=lambda device: device.parameters)
        bandwidth = self.cluster.bandwidth * self.cluster.efficiency.memory
        gathers_new_params = self.plan.zero_stage in (1, 2)
        return {
            "sums of gradients": sum_seconds(self.plan, largest, bandwidth),
            "reduction": self._reduction_seconds(largest),
            "update": update_seconds(self.plan, largest, self.cluster.host),
            "gather": self._exchange(largest.parameters) if gathers_new_params else 0.0,
        }

    def _reduction_seconds(self, device: LayerCost) -> float:
        """Return the seconds of reductions that are left when the last backward ends.

        Along "data" ZeRO scatters the sums, but for stage 0, which gathers them too; stage 3 has
        reduced them beside the backwards. Then what a device has is all-reduced along "replica".
        They begin with the last microbatch's backward, and run beside the shortest one.
        """
        has_sums = cast(int, self.plan.microbatches) > 1
        gradients = device.sums if has_sums else device.gradients
        backward = min([stage.backward for stage in self.stages])
        return self._side_by_side(backward, self._seconds_to_reduce(gradients)) - backward

    def _seconds_to_reduce(self, gradients: int) -> float:
        """Return the seconds in which all devices reduce some bytes of gradients."""
        plan = self.plan
        seconds = self._exchange(gradients) if plan.zero_stage < 3 else 0.0
        if plan.zero_stage == 0:
            seconds *= 2
        shard = gradients / (cast(int, plan.data) if plan.zero_stage else 1)
        return seconds + 2 * self._exchange(shard, "replica")

    @cached_property
    def formula_terms(self) -> dict[str, float]:
        """The seconds of a step by the formulas, by what they are for.

        Those of the layers are their operations, and the messages along each axis that these wait
        for.
        """
        slowest = max(self.by_device, key=lambda device: device.forward + device.backward)
        microbatches = cast(int, self.plan.microbatches)
        work = (slowest.forward + slowest.backward) * microbatches
        messages = dict[str, float]()
        for axes, seconds in slowest.exposed.items():
            messages[f"messages: {axes}"] = seconds * microbatches
        operations = work - sum(messages.values())
        # Without stages, and without gathers beside the layers, nothing waits.
        has_waits = self.plan.in_stages or shards_params(self.plan)
        total = float(self._simulation.makespan) if has_waits else work
        waits = max(total - work, 0.0)
        terms = {"layers": operations, **messages, "waits": waits, **self._after_layers}
        slowest_device = self.cluster.slowest(self.plan.devices)
        return {name: seconds * slowest_device for name, seconds in terms.items()}

    @property
    def flops(self) -> float:
        """The operations of all devices in a step, with those that are recomputed."""
        devices = self.plan.devices // self.plan.pipeline
        of_microbatch = sum([device.flops for device in self.by_device])
        return of_microbatch * cast(int, self.plan.microbatches) * devices

    @cached_property
    def model_flops(self) -> int:
        """The operations of the model in a step of all devices, without those recomputed.

        They are those of matrix products and attention in a forward and a backward, as traced on
        one device: operations that devices repeat, since they do not share a layer, count once. A
        backward counts as two forwards at most: see `LayerCost`.
        """
        first, layer, last, *_ = self.tracer.cost(Parallelism(data=1))
        of_sample = first.model_flops + self.layers * layer.model_flops + last.model_flops
        return of_sample * self.plan.rows_of_step

    @property
    def dtype(self) -> str:
        """The dtype of most products, of whose peak the utilization is a part: "bf16"."""
        return self.tracer.cost(Parallelism(data=1)).dtype

    def utilization(self, flops: float | None = None) -> float:
        """Return the model flops utilization: the part of the peak that the model's operations are.

        Those that are recomputed do not count: see `model_flops`. The peak is that in `dtype`.

        Args:
            flops: instead of these.
        """
        done = flops or self.model_flops
        return done / (self.seconds * self.plan.devices * self.cluster.peak(self.dtype))

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens of all devices in a second; None if the batch has no token ids."""
        of_sample = self.tracer.model.tokens
        if of_sample is None:
            return None
        return of_sample * self.plan.rows_of_step / self.seconds

    # -- texts ------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return the terms of time and memory as text, and the notes."""
        rows = [_milliseconds(name, seconds) for name, seconds in self.terms.items()]
        rows.append(_milliseconds("step", self.seconds))
        rows += [_gigabytes(name, size) for name, size in self.memory().items()]
        rows.append(_gigabytes("peak", self.peak))
        return "\n".join([*rows, *self.notes])

    def excess(self) -> str:
        """Return by how much memory is passed, and for what; "" if the plan fits."""
        over = self.peak - self.cluster.memory
        if over <= 0:
            return ""
        name, size = max(self.memory().items(), key=lambda pair: pair[1])
        return f"{over / 1e9:,.2f} GB over the memory; {size / 1e9:,.2f} are for {name}"

    # -- the program ------------------------------------------------------------------------------

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh, for `make_mesh`."""
        return self.plan.axes

    def save(self, path: str | Path) -> None:
        """Write the plan as a TOML file: see `Parallelism.load`."""
        self.plan.save(path)

    def plugin(self, sample: Any = None) -> Any:
        """Raise, naming the plugin that takes a plan."""
        raise PlanError(
            "plan.plugin: write fs.HybridParallelPlugin(best.plan, blocks="
            f"{self.tracer.model.blocks!r}, sample=sample), or fs.Booster(best.plan)."
        )

    def build(self, model: nn.Module, *, mesh: Mesh | None = None) -> tuple[Any, ...]:
        """Return the step that trains a model by the plan, and its arguments.

        It has the optimizer and the loss of the search. The arguments are the parameters, the
        state, and buffers if the model has any: see `train_step`.

        Args:
            model: the module, with values; it is not changed.
            mesh: with the sizes of the plan; default: `make_mesh(plan.axes)`.
        """
        mesh = make_mesh(self.mesh) if mesh is None else mesh
        if dict(mesh.shape) != self.mesh:
            raise PlanError(
                f"plan.build: mesh must have the sizes of the plan, {self.mesh}; got {mesh}."
            )
        if mesh.runtime != "abstract" and without_memory(model):
            raise PlanError(
                "plan.build: model must have values; got tensors on the meta device. "
                'Give model.to_empty(device="cpu") with values.'
            )
        # The layers of the copy recompute; the tensors are shared.
        tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
        program = self.tracer.model.program(copied(model, tensors), self.plan, mesh)
        return program.step, *program.arguments

    def cost(self, model: nn.Module) -> Cost:
        """Return the cost of the program of all layers: see `fs.plan.cost`."""
        step, *arguments = self.build(model, mesh=make_mesh(self.mesh, runtime="abstract"))
        rows = self.plan.rows_of_step
        batch = map_leaves(lambda x: x.new_empty((rows, *x.shape[1:])), self.tracer.model.batch)
        return cost(step, *arguments, batch, cluster=self.cluster)

    def scaled(self, devices: int) -> PlanEstimate:
        """Return the plan on fewer devices: see `Parallelism.scaled`."""
        return replace(self, plan=self.plan.scaled(devices))


def _milliseconds(name: str, seconds: float) -> str:
    return f"{name:22}{1e3 * seconds:12,.1f} ms"


def _gigabytes(name: str, size: int) -> str:
    return f"{name:22}{size / 1e9:12,.2f} GB"
