"""The senders between two meshes and what they send, against sets of element numbers, which no table is made from."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fshard as fs
from fshard.mesh.reshard.crossing import Crossing, MeshSide
from fshard.mesh.runtimes.process import ProcessWorld
from tests.mesh.reshard.moves_between import drawn_moves, source_array, stored_by_device


def numbers_of(boxes, stored):
    """Return the elements of boxes in the memory of a shard, in their order.

    `stored` are the numbers of the elements of the shard.
    """
    numbers = []
    for box in boxes:
        for indices in product(*map(range, box.lengths)):
            steps = [index * stride for index, stride in zip(indices, box.strides, strict=True)]
            numbers.append(stored[box.offset + sum(steps)])
    return numbers


def crossing_of(move, leaf, machines):
    """Return the way of a leaf, where each device of the world has a machine."""
    before, after = move.before.make(), move.after.make()
    devices = tuple(sorted({*before.devices, *after.devices}))
    sides = []
    for side, mesh in [(leaf.before, before), (leaf.after, after)]:
        spec = side.spec.replace(unreduced=())
        sides.append(MeshSide.of(replace(side.layout(mesh), spec=spec)))
    return Crossing(*sides, leaf.shape or (1,), devices, tuple([machines[x] for x in devices]))


@given(drawn_moves(), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_crossing_sends_each_missing_element_once_from_the_nearest(move, machines):
    leaf = move.leaves[0]
    way = crossing_of(move, leaf, machines)
    has = stored_by_device(move.before, leaf.before, leaf.shape)
    needs = stored_by_device(move.after, leaf.after, leaf.shape)
    index_of = {number: index for index, number in enumerate(way.devices)}

    total = 0
    for receiver, stored in needs.items():
        received = Counter()
        for sender_index, (_, boxes) in way.traffic(index_of[receiver]).incoming.items():
            sender = way.devices[sender_index]
            numbers = numbers_of(boxes, stored)
            received.update(numbers)
            # The sender enumerates the same elements, in one order.
            _, outgoing = way.traffic(sender_index).outgoing[index_of[receiver]]
            assert numbers == numbers_of(outgoing, has[sender])
            assert way.counts[sender_index, index_of[receiver]] == len(numbers)
            for number in numbers:
                holders = [device for device in has if number in has[device]]
                is_near_anywhere = machines[receiver] in [machines[x] for x in holders]
                assert machines[sender] == machines[receiver] or not is_near_anywhere
        missing = {*stored} - {*has.get(receiver, [])}
        assert received == Counter(dict.fromkeys(missing, 1))
        total += len(missing)
    assert way.counts.sum() == total


@given(drawn_moves(has_sums=False, memories=["device"]))
def test_ledger_has_the_bytes_of_missing_elements_by_link(move):
    before, after = move.before.make(), move.after.make()
    assume(before != after)
    expected = Counter()
    for leaf in move.leaves:
        itemsize = min(leaf.dtype.itemsize, move.expected_full(leaf).dtype.itemsize)
        has = stored_by_device(move.before, leaf.before, leaf.shape)
        needs = stored_by_device(move.after, leaf.after, leaf.shape)
        for receiver, stored in needs.items():
            expected[receiver] += len({*stored} - {*has.get(receiver, [])}) * itemsize

    sources = [source_array(move, leaf, before) for leaf in move.leaves]
    layouts = [leaf.after.layout(after) for leaf in move.leaves]
    with fs.ledger() as comm:
        fs.reshard(sources, layouts, dtype=move.dtype)
    received = Counter()
    sent = Counter()
    for (sender, receiver), count in comm.links.items():
        received[receiver] += count
        sent[sender] += count
    assert received == +expected
    assert {device: comm.bytes(device) for device in sent} == sent


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([0, 0, 0, 0, 0, 0], {(0, 4): 6, (1, 4): 6, (2, 5): 6, (3, 5): 6}),
        ([0, 1, 0, 1, 0, 1], {(0, 4): 6, (2, 4): 6, (1, 5): 6, (3, 5): 6}),
        ([0, 1, 2, 2, 0, 3], {(0, 4): 12, (0, 5): 3, (1, 5): 3, (2, 5): 3, (3, 5): 3}),
    ],
    ids=["one machine", "two machines", "a machine without replica"],
)
def test_replicas_of_the_nearest_machine_divide_the_sending(machines, expected):
    """Four replicas of 12 elements, for two other devices."""
    trainer = fs.make_mesh({"data": 4})
    engine = fs.make_mesh({"model": 2}, devices=(4, 5))
    sides = [MeshSide.of(fs.Layout(mesh)) for mesh in (trainer, engine)]
    way = Crossing(*sides, (12,), tuple(range(6)), tuple(machines))
    actual = {}
    for sender, receiver in np.argwhere(way.counts).tolist():
        actual[sender, receiver] = way.counts[sender, receiver]
    assert actual == expected


def links_on_machines(machines):
    """Return the bytes that this process sends, if processes are on these machines."""
    trainer = fs.make_mesh({"data": 2}, devices=(0, 1))
    engine = fs.make_mesh({"model": 2}, devices=(2, 3))
    world = ProcessWorld.of(fs.make_mesh({"all": 4}))
    actual_machines = world.machines
    world.machines = machines
    try:
        x = fs.device_put(torch.arange(6.0), fs.Layout(trainer))
        with fs.ledger() as comm:
            y = fs.reshard(x, fs.Layout(engine))
    finally:
        world.machines = actual_machines
    assert not y.is_local or y.local.equal(torch.arange(6.0))
    return dict(comm.links)


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([0, 1, 1, 0], [{(0, 3): 24}, {(1, 2): 24}]),
        ([0, 1, 2, 2], [{(0, 2): 24}, {(1, 3): 24}]),
        ([0, 1, 0, 0], [{(0, 2): 24, (0, 3): 24}, {}]),
    ],
    ids=str,
)
def test_processes_receive_from_their_own_machine(four, machines, expected):
    assert four.run(links_on_machines, machines) == [*expected, {}, {}]
