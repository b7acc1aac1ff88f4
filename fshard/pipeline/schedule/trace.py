"""Events with start and end, simulated or measured by `timeline`.

They are exported for Perfetto and chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Rational
from time import perf_counter
from typing import NamedTuple, TypeVar

from fshard.pipeline.schedule.actions import COMPUTE, MESSAGES, RECEIVES, SENDS, Action

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


# -- export ----------------------------------------------------------------------------------------


def to_chrome_trace(events: Iterable[Event], *, unit: float = 1) -> str:
    """Write events as JSON for ui.perfetto.dev and chrome://tracing.

    A device is a process of the trace, with a line each for computation, messages and weights, and
    each message is an arrow.

    Args:
        events: of any devices.
        unit: one unit of their time in microseconds: 1e6 for seconds.

    >>> print(to_chrome_trace([Event(1, Action.parse("2F0"), 3, 5)]))
    {"traceEvents": [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "device 1"}},
    {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "compute"}},
    {"ph": "X", "pid": 1, "tid": 0, "name": "2F0", "cat": "F", "ts": 3.0, "dur": 2.0}
    ]}
    """
    events = list(events)
    records = [*_name_records(events)]
    for event in events:
        records += _event_records(event, unit)
    lines = [json.dumps(record) for record in records]
    return '{"traceEvents": [\n' + ",\n".join(lines) + "\n]}"


def _name_records(events: Iterable[Event]) -> Iterable[dict[str, object]]:
    """Yield the names of devices and of their lines, device by device."""
    lanes_of_device: dict[int, set[str]] = {}
    for event in events:
        lanes_of_device.setdefault(event.device, set()).add(_lane_of(event.action))

    for device, lanes in sorted(lanes_of_device.items()):
        name = {"name": f"device {device}"}
        yield {"ph": "M", "pid": device, "name": "process_name", "args": name}
        for lane in sorted(lanes):
            line = _line_of(device, lane)
            yield {"ph": "M", **line, "name": "thread_name", "args": {"name": lane}}


def _event_records(event: Event, unit: float) -> Iterable[dict[str, object]]:
    """Yield an event, and of a message one end of its arrow: Perfetto joins ends with one id."""
    device, action, start, end = event
    line = _line_of(device, _lane_of(action))
    time = float(start) * unit
    duration = float(end - start) * unit
    yield {
        "ph": "X",
        **line,
        "name": str(action),
        "cat": action.kind,
        "ts": time,
        "dur": duration,
    }
    if action.kind not in MESSAGES:
        return

    if action.kind in SENDS:
        arrow = {"ph": "s", "id": str(action)}
    else:
        arrow = {"ph": "f", "bp": "e", "id": str(action.partner)}
    # "bp": "e" binds an arrow to the event that encloses its end, so ends are in the middle.
    yield {**arrow, **line, "name": "message", "cat": "message", "ts": time + duration / 2}


def _lane_of(action: Action) -> str:
    if action.kind in COMPUTE:
        return "compute"
    if action.kind in MESSAGES:
        return "messages"
    return "weights"


def _line_of(device: int, lane: str) -> dict[str, object]:
    return {"pid": device, "tid": _LANES.index(lane)}


# -- measurement -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """Measured events, in the order in which they ended.

    Their times are seconds of a clock that the processes of a machine share. A device is its number
    in the mesh, also where the mesh has other axes, such as "data".
    """

    events: list[Event] = field(default_factory=list[Event])

    def __repr__(self) -> str:
        """Return the number of events, of their devices, and the seconds between first and last."""
        if not self.events:
            return "Timeline(no events)"
        devices = len({event.device for event in self.events})
        begin = min([event.start for event in self.events])
        end = max([event.end for event in self.events])
        seconds = rounded(end - begin)
        return f"Timeline(events={len(self.events)}, devices={devices}, seconds={seconds})"

    def to_chrome_trace(self) -> str:
        """Write it as JSON for ui.perfetto.dev and chrome://tracing.

        The files of several processes can be opened together.
        """
        return to_chrome_trace(self.events, unit=1e6)

    def add(self, event: Event) -> None:
        """Record an event that has just ended, in the thread of its device."""
        self.events.append(event)


@contextmanager
def timeline() -> Generator[Timeline]:
    """Record the actions of all pipelines that run in the block, with times.

    The actions are those of the devices of this process. Waiting for a message, and sending one,
    are actions, named as in a schedule with messages. On a GPU the times are those of kernel
    launches.

    >>> import torch, fshard as fs
    >>> schedule = fs.pipeline_schedule("gpipe", stages=2, microbatches=1)
    >>> stages = [lambda w, x: w * x] * 2
    >>> mesh = fs.make_mesh({"pipe": 2})
    >>> step = fs.pipeline.pipelined(stages, schedule, lambda y, x: y.sum(), mesh=mesh)
    >>> with timeline() as run:
    ...     outcome = step([torch.tensor(2.0), torch.tensor(3.0)], [torch.ones(1)])
    >>> [str(event.action) for event in run.events if event.device == 1]
    ['1RECV_F0', '1F0', '1SEND_B0', '1B0']
    """
    with recording_to(Timeline()) as opened:
        yield opened


AnyTimeline = TypeVar("AnyTimeline", bound=Timeline)


@contextmanager
def recording_to(opened: AnyTimeline) -> Generator[AnyTimeline]:
    """Record the actions of all pipelines that run in the block in a timeline."""
    _open.append(opened)
    try:
        yield opened
    finally:
        # By identity: two timelines without events are equal.
        _open[:] = [timeline for timeline in _open if timeline is not opened]


_open: list[Timeline] = []


class Recorder:
    """Records the actions of one device in all open timelines."""

    def __init__(self, device: int, timelines: Sequence[Timeline]) -> None:
        self._device = device
        self._timelines = timelines
        self._received: Number = 0.0  # when the last message was received

    def record(self, action: Action, start: float) -> None:
        """Record an action that ends now.

        It began at `start`, or when the last message since then was received: the interpreter
        receives the inputs of a computation within the action of the computation.
        """
        event = Event(self._device, action, max(start, self._received), perf_counter())
        for timeline in self._timelines:
            timeline.add(event)
        if action.kind in RECEIVES:
            self._received = event.end


def recorder_of(device: int) -> Recorder | None:
    """Return the recorder of a device in the open timelines, if there are any."""
    return Recorder(device, tuple(_open)) if _open else None


def rounded(number: Number) -> str:
    """Format a number in at most a few digits, a fraction with a short denominator as such."""
    if isinstance(number, Rational) and number.denominator < 1000:
        return str(number)
    return f"{float(number):.4g}"
