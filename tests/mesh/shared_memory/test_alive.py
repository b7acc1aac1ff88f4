"""A process is alive until it has ended, also if no process waits for it; the oracle is what the test does to it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fshard.mesh.shared_memory.alive import ProcessId, this_process
from tests.helpers.ended import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is that of Linux")


def id_of(pid):
    here = this_process()
    columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessId(here.machine, pid, int(columns[19]))


def test_process_has_ended_once_it_is_killed_whether_its_parent_waits_or_not():
    child = subprocess.Popen(["sleep", "60"])
    process = id_of(child.pid)
    assert not process.has_ended
    child.send_signal(signal.SIGSTOP)
    assert not process.has_ended
    child.kill()
    wait_until(lambda: process.has_ended)  # it is a zombie
    child.wait()
    assert process.has_ended


def test_later_process_with_the_number_is_another_one():
    here = this_process()
    assert here == id_of(os.getpid())
    assert not here.has_ended
    assert here._replace(start=here.start - 1).has_ended
