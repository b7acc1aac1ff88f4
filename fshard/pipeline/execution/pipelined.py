"""`pipelined`: run stages, as plain functions, by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.mesh.layout import Mesh, PyTree, require_mesh
from fshard.mesh.layout.kinds import compute_device
from fshard.mesh.spmd.deterministic import deterministic
from fshard.mesh.spmd.run import is_outside, resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import parting, require
from fshard.pipeline.execution.device import StageDevice
from fshard.pipeline.execution.gradient_sums import OrderedSum, RunningSum
from fshard.pipeline.execution.leaves import Params, Stage, map_tensors, stage_for
from fshard.pipeline.execution.mailbox import Forms
from fshard.pipeline.execution.microbatches import mean_result, shape_key, weights_of
from fshard.pipeline.execution.route import Route
from fshard.pipeline.schedule.actions import Kind
from fshard.pipeline.schedule.schedule import Schedule
from fshard.source import call_site

LossFunction = Callable[[PyTree, PyTree], Any]


class PipelinedResult(NamedTuple):
    """The result of a pipelined step.

    Args:
        loss: the mean over the microbatches; None without a loss function.
        gradients: of the parameters of each stage; None for stages of other devices and without a
            backward.
        metrics: what the loss function returns beside the loss: means, and sums of integers.
            Without a loss function, the last stage's result for each microbatch, on its device;
            None elsewhere.
    """

    loss: Tensor | None
    gradients: list[PyTree]
    metrics: PyTree


def pipelined(
    stages: Sequence[Stage],
    schedule: Schedule,
    loss_fn: LossFunction | None = None,
    *,
    mesh: Mesh,
    axis: str = "pipe",
    skips: Mapping[str, tuple[int, int]] | None = None,
    backward: bool = True,
    reproducible: bool = False,
    dynamic: bool = False,
) -> Callable[..., PipelinedResult]:
    """Return the function (params, microbatches, weights=None) -> PipelinedResult.

    It runs the stages by the schedule. Values and gradients are sent between stages of different
    devices once each; the loss and metrics are sent to all devices.

    Args:
        stages: functions (params, x) -> y of pytrees. The first one's x is the microbatch.
        schedule: the actions of each device; it is verified. Those on sharded weights do nothing.
        loss_fn: of (y, microbatch), where y is the last stage's: a loss, or a loss and a tree of
            metrics.
        mesh: the devices.
        axis: the axis of the stages.
        skips: {name: (from, to)}: stage `from` returns (y, {name: value}), and stage `to` is called
            with name=value.
        backward: False runs only the forwards of the schedule.
        reproducible: add gradients of microbatches in one fixed tree, whatever the schedule, with
            one intra-op thread.
        dynamic: True if shapes depend on more than the shapes of the microbatch; then each message
            describes itself.

    The function's `params` are a tree per stage, of which a device needs its own; floating tensors
    in it are trained, except Parameters that do not require grad. `microbatches` are trees, the
    same on all devices; their shapes may differ. Each counts for its number of rows, or for its
    entry in `weights`. Only the first stage and the loss function read them; elsewhere a tensor may
    be a placeholder: `x.new_empty(()).expand(x.shape)` takes no memory.

    >>> import fshard as fs
    >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n", name="1f1b")
    >>> def stage(w, x):
    ...     return w * x
    >>> def loss_fn(y, x):
    ...     return y.mean()
    >>> step = pipelined([stage] * 2, schedule, loss_fn, mesh=fs.make_mesh({"pipe": 2}))
    >>> step([torch.tensor(2.0), torch.tensor(3.0)], [torch.ones(1), torch.ones(3)])[:2]
    (tensor(6.), [tensor(3.), tensor(2.)])
    """
    _validate(stages, schedule, loss_fn, mesh, axis, backward)
    schedule.verify()  # (1)
    route = Route(schedule, skips or {}, backward)  # (2)
    forms_by_device: dict[int, Forms] = {}

    def step(
        params: Sequence[PyTree],
        microbatches: Sequence[PyTree],
        weights: Sequence[float] | None = None,
    ) -> PipelinedResult:
        current_mesh = resolve_mesh(mesh)
        site = call_site()
        _validate_step(schedule, current_mesh, axis, params, microbatches)
        counts = weights_of(microbatches, weights)
        keys = [shape_key(microbatch) for microbatch in microbatches]

        def run_device(_: int) -> PipelinedResult:
            group = require("pipelined").group(axis, "pipelined")
            work = FunctionWork(stages, loss_fn, microbatches, counts, reproducible)
            for stage, index in enumerate(route.placement):
                if index == group.index:
                    work.add_stage(stage, params[stage], trained=backward)

            forms = None if dynamic else forms_by_device.setdefault(group.device, {})
            with parting(group):
                interpreter = StageDevice(
                    route,
                    work,
                    group,
                    compute_device(current_mesh),
                    site,
                    keys,
                    forms,
                    backward=backward,
                    has_outcome=loss_fn is not None,
                )
                outcome = interpreter.run()
            loss, metrics = (None, work.outputs()) if outcome is None else outcome
            gradients = work.gradients() if backward else [None] * len(stages)
            return PipelinedResult(loss, gradients, metrics)

        try:
            with deterministic(reproducible, current_mesh.device_type):
                results = run_on_devices(current_mesh, run_device)
        except BaseException:
            # Some devices may have cached message forms that others have not.
            forms_by_device.clear()
            raise
        return _combine(results)

    return step


def _combine(results: Sequence[PipelinedResult]) -> PipelinedResult:
    """Return one result of all devices of this process: what any of them has."""
    gradients: list[PyTree] = []
    for trees in zip(*[result.gradients for result in results], strict=True):
        gradients.append(_first_present(trees))
    metrics = _first_present([result.metrics for result in results])
    return PipelinedResult(results[0].loss, gradients, metrics)


def _first_present(trees: Sequence[PyTree]) -> PyTree:
    return next((tree for tree in trees if tree is not None), None)


# -- checks ----------------------------------------------------------------------------------------


def _validate(
    stages: Sequence[Stage],
    schedule: Schedule,
    loss_fn: object,
    mesh: Mesh,
    axis: str,
    backward: bool,
) -> None:
    mesh = require_mesh("pipelined", mesh)
    mesh.check_axes(axis, "pipelined(axis=)")
    if not isinstance(schedule, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"schedule must be a Schedule; got {type(schedule).__name__}. "
            "Write fs.pipeline_schedule(...)."
        )

    errors: list[str] = []
    if len(stages) != schedule.stages:
        errors.append(f"stages must be {schedule.stages}, as in the schedule; got {len(stages)}")
    if mesh.shape[axis] != schedule.devices:
        errors.append(
            f"axis {axis} must have {schedule.devices} devices, as the schedule; "
            f"got {mesh.shape[axis]}"
        )
    if backward and loss_fn is None:
        errors.append("a backward begins with a loss: give loss_fn=, or backward=False")
    kinds = {action.kind for row in schedule.rows for action in row}
    if backward and not kinds & {Kind.B, Kind.I, Kind.W}:
        errors.append("the schedule has no backward: give backward=False")
    if mesh.runtime == "abstract":
        errors.append(
            "mesh must have values; on an abstract one use schedule.simulate, without stages"
        )
    if errors:
        raise ValueError(f"pipelined by {schedule.name}: {'; '.join(errors)}.")


def _validate_step(
    schedule: Schedule,
    mesh: Mesh,
    axis: str,
    params: Sequence[PyTree],
    microbatches: Sequence[PyTree],
) -> None:
    if len(microbatches) != schedule.microbatches:
        raise ValueError(
            f"microbatches must be {schedule.microbatches}, as in the schedule; "
            f"got {len(microbatches)}."
        )
    if len(params) != schedule.stages:
        raise ValueError(
            f"params must be {schedule.stages} trees, one for each stage; got {len(params)}."
        )
    if is_outside(mesh) and mesh.size != mesh.shape[axis]:
        raise ValueError(
            f"pipelined must be called inside shard_map or run, as {mesh} has other axes than "
            f"{axis}."
        )


# -- the work of one device ------------------------------------------------------------------------


class FunctionWork:
    """The `StageWork` of one device for functions on given trees of parameters.

    Args:
        stages: the functions of all stages.
        loss_fn: the loss function, if any.
        microbatches: those of the step.
        weights: one per microbatch.
        reproducible: add gradients in the fixed tree.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss_fn: LossFunction | None,
        microbatches: Sequence[PyTree],
        weights: list[float],
        reproducible: bool,
    ) -> None:
        self._stages = stages
        self._loss_fn = loss_fn
        self._microbatches = microbatches
        self._weights = weights
        self._reproducible = reproducible
        self._params: dict[int, Params] = {}
        self._sums: dict[int, RunningSum | OrderedSum] = {}
        # Of each microbatch, on the device of the last stage: loss and metrics, or y.
        self._results: dict[int, Any] = {}

    def add_stage(self, stage: int, params: PyTree, *, trained: bool) -> None:
        """Add a stage of the device."""
        self._params[stage] = Params(params, trained)
        self._sums[stage] = OrderedSum(self._weights) if self._reproducible else RunningSum()

    # -- forward -----------------------------------------------------------------------------------

    def first_input(self, microbatch: int) -> PyTree:
        return self._microbatches[microbatch]

    def run_stage(self, stage: int, microbatch: int, x: PyTree, skips: dict[str, PyTree]) -> PyTree:
        function = stage_for(self._stages[stage], microbatch)
        return function(self._params[stage].tree, x, **skips)

    def evaluate_loss(self, microbatch: int, y: PyTree) -> Tensor | None:
        """Return the loss, and keep it with the metrics; without a loss function, keep y."""
        if self._loss_fn is None:
            self._results[microbatch] = map_tensors(Tensor.detach, y)
            return None

        result = self._loss_fn(y, self._microbatches[microbatch])
        has_metrics = isinstance(result, tuple) and len(result) == 2
        loss, metrics = result if has_metrics else (result, ())
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            form = type(loss).__name__
            if isinstance(loss, Tensor):
                form = f"{loss.dtype} of shape {tuple(loss.shape)}"
            raise ValueError(
                f"loss_fn must return one floating number, or it and metrics; got {form}."
            )
        self._results[microbatch] = map_tensors(Tensor.detach, (loss, metrics))
        return loss

    # -- backward ----------------------------------------------------------------------------------

    def cotangent(self, microbatch: int) -> Tensor:
        """Return the gradient of a microbatch's loss: its share of the mean.

        In reproducible mode it is 1, since sums are weighted and divided.
        """
        share = 1.0
        if not self._reproducible:
            share = self._weights[microbatch] / sum(self._weights)
        loss, _ = self._results[microbatch]
        return torch.full_like(loss, share)

    def edges(self, stage: int) -> list[GradientEdge]:
        return self._params[stage].edges

    def may_accumulate(self, stage: int, microbatch: int) -> bool:
        """Let autograd add to a running sum, unless the microbatch has no weight."""
        total = self._sums[stage]
        if self._weights[microbatch] == 0 or not isinstance(total, RunningSum):
            return False
        return total.let_accumulate(self._params[stage].trained)

    def add_gradients(self, stage: int, microbatch: int, gs: list[Tensor | None]) -> None:
        """Add gradients; those of weight 0 count as none, even if they are not finite."""
        if self._weights[microbatch] == 0:
            gs = [None] * len(gs)
        self._sums[stage].add(microbatch, gs)

    # -- units: parameters are unsharded, so there is nothing to do --------------------------------

    def unshard(self, stage: int) -> None:
        """Do nothing."""

    def reshard(self, stage: int) -> None:
        """Do nothing."""

    def reduce(self, stage: int) -> None:
        """Do nothing."""

    # -- the end of the step -----------------------------------------------------------------------

    def outcome(self) -> tuple[Tensor, PyTree]:
        return mean_result(self._results_by_microbatch(), self._weights)

    def outputs(self) -> list[PyTree] | None:
        """Return the last stage's result for each microbatch; None on other devices."""
        return self._results_by_microbatch() or None

    def _results_by_microbatch(self) -> list[Any]:
        return [result for _, result in sorted(self._results.items())]

    def gradients(self) -> list[PyTree]:
        """Return the gradients of each stage; None for those of other devices."""
        trees: list[PyTree] = [None] * len(self._stages)
        for stage, total in self._sums.items():
            trees[stage] = self._params[stage].tree_of(total.result())
        return trees
