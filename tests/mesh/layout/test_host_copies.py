"""Offloaded activations and reads of the host, on a fake GPU: a value that is used before its event is NaN."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import grad

import fshard as fs
from fshard import P
from fshard.mesh.layout.host_copies import AHEAD, HostCopy, start_read
from fshard.mesh.layout.sharded import in_memory
from fshard.nn import checkpoint_name, offload, save_names
from fshard.transforms.module import remat
from tests.mesh.layout.fake_gpu import FakeEvent, FakeGpu


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch, remat)


def block(w, x):
    y = checkpoint_name(x @ w, "product")
    return torch.relu_(y).sin().cos()  # in place


def gradients(policy):
    generator = torch.Generator().manual_seed(0)
    ws = [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(3)]
    x = torch.randn(2, 4, generator=generator)
    for w in ws:
        x = (fs.remat(block, policy) if policy else block)(w, x) + 1
    return grad(x.sum(), ws)


@pytest.mark.parametrize("policy", ["everything", "dots", save_names("product")], ids=["everything", "dots", "names"])
def test_offloaded_tensors_are_used_after_their_copies(gpu, monkeypatch, policy):
    expected = gradients(None)
    assert gpu.log == []
    assert all(map(torch.equal, gradients(offload(policy)), expected))
    assert gpu.log.count("to host") == gpu.log.count("to device") == (11 if policy == "everything" else 3)
    assert "host waits" not in gpu.log
    monkeypatch.setattr(FakeEvent, "wait", lambda event: None)
    assert any(x.isnan().any() for x in gradients(offload(policy)))


def test_offloaded_tensors_are_fetched_ahead(gpu):
    copies = [HostCopy(torch.full((2,), float(i))) for i in range(8)]
    assert gpu.log == ["to host"] * 2 + ["to host", "device waits"] * 6  # two run at a time
    gpu.log.clear()
    for i in (7, 6, 6):
        assert copies[i].get().tolist() == [i, i]
    last = ["to device", "device waits"]
    assert gpu.log == ["to device"] * AHEAD + last + last + last  # the last one once more: it was used


def test_host_waits_only_where_it_reads(gpu):
    x, on_host = torch.ones(3), gpu.on_host(torch.zeros(2))
    read = start_read([x, on_host])
    x.add_(1)  # follows the copy on the stream
    assert gpu.log == ["to host"]
    ones, zeros = read()
    assert ones.tolist() == [1, 1, 1] and zeros is on_host and gpu.log == ["to host", "host waits"]


def test_layout_in_host_memory_waits_for_its_event(gpu):
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
