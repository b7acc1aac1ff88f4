"""`calibrate`: the numbers of the machine that runs it, measured in about half a minute."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import NamedTuple

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
"""The dtypes of which matrix products are timed."""

_SIDES = (128, 1024)
"""The sides of the square matrices: one far below a device's best rate, and one near it."""

_UNIT_SIDES = (8, 512)
"""The sides of the weights of units: one whose messages are latency, and one of bandwidth."""

_ROUNDS = 25
"""The timed calls, of which the median counts."""

_LENGTH = 32
"""The weights of a model, and the small operations of a chain: enough to hide what begins them."""

_VECTOR = 1 << 24
"""The elements of a vector, 64 MiB: more than caches hold, so that memory is what is timed."""


def calibrate(mesh: Mesh) -> Cluster:
    """Return the machine of a mesh of processes, measured while all of them compute.

    All processes call it. Rates are those of the slowest one; links have one level, that of all
    processes.

    >>> machine = calibrate(Mesh((("all", 2),), "virtual", "cpu"))
    >>> machine.efficiency.overlap, machine.links[0].devices
    (0, 0)
    """
    machine = run(_measured, mesh.device_type, mesh.axis_names, mesh=mesh)[0]
    return replace(machine, links=(_link(mesh),))


# -- links -----------------------------------------------------------------------------------------


def _link(mesh: Mesh) -> NetworkLink:
    """Return latency and bandwidth as units of ZeRO-3 have them, with packing.

    A gradient with small weights is latency, one with large weights is bandwidth too: their
    difference in bytes, by their difference in seconds, is the rate of the link.
    """
    small, large = [_communication_of_gradient(mesh, side) for side in _UNIT_SIDES]
    # The differences can be nothing on one device, and noise can turn their signs.
    bytes_more = max(large.sent - small.sent, 1.0)
    seconds_more = max(large.seconds - small.seconds, 1e-9)
    latency = small.seconds / max(small.calls, 1)
    return NetworkLink(devices=0, bandwidth=bytes_more / seconds_more, latency=latency)


class _Communication(NamedTuple):
    calls: int
    sent: float
    seconds: float


def _communication_of_gradient(mesh: Mesh, side: int) -> _Communication:
    """Return calls, bytes and seconds of a gradient's collectives.

    The seconds are those of the gradient on the mesh, less those of one device's full tensors.
    """
    device = mesh.device_type
    weights = [torch.ones(side, side, device=device) for _ in range(_LENGTH)]
    batch = torch.ones(mesh.size, side, device=device)
    params = shard_params(weights, fsdp(mesh.axis_names, unit="[*]"), mesh=mesh)
    gradient = value_and_grad(_product, mesh=mesh, batch=P(mesh.axis_names))
    with ledger() as comm:
        gradient(params, batch)

    leaves = [weight.requires_grad_() for weight in weights]
    sample = batch[:1]
    seconds = _median(lambda: gradient(params, batch), device)
    seconds -= _median(lambda: torch.autograd.grad(_product(leaves, sample), leaves), device)
    return _Communication(comm.calls(), float(comm.bytes()), max(seconds, 1e-9))


def _product(params: list[Tensor], x: Tensor) -> Tensor:
    for weight in params:
        x = x @ weight
    return x.mean()


# -- rates of a device -----------------------------------------------------------------------------


def _measured(device: str, axes: tuple[str, ...]) -> Cluster:
    """Return the machine, as each device measures it."""

    def seconds(operation: Callable[[], object]) -> float:
        """Return the time of an operation on the slowest device."""
        local = _median(operation, device, lambda: psum(torch.zeros((), device=device), axes))
        return float(pmax(torch.tensor(local, dtype=torch.float64), axes))

    flops, half = _product_rates(device, seconds)
    x = torch.ones(_VECTOR, device=device)
    traffic = 3 * x.nbytes  # two are read, one is written
    bandwidth = traffic / seconds(lambda: x + x)
    on_host = torch.empty(x.shape, pin_memory=x.is_cuda)
    host = x.nbytes / seconds(lambda: on_host.copy_(x))
    launch = seconds(lambda: _chain(device)) / (2 * _LENGTH)  # forward and backward

    is_gpu = device == "cuda"
    if is_gpu:
        memory = torch.cuda.mem_get_info()[1]
    else:
        # All processes share the memory of the machine.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / axis_size(axes)
    # What is measured is what programs get: no part of it is lost once more.
    efficiency = Efficiency(
        matmul=1.0,
        half=half,
        attention=1.0,
        memory=1.0,
        launch=launch,
        link=1.0,
        overlap=int(is_gpu),
    )
    return Cluster(
        name=torch.cuda.get_device_name() if is_gpu else "cpu",
        flops=flops,
        memory=float(memory),
        bandwidth=bandwidth,
        host=host,
        disk=1e9,  # not measured
        links=(NetworkLink(0, 1.0, 0.0),),  # `calibrate` replaces it
        efficiency=efficiency,
    )


def _product_rates(
    device: str, seconds: Callable[[Callable[[], object]], float]
) -> tuple[dict[str, float], float]:
    """Return the operations per second by dtype, and the operations at which f32 gets half.

    A product of n operations gets best * n / (n + half), so half = n * (best / rate - 1).
    """
    best = dict[str, float]()
    halves = dict[str, float]()
    for dtype, torch_dtype in _DTYPES.items():
        rates = list[float]()
        for side in _SIDES:
            x = torch.ones(side, side, dtype=torch_dtype, device=device)
            rates.append(_operations(side) / seconds(lambda x=x: x @ x))
        best[dtype] = max(rates)
        halves[dtype] = _operations(_SIDES[0]) * (best[dtype] / rates[0] - 1)
    return best, halves["f32"]


def _operations(side: int) -> int:
    """Return the operations of a product of square matrices."""
    return 2 * side**3


def _chain(device: str) -> None:
    """Run small operations, and their backward."""
    y = torch.ones(1, device=device, requires_grad=True)
    for _ in range(_LENGTH):
        y = y * 1.0
    y.backward()


def _median(
    operation: Callable[[], object],
    device: str,
    barrier: Callable[[], object] = lambda: None,
) -> float:
    """Return the seconds of an operation; after a barrier all devices begin it together."""
    durations = list[float]()
    for _ in range(1 + _ROUNDS):
        barrier()
        _wait(device)
        begin = perf_counter()
        operation()
        _wait(device)
        durations.append(perf_counter() - begin)
    return median(durations[1:])  # the first one allocates


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
