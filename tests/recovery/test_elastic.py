"""A run that loses devices ends with the bits of one that nothing was lost of.

Devices are killed at every moment that they reach. The oracle runs the same program without an
elastic run: on one mesh, or moved to the smaller mesh by a checkpoint on disk.
"""

import gc
import random
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

import fshard as fs
from fshard.checkpoint.save import write
from fshard.checkpoint.snapshot import snapshot_of
from fshard.errors import CheckpointError, LostStateError, MeshError
from fshard.mesh.layout import flatten
from fshard.recovery.copies import VersionKey
from fshard.recovery.survey import Holding, choose
from tests.helpers.ended import wait_until
from tests.recovery.oracle import moved, undisturbed
from tests.recovery.trained import PROGRAMS, PROGRAMS_OF_A_MESH, of_count, of_powers, zero


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


def some_of(reached, name, count=5):
    """Choose devices with moments of some phases: of others for each program, so that all occur."""
    every = [(device, moment) for device, row in reached.items() for moment in row]
    draw = random.Random(name)
    draw.shuffle(every)
    one_of_phase = {moment[0]: (device, moment) for device, moment in every}
    return draw.sample([*one_of_phase.values()], min(count, len(one_of_phase)))


def lost_at(moment_of_device):
    """Return a context in which devices are killed, each at its moment."""
    stack = ExitStack()
    for device, moment in moment_of_device.items():
        stack.enter_context(fs.testing.kill(device, at=moment))
    return stack


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

    kills = some_of(moments_of(make_mesh, program), name)
    check_kills(make_mesh, program, kills, lambda generation: expected)


@pytest.mark.parametrize("name", PROGRAMS_OF_A_MESH)
def test_a_run_goes_on_as_one_that_moved_to_the_smaller_mesh(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FSHARD_DISK", str(tmp_path))
    make_mesh, program = PROGRAMS_OF_A_MESH[name]
    known = {}

    def expected_of(generation):
        step = generation.step
        if step not in known:
            folder = tmp_path / str(step)
            known[step] = moved(make_mesh, program, folder, step, (4, 3))
        return known[step]

    kills = some_of(moments_of(make_mesh, program), name)
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


# -- several losses --------------------------------------------------------------------------------


def test_a_run_goes_on_to_the_last_device():
    make_mesh, program = of_powers, zero
    expected = undisturbed(make_mesh, program)

    with lost_at({3: ("update", 0), 0: ("forward", 1), 1: ("copy", 2)}):
        result, generations = run_elastic(make_mesh, program)

    assert [generation.devices for generation in generations][-1] == (2,)
    assert_equal_bits(result, expected, "one device")


def test_devices_that_are_not_neighbours_may_be_lost_at_once():
    expected = undisturbed(of_powers, zero)

    with fs.testing.kill(0, 2, at=("reduce", 2)):
        result, generations = run_elastic(of_powers, zero)

    assert generations[1].lost == (0, 2)
    assert_equal_bits(result, expected, "two devices")


def test_neighbours_may_be_lost_at_once_with_two_copies():
    expected = undisturbed(of_powers, zero)

    with fs.testing.kill(1, 2, at=("update", 1)):
        result, generations = run_elastic(of_powers, zero, copies=2)

    assert generations[1].step == 1
    assert_equal_bits(result, expected, "two neighbours")


def test_neighbours_lost_at_once_with_one_copy_are_an_error():
    with fs.testing.kill(1, 2, at=("reduce", 2)), pytest.raises(LostStateError, match="device 1"):
        run_elastic(of_powers, zero)


def test_a_run_with_a_folder_goes_back_to_its_last_checkpoint(tmp_path):
    expected = undisturbed(of_powers, zero)

    folder = fs.Checkpoints(tmp_path)
    with fs.testing.kill(1, 2, at=("update", 1)):
        result, generations = run_elastic(of_powers, zero, folder=folder)

    assert (generations[1].source, generations[1].step) == ("checkpoint", 1)
    assert_equal_bits(result, expected, "from a folder")


def test_a_program_that_is_started_again_goes_on_from_its_folder(tmp_path):
    expected = undisturbed(of_powers, zero)

    def interrupted(run):
        save = run.save

        def save_and_stop(step, tree):
            save(step, tree, wait=True)
            if step == 2:
                raise KeyboardInterrupt

        run.save = save_and_stop
        return zero(run)

    with pytest.raises(KeyboardInterrupt):
        run_elastic(of_powers, interrupted, folder=fs.Checkpoints(tmp_path))
    result, generations = run_elastic(of_powers, zero, folder=fs.Checkpoints(tmp_path))

    assert (generations[0].source, generations[0].step) == ("checkpoint", 2)
    assert_equal_bits(result, expected, "started again")


def test_a_run_with_copies_reads_no_file(monkeypatch):
    def fail(*arguments):
        raise AssertionError("a file is read")

    monkeypatch.setattr("fshard.checkpoint.source.SavedFolder.read", fail)
    monkeypatch.setattr("fshard.checkpoint.index.read_sealed", fail)
    with fs.testing.kill(2, at=("update", 1)):
        _, generations = run_elastic(of_powers, zero)

    assert generations[1].source == "memory"


@pytest.mark.parametrize("every", [2, 3])
def test_steps_since_the_last_copy_are_repeated(every):
    expected = undisturbed(of_powers, zero)

    with fs.testing.kill(2, at=("update", 2)):
        result, generations = run_elastic(of_powers, zero, every=every)

    assert generations[1].step == (2 if every == 2 else None)
    assert_equal_bits(result, expected, f"every {every}")


# -- growth ----------------------------------------------------------------------------------------


def test_devices_come_and_go_in_one_run():
    """2 -> 4, then 4 -> 3 -> 2; three devices round as a run that was on three from there."""
    counts = []
    steps = 8

    def program(run):
        counts.append(run.mesh.size)
        kept = {"w": fs.device_put(torch.zeros(12), fs.Layout(run.mesh, fs.P("data")))}
        kept["steps"] = 0
        if run.latest is not None:
            kept = run.restore(kept)
        while kept["steps"] < steps:
            if kept["steps"] == 2 and run.mesh.size == 2:
                train.grow(2)
            noise = fs.device_put(torch.rand(12), kept["w"].layout)
            kept = {"w": kept["w"] + noise, "steps": kept["steps"] + 1}
            run.save(kept["steps"], kept)
        return fs.unshard(kept["w"])

    train = fs.elastic(of_count, devices=2)(program)
    torch.manual_seed(3)
    with lost_at({1: ("copy", 5), 3: ("copy", 3)}):
        result = train()

    torch.manual_seed(3)
    expected = sum([torch.rand(12) for _ in range(steps)], torch.zeros(12))
    assert counts == [2, 4, 3, 2]
    assert torch.equal(result, expected)


# -- errors and misuse -----------------------------------------------------------------------------


def test_an_error_of_the_program_is_raised():
    def program(run):
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        run_elastic(of_count, program)


def test_a_loss_before_the_first_save_begins_anew_with_equal_draws():
    def program(run):
        drawn = torch.rand(2)
        fs.unshard(fs.device_put(drawn, fs.Layout(run.mesh, fs.P("data"))).sum())
        kept = {"w": drawn}
        run.save(1, kept)
        return drawn

    torch.manual_seed(3)
    expected = torch.rand(2)
    with fs.testing.kill(1, at=("copy", 0)):
        result, generations = run_elastic(lambda devices: of_count(devices[:2]), program)

    assert generations[1].step is None
    assert torch.equal(result, expected)


def test_devices_must_be_given_without_processes():
    with pytest.raises(MeshError, match="devices must be the number of virtual devices"):
        fs.elastic(of_count)(zero)()


def test_a_mesh_of_none_is_an_error():
    with pytest.raises(MeshError, match="must return a mesh of some devices"):
        fs.elastic(lambda devices: None, devices=2)(zero)()


def test_a_mesh_of_other_devices_is_an_error():
    with pytest.raises(TypeError, match="devices=devices"):
        fs.elastic(lambda devices: fs.make_mesh({"data": 2}, devices=(7, 8)), devices=2)(zero)()


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"copies": -1}, "copies must be an integer >= 0, got -1"),
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"devices": 0}, "devices must be an integer >= 1, got 0"),
        ({"memory": "disk"}, "memory must be 'device' or 'host', got 'disk'"),
        ({"folder": "runs"}, "folder must be an fs.Checkpoints, got 'runs'"),
        ({"timeout": 0}, "timeout must be seconds > 0, got 0"),
    ],
)
def test_an_illegal_argument_raises_where_it_is_given(argument, text):
    with pytest.raises(ValueError, match=f"fs.elastic: {text}"):
        fs.elastic(of_count, **argument)


def test_a_decorator_without_a_mesh_is_an_error():
    with pytest.raises(TypeError, match="make_mesh must be a function"):
        fs.elastic({"data": 4})
    with pytest.raises(TypeError, match=r"must decorate a function.*@fs.elastic\(make_mesh\)"):
        fs.elastic(zero)(4)
    with pytest.raises(TypeError, match=r"must decorate a function.*@fs.elastic\(make_mesh\)"):
        fs.elastic(zero)()


def test_a_call_inside_of_a_run_is_an_error():
    train = fs.elastic(of_count, devices=2)(zero)
    with pytest.raises(MeshError, match=r"fs.run\(main, run, mesh=run.mesh\)"):
        fs.run(train, mesh=fs.make_mesh({"data": 2}))


def test_save_needs_a_number_of_a_step():
    def program(run):
        run.save({"w": torch.ones(2)}, 1)

    with pytest.raises(ValueError, match="run.save: step must be an integer >= 0"):
        run_elastic(of_count, program)


def test_a_function_that_does_not_restore_is_an_error():
    """It would begin from the start after each loss, with random generators of its end."""

    def program(run):
        for step in range(1, 4):
            run.save(step, {"w": torch.ones(2)})

    with fs.testing.kill(1, at=("copy", 2)), pytest.raises(CheckpointError, match="latest is 2"):
        run_elastic(of_count, program)


def test_an_error_names_the_shares_that_no_device_has():
    """Two neighbours of four are lost. Device 3 has not yet overwritten the version before."""
    last = VersionKey(0, 2)
    before = VersionKey(0, 1)
    left = [(last, 0, 0), (last, 3, 0), (last, 3, 3), (last, 2, 3), (before, 3, 3), (before, 2, 3)]
    table = [Holding(key, 4, owner, 8, name, False) for key, owner, name in left]

    with pytest.raises(LostStateError, match="the state of device 1 of the mesh before"):
        choose(table)


def test_growth_needs_a_number():
    def program(run):
        train.grow(0)

    train = fs.elastic(of_count, devices=2)(program)
    with pytest.raises(ValueError, match="count must be an integer >= 1, got 0"):
        train()


# -- going back ------------------------------------------------------------------------------------


def goes_back(run):
    """Save two versions, and restore the last one, of which the tree was changed since."""
    layout = fs.Layout(run.mesh, fs.P.flat("data"))
    kept = {"w": fs.device_put(torch.arange(6.0), layout), "steps": 1}
    run.save(1, kept)
    kept = {"w": kept["w"] + 1, "steps": 2}
    run.save(2, kept)
    restored = run.restore({"w": kept["w"] * 0, "steps": 0})
    return fs.unshard(restored["w"]), restored["steps"], run.latest


def goes_back_on_devices(run):
    return fs.run(goes_back, run, mesh=run.mesh)[1]


@pytest.mark.parametrize("program", [goes_back, goes_back_on_devices])
@pytest.mark.parametrize("copies", [0, 1])
def test_a_program_may_go_back_to_its_last_save(program, copies):
    (w, steps, latest), _ = run_elastic(of_count, program, copies=copies)

    assert torch.equal(w, torch.arange(6.0) + 1)
    assert (steps, latest) == (2, 2)


# -- what is left of a generation ------------------------------------------------------------------


def test_a_run_keeps_two_versions_in_each_generation():
    """Shares of the version that a generation began with end with its second save."""
    size = 1 << 16
    counts = []

    def buffers():
        """Return the number of memories of shares, which are bytes."""
        storages = set()
        for x in gc.get_objects():
            if type(x) is torch.Tensor and x.dtype == torch.uint8 and x.numel() > size:
                storages.add(x.untyped_storage().data_ptr())
        return len(storages)

    def program(run):
        layout = fs.Layout(run.mesh, fs.P.flat("data"))
        kept = {"w": fs.device_put(torch.zeros(size), layout), "steps": 0}
        if run.latest is not None:
            kept = run.restore(kept)
        while kept["steps"] < 6:
            kept = {"w": kept["w"] + 1, "steps": kept["steps"] + 1}
            run.save(kept["steps"], kept)
            counts.append((run.mesh.size, kept["steps"], buffers()))

    with fs.testing.kill(1, at=("copy", 3)):
        run_elastic(of_count, program)

    versions, copies = 2, 1
    assert counts[2] == (4, 3, 4 * versions * (1 + copies))
    assert counts[-1] == (3, 6, 3 * versions * (1 + copies))


def test_a_save_in_the_background_ends_with_devices_that_wrote_it(tmp_path):
    """Neighbours are lost in it, so the run goes on from the save before."""

    def program(run):
        layout = fs.Layout(run.mesh, fs.P.flat("data"))
        kept = {"w": fs.device_put(torch.zeros(8), layout), "steps": 0}
        if run.latest is not None:
            kept = run.restore(kept)
        while kept["steps"] < 4:
            kept = {"w": kept["w"] + 1, "steps": kept["steps"] + 1}
            run.save(kept["steps"], kept)
            wait_until(is_saved, 20)
        return fs.unshard(kept["w"])

    def is_saved():
        return all(thread.name != "fshard checkpoint" for thread in threading.enumerate())

    with fs.testing.kill(1, 2, at=("save", 5)):
        result, generations = run_elastic(of_count, program, folder=fs.Checkpoints(tmp_path))
    assert (generations[1].source, generations[1].step) == ("checkpoint", 1)
    assert torch.equal(result, torch.full((8,), 4.0))


def test_a_save_of_a_world_that_was_left_waits_for_none_that_had_not_begun(tmp_path):
    layout = fs.Layout(fs.make_mesh({"data": 2}), fs.P("data"))
    content = snapshot_of({"w": fs.device_put(torch.ones(2), layout)})
    content = replace(content, shares={0: content.shares[0]}, is_staying=lambda: False)

    with pytest.raises(CheckpointError, match="processes of devices 1 have ended"):
        write(tmp_path, content, "token", 5)


def test_growth_that_comes_too_late_is_not_of_the_next_call():
    def program(run):
        run.save(1, {"w": torch.ones(2)})
        train.grow(1)

    train = fs.elastic(of_count, devices=2)(program)
    train()
    train()
    assert [generation.devices for generation in train.generations] == [(0, 1)]


def test_arrays_on_other_devices_than_the_run_are_an_error():
    """The devices of the run alone keep shares: those of others would be lost in silence."""

    def program(run):
        layout = fs.Layout(fs.make_mesh({"data": 4}), fs.P("data"))
        run.save(1, {"w": fs.device_put(torch.arange(8.0), layout)})

    with pytest.raises(CheckpointError, match="must be on the devices of run.mesh"):
        run_elastic(lambda devices: of_count(devices[:2]), program)


# -- steps that are counted wrongly ----------------------------------------------------------------


def counts_from_zero(run, kept, save):
    """Restore in place, and count from the start all the same."""
    if run.latest is not None:
        run.restore(kept)
    for step in range(4):
        save(step + 1)


def saves_before_it_counts(run, kept, save):
    """Save a step under the number of the one before."""
    if run.latest is not None:
        kept = run.restore(kept)
    while kept["steps"] < 4:
        save(kept["steps"])
        kept["steps"] += 1


@pytest.mark.parametrize("count", [counts_from_zero, saves_before_it_counts])
def test_a_step_that_was_saved_before_is_an_error(count):
    def program(run):
        x = fs.device_put(torch.zeros(12), fs.Layout(run.mesh, fs.P("data")))
        kept = {"x": x, "steps": 0}
        count(run, kept, lambda step: run.save(step, kept))

    with fs.testing.kill(1, at=("copy", 2)), pytest.raises(CheckpointError, match="greater than"):
        run_elastic(of_count, program)


@pytest.mark.parametrize("on_devices", [False, True])
def test_a_function_that_handles_a_loss_itself_is_called_again(on_devices):
    """Else it would return in the middle, and no error would show it."""

    def steps_of(run):
        kept = {"x": fs.device_put(torch.zeros(12), fs.Layout(run.mesh, fs.P("data"))), "steps": 0}
        if run.latest is not None:
            kept = run.restore(kept)
        try:
            while kept["steps"] < 4:
                kept["steps"] += 1
                run.save(kept["steps"], kept)
        except Exception:
            return "early"
        return kept["steps"]

    def program(run):
        return fs.run(steps_of, run, mesh=run.mesh)[0] if on_devices else steps_of(run)

    with fs.testing.kill(1, at=("copy", 2)):
        result, generations = run_elastic(of_count, program)

    assert result == 4
    assert len(generations) == 2
