"""`place`: what leaves the devices' memory in a step, so that it stays below a limit.

    measure     the step runs twice on the abstract mesh, with everything on the device: bytes
                between uses of units
    choose      parameters, state and activations, the cheapest for the bytes by which the limit is
                passed (see `choice`)
    verify      the step runs again with these in other memory; if it passes the limit still, more
                are chosen

A placement is a value: the memory kind of each unit's parameters and state, and of each named
activation. All devices follow one, which is made from shapes alone. A step that uses units in
another order than the measured one fetches them when it needs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from fshard.errors import MemoryLimitError
from fshard.memory.choice import NotEnoughError, Option, choose
from fshard.memory.kinds import mark
from fshard.memory.limit import limit
from fshard.memory.state import UpdateOn
from fshard.memory.usage import MemoryUsage
from fshard.mesh.collectives.ledger import Ledger, ledger
from fshard.mesh.layout import Layout, Memory, Mesh, PyTree, flatten, map_leaves
from fshard.mesh.layout.counting import MEMORIES, ActivationMemory, without_counters
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.reshard.device_put import reshard
from fshard.mesh.runtimes.abstract import Mail, represented
from fshard.mesh.spmd.run import local_devices
from fshard.tables import Table, TableCell, TableColumn, Tabular

Role = Literal["parameters", "state", "activations"]


class PlaceableStep(ABC):
    """A training step that `place` can measure, since it can be made again for an abstract mesh.

    `TrainStep` is one. It is in `transforms`, which this package must not import.
    """

    @property
    @abstractmethod
    def mesh(self) -> Mesh:
        """The devices."""

    @property
    @abstractmethod
    def state_memory(self) -> Memory:
        """The memory of the optimizer's state."""

    @property
    @abstractmethod
    def update_on(self) -> UpdateOn:
        """The memory in which the state is updated."""

    @abstractmethod
    def replace(self, **options: Any) -> PlaceableStep:
        """Return the step with other options, such as its mesh."""

    @abstractmethod
    def __call__(self, params: PyTree, state: PyTree, *inputs: PyTree) -> tuple[Any, ...]:
        """Return the next parameters, state, buffers if there are any, and metrics."""


class MemoryGroup(NamedTuple):
    """Arrays in one memory: a unit's parameters, their state, or activations of a name."""

    role: Role
    unit: str


class Rates(NamedTuple):
    """The work of a device in a second.

    Operations of matrix products, and bytes copied to and from the host and a disk.
    """

    flops: float = 4e14
    host: float = 4e10
    disk: float = 4e9


@dataclass(frozen=True, repr=False)
class Placement(Tabular):
    """The memory of each group, and what a step then needs and moves.

    Prints as a table: see `place`.

    Args:
        memories: of parameters and state.
        activations: the memory of named ones that do not stay on the device, for
            `train_step(activations=)`.
        sizes: their bytes per device.
        limits: by memory kind, in bytes per device.
        used: memory that the step uses.
        comm: what it moves.
        needed: the bytes of device memory without limits.
        rates: of the device.
        step: the given one, with its activations in their memories.
    """

    memories: Mapping[MemoryGroup, Memory]
    activations: Mapping[str, ActivationMemory]
    sizes: Mapping[MemoryGroup, int]
    limits: Mapping[Memory, int | None]
    used: MemoryUsage = field(repr=False)
    comm: Ledger = field(repr=False)
    needed: int
    rates: Rates
    step: PlaceableStep

    def peak(self, kind: Memory = "device") -> int:
        """Return the largest number of bytes that a device holds in a step.

        The given trees and the batch are included.
        """
        return self.used.peak(kind)

    def moved(self, source: Memory, target: Memory) -> int:
        """Return the bytes that a device moves between two memories in a step."""
        return self.comm.moved(source, target)

    def apply(self, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return parameters and state in their memories.

        Those that are there already are the same arrays.
        """
        params = in_memories(params, "parameters", self.memories)
        return params, in_memories(state, "state", self.memories)

    def flops(self) -> int:
        """Return the floating-point operations of a device in a step.

        Those of matrix products, convolutions and attention.
        """
        return sum(event.flops for event in self.used.timeline)

    def seconds(self) -> float:
        """Return the time of a step by the rates: matrix products and transfers alone.

        Copies to and from a memory each run in the order of their starts, beside the computation.
        Those that start in one event are there when the next one ends; those of the update when it
        ends.
        """
        now = 0.0
        ends = dict[tuple[Memory, Memory], float]()  # of the last copy between two memories
        for event in self.used.timeline:
            arrival = max(ends.values(), default=0.0)
            for way, count in event.moved.items():
                rate = self.rates.disk if "disk" in way else self.rates.host
                start = max(ends.get(way, 0.0), now)
                ends[way] = start + count / rate
            now = max(now + event.flops / self.rates.flops, arrival)
        return max(now, *ends.values(), 0.0)

    def _repr_html_(self) -> str:
        """Return the table, and the curve of device memory under a step with its limit."""
        return f"{super()._repr_html_()}{self._svg_of_curve()}"

    def _svg_of_curve(self) -> str:
        """Draw a bar for each event, 12 wide, and a line at the limit; 100 is the top."""
        limit = self.limits["device"]
        events = self.used.timeline
        top = max(event.peak for event in events)
        if limit is not None and limit <= 2 * self.needed:  # a line far above would flatten bars
            top = max(top, limit)

        parts: list[str] = []
        for index, event in enumerate(events):
            height = 100 * event.peak / top
            title = f"<title>{escape(event.name)}: {event.peak:,} bytes</title>"
            parts.append(
                f'<rect x="{12 * index}" y="{100 - height:.1f}" width="11" '
                f'height="{height:.1f}" fill="#5b8ff9">{title}</rect>'
            )
        width = 12 * len(events)
        if limit is not None:
            y = 100 - 100 * limit / top
            parts.append(f'<path d="M0 {y:.1f}H{width}" stroke="#d33"/>')
        style = f"width:100%;max-width:{width}px;height:120px"
        return (
            f'<svg viewBox="0 -2 {width} 104" style="{style}" preserveAspectRatio="none">'
            f"{''.join(parts)}</svg>"
        )

    def table(self) -> Table:
        """Return the groups that are in other memory, and the peaks, as a table."""
        columns = (
            TableColumn("unit"),
            TableColumn("what"),
            TableColumn("memory"),
            TableColumn("bytes per device", "bytes"),
        )
        table = Table(columns, title="placement")

        memories: dict[MemoryGroup, Memory | ActivationMemory] = {**self.memories}
        for name, memory in self.activations.items():
            memories[MemoryGroup("activations", name)] = memory
        for group, memory in memories.items():
            if memory != "device":
                table.add(group.unit, group.role, memory, self.sizes[group])

        table.add_section()
        for kind, most in self.limits.items():
            if most is None and not self.peak(kind):
                continue
            remark = ""
            if most is not None:
                remark += f" of {most:,}"
            if kind == "device":
                remark += f", {self.needed:,} unplaced"
            table.add(None, "peak", kind, TableCell(self.peak(kind), remark=remark))

        ways = dict[tuple[Memory, Memory], None]()  # each once, in order
        for counts in self.comm.moves.values():
            ways |= dict.fromkeys(counts)
        for source, target in ways:
            count = self.moved(source, target)
            table.add(None, "moved in a step", f"{source} to {target}", count)
        return table


def place(
    step: PlaceableStep,
    params: PyTree,
    state: PyTree,
    *inputs: PyTree,
    device: int,
    host: int | None = None,
    rates: Rates | None = None,
) -> Placement:
    """Return what is in other memory so that a step stays below limits: only the excess.

    The step runs on the abstract mesh: nothing is computed, sent or allocated on devices. The
    memory of the given arrays does not matter, so a model that is larger than its devices begins
    with `shard_params(memory="host")`.

    Args:
        step: of `train_step`, of a full model. State that leaves the device is stored in the memory
            `state_memory` of its optimizer, by default the host. With `update_on="host"` all state
            stays there. Activations with a name, which `fs.remat` keeps by `fs.nn.save_names`, may
            leave or be recomputed.
        params, state: for the step; parameters that leave must be sharded: stage 3.
        inputs: its other arguments: the batch, or buffers and the batch.
        device, host: the most bytes that each device may have in this memory; None: any number.
        rates: of the device, by which costs are compared; default: those of an H100. `fshard
            doctor` measures the links.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = [torch.ones(64, 64) for _ in range(4)]
    >>> params = fs.shard_params(params, fs.fsdp("data", unit="[*]"), mesh=mesh)
    >>> opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    >>> def loss_fn(params, x):
    ...     for w in params:
    ...         x = torch.tanh(x @ w)
    ...     return x.square().mean()
    >>> step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    >>> state, x = opt.init(params), torch.ones(8, 64)
    >>> plan = fs.memory.place(step, params, state, x, device=140_000)
    >>> plan.needed > 140_000 >= plan.peak(), plan.moved("host", "device")
    (True, 49152)
    >>> params, state = plan.apply(params, state)
    >>> params, state, metrics = plan.step(params, state, x)
    """
    measurement = _Measurement(step, params, state, inputs)
    limits: dict[Memory, int | None] = {"device": device, "host": host, "disk": None}
    plan = measurement.measured((), limits, rates or Rates())
    if plan.peak() > device:
        plan = measurement.below(device, plan)
    if host is not None and plan.peak("host") > host:
        raise MemoryLimitError(
            f"memory.place: host memory must be at least {plan.peak('host'):,} bytes per device "
            f"for what leaves device memory; got host={host:,}. Raise the limit, or use "
            'state_memory="disk".'
        )
    if plan.activations:
        step = step.replace(activations=plan.activations)
    return replace(plan, step=step)


def least(step: PlaceableStep, params: PyTree, state: PyTree, *inputs: PyTree) -> Placement:
    """Return the placement with all sharded parameters and all state on the host.

    `place` measures it.
    """
    measurement = _Measurement(step, params, state, inputs)
    resident = measurement.measured((), dict.fromkeys(MEMORIES), Rates())
    options = measurement.options(resident)
    absent = [option for option in options if option.group.role != "activations"]
    return measurement.measured(absent, resident.limits, resident.rates, resident.needed)


def holders_of(plan: Placement) -> str:
    """Return the largest holders of device memory at the peak of a step, as text."""
    rows = plan.used.holders()[:5]
    return "; ".join(f"{row.bytes:,} bytes for {row.purpose} at {row.site}" for row in rows)


def _too_small(plan: Placement, device: int) -> MemoryLimitError:
    return MemoryLimitError(
        f"memory.place: device memory must be at least {plan.peak():,} bytes per device, with as "
        f"much elsewhere as may leave; got device={device:,}. The largest holders are then "
        f"{holders_of(plan)}. Raise the limit, shard over more devices, use smaller units or "
        'microbatches, or update_on="host".'
    )


class _Measurement:
    """Runs of a step on the abstract mesh, with groups in some memories."""

    def __init__(
        self, step: PlaceableStep, params: PyTree, state: PyTree, inputs: Sequence[PyTree]
    ) -> None:
        if not isinstance(step, PlaceableStep):
            raise TypeError(
                f"memory.place: step must be one of train_step; got {type(step).__name__}."
            )
        self._step = step
        self._mesh = replace(
            step.mesh, runtime="abstract", device_type="meta", numbers=None, is_member=True
        )
        self._trees: dict[Role, PyTree] = {"parameters": params, "state": state}
        self._devices = fullest_devices(self._trees)
        self._inputs = inputs
        self._sizes = group_sizes(self._trees)
        self.state_memory: Memory = "host" if step.state_memory == "device" else step.state_memory
        self._sharded = set[str | None]()  # the units that may leave
        for x in flatten(params)[0]:
            if isinstance(x, Sharded) and x.layout.spec.is_flat:
                self._sharded.add(x.layout.unit)

    def measured(
        self,
        absent: Sequence[Option],
        limits: Mapping[Memory, int | None],
        rates: Rates,
        needed: int | None = None,
    ) -> Placement:
        """Run two steps, of which the second knows the order of units, with groups in other memory.

        The peak is that of both, what is moved that of the second; both of the device whose peak is
        highest.
        """

        def run(device: int) -> Placement:
            return self._measured_on(device, absent, limits, rates, needed)

        return max(represented(self._devices, None, run, Mail()), key=Placement.peak)

    def _measured_on(
        self,
        device: int,
        absent: Sequence[Option],
        limits: Mapping[Memory, int | None],
        rates: Rates,
        needed: int | None,
    ) -> Placement:
        """Run the steps as a device of the abstract mesh."""
        memories: dict[MemoryGroup, Memory] = dict.fromkeys(self._sizes, "device")
        activations: dict[str, ActivationMemory] = {}
        if self._step.update_on == "host":
            for group in self._sizes:
                if group.role == "state":
                    memories[group] = self.state_memory
        for option in absent:
            if option.group.role == "activations":
                activations[option.group.unit] = option.memory
            else:
                memories[option.group] = cast(Memory, option.memory)

        with without_counters():
            step = self._step.replace(mesh=self._mesh, activations=activations)
            trees = self._abstract_trees(memories)
        comm = Ledger()
        with without_counters(), limit() as used:
            for _ in range(2):
                used.timeline.clear()
                with ledger() as comm:
                    mark("begin")
                    # A name, so that the second step finds the metrics of the first one in use.
                    *after, _metrics = step(*trees)
                trees[: len(after)] = after
        sizes = dict(self._sizes)
        for name in used.timeline[0].kept:
            largest = max(event.kept[name] for event in used.timeline)
            sizes[MemoryGroup("activations", name)] = largest
        if needed is None:
            needed = used.peak()
        return Placement(
            memories, activations, sizes, limits, used, comm, needed, rates, self._step
        )

    def _abstract_trees(self, memories: Mapping[MemoryGroup, Memory]) -> list[PyTree]:
        """Return the arguments of the step on the abstract mesh."""
        trees = list[PyTree]()
        for role, tree in self._trees.items():
            trees.append(abstract_like(tree, self._mesh, partial(_memory_of, memories, role)))
        for tree in self._inputs:
            trees.append(abstract_like(tree, self._mesh, lambda x: x.layout.memory))
        return trees

    def below(self, device: int, resident: Placement) -> Placement:
        """Return the cheapest placement below a limit, from the one with all on the device."""
        options = self.options(resident)
        needs = torch.tensor([event.peak for event in resident.used.timeline])
        last_of_each = {option.group: option for option in options}
        all_groups = [*last_of_each.values()]
        of_state = [option for option in all_groups if option.group.role == "state"]
        fallbacks = [all_groups, of_state]  # of_state first: buffers may be larger with all
        target = device
        plan = resident
        smallest = resident
        while plan.peak() > device:
            try:
                chosen = choose(options, needs - target)
            except NotEnoughError:
                if not fallbacks:
                    raise _too_small(smallest, device) from None
                chosen = fallbacks.pop()
            plan = self.measured(chosen, resident.limits, resident.rates, resident.needed)
            smallest = min(smallest, plan, key=Placement.peak)
            # The bytes of options are estimates, without buffers and copies under way. The next
            # target is lower by what is still too much; by 1 at least, so that the loop ends.
            target -= max(plan.peak() - device, 1)
        return replace(plan, sizes=resident.sizes)

    def options(self, resident: Placement) -> list[Option]:
        """Return where each group may be, when it is absent, and what that costs."""
        rates = resident.rates
        timeline = resident.used.timeline
        is_updated_on_device = self._step.update_on == "device"
        options: list[Option] = []
        if is_updated_on_device:
            # The update fetches and stores it, with buffers for a few leaves.
            rate = rates.disk if self.state_memory == "disk" else rates.host
            for group, size in self._sizes.items():
                if group.role == "state":
                    absent = torch.full((len(timeline),), size)
                    options.append(Option(group, self.state_memory, absent, 2 * size / rate))

        for group, size in self._sizes.items():
            if group.role != "parameters" or group.unit not in self._sharded:
                continue
            uses = [event for event, x in enumerate(timeline) if x.name == group.unit]
            absent = _absence(uses or [0], size, len(timeline))  # [0]: of one device
            moves = max(len(uses), 1)
            if is_updated_on_device:
                moves += 2  # it is fetched and stored for the update
            options.append(Option(group, "host", absent, moves * size / rates.host))

        for name in timeline[0].kept:
            options += self._options_of_activations(name, resident)
        return options

    def _options_of_activations(self, name: str, resident: Placement) -> list[Option]:
        """Return the costs of activations of a name on the host, and of computing them again."""
        rates = resident.rates
        group = MemoryGroup("activations", name)
        kept = torch.tensor([event.kept[name] for event in resident.used.timeline])
        seconds = 2 * int(kept.max()) / rates.host
        on_host = Option(group, "host", kept * 3 // 4, seconds)  # the rest is under way
        recomputed = Option(group, "recomputed", kept, 0.0)
        plan = self.measured([recomputed], resident.limits, rates)
        flops = plan.flops() - resident.flops()
        return [on_host, recomputed._replace(cost=flops / rates.flops)]


def _absence(uses: Sequence[int], size: int, events: int) -> Tensor:
    """Return the bytes of a unit that are absent in each event, if it leaves between its uses.

    It leaves and returns beside the events after and before a use.

    >>> _absence([0, 6], 9, 7).tolist()
    [0, 0, 9, 9, 9, 0, 0]
    """
    absent = torch.zeros(events, dtype=torch.int64)
    first_of_next_step = events + uses[0]
    for begin, end in pairwise([*uses, first_of_next_step]):
        for event in range(begin + 2, end - 1):
            absent[event % events] = size
    return absent


def abstract_like(tree: PyTree, mesh: Mesh, memory: Callable[[Sharded], Memory]) -> PyTree:
    """Return a tree of arrays of an abstract mesh, without values, in some memories.

    Ties stay ties.
    """
    copies: dict[tuple[int, ...], Any] = {}

    def abstract(x: Any) -> Any:
        if not isinstance(x, Sharded | Tensor):
            return x
        key = key_of(x)
        if key not in copies:
            copies[key] = _abstract_leaf(x, mesh, memory)
        return copies[key]

    return map_leaves(abstract, tree)


def _abstract_leaf(
    x: Sharded | Tensor, mesh: Mesh, memory: Callable[[Sharded], Memory]
) -> Sharded | Tensor:
    if isinstance(x, Sharded):
        layout = x.layout.on(mesh).with_memory(memory(x))
        shape = layout.local_shape(x.shape, local_devices(mesh)[0])
        return Sharded(x.shape, layout, (empty_in(layout.memory, shape, x.dtype, "meta"),))
    if x.ndim:
        return torch.empty_like(x, device="meta")
    return x.clone()  # a number, which a step may read


def group_sizes(trees: Mapping[Role, PyTree]) -> dict[MemoryGroup, int]:
    """Return the bytes of the groups of some trees on the device that stores most of them."""
    return _sizes_on(fullest_devices(trees)[0], trees)


MEASURED_OWNERS = 8
"""Each takes two abstract steps. Those that store less than eight others are unlikely to have the
highest peak."""


def fullest_devices(trees: Mapping[Role, PyTree]) -> list[int]:
    """Return the devices that store most of some trees, at most 8.

    Owners of optimizer state have unequal parts of it.
    """
    arrays = [x for tree in trees.values() for x in flatten(tree)[0] if isinstance(x, Sharded)]
    has_owners = any(x.layout.spec.at_axes for x in arrays)
    if not has_owners:
        return [0]  # of uneven shards, too, the first device has the largest

    def stored(device: int) -> int:
        return sum(_sizes_on(device, trees).values())

    devices = sorted(range(arrays[0].mesh.size), key=stored, reverse=True)
    return devices[:MEASURED_OWNERS]


def _sizes_on(device: int, trees: Mapping[Role, PyTree]) -> dict[MemoryGroup, int]:
    sizes = dict[MemoryGroup, int]()
    for role, tree in trees.items():
        arrays = dict[Any, Sharded]()  # tied ones once
        for x in flatten(tree)[0]:
            if isinstance(x, Sharded) and x.ndim:
                arrays[key_of(x)] = x
        for x in arrays.values():
            group = MemoryGroup(role, str(x.layout.unit))
            size = prod(x.layout.local_shape(x.shape, device)) * x.dtype.itemsize
            sizes[group] = sizes.get(group, 0) + size
    return sizes


def in_memories(tree: PyTree, role: Role, memories: Mapping[MemoryGroup, Memory]) -> PyTree:
    """Return a tree whose arrays are in the memories of their groups."""

    def layout_of(x: Any) -> Layout | None:
        if not isinstance(x, Sharded):
            return None
        return x.layout.with_memory(_memory_of(memories, role, x))

    return reshard(tree, map_leaves(layout_of, tree))


def _memory_of(memories: Mapping[MemoryGroup, Memory], role: Role, x: Sharded) -> Memory:
    if not x.ndim:
        return x.layout.memory  # a number is in no group
    return memories.get(MemoryGroup(role, str(x.layout.unit)), x.layout.memory)
