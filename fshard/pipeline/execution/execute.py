"""`pipelined`: run stages, as plain functions, by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.errors import LayoutError
from fshard.mesh.layout import Mesh, PyTree, refuse_no_mesh
from fshard.mesh.spmd.run import is_outside, one_thread, resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import Group, parting, require
from fshard.pipeline.execution.device import StageDevice
from fshard.pipeline.execution.leaves import Params, Stage, called_for, map_tensors
from fshard.pipeline.execution.microbatches import Microbatches, MicrobatchResult, together
from fshard.pipeline.execution.post import MessageForm, Route
from fshard.pipeline.execution.total import Ordered, RunningSum, Total
from fshard.pipeline.schedule.schedule import Action, Kind, Schedule
from fshard.pipeline.schedule.verify import verify
from fshard.source import Site, call_site


class PipelinedResult(NamedTuple):
    """The result of a pipelined step.

    Args:
        loss: the mean over the microbatches; None without a loss function.
        gradients: of the parameters of each stage; None for stages of other devices and without a backward.
        metrics: what the loss function returns beside the loss: means, and sums of integers. Without a loss function, the
            last stage's result for each microbatch, on its device; None elsewhere.
    """

    loss: Tensor | None
    gradients: list[PyTree]
    metrics: PyTree


def pipelined(
    stages: Sequence[Stage],
    schedule: Schedule,
    loss_fn: Callable[[PyTree, PyTree], Any] | None = None,
    *,
    mesh: Mesh,
    axis: str = "pipe",
    skips: Mapping[str, tuple[int, int]] | None = None,
    backward: bool = True,
    reproducible: bool = False,
    dynamic: bool = False,
) -> Callable[..., PipelinedResult]:
    """Return the function (params, microbatches, weights=None) -> Outcome that runs stages by a schedule.

    Values and gradients are sent between stages of different devices once each; the loss and metrics go to all
    devices.

    Args:
        stages: functions (params, x) -> y of pytrees. The first one's x is the microbatch.
        schedule: the actions of each device; it is verified.
        loss_fn: of (y, microbatch), where y is the last stage's: a loss, or a loss and a tree of metrics.
        mesh: the devices.
        axis: the axis of the stages.
        skips: {name: (from, to)}: stage `from` returns (y, {name: value}), and stage `to` is called with name=value.
        backward: False runs only the forwards of the schedule.
        reproducible: add gradients of microbatches in one fixed tree, whatever the schedule, with one intra-op thread.
        dynamic: True if shapes depend on more than the shapes of the microbatch; then each message describes itself.

    The function's `params` are a tree per stage, of which a device needs its own; floating tensors in it are trained,
    except Parameters that do not require grad. `microbatches` are trees, the same on all devices; their shapes may
    differ. Each counts for its number of rows, or for its entry in `weights`. Only the first stage and the loss
    function read them; elsewhere a tensor may be a placeholder: `x.new_empty(()).expand(x.shape)` takes no memory.

    >>> import fshard as fs
    >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n", name="1f1b")
    >>> def stage(w, x):
    ...     return w * x
    >>> step = pipelined([stage] * 2, schedule, lambda y, x: y.mean(), mesh=fs.make_mesh({"pipe": 2}))
    >>> step([torch.tensor(2.0), torch.tensor(3.0)], [torch.ones(1), torch.ones(3)])[:2]
    (tensor(6.), [tensor(3.), tensor(2.)])
    """
    refuse_no_mesh("pipelined", mesh)
    mesh.check_axes(axis, "pipelined(axis=)")
    wrong = [
        (len(stages) != schedule.stages, f"it has {schedule.stages} stages, {len(stages)} are given"),
        (
            mesh.shape[axis] != schedule.devices,
            f"it is for {schedule.devices} devices, axis {axis} has {mesh.shape[axis]}",
        ),
        (backward and loss_fn is None, "a backward begins with a loss: give loss_fn=, or backward=False"),
        (backward and not any(map(_has_backward, schedule.rows)), "it has no backward: give backward=False"),
        (
            mesh.runtime == "abstract",
            "on an abstract mesh the results of stages are unknown: `simulate` needs no stages",
        ),
    ]
    if any(is_wrong for is_wrong, _ in wrong):
        raise LayoutError(f"pipelined as {schedule.name}: {'; '.join(text for is_wrong, text in wrong if is_wrong)}.")
    verify(schedule)
    plan = ExecutionPlan(stages, Route(schedule, skips or {}, backward), loss_fn, backward, reproducible, dynamic, {})

    def step(
        params: Sequence[PyTree], microbatches: Sequence[PyTree], weights: Sequence[float] | None = None
    ) -> PipelinedResult:
        own, site = resolve_mesh(mesh), call_site()
        batch = Microbatches.of(microbatches, weights, schedule.microbatches)
        if len(params) != len(stages):
            raise LayoutError(
                f"pipelined: {len(stages)} stages have as many trees of parameters, {len(params)} are given."
            )
        if is_outside(own) and own.size != own.shape[axis]:
            raise LayoutError(
                f"pipelined over {axis} of {own}: what its other axes are for is not known here. Call it inside shard_map."
            )

        def body(_: int) -> PipelinedResult:
            group = require("pipelined").group(axis, "pipelined")
            return _run(plan, batch, params, group, torch.device(own.device_type), site)

        try:
            with one_thread(reproducible):
                outcomes = run_on_devices(own, body)
        except BaseException:
            plan.known.clear()  # some devices may have cached message forms that others have not
            raise
        gradients = [_held([one.gradients[stage] for one in outcomes]) for stage in range(len(stages))]
        return PipelinedResult(outcomes[0].loss, gradients, _held([one.metrics for one in outcomes]))

    return step


def _has_backward(row: Sequence[Action]) -> bool:
    return any(action.kind in (Kind.B, Kind.I, Kind.W) for action in row)


def _held(trees: Sequence[PyTree]) -> PyTree:
    """Return the value of the device that has it."""
    return next((tree for tree in trees if tree is not None), None)


# -- one device -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExecutionPlan:
    """The data that all steps share: see `pipelined`; `known` are the cached forms of messages of each device."""

    stages: Sequence[Stage]
    route: Route
    loss_fn: Callable[[PyTree, PyTree], Any] | None
    backward: bool
    reproducible: bool
    dynamic: bool
    known: dict[int, dict[Any, MessageForm]]


def _run(
    plan: ExecutionPlan, batch: Microbatches, params: Sequence[PyTree], group: Group, device: torch.device, site: Site
) -> PipelinedResult:
    """Run one device."""
    work, known = Given(plan, batch, params, group.index), None
    if not plan.dynamic:
        known = plan.known.setdefault(group.device, {})
    options = {"backward": plan.backward, "has_outcome": plan.loss_fn is not None}
    with parting(group):
        outcome = StageDevice(plan.route, work, group, device, site, batch.kinds, known, **options).run()
    loss, metrics = outcome or (None, [work.results[microbatch] for microbatch in sorted(work.results)] or None)
    return PipelinedResult(loss, work.gradients(), metrics)


class Given:
    """The `Work` of one device on parameters that it is given, each stage's as a tree."""

    def __init__(self, plan: ExecutionPlan, batch: Microbatches, params: Sequence[PyTree], index: int) -> None:
        self.plan, self.batch = plan, batch
        own = [stage for stage, place in enumerate(plan.route.placement) if place == index]
        self.params = {stage: Params(params[stage], plan.backward) for stage in own}
        self.totals: dict[int, Total] = {
            stage: Ordered(batch.weights) if plan.reproducible else RunningSum() for stage in own
        }
        self.found: dict[int, MicrobatchResult] = {}
        self.ones: dict[tuple[float, torch.dtype, torch.Size], Tensor] = {}
        self.results: dict[int, PyTree] = {}

    def begin(self, microbatch: int) -> PyTree:
        return self.batch.microbatches[microbatch]

    def call(self, stage: int, microbatch: int, x: PyTree, skips: dict[str, PyTree]) -> PyTree:
        return called_for(self.plan.stages[stage], microbatch)(self.params[stage].tree, x, **skips)

    def end(self, microbatch: int, y: PyTree) -> Tensor | None:
        """Return the loss; without a loss function, keep the result."""
        if self.plan.loss_fn is None:
            self.results[microbatch] = map_tensors(Tensor.detach, y)
            return None
        loss, self.found[microbatch] = MicrobatchResult.of(self.plan.loss_fn(y, self.batch.microbatches[microbatch]))
        return loss

    def start(self, microbatch: int) -> Tensor:
        """Return the gradient of a microbatch's loss: its part of the mean, unless sums are weighted."""
        weights = self.batch.weights
        part, loss = 1.0 if self.plan.reproducible else weights[microbatch] / sum(weights), self.found[microbatch].loss
        key = part, loss.dtype, loss.shape
        if key not in self.ones:
            self.ones[key] = torch.full_like(loss, part)
        return self.ones[key]

    def edges(self, stage: int) -> list[GradientEdge]:
        return self.params[stage].edges

    def may_accumulate(self, stage: int, microbatch: int) -> bool:
        """Let autograd add to the sums, where nothing has to be done with gradients before."""
        total = self.totals[stage]
        return isinstance(total, RunningSum) and total.let_accumulate(self.params[stage].own)

    def add(self, stage: int, microbatch: int, gs: list[Tensor | None]) -> None:
        self.totals[stage].add(microbatch, gs)

    def gather(self, stage: int) -> None:
        """Do nothing, as for all unit actions: parameters are unsharded."""

    free = reduce = gather

    def outcome(self) -> tuple[Tensor, PyTree]:
        return together([self.found[microbatch] for microbatch in sorted(self.found)], self.batch.weights)

    def gradients(self) -> list[PyTree]:
        """Return those of each stage that is here."""
        found: list[PyTree] = [None] * len(self.plan.stages)
        for stage, total in self.totals.items() if self.plan.backward else ():
            found[stage] = self.params[stage].tree_of(total.result())
        return found
