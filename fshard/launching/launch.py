"""`launch`: a function in several processes, from a script or a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from fshard.errors import MeshError
from fshard.launching.pool import Processes
from fshard.mesh.runtimes.launchers import launched, process_count, process_index
from fshard.mesh.spmd.run import error_of_deferred
from fshard.mesh.spmd.scope import here

Result = TypeVar("Result")


def launch(
    fn: Callable[..., Result],
    *args: Any,
    processes: int,
    device: Literal["cpu", "cuda"] | None = None,
    timeout: float | None = None,
    elastic: bool = False,
    **kwargs: Any,
) -> list[Result]:
    """Run `fn(*args, **kwargs)` in new processes of this machine; return results in rank order.

    In `fn`, `fs.make_mesh({"data": 4})` is a mesh of the processes, as under torchrun. Their output
    is displayed here line by line. An exception in a process is raised here, with its traceback as
    a note, and the others are ended, as by Ctrl-C and at the end of this process. All processes end
    with the call.

    Functions of modules are pickled by name. Those of a notebook or of the running script, lambdas,
    and nested functions are pickled by value, with the globals that they use, if cloudpickle is
    installed. The script itself is not run again, so `if __name__ == "__main__"` is not needed.
    Settings of torch in this process, such as `torch.set_default_dtype`, do not reach the others:
    call these functions in `fn`.

    Args:
        fn: the function.
        args: of `fn` in every process.
        processes: number of processes.
        device: "cpu" hides the GPUs; "cuda" requires one. Default as in `make_mesh`: GPUs if there
            are any, each process its own, or shared if there are fewer.
        timeout: seconds for the call; default: unlimited.
        elastic: let the other processes go on when one dies or raises, for functions in
            `fs.elastic`. Returned are the results of those that returned, in rank order, without
            the others; each loss is a line on stderr. It is an error if none has returned, and an
            exception is raised if no process returned after it. Another call, or
            `fshard run --elastic`, starts more processes for a run with a folder.
        kwargs: of `fn` in every process.

        def total(scale):
            mesh = fs.make_mesh({"data": fs.mesh.process_count()})
            return fs.run(lambda: fs.psum(torch.tensor(scale), "data"), mesh=mesh)[0]

        fs.launch(total, 0.5, processes=4)  # [tensor(2.), tensor(2.), tensor(2.), tensor(2.)]
    """
    _validate(fn, processes, device, timeout, elastic)
    # One thread each, as under torchrun: the processes share the processors.
    threads = os.environ.get("OMP_NUM_THREADS") or "1"
    environment = {"OMP_NUM_THREADS": threads}
    backend = "gloo" if device == "cpu" else "nccl"  # the latter where there are GPUs, and enough
    with Processes(
        processes,
        backend=backend,
        environment=environment,
        timeout=timeout,
        shown=True,
        elastic=elastic,
    ) as pool:
        return pool.run_last(fn, *args, **kwargs)


def _validate(fn: Any, processes: Any, device: Any, timeout: Any, elastic: Any) -> None:
    """Raise one error with everything that is wrong with a call."""
    errors: list[str] = []
    deferred = error_of_deferred("fn", fn).removesuffix(".")
    if deferred:
        errors.append(deferred)
    if not callable(fn):
        errors.append(f"fn must be a function; got {fn!r}")

    is_integer = isinstance(processes, int) and not isinstance(processes, bool)
    if not is_integer or processes < 1:
        errors.append(f"processes must be an integer >= 1; got {processes!r}")

    if device not in (None, "cpu", "cuda"):
        errors.append(f'device must be "cpu" or "cuda"; got {device!r}')
    if device == "cuda" and not torch.cuda.is_available():
        errors.append('device="cuda" needs a GPU, but torch sees none')

    is_number = isinstance(timeout, int | float)
    if timeout is not None and not (is_number and timeout > 0):
        errors.append(f"timeout must be a number of seconds; got {timeout!r}")

    if not isinstance(elastic, bool):
        errors.append(f"elastic must be True or False; got {elastic!r}")

    if here() is not None:
        errors.append("this code runs on a device of a mesh, and starts no processes")
    elif launched():
        errors.append(
            f"this is process {process_index()} of {process_count()} that were started together, "
            "and starts no others: make the mesh here, with fs.make_mesh. If a file that the "
            "processes import has called fs.launch, put that call below "
            '`if __name__ == "__main__":`'
        )

    if errors:
        raise MeshError(f"fs.launch cannot start: {'; '.join(errors)}.")
