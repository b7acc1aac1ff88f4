"""`LayeredModel`: the training step of a model with repeated layers by a plan, which is traced and which trains.

plan.tensor, sequence      tensor_parallel ─┐
plan.experts               shard_experts ───┼─> shard_params ──> partition_optimizer ──> train_step
plan.recompute             remat of layers ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fshard.booster.model import shard_model
from fshard.booster.optimizer import partitioned
from fshard.errors import PlanError
from fshard.experts.module import MoE
from fshard.experts.transformers import shard_experts
from fshard.mesh.layout import Mesh, P, PyTree, map_leaves
from fshard.optim.contract import Optimizer
from fshard.optim.partition import partition_optimizer
from fshard.optim.torch_optim.instances import optimizer_source
from fshard.plan.model_plan import ModelPlan, kept_names
from fshard.plan.models import Transformer
from fshard.tensor.plan import Plan, tensor_parallel
from fshard.transforms.module.functionalize import functionalize
from fshard.transforms.module.remat import remat, save_names
from fshard.transforms.module.replica import copy_on_meta
from fshard.transforms.shard_params import fsdp, shard_params
from fshard.transforms.train_step import train_step

Loss = Callable[[Any, Any], Tensor]
"""A function of the model's output and the batch."""
_KEPT = {"selective": "dots", "full": "nothing"}
"""The policies of `remat`."""


class RecomputedLayer(nn.Module):
    """A layer whose activations are recomputed in the backward."""

    def __init__(self, layer: nn.Module, recompute: str) -> None:
        super().__init__()
        self.layer, self.kept = layer, _KEPT.get(recompute) or save_names(*kept_names(recompute))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        return remat(self.layer, self.kept)(*args, **kwargs)


class TrainingProgram(NamedTuple):
    """A step of `train_step`, and the arguments before the batch: parameters, state, and buffers if the model has any."""

    step: Callable[..., Any]
    arguments: list[PyTree]


@dataclass(frozen=True)
class LayeredModel:
    """A model with repeated layers, and how it is trained.

    Args:
        build: returns the module on the meta device with a number of layers.
        blocks: the path of the layers in it.
        layers: their number.
        batch: of one sample, on the meta device.
        loss: of the output and the batch; None: `output.loss` if the batch is a dict of the model's arguments, else the
            cross-entropy of logits and the second part of the batch.
        optimizer: of `fs.optim`.
        experts: the number of experts of a layer.
    """

    build: Callable[[int], nn.Module]
    blocks: str
    layers: int
    batch: PyTree
    loss: Loss | None
    optimizer: Optimizer
    experts: int = 0

    def arguments(self, batch: PyTree) -> Any:
        """Return the model's arguments in a batch, which is a dict of them, or has an input first."""
        if isinstance(batch, Mapping):
            return batch
        return (batch[0] if isinstance(batch, tuple | list) else batch,)

    def call(self, model: Callable[..., Any], batch: PyTree, *before: Any) -> Any:
        """Call the model with a batch."""
        arguments = self.arguments(batch)
        return (
            model(*before, **arguments)
            if isinstance(arguments, Mapping)
            else model(*before, *arguments)
        )

    def loss_of(self, output: Any, batch: PyTree, plan: Plan | None = None) -> Tensor:
        """Return the loss of an output; `plan` is that of the layers."""
        if self.loss is not None:
            return self.loss(output if plan is None else map_leaves(plan.full, output), batch)
        if isinstance(batch, Mapping):
            return output.loss if plan is None else plan.full(output.loss)
        if plan is not None:
            return plan.cross_entropy(output, batch[1])
        return functional.cross_entropy(output.flatten(0, -2), batch[1].flatten())

    def recomputed(self, module: nn.Module, recompute: str) -> nn.Module:
        """Let the layers of a module recompute."""
        layers = cast(nn.ModuleList, module.get_submodule(self.blocks))
        for index, layer in enumerate(layers if recompute != "never" else ()):
            layers[index] = RecomputedLayer(layer, recompute)
        return module

    def program(
        self,
        module: nn.Module,
        plan: ModelPlan,
        mesh: Mesh,
        loss: Callable[..., Tensor] | None = None,
    ) -> TrainingProgram:
        """Return the step of a plan without stages, and its arguments.

        Args:
            module: the model; its layers recompute from now on.
            plan: sizes and options.
            mesh: the devices.
            loss: instead of `loss_of`.
        """
        layers, loss = (
            self.layer_plan(self.recomputed(module, plan.recompute), plan),
            loss or self.loss_of,
        )
        experts = ("expert",) if plan.experts > 1 else ()
        within: Any = None if layers is None else layers.rules
        if self.experts:
            inner = tuple(axis for axis in ("seq", "model") if mesh.shape.get(axis, 1) > 1)
            specs = shard_experts(module, experts, inner)
            within = within or {
                name: spec for leaves in specs.values() for name, spec in leaves.items()
            } | {"**": P()}
        apply, params, buffers = functionalize(module.train(), plan=layers)

        def loss_fn(params: PyTree, *arguments: PyTree) -> Any:
            *current, batch = arguments
            output, after = self.call(apply, batch, params, current[0] if current else {})
            value = loss(output, batch, layers)
            return (value, after) if current else value

        axes, local = ("data", *experts), (*experts, *(() if layers is None else layers.axes))
        rules = (
            fsdp(axes, unit=f"{self.blocks}.*", within=within)
            if plan.zero_stage == 3
            else within or P()
        )
        params = shard_params(params, rules, mesh=mesh)
        opt = partition_optimizer(
            self.optimizer,
            mesh=mesh,
            axis=axes,
            stage=plan.zero_stage,
            state_memory=plan.state_memory,
            update_on="device",
        )
        options: Any = {"local": local, "has_buffers": bool(buffers), "donate": True}
        options |= {"accumulate": plan.microbatches} if plan.microbatches > 1 else {}
        batch = P((*(("replica",) if plan.replicas > 1 else ()), *axes))
        step = train_step(loss_fn, opt, mesh=mesh, batch=batch, **options)
        return TrainingProgram(step, [params, opt.init(params), *([buffers] if buffers else [])])

    def staged_program(self, module: nn.Module, plan: ModelPlan, mesh: Mesh) -> TrainingProgram:
        """Return the step of a plan with stages, and its arguments: see `program`."""
        sample = map_leaves(lambda x: torch.zeros_like(x, device="cpu"), self.arguments(self.batch))
        plugin = replace(
            replace(plan, recompute="never").plugin(blocks=self.blocks, sample=sample), mesh=mesh
        )
        module = self.recomputed(module, plan.recompute)
        source = optimizer_source(self.optimizer, dict(module.named_parameters()), "plan.build")
        stages, params, buffers = shard_model(plugin, module, source)
        options: Any = {**plugin.gradient_options(), "loss": self.loss_of}
        opt = partitioned(plugin, source)()
        if not any(buffers):
            options["has_buffers"] = False
            stages = [
                x if isinstance(x, nn.Module) else partial(_without_buffers, x) for x in stages
            ]
        step = train_step(stages, opt, donate=True, **options)
        return TrainingProgram(
            step, [params, opt.init(params), *([buffers] if any(buffers) else [])]
        )

    def layer_plan(self, module: nn.Module, plan: ModelPlan) -> Plan | None:
        """Return how layers and tokens are sharded."""
        if plan.tensor == plan.sequence == 1:
            return None
        is_megatron = plan.sequence_mode == "megatron"
        sequence = "model" if is_megatron else "seq" if plan.sequence > 1 else None
        return tensor_parallel(
            module.eval(),  # planned without draws
            axis="model",
            size=plan.tensor,
            sample=self.arguments(self.batch),
            sequence=sequence,
            sequence_mode="gather" if sequence is None else plan.sequence_mode,
            experts="expert" if plan.experts > 1 else None,
            check=False,
        )


def layered_model(
    model: nn.Module | Transformer,
    batch: PyTree,
    optimizer: Optimizer,
    loss: Loss | None,
    blocks: str | None,
) -> LayeredModel:
    """Return the model as one with a number of layers."""
    if isinstance(model, Transformer):
        ids = torch.empty(1, model.sequence, dtype=torch.int64, device="meta")
        return LayeredModel(
            model.build, "layers", model.layers, (ids, ids), loss, optimizer, model.experts
        )
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"plan.search: model must be a module or a Transformer; got {type(model).__name__}. Programs: plan.rank."
        )
    lists = {
        name: len(child)
        for name, child in model.named_modules()
        if isinstance(child, nn.ModuleList)
    }
    if blocks is None and not lists:
        raise PlanError(
            "plan.search: the model must have its repeated layers in a ModuleList; got none. Name one: blocks=."
        )
    path = blocks or max(lists, key=lambda name: lists[name])
    if path not in lists:
        raise PlanError(
            f"plan.search: blocks must be a ModuleList of the model, {', '.join(lists)}; got {path!r}."
        )
    shapes = [
        {name: x.shape for name, x in layer.named_parameters()}
        for layer in model.get_submodule(path).children()
    ]
    if different := [str(index) for index, shape in enumerate(shapes) if shape != shapes[0]]:
        raise PlanError(
            f"plan.search: the layers {path} must have equal parameters; those of {', '.join(different)} differ from 0's. "
            "Rank its programs: plan.rank."
        )
    sample = map_leaves(lambda x: x[:1].to("meta"), batch)
    experts = [x.router.out_features for x in model.modules() if isinstance(x, MoE)]
    experts += [
        int(x.num_experts) for x in cast(Any, model).modules() if hasattr(x, "_is_expert_parallel")
    ]
    return LayeredModel(
        partial(_shortened, model, path),
        path,
        lists[path],
        sample,
        loss,
        optimizer,
        max(experts, default=0),
    )


def _shortened(model: nn.Module, path: str, layers: int) -> nn.Module:
    """Return a copy of a model with its first layers, without values."""
    copy = copy_on_meta(model)
    parent, _, name = path.rpartition(".")
    blocks = cast(nn.ModuleList, copy.get_submodule(path))
    setattr(copy.get_submodule(parent), name, blocks[:layers])
    return copy


def _without_buffers(stage: Callable[..., Any], params: PyTree, x: PyTree) -> PyTree:
    return stage(params, {}, x)[0]
