"""Answers to the exercises of failures: the right ones, and wrong ones by their hint."""

from math import sqrt

import fshard as fs


def survives(lost, devices, copies):
    for d in lost:
        holders = [(d + i) % devices for i in range(copies + 1)]
        if all(holder in lost for holder in holders):
            return False
    return True


def without_wrap(lost, devices, copies):
    return not any(all(d + i in lost for i in range(copies + 1)) for d in lost)


def make_mesh(devices):
    if 8 % len(devices) != 0:
        return None
    return fs.make_mesh({"data": len(devices)}, devices=devices)


def of_first_devices(devices):
    if 8 % len(devices) != 0:
        return None
    return fs.make_mesh({"data": len(devices)})


def of_other_axis(devices):
    if 8 % len(devices) != 0:
        return None
    return fs.make_mesh({"x": len(devices)}, devices=devices)


def of_one(devices):
    return make_mesh(devices[:1])


SOLUTIONS = {
    "failures.survives": survives,
    "failures.mesh": make_mesh,
    "failures.interval": lambda save, hours, devices: sqrt(2 * save * 3600 * hours / devices),
}

WRONG = {
    "failures.survives": {
        "only their number": lambda lost, devices, copies: len(lost) <= copies,
        "modulo": without_wrap,
        "may fail": lambda lost, devices, copies: survives(lost, devices, 1),
        "still be among": lambda lost, devices, copies: 2 * len(lost) <= devices,
    },
    "failures.mesh": {
        "must be None": lambda devices: fs.make_mesh({"data": len(devices)}, devices=devices),
        "are left": of_first_devices,
        "the mesh has 1": of_one,
        'must be "data"': of_other_axis,
        "a mesh of all": lambda devices: None,
    },
    "failures.interval": {
        "one device": lambda save, hours, devices: sqrt(2 * save * 3600 * hours),
        "factor 2": lambda save, hours, devices: sqrt(save * 3600 * hours / devices),
        "in hours": lambda save, hours, devices: sqrt(2 * save * 3600 * hours / devices) / 60,
        "between two failures": lambda save, hours, devices: 3600 * hours / devices,
        "the answer is nan": lambda save, hours, devices: float("nan"),
        "square root": lambda save, hours, devices: 2 * save * 3600 * hours / devices,
    },
}
