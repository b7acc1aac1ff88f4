"""The pytest plugin: a mesh for a test, and the same tests on processes.

    @pytest.mark.mesh(data=4, model=2)
    def test_it(mesh):                      # a virtual mesh; {"data": 4} without the marker
        ...

The fixture `certified` compares a program of torch.distributed, or a script, with one process. With
`--certificates=FOLDER` each of its certificates is written there as JSON and as HTML.

`pytest --mesh-runtime=gloo` runs each test that has the marker or the fixture in as many processes
as its mesh has devices, set up as by torchrun: each process runs pytest on that test alone. The
processes are reused by later tests. An exception in a process is raised here; a skip is a skip, and
`xfail` is evaluated here. A test that hypothesis draws examples for needs
`suppress_health_check=[HealthCheck.function_scoped_fixture]`.

Every pytest loads this module where fshard is installed, so imports are delayed.
"""

from __future__ import annotations

import os
import re
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from fshard.mesh.layout.mesh import Mesh
    from fshard.testing.certificate import Certificate
    from fshard.testing.processes import Processes

DEFAULT = {"data": 4}
"""The axes of a test's mesh without a marker."""
TIMEOUT = 120.0
"""Seconds that one test may take on processes."""

_pools: pytest.StashKey[dict[int, Processes]] = pytest.StashKey()
"""The processes of tests, by their number: they stay for the next test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--mesh-runtime` and `--certificates`."""
    group = parser.getgroup("fshard")
    group.addoption(
        "--mesh-runtime",
        choices=("virtual", "gloo"),
        default="virtual",
        help="where tests with a mesh run: on virtual devices, or in a process for every device",
    )
    group.addoption(
        "--certificates",
        metavar="FOLDER",
        help="where the fixture `certified` writes its certificates, as JSON and as HTML",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "mesh(**axes): the axes of the test's mesh, such as mesh(data=4, model=2)"
    )
    config.stash[_pools] = {}


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the processes end."""
    for pool in config.stash.get(_pools, {}).values():
        pool.close()


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """Give a mesh with the axes of `@pytest.mark.mesh(...)`: virtual, or of processes."""
    from fshard.mesh.layout.make import make_mesh

    runtime = "process" if _is_one_of_many() else "virtual"
    return make_mesh(_axes(request.node), runtime=runtime)


@pytest.fixture(scope="session")
def certified(pytestconfig: pytest.Config) -> Callable[..., Any]:
    """Give `certify_program` whose processes stay for the next test; of a path `certify_script`.

    It raises with the table unless `check=False`.
    """
    from fshard.testing.programs import certify_program
    from fshard.testing.scripts import certify_script

    pools = pytestconfig.stash[_pools]
    folder = pytestconfig.getoption("--certificates")

    def certify(program: Any, meshes: Any, *, check: bool = True, **options: Any) -> Any:
        if isinstance(program, str | Path):
            certificate = certify_script(program, meshes, **options)
        else:
            certificate = certify_program(program, meshes, processes=pools, **options)
        if folder is not None:
            _write(certificate, Path(folder))
        return certificate.check() if check else certificate

    return certify


def _write(certificate: Certificate, folder: Path) -> None:
    """Write a certificate under the name of the test that runs; one test may have several."""
    from fshard.testing.certificate_page import certificate_page

    name, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")  # "tests/test_x.py::test (call)"
    stem = re.sub(r"\W+", "-", name).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + len([*folder.glob(f"{stem}.*.json")])
    (folder / f"{stem}.{number}.json").write_text(certificate.json(), encoding="utf-8")
    (folder / f"{stem}.{number}.html").write_text(certificate_page(certificate), encoding="utf-8")


def _axes(node: pytest.Item) -> dict[str, int]:
    """Return the axes of a test's mesh."""
    marker = node.get_closest_marker("mesh")
    if marker is None:
        return dict(DEFAULT)
    if marker.args:
        raise pytest.UsageError(f"{node.nodeid}: axes have names: write @pytest.mark.mesh(data=4).")
    return dict(marker.kwargs or DEFAULT)


def _is_one_of_many() -> bool:
    """Return True if this pytest is one of several, started here, by torchrun, srun or mpirun."""
    from fshard.mesh.runtimes.launchers import launched

    return launched()


# -- in the pytest that the user started -----------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the fixtures of tests that will run elsewhere to those processes."""
    if config.getoption("--mesh-runtime") == "gloo" and not _is_one_of_many():
        for item in items:
            if isinstance(item, pytest.Function) and _has_mesh(item):
                item.stash[_elsewhere] = True
                item.fixturenames = []


_elsewhere = pytest.StashKey[bool]()


def _has_mesh(item: pytest.Function) -> bool:
    """Return True if a test has the marker, or uses this plugin's fixture and not another one of that name."""
    fixtures: Any = getattr(item, "_fixtureinfo", None)
    definitions = fixtures.name2fixturedefs.get("mesh", ()) if fixtures is not None else ()
    is_ours = any(definition.func.__module__ == __name__ for definition in definitions[-1:])
    return item.get_closest_marker("mesh") is not None or is_ours


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test in a process per device of its mesh, and raise its exception here."""
    __tracebackhide__ = True
    if not pyfuncitem.stash.get(_elsewhere, False):
        return None
    from fshard.testing.processes import Processes

    config = pyfuncitem.config
    pools = config.stash[_pools]
    n = prod(_axes(pyfuncitem).values())
    if n not in pools:
        pools[n] = Processes(n)
    pool = pools[n]
    pool.timeout = TIMEOUT
    raised: BaseException | None = None
    try:
        pool.run(run_one_test, _arguments(config, pyfuncitem))
    except SkippedThere as skipped:
        raised = pytest.skip.Exception(str(skipped), _use_item_location=True)
    except BaseException as error:
        raised = error.with_traceback(None)
    # Outside of `except`, where a skip would have SkippedThere as its context.
    if raised is not None:
        raise raised
    return True


def _arguments(config: pytest.Config, item: pytest.Function) -> list[str]:
    """Return the command line for one test.

    It has this pytest's own settings, but nothing that chooses or reports tests.
    """
    path, separator, name = item.nodeid.partition("::")
    options = [f"--rootdir={config.rootpath}"]
    if config.inipath is not None:
        options += ["-c", str(config.inipath)]
    for plugin in ["no:cacheprovider", *(config.getoption("plugins") or ())]:
        options += ["-p", plugin]
    for setting in config.getoption("override_ini") or ():
        options += ["-o", setting]
    rules = [*(config.getoption("pythonwarnings") or ())]
    rules.append("ignore:Module already imported:pytest.PytestAssertRewriteWarning")
    for rule in rules:
        options += ["-W", rule]
    options += ["-q", "--no-header"]
    options.append("--runxfail")  # xfail is evaluated in the pytest that the user started
    if config.pluginmanager.hasplugin("hypothesispytest"):
        options.append("--hypothesis-seed=0")  # every process must draw the same examples
    return [*options, f"{config.rootpath / path}{separator}{name}"]


# -- in each of the processes ----------------------------------------------------------------------


class SkippedThere(Exception):
    """Carries the reason of a skip: pytest's own exception cannot be pickled."""


class _Observer:
    """Stores the exception of a test."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self.ran = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self.ran = True
        if not report.passed and self.raised is None and call.excinfo is not None:
            self.raised = call.excinfo.value
        return report


def run_one_test(arguments: list[str]) -> None:
    """Run pytest on one test, as one process of several.

    Raises the test's exception, with pytest's output as a note.
    """
    import contextlib
    import io
    import random

    import torch

    torch.manual_seed(0)  # the test before may have drawn differently in each process
    random.seed(0)
    observer = _Observer()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(arguments, plugins=[observer])
    if observer.raised is None and code == pytest.ExitCode.OK and observer.ran:
        return
    if isinstance(observer.raised, pytest.skip.Exception):
        raise SkippedThere(observer.raised.msg)
    error = observer.raised
    if error is None:
        error = RuntimeError(f"pytest {' '.join(arguments)} ended with {code!r}.")
    error.__notes__ = [*getattr(error, "__notes__", []), output.getvalue()]
    raise error.with_traceback(None)
