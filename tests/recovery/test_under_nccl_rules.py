"""Processes that are killed change no bit under the rules of NCCL, on a device that is not the host.

There nothing is told of a death: what waits for a dead process never completes. The oracle is the
same program on virtual devices of the host, of which none is lost.
"""

import os
import random
import signal
import time
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map_only

import fshard as fs
from fshard.mesh.runtimes import process
from fshard.recovery.copies import Copies, Shelf
from tests.mesh.runtimes import fake_device, nccl_rules
from tests.mesh.runtimes.nccl_rules import NcclRules
from tests.recovery import test_elastic_processes, trained
from tests.recovery.programs import Run
from tests.recovery.test_elastic_processes import check_bits, wait_for_end

UNSEEN = {"FSHARD_BACKEND": fake_device.BACKEND, "NCCL_RULES_DEATHS": "unseen"}
STEPS = 8

MOMENTS = {
    "compute": (trained, "batch_of", "before"),
    "collective": (NcclRules, "launch", "before"),
    "started collective": (NcclRules, "launch", "after"),
    "copy to the neighbour": (NcclRules, "end_batch", "before"),
    "started copy": (NcclRules, "end_batch", "after"),
    "save": (Copies, "save", "before"),
    "meeting": (Shelf, "complete", "after"),
    "staging": (Copies, "_staged", "after"),
    "end of save": (Copies, "save", "after"),
}
"""The function before or after which a process is killed, from its third step on."""


def kill_at(moment, calls):
    """Let this process be killed at a moment, after so many calls since its third step."""
    owner, name, side = MOMENTS[moment]
    original = getattr(owner, name)
    left = [calls]

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def replaced(*arguments, **options):
        is_now = False
        if made.steps >= 3:
            is_now = left[0] == 0
            left[0] -= 1
        if is_now and side == "before":
            die()
        result = original(*arguments, **options)
        if is_now:
            die()
        return result

    setattr(owner, name, replaced)


class Made:
    """The steps that this process has made."""

    steps = 0


made = Made()


def train(name, deaths, options, run, write):
    """Be a process of an elastic run on the device; some processes kill themselves."""
    fake_device.install()
    trained.plain = lambda tree: tree_map_only(torch.Tensor, lambda x: x.cpu(), fs.unshard(tree))
    save = Copies.save

    def counted(copies, step, tree, **save_options):
        result = save(copies, step, tree, **save_options)
        made.steps = step
        return result

    Copies.save = counted
    rank = int(os.environ["RANK"])
    if rank in deaths:
        kill_at(*deaths[rank])
    test_elastic_processes.train(name, STEPS, 0.0, options, run, write)
    assert nccl_rules.violations == []


def start(folder, name, deaths, *, count=4, options=None, **of_run):
    run = Run(folder, UNSEEN, has_folder=False, **of_run)
    run.main = partial(train, name, deaths, options or {})
    run.start(count, run.main)
    return run


def check(folder, name, deaths, **options):
    """Run a program of which some processes are killed; compare what the others end with."""
    run = start(folder, name, deaths, **options)
    try:
        others = [rank for rank in range(4) if rank not in deaths]
        wait_for_end(run, others)
        check_bits(run, name, STEPS, count=2)
        for rank in deaths:
            assert run.processes[rank].exitcode == -signal.SIGKILL
        return run
    finally:
        run.close()


def test_a_process_killed_in_a_collective_changes_no_bit(tmp_path):
    check(tmp_path, "zero 3", {2: ("started collective", 2)})
