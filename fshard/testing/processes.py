"""`run_processes`: a function in real processes, for tests.

`Processes`, a pool that stays for several calls, is that of `fs.launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fshard.launching.pool import Processes

__all__ = ["Processes", "run_processes"]

Result = TypeVar("Result")


def run_processes(
    fn: Callable[..., Result],
    n: int,
    *args: Any,
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Result]:
    """Run `fn(*args, **kwargs)` in `n` new processes, set up as by torchrun; return all results.

    Args:
        fn: a picklable function, at the top level of a module. `fs.make_mesh({"data": n})` in it is
            a process mesh.
        n: number of processes.
        args: of `fn` in every process.
        backend: "gloo" (on CPUs, whatever GPUs there are) or "nccl".
        environment: more variables for the processes, such as {"FSHARD_CHECK": "1"}.
        timeout: seconds that `fn` may take.
        fresh: start each process as a new interpreter, with its own hash seed, as torchrun does. It
            takes seconds; otherwise, on Linux, they are forked from one process that has imported
            torch.
        kwargs: of `fn` in every process.

    Raises the exception of the first process to fail, with its traceback and the state of the
    others as notes; a RuntimeError if a process died, or after the timeout. All processes end with
    the call.

        def total():
            return fs.run(lambda: fs.psum(torch.ones(2), "data"), mesh=fs.make_mesh({"data": 2}))[0]

        assert [x.tolist() for x in run_processes(total, 2)] == [[2, 2], [2, 2]]
    """
    with Processes(
        n, backend=backend, environment=environment, timeout=timeout, fresh=fresh
    ) as pool:
        return pool.run_last(fn, *args, **kwargs)
