"""A run that loses devices ends with the bits of one that nothing was lost of.

Devices are killed at every moment that they reach. The oracle runs the same program without an
elastic run: on one mesh, or moved to the smaller mesh by a checkpoint on disk.
"""

import random
from itertools import pairwise

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from tests.recovery.oracle import moved, undisturbed
from tests.recovery.programs import PROGRAMS, PROGRAMS_OF_A_MESH, of_count, of_powers, zero


def assert_equal_bits(actual, expected, case):
    actual_leaves, structure = flatten(actual)
    expected_leaves, expected_structure = flatten(expected)
    assert structure == expected_structure, case
    for x, y in zip(actual_leaves, expected_leaves, strict=True):
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(y)), case


def run_elastic(make_mesh, program, **options):
    """Return what an elastic run ends with, and its generations."""
    torch.manual_seed(3)
    train = fs.elastic(make_mesh, devices=4, **options)(program)
    return train(), train.generations


def moments_of(make_mesh, program):
    """Return the moments of each device in a run that loses nothing."""
    with fs.testing.moments() as reached:
        run_elastic(make_mesh, program)
    return reached


def some_of(reached, count=12):
    """Choose devices with moments: one of each phase, and others."""
    every = [(device, moment) for device, row in reached.items() for moment in row]
    random.Random(0).shuffle(every)
    first_of_phase = {moment[0]: (device, moment) for device, moment in every}
    chosen = [*first_of_phase.values()]
    return chosen + every[: count - len(chosen)]


def check_kills(make_mesh, program, kills, expected_of):
    """Kill a device at a moment, in one run for each, and compare the ends."""
    for device, moment in kills:
        with fs.testing.kill(device, at=moment):
            result, generations = run_elastic(make_mesh, program)
        case = f"device {device} at {moment}"
        assert len(generations) == 2, case
        assert generations[1].lost == (device,), case
        assert_equal_bits(result, expected_of(generations[1]), case)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_killed_device_changes_no_bit(name):
    make_mesh, program = PROGRAMS[name]
    expected = undisturbed(make_mesh, program)

    kills = some_of(moments_of(make_mesh, program))
    check_kills(make_mesh, program, kills, lambda generation: expected)


@pytest.mark.parametrize("name", PROGRAMS_OF_A_MESH)
def test_a_run_goes_on_as_one_that_moved_to_the_smaller_mesh(name, tmp_path):
    make_mesh, program = PROGRAMS_OF_A_MESH[name]
    known = {}

    def expected_of(generation):
        step = generation.step
        if step not in known:
            folder = tmp_path / str(step)
            known[step] = moved(make_mesh, program, folder, step, (4, 3))
        return known[step]

    kills = some_of(moments_of(make_mesh, program))
    check_kills(make_mesh, program, kills, expected_of)


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_device_killed_at_any_moment_changes_no_bit(name):
    make_mesh, program = PROGRAMS[name]
    expected = undisturbed(make_mesh, program)

    reached = moments_of(make_mesh, program)
    kills = [(device, moment) for device, row in reached.items() for moment in row]
    check_kills(make_mesh, program, kills, lambda generation: expected)
