"""The cost of one layer of a model, and of what is before and after the layers, from two small programs.

    model with no layer  ──trace──> the ends       model with one layer ──trace──> the ends and a layer

Each is a step of `train_step` on one device, or on those that share the layers, for one microbatch: the same code that
trains. Repeated layers are traced once and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fshard.memory.kinds import Purpose, mark
from fshard.memory.placement import abstract_like
from fshard.mesh.layout import P, PyTree, flatten, map_leaves
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.runtimes.abstract import represented
from fshard.optim.contract import Optimizer
from fshard.plan.cluster import Cluster
from fshard.plan.cost import recorded
from fshard.plan.timing import times_of
from fshard.plan.trace import PURPOSES, Event, Operation, TracedMail
from fshard.tensor.plan import Plan, tensor_parallel
from fshard.transforms.module.functionalize import functionalize
from fshard.transforms.module.remat import remat
from fshard.transforms.shard_params import shard_params
from fshard.transforms.train_step import train_step

Loss = Callable[[Any, Any], Tensor]
"""A function of the model's output and the batch."""


@dataclass(frozen=True)
class LayerCost:
    """The needs of some layers for one microbatch, on one of the devices that share them.

    Args:
        forward, backward, update: seconds; the update is that of all their parameters.
        flops: operations of matrix products, with those that are recomputed.
        parameters, gradients, state: bytes.
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
    state: int = 0
    casts: int = 0
    saved: int = 0
    workspace: int = 0

    def __add__(self, other: LayerCost) -> LayerCost:
        sums = {name: x + getattr(other, name) for name, x in vars(self).items()}
        return LayerCost(**{**sums, "workspace": max(self.workspace, other.workspace)})

    def times(self, count: int) -> LayerCost:
        """Return the cost of a number of such layers."""
        return LayerCost(**{name: x if name == "workspace" else x * count for name, x in vars(self).items()})


@dataclass(frozen=True)
class ModelCost:
    """The costs of what is before the layers, of one layer, and of what is after them, with the loss.

    `message` is the size of what one layer sends to the next.
    """

    first: LayerCost
    layer: LayerCost
    last: LayerCost
    message: int


class Recomputed(nn.Module):
    """A layer whose activations are recomputed in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        return remat(self.layer)(*args, **kwargs)


@dataclass(frozen=True)
class LayeredModel:
    """A model with repeated layers, and how it is trained.

    Args:
        build: returns the module on the meta device with a number of layers.
        blocks: the path of the layers in it.
        layers: their number.
        batch: of one sample.
        loss: of the output and the batch; None: the cross-entropy of logits and the second part of the batch.
        optimizer: of `fs.optim`.
        ends: costs of the model without layers, as they are known.
    """

    build: Callable[[int], nn.Module]
    blocks: str
    layers: int
    batch: PyTree
    loss: Loss | None
    optimizer: Optimizer
    ends: dict[tuple[Any, ...], LayerCost] = field(default_factory=dict[tuple[Any, ...], LayerCost], compare=False)

    def rows(self, count: int) -> PyTree:
        """Return a batch of a number of samples."""
        return map_leaves(lambda x: x.new_empty((count, *x.shape[1:]), device="meta"), self.batch)

    def inputs(self, batch: PyTree) -> Any:
        """Return the model's input in a batch."""
        return batch[0] if isinstance(batch, tuple | list) else batch

    def trace(self, cluster: Cluster, *, tensor: int, rows: int, recompute: bool, sequence: bool) -> ModelCost:
        """Return the costs of a microbatch.

        Args:
            cluster: the machine.
            tensor: devices that share the layers.
            rows: samples of a microbatch.
            recompute: True if each layer keeps its input alone.
            sequence: True if these devices share the tokens between the layers, too.
        """
        key = cluster.name, tensor, rows, sequence
        if key not in self.ends:  # recomputation changes nothing of them
            self.ends[key] = self._traced(0, cluster, tensor, rows, False, sequence)[0]
        ends, (both, below) = self.ends[key], self._traced(1, cluster, tensor, rows, recompute, sequence)
        layer = {name: x - getattr(ends, name) for name, x in vars(both).items()}
        layer["workspace"] = max(below - layer["saved"], 0)
        first = self._first_part(ends)
        last = {name: x - getattr(first, name) for name, x in vars(ends).items()}
        return ModelCost(
            first, LayerCost(**layer), LayerCost(**last), self._message(rows) // (tensor if sequence else 1)
        )

    def _traced(
        self, layers: int, cluster: Cluster, tensor: int, rows: int, recompute: bool, sequence: bool
    ) -> tuple[LayerCost, int]:
        """Return the cost of the model with a number of layers, and the most activations in the backward below the head."""
        model, batch = self.build(layers), self.rows(rows)
        if recompute:
            parent, _, name = self.blocks.rpartition(".")
            layers_of = cast(nn.ModuleList, model.get_submodule(self.blocks))
            setattr(model.get_submodule(parent), name, nn.ModuleList(Recomputed(layer) for layer in layers_of))
        mesh, plan = make_mesh({"data": 1, "model": tensor}, runtime="abstract"), None
        if tensor > 1:
            mode: Any = {"sequence": "model", "sequence_mode": "megatron"} if sequence else {}
            sample = self.inputs(batch)
            sample = sample if isinstance(sample, dict) else (sample,)
            plan = tensor_parallel(model.eval(), axis="model", size=tensor, sample=sample, check=False, **mode)
        apply, params, buffers = functionalize(model.train(), plan=plan)  # planned without draws

        def loss_fn(params: PyTree, batch: PyTree) -> Tensor:
            output, _ = apply(params, buffers, self.inputs(batch))
            mark("loss")
            loss = self._loss(plan, output, batch)
            mark("backward")
            return loss

        params = shard_params(params, P() if plan is None else plan.rules, mesh=mesh)
        local = () if plan is None else plan.axes
        step = train_step(loss_fn, self.optimizer, mesh=mesh, batch=P("data"), local=local, donate=True)
        state = self.optimizer.init(params)
        return _cost_of(step, [params, state, batch], cluster)

    def _loss(self, plan: Plan | None, output: Any, batch: PyTree) -> Tensor:
        if self.loss is not None:
            return self.loss(output if plan is None else map_leaves(plan.full, output), batch)
        if plan is not None:
            return plan.cross_entropy(output, batch[1])
        return functional.cross_entropy(output.flatten(0, -2), batch[1].flatten())

    def _first_part(self, ends: LayerCost) -> LayerCost:
        """Return the cost of what is before the layers: its memory, by the parameters that are registered before them."""
        model = self.build(1)
        names, size = (
            [name for name, _ in model.named_parameters()],
            {name: x.nbytes for name, x in model.named_parameters()},
        )
        begin = next(index for index, name in enumerate(names) if name.startswith(f"{self.blocks}."))
        outside = [name for name in names if not name.startswith(f"{self.blocks}.")]
        part = sum(size[name] for name in names[:begin]) / max(sum(size[name] for name in outside), 1)
        shares = {name: getattr(ends, name) * part for name in ("update", "parameters", "gradients", "state", "casts")}
        return LayerCost(**{name: x if name == "update" else int(x) for name, x in shares.items()})

    def _message(self, rows: int) -> int:
        """Return the bytes that a layer is called with."""
        model, sizes = self.build(1), list[int]()
        layer = model.get_submodule(f"{self.blocks}.0")
        layer.register_forward_pre_hook(
            lambda _, args: sizes.append(sum(x.nbytes for x in args if isinstance(x, Tensor)))
        )
        inputs = self.inputs(self.rows(rows))
        with torch.no_grad():
            model(**inputs) if isinstance(inputs, dict) else model(inputs)
        return sizes[0]


def _cost_of(step: Callable[..., Any], trees: Sequence[PyTree], cluster: Cluster) -> tuple[LayerCost, int]:
    """Return the cost of a step, and the most activations after its first gradient of a parameter."""
    events, mesh = list[Event](), step.mesh  # pyright: ignore[reportFunctionMemberAccess]

    def run(_: int) -> None:
        recorded(step, [abstract_like(tree, mesh, lambda x: x.layout.memory) for tree in trees], events)

    represented([0], None, run, TracedMail({0: events}))
    times = times_of({0: events}, cluster, mesh)[0]
    operations = [event for event in events if isinstance(event, Operation)]
    backward = next(index for index, event in enumerate(operations) if event.unit == "backward")
    alive = [_bytes(event, "activations", "other") for event in operations]
    below = [
        size
        for size, event in zip(alive, operations, strict=True)
        if event.unit != "update" and _bytes(event, "gradients")
    ]
    gradients = max(_bytes(event, "gradients") for event in operations if event.unit != "update")
    begins, static = times.begins, _shards(trees[0]) + _shards(trees[1])
    total = LayerCost(
        forward=begins["backward"],
        backward=begins["update"] - begins["backward"],
        update=times.step - begins["update"],
        flops=sum(event.flops for event in operations),
        parameters=_shards(trees[0]),
        gradients=gradients,
        state=_shards(trees[1]),
        casts=max(sum(event.memory) for event in operations if event.unit == "update") - static - gradients,
        saved=alive[backward],
        workspace=max(alive) - alive[backward],
    )
    return total, max(below)


def _bytes(event: Operation, *purposes: Purpose) -> int:
    return sum(event.memory[PURPOSES.index(purpose)] for purpose in purposes)


def _shards(tree: PyTree) -> int:
    leaves = {key_of(x): x for x in flatten(tree)[0] if isinstance(x, Sharded)}
    return sum(x.shards[0].nbytes for x in leaves.values())
