"""How much hypothesis tries, and processes that the tests share."""

import gc
import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.helpers import foreign_backward
from tests.helpers.processes import HAS_FOREIGN_ENGINE, HAS_RULES, Processes
from tests.helpers.sampled import THOROUGH

pytest_plugins = ["pytester"]

# Programs of users: an import runs them, and they look for processes of torchrun.
collect_ignore = ["testing/scripts"]

# Several workers share the processors: more threads in each would only wait for each other.
# Programs that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in jobs of a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On CI a run must give what the run before gave; elsewhere every run looks at new examples and
# keeps its failures.
ON_CI = os.environ.get("CI", "").lower() in ("1", "true")
settings.register_profile(
    "fshard", deadline=None, max_examples=60, derandomize=ON_CI, print_blob=True
)
settings.register_profile("thorough", settings.get_profile("fshard"), max_examples=500)
settings.load_profile(os.environ.get("FSHARD_EXAMPLES", "fshard"))

if HAS_FOREIGN_ENGINE:  # here; `tests.helpers.processes` installs it in processes
    foreign_backward.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests of this run; refuse names of tests that hold an address: workers could not
    agree on them.
    """

    def is_left_out(item: pytest.Item) -> bool:
        is_repeated = "[gloo" in item.nodeid and "tests/mesh/" not in item.nodeid
        is_slow_proof = item.get_closest_marker("thorough") is not None
        return is_repeated or (is_slow_proof and not THOROUGH)

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_left_out(item)]
    if unlike := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError("These parameters need other ids:\n  " + "\n  ".join(unlike))


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU on which no memory may be misused."""
    from tests.mesh.layout.fake_gpu import FakeGpu  # after fshard's modules, which it changes

    gpu = FakeGpu(monkeypatch)
    yield gpu
    gpu.finish()


PRELOADED = [
    "__main__",
    "fshard.launching.worker",
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "fshard.testing.gpt",
    "fshard.command",
    "fshard.recovery.elastic",
    "fshard.refit",
]
"""Modules that tests in processes need: imported once, in the process that all others are forked
from.
"""

LLAMA = "transformers.models.llama.modeling_llama"
"""The model of most tests with transformers, whose import takes a process two seconds. It is
preloaded, too, if the files of the tests that run import transformers: each process would.
"""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what is imported from the garbage collector; start the process that others are forked
    from, if tests need it.
    """
    if HAS_RULES:
        # Processes of tests get it from `Processes`; a program that a test starts knows no such
        # backend.
        del os.environ["FSHARD_BACKEND"]
    gc.collect()
    gc.freeze()
    # Full collections visit all that was imported since, such as transformers: at the default of 10
    # they take an eighth of the time of all tests.
    gc.set_threshold(700, 10, 200)
    starts = any(
        {"link", "run_processes", "Processes"} & {*item.fixturenames, *vars(item.module)}
        for item in session.items
        if isinstance(item, pytest.Function)
    )
    if sys.platform == "linux" and starts:
        preloaded = [*PRELOADED, LLAMA] if "transformers" in sys.modules else PRELOADED
        multiprocessing.forkserver.set_forkserver_preload(preloaded)
        multiprocessing.forkserver.ensure_running()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and sys.platform == "linux":
        keep_on_a_processor(int(worker.removeprefix("gw")))


def keep_on_a_processor(worker: int) -> None:
    """Keep one worker of xdist on each processor; those beyond run wherever another one waits.

    The threads of virtual devices take turns, so they are fastest on one processor: those of two
    workers must not be on the same one.
    """
    processors = sorted(os.sched_getaffinity(0))
    if worker < len(processors):
        os.sched_setaffinity(0, {processors[worker]})


LINKS = {"rules": {}} if HAS_RULES else {"direct": {}, "gloo": {"FSHARD_DIRECT": "0"}}
"""The links of the processes of one machine: those by default, and those of processes on several
machines.
"""


@pytest.fixture(scope="session", params=LINKS)
def link(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment that gives processes one kind of link."""
    return LINKS[request.param]


@pytest.fixture(scope="session")
def two(link: dict[str, str]) -> Iterator[Processes]:
    """Two processes, for all tests that leave them as they were; over direct links each has a hash
    seed of its own.
    """
    with Processes(2, environment=link, fresh=link is LINKS.get("direct")) as pool:
        yield pool


@pytest.fixture(scope="session")
def four(link: dict[str, str]) -> Iterator[Processes]:
    """Four processes, for all tests that leave them as they were."""
    with Processes(4, environment=link) as pool:
        yield pool
