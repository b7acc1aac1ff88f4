"""Processes go on without those that are killed, and with new ones; the oracle is a plain list of
who lives.
"""

import pytest

from tests.helpers.processes import HAS_RULES, Processes, not_under_rules  # noqa: F401
from tests.recovery.programs import Run


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()


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
