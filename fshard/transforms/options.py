"""What the options of `value_and_grad` may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, TypedDict

import torch

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout
from fshard.mesh.tree import PyTree
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


def refuse_options(
    reproducible: bool,
    slices: int | None,
    reduce: torch.dtype | None,
    *,
    at_least_1: Mapping[str, Any],
    at_least_0: Mapping[str, Any],
) -> None:
    """Raise if options contradict each other, or if numbers, by their names, are too small or not whole; name all of these."""
    if slices is not None and not reproducible:
        raise LayoutError(
            f"value_and_grad(slices={slices}) has no meaning without reproducible=True. Add it, or leave slices out; "
            "accumulate= cuts each device's part."
        )
    wrong = [
        f"{name}={value!r}"
        for least, values in ((1, at_least_1), (0, at_least_0))
        for name, value in values.items()
        if not isinstance(value, Integral) or value < least
    ]
    if wrong:
        raise LayoutError(
            f"value_and_grad: {', '.join(wrong)}: a whole number of at least 1 is needed (in_flight, prefetch and bucket: 0)."
        )
    if reduce is not None and not isinstance(reduce, torch.dtype):
        raise LayoutError(f"value_and_grad: reduce={reduce!r} is no dtype: reduce=torch.float32, say.")
    if reproducible and reduce in (torch.bfloat16, torch.float16):
        raise LayoutError(
            f"value_and_grad(reproducible=True, reduce={reduce}): sums in 16 bits are rounded at other places on other meshes. "
            "Give reduce=torch.float32, or leave it out."
        )
