"""`LayerTrace`: the recorded step of a model with one layer, by phases.

It is a step of `train_step` on one device, or on those that share the layers, for one microbatch:
the same code that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fshard.errors import PlanError
from fshard.memory.limit import open_usages
from fshard.memory.placement import abstract_like
from fshard.mesh.layout import PyTree, flatten, map_leaves, unflatten
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.runtimes.abstract import represented
from fshard.parallelism.value import RECOMPUTED_IN_LAYERS, Parallelism, Recomputed, kept_names
from fshard.plan.cost import recorded
from fshard.plan.program import LayeredModel, RecomputedLayer
from fshard.plan.trace import Event, Operation, TracedMail
from fshard.transforms.module.remat import NamedValueMode


class TracedStep(NamedTuple):
    """The events of one device in a step.

    Args:
        events: the unit of each operation is its phase: "first", "layer", "last", then "backward"
            (of the last), "layer backward", "first backward", "update".
        active: the bytes of activations at the begin of each phase.
        parameters, sums: the bytes of "first", "layer" and "last", and of sums of their gradients.
        of_experts: the bytes of those parameters that are sharded along "expert".
        state: the bytes of the optimizer's state.
    """

    events: list[Event]
    active: dict[str, int]
    parameters: dict[str, int]
    sums: dict[str, int]
    of_experts: dict[str, int]
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
    """The training step of a model with one layer, on devices that share it, and its phases.

    Args:
        model: with any number of layers.
        plan: of the devices that share a layer: see `Parallelism.of_layer`.
    """

    def __init__(self, model: LayeredModel, plan: Parallelism) -> None:
        self.model, self.mesh = model, make_mesh(plan.axes, runtime="abstract")
        self.events = list[Event]()
        self.recompute: Recomputed = "never"
        self.values = ValueNames()
        self.begins = dict[str, int]()
        self.active = dict[str, int]()

        module = model.build(1)
        layers = cast(nn.ModuleList, module.get_submodule(model.blocks))
        # All copies of the module share a function; a method would be copied, with its trace.
        layers[0] = WatchedLayer(layers[0], lambda *args, **kwargs: self.run_layer(*args, **kwargs))
        self.program = model.program(module, plan, self.mesh, self.loss)
        self.record(rows=1, recompute="never")  # the first step checks what later ones do not

    # -- phases, in order of time -----------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """Begin a phase of the step, if it is recorded."""
        for usage in open_usages():
            usage.free_dead()
            self.begins[phase] = len(self.events)
            self.active[phase] = usage.purposes["activations"]

    def run_layer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the layer: a phase of the forward, and of the backward."""
        self.begin("layer")
        if not _differentiable((args, kwargs)) and self.model.layers > 1:
            # Only the first layer has no gradient of its input: this one represents all.
            args, kwargs = _with_gradient((args, kwargs), layer)
        # The gradient of the layer's input is there when its backward ends.
        for x in _differentiable((args, kwargs))[:1]:
            x.register_hook(lambda _: self.begin("first backward"))
        is_kept = self.recompute == "never"
        run = layer if is_kept else RecomputedLayer(layer, self.recompute)
        with self.values:
            output = run(*args, **kwargs)
        self.begin("last")
        for x in _differentiable(output)[:1]:
            x.register_hook(lambda _: self.begin("layer backward"))
        return output

    def loss(self, *arguments: Any) -> Tensor:
        """Return the loss, with which the forward ends."""
        loss = self.model.loss_of(*arguments)
        self.begin("backward")
        return loss

    # -- the record -------------------------------------------------------------------------------

    def record(self, *, rows: int, recompute: Recomputed) -> TracedStep:
        """Return what a device does with a number of samples."""
        self._validate_recompute(recompute)
        self.recompute = recompute
        self.begins, self.active = {"first": 0}, {"first": 0}
        self._run(rows)
        return TracedStep(
            events=self._events_by_phase(),
            active=self.active,
            parameters=self._bytes_of_phases(least=1),
            sums=self._bytes_of_phases(least=4),
            of_experts=self._bytes_of_phases(least=1, axis="expert"),
            state=_bytes_of(self.program.arguments[1]),
        )

    def notes(self) -> list[str]:
        """Return which weights of linear layers no device shares with others, and why."""
        plan = self.program.layer_plan
        names = dict[str, list[str]]()
        for name, reason in plan.replicated.items() if plan is not None else ():
            # The first layer represents all, so its number is left out.
            path = name.replace(f"{self.model.blocks}.0.layer.", "").removesuffix(".weight")
            names.setdefault(reason, []).append(path)
        return [f"{', '.join(paths)} replicated: {reason}" for reason, paths in names.items()]

    def _validate_recompute(self, recompute: Recomputed) -> None:
        if not kept_names(recompute) and recompute not in RECOMPUTED_IN_LAYERS:
            raise PlanError(
                'plan: recompute must be "never", "selective", "full" or "except a, b" of the '
                f"layers; got {recompute!r}."
            )
        unknown = [name for name in kept_names(recompute) if name not in self.values.names]
        if unknown:
            names = ", ".join(dict.fromkeys(self.values.names)) or "none"
            raise PlanError(
                "plan: recompute must except names of fs.nn.checkpoint_name in the layers, "
                f"{names}; got {', '.join(unknown)}."
            )

    def _run(self, rows: int) -> None:
        """Run the step as the first device of the mesh, and write its events."""
        sample_axes = ("data", "expert")
        devices = prod([size for axis, size in self.mesh.axes if axis in sample_axes])

        def of_all_devices(x: Tensor) -> Tensor:
            return x.new_empty((rows * devices, *x.shape[1:]))

        batch = map_leaves(of_all_devices, self.model.batch)

        def run(_: int) -> None:
            trees = list[Any]()
            for tree in (*self.program.arguments, batch):
                trees.append(abstract_like(tree, self.mesh, lambda x: x.layout.memory))
            recorded(self.program.step, trees, self.events)

        represented([0], None, run, TracedMail({0: self.events}))

    def _events_by_phase(self) -> list[Event]:
        """Return the events, with the phase of each operation before the update as its unit."""
        events = list[Event]()
        bounds = [*self.begins.items(), ("", len(self.events))]
        for (phase, begin), (_, end) in pairwise(bounds):
            for event in self.events[begin:end]:
                is_of_phase = isinstance(event, Operation) and event.unit != "update"
                events.append(event._replace(unit=phase) if is_of_phase else event)
        return events

    def _bytes_of_phases(self, least: int, axis: str | None = None) -> dict[str, int]:
        """Return the bytes of the parameters of each phase, if a number has at least `least` bytes.

        Those that are registered before the layers are of the first phase.

        Args:
            least: bytes of a number.
            axis: that shards the parameters; None: of all parameters.
        """
        sizes = {"first": 0, "layer": 0, "last": 0}
        phase = "first"
        for name, x in self.program.arguments[0].items():
            if name.startswith(f"{self.model.blocks}."):
                phase = "layer"
            elif phase != "first":
                phase = "last"
            for leaf in flatten(x)[0]:  # several, of a fused weight that is sharded in parts
                if axis is not None and axis not in leaf.spec.axes:
                    continue
                width = leaf.dtype.itemsize
                sizes[phase] += _bytes_of(leaf) * max(least, width) // width
        return sizes


def _differentiable(tree: PyTree) -> list[Any]:
    leaves = flatten(tree)[0]
    return [x for x in leaves if isinstance(x, Tensor | Sharded) and x.requires_grad]


class _AfterParameter(torch.autograd.Function):
    """Returns a tensor as it is; its gradient is computed, as if it depended on a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _with_gradient(tree: PyTree, layer: nn.Module) -> PyTree:
    """Return arguments whose first floating-point tensor, the hidden states, has a gradient."""
    trained = _differentiable([*layer.parameters()])
    leaves, structure = flatten(tree)
    for index, x in enumerate(leaves):
        is_hidden_states = isinstance(x, Tensor) and x.is_floating_point()
        if is_hidden_states and trained:
            leaves[index] = _AfterParameter.apply(x, trained[0])
            break
    return unflatten(structure, leaves)


def _bytes_of(tree: PyTree) -> int:
    """Return the bytes of a device's shards; those of tied leaves count once."""
    leaves = {key_of(x): x for x in flatten(tree)[0] if isinstance(x, Sharded)}
    return sum([x.shards[0].nbytes for x in leaves.values()])
