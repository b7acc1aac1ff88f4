"""`describe`: a plan in words and numbers, for the page of its cost.

PlanEstimate, model ─> the cost of the program, model, layout, MFU, tokens a second
Plans               ─> the next best plans, and the terms by which each is slower
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from fshard.parallelism.value import Parallelism
    from fshard.plan.cost import Cost
    from fshard.plan.estimate import PlanEstimate
    from fshard.plan.models import Transformer
    from fshard.plan.search import Plans


@dataclass(frozen=True)
class DescribedPlan:
    """The cost of a plan's program, and what the page shows of the plan: see `describe`.

    Args:
        cost: of the program.
        plan: its sizes and options.
        model: in words.
        tokens: of a step; 0 if the batch has none.
        flops: of the model in a step, without those recomputed: see `PlanEstimate.model_flops`.
        dtype: of its products.
        others: the best plans of a search: see `Plans.rows`.
        tried: the number of plans that the search compared; 0 without a search.
    """

    cost: Cost
    plan: Parallelism
    model: str
    tokens: int = 0
    flops: float = 0.0
    dtype: str = "bf16"
    others: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    tried: int = 0

    def facts(self) -> dict[str, str]:
        """Return what the page shows of the plan, by title."""
        from fshard.plan.tables.layout import sizes_text  # plans are loaded where there is one

        plan = self.plan
        facts = {"model": self.model, "layout": sizes_text(plan), "ZeRO": _zero_text(plan)}
        facts["microbatches"] = (
            f"{plan.microbatches:,} of {plan.rows:,} {_plural('sample', plan.rows)} on a device; "
            f"{plan.rows_of_step:,} samples in a step"
        )
        if plan.in_stages:
            facts["schedule"] = plan.schedule
            if plan.stages > plan.pipeline:
                facts["schedule"] += f", {plan.chunks} stages of a device"
        facts["recomputed"] = str(plan.recompute)
        if plan.recompute == "never":
            facts["recomputed"] = "nothing"
        cluster = self.cost.cluster
        facts["cluster"] = (
            f"{self.cost.mesh.size:,} × {cluster.name}, {cluster.memory / 1e9:,.0f} GB each"
        )
        node = cluster.links[0].devices
        if node:
            facts["cluster"] += f", nodes of {node}"
        return facts


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


_ZERO = (
    "0: each device has all parameters, gradients and state",
    "1: the optimizer's state is sharded",
    "2: state and gradients are sharded",
    "3: state, gradients and parameters are sharded",
)


def _zero_text(plan: Parallelism) -> str:
    text = _ZERO[plan.zero_stage]
    if plan.zero_stage and plan.data == 1:
        text += ", on one device along data"
    if plan.state_memory == "host":
        text += "; the state is in the memory of the host"
    return text


def describe(
    estimate: PlanEstimate, model: nn.Module | Transformer, *, plans: Plans | None = None
) -> DescribedPlan:
    """Return the cost of a plan's program with what `page` shows of the plan.

    Args:
        estimate: of `fs.plan.search`.
        model: that was searched.
        plans: of the search; the page then lists the next best ones, and why they are not the best.

    >>> import fshard as fs
    >>> sizes = dict(hidden=64, ffn=128, heads=4, kv_heads=4, vocab=100, sequence=32)
    >>> small = fs.plan.Transformer(layers=2, **sizes)
    >>> h100, adamw = fs.plan.cluster("h100"), fs.optim.adamw(0.1)
    >>> options = dict(devices=2, cluster=h100, global_batch=4, optimizer=adamw)
    >>> plans = fs.plan.search(small, **options, tensor=1, pipeline=1, rows=1)
    >>> described = describe(plans[0], small, plans=plans)
    >>> described.facts()["model"], described.tokens
    ('95.0 k parameters, 2 layers, 32 tokens a sample', 128)
    """
    module = model
    if not isinstance(module, nn.Module):
        module = module.build()
    if plans is None:
        return described(estimate, module, "", [], 0)
    return described(estimate, module, "", plans.rows(), plans.tried)


def described(
    estimate: PlanEstimate,
    module: nn.Module,
    name: str,
    others: Sequence[Mapping[str, Any]],
    tried: int,
) -> DescribedPlan:
    """Return the cost of a plan's program, with the numbers of its model."""
    return described_cost(estimate, estimate.cost(module), name, others, tried)


def described_cost(
    estimate: PlanEstimate,
    cost: Cost,
    name: str,
    others: Sequence[Mapping[str, Any]] = (),
    tried: int = 0,
) -> DescribedPlan:
    """Return the cost of a plan's program, which has run, with the numbers of its model."""
    layered = estimate.tracer.model
    text = f"{count_text(layered.parameters)} parameters, {layered.layers} layers"
    if layered.experts:
        text += f", {layered.experts} experts"
    if layered.tokens is not None:
        text += f", {layered.tokens:,} tokens a sample"
    if name:
        text = f"{name}: {text}"
    return DescribedPlan(
        cost=cost,
        plan=estimate.plan,
        model=text,
        tokens=(layered.tokens or 0) * estimate.plan.rows_of_step,
        flops=estimate.model_flops,
        dtype=estimate.dtype,
        others=others,
        tried=tried,
    )


def count_text(count: int) -> str:
    """Write a large number with three digits.

    >>> count_text(6_738_415_616), count_text(272_000_000), count_text(999)
    ('6.74 B', '272 M', '999')
    """
    for power, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= power:
            return f"{f'{count / power:#.3g}'.rstrip('.')} {name}"
    return str(count)
