"""`rank`: the meshes and options of a program, ranked by time; each rejected one with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

from fshard.errors import FshardError, PlanError
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.make import make_mesh
from fshard.plan.cluster import Cluster, assert_cluster
from fshard.plan.cost import Cost, cost
from fshard.plan.tables.why import slower_text
from fshard.tables import Table, TableColumn, Tabular
from fshard.transforms.train_step import TrainStep

Program = Callable[..., tuple[TrainStep, Sequence[PyTree]]]
"""A function of a mesh and options: to a step of `train_step`, and its arguments."""


class RankedPlan(NamedTuple):
    """A mesh and options, and their cost; or the reason why they are rejected.

    Args:
        sizes: of the mesh's axes.
        options: of the program.
        cost: None if the program cannot run.
        reason: "" if the plan fits; else by which number it does not.
    """

    sizes: Mapping[str, int]
    options: Mapping[str, Any]
    cost: Cost | None
    reason: str = ""

    @property
    def terms(self) -> dict[str, float]:
        """The seconds of a step, by what they are for."""
        times = self.cost.times if self.cost is not None else None
        if times is None:
            return {}
        terms = {"operations": times.compute}
        for axes, seconds in times.exposed.items():
            terms[f"network along {'+'.join(axes)}"] = seconds
        terms["copies"] = times.copies
        return terms


@dataclass(frozen=True, repr=False)
class Ranking(Tabular):
    """The plans that fit, the fastest first: a sequence. `rejected` has the others.

    Prints as a table.
    """

    plans: Sequence[RankedPlan]
    rejected: Sequence[RankedPlan] = field(repr=False)

    def __getitem__(self, index: int) -> RankedPlan:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[RankedPlan]:
        return iter(self.plans)

    def table(self) -> Table:
        """Return the plans as a table."""
        columns = (
            TableColumn("mesh"),
            TableColumn("options"),
            TableColumn("step, s", "seconds"),
            TableColumn("of peak", "ratio"),
            TableColumn("memory, bytes", "bytes"),
            TableColumn("why not the first"),
        )
        table = Table(columns, title="plans")
        for plan in self.plans:
            table.add(*_cells(plan), slower_text(self.plans[0].terms, plan.terms))
        if self.rejected:
            table.add_section()
        for plan in self.rejected:
            table.add(*_cells(plan), plan.reason)
        return table


def _cells(plan: RankedPlan) -> tuple[Any, ...]:
    """Return the cells of a plan but for the reason; no numbers of a program that cannot run."""
    names = (_written(plan.sizes), _written(plan.options))
    if plan.cost is None:
        return (*names, None, None, None)
    return (*names, plan.cost.seconds, plan.cost.utilization(), plan.cost.peak())


def rank(
    program: Program,
    *,
    devices: int,
    axes: Sequence[str] | Mapping[str, Sequence[int]],
    cluster: Cluster,
    options: Mapping[str, Sequence[Any]] | None = None,
) -> Ranking:
    """Rank all meshes of a number of devices, and all options, by the time of a step.

    None of it runs on devices.

    Args:
        program: called with an abstract mesh and options by name; it returns a step of `train_step`
            and its arguments, of meta tensors. The same function builds the step that trains.
        devices: their number.
        axes: of the mesh, outermost first; a mapping limits their sizes:
            {"data": range(1, 65), "model": (1, 2, 4, 8)}.
        cluster: the machine: see `fs.plan.cluster`.
        options: values of each option.

    A plan that passes the memory of a device, or whose program raises, is rejected with that number
    or message.

    Raises:
        PlanError: if no plan fits, with the smallest excess.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> def program(mesh, stage):
    ...     params = [torch.empty(512, 512, device="meta") for _ in range(4)]
    ...     params = fs.shard_params(params, fs.fsdp("data", unit="[*]") if stage == 3 else P(), mesh=mesh)
    ...     opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)
    ...     def loss_fn(params, x):
    ...         for w in params:
    ...             x = torch.tanh(x @ w)
    ...         return x.square().mean()
    ...     step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    ...     return step, (params, opt.init(params), torch.empty(64, 512, device="meta"))
    >>> plans = rank(program, devices=4, axes=["data"], options={"stage": [1, 3]}, cluster=fs.plan.cluster("h100"))
    >>> [plan.options["stage"] for plan in plans], plans[1].terms.keys() >= {"operations", "network along data"}
    ([1, 3], True)
    """
    assert_cluster(cluster, "plan.rank")
    names = [*(options or {})]
    tried = list[RankedPlan]()
    for sizes in _meshes(devices, axes):
        for values in product(*(options or {}).values()):
            chosen = dict(zip(names, values, strict=True))
            tried.append(_tried(program, sizes, chosen, cluster))
    if not tried:
        raise PlanError(
            f"plan.rank: the sizes of {', '.join(axes)} must have a product of {devices}; "
            "got none that has."
        )
    fitting = [plan for plan in tried if not plan.reason]
    rejected = [plan for plan in tried if plan.reason]
    if not fitting:
        raise _nothing_fits(rejected, devices)
    return Ranking(sorted(fitting, key=_seconds), rejected)


def _seconds(plan: RankedPlan) -> float:
    return float("inf") if plan.cost is None else plan.cost.seconds


def _peak(plan: RankedPlan) -> float:
    return float("inf") if plan.cost is None else plan.cost.peak()


def _nothing_fits(rejected: Sequence[RankedPlan], devices: int) -> PlanError:
    nearest = min(rejected, key=_peak)
    return PlanError(
        f"plan.rank: no plan of {devices} devices fits; the nearest is "
        f"{_written({**nearest.sizes, **nearest.options})}: {nearest.reason}. "
        "Take more devices, a higher stage of ZeRO, recomputation or smaller microbatches."
    )


def _meshes(
    devices: int, axes: Sequence[str] | Mapping[str, Sequence[int]]
) -> Iterator[dict[str, int]]:
    """Yield the sizes of axes whose product is the number of devices."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    legal = list[list[int]]()
    for axis in axes:
        if isinstance(axes, Mapping):
            legal.append([size for size in divisors if size in axes[axis]])
        else:
            legal.append(divisors)
    for sizes in product(*legal):
        if prod(sizes) == devices:
            yield dict(zip(axes, sizes, strict=True))


def _tried(
    program: Program, sizes: Mapping[str, int], options: Mapping[str, Any], cluster: Cluster
) -> RankedPlan:
    """Run a program on the abstract mesh; return its cost, and why it does not fit or run."""
    try:
        step, arguments = program(make_mesh(sizes, runtime="abstract"), **options)
        report = cost(step, *arguments, cluster=cluster)
    except (FshardError, ValueError) as error:
        first_line, *_ = str(error).split("\n")
        return RankedPlan(sizes, options, None, first_line)
    if report.fits:
        return RankedPlan(sizes, options, report)
    largest = report.used.holders()[0]
    reason = (
        f"{report.peak() - cluster.memory:,.0f} bytes over the memory; "
        f"{largest.bytes:,} are for {largest.purpose} at {largest.site}"
    )
    return RankedPlan(sizes, options, report, reason)


def _written(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
