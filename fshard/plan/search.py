"""`search`: how to train a model with repeated layers on a number of devices, ranked.

all sizes and options ──divide?──> ──traced?──> ──least memory──> ──formula of time──> simulated ──>
                      rejected     rejected     rejected          the best             rejected

    ──programs of the best──> table
      memory: rejected
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple

from torch import nn

from fshard.errors import PlanError
from fshard.mesh.layout import PyTree
from fshard.optim.contract import Optimizer
from fshard.parallelism.value import Parallelism
from fshard.plan.cluster import Cluster, assert_cluster
from fshard.plan.estimate import LONGEST_PROGRAM, PlanEstimate
from fshard.plan.layers import LayerTracer
from fshard.plan.models import Transformer
from fshard.plan.program import Loss, layered_model
from fshard.plan.programs.shortened import ProgramCost
from fshard.plan.space import (
    KINDS,
    Candidate,
    Choices,
    Kind,
    RejectedPlan,
    advice,
    candidates,
    divisors_text,
    plan_choices,
)
from fshard.plan.tables.layout import as_constraints, layout_fields, layout_text
from fshard.plan.tables.summary import SHOWN, Training, plans_dict, plans_table
from fshard.plan.tables.why import Reason, rejected_reason, slower_reason, slower_text
from fshard.tables import Table, Tabular, text_of

SIMULATED = 48
"""The plans, the best by a formula of time or memory, whose schedules are simulated."""

LARGEST_COUNT = 2**20
"""Devices and samples of a step: their divisors are tried one after another."""

MOST_LAYERS = 100_000
"""The layers of a model: more are a mistake, and each is placed on a stage."""

PROGRAMS = 200
"""The layers, times microbatches, of all programs that a search runs: about eight seconds."""

ERROR = 0.1
"""The part by which a formula of memory may be wrong: the program of a plan decides if it fits."""

LISTED = 12
"""The rejected plans that are listed."""


@dataclass(frozen=True, repr=False)
class Plans(Tabular):
    """The plans of a search that fit, the best first: a sequence of estimates.

    Prints as a table with reasons.

    Args:
        estimates: of the plans that fit; those by formulas alone are last.
        rejected: some that do not, of each kind of reason the nearest first, and one of a reason.
        tried: the number of plans whose numbers divide.
        stages: of ZeRO that are one program, by its plan in `estimates`.
        choices: the values of each field that were tried.
    """

    estimates: list[PlanEstimate]
    rejected: list[RejectedPlan] = field(repr=False)
    tried: int
    stages: Mapping[Parallelism, Sequence[int]] = field(
        default_factory=dict[Parallelism, Sequence[int]], repr=False
    )
    choices: Choices = field(default_factory=dict[str, Collection[Any]], repr=False)

    def __getitem__(self, index: int) -> PlanEstimate:
        return self.estimates[index]

    def __len__(self) -> int:
        return len(self.estimates)

    def __iter__(self) -> Iterator[PlanEstimate]:
        return iter(self.estimates)

    @property
    def model_flops(self) -> float:
        """The operations of the model in a step, without recomputation."""
        return self.estimates[0].model_flops

    def table(self, *, tokens: float | None = None, price: float | None = None) -> Table:
        """Return the ten best plans, and below them those that were rejected, as a table.

        Of plans on several numbers of devices, the best of each number. The last column has notes
        too: the layers that a plan leaves replicated, and why.

        Args:
            tokens: of a training, for its days.
            price: of a device and hour, for its cost.
        """
        training = Training(tokens, price)
        remarks = [self._remarks(estimate) for estimate in self.estimates]
        return plans_table(
            self.estimates, remarks, self.rejected, self.tried, training, self.stages
        )

    def text(self, *, tokens: float | None = None, price: float | None = None) -> str:
        """Return the table as text.

        Args:
            tokens, price: see `table`.
        """
        return text_of(self.table(tokens=tokens, price=price))

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers of the ten best plans, and the terms by which each is slower."""
        rows = list[dict[str, Any]]()
        for estimate in self.estimates[:SHOWN]:
            rows.append(
                {
                    "plan": layout_text(estimate.plan),
                    "seconds": estimate.seconds,
                    "mfu": estimate.utilization(),
                    "peak": float(estimate.peak),
                    "reason": self.slower(estimate),
                }
            )
        return rows

    def slower(self, estimate: PlanEstimate) -> str:
        """Return by how much a plan is slower than the first, and by which terms.

        "" if it is not slower, as a later plan may be if the goal is another one than time.
        """
        return slower_text(self.estimates[0].terms, estimate.terms)

    def _remarks(self, estimate: PlanEstimate) -> str:
        texts = [self.slower(estimate), *estimate.notes]
        return "; ".join([text for text in texts if text])

    def why(self, layout: str | Mapping[str, Any] | Parallelism) -> str:
        """Return the terms by which a layout loses against the best plan, or why it is rejected.

        Fields that the layout leaves open have the values with the least time.

        Args:
            layout: fields of a `Parallelism`, "data=16, tensor=4, zero_stage=3", or such a value.

        >>> import fshard as fs
        >>> small = Transformer(layers=4, hidden=256, ffn=1024, heads=4, kv_heads=4, vocab=1000, sequence=128)
        >>> h100, adamw = fs.plan.cluster("h100"), fs.optim.adamw(3e-4)
        >>> plans = search(small, devices=8, cluster=h100, global_batch=64, optimizer=adamw, rows=8)
        >>> " times as long as the best plan: " in plans.why("tensor=8")
        True
        >>> print(plans.why("data=3"))
        The layout is rejected: data * pipeline * experts * sequence * tensor must be the number of ...
        """
        return self.reason(layout).text

    def reason(self, layout: str | Mapping[str, Any] | Parallelism) -> Reason:
        """Return the text of `why`, and the numbers of both plans.

        Args:
            layout: see `why`.
        """
        fields = as_constraints(layout_fields(layout))
        best = self.estimates[0]
        tracer = best.tracer
        batch = best.plan.rows_of_step
        choices = plan_choices(fields, tracer.model.experts)
        counts = sorted({estimate.plan.devices for estimate in self.estimates})
        of_each_count = [
            candidates(tracer.model.layers, count, batch, choices, tracer.cluster)
            for count in counts
        ]
        fitting, rejected, _ = _sorted_out(chain.from_iterable(of_each_count), tracer)
        simulated, passing_memory = _simulated(sorted(fitting, key=GOALS["time"][0]))
        rejected += passing_memory
        estimates, passing_memory = _by_programs(simulated, GOALS["time"][1])
        rejected += passing_memory
        if estimates:
            fastest = estimates[0]
            if fastest.program is None:  # two plans are compared by the same measure
                best = replace(best, by_formula=True)
            return slower_reason(best, fastest, self._why_left_out(fastest.plan))

        too_large = [plan for plan in rejected if plan.kind == "memory"]
        if too_large:
            # They are rejected by the least memory; the nearest of all is that by their schedules.
            likely = sorted(too_large, key=lambda plan: plan.peak)[:LISTED]
            by_formula = [PlanEstimate(plan.plan, tracer, by_formula=True) for plan in likely]
            nearest = min(by_formula, key=lambda estimate: estimate.peak)
            return rejected_reason(nearest.excess() or likely[0].reason, nearest)
        if rejected:
            return rejected_reason(rejected[0].reason, None)
        # Fields that contradict each other are no candidates.
        data = fields.get("data", 1)
        Parallelism(**{**fields, "data": data})
        numbers = ", ".join([f"{name}={value}" for name, value in fields.items()])
        count_text = " or ".join(map(str, counts))
        return rejected_reason(
            f"no plan of {count_text} devices and {batch} samples has {numbers}", None
        )

    def _why_left_out(self, plan: Parallelism) -> str:
        """Return why a plan is not the first one, although it is not slower."""
        known = {estimate.plan: estimate for estimate in self.estimates}
        if plan in known and known[plan].program is not None:
            return "the goal of the search is not its time"
        for name, values in self.choices.items():
            value = vars(plan)[name]
            if value not in values:
                return f"{name}={value} is none of the values that it tried"
        return "the search prunes by formulas, and did not cost its program"

    def to_dict(self, *, tokens: float | None = None, price: float | None = None) -> dict[str, Any]:
        """Return all numbers of the plans, for a file of JSON.

        Args:
            tokens, price: see `table`.
        """
        return plans_dict(self.estimates, self.rejected, self.tried, Training(tokens, price))


# -- the search ------------------------------------------------------------------------------------

Progress = Callable[[str], None]
"""A function that is called with what a search does, in words."""


def _ignore(_: str) -> None:
    """Do nothing with it."""


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
    progress: Progress = _ignore,
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
        loss: of the output and the batch. Default: for a dict the output, or its `loss`; else the
            cross-entropy of logits and labels.
        blocks: path of the repeated layers; default: the longest `ModuleList`.
        goal: the best plan has the least "time" of a step, "cost", which is time by devices, or
            "memory" of a device.
        progress: is called with what the search does, in words.
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
    if goal not in GOALS:
        raise PlanError(f"plan.search: goal must be one of {', '.join(GOALS)}; got {goal!r}.")
    assert_cluster(cluster, "plan.search")
    counts = _counts(devices, global_batch)
    layered = layered_model(model, batch, optimizer, loss, blocks)
    if layered.layers > MOST_LAYERS:
        raise PlanError(
            f"plan.search: layers must be at most {MOST_LAYERS:,}; got {layered.layers:,}."
        )
    choices = plan_choices(constraints, layered.experts)
    numbers = " or ".join(map(str, counts))

    of_each_count = [
        candidates(layered.layers, count, global_batch, choices, cluster) for count in counts
    ]
    tracer = LayerTracer(layered, cluster)
    fitting, rejected, tried = _sorted_out(chain.from_iterable(of_each_count), tracer, progress)
    advised = "".join([f" {text}." for text in advice(counts[0], global_batch, cluster)])
    if not tried:
        options = _constraints_text({name: choices[name] for name in constraints})
        raise PlanError(
            f"plan.search: sizes must divide {numbers} devices, {layered.layers} layers and a "
            f"global batch of {global_batch}; no plan with {options} does. Divisors: "
            f"{divisors_text(counts, layered.layers, global_batch)}.{advised}"
        )

    ranked_before, ranked = GOALS[goal]
    simulated, passing_memory = _simulated(sorted(fitting, key=ranked_before))
    rejected += passing_memory
    distinct, stages = _distinct_programs(simulated)
    estimates, passing_memory = _by_programs(distinct, ranked, progress, tried)
    rejected += passing_memory
    if not estimates:
        raise _nothing_fits(rejected, numbers)
    return Plans(estimates, _listed(rejected), tried, stages, choices)


def _counts(devices: int | Sequence[int], global_batch: int) -> tuple[int, ...]:
    counts = (devices,) if isinstance(devices, int) else tuple(devices)
    numbers = (*counts, global_batch)
    are_integers = all([type(number) is int for number in numbers])
    if not counts or not are_integers or min(numbers) < 1:
        raise PlanError(
            f"plan.search: devices and global_batch must be >= 1; got {devices} and {global_batch}."
        )
    if max(numbers) > LARGEST_COUNT:
        raise PlanError(
            f"plan.search: devices and global_batch must be at most {LARGEST_COUNT:,}; "
            f"got {devices} and {global_batch}."
        )
    return counts


class _Sorted(NamedTuple):
    """Candidates: those that may fit, those that are rejected, and the number that were tried."""

    fitting: list[PlanEstimate]
    rejected: list[RejectedPlan]
    tried: int


def _sorted_out(
    tried: Iterable[Candidate], tracer: LayerTracer, progress: Progress = _ignore
) -> _Sorted:
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
        progress(f"tried {count:,} layouts")
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
    key = estimate.plan.of_layer()
    if key not in errors:
        errors[key] = _error_of(partial(estimate.tracer.cost, estimate.plan))
    return errors[key]


def _error_of(run: Callable[[], object]) -> str:
    """Return the first line of the error of a program, or ""."""
    try:
        run()
    except Exception as error:  # whatever the code of a module raises
        return str(error).partition("\n")[0] or type(error).__name__
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
    estimates: Sequence[PlanEstimate], ranked: Key, progress: Progress = _ignore, tried: int = 0
) -> tuple[list[PlanEstimate], list[RejectedPlan]]:
    """Return the estimates, the best ones by the cost of their programs, and those that do not fit.

    The best by the formulas are costed by their programs, until all that a table shows are: one that
    falls behind makes room for another. Programs that are too long together stay by the formulas;
    these plans are behind all others, since a formula may be wrong by more than plans differ.
    """
    fitting = list[PlanEstimate]()
    rejected = list[RejectedPlan]()
    left = PROGRAMS
    for by_formula in sorted(estimates, key=ranked):
        estimate = by_formula
        # Plans by formulas alone will be behind this one, so they take no row of the table from it.
        costed = [x for x in fitting if x.program is not None]
        ahead = [x for x in costed if ranked(x) <= ranked(by_formula)]
        is_shown = len(ahead) < SHOWN
        size = 0 if by_formula.is_known else by_formula.program_size
        if is_shown and size <= min(left, LONGEST_PROGRAM):
            left -= size
            place = f"{len(ahead) + 1} of {min(SHOWN, len(estimates))}"
            progress(f"tried {tried:,} layouts; costing {place} by their programs")
            estimate = replace(by_formula, by_formula=False)
            if error := _error_of(partial(_run_program, estimate)):
                rejected.append(RejectedPlan(estimate.plan, error, "program"))
                continue
        if estimate.excess():
            rejected.append(_passing_memory(estimate))
        else:
            fitting.append(estimate)
    return _programs_first(fitting, ranked), rejected


def _programs_first(estimates: Iterable[PlanEstimate], ranked: Key) -> list[PlanEstimate]:
    """Return plans in order: those whose programs ran, then those by formulas alone."""

    def position(estimate: PlanEstimate) -> tuple[bool, float]:
        is_by_formula = estimate.program is None
        return is_by_formula, ranked(estimate)

    return sorted(estimates, key=position)


def _run_program(estimate: PlanEstimate) -> ProgramCost | None:
    return estimate.program


def _listed(rejected: Sequence[RejectedPlan]) -> list[RejectedPlan]:
    """Return the rejected plans to list: the nearest ones, of each kind of reason in turn.

    So a dozen plans that do not fit hide neither an error of a program nor a number that does not
    divide. Of several plans whose reasons differ in numbers alone only the nearest is listed.
    """
    nearest = dict[str, RejectedPlan]()
    for plan in sorted(rejected, key=lambda plan: plan.peak):
        nearest.setdefault(re.sub("[0-9.,]+", "0", plan.reason), plan)
    by_kind = dict[Kind, list[RejectedPlan]]()
    for kind in KINDS:
        by_kind[kind] = [plan for plan in nearest.values() if plan.kind == kind]
    in_turn = chain.from_iterable(zip_longest(*by_kind.values()))
    return [plan for plan in in_turn if plan is not None][:LISTED]


def _constraints_text(constraints: Choices) -> str:
    """Return the values of each field: "tensor=3, rows=2 or 4"."""
    texts = list[str]()
    for name, values in constraints.items():
        texts.append(f"{name}={' or '.join(map(str, values))}")
    return ", ".join(texts) or "any option"


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

GOALS: dict[str, tuple[Key, Key]] = {
    "time": (lambda x: x.approximate_seconds(), lambda x: x.seconds),
    "cost": (
        lambda x: x.approximate_seconds() * x.plan.devices,
        lambda x: x.seconds * x.plan.devices,
    ),
    "memory": (lambda x: x.least_memory(), lambda x: x.peak),
}
"""Plans are ranked by these, before their schedules are simulated and after."""


def best_by(goal: str, plans: Plans) -> PlanEstimate:
    """Return the best of plans that are on several numbers of devices."""
    first, *_ = _programs_first(plans, GOALS[goal][1])
    return first
