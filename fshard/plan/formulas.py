"""The formulas of time and memory of a plan, of the costs of its layers; each below its derivation.

n, size              devices along an axis, and bytes that they gather
p, m                 stages of the pipeline's devices, and microbatches
F, B                 seconds of a forward and a backward of a microbatch, of one device
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import cast

from fshard.memory.state import GROUPS, LARGEST
from fshard.parallelism.value import Parallelism
from fshard.plan.layers import LayerCost, LayerWeights, ModelCost

UNSHARDED_UNITS = 2
"""Units of ZeRO-3 on a device at once: the one in use and the next, `live_units=` by default."""

STREAMED_GROUPS = 3
"""Groups of a state on the host that are on the device at once: on the way there, in the update,
and on the way back."""


# -- stages and devices ----------------------------------------------------------------------------


@cache
def layers_of_stages(layers: int, stages: int, weights: LayerWeights) -> tuple[int, ...]:
    """Return the number of layers of each stage, as `split_stages` balances parameters.

    The largest stage has as few parameters as can be; of all such splits it is the most even one,
    and of these the one whose last stages have the fewest. All layers are equal, so stages between
    the first and the last one have a number of layers, or one more.
    """
    if stages == 1:
        return (layers,)
    middles = stages - 2
    best = (inf, inf)
    ends = (1, 1)
    for last in range(1, layers - stages + 2):
        for first in range(layers - middles - last, 0, -1):
            between = layers - first - last
            if between and not middles:
                break  # two stages have all layers
            fewest, more = divmod(between, max(middles, 1))
            begin = weights.first + first * weights.layer
            end = weights.last + last * weights.layer
            short = fewest * weights.layer
            long = short + weights.layer
            largest = max(begin, end, long if more else short)
            squares = begin**2 + end**2 + more * long**2 + (middles - more) * short**2
            if (largest, squares) < best:
                best = (largest, squares)
                ends = (first, last)
    first, last = ends
    fewest, more = divmod(layers - first - last, max(middles, 1))
    between = [fewest + (stage < more) for stage in range(middles)]
    return (first, *between, last)


def costs_of_stages(model: ModelCost, layers: Sequence[int]) -> list[LayerCost]:
    """Return the cost of each stage, of a number of layers, for a microbatch."""
    costs = [model.layer.times(count) for count in layers]
    costs[0] += model.first
    costs[-1] += model.last
    return costs


def costs_of_devices(stages: Sequence[LayerCost], placement: Sequence[int]) -> list[LayerCost]:
    """Return the sum of the stages of each device along the pipeline."""
    sums = [LayerCost() for _ in {*placement}]
    for stage, coordinate in zip(stages, placement, strict=True):
        sums[coordinate] += stage
    return sums


def microbatches_in_flight(plan: Parallelism) -> int:
    """Return the microbatches whose activations the first device has at once, at least.

    1F1B and its relatives begin the first backward after p forwards; GPipe and breadth-first do
    all m forwards before. Schedules of a V have fewer, of which one is certain. See the table of
    peaks of `pipeline_schedule`.
    """
    assert plan.microbatches is not None
    if plan.pipeline == 1 or plan.schedule in ("v-half", "v-min", "dualpipe-v"):
        return 1
    if plan.schedule in ("gpipe", "bfs"):
        return plan.microbatches
    return min(plan.pipeline, plan.microbatches)


# -- memory ----------------------------------------------------------------------------------------


def shards_params(plan: Parallelism) -> bool:
    """Return True if each device has a part of the parameters."""
    return plan.zero_stage >= 3


def shards_gradients(plan: Parallelism) -> bool:
    """Return True if each device has a part of the gradients.

    Not in stages: there a device reduces its gradients after its last microbatch.
    """
    return plan.zero_stage >= 2 and not plan.in_stages


def reduces_in_backward(plan: Parallelism) -> bool:
    """Return True if gradients are reduced while each backward runs, and not after the last one.

    Below ZeRO-2 they are sums over all microbatches before.
    """
    return not plan.in_stages and (plan.microbatches == 1 or shards_gradients(plan))


def shards_state(plan: Parallelism) -> bool:
    """Return True if each device has a part of the optimizer's state."""
    return plan.zero_stage >= 1


def part_of_device(plan: Parallelism, cost: LayerCost) -> float:
    """Return the part of parameters that a device has of those that devices of ZeRO share.

    These devices are along "data", and along "expert" too but for the experts themselves, of which
    each device along "expert" has others: see `Parallelism.zero_axes`.
    """
    of_experts = cost.of_experts / max(cost.parameters, 1)
    dense = 1 - of_experts
    return (of_experts + dense / plan.experts) / cast(int, plan.data)


def divided(size: int, plan: Parallelism, cost: LayerCost, is_sharded: bool) -> int:
    """Return the bytes that a device has of a size, which devices of ZeRO share or not.

    Args:
        size: of what has equally many bytes for each parameter, such as gradients.
        plan: sizes and options.
        cost: of the layers that the size is of.
        is_sharded: False if each device has all of it.
    """
    return int(size * part_of_device(plan, cost)) if is_sharded else size


def bytes_of_device(
    plan: Parallelism,
    device: LayerCost,
    stages: Sequence[LayerCost],
    model: ModelCost,
    activations: int,
) -> dict[str, int]:
    """Return the bytes of a device at its peak, by purpose.

        parameters, gradients, state     by the stage of ZeRO a part of them
        unsharded                        units of ZeRO-3 that are in use
        activations, or update           whichever is larger: saved activations are free before
                                         the update begins, whose casts are free at its end

    Over several microbatches gradients are added in sums of at least 32 bits.

    Args:
        plan: sizes and options.
        device: the costs of the stages of the device.
        stages: those of all stages.
        model: those of a layer, and of the ends of the model.
        activations: bytes of microbatches in flight, and beside them.
    """
    has_sums = cast(int, plan.microbatches) > 1
    gradients = device.sums if has_sums else device.gradients
    state = divided(device.state, plan, device, shards_state(plan))
    update = divided(device.casts, plan, device, shards_state(plan))
    if plan.state_memory == "host":
        update += _streamed_state(plan, state, model)
        state = 0
    sizes = {
        "parameters": divided(device.parameters, plan, device, shards_params(plan)),
        "gradients": divided(gradients, plan, device, shards_gradients(plan)),
        "state": state,
        "unsharded": _unsharded_params(plan, stages, model),
    }
    if activations >= update:
        return {**sizes, "activations": activations}
    return {**sizes, "update": update}


def _unsharded_params(plan: Parallelism, stages: Sequence[LayerCost], model: ModelCost) -> int:
    """Return the bytes of unsharded units of ZeRO-3: of layers, or of all layers of a stage."""
    if not shards_params(plan):
        return 0
    if plan.in_stages:
        units = min(cast(int, plan.chunks), UNSHARDED_UNITS)
        return units * max([_gathered_params(plan, stage) for stage in stages])
    return UNSHARDED_UNITS * _gathered_params(plan, model.layer)


def _gathered_params(plan: Parallelism, cost: LayerCost) -> int:
    """Return the bytes of the parameters of which a device has a shard: see `part_of_device`."""
    if plan.data != 1:
        return cost.parameters
    if plan.experts != 1:
        return cost.parameters - cost.of_experts
    return 0


def _streamed_state(plan: Parallelism, state: int, model: ModelCost) -> int:
    """Return the bytes of a state on the host that are on the device during the update.

    The state is streamed in groups, of a part of it or of one large leaf: the ends of a model have
    the largest leaves, the table of words.
    """
    leaves = list[int]()
    for end in (model.first, model.last):
        leaves.append(divided(end.state, plan, end, shards_state(plan)))
    leaf = max(leaves)
    group = min(state // GROUPS, LARGEST)
    return STREAMED_GROUPS * max(group, leaf)


def workspace_of_device(
    plan: Parallelism,
    coordinate: int,
    stages: Sequence[LayerCost],
    placement: Sequence[int],
    model: ModelCost,
) -> int:
    """Return the bytes of activations beside those in flight.

    What is after the layers has its own workspace, and its activations are free before a layer
    runs: so on the device of the last stage

        max(workspace of a layer - saved of the end, workspace of the end)

    In stages a device keeps the gradients of a microbatch until its backward ends, when all of its
    activations are free but those of one layer:

        gradients of a stage - its saved activations + those of a layer
    """
    layer, last = model.layer, model.last
    workspace = layer.workspace
    if coordinate == placement[-1]:
        workspace = max(layer.workspace - last.saved, last.workspace, 0)
    if not plan.in_stages:
        return workspace

    gradients_at_end = 0
    for stage, device in zip(stages, placement, strict=True):
        if device == coordinate:
            size = stage.gradients - stage.saved + layer.saved
            gradients_at_end = max(gradients_at_end, size)
    return workspace + gradients_at_end


def least_bytes_of_device(
    plan: Parallelism,
    coordinate: int,
    device: LayerCost,
    model: ModelCost,
    layers: Sequence[int],
    workspace: int,
) -> int:
    """Return bytes that a device has at least, without a simulation of its schedule.

    The first device has most microbatches in flight, each with the activations of the layers of
    its first stage; of another one a single chunk of one microbatch is certain.
    """
    state = device.state if plan.state_memory == "device" else 0
    kept = divided(device.parameters, plan, device, shards_params(plan))
    kept += divided(state, plan, device, shards_state(plan))
    gradients = divided(device.gradients, plan, device, shards_gradients(plan))
    saved = model.layer.saved
    if coordinate == 0:
        saved *= layers[0] * microbatches_in_flight(plan)
    # In stages all forwards may be over before there is a gradient, as in GPipe; and a backward
    # without sums of an earlier one frees activations while it makes gradients.
    if plan.in_stages or plan.microbatches == 1:
        return kept + max(gradients, saved)
    return kept + gradients + saved + workspace


# -- time ------------------------------------------------------------------------------------------


def exchange_seconds(size: float, devices: int, bandwidth: float, latency: float) -> float:
    """Return the seconds of an all-gather to some bytes, or of a reduce-scatter from them.

    Each device sends (n - 1) / n of the bytes, in at least log2(n) rounds of messages.
    """
    if devices == 1:
        return 0.0
    rounds = (devices - 1).bit_length()
    return latency * rounds + size * (devices - 1) / devices / bandwidth


def idle_microbatches(plan: Parallelism) -> float:
    """Return the idle time of a schedule's slowest device, in microbatches of F + B.

    The table of `pipeline_schedule` has it, in thirds: a forward and both halves of a backward,
    each 1. So 1F1B, with 3 (p - 1), is idle for p - 1 microbatches, and with v stages per device in
    loops for (p - 1) / v. Where no entry is simpler, 1F1B's is an upper bound.
    """
    chunks = cast(int, plan.chunks)
    of_one_device = {
        "zb-h1": 1 / 3,
        "zb-h2": 0.0,
        "zbv": 1 / 6,
        "dualpipe-v": 1 / 6,
        "interleaved": 1 / chunks,
        "bfs": 1 / chunks,
    }
    return (plan.pipeline - 1) * of_one_device.get(plan.schedule, 1.0)


def sum_seconds(plan: Parallelism, device: LayerCost, bandwidth: float) -> float:
    """Return the seconds in which gradients are added over microbatches.

    An addition reads a gradient and the sum, and writes the sum: of a part of the gradients, where
    these are reduced and scattered before.
    """
    microbatches = cast(int, plan.microbatches)
    if microbatches == 1:
        return 0.0
    bytes_of_addition = device.gradients + 2 * device.sums
    traffic = divided(bytes_of_addition, plan, device, shards_gradients(plan))
    return traffic * microbatches / bandwidth


def update_seconds(plan: Parallelism, device: LayerCost, host_bandwidth: float) -> float:
    """Return the seconds of the update: of a part of the state from stage 1 of ZeRO on.

    A state on the host is sent to the device beside the update.
    """
    to_device = device.state / host_bandwidth if plan.state_memory == "host" else 0.0
    seconds = max(device.update, to_device)
    return seconds * part_of_device(plan, device) if shards_state(plan) else seconds
