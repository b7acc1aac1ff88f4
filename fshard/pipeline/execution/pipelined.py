"""`pipelined`: run stages, as plain functions, by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.mesh.layout import Mesh, PyTree, require_mesh
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
    """Return the function (params, microbatches, weights=None) -> PipelinedResult that runs stages by a schedule.

    Values and gradients are sent between stages of different devices once each; the loss and metrics are sent to all
    devices.

    Args:
        stages: functions (params, x) -> y of pytrees. The first one's x is the microbatch.
        schedule: the actions of each device; it is verified. Those on sharded weights do nothing.
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
    _validate(stages, schedule, loss_fn, mesh, axis, backward)
    schedule.verify()  # (1)
    route = Route(schedule, skips or {}, backward)  # (2)
    forms: dict[int, Forms] = {}  # of messages, by device

    def step(
        params: Sequence[PyTree],
        microbatches: Sequence[PyTree],
        weights: Sequence[float] | None = None,
    ) -> PipelinedResult:
        current, site = resolve_mesh(mesh), call_site()
        if len(microbatches) != schedule.microbatches:
            raise ValueError(
                f"microbatches must be {schedule.microbatches}, as in the schedule; got {len(microbatches)}."
            )
        if len(params) != len(stages):
            raise ValueError(
                f"params must be {len(stages)} trees, one for each stage; got {len(params)}."
            )
        if is_outside(current) and current.size != current.shape[axis]:
            raise ValueError(
                f"pipelined must be called inside shard_map or run, as {current} has other axes than {axis}."
            )
        counts, keys = weights_of(microbatches, weights), [*map(shape_key, microbatches)]

        def run_device(_: int) -> PipelinedResult:
            group = require("pipelined").group(axis, "pipelined")
            work = FunctionWork(stages, loss_fn, microbatches, counts, reproducible)
            for stage in [
                stage for stage, device in enumerate(route.placement) if device == group.index
            ]:
                work.params[stage] = Params(params[stage], backward)
                work.sums[stage] = OrderedSum(counts) if reproducible else RunningSum()
            device, cache = (
                torch.device(current.device_type),
                None if dynamic else forms.setdefault(group.device, {}),
            )
            options = {"backward": backward, "has_outcome": loss_fn is not None}
            with parting(group):
                outcome = StageDevice(
                    route, work, group, device, site, keys, cache, **options
                ).run()
            loss, metrics = outcome or (None, [y for _, y in sorted(work.results.items())] or None)
            return PipelinedResult(
                loss, work.gradients() if backward else [None] * len(stages), metrics
            )

        try:
            with deterministic(reproducible, current.device_type):
                results = run_on_devices(current, run_device)
        except BaseException:
            forms.clear()  # some devices may have cached message forms that others have not
            raise
        gradients = [
            _first_present(trees)
            for trees in zip(*[result.gradients for result in results], strict=True)
        ]
        return PipelinedResult(
            results[0].loss, gradients, _first_present([result.metrics for result in results])
        )

    return step


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
            f"schedule must be a Schedule; got {type(schedule).__name__}. Write fs.pipeline_schedule(...)."
        )
    kinds = {action.kind for row in schedule.rows for action in row}
    errors = [
        (
            len(stages) != schedule.stages,
            f"stages must be {schedule.stages}, as in the schedule; got {len(stages)}",
        ),
        (
            mesh.shape[axis] != schedule.devices,
            f"axis {axis} must have {schedule.devices} devices, as the schedule; got {mesh.shape[axis]}",
        ),
        (
            backward and loss_fn is None,
            "a backward begins with a loss: give loss_fn=, or backward=False",
        ),
        (
            backward and not kinds & {Kind.B, Kind.I, Kind.W},
            "the schedule has no backward: give backward=False",
        ),
        (
            mesh.runtime == "abstract",
            "mesh must have values; on an abstract one use schedule.simulate, without stages",
        ),
    ]
    if texts := [text for is_error, text in errors if is_error]:
        raise ValueError(f"pipelined by {schedule.name}: {'; '.join(texts)}.")


def _first_present(trees: Sequence[PyTree]) -> PyTree:
    """Return the value of the device that has it."""
    return next((tree for tree in trees if tree is not None), None)


@dataclass
class FunctionWork:
    """The `StageWork` of one device for functions on given trees of parameters."""

    stages: Sequence[Stage]
    loss_fn: Callable[[PyTree, PyTree], Any] | None
    microbatches: Sequence[PyTree]
    weights: list[float]
    reproducible: bool
    params: dict[int, Params] = field(default_factory=dict[int, Params])
    sums: dict[int, RunningSum | OrderedSum] = field(
        default_factory=dict[int, RunningSum | OrderedSum]
    )
    results: dict[int, Any] = field(
        default_factory=dict[int, Any]
    )  # loss and metrics of each microbatch, or y

    def first_input(self, microbatch: int) -> PyTree:
        return self.microbatches[microbatch]

    def run_stage(self, stage: int, microbatch: int, x: PyTree, skips: dict[str, PyTree]) -> PyTree:
        return stage_for(self.stages[stage], microbatch)(self.params[stage].tree, x, **skips)

    def evaluate_loss(self, microbatch: int, y: PyTree) -> Tensor | None:
        """Return the loss, and keep it with the metrics; without a loss function, keep y."""
        if self.loss_fn is None:
            self.results[microbatch] = map_tensors(Tensor.detach, y)
            return None
        result = self.loss_fn(y, self.microbatches[microbatch])
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, ())
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            form = (
                f"{loss.dtype} of shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else type(loss).__name__
            )
            raise ValueError(
                f"loss_fn must return one floating number, or it and metrics; got {form}."
            )
        self.results[microbatch] = map_tensors(Tensor.detach, (loss, metrics))
        return loss

    def cotangent(self, microbatch: int) -> Tensor:
        """Return the gradient of a microbatch's loss: its share of the mean, unless sums are weighted."""
        share = 1.0 if self.reproducible else self.weights[microbatch] / sum(self.weights)
        return torch.full_like(self.results[microbatch][0], share)

    def edges(self, stage: int) -> list[GradientEdge]:
        return self.params[stage].edges

    def may_accumulate(self, stage: int, microbatch: int) -> bool:
        """Let autograd add to the sums, unless these are ordered or the microbatch has no weight."""
        total, has_weight = self.sums[stage], self.weights[microbatch] > 0
        if not has_weight or not isinstance(total, RunningSum):
            return False
        return total.let_accumulate(self.params[stage].trained)

    def add_gradients(self, stage: int, microbatch: int, gs: list[Tensor | None]) -> None:
        """Add gradients; those of weight 0 count as none, even if they are not finite."""
        has_weight = self.weights[microbatch] > 0
        self.sums[stage].add(microbatch, gs if has_weight else [None] * len(gs))

    def unshard(self, stage: int) -> None:
        """Do nothing, as for all unit actions: parameters are unsharded."""

    reshard = reduce = unshard

    def outcome(self) -> tuple[Tensor, PyTree]:
        return mean_result([result for _, result in sorted(self.results.items())], self.weights)

    def gradients(self) -> list[PyTree]:
        """Return the gradients of each stage; None for those of other devices."""
        trees = {
            stage: self.params[stage].tree_of(total.result()) for stage, total in self.sums.items()
        }
        return [trees.get(stage) for stage in range(len(self.stages))]
