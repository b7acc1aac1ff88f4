"""`search`: how to train a model with repeated layers on a number of devices, ranked.

all sizes and options ──divide?──> ──traced?──> ──least memory──> ──formula of time──> simulated ──>
                      rejected     rejected     rejected          the best             rejected

    ──programs of the best──> table
      memory: rejected
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import nn

from fshard.errors import FshardError, PlanError
from fshard.mesh.layout import PyTree
from fshard.optim.contract import Optimizer
from fshard.parallelism.value import Parallelism
from fshard.plan.cluster import Cluster, assert_cluster
from fshard.plan.estimate import LONGEST_PROGRAM, PlanEstimate
from fshard.plan.layers import LayerTracer
from fshard.plan.models import Transformer
from fshard.plan.program import Loss, layered_model
from fshard.plan.programs.shortened import ProgramCost
from fshard.plan.space import Candidate, Divided, candidates, divisors_text, plan_choices
from fshard.tables import Tabular

if TYPE_CHECKING:  # it is imported where a table is shown
    from rich.table import Table

SIMULATED = 48
"""The plans, the best by a formula of time or memory, whose schedules are simulated."""

SHOWN = 10
"""The plans that fit in a table."""

PROGRAMS = 240
"""The layers, times microbatches, of all programs that a search runs: about seven seconds."""

ERROR = 0.1
"""The part by which a formula of memory may be wrong: the program of a plan decides if it fits."""

LISTED = 12
"""The rejected plans that are listed."""

Kind = Literal["memory", "program"] | Divided
"""Why a plan is rejected: it does not fit, its program raises, or it does not divide a number."""

KINDS: tuple[Kind, ...] = ("memory", "program", "devices", "layers", "samples")
"""All of these, in the order in which they are listed."""


@dataclass(frozen=True)
class RejectedPlan:
    """A plan that does not fit, cannot run or does not divide.

    Args:
        plan: its sizes and options.
        reason: the number that rejects it, or the error of its program.
        kind: of the reason.
        peak: bytes of the fullest device, of a plan that does not fit.
    """

    plan: Parallelism
    reason: str
    kind: Kind = "memory"
    peak: float = 0.0


@dataclass(frozen=True, repr=False)
class Plans(Tabular):
    """The plans of a search that fit, the best first: a sequence of estimates.

    Prints as a table with reasons.

    Args:
        estimates: of the plans that fit.
        rejected: some that do not, of each kind of reason the nearest first, and one of a reason.
        model_flops: of a step, without recomputation; for model flops utilization.
        tried: the number of plans whose numbers divide.
        stages: of ZeRO that are one program, by its plan in `estimates`.
    """

    estimates: list[PlanEstimate]
    rejected: list[RejectedPlan] = field(repr=False)
    model_flops: float | None
    tried: int
    stages: Mapping[Parallelism, Sequence[int]] = field(
        default_factory=dict[Parallelism, Sequence[int]], repr=False
    )

    def __getitem__(self, index: int) -> PlanEstimate:
        return self.estimates[index]

    def __len__(self) -> int:
        return len(self.estimates)

    def __iter__(self) -> Iterator[PlanEstimate]:
        return iter(self.estimates)

    def table(self) -> Table:
        """Return the ten best plans and those that were rejected as a rich table.

        The last column has notes too: the layers that a plan leaves replicated, and why.
        """
        from rich.table import Table

        texts = ("mesh", "ZeRO", "microbatches", "schedule", "recompute")
        numbers = ("step, s", "MFU", "GB")
        table = Table(*texts, *numbers, "why not")
        for column, name in enumerate((*texts, *numbers)):
            if name == "ZeRO" or name in numbers:
                table.columns[column].justify = "right"

        for estimate in self.estimates[:SHOWN]:
            seconds = f"{estimate.seconds:.3g}"
            if estimate.program is None:
                seconds = f"~{seconds}"
            utilization = f"{_digits(100 * estimate.utilization(self.model_flops))} %"
            peak = _digits(estimate.peak / 1e9, decimals=1)
            remarks = [text for text in (self.slower(estimate), *estimate.notes) if text]
            row = _row(estimate.plan, self.stages.get(estimate.plan, ()))
            table.add_row(*row, seconds, utilization, peak, "; ".join(remarks))
        table.add_section()
        for rejected in self.rejected:
            table.add_row(*_row(rejected.plan), "", "", "", rejected.reason)
        shown = min(SHOWN, len(self.estimates))
        table.caption = (
            f"The best {shown} of {self.tried:,} plans, by the cost of their programs, "
            f"of {len(self.estimates)} that are nearly as fast and fit"
        )
        has_formulas = any([x.program is None for x in self.estimates[:SHOWN]])
        if has_formulas:
            table.caption += ". ~ by formulas: the program is too long to run in a search"
        return table

    def slower(self, estimate: PlanEstimate) -> str:
        """Return the term by which a plan is slower than the first; "" if there is none."""
        first = self.estimates[0]
        if estimate is first:
            return ""
        longer = dict[str, float]()
        for name, seconds in estimate.terms.items():
            longer[name] = seconds - first.terms.get(name, 0.0)
        name = max(longer, key=lambda name: longer[name])
        is_rounding = longer[name] <= 1e-6 * first.seconds
        if is_rounding:  # it is as fast, or faster: the goal is another one
            return ""
        return f"{name}: {_digits(1e3 * longer[name])} ms more"


def _digits(number: float, decimals: int = 0) -> str:
    """Return a number with some decimals; below 1, where a small model would show zeros, two digits."""
    return f"{number:,.{decimals}f}" if number >= 1 else f"{number:.2g}"


def _row(plan: Parallelism, stages: Sequence[int] = ()) -> tuple[str, ...]:
    """Return the cells of a plan, before its numbers; `stages` of ZeRO are one program."""
    # Where data is what is left, and nothing is, there is no number of it.
    sizes = plan.axes if plan.data is not None else replace(plan, data=1).axes
    mesh = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    zero = " = ".join(map(str, stages)) or str(plan.zero_stage)
    if plan.state_memory == "host":
        zero += ", host"
    schedule = ""
    if plan.in_stages:
        has_chunks = plan.chunks is not None and plan.chunks > 1
        schedule = f"{plan.schedule} x {plan.chunks}" if has_chunks else plan.schedule
    recompute = "" if plan.recompute == "never" else str(plan.recompute)
    return " ".join(mesh), zero, f"{plan.microbatches} x {plan.rows}", schedule, recompute


# -- the search ------------------------------------------------------------------------------------


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
    """Rank the plans of training a model with repeated layers.

    A plan is a `Parallelism`: sizes of the mesh, ZeRO, stages, microbatches, recomputation.

    Args:
        model: a module, on the meta device if it is large; or the sizes of a `Transformer`.
        batch: of one or more samples: the model's input, a pair of it and labels, or a dict of
            arguments. Not for a `Transformer`.
        devices: their number, or several.
        cluster: the machine: see `fs.plan.cluster`.
        global_batch: samples of a step, on all devices.
        optimizer: of `fs.optim`.
        loss: of the output and the batch. Default: `output.loss` for a dict, else the cross-entropy
            of logits and labels.
        blocks: path of the repeated layers; default: the longest `ModuleList`.
        goal: the best plan has the least "time" of a step, "cost", which is time by devices, or
            "memory" of a device.
        constraints: fields of `Parallelism` with a value, or several: pipeline=8, rows=(1, 2).

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
    assert_cluster(cluster, "plan.search")
    counts = _counts(devices, global_batch)
    layered = layered_model(model, batch, optimizer, loss, blocks)
    choices = plan_choices(constraints, layered.experts)
    numbers = " or ".join(map(str, counts))

    of_each_count = [
        candidates(layered.layers, count, global_batch, choices, cluster) for count in counts
    ]
    tracer = LayerTracer(layered, cluster)
    fitting, rejected, tried = _sorted_out(chain.from_iterable(of_each_count), tracer)
    if not tried:
        options = ", ".join(f"{name}={x!r}" for name, x in constraints.items()) or "any option"
        raise PlanError(
            f"plan.search: sizes must divide {numbers} devices, {layered.layers} layers and a "
            f"global batch of {global_batch}; no plan with {options} does. Divisors: "
            f"{divisors_text(counts, layered.layers, global_batch)}."
        )

    ranked_before, ranked = _GOALS[goal]
    simulated, passing_memory = _simulated(sorted(fitting, key=ranked_before))
    rejected += passing_memory
    distinct, stages = _distinct_programs(simulated)
    estimates, passing_memory = _by_programs(distinct, ranked)
    rejected += passing_memory
    if not estimates:
        raise _nothing_fits(rejected, numbers)
    flops = model.flops(global_batch) if isinstance(model, Transformer) else None
    return Plans(estimates, _listed(rejected), flops, tried, stages)


def _counts(devices: int | Sequence[int], global_batch: int) -> tuple[int, ...]:
    counts = (devices,) if isinstance(devices, int) else tuple(devices)
    if not counts or min(*counts, global_batch) < 1:
        raise PlanError(
            f"plan.search: devices and global_batch must be >= 1; got {devices} and {global_batch}."
        )
    return counts


class _Sorted(NamedTuple):
    """Candidates: those that may fit, those that are rejected, and the number that were tried."""

    fitting: list[PlanEstimate]
    rejected: list[RejectedPlan]
    tried: int


def _sorted_out(tried: Iterable[Candidate], tracer: LayerTracer) -> _Sorted:
    """Reject the candidates that do not divide, cannot run, or do not fit by their least memory."""
    fitting = list[PlanEstimate]()
    rejected = list[RejectedPlan]()
    errors = dict[Parallelism, str]()
    count = 0
    limit = tracer.cluster.memory
    for plan, divided, reason in tried:
        if divided is not None:
            rejected.append(RejectedPlan(plan, reason, divided))
            continue
        count += 1
        estimate = PlanEstimate(plan, tracer, by_formula=True)
        if error := _trace_error(estimate, errors):
            rejected.append(RejectedPlan(plan, error, "program"))
            continue
        least = estimate.least_memory()
        if least <= (1 + ERROR) * limit:
            fitting.append(estimate)
        else:
            over = f"{(least - limit) / 1e9:,.2f} GB over the memory"
            reason = f"{over}, {estimate.in_flight} microbatches in flight"
            rejected.append(RejectedPlan(plan, reason, "memory", least))
    return _Sorted(fitting, rejected, count)


def _trace_error(estimate: PlanEstimate, errors: dict[Parallelism, str]) -> str:
    """Trace the layers of a plan, once for all that share them alike; return the error, or ""."""
    key = replace(estimate.plan.of_layer(), rows=1)
    if key not in errors:
        errors[key] = _error_of(partial(estimate.tracer.cost, estimate.plan))
    return errors[key]


def _error_of(run: Callable[[], object]) -> str:
    """Return the first line of the error of a program, or ""."""
    try:
        run()
    except (FshardError, ValueError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return ""


def _simulated(
    ranked: Sequence[PlanEstimate],
) -> tuple[list[PlanEstimate], list[RejectedPlan]]:
    """Return the first plans whose simulated schedules fit, and those before them that do not."""
    estimates = list[PlanEstimate]()
    rejected = list[RejectedPlan]()
    for estimate in ranked:
        if len(estimates) == SIMULATED:
            break
        is_near = estimate.peak <= (1 + ERROR) * estimate.cluster.memory
        if is_near and estimate.program_size <= LONGEST_PROGRAM:
            estimates.append(estimate)  # its program decides
        elif estimate.excess():
            rejected.append(_passing_memory(estimate))
        else:
            estimates.append(estimate)
    return estimates, rejected


def _passing_memory(estimate: PlanEstimate) -> RejectedPlan:
    return RejectedPlan(estimate.plan, estimate.excess(), "memory", estimate.peak)


def _distinct_programs(
    estimates: Sequence[PlanEstimate],
) -> tuple[list[PlanEstimate], dict[Parallelism, list[int]]]:
    """Return one estimate for each program, and the stages of ZeRO that share it.

    In stages of the model, ZeRO-2 is ZeRO-1: a device reduces gradients after its last microbatch.
    """
    distinct = dict[Parallelism, PlanEstimate]()
    stages = dict[Parallelism, list[int]]()
    for estimate in sorted(estimates, key=lambda x: x.plan.zero_stage):
        plan = estimate.plan
        is_as_one = plan.in_stages and plan.zero_stage == 2
        first = replace(plan, zero_stage=1) if is_as_one else plan
        known = distinct.setdefault(first, estimate)
        stages.setdefault(known.plan, []).append(plan.zero_stage)
    in_order = [x for x in estimates if x.plan in stages]
    return in_order, stages


def _by_programs(
    estimates: Sequence[PlanEstimate], ranked: Key
) -> tuple[list[PlanEstimate], list[RejectedPlan]]:
    """Return the estimates, the best ones by the cost of their programs, and those that do not fit.

    The best by the formulas are costed by their programs, until all that a table shows are: one that
    falls behind makes room for another. Programs that are too long together stay by the formulas.
    """
    fitting = list[PlanEstimate]()
    rejected = list[RejectedPlan]()
    left = PROGRAMS
    for by_formula in sorted(estimates, key=ranked):
        estimate = by_formula
        ahead = [x for x in fitting if ranked(x) <= ranked(by_formula)]
        is_shown = len(ahead) < SHOWN
        if is_shown and by_formula.program_size <= min(left, LONGEST_PROGRAM):
            left -= by_formula.program_size
            estimate = replace(by_formula, by_formula=False)
            if error := _error_of(partial(_run_program, estimate)):
                rejected.append(RejectedPlan(estimate.plan, error, "program"))
                continue
        if estimate.excess():
            rejected.append(_passing_memory(estimate))
        else:
            fitting.append(estimate)
    return sorted(fitting, key=ranked), rejected


def _run_program(estimate: PlanEstimate) -> ProgramCost | None:
    return estimate.program


def _listed(rejected: Sequence[RejectedPlan]) -> list[RejectedPlan]:
    """Return the rejected plans to list: the nearest ones, of each kind of reason in turn.

    So a dozen plans that do not fit hide neither an error of a program nor a number that does not
    divide. Of several plans with one reason only the nearest is listed.
    """
    nearest = dict[str, RejectedPlan]()
    for plan in sorted(rejected, key=lambda plan: plan.peak):
        nearest.setdefault(plan.reason, plan)
    by_kind = dict[Kind, list[RejectedPlan]]()
    for kind in KINDS:
        by_kind[kind] = [plan for plan in nearest.values() if plan.kind == kind]
    in_turn = chain.from_iterable(zip_longest(*by_kind.values()))
    return [plan for plan in in_turn if plan is not None][:LISTED]


def _nothing_fits(rejected: Sequence[RejectedPlan], devices: str) -> PlanError:
    too_large = [plan for plan in rejected if plan.kind == "memory"]
    if too_large:
        nearest = min(too_large, key=lambda plan: plan.peak)
        return PlanError(
            f"plan.search: no plan of {devices} devices fits; the nearest is {nearest.plan}: "
            f"{nearest.reason}. Take more devices, or those with more memory."
        )
    # One of each kind: the plan that raises is seldom the one that the reader has in mind.
    first = dict[Kind, RejectedPlan]()
    for plan in rejected:
        first.setdefault(plan.kind, plan)
    nearest = [f"{plan.plan}: {plan.reason.rstrip('.')}" for plan in first.values()]
    return PlanError(f"plan.search: no plan of {devices} devices runs. {'. '.join(nearest)}.")


Key = Callable[[PlanEstimate], float]

_GOALS: dict[str, tuple[Key, Key]] = {
    "time": (lambda x: x.approximate_seconds(), lambda x: x.seconds),
    "cost": (
        lambda x: x.approximate_seconds() * x.plan.devices,
        lambda x: x.seconds * x.plan.devices,
    ),
    "memory": (lambda x: x.least_memory(), lambda x: x.peak),
}
"""Plans are ranked by these, before their schedules are simulated and after."""
