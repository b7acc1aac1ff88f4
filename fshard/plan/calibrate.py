"""`calibrate`: the numbers of the machine that runs it, measured in about half a minute."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from fshard.mesh.collectives.api import axis_size, pmax, psum
from fshard.mesh.collectives.ledger import ledger
from fshard.mesh.layout import Mesh, P
from fshard.mesh.spmd.run import run
from fshard.plan.cluster import Cluster, Efficiency, NetworkLink
from fshard.transforms.shard_params import fsdp, shard_params
from fshard.transforms.value_and_grad import value_and_grad

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
_SIDES = (128, 1024)
_UNIT_SIDES = (8, 512)
_ROUNDS = 25
_LENGTH = 32


def calibrate(mesh: Mesh) -> Cluster:
    """Return the machine of a mesh of processes, measured while all of them compute.

    All processes call it. Rates are those of the slowest one; links have one level, that of all processes.

    >>> machine = calibrate(Mesh((("all", 2),), "virtual", "cpu"))
    >>> machine.efficiency.overlap, machine.links[0].devices
    (0, 0)
    """
    machine = run(_measured, mesh.device_type, mesh.axis_names, mesh=mesh)[0]
    return replace(machine, links=(_link(mesh),))


def _link(mesh: Mesh) -> NetworkLink:
    """Return latency and bandwidth as units of ZeRO-3 have them, with packing: of a gradient, less that of full tensors."""
    device, rows = mesh.device_type, list[tuple[int, float, float]]()
    for side in _UNIT_SIDES:
        weights, batch = (
            [torch.ones(side, side, device=device) for _ in range(_LENGTH)],
            torch.ones(mesh.size, side),
        )
        batch = batch.to(device)
        params = shard_params(weights, fsdp(mesh.axis_names, unit="[*]"), mesh=mesh)
        gradient = value_and_grad(_product, mesh=mesh, batch=P(mesh.axis_names))
        with ledger() as comm:
            gradient(params, batch)
        full, sample = [w.requires_grad_() for w in weights], batch[:1]
        seconds = _median(partial(gradient, params, batch), device)
        seconds -= _median(lambda w=full, x=sample: torch.autograd.grad(_product(w, x), w), device)
        rows.append((comm.calls(), float(comm.bytes()), max(seconds, 1e-9)))
    (calls, few, short), (_, many, long) = rows
    return NetworkLink(0, max(many - few, 1.0) / max(long - short, 1e-9), short / max(calls, 1))


def _median(
    call: Callable[[], object], device: str, meet: Callable[[], object] = lambda: None
) -> float:
    """Return the seconds of a call; `meet` lets all devices begin it together."""
    durations = list[float]()
    for _ in range(1 + _ROUNDS):
        meet()
        _wait(device)
        begin = perf_counter()
        call()
        _wait(device)
        durations.append(perf_counter() - begin)
    return median(durations[1:])


def _product(params: list[Tensor], x: Tensor) -> Tensor:
    for w in params:
        x = x @ w
    return x.mean()


def _chain(x: Tensor) -> None:
    """Run small operations, and their backward."""
    y = x
    for _ in range(_LENGTH):
        y = y * 1.0
    y.backward()


def _measured(device: str, axes: tuple[str, ...]) -> Cluster:
    """Return the machine, as each device measures it."""

    def seconds(call: Callable[[], object]) -> float:
        """Return the time of a call on the slowest device."""
        local = _median(call, device, lambda: psum(torch.zeros((), device=device), axes))
        return float(pmax(torch.tensor(local, dtype=torch.float64), axes))

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
    launch = seconds(lambda: _chain(torch.ones(1, device=device, requires_grad=True))) / (
        2 * _LENGTH
    )
    on_host = torch.empty(x.shape, pin_memory=x.is_cuda)
    host = x.nbytes / seconds(lambda: on_host.copy_(x))
    if device == "cuda":
        memory = torch.cuda.mem_get_info()[1]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / axis_size(axes)
    return Cluster(
        name=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        flops=flops,
        memory=float(memory),
        bandwidth=bandwidth,
        host=host,
        disk=1e9,
        links=(NetworkLink(0, 1.0, 0.0),),
        efficiency=Efficiency(1.0, halves[0], 1.0, 1.0, launch, 1.0, int(device == "cuda")),
    )


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
