"""Each kind of program gives the same bits where autograd runs backwards in a thread of its own, as
on an accelerator.

All run in the same two processes, outside of `fs.run` unless they say so, as under torchrun.
"""

import importlib
import os

import pytest
import torch

from tests.helpers.foreign_backward import foreign_backward
from tests.helpers.foreign_programs import (
    PROGRAMS,
)
from tests.helpers.processes import Processes


def both(name):
    """Run a program with backwards in the caller's thread, then in another one; return both results
    and the count.
    """
    program, _ = PROGRAMS[name]
    if os.environ.get("FSHARD_BACKEND") == "nccl_rules":
        importlib.import_module("tests.mesh.runtimes.nccl_rules")  # registers it
    here = program()
    with foreign_backward() as engine:
        there = program()
    return here, there, engine.backwards


OVER_GLOO = {
    "stages",  # their messages have tests of their own
    "rematerialised",  # a unit that the caller has prefetched is waited for in the other thread: on the same stream
}
"""Programs that do not run over the rules of NCCL."""
CASES = [("gloo", name) for name in PROGRAMS] + [
    ("nccl_rules", name) for name in PROGRAMS if name not in OVER_GLOO
]


@pytest.fixture(scope="module")
def two(request):
    """Two processes; over the rules of NCCL they are as on CUDA but for the device."""
    with Processes(2, environment={"FSHARD_BACKEND": request.param}) as pool:
        yield pool


@pytest.mark.parametrize(("two", "name"), CASES, indirect=["two"])
def test_backward_in_a_foreign_thread_gives_equal_bits(two, name):
    for here, there, count in two.run(both, name):
        torch.testing.assert_close(there, here, rtol=0, atol=0)
        assert count == PROGRAMS[name][1]
