"""Combinators against loops over one device's gradients."""

import pytest
import torch

import fshard as fs
from fshard import comm

FRACTION, COUNT = 0.1, 6


def gradient(device, step):
    return torch.randn(40, generator=torch.Generator().manual_seed(10 * step + device))


def largest(x):
    index = x.abs().argsort(descending=True)[: int(FRACTION * len(x))]
    return torch.zeros_like(x).index_copy(0, index, x[index])


def with_feedback(gradients):
    residual = torch.zeros(40)
    for g in gradients:
        sent = largest(g + residual)
        residual = 0.5 * (g + residual - sent)
        yield sent


def with_estimates(gradients):
    estimate = torch.zeros(40)
    for g in gradients:
        estimate = estimate + largest(g - estimate)
        yield estimate


def with_momentum(gradients):
    """Deep Gradient Compression: momentum u and its sum v; both are zero where v is sent."""
    u = torch.zeros(40)
    v = torch.zeros(40)
    for g in gradients:
        u = 0.9 * u + g
        v = v + u
        sent = largest(v)
        u = u * (sent == 0)
        v = v * (sent == 0)
        yield sent


def with_delay(gradients):
    yield from [torch.zeros(40), *map(largest, [*gradients][:-1])]


@pytest.mark.parametrize(
    ("combine", "loop"),
    [
        (lambda c: comm.error_feedback(c, decay=0.5), with_feedback),
        (comm.ef21, with_estimates),
        (lambda c: comm.momentum_corrected(c, 0.9), with_momentum),
        (comm.delayed, with_delay),
    ],
)
def test_totals_are_those_of_the_loop_over_each_device(combine, loop):
    compress = combine(comm.top_k(FRACTION))

    def main():
        state = compress.init([gradient(0, 0)])
        totals = []
        for step in range(COUNT):
            total, _, state = compress.reduce(
                [gradient(fs.axis_index("data"), step)], state, "data"
            )
            totals.append(total[0])
        return torch.stack(totals)

    expected = sum(
        torch.stack([*loop(gradient(device, step) for step in range(COUNT))]) for device in range(3)
    )
    for totals in fs.run(main, mesh=fs.make_mesh({"data": 3})):
        torch.testing.assert_close(totals, expected)


def test_a_compressor_of_ones_own_is_a_generator_of_collectives():
    """Combinators start it as any other."""

    def phases(grads, state, axis):
        total = yield fs.psum.start(grads, axis)
        return comm.Reduced(total, grads, state + 1)

    compress = comm.error_feedback(comm.Compressor(lambda params: 0, phases))

    def main():
        x = torch.ones(3) * (1 + fs.axis_index("data"))
        return compress.reduce(x, compress.init(x), "data")

    total, _, state = fs.run(main, mesh=fs.make_mesh({"data": 2}))[0]
    assert (total.tolist(), state["inner"]) == ([3.0, 3.0, 3.0], 1)
