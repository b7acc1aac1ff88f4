"""Processes go on without those that are killed, and with new ones; the oracle is a plain list of
who lives.
"""

import signal
from functools import partial

import pytest

from tests.helpers.processes import HAS_RULES, Processes, not_under_rules  # noqa: F401
from tests.recovery.programs import POINTS, Run, die_at


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


@pytest.fixture
def run(new_run):
    return new_run()


def test_survivors_go_on_until_one_is_left(run):
    run.start(4)
    living = [0, 1, 2, 3]
    run.wait_for(living)
    for victim in (2, 0, 3):
        killed = run.kill(victim)
        before = [*living]
        living.remove(victim)
        rows = run.wait_for(living)
        assert all(row["before"] == before for row in rows)
        print([round(row["at"] - killed, 3) for row in rows])
    run.finish(living)


@pytest.mark.parametrize("victims", [(0, 1), (1, 3), (0, 1, 2)])
def test_several_may_die_at_once(run, victims):
    run.start(4)
    run.wait_for([0, 1, 2, 3])
    killed = run.kill(*victims)
    living = [number for number in range(4) if number not in victims]
    rows = run.wait_for(living)
    print([round(row["at"] - killed, 3) for row in rows])
    run.finish(living)


def test_new_processes_are_taken_up(run):
    run.start(2)
    run.wait_for([0, 1])
    run.start(1)
    run.wait_for([0, 1, 2])
    run.start(1)
    run.wait_for([0, 1, 2, 3])
    run.kill(1)
    run.wait_for([0, 2, 3])
    run.start(1)
    rows = run.wait_for([0, 2, 3, 4])
    assert all(row["before"] == [0, 2, 3] for row in rows)
    run.finish([0, 2, 3, 4])


def test_stopped_process_is_left_behind(new_run):
    run = new_run(timeout=2.0)
    run.start(3)
    run.wait_for([0, 1, 2])
    run.kill(1, by=signal.SIGSTOP)
    run.wait_for([0, 2])
    run.kill(1, by=signal.SIGCONT)
    from tests.helpers.ended import wait_until

    wait_until(lambda: "error" in run.last(1))
    print(run.last(1)["error"])
    assert "timeout=" in run.last(1)["error"]
    run.finish([0, 2])


@pytest.mark.parametrize(
    "environment",
    [{"FSHARD_DIRECT": "0"}, {"FSHARD_CHECK": "1"}, {"FSHARD_DIRECT": "0", "FSHARD_CHECK": "1"}],
    ids=str,
)
def test_over_other_links(new_run, environment):
    run = new_run(environment)
    run.start(4)
    run.wait_for([0, 1, 2, 3])
    for victim, living in ((0, [1, 2, 3]), (2, [1, 3])):
        killed = run.kill(victim)
        rows = run.wait_for(living)
        print(environment, [(round(row["at"] - killed, 3)) for row in rows])
    run.start(1)
    run.wait_for([1, 3, 4])
    run.finish([1, 3, 4])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_process_may_die_while_the_others_regroup(new_run, point, victim):
    run = new_run(patch=partial(die_at, point, victim))
    run.start(4)
    run.wait_for([0, 1, 2, 3])
    killed = run.kill(3)
    living = [number for number in range(3) if number != victim]
    rows = run.wait_for(living)
    print(point, victim, [round(row["at"] - killed, 3) for row in rows], rows[0]["generation"])
    run.finish(living)
