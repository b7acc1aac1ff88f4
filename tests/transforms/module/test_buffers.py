"""Buffers that a loss writes are averaged over devices, weighted by samples.

The oracle is the formula on the parts of the batch.
"""

import pytest
import torch

import fshard as fs
from fshard import P

PARTS = {2: (3, 2), 4: (2, 2, 1, 0)}
"""The number of the five samples that each device has."""


def buffers_after(devices, samples, write, start, **options):
    mesh = fs.make_mesh({"data": devices})
    params = fs.shard_params({"w": torch.ones(3)}, P(), mesh=mesh)
    buffers = fs.device_put({"b": start}, fs.Layout(mesh))

    def loss_fn(params, buffers, x):
        return (x @ params["w"]).square().mean(), {"b": write(buffers["b"], x)}

    function = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), has_buffers=True, **options)
    (_, after), _ = function(params, buffers, samples)
    return fs.unshard(after["b"])


@pytest.mark.parametrize("devices", PARTS)
def test_buffer_of_uneven_parts_is_the_mean_by_samples(devices):
    """Of the running mean of BatchNorm; the mean of the devices' means would be another."""
    samples = torch.randn(5, 3, dtype=torch.float32)
    start = torch.zeros(3)
    actual = buffers_after(devices, samples, lambda b, x: 0.9 * b + 0.1 * x.mean(0), start)
    parts = [part for part in samples.split(PARTS[devices]) if len(part)]
    expected = sum(len(part) * 0.1 * part.mean(0) for part in parts) / 5
    torch.testing.assert_close(actual, expected)
    if devices == 2:
        assert not torch.allclose(expected, sum(0.1 * part.mean(0) for part in parts) / 2)


def test_buffer_of_weighted_parts_is_the_mean_by_weight():
    """Tokens that count: `weight=` is the weight of a buffer too."""
    samples = torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]])
    actual = buffers_after(
        2, samples, lambda b, x: x.sum(0), torch.zeros(3), weight=lambda x: x.sum()
    )
    first, second = samples.split(2)
    expected = (first.sum() * first.sum(0) + second.sum() * second.sum(0)) / samples.sum()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("start", [2**53 + 1, 2**62 + 1])
def test_integer_buffer_beyond_floats_is_exact(start):
    """A count that no float64 holds is added to on all devices alike."""
    counts = torch.tensor([start, 3], dtype=torch.int64)
    actual = buffers_after(2, torch.randn(4, 3), lambda b, x: b + 1, counts)
    assert actual.tolist() == [start + 1, 4]
