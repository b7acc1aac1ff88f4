"""The plans that a search compares: all sizes of a mesh and all options whose numbers divide.

devices ──> sizes of axes ──> samples of a microbatch, ZeRO, recomputation, schedule, stages of a device
   │              │
   └──────────────┴── do not divide: candidates with a reason, which are not tried
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod
from typing import Any, Literal, NamedTuple

from fshard.errors import PlanError
from fshard.parallelism.value import FIELDS, IN_LOOPS, ONE_STAGE, SIZES, Parallelism
from fshard.plan.cluster import Cluster

DEFAULTS: dict[str, tuple[Any, ...]] = {
    "sequence": (1,),
    "replicas": (1,),
    "state_memory": ("device",),
    "zero_stage": (0, 1, 2, 3),
    "rows": (1, 2, 4, 8),
    "recompute": ("never", "full"),
    "schedule": ("1f1b", "interleaved", "zb-h1", "zbv"),
}
"""The values that are tried; `data`, `pipeline` and `tensor` are all that divide the devices."""

NOT_SEARCHED = ("tensor_mode", "tensor_depth")
"""Fields without estimates: those of a layer are of 1d tensor parallelism."""

Choices = Mapping[str, Collection[Any]]
"""The values of each field that are tried; of those without any, all that divide."""


Divided = Literal["devices", "layers", "samples"]
"""The numbers that a plan divides."""


class Candidate(NamedTuple):
    """A plan, and why it does not divide a number, if so.

    Args:
        plan: its sizes and options.
        divided: the number; None if all are divided.
        reason: in words.
    """

    plan: Parallelism
    divided: Divided | None = None
    reason: str = ""


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


def plan_choices(constraints: Mapping[str, Any], experts: int = 0) -> dict[str, Collection[Any]]:
    """Return the values of each field; raise naming all that are unknown.

    Args:
        constraints: fields with a value, or several.
        experts: number of experts of a layer; 0 if it has none.
    """
    names = [name for name in FIELDS if name not in NOT_SEARCHED]
    unknown = [name for name in constraints if name not in names]
    if unknown:
        raise PlanError(f"plan.search: {', '.join(unknown)} must be among {', '.join(names)}.")

    chosen = dict[str, Collection[Any]]()
    for name, value in constraints.items():
        is_several = isinstance(value, Collection) and not isinstance(value, str)
        chosen[name] = tuple(value) if is_several else (value,)
        for each in chosen[name]:
            _validate(name, each)
    if not experts and max(chosen.get("experts", (1,))) > 1:
        raise PlanError(
            "plan.search: experts must be 1, since the layers have none; "
            f"got {max(chosen['experts'])}."
        )

    sizes = [1]
    for size in (8, 64):
        if experts % size == 0 and experts > 0:
            sizes.append(size)
    return {**DEFAULTS, "experts": tuple(sizes), **chosen}


def _validate(name: str, value: Any) -> None:
    """Raise if a field cannot have a value, whatever the others are."""
    fields: dict[str, Any] = {name: value}
    if value == "megatron":
        fields["tensor"] = 2
    Parallelism(**fields)


# -- candidates ------------------------------------------------------------------------------------


def candidates(
    layers: int, devices: int, batch: int, choices: Choices, cluster: Cluster
) -> Iterator[Candidate]:
    """Yield all plans with the values that are chosen, and one for each reason not to divide.

    Args:
        layers: number of repeated layers.
        devices: their number.
        batch: number of samples of a step.
        choices: values of fields: see `plan_choices`.
        cluster: layers are shared inside of its nodes.
    """
    node = cluster.links[0].devices or devices
    for sizes in _sizes(devices, choices):
        if reason := sizes.misfit(devices=devices, node=node):
            yield Candidate(sizes, "devices", reason)
        elif reason := sizes.misfit(layers=layers):
            yield Candidate(sizes, "layers", reason)
        else:
            yield from _with_options(sizes.on(devices), layers, batch, choices)


def legal_plans(
    layers: int, devices: int, batch: int, choices: Choices, cluster: Cluster
) -> Iterator[Parallelism]:
    """Yield all plans whose sizes divide, with the values that are chosen: see `candidates`."""
    for candidate in candidates(layers, devices, batch, choices, cluster):
        if candidate.divided is None:
            yield candidate.plan


_SIZES = ("tensor", "pipeline", "sequence", "experts", "replicas", "data")
"""All of `SIZES`; plans that are equally good are ranked in this order."""
assert set(_SIZES) == set(SIZES)


def _sizes(devices: int, choices: Choices) -> Iterator[Parallelism]:
    """Yield sizes of all axes; without a choice, `data` is what is left.

    Sizes without a choice only divide the devices that are left. So sizes with another product
    are yielded where a choice is the reason.
    """
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    values = list[Collection[int | None]]()
    for name in _SIZES:
        default: Collection[int | None] = (None,) if name == "data" else divisors
        values.append(choices.get(name, default))
    free = [name for name in ("tensor", "pipeline") if name not in choices]
    for sizes in product(*values):
        chosen: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
        if chosen["pipeline"] > 1 and chosen["replicas"] > 1:
            continue
        parallelism = Parallelism(**chosen)
        if not parallelism.misfit(devices=devices):
            yield parallelism
            continue
        count = prod([size for size in sizes if size is not None])
        is_free_size = any([chosen[name] > 1 for name in free])
        has_other_sizes = devices % count == 0 and bool(free)
        if not is_free_size and not has_other_sizes:
            yield parallelism


def _with_options(
    sizes: Parallelism, layers: int, batch: int, choices: Choices
) -> Iterator[Candidate]:
    """Yield the plans of some sizes with all options."""
    legal_rows = list[int]()
    for rows in choices["rows"]:
        plan = replace(sizes, rows=rows)
        if reason := plan.misfit(batch=batch):
            yield Candidate(plan, "samples", reason)
        else:
            legal_rows.append(rows)

    names = ["zero_stage", "rows", "recompute", "schedule", "state_memory", "sequence_mode"]
    shares_layers = sizes.tensor > 1 and sizes.sequence == 1
    default_modes = ("megatron",) if shares_layers else ("gather",)
    values = {"sequence_mode": default_modes, **choices, "rows": legal_rows}
    for options in product(*[values[name] for name in names]):
        chosen: dict[str, Any] = dict(zip(names, options, strict=True))
        if _is_distinct(sizes, chosen, choices):
            yield from _with_microbatches(sizes, chosen, layers, batch, choices)


def _is_distinct(sizes: Parallelism, options: Mapping[str, Any], choices: Choices) -> bool:
    """Return True if options have a meaning with some sizes, and are those of no other plan."""
    # On one device along "data" all stages of ZeRO are one program.
    shards_nothing = sizes.data == 1 and options["zero_stage"] != min(choices["zero_stage"])
    # Without stages there is no schedule.
    first_schedule = next(iter(choices["schedule"]))
    has_idle_schedule = not sizes.in_stages and options["schedule"] != first_schedule
    shares_layers = sizes.tensor > 1 and sizes.sequence == 1
    has_no_layer_axis = options["sequence_mode"] == "megatron" and not shares_layers
    streams_in_stages = options["state_memory"] == "host" and sizes.in_stages
    return not (shards_nothing or has_idle_schedule or has_no_layer_axis or streams_in_stages)


def _with_microbatches(
    sizes: Parallelism,
    options: Mapping[str, Any],
    layers: int,
    batch: int,
    choices: Choices,
) -> Iterator[Candidate]:
    """Yield the plans whose microbatches divide the batch, with all numbers of stages."""
    assert sizes.data is not None
    samples = sizes.data * sizes.experts * sizes.replicas * options["rows"]
    microbatches = batch // samples
    if microbatches not in choices.get("microbatches", (microbatches,)):
        return
    fields: dict[str, Any] = {**vars(sizes), **options, "microbatches": microbatches}
    for chunks in _chunks(options["schedule"], sizes, choices):
        fields["chunks"] = chunks
        plan = Parallelism(**fields)
        if reason := plan.misfit(layers=layers):
            yield Candidate(plan, "layers", reason)
        else:
            yield Candidate(plan)


def _chunks(schedule: str, sizes: Parallelism, choices: Choices) -> list[int]:
    """Return the numbers of stages of a device that a schedule allows."""
    if not sizes.in_stages or schedule in ONE_STAGE:
        legal = (1,)
    elif schedule in IN_LOOPS:
        legal = (2, 4, 8)
    else:
        legal = (2,)
    return [chunks for chunks in choices.get("chunks", legal) if chunks in legal]


def advice(devices: int, batch: int, cluster: Cluster) -> list[str]:
    """Return which numbers of a run to change, since few layouts divide them.

    >>> from fshard.plan.cluster import cluster
    >>> advice(8, 7, cluster("h100", node=8))
    ['7 samples and 8 devices have no common divisor: change global_batch or devices']
    """
    texts = list[str]()
    node = cluster.links[0].devices
    if node and devices > node and devices % node:
        texts.append(
            f"{devices:,} devices are {devices / node:.3g} nodes of {node}: "
            f"change devices to a multiple of {node}, or node"
        )
    if devices > 1 and batch > 1 and gcd(devices, batch) == 1:
        texts.append(
            f"{batch:,} samples and {devices:,} devices have no common divisor: "
            "change global_batch or devices"
        )
    return texts


def divisors_text(devices: Sequence[int], layers: int, batch: int) -> str:
    """Return the divisors of all numbers that plans divide, for an error."""
    sizes = {"devices": devices[0], "layers": layers, "global batch": batch}
    texts = list[str]()
    for name, count in sizes.items():
        divisors = [str(size) for size in range(1, count + 1) if count % size == 0]
        texts.append(f"of {name} {', '.join(divisors)}")
    return "; ".join(texts)
