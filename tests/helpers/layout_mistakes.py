"""Mistakes of layouts, put into the library by patches: in the steps of one mesh, and not in others.

Each is a function of the size of that mesh, and returns a patch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

import fshard as fs
from fshard.mesh.spmd.scope import here
from fshard.optim import norms
from fshard.transforms import device_step
from fshard.transforms.batch import Batch
from fshard.transforms.fsdp.reductions import Reducer
from fshard.transforms.fsdp.units import Unit
from fshard.transforms.reproducible.summation_tree import TreeAccumulator
from fshard.transforms.slices import DeviceSlices
from fshard.transforms.stages.device import StageStep
from fshard.transforms.stages.params import StageSums
from fshard.transforms.train_step import TrainStep

Patch = AbstractContextManager[Any]


def on_mesh_of(size: int) -> bool:
    """Return True on a device of a mesh of this size."""
    scope = here()
    return scope is not None and scope.mesh.size == size


def instead(owner: Any, name: str, size: int, mistaken: Callable[..., Any]) -> Patch:
    """Call `mistaken(original, *arguments)` in place of a function, on devices of one mesh."""
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        if on_mesh_of(size):
            return mistaken(original, *args, **kwargs)
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, patched)


def around_update(size: int, mistaken: Callable[..., Any]) -> Patch:
    """Call `mistaken(original, step, params, state, ...)` in place of the update of a mesh."""
    original = TrainStep._updated

    def patched(step: TrainStep, *args: Any) -> Any:
        if step.mesh.size == size:
            return mistaken(original, step, *args)
        return original(step, *args)

    return mock.patch.object(TrainStep, "_updated", patched)


# -- reductions ------------------------------------------------------------------------------------


def mean_for_sum(size: int) -> Patch:
    def add(original: Any, reducer: Any, indices: Any, gs: Any, copies: int) -> Any:
        return original(reducer, indices, [g / size for g in gs], copies)

    return instead(Reducer, "_add", size, add)


def wrong_group(size: int) -> Patch:
    """The sum is over the first half of the devices."""

    def send(original: Any, reducer: Any) -> Any:
        if here().device >= size / 2:
            reducer._bucket = [(index, torch.zeros_like(g)) for index, g in reducer._bucket]
        return original(reducer)

    return instead(Reducer, "send", size, send)


def sum_twice(size: int) -> Patch:
    def add(original: Any, reducer: Any, indices: Any, gs: Any, copies: int) -> Any:
        return original(reducer, indices, [gs[0] * 2, *gs[1:]], copies)

    return instead(Reducer, "_add", size, add)


def sums_in_16_bits(size: int) -> Patch:
    def cast(original: Any, reducer: Any, indices: Any, gs: Any) -> Any:
        return [None if g is None else g.bfloat16().to(g.dtype) for g in gs]

    return instead(Reducer, "cast", size, cast)


# -- units -----------------------------------------------------------------------------------------


def _other_values(size: int, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Patch:
    def wait(original: Any, unit: Any, into: Any = None) -> Any:
        is_new = unit.pending is not None or not getattr(unit, "is_changed", False)
        values = original(unit, into)
        if is_new and unit.plan.is_sharded and unit.values:
            unit.values = [change(unit, x) for x in values]
            unit.is_changed = True
            unit._versions = [x._version for x in unit.values]
        return unit.values

    return instead(Unit, "wait_for_unshard", size, wait)


def missing_wait(size: int) -> Patch:
    """The memory is read before values have arrived."""
    return _other_values(size, lambda unit, x: torch.zeros_like(x))


def stale_unit(size: int) -> Patch:
    """The unit has the values of an earlier step."""
    cache: dict[Any, torch.Tensor] = {}

    def change(unit: Any, x: torch.Tensor) -> torch.Tensor:
        key = here().device, unit.plan.params[0].path, x.shape
        return cache.setdefault(key, x.clone())

    return _other_values(size, change)


def swapped_shards(size: int) -> Patch:
    def change(unit: Any, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1).roll(x.numel() // 2).reshape(x.shape)

    return _other_values(size, change)


def lost_element(size: int) -> Patch:
    """The last element is taken for padding."""

    def change(unit: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone().reshape(-1)
        y[-1] = 0
        return y.reshape(x.shape)

    return _other_values(size, change)


# -- slices ----------------------------------------------------------------------------------------


def lost_slice(size: int) -> Patch:
    def end_slice(original: Any, trees: Any, weight: float) -> Any:
        return original(trees, 0.0 if here().device == 1 else weight)

    return instead(TreeAccumulator, "end_slice", size, end_slice)


def equal_weights(size: int) -> Patch:
    def end_slice(original: Any, trees: Any, weight: float) -> Any:
        return original(trees, 1.0)

    return instead(TreeAccumulator, "end_slice", size, end_slice)


def wrong_scale_of_uneven_batches(size: int) -> Patch:
    def divisor(original: Any, largest: float, scale: float, weight: float, **flags: Any) -> Any:
        return original(largest, scale, -(-weight // size) * size, **flags)

    return instead(device_step, "gradient_divisor", size, divisor)


def sums_in_a_row(size: int) -> Patch:
    """Slices are added one after the other instead of in the tree."""

    def end_slice(original: Any, trees: Any, weight: float) -> Any:
        original(trees, weight)
        for row in trees._trees:
            while len(row) > 1:
                (_, left), (_, right) = row[-2:]
                row[-2:] = [(99, [a + b for a, b in zip(left, right, strict=True)])]

    return instead(TreeAccumulator, "end_slice", size, end_slice)


def draws_of_another_slice(size: int) -> Patch:
    def running(original: Any, slices: Any, turn: Any) -> Any:
        return original(slices, turn._replace(number=turn.number + 1))

    return instead(DeviceSlices, "running", size, running)


def samples_of_a_neighbour(size: int) -> Patch:
    def slices(original: Any, batch: Any, index: int, count: int, **flags: Any) -> Any:
        return original(batch, (index + 1) % size, count, **flags)

    return instead(Batch, "slices", size, slices)


# -- updates ---------------------------------------------------------------------------------------


def norm_counts_replicas(size: int) -> Patch:
    original = norms._norm_later

    def norm_later(leaves: Any, *args: Any) -> Any:
        norm = original(leaves, *args)
        is_wrong = any(getattr(x, "mesh", None) and x.mesh.size == size for x in leaves)
        return (lambda: norm() * 2) if is_wrong else norm

    return mock.patch.object(norms, "_norm_later", norm_later)


def parameters_not_gathered(size: int) -> Patch:
    """One leaf has its old values after the update."""

    def updated(original: Any, step: Any, params: Any, *rest: Any) -> Any:
        before = fs.reshard(params["b"], params["b"].layout)
        params, *results = original(step, params, *rest)
        return params | {"b": before}, *results

    return around_update(size, updated)


def state_of_a_neighbour(size: int) -> Patch:
    def updated(original: Any, step: Any, params: Any, state: Any, *rest: Any) -> Any:
        params, state, norm = original(step, params, state, *rest)
        x = state["exp_avg"]["a"]
        shards = (*x.shards[1:], x.shards[0])
        if torch.equal(shards[0], x.shards[0]):  # replicas: an element of one is another's
            shards = tuple([shard.flip(0) for shard in shards])
        x = fs.Sharded(x.shape, x.layout, shards)
        return params, state | {"exp_avg": state["exp_avg"] | {"a": x}}, norm

    return around_update(size, updated)


def stale_state(size: int) -> Patch:
    def updated(original: Any, step: Any, params: Any, state: Any, *rest: Any) -> Any:
        x = state["exp_avg_sq"]["c"]
        before = fs.reshard(x, x.layout)
        params, state, norm = original(step, params, state, *rest)
        return params, state | {"exp_avg_sq": state["exp_avg_sq"] | {"c": before}}, norm

    return around_update(size, updated)


def update_twice(size: int) -> Patch:
    def updated(original: Any, step: Any, params: Any, state: Any, grads: Any, *rest: Any) -> Any:
        params, state, _ = original(step, params, state, grads, *rest)
        return original(step, params, state, grads, *rest)

    return around_update(size, updated)


MISTAKES = (
    mean_for_sum,
    wrong_group,
    sum_twice,
    sums_in_16_bits,
    missing_wait,
    stale_unit,
    swapped_shards,
    lost_element,
    lost_slice,
    equal_weights,
    wrong_scale_of_uneven_batches,
    sums_in_a_row,
    draws_of_another_slice,
    samples_of_a_neighbour,
    norm_counts_replicas,
    parameters_not_gathered,
    state_of_a_neighbour,
    stale_state,
    update_twice,
)
"""Those of a full model."""


# -- stages and buffers ----------------------------------------------------------------------------


def lost_microbatch(size: int) -> Patch:
    def add(original: Any, sums: Any, stage: int, microbatch: int, gs: Any, **flags: Any) -> Any:
        if microbatch == 1:
            gs = [torch.zeros_like(g) for g in gs]
        return original(sums, stage, microbatch, gs, **flags)

    return instead(StageSums, "add", size, add)


def stale_message(size: int) -> Patch:
    """A stage gets the message of the microbatch before."""

    def run_stage(original: Any, step: Any, stage: int, microbatch: int, x: Any, skips: Any) -> Any:
        earlier = getattr(step, "earlier", {})
        step.earlier = {**earlier, stage: x.detach()}
        stale = 0 * x + earlier.get(stage, x.detach())
        return original(step, stage, microbatch, stale if stage else x, skips)

    return instead(StageStep, "run_stage", size, run_stage)


def buffers_of_one_device(size: int) -> Patch:
    def averaged(original: Any, slices: Any, entries: Any, group: Any, *rest: Any) -> Any:
        return original(slices, entries, None, *rest)

    return instead(device_step, "averaged", size, averaged)
