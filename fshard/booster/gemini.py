"""`GeminiPlugin`: ZeRO 3 whose units of parameters and state are in host memory as far as device memory needs it.

auto, a functional step    begins with all on the host; the first step's placement is that of `fs.memory.place`
auto, torch's loop         begins with all on the host, where a step must fit; after two steps, whose peak is known, what has
                           room returns
static                     fractions of parameters and state, by units
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from fshard.ambient import ambient
from fshard.booster.plugins import ShardedPlugin
from fshard.errors import LayoutError, MemoryLimitError
from fshard.memory.placement import (
    MemoryGroup,
    Placement,
    Role,
    abstract_like,
    group_sizes,
    holders_of,
    in_memories,
    least,
    place,
)
from fshard.memory.state import UpdateOn
from fshard.mesh.collectives.api import pmax
from fshard.mesh.layout import Memory, Mesh, P, PyTree, flatten, map_leaves
from fshard.mesh.spmd.run import run_on_devices
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.transforms.batch import BatchPart, rows_of
from fshard.transforms.shard_params import Fsdp, Rules
from fshard.transforms.train_step import train_step

MOST = 1 << 62
"""The limit of a mesh of CPUs, whose memory is the host's."""


@dataclass(frozen=True, kw_only=True)
class GeminiPlugin(ShardedPlugin):
    """ZeRO 3 with parameters and optimizer state in host memory: only what device memory has no room for, or fractions.

    Gradients are sent to the host, and updated there, where all state is on the host; else state is sent to the device.

    Args:
        placement: "auto" places by `device` and `host`; "static" by the fractions.
        device, host: the most bytes that a device may have in this memory; None: all memory of a GPU, any number.
        offload_optim_frac: of the optimizer's state, stored on the host.
        offload_param_frac: of the parameters, stored on the host; those are sharded.
        shard_param_frac: of the parameters, sharded; the others are replicated, as by `ZeroPlugin(stage=2)`.

    Units are chosen from the first on, as many as have a fraction of all bytes.
    """

    placement: Literal["auto", "static"] = "auto"
    device: int | None = None
    host: int | None = None
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    shard_param_frac: float = 1.0

    def contradictions(self) -> list[str]:
        fractions = {name: getattr(self, name) for name in _FRACTIONS}
        errors = [
            f"{name} must be from 0 to 1; got {x!r}"
            for name, x in fractions.items()
            if isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x <= 1
        ]
        limits = {"device": self.device, "host": self.host}
        if self.placement == "auto" and tuple(fractions.values()) != (0, 0, 1):
            errors.append('fractions are for placement="static"; "auto" takes device= and host=')
        if self.placement == "static" and any(x is not None for x in limits.values()):
            errors.append('device= and host= are for placement="auto"; "static" takes fractions')
        if not errors and self.offload_param_frac > 0 and self.shard_param_frac < 1:
            errors.append(
                f"shard_param_frac must be 1 with offload_param_frac; got {self.shard_param_frac}"
            )
        return errors + super().contradictions()

    def param_memory(self) -> Memory:
        return "host" if self.placement == "auto" or self.offload_param_frac > 0 else "device"

    def state_memory(self) -> Memory:
        return "host" if self.placement == "auto" or self.offload_optim_frac > 0 else "device"

    def update_on(self) -> UpdateOn:
        return "host" if self.placement == "auto" or self.offload_optim_frac == 1 else "device"

    def rules_of(self, params: Mapping[str, Any], within: Rules = None) -> Rules:
        """Return the layouts of parameters: those of the first units are sharded, the others replicated."""
        sharded = self.rules(within)
        if self.shard_param_frac == 1 or not isinstance(sharded, Fsdp):
            return sharded
        units, sizes = (
            sharded.units([f".{name}" for name in params], [*params.values()]),
            dict[str, int](),
        )
        for unit, x in zip(units, params.values(), strict=True):
            sizes[unit] = sizes.get(unit, 0) + x.numel() * x.dtype.itemsize
        chosen = _first(sizes, self.shard_param_frac)
        return {
            name: sharded if unit in chosen else P()
            for name, unit in zip(params, units, strict=True)
        }

    def placed(self, role: Role, tree: PyTree) -> PyTree:
        """Return new parameters or state in the memories of a static placement."""
        fraction = self.offload_param_frac if role == "parameters" else self.offload_optim_frac
        if self.placement == "auto":
            self._validate_host(sum(group_sizes({role: tree}).values()))
            return tree
        if fraction in (0, 1):
            return tree
        sizes = {group.unit: size for group, size in group_sizes({role: tree}).items()}
        chosen = _first(sizes, fraction)
        return in_memories(
            tree, role, {MemoryGroup(role, unit): _HOST[unit in chosen] for unit in sizes}
        )

    def _validate_host(self, needed: int) -> None:
        if self.host is not None and needed > self.host:
            raise MemoryLimitError(
                f"GeminiPlugin: host memory must be at least {needed:,} bytes per device for what begins or stays there; got "
                f"host={self.host:,}. Raise the limit, or shard over more devices."
            )

    def placed_step(
        self,
        make: Callable[[UpdateOn], Any],
        params: PyTree,
        state: PyTree,
        buffers: PyTree,
        batch: PyTree,
    ) -> tuple[UpdateOn, Placement | None]:
        """Return where a step updates, on the device if that has room, and its placement.

        There is no placement, and all stays on the host, if the model reads values, which an abstract mesh has not: such
        as the masks of transformers' causal models.
        """
        mesh = self.default_mesh()
        batch = _of_first_device(batch, mesh)
        limits: Any = {"device": _limit(self.device, mesh), "host": self.host}
        try:
            with suppress(MemoryLimitError):
                return "device", place(make("device"), params, state, buffers, batch, **limits)
            return "host", place(make("host"), params, state, buffers, batch, **limits)
        except LayoutError as error:
            warn(
                "GeminiPlugin: all parameters and state stay on the host, since the step cannot be measured before it runs: "
                f"{error} Leave out what makes the model read values, such as an attention_mask of ones.",
                stacklevel=5,
            )
            return "host", None

    def validate_loop(
        self,
        run: Callable[..., Any],
        opt: ShardedOptimizer,
        params: PyTree,
        buffers: PyTree,
        batch: Any,
    ) -> None:
        """Raise if a loop's step passes the limit with all parameters and state on the host.

        The step runs on the abstract mesh with a loss in place of the caller's, of one tensor of the output's size. A model
        that cannot run there, since it reads values, gets a warning: `validate_peak` finds what is counted.
        """
        limit = _limit(self.device, self.default_mesh())
        if self.placement == "static" or limit == MOST:
            return

        def loss(params: PyTree, buffers: PyTree, batch: Any) -> tuple[Tensor, PyTree]:
            args, kwargs = batch
            output, after = run(params, buffers, *args, **kwargs)
            floats = [x for x in flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
            return torch.stack([(2 * x).abs().square().mean().float() for x in floats]).sum(), after

        step = train_step(loss, opt, donate=True, **self.gradient_options())
        batch = _of_first_device(batch, self.default_mesh())
        try:
            plan = _measured(step, opt, params, buffers, batch)
        except Exception as error:  # of the caller's model, which may need values
            warn(
                f"GeminiPlugin: a step of this loop cannot be measured without values ({type(error).__name__}: {error}). "
                f"Whether it keeps device={limit:,} is known after it, inside of fs.memory.limit alone.",
                stacklevel=2,
            )
            return
        if plan.peak() > limit:
            raise MemoryLimitError(
                f"GeminiPlugin: device memory must be at least {plan.peak():,} bytes per device for a step of this loop, with "
                f"all parameters and state on the host; got device={limit:,}. The largest holders are then {holders_of(plan)}. "
                'Raise the limit, shard over more devices, or use smaller units (unit="*") or parts of the batch.'
            )

    def validate_peak(self) -> None:
        """Raise if the steps so far have passed the limit, as far as a `memory.limit` around them has counted."""
        limit = _limit(self.device, self.default_mesh())
        events = [event for counter in ambient.counters for event in counter.usage.timeline]
        peak = max([event.peak for event in events], default=0)
        if self.placement == "auto" and peak > limit:
            raise MemoryLimitError(
                f"GeminiPlugin: device memory must be at least {peak:,} bytes per device, the peak of the steps so far; got "
                f"device={limit:,}. Raise the limit, shard over more devices, or use smaller units or parts of the batch."
            )

    def placed_in_loop(self, params: PyTree, state: PyTree) -> tuple[UpdateOn, PyTree, PyTree]:
        """Return where a loop updates from its third step on, and what has room on the device there: see `_room`."""
        mesh, sizes = self.default_mesh(), group_sizes({"parameters": params, "state": state})
        room, every = _room(_limit(self.device, mesh), mesh), sum(sizes.values())
        of_params = {group: size for group, size in sizes.items() if group.role == "parameters"}
        if every + sum(of_params.values()) <= room:  # all, and gradients
            memories: dict[MemoryGroup, Memory] = dict.fromkeys(sizes, "device")
            return (
                "device",
                in_memories(params, "parameters", memories),
                in_memories(state, "state", memories),
            )
        to_device = dict[MemoryGroup, Memory]()
        is_alone = all(
            mesh.shape[axis] == 1 for axis in self.zero_axes()
        )  # then gradients stay until they fill a bucket
        for group, size in of_params.items():
            size *= 1 + is_alone
            if size <= room:
                to_device[group], room = "device", room - size
        gradients = sum(of_params.values())
        self._validate_host(
            gradients + sum(size for group, size in sizes.items() if group not in to_device)
        )
        return "host", in_memories(params, "parameters", to_device), state


def _measured(
    step: Any, opt: ShardedOptimizer, params: PyTree, buffers: PyTree, batch: Any
) -> Placement:
    """Measure a step on the abstract mesh, in a thread: the caller is a device of another mesh."""
    mesh = replace(step.mesh, runtime="abstract", device_type="meta", ranks=None)
    abstract_params = abstract_like(params, mesh, lambda x: x.layout.memory)
    abstract_opt = opt.on_mesh(mesh)

    def run() -> Placement:
        return least(step, params, abstract_opt.init(abstract_params), buffers, batch)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


_FRACTIONS = ("offload_optim_frac", "offload_param_frac", "shard_param_frac")
_HOST: dict[bool, Memory] = {True: "host", False: "device"}


def _first(sizes: Mapping[str, int], fraction: float) -> set[str]:
    """Return the first units that have a fraction of all bytes."""
    chosen, missing = set[str](), fraction * sum(sizes.values())
    for unit, size in sizes.items():
        if missing <= 0:
            break
        chosen.add(unit)
        missing -= size
    return chosen


def _limit(device: int | None, mesh: Mesh) -> int:
    if device is None and mesh.device_type == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return MOST if device is None else device


def _room(device: int, mesh: Mesh) -> int:
    """Return the bytes by which the fullest device has been below a limit so far; none if nothing has counted them."""
    if device == MOST:
        return device
    peaks = [counter.usage.peak() for counter in ambient.counters]
    if mesh.device_type == "cuda":
        peaks.append(torch.cuda.max_memory_allocated())
    peak = torch.tensor(max(peaks, default=device), dtype=torch.int64)
    (largest,) = run_on_devices(mesh, lambda _: pmax(peak, mesh.axis_names))
    return device - int(largest)


def _of_first_device(batch: PyTree, mesh: Mesh) -> PyTree:
    """Return a batch as the first device has it, whose part is the largest: all devices place alike."""
    if not isinstance(batch, BatchPart):
        return batch
    rows, cut = batch.cut.rows(mesh), batch.cut
    first = cut.rows(Mesh(mesh.axes, "abstract", "meta"))

    def resized(x: Any) -> Any:
        return x.new_empty((first, *x.shape[1:])) if rows_of(x) == rows and rows != first else x

    return BatchPart(map_leaves(resized, batch.tree), cut)
