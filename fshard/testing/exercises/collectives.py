"""Exercises of the notebook "Collectives and gradients"."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import (
    Answer,
    Cases,
    Exercise,
    PerDevice,
    WrongAnswer,
    is_same,
    mistake,
    on_devices,
    sent,
)

__all__ = ["EXERCISES"]


# -- the bytes of a psum --------------------------------------------------------------------------


@cache
def psum_bytes(n: int, numbers: int) -> Fraction:
    mesh = fs.make_mesh({"data": n}, runtime="abstract")
    x = torch.empty(numbers, device="meta")
    return sent(lambda: fs.run(lambda: fs.psum(x, "data"), mesh=mesh))


@mistake("That is one half: the sums are then also sent back to all devices.")
def bytes_of_one_half(n: int, numbers: int) -> Fraction:
    return psum_bytes(n, numbers) / 2


@mistake(
    "To send everything to everyone costs (n - 1) B. With shards of sums it is less: 2 of all but"
    " an n-th."
)
def bytes_of_everything(n: int, numbers: int) -> int:
    return 4 * (n - 1) * numbers


@mistake("That is a number of elements. A float32 has 4 bytes.")
def elements(n: int, numbers: int) -> Fraction:
    return psum_bytes(n, numbers) / 4


@mistake("Nearly: each device keeps its own n-th, twice.")
def bytes_with_own_shards(n: int, numbers: int) -> int:
    return 8 * numbers


BYTES = Exercise(
    name="collectives.bytes",
    question=(
        "How many bytes does each of `n` devices send in a `psum` of a float32 tensor of `numbers`"
        " elements?"
    ),
    form="answer(n, numbers)",
    hints=(
        "A `psum` is a `psum_scatter`, then an `all_gather`.",
        "In each of them a device sends all but its own n-th.",
        "2 (n - 1)/n of the bytes of the tensor.",
    ),
    why="It hardly grows with n: two devices send B each, a thousand send 2 B each.",
    grade=Cases(
        cases=[(3, 30), (5, 40), (64, 6400)],
        truth=psum_bytes,
        mistakes=(bytes_of_one_half, bytes_of_everything, elements, bytes_with_own_shards),
    ),
)


# -- a mean of different numbers of values --------------------------------------------------------


def values_of_devices(devices: int) -> PerDevice:
    """Return values of each device: device i has i + 1 of them."""
    draw = torch.Generator().manual_seed(devices)
    return PerDevice(torch.randn(i + 1, generator=draw) for i in range(devices))


def run_mean(answer: Answer, devices: int) -> PerDevice:
    return on_devices(answer, fs.make_mesh({"data": devices}), values_of_devices(devices))


def mean_of_all(devices: int) -> list[Tensor]:
    return [torch.cat(values_of_devices(devices)).mean()] * devices


@mistake(
    "This is the mean of the devices' means. A device with one value counts as much as one with"
    " four. Sum values and numbers apart."
)
def mean_of_means(values: Tensor) -> Tensor:
    return fs.pmean(values.mean(), "data")


@mistake("This is the sum of the devices' means.")
def sum_of_means(values: Tensor) -> Tensor:
    return fs.psum(values.mean(), "data")


@mistake("This is the mean of the device's own values. No collective is called.")
def local_mean(values: Tensor) -> Tensor:
    return values.mean()


@mistake("This is the sum of all. Divide by the number of all values, which is summed, too.")
def sum_of_all(values: Tensor) -> Tensor:
    return fs.psum(values.sum(), "data")


MEAN = Exercise(
    name="collectives.mean",
    question=(
        "Each device has some `values`, a vector; devices have different numbers of them. Return"
        " the mean of all values of all devices, on each device."
    ),
    form="answer(values)",
    hints=(
        "A mean of means weighs few values as much as many.",
        "Which two numbers must be summed over devices?",
        '`fs.psum(values.sum(), "data")`, and the same of the number of values.',
    ),
    why=(
        "The last batch of an epoch and padded tokens are this case: a silent, small, wrong"
        " gradient."
    ),
    grade=Cases(
        cases=[(3,), (4,)],
        truth=mean_of_all,
        mistakes=(mean_of_means, sum_of_means, local_mean, sum_of_all),
        run=run_mean,
    ),
)


# -- a reduce-scatter of an all-to-all ------------------------------------------------------------


def vectors(devices: int) -> PerDevice:
    draw = torch.Generator().manual_seed(devices)
    return PerDevice(torch.randn(2 * devices, generator=draw) for _ in range(devices))


def run_scatter(answer: Answer, devices: int) -> PerDevice:
    return on_devices(answer, fs.make_mesh({"data": devices}), vectors(devices))


def scattered(devices: int) -> list[Tensor]:
    total = torch.stack(vectors(devices)).sum(0)
    return [*total.chunk(devices)]


@mistake(
    "After the all-to-all a device has its shard of each other's vector, one behind the other: they"
    " must still be added."
)
def not_added(x: Tensor) -> Tensor:
    return fs.all_to_all(x, "data")


@mistake("These are the sums of all shards of the device's own vector. Exchange before adding.")
def added_before_exchange(x: Tensor) -> Tensor:
    return x.view(fs.axis_size("data"), -1).sum(0)


@mistake("All devices have the sum of all. Each keeps its own shard alone.")
def sum_on_all_devices(x: Tensor) -> Tensor:
    return fs.psum(x, "data")


@mistake("The received rows are added within a shard: view them as (devices, elements) first.")
def added_within_a_shard(x: Tensor) -> Tensor:
    received = fs.all_to_all(x, "data")
    return received.view(-1, fs.axis_size("data")).sum(1)


SCATTER_CASES = Cases(
    cases=[(3,), (4,)],
    truth=scattered,
    mistakes=(not_added, added_before_exchange, sum_on_all_devices, added_within_a_shard),
    run=run_scatter,
)


def grade_scatter(answer: Answer) -> None:
    """Check which collectives are called, then the values."""
    for (devices,) in SCATTER_CASES.cases:
        with fs.ledger() as comm:
            result = run_scatter(answer, devices)
        if comm.calls(collective="psum_scatter"):
            raise WrongAnswer("`fs.psum_scatter` is what is to be built. Use `fs.all_to_all`.")

        bytes_of_all_to_all = 8 * (devices - 1)
        is_right = is_same(result, scattered(devices))
        if is_right and comm.bytes() > bytes_of_all_to_all:
            raise WrongAnswer(
                f"The values are right, but a device sends {float(comm.bytes()):g} bytes, where an"
                f" all-to-all sends {bytes_of_all_to_all}: most of what arrives is thrown away."
            )
    SCATTER_CASES(answer)


SCATTER = Exercise(
    name="collectives.scatter",
    question=(
        'Build `fs.psum_scatter(x, "data")` for a vector `x` from `fs.all_to_all` and operations of'
        " torch, with as few bytes as the original."
    ),
    form="answer(x)",
    hints=(
        '`fs.all_to_all(x, "data")` gives each device its shard of the vectors of all devices.',
        "They stand one behind the other: the result has as many elements as `x`.",
        "View it as (devices, elements) and sum over the first dim.",
    ),
    why="Compressed all-reduces are built so: quantize, all-to-all, sum, quantize, all-gather.",
    grade=grade_scatter,
)


# -- the gradient of an all-gather ----------------------------------------------------------------


def gradient_of_gather(n: int) -> float:
    """Return the gradient of the number of device 0, computed by autograd."""
    mesh = fs.make_mesh({"data": n})

    def on_device() -> Tensor:
        shard = torch.ones(1, requires_grad=True)
        full = fs.all_gather(shard, "data")
        loss = (fs.axis_index("data") + 1) * full.sum()
        return torch.autograd.grad(loss, shard)[0]

    gradients = fs.run(on_device, mesh=mesh)
    return float(gradients[0])


@mistake("That is the share of device 0 alone. All devices use its number.")
def share_of_device_0(n: int) -> int:
    return 1


@mistake("Each device uses it once, but not with the factor 1: device i has i + 1.")
def number_of_uses(n: int) -> int:
    return n


@mistake("Indices begin at 0, factors at 1: the last one is n.")
def sum_of_indices(n: int) -> int:
    return n * (n - 1) // 2


@mistake("Losses are added here, not averaged.")
def mean_of_factors(n: int) -> float:
    return (n + 1) / 2


GATHERED = Exercise(
    name="collectives.gathered",
    question=(
        "Each of `n` devices has one number. All gather the vector, and device i (0, 1, ...) has"
        " the loss `(i + 1) * vector.sum()`. What is the gradient of the sum of these losses with"
        " respect to the number of device 0?"
    ),
    form="answer(n)",
    hints=(
        "The number of device 0 is used on every device.",
        "Each device contributes its own factor, i + 1.",
        "1 + 2 + ... + n.",
    ),
    why="The backward of an all-gather is a sum over devices, a `psum_scatter`: all of ZeRO-3.",
    grade=Cases(
        cases=[(2,), (3,), (5,)],
        truth=gradient_of_gather,
        mistakes=(share_of_device_0, number_of_uses, sum_of_indices, mean_of_factors),
    ),
)


# -- a shift --------------------------------------------------------------------------------------


def numbers_of_devices(devices: int) -> PerDevice:
    return PerDevice(torch.tensor([float(i)]) for i in range(devices))


def run_shift(answer: Answer, devices: int) -> PerDevice:
    return on_devices(answer, fs.make_mesh({"data": devices}), numbers_of_devices(devices))


def shifted(devices: int) -> list[Tensor]:
    *others, last = numbers_of_devices(devices)
    return [last, *others]


@mistake(
    "It is the other direction: device i has that of device i + 1. A pair is (source, destination)."
)
def shifted_back(x: Tensor) -> Tensor:
    n = fs.axis_size("data")
    pairs = [((i + 1) % n, i) for i in range(n)]
    return fs.ppermute(x, "data", pairs)


@mistake("Device 0 gets zeros: no pair leads to it. The last device sends to it.")
def shifted_without_the_last(x: Tensor) -> Tensor:
    n = fs.axis_size("data")
    pairs = [(i, i + 1) for i in range(n - 1)]
    return fs.ppermute(x, "data", pairs)


@mistake("Each device has its own tensor: nothing has moved.")
def not_shifted(x: Tensor) -> Tensor:
    return x


SHIFT = Exercise(
    name="collectives.shift",
    question=(
        "Every device has a tensor `x`. Write the function after which device i has that of device"
        " i - 1, and device 0 that of the last one, on any number of devices. One collective is"
        " enough."
    ),
    form="answer(x)",
    hints=(
        '`fs.ppermute(x, "data", pairs)` sends along pairs of (source, destination).',
        "A device that no pair names as a destination gets zeros.",
        '`[(i, (i + 1) % n) for i in range(n)]`, where n is `fs.axis_size("data")`.',
    ),
    why=(
        "Ring attention is this in a loop: while a device computes, the next keys are on their way."
    ),
    grade=Cases(
        cases=[(3,), (5,)],
        truth=shifted,
        mistakes=(shifted_back, shifted_without_the_last, not_shifted),
        run=run_shift,
    ),
)

EXERCISES = (BYTES, MEAN, SCATTER, GATHERED, SHIFT)
