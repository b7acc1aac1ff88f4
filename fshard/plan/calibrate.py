"""`calibrate`: the numbers of the machine that runs it, measured in about half a minute."""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from fshard.mesh.collectives.api import pmax, psum
from fshard.mesh.layout import Mesh
from fshard.mesh.spmd.run import run
from fshard.plan.cluster import Cluster, Efficiency, NetworkLink

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
_SIDES = (128, 1024)
_MESSAGES = (1 << 12, 1 << 24)
_ROUNDS = 9


def calibrate(mesh: Mesh) -> Cluster:
    """Return the machine of a mesh of processes, measured while all of them compute.

    All processes call it. Rates are those of the slowest one; links have one level, that of all processes.

    >>> machine = calibrate(Mesh((("all", 2),), "virtual", "cpu"))
    >>> machine.efficiency.overlap, machine.links[0].devices
    (0, 0)
    """
    return run(_measured, mesh.device_type, mesh.axis_names, mesh.size, mesh=mesh)[0]


def _measured(device: str, axes: tuple[str, ...], n: int) -> Cluster:
    """Return the machine, as each device measures it."""

    def seconds(call: Callable[[], object]) -> float:
        """Return the time of a call on the slowest device."""
        durations = list[float]()
        for _ in range(1 + _ROUNDS):
            psum(torch.zeros((), device=device), axes)  # begin together
            _wait(device)
            begin = perf_counter()
            call()
            _wait(device)
            durations.append(perf_counter() - begin)
        return float(pmax(torch.tensor(median(durations[1:]), dtype=torch.float64), axes))

    flops, halves = dict[str, float](), list[float]()
    for name, dtype in _DTYPES.items():
        rates = list[float]()
        for side in _SIDES:
            x = torch.ones(side, side, dtype=dtype, device=device)
            rates.append(2 * side**3 / seconds(lambda x=x: x @ x))
        flops[name] = max(rates)
        halves.append(2 * _SIDES[0] ** 3 * max(flops[name] / rates[0] - 1, 0.0))
    x = torch.ones(1 << 24, device=device)
    bandwidth = 3 * x.nbytes / seconds(lambda: x + x)
    small = torch.ones(1, device=device)
    launch = seconds(lambda: [small + small for _ in range(100)]) / 100
    times = [seconds(lambda size=size: psum(torch.ones(size // 4, device=device), axes)) for size in _MESSAGES]
    sent = [2 * (n - 1) / n * size for size in _MESSAGES]
    link = max(sent[1] - sent[0], 1.0) / max(times[1] - times[0], 1e-9)
    host = _host_bandwidth(x, seconds)
    return Cluster(
        name=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        flops=flops,
        memory=float(torch.cuda.mem_get_info()[1] if device == "cuda" else _physical_memory() / n),
        bandwidth=bandwidth,
        host=host,
        disk=1e9,
        links=(NetworkLink(0, link, times[0]),),
        efficiency=Efficiency(1.0, halves[0], 1.0, 1.0, launch, 1.0, int(device == "cuda")),
    )


def _host_bandwidth(x: torch.Tensor, seconds: Callable[[Callable[[], object]], float]) -> float:
    """Return the bytes per second of copies to the host."""
    y = torch.empty(x.shape, pin_memory=x.is_cuda)
    return x.nbytes / seconds(lambda: y.copy_(x))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
