"""Processes that train in an elastic run, and the test that waits for them.

The oracle of their bits is the same program on virtual devices, of which none is lost.
"""

import os
import time
from functools import partial

import torch

import fshard as fs
from tests.helpers.ended import wait_until
from tests.recovery import trained
from tests.recovery.oracle import undisturbed
from tests.recovery.programs import Run
from tests.recovery.trained import PROGRAMS, PROGRAMS_OF_A_MESH, PROGRAMS_OF_TWO

PROGRAMS_HERE = {**PROGRAMS, **PROGRAMS_OF_A_MESH, **PROGRAMS_OF_TWO}


def train(name, steps, seconds, options, run, write):
    """Be a process of an elastic run; log each step, and save the result."""
    trained.STEPS = steps
    trained.is_at_end = partial(stops, run)
    make_mesh, program = PROGRAMS_HERE[name]

    def logged(elastic_run):
        save = elastic_run.save
        write(devices=elastic_run.mesh.size, latest=elastic_run.latest)

        def save_and_log(step, tree, **save_options):
            save(step, tree, **save_options)
            processes = fs.mesh.process_count()
            write(step=step, devices=elastic_run.mesh.size, processes=processes)
            time.sleep(seconds)

        elastic_run.save = save_and_log
        return program(elastic_run)

    torch.manual_seed(3)
    if run.folder is not None:
        options = {**options, "folder": fs.Checkpoints(run.folder, every=1000)}
    elastic = fs.elastic(make_mesh, timeout=run.timeout, **options)(logged)
    result = elastic()
    if result is not None:
        torch.save(result, run.logs / f"{os.getpid()}.pt")
    write(end="returned", generations=[generation._asdict() for generation in elastic.generations])


def stops(run, elastic_run, steps):
    """Return True on all processes after the last step, or once the test has stopped them."""
    if steps == trained.STEPS:
        return True
    flag = torch.tensor([run.stop_file.exists()], dtype=torch.int64)
    mesh = elastic_run.mesh
    (total,) = fs.run(lambda: fs.psum(flag, mesh.axis_names), mesh=mesh)
    return bool(total)


def results_of(run):
    return [torch.load(path) for path in run.logs.glob("*.pt")]


def start(folder, name, steps, *, count=4, seconds=0.0, options=None, **of_run):
    """Start the processes of a program; return the run."""
    run = Run(folder, **of_run)
    run.main = partial(train, name, steps, seconds, options or {})
    run.start(count, run.main)
    return run


def wait_for_step(run, step, processes):
    """Wait until processes have made a step."""

    def have_made():
        run.check_errors(processes)
        return all(run.last(process).get("step", 0) >= step for process in processes)

    wait_until(have_made, 40)


def wait_for_end(run, processes):
    def have_ended():
        run.check_errors(processes)
        return all("end" in run.last(process) for process in processes)

    wait_until(have_ended, 60)


def check_bits(run, name, steps, count, devices=4):
    """Compare what processes have ended with to a run of some devices of which nothing was lost."""
    results = results_of(run)
    assert len(results) == count
    before = trained.STEPS
    trained.STEPS = steps
    try:
        expected = undisturbed(*PROGRAMS_HERE[name], count=devices)
    finally:
        trained.STEPS = before
    for result in results:
        assert result["losses"] == expected["losses"]
        for parameter, x in expected["params"].items():
            assert torch.equal(result["params"][parameter], x), parameter


def devices_of(run, process):
    """Return the number of devices of a process's last mesh, and the time since when."""
    rows = [row for row in run.rows(process) if "latest" in row]
    return (rows[-1]["devices"], rows[-1]["at"]) if rows else (0, 0.0)


def wait_for_devices(run, count, processes, after):
    """Wait until processes have made a step on a mesh of some devices, since a time."""

    def have_made():
        run.check_errors(processes)
        for process in processes:
            last = run.last(process)
            if last.get("devices") != count or "step" not in last or last["at"] < after:
                return False
        return True

    wait_until(have_made, 60)


def check_replacements(run, name, kills, draw, pause, waits=lambda: True):
    """Kill processes of a run at random times, and replace each; compare what all end with.

    Args:
        run: with four processes.
        name: of its program.
        kills: how many.
        draw: random numbers: the times, and who is killed.
        pause: the longest time between a step of all and a kill.
        waits: returns True to wait for the survivors' first step before a new process starts.
    """
    living = [0, 1, 2, 3]
    after = 0.0
    try:
        for _ in range(kills):
            wait_for_devices(run, 4, living, after)
            time.sleep(draw.random() * pause)
            victim = draw.choice(living)
            after = run.kill(victim)
            living.remove(victim)
            if waits():
                wait_for_devices(run, 2, living[:2], after)
            living.append(len(run.processes))
            run.start(1, run.main)
        wait_for_devices(run, 4, living, after)
        run.stop_file.touch()
        wait_for_end(run, living)
        check_bits(run, name, len(results_of(run)[0]["losses"]), count=4)
    finally:
        run.close()
