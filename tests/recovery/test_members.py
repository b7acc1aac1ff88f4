"""Processes go on without those that are killed, and with new ones; the oracle is a plain list of
who lives, and, for what they compute then, virtual devices.
"""

import random
import signal
import time
from functools import partial

import pytest

import fshard as fs
from tests.helpers.ended import wait_until
from tests.helpers.processes import Processes, not_under_rules  # noqa: F401, see conftest
from tests.helpers.sampled import thorough
from tests.recovery.programs import (
    POINTS,
    Run,
    die_at,
    digest,
    everything,
    fail_in_one,
    meet_in_folders_of_their_own,
    meet_without_folder,
    pids_in_memory,
    sum_on_two,
    work_in_a_loop,
)

LINKS = [
    {},
    {"FSHARD_DIRECT": "0"},
    {"FSHARD_CHECK": "1"},
    {"FSHARD_DIRECT": "0", "FSHARD_CHECK": "1"},
]


@pytest.fixture
def new_run(tmp_path):
    """Make a run; its processes end with the test."""
    runs = []

    def make(*arguments, **options):
        runs.append(Run(tmp_path, *arguments, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.mark.parametrize("has_folder", [True, False])
def test_survivors_go_on_until_one_is_left(new_run, has_folder):
    run = new_run(has_folder=has_folder)
    run.start(4)
    living = [0, 1, 2, 3]
    run.wait_for(living)
    for victim in (2, 0, 3):
        run.kill(victim)
        living.remove(victim)
        rows = run.wait_for(living)
        assert [row["rank"] for row in rows] == [*range(len(living))]
        assert all(row["count"] == len(living) for row in rows)
    run.finish(living)
    assert pids_in_memory().isdisjoint({process.pid for process in run.processes})


@pytest.mark.parametrize(
    "victims", [(0, 1), thorough((1, 3)), thorough((0, 3)), thorough((1, 2, 3)), (0, 1, 2)]
)
def test_several_may_die_at_once(new_run, victims):
    run = new_run()
    run.start(4)
    run.wait_for([0, 1, 2, 3])
    run.kill(*victims)
    living = [number for number in range(4) if number not in victims]
    run.wait_for(living)
    run.finish(living)


QUICK = {"after decide": 1, "after publish_store": 0}
"""Points that every run tries, with a victim."""
DEATHS = []
for _point in POINTS:
    # The first process serves the store.
    for _victim in [0] if "store" in _point else [0, 1]:
        is_quick = QUICK.get(_point) == _victim
        DEATHS.append((_point, _victim) if is_quick else thorough(_point, _victim))


@pytest.mark.parametrize(("point", "victim"), DEATHS)
def test_process_may_die_while_the_others_regroup(new_run, point, victim):
    run = new_run(patch=partial(die_at, point, victim))
    run.start(4)
    run.wait_for([0, 1, 2, 3])
    run.kill(3)
    living = [number for number in range(3) if number != victim]
    rows = run.wait_for(living)
    assert all(row["generation"] <= 2 for row in rows)
    run.finish(living)


@pytest.mark.thorough
@pytest.mark.parametrize("link", LINKS, ids=str)
def test_two_may_die_at_any_moment(new_run, tmp_path, link):
    for seed in range(20):
        draw = random.Random(seed)
        (tmp_path / str(seed)).mkdir()
        run = Run(tmp_path / str(seed), link)
        try:
            run.start(4)
            run.wait_for([0, 1, 2, 3])
            victims = draw.sample(range(4), 2)
            run.kill(victims[0])
            time.sleep(draw.random() * draw.choice([0, 0.01, 0.1]))
            run.kill(victims[1])
            living = [number for number in range(4) if number not in victims]
            run.wait_for(living)
            run.finish(living)
        finally:
            run.close()


@pytest.mark.parametrize(
    "link", [LINKS[0], thorough(LINKS[1]), thorough(LINKS[2]), LINKS[3]], ids=str
)
def test_worlds_that_follow_have_the_bits_of_virtual_devices(new_run, tmp_path, link):
    """2 -> 4 -> 3 -> 2 processes; each generation does everything that a world is for."""
    expected = {}
    for size in (2, 3, 4):
        mesh = fs.make_mesh({"d": size})
        expected[size] = digest(everything(mesh, tmp_path / f"virtual {size}"))

    run = new_run(link)
    run.start(2, work_in_a_loop)
    living = [0, 1]

    def check():
        rows = run.wait_for(living)
        assert {row["work"] for row in rows} == {expected[len(living)]}

    check()
    for number in (2, 3):
        run.start(1, work_in_a_loop)
        living.append(number)
        check()
    for number in (0, 2):
        run.kill(number)
        living.remove(number)
        check()
    run.finish(living)


def test_new_processes_get_numbers_that_no_process_had(new_run):
    run = new_run()
    run.start(2)
    run.wait_for([0, 1])
    run.start(1)
    run.wait_for([0, 1, 2])
    run.kill(1)
    run.wait_for([0, 2])
    run.start(1)
    run.wait_for([0, 2, 3])
    run.kill(3)
    run.wait_for([0, 2])
    run.finish([0, 2])


@pytest.mark.parametrize("stopped", [1, 0])
def test_process_that_is_stopped_is_left_behind(new_run, stopped):
    run = new_run(timeout=1.5)
    run.start(4)
    run.wait_for([0, 1, 2, 3])
    run.kill(3)
    run.wait_for([0, 1, 2])  # process 0 serves the store
    living = [number for number in range(3) if number != stopped]
    run.kill(stopped, by=signal.SIGSTOP)
    run.wait_for(living)
    run.kill(stopped, by=signal.SIGCONT)
    wait_until(lambda: "error" in run.last(stopped))
    assert run.last(stopped)["error"].startswith("LostProcessError")
    assert "timeout=" in run.last(stopped)["error"]
    run.finish(living)


def test_process_without_work_takes_the_place_of_a_lost_one(new_run):
    run = new_run()
    run.start(4, sum_on_two)
    run.wait_for([0, 1, 2, 3])
    run.kill(3)  # the others do not need it
    time.sleep(0.1)
    assert run.last(2)["numbers"] == [0, 1, 2, 3]
    run.kill(0)
    run.wait_for([1, 2])
    changes = [row for row in run.rows(2) if "change" in row]
    assert [row["change"] for row in changes] == ["regroup"]
    assert changes[0]["processor"] < 0.2
    run.finish([1, 2])
    assert run.last(1)["sum"] == 0b110


def test_process_without_work_hears_of_the_end(new_run):
    run = new_run()
    run.start(3, sum_on_two)
    run.wait_for([0, 1, 2])
    run.finish([0, 1, 2])
    assert run.last(2)["end"] == "spare"


def test_process_with_an_error_of_its_own_leaves(new_run):
    run = new_run()
    run.start(3, fail_in_one)
    run.wait_for([0, 2])
    assert run.last(1)["failed"]
    run.finish([0, 1, 2])


def test_machines_hear_each_other_through_the_folder(new_run):
    run = new_run(timeout=1.5)
    run.start(4, machines=["a", "a", "b", "b"])
    run.wait_for([0, 1, 2, 3])
    killed = run.kill(3)  # which process 2 sees
    rows = run.wait_for([0, 1, 2])
    assert rows[0]["at"] < killed + 1.5
    killed = run.kill(2)
    rows = run.wait_for([0, 1])
    assert rows[0]["at"] > killed + 0.4  # the last sign of life may be a second old
    run.start(1, machines=["c"])
    run.wait_for([0, 1, 4])
    run.finish([0, 1, 4])


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (meet_without_folder, "must be given a folder that all of them see"),
        (meet_in_folders_of_their_own, "folder must be a directory that all processes see"),
    ],
)
def test_machines_need_a_folder_that_all_see(new_run, main, text):
    run = new_run()
    run.folder.mkdir()
    run.start(2, main, machines=["a", "b"])
    wait_until(lambda: all("end" in run.last(index) for index in range(2)))
    assert all(text in run.last(index)["end"] for index in range(2))
    assert [*run.folder.rglob("fshard-run*")] == []
