"""A ZeRO-3 step as the device sees it: what is launched before anything completes, and the bytes
that are alive.
"""

import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fshard as fs
from fshard import P
from fshard.mesh.layout.sharded import flatten_shards
from tests.mesh.runtimes import echo

N, UNITS, SIZE = 4, 6, 32
LEAF = SIZE * SIZE * 4
UNIT = 2 * LEAF
SHARD = 2 * LEAF // N


class Block(torch.nn.Module):
    """A unit of two leaves; its activations are smaller than a leaf's shard."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.randn(SIZE, SIZE)) for _ in range(2))

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at a time, of memory of at least the size of a leaf's shard."""

    def __init__(self, tensors):
        super().__init__()
        self.most, self.storages = 0, {}
        self.note(tensors)

    def note(self, tree):
        for x in tree_leaves(tree):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)

    def sample(self):
        """Count: FSDP2 frees memory by setting its size to 0."""
        total = 0
        for reference in self.storages.values():
            storage = reference()
            size = 0 if storage is None else storage.nbytes()
            if size >= LEAF // N:
                total += size
        self.most = max(self.most, total)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.sample()
        result = func(*args, **(kwargs or {}))
        self.note((args, kwargs, result))
        self.sample()
        return result


def after_two_steps(stage=3, sizes=None, **options):
    """Return a training step with its arguments, on a mesh of these sizes: one axis, unless given."""
    sizes = sizes or {"data": N}
    mesh = fs.make_mesh(sizes, runtime="process", device="cpu")
    apply, params, _ = fs.functionalize(torch.nn.Sequential(*[Block() for _ in range(UNITS)]))
    params = fs.shard_params(params, fs.fsdp("data", unit="*") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.sgd(0.1), mesh=mesh, axis="data", stage=stage)
    step = fs.train_step(
        lambda p, x: apply(p, {}, x)[0].sum(),
        opt,
        mesh=mesh,
        batch=P(tuple(sizes)),
        donate=True,
        **options,
    )
    state = opt.init(params)
    batch = fs.device_put(torch.ones(2 * N, SIZE), fs.Layout(mesh, P(tuple(sizes))))
    for _ in range(2):
        params, state, _ = step(params, state, batch)
    echo.forget()
    return step, params, state, batch


@pytest.fixture
def alone(monkeypatch):
    """Play all ranks.

    Each is the first one here, so differences of inputs would not add up to 0.
    """
    monkeypatch.setattr("fshard.transforms.agreement.hash_of", lambda value: 0)
    with echo.echoing(N):
        yield


def test_step_launches_everything_before_anything_completes(alone):
    """Reads of values by the host are counted in `test_host_syncs`."""
    step, params, state, batch = after_two_steps()
    step(params, state, batch)
    names = [work.name for work in echo.works]
    forward = names[:UNITS]
    backward = names[UNITS:-2]
    end = names[-2:]
    assert forward == ["all_gather"] * UNITS
    assert (
        sorted(backward) == ["all_gather"] * (UNITS - 2) + ["reduce_scatter"] * UNITS
    )  # two units were kept
    assert end == ["all_reduce"] * 2  # the loss, the norm
    assert echo.blocking == []
    assert not any(work.is_completed() for work in echo.works)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"in_flight": 0}], ids=str)
@pytest.mark.parametrize("stage", range(4))
def test_no_step_blocks_the_host(alone, stage, options):
    step, params, state, batch = after_two_steps(stage, **options)
    step(params, state, batch)
    assert echo.works and echo.blocking == []


def peak(**options):
    """Return the most bytes of a step beyond the shards of parameters."""
    step, params, state, batch = after_two_steps(**options)
    with LiveBytes(flatten_shards((params, state, batch))[0]) as live:
        step(params, state, batch)
    return live.most - UNITS * SHARD


def fsdp2_peak():
    """Return the same for FSDP2."""
    mesh = init_device_mesh("cpu", (N,))
    model = torch.nn.Sequential(*[Block() for _ in range(UNITS)])
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    for _ in range(3):
        model.zero_grad()
        with LiveBytes([x.to_local() for x in model.parameters()]) as live:
            model(torch.ones(2, SIZE)).sum().backward()
    return live.most - UNITS * SHARD


@pytest.mark.parametrize(
    ("prefetch", "in_flight"), [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
)
def test_peak_is_two_units_and_those_prefetched_and_packed(alone, prefetch, in_flight):
    """At its last gradient a unit has its parameters and gradients; later ones are prefetched,
    earlier ones packed.
    """
    reduced = UNITS - 1 - prefetch if in_flight else UNITS
    assert (
        peak(prefetch=prefetch, in_flight=in_flight)
        == (2 + prefetch + in_flight) * UNIT + reduced * SHARD
    )


def test_peak_of_one_reduction_in_flight_is_that_of_fsdp2(alone):
    assert peak(prefetch=1, in_flight=1) == fsdp2_peak()


# -- reductions of two steps: hybrid sharding ------------------------------------------------------

HYBRID = {"replicas": 2, "data": 2}


class Events(TorchDispatchMode):
    """The order of a step's matrix products, and of the launches and waits of its reductions."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.log = []
        started = echo._started
        monkeypatch.setattr(echo, "_started", lambda name: self.noted(started(name)))
        monkeypatch.setattr(
            echo.EchoWork, "wait", lambda work: self.log.append(f"wait {work.name}")
        )

    def noted(self, work):
        self.log.append(f"start {work.name}")
        return work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.log.append("mm")
        return func(*args, **(kwargs or {}))


def products_until_waits(log, name):
    """Return how many matrix products lie between each start of a collective and its wait."""

    def indices_of(event):
        return [index for index, other in enumerate(log) if other == event]

    starts = indices_of(f"start {name}")
    waits = indices_of(f"wait {name}")
    return [log[start:wait].count("mm") for start, wait in zip(starts, waits, strict=True)]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_both_steps_of_a_reduction_have_a_backward_to_hide_behind(alone, monkeypatch, in_flight):
    """A block's backward has four products, the first block's three, since its input needs no
    gradient.
    """
    step, params, state, batch = after_two_steps(sizes=HYBRID, in_flight=in_flight)
    with Events(monkeypatch) as events:
        step(params, state, batch)
    assert products_until_waits(events.log, "reduce_scatter") == [4] * (UNITS - 2) + [3, 0]
    within_step = products_until_waits(events.log, "all_reduce")
    losses_and_last_unit = [0, 0, 0]
    assert within_step[: UNITS - 1] == [4] * (UNITS - 3) + [3, 0]
    assert within_step[UNITS - 1 :] == losses_and_last_unit
    order = [
        event for event in events.log if event.startswith(("start reduce", "start all_reduce"))
    ]
    assert order[: 2 * UNITS - 1] == ["start reduce_scatter"] + [
        "start all_reduce",
        "start reduce_scatter",
    ] * (UNITS - 1)


@pytest.mark.parametrize(
    ("prefetch", "in_flight"), [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
)
def test_peak_of_two_steps_is_at_most_that_of_one(alone, prefetch, in_flight):
    """While a shard is summed over the replicas no packed gradient is held: the bound is that of
    two devices.
    """
    reduced = UNITS - 1 - prefetch if in_flight else UNITS
    bound = (2 + prefetch + in_flight) * UNIT + reduced * UNIT // 2
    shards = UNITS * UNIT // 2
    step, params, state, batch = after_two_steps(
        sizes=HYBRID, prefetch=prefetch, in_flight=in_flight
    )
    with LiveBytes(flatten_shards((params, state, batch))[0]) as live:
        step(params, state, batch)
    assert live.most - shards <= bound
