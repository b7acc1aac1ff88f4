"""`cost_of_program`: the cost of a plan's program, from those of shorter programs of the same plan.

    layers          4 ──> 5 ──────────> all       in stages: the stages' first ──> one more in each
    microbatches    3 ──> 4 ──────────> all

A shorter program runs as `fs.plan.cost` runs the one of all layers: on the abstract mesh, with the
same mesh, options and samples of a microbatch. See Note [Programs are linear].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import NamedTuple, cast

from fshard.parallelism.value import Parallelism
from fshard.plan.cluster import Cluster
from fshard.plan.cost import Cost
from fshard.plan.formulas import reduces_in_backward, shards_params
from fshard.plan.program import LayeredModel
from fshard.plan.programs.numbers import LOSS, ProgramCost, cost_of_short_program, peaks
from fshard.transforms.options import default_bucket

# Note [Programs are linear]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
# All layers of a model are equal, and all microbatches have equally many samples. So with one layer
# more a program does the operations of one layer more, in each microbatch; and a device holds one
# layer's bytes more at each time of the step. The operations are the same at any number but for the
# first and the last layer, and the first and the last microbatches, which begin and end queues of
# the network and sums of gradients:
#
#     operations, bytes sent       a + b L + c M + d L M, exactly
#     seconds                      the same, once the queues are steady: each wait is a maximum of
#                                  such sums, and the same one of them is largest from then on
#     peak before the update,      a + b L each, once the queues are full, since it is the peak of
#     and in the update            one layer: the n-th from either end; the peak of the step is the
#                                  larger one
#
# Two numbers of layers give the coefficients: the fewest with which the queues are full, and one
# more. "One more" is as many as repeat themselves:
#
#     stages       each has a number of layers, or one more: a program has as many stages of either
#                  kind, and one layer more in each
#     buckets      a bucket of gradients has several layers, if these are small: a bucket more, with
#                  the same remainder
#
# Note [Gradients under way]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
# Where gradients are reduced while a backward runs, those of some layers are under way while one
# computes the next: `in_flight` buckets, 2 by default. Until as many are under way as with more
# layers, and none of them is of the head, the peak is on no line. With ZeRO-3 that takes four
# layers, as measured with a model of 8 MB a layer; each layer adds to the peak
#
#     layers     3        4        5        6        7
#     MB         25.2     23.3     16.8     16.8     16.8
#
# A bucket of all layers' gradients is sent once in a microbatch: then the same queue is one of
# microbatches, and full after four.

FEWEST_LAYERS = 2
"""With these the first layer is another one than the last."""

FEWEST_WITH_EXPERTS = 3
"""With these the gradients of a layer before, at the peak, are as many as with more."""

FULL_QUEUE = 4
"""With these layers, or microbatches, a queue is full: see Note [Gradients under way]."""

FEWEST_MICROBATCHES = 3
"""The first makes the sums of gradients, the last reduces them; one is between."""

ALL_FORWARDS_FIRST = ("gpipe", "bfs")
"""The schedules that have no microbatch after which they repeat themselves."""

BRIEF = 0.03
"""Seconds of a step in which a few sums more would be seen."""


class ShortPrograms(NamedTuple):
    """The programs that run in place of a plan's.

    Args:
        layers: of each program: of the one of all layers, or of two shorter ones.
        microbatches: of each program.
        steps: that run, of which the last one counts: see `cost_on_mesh`.
    """

    layers: Sequence[int]
    microbatches: int
    steps: int

    @property
    def size(self) -> int:
        """The layers, times microbatches, that run."""
        return sum(self.layers) * self.microbatches * self.steps


class ProgramNumbers(NamedTuple):
    """The numbers of a program that are linear in layers and microbatches.

    Args:
        seconds: of a step.
        before_update, update: bytes at the peak of either, by purpose; "under way" is what
            collectives will write.
    """

    seconds: float
    before_update: dict[str, float]
    update: dict[str, float]

    def extended(self, more: ProgramNumbers, fraction: Fraction) -> ProgramNumbers:
        """Return the numbers on the line through these, at 0, and those of more layers, at 1."""

        def on_line(x: float, y: float) -> float:
            return x + (y - x) * float(fraction)

        def sizes_on_line(x: dict[str, float], y: dict[str, float]) -> dict[str, float]:
            return {name: on_line(size, y[name]) for name, size in x.items()}

        return ProgramNumbers(
            on_line(self.seconds, more.seconds),
            sizes_on_line(self.before_update, more.before_update),
            sizes_on_line(self.update, more.update),
        )


def cost_of_program(
    model: LayeredModel, plan: Parallelism, cluster: Cluster, programs: ShortPrograms
) -> ProgramCost:
    """Return the cost of the program of a plan, with all layers and microbatches.

    Args:
        model: with any number of layers.
        plan: its sizes and options, with `data` as a number.
        cluster: the machine.
        programs: that run.
    """
    fewest, most = programs.layers[0], programs.layers[-1]
    numbers = _numbers_of(model, plan, cluster, programs, fewest)
    if fewest < model.layers:
        numbers_of_more = _numbers_of(model, plan, cluster, programs, most)
        fraction = Fraction(model.layers - fewest, most - fewest)
        pairs = zip(numbers, numbers_of_more, strict=True)
        numbers = [less.extended(more, fraction) for less, more in pairs]

    seconds = max([device.seconds for device in numbers])
    phases = list[dict[str, float]]()
    for device in numbers:
        phases += [device.before_update, device.update]
    fullest = max(phases, key=lambda sizes: sum(sizes.values()))
    memory = {name: round(size) for name, size in fullest.items() if round(size)}
    return ProgramCost(seconds, memory)


# -- which programs run ----------------------------------------------------------------------------


def steps_of_programs(plan: Parallelism, seconds: float) -> int:
    """Return the steps that run, of which the last one counts: see `cost_on_mesh`.

    In the first step devices agree on the order of units by a few small sums more. In a step that
    takes long these are nothing.

    Args:
        plan: its sizes and options.
        seconds: of the step, about.
    """
    return 2 if shards_params(plan) or seconds < BRIEF else 1


def fewest_layers(plan: Parallelism, *, has_experts: bool) -> int:
    """Return the layers with which a program without stages is as it is with more.

    See Note [Gradients under way].
    """
    if reduces_in_backward(plan):
        return FULL_QUEUE
    return FEWEST_WITH_EXPERTS if has_experts else FEWEST_LAYERS


def layers_of_programs(layers: int, plan: Parallelism, least: int, gradients: int) -> list[int]:
    """Return the layers of the programs that run: of the one of all layers, or of two shorter ones.

    See Note [Programs are linear].

    Args:
        layers: of the model.
        plan: its sizes and options, with `data` as a number.
        least: layers with which a program without stages is as it is with more.
        gradients: bytes of a layer's gradients on a device.
    """
    if plan.in_stages:
        period = plan.stages
        fewest = plan.stages + layers % plan.stages
    else:
        period = _layers_of_bucket(plan, gradients)
        fewest = max(least, period)
        fewest += (layers - fewest) % period
    most = fewest + period
    if layers <= fewest + most:
        return [layers]
    return [fewest, most]


def microbatches_of_programs(plan: Parallelism, gradients: int) -> int:
    """Return the number of microbatches of the programs that run: of few, all.

    In stages the schedule repeats itself for each round of as many microbatches as devices, once
    all devices are busy: see `_repeated_microbatches`.

    Args:
        plan: its sizes and options.
        gradients: bytes of a layer's gradients on a device.
    """
    microbatches = cast(int, plan.microbatches)
    if plan.in_stages:
        if plan.schedule in ALL_FORWARDS_FIRST:
            return microbatches
        rounds = 3 * plan.pipeline + microbatches % plan.pipeline
        return min(microbatches, rounds)

    fewest = FEWEST_MICROBATCHES
    if _layers_of_bucket(plan, gradients) > 1:
        fewest = FULL_QUEUE  # the bucket may be one of all layers
    return min(microbatches, fewest)


def _layers_of_bucket(plan: Parallelism, gradients: int) -> int:
    """Return the layers whose gradients a device keeps until it reduces them.

    After several microbatches without ZeRO-2 it keeps those of all layers, and with ZeRO-3 it
    reduces each layer's at once.
    """
    keeps_bucket = reduces_in_backward(plan) and not shards_params(plan)
    if not keeps_bucket or not gradients:
        return 1
    return ceil(default_bucket("cuda") / gradients)


# -- a program that runs ---------------------------------------------------------------------------


def _repeated_microbatches(plan: Parallelism) -> int:
    """Return the microbatches after which a program repeats itself."""
    return plan.pipeline if plan.in_stages else 1


def _numbers_of(
    model: LayeredModel, plan: Parallelism, cluster: Cluster, programs: ShortPrograms, layers: int
) -> list[ProgramNumbers]:
    """Return the numbers of each device in a program of some layers, with all microbatches."""
    short = replace(plan, microbatches=programs.microbatches)
    cost = cost_of_short_program(model, short, cluster, programs.steps, layers)
    missing = cast(int, plan.microbatches) - programs.microbatches
    seconds_of_missing = 0.0
    if missing:
        seconds_of_missing = missing * _seconds_of_microbatch(plan, cost)
    numbers = list[ProgramNumbers]()
    for device in cost.devices.values():
        before_update, update = peaks(device)
        seconds = device.times.step + seconds_of_missing
        numbers.append(ProgramNumbers(seconds, before_update, update))
    return numbers


def _seconds_of_microbatch(plan: Parallelism, cost: Cost) -> float:
    """Return the time between the losses of two microbatches, where the program repeats itself."""
    for device in cost.devices.values():
        begins = device.times.begins
        losses = [begins[name] for name in begins if name.startswith(LOSS)]
        if losses:  # the last stage has them
            break
    else:
        raise AssertionError("no device has a loss")
    repeated = _repeated_microbatches(plan)
    # The last microbatches are those in which the schedule ends.
    end = -1 if not plan.in_stages else -1 - cast(int, plan.microbatches) % plan.pipeline
    return (losses[end] - losses[end - repeated]) / repeated
