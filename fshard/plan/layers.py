"""The costs of one layer of a model, and of what is before and after the layers, from a model with one layer.

    forward    first ──> layer ──> last, loss        backward    last ──> layer ──> first        update

It is a step of `train_step` on one device, or on those that share the layers, for one microbatch: the same code that
trains. Repeated layers are traced once and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fshard.errors import PlanError
from fshard.memory.limit import open_usages
from fshard.memory.placement import abstract_like
from fshard.mesh.layout import Mesh, PyTree, flatten, map_leaves
from fshard.mesh.layout.counting import Purpose
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.runtimes.abstract import represented
from fshard.plan.cluster import Cluster
from fshard.plan.cost import recorded
from fshard.plan.model_plan import ModelPlan, kept_names
from fshard.plan.program import LayeredModel, RecomputedLayer
from fshard.plan.timing import times_of
from fshard.plan.trace import PURPOSES, Event, Operation, TracedMail
from fshard.transforms.module.remat import NamedValueMode


@dataclass(frozen=True)
class LayerCost:
    """The needs of some layers for one microbatch, on one of the devices that share them.

    Args:
        forward, backward, update: seconds; the update is that of all their parameters.
        flops: operations of matrix products, with those that are recomputed.
        parameters, gradients, state: bytes.
        sums: bytes of gradients that are added over microbatches, in at least 32 bits.
        casts: bytes that the update has for a while, such as gradients in 32 bits.
        saved: bytes of activations, from the forward to the backward.
        workspace: bytes besides these while the layers run.
    """

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    flops: int = 0
    parameters: int = 0
    gradients: int = 0
    sums: int = 0
    state: int = 0
    casts: int = 0
    saved: int = 0
    workspace: int = 0

    def __add__(self, other: LayerCost) -> LayerCost:
        sums = {name: x + getattr(other, name) for name, x in vars(self).items()}
        return LayerCost(**{**sums, "workspace": max(self.workspace, other.workspace)})

    def times(self, count: int) -> LayerCost:
        """Return the cost of a number of such layers."""
        return LayerCost(
            **{name: x if name == "workspace" else x * count for name, x in vars(self).items()}
        )


class ModelCost(NamedTuple):
    """The costs of what is before the layers, of one layer, and of what is after them, with the loss.

    `message` is the size of what one layer sends to the next.
    """

    first: LayerCost
    layer: LayerCost
    last: LayerCost
    message: int


class TracedStep(NamedTuple):
    """The events of one device in a step.

    Args:
        events: the unit of each operation is its phase: "first", "layer", "last", then "backward" (of the last),
            "layer backward", "first backward", "update".
        active: the bytes of activations at the begin of each phase.
        parameters, sums: the bytes of "first", "layer" and "last", and of sums of their gradients.
        state: the bytes of the optimizer's state.
    """

    events: list[Event]
    active: dict[str, int]
    parameters: dict[str, int]
    sums: dict[str, int]
    state: int


class WatchedLayer(nn.Module):
    """A layer that is called by another function."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        return self.call(self.layer, *args, **kwargs)


class ValueNames(NamedValueMode):
    """Collects the names that a layer gives to values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    def mark(self, x: Tensor, label: str) -> None:
        """Append a name."""
        self.names.append(label)


class LayerTrace:
    """The training step of a model with one layer, on devices that share it, and where its phases begin."""

    def __init__(self, model: LayeredModel, plan: ModelPlan) -> None:
        self.model, self.mesh = model, make_mesh(plan.mesh, runtime="abstract")
        self.events = list[Event]()
        self.recompute, self.values = "never", ValueNames()
        self.begins, self.active = dict[str, int](), dict[str, int]()
        module = model.build(1)
        layers = cast(nn.ModuleList, module.get_submodule(model.blocks))
        layers[0] = WatchedLayer(
            layers[0], lambda *args, **kwargs: self.call_layer(*args, **kwargs)
        )
        self.step, self.arguments = model.program(module, plan, self.mesh, self.loss)
        self.record(rows=1, recompute="never")  # the first step checks what later ones do not

    def begin(self, phase: str) -> None:
        """Begin a phase of the step."""
        for usage in open_usages():
            usage.free_dead()
            self.begins[phase] = len(self.events)
            self.active[phase] = usage.purposes["activations"]

    def call_layer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the layer: a phase of the forward, and of the backward."""
        self.begin("layer")
        for x in _differentiable((args, kwargs))[:1]:
            x.register_hook(lambda _: self.begin("first backward"))
        run = layer if self.recompute == "never" else RecomputedLayer(layer, self.recompute)
        with self.values:
            output = run(*args, **kwargs)
        self.begin("last")
        for x in _differentiable(output)[:1]:
            x.register_hook(lambda _: self.begin("layer backward"))
        return output

    def loss(self, *arguments: Any) -> Tensor:
        """Return the loss."""
        loss = self.model.loss_of(*arguments)
        self.begin("backward")
        return loss

    def record(self, *, rows: int, recompute: str) -> TracedStep:
        """Return what a device does with a number of samples."""
        if unknown := [name for name in kept_names(recompute) if name not in self.values.names]:
            names = ", ".join(dict.fromkeys(self.values.names)) or "none"
            raise PlanError(
                f"plan: recompute must except names of fs.nn.checkpoint_name in the layers, {names}; got {', '.join(unknown)}."
            )
        devices = prod(size for axis, size in self.mesh.axes if axis in ("data", "expert"))
        batch = map_leaves(lambda x: x.new_empty((rows * devices, *x.shape[1:])), self.model.batch)
        self.begins, self.active, self.recompute = {"first": 0}, {"first": 0}, recompute

        def run(_: int) -> None:
            trees = [
                abstract_like(x, self.mesh, lambda x: x.layout.memory)
                for x in (*self.arguments, batch)
            ]
            recorded(self.step, trees, self.events)

        represented([0], None, run, TracedMail({0: self.events}))
        events = list[Event]()
        for (phase, begin), (_, end) in pairwise([*self.begins.items(), ("", len(self.events))]):
            for event in self.events[begin:end]:
                is_of_phase = isinstance(event, Operation) and event.unit != "update"
                events.append(event._replace(unit=phase) if is_of_phase else event)
        sizes = self.phase_bytes(1), self.phase_bytes(4)
        return TracedStep(events, self.active, *sizes, _bytes_of(self.arguments[1]))

    def phase_bytes(self, least: int) -> dict[str, int]:
        """Return the bytes of the parameters of each phase, where a number has at least `least` bytes.

        Those that are registered before the layers are of the first phase.
        """
        sizes, phase = {"first": 0, "layer": 0, "last": 0}, "first"
        for name, x in self.arguments[0].items():
            is_of_layer = name.startswith(f"{self.model.blocks}.")
            phase = "layer" if is_of_layer else "first" if phase == "first" else "last"
            sizes[phase] += _bytes_of(x) * max(least, x.dtype.itemsize) // x.dtype.itemsize
        return sizes


class LayerTracer:
    """The costs of a model's layers on a machine, in all plans. Each step is traced once.

    A step is traced with two samples and with four, and derived for other numbers: its sizes are linear in them.
    """

    def __init__(self, model: LayeredModel, cluster: Cluster) -> None:
        self.model, self.cluster = model, cluster
        self.traces, self.steps = dict[ModelPlan, LayerTrace](), dict[ModelPlan, TracedStep]()
        self.costs = dict[ModelPlan, ModelCost]()

    def cost(self, plan: ModelPlan) -> ModelCost:
        """Return the costs of a microbatch, on the devices that share it."""
        shared = {
            name: getattr(plan, name) for name in ("tensor", "sequence", "sequence_mode", "experts")
        }
        key = ModelPlan(**shared, recompute=plan.recompute, rows=plan.rows)
        if key not in self.costs:
            two, four = (self._traced(replace(key, rows=rows)) for rows in (2, 4))
            step: TracedStep = {2: two, 4: four}.get(plan.rows) or _between(
                two, four, (plan.rows - 2) / 2
            )
            tokens = plan.tensor if plan.sequence_mode == "megatron" else plan.sequence
            first, layer, last = _costs_of(
                step, self.cluster, make_mesh(key.mesh, runtime="abstract")
            )
            self.costs[key] = ModelCost(first, layer, last, self._message * plan.rows // tokens)
        return self.costs[key]

    def _traced(self, plan: ModelPlan) -> TracedStep:
        shared = replace(plan, recompute="never", rows=1)
        if shared not in self.traces:
            self.traces[shared] = LayerTrace(self.model, shared)
        if plan not in self.steps:
            self.steps[plan] = self.traces[shared].record(rows=plan.rows, recompute=plan.recompute)
        return self.steps[plan]

    @cached_property
    def _message(self) -> int:
        """The bytes that a layer is called with, for a sample."""
        model, sizes = self.model.build(1), list[int]()
        layer = model.get_submodule(f"{self.model.blocks}.0")
        layer.register_forward_pre_hook(
            lambda _, args: sizes.append(sum(x.nbytes for x in args if isinstance(x, Tensor)))
        )
        with torch.no_grad():
            self.model.call(model, self.model.batch)
        return sizes[0]


def _between(x: Any, y: Any, fraction: float) -> Any:
    """Return a value, or a tree of them, on the line through two: x is at 0, y at 1."""
    if isinstance(x, dict):
        return {
            key: _between(value, y[key], fraction) for key, value in cast(dict[str, Any], x).items()
        }
    if isinstance(x, list | tuple):
        values = [_between(a, b, fraction) for a, b in zip(cast(Sequence[Any], x), y, strict=True)]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return x if x == y else type(x)(x + (y - x) * fraction)


def _costs_of(step: TracedStep, cluster: Cluster, mesh: Mesh) -> list[LayerCost]:
    """Return the costs of the phases "first", "layer" and "last"."""
    times = times_of({0: step.events}, cluster, mesh)[0]
    operations = [event for event in step.events if isinstance(event, Operation)]
    phases = [*dict.fromkeys(event.unit for event in operations)]
    begins = [*map(times.begins.__getitem__, phases), times.step]
    seconds = {
        phase: end - begin for phase, (begin, end) in zip(phases, pairwise(begins), strict=True)
    }
    most = dict[str, int]()
    for event in operations:
        most[event.unit] = max(_bytes(event, "activations"), most.get(event.unit, 0))
    gradients = [_bytes(event, "gradients") for event in operations if event.unit != "update"]
    total = sum(step.parameters.values())
    casts = (
        max(sum(event.memory) for event in operations if event.unit == "update")
        - total
        - step.state
    )
    costs, later, ends = list[LayerCost](), total, ("layer", "last", "backward")
    for phase, end, backward in zip(
        step.parameters, ends, ("first backward", "layer backward", "backward"), strict=True
    ):
        size, saved = step.parameters[phase], step.active[end]
        share, later = size / max(total, 1), later - size
        held = saved + (
            0 if any(gradients[:-2]) else later
        )  # gradients are activations until all are there
        costs.append(
            LayerCost(
                forward=seconds[phase],
                backward=seconds.get(backward, 0.0),
                update=seconds["update"] * share,
                flops=sum(event.flops for event in operations if event.unit in (phase, backward)),
                parameters=size,
                gradients=round(max(gradients) * share),
                sums=step.sums[phase],
                state=round(step.state * share),
                casts=round((casts - max(gradients)) * share),
                saved=saved - step.active[phase],
                workspace=max(most[phase] - saved, most.get(backward, 0) - held, 0),
            )
        )
    return costs


def _differentiable(tree: PyTree) -> list[Any]:
    return [x for x in flatten(tree)[0] if getattr(x, "requires_grad", False)]


def _bytes(event: Operation, *purposes: Purpose) -> int:
    return sum(event.memory[PURPOSES.index(purpose)] for purpose in purposes)


def _bytes_of(tree: PyTree) -> int:
    """Return the bytes of a device's shards."""
    leaves = {key_of(x): x for x in flatten(tree)[0] if isinstance(x, Sharded)}
    return sum(x.shards[0].nbytes for x in leaves.values())
