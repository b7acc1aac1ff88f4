"""`broadcast_to` and plain values outside of a mesh, against the values of its first device."""

import pytest
import torch

import fshard as fs
from fshard import P
from tests.helpers.processes import Processes


@pytest.fixture(scope="module")
def pool():
    with Processes(4, environment={"FSHARD_CHECK": "1"}) as processes:
        yield processes


WORLD = {"device": 4}
SOURCE, TARGET = (2, 1), (3, 2)


def everywhere(pool, function, *args):
    """Return what a function returns on virtual devices and on processes."""
    return [fs.run(function, *args, mesh=fs.make_mesh(WORLD)), pool.run(function, *args)]


def plain_values(target):
    """Return plain values of a mesh, and what each process has of them after a broadcast."""
    source = fs.make_mesh({"data": 2}, devices=SOURCE)
    fs.make_mesh(WORLD)
    mesh = None if target is None else fs.make_mesh({"model": 2}, devices=target)
    x = fs.device_put(torch.arange(6.0).reshape(2, 3), fs.Layout(source, P("data")))
    values = fs.unshard({"x": x, "half": (x * 2).bfloat16(), "total": x.sum()})
    if source.is_member:
        values |= {"flags": torch.tensor([True, False]), "steps": 3, "empty": torch.zeros(0, 2)}
    return values, fs.broadcast_to(values, mesh, source=source)


@pytest.mark.parametrize("target", [None, TARGET, SOURCE])
def test_broadcast_to_gives_values_to_the_processes_named(pool, target):
    receivers = range(4) if target is None else {*SOURCE, *target}
    for results in everywhere(pool, plain_values, target):
        expected, _ = results[SOURCE[0]]
        assert expected["half"].dtype == torch.bfloat16
        for number, (before, after) in enumerate(results):
            if number not in SOURCE:
                assert before == dict.fromkeys(("x", "half", "total"))
            if number in receivers:
                assert after.keys() == expected.keys()
                for name, value in expected.items():
                    torch.testing.assert_close(after[name], value, rtol=0, atol=0)
            else:
                assert after == before


def with_arrays():
    source = fs.make_mesh({"data": 2}, devices=SOURCE)
    fs.make_mesh(WORLD)
    x = fs.device_put(torch.arange(4.0), fs.Layout(source, P("data")))
    tree = {"x": x, "loss": fs.unshard(x.sum())}
    result = fs.broadcast_to(tree, source=source)
    return result["x"] is x, result["loss"]


def test_broadcast_to_keeps_the_arrays_of_each_process(pool):
    for results in everywhere(pool, with_arrays):
        assert results == [(True, torch.tensor(6.0))] * 4


def with_unlike_arrays():
    source = fs.make_mesh({"data": 2}, devices=SOURCE)
    x = fs.device_put(torch.arange(4.0), fs.Layout(source, P("data")))
    fs.broadcast_to([x] if source.is_member else None, source=source)


def test_broadcast_to_without_the_arrays_of_the_sender_raises():
    with pytest.raises(fs.errors.LayoutError, match="must have them on all processes"):
        fs.run(with_unlike_arrays, mesh=fs.make_mesh(WORLD))


def test_broadcast_to_of_a_tensor_without_values_raises():
    def main():
        source = fs.make_mesh({"data": 2}, devices=SOURCE)
        fs.broadcast_to({"x": torch.zeros(2, device="meta")}, source=source)

    with pytest.raises(fs.errors.LayoutError, match=r"tree\['x'\]|must have values"):
        fs.run(main, mesh=fs.make_mesh(WORLD))


def test_broadcast_to_from_outside_of_a_run_returns_the_values():
    mesh = fs.make_mesh({"data": 2}, devices=range(4, 6))
    tree = {"loss": torch.tensor(1.0)}
    assert fs.broadcast_to(tree, source=mesh) is tree


def counted(target):
    source = fs.make_mesh({"data": 2}, devices=SOURCE)
    mesh = fs.make_mesh({"model": 2}, devices=target)
    value = torch.ones(5) if source.is_member else None
    with fs.ledger() as comm:
        fs.broadcast_to(value, mesh, source=source)
    return comm.by_collective()


def test_broadcast_to_counts_the_bytes_of_the_values_as_a_chain():
    results = fs.run(counted, TARGET, mesh=fs.make_mesh(WORLD))
    way = "data=2 on 2, 1 -> model=2 on 3, 2"
    sent = [result.get(("broadcast", (way,)), (0, 0))[1] for result in results]
    assert sent == [0, 0, 20, 20]  # of devices 2, 3 and 1 the last sends nothing


def in_other_lines(is_sender):
    source = fs.make_mesh({"data": 2}, devices=SOURCE)
    fs.make_mesh(WORLD)
    if source.is_member:
        return fs.broadcast_to(1.0, source=source)
    return fs.broadcast_to(None, source=source)


def test_broadcast_to_may_be_called_in_other_lines_by_senders_and_receivers(pool):
    for results in everywhere(pool, in_other_lines, True):
        assert results == [1.0] * 4


def values_outside():
    mesh = fs.make_mesh({"data": 1}, devices=(1,))
    x = fs.device_put(torch.arange(4.0), fs.Layout(mesh))
    if mesh.is_member:
        return
    assert fs.unshard(x) is None
    assert fs.unshard({"x": x, "n": 1}) == {"x": None, "n": 1}
    assert fs.optim.all_finite({"x": x}) is None
    with pytest.raises(fs.errors.LayoutError, match="none of data=1 on 1"):
        float(x.sum())
    branching = fs.shard_map(
        lambda x: x if x.sum() > 0 else -x, mesh=mesh, in_specs=P(), out_specs=P()
    )
    with pytest.raises(fs.errors.LayoutError, match=r"mesh\.is_member"):
        branching(x)
    return


def test_values_of_arrays_outside_of_their_mesh_are_none_or_raise():
    fs.run(values_outside, mesh=fs.make_mesh({"device": 2}))
