"""`search`: how to train a model with repeated layers on a number of devices, ranked.

all sizes and options ──divide?──> ──memory of parameters──> ──formula of time──> the best: schedules simulated ──> table
                         rejected       rejected                                    memory: rejected
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fshard.errors import FshardError, PlanError
from fshard.mesh.layout import PyTree
from fshard.optim.contract import Optimizer
from fshard.plan.cluster import Cluster
from fshard.plan.estimate import PlanEstimate
from fshard.plan.layers import LayerTracer
from fshard.plan.model_plan import ModelPlan
from fshard.plan.models import Transformer
from fshard.plan.program import Loss, layered_model
from fshard.plan.space import divisors_text, legal_plans, plan_choices
from fshard.tables import Tabular

if TYPE_CHECKING:  # it is imported where a table is shown
    from rich.table import Table

SIMULATED = 48
"""The plans, the best by a formula of time or memory, whose schedules are simulated."""
LISTED = 12
"""The rejected plans that are listed."""


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

        table = Table(
            "mesh",
            "ZeRO",
            "microbatches",
            "schedule",
            "recompute",
            "step, s",
            "MFU",
            "GB",
            "why not",
        )
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
        f"{plan.zero_stage}, host" if plan.state_memory == "host" else str(plan.zero_stage),
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
    choices = plan_choices(constraints, layered.experts)
    tracer, errors, tried = LayerTracer(layered, cluster), dict[str, str](), 0
    rejected, fitting = list[tuple[float, RejectedPlan]](), list[tuple[float, PlanEstimate]]()
    for plan in chain.from_iterable(
        legal_plans(layered.layers, count, global_batch, choices, cluster) for count in counts
    ):
        tried += 1
        estimate = PlanEstimate(plan, tracer)
        if error := _trace_error(estimate, errors):
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
        options = ", ".join(f"{name}={x!r}" for name, x in constraints.items()) or "any option"
        raise PlanError(
            f"plan.search: sizes must divide {numbers} devices, {layered.layers} layers and a global batch of "
            f"{global_batch}; no plan with {options} does. Divisors: {divisors_text(counts, layered.layers, global_batch)}."
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
        raise PlanError(
            f"plan.search: devices and global_batch must be >= 1; got {devices} and {global_batch}."
        )
    return counts


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
        static = sum(
            size // plan.data if plan.zero_stage >= stage else size for size, stage in shares
        )
        layers = estimate.layers // (plan.pipeline * plan.chunks) * plan.chunks
        saved = (
            cost.saved // plan.chunks
            if coordinate
            else estimate.model.layer.saved * layers * estimate.in_flight
        )
        sizes.append(static + saved + estimate.workspace(coordinate))
    return max(sizes)


_GOALS: dict[str, tuple[Callable[[PlanEstimate], float], Callable[[PlanEstimate], float]]] = {
    "time": (lambda x: x.approximate_seconds(), lambda x: x.seconds),
    "cost": (
        lambda x: x.approximate_seconds() * x.plan.devices,
        lambda x: x.seconds * x.plan.devices,
    ),
    "memory": (least_memory, lambda x: x.peak),
}
"""Plans are ranked by these, before their schedules are simulated and after."""


def _trace_error(estimate: PlanEstimate, errors: dict[str, str]) -> str:
    """Trace the layers of a plan, once for all that share them alike; return the error, "" if there is none."""
    names = ("tensor", "sequence", "sequence_mode", "experts", "recompute")
    key = repr([getattr(estimate.plan, name) for name in names])
    if key not in errors:
        try:
            errors[key] = ""
            estimate.tracer.cost(estimate.plan)
        except (FshardError, ValueError, RuntimeError) as error:
            errors[key] = str(error).partition("\n")[0]
    return errors[key]
