"""What the options of `value_and_grad` may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch

from fshard.mesh.layout import Layout
from fshard.mesh.tree import PyTree
from fshard.transforms.complaints import misfits
from fshard.transforms.counts import Weight
from fshard.transforms.patterns import Choice
from fshard.transforms.stage_functions import How as Recompute


class Options(TypedDict, total=False):
    """All of them, by name: first those that any gradient has, then those of a loss function, then those of stages."""

    has_buffers: bool
    has_aux: bool
    weight: Weight | None
    gradients: Callable[[Layout], Layout] | None
    frozen: Choice
    reproducible: bool
    live_units: int
    compute: torch.dtype | None
    reduce: torch.dtype | None

    accumulate: int
    reduce_once: bool
    slices: int | None
    reshard_after_forward: bool
    prefetch: int
    in_flight: int
    bucket: int

    loss: Callable[..., Any] | None
    inputs: Callable[[PyTree], PyTree] | None
    skips: Mapping[str, tuple[int, int]] | None
    axis: str
    deferred_batch_norm: bool
    dynamic: bool
    recompute: Recompute


def wrong_options(reproducible: bool, given: Mapping[str, Any]) -> list[str]:
    """Return all that is wrong with options, by their names, and with how they go together."""
    wrong = [*misfits(Options, given, in_flight=0, prefetch=0, bucket=0).values()]
    if given.get("slices") is not None and not reproducible:
        wrong.append(
            f"slices={given['slices']} has no meaning without reproducible=True, and accumulate= cuts each device's part"
        )
    if reproducible and (reduce := given.get("reduce")) in (torch.bfloat16, torch.float16):
        wrong.append(
            f"reproducible=True with reduce={reduce}: sums in 16 bits are rounded at other places on other meshes; "
            "reduce=torch.float32 is not"
        )
    return wrong
