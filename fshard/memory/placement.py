"""`place`: which parameters and which optimizer state of a step leave the devices' memory, so that it stays below a limit.

    measure     the step runs twice on the abstract mesh, with everything on the device: bytes between uses of units
    choose      units and their state that are not used for a while, the cheapest for the bytes by which the limit is
                passed (see `gaps`)
    verify      the step runs again with these in other memory; if it passes the limit still, more are chosen

A placement is a value: the memory kind of each unit's parameters and state. All devices follow one, which is made from
shapes alone. A step that uses units in another order than the measured one fetches them when it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fshard.ambient import setting
from fshard.errors import MemoryLimitError
from fshard.memory.gaps import Gap, NotEnoughError, bytes_beyond, choose_gaps
from fshard.memory.kinds import mark
from fshard.memory.limit import limit
from fshard.memory.usage import MemoryUsage
from fshard.mesh.collectives.ledger import Ledger, ledger
from fshard.mesh.layout import Memory, PyTree, flatten, map_leaves
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.reshard.device_put import reshard
from fshard.tables import Tabular

if TYPE_CHECKING:  # it is imported where a table is shown
    from rich.table import Table

Role = Literal["parameters", "state"]


class MemoryGroup(NamedTuple):
    """The parameters of a unit, or their optimizer state: they are in one memory."""

    role: Role
    unit: str


@dataclass(frozen=True, repr=False)
class Placement(Tabular):
    """The memory of each group, and what a step then needs and moves. Prints as a table: see `place`.

    Args:
        memories: of the groups.
        sizes: their bytes per device.
        limits: by memory kind, in bytes per device.
        used: memory that the step uses.
        comm: what it moves.
        needed: the bytes of device memory without limits.
    """

    memories: Mapping[MemoryGroup, Memory]
    sizes: Mapping[MemoryGroup, int]
    limits: Mapping[Memory, int | None]
    used: MemoryUsage = field(repr=False)
    comm: Ledger = field(repr=False)
    needed: int

    def peak(self, kind: Memory = "device") -> int:
        """Return the largest number of bytes that a device holds in a step, the given trees and the batch included."""
        return self.used.peak(kind)

    def moved(self, source: Memory, target: Memory) -> int:
        """Return the bytes that a device moves between two memories in a step."""
        return self.comm.moved(source, target)

    def apply(self, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return parameters and state in their memories; those that are there already are the same arrays."""
        return in_memories(params, "parameters", self.memories), in_memories(state, "state", self.memories)

    def _repr_html_(self) -> str:
        """Return the table, and the curve of device memory under a step with its limit."""
        return super()._repr_html_() + self._curve()

    def _curve(self) -> str:
        limit, rows = self.limits["device"], self.used.timeline
        top = max([most for _, most in rows] + ([] if limit is None or limit > 2 * self.needed else [limit]))
        bars = "".join(
            f'<rect x="{12 * i}" y="{100 - 100 * most / top:.1f}" width="11" height="{100 * most / top:.1f}" fill="#5b8ff9">'
            f"<title>{escape(name)}: {most:,} bytes</title></rect>"
            for i, (name, most) in enumerate(rows)
        )
        line = "" if limit is None else f'<path d="M0 {100 - 100 * limit / top:.1f}H{12 * len(rows)}" stroke="#d33"/>'
        return (
            f'<svg viewBox="0 -2 {12 * len(rows)} 104" style="width:100%;max-width:{12 * len(rows)}px;height:120px" '
            f'preserveAspectRatio="none">{bars}{line}</svg>'
        )

    def table(self) -> Table:
        """Return the groups that are in other memory, and the peaks, as a rich table."""
        from rich.table import Table

        table = Table("unit", "what", "memory", "bytes per device", title="placement")
        table.columns[3].justify = "right"
        for group, memory in self.memories.items():
            if memory != "device":
                table.add_row(group.unit, group.role, memory, f"{self.sizes[group]:,}")
        table.add_section()
        for kind, most in self.limits.items():
            if most is not None or self.peak(kind):
                text = f"{self.peak(kind):,}{'' if most is None else f' of {most:,}'}"
                table.add_row("", "peak", kind, f"{text}, {self.needed:,} unplaced" if kind == "device" else text)
        for source, target in dict.fromkeys(pair for counts in self.comm.moves.values() for pair in counts):
            table.add_row("", "moved in a step", f"{source} to {target}", f"{self.moved(source, target):,}")
        return table


def place(
    step: Callable[..., Any], params: PyTree, state: PyTree, *inputs: PyTree, device: int, host: int | None = None
) -> Placement:
    """Return which units and which state are in other memory, so that a step stays below limits: only the excess.

    The step runs on the abstract mesh: nothing is computed, sent or allocated on devices. The memory of the given arrays
    does not matter, so a model that is larger than its devices begins with `shard_params(memory="host")`.

    Args:
        step: of `train_step`, of a full model. State that leaves the device is stored in the memory `state_memory` of its
            optimizer, by default the host. With `update_on="host"` all state stays there.
        params, state: for the step; parameters that leave must be sharded: stage 3.
        inputs: its other arguments: the batch, or buffers and the batch.
        device, host: the most bytes that each device may have in this memory; None: any number.

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
    """
    limits: dict[Memory, int | None] = {"device": device, "host": host, "disk": None}
    run = _Measurement(step, params, state, inputs)
    memories = run.memories(())
    used, comm = run.measured(memories)
    plan = Placement(memories, run.sizes, limits, used, comm, used.peak())
    gaps, needs = run.gaps(used.timeline), [most for _, most in used.timeline]
    target, smallest = device, plan
    every = {gap.name for gap in gaps}
    fallbacks = [every, {group for group in every if group.role == "state"}]  # in which buffers may be larger
    while plan.peak() > device:
        try:
            absent = _chosen(gaps, needs, target)
        except NotEnoughError:
            if not fallbacks:
                raise _too_small(smallest, device) from None
            absent = fallbacks.pop()
        memories = run.memories(absent)
        used, comm = run.measured(memories)
        plan = replace(plan, memories=memories, used=used, comm=comm)
        smallest = min(smallest, plan, key=Placement.peak)
        target -= max(plan.peak() - device, 1)
    if host is not None and plan.peak("host") > host:
        raise MemoryLimitError(
            f"memory.place: host memory must be at least {plan.peak('host'):,} bytes per device for what leaves device memory; "
            f'got host={host:,}. Raise the limit, or use state_memory="disk".'
        )
    return plan


def _chosen(gaps: Sequence[Gap], needs: Sequence[int], target: int) -> set[MemoryGroup]:
    """Return the groups that leave so that no event needs more than the target."""
    absent = {gap.name for gap in choose_gaps(gaps, needs, target)}
    cost = {group: sum(gap.cost for gap in gaps if gap.name == group) for group in absent}
    for group in sorted(absent, key=lambda group: -cost[group]):  # all gaps of a group count, not only the chosen ones
        rest = [gap for gap in gaps if gap.name in absent - {group}]
        if bytes_beyond(rest, needs, target).max() <= 0:
            absent.discard(group)
    return absent


def _too_small(plan: Placement, device: int) -> MemoryLimitError:
    holders = "; ".join(f"{x.bytes:,} bytes for {x.purpose} at {x.site}" for x in plan.used.holders()[:5])
    return MemoryLimitError(
        f"memory.place: device memory must be at least {plan.peak():,} bytes per device, with as much elsewhere as may leave; "
        f"got device={device:,}. The largest holders are then {holders}. Raise the limit, shard over more devices, use smaller "
        'units or microbatches, or update_on="host".'
    )


class _Measurement:
    """Runs of a step on the abstract mesh, with groups in some memories."""

    def __init__(self, step: Any, params: PyTree, state: PyTree, inputs: Sequence[PyTree]) -> None:
        if not hasattr(step, "on_mesh"):
            raise TypeError(f"memory.place: step must be one of train_step; got {type(step).__name__}.")
        self._mesh = replace(step.mesh, runtime="abstract", device_type="meta", ranks=None)
        self._step, self._made = step, step.on_mesh(self._mesh)
        self._trees, self._inputs = (params, state), inputs
        trees = dict(zip(get_args(Role), self._trees, strict=True))
        self.sizes = group_sizes(trees)
        arrays = [x for x in flatten(params)[0] if isinstance(x, Sharded)]
        self._sharded = {x.layout.unit for x in arrays if x.layout.spec.is_flat}

    def memories(self, absent: Collection[MemoryGroup]) -> dict[MemoryGroup, Memory]:
        """Return the memory of each group, if some leave the device."""
        memory, on_host = self._step.state_memory, self._step.update_on == "host"
        of_state: Memory = "host" if memory == "device" else memory
        return {
            group: "device"
            if group not in absent and not (on_host and group.role == "state")
            else "host"
            if group.role == "parameters"
            else of_state
            for group in self.sizes
        }

    def measured(self, memories: Mapping[MemoryGroup, Memory]) -> tuple[MemoryUsage, Ledger]:
        """Run two steps, of which the second knows the order of units; return memory of both, and moves of the second."""
        metrics, comm = None, Ledger()
        with setting(counters=()):
            params, state = (
                self._abstract(tree, partial(_memory_of, memories, role))
                for role, tree in zip(get_args(Role), self._trees, strict=True)
            )
            inputs = [self._abstract(tree, lambda x: x.layout.memory) for tree in self._inputs]
        with setting(counters=()), limit() as used:
            for _ in range(2):
                used.timeline.clear()
                with ledger() as comm:
                    mark("begin")
                    params, state, *buffers, metrics = self._made(params, state, *inputs)
                inputs[: len(buffers)] = buffers
        del metrics  # which the next step finds in use
        return used, comm

    def gaps(self, timeline: Sequence[tuple[str, int]]) -> list[Gap]:
        """Return the times between the uses of each group that may leave; they cost the bytes that are moved."""
        events, on_device, gaps = len(timeline), self._step.update_on == "device", list[Gap]()
        for group, size in self.sizes.items():
            if group.role == "state":  # the update has buffers for a few leaves of it
                gaps += [Gap(group, size, -2, events + 1, 2.0 * size)] if on_device else []
                continue
            uses = [event for event, (unit, _) in enumerate(timeline) if unit == group.unit] or [
                0
            ]  # [0]: of one device
            for begin, end in pairwise([*uses, events + uses[0]]) if group.unit in self._sharded else ():
                moves = 1 + (end >= events) + (end >= events and on_device)  # a fetch; after the update also a store
                gaps.append(Gap(group, size, begin, end, float(moves * size)))
        return gaps

    def _abstract(self, tree: PyTree, memory: Callable[[Sharded], Memory]) -> PyTree:
        """Return a tree of arrays without values, in some memories; ties stay ties."""
        made: dict[tuple[int, ...], Any] = {}

        def leaf(x: Any) -> Any:
            if not isinstance(x, Sharded | Tensor):
                return x
            if key_of(x) not in made:
                if isinstance(x, Sharded):
                    layout = x.layout.on(self._mesh).with_memory(memory(x))
                    shard = empty_in(layout.memory, layout.local_shape(x.shape, 0), x.dtype, "meta")
                    made[key_of(x)] = Sharded(x.shape, layout, (shard,))
                else:
                    made[key_of(x)] = torch.empty_like(x, device="meta") if x.ndim else x.clone()
            return made[key_of(x)]

        return map_leaves(leaf, tree)


def group_sizes(trees: Mapping[Role, PyTree]) -> dict[MemoryGroup, int]:
    """Return the bytes of the groups of some trees on the first device, which has the most."""
    sizes = dict[MemoryGroup, int]()
    for role, tree in trees.items():
        for x in {key_of(x): x for x in flatten(tree)[0] if isinstance(x, Sharded) and x.ndim}.values():
            group = MemoryGroup(role, str(x.layout.unit))
            sizes[group] = sizes.get(group, 0) + prod(x.layout.local_shape(x.shape, 0)) * x.dtype.itemsize
    return sizes


def in_memories(tree: PyTree, role: Role, memories: Mapping[MemoryGroup, Memory]) -> PyTree:
    """Return a tree whose arrays are in the memories of their groups."""

    layouts = map_leaves(
        lambda x: x.layout.with_memory(_memory_of(memories, role, x)) if isinstance(x, Sharded) else None, tree
    )
    return reshard(tree, layouts)


def _memory_of(memories: Mapping[MemoryGroup, Memory], role: Role, x: Sharded) -> Memory:
    return memories.get(MemoryGroup(role, str(x.layout.unit)), x.layout.memory) if x.ndim else x.layout.memory
