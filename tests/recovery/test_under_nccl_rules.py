"""Processes that are killed change no bit under the rules of NCCL, on a device that is not the host.

There nothing reports a death: what waits for a dead process never completes. The oracle is the
same program on virtual devices of the host, of which none is lost.
"""

import os
import random
import signal
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map_only

import fshard as fs
from fshard.checkpoint.snapshot import TreeSnapshot
from fshard.recovery.copies import Copies, Shelf
from tests.mesh.runtimes import fake_device, nccl_rules
from tests.mesh.runtimes.nccl_rules import NcclRules
from tests.recovery import trained, training_processes
from tests.recovery.oracle import undisturbed
from tests.recovery.programs import Run
from tests.recovery.training_processes import (
    check_bits,
    check_replacements,
    results_of,
    wait_for_end,
)

UNSEEN = {"FSHARD_BACKEND": fake_device.BACKEND, "NCCL_RULES_DEATHS": "unseen"}
STEPS = 8

MOMENTS = {
    "compute": (torch.nn.GELU, "forward", "before"),
    "collective": (NcclRules, "launch", "before"),
    "started collective": (NcclRules, "launch", "after"),
    "copy to the neighbour": (NcclRules, "end_batch", "before"),
    "started copy": (NcclRules, "end_batch", "after"),
    "save": (Copies, "save", "before"),
    "meeting": (Shelf, "complete", "after"),
    "staging": (TreeSnapshot, "staged", "after"),
    "end of save": (Copies, "save", "after"),
}
"""The function before or after which a process is killed, from its third step on."""


def kill_at(moment, calls):
    """Let this process be killed at a moment, after some calls since its third step."""
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


def train(name, steps, seconds, deaths, options, run, write):
    """Be a process of an elastic run on the device; some processes kill themselves."""
    fake_device.install()
    trained.plain = lambda tree: tree_map_only(torch.Tensor, lambda x: x.cpu(), fs.unshard(tree))
    save = Copies.save

    def counted(copies, step, tree, **save_options):
        result = save(copies, step, tree, **save_options)
        made.steps = step
        return result

    Copies.save = counted
    rank = int(os.environ.get("RANK", "-1"))
    if rank in deaths:
        kill_at(*deaths[rank])
    training_processes.train(name, steps, seconds, options, run, write)
    assert nccl_rules.violations == []


def start(folder, name, deaths=None, *, steps=STEPS, seconds=0.0, options=None, **of_run):
    """Start the processes of a program; the time limit is too long to notice a death by it."""
    run = Run(folder, UNSEEN, timeout=600.0, **of_run)
    run.main = partial(train, name, steps, seconds, deaths or {}, options or {})
    run.start(4, run.main)
    return run


def check(folder, name, deaths, **options):
    """Run a program of which some processes are killed; compare what the others end with."""
    run = start(folder, name, deaths, has_folder=False, **options)
    try:
        others = [rank for rank in range(4) if rank not in deaths]
        wait_for_end(run, others)
        check_bits(run, name, STEPS, count=2)
        for rank in deaths:
            assert run.processes[rank].exitcode == -signal.SIGKILL
        return run
    finally:
        run.close()


IN_SUITE = [("started collective", 2), ("compute", 0), ("started copy", 0)]
MOMENTS_OF_VICTIMS = [(moment, victim) for moment in MOMENTS for victim in (0, 2)]


def thorough_but(cases, kept):
    """Return cases as parameters; those that are not kept in the suite are thorough."""
    return [
        pytest.param(case, marks=[] if case in kept else pytest.mark.thorough) for case in cases
    ]


@pytest.mark.parametrize("case", thorough_but(MOMENTS_OF_VICTIMS, IN_SUITE), ids=str)
def test_a_process_killed_at_a_moment_changes_no_bit(case, tmp_path):
    """Process 0 has the hub of the rules, and the store."""
    moment, victim = case
    check(tmp_path, "zero 3", {victim: (moment, 2)})


PROGRAMS = ["zero 1", "zero 2", "tensor axis", "dropout", "accumulation", "clipping", "fp16"]
"""Not the others: stages resize memory and host state is pinned, which this device cannot; experts
add in another order than on the host; the labels of torch's loop are on the host.
"""


@pytest.mark.parametrize("name", thorough_but(PROGRAMS, ["dropout"]))
def test_programs_go_on_without_a_process(name, tmp_path):
    check(tmp_path, name, {1: ("collective", 5)})


@pytest.mark.parametrize("options", thorough_but([{"memory": "host"}, {"copies": 2}], []), ids=str)
def test_other_copies_outlive_a_process(options, tmp_path):
    check(tmp_path, "zero 3", {0: ("started collective", 7)}, options=options)


@pytest.mark.thorough
def test_two_processes_may_be_killed_at_once(tmp_path):
    deaths = {0: ("compute", 0), 1: ("compute", 0)}
    check(tmp_path, "zero 3", deaths, options={"copies": 2})


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.thorough)])
@pytest.mark.timeout(2000)
def test_killed_processes_that_are_replaced_change_no_bit(kills, tmp_path):
    """At random times, so on meshes of 4, then 2, then 4 devices; worlds have hubs of their own."""
    draw = random.Random(kills)
    run = start(tmp_path, "zero 3", steps=20_000, seconds=0.002)
    check_replacements(run, "zero 3", kills, draw, pause=0.5)


# -- a device behind the host ----------------------------------------------------------------------


def behind(run, write):
    """Be a process whose device does nothing more from the fourth step on; process 2 dies then."""
    fake_device.install()
    save = Copies.save

    def saved(copies, step, tree, **options):
        if run_of.mesh.size == 4 and step == 4:
            nccl_rules.hold()
        if run_of.mesh.size == 4 and step == 5 and os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        write(began=step)
        return save(copies, step, tree, **options)

    def program(elastic_run):
        nonlocal run_of
        run_of = elastic_run
        return trained.zero(elastic_run)

    def loop(elastic_run, step, kept):
        """Train, and read nothing of the device before the end."""
        kept.pop("losses")
        if elastic_run.latest is not None:
            kept = elastic_run.restore(kept)
        while kept["steps"] < STEPS:
            trained_trees = step(kept["params"], kept["state"], trained.batch_of(kept["steps"]))
            kept["params"], kept["state"], _ = trained_trees
            kept["steps"] += 1
            elastic_run.save(kept["steps"], kept)
        return {name: x.cpu() for name, x in fs.unshard(kept["params"]).items()}

    run_of = None
    Copies.save = saved
    trained.loop = loop
    elastic = fs.elastic(trained.of_powers)(program)
    result = elastic()
    if result is not None:
        torch.save(result, run.logs / f"{os.getpid()}.pt")
    write(end="returned", steps=[row.step for row in elastic.generations])


def test_a_version_behind_a_hanging_collective_does_not_count(tmp_path):
    """The host has started two more versions, with the NaN of collectives that never end."""
    run = Run(tmp_path, UNSEEN, has_folder=False, timeout=600.0)
    try:
        run.start(4, behind)
        wait_for_end(run, [0, 1, 3])
        assert run.last(0)["steps"] == [None, 3]
        assert {"began": 5}.items() <= run.rows(0)[4].items()  # it was two steps ahead
        expected = undisturbed_params("zero 3")
        results = results_of(run)
        assert len(results) == 2
        for result in results:
            for name, x in expected.items():
                assert torch.equal(result[name], x), name
    finally:
        run.close()


def undisturbed_params(name):
    before = trained.STEPS
    trained.STEPS = STEPS
    try:
        return undisturbed(*trained.PROGRAMS[name])["params"]
    finally:
        trained.STEPS = before
