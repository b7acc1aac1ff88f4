"""`program_code`: the program of a state as text: complete, formatted, and with three steps.

    imports ── model ── mesh ── layers ── layouts ── optimizer ── loss ── step ── training

Of a full model each part is written out by the public functions. Of stages `shard_model` makes the
stages and their layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from fshard.laboratory.state import OPTIMIZERS, SIZES_OF_MODEL, LabState
from fshard.mesh.layout import as_written
from fshard.parallelism.modes import MODEL_AXES
from fshard.parallelism.value import Parallelism, kept_names
from fshard.plan.models import Transformer
from fshard.plan.program import LayeredModel, kept_by_layers

Lines = list[str]


def program_code(state: LabState, model: LayeredModel) -> str:
    """Return the program of a state.

    Args:
        state: of the lab.
        model: with the overrides of the state.
    """
    plan = state.parallelism
    parts = [_imports(plan), _model(state.model, model)]
    if plan.recompute != "never":
        parts.append(_recomputed(plan, model))
    if plan.in_stages:
        parts += [_stages(plan, model), _stage_step(state, plan)]
    else:
        parts += [_mesh(plan), _layers(plan, model), _layouts(plan, model)]
        parts += [_optimizer(state, plan), _loss(state, plan, model), _step(plan)]
    parts.append(_training(state, plan))
    text = "\n".join(["\n".join([*part, ""]) for part in parts if part])
    return f'"""{_title(state, plan)}"""\n\n{text}'


def _title(state: LabState, plan: Parallelism) -> str:
    axes = ", ".join([f"{name}={size}" for name, size in plan.axes.items() if size > 1])
    name = "A module" if state.model is None else "A Transformer"
    return f"{name} on {plan.devices:,} devices ({axes or 'no axis'}), ZeRO-{plan.zero_stage}."


def _imports(plan: Parallelism) -> Lines:
    of_torch = ["import torch", "from torch.nn.functional import cross_entropy", ""]
    if plan.in_stages:
        own = ["import fshard as fs", "from fshard.parallelism.build import shard_model"]
        return ["from functools import partial", "", *of_torch, *own]
    return [*of_torch, "import fshard as fs", "from fshard import P"]


# -- the model -------------------------------------------------------------------------------------


def _model(sizes: Transformer | None, model: LayeredModel) -> Lines:
    if sizes is None:
        return ["model, batch, loss = ...  # those that fs.lab was given"]
    lines = ["sizes = fs.plan.Transformer("]
    for each in fields(Transformer):
        value = getattr(sizes, each.name)
        if each.name in SIZES_OF_MODEL or value != each.default:
            lines.append(f"    {each.name}={_value(value)},")
    lines += [
        ")",
        'model = sizes.build().to_empty(device="cpu")',
        "with torch.no_grad():",
        "    for x in model.parameters():",
        "        if x.dim() > 1:",
        "            x.normal_(0, 0.02)",
        "        else:",
        "            x.fill_(1)",
    ]
    return lines


def _value(x: Any) -> str:
    if isinstance(x, str):
        return _quoted(x)
    if isinstance(x, tuple):
        texts = [_quoted(each) for each in x]
        comma = "," if len(texts) == 1 else ""
        return f"({', '.join(texts)}{comma})"
    return str(x) if isinstance(x, torch.dtype) else repr(x)


def _quoted(text: str) -> str:
    return f'"{text}"'


def _recomputed(plan: Parallelism, model: LayeredModel) -> Lines:
    kept = kept_by_layers(plan.recompute)
    policy = _quoted(kept)
    if not isinstance(kept, str):
        names = ", ".join([_quoted(name) for name in kept_names(plan.recompute)])
        policy = f"fs.nn.save_names({names})"
    return [
        "",
        "class Recomputed(torch.nn.Module):",
        "    def __init__(self, layer):",
        "        super().__init__()",
        "        self.layer = layer",
        "",
        "    def forward(self, *args):",
        f"        return fs.remat(self.layer, {policy})(*args)",
        "",
        "",
        f"for index, layer in enumerate(model.{model.blocks}):",
        f"    model.{model.blocks}[index] = Recomputed(layer)",
    ]


# -- a full model ----------------------------------------------------------------------------------


def _axes_on_mesh(plan: Parallelism) -> dict[str, int]:
    """Return the axes of a full model: those of one device are left out, but for "data"."""
    axes = plan.axes
    kept = ("data", *plan.expert_axes, *plan.inner_axes)
    return {name: size for name, size in axes.items() if size > 1 or name in kept}


def _mesh(plan: Parallelism) -> Lines:
    axes = ", ".join([f"{_quoted(name)}: {size}" for name, size in _axes_on_mesh(plan).items()])
    return [f"mesh = fs.make_mesh({{{axes}}})"]


def _layers(plan: Parallelism, model: LayeredModel) -> Lines:
    """Return the lines that plan the layers; the model as a function of its parameters."""
    if not plan.inner_axes:
        lines = list[str]()
        if model.experts:
            axis = _quoted("expert") if plan.experts > 1 else "None"
            lines.append(f"experts = fs.experts.expert_rules(model, {axis})")
        return [*lines, "apply, params, buffers = fs.functionalize(model)"]

    axes = MODEL_AXES[plan.tensor_mode]
    options = {
        "axis": _axes(axes),
        "sample": "torch.zeros(1, sizes.sequence, dtype=torch.int64)",
        "size": str(plan.inner_axes[axes[-1]]),
        "check": "False",
    }
    if plan.tensor_mode != "1d":
        options["mode"] = _quoted(plan.tensor_mode)
    if plan.token_axis is not None:
        options["sequence"] = _quoted(plan.token_axis)
        options["sequence_mode"] = _quoted(plan.sequence_mode)
    if plan.experts > 1:
        options["experts"] = _quoted("expert")
    if model.styles:
        options["rules"] = _mapping({name: _quoted(x) for name, x in model.styles.items()}, 4)
    lines = ["layers = fs.tensor_parallel(", "    model,"]
    lines += [f"    {name}={text}," for name, text in options.items()]
    lines += [")", "apply, params, buffers = layers.functionalize(model)"]
    return lines


def _axes(axes: Sequence[str]) -> str:
    return as_written(tuple(axes))


def _mapping(texts: Mapping[str, str], indent: int) -> str:
    """Write a dict with a line for each entry, as a formatter does if it ends with a comma."""
    space = " " * indent
    lines = [f"{space}    {_quoted(name)}: {text}," for name, text in texts.items()]
    return "\n".join(["{", *lines, f"{space}}}"])


def _layouts(plan: Parallelism, model: LayeredModel) -> Lines:
    within = "layers.rules" if plan.inner_axes else ""
    if not within and model.experts and plan.experts > 1:
        within = "experts"
    rules = within or "P()"
    if plan.zero_stage == 3:
        options = f'unit="{model.blocks}.*"'
        if within:
            options += f", within={within}"
        rules = f"fs.fsdp({_axes(plan.zero_axes)}, {options})"
    lines = list[str]()
    if model.layouts:
        texts = {pattern: repr(spec) for pattern, spec in model.layouts.items()}
        if plan.zero_stage == 3 or not within:
            rules = _mapping({**texts, "**": rules}, 0)
        else:
            rules = f"{{**{within}, **{_mapping(texts, 0)}}}"
    lines.append(f"rules = {rules}")
    lines.append("params = fs.shard_params(params, rules, mesh=mesh)")
    return lines


def _optimizer(state: LabState, plan: Parallelism) -> Lines:
    options = ["mesh=mesh", f"axis={_axes(plan.zero_axes)}", f"stage={plan.zero_stage}"]
    if plan.state_memory != "device":
        options += [f"state_memory={_quoted(plan.state_memory)}", 'update_on="device"']
    return [
        "opt = fs.partition_optimizer(",
        f"    {OPTIMIZERS[state.optimizer]},",
        *[f"    {option}," for option in options],
        ")",
        "state = opt.init(params)",
    ]


def _loss(state: LabState, plan: Parallelism, model: LayeredModel) -> Lines:
    if state.model is None:
        return _loss_of_module(plan, model)
    lines = [
        "",
        "def loss_fn(params, batch):",
        "    ids, labels = batch",
        "    logits, _ = apply(params, buffers, ids)",
    ]
    if plan.inner_axes:
        return [*lines, "    return layers.cross_entropy(logits, labels)", ""]
    return [*lines, "    return cross_entropy(logits.flatten(0, 1), labels.flatten())", ""]


def _loss_of_module(plan: Parallelism, model: LayeredModel) -> Lines:
    call = "**batch" if isinstance(model.batch, Mapping) else "batch[0]"
    output = "layers.full(output)" if plan.inner_axes else "output"
    return [
        "",
        "def loss_fn(params, batch):",
        f"    output, _ = apply(params, buffers, {call})",
        f"    return loss({output}, batch)",
        "",
    ]


def _batch_spec(plan: Parallelism) -> str:
    axes = [axis for axis in ("replica", *plan.zero_axes) if axis in plan.axes]
    return f"P({_axes(axes)})"


def _step(plan: Parallelism) -> Lines:
    options = [f"batch={_batch_spec(plan)}"]
    if plan.local_axes:
        options.append(f"local={_axes(plan.local_axes)}")
    assert plan.microbatches is not None
    if plan.microbatches > 1:
        options.append(f"accumulate={plan.microbatches}")
    return [
        "step = fs.train_step(",
        "    loss_fn,",
        "    opt,",
        "    mesh=mesh,",
        *[f"    {option}," for option in options],
        "    donate=True,",
        ")",
    ]


# -- stages ----------------------------------------------------------------------------------------


def _stages(plan: Parallelism, model: LayeredModel) -> Lines:
    options = [field for field in fields(Parallelism) if field.name != "data"]
    default = Parallelism()
    lines = ["parallelism = fs.Parallelism(", f"    data={plan.data},"]
    for each in options:
        value = vars(plan)[each.name]
        if value != vars(default)[each.name]:
            lines.append(f"    {each.name}={_value(value)},")
    lines += [")", "mesh = parallelism.mesh()", "sharded = shard_model("]
    lines += ["    model,", "    parallelism,", "    mesh=mesh,"]
    lines += ["    sample=(torch.zeros(1, sizes.sequence, dtype=torch.int64),),"]
    lines += [f"    blocks={_quoted(model.blocks)},", "    has_full_output=True,"]
    if model.styles:
        lines.append(f"    styles={_mapping({k: _quoted(v) for k, v in model.styles.items()}, 4)},")
    return [*lines, ")", "params = sharded.params"]


def _stage_step(state: LabState, plan: Parallelism) -> Lines:
    return [
        *_optimizer(state, plan),
        "",
        "",
        "def without_buffers(stage, params, x):",
        "    output, _ = stage(params, {}, x)",
        "    return output",
        "",
        "",
        "def loss_fn(logits, batch):",
        "    _, labels = batch",
        "    return cross_entropy(logits.flatten(0, 1), labels.flatten())",
        "",
        "",
        "stages = list(sharded.function)",
        "for number, stage in enumerate(stages):",
        "    if not isinstance(stage, torch.nn.Module):",
        "        stages[number] = partial(without_buffers, stage)",
        "step = fs.train_step(stages, opt, loss=loss_fn, donate=True, **sharded.options)",
    ]


# -- training --------------------------------------------------------------------------------------


def _training(state: LabState, plan: Parallelism) -> Lines:
    if state.model is None:
        lines = ["for _ in range(3):"]
    else:
        lines = [
            "for _ in range(3):",
            f"    ids = torch.randint(sizes.vocab, ({plan.rows_of_step}, sizes.sequence + 1))",
            "    batch = (ids[:, :-1], ids[:, 1:])",
        ]
    return [
        *lines,
        "    params, state, metrics = step(params, state, batch)",
        '    print(float(metrics["loss"]))',
    ]
