"""The processes of tests: those of `fshard.testing`, under the rules of other machines where asked
for.

    FSHARD_BACKEND=nccl_rules      each function runs under the rules of NCCL: see `nccl_rules`
    FSHARD_FOREIGN_BACKWARD=1      each backward runs in a thread of another engine

Tests of processes take them from here, so that the suite can be run under either.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest

from fshard.mesh.spmd.deterministic import deterministic
from fshard.testing.processes import Processes as LibraryProcesses

RULES = {"FSHARD_BACKEND": "nccl_rules"}
"""The environment of processes under the rules of NCCL."""

HAS_RULES = os.environ.get("FSHARD_BACKEND") == RULES["FSHARD_BACKEND"]
"""True if all processes of tests are to use the rules of NCCL; programs that tests start do not."""

HAS_FOREIGN_ENGINE = bool(os.environ.get("FSHARD_FOREIGN_BACKWARD"))
"""True if all backwards are to run in threads of another engine."""


ONE_LINK = pytest.mark.parametrize("link", ["rules" if HAS_RULES else "direct"], indirect=True)
"""A mark for tests of `two` and `four` whose subject is no link: they run over the first kind alone.

The conformance suite compares every collective and its backward over all kinds.
"""


def not_under_rules(reason: str) -> pytest.MarkDecorator:
    """Mark a test that is left out under the rules of NCCL, for a reason."""
    return pytest.mark.skipif(HAS_RULES, reason=f"under the rules of NCCL: {reason}")


def sums_in_order() -> AbstractContextManager[None]:
    """Let sums over processes have the bits of virtual devices, where the backend adds in its own order."""
    return deterministic(HAS_RULES, "cpu")


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that processes run in place of a test's."""
    # Imported where asked for: processes import this file too, and the rules register a backend.
    if HAS_FOREIGN_ENGINE:
        from tests.helpers.foreign_backward import Foreign

        function = Foreign(function)
    if HAS_RULES:
        from tests.mesh.runtimes.nccl_rules import Ruled

        function = Ruled(function)
    return function


class Processes(LibraryProcesses):
    """A pool of processes, which run functions under the rules that are asked for."""

    def __init__(
        self, n: int, *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        variables = RULES if HAS_RULES else {}
        super().__init__(n, environment={**variables, **(environment or {})}, **options)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return super().run(wrapped(fn), *args, **kwargs)

    def run_last(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return super().run_last(wrapped(fn), *args, **kwargs)


def run_processes(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    backend: str = "gloo",
    environment: dict[str, str] | None = None,
    timeout: float = 60.0,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run a function in new processes, as `fshard.testing.run_processes` does."""
    options: Any = {"backend": backend, "environment": environment}
    with Processes(n, timeout=timeout, fresh=fresh, **options) as pool:
        return pool.run_last(fn, *args, **kwargs)
