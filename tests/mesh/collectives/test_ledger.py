"""Ledgers of threads: each counts the collectives of the thread that has opened it, and of the
devices that it runs.
"""

import threading

import pytest
import torch

import fshard as fs
from fshard.mesh.collectives.ledger import active


def total(mesh, count):
    """Run some collectives on a mesh."""

    def main():
        for _ in range(count):
            fs.psum(torch.ones(2), "data")

    fs.run(main, mesh=mesh)


def in_threads(*bodies):
    """Run functions at the same time, each in a thread; raise their errors."""
    errors = list[BaseException]()

    def guarded(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_ledgers_of_threads_count_their_own_collectives():
    both = threading.Barrier(3)
    counts = dict[int, int]()

    def body(number):
        mesh = fs.make_mesh({"data": 2})
        with fs.ledger() as ledger:
            both.wait()
            total(mesh, number)
            both.wait()
        counts[number] = ledger.calls()

    in_threads(*[lambda number=number: body(number) for number in (1, 2, 5)])
    assert counts == {1: 1, 2: 2, 5: 5}


def test_ledger_does_not_count_a_thread_beside():
    with fs.ledger() as ledger:
        total(fs.make_mesh({"data": 2}), 1)
        in_threads(lambda: total(fs.make_mesh({"data": 2}), 7))
    assert ledger.calls() == 1


def test_nested_ledgers_count_what_is_inside():
    mesh = fs.make_mesh({"data": 2})
    with fs.ledger() as outer:
        total(mesh, 1)
        with fs.ledger() as inner:
            total(mesh, 2)
    total(mesh, 4)
    assert (outer.calls(), inner.calls(), active()) == (3, 2, ())


def test_ledger_of_a_device_counts_that_device():
    def main():
        with fs.ledger() as ledger:
            fs.psum(torch.ones(2), "data")
        fs.psum(torch.ones(2), "data")
        return ledger.calls(), [*ledger.devices]

    with fs.ledger() as outer:
        results = fs.run(main, mesh=fs.make_mesh({"data": 2}))
    assert results == [(1, [0]), (1, [1])] and outer.calls() == 2


@pytest.mark.parametrize("fails", [False, True])
def test_ledger_is_closed_with_its_block(fails):
    with pytest.raises(KeyError) if fails else fs.ledger(), fs.ledger():
        if fails:
            raise KeyError
    assert active() == ()
