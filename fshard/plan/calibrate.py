"""`calibrate`: the numbers of the machine that runs it, measured in about half a minute."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.errors import PlanError
from fshard.mesh.collectives.api import axis_size, pmax
from fshard.mesh.collectives.ledger import ledger
from fshard.mesh.layout import Mesh, P
from fshard.mesh.spmd.run import run
from fshard.plan.cluster import Cluster, Efficiency, NetworkLink
from fshard.transforms.shard_params import fsdp, shard_params
from fshard.transforms.value_and_grad import value_and_grad

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
"""The dtypes of which matrix products are timed."""

_RUN_SECONDS = 0.02
"""The seconds of a timed run of calls: on a GPU, many times those of its launch and its wait."""

_MOST_CALLS = 1000
"""The calls of a run at most: those of an operation that takes 20 us."""

_ROUNDS = 9
"""The timed runs, of which the median counts."""

_LENGTH = 32
"""The small operations of a chain: enough to hide what begins them."""


class _Sizes(NamedTuple):
    """The sizes of what is timed on a device.

    Args:
        products: sides of square matrices: one far below the best rate, and one near it.
        units: sides of the weights of units: one whose messages are latency, and those of which the
            first that takes long enough is bandwidth.
        weights: of a model: enough that latencies are not noise.
        vector: elements of a vector: more than caches hold, so that memory is what is timed.
    """

    products: tuple[int, int]
    units: tuple[int, ...]
    weights: int
    vector: int


_SIZES = {
    "cpu": _Sizes((128, 1024), (8, 1024, 2048), 8, 1 << 24),  # units of 4 MiB, vectors of 64 MiB
    "cuda": _Sizes((1024, 8192), (8, 4096, 8192), 8, 1 << 28),  # units of 64 MiB, vectors of 1 GiB
}

Agree = Callable[[float], float]
"""Returns the largest of all devices' numbers, and waits for all devices."""


def calibrate(mesh: Mesh) -> Cluster:
    """Return the machine of a mesh of processes, measured while all of them compute.

    All processes call it. Rates are those of the slowest one; links have one level, that of all
    processes. Raises if the time of large messages is not twice that of small ones.

    >>> machine = calibrate(Mesh((("all", 1),), "virtual", "cpu"))
    >>> machine.efficiency.overlap, machine.links[0].devices
    (0, 0)
    """
    machine = run(_measured, mesh.device_type, mesh.axis_names, mesh=mesh)[0]
    if mesh.size == 1:  # one device sends nothing: what it would send stays in its memory
        link = NetworkLink(0, machine.bandwidth, machine.efficiency.launch)
    else:
        link = _link(mesh)
    return replace(machine, links=(link,))


# -- links -----------------------------------------------------------------------------------------


class _Communication(NamedTuple):
    """The collectives of a gradient.

    Args:
        unit: bytes of a unit.
        calls, sent: the collectives of a device, and the bytes that it sends.
        seconds: of the gradient on the mesh, less those of one device's full tensors.
    """

    unit: int
    calls: int
    sent: float
    seconds: float


def _link(mesh: Mesh) -> NetworkLink:
    """Return latency and bandwidth as units of ZeRO-3 have them, with packing.

    A gradient with small weights is latency, one with large weights is bandwidth too: their
    difference in bytes, by their difference in seconds, is the rate of the link.
    """
    small_side, *large_sides = _SIZES[mesh.device_type].units
    small = _communication_of_gradient(mesh, small_side)
    if small.seconds <= 0:
        raise PlanError(
            f"calibrate: a gradient with {small.calls} collectives must take longer than one "
            f"without; got {small.seconds:.2g} s more, so the latency is unknown. {_REPEAT}"
        )
    large = small
    for side in large_sides:
        large = _communication_of_gradient(mesh, side)
        if large.seconds >= 2 * small.seconds:
            break
    else:
        raise PlanError(
            f"calibrate: collectives of {large.unit:,} bytes must take twice as long as those of "
            f"{small.unit:,}, which are latency; got {large.seconds:.2g} s and "
            f"{small.seconds:.2g} s, so the bandwidth is unknown. {_REPEAT}"
        )
    bandwidth = (large.sent - small.sent) / (large.seconds - small.seconds)
    return NetworkLink(0, bandwidth, small.seconds / small.calls)


_REPEAT = (
    "Repeat it while nothing else runs on the machine, or take the links of its data sheet: "
    'fs.plan.cluster("h100").save("here.toml").'
)


def _communication_of_gradient(mesh: Mesh, side: int) -> _Communication:
    """Return calls, bytes and seconds of a gradient's collectives."""
    device = mesh.device_type

    def agree(number: float) -> float:
        return run(_largest, number, mesh.axis_names, mesh=mesh)[0]

    # Of norm 1, so that no product of them overflows.
    weights = [_random(side, side, device=device) for _ in range(_SIZES[device].weights)]
    weights = [weight / side**0.5 for weight in weights]
    batch = _random(mesh.size, side, device=device)
    params = shard_params(weights, fsdp(mesh.axis_names, unit="[*]"), mesh=mesh)
    gradient = value_and_grad(_product, mesh=mesh, batch=P(mesh.axis_names))
    gradient(params, batch)  # the first step agrees with all devices on the order of units
    with ledger() as comm:
        gradient(params, batch)

    leaves = [weight.requires_grad_() for weight in weights]
    sample = batch[:1]
    seconds = _seconds(lambda: gradient(params, batch), device, agree)
    seconds -= _seconds(
        lambda: torch.autograd.grad(_product(leaves, sample), leaves), device, agree
    )
    return _Communication(weights[0].nbytes, comm.calls(), float(comm.bytes()), seconds)


def _product(params: list[Tensor], x: Tensor) -> Tensor:
    for weight in params:
        x = x @ weight
    return x.mean()


# -- rates of a device -----------------------------------------------------------------------------


def _measured(device: str, axes: tuple[str, ...]) -> Cluster:
    """Return the machine, as each device measures it."""

    def seconds(operation: Callable[[], object]) -> float:
        """Return the time of an operation on the slowest device."""
        return _seconds(operation, device, lambda number: _largest(number, axes))

    flops, half = _product_rates(device, seconds)
    size = _SIZES[device].vector
    x = _random(size, device=device)
    y = _random(size, device=device)
    traffic = 3 * x.nbytes  # two are read, one is written
    bandwidth = traffic / seconds(lambda: x + y)
    on_host = torch.empty(x.shape, pin_memory=x.is_cuda)
    host = x.nbytes / seconds(lambda: on_host.copy_(x, non_blocking=True))
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
        attention=1.0 if is_gpu else 0.5,  # kernels of CPUs skip no pairs of short sequences
        memory=1.0,
        launch=launch,
        link=1.0,
        overlap=int(is_gpu),
    )
    name = torch.cuda.get_device_name() if is_gpu else "cpu"
    return Cluster(
        name=name,
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
    sides = _SIZES[device].products
    best = dict[str, float]()
    halves = dict[str, float]()
    for dtype, torch_dtype in _DTYPES.items():
        rates = list[float]()
        for side in sides:
            x = _random(side, side, dtype=torch_dtype, device=device)
            rates.append(_operations(side) / seconds(lambda x=x: x @ x))
        best[dtype] = max(rates)
        halves[dtype] = _operations(sides[0]) * (best[dtype] / rates[0] - 1)
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


# -- seconds ---------------------------------------------------------------------------------------


def _random(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers, the same on all devices.

    Ones would flatter a GPU, whose clock falls with the bits that change.
    """
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=dtype, device=device)


def _largest(number: float, axes: tuple[str, ...]) -> float:
    """Return the largest of all devices' numbers."""
    return float(pmax(torch.tensor(number, dtype=torch.float64), axes))


def _seconds(operation: Callable[[], object], device: str, agree: Agree) -> float:
    """Return the seconds of an operation on the slowest device, in runs of many calls."""
    operation()  # the first one allocates
    once = agree(_seconds_of_run(operation, 1, device))
    # The same number on all devices, since an operation may be collective.
    calls = _MOST_CALLS
    if once * _MOST_CALLS > _RUN_SECONDS:
        calls = ceil(_RUN_SECONDS / once)
    durations = list[float]()
    for _ in range(_ROUNDS):
        agree(0.0)  # all devices begin a run together
        durations.append(_seconds_of_run(operation, calls, device) / calls)
    return agree(median(durations))


def _seconds_of_run(operation: Callable[[], object], calls: int, device: str) -> float:
    """Return the seconds in which a device runs so many calls of an operation."""
    if device != "cuda":
        begin = perf_counter()
        for _ in range(calls):
            operation()
        return perf_counter() - begin

    first, last = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    first.record()
    for _ in range(calls):
        operation()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3
