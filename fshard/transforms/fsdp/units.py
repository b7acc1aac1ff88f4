"""Units: parameters that are all-gathered together (FSDP buckets), on one device in one step.

                     fetch               unshard             wait_for_unshard
    shards, on disk  ──────>  on device  ──────>  in flight  ──────────────>  values
    or on the host                                                               │
       ^                                  reshard                                │
       └─────────────────────────────────────────────────────────────────────────┘

A unit does not know when. The `ParamRuntime` of a full model unshards it when an operation uses it
and has room for it; a schedule unshards the units of stages (`StageParams`). Parameters of ZeRO 0
to 2 are replicated: their values are views of the shards, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.memory.kinds import mark, purpose
from fshard.memory.transfers import Link, Transfer, start
from fshard.mesh.layout import Memory
from fshard.mesh.layout.counting import DeviceRecorder, RecordedPhase, counting
from fshard.mesh.layout.kinds import compute_device, empty_in
from fshard.mesh.layout.packing import cast
from fshard.mesh.reshard.execute import StartedReshard, start_reshard
from fshard.mesh.spmd.moments import listeners, reach
from fshard.mesh.spmd.scope import Scope, entered, require
from fshard.source import Site
from fshard.transforms.fsdp.plans import UnitPlan
from fshard.transforms.module.replica import Replica
from fshard.transforms.options import StepOptions


@dataclass(frozen=True, eq=False)
class StepContext:
    """The step of one device, as its parameters see it.

    Args:
        options: of the step.
        site: the source line of the step.
        scope: of the device.
        device: that computes: shards may be stored elsewhere.
        recorder: of the device; None if the step is not recorded.
    """

    options: StepOptions
    site: Site
    scope: Scope
    device: torch.device
    recorder: DeviceRecorder | None
    _replicas: list[Replica] = field(default_factory=list[Replica])

    @staticmethod
    def of(options: StepOptions, site: Site) -> StepContext:
        """Return the context of a step of the calling device."""
        scope = require(options.caller)
        device_recorder: DeviceRecorder | None = None
        recorder = counting().recorder
        if recorder is not None:
            device_recorder = recorder.on_device(scope.number)
        return StepContext(options, site, scope, compute_device(scope.mesh), device_recorder)

    def use(self, replica: Replica) -> None:
        """Record a module copy that has parameters of the step installed until it ends."""
        if not any(replica is cached for cached in self._replicas):
            self._replicas.append(replica)

    def release_replicas(self) -> None:
        """Take the parameters out of the module copies."""
        for replica in self._replicas:
            replica.rest()
        self._replicas.clear()


class Unit:
    """Parameters that are all-gathered together.

    Args:
        context: of the step.
        plan: of the unit.
        shards: of its parameters on this device.

    `values` are the unsharded parameters, none while the unit is sharded. `pending` waits for their
    all-gather.
    """

    def __init__(self, context: StepContext, plan: UnitPlan, shards: Sequence[Tensor]) -> None:
        self.context = context
        self.plan = plan
        self.shards = shards
        self.values: list[Tensor] = []
        self.pending: StartedReshard | None = None
        # Of shards in other memory, to the device: their positions, by memory.
        self._copies: list[tuple[list[int], Transfer]] | None = None
        self._versions: list[int] = []  # of the values, as they were unsharded

    @property
    def is_unsharded(self) -> bool:
        """True if it is unsharded, or about to be."""
        return bool(self.values) or self.pending is not None

    # Without gradients, since a region of `remat` counts the operations of a recorded forward: its
    # second run, which may find the unit unsharded, must count as many.
    @torch.no_grad()
    def fetch(self) -> None:
        """Start to copy shards from other memory to the device.

        Unless the unit is unsharded or about to be.
        """
        if not self.plan.is_sharded or self.is_unsharded or self._copies is not None:
            return
        away: dict[Memory, list[int]] = {}
        for position, plan in enumerate(self.plan.params):
            if plan.memory != "device":
                away.setdefault(plan.memory, []).append(position)
        self._copies = []
        with purpose("unsharded"):
            for memory, positions in away.items():
                self._copies.append((positions, self._start_copies(memory, positions)))

    def _start_copies(self, memory: Memory, positions: Sequence[int]) -> Transfer:
        """Start to copy the shards at some positions, all in one memory, to the device."""
        mesh = self.plan.params[positions[0]].gradient.mesh
        shards = [self.shards[position] for position in positions]
        targets = [empty_in("device", x.shape, x.dtype, mesh.device_type) for x in shards]
        link = Link(memory, "device", mesh.runtime, self.context.scope.number)
        return start(shards, targets, link)

    @torch.no_grad()
    def unshard(self) -> None:
        """Start the all-gather, unless the unit is unsharded or about to be."""
        if self.is_unsharded:
            return
        options, site, scope = self.context.options, self.context.site, self.context.scope
        params = self.plan.params

        # The scope is entered, since a backward that unshards it may run outside of `run`:
        # torch.autograd.grad(loss, inputs).
        with savable(), entered(scope), purpose("unsharded"):
            xs = self._wait_for_fetch()
            dtypes = None
            if options.compute is not None:
                dtypes = [options.used_in(x.dtype) for x in xs]
            if params:
                mark(str(params[0].gradient.unit))
            if self.plan.is_sharded:
                if listeners:
                    reach("gather")
                if self.context.recorder is not None:
                    self._record("shard", xs)
                plans = [plan.gather for plan in params]
                self.pending = start_reshard(xs, plans, site, ahead=True, dtypes=dtypes)  # (4)
                return
            if dtypes is not None:
                xs = cast(xs, dtypes)
            self.values = [x.reshape(plan.shape) for x, plan in zip(xs, params, strict=True)]
            self._versions = versions_of(self.values)
            if self.context.recorder is not None:
                self._record("shard", self.values)  # which is the parameter, as it is used

    def _wait_for_fetch(self) -> list[Tensor]:
        """Return the shards, all in the device's memory."""
        self.fetch()
        shards = [shard.detach() for shard in self.shards]
        for positions, transfer in self._copies or ():
            for position, copy in zip(positions, transfer.wait(), strict=True):
                shards[position] = copy
        self._copies = None
        return shards

    @torch.no_grad()
    def wait_for_unshard(self, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Wait for the all-gather, if one was started; return the unsharded parameters.

        They are also in the tensors `into`, contiguous ones, if it was started.
        """
        if self.pending is not None:
            with savable():
                self.values = self.pending.wait(into)
            self.pending = None
            self._versions = versions_of(self.values)
            if self.context.recorder is not None:
                self._record("unsharded", self.values)
        return self.values

    def _record(self, phase: RecordedPhase, xs: Sequence[Tensor]) -> None:
        """Record the tensors of all parameters of the unit."""
        recorder = self.context.recorder
        assert recorder is not None
        for plan, x in zip(self.plan.params, xs, strict=True):
            recorder.record(phase, plan.path, x)

    def written(self) -> list[str]:
        """Return the paths of parameters that were written to since they were unsharded."""
        versions = versions_of(self.values)
        if versions == self._versions:
            return []
        rows = zip(self.plan.params, versions, self._versions, strict=True)
        return [plan.path for plan, version, before in rows if version != before]

    def reshard(self) -> None:
        """Free the unsharded parameters: the next use all-gathers them again."""
        self.values = []
        self._versions = []
        self._copies = None


# Note [Unsharded parameters are savable]
# A tensor that is made in inference mode can never be saved for a backward. An operation in
# inference mode may unshard a unit whose values are differentiated afterwards. No loss function is
# known that fails without this rule.
def savable() -> AbstractContextManager[Any]:
    """Return a context whose results can be saved for a backward.

    See Note [Unsharded parameters are savable].
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _ANY_MODE


_ANY_MODE = nullcontext()


def versions_of(xs: Sequence[Tensor]) -> list[int]:
    """Return the version counters of tensors, which writes increment.

    0 for tensors of inference mode, which have none.
    """
    try:
        return [x._version for x in xs]
    except RuntimeError:
        return [0 if x.is_inference() else x._version for x in xs]
