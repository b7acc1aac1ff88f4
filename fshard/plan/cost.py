"""`cost`: the needs of a training step on a mesh, and how long it takes.

They are counted by running it on the abstract mesh:

the step ─> abstract mesh ─> events ─┬─ operations, bytes by axis and line, peak memory: exact
                                     └─ times_of(events, cluster): a model

One device does what all do; of stages, one device of each, in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from fshard.errors import PlanError
from fshard.memory.kinds import mark
from fshard.memory.placement import abstract_like
from fshard.memory.usage import MemoryUsage
from fshard.mesh.collectives.ledger import Ledger
from fshard.mesh.layout import Memory, Mesh, PyTree
from fshard.mesh.layout.counting import Purpose, without_counters
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.abstract import represented
from fshard.plan.cluster import Cluster, assert_cluster
from fshard.plan.timing import Times, times_of
from fshard.plan.trace import (
    CollectiveStart,
    Event,
    Operation,
    TracedLedger,
    TracedMail,
    dtype_of_products,
    recording,
)
from fshard.recovery.copies import Copies
from fshard.tables import Table, TableCell, TableColumn, Tabular
from fshard.transforms.train_step import TrainStep


class OperationCost(NamedTuple):
    """All calls of one operation in a dtype.

    `limit` is what limits them: "arithmetic", "memory" or "launch".
    """

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
        """Return the operations of matrix products, convolutions and attention.

        Args:
            dtype: that they are in, such as "bf16"; None: all.
        """
        counts = list[int]()
        for device in self.devices.values():
            operations = [x for x in device.operations if dtype in (None, x.dtype)]
            counts.append(sum(x.flops for x in operations))
        return max(counts)

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
        """Return the part of peak operations that are done, by default with recomputed ones.

        Args:
            flops: of the model in a step, on all devices; for model flops utilization.
        """
        operations = self._all_operations()
        if flops is None:
            of_device = sum([event.flops for event in operations]) / len(self.devices)
        else:
            of_device = flops / self.mesh.size
        return of_device / (self.seconds * self.cluster.peak(dtype_of_products(operations)))

    def operations(self) -> list[OperationCost]:
        """Return the calls of each operation and dtype on all `devices`, the longest first.

        This is a roofline as rows.
        """
        groups = dict[tuple[str, str], list[Operation]]()
        for event in self._all_operations():
            groups.setdefault((event.name, event.dtype), []).append(event)
        slowest = self.cluster.slowest(self.mesh.size)
        rows = [_operation_cost(calls, self.cluster, slowest) for calls in groups.values()]
        return sorted(rows, key=lambda row: -row.seconds)

    def _all_operations(self) -> list[Operation]:
        operations = list[Operation]()
        for device in self.devices.values():
            operations += device.operations
        return operations

    def table(self) -> Table:
        """Return the numbers as a table."""
        columns = (
            TableColumn("what"),
            TableColumn("of", "source"),
            TableColumn("amount", "bytes"),
            TableColumn("seconds", "seconds"),
        )
        title = f"a step on {self.mesh.size:,} x {self.cluster.name}"
        table = Table(columns, title=title)
        flops = TableCell(self.flops(), kind="count")
        table.add("operations", "matrix products", flops, None)
        same = TableCell("operations", text="")
        table.add(same, "memory traffic, bytes", self.traffic(), self.times.compute)
        self._add_transfers(table)

        limit = "" if self.fits else f" of {self.cluster.memory:,.0f}: too many"
        table.add("memory", "peak, bytes", TableCell(self.peak(), remark=limit), None)
        for holder in self.used.holders()[:4]:
            source = f"{holder.purpose} at {holder.site}"
            table.add(TableCell("memory", text=""), source, holder.bytes, None)

        table.add_section()
        utilization = TableCell(self.utilization(), remark=" of peak operations", kind="ratio")
        table.add("step", None, utilization, self.seconds)
        return table

    def _add_transfers(self, table: Table) -> None:
        """Add the rows of the network, of copies between memories, and of messages of stages."""
        starts = [x for x in self.devices[0].events if isinstance(x, CollectiveStart)]
        for axes, seconds in self.times.network.items():
            sent = sum(event.sent for event in starts if event.row.axes == axes)
            exposed = self.times.exposed.get(axes, 0.0)
            times = TableCell(seconds, remark=f", {exposed:.3g} exposed")
            table.add("network", f"{'+'.join(axes)}, bytes", float(sent), times)
        ways = dict[tuple[Memory, Memory], None]()  # each once, in order
        for counts in self.comm.moves.values():
            ways |= dict.fromkeys(counts)
        for source, target in ways:
            count = self.comm.moved(source, target)
            table.add("copies", f"{source} to {target}, bytes", count, None)
        if self.comm.calls(collective="send"):
            sent = float(self.comm.bytes(collective="send"))
            idle = TableCell(self.times.idle, remark=" idle")
            table.add("stages", "messages, bytes", sent, idle)


def _operation_cost(calls: Sequence[Operation], machine: Cluster, slowest: float) -> OperationCost:
    """Return the sum of the calls of one operation in a dtype, on the slowest device."""
    first = calls[0]
    flops = sum(call.flops for call in calls)
    traffic = sum(call.traffic for call in calls)
    seconds = sum(machine.seconds_of_operation(x.name, x.dtype, x.flops, x.traffic) for x in calls)
    launch_seconds = machine.efficiency.launch * len(calls)
    memory_seconds = traffic / (machine.bandwidth * machine.efficiency.memory)
    # Each call takes the longest of launch, memory and arithmetic: if the sum is longer than either
    # of the first two, arithmetic is what limits, for operations that have any.
    limit = "launch" if launch_seconds >= memory_seconds else "memory"
    if seconds > 1.001 * max(launch_seconds, memory_seconds):
        limit = "arithmetic" if flops else "memory"
    return OperationCost(
        first.name, first.dtype, len(calls), flops, traffic, seconds * slowest, limit
    )


def cost(
    step: TrainStep,
    *arguments: PyTree,
    cluster: Cluster,
    sizes: Mapping[str, int] | None = None,
    copies: int = 0,
    copies_in: Memory = "device",
) -> Cost:
    """Return what a device needs in a step, and the time on a machine.

    That is operations, bytes by axis and line, and memory. The step runs on the abstract mesh: the
    same code, without values, devices or memory. So operations, bytes and peaks are those of the
    run; time is computed from the order of operations, collectives and waits by `times_of`.

    Args:
        step: of `train_step`, of a full model or of stages.
        arguments: of the step: parameters, state, buffers if it has them, and the batch. Their
            values do not matter: meta tensors and arrays of any mesh will do.
        cluster: the machine: see `fs.plan.cluster`.
        sizes: sizes of axes that differ from the step's mesh, such as {"data": 1024}. The batch is
            that of all devices.
        copies: of each device's share of the results, on other devices: those of `run.save` after
            each step in a function of `fs.elastic(copies=1)`.
        copies_in: the memory of the copies, the `memory` of `fs.elastic`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> params = [torch.ones(512, 512) for _ in range(4)]
    >>> params = fs.shard_params(params, fs.fsdp("data", unit="[*]"), mesh=mesh)
    >>> opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    >>> def loss_fn(params, x):
    ...     for w in params:
    ...         x = torch.tanh(x @ w)
    ...     return x.square().mean()
    >>> step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    >>> h100 = fs.plan.cluster("h100")
    >>> report = fs.plan.cost(step, params, opt.init(params), torch.ones(64, 512), cluster=h100)
    >>> products = 4 + 8 - 1  # forward, and backward but for the first input
    >>> report.flops() == 2 * 16 * 512 * 512 * products, report.fits
    (True, True)
    """
    if not isinstance(step, TrainStep):
        raise PlanError(f"plan.cost: step must be one of train_step; got {type(step).__name__}.")
    assert_cluster(cluster, "plan.cost")
    sizes = sizes or {}
    unknown = [axis for axis in sizes if axis not in step.mesh.shape]
    if unknown:
        names = ", ".join(unknown)
        raise PlanError(f"plan.cost: sizes must name axes of {step.mesh}; got {names}.")
    if type(copies) is not int or copies < 0:
        raise PlanError(f"plan.cost: copies must be a number of devices; got {copies!r}.")

    mesh = make_mesh({**step.mesh.shape, **sizes}, runtime="abstract")
    return cost_on_mesh(step, arguments, mesh, cluster, copies=copies, copies_in=copies_in)


def cost_on_mesh(
    step: TrainStep,
    arguments: Sequence[PyTree],
    mesh: Mesh,
    cluster: Cluster,
    *,
    copies: int = 0,
    copies_in: Memory = "device",
    steps: int = 2,
) -> Cost:
    """Return the cost of a step on an abstract mesh: see `cost`.

    Args:
        step, arguments, cluster, copies, copies_in: of `cost`.
        mesh: the devices.
        steps: that run, of which the last one counts. Only the second one knows the order of the
            units of ZeRO-3, and has the copies of the step before; for others one is enough.
    """
    axis = step.options.axis if step.options.schedule is not None else None
    devices = [0]
    if axis is not None:
        devices = [mesh.index({axis: index}) for index in range(mesh.shape[axis])]
    events = {device: list[Event]() for device in devices}

    def run(device: int) -> tuple[MemoryUsage, TracedLedger, list[PyTree]]:
        with without_counters():
            trees = [abstract_like(tree, mesh, lambda x: x.layout.memory) for tree in arguments]
            step_on_mesh = step.replace(mesh=mesh)
        program: Callable[..., Any] = step_on_mesh
        if copies:
            program = StepAfterSave(step_on_mesh, mesh, copies, copies_in)
        for _ in range(steps - 1):
            _, _, results = recorded(program, trees, events[device])
            *trees[:-1], _ = results
            del results  # the next step donates them: else their memory would still be in use
        used, comm, _ = recorded(program, trees, events[device])
        return used, comm, trees

    results = represented(devices, axis, run, TracedMail(events))
    times = times_of(events, cluster, mesh)
    costs = dict[int, DeviceCost]()
    comm = Ledger()
    for device, (used, device_comm, _) in zip(devices, results, strict=True):
        costs[device] = DeviceCost(used, events[device], times[device])
        comm.devices.update(device_comm.devices)
        comm.moves.update(device_comm.moves)
    trees_of_first = results[0][2]
    return Cost(mesh, cluster, costs, comm, trees_of_first)


class StepAfterSave:
    """A step after `run.save` of its arguments: their copies are sent while it runs.

    Called for the second time, devices keep two versions, as they do from then on.
    """

    def __init__(
        self, step: Callable[..., Any], mesh: Mesh, copies: int, copies_in: Memory
    ) -> None:
        self._step = step
        self._copies = Copies(copies, copies_in)
        self._copies.begin(0, mesh, range(mesh.size), None)
        self._saved = 0

    def __call__(self, *trees: PyTree) -> Any:
        *kept, _ = trees  # the batch is not saved
        self._copies.save(self._saved, kept)
        self._saved += 1
        del kept  # the step donates them
        results = self._step(*trees)
        self._copies.complete()  # as the next save begins
        return results


def recorded(
    step: Callable[..., Any], trees: Sequence[PyTree], events: list[Event]
) -> tuple[MemoryUsage, TracedLedger, Any]:
    """Return the memory, the ledger and the results of a step."""
    events.clear()
    with recording(events) as (used, comm):
        mark("begin")
        result = step(*trees)
    return used, comm, result
