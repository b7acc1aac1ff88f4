"""Reads of the host, on a fake GPU: a value that is used before its event is NaN."""

from types import SimpleNamespace

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.mesh.layout import kinds
from fshard.mesh.layout.host_copies import start_read, upload
from fshard.mesh.layout.sharded import in_memory
from fshard.transforms.batch import shard_batch


def test_host_waits_only_where_it_reads(gpu):
    x = torch.ones(3)
    on_host = gpu.on_host(torch.zeros(2))
    read = start_read([x, on_host])
    x.add_(1)  # follows the copy on the stream
    assert gpu.log == ["to host"]
    ones, zeros = read()
    assert ones.tolist() == [1, 1, 1] and zeros is on_host and gpu.log == ["to host", "host waits"]


def test_a_copy_to_the_device_keeps_what_the_host_had(gpu):
    """The host does not wait, and may write to its tensor at once."""
    x = gpu.on_host(torch.ones(3))
    target = torch.zeros(3)
    read = start_read([x], [target])
    x.add_(1)
    assert gpu.log == ["to device"]
    assert target.tolist() == [1, 1, 1]
    del read


def test_layout_in_host_memory_waits_for_its_event(gpu, monkeypatch):
    monkeypatch.setitem(
        kinds.makers, "host", lambda shape, dtype: gpu.pinned_like(torch.empty(shape, dtype=dtype))
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


@pytest.fixture
def mesh():
    return fs.make_mesh({"data": 1})


def squares(params, x):
    return (params["w"] * x).square().mean()


def test_step_with_a_batch_of_the_host_waits_on_the_device_alone(gpu, mesh):
    params = fs.shard_params({"w": torch.ones(3)}, P(), mesh=mesh)
    gradient = fs.value_and_grad(squares, mesh=mesh, batch=P("data"))
    batch = gpu.on_host(torch.full((2, 3), 2.0))
    losses = []
    for value in (2.0, 3.0, 4.0):
        batch.fill_(value)  # the user's buffer, reused
        losses.append(gradient(params, batch)[0])
        batch.fill_(torch.nan)
    assert [loss.item() for loss in losses] == [4, 9, 16]
    assert gpu.log == ["to device", "device waits"] * 3


LEAVES = {
    "rows": (lambda x: x, P("data")),
    "not contiguous": (lambda x: x.T, P("data")),
    "replicated": (lambda x: x, P()),
    "one number": (lambda x: x[0, 0], P()),
    "no rows": (lambda x: x[:0], P()),
    "integers": (lambda x: x.long(), P("data")),
    "16 bits": (lambda x: x.bfloat16(), P("data")),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("n", [1, 2])
def test_leaves_of_the_host_are_uploaded(gpu, name, n):
    view, spec = LEAVES[name]
    leaf = gpu.on_host(view(torch.arange(12.0).view(4, 3)))
    placed = shard_batch(leaf, spec, fs.make_mesh({"data": n}))
    shards = placed.columns[0]
    assert not any(map(gpu.is_on_host, shards))
    if spec == P():
        assert all(torch.equal(shard, leaf) for shard in shards)
    else:
        assert torch.equal(torch.cat(shards), leaf)
    assert "host waits" not in gpu.log


def test_array_from_local_shard_of_the_host_is_uploaded(gpu, mesh):
    shard = gpu.on_host(torch.ones(2, 3))
    x = fs.from_local(shard, fs.Layout(mesh, P("data")))
    shard.zero_()
    assert x.shards[0].eq(1).all() and not gpu.is_on_host(x.shards[0])
    assert gpu.log == ["to device", "device waits"]


def test_uploads_run_beside_the_computation(gpu):
    """In memory of their own stream: the copy waits for nothing that the device has still to do."""
    copy = upload(gpu.on_host(torch.ones(3)))
    (stream,) = [stream for stream in gpu.streams if stream.is_for_copies]
    assert gpu.owners[copy.untyped_storage()] == {stream, gpu.current}
    assert not stream._waits and copy.tolist() == [1, 1, 1]
