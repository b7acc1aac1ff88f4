"""The costs of one layer of a model, and of what is before and after the layers, by one trace.

    forward    first ──> layer ──> last, loss        backward    last ──> layer ──> first        update

Repeated layers are traced once, see `layer_trace`, and multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fshard.mesh.layout import Mesh
from fshard.mesh.layout.counting import Purpose
from fshard.mesh.layout.make import make_mesh
from fshard.parallelism.value import Parallelism
from fshard.plan.cluster import Cluster
from fshard.plan.layer_trace import LayerTrace, TracedStep
from fshard.plan.program import LayeredModel
from fshard.plan.timing import Times, times_of
from fshard.plan.trace import PURPOSES, CollectiveStart, Operation, dtype_of_products


@dataclass(frozen=True)
class LayerCost:
    """The needs of some layers for one microbatch, on one of the devices that share them.

    Args:
        forward, backward, update: seconds; the update is that of all their parameters.
        exposed: seconds of forward and backward that wait for messages, by axes: "data+model".
        flops: operations of matrix products and attention, with those that are recomputed.
        model_flops: these without those that are recomputed: see `_model_flops`.
        parameters, gradients, state: bytes.
        of_experts: bytes of parameters, those that devices along "expert" have different ones of.
        sums: bytes of gradients that are added over microbatches, in at least 32 bits.
        casts: bytes that the update has for a while, such as gradients in 32 bits.
        saved: bytes of activations, from the forward to the backward.
        workspace: bytes besides these while the layers run.
    """

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    flops: int = 0
    model_flops: int = 0
    parameters: int = 0
    of_experts: int = 0
    gradients: int = 0
    sums: int = 0
    state: int = 0
    casts: int = 0
    saved: int = 0
    workspace: int = 0
    exposed: Mapping[str, float] = field(default_factory=dict[str, float])

    def __add__(self, other: LayerCost) -> LayerCost:
        others = vars(other)
        sums = dict[str, Any]()
        for name, value in vars(self).items():
            if name not in ("workspace", "exposed"):
                sums[name] = value + others[name]
        exposed = dict(self.exposed)
        for axes, seconds in other.exposed.items():
            exposed[axes] = exposed.get(axes, 0.0) + seconds
        workspace = max(self.workspace, other.workspace)  # one runs after the other
        return LayerCost(**sums, workspace=workspace, exposed=exposed)

    def times(self, count: int) -> LayerCost:
        """Return the cost of a number of such layers."""
        products = dict[str, Any]()
        for name, value in vars(self).items():
            if name not in ("workspace", "exposed"):
                products[name] = value * count
        exposed = {axes: seconds * count for axes, seconds in self.exposed.items()}
        return LayerCost(**products, workspace=self.workspace, exposed=exposed)


class LayerWeights(NamedTuple):
    """The bytes of the parameters before the layers, of a layer, and after them, on one device."""

    first: int
    layer: int
    last: int


class ModelCost(NamedTuple):
    """The costs of what is before the layers, of a layer, and of what is after them.

    The loss is after them. `message` is the number of bytes that one layer sends to the next,
    `dtype` that of most products.
    """

    first: LayerCost
    layer: LayerCost
    last: LayerCost
    message: int
    dtype: str


# -- the tracer ------------------------------------------------------------------------------------


class LayerTracer:
    """The costs of a model's layers on a machine, in all plans. Each step is traced once.

    A step is traced with two samples and with four. Where both have the same operations, sizes are
    linear in the samples, and steps of other numbers are derived.
    """

    def __init__(self, model: LayeredModel, cluster: Cluster) -> None:
        self.model, self.cluster = model, cluster
        self.traces = dict[Parallelism, LayerTrace]()
        self.steps = dict[Parallelism, TracedStep]()
        self.costs = dict[Parallelism, ModelCost]()
        # Of programs of few stages: see `fshard.plan.programs.staged`.
        self.measured_stages = dict[Parallelism, Any]()

    def cost(self, plan: Parallelism) -> ModelCost:
        """Return the costs of a microbatch, on the devices that share it."""
        key = plan.of_layer()
        if key not in self.costs:
            step = self._step(key)
            mesh = make_mesh(key.axes, runtime="abstract")
            first, layer, last = costs_of(step, self.cluster.steady, mesh)
            shares_tokens = plan.sequence_mode == "megatron"
            token_devices = plan.tensor if shares_tokens else plan.sequence
            message = self._message * plan.rows // token_devices
            operations = [event for event in step.events if isinstance(event, Operation)]
            dtype = dtype_of_products(operations)
            self.costs[key] = ModelCost(first, layer, last, message, dtype)
        return self.costs[key]

    @cached_property
    def weights(self) -> LayerWeights:
        """The parameters by which the model is split into stages."""
        model = self.cost(Parallelism(data=1))
        return LayerWeights(model.first.parameters, model.layer.parameters, model.last.parameters)

    def notes(self, plan: Parallelism) -> list[str]:
        """Return which weights of linear layers no device shares with others, and why."""
        return self._trace(plan.of_layer()).notes()

    def _step(self, key: Parallelism) -> TracedStep:
        two = self._traced(replace(key, rows=2))
        four = self._traced(replace(key, rows=4))
        if key.rows == 2:
            return two
        if key.rows == 4:
            return four
        if _names_of(two) == _names_of(four):
            return _between(two, four, (key.rows - 2) / 2)
        # Such as attention of 6 heads on 4 devices: samples are sharded, if there are as many.
        return self._traced(key)

    def _trace(self, key: Parallelism) -> LayerTrace:
        shared = replace(key, recompute="never", rows=1)
        if shared not in self.traces:
            self.traces[shared] = LayerTrace(self.model, shared)
        return self.traces[shared]

    def _traced(self, key: Parallelism) -> TracedStep:
        trace = self._trace(key)
        if key not in self.steps:
            self.steps[key] = trace.record(rows=key.rows, recompute=key.recompute)
        return self.steps[key]

    @cached_property
    def _message(self) -> int:
        """The bytes that a layer is called with, for a sample."""
        model = self.model.build(1)
        sizes = list[int]()

        def measure(_: Any, arguments: tuple[Any, ...]) -> None:
            sizes.append(sum([x.nbytes for x in arguments if isinstance(x, Tensor)]))

        model.get_submodule(f"{self.model.blocks}.0").register_forward_pre_hook(measure)
        with torch.no_grad():
            self.model.call(model, self.model.batch)
        return sizes[0]


def _names_of(step: TracedStep) -> list[str]:
    """Return the names of operations and collectives, and the kinds of other events."""
    names = list[str]()
    for event in step.events:
        if isinstance(event, Operation):
            names.append(event.name)
        elif isinstance(event, CollectiveStart):
            names.append(event.row.collective)
        else:
            names.append(type(event).__name__)
    return names


def _between(x: Any, y: Any, fraction: float) -> Any:
    """Return a value, or a tree of them, on the line through two: x is at 0, y at 1."""
    if isinstance(x, dict):
        tree = cast(dict[str, Any], x)
        return {key: _between(value, y[key], fraction) for key, value in tree.items()}
    if isinstance(x, list | tuple):
        pairs = zip(cast(list[Any], x), y, strict=True)
        values = [_between(a, b, fraction) for a, b in pairs]
        is_named = isinstance(x, tuple) and type(x) is not tuple
        return type(x)(*values) if is_named else type(x)(values)
    if x == y:  # a name too
        return x
    return type(x)(x + (y - x) * fraction)


# -- the costs of a trace --------------------------------------------------------------------------

FORWARD = ("first", "layer", "last")
"""The phases of a forward, in order. Parameters, sums and costs are of these."""

BACKWARD_OF = {"first": "first backward", "layer": "layer backward", "last": "backward"}
"""The phase of the backward of each."""

PHASE_AFTER = {"first": "layer", "layer": "last", "last": "backward"}
"""The phase that follows each."""

AFTER_GRADIENTS = 1
"""The operations of a step that follow its last gradient: it converts the loss."""


def costs_of(step: TracedStep, cluster: Cluster, mesh: Mesh) -> list[LayerCost]:
    """Return the costs of the phases "first", "layer" and "last"."""
    operations = [event for event in step.events if isinstance(event, Operation)]
    times = times_of({0: step.events}, cluster, mesh)[0]
    seconds = _seconds_of_phases(times, operations)
    gradients = _most_gradients(operations)
    casts = _bytes_of_update(step, operations) - gradients
    total = sum(step.parameters.values())

    costs = list[LayerCost]()
    for phase in FORWARD:
        # What a step has for all parameters alike is divided by their bytes.
        share = step.parameters[phase] / max(total, 1)
        phases = (phase, BACKWARD_OF[phase])
        saved = step.active[PHASE_AFTER[phase]] - step.active[phase]
        cost = LayerCost(
            forward=seconds[phase],
            backward=seconds.get(BACKWARD_OF[phase], 0.0),
            update=seconds["update"] * share,
            flops=sum([event.flops for event in operations if event.unit in phases]),
            model_flops=_model_flops(phase, operations),
            parameters=step.parameters[phase],
            of_experts=step.of_experts[phase],
            gradients=round(gradients * share),
            sums=step.sums[phase],
            state=round(step.state * share),
            casts=round(casts * share),
            saved=saved,
            workspace=_workspace(phase, step, operations),
            exposed=_exposed_of_phases(times, phases, mesh),
        )
        costs.append(cost)
    return costs


def _exposed_of_phases(times: Times, phases: Sequence[str], mesh: Mesh) -> dict[str, float]:
    """Return the seconds in which the operations of some phases wait for messages, by axes.

    Axes of one device have no messages.
    """
    exposed = dict[str, float]()
    for phase in phases:
        for axes, seconds in times.exposed_by_unit[phase].items():
            sent_along = [axis for axis in axes if mesh.shape[axis] > 1]
            if not sent_along:
                continue
            name = "+".join(sent_along)
            exposed[name] = exposed.get(name, 0.0) + seconds
    return exposed


def _seconds_of_phases(times: Times, operations: list[Operation]) -> dict[str, float]:
    """Return the time from the begin of each phase to that of the next one, or the step's end."""
    phases = [*dict.fromkeys([event.unit for event in operations])]
    begins = [times.begins[phase] for phase in phases]
    seconds = dict[str, float]()
    for phase, (begin, end) in zip(phases, pairwise([*begins, times.step]), strict=True):
        seconds[phase] = end - begin
    return seconds


def _model_flops(phase: str, operations: list[Operation]) -> int:
    """Return the operations of a phase in a forward and a backward, none of them recomputed.

    A backward needs two products for one of the forward, or fewer: of frozen weights, or of an
    input without a gradient. What is more is recomputed: fused attention computes its scores again,
    so that its backward has 2.5 times the operations of the forward.
    """
    forward = sum([event.flops for event in operations if event.unit == phase])
    backward = sum([event.flops for event in operations if event.unit == BACKWARD_OF[phase]])
    return forward + min(backward, 2 * forward)


def _most_gradients(operations: list[Operation]) -> int:
    """Return the most bytes of gradients before the update."""
    sizes = [_bytes(event, "gradients") for event in operations if event.unit != "update"]
    return max(sizes)


def _bytes_of_update(step: TracedStep, operations: list[Operation]) -> int:
    """Return the bytes of the update, at its peak, besides parameters and state.

    These are gradients, and what the update makes of them.
    """
    sizes = [sum(event.memory) for event in operations if event.unit == "update"]
    return max(sizes) - sum(step.parameters.values()) - step.state


def _workspace(phase: str, step: TracedStep, operations: list[Operation]) -> int:
    """Return the bytes of activations beside those that are saved, while a phase runs either way.

        forward     peak - what is saved when the phase ends
        backward    peak - what is saved when the phase ends - gradients among the activations

    Where gradients are kept until the step ends, memory counts them as activations until all are
    there. When the backward of a phase runs, those of the phases after it are there; they have the
    bytes of their parameters. Where gradients are counted as such before, there are none among the
    activations.
    """
    saved = step.active[PHASE_AFTER[phase]]
    forward = _most_activations(phase, operations)
    backward = _most_activations(BACKWARD_OF[phase], operations)

    later_phases = FORWARD[FORWARD.index(phase) + 1 :]
    later_gradients = sum([step.parameters[later] for later in later_phases])
    of_model = [event for event in operations if event.unit != "update"]
    before_end = of_model[:-AFTER_GRADIENTS]
    counts_early = any([_bytes(event, "gradients") > 0 for event in before_end])
    held = saved if counts_early else saved + later_gradients
    return max(forward - saved, backward - held, 0)


def _most_activations(phase: str, operations: list[Operation]) -> int:
    sizes = [_bytes(event, "activations") for event in operations if event.unit == phase]
    return max(sizes, default=0)


def _bytes(event: Operation, purpose: Purpose) -> int:
    return event.memory[PURPOSES.index(purpose)]
