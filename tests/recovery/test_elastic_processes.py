"""Processes that are killed at any time change no bit of what the others end with.

The oracle is the same program on virtual devices, of which none is lost.
"""

import os
import random
import signal
import time
from functools import partial

import pytest
import torch

import fshard as fs
from tests.helpers.ended import wait_until
from tests.helpers.sampled import thorough
from tests.recovery import trained
from tests.recovery.oracle import moved
from tests.recovery.programs import Run, pids_in_memory
from tests.recovery.training_processes import (
    PROGRAMS_HERE,
    check_bits,
    check_replacements,
    results_of,
    start,
    stops,
    wait_for_devices,
    wait_for_end,
    wait_for_step,
)


@pytest.mark.parametrize(
    ("name", "victim"),
    [("zero 3", 0), thorough("zero 1", 2), ("tensor axis", 2), thorough("dropout", 3)],
)
def test_a_killed_process_changes_no_bit(name, victim, tmp_path):
    run = start(tmp_path, name, 12, seconds=0.01, has_folder=False)
    try:
        wait_for_step(run, 3, range(4))
        time.sleep(random.Random(name).random() * 0.02)
        run.kill(victim)
        others = [process for process in range(4) if process != victim]
        wait_for_end(run, others)
        check_bits(run, name, 12, count=2)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("zero 3", 2),
        pytest.param("zero 3", 100, marks=pytest.mark.thorough),
        pytest.param("state on the host", 100, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.timeout(3000)
def test_processes_that_are_killed_and_replaced_change_no_bit(name, kills, tmp_path):
    """At random times; each is replaced by a new one, so meshes are of 4, then 2, then 4 devices."""
    draw = random.Random(kills)
    run = start(tmp_path, name, 20_000, seconds=0.002)
    check_replacements(run, name, kills, draw, pause=0.2, waits=lambda: draw.random() < 0.5)


@pytest.mark.parametrize("kills", [1, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.timeout(3000)
def test_state_on_disk_survives_kills_at_random_times(kills, tmp_path, monkeypatch):
    """Two of four processes train. Any of the four is killed, and replaced by a new one."""
    monkeypatch.setenv("FSHARD_DISK", str(tmp_path))  # of the oracle
    draw = random.Random(kills)
    name = "state on disk of two"
    run = start(tmp_path, name, 20_000, seconds=0.002, environment={"FSHARD_DISK": str(tmp_path)})
    living = [0, 1, 2, 3]
    try:
        for _ in range(kills):
            wait_for_two(run, living, after=time.time())
            time.sleep(draw.random() * 0.2)
            victim = draw.choice(living)
            run.kill(victim)
            living.remove(victim)
            living.append(len(run.processes))
            run.start(1, run.main)
        wait_for_two(run, living, after=time.time())
        run.stop_file.touch()
        wait_for_end(run, living)
        check_bits(run, name, len(results_of(run)[0]["losses"]), count=2, devices=2)
    finally:
        run.close()


def wait_for_two(run, processes, after):
    """Wait until two of some processes have made a step since a time, in a world of them all."""

    def have_made():
        run.check_errors(processes)
        rows = [run.last(process) for process in processes]
        # The others are spares, which log nothing. One that is new may not have joined: a run that
        # ends before leaves it alone.
        trainers = [row for row in rows if "step" in row and row["at"] > after]
        return [row["processes"] for row in trainers] == [len(processes)] * 2

    wait_until(have_made, 60)


@pytest.mark.parametrize(
    ("memory", "direct"),
    [("host", "1"), ("disk", "0"), thorough("host", "0"), thorough("disk", "1")],
)
def test_state_on_the_host_or_on_disk_survives(memory, direct, tmp_path, monkeypatch):
    monkeypatch.setenv("FSHARD_DISK", str(tmp_path))  # of the oracle
    name = f"state on {'the host' if memory == 'host' else 'disk'}"
    environment = {"FSHARD_DIRECT": direct, "FSHARD_DISK": str(tmp_path)}
    run = start(tmp_path, name, 9, seconds=0.01, has_folder=False, environment=environment)
    try:
        wait_for_step(run, 3, range(4))
        run.kill(1)
        wait_for_end(run, [0, 2, 3])
        check_moved(run, name, 9, tmp_path)
    finally:
        run.close()


def check_moved(run, name, steps, folder):
    """Compare with a run on disk that moved from four devices to those left, where this one did."""
    generations = [run.rows(process)[-1]["generations"][-1] for process in (0, 2, 3)]
    (step,) = {generation["step"] for generation in generations}
    count = len(generations[0]["devices"])
    before = trained.STEPS
    trained.STEPS = steps
    try:
        expected = moved(*PROGRAMS_HERE[name], folder / "moved", step, (4, count))
    finally:
        trained.STEPS = before
    results = results_of(run)
    assert len(results) == count
    for result in results:
        for parameter, x in expected["params"].items():
            assert torch.equal(result["params"][parameter], x), parameter


def test_a_run_grows_and_shrinks(tmp_path):
    """2 -> 4, by two processes that are started later, then 4 -> 3 -> 2 by two that are killed."""
    run = start(tmp_path, "draws", 2000, count=2, seconds=0.005)
    try:
        wait_for_devices(run, 2, [0, 1], 0.0)
        run.start(2, run.main)
        wait_for_devices(run, 4, range(4), 0.0)
        after = run.kill(2)
        wait_for_devices(run, 3, [0, 1, 3], after)
        after = run.kill(0)
        wait_for_devices(run, 2, [1, 3], after)
        run.stop_file.touch()
        wait_for_end(run, [1, 3])

        results = results_of(run)
        torch.manual_seed(3)
        expected = sum([torch.rand(12) for _ in range(results[0]["steps"])], torch.zeros(12))
        assert len(results) == 2
        for result in results:
            assert torch.equal(result["w"], expected)
    finally:
        run.close()


@pytest.mark.thorough
def test_a_stopped_process_is_left_behind_after_the_limit(tmp_path):
    run = start(tmp_path, "zero 3", 200, seconds=0.01, has_folder=False, timeout=3.0)
    try:
        wait_for_step(run, 3, range(4))
        run.kill(3, by=signal.SIGSTOP)
        wait_for_end(run, [0, 1, 2])
        run.kill(3, by=signal.SIGCONT)
        wait_until(lambda: "error" in run.last(3), 20)

        assert "went on without" in run.last(3)["error"]
        assert "timeout=" in run.last(3)["error"]
        check_bits(run, "zero 3", 200, count=2)
    finally:
        run.close()


def wait_in_vain(run, write):
    """Be a process of a program in which each receives what the other one never sends."""

    def receive():
        other = 1 - fs.axis_index("data")
        return fs.recv(torch.ones(1), "data", other)

    def program(elastic_run):
        write(devices=elastic_run.mesh.size)
        fs.run(receive, mesh=elastic_run.mesh)

    fs.elastic(trained.of_count, timeout=run.timeout)(program)()


def test_processes_that_wait_in_vain_raise(tmp_path):
    """No process is lost: to begin again would wait for ever."""
    run = Run(tmp_path, has_folder=False, timeout=2.0)
    try:
        run.start(2, wait_in_vain)
        wait_until(lambda: "error" in run.last(0) and "error" in run.last(1), 40)
        errors = run.last(0)["error"] + run.last(1)["error"]
        assert "CollectiveTimeoutError" in errors  # the other one may have seen this one leave
    finally:
        run.close()


def train_to_an_error(error, run, write):
    """Be a process of a program that raises the same on all processes."""

    def program(elastic_run):
        layout = fs.Layout(elastic_run.mesh, fs.P.flat("data"))
        kept = {"w": fs.device_put(torch.ones(8), layout), "steps": 0}
        if elastic_run.latest is not None:
            kept = elastic_run.restore(kept)
        elastic_run.save((elastic_run.latest or 0) + 1, kept)
        time.sleep(0.2 * fs.mesh.process_index())
        raise error

    fs.elastic(trained.of_count, timeout=run.timeout)(program)()


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), KeyboardInterrupt(), thorough(SystemExit(3))]
)
def test_an_error_of_all_processes_is_no_loss(error, tmp_path):
    """The last ones see that the first ones have left, and raise their own error all the same."""
    run = Run(tmp_path, has_folder=False)
    try:
        run.start(4, partial(train_to_an_error, error))
        wait_until(lambda: all("error" in run.last(process) for process in range(4)), 40)
        for process in range(4):
            assert run.last(process)["error"].startswith(type(error).__name__)
        for started in run.processes:
            started.join(20)
        pids = {started.pid for started in run.processes}
        assert pids.isdisjoint(pids_in_memory())
    finally:
        run.close()


def die_before_a_save(run, write):
    """Be a process of a program whose process 1 is killed when the others save in the background."""

    def program(elastic_run):
        layout = fs.Layout(elastic_run.mesh, fs.P.flat("data"))
        kept = {"w": fs.device_put(torch.ones(8), layout), "steps": 0}
        if elastic_run.latest is not None:
            kept = elastic_run.restore(kept)
        while kept["steps"] < 4:
            kept = {"w": kept["w"] * 2, "steps": kept["steps"] + 1}
            elastic_run.save(kept["steps"], kept)
        return fs.unshard(kept["w"])

    def save(folder, step, tree, **options):
        if step == 3 and fs.mesh.process_index() == 1 and fs.mesh.process_count() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        write(step=step)
        save_to_disk(folder, step, tree, **options)

    save_to_disk = fs.Checkpoints.save
    fs.Checkpoints.save = save
    folder = fs.Checkpoints(run.folder)
    elastic = fs.elastic(trained.of_count, timeout=run.timeout, folder=folder, every=2)
    result = elastic(program)()
    torch.save(result, run.logs / f"{os.getpid()}.pt")
    write(end="returned", latest=folder.latest)


def test_a_save_in_the_background_waits_for_no_lost_process(tmp_path):
    """Process 1 is lost before it has begun to write: the others end at once, not in 600 s."""
    run = Run(tmp_path)
    try:
        run.start(3, die_before_a_save)
        wait_for_end(run, [0, 2])
        for process in (0, 2):
            run.processes[process].join(20)
            assert run.processes[process].exitcode == 0
            assert run.last(process)["latest"] == 4
        for result in results_of(run):
            assert torch.equal(result, torch.full((8,), 16.0))
    finally:
        run.close()


def keeps_an_array(run, write):
    """Be a process of a program that uses an array of the generation before."""
    before = []
    texts = []

    def program(elastic_run):
        layout = fs.Layout(elastic_run.mesh, fs.P("data"))
        x = fs.device_put(torch.arange(12.0), layout)
        for old in before:
            for use in (lambda old: old + x, fs.unshard):
                with pytest.raises(fs.errors.FshardError) as error:
                    use(old)
                texts.append(str(error.value))
        before.append(x)
        if elastic_run.latest is not None:
            elastic_run.restore({"x": x})
        write(devices=elastic_run.mesh.size)
        steps = elastic_run.latest or 0
        while not stops(run, elastic_run, 0):
            steps += 1
            elastic_run.save(steps, {"x": x})

    trained.STEPS = -1
    folder = fs.Checkpoints(run.folder, every=1000)
    fs.elastic(trained.of_count, folder=folder)(program)()
    write(end="returned", texts=texts)


def test_an_array_of_a_generation_before_raises(tmp_path):
    """Its mesh looks like the new one, but device 1 is another process now."""
    run = Run(tmp_path)
    try:
        run.start(3, keeps_an_array)
        wait_until(lambda: run.last(2).get("devices") == 3, 40)
        run.kill(1)
        wait_until(lambda: run.last(2).get("devices") == 2, 40)
        run.start(1, keeps_an_array)
        wait_until(lambda: run.last(3).get("devices") == 3, 40)
        run.stop_file.touch()
        wait_for_end(run, [0, 2, 3])

        texts = run.last(2)["texts"]
        assert len(texts) == 6
        assert any("made before processes were lost or joined" in text for text in texts)
    finally:
        run.close()
