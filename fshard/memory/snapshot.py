"""Write what was counted as torch's memory viewer reads it: the format of `torch.cuda.memory._snapshot`."""

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
    events, in_use = [*events], [*in_use]
    pairs = {
        (event.device is not None, event.device or 0, event.kind) for event in (*events, *in_use)
    }
    numbers = {pair: number for number, pair in enumerate(sorted(pairs))}

    def number(event: MemoryEvent) -> int:
        return numbers[event.device is not None, event.device or 0, event.kind]

    traces: list[list[dict[str, Any]]] = [[] for _ in numbers]
    for event in events:
        row = {
            "addr": event.address,
            "size": event.size,
            "stream": 0,
            "time_us": event.microseconds,
        }
        traces[number(event)] += [
            {"action": name, **row, "frames": _frames(event)} for name in _ACTIONS[event.action]
        ]
    snapshot = {
        "segments": [_segment(number(event), event) for event in in_use],
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }
    Path(path).write_bytes(pickle.dumps(snapshot))


def _segment(device: int, event: MemoryEvent) -> dict[str, Any]:
    """Return a block as a segment of its own."""
    sizes = dict.fromkeys(
        ("total_size", "allocated_size", "active_size", "requested_size"), event.size
    )
    place = {
        "device": device,
        "address": event.address,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
    }
    block = {
        "address": event.address,
        "size": event.size,
        "requested_size": event.size,
        "state": "active_allocated",
    }
    return {
        **place,
        **sizes,
        "frames": [],
        "is_expandable": False,
        "blocks": [{**block, "frames": _frames(event)}],
    }


def _frames(event: MemoryEvent) -> list[dict[str, Any]]:
    """Return the source line, below a line of the purpose, the kind and the device."""
    owner = "all devices" if event.device is None else f"device {event.device}"
    return [
        {
            "name": f"{event.purpose}, {event.kind} memory of {owner}",
            "filename": event.purpose,
            "line": 0,
        },
        {"name": event.site.function, "filename": event.site.file, "line": event.site.line},
    ]
