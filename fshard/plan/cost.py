"""`cost`: the needs of a training step on a mesh, counted by running it on the abstract mesh; and how long it takes.

the step ─> abstract mesh ─> events ─┬─ operations, bytes by axis and line, peak memory: exact
                                     └─ times_of(events, cluster): a model

One device does what all do; of stages, one device of each, in a thread of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from fshard.errors import PlanError
from fshard.memory.kinds import mark
from fshard.memory.placement import abstract_like
from fshard.memory.usage import MemoryUsage
from fshard.mesh.collectives.ledger import Ledger
from fshard.mesh.layout import Memory, Mesh, PyTree
from fshard.mesh.layout.counting import Purpose, without_counters
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.abstract import represented
from fshard.plan.cluster import Cluster
from fshard.plan.timing import Times, times_of
from fshard.plan.trace import CollectiveStart, Event, Operation, TracedLedger, TracedMail, recording
from fshard.tables import Tabular

if TYPE_CHECKING:  # it is imported where a table is shown
    from rich.table import Table


class OperationCost(NamedTuple):
    """All calls of one operation in a dtype, and what limits them: "arithmetic", "memory" or "launch"."""

    name: str
    dtype: str
    calls: int
    flops: int
    traffic: int
    seconds: float
    limit: str


@dataclass(frozen=True)
class DeviceCost:
    """The needs of one device.

    Args:
        used: memory; its peak, with the lines of the program.
        events: operations, collectives, copies and messages, in order.
        times: seconds.
    """

    used: MemoryUsage = field(repr=False)
    events: Sequence[Event] = field(repr=False)
    times: Times

    @property
    def operations(self) -> list[Operation]:
        """The operations of torch."""
        return [event for event in self.events if isinstance(event, Operation)]


@dataclass(frozen=True, repr=False)
class Cost(Tabular):
    """The needs of a device in a step: see `cost`. Prints as a table.

    Numbers are those of the device that has the most, as in a ledger.

    Args:
        mesh: of the step.
        cluster: the machine.
        devices: one that does what all do; of a pipeline, one of each stage. By number.
        comm: their ledger.
        arguments: of the step, without values.
    """

    mesh: Mesh
    cluster: Cluster
    devices: Mapping[int, DeviceCost] = field(repr=False)
    comm: Ledger = field(repr=False)
    arguments: Sequence[PyTree] = field(repr=False)

    @property
    def used(self) -> MemoryUsage:
        """The memory of the fullest device."""
        return max((device.used for device in self.devices.values()), key=lambda used: used.peak())

    @property
    def times(self) -> Times:
        """The times of the slowest device."""
        return max((device.times for device in self.devices.values()), key=lambda times: times.step)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.times.step

    def flops(self, dtype: str | None = None) -> int:
        """Return the operations of matrix products, convolutions and attention, of a dtype such as "bf16" or of all."""
        return max(
            sum(x.flops for x in device.operations if dtype in (None, x.dtype))
            for device in self.devices.values()
        )

    def traffic(self) -> int:
        """Return the bytes that operations read and write."""
        return max(
            sum(event.traffic for event in device.operations) for device in self.devices.values()
        )

    def peak(self, kind: Memory = "device", purpose: Purpose | None = None) -> int:
        """Return the most bytes that a device has in a step; of a purpose: its bytes at that time."""
        return max(device.used.peak(kind, purpose) for device in self.devices.values())

    def sent(self, axis: str | None = None) -> Fraction:
        """Return the bytes that a device sends, along an axis or in all."""
        return self.comm.bytes(axis=axis)

    @property
    def fits(self) -> bool:
        """True if the peak is at most the memory of a device."""
        return self.peak() <= self.cluster.memory

    def utilization(self, flops: float | None = None) -> float:
        """Return the part of peak operations that are done, by default with those that are recomputed.

        Args:
            flops: of the model in a step, on all devices; for model flops utilization.
        """
        devices = self.devices.values()
        dtypes = Counter[str]()
        for event in (event for device in devices for event in device.operations):
            dtypes[event.dtype] += event.flops
        dtype = max(dtypes, key=lambda name: dtypes[name], default="f32")
        each = dtypes.total() / len(devices) if flops is None else flops / self.mesh.size
        return each / (self.seconds * self.cluster.peak(dtype))

    def operations(self) -> list[OperationCost]:
        """Return the calls of each operation and dtype on all `devices`, the longest first: a roofline as rows."""
        rows, costs = dict[tuple[str, str], list[Operation]](), list[OperationCost]()
        for event in (event for device in self.devices.values() for event in device.operations):
            rows.setdefault((event.name, event.dtype), []).append(event)
        machine, efficiency = self.cluster, self.cluster.efficiency
        for (name, dtype), calls in rows.items():
            flops, traffic = (
                sum(getattr(call, key) for call in calls) for key in ("flops", "traffic")
            )
            seconds = sum(
                machine.seconds_of_operation(x.name, x.dtype, x.flops, x.traffic) for x in calls
            )
            limits = {
                "launch": efficiency.launch * len(calls),
                "memory": traffic / (machine.bandwidth * efficiency.memory),
            }
            largest = max(limits, key=lambda key: limits[key])
            limit = (
                largest
                if seconds <= 1.001 * limits[largest]
                else "arithmetic"
                if flops
                else "memory"
            )
            costs.append(OperationCost(name, dtype, len(calls), flops, traffic, seconds, limit))
        return sorted(costs, key=lambda row: -row.seconds)

    def table(self) -> Table:
        """Return the numbers as a rich table."""
        from rich.table import Table

        table = Table(
            "what",
            "of",
            "amount",
            "seconds",
            title=f"a step on {self.mesh.size:,} x {self.cluster.name}",
        )
        for column in (2, 3):
            table.columns[column].justify = "right"
        table.add_row("operations", "matrix products", f"{self.flops():,}", "")
        table.add_row(
            "", "memory traffic, bytes", f"{self.traffic():,}", f"{self.times.compute:.3g}"
        )
        for axes, seconds in self.times.network.items():
            rows = [event for event in self.devices[0].events if isinstance(event, CollectiveStart)]
            sent = sum(event.sent for event in rows if event.row.axes == axes)
            exposed = f"{seconds:.3g}, {self.times.exposed.get(axes, 0.0):.3g} exposed"
            table.add_row("network", f"{'+'.join(axes)}, bytes", f"{sent:,.0f}", exposed)
        for source, target in dict.fromkeys(
            way for counts in self.comm.moves.values() for way in counts
        ):
            table.add_row(
                "copies", f"{source} to {target}, bytes", f"{self.comm.moved(source, target):,}", ""
            )
        limit = "" if self.fits else f" of {self.cluster.memory:,.0f}: too many"
        if self.comm.calls(collective="send"):
            sent = float(self.comm.bytes(collective="send"))
            table.add_row(
                "stages", "messages, bytes", f"{sent:,.0f}", f"{self.times.idle:.3g} idle"
            )
        table.add_row("memory", "peak, bytes", f"{self.peak():,}{limit}", "")
        for holder in self.used.holders()[:4]:
            table.add_row("", f"{holder.purpose} at {holder.site}", f"{holder.bytes:,}", "")
        table.add_section()
        table.add_row(
            "step",
            "",
            f"{100 * self.utilization():.0f} % of peak operations",
            f"{self.seconds:.3g}",
        )
        return table


def cost(
    step: Callable[..., Any],
    *arguments: PyTree,
    cluster: Cluster,
    sizes: Mapping[str, int] | None = None,
) -> Cost:
    """Return what a device needs in a step: operations, bytes by axis and line, memory; and the time on a machine.

    The step runs on the abstract mesh: the same code, without values, devices or memory. So operations, bytes and peaks are
    those of the run; time is computed from the order of operations, collectives and waits by `times_of`.

    Args:
        step: of `train_step`, of a full model or of stages.
        arguments: of the step: parameters, state, buffers if it has them, and the batch. Their values do not matter: meta
            tensors and arrays of any mesh will do.
        cluster: the machine: see `fs.plan.cluster`.
        sizes: sizes of axes that differ from the step's mesh, such as {"data": 1024}. The batch is that of all devices.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> params = fs.shard_params([torch.ones(512, 512) for _ in range(4)], fs.fsdp("data", unit="[*]"), mesh=mesh)
    >>> opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    >>> def loss_fn(params, x):
    ...     for w in params:
    ...         x = torch.tanh(x @ w)
    ...     return x.square().mean()
    >>> step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    >>> report = fs.plan.cost(step, params, opt.init(params), torch.ones(64, 512), cluster=fs.plan.cluster("h100"))
    >>> report.flops() == 2 * 16 * 512 * 512 * (4 + 8 - 1), report.fits  # forward, and backward but for the first input
    (True, True)
    """
    changed, mesh = getattr(step, "changed", None), getattr(step, "mesh", None)
    if changed is None or mesh is None:
        raise PlanError(f"plan.cost: step must be one of train_step; got {type(step).__name__}.")
    if unknown := [axis for axis in sizes or {} if axis not in mesh.shape]:
        raise PlanError(f"plan.cost: sizes must name axes of {mesh}; got {', '.join(unknown)}.")
    mesh = make_mesh({**mesh.shape, **(sizes or {})}, runtime="abstract")
    axis = getattr(getattr(step, "stages", None), "axis", None)
    devices = (
        [0] if axis is None else [mesh.index({axis: index}) for index in range(mesh.shape[axis])]
    )
    events = {device: list[Event]() for device in devices}

    def run(device: int) -> tuple[MemoryUsage, TracedLedger, list[PyTree]]:
        with without_counters():
            trees = [abstract_like(tree, mesh, lambda x: x.layout.memory) for tree in arguments]
            called = changed(mesh=mesh)
        *trees[:-1], _ = recorded(called, trees, events[device])[
            2
        ]  # the second step knows the order of units
        used, comm, _ = recorded(called, trees, events[device])
        return used, comm, trees

    results = represented(devices, axis, run, TracedMail(events))
    times = times_of(events, cluster, mesh)
    costs = {
        device: DeviceCost(used, events[device], times[device])
        for device, (used, *_) in zip(devices, results, strict=True)
    }
    comm = Ledger()
    for _, each, _ in results:
        comm.devices.update(each.devices)
        comm.moves.update(each.moves)
    return Cost(mesh, cluster, costs, comm, results[0][2])


def recorded(
    step: Callable[..., Any], trees: Sequence[PyTree], events: list[Event]
) -> tuple[MemoryUsage, TracedLedger, Any]:
    """Return the memory, the ledger and the results of a step."""
    events.clear()
    with recording(events) as (used, comm):
        mark("begin")
        result = step(*trees)
    return used, comm, result
