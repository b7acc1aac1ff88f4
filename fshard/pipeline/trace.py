"""What was done when, simulated or measured, and its export for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from fshard.pipeline.schedule import COMPUTE, MESSAGES, Action, Kind

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
    """Write events as the JSON that ui.perfetto.dev and chrome://tracing open, with an arrow for each message.

    A device is a process of the trace, with one line for what it computes, one for what it sends and receives, and one for what
    is done with its weights.

    Args:
        events: in any order.
        unit: how many microseconds one unit of their time is: 1e6 if they are in seconds.

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
        lane = "compute" if action.kind in COMPUTE else "messages" if action.kind in MESSAGES else "weights"
        line = {"pid": device, "tid": _LANES.index(lane)}
        names[f"{device:9}"] = {"ph": "M", "pid": device, "name": "process_name", "args": {"name": f"device {device}"}}
        names[f"{device:9} {lane}"] = {"ph": "M", **line, "name": "thread_name", "args": {"name": lane}}
        begin, length = float(start) * unit, float(end - start) * unit
        records.append({"ph": "X", **line, "name": str(action), "cat": action.kind, "ts": begin, "dur": length})
        if action.kind in MESSAGES:
            sends = action.kind in {Kind.SEND_F, Kind.SEND_B}
            arrow = {"ph": "s", "id": str(action)} if sends else {"ph": "f", "bp": "e", "id": str(action.partner)}
            records.append({**arrow, **line, "name": "message", "cat": "message", "ts": begin + length / 2})
    lines = map(json.dumps, [*(names[key] for key in sorted(names)), *records])
    return '{"traceEvents": [\n' + ",\n".join(lines) + "\n]}"
