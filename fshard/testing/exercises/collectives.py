"""Exercises of the notebook "Collectives and gradients"."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.grading import (
    Exercise,
    PerDevice,
    WrongAnswer,
    as_function,
    grade_cases,
    grade_results,
    is_same,
    on_devices,
    sent,
)


@cache
def _psum_bytes(n: int, numbers: int) -> int | Fraction:
    mesh = fs.make_mesh({"data": n}, runtime="abstract")
    x = torch.empty(numbers, device="meta")
    return sent(lambda: fs.run(lambda: fs.psum(x, "data"), mesh=mesh))


BYTES = Exercise(
    "collectives.bytes",
    "How many bytes does each of `n` devices send in a `psum` of a float32 tensor of `numbers`"
    " elements?",
    "answer(n, numbers)",
    (
        "A `psum` is a `psum_scatter`, then an `all_gather`.",
        "In each of them a device sends all but its own n-th.",
        "2 (n - 1)/n of the bytes of the tensor.",
    ),
    "It hardly grows with n: two devices send B each, a thousand send 2 B each.",
    lambda answer: grade_cases(
        answer,
        "answer(n, numbers)",
        [(3, 30), (5, 40), (64, 6400)],
        _psum_bytes,
        {
            "That is one half: the sums are then also sent back to all devices.": (
                lambda n, numbers: _psum_bytes(n, numbers) / 2
            ),
            "To send everything to everyone costs (n - 1) B. With shards of sums it is less: 2 of"
            " all but an n-th.": lambda n, numbers: 4 * (n - 1) * numbers,
            "That is a number of elements. A float32 has 4 bytes.": (
                lambda n, numbers: _psum_bytes(n, numbers) / 4
            ),
            "Nearly: each device keeps its own n-th, twice.": lambda n, numbers: 8 * numbers,
        },
    ),
)


def _unequal(n: int) -> PerDevice:
    """Return rows of each device: device i has i + 1 of them."""
    draw = torch.Generator().manual_seed(n)
    return PerDevice(torch.randn(i + 1, generator=draw) for i in range(n))


def _mean_of_all(n: int) -> list[Tensor]:
    return [torch.cat(_unequal(n)).mean()] * n


MEAN = Exercise(
    "collectives.mean",
    "Each device has some `values`, a vector; devices have different numbers of them. Return the"
    " mean of all values of all devices, on each device.",
    "answer(values)",
    (
        "A mean of means weighs few values as much as many.",
        "Which two numbers must be summed over devices?",
        '`fs.psum(values.sum(), "data")`, and the same of the number of values.',
    ),
    "The last batch of an epoch and padded tokens are this case: a silent, small, wrong gradient.",
    lambda answer: grade_cases(
        answer,
        "answer(values)",
        [(3,), (4,)],
        _mean_of_all,
        {
            "This is the mean of the devices' means. A device with one value counts as much as one"
            " with four. Sum values and numbers apart.": (
                lambda n: [torch.stack([x.mean() for x in _unequal(n)]).mean()] * n
            ),
            "This is the sum of the devices' means.": (
                lambda n: [torch.stack([x.mean() for x in _unequal(n)]).sum()] * n
            ),
            "This is the mean of the device's own values. No collective is called.": (
                lambda n: [x.mean() for x in _unequal(n)]
            ),
            "This is the sum of all. Divide by the number of all values, which is summed, too.": (
                lambda n: [torch.cat(_unequal(n)).sum()] * n
            ),
        },
        run=lambda function, n: on_devices(function, fs.make_mesh({"data": n}), _unequal(n)),
        names="devices",
    ),
)


def _rows(n: int) -> PerDevice:
    draw = torch.Generator().manual_seed(n)
    return PerDevice(torch.randn(2 * n, generator=draw) for _ in range(n))


def _scattered(n: int) -> list[Tensor]:
    return [*torch.stack(_rows(n)).sum(0).chunk(n)]


def _grade_scatter(answer: Any) -> None:
    function = as_function(answer, "answer(x)")
    results: list[Any] = []
    for n in (3, 4):
        mesh = fs.make_mesh({"data": n})
        with fs.ledger() as comm:
            results.append(on_devices(function, mesh, _rows(n)))
        if comm.calls(collective="psum_scatter"):
            raise WrongAnswer("`fs.psum_scatter` is what is to be built. Use `fs.all_to_all`.")
        is_dear = comm.bytes() > Fraction(n - 1, n) * 8 * n
        if is_dear and is_same(results[-1], _scattered(n)):
            raise WrongAnswer(
                f"The values are right, but a device sends {float(comm.bytes()):g} bytes, where an"
                f" all-to-all sends {8 * (n - 1)}: most of what arrives is thrown away."
            )
    grade_results(
        results,
        "(devices)",
        [(3,), (4,)],
        _scattered,
        {
            "After the all-to-all a device has its shard of each other's vector, one behind the"
            " other: they must still be added.": (
                lambda n: [torch.cat([x.chunk(n)[i] for x in _rows(n)]) for i in range(n)]
            ),
            "These are the sums of all shards of the device's own vector. Exchange before"
            " adding.": (lambda n: [x.view(n, -1).sum(0) for x in _rows(n)]),
            "All devices have the sum of all. Each keeps its own shard alone.": (
                lambda n: [torch.stack(_rows(n)).sum(0)] * n
            ),
            "The received rows are added within a shard: view them as (devices, elements) first.": (
                lambda n: [
                    torch.cat([x.chunk(n)[i] for x in _rows(n)]).view(-1, n).sum(1)
                    for i in range(n)
                ]
            ),
        },
    )


SCATTER = Exercise(
    "collectives.scatter",
    'Build `fs.psum_scatter(x, "data")` for a vector `x` from `fs.all_to_all` and operations of'
    " torch, with as few bytes as the original.",
    "answer(x)",
    (
        '`fs.all_to_all(x, "data")` gives each device its shard of the vectors of all devices.',
        "They stand one behind the other: the result has as many elements as `x`.",
        "View it as (devices, elements) and sum over the first dim.",
    ),
    "Compressed all-reduces are built so: quantize, all-to-all, sum, quantize, all-gather.",
    _grade_scatter,
)


def _gather_gradient(n: int) -> float:
    """Return a number of the gradient of a shard that all devices use, device i times i + 1."""
    mesh = fs.make_mesh({"data": n})

    def on_device() -> Tensor:
        shard = torch.ones(1, requires_grad=True)
        full = fs.all_gather(shard, "data")
        loss = (fs.axis_index("data") + 1) * full.sum()
        return torch.autograd.grad(loss, shard)[0]

    return float(fs.run(on_device, mesh=mesh)[0])


GATHERED = Exercise(
    "collectives.gathered",
    "Each of `n` devices has one number. All gather the vector, and device i (0, 1, ...) has the"
    " loss `(i + 1) * vector.sum()`. What is the gradient of the sum of these losses with"
    " respect to"
    " the number of device 0?",
    "answer(n)",
    (
        "The number of device 0 is used on every device.",
        "Each device contributes its own factor, i + 1.",
        "1 + 2 + ... + n.",
    ),
    "The backward of an all-gather is a sum over devices, a `psum_scatter`: all of ZeRO-3.",
    lambda answer: grade_cases(
        answer,
        "answer(n)",
        [(2,), (3,), (5,)],
        _gather_gradient,
        {
            "That is the share of device 0 alone. All devices use its number.": lambda n: 1,
            "Each device uses it once, but not with the factor 1: device i has i + 1.": lambda n: n,
            "Indices begin at 0, factors at 1: the last one is n.": lambda n: n * (n - 1) // 2,
            "Losses are added here, not averaged.": lambda n: (n + 1) / 2,
        },
    ),
)


def _shifted(n: int) -> list[Tensor]:
    return [torch.tensor([float((i - 1) % n)]) for i in range(n)]


SHIFT = Exercise(
    "collectives.shift",
    "Every device has a tensor `x`. Write the function after which device i has that of device"
    " i - 1, and device 0 that of the last one, on any number of devices. One collective is"
    " enough.",
    "answer(x)",
    (
        '`fs.ppermute(x, "data", pairs)` sends along pairs of (source, destination).',
        "A device that no pair names as a destination gets zeros.",
        '`[(i, (i + 1) % n) for i in range(n)]`, where n is `fs.axis_size("data")`.',
    ),
    "Ring attention is this in a loop: while a device computes, the next keys are on their way.",
    lambda answer: grade_cases(
        answer,
        "answer(x)",
        [(3,), (5,)],
        _shifted,
        {
            "It is the other direction: device i has that of device i + 1. A pair is (source,"
            " destination).": lambda n: [torch.tensor([float((i + 1) % n)]) for i in range(n)],
            "Device 0 gets zeros: no pair leads to it. The last device sends to it.": (
                lambda n: [torch.tensor([float(max(i - 1, 0))]) for i in range(n)]
            ),
            "Each device has its own tensor: nothing has moved.": (
                lambda n: [torch.tensor([float(i)]) for i in range(n)]
            ),
        },
        run=lambda function, n: on_devices(
            function,
            fs.make_mesh({"data": n}),
            PerDevice(torch.tensor([float(i)]) for i in range(n)),
        ),
        names="devices",
    ),
)

EXERCISES = (BYTES, MEAN, SCATTER, GATHERED, SHIFT)
