"""Marks in a trace of torch's profiler, by which the threads of virtual devices are known."""

from __future__ import annotations

from torch.autograd import profiler

MARK = "fshard: device "


def mark(device: int) -> None:
    """Say in the trace that is being recorded, if there is one, that this thread is a device's."""
    if getattr(profiler, "_is_profiler_enabled", True):
        with profiler.record_function(f"{MARK}{device}"):
            pass
