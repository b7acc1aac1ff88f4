"""Write what was counted as torch's memory viewer reads it.

This is the format of `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fshard.mesh.layout import Memory
from fshard.source import Site


class MemoryEvent(NamedTuple):
    """An allocation or a free."""

    action: Literal["alloc", "free"]
    microseconds: int
    device: int | None
    kind: Memory
    address: int
    size: int
    purpose: str
    site: Site


_ACTIONS = {"alloc": ("alloc",), "free": ("free_requested", "free_completed")}


def write_snapshot(
    path: str | Path, events: Iterable[MemoryEvent], in_use: Iterable[MemoryEvent]
) -> None:
    """Write events and the blocks in use; each memory of each device is a device of the viewer."""
    events = [*events]
    in_use = [*in_use]
    owners = sorted({_owner(event) for event in (*events, *in_use)})
    numbers = {owner: number for number, owner in enumerate(owners)}

    traces: list[list[dict[str, Any]]] = [[] for _ in owners]
    for event in events:
        trace = traces[numbers[_owner(event)]]
        for action in _ACTIONS[event.action]:
            entry = {
                "action": action,
                "addr": event.address,
                "size": event.size,
                "stream": 0,
                "time_us": event.microseconds,
                "frames": _frames(event),
            }
            trace.append(entry)
    snapshot = {
        "segments": [_segment(numbers[_owner(event)], event) for event in in_use],
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }
    Path(path).write_bytes(pickle.dumps(snapshot))


def _owner(event: MemoryEvent) -> tuple[bool, int, Memory]:
    """Return the device and the memory of an event, in an order that has all devices first."""
    return event.device is not None, event.device or 0, event.kind


def _segment(device: int, event: MemoryEvent) -> dict[str, Any]:
    """Return a block as a segment of its own."""
    block = {
        "address": event.address,
        "size": event.size,
        "requested_size": event.size,
        "state": "active_allocated",
        "frames": _frames(event),
    }
    return {
        "device": device,
        "address": event.address,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "total_size": event.size,
        "allocated_size": event.size,
        "active_size": event.size,
        "requested_size": event.size,
        "frames": [],
        "is_expandable": False,
        "blocks": [block],
    }


def _frames(event: MemoryEvent) -> list[dict[str, Any]]:
    """Return the source line, below a line of the purpose, the kind and the device."""
    owner = "all devices" if event.device is None else f"device {event.device}"
    purpose = {
        "name": f"{event.purpose}, {event.kind} memory of {owner}",
        "filename": event.purpose,
        "line": 0,
    }
    site = event.site
    return [purpose, {"name": site.function, "filename": site.file, "line": site.line}]
