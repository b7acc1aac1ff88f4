"""How long collectives take between processes: medians, of the slowest process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.oracles import ORACLES

SIZES = {1 << 10: 100, 1 << 20: 20, 1 << 24: 5}
"""Bytes that each process holds, and how often to measure."""
WARM_UP = 3


@dataclass(frozen=True)
class Speed:
    """How long one collective took."""

    collective: str
    held: int
    """Bytes that each process held before."""
    sent: int
    """Bytes that each process sent."""
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes that each process sent in a second."""
        return self.sent / self.seconds


def measure(mesh: fs.Mesh) -> list[Speed]:
    """Measure on a mesh of one axis, in all its processes."""
    (axis,), n = mesh.axis_names, mesh.size
    ring = [(i, (i + 1) % n) for i in range(n)]
    calls: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
        "psum": (lambda x: fs.psum(x, axis), {}),
        "all_gather": (lambda x: fs.all_gather(x, axis), {}),
        "psum_scatter": (lambda x: fs.psum_scatter(x, axis), {}),
        "ppermute": (lambda x: fs.ppermute(x, axis, ring), {"pairs": ring}),
    }
    found: list[Speed] = []
    for name, (call, options) in calls.items():
        for held, times in SIZES.items():
            size = max(n, held // 4 // n * n) * 4  # every process has a piece of equal size
            sent = int(ORACLES[name].sent(size, 0, n, **options))
            seconds = fs.run(_timed, call, size // 4, times, mesh.device_type, axis, mesh=mesh)
            found.append(Speed(name, held, sent, max(seconds)))
    return found


def _timed(call: Callable[[Tensor], Any], elements: int, times: int, device: str, axis: str) -> float:
    x = torch.ones(elements, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    durations: list[float] = []
    for number in range(WARM_UP + times):
        fs.psum(torch.ones((), device=device), axis)  # begin together
        wait()
        start = time.perf_counter()
        call(x)
        wait()
        durations += [time.perf_counter() - start] * (number >= WARM_UP)
    return median(durations)
