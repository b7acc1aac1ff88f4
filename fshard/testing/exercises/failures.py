"""Exercises of the notebook "When machines fail"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

import fshard as fs
from fshard import P
from fshard.testing.grading import Answer, Cases, Exercise, WrongAnswer, mistake
from fshard.testing.kill import kill

__all__ = ["EXERCISES"]


# -- devices that fail at once --------------------------------------------------------------------


@cache
def survives(lost: tuple[int, ...], devices: int, copies: int) -> bool:
    """Kill virtual devices of a run, and return True if it continues from its last step."""
    run = fs.elastic(mesh_of, devices=devices, copies=copies)(train)
    second_step = ("collective", 5)  # then the first version is complete on all devices
    try:
        with kill(*lost, at=second_step):
            run()
    except fs.errors.LostStateError:
        return False
    return run.generations[-1].step is not None


def mesh_of(devices: Sequence[int]) -> fs.Mesh:
    return fs.make_mesh({"data": len(devices)}, devices=devices)


def train(run: Any) -> int:
    """Make two steps, and save after each."""
    array = fs.device_put(torch.zeros(12), fs.Layout(run.mesh, P.flat("data")))
    state = {"w": array, "steps": 0}
    if run.latest is not None:
        state = run.restore(state)
    while state["steps"] < 2:
        fs.run(lambda: fs.psum(torch.ones(1), "data"), mesh=run.mesh)
        state = {"w": state["w"] + 1, "steps": state["steps"] + 1}
        run.save(state["steps"], state)
    return state["steps"]


@mistake("It is not only their number: with one copy, two devices may fail that are no neighbours.")
def survives_by_number(lost: tuple[int, ...], devices: int, copies: int) -> bool:
    return len(lost) <= copies


@mistake("After the last device comes the first: take the number modulo `devices`.")
def survives_without_circle(lost: tuple[int, ...], devices: int, copies: int) -> bool:
    for device in lost:
        holders = set(range(device, device + copies + 1))
        if holders <= set(lost):
            return False
    return True


@mistake("With two copies a share is on three devices, so two neighbours may fail.")
def survives_with_one_copy(lost: tuple[int, ...], devices: int, copies: int) -> bool:
    neighbours = {(device + 1) % devices for device in lost}
    return not neighbours & set(lost)


@mistake("If as many are left as are lost, the copies may still be among the lost ones.")
def survives_by_half(lost: tuple[int, ...], devices: int, copies: int) -> bool:
    return 2 * len(lost) <= devices


SURVIVES = Exercise(
    name="failures.survives",
    question=(
        "An elastic run keeps each device's share of the state on the device itself and on the"
        " `copies` devices after it (after the last comes the first). The devices `lost`, a tuple"
        " of numbers of `devices`, fail at once. Does the run go on from its last step? Return True"
        " or False."
    ),
    form="answer(lost, devices, copies)",
    hints=(
        "A share is gone if all devices that have it are lost.",
        "Share d is on the devices d, d + 1, ..., d + copies, modulo `devices`.",
        "For each d of `lost`: is one of these not in `lost`?",
    ),
    why="Two machines of one rack fail together: place neighbours in different racks.",
    grade=Cases(
        cases=[
            ((1,), 3, 1),
            ((0, 1), 4, 1),
            ((0, 2), 4, 1),
            ((0, 3), 4, 1),
            ((0, 1), 4, 2),
            ((0, 1, 2), 4, 2),
        ],
        truth=survives,
        mistakes=(
            survives_by_number,
            survives_without_circle,
            survives_with_one_copy,
            survives_by_half,
        ),
    ),
)


# -- the mesh of those that are left --------------------------------------------------------------


def grade_mesh(answer: Answer) -> None:
    for devices in ((0, 1, 2, 3), (1, 2), (5,), (0, 2, 3), (0, 1, 2, 4, 6), (0, 1, 2, 4, 6, 7)):
        mesh = answer(devices)
        if 8 % len(devices) == 0:
            grade_mesh_of(mesh, devices)
        elif mesh is not None:
            raise WrongAnswer(
                f"{len(devices)} devices do not divide 8 slices, so the answer must be None:"
                " then the run waits for a number that does, or leaves devices as spares."
            )


def grade_mesh_of(mesh: Any, devices: tuple[int, ...]) -> None:
    if not isinstance(mesh, fs.Mesh):
        raise WrongAnswer(f"Of the devices {devices} the answer must make a mesh of all.")
    if mesh.axis_names != ("data",):
        raise WrongAnswer(f'The axis must be "data"; got {", ".join(mesh.axis_names)}.')
    if mesh.size != len(devices):
        raise WrongAnswer(f"Of {len(devices)} devices the mesh has {mesh.size}.")
    if tuple(mesh.devices) != devices:
        raise WrongAnswer(
            f"The mesh is of the devices {tuple(mesh.devices)}, but {devices} are left:"
            " `fs.make_mesh(..., devices=devices)`."
        )


MESH = Exercise(
    name="failures.mesh",
    question=(
        "A reproducible step adds 8 slices, so it has equal bits on 1, 2, 4 or 8 devices. Write the"
        ' `make_mesh` of an elastic run: a mesh of the axis "data" of all of `devices` (the numbers'
        " of those that are left), or None if their number does not divide 8."
    ),
    form="answer(devices)",
    hints=(
        "`8 % len(devices)` is 0 if they divide the slices.",
        "Not devices 0 to n - 1, but those that are left: `devices=devices`.",
    ),
    why="The bits of a run then do not show that half of its machines were lost.",
    grade=grade_mesh,
)


# -- the interval between two saves ---------------------------------------------------------------


def lost_share(interval: float, save: float, hours: float, devices: int) -> float:
    """Return the part of the time that is lost: by saving, and by work after the last save."""
    between_failures = 3600 * hours / devices
    return save / interval + interval / 2 / between_failures


def best_interval(save: float, hours: float, devices: int) -> float:
    """Search the interval with the least loss, by thirds."""
    low, high = 1e-3, 1e7
    for _ in range(200):
        left = low + (high - low) / 3
        right = high - (high - low) / 3
        if lost_share(left, save, hours, devices) < lost_share(right, save, hours, devices):
            high = right
        else:
            low = left
    return low


@mistake("That is for one device. A run of n devices fails n times as often.")
def interval_of_one_device(save: float, hours: float, devices: int) -> float:
    return (2 * save * 3600 * hours) ** 0.5


@mistake("That is in hours; the question is in seconds.")
def interval_in_hours(save: float, hours: float, devices: int) -> float:
    return (2 * save * hours / devices) ** 0.5


@mistake("Half an interval is lost on average, not a full one: the factor 2 is missing.")
def interval_without_half(save: float, hours: float, devices: int) -> float:
    return (save * 3600 * hours / devices) ** 0.5


@mistake("That is the time between two failures: half of all work would be lost.")
def time_between_failures(save: float, hours: float, devices: int) -> float:
    return 3600 * hours / devices


@mistake("More rarely than it could be: the time between failures does not grow with devices.")
def interval_that_grows(save: float, hours: float, devices: int) -> float:
    return (2 * save * 3600 * hours * devices) ** 0.5


@mistake("A square root is missing.")
def interval_without_root(save: float, hours: float, devices: int) -> float:
    return 2 * save * 3600 * hours / devices


INTERVAL_MISTAKES = (
    interval_of_one_device,
    interval_in_hours,
    interval_without_half,
    time_between_failures,
    interval_that_grows,
    interval_without_root,
)


def grade_interval(answer: Answer) -> None:
    cases = [(10.0, 1000.0, 100), (60.0, 50000.0, 16384), (2.0, 720.0, 1)]
    results = [answer(*case) for case in cases]
    best = [best_interval(*case) for case in cases]
    if are_near(results, best):
        return
    for known in INTERVAL_MISTAKES:
        wrong = [known.answer(*case) for case in cases]
        if are_near(results, wrong):
            raise WrongAnswer(known.hint)
    raise WrongAnswer(
        f"For save = 10, hours = 1000, devices = 100 the answer is {results[0]}; least is lost with"
        f" {best[0]:.0f} seconds."
    )


def are_near(results: Sequence[Any], expected: Sequence[float]) -> bool:
    """Return True if all results are numbers within a hundredth of the expected ones."""
    for result, right in zip(results, expected, strict=True):
        is_number = isinstance(result, (int, float)) and not isinstance(result, bool)
        is_near = is_number and abs(result - right) <= 0.01 * right  # False of a NaN
        if not is_near:
            return False
    return True


INTERVAL = Exercise(
    name="failures.interval",
    question=(
        "Saving takes `save` seconds; a device fails once in `hours` hours, and any of `devices`"
        " stops the run. After a failure the work since the last save is lost, half an interval on"
        " average. How many seconds should be between two saves, so that least time is lost?"
    ),
    form="answer(save, hours, devices)",
    hints=(
        "With an interval T, save / T of the time goes to saving, and T / 2 is lost per failure.",
        "M = 3600 * hours / devices seconds are between two failures: minimize save / T + T / (2"
        " M).",
        "T = sqrt(2 * save * M).",
    ),
    why="Young's rule of 1974. Sixteen times as many devices: four times as often.",
    grade=grade_interval,
)

EXERCISES = (SURVIVES, MESH, INTERVAL)
