"""Optimizer state on the host and on disk, in two processes."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import optim
from fshard.memory.transfers import stress
from tests.memory.training import CASE, away, same_bits, trained


def is_same_in_process(folder, place, rate, case):
    os.environ["FSHARD_DISK"] = folder
    expected = trained(**case)
    with stress(poison=True, rate=rate):
        return same_bits(trained(*place, **case), expected)


@pytest.mark.parametrize(
    ("name", "place", "rate", "more"),
    [
        ("adamw", ("host", "device"), 1e6, {"stage": 2, "fp16": True}),
        ("ema of masters", ("host", "host"), None, {"stage": 1, "clips": True}),
        ("shampoo", ("disk", "device"), None, {"stage": 3}),
        ("lamb", ("disk", "host"), 1e6, {"stage": 3, "microbatches": 2}),
    ],
)
def test_bits_are_equal_in_processes(two, disk_folder, name, place, rate, more):
    """With copies at their wait, and late ones in the helper thread."""
    case = CASE | {"name": name, "half": "masters" in name, **more}
    assert two.run(is_same_in_process, str(disk_folder), place, rate, case) == [True, True]


def resident():
    """Return the bytes of memory that this process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


M_MMAP_THRESHOLD = -3
"""An option of `mallopt`: buffers of at least this size are returned to the system when they are
freed.
"""


def growth_of_a_process(folder):
    """Return the growth of resident memory by 16 MB of state on each of two devices, and that of
    200 more steps.
    """
    os.environ["FSHARD_DISK"] = folder
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10)
    mesh = fs.make_mesh({"data": 2})
    sizes = {}
    large, small = (
        fs.shard_params([torch.ones(n) for _ in range(16)], fs.fsdp("data"), mesh=mesh)
        for n in (1 << 18, 1 << 8)
    )
    for place in (("disk", "host"), ("device", "device")):
        opt = fs.partition_optimizer(
            optim.adamw(0.1),
            mesh=mesh,
            axis="data",
            stage=3,
            state_memory=place[0],
            update_on=place[1],
        )
        state_of_small = opt.init(small)
        for _ in range(
            5
        ):  # code that is used for the first time becomes resident, and buffers are made
            small, state_of_small = opt.step(small, state_of_small, small)
        before = resident()
        state = opt.init(large)
        after = resident()
        for step in range(250):
            if step == 50:
                settled = resident()
            small, state_of_small = opt.step(small, state_of_small, small)
        sizes[place[0]] = after - before, resident() - settled
        assert away(state, place[0]) == 16 << 20
    return sizes


def test_state_on_disk_is_not_resident_in_processes(two, disk_folder):
    for sizes in two.run(growth_of_a_process, str(disk_folder)):
        assert sizes["disk"][0] < 0.1 * (16 << 20) < 0.8 * (16 << 20) < sizes["device"][0]
        assert sizes["disk"][1] < 1 << 18
