"""Exercises of the notebook "When machines fail"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

import fshard as fs
from fshard import P
from fshard.testing.grading import Exercise, WrongAnswer, as_function, grade_cases
from fshard.testing.kill import kill


def _mesh_of(devices: Sequence[int]) -> fs.Mesh:
    return fs.make_mesh({"data": len(devices)}, devices=devices)


_SECOND_STEP = ("collective", 5)
"""A moment of `_train` at which its first version is complete on all devices."""


def _train(run: Any) -> int:
    array = fs.device_put(torch.zeros(12), fs.Layout(run.mesh, P.flat("data")))
    kept = {"w": array, "steps": 0}
    if run.latest is not None:
        kept = run.restore(kept)
    while kept["steps"] < 2:
        fs.run(lambda: fs.psum(torch.ones(1), "data"), mesh=run.mesh)
        kept = {"w": kept["w"] + 1, "steps": kept["steps"] + 1}
        run.save(kept["steps"], kept)
    return kept["steps"]


@cache
def _survives(lost: tuple[int, ...], devices: int, copies: int) -> bool:
    """Kill virtual devices of a run, and return True if it continues from its last step."""
    run = fs.elastic(_mesh_of, devices=devices, copies=copies)(_train)
    try:
        with kill(*lost, at=_SECOND_STEP):
            run()
    except fs.errors.LostStateError:
        return False
    return run.generations[-1].step is not None


SURVIVES = Exercise(
    "failures.survives",
    "An elastic run keeps each device's share of the state on the device itself and on the `copies`"
    " devices after it (after the last comes the first). The devices `lost`, a tuple of numbers of"
    " `devices`, fail at once. Does the run go on from its last step? Return True or False.",
    "answer(lost, devices, copies)",
    (
        "A share is gone if all devices that have it are lost.",
        "Share d is on the devices d, d + 1, ..., d + copies, modulo `devices`.",
        "For each d of `lost`: is one of these not in `lost`?",
    ),
    "Two machines of one rack fail together: place neighbours in different racks.",
    lambda answer: grade_cases(
        answer,
        "answer(lost, devices, copies)",
        [
            ((1,), 3, 1),
            ((0, 1), 4, 1),
            ((0, 2), 4, 1),
            ((0, 3), 4, 1),
            ((0, 1), 4, 2),
            ((0, 1, 2), 4, 2),
        ],
        _survives,
        {
            "It is not only their number: with one copy, two devices may fail that are no"
            " neighbours.": lambda lost, devices, copies: len(lost) <= copies,
            "After the last device comes the first: take the number modulo `devices`.": (
                lambda lost, devices, copies: (
                    not any(all(d + i in lost for i in range(copies + 1)) for d in lost)
                )
            ),
            "With two copies a share is on three devices, so two neighbours may fail.": (
                lambda lost, devices, copies: not any((d + 1) % devices in lost for d in lost)
            ),
            "If as many are left as are lost, the copies may still be among the lost ones.": (
                lambda lost, devices, copies: 2 * len(lost) <= devices
            ),
        },
    ),
)


def _grade_mesh(answer: Any) -> None:
    function = as_function(answer, "answer(devices)")
    for devices in ((0, 1, 2, 3), (1, 2), (5,), (0, 2, 3), (0, 1, 2, 4, 6), (0, 1, 2, 4, 6, 7)):
        mesh = function(devices)
        if 8 % len(devices) != 0:
            if mesh is not None:
                raise WrongAnswer(
                    f"{len(devices)} devices do not divide 8 slices, so the answer must be None:"
                    " then the run waits for a number that does, or leaves devices as spares."
                )
            continue
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
    "failures.mesh",
    "A reproducible step adds 8 slices, so it has equal bits on 1, 2, 4 or 8 devices. Write the"
    ' `make_mesh` of an elastic run: a mesh of the axis "data" of all of `devices` (the numbers of'
    " those that are left), or None if their number does not divide 8.",
    "answer(devices)",
    (
        "`8 % len(devices)` is 0 if they divide the slices.",
        "Not devices 0 to n - 1, but those that are left: `devices=devices`.",
    ),
    "The bits of a run then do not show that half of its machines were lost.",
    _grade_mesh,
)


def _lost_share(interval: float, save: float, hours: float, devices: int) -> float:
    """Return the part of the time that is lost: by saving, and by work after the last save."""
    between_failures = 3600 * hours / devices
    return save / interval + interval / 2 / between_failures


def _best_interval(save: float, hours: float, devices: int) -> float:
    """Search the interval with the least loss, by thirds."""
    low, high = 1e-3, 1e7
    for _ in range(200):
        left = low + (high - low) / 3
        right = high - (high - low) / 3
        if _lost_share(left, save, hours, devices) < _lost_share(right, save, hours, devices):
            high = right
        else:
            low = left
    return low


def _is_near(result: Any, right: float) -> bool:
    is_number = isinstance(result, (int, float)) and not isinstance(result, bool)
    return is_number and abs(result - right) <= 0.01 * right


def _grade_interval(answer: Any) -> None:
    form = "answer(save, hours, devices)"
    cases = [(10.0, 1000.0, 100), (60.0, 50000.0, 16384), (2.0, 720.0, 1)]
    function = as_function(answer, form)
    results = [function(*case) for case in cases]
    best = [_best_interval(*case) for case in cases]
    if all(map(_is_near, results, best)):
        return
    for text, factor in _INTERVAL_MISTAKES.items():
        wrong = [factor(interval, *case) for interval, case in zip(best, cases, strict=True)]
        if all(map(_is_near, results, wrong)):
            raise WrongAnswer(text)
    raise WrongAnswer(
        f"For save = 10, hours = 1000, devices = 100 the answer is {results[0]}; least is lost with"
        f" {best[0]:.0f} seconds."
    )


_INTERVAL_MISTAKES: dict[str, Any] = {
    "That is for one device. A run of n devices fails n times as often.": (
        lambda interval, save, hours, devices: interval * devices**0.5
    ),
    "That is in hours; the question is in seconds.": (
        lambda interval, save, hours, devices: interval / 60
    ),
    "Half an interval is lost on average, not a full one: the factor 2 is missing.": (
        lambda interval, save, hours, devices: interval / 2**0.5
    ),
    "That is the time between two failures: half of all work would be lost.": (
        lambda interval, save, hours, devices: 3600 * hours / devices
    ),
    "More rarely than it could be: the time between failures does not grow with devices.": (
        lambda interval, save, hours, devices: interval * devices
    ),
    "A square root is missing.": lambda interval, save, hours, devices: interval**2,
}

INTERVAL = Exercise(
    "failures.interval",
    "Saving takes `save` seconds; a device fails once in `hours` hours, and any of `devices` stops"
    " the run. After a failure the work since the last save is lost, half an interval on average."
    " How many seconds should be between two saves, so that least time is lost?",
    "answer(save, hours, devices)",
    (
        "With an interval T, save / T of the time goes to saving, and T / 2 is lost per failure.",
        "M = 3600 * hours / devices seconds are between two failures: minimize save / T + T / (2"
        " M).",
        "T = sqrt(2 * save * M).",
    ),
    "Young's rule of 1974. Sixteen times as many devices: four times as often.",
    _grade_interval,
)

EXERCISES = (SURVIVES, MESH, INTERVAL)
