"""Activations by name in host memory: bits, bytes and peaks; waits are not missing; runtimes agree."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from fshard.memory.transfers import Transfer, stress
from fshard.nn import checkpoint_name, save_names
from tests.helpers.sampled import examples

NAMES = ("first", "second")
LAYERS, WIDTH, ROWS = 6, 8, 16
names = st.lists(st.sampled_from(NAMES), unique=True).map(tuple)


def block(w, x):
    y = checkpoint_name(torch.tanh(x @ w), "first")
    return checkpoint_name(y.sin() @ w.T, "second").cos()


def trained(policy=None, *, n=2, stage=3, microbatches=1, runtime=None, limit=None):
    """Return parameters after a step; the ledger, and memory, of a second one."""
    draw = torch.Generator().manual_seed(0)
    mesh = fs.make_mesh({"data": n}, runtime=runtime)
    weights = [torch.randn(WIDTH, WIDTH, generator=draw) for _ in range(LAYERS)]
    params = fs.shard_params(weights, fs.fsdp("data", unit="[*]") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(optim.sgd(0.1), mesh=mesh, axis="data", stage=stage)

    def loss_fn(params, x):
        for w in params:
            x = (block if policy is None else fs.remat(block, policy))(w, x)
        return x.square().mean()

    step = fs.train_step(
        loss_fn, opt, mesh=mesh, batch=P("data"), donate=True, accumulate=microbatches
    )
    state = opt.init(params)
    batch = torch.randn(ROWS, WIDTH, generator=draw)
    params, state, _ = step(params, state, batch)
    with fs.memory.limit(device=limit) as used, fs.ledger() as comm:
        params, state, _ = step(params, state, batch)
    return fs.unshard(params) if runtime != "abstract" else None, comm, used


@settings(max_examples=examples(10))
@given(names, names, st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(1, 2))
def test_bits_and_bytes_of_drawn_names(kept, offloaded, n, stage, microbatches):
    result, comm, _ = trained(
        save_names(*kept, offload=offloaded), n=n, stage=stage, microbatches=microbatches
    )
    expected, *_ = trained(
        save_names(*kept, *offloaded), n=n, stage=stage, microbatches=microbatches
    )
    assert all(map(torch.equal, result, expected))
    size = 4 * ROWS // n * WIDTH * LAYERS * len(offloaded)  # all microbatches together
    assert comm.moved("device", "host") == comm.moved("host", "device") == size


@pytest.mark.parametrize("runtime", ["virtual", "abstract"])
def test_peaks_are_lower_by_what_is_on_the_host(runtime):
    """On both runtimes alike, and within a limit that the step with all on the device passes."""
    _, _, kept = trained(save_names(*NAMES), n=2, runtime=runtime)
    _, comm, used = trained(save_names(*NAMES, offload=NAMES), n=2, runtime=runtime)
    size = 4 * ROWS // 2 * WIDTH
    assert used.peak("host", "activations") == used.peak("host") == 2 * LAYERS * size
    assert (
        kept.peak() - used.peak() >= (2 * LAYERS - 6) * size
    )  # two are leaving, and three are back
    assert comm.moved("device", "host") == 2 * LAYERS * size
    trained(save_names(*NAMES, offload=NAMES), n=2, runtime=runtime, limit=used.peak())
    with pytest.raises(fs.errors.MemoryLimitError):
        trained(save_names(*NAMES), n=2, runtime=runtime, limit=used.peak())


@pytest.mark.parametrize("rate", [None, 1e4])
def test_a_missing_wait_changes_the_bits(rate, monkeypatch):
    expected, *_ = trained(save_names(*NAMES))
    policy = save_names("first", offload="second")
    with stress(poison=True, rate=rate):
        assert all(map(torch.equal, trained(policy)[0], expected))
        monkeypatch.setattr(Transfer, "wait", lambda transfer: transfer._targets)
        assert not all(map(torch.equal, trained(policy)[0], expected))


def test_values_that_were_written_to_are_computed_again():
    def written(w, x):
        y = checkpoint_name(x @ w, "first")
        return torch.relu_(y).sin() + y

    w = torch.randn(4, 4).requires_grad_()
    x = torch.randn(3, 4)
    (expected,) = torch.autograd.grad(written(w, x).sum(), w)

    def main():
        y = fs.remat(written, save_names(offload="first"))(w, x).sum()
        return [torch.autograd.grad(y, w, retain_graph=True)[0] for _ in range(2)]

    for gradients in fs.run(main, mesh=fs.make_mesh({"data": 2})):
        assert all(torch.equal(gradient, expected) for gradient in gradients)


def test_copies_end_with_their_graph():
    """Without a backward, and in evaluation, nothing stays on the host."""
    policy = save_names(offload=NAMES)
    w = torch.randn(WIDTH, WIDTH).requires_grad_()
    with fs.memory.limit() as used:
        y = fs.run(
            lambda: fs.remat(block, policy)(w, torch.ones(3, WIDTH)).sum(),
            mesh=fs.make_mesh({"data": 1}),
        )
        assert used.now("host") == 2 * 4 * 3 * WIDTH
        del y
        with torch.no_grad():
            fs.run(
                lambda: fs.remat(block, policy)(w, torch.ones(3, WIDTH)),
                mesh=fs.make_mesh({"data": 1}),
            )
        gc.collect()
        assert used.now("host") == 0


def test_in_stages():
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    stages = [
        torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(2)
    ]

    def gradient(policy):
        functions = [lambda w, x: fs.remat(block, policy)(w, x)] * 2
        run = fs.value_and_grad(
            functions,
            mesh=mesh,
            batch=P("data"),
            schedule=schedule,
            loss=lambda y, x: y.square().mean(),
        )
        params = fs.shard_stages(stages, mesh=mesh, schedule=schedule)
        with fs.ledger() as comm:
            _, grads = run(params, torch.ones(ROWS, WIDTH))
        return fs.unshard(grads), comm.moved("device", "host")

    (result, moved), (expected, _) = (
        gradient(save_names(offload="first")),
        gradient(save_names("first")),
    )
    assert all(map(torch.equal, result, expected)) and moved == 4 * ROWS // 2 * WIDTH
