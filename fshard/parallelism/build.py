"""(model, parallelism) -> functions, parameters, buffers and options of a step.

    split_model     experts, the plan of the layers, stages      parts: a module and its layer plan
    shard_full      a full model                           ┐
    shard_in_stages the parts, each a stage                ┴──>  functions, parameters, buffers
    step_options    the batch, the schedule                ───>  options of `train_step`
    shard_model     all of these, from the model and a parallelism

A Booster has layouts of its own, by its plugin, and gives them to the middle two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from fshard.experts.transformers import shard_experts
from fshard.mesh.layout import Axes, Layout, Memory, Mesh, P, PyTree, map_leaves
from fshard.mesh.spmd.global_inputs import compare_inputs, samples_of
from fshard.mesh.spmd.scope import here
from fshard.parallelism.modes import MODEL_AXES
from fshard.parallelism.value import Parallelism
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.split.balance import Balance
from fshard.pipeline.split.stages import split_stages
from fshard.randomness import keyed_random
from fshard.tensor.joined import concatenated
from fshard.tensor.plan import TOLERANCE, Plan, tensor_parallel
from fshard.transforms.module.compiled import uncompile
from fshard.transforms.module.functionalize import module_function, validate_no_hooks
from fshard.transforms.module.lazy import reserved, without_memory
from fshard.transforms.module.replica import copy_on_meta
from fshard.transforms.patterns import Choice, matches
from fshard.transforms.shard_params import Fsdp, Rules, apply_rules, fsdp
from fshard.transforms.stages.plan import place_stages

ModelPart = tuple[nn.Module, Plan | None]
"""A stage, or the full model, and the plan of its layers that are sharded."""

Freeze = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""A function of parameters by name: the same, of which some are frozen."""


class ShardedModel(NamedTuple):
    """A model as arguments of a step.

    Args:
        function: of (params, buffers, *args), to its output and new buffers. Of stages, a tuple:
            each is a module, or such a function.
        params, buffers: by name, in their layouts; of stages, a list of trees.
        options: of `train_step`, but for the loss.
        plan: of the layers that are sharded, for a loss of sharded outputs; None without any.
    """

    function: Any
    params: PyTree
    buffers: PyTree
    options: dict[str, Any]
    plan: Plan | None


def shard_model(
    model: nn.Module,
    parallelism: Parallelism,
    *,
    mesh: Mesh,
    sample: Any,
    blocks: str,
    has_full_output: bool,
    styles: Mapping[str, str] | None = None,
    layouts: Mapping[str, P] | None = None,
    layer_plan: Plan | None = None,
) -> ShardedModel:
    """Return a model as arguments of a step.

    Args:
        model: with repeated layers. Its layers of experts use the mesh from now on.
        parallelism: sizes and options.
        mesh: the devices.
        sample: a microbatch, by whose shapes layers and stages are planned.
        blocks: path of the repeated layers, each a unit of ZeRO-3.
        has_full_output: the output has full tensors; else shards of layers stay as they are, for
            a loss by the plan of the layers.
        styles: of weights by pattern, instead of those that the plan of the layers finds: the
            rules of `tensor_parallel`.
        layouts: of parameters by pattern, instead of those that the parallelism gives them; not in
            stages.
        layer_plan: of an equal model, whose layers are not planned again.
    """
    parts = split_model(
        model,
        parallelism,
        sample=sample,
        blocks=blocks,
        check=False,
        styles=styles,
        layer_plan=layer_plan,
    )
    compare_inputs("shard_model", mesh, samples_of(dict(model.named_parameters())))
    replica_axis = ("replica",) if parallelism.replicas > 1 else ()
    batch_axes = (*replica_axis, *parallelism.zero_axes)
    options: dict[str, Any] = {"mesh": mesh, "batch": P(batch_axes), **step_options(parallelism)}
    if parallelism.in_stages:
        placed = shard_in_stages(
            parts,
            lambda within: param_rules(parallelism, parallelism.zero_axes, within),
            mesh=mesh,
            schedule=options["schedule"],
            axis=options["axis"],
        )
        return ShardedModel(*placed, options, parts[0][1])

    ((_, plan),) = parts
    placed = shard_full(
        model,
        plan,
        lambda _, within: param_rules(
            parallelism, parallelism.zero_axes, within, unit=f"{blocks}.*"
        ),
        mesh=mesh,
        has_full_output=has_full_output,
        layouts=layouts,
    )
    return ShardedModel(*placed, options, plan)


# -- the parts -------------------------------------------------------------------------------------


def split_model(
    model: nn.Module,
    parallelism: Parallelism,
    *,
    sample: Any,
    blocks: str | Sequence[str] | None = None,
    balance: Balance = "parameters",
    check: bool = True,
    tolerance: float = TOLERANCE,
    ignore: str | Sequence[str] = (),
    seed: int = 0,
    styles: Mapping[str, str] | None = None,
    layer_plan: Plan | None = None,
) -> list[ModelPart]:
    """Return the stages of a model, each with the plan of its layers that are sharded.

    Args:
        model: its layers of experts send tokens along the axes of the mesh from now on.
        parallelism: sizes and options.
        sample: a microbatch, for the plan of layers and for the stages of a model with `blocks`.
        blocks, balance: of `split_stages`.
        check: compare the planned model with the model: see `tensor_parallel`.
        tolerance, ignore: of that check.
        seed: of draws of the model while it is planned.
        styles: of weights by pattern: the rules of `tensor_parallel`.
        layer_plan: of an equal model, whose layers are not planned again.
    """
    has_inner_axes = bool(parallelism.inner_axes)
    if parallelism.in_stages or has_inner_axes:
        uncompile(model, "stages, and layers by a plan, run uncompiled. Leave it out.")

    plan = None
    if has_inner_axes and layer_plan is not None:
        plan = replace(layer_plan, model=model)
    elif has_inner_axes:
        check_options: dict[str, Any] = {"tolerance": tolerance, "ignore": ignore}
        check_options["check"] = check and _checks_here(model)
        check_options["rules"] = styles
        arguments = _arguments_of(sample, blocks, parallelism)
        plan = _layer_plan(model, parallelism, arguments, seed, check_options)
    if parallelism.experts > 1 or has_inner_axes or parallelism.in_stages:
        shard_experts(model, tuple(parallelism.expert_axes), tuple(parallelism.inner_axes))

    if not parallelism.in_stages:
        return [(model, plan)]
    stages = split_stages(
        cast(Any, model), parallelism.stages, balance, sample=sample, blocks=cast(Any, blocks)
    )
    plans = [None] * len(stages) if plan is None else plan.of_stages(stages)
    return [*zip(stages, plans, strict=True)]


def _arguments_of(sample: Any, blocks: Any, parallelism: Parallelism) -> Any:
    """Return the arguments of the model in a sample, in the form of `tensor_parallel`."""
    if not parallelism.in_stages:
        return sample
    if blocks is None:
        return (sample,)  # layers in a row pass one value on, which may be a tuple
    return tuple(cast(list[Any], sample)) if isinstance(sample, list) else sample


def _checks_here(model: nn.Module) -> bool:
    """Return True if the caller checks the plan of a model: one device, and only of values."""
    scope = here()
    is_checker = scope is None or scope.mesh.runtime == "process" or scope.device == 0
    return is_checker and not without_memory(model)


def _layer_plan(
    model: nn.Module,
    parallelism: Parallelism,
    arguments: Any,
    seed: int,
    check_options: dict[str, Any],
) -> Plan:
    """Return the plan of the model's layers."""
    axes = MODEL_AXES[parallelism.tensor_mode]
    token_axis = parallelism.token_axis
    # Lazy layers are planned by their shapes: a copy, since planning runs the model.
    planned_model = copy_on_meta(model) if without_memory(model) else model

    sequence_mode = parallelism.sequence_mode
    if token_axis is None:
        sequence_mode = "gather"
    expert_axis = "expert" if parallelism.experts > 1 else None
    with keyed_random(seed):
        return tensor_parallel(
            planned_model,
            axis=axes,
            sample=arguments,
            mode=parallelism.tensor_mode,
            size=parallelism.inner_axes[axes[-1]],
            sequence=token_axis,
            sequence_mode=sequence_mode,
            experts=expert_axis,
            **check_options,
        )


# -- layouts and options ---------------------------------------------------------------------------


def param_rules(
    parallelism: Parallelism,
    axes: tuple[str, ...],
    within: Rules,
    unit: str | None = None,
) -> Rules:
    """Return the rules of parameters.

    Args:
        parallelism: its ZeRO-3 shards them along `axes`.
        axes: of the devices that have other samples.
        within: rules along the axes of layers; None: only experts are sharded there.
        unit: parameters that are all-gathered together: see `fsdp`.
    """
    if within is None and parallelism.experts > 1:
        within = _spec_of_experts
    if parallelism.zero_stage == 3 and axes:
        return fsdp(axes, unit=unit, within=within)
    return P() if within is None else within


def rules_with(layouts: Mapping[str, P], rules: Rules, names: Iterable[str]) -> Rules:
    """Return rules by which the parameters that some patterns match have other layouts.

    Args:
        layouts: by pattern.
        rules: of all parameters: of `param_rules`.
        names: of the parameters.
    """
    if isinstance(rules, P | Fsdp):
        return {**layouts, "**": rules}
    others = dict[str, P]()
    for name in names:
        # A name and a pattern that both match a parameter would contradict each other.
        if not any([matches(pattern, name) for pattern in layouts]):
            spec: Any = rules(name, None) if callable(rules) else rules[name]
            others[name] = spec
    return {**layouts, **others}


def _spec_of_experts(path: str, leaf: Any) -> P:
    """Return the spec of a leaf: tensors of a layer's `experts` are sharded by their first dim."""
    is_expert = path.split(".")[-2:-1] == ["experts"]
    return P("expert") if is_expert else P()


def step_options(parallelism: Parallelism, pipeline_axis: str = "pipe") -> dict[str, Any]:
    """Return the options of `train_step` that depend on sizes alone."""
    options = dict[str, Any]()
    if parallelism.local_axes:
        options["local"] = parallelism.local_axes
    if parallelism.in_stages:
        options["schedule"] = parallelism.pipeline_schedule()
        options["axis"] = pipeline_axis
    elif cast(int, parallelism.microbatches) > 1:
        options["accumulate"] = parallelism.microbatches
    return options


# -- functions, parameters and buffers -------------------------------------------------------------


def shard_full(
    model: nn.Module,
    plan: Plan | None,
    rules: Callable[[Mapping[str, Any], Rules], Rules],
    *,
    mesh: Mesh,
    freeze: Freeze = dict,
    memory: Memory | Mapping[str, Memory] = "device",
    buffers: Choice = None,
    sync_batchnorm: Axes | None = None,
    in_place: bool = False,
    has_full_output: bool = True,
    layouts: Mapping[str, P] | None = None,
) -> tuple[Any, PyTree, PyTree]:
    """Return a model as a function, its parameters in their layouts, and its buffers.

    Args:
        model: the module; `in_place` runs it itself.
        plan: of its layers that are sharded.
        rules: of parameters by name, and of rules along the axes of the plan.
        mesh: the devices.
        freeze: marks parameters that are not trained.
        memory: of the parameters.
        buffers, sync_batchnorm: of `functionalize`.
        has_full_output: the output has full tensors.
        layouts: of parameters by pattern, instead of those by the rules.
    """
    options: Any = {"buffers": buffers, "sync_batchnorm": sync_batchnorm, "in_place": in_place}
    if plan is None:
        function, params, tensors = module_function(model, **options)
    elif has_full_output:
        function, params, tensors = planned_function(plan, model, **options)
    else:
        function, params, tensors = plan.functionalize(model, **options)

    # Of the module's own parameters, since the optimizer's source knows them by identity.
    named: dict[str, Tensor] = {name: x for name, x in model.named_parameters() if name in params}
    leaves = freeze(named)
    within = None if plan is None else {name: plan.spec(name) for name in leaves}
    params_by_name = _split(plan, leaves)
    all_rules = rules(leaves, within)
    if layouts:
        all_rules = rules_with(layouts, all_rules, params_by_name)
    params = apply_rules(params_by_name, all_rules, mesh, put=reserved, memory=memory)
    placed_buffers = dict[str, Any]()
    for name, x in tensors.items():
        placed_buffers[name] = reserved(x, Layout(mesh)) if x.is_meta else x
    return function, params, placed_buffers


def shard_in_stages(
    parts: Sequence[ModelPart],
    rules: Callable[[Rules], Rules],
    *,
    mesh: Mesh,
    schedule: Schedule,
    axis: str,
    freeze: Freeze = dict,
    memory: Memory | Mapping[str, Memory] = "device",
    in_place: bool = False,
) -> tuple[tuple[Any, ...], list[PyTree], list[PyTree]]:
    """Return stages as functions, and their parameters and buffers on the devices of each.

    For the arguments see `shard_full`; `rules` is of the rules along the axes of the plans.
    """
    functions = list[Any]()
    params = list[dict[str, Any]]()
    for number, (stage, plan) in enumerate(parts):
        validate_no_hooks(stage)
        is_last = number == len(parts) - 1
        if plan is None:
            functions.append(stage)
        else:
            # The parameters are not named: those of fused weights are copies, which would live on.
            functions.append(planned_function(plan, stage, is_last=is_last, in_place=in_place)[0])
        named: dict[str, Tensor] = dict(stage.named_parameters())
        params.append(_split(plan, freeze(named)))

    within = [None if plan is None else plan.rules for _, plan in parts]
    layouts = rules(within if any(within) else None)
    placed_on: Any = {"mesh": mesh, "schedule": schedule, "axis": axis, "put": reserved}
    sharded = place_stages(params, layouts, memory=memory, **placed_on)
    buffers = place_stages([dict(stage.named_buffers()) for stage, _ in parts], **placed_on)
    return tuple(functions), sharded, buffers


def planned_function(
    plan: Plan, module: nn.Module, *, is_last: bool = True, **options: Any
) -> tuple[Any, PyTree, PyTree]:
    """Return a module as a function by its plan, its parameters and its buffers.

    The outputs of the last stage, or of a full model, are full tensors.
    """
    apply, params, buffers = plan.functionalize(module, **options)
    full = plan.full if is_last else concatenated

    def function(
        params: PyTree, buffers: PyTree, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, PyTree]:
        output, new_buffers = apply(params, buffers, *args, **kwargs)
        return map_leaves(full, output), new_buffers

    return function, params, buffers


def _split(plan: Plan | None, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return parameters by name; by a plan, the parts of a fused weight are leaves."""
    return dict(params) if plan is None else plan.split(params)
