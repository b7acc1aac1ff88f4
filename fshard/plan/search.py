"""`search`: how to train a model with repeated layers on a number of devices, ranked.

all sizes and options ──divide?──> ──memory of parameters──> ──formula of time──> the best: schedules simulated ──> table
                         rejected       rejected                                    memory: rejected
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from fshard.errors import FshardError, PlanError
from fshard.experts.module import MoE
from fshard.mesh.layout import PyTree, map_leaves
from fshard.optim.contract import Optimizer
from fshard.plan.cluster import Cluster
from fshard.plan.estimate import PlanEstimate
from fshard.plan.layers import LayerTracer
from fshard.plan.model_plan import IN_LOOPS, ONE_STAGE, ModelPlan
from fshard.plan.models import Transformer
from fshard.plan.program import LayeredModel, Loss
from fshard.tables import Tabular
from fshard.transforms.module.replica import copy_on_meta

if TYPE_CHECKING:  # it is imported where a table is shown
    from rich.table import Table

SIMULATED = 48
"""The plans, the best by a formula of time or memory, whose schedules are simulated."""
LISTED = 12
"""The rejected plans that are listed."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "sequence": (1,),
    "replicas": (1,),
    "state_memory": ("device",),
    "zero_stage": (0, 1, 2, 3),
    "rows": (1, 2, 4, 8),
    "recompute": ("never", "full"),
    "schedule": ("1f1b", "interleaved", "zb-h1", "zbv"),
}
"""The values that are tried; `data`, `pipeline` and `tensor` are all that divide the devices."""


@dataclass(frozen=True)
class RejectedPlan:
    """A plan that does not fit or cannot run, with the number that rejects it."""

    plan: ModelPlan
    reason: str


@dataclass(frozen=True, repr=False)
class Plans(Tabular):
    """The plans of a search that fit, the best first. A sequence of estimates; prints as a table with reasons.

    Args:
        estimates: of the plans that fit.
        rejected: some that do not, the nearest first.
        model_flops: of a step, without recomputation; for model flops utilization.
        tried: the number of plans.
    """

    estimates: list[PlanEstimate]
    rejected: list[RejectedPlan] = field(repr=False)
    model_flops: float | None
    tried: int

    def __getitem__(self, index: int) -> PlanEstimate:
        return self.estimates[index]

    def __len__(self) -> int:
        return len(self.estimates)

    def __iter__(self) -> Iterator[PlanEstimate]:
        return iter(self.estimates)

    def table(self) -> Table:
        """Return the ten best plans and those that were rejected as a rich table."""
        from rich.table import Table

        table = Table("mesh", "ZeRO", "microbatches", "schedule", "recompute", "step, s", "MFU", "GB", "why not")
        for column in (1, 5, 6, 7):
            table.columns[column].justify = "right"
        for estimate in self.estimates[:10]:
            numbers = (
                f"{estimate.seconds:.3g}",
                f"{100 * estimate.utilization(self.model_flops):.0f} %",
                f"{estimate.peak / 1e9:.1f}",
            )
            table.add_row(*_row(estimate.plan), *numbers, self.slower(estimate))
        table.add_section()
        for rejected in self.rejected:
            table.add_row(*_row(rejected.plan), "", "", "", rejected.reason)
        table.caption = f"{self.tried:,} plans, {len(self.estimates)} simulated that fit"
        return table

    def slower(self, estimate: PlanEstimate) -> str:
        """Return the term by which a plan is slower than the first."""
        if estimate is self.estimates[0]:
            return ""
        longer = {name: x - self.estimates[0].terms[name] for name, x in estimate.terms.items()}
        name = max(longer, key=lambda name: longer[name])
        return f"{name}: {1e3 * longer[name]:,.0f} ms more"


def _row(plan: ModelPlan) -> tuple[str, ...]:
    schedule = f"{plan.schedule} x {plan.chunks}" if plan.chunks > 1 else plan.schedule
    return (
        " ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1),
        str(plan.zero_stage),
        f"{plan.microbatches} x {plan.rows}",
        schedule if plan.pipeline > 1 else "",
        "" if plan.recompute == "never" else plan.recompute,
    )


def search(
    model: nn.Module | Transformer,
    batch: PyTree = None,
    *,
    devices: int | Sequence[int],
    cluster: Cluster,
    global_batch: int,
    optimizer: Optimizer,
    loss: Loss | None = None,
    blocks: str | None = None,
    goal: Literal["time", "cost", "memory"] = "time",
    **constraints: Any,
) -> Plans:
    """Rank the plans of training a model with repeated layers: sizes of the mesh, ZeRO, stages, microbatches, recomputation.

    Args:
        model: a module, on the meta device if it is large; or the sizes of a `Transformer`.
        batch: of one or more samples: the model's input, a pair of it and labels, or a dict of arguments. Not for a
            `Transformer`.
        devices: their number, or several.
        cluster: the machine: see `fs.plan.cluster`.
        global_batch: samples of a step, on all devices.
        optimizer: of `fs.optim`.
        loss: of the output and the batch. Default: `output.loss` for a dict, else the cross-entropy of logits and labels.
        blocks: path of the repeated layers; default: the longest `ModuleList`.
        goal: the best plan has the least "time" of a step, "cost", which is time by devices, or "memory" of a device.
        constraints: fields of `ModelPlan` with a value, or several: pipeline=8, zero_stage=(1, 3).

    Raises:
        PlanError: if no plan fits, with the smallest excess, or if none divides.

    >>> import fshard as fs
    >>> small = Transformer(layers=4, hidden=256, ffn=1024, heads=4, kv_heads=4, vocab=1000, sequence=128)
    >>> h100, adamw = fs.plan.cluster("h100"), fs.optim.with_master_weights(fs.optim.adamw(3e-4))
    >>> plans = search(small, devices=8, cluster=h100, global_batch=64, optimizer=adamw, rows=8)
    >>> plans[0].plan.devices, plans[0].seconds <= plans[1].seconds
    (8, True)
    """
    if goal not in _GOALS:
        raise PlanError(f"plan.search: goal must be one of {', '.join(_GOALS)}; got {goal!r}.")
    first_key, key = _GOALS[goal]
    counts = _counts(devices, global_batch)
    layered = layered_model(model, batch, optimizer, loss, blocks)
    choices = _choices(constraints, layered.experts)
    tracer, errors, tried = LayerTracer(layered, cluster), dict[str, str](), 0
    rejected, fitting = list[tuple[float, RejectedPlan]](), list[tuple[float, PlanEstimate]]()
    for plan in chain.from_iterable(_plans(layered.layers, count, global_batch, choices, cluster) for count in counts):
        tried += 1
        estimate = PlanEstimate(plan, tracer)
        if error := _cost_errors(estimate, errors):
            rejected.append((float("inf"), RejectedPlan(plan, error)))
            continue
        least = least_memory(estimate)
        if least > cluster.memory:
            over = f"{(least - cluster.memory) / 1e9:,.2f} GB over the memory"
            reason = f"{over}, {estimate.in_flight} microbatches in flight"
            rejected.append((least, RejectedPlan(plan, reason)))
        else:
            fitting.append((first_key(estimate), estimate))
    numbers = " or ".join(map(str, counts))
    if not tried:
        given = ", ".join(f"{name}={x!r}" for name, x in constraints.items()) or "any option"
        raise PlanError(
            f"plan.search: sizes must divide {numbers} devices, {layered.layers} layers and a global batch of "
            f"{global_batch}; no plan with {given} does. Divisors: {_divisors(counts, layered.layers, global_batch)}."
        )
    estimates = list[PlanEstimate]()
    for _, estimate in sorted(fitting, key=lambda pair: pair[0]):
        if len(estimates) == SIMULATED:
            break
        if reason := estimate.excess():
            rejected.append((estimate.peak, RejectedPlan(estimate.plan, reason)))
        else:
            estimates.append(estimate)
    rejected.sort(key=lambda pair: pair[0])
    if not estimates:
        raise _nothing_fits(rejected[0], numbers)
    flops = model.flops(global_batch) if isinstance(model, Transformer) else None
    nearest = {plan.reason: plan for _, plan in reversed(rejected)}  # one for each reason
    return Plans(sorted(estimates, key=key), [*reversed(nearest.values())][:LISTED], flops, tried)


def _counts(devices: int | Sequence[int], global_batch: int) -> tuple[int, ...]:
    counts = (devices,) if isinstance(devices, int) else tuple(devices)
    if not counts or min(*counts, global_batch) < 1:
        raise PlanError(f"plan.search: devices and global_batch must be >= 1; got {devices} and {global_batch}.")
    return counts


def _divisors(devices: Sequence[int], layers: int, batch: int) -> str:
    sizes = {"devices": devices[0], "layers": layers, "global batch": batch}
    return "; ".join(
        f"of {name} {', '.join(str(size) for size in range(1, count + 1) if count % size == 0)}"
        for name, count in sizes.items()
    )


def _nothing_fits(nearest: tuple[float, RejectedPlan], devices: str) -> PlanError:
    size, (plan, reason) = nearest[0], vars(nearest[1]).values()
    if size == float("inf"):
        return PlanError(f"plan.search: the model cannot be planned, such as with {plan}: {reason}")
    return PlanError(
        f"plan.search: no plan of {devices} devices fits; the nearest is {plan}: {reason}. "
        "Take more devices, or those with more memory."
    )


def least_memory(estimate: PlanEstimate) -> int:
    """Return bytes that the fullest device has at least: the first one has most microbatches in flight."""
    plan, sizes = estimate.plan, list[int]()
    for coordinate, cost in enumerate(estimate.by_device):
        state = cost.state if plan.state_memory == "device" else 0
        shares = (cost.parameters, 3), (cost.gradients, 2 if plan.pipeline == 1 else 4), (state, 1)
        static = sum(size // plan.data if plan.zero_stage >= stage else size for size, stage in shares)
        layers = estimate.layers // (plan.pipeline * plan.chunks) * plan.chunks
        saved = cost.saved // plan.chunks if coordinate else estimate.model.layer.saved * layers * estimate.in_flight
        sizes.append(static + saved + estimate.workspace(coordinate))
    return max(sizes)


_GOALS: dict[str, tuple[Callable[[PlanEstimate], float], Callable[[PlanEstimate], float]]] = {
    "time": (lambda x: x.bound(), lambda x: x.seconds),
    "cost": (lambda x: x.bound() * x.plan.devices, lambda x: x.seconds * x.plan.devices),
    "memory": (least_memory, lambda x: x.peak),
}
"""Plans are ranked by these, before their schedules are simulated and after."""


def _cost_errors(estimate: PlanEstimate, errors: dict[str, str]) -> str:
    """Return why the layers of a plan cannot run; "" if they can."""
    key = repr([getattr(estimate.plan, name) for name in ("tensor", "sequence", "sequence_mode", "experts")])
    if key not in errors:
        try:
            errors[key] = ""
            estimate.tracer.cost(estimate.plan)
        except (FshardError, ValueError) as error:
            errors[key] = str(error).partition("\n")[0]
    return errors[key]


def _plans(
    layers: int, devices: int, global_batch: int, choices: Mapping[str, Collection[Any]], cluster: Cluster
) -> Iterator[ModelPlan]:
    """Yield all plans whose sizes divide, with the values that are chosen."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    node = cluster.links[0].devices or devices
    options = [choices[name] for name in ("zero_stage", "rows", "recompute", "schedule", "state_memory")]
    axes = [choices[name] for name in ("sequence", "experts", "replicas")]
    for tensor, pipeline, sequence, experts, replicas in product(divisors, divisors, *axes):
        data, rest = divmod(devices, tensor * pipeline * sequence * experts * replicas)
        sizes = {"data": data, "pipeline": pipeline, "tensor": tensor, "sequence": sequence, "experts": experts}
        sizes["replicas"] = replicas
        is_legal = not rest and tensor <= node and pipeline <= layers and (replicas == 1 or pipeline == 1)
        if not is_legal or any(size not in choices.get(name, (size,)) for name, size in sizes.items()):
            continue
        mode = choices.get("sequence_mode", ("megatron",) if tensor > 1 and sequence == 1 else ("gather",))
        for zero_stage, rows, recompute, schedule, memory, sequence_mode in product(*options, mode):
            microbatches, rest = divmod(global_batch, data * experts * replicas * rows)
            is_sharded = data > 1 or zero_stage == min(choices["zero_stage"])
            is_first = pipeline > 1 or schedule == next(iter(choices["schedule"]))
            if rest or not microbatches or not is_sharded or not is_first:
                continue
            if sequence_mode == "megatron" and (tensor == 1 or sequence > 1):
                continue
            if memory == "host" and pipeline > 1:
                continue
            for chunks in _chunks(schedule, pipeline, layers, choices):
                if microbatches in choices.get("microbatches", (microbatches,)):
                    yield ModelPlan(
                        **sizes,
                        zero_stage=zero_stage,
                        rows=rows,
                        microbatches=microbatches,
                        schedule=schedule,
                        chunks=chunks,
                        recompute=recompute,
                        sequence_mode=sequence_mode,
                        state_memory=memory,
                    )


def _chunks(schedule: str, pipeline: int, layers: int, choices: Mapping[str, Collection[Any]]) -> Iterator[int]:
    """Yield the numbers of stages of a device."""
    legal = (1,) if pipeline == 1 or schedule in ONE_STAGE else (2, 4, 8) if schedule in IN_LOOPS else (2,)
    for chunks in choices.get("chunks", legal):
        if chunks in legal and chunks * pipeline <= layers:
            yield chunks


def _choices(constraints: Mapping[str, Any], experts: int = 0) -> dict[str, Collection[Any]]:
    """Return the values of each option, of layers with a number of experts; raise naming all that are unknown."""
    names = [field.name for field in fields(ModelPlan)]
    if unknown := [name for name in constraints if name not in names]:
        raise PlanError(f"plan.search: {', '.join(unknown)} must be among {', '.join(names)}.")
    given: dict[str, Collection[Any]] = {
        name: tuple(x) if isinstance(x, Collection) and not isinstance(x, str) else (x,)
        for name, x in constraints.items()
    }
    for name, values in given.items():
        for value in values:
            ModelPlan(**{name: value})  # raises if it is not legal
    if not experts and max(given.get("experts", (1,))) > 1:
        raise PlanError(f"plan.search: experts must be 1, since the layers have none; got {constraints['experts']}.")
    sizes = tuple([size for size in (1, 8, 64) if size == 1 or experts % size == 0 < experts])
    return {**_CHOICES, "experts": sizes, **given}


def layered_model(
    model: nn.Module | Transformer, batch: PyTree, optimizer: Optimizer, loss: Loss | None, blocks: str | None
) -> LayeredModel:
    """Return the model as one with a number of layers."""
    if isinstance(model, Transformer):
        ids = torch.empty(1, model.sequence, dtype=torch.int64, device="meta")
        return LayeredModel(model.build, "layers", model.layers, (ids, ids), loss, optimizer, model.experts)
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"plan.search: model must be a module or a Transformer; got {type(model).__name__}. Programs: plan.rank."
        )
    lists = {name: len(child) for name, child in model.named_modules() if isinstance(child, nn.ModuleList)}
    if blocks is None and not lists:
        raise PlanError(
            "plan.search: the model must have its repeated layers in a ModuleList; got none. Name one: blocks=."
        )
    path = blocks or max(lists, key=lambda name: lists[name])
    if path not in lists:
        raise PlanError(f"plan.search: blocks must be a ModuleList of the model, {', '.join(lists)}; got {path!r}.")
    shapes = [{name: x.shape for name, x in layer.named_parameters()} for layer in model.get_submodule(path).children()]
    if different := [str(index) for index, shape in enumerate(shapes) if shape != shapes[0]]:
        raise PlanError(
            f"plan.search: the layers {path} must have equal parameters; those of {', '.join(different)} differ from 0's. "
            "Rank its programs: plan.rank."
        )
    sample = map_leaves(lambda x: x[:1].to("meta"), batch)
    experts = [x.router.out_features for x in model.modules() if isinstance(x, MoE)]
    experts += [int(x.num_experts) for x in cast(Any, model).modules() if hasattr(x, "_is_expert_parallel")]
    return LayeredModel(
        partial(_shortened, model, path), path, lists[path], sample, loss, optimizer, max(experts, default=0)
    )


def _shortened(model: nn.Module, path: str, layers: int) -> nn.Module:
    """Return a copy of a model with its first layers, without values."""
    copy = copy_on_meta(model)
    parent, _, name = path.rpartition(".")
    blocks = cast(nn.ModuleList, copy.get_submodule(path))
    setattr(copy.get_submodule(parent), name, blocks[:layers])
    return copy
