"""The plans of a search as a table and as a dict, with what a training takes.

A table shows the ten best plans of one number of devices, or the best of each of several numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fshard.errors import PlanError
from fshard.parallelism.value import Parallelism
from fshard.plan.cluster import PRESETS, cluster
from fshard.plan.estimate import PlanEstimate
from fshard.plan.space import RejectedPlan, advice
from fshard.plan.tables.layout import layout_text, options_text, sizes_text
from fshard.tables import Table, TableCell, TableColumn

SHOWN = 10
"""The plans that fit in a table."""

# The seven runs that the constants of the presets are tested by have the predicted model flops
# utilization within 5 points, of 41 % to 57 %. 5 of 41 are 12 %.
TIME_ERROR = 0.12
"""The part of a time by which a machine may differ from it."""


class PublishedRuns(NamedTuple):
    """The published runs on a GPU that estimates were compared with: tests/plan/published.py.

    Args:
        runs: their number.
        near: number of those that took a time within `TIME_ERROR` of the predicted one.
        others: how far the other ones are from it.
    """

    runs: int
    near: int
    others: str

    @property
    def are_near(self) -> bool:
        """True if most runs are near, so that a time has an error."""
        return self.near >= 0.8 * self.runs


PUBLISHED = {
    "a100": PublishedRuns(46, 39, "the others up to 1.4 times as long"),
    "h100": PublishedRuns(16, 6, "the others, of FSDP on 8 to 128, 1.4 to 1.8 times as long"),
}
"""Published runs by the preset of their GPU; on the other presets none is known."""

FORMULA_ERROR = "0.4 to 1.8 times the time and 0.3 to 3.7 times the memory of 263 drawn programs"
"""The range of formulas alone, of which a "~" is: see the guide."""

DEFINITION = (
    "MFU: operations of the model, none recomputed, of the peak in the dtype of its products"
)
"""The one definition of model flops utilization: see `PlanEstimate.model_flops`."""

HOURS_OF_DAY = 24
SECONDS_OF_DAY = 86_400


@dataclass(frozen=True)
class Training:
    """The length of a training, and the price of devices.

    Args:
        tokens: that it has; None: no time is computed.
        price: of a device and hour; None: no cost is.
    """

    tokens: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            is_positive = number is None or 0 < number < float("inf")
            if not is_positive:
                raise PlanError(f"plan: {name} must be a number above 0; got {number!r}.")
        if self.price is not None and self.tokens is None:
            raise PlanError("plan: price must have tokens beside it, of which it is the cost.")

    def days(self, estimate: PlanEstimate) -> float | None:
        """Return the days of the training by a plan."""
        if self.tokens is None:
            return None
        speed = estimate.tokens_per_second
        if speed is None:
            raise PlanError(
                "plan: tokens must be of a model of token ids; its batch has no integers of two "
                "dims."
            )
        return self.tokens / speed / SECONDS_OF_DAY

    def cost(self, estimate: PlanEstimate) -> float | None:
        """Return the cost of the training by a plan."""
        days = self.days(estimate)
        if days is None or self.price is None:
            return None
        return days * HOURS_OF_DAY * estimate.plan.devices * self.price


def _shown(estimates: Sequence[PlanEstimate]) -> list[int]:
    """Return the numbers of the best plans of one number of devices, or of each number the best."""
    best = dict[int, int]()
    for number, estimate in enumerate(estimates):
        best.setdefault(estimate.plan.devices, number)
    if len(best) == 1:
        return [*range(min(SHOWN, len(estimates)))]
    return [best[devices] for devices in sorted(best)]


# -- the table -------------------------------------------------------------------------------------


def plans_table(
    estimates: Sequence[PlanEstimate],
    remarks: Sequence[str],
    rejected: Sequence[RejectedPlan],
    tried: int,
    training: Training,
    stages: Mapping[Parallelism, Sequence[int]],
) -> Table:
    """Return the table of plans: see `Plans.table`. Each plan has a remark.

    `stages` of ZeRO are one program, by its plan.
    """
    shown = _shown(estimates)
    counts = {estimates[number].plan.devices for number in shown}
    has_several_counts = len(counts) > 1
    texts = [TableColumn("layout"), TableColumn("options")]
    numbers = _number_columns(training)
    # Plans on several numbers of devices are slower for that alone.
    if has_several_counts:
        columns = [TableColumn("devices", "count", wraps=False), *texts, *numbers]
    else:
        columns = [*texts, *numbers, TableColumn("slower by")]

    best = f"The best {len(shown)}"
    if has_several_counts:
        best = "The best plan of each number of devices"
    notes = [f"{best}, of {tried:,} plans that were tried. {_counts_text(estimates)}"]
    if any([estimates[number].program is None for number in shown]):
        notes.append(f"~: by formulas, which were {FORMULA_ERROR}.")
    if not has_several_counts:
        first = estimates[0]
        notes += _memory_lines(first)
        notes += [
            f"{text}."
            for text in advice(first.plan.devices, first.plan.rows_of_step, first.cluster)
        ]
    notes += _definitions([estimates[number] for number in shown])
    notes += _rejected_lines(rejected)

    table = Table(columns, title=_title(estimates[0], has_several_counts), notes=notes)
    for number in shown:
        estimate = estimates[number]
        plan = estimate.plan
        cells = [sizes_text(plan), options_text(plan, stages.get(plan, ()))]
        cells += _numbers(estimate, training)
        if has_several_counts:
            table.add(plan.devices, *cells)
        else:
            table.add(*cells, remarks[number])
    return table


NEARLY_FULL = 0.95
"""The part of a device's memory from which on a plan may not fit on a machine."""


def _memory_lines(first: PlanEstimate) -> list[str]:
    """Return a warning if the best plan leaves next to no memory."""
    part = first.peak / first.cluster.memory
    if part < NEARLY_FULL:
        return []
    return [
        f"The first plan takes {digits(100 * part)} % of the memory, to which CUDA, NCCL and "
        "fragments are added: prefer one with less, or give a cluster of less memory."
    ]


def _number_columns(training: Training) -> list[TableColumn]:
    """Return the columns of the numbers of a plan: see `_numbers`."""
    columns = [TableColumn("step, s", "seconds", wraps=False)]
    columns.append(TableColumn("tokens/s", "count", wraps=False))
    if training.tokens is not None:
        columns.append(TableColumn("days", "count", wraps=False))
    if training.price is not None:
        columns.append(TableColumn("cost", "count", wraps=False))
    columns.append(TableColumn("MFU", "ratio", wraps=False))
    columns.append(TableColumn("GB", "count", wraps=False))
    return columns


def _numbers(estimate: PlanEstimate, training: Training) -> list[TableCell | None]:
    """Return the cells of time, speed, days, cost, utilization and memory."""
    seconds = estimate.seconds
    speed = estimate.tokens_per_second
    time = f"{seconds:.3g}"
    if estimate.program is None:  # a note has the error of formulas
        time = f"~{time}"
    elif has_measured_error(estimate):
        error = float(f"{TIME_ERROR * seconds:.1g}")
        time = f"{time} ± {error:g}"
    cells: list[TableCell | None] = [TableCell(seconds, time)]
    cells.append(None if speed is None else TableCell(speed, short(speed)))
    days = training.days(estimate)
    price = training.cost(estimate)
    if days is not None:
        cells.append(TableCell(days, digits(days, decimals=1)))
    if price is not None:
        cells.append(TableCell(price, short(price)))
    utilization = estimate.utilization()
    cells.append(TableCell(utilization, f"{digits(100 * utilization)} %"))
    peak = estimate.peak / 1e9
    cells.append(TableCell(peak, digits(peak, decimals=1)))
    return cells


def _title(first: PlanEstimate, has_several_counts: bool) -> str:
    """Return the model, the machine and the batch."""
    model = first.tracer.model
    machine = first.cluster
    devices = "" if has_several_counts else f"{first.plan.devices:,} x "
    memory = f"{machine.name} with {digits(machine.memory / 1e9)} GB"
    samples = f"{first.plan.rows_of_step:,} samples"
    if model.tokens is not None:
        samples += f" of {model.tokens:,} tokens"
    return f"{model.parameters:,} parameters on {devices}{memory}, {samples} a step"


def has_measured_error(estimate: PlanEstimate) -> bool:
    """Return True if most published runs on its GPU took about the predicted time."""
    name = estimate.cluster.name
    return _is_preset(estimate) and name in PUBLISHED and PUBLISHED[name].are_near


def _is_preset(estimate: PlanEstimate) -> bool:
    """Return True for a GPU with the efficiencies of its preset, which estimates are tested with."""
    machine = estimate.cluster
    is_gpu = machine.name in PRESETS and machine.name != "cpu"
    return is_gpu and machine.efficiency == cluster(machine.name).efficiency


def _counts_text(estimates: Sequence[PlanEstimate]) -> str:
    """Return how many plans formulas have kept, and by what these are costed."""
    costed = len([estimate for estimate in estimates if estimate.program is not None])
    kept = f"Formulas kept {len(estimates):,} of those that fit"
    by_formula = len(estimates) - costed
    if not costed:
        return f"{kept}, all by formulas (~)."
    if not by_formula:
        return f"{kept}, all by the cost of their programs."
    return f"{kept}: {costed:,} by the cost of their programs, {by_formula:,} by formulas (~)."


def _definitions(shown: Sequence[PlanEstimate]) -> list[str]:
    """Return what the columns are."""
    options = "Options: ZeRO, microbatches x samples of each, schedule, recomputation."
    lines = [f"{options} {DEFINITION}, {shown[0].dtype}."]
    if any([x.program is not None and _is_preset(x) for x in shown]):
        lines.append(_error_text(shown[0].cluster.name))
    return lines


def _error_text(name: str) -> str:
    """Return which published runs on a GPU show by how much times differ."""
    if name not in PUBLISHED:
        return f"No ±: no published run on {name} was compared with its estimate."
    published = PUBLISHED[name]
    sign = "±" if published.are_near else "No ±"
    return (
        f"{sign}: {published.near} of {published.runs} published runs on {name} took a time within "
        f"{100 * TIME_ERROR:.0f} % of the predicted one, {published.others} "
        "(docs/guides/plan.md, Published runs)."
    )


def _rejected_lines(rejected: Sequence[RejectedPlan]) -> list[str]:
    """Return the plans that were rejected, one a line."""
    lines: list[str] = []
    if rejected:
        lines += ["", "Rejected:"]
    for plan in rejected:
        # Sizes that do not divide the devices have no options.
        name = layout_text(plan.plan)
        if plan.kind == "devices":
            name = sizes_text(plan.plan)
        lines.append(f"{name}: {plan.reason}")
    return lines


def digits(number: float, decimals: int = 0) -> str:
    """Return a number with some decimals, and with two digits at least: small models have small ones.

    >>> digits(1234.5), digits(1.66), digits(0.01234)
    ('1,234', '1.7', '0.012')
    """
    is_small = number < 1 if decimals else number < 10
    return f"{number:.2g}" if is_small else f"{number:,.{decimals}f}"


def short(number: float) -> str:
    """Return a number with three digits and a suffix.

    >>> short(616_930), short(1.08e9), short(12)
    ('617k', '1.08B', '12')
    """
    for suffix, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g}{suffix}"
    return f"{number:.3g}"


# -- the dict --------------------------------------------------------------------------------------


def plans_dict(
    estimates: Sequence[PlanEstimate],
    rejected: Sequence[RejectedPlan],
    tried: int,
    training: Training,
) -> dict[str, Any]:
    """Return the numbers of plans: see `Plans.to_dict`."""
    first = estimates[0]
    model = first.tracer.model
    machine = first.cluster
    peak = machine.peak(first.dtype)
    error = TIME_ERROR if has_measured_error(first) else None
    return {
        "model": {
            "parameters": model.parameters,
            "layers": model.layers,
            "tokens_of_a_sample": model.tokens,
            "flops_of_a_step": first.model_flops,
        },
        "machine": {"name": machine.name, "memory": machine.memory, "peak": peak},
        "global_batch": first.plan.rows_of_step,
        "time_error": error,
        "mfu": DEFINITION,
        "tried": tried,
        "plans": [_plan_dict(estimate, training) for estimate in estimates],
        "rejected": [_rejected_dict(plan) for plan in rejected],
    }


def _plan_dict(estimate: PlanEstimate, training: Training) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "layout": dict(vars(estimate.plan)),
        "devices": estimate.plan.devices,
        "seconds": estimate.seconds,
        "seconds_by_term": dict(estimate.terms),
        "by_formula": estimate.program is None,
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": estimate.utilization(),
        "peak": estimate.peak,
        "bytes_by_purpose": estimate.memory(),
        "notes": estimate.notes,
    }
    if training.tokens is not None:
        numbers["days"] = training.days(estimate)
    if training.price is not None:
        numbers["cost"] = training.cost(estimate)
    return numbers


def _rejected_dict(rejected: RejectedPlan) -> dict[str, Any]:
    layout = dict(vars(rejected.plan))
    return {"layout": layout, "reason": rejected.reason, "kind": rejected.kind}
