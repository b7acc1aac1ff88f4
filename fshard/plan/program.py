"""`LayeredModel`: the step of a model with repeated layers by a plan: it is traced, and it trains.

plan ──> remat of layers ──> shard_model: experts, layers, stages ──┬──> train_step
         partition_optimizer: ZeRO ─────────────────────────────────┘
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fshard.errors import PlanError
from fshard.experts.module import MoE
from fshard.experts.transformers import shard_experts
from fshard.mesh.layout import Mesh, P, PyTree, flatten, map_leaves
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.contract import Optimizer
from fshard.optim.partition import partition_optimizer
from fshard.parallelism.build import ShardedModel, shard_model
from fshard.parallelism.value import Parallelism, Recomputed, kept_names
from fshard.plan.models import Transformer
from fshard.tensor.plan import Plan
from fshard.transforms.module.remat import remat, save_names
from fshard.transforms.module.replica import copy_on_meta
from fshard.transforms.train_step import train_step

Loss = Callable[[Any, Any], Tensor]
"""A function of the model's output and the batch."""

_KEPT = {"selective": "dots", "full": "nothing"}
"""The policies of `remat`."""


def kept_by_layers(recompute: Recomputed) -> Any:
    """Return what layers keep for their backward: a policy of `remat`."""
    return _KEPT.get(str(recompute)) or save_names(*kept_names(recompute))


class RecomputedLayer(nn.Module):
    """A layer whose activations are recomputed in the backward."""

    def __init__(self, layer: nn.Module, recompute: Recomputed) -> None:
        super().__init__()
        self.layer = layer
        self.kept = kept_by_layers(recompute)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        return remat(self.layer, self.kept)(*args, **kwargs)


class TrainingProgram(NamedTuple):
    """A step of `train_step`, and what it needs.

    Args:
        step: of the arguments and a batch.
        arguments: parameters, state, and buffers if the model has any.
        layer_plan: of the layers that are sharded; None if no devices share layers or tokens.
    """

    step: Callable[..., Any]
    arguments: list[PyTree]
    layer_plan: Plan | None


@dataclass(frozen=True)
class LayeredModel:
    """A model with repeated layers, and how it is trained.

    Args:
        build: returns the module on the meta device with a number of layers.
        blocks: the path of the layers in it.
        layers: their number.
        batch: of one sample, on the meta device.
        loss: of the output and the batch; None: the output, or its `loss`, if the batch is a dict of
            the model's arguments, else the cross-entropy of logits and the second part of the batch.
        optimizer: of `fs.optim`.
        experts: the number of experts of a layer.
        styles, layouts: of weights and of parameters by pattern, instead of those of a plan: see
            `shard_model`.
    """

    build: Callable[[int], nn.Module]
    blocks: str
    layers: int
    batch: PyTree
    loss: Loss | None
    optimizer: Optimizer
    experts: int = 0
    styles: Mapping[str, str] = field(default_factory=dict[str, str])
    layouts: Mapping[str, P] = field(default_factory=dict[str, P])
    _layer_plans: dict[Any, Plan] = field(
        default_factory=dict[Any, Plan], init=False, repr=False, compare=False
    )

    @cached_property
    def parameters(self) -> int:
        """The number of parameters; all layers are equal, so that two models suffice."""
        one = self._parameters_with(1)
        two = self._parameters_with(2)
        return one + (self.layers - 1) * (two - one)

    def _parameters_with(self, layers: int) -> int:
        return sum([x.numel() for x in self.build(layers).parameters()])

    @cached_property
    def tokens(self) -> int | None:
        """The number of tokens of a sample: of its first integers. None if it has none."""
        for x in flatten(self.batch)[0]:
            is_of_ids = isinstance(x, Tensor) and not x.is_floating_point() and x.dim() > 1
            if is_of_ids:
                return x[0].numel()
        return None

    @cached_property
    def has_buffers(self) -> bool:
        """True if the model has buffers, which a step then takes and returns."""
        return any([True for _ in self.build(1).buffers()])

    # -- the model and its loss -------------------------------------------------------------------

    def arguments(self, batch: PyTree) -> Any:
        """Return the model's arguments in a batch: a dict of them, or an input and more."""
        if isinstance(batch, Mapping):
            return batch
        model_input = batch[0] if isinstance(batch, tuple | list) else batch
        return (model_input,)

    def call(self, model: Callable[..., Any], batch: PyTree, *before: Any) -> Any:
        """Call the model with other arguments and those in a batch."""
        arguments = self.arguments(batch)
        if isinstance(arguments, Mapping):
            return model(*before, **arguments)
        return model(*before, *arguments)

    def loss_of(self, output: Any, batch: PyTree, plan: Plan | None = None) -> Tensor:
        """Return the loss of an output; `plan` is that of the layers, if the output is sharded."""
        if self.loss is not None:
            full_output = output if plan is None else map_leaves(plan.full, output)
            return self.loss(full_output, batch)
        if isinstance(batch, Mapping):
            value = _loss_in(output)
            return value if plan is None else plan.full(value)
        labels = batch[1]
        if plan is not None:
            return plan.cross_entropy(output, labels)
        return functional.cross_entropy(output.flatten(0, -2), labels.flatten())

    # -- the program ------------------------------------------------------------------------------

    def program(
        self,
        module: nn.Module,
        plan: Parallelism,
        mesh: Mesh,
        loss: Callable[..., Tensor] | None = None,
    ) -> TrainingProgram:
        """Return the step of a plan, and its arguments.

        Args:
            module: the model; its layers recompute from now on.
            plan: sizes and options.
            mesh: the devices.
            loss: instead of `loss_of`.
        """
        self.recomputed(module, plan.recompute)
        if self.experts:
            # Experts of transformers then run on shapes alone, which their own functions do not.
            shard_experts(module, ())
        count = len(cast(nn.ModuleList, module.get_submodule(self.blocks)))
        key = (plan.of_layer(), count)
        sharded = shard_model(
            module.train(),
            plan,
            mesh=mesh,
            sample=self._sample(plan),
            blocks=self.blocks,
            has_full_output=plan.in_stages,  # a schedule passes no plan to the loss
            styles=self.styles,
            layouts=self.layouts,
            layer_plan=self._layer_plans.get(key),
        )
        self._keep_layer_plan(key, sharded.plan, plan)
        opt = partition_optimizer(
            self.optimizer,
            mesh=mesh,
            axis=plan.zero_axes,
            stage=plan.zero_stage,
            state_memory=plan.state_memory,
            update_on="device",
        )

        functions, options = self._with_loss(sharded, plan, loss or self.loss_of)
        has_buffers = _has_buffers(sharded)
        step = train_step(functions, opt, has_buffers=has_buffers, donate=True, **options)
        arguments = [sharded.params, opt.init(sharded.params)]
        if has_buffers:
            arguments.append(sharded.buffers)
        return TrainingProgram(step, arguments, sharded.plan)

    def _keep_layer_plan(self, key: Any, layer_plan: Plan | None, plan: Parallelism) -> None:
        """Keep the plan of the layers, which is a fourth of the time of a short program."""
        # That of stages is the first stage's alone.
        if layer_plan is not None and not plan.in_stages:
            self._layer_plans[key] = replace(layer_plan, model=None)

    def recomputed(self, module: nn.Module, recompute: Recomputed) -> nn.Module:
        """Let the layers of a model recompute from now on; return the model."""
        if recompute == "never":
            return module
        layers = cast(nn.ModuleList, module.get_submodule(self.blocks))
        for index, layer in enumerate(layers):
            layers[index] = RecomputedLayer(layer, recompute)
        return module

    def _sample(self, plan: Parallelism) -> Any:
        """Return the arguments by which layers and stages are planned."""
        arguments = self.arguments(self.batch)
        if not plan.in_stages:
            return arguments
        # Stages are found by a run of the model, in which integers have values.
        return map_leaves(lambda x: torch.zeros_like(x, device="cpu"), arguments)

    def _with_loss(
        self, sharded: ShardedModel, plan: Parallelism, loss: Callable[..., Tensor]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the functions and the options of a step: of stages, the loss is an option."""
        has_buffers = _has_buffers(sharded)
        if plan.in_stages:
            stages = list[Any]()
            for stage in sharded.function:
                is_module = isinstance(stage, nn.Module)
                is_as_needed = has_buffers or is_module
                stages.append(stage if is_as_needed else partial(_without_buffers, stage))
            return stages, {**sharded.options, "loss": loss}
        return self.loss_function(sharded.function, sharded.plan, loss), sharded.options

    def loss_function(
        self, function: Any, layer_plan: Plan | None, loss: Callable[..., Tensor]
    ) -> Callable[..., Any]:
        """Return the loss as a function of parameters, of buffers if there are any, and of a batch.

        With buffers its result has the new ones beside the loss.

        Args:
            function: the model as a function: of `functionalize`.
            layer_plan: of the layers that are sharded; None without any.
            loss: of the output, the batch and the plan: `loss_of`.
        """

        def loss_fn(params: PyTree, *arguments: PyTree) -> Any:
            *buffers, batch = arguments
            before = buffers[0] if buffers else {}
            output, after = self.call(function, batch, params, before)
            value = loss(output, batch, layer_plan)
            return (value, after) if buffers else value

        return loss_fn


def _loss_in(output: Any) -> Any:
    """Return the loss that a model returns: its result, or `output.loss`."""
    value = getattr(output, "loss", output)
    if not isinstance(value, Tensor | Sharded) or value.numel() != 1:
        raise PlanError(
            "plan.search: the result of a model that takes a dict must be a loss of one element, or "
            f"have one as `loss`; got {type(output).__name__}. Give loss=, a function of the result "
            "and the batch."
        )
    return value


def _has_buffers(sharded: ShardedModel) -> bool:
    trees = sharded.buffers if isinstance(sharded.buffers, list) else [sharded.buffers]
    return any(trees)


def _without_buffers(stage: Callable[..., Any], params: PyTree, x: PyTree) -> PyTree:
    """Run a stage that has no buffers."""
    output, _ = stage(params, {}, x)
    return output


# -- models as layers ------------------------------------------------------------------------------


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
            build=model.build,
            blocks="layers",
            layers=model.layers,
            batch=(ids, ids),
            loss=loss,
            optimizer=optimizer,
            experts=model.experts,
        )
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            "plan.search: model must be a module or a Transformer; "
            f"got {type(model).__name__}. Sizes of a config.json: Transformer.from_config(path). "
            "Other programs: plan.rank."
        )
    path = _path_of_layers(model, blocks)
    layers = cast(nn.ModuleList, model.get_submodule(path))
    _validate_equal(path, layers)
    _validate_arguments(model, batch)
    return LayeredModel(
        build=partial(_shortened, model, path),
        blocks=path,
        layers=len(layers),
        batch=map_leaves(lambda x: x[:1].to("meta"), batch),
        loss=loss,
        optimizer=optimizer,
        experts=_most_experts(model),
    )


def _path_of_layers(model: nn.Module, blocks: str | None) -> str:
    """Return the path of the layers: the one that is given, or the longest list's."""
    lengths = dict[str, int]()
    for name, child in model.named_modules():
        if isinstance(child, nn.ModuleList):
            lengths[name] = len(child)
    if blocks is None and not lengths:
        raise PlanError(
            "plan.search: the model must have its repeated layers in a ModuleList; got none. "
            "Name one: blocks=."
        )
    # A list inside of another one is a part of a layer, such as a norm of each head.
    outermost = dict[str, int]()
    for name, length in lengths.items():
        if not any([name.startswith(f"{other}.") for other in outermost]):
            outermost[name] = length
    path = blocks or max(outermost, key=lambda name: outermost[name])
    if path not in lengths:
        raise PlanError(
            f"plan.search: blocks must be a ModuleList of the model, {', '.join(lengths)}; "
            f"got {path!r}."
        )
    return path


def _validate_equal(path: str, layers: nn.ModuleList) -> None:
    """Raise unless all layers have parameters of the same names and shapes."""
    shapes = [{name: x.shape for name, x in layer.named_parameters()} for layer in layers]
    different = [str(index) for index, shape in enumerate(shapes) if shape != shapes[0]]
    if different:
        raise PlanError(
            f"plan.search: the layers {path} must have equal parameters; "
            f"those of {', '.join(different)} differ from 0's. Rank its programs: plan.rank."
        )


def _validate_arguments(model: nn.Module, batch: PyTree) -> None:
    """Raise unless the model can be called with a batch."""
    call = inspect.signature(model.forward)
    names = ", ".join(call.parameters)
    if isinstance(batch, Mapping):
        try:
            call.bind(**cast(Mapping[str, Any], batch))
        except TypeError as error:
            raise PlanError(
                f"plan.search: batch must have the arguments of the model, {names}; got "
                f"{', '.join(map(str, cast(Any, batch)))}: {error}. A loss of labels beside them is "
                "that of a module whose forward takes them too, and returns the loss."
            ) from None
        return
    try:
        call.bind(None)
    except TypeError as error:
        raise PlanError(
            f"plan.search: batch must be a dict for a model that is called with {names}: of a pair "
            f"only the first is an input; {error}. Write batch={{name: tensor}} with these names."
        ) from None


def _most_experts(model: nn.Module) -> int:
    """Return the most experts of a layer, of `fs.nn.MoE` or of transformers; 0 without any."""
    counts = [0]
    for module in model.modules():
        if isinstance(module, MoE):
            counts.append(module.router.out_features)
        elif hasattr(module, "_is_expert_parallel"):
            experts: Any = module
            counts.append(int(experts.num_experts))
    return max(counts)


def _shortened(model: nn.Module, path: str, layers: int) -> nn.Module:
    """Return a copy of a model with its first layers, without values."""
    copy = copy_on_meta(model)
    parent, _, name = path.rpartition(".")
    blocks = cast(nn.ModuleList, copy.get_submodule(path))
    setattr(copy.get_submodule(parent), name, blocks[:layers])
    return copy
