"""Asynchronous training against sequential loops of plain tensors."""

import os
import signal
import time
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import comm
from tests.comm.servers import CODES, LIVE, OPTIMIZERS, drawn, gradient, params, server_of
from tests.helpers.processes import not_under_rules, run_processes


def batch(worker, number):
    return drawn(4, 6, seed=100 * worker + number)


def loop(arrivals, opt, compensate=0.0):
    """Apply the pushes one after the other; keep all versions of the parameters."""
    versions = [params()]
    state = opt.init(params())
    losses = []
    numbers = Counter()
    for worker, version in arrivals.events:
        now = versions[-1]
        read = versions[version]
        loss, grads = gradient(read, batch(worker, numbers[worker]))
        if compensate:
            grads = {
                name: g + compensate * g * g * (now[name] - read[name]) for name, g in grads.items()
            }
        after, state = opt.step(grads, state, {name: x.clone() for name, x in now.items()})
        versions.append({name: x.clone() for name, x in after.items()})
        numbers[worker] += 1
        losses.append(loss.item())
    return versions[-1], losses


def train(*args, batches=batch, **options):
    server = server_of(*args, **options)
    return server(params(), server.init(params()), batches)


def assert_same_bits(tree, other):
    assert all(torch.equal(tree[name], other[name]) for name in other)


SPEEDS = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


@settings(max_examples=25)
@given(
    SPEEDS,
    st.integers(0, 6),
    st.integers(0, 5),
    st.sampled_from([*OPTIMIZERS]),
    st.sampled_from([0.0, 0.5]),
)
def test_arrivals_are_a_sequential_loop(speeds, slack, seed, opt, compensate):
    bound = len(speeds) - 1 + slack
    arrivals = comm.arrivals(speeds, bound=bound, count=10, seed=seed, jitter=0.5)
    assert max(arrivals.staleness) <= bound and arrivals == comm.Arrivals([*arrivals.events], bound)
    trained, _, metrics = train(arrivals, opt, len(speeds) + 1, compensate=compensate)
    expected, losses = loop(arrivals, OPTIMIZERS[opt], compensate)
    assert_same_bits(trained, expected)
    assert metrics["loss"].tolist() == losses and metrics["arrivals"] == arrivals


def test_bound_makes_fast_workers_wait():
    free, bounded = [
        comm.arrivals([1.0, 100.0], bound=bound, count=60, jitter=0.0) for bound in (60, 3)
    ]
    assert {worker for worker, _ in free.events} == {1}
    assert [worker for worker, _ in bounded.events] == [1, 1, 1, 0] * 15


@pytest.mark.parametrize("code", CODES)
def test_compressed_pushes_feed_back_their_errors(code):
    """Of gradients that do not depend on the parameters, all is sent or still to be sent, after two
    calls.
    """
    compress, size = CODES[code]
    arrivals = comm.arrivals([1.0, 2.0], bound=2, count=10)
    server = server_of(arrivals, "sgd", 3, lambda w, x: (x.sum(), x[:3].T), code)
    w = torch.zeros(6, 3)
    state = server.init(torch.zeros(6, 3))
    for _ in range(2):
        with fs.ledger() as ledger:
            w, state, _ = server(w, state, batch)
    numbers = Counter(worker for worker, _ in arrivals.events)
    total = 2 * sum(
        batch(worker, number)[:3].T for worker in numbers for number in range(numbers[worker])
    )
    torch.testing.assert_close((state["unsent"] if compress else 0) - 4 * w, total)
    assert (
        ledger.bytes(2, collective="send") == numbers[1] * (size + 8)
        and ledger.bytes(0, collective="send") == 720
    )


def late_batch(path, worker, number):
    """Let worker 2 begin when worker 0 has pushed 4 times."""
    if (worker, number) == (0, 4):
        path.touch()
    while (worker, number) == (2, 0) and not path.exists():
        time.sleep(0.01)
    return batch(worker, number)


def deadly_batch(worker, number):
    if (worker, number) == (1, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(worker, number)


over_gloo = not_under_rules("losses are sent over gloo, to which these rules do not apply")


@over_gloo
def test_live_log_replays_to_the_same_bits(four, tmp_path):
    batches = partial(late_batch, tmp_path / "late")
    (trained, _, metrics), *others = four.run(
        train, LIVE, code="random_k", batches=batches, live=True
    )
    log = metrics["arrivals"]
    assert sorted(worker for worker, _ in log.events) == sorted(worker for worker, _ in LIVE.events)
    assert 4 <= log.events.index((2, 0)) <= log.bound
    for tree, *_ in [train(log, code="random_k"), *four.run(train, log, code="random_k"), *others]:
        assert_same_bits(tree, trained)


@over_gloo
def test_worker_that_dies_ends_all(link):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="process 2 of 4 was killed") as error:
        run_processes(train, 4, LIVE, batches=deadly_batch, live=True, environment=link)
    notes = "".join(error.value.__notes__)
    assert all(f"process {process} failed:\nLostProcessError" in notes for process in (0, 1, 3))
    assert time.monotonic() - start < 30
