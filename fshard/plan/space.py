"""The plans that a search compares: all sizes of a mesh and all options whose numbers divide.

devices ──> sizes of axes ──> samples of a microbatch, ZeRO, recomputation, schedule ──> stages of a device
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from fshard.errors import PlanError
from fshard.plan.cluster import Cluster
from fshard.plan.model_plan import IN_LOOPS, ONE_STAGE, ModelPlan

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


def plan_choices(constraints: Mapping[str, Any], experts: int = 0) -> dict[str, Collection[Any]]:
    """Return the values of each option, of layers with a number of experts; raise naming all that are unknown."""
    names = [field.name for field in fields(ModelPlan)]
    if unknown := [name for name in constraints if name not in names]:
        raise PlanError(f"plan.search: {', '.join(unknown)} must be among {', '.join(names)}.")
    chosen: dict[str, Collection[Any]] = {
        name: tuple(x) if isinstance(x, Collection) and not isinstance(x, str) else (x,)
        for name, x in constraints.items()
    }
    for name, values in chosen.items():
        for value in values:
            ModelPlan(**{name: value})  # raises if it is not legal
    if not experts and max(chosen.get("experts", (1,))) > 1:
        raise PlanError(
            f"plan.search: experts must be 1, since the layers have none; got {constraints['experts']}."
        )
    sizes = tuple([size for size in (1, 8, 64) if size == 1 or experts % size == 0 < experts])
    return {**DEFAULTS, "experts": sizes, **chosen}


def legal_plans(
    layers: int,
    devices: int,
    global_batch: int,
    choices: Mapping[str, Collection[Any]],
    cluster: Cluster,
) -> Iterator[ModelPlan]:
    """Yield all plans whose sizes divide, with the values that are chosen."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    node = cluster.links[0].devices or devices
    options = [
        choices[name] for name in ("zero_stage", "rows", "recompute", "schedule", "state_memory")
    ]
    axes = [choices[name] for name in ("sequence", "experts", "replicas")]
    for tensor, pipeline, sequence, experts, replicas in product(divisors, divisors, *axes):
        data, rest = divmod(devices, tensor * pipeline * sequence * experts * replicas)
        sizes = {
            "data": data,
            "pipeline": pipeline,
            "tensor": tensor,
            "sequence": sequence,
            "experts": experts,
        }
        sizes["replicas"] = replicas
        is_legal = (
            not rest and tensor <= node and pipeline <= layers and (replicas == 1 or pipeline == 1)
        )
        if not is_legal or any(
            size not in choices.get(name, (size,)) for name, size in sizes.items()
        ):
            continue
        mode = choices.get(
            "sequence_mode", ("megatron",) if tensor > 1 and sequence == 1 else ("gather",)
        )
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


def _chunks(
    schedule: str, pipeline: int, layers: int, choices: Mapping[str, Collection[Any]]
) -> Iterator[int]:
    """Yield the numbers of stages of a device."""
    legal = (
        (1,)
        if pipeline == 1 or schedule in ONE_STAGE
        else (2, 4, 8)
        if schedule in IN_LOOPS
        else (2,)
    )
    for chunks in choices.get("chunks", legal):
        if chunks in legal and chunks * pipeline <= layers:
            yield chunks


def divisors_text(devices: Sequence[int], layers: int, batch: int) -> str:
    """Return the divisors of all numbers that plans divide, for an error."""
    sizes = {"devices": devices[0], "layers": layers, "global batch": batch}
    return "; ".join(
        f"of {name} {', '.join(str(size) for size in range(1, count + 1) if count % size == 0)}"
        for name, count in sizes.items()
    )
