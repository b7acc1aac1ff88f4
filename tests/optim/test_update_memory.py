"""Bytes that a partitioned update holds beyond its arguments, counted on an abstract mesh."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import optim
from fshard.mesh.layout.sharded import flatten_shards
from tests.transforms.helpers.placement import placed

N, SIZE, COUNT = 4, 64, 64
LEAF = SIZE * SIZE * 4
WHOLE = LEAF * COUNT
AT_ONCE = 4 * LEAF


class Peak(TorchDispatchMode):
    """Counts the bytes of all memory that is held, and the most there ever was."""

    def __init__(self, held):
        super().__init__()
        self.now = self.most = 0
        self.known = set()
        for x in held:
            self.note(x)

    def note(self, x):
        memory = x.untyped_storage()
        if memory._cdata not in self.known:
            self.known.add(memory._cdata)
            self.now += memory.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(memory, self.forget, memory._cdata, memory.nbytes())

    def forget(self, key, size):
        self.known.remove(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in flatten_shards(result)[0]:
            if isinstance(x, torch.Tensor):
                self.note(x)
        return result


def beyond(sharding, stage):
    """The most that a step holds beyond parameters, gradients and state, and what is left of that
    after it.
    """
    mesh = fs.make_mesh({"data": N}, runtime="abstract")
    opt = fs.partition_optimizer(
        optim.sgd(0.1, momentum=0.9, fused=False),
        mesh=mesh,
        axis="data",
        stage=stage,
        sharding=sharding,
    )
    params = placed(
        {str(i): torch.empty(SIZE, SIZE, device="meta") for i in range(COUNT)}, stage, mesh
    )
    state = opt.init(params)
    grads = {
        k: fs.device_put(torch.empty(x.shape, device="meta"), opt.gradients(x.layout))
        for k, x in params.items()
    }
    with Peak(flatten_shards((params, grads, state))[0]) as peak:
        before = peak.now
        params, state = opt.step(grads, state, params)
    return peak.most - before, peak.now - before


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_flat_update_holds_few_extra_bytes(stage, monkeypatch):
    monkeypatch.setattr(optim.sharded.optimizer, "AT_ONCE", AT_ONCE)
    most, left = beyond("flat", stage)
    assert most <= (2 * AT_ONCE if stage < 3 else 0) + COUNT * 8
    assert left <= COUNT * 8  # the counts of steps


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_owner_update_holds_few_extra_bytes(stage, monkeypatch):
    monkeypatch.setattr(optim.sharded.optimizer, "AT_ONCE", AT_ONCE)
    monkeypatch.setattr(fs.mesh.reshard.execute, "AT_ONCE", AT_ONCE)
    most, left = beyond("owners", stage)
    share = WHOLE // N
    assert most <= (share if stage < 3 else 2 * share) + 4 * AT_ONCE
    assert left <= COUNT * 8
