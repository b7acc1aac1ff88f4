"""Events with start and end, simulated or measured by `timeline`, and their export for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Rational
from time import perf_counter
from typing import NamedTuple

from fshard.pipeline.schedule.actions import COMPUTE, MESSAGES, SENDS, Action

Number = int | float | Fraction
_LANES = ("compute", "messages", "weights")


class Event(NamedTuple):
    """One action of one device, and when it began and ended.

    >>> print(Event(1, Action.parse("2F0"), 3, 5))
    2F0 on device 1 from 3 to 5
    """

    device: int
    action: Action
    start: Number
    end: Number

    def __str__(self) -> str:
        return f"{self.action} on device {self.device} from {self.start} to {self.end}"


def to_chrome_trace(events: Iterable[Event], *, unit: float = 1) -> str:
    """Write events as JSON for ui.perfetto.dev and chrome://tracing, with an arrow for each message.

    A device is a process of the trace, with a line each for computation, messages and weights.

    Args:
        events: in any order.
        unit: one unit of their time in microseconds: 1e6 for seconds.

    >>> print(to_chrome_trace([Event(1, Action.parse("2F0"), 3, 5)]))
    {"traceEvents": [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "device 1"}},
    {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "compute"}},
    {"ph": "X", "pid": 1, "tid": 0, "name": "2F0", "cat": "F", "ts": 3.0, "dur": 2.0}
    ]}
    """
    records: list[dict[str, object]] = []
    names: dict[str, dict[str, object]] = {}
    for device, action, start, end in events:
        lane = (
            "compute"
            if action.kind in COMPUTE
            else "messages"
            if action.kind in MESSAGES
            else "weights"
        )
        line = {"pid": device, "tid": _LANES.index(lane)}
        names[f"{device:9}"] = {
            "ph": "M",
            "pid": device,
            "name": "process_name",
            "args": {"name": f"device {device}"},
        }
        names[f"{device:9} {lane}"] = {
            "ph": "M",
            **line,
            "name": "thread_name",
            "args": {"name": lane},
        }
        begin, length = float(start) * unit, float(end - start) * unit
        records.append(
            {"ph": "X", **line, "name": str(action), "cat": action.kind, "ts": begin, "dur": length}
        )
        if action.kind in MESSAGES:
            arrow = (
                {"ph": "s", "id": str(action)}
                if action.kind in SENDS
                else {"ph": "f", "bp": "e", "id": str(action.partner)}
            )
            records.append(
                {**arrow, **line, "name": "message", "cat": "message", "ts": begin + length / 2}
            )
    lines = map(json.dumps, [*(names[key] for key in sorted(names)), *records])
    return '{"traceEvents": [\n' + ",\n".join(lines) + "\n]}"


@dataclass(frozen=True)
class Timeline:
    """Measured events, in the order in which they ended; in seconds of a clock shared by the processes of a machine.

    A device is its number in the mesh, also where the mesh has other axes, such as "data".
    """

    events: list[Event] = field(default_factory=list[Event])

    def to_chrome_trace(self) -> str:
        """Write it as the JSON that ui.perfetto.dev and chrome://tracing open; several processes' can be opened together."""
        return to_chrome_trace(self.events, unit=1e6)


@contextmanager
def timeline() -> Generator[Timeline]:
    """Record the actions of all pipelines that run in the block, with times, on the devices of this process.

    Waiting for a message, and sending one, are actions, named as in a schedule with messages. On a GPU the times are
    those of kernel launches.

    >>> import torch, fshard as fs
    >>> schedule = fs.pipeline_schedule("gpipe", stages=2, microbatches=1)
    >>> step = fs.pipeline.pipelined([lambda w, x: w * x] * 2, schedule, lambda y, x: y.sum(), mesh=fs.make_mesh({"pipe": 2}))
    >>> with timeline() as run:
    ...     outcome = step([torch.tensor(2.0), torch.tensor(3.0)], [torch.ones(1)])
    >>> [str(event.action) for event in run.events if event.device == 1]
    ['1RECV_F0', '1F0', '1SEND_B0', '1B0']
    """
    opened = Timeline()
    _open.append(opened)
    try:
        yield opened
    finally:
        _open[:] = [timeline for timeline in _open if timeline is not opened]


_open: list[Timeline] = []


class Recorder:
    """Records the actions of one device in all open timelines."""

    def __init__(self, device: int, timelines: Sequence[Timeline]) -> None:
        self._device, self._timelines = device, timelines
        self._received: Number = 0.0

    def record(self, action: Action, began: float) -> None:
        """Record something that ends now; a computation began with the last message that it waited for."""
        event = Event(self._device, action, max(began, self._received), perf_counter())
        for timeline in self._timelines:
            timeline.events.append(event)
        if action.kind in MESSAGES - SENDS:
            self._received = event.end


def recorder_of(device: int) -> Recorder | None:
    """Return the recorder of a device in the open timelines, if there are any."""
    return Recorder(device, tuple(_open)) if _open else None


def rounded(number: Number) -> str:
    """Format a number in at most a few digits, a fraction as such."""
    short = isinstance(number, Rational) and number.denominator < 1000
    return str(number) if short else f"{float(number):.4g}"
