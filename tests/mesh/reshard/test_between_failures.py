"""Devices of two meshes that do not call the same reshard: an error that names both, never wrong values."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.mesh.reshard import between, rounds
from fshard.mesh.spmd.run import local_devices
from tests.helpers.processes import HAS_RULES, run_processes
from tests.helpers.sampled import thorough

WAY = "data=2 on 0, 1 -> model=2 on 2, 3"
FULL = torch.arange(64 * 6.0).reshape(64, 6)
SHAPES = {"shape": {"a": (6, 64)}, "order": {"a": (32, 12), "b": (64, 6)}, "tree": {"a": (64, 6)}}
"""The trees of the engine, where the trainer has a of (64, 6) and b of (32, 12)."""


def meshes():
    """Return a trainer on devices 0 and 1, and an engine on 2 and 3."""
    trainer = fs.make_mesh({"data": 2}, devices=(0, 1))
    return trainer, fs.make_mesh({"model": 2}, devices=(2, 3))


def move(fault):
    """Reshard a tree, with a fault on the engine; compare the new shards."""
    trainer, engine = meshes()
    is_engine = engine.is_member
    shapes = {"a": (64, 6), "b": (32, 12)}
    if fault == "shape":
        shapes = {"a": (64, 6)}
    if fault in SHAPES and is_engine:
        shapes = SHAPES[fault]
    # Of one size, so that no count of elements differs where the order does.
    tensors = {
        name: FULL.reshape(shape) + number for number, (name, shape) in enumerate(shapes.items())
    }
    x = fs.device_put(tensors, fs.Layout(trainer, P.flat("data")))
    dtype = torch.bfloat16 if fault == "dtype" and is_engine else None
    y = fs.reshard(x, fs.Layout(engine, P(None, "model")), dtype=dtype)
    if is_engine:
        column = local_devices(engine)[0]
        for name, array in y.items():
            assert array.local.equal(tensors[name].chunk(2, 1)[column])


def error_of_move(fault):
    """Return the error of a move as text, or None."""
    try:
        move(fault)
    except fs.errors.FshardError as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("fault", ["shape", "order", "tree", "dtype"])
def test_another_tree_on_virtual_devices_raises_with_both_calls(fault):
    with pytest.raises(fs.errors.MismatchError) as caught:
        fs.run(move, fault, mesh=fs.make_mesh({"device": 4}))
    assert str(caught.value).count(WAY) >= 2


@pytest.mark.parametrize(
    ("fault", "environment"),
    [
        ("order", {}),
        thorough("shape", {}),
        thorough("tree", {}),
        thorough("dtype", {}),
        thorough("order", {"FSHARD_DIRECT": "0", "FSHARD_TIMEOUT": "3"}),
        ("dtype", {"FSHARD_CHECK": "1"}),
    ],
    ids=str,
)
def test_another_tree_on_processes_raises_on_the_receivers(fault, environment):
    if HAS_RULES and "FSHARD_CHECK" not in environment:
        pytest.skip("NCCL compares no calls")
    texts = run_processes(error_of_move, 4, fault, environment=environment)
    for text in texts[2:]:
        assert text.startswith("MismatchError") and WAY in text
    if environment.get("FSHARD_CHECK"):  # then on all, with the calls of both meshes
        for text in texts:
            assert "bfloat16" in text and "float32" in text


def move_in_two_lines():
    """Reshard in another line on each mesh."""
    trainer, engine = meshes()
    x = fs.device_put(FULL, fs.Layout(trainer, P.flat("data")))
    layout = fs.Layout(engine, P(None, "model"))
    if trainer.is_member:
        fs.reshard(x, layout)
        return None
    return fs.reshard(x, layout).local if engine.is_member else None


@pytest.mark.parametrize("check", [False, True])
def test_lines_may_differ_between_virtual_meshes(check):
    results = fs.run(move_in_two_lines, mesh=fs.make_mesh({"device": 5}), check=check)
    assert torch.cat(results[2:4], 1).equal(FULL)


def test_lines_may_differ_between_processes_under_checks():
    results = run_processes(move_in_two_lines, 4, environment={"FSHARD_CHECK": "1"})
    assert torch.cat(results[2:], 1).equal(FULL)


def move_without(absent, number):
    """Reshard on all devices but one."""
    trainer, engine = meshes()
    x = fs.device_put(FULL, fs.Layout(trainer, P.flat("data")))
    if number == absent:
        return None
    return fs.reshard(x, fs.Layout(engine, P(None, "model")))


@pytest.mark.parametrize("absent", [0, 3])
def test_device_that_does_not_call_is_a_deadlock_that_names_both_meshes(absent):
    mesh = fs.make_mesh({"device": 4})
    with pytest.raises(fs.errors.FshardError, match=WAY):
        fs.run(lambda: move_without(absent, fs.axis_index("device")), mesh=mesh)


def wait_for_absent():
    """Reshard again, within a limit of a second, while a sender is elsewhere; return the error."""
    trainer, engine = meshes()
    layout = fs.Layout(engine, P(None, "model"))
    x = fs.device_put(FULL, fs.Layout(trainer, P.flat("data")))
    fs.reshard(x, layout)
    if torch.distributed.get_rank() == 1:
        time.sleep(3)
        return None
    began = time.monotonic()
    try:
        fs.reshard(x, layout)
    except fs.errors.FshardError as error:
        return str(error), time.monotonic() - began
    return None


@pytest.mark.skipif(HAS_RULES, reason="within a second NCCL does not even connect")
@pytest.mark.parametrize("link", [{}, {"FSHARD_DIRECT": "0"}], ids=["direct", "gloo"])
def test_process_that_does_not_call_is_a_timeout_that_names_both_meshes(link):
    environment = {"FSHARD_TIMEOUT": "1", **link}
    reports = run_processes(wait_for_absent, 4, environment=environment)
    for text, seconds in reports[2:]:
        assert WAY in text
        assert seconds < 10


def die_in_the_middle(victim, folder):
    """Reshard in a few rounds, in one of which a process is killed; write the errors of others."""
    rounds.ROUND = 4 << 20  # its messages are read by address, and confirmed
    trainer, engine = meshes()
    rank = torch.distributed.get_rank()
    x = fs.device_put(torch.ones(2048, 1024), fs.Layout(trainer, P.flat("data")))
    if rank == victim:
        numbers = iter(range(10))
        copy_to_row = between._copy_to_row

        def copy_or_die(*arguments):
            if next(numbers) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            copy_to_row(*arguments)

        between._copy_to_row = copy_or_die
    try:
        fs.reshard(x, fs.Layout(engine, P(None, "model")))
    except fs.errors.FshardError as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.skipif(HAS_RULES, reason="NCCL finds a lost process by its time limit")
@pytest.mark.parametrize("victim", [0, 3])
def test_process_killed_between_rounds_ends_the_others(victim, tmp_path):
    with pytest.raises(RuntimeError, match="SIGKILL"):
        run_processes(die_in_the_middle, 4, victim, str(tmp_path), timeout=30)
    texts = [file.read_text() for file in tmp_path.iterdir()]
    assert texts
    for text in texts:
        assert text.startswith("LostProcessError") and WAY in text


def move_again_and_again(count):
    """Reshard there and back many times, while each mesh also computes on its own."""
    trainer, engine = meshes()
    there = fs.Layout(engine, P(None, "model"))
    back = fs.Layout(trainer, P.flat("data"))
    x = fs.device_put(FULL, back)
    doubled = fs.shard_map(
        lambda shard: shard * fs.psum(torch.ones(()), "model"),
        mesh=engine,
        in_specs=P(None, "model"),
        out_specs=P(None, "model"),
    )
    halved = fs.shard_map(
        lambda shard: shard / fs.psum(torch.ones(()), "data"),
        mesh=trainer,
        in_specs=P.flat("data", shape=(64, 6)),
        out_specs=P.flat("data", shape=(64, 6)),
    )
    for _ in range(count):
        y = doubled(fs.reshard(x, there))
        x = halved(fs.reshard(y, back))
    return x.local if x.is_local else None


def test_many_moves_beside_the_work_of_each_mesh_keep_their_values(four):
    flat = FULL.reshape(-1)
    for results in (
        fs.run(move_again_and_again, 5, mesh=fs.make_mesh({"device": 4})),
        four.run(move_again_and_again, 50),
    ):
        assert torch.cat(results[:2]).equal(flat)
        assert results[2:] == [None, None]
