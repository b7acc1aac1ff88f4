"""`program_code`: the program of a state as text: complete, formatted, and with three steps.

    imports ── model ── mesh ── layers ── layouts ── optimizer ── loss ── step ── training

Of a full model each part is written out by functions. Of stages a Booster has all of them, by its
plugin. A module of the user's own is the name `model`, beside the names `batch` and `loss`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

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
    parts = [_imports(plan, model), _model(state, model)]
    if plan.recompute != "never":
        parts.append(_recomputed(plan, model))
    if plan.in_stages:
        parts += [_stages(state, plan, model), _criterion(model), _booster(state)]
    else:
        parts += [_mesh(plan), _layers(state, plan, model), _layouts(plan, model)]
        parts += [_optimizer(state, plan), _loss(plan, model), _step(plan, model)]
    parts.append(_training(state, model))
    text = "\n".join(["\n".join([*part, ""]) for part in parts if part])
    return f'"""{_title(state, plan)}"""\n\n{text}'


def _title(state: LabState, plan: Parallelism) -> str:
    axes = ", ".join([f"{name}={size}" for name, size in plan.axes.items() if size > 1])
    name = "A module" if state.model is None else "A Transformer"
    return f"{name} on {plan.devices:,} devices ({axes or 'no axis'}), ZeRO-{plan.zero_stage}."


def _imports(plan: Parallelism, model: LayeredModel) -> Lines:
    lines = ["import torch"]
    layers = _name_of_layers(plan)
    if _value_of_loss(model, layers).startswith("cross_entropy"):
        lines.append("from torch.nn.functional import cross_entropy")
    lines += ["", "import fshard as fs"]
    if not plan.in_stages:
        lines.append("from fshard import P")
    return lines


# -- the model -------------------------------------------------------------------------------------


def _model(state: LabState, model: LayeredModel) -> Lines:
    sizes = state.model
    if sizes is None:
        return _batch_of_module(state.parallelism.rows_of_step, model)
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


def _batch_of_module(rows: int, model: LayeredModel) -> Lines:
    """Return the lines that take as many rows of a batch as a step has: all again, or the first."""
    batch = model.batch
    names = "model, batch and loss"
    if model.loss is None:
        names = "model and batch"
    tensors = [batch]
    if isinstance(batch, Mapping):
        first = next(iter(cast(Mapping[str, Any], batch)))
        tensors = [*cast(Mapping[str, Any], batch).values()]
        length = f"len(batch[{_quoted(first)}])"
        repeated = "{name: x[rows] for name, x in batch.items()}"
    elif isinstance(batch, tuple | list):
        tensors = [*cast("tuple[Any, ...]", batch)]
        length = "len(batch[0])"
        repeated = "tuple([x[rows] for x in batch])"
    else:
        length = "len(batch)"
        repeated = "batch[rows]"
    if not all([isinstance(x, torch.Tensor) for x in tensors]):
        return [
            f"# {names} are those that fs.lab was given; batch must have {rows} rows.",
            "model.train()",
        ]
    return [
        f"# {names} are those that fs.lab was given. A step takes {rows} rows: the first ones, and",
        "# all again where the batch has fewer.",
        f"rows = torch.arange({rows}) % {length}",
        f"batch = {repeated}",
        "model.train()",
    ]


def _sample(state: LabState, model: LayeredModel) -> str:
    """Return the arguments of the model, of one sample, by which layers and stages are planned."""
    if state.model is not None:
        return "(torch.zeros(1, sizes.sequence, dtype=torch.int64),)"
    if isinstance(model.batch, Mapping):
        return "{name: x[:1] for name, x in batch.items()}"
    return f"({_input(model)}[:1],)"


def _input(model: LayeredModel) -> str:
    """Return the arguments of the model in a batch, as they are written in a call."""
    if isinstance(model.batch, Mapping):
        return "**batch"
    if isinstance(model.batch, tuple | list):
        return "batch[0]"
    return "batch"


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
        "    def forward(self, *args, **kwargs):",
        f"        return fs.remat(self.layer, {policy})(*args, **kwargs)",
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


def _layers(state: LabState, plan: Parallelism, model: LayeredModel) -> Lines:
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
        "sample": _sample(state, model),
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


def _loss(plan: Parallelism, model: LayeredModel) -> Lines:
    arguments = _input(model)
    value = _value_of_loss(model, _name_of_layers(plan))
    if model.has_buffers:
        return [
            "",
            "def loss_fn(params, buffers, batch):",
            f"    output, buffers = apply(params, buffers, {arguments})",
            f"    return {value}, buffers",
            "",
        ]
    return [
        "",
        "def loss_fn(params, batch):",
        f"    output, _ = apply(params, buffers, {arguments})",
        f"    return {value}",
        "",
    ]


def _name_of_layers(plan: Parallelism) -> str:
    """Return the name of the plan by which the output of a full model is sharded; "" without."""
    has_sharded_output = bool(plan.inner_axes) and not plan.in_stages
    return "layers" if has_sharded_output else ""


def _value_of_loss(model: LayeredModel, layers: str) -> str:
    """Return the loss of `output` and `batch`, as `LayeredModel.loss_of` computes it.

    Args:
        model: with the loss.
        layers: the name of the plan of the layers, whose outputs are sharded; "" without one.
    """
    is_by_name = isinstance(model.batch, Mapping)
    if layers and model.loss is not None:
        return f"loss({layers}.full(output), batch)"
    if layers and is_by_name:
        return f'{layers}.full(getattr(output, "loss", output))'
    if layers:
        return f"{layers}.cross_entropy(output, batch[1])"
    if model.loss is not None:
        return "loss(output, batch)"
    if is_by_name:
        return 'getattr(output, "loss", output)'
    return "cross_entropy(output.flatten(0, -2), batch[1].flatten())"


def _batch_spec(plan: Parallelism) -> str:
    axes = [axis for axis in ("replica", *plan.zero_axes) if axis in plan.axes]
    return f"P({_axes(axes)})"


def _step(plan: Parallelism, model: LayeredModel) -> Lines:
    options = [f"batch={_batch_spec(plan)}"]
    if model.has_buffers:
        options.append("has_buffers=True")
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


def _stages(state: LabState, plan: Parallelism, model: LayeredModel) -> Lines:
    default = vars(Parallelism())
    lines = ["parallelism = fs.Parallelism(", f"    data={plan.data},"]
    for name, value in vars(plan).items():
        # The layers recompute by themselves, and stages not again.
        if name not in ("data", "recompute") and value != default[name]:
            lines.append(f"    {name}={_value(value)},")
    lines += [
        ")",
        "plugin = fs.HybridParallelPlugin(",
        "    parallelism,",
        "    mesh=parallelism.mesh(),",
        f"    sample={_sample(state, model)},",
        f"    blocks={_quoted(model.blocks)},",
    ]
    if model.styles:
        styles = {pattern: _quoted(style) for pattern, style in model.styles.items()}
        lines.append(f"    tensor_rules={_mapping(styles, 4)},")
    return [*lines, ")", "booster = fs.Booster(plugin)"]


def _criterion(model: LayeredModel) -> Lines:
    """Return the lines of the loss of stages, but for one that `fs.lab` was given."""
    if model.loss is not None:
        return []
    return ["", "def loss(output, batch):", f"    return {_value_of_loss(model, '')}", ""]


def _booster(state: LabState) -> Lines:
    return [f"state = booster.init(model, {OPTIMIZERS[state.optimizer]}, loss)"]


# -- training --------------------------------------------------------------------------------------


def _training(state: LabState, model: LayeredModel) -> Lines:
    plan = state.parallelism
    lines = ["for _ in range(3):"]
    if state.model is not None:
        lines += [
            f"    ids = torch.randint(sizes.vocab, ({plan.rows_of_step}, sizes.sequence + 1))",
            "    batch = (ids[:, :-1], ids[:, 1:])",
        ]
    if plan.in_stages and isinstance(model.batch, Mapping):
        lines.append("    state, metrics = booster.step(state, batch)")
    elif plan.in_stages:
        lines += [
            "    # Of a pair the loss gets the second: here the full batch.",
            f"    state, metrics = booster.step(state, ({_input(model)}, batch))",
        ]
    elif model.has_buffers:
        lines.append("    params, state, buffers, metrics = step(params, state, buffers, batch)")
    else:
        lines.append("    params, state, metrics = step(params, state, batch)")
    return [*lines, '    print(float(metrics["loss"]))']
