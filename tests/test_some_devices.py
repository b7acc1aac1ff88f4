"""Every transform on a mesh of some devices: equal bits as on a mesh of all, and nothing outside.

The oracle is the same program on a mesh of as many devices that is all there is. On devices and
processes outside of the mesh it runs to its end at once, plain values are None there, arrays have
the same types, and torch's generator has drawn the same numbers.
"""

from datetime import timedelta
from math import prod

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from tests.helpers.processes import Processes
from tests.helpers.some_devices import LOOPS, PROGRAMS, Outcome, run_program

NUMBERS = {2: (3, 1), 4: (3, 1, 4, 0)}

ON_PROCESSES = [
    "shard_map",
    "arrays",
    "value_and_grad",
    "zero 3 donating in bf16",
    "fp16",
    "local steps",
    "experts",
    "parameters on the host",
    "1f1b",
    "tensor parallel",
    "functional booster",
    "loop, zero",
    "loop in stages",
]
"""One program of each kind: the others have the same code outside of a mesh as in `fs.run`."""


@pytest.fixture(autouse=True)
def disk(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("FSHARD_DISK", str(tmp_path_factory.mktemp("disk")))


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    environment = {"FSHARD_DISK": str(tmp_path_factory.mktemp("disk"))}
    with Processes(4, environment=environment) as processes:
        yield processes


@pytest.mark.parametrize("name", [*PROGRAMS])
def test_program_from_outside_on_some_devices_has_equal_bits(name):
    axes, _ = PROGRAMS[name]
    numbers = NUMBERS[prod(axes.values())]
    assert_equal(run_program(name, numbers), run_program(name))


@pytest.mark.parametrize("name", [*PROGRAMS, *LOOPS])
def test_program_as_devices_of_a_run_has_equal_bits(name):
    axes, _ = (PROGRAMS | LOOPS)[name]
    numbers = NUMBERS[prod(axes.values())]
    expected = fs.run(run_program, name, mesh=fs.make_mesh(axes))

    outcomes = fs.run(run_program, name, numbers, mesh=fs.make_mesh({"device": 6}))

    for number, outcome in enumerate(outcomes):
        if number in numbers:
            assert_equal(outcome, expected[numbers.index(number)])
        else:
            assert_outside(outcome, expected[0])


@pytest.mark.parametrize("name", ON_PROCESSES)
def test_program_on_processes_has_equal_bits_and_does_not_wait_outside(pool, name):
    axes, _ = (PROGRAMS | LOOPS)[name]
    count = prod(axes.values())
    meshes = [(0, 1), (3, 2)] if count == 2 else [(0, 1, 3, 2)]
    expected = fs.run(run_program, name, mesh=fs.make_mesh(axes))

    for rank, outcomes in enumerate(pool.run(on_meshes, name, meshes)):
        for numbers, outcome in zip(meshes, outcomes, strict=True):
            if rank in numbers:
                assert_equal(outcome, expected[numbers.index(rank)])
            else:
                assert_outside(outcome, expected[0])


def on_meshes(name, meshes):
    """Run a program on each mesh; its members begin when all others have run it."""
    fs.make_mesh({"all": -1})
    store = dist.distributed_c10d._get_default_store()
    outcomes = []
    for number, devices in enumerate(meshes):
        rank = dist.get_rank()
        others = [f"{name}/{number}/{other}" for other in range(4) if other not in devices]
        if rank in devices and others:
            store.wait(others, timedelta(seconds=30))
        outcomes.append(run_program(name, devices))
        if rank not in devices:
            store.set(f"{name}/{number}/{rank}", "has run")
    return outcomes


def assert_equal(outcome: Outcome, expected: Outcome):
    """Compare all bits, the types of arrays, and the numbers that are drawn next."""
    assert outcome.types == expected.types
    assert outcome.draw == expected.draw
    leaves, structure = flatten(outcome.values, none_is_leaf=True)
    expected_leaves, expected_structure = flatten(expected.values, none_is_leaf=True)
    assert structure == expected_structure
    for x, y in zip(leaves, expected_leaves, strict=True):
        if isinstance(y, torch.Tensor):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        else:
            assert x == y


def assert_outside(outcome: Outcome, expected: Outcome):
    """Compare the types of arrays and the draws; other values must be None, or equal: counts."""
    assert outcome.types == expected.types
    assert outcome.draw == expected.draw
    counts = [x for x in flatten(outcome.values)[0] if x is not None]
    expected_values = flatten(expected.values)[0]
    for x in counts:
        assert any(x.shape == y.shape and torch.equal(x, y) for y in expected_values)


def call_a_boosted_model():
    mesh = fs.make_mesh({"data": 2}, devices=(0, 1))
    model, *_ = fs.Booster(fs.DDPPlugin(mesh=mesh)).boost(torch.nn.Linear(2, 1))
    model(torch.ones(2, 2))


def test_loop_outside_of_its_mesh_raises_and_names_the_way_out():
    with pytest.raises(fs.errors.ScopeError, match="if mesh.is_member: around the loop"):
        fs.run(call_a_boosted_model, mesh=fs.make_mesh({"device": 3}))


def step_without_a_batch():
    mesh = fs.make_mesh({"data": 2}, devices=(0, 1))
    params = fs.shard_params({"w": torch.ones(4)}, fs.fsdp("data"), mesh=mesh)

    def loss_fn(params, x):
        assert x.isfinite().all()  # of a value, which there is none of outside
        return (params["w"] * x).sum(1).mean()

    step = fs.train_step(loss_fn, fs.optim.sgd(1.0), mesh=mesh, batch=P("data"))
    batch = torch.ones(2, 4) if mesh.is_member else None
    _, _, metrics = step(params, step.init(params), batch)
    return metrics


def test_step_outside_needs_no_batch_and_looks_at_no_value():
    *_, outside = fs.run(step_without_a_batch, mesh=fs.make_mesh({"device": 3}))
    assert outside == dict.fromkeys(("loss", "grad_norm", "finite", "samples"))
