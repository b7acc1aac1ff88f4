"""Reads of the host, on a fake GPU: a value that is used before its event is NaN."""

from types import SimpleNamespace

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.mesh.layout import kinds
from fshard.mesh.layout.host_copies import start_read
from fshard.mesh.layout.sharded import in_memory
from tests.mesh.layout.fake_gpu import FakeGpu


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


def test_host_waits_only_where_it_reads(gpu):
    x = torch.ones(3)
    on_host = gpu.on_host(torch.zeros(2))
    read = start_read([x, on_host])
    x.add_(1)  # follows the copy on the stream
    assert gpu.log == ["to host"]
    ones, zeros = read()
    assert ones.tolist() == [1, 1, 1] and zeros is on_host and gpu.log == ["to host", "host waits"]


def test_layout_in_host_memory_waits_for_its_event(gpu, monkeypatch):
    monkeypatch.setitem(
        kinds.makers, "host", lambda shape, dtype: gpu.on_host(torch.empty(shape, dtype=dtype))
    )
    x = in_memory(torch.ones(2), SimpleNamespace(device_type="cuda"), "host")
    assert x.tolist() == [1, 1] and gpu.log == ["to host", "host waits"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_are_read_after_the_forward_is_launched(gpu, accumulate):
    def loss_fn(params, x):
        gpu.log.append("forward")
        return (params["w"] * x).sum(1).mean()

    mesh = fs.make_mesh({"data": 1})
    params = fs.shard_params({"w": torch.tensor([1.0, 2.0])}, P(), mesh=mesh)
    gradient = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), weight=lambda x: (x > 0).sum(), accumulate=accumulate
    )
    loss, _ = gradient(params, torch.tensor([[1.0, 1.0], [3.0, 0.0]]))
    assert loss.item() == 3.0
    assert gpu.log == ["to host", "forward", "host waits", *["forward"] * (accumulate - 1)]
