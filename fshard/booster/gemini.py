"""`GeminiPlugin`: ZeRO 3 whose units of parameters and state are in host memory as far as device memory needs it.

auto, a functional step    begins with all on the host; `fs.memory.place` places the first step
auto, torch's loop         begins with all on the host, where a step must fit; after two steps,
                           whose peak is known, what has room returns
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

from fshard.booster.plugins import ShardedPlugin
from fshard.errors import LayoutError, MemoryLimitError
from fshard.memory.limit import open_usages
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
    """ZeRO 3 with parameters and state in host memory: what device memory has no room for.

    Gradients are sent to the host, and updated there, where all state is on the host; else state is
    sent to the device.

    Args:
        placement: "auto" places by `device` and `host`; "static" by the fractions.
        device, host: the most bytes that a device may have in this memory; None: all memory of a
            GPU, any number.
        offload_optim_frac: of the optimizer's state, stored on the host.
        offload_param_frac: of the parameters, stored on the host; those are sharded.
        shard_param_frac: of the parameters, sharded; the others are replicated, as by
            `ZeroPlugin(stage=2)`.

    Units are chosen from the first on, as many as have a fraction of all bytes.
    """

    placement: Literal["auto", "static"] = "auto"
    device: int | None = None
    host: int | None = None
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    shard_param_frac: float = 1.0

    def contradictions(self) -> list[str]:
        errors = list[str]()
        fractions = self._fractions()
        for name, fraction in fractions.items():
            is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
            if not is_number or not 0 <= fraction <= 1:
                errors.append(f"{name} must be from 0 to 1; got {fraction!r}")

        has_default_fractions = tuple(fractions.values()) == (0, 0, 1)
        has_limits = self.device is not None or self.host is not None
        if self.placement == "auto" and not has_default_fractions:
            errors.append('fractions are for placement="static"; "auto" takes device= and host=')
        if self.placement == "static" and has_limits:
            errors.append('device= and host= are for placement="auto"; "static" takes fractions')
        if not errors and self.offload_param_frac > 0 and self.shard_param_frac < 1:
            errors.append(
                f"shard_param_frac must be 1 with offload_param_frac; got {self.shard_param_frac}"
            )
        return errors + super().contradictions()

    def _fractions(self) -> dict[str, float]:
        return {
            "offload_optim_frac": self.offload_optim_frac,
            "offload_param_frac": self.offload_param_frac,
            "shard_param_frac": self.shard_param_frac,
        }

    def param_memory(self) -> Memory:
        return "host" if self.placement == "auto" or self.offload_param_frac > 0 else "device"

    def state_memory(self) -> Memory:
        return "host" if self.placement == "auto" or self.offload_optim_frac > 0 else "device"

    def update_on(self) -> UpdateOn:
        return "host" if self.placement == "auto" or self.offload_optim_frac == 1 else "device"

    # -- static placement -------------------------------------------------------------------------

    def rules_of(self, params: Mapping[str, Any], within: Rules = None) -> Rules:
        """Return the layouts of parameters: the first units are sharded, the others replicated."""
        sharded = self.rules(within)
        if self.shard_param_frac == 1 or not isinstance(sharded, Fsdp):
            return sharded
        paths = [f".{name}" for name in params]
        units = sharded.units(paths, [*params.values()])

        sizes = dict[str, int]()
        for unit, x in zip(units, params.values(), strict=True):
            sizes[unit] = sizes.get(unit, 0) + x.numel() * x.dtype.itemsize
        chosen = _first(sizes, self.shard_param_frac)

        rules = dict[str, Any]()
        for name, unit in zip(params, units, strict=True):
            rules[name] = sharded if unit in chosen else P()
        return rules

    def placed(self, role: Role, tree: PyTree) -> PyTree:
        """Return new parameters or state in the memories of a static placement."""
        if self.placement == "auto":
            self._validate_host(sum(group_sizes({role: tree}).values()))
            return tree
        fraction = self.offload_param_frac if role == "parameters" else self.offload_optim_frac
        if fraction in (0, 1):
            return tree  # all of it has one memory, that of its layouts
        sizes = {group.unit: size for group, size in group_sizes({role: tree}).items()}
        chosen = _first(sizes, fraction)
        memories = dict[MemoryGroup, Memory]()
        for unit in sizes:
            memories[MemoryGroup(role, unit)] = "host" if unit in chosen else "device"
        return in_memories(tree, role, memories)

    def _validate_host(self, needed: int) -> None:
        if self.host is not None and needed > self.host:
            raise MemoryLimitError(
                f"GeminiPlugin: host memory must be at least {needed:,} bytes per device for what "
                f"begins or stays there; got host={self.host:,}. "
                "Raise the limit, or shard over more devices."
            )

    # -- a functional step ------------------------------------------------------------------------

    def placed_step(
        self,
        make: Callable[[UpdateOn], Any],
        params: PyTree,
        state: PyTree,
        buffers: PyTree,
        batch: PyTree,
    ) -> tuple[UpdateOn, Placement | None]:
        """Return where a step updates, on the device if that has room, and its placement.

        There is no placement, and all stays on the host, if the model reads values, which an
        abstract mesh has not: such as the masks of transformers' causal models.
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
                "GeminiPlugin: all parameters and state stay on the host, since the step cannot be "
                f"measured before it runs: {error} Leave out what makes the model read values, "
                "such as an attention_mask of ones.",
                stacklevel=5,
            )
            return "host", None

    # -- a loop -----------------------------------------------------------------------------------

    def validate_loop(
        self,
        run: Callable[..., Any],
        opt: ShardedOptimizer,
        params: PyTree,
        buffers: PyTree,
        batch: Any,
    ) -> None:
        """Raise if a loop's step passes the limit with all parameters and state on the host.

        The step runs on the abstract mesh with a loss in place of the caller's, of one tensor of
        the output's size. A model that cannot run there, since it reads values, gets a warning:
        `validate_peak` finds what is counted.
        """
        mesh = self.default_mesh()
        limit = _limit(self.device, mesh)
        if self.placement == "static" or limit == MOST:
            return

        def loss(params: PyTree, buffers: PyTree, batch: Any) -> tuple[Tensor, PyTree]:
            args, kwargs = batch
            output, after = run(params, buffers, *args, **kwargs)
            floats = [x for x in flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
            return torch.stack([(2 * x).abs().square().mean().float() for x in floats]).sum(), after

        step = train_step(loss, opt, donate=True, **self.gradient_options())
        try:
            placement = _measured(step, opt, params, buffers, _of_first_device(batch, mesh))
        except Exception as error:  # of the caller's model, which may need values
            warn(
                "GeminiPlugin: a step of this loop cannot be measured without values "
                f"({type(error).__name__}: {error}). Whether it keeps device={limit:,} is known "
                "after it, inside of fs.memory.limit alone.",
                stacklevel=2,
            )
            return
        peak = placement.peak()
        if peak > limit:
            raise MemoryLimitError(
                f"GeminiPlugin: device memory must be at least {peak:,} bytes per device for a "
                "step of this loop, with all parameters and state on the host; "
                f"got device={limit:,}. The largest holders are then {holders_of(placement)}. "
                'Raise the limit, shard over more devices, or use smaller units (unit="*") or '
                "parts of the batch."
            )

    def validate_peak(self) -> None:
        """Raise if the steps so far have passed the limit, as far as a `memory.limit` has counted."""
        limit = _limit(self.device, self.default_mesh())
        peak = 0
        for usage in open_usages():
            peak = max([peak, *[event.peak for event in usage.timeline]])
        if self.placement == "auto" and peak > limit:
            raise MemoryLimitError(
                f"GeminiPlugin: device memory must be at least {peak:,} bytes per device, the peak "
                f"of the steps so far; got device={limit:,}. "
                "Raise the limit, shard over more devices, or use smaller units or parts of the "
                "batch."
            )

    def placed_in_loop(self, params: PyTree, state: PyTree) -> tuple[UpdateOn, PyTree, PyTree]:
        """Return where a loop updates from its third step on, and what has room on the device.

        For the room see `_room`. All returns if parameters, state and gradients have room; else
        as many units of parameters as have.
        """
        mesh = self.default_mesh()
        sizes = group_sizes({"parameters": params, "state": state})
        of_params = {group: size for group, size in sizes.items() if group.role == "parameters"}
        gradients = sum(of_params.values())  # they have the bytes of their parameters
        room = _room(_limit(self.device, mesh), mesh)
        if sum(sizes.values()) + gradients <= room:
            memories: dict[MemoryGroup, Memory] = dict.fromkeys(sizes, "device")
            params_here = in_memories(params, "parameters", memories)
            return "device", params_here, in_memories(state, "state", memories)

        # On one device gradients stay there until they fill a bucket.
        is_alone = all([mesh.shape[axis] == 1 for axis in self.zero_axes()])
        to_device = dict[MemoryGroup, Memory]()
        for group, size in of_params.items():
            needed = 2 * size if is_alone else size
            if needed <= room:
                to_device[group] = "device"
                room -= needed
        on_host = [size for group, size in sizes.items() if group not in to_device]
        self._validate_host(gradients + sum(on_host))
        return "host", in_memories(params, "parameters", to_device), state


def _measured(
    step: Any, opt: ShardedOptimizer, params: PyTree, buffers: PyTree, batch: Any
) -> Placement:
    """Measure a step on the abstract mesh, in a thread: the caller is a device of another mesh."""
    mesh = replace(step.mesh, runtime="abstract", device_type="meta", numbers=None, is_member=True)
    abstract_params = abstract_like(params, mesh, lambda x: x.layout.memory)
    abstract_opt = opt.on_mesh(mesh)

    def run() -> Placement:
        return least(step, params, abstract_opt.init(abstract_params), buffers, batch)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def _first(sizes: Mapping[str, int], fraction: float) -> set[str]:
    """Return the first units that have a fraction of all bytes."""
    chosen = set[str]()
    missing = fraction * sum(sizes.values())
    for unit, size in sizes.items():
        if missing <= 0:
            break
        chosen.add(unit)
        missing -= size
    return chosen


def _limit(device: int | None, mesh: Mesh) -> int:
    """Return the most bytes of a device: those that are given, or all of a GPU."""
    if device is None and mesh.device_type == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return MOST if device is None else device


def _room(device: int, mesh: Mesh) -> int:
    """Return the bytes by which the fullest device has been below a limit so far.

    There are none if nothing has counted them.
    """
    if device == MOST:
        return device
    peaks = [usage.peak() for usage in open_usages()]
    if mesh.device_type == "cuda":
        peaks.append(torch.cuda.max_memory_allocated())
    peak = torch.tensor(max(peaks, default=device), dtype=torch.int64)
    (largest,) = run_on_devices(mesh, lambda _: pmax(peak, mesh.axis_names))
    return device - int(largest)


def _of_first_device(batch: PyTree, mesh: Mesh) -> PyTree:
    """Return a batch as the first device has it, whose part is the largest.

    So all devices place alike.
    """
    if not isinstance(batch, BatchPart):
        return batch
    rows = batch.cut.rows(mesh)
    most = batch.cut.rows(Mesh(mesh.axes, "abstract", "meta"))

    def resized(x: Any) -> Any:
        has_other_rows = rows_of(x) == rows and rows != most
        return x.new_empty((most, *x.shape[1:])) if has_other_rows else x

    return BatchPart(map_leaves(resized, batch.tree), batch.cut)
