"""`Profile`: Chrome traces of all devices that can be opened together in ui.perfetto.dev.

torch's profiler records a process. Virtual devices are threads of one, which are named in the
trace: each has its own file, as a process has, and work outside of devices is in host.json.

    device-0.json  device-1.json  ...  host.json
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self
from warnings import warn

import torch.distributed as dist
from torch import profiler
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
from torch.autograd import profiler as autograd_profiler

from fshard.errors import FshardError
from fshard.mesh.spmd.run import MARK, mark
from fshard.mesh.spmd.scope import here
from fshard.report.report import count_errors


class Profile:
    """Records some steps of training, of all devices of this process; call `step()` after each.

    Args:
        folder: of the files.
        wait: steps to skip first.
        warmup: steps in which the profiler itself warms up.
        active: steps to record.
        options: of torch.profiler.profile: with_stack, record_shapes, profile_memory, ...

    Inside of `fs.run` each device has its own, of which device 0's records all.

    >>> import torch, fshard as fs
    >>> from tempfile import TemporaryDirectory
    >>> spec = fs.P("data")
    >>> mesh = fs.make_mesh({"data": 2})
    >>> double = fs.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=spec, out_specs=spec)
    >>> with TemporaryDirectory() as folder:
    ...     with Profile(folder, wait=0, warmup=1, active=1) as profile:
    ...         for step in range(2):
    ...             y = double(torch.ones(4))
    ...             profile.step()
    ...     sorted(file.name for file in Path(folder).iterdir())
    ['device-0.json', 'device-1.json', 'host.json']
    """

    _recording: ClassVar = False

    def __init__(
        self, folder: str | Path, *, wait: int = 1, warmup: int = 1, active: int = 3, **options: Any
    ) -> None:
        errors = count_errors(wait=(wait, 0), warmup=(warmup, 0), active=(active, 1))
        if errors:
            raise ValueError(f"Profile: {'; '.join(errors)}.")
        self.folder = Path(folder)
        self._rank = dist.get_rank() if dist.is_initialized() else None
        scope = here()
        self._virtual_device: int | None = None
        is_first = True
        if scope is not None and scope.mesh.runtime == "virtual":
            self._virtual_device = scope.number
            is_first = scope.device == 0

        self._skipped_steps = wait + warmup
        self._profiler: profiler.profile | None = None
        if is_first:  # one of them records all threads
            settings: dict[str, Any] = {
                "schedule": profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
                "on_trace_ready": self._write,
                "experimental_config": _ExperimentalConfig(profile_all_threads=True),
                **options,
            }
            self._profiler = profiler.profile(**settings)

    def __enter__(self) -> Self:
        if self._profiler is not None:
            if Profile._recording or getattr(autograd_profiler, "_is_profiler_enabled", False):
                raise FshardError(
                    "Profile: another one is recording this process; torch's profiler does so once "
                    "at a time."
                )
            Profile._recording = True
            self._profiler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is None:
            return
        try:
            self._profiler.stop()
        finally:
            Profile._recording = False
        if self._profiler.step_num <= self._skipped_steps:
            warn(
                f"Profile recorded nothing: it was to begin after {self._skipped_steps} steps.",
                stacklevel=2,
            )

    def step(self) -> None:
        """End a step of training."""
        if self._virtual_device is not None:
            mark(self._virtual_device)  # that of `fs.run` was before the recording began
        if self._profiler is not None:
            self._profiler.step()

    def _write(self, recorded: Any) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
        self.folder.mkdir(parents=True, exist_ok=True)
        traces = by_device(trace["traceEvents"], os.getpid(), self._rank)
        for name, events in traces.items():
            device_trace = {**trace, "traceEvents": events}
            file = self.folder / f"{name}.json"
            file.write_text(json.dumps(device_trace), encoding="utf-8")


def by_device(
    events: list[dict[str, Any]], process: int, alone: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Return a trace's events by device, each device a process of the trace with its name.

    Args:
        events: as torch writes them.
        process: the recorded process.
        alone: its device, if the process is one device.

    >>> named = {"ph": "X", "name": f"{MARK}1", "pid": 7, "tid": 9}
    >>> product = {"ph": "X", "name": "mm", "pid": 7, "tid": 9}
    >>> by_device([named, product], 7)["device-1"][1]
    {'ph': 'X', 'name': 'mm', 'pid': 1, 'tid': 9}
    """
    device_of_thread: dict[Any, int] = {}
    for event in events:
        if event["name"].startswith(MARK):
            device_of_thread[event["tid"]] = int(event["name"].removeprefix(MARK))

    by_name: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["name"].startswith(MARK) or event["name"] == "process_name":
            continue
        device = alone if alone is not None else device_of_thread.get(event.get("tid"))
        name = "host" if device is None else f"device-{device}"
        if name not in by_name:
            number = process if device is None else device
            by_name[name] = [_process_title(name.replace("-", " "), number)]
        if device is not None and event.get("pid") == process:
            event = {**event, "pid": device}
        by_name[name].append(event)
    return by_name


def _process_title(title: str, number: int) -> dict[str, Any]:
    """Return the event of a trace that gives a process its name."""
    return {
        "ph": "M",
        "name": "process_name",
        "tid": 0,
        "args": {"name": title},
        "pid": number,
    }
