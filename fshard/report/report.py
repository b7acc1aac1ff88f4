"""`Report`: from the metrics of each step to numbers in writers, such as a progress bar.

Metrics of `train_step` are equal on all devices. In torch's loop a loss is that of a device's own
samples: with `mesh=` the mean over all devices is reported, weighted by samples, and samples are
summed: `loader.samples`, which is 0 on a device with an idle slice.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from time import perf_counter
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fshard.mesh.collectives.api import psum
from fshard.mesh.layout import Mesh
from fshard.mesh.spmd.run import device_of, is_outside, resolve_mesh, run_on_devices
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
    """Called once after each step with its metrics, of which numbers are passed to all writers.

    These are numbers, and tensors of one number.

    Args:
        writers: `Bar`, `JsonLines`, `TensorBoard`, `Tracker`, or any object with `write` and
            `close`.
        mesh: of the devices to average over, if the metrics are each device's own; a collective of
            all devices. Of a mesh with axes of layers it is that of the samples, such as
            mesh["data"]: else each sample counts once for each device that shares its layers.
        every: report every n-th step, and the first. Tensors are read only then.
        step: number of steps of an earlier run.
        clock: seconds.

    Outside of the mesh of a step its metrics are None: where the first of all devices may be
    outside, report `fs.broadcast_to(metrics, source=mesh)`.

    Added metrics: "samples_per_second", if "samples" is among them, and "memory": the peak bytes of
    the device, on a CPU of the process.

    >>> names = ("loss", "samples", "samples_per_second")
    >>> class Print:
    ...     def write(self, step, values):
    ...         print(step, {name: values[name] for name in names})
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
        not_writers = [repr(x) for x in writers if not _is_writer(x)]
        errors: list[str] = []
        if not_writers:
            errors.append(
                f"{', '.join(not_writers)} cannot write: a writer has write(step, values) and "
                "close()"
            )
        errors += count_errors(every=(every, 1), step=(step, 0))
        if errors:
            raise ValueError(f"Report: {'; '.join(errors)}.")
        self.writers = writers
        self.mesh = mesh
        self.every = every
        self.step = step
        self._clock = clock
        self._first_step = step + 1
        # Since the last report: its time, and the samples of all steps, also those between reports.
        self._last_time = clock()
        self._samples: float | Tensor = 0.0

    def __call__(self, metrics: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Count a step, and report its numbers, and tensors of one number; leave out others."""
        if metrics is not None and not isinstance(metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"a report takes numbers by their names, such as report(loss=0.5); got {metrics!r}."
            )
        all_metrics = {**(metrics or {}), **more}
        if "step" in all_metrics:
            raise ValueError(
                "a report counts steps itself: begin with Report(..., step=), and leave step out."
            )
        self.step += 1
        is_outside_of_mesh = self.mesh is not None and not self.mesh.is_member
        if is_outside_of_mesh:
            return
        if self._is_first():
            _validate_has_values(all_metrics)
        numbers = {name: x for name, x in all_metrics.items() if _is_number(x)}
        # A tensor's sum stays on its device, so that the host does not wait for it.
        self._samples = self._samples + numbers.get("samples", 0)
        if self.step % self.every == 0 or self.step == self._first_step:
            self._report(numbers)

    def __repr__(self) -> str:
        """Return the kinds of the writers, and the steps."""
        words = [type(writer).__name__ for writer in self.writers]
        words += [f"every={self.every}", f"step={self.step}"]
        return f"Report({', '.join(words)})"

    def _report(self, numbers: Mapping[str, Any]) -> None:
        """Pass numbers to the writers, on device 0."""
        values: dict[str, float] = {}
        for name, x in numbers.items():
            values[name] = float(x.item() if isinstance(x, Tensor) else x)
        samples = float(self._samples)
        self._samples = 0.0
        if self.mesh is not None:
            values, samples = _of_all(self.mesh, values, samples)
        if not self._is_first():
            return

        time = self._clock()
        if "samples" in values and time > self._last_time:
            values["samples_per_second"] = samples / (time - self._last_time)
        self._last_time = time
        if "memory" not in values:
            values["memory"] = float(peak_memory())
        for writer in self.writers:
            writer.write(self.step, dict(values))  # a copy, which the writer may keep

    def _is_first(self) -> bool:
        """Return True if the caller writes: device 0, that of the mesh if there is one, or all."""
        mesh = self.mesh
        if mesh is not None and not mesh.is_member:
            return False
        if mesh is not None and mesh.numbers is not None:
            return device_of(mesh) == 0
        scope = here()
        if scope is not None:
            return scope.device == 0
        return not dist.is_initialized() or dist.get_rank() == 0

    def close(self) -> None:
        """Close all writers."""
        if not self._is_first():
            return
        for writer in self.writers:
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def count_errors(**counts: tuple[Any, int]) -> list[str]:
    """List the arguments that are no integers, or less than a number."""
    errors: list[str] = []
    for name, (x, least) in counts.items():
        if type(x) is not int or x < least:
            errors.append(f"{name}= must be an integer >= {least}; got {x!r}")
    return errors


def _is_writer(x: Any) -> bool:
    return hasattr(x, "write") and hasattr(x, "close")


def _is_number(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() == 1 and not x.is_complex()
    return isinstance(x, Real)


def _validate_has_values(metrics: Mapping[str, Any]) -> None:
    """Raise on the device that writes, if it is outside of the mesh of the metrics."""
    has_values = [x is not None for x in metrics.values()]
    if not metrics or any(has_values):
        return
    names = ", ".join(metrics)
    raise ValueError(
        f"a report must have values on the first device, which writes; got {names} without, as "
        "outside of a mesh. Write report(fs.broadcast_to(metrics, source=mesh)), with the mesh of "
        "the step."
    )


def _of_all(
    mesh: Mesh, values: Mapping[str, float], samples: float
) -> tuple[dict[str, float], float]:
    """Return the means of all devices, weighted by samples, and the sums of samples."""
    if is_outside(mesh):
        raise ValueError(
            "Report(mesh=): outside of fs.run there is one process; its metrics are those of all "
            "devices already."
        )
    weight = values.get("samples", 1.0)
    # Of a device without samples even nan counts as 0.
    summands = [x * weight if weight else 0.0 for x in values.values()]
    row = torch.tensor([*summands, weight, samples], dtype=torch.float64).to(mesh.device_type)
    (total,) = run_on_devices(resolve_mesh(mesh), lambda device: psum(row, mesh.axis_names))
    *sums, total_weight, total_samples = total.tolist()

    means = dict(values)
    if total_weight:
        for name, x in zip(values, sums, strict=True):
            means[name] = x / total_weight
    if "samples" in values:
        means["samples"] = total_weight
    return means, total_samples


def peak_memory() -> int:
    """Return the most bytes that this device has had.

    Those of a GPU's tensors, else all that this process has had in memory.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, else in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
