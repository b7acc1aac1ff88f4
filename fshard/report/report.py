"""`Report`: from the metrics of each step to numbers in writers, such as a progress bar.

Metrics of `train_step` are equal on all devices. In torch's loop a loss is that of a device's own samples: with
`mesh=` the mean over all devices is reported, weighted by samples, and samples are summed: `loader.samples`, which is
0 on a device with an idle slice.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from time import perf_counter
from typing import Any, Protocol, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fshard.mesh.collectives.api import psum
from fshard.mesh.layout import Mesh
from fshard.mesh.spmd.run import is_outside, resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import here


class Writer(Protocol):
    """Destination of numbers. `write` may open files; it is called on one device only."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        ...

    def close(self) -> None:
        """Finish; what has been written stays."""
        ...


class Report:
    """Called once after each step with its metrics; numbers, and tensors of one number, are passed to all writers.

    Args:
        writers: `Bar`, `JsonLines`, `TensorBoard`, or any object with `write` and `close`.
        mesh: of the devices to average over, if the metrics are each device's own; a collective of all devices.
        every: report every n-th step, and the first. Tensors are read only then.
        step: number of steps of an earlier run.
        clock: seconds.

    Added metrics: "samples_per_second", if "samples" is among them, and "memory": the peak bytes of the device, on a
    CPU of the process.

    >>> class Print:
    ...     def write(self, step, values):
    ...         print(step, {name: values[name] for name in ("loss", "samples", "samples_per_second")})
    ...     def close(self):
    ...         print("closed")
    >>> ticks = iter(range(10))
    >>> with Report(Print(), every=2, clock=lambda: next(ticks)) as report:
    ...     for step in range(4):
    ...         report({"loss": torch.tensor(2.0**-step), "samples": 8, "rows": torch.ones(8)})
    1 {'loss': 1.0, 'samples': 8.0, 'samples_per_second': 8.0}
    2 {'loss': 0.5, 'samples': 8.0, 'samples_per_second': 8.0}
    4 {'loss': 0.125, 'samples': 8.0, 'samples_per_second': 16.0}
    closed
    """

    def __init__(
        self,
        *writers: Writer,
        mesh: Mesh | None = None,
        every: int = 1,
        step: int = 0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        strange = ", ".join(
            repr(x) for x in writers if not (hasattr(x, "write") and hasattr(x, "close"))
        )
        errors = (
            [f"{strange} cannot write: a writer has write(step, values) and close()"]
            if strange
            else []
        )
        errors += count_errors(every=(every, 1), step=(step, 0))
        if errors:
            raise ValueError(f"Report: {'; '.join(errors)}.")
        self.writers, self.mesh, self.every, self.step = writers, mesh, every, step
        self._clock, self._first = clock, step + 1
        self._since, self._samples = clock(), cast("float | Tensor", 0.0)

    def __call__(self, metrics: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Count a step, and report it: numbers, and tensors of one number; others are left out."""
        if metrics is not None and not isinstance(metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"a report takes numbers by their names, such as report(loss=0.5); got {metrics!r}."
            )
        if "step" in {**(metrics or {}), **more}:
            raise ValueError(
                "a report counts steps itself: begin with Report(..., step=), and leave step out."
            )
        self.step += 1
        numbers = {name: x for name, x in {**(metrics or {}), **more}.items() if _is_number(x)}
        self._samples = self._samples + numbers.get(
            "samples", 0
        )  # a tensor's sum stays on its device
        if self.step % self.every and self.step != self._first:
            return
        values = {
            name: float(x.item() if isinstance(x, Tensor) else x) for name, x in numbers.items()
        }
        samples, self._samples = float(self._samples), 0.0
        if self.mesh is not None:
            values, samples = _of_all(self.mesh, values, samples)
        if not _is_first():
            return
        time = self._clock()
        if "samples" in values and time > self._since:
            values["samples_per_second"] = samples / (time - self._since)
        self._since = time
        for writer in self.writers:
            writer.write(
                self.step, {**values, "memory": values.get("memory", float(peak_memory()))}
            )

    def close(self) -> None:
        """Close all writers."""
        for writer in self.writers if _is_first() else ():
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def count_errors(**counts: tuple[Any, int]) -> list[str]:
    """List the arguments that are no integers, or less than a number."""
    unfit = {
        name: (x, least) for name, (x, least) in counts.items() if type(x) is not int or x < least
    }
    return [
        f"{name}= must be an integer >= {least}; got {x!r}" for name, (x, least) in unfit.items()
    ]


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex())


def _is_first() -> bool:
    """Return True if the caller is device 0, or runs all devices."""
    if (scope := here()) is not None:
        return scope.device == 0
    return not dist.is_initialized() or dist.get_rank() == 0


def _of_all(
    mesh: Mesh, values: Mapping[str, float], samples: float
) -> tuple[dict[str, float], float]:
    """Return the means of all devices, weighted by samples, and the sums of samples."""
    if is_outside(mesh):
        raise ValueError(
            "Report(mesh=): outside of fs.run there is one process; its metrics are those of all devices already."
        )
    weight = values.get("samples", 1.0)
    row = torch.tensor(
        [*(x * weight if weight else 0.0 for x in values.values()), weight, samples],
        dtype=torch.float64,
    )
    row = row.to(mesh.device_type)
    (total,) = run_on_devices(resolve_mesh(mesh), lambda device: psum(row, mesh.axis_names))
    *sums, weight, samples = total.tolist()
    means = (
        {name: x / weight for name, x in zip(values, sums, strict=True)} if weight else dict(values)
    )
    return (means | {"samples": weight} if "samples" in values else means), samples


def peak_memory() -> int:
    """Return the most bytes that this device has had: a GPU's tensors, else all that this process has had in memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
