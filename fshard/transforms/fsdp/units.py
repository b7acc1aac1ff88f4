"""Units: parameters that are all-gathered and reduce-scattered together (FSDP buckets).

    pre-forward     unshard, wait_for_unshard       just before the first operation that uses the unit
                    reshard                         when later units need the memory
    pre-backward    unshard, wait_for_unshard       when a saved tensor of the unit is read
    post-backward   reshard, and reduce             right after the backward of that operation

A `LazyUnit` is one autograd Function with an output per parameter, recorded just before the first operation that uses the
unit. So autograd calls its backward, the reduce-scatter, right after the backward of that operation, and the backward of
earlier units overlaps with it. The units of stages, `StageUnit`, are unsharded, resharded and reduced by a schedule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import Function

from fshard.memory.kinds import mark, purpose
from fshard.memory.transfers import Link, Transfer, start
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout.kinds import empty_in
from fshard.mesh.reshard.execute import start_reshard
from fshard.mesh.spmd.scope import entered, require
from fshard.source import Site
from fshard.transforms.fsdp.plans import Along, Gradients, ParamPlan, savable, versions_of
from fshard.transforms.module.replica import Replica
from fshard.transforms.options import StepOptions

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


OTHER_ORDER = (
    "fshard: a step uses units in another order than the last one. Those in other memory are copied to the device when they "
    "are used, instead of ahead."
)


class UnitRuntime:
    """The state that the units of one device share in one step.

    `sequence`: the numbers of units in the order of their all-gathers, which must be equal on all devices.
    """

    def __init__(self, options: StepOptions, site: Site) -> None:
        self.options, self.site, self.scope = options, site, require(options.caller)
        self.sequence: list[int] = []
        self._replicas: list[Replica] = []  # copies of modules, in which parameters are installed

    def use(self, replica: Replica) -> None:
        """Record a module copy that has parameters of the step installed until it is closed."""
        if not any(replica is cached for cached in self._replicas):
            self._replicas.append(replica)

    def release_replicas(self) -> None:
        """Take the parameters out of the module copies."""
        for replica in self._replicas:
            replica.rest()
        self._replicas = []


class UnitPlan(NamedTuple):
    """The plan of a unit: its parameters, by index and by plan.

    `is_sharded`: whether any is all-gathered, or copied to the device, before it is used; `is_trained`: any is trained.
    """

    indices: list[int]
    params: list[ParamPlan]
    is_sharded: bool
    is_trained: bool

    @staticmethod
    def of(leaves: Sequence[ParamPlan], indices: list[int]) -> UnitPlan:
        """Return the plan of the unit of these leaves."""
        params = [leaves[index] for index in indices]
        return UnitPlan(
            indices,
            params,
            any(plan.is_sharded for plan in params),
            any(plan.trained for plan in params),
        )


class Unit:
    """Parameters that are all-gathered and reduce-scattered together; those of ZeRO 0-2 are replicated and only reduced.

    `values` are the unsharded parameters, none while the unit is sharded.
    """

    def __init__(
        self, runtime: UnitRuntime, number: int, plan: UnitPlan, shards: Sequence[Tensor]
    ) -> None:
        self._shared, self.number, self.indices, self.shards = runtime, number, plan.indices, shards
        self.plans, self.is_sharded, self.is_trained = plan.params, plan.is_sharded, plan.is_trained
        self.values: list[Tensor] = []
        self.versions: list[int] = []
        self.pending: Callable[[], list[Tensor]] | None = None
        self._copies: list[Transfer] | None = (
            None  # of shards in other memory, under way to the device
        )

    @torch.no_grad()  # so that a region of `remat`, which may run again when the unit is there, does not count operations
    def fetch(self) -> None:
        """Start to copy shards from other memory to the device, unless the unit is unsharded or about to be."""
        if (
            self.values
            or self.pending is not None
            or self._copies is not None
            or not self.is_sharded
        ):
            return
        self._copies = []
        with purpose("unsharded"):
            for x, plan in zip(self.shards, self.plans, strict=True):
                if plan.memory != "device":
                    mesh = plan.gradient.mesh
                    link = Link(plan.memory, "device", mesh.runtime, self._shared.scope.device)
                    self._copies.append(
                        start(x, empty_in("device", x.shape, x.dtype, mesh.device_type), link)
                    )

    def _wait_for_fetch(self) -> list[Tensor]:
        """Return the shards, all in the device's memory."""
        self.fetch()
        copies, self._copies = iter(self._copies or ()), None
        return [
            x.detach() if plan.memory == "device" else next(copies).wait()
            for x, plan in zip(self.shards, self.plans, strict=True)
        ]

    @torch.no_grad()
    def unshard(self) -> None:
        """Start the all-gather, unless the unit is unsharded or about to be; replicated parameters are views of shards."""
        if self.values or self.pending is not None:
            return
        shared = self._shared
        # torch.autograd.grad(loss, inputs) may be called outside of `run`
        with savable(), entered(shared.scope), purpose("unsharded"):
            xs = self._wait_for_fetch()
            if (dtype := shared.options.compute) is not None:
                xs = [x.to(dtype) if x.is_floating_point() else x for x in xs]
            for plan in self.plans[:1]:
                mark(str(plan.gradient.unit))
            if self.is_sharded:
                shared.sequence.append(self.number)
                self.pending = start_reshard(
                    xs, [plan.gather for plan in self.plans], shared.site, ahead=True
                )  # (4)
                return
            values = [x.reshape(plan.shape) for x, plan in zip(xs, self.plans, strict=True)]
            self.pending = lambda: values

    @torch.no_grad()
    def wait_for_unshard(self) -> list[Tensor]:
        """Wait for the all-gather, if one was started; return the unsharded parameters."""
        if self.pending is not None:
            with savable():
                self.values, self.pending = self.pending(), None
            self.versions = versions_of(self.values)
        return self.values

    def reshard(self) -> None:
        """Free the unsharded parameters: the next use all-gathers them again."""
        self.values, self.versions, self._copies = [], [], None

    def written(self) -> list[str]:
        """Return the paths of unsharded parameters that were written to in place."""
        versions = versions_of(self.values)
        if versions == self.versions:
            return []
        return [
            plan.path
            for plan, version, before in zip(self.plans, versions, self.versions, strict=True)
            if version != before
        ]


class Order(NamedTuple):
    """The order of units in one step, by number, which the next step expects.

    `forward` and `backward` are the orders of all-gathers, `turns` that of reductions, on which devices agreed along the
    batch's axes and `along`.
    """

    forward: list[int]
    backward: list[int]
    turns: Sequence[int] = ()
    along: Along = ()


class UnitSchedule(UnitRuntime):
    """The units of a full model on one device in one step: which are unsharded, by the order of their use.

    `saved` keeps unsharded parameters out of autograd's graph, `reductions` takes the gradients.
    """

    saved: Any
    reductions: Any

    def __init__(self, options: StepOptions, site: Site, order: Order | None) -> None:
        super().__init__(options, site)
        self.state: Literal["idle", "forward", "backward", "closed"] = "idle"
        self.units: list[LazyUnit] = []
        self.anchor = torch.zeros(
            (), requires_grad=True
        )  # the input that makes autograd call the backwards of units
        self.observed, self.expected = Order([], []), order or Order([], [])
        self.used_units: dict[int, None] = {}  # the units that the forward has used, by first use
        self.live: list[LazyUnit] = []  # the sharded units that are unsharded, the last used last
        self.written: list[str] = []  # the parameters that the loss function has written to

    def make_room(self, unit: LazyUnit) -> None:
        """Reshard the units that were used longest ago, so that one more can be unsharded."""
        if unit in self.live:
            self.live.remove(unit)
        while self.options.reshard_after_forward and len(self.live) >= self.options.live_units:
            self.live[0].reshard()  # (6)
        self.live.append(unit)

    def fetch_ahead(self, numbers: Sequence[int]) -> None:
        """Start to copy the next units from other memory: those to prefetch, and one more."""
        for number in numbers[: self.options.prefetch + 1] if self.options.prefetch else ():
            self.units[number].fetch()

    def look_ahead(self, direction: Literal["forward", "backward"], unit: LazyUnit) -> None:
        """Record an all-gather, and prefetch the units that followed it in the last step.

        All devices need the same all-gathers in one order. A use of a unit that is unsharded already needs none and is
        not recorded: it may depend on the data. So all devices prefetch alike, and their collectives keep one order.
        """
        observed, expected = getattr(self.observed, direction), getattr(self.expected, direction)
        index = len(observed)
        observed.append(unit.number)
        if index < len(expected) and expected[: index + 1] == observed:
            self.fetch_ahead(expected[index + 1 :])
            for number in expected[index + 1 : index + 1 + self.options.prefetch]:
                self.units[number].unshard()
        elif expected and any(plan.memory != "device" for plan in unit.plans):
            warnings.warn(OTHER_ORDER, stacklevel=1)


class LazyUnit(Unit):
    """A unit of a full model, which is unsharded when a loss function uses one of its lazy parameters."""

    def __init__(
        self, runtime: UnitSchedule, number: int, plan: UnitPlan, shards: Sequence[Tensor]
    ) -> None:
        super().__init__(runtime, number, plan, shards)
        self.runtime = runtime
        self.outputs: tuple[Tensor, ...] | None = None
        self.accumulated: Gradients | None = None
        self.pending_backwards = 0  # uses whose backward is still to come

    def pre_forward(self) -> tuple[Tensor, ...]:
        """Return all parameters of the unit, unsharded and differentiable."""
        if self.outputs is not None:
            return self.outputs
        runtime, has_grad = self.runtime, torch.is_grad_enabled()
        is_gathered = self.is_sharded and not self.values
        if is_gathered:
            runtime.make_room(self)
        with outside_transforms():
            self.unshard()
            if self.is_trained and has_grad:
                outputs: tuple[Tensor, ...] = _UseUnit.apply(runtime.anchor, self)  # type: ignore[assignment]
            else:
                with torch.no_grad():
                    outputs = tuple([x.detach() for x in self.wait_for_unshard()])
        is_recomputed = (
            _C._current_graph_task_id() != -1
        )  # it ends with the backward that it is part of
        if self.is_trained and has_grad and not is_recomputed:
            self.pending_backwards += 1
            runtime.used_units.setdefault(self.number)
        if has_grad or not self.is_trained:
            self.outputs = outputs
        if is_gathered:
            with outside_transforms():  # it starts the all-gather of the next units
                runtime.look_ahead("forward", self)
        return outputs

    def use_once(self, x: Tensor, position: int) -> Tensor:
        """Return one parameter for one use, whose cotangent is received separately."""
        with outside_transforms():
            return _UseOnce.apply(x, self, position)  # type: ignore[no-any-return]

    def wait_for_unshard(self) -> list[Tensor]:
        """Wait for the all-gather, if one was started; return the unsharded parameters."""
        if self.pending is not None:
            super().wait_for_unshard()
            if self.is_sharded:
                self.runtime.saved.register(self)
        return self.values

    def reshard(self) -> None:
        """Free the unsharded parameters: the next use all-gathers them again."""
        self.runtime.written += self.written()
        super().reshard()
        self.outputs = None
        if self in self.runtime.live:
            self.runtime.live.remove(self)

    def pre_backward(self) -> list[Tensor]:
        """Return all parameters for the backward, and unshard them again if they were freed."""
        if not self.values:
            self.runtime.make_room(self)
            self.unshard()  # (7)
            self.wait_for_unshard()
            self.runtime.look_ahead("backward", self)
        return self.values

    def post_backward(self) -> None:
        """Count the backward of one use, and reshard."""
        self.pending_backwards -= 1
        if self.is_sharded and self.runtime.options.reshard_after_forward:
            self.reshard()

    def accumulate(self, gs: Gradients) -> None:
        """Add gradients to those of earlier slices, in at least 32 bits; they are reduced together."""
        gs = [
            g.float() if g is not None and g.dtype in (torch.bfloat16, torch.float16) else g
            for g in gs
        ]
        sums = self.accumulated or [None] * len(gs)
        self.accumulated = [
            total if g is None else g if total is None else total + g
            for total, g in zip(sums, gs, strict=True)
        ]

    def take_accumulated(self, gs: Gradients) -> Gradients:
        """Return gradients plus the accumulated ones, and reset these."""
        if self.accumulated is not None:
            self.accumulate(gs)
            gs, self.accumulated = self.accumulated, None
        return gs


class _UseUnit(Function):
    """Forward: the all-gather of a unit.  Backward: the reduction of its gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, unit: LazyUnit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        values = [
            x.detach() for x in unit.wait_for_unshard()
        ]  # `check_unchanged` finds writes to them
        ctx.mark_non_differentiable(
            *(x for x, plan in zip(values, unit.plans, strict=True) if not plan.trained)
        )
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None]:
        unit: LazyUnit = ctx.unit
        unit.post_backward()
        unit.runtime.reductions.receive(unit, gs)
        return None, None


class _UseOnce(Function):
    """One use of one parameter, in reproducible mode.  Backward: its cotangent is received separately.

    Autograd adds up the cotangents of all uses of a `_UseUnit`, of which a unit has several if it was resharded in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: LazyUnit, position: int) -> Tensor:
        ctx.unit, ctx.position = unit, position
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None, None]:
        row: Gradients = [None] * len(ctx.unit.indices)
        (row[ctx.position],) = gs
        ctx.unit.runtime.reductions.receive_separately(ctx.unit, row)
        return None, None, None


USE_NODES: tuple[Any, ...] = tuple(cast("Any", use)._backward_cls for use in (_UseUnit, _UseOnce))
"""The autograd nodes of uses of units."""


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context outside of torch.func's transforms, which parameters do not belong to."""
    return temporarily_clear_interpreter_stack() if transformed() else nullcontext()
