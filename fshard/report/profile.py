"""`Profile`: Chrome traces of all devices that can be opened together in ui.perfetto.dev.

torch's profiler records a process. Virtual devices are threads of one, which are named in the trace: each has its own
file, as a process has, and work outside of devices is in host.json.

    device-0.json  device-1.json  ...  host.json
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
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
    >>> double = fs.shard_map(lambda x: 2 * x, mesh=fs.make_mesh({"data": 2}), in_specs=fs.P("data"), out_specs=fs.P("data"))
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
        self.folder = Path(folder)
        scope = here()
        self._alone = dist.get_rank() if dist.is_initialized() else None
        self._virtual = (
            scope.device if scope is not None and scope.mesh.runtime == "virtual" else None
        )
        if errors := count_errors(wait=(wait, 0), warmup=(warmup, 0), active=(active, 1)):
            raise ValueError(f"Profile: {'; '.join(errors)}.")
        self._begins = wait + warmup
        plan = profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        settings: dict[str, Any] = {"schedule": plan, "on_trace_ready": self._write, **options}
        config = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = (
            profiler.profile(experimental_config=config, **settings) if not self._virtual else None
        )

    def __enter__(self) -> Self:
        if self._profiler is not None:
            if Profile._recording or getattr(autograd_profiler, "_is_profiler_enabled", False):
                raise FshardError(
                    "Profile: another one is recording this process; torch's profiler does so once at a time."
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
        if self._profiler.step_num <= self._begins:
            warn(
                f"Profile recorded nothing: it was to begin after {self._begins} steps.",
                stacklevel=2,
            )

    def step(self) -> None:
        """End a step of training."""
        if self._virtual is not None:
            mark(self._virtual)
        if self._profiler is not None:
            self._profiler.step()

    def _write(self, recorded: Any) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, events in by_device(trace["traceEvents"], os.getpid(), self._alone).items():
            device_trace = {**trace, "traceEvents": events}
            (self.folder / f"{name}.json").write_text(json.dumps(device_trace), encoding="utf-8")


def by_device(
    events: list[dict[str, Any]], process: int, alone: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Return a trace's events by device, each device a process of the trace with its name.

    Args:
        events: as torch writes them.
        process: the recorded process.
        alone: its device, if the process is one device.

    >>> events = [{"ph": "X", "name": f"{MARK}1", "pid": 7, "tid": 9}, {"ph": "X", "name": "mm", "pid": 7, "tid": 9}]
    >>> by_device(events, 7)["device-1"][1]
    {'ph': 'X', 'name': 'mm', 'pid': 1, 'tid': 9}
    """
    threads = {
        e["tid"]: int(e["name"].removeprefix(MARK)) for e in events if e["name"].startswith(MARK)
    }
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        device = threads.get(event.get("tid")) if alone is None else alone
        name = "host" if device is None else f"device-{device}"
        if event["name"].startswith(MARK) or event["name"] == "process_name":
            continue
        if name not in by_name:
            title = {
                "ph": "M",
                "name": "process_name",
                "tid": 0,
                "args": {"name": name.replace("-", " ")},
            }
            by_name[name].append({**title, "pid": process if device is None else device})
        by_name[name].append(
            {**event, "pid": device}
            if device is not None and event.get("pid") == process
            else event
        )
    return dict(by_name)
