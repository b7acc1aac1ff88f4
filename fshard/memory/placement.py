"""`place`: what leaves the devices' memory in a step, so that it stays below a limit.

    measure     the step runs twice on the abstract mesh, with everything on the device: bytes between uses of units
    choose      parameters, state and activations, the cheapest for the bytes by which the limit is passed (see `choice`)
    verify      the step runs again with these in other memory; if it passes the limit still, more are chosen

A placement is a value: the memory kind of each unit's parameters and state, and of each named activation. All devices
follow one, which is made from shapes alone. A step that uses units in another order than the measured one fetches them
when it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard.errors import MemoryLimitError
from fshard.memory.choice import NotEnoughError, Option, choose
from fshard.memory.kinds import mark
from fshard.memory.limit import limit
from fshard.memory.usage import MemoryUsage
from fshard.mesh.collectives.ledger import Ledger, ledger
from fshard.mesh.layout import Memory, Mesh, PyTree, flatten, map_leaves
from fshard.mesh.layout.counting import MEMORIES, ActivationMemory, without_counters
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.reshard.device_put import reshard
from fshard.mesh.runtimes.abstract import Mail, represented
from fshard.mesh.spmd.run import local_devices
from fshard.tables import Tabular

if TYPE_CHECKING:  # it is imported where a table is shown
    from rich.table import Table

Role = Literal["parameters", "state", "activations"]


class MemoryGroup(NamedTuple):
    """The parameters of a unit, their optimizer state, or activations with one name: they are in one memory."""

    role: Role
    unit: str


class Rates(NamedTuple):
    """The work of a device in a second: operations of matrix products, and bytes copied to and from the host and a disk."""

    flops: float = 4e14
    host: float = 4e10
    disk: float = 4e9


@dataclass(frozen=True, repr=False)
class Placement(Tabular):
    """The memory of each group, and what a step then needs and moves. Prints as a table: see `place`.

    Args:
        memories: of parameters and state.
        activations: the memory of named ones that do not stay on the device, for `train_step(activations=)`.
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
    step: Callable[..., Any]

    def peak(self, kind: Memory = "device") -> int:
        """Return the largest number of bytes that a device holds in a step, the given trees and the batch included."""
        return self.used.peak(kind)

    def moved(self, source: Memory, target: Memory) -> int:
        """Return the bytes that a device moves between two memories in a step."""
        return self.comm.moved(source, target)

    def apply(self, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return parameters and state in their memories; those that are there already are the same arrays."""
        return in_memories(params, "parameters", self.memories), in_memories(
            state, "state", self.memories
        )

    def flops(self) -> int:
        """Return the floating-point operations of a device in a step: those of matrix products, convolutions and attention."""
        return sum(event.flops for event in self.used.timeline)

    def seconds(self) -> float:
        """Return the time of a step by the rates: matrix products and transfers; without the network and other operations.

        Copies to and from a memory each run in the order of their starts, beside the computation. Those that start in one
        event are there when the next one ends; those of the update when it ends.
        """
        now, ends = 0.0, dict[tuple[Memory, Memory], float]()
        for event in self.used.timeline:
            before = max(ends.values(), default=0.0)
            for way, count in event.moved.items():
                rate = self.rates.disk if "disk" in way else self.rates.host
                ends[way] = max(ends.get(way, 0.0), now) + count / rate
            now = max(now + event.flops / self.rates.flops, before)
        return max(now, *ends.values(), 0.0)

    def _repr_html_(self) -> str:
        """Return the table, and the curve of device memory under a step with its limit."""
        limit, rows = self.limits["device"], self.used.timeline
        top = max(
            [event.peak for event in rows]
            + ([] if limit is None or limit > 2 * self.needed else [limit])
        )
        bars = "".join(
            f'<rect x="{12 * i}" y="{100 - 100 * event.peak / top:.1f}" width="11" height="{100 * event.peak / top:.1f}" '
            f'fill="#5b8ff9"><title>{escape(event.name)}: {event.peak:,} bytes</title></rect>'
            for i, event in enumerate(rows)
        )
        line = (
            ""
            if limit is None
            else f'<path d="M0 {100 - 100 * limit / top:.1f}H{12 * len(rows)}" stroke="#d33"/>'
        )
        return super()._repr_html_() + (
            f'<svg viewBox="0 -2 {12 * len(rows)} 104" style="width:100%;max-width:{12 * len(rows)}px;height:120px" '
            f'preserveAspectRatio="none">{bars}{line}</svg>'
        )

    def table(self) -> Table:
        """Return the groups that are in other memory, and the peaks, as a rich table."""
        from rich.table import Table

        table = Table("unit", "what", "memory", "bytes per device", title="placement")
        table.columns[3].justify = "right"
        activations = {
            MemoryGroup("activations", name): memory for name, memory in self.activations.items()
        }
        for group, memory in {**self.memories, **activations}.items():
            if memory != "device":
                table.add_row(group.unit, group.role, memory, f"{self.sizes[group]:,}")
        table.add_section()
        for kind, most in self.limits.items():
            if most is not None or self.peak(kind):
                text = f"{self.peak(kind):,}{'' if most is None else f' of {most:,}'}"
                table.add_row(
                    "",
                    "peak",
                    kind,
                    f"{text}, {self.needed:,} unplaced" if kind == "device" else text,
                )
        for source, target in dict.fromkeys(
            pair for counts in self.comm.moves.values() for pair in counts
        ):
            table.add_row(
                "", "moved in a step", f"{source} to {target}", f"{self.moved(source, target):,}"
            )
        return table


def place(
    step: Any,
    params: PyTree,
    state: PyTree,
    *inputs: PyTree,
    device: int,
    host: int | None = None,
    rates: Rates | None = None,
) -> Placement:
    """Return what is in other memory so that a step stays below limits: parameters, state and activations, only the excess.

    The step runs on the abstract mesh: nothing is computed, sent or allocated on devices. The memory of the given arrays
    does not matter, so a model that is larger than its devices begins with `shard_params(memory="host")`.

    Args:
        step: of `train_step`, of a full model. State that leaves the device is stored in the memory `state_memory` of its
            optimizer, by default the host. With `update_on="host"` all state stays there. Activations with a name, which
            `fs.remat` keeps by `fs.nn.save_names`, may leave or be recomputed.
        params, state: for the step; parameters that leave must be sharded: stage 3.
        inputs: its other arguments: the batch, or buffers and the batch.
        device, host: the most bytes that each device may have in this memory; None: any number.
        rates: of the device, by which costs are compared; default: those of an H100. `fshard doctor` measures the links.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params([torch.ones(64, 64) for _ in range(4)], fs.fsdp("data", unit="[*]"), mesh=mesh)
    >>> opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    >>> def loss_fn(params, x):
    ...     for w in params:
    ...         x = torch.tanh(x @ w)
    ...     return x.square().mean()
    >>> step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)
    >>> plan = fs.memory.place(step, params, opt.init(params), torch.ones(8, 64), device=140_000)
    >>> plan.needed > 140_000 >= plan.peak(), plan.moved("host", "device")
    (True, 49152)
    >>> params, state = plan.apply(params, opt.init(params))
    >>> params, state, metrics = plan.step(params, state, torch.ones(8, 64))
    """
    run = _Measurement(step, params, state, inputs)
    plan = run.measured((), {"device": device, "host": host, "disk": None}, rates or Rates())
    if plan.peak() > device:
        plan = run.below(device, plan)
    if host is not None and plan.peak("host") > host:
        raise MemoryLimitError(
            f"memory.place: host memory must be at least {plan.peak('host'):,} bytes per device for what leaves device memory; "
            f'got host={host:,}. Raise the limit, or use state_memory="disk".'
        )
    return replace(
        plan, step=step.changed(activations=plan.activations) if plan.activations else step
    )


def least(step: Any, params: PyTree, state: PyTree, *inputs: PyTree) -> Placement:
    """Return the placement with all sharded parameters and all state on the host, as `place` measures it."""
    run = _Measurement(step, params, state, inputs)
    resident = run.measured((), dict.fromkeys(MEMORIES), Rates())
    absent = [option for option in run.options(resident) if option.group.role != "activations"]
    return run.measured(absent, resident.limits, resident.rates, resident.needed)


def holders_of(plan: Placement) -> str:
    """Return the largest holders of device memory at the peak of a step, as text."""
    rows = plan.used.holders()[:5]
    return "; ".join(f"{row.bytes:,} bytes for {row.purpose} at {row.site}" for row in rows)


def _too_small(plan: Placement, device: int) -> MemoryLimitError:
    holders = holders_of(plan)
    return MemoryLimitError(
        f"memory.place: device memory must be at least {plan.peak():,} bytes per device, with as much elsewhere as may leave; "
        f"got device={device:,}. The largest holders are then {holders}. Raise the limit, shard over more devices, use smaller "
        'units or microbatches, or update_on="host".'
    )


class _Measurement:
    """Runs of a step on the abstract mesh, with groups in some memories."""

    def __init__(self, step: Any, params: PyTree, state: PyTree, inputs: Sequence[PyTree]) -> None:
        if not hasattr(step, "changed"):
            raise TypeError(
                f"memory.place: step must be one of train_step; got {type(step).__name__}."
            )
        self._mesh = replace(step.mesh, runtime="abstract", device_type="meta", ranks=None)
        self._step, self._inputs = step, inputs
        self._trees: dict[Role, PyTree] = {"parameters": params, "state": state}
        self._devices = fullest_devices(self._trees)
        self._sizes = group_sizes(self._trees)
        self.state_memory: Memory = "host" if step.state_memory == "device" else step.state_memory
        arrays = [x for x in flatten(params)[0] if isinstance(x, Sharded)]
        self._sharded = {x.layout.unit for x in arrays if x.layout.spec.is_flat}

    def measured(
        self,
        absent: Sequence[Option],
        limits: Mapping[Memory, int | None],
        rates: Rates,
        needed: int | None = None,
    ) -> Placement:
        """Run two steps, of which the second knows the order of units, with groups in other memory than the device's.

        The peak is that of both, what is moved that of the second; both of the device whose peak is highest.
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
        if self._step.update_on == "host":
            memories |= {group: self.state_memory for group in self._sizes if group.role == "state"}
        memories |= {option.group: option.memory for option in absent if option.group in memories}
        activations = {
            option.group.unit: option.memory for option in absent if option.group not in memories
        }
        with without_counters():
            step = self._step.changed(mesh=self._mesh, activations=activations)
            trees = [
                abstract_like(tree, self._mesh, partial(_memory_of, memories, role))
                for role, tree in self._trees.items()
            ]
            trees += [
                abstract_like(tree, self._mesh, lambda x: x.layout.memory) for tree in self._inputs
            ]
        metrics, comm, sizes = None, Ledger(), dict(self._sizes)
        with without_counters(), limit() as used:
            for _ in range(2):
                used.timeline.clear()
                with ledger() as comm:
                    mark("begin")
                    *after, metrics = step(*trees)
                trees[: len(after)] = after
        del metrics  # which the next step finds in use
        for name in used.timeline[0].kept:
            sizes[MemoryGroup("activations", name)] = max(
                event.kept[name] for event in used.timeline
            )
        needed = used.peak() if needed is None else needed
        return Placement(
            memories, activations, sizes, limits, used, comm, needed, rates, self._step
        )

    def below(self, device: int, resident: Placement) -> Placement:
        """Return the cheapest placement below a limit, from the one with all on the device."""
        options, needs = (
            self.options(resident),
            torch.tensor([event.peak for event in resident.used.timeline]),
        )
        each = {option.group: option for option in options}
        fallbacks = [
            [*each.values()],
            [x for x in each.values() if x.group.role == "state"],
        ]  # buffers may be larger there
        target, plan, smallest = device, resident, resident
        while plan.peak() > device:
            try:
                chosen = choose(options, needs - target)
            except NotEnoughError:
                if not fallbacks:
                    raise _too_small(smallest, device) from None
                chosen = fallbacks.pop()
            plan = self.measured(chosen, resident.limits, resident.rates, resident.needed)
            smallest = min(smallest, plan, key=Placement.peak)
            target -= max(plan.peak() - device, 1)
        return replace(plan, sizes=resident.sizes)

    def options(self, resident: Placement) -> list[Option]:
        """Return where each group may be, when it is absent, and what that costs."""
        timeline, rates, on_device = (
            resident.used.timeline,
            resident.rates,
            self._step.update_on == "device",
        )
        events, rate = len(timeline), rates.disk if self.state_memory == "disk" else rates.host
        of_state = [
            (group, size)
            for group, size in self._sizes.items()
            if group.role == "state" and on_device
        ]
        options = [  # the update has buffers for a few leaves
            Option(group, self.state_memory, torch.full((events,), size), 2 * size / rate)
            for group, size in of_state
        ]
        for group, size in self._sizes.items():
            if group.role == "parameters" and group.unit in self._sharded:
                uses = [event for event, x in enumerate(timeline) if x.name == group.unit] or [
                    0
                ]  # [0]: of one device
                absent = torch.zeros(events, dtype=torch.int64)
                for begin, end in pairwise(
                    [*uses, events + uses[0]]
                ):  # it leaves and returns beside other events
                    absent[[event % events for event in range(begin + 2, end - 1)]] = size
                moves = (
                    len(uses) + 2 * on_device
                )  # for an update on the device it is fetched and stored
                options.append(Option(group, "host", absent, moves * size / rates.host))
        for name in timeline[0].kept:
            group = MemoryGroup("activations", name)
            kept = torch.tensor([event.kept[name] for event in timeline])
            options.append(
                Option(group, "host", kept * 3 // 4, 2 * int(kept.max()) / rates.host)
            )  # the rest is under way
            recomputed = Option(group, "recomputed", kept, 0.0)
            again = self.measured([recomputed], resident.limits, rates)
            options.append(
                recomputed._replace(cost=(again.flops() - resident.flops()) / rates.flops)
            )
        return options


def abstract_like(tree: PyTree, mesh: Mesh, memory: Callable[[Sharded], Memory]) -> PyTree:
    """Return a tree of arrays of an abstract mesh, without values, in some memories; ties stay ties."""
    made: dict[tuple[int, ...], Any] = {}

    def leaf(x: Any) -> Any:
        if not isinstance(x, Sharded | Tensor):
            return x
        if key_of(x) not in made:
            if isinstance(x, Sharded):
                layout = x.layout.on(mesh).with_memory(memory(x))
                shard = empty_in(
                    layout.memory,
                    layout.local_shape(x.shape, local_devices(mesh)[0]),
                    x.dtype,
                    "meta",
                )
                made[key_of(x)] = Sharded(x.shape, layout, (shard,))
            else:
                made[key_of(x)] = torch.empty_like(x, device="meta") if x.ndim else x.clone()
        return made[key_of(x)]

    return map_leaves(leaf, tree)


def group_sizes(trees: Mapping[Role, PyTree]) -> dict[MemoryGroup, int]:
    """Return the bytes of the groups of some trees on the device that stores most of them."""
    return _sizes_on(fullest_devices(trees)[0], trees)


MEASURED_OWNERS = 8
"""Each takes two abstract steps. Those that store less than eight others are unlikely to have the highest peak."""


def fullest_devices(trees: Mapping[Role, PyTree]) -> list[int]:
    """Return the devices that store most of some trees, at most 8: owners of optimizer state have unequal parts of it."""
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
        for x in {
            key_of(x): x for x in flatten(tree)[0] if isinstance(x, Sharded) and x.ndim
        }.values():
            group = MemoryGroup(role, str(x.layout.unit))
            count = prod(x.layout.local_shape(x.shape, device))
            sizes[group] = sizes.get(group, 0) + count * x.dtype.itemsize
    return sizes


def in_memories(tree: PyTree, role: Role, memories: Mapping[MemoryGroup, Memory]) -> PyTree:
    """Return a tree whose arrays are in the memories of their groups."""

    layouts = map_leaves(
        lambda x: (
            x.layout.with_memory(_memory_of(memories, role, x)) if isinstance(x, Sharded) else None
        ),
        tree,
    )
    return reshard(tree, layouts)


def _memory_of(memories: Mapping[MemoryGroup, Memory], role: Role, x: Sharded) -> Memory:
    return (
        memories.get(MemoryGroup(role, str(x.layout.unit)), x.layout.memory)
        if x.ndim
        else x.layout.memory
    )
