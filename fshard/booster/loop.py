"""A model with separate forward and backward, as torch's loops are written.

    output = model(x)                   forward     of this device's part of the batch
    loss = criterion(output, y)                     the caller's own
    model.backward(loss)                backward    gradients are reduced, or kept: sync=False
    grads = model.gradients(options)    finish      of all backwards since the last call

These are the three phases of a functional step, `ModelStep` in `transforms/device_step.py`: the
loss is a mean over the samples of this device, the gradient that of the mean over all devices,
weighted by samples. Each forward has a `ModelStep` of its own, since batches differ; all of one
optimizer step share a `ParamRuntime`. The caller is one device: a process, or inside of `fs.run`.

In reproducible mode the module runs once for each slice of the device's part: see `joined_outputs`.
So the bits of gradients are equal on any mesh, if a sample's loss depends on that sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from math import inf, nan
from numbers import Real
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fshard.booster.gemini import GeminiPlugin
from fshard.booster.loader import DeviceState
from fshard.booster.loss_check import LossCheck, loss_in
from fshard.booster.model import BoostedModel, validate_inside
from fshard.booster.plugins import Plugin
from fshard.errors import MismatchError, ModuleError, ScopeError
from fshard.memory.kinds import claim, purpose
from fshard.mesh.layout import Layout, Mesh, PyTree
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.spmd.deterministic import deterministic
from fshard.mesh.spmd.run import as_one_device, local_devices, resolve_mesh
from fshard.optim.scaling import finite_scale
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.optim.torch_optim.instances import OptimizerSource
from fshard.randomness import drawn_key
from fshard.source import call_site
from fshard.transforms.agreement import SliceLoss, hash_of, host_row, reduce_rows
from fshard.transforms.batch import Batch, Slice
from fshard.transforms.device_step import ModelStep, SliceOutput
from fshard.transforms.fsdp.graph_checks import (
    loop_collectives,
    other_leaves,
    validate_no_other_parameters,
    validate_no_reentrant_checkpoint,
)
from fshard.transforms.fsdp.lazy_param import unsharded
from fshard.transforms.fsdp.param_runtime import ParamRuntime
from fshard.transforms.fsdp.plans import ParamPlans
from fshard.transforms.gradient import ParamTree
from fshard.transforms.metrics import NO_METRICS
from fshard.transforms.module.buffers import Buffers
from fshard.transforms.options import Options
from fshard.transforms.reproducible.joined_outputs import JoinedOutput, join, split_cotangents
from fshard.transforms.slices import Count, DeviceSlices, SliceTurn, largest_of
from fshard.transforms.value_and_grad import gradient_of
from fshard.uncompiled import uncompiled

Args = ParamSpec("Args")
Result = TypeVar("Result")
ROUNDING = 1e-11
"""Of a sum of the devices' shares.

A share of a batch of another size changes it by 1 / (devices x samples) or more.
"""


def as_device(
    method: Callable[Concatenate[LoopModel, Args], Result],
) -> Callable[Concatenate[LoopModel, Args], Result]:
    """Return a method that runs as the device of the model's mesh that the caller is."""

    @wraps(method)
    def run(self: LoopModel, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        validate_inside(self.mesh)
        _validate_member(self.mesh)
        scope = as_one_device(resolve_mesh(self.mesh), mapped=self.mesh.axis_names)
        with (
            deterministic(self.is_reproducible, self.mesh.device_type),
            scope,
            purpose("activations"),
        ):
            return method(self, *args, **kwargs)

    return run


def _validate_member(mesh: Mesh) -> None:
    """Raise outside of a mesh: the caller's own code between forward and backward needs values."""
    if not mesh.is_member:
        raise ScopeError(
            f"a loop must run on the devices of {mesh.grid}; this process is none of them. Write "
            "if mesh.is_member: around the loop, but not around boost, fs.save and fs.reshard."
        )


class Forward(NamedTuple):
    """A forward of the model on a batch, for its backward.

    Args:
        step: its phases.
        share: this device's share of the samples.
        weights: of the slices.
    """

    step: ModelStep
    share: float
    weights: Sequence[float]


@dataclass
class LoopStep:
    """A step in progress: from its first forward to the gradients.

    Args:
        params: the parameters.
        plans: of these.
        runtime: of these.
        last: the last forward.
        differentiated: that of the last backward.
        weights: of the slices of each backward.
        outputs: of all forwards, in reproducible mode.
        has_other_leaves: True if a loss may lead to leaves besides parameters, such as inputs.
    """

    params: ParamTree
    plans: ParamPlans
    runtime: ParamRuntime
    last: Forward | None = None
    differentiated: Forward | None = None
    weights: list[Sequence[float]] = field(default_factory=list[Sequence[float]])
    outputs: list[JoinedOutput] = field(default_factory=list[JoinedOutput])
    has_other_leaves: bool = False

    @property
    def is_pending(self) -> bool:
        """True if the last forward has had no backward."""
        return self.last is not self.differentiated

    def lazy_params(self) -> PyTree:
        """Return the parameters as the module gets them."""
        return self.params.with_leaves(self.runtime.lazy_params)

    def drop_forwards(self) -> None:
        """Drop the batches, which would stay until Python collects cycles of the runtime."""
        self.last = self.differentiated = None

    def close(self, *, wait: bool = True) -> None:
        """End the step without its gradients."""
        self.runtime.close(wait=wait)
        self.drop_forwards()


def _validated_loss(loss: Any) -> Tensor:
    """Return a loss as a tensor; raise unless it is one number with a gradient."""
    loss = unshard(loss)  # an array, if penalties of sharded parameters were added to it
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            "backward: the loss must be a tensor of one number that the model's output led to."
        )
    return loss


def _validate_no_leaves(leaves: Sequence[Tensor]) -> None:
    """Raise if the loss of a reproducible step depends on leaves besides parameters."""
    if leaves:
        shapes = ", ".join([str(tuple(x.shape)) for x in leaves])
        raise ValueError(
            "reproducible=True: the loss must depend on no tensors that need a gradient, beside "
            f"the model's parameters; got some of shapes {shapes}. detach() them, or leave "
            "reproducible=True out."
        )


class LoopModel(BoostedModel):
    """A boosted model that is called and differentiated by the caller: see above.

    Args:
        module, plugin, source: see `BoostedModel`.
        opt: with the layouts of gradients.
        state: of the Booster; it has the batches of loaders.
        loss_check: compares the loss of the first step with that of all samples.
    """

    def __init__(
        self,
        module: nn.Module,
        plugin: Plugin,
        source: OptimizerSource,
        opt: ShardedOptimizer,
        state: DeviceState,
        loss_check: LossCheck | None = None,
    ) -> None:
        super().__init__(module, plugin, source)
        self._axes = plugin.replica_axes()
        self._state = state
        self._loss_check = loss_check
        self._unmeasured = (plugin, opt) if isinstance(plugin, GeminiPlugin) else None
        self._options = plugin.gradient_options()
        self.set_gradients(opt.gradients)
        self._step: LoopStep | None = None
        self._has_other_leaves = (
            False  # the loss of the first step led to leaves besides parameters
        )
        # A hash of the all-gathers of forwards without gradients: devices compare it in the next
        # step.
        self._gathers = 0
        self.set_buffers([self.module_buffers])
        state.loop_models.add(self)

    def set_gradients(self, layouts: Callable[[Layout], Layout]) -> None:
        """Set the layouts of gradients, by those of parameters."""
        options = Options(gradients=layouts, **self._options)
        self._gradient = gradient_of("value_and_grad", self.function, options)

    def buffer_trees(self) -> list[PyTree]:
        self.follow_writes()
        changed = self._agreed.changed(0, self._written[0], torch.device("cpu"))
        return [self._agreed.after([changed])]

    def set_buffers(self, trees: list[PyTree]) -> None:
        (self.module_buffers,) = trees
        self._agreed = Buffers(self.module_buffers, resolve_mesh(self.mesh))
        self._written = [self._agreed.part(0)]  # as each slice of the last forward has left them
        self.slots.leave(self._written[0])

    def follow_writes(self) -> None:
        """Use buffers that the loop has written to, in each slice and in the mean over devices."""
        written = self.slots.written()
        if written:
            self._written = [{**tree, **written} for tree in self._written]
            self.slots.leave(self._written[-1])

    def restore_buffers(self) -> None:
        """Undo the writes of layers that ran again in a backward: those of the forward count."""
        self.slots.leave(self._written[-1])

    def validate_between_steps(self) -> None:
        super().validate_between_steps()
        if self._step is not None:
            # A forward without a backward, as of a discriminator in another model's loss.
            self._step.close()
            self._step = None
            self.slots.release_params()

    # -- forward -----------------------------------------------------------------------------------

    @uncompiled
    @as_device
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this device's part of the batch."""
        has_grad, mesh = torch.is_grad_enabled(), resolve_mesh(self.mesh)
        part = self._state.part_of((args, kwargs))
        self.slots.validate_params()
        self.follow_writes()
        if has_grad and self._unmeasured is not None:
            plugin, opt = self._unmeasured
            self._unmeasured = None
            plugin.validate_loop(self.function, opt, self.params, self.module_buffers, part)

        # Forwards without gradients have a step of their own, which ends with them.
        step = self._step
        if step is None or not has_grad:
            step = self._begin(mesh)
        if not step.is_pending:
            step.runtime.begin_slice()
        is_sliced = has_grad and self.is_reproducible
        batch = replace(part.on(mesh, split=is_sliced), axes=self._axes)
        phases = self._phases(step, batch, has_grad=has_grad)
        share = part.cut.share(mesh, self._axes)
        turns = self._turns(phases.slices, share, is_sliced=is_sliced)
        try:
            outputs = self._run_slices(step, phases, turns, has_grad=has_grad)
            weights = [turn.weight for turn in turns]
            output = outputs[0]
            if is_sliced:
                output, joined = join(outputs, [turn.slice.rows for turn in turns])
                step.outputs += joined
        except BaseException:
            if step is not self._step:
                step.close(wait=False)  # no later call uses it
            raise

        if has_grad:
            step.last = Forward(phases, share, weights)
            self._step = step
            if self._loss_check is not None and loss_in(output) is not None:
                self._loss_check.record(self._loss_in_eval_mode, args, kwargs)
            return output
        step.runtime.finish_slice()
        if step.runtime.sequence:
            self._gathers = hash_of((self._gathers, step.runtime.sequence))
        step.close()
        return output

    def _begin(self, mesh: Mesh) -> LoopStep:
        """Begin a step: make the parameters available."""
        params = ParamTree.of(self.params)
        claim(params.leaves, "parameters")
        plans = self._gradient.plans_of(params, mesh, self._axes)
        (device,) = local_devices(mesh)
        options = self._gradient.options
        runtime = ParamRuntime(plans, params.shards(0), device, options, call_site())
        return LoopStep(params, plans, runtime)

    def _phases(self, step: LoopStep, batch: Batch, *, has_grad: bool) -> ModelStep:
        """Return the phases of a forward and its backward on a batch."""
        options, runtime = self._gradient.options, step.runtime
        context = runtime.context
        with self.draws(grad=has_grad):
            key = drawn_key()
        slices = DeviceSlices(options, context.scope, batch, 0, key, context.site)
        return ModelStep(slices, runtime, step.lazy_params, self._agreed)

    def _turns(self, slices: DeviceSlices, share: float, *, is_sliced: bool) -> list[SliceTurn]:
        """Return the slices of a device's batch: one of any objects, unless it `is_sliced`."""
        batch = slices.batch
        index = self._state.cut(0).device_index(batch.mesh)
        if not is_sliced:
            # Without a share the samples are a neighbour's: statistics must not count them.
            rows = 1 if share else 0
            slice = Slice([x for (x,) in batch.columns], rows, None)
            return [SliceTurn(slice, index, 0, lambda: [Count(share, share)])]
        parts = batch.slices(0, slices.count, is_copied=True)
        counts = [Count(part.rows, 1.0) for part in parts]
        first = index * len(parts)
        return [
            SliceTurn(part, first + turn, turn, lambda: counts) for turn, part in enumerate(parts)
        ]

    def _run_slices(
        self, step: LoopStep, phases: ModelStep, turns: Sequence[SliceTurn], *, has_grad: bool
    ) -> list[Any]:
        """Run the module once for each slice; return the outputs."""
        for turn in turns:
            inputs = [x for x in turn.slice.leaves if isinstance(x, Tensor)]
            step.has_other_leaves |= any([x.requires_grad for x in inputs])
        if has_grad and self.is_reproducible and step.has_other_leaves:
            raise ValueError(
                "reproducible=True: arguments of the model must not need a gradient, as the output "
                "of another call does: "
                "slices are cut off from its graph. detach() them, or leave reproducible=True out."
            )
        outputs, written = list[Any](), list[PyTree]()
        for turn, buffers in zip(turns, self._written_by(len(turns)), strict=True):

            def run_module(params: PyTree, batch: PyTree, buffers: PyTree = buffers) -> Any:
                args, kwargs = batch
                return self.function(params, buffers, *args, **kwargs)

            with phases.slices.running(turn):
                output, buffers_after = phases.forward(turn, run_module, is_recorded=has_grad)
            if has_grad and step.runtime.is_first_step:
                validate_no_reentrant_checkpoint(output)
            outputs.append(unsharded(output))
            written.append(buffers_after)
        # Fewer are of a forward without gradients between those of a reproducible step, whose
        # slices go on from theirs.
        if len(written) >= len(self._written):
            self._written = written
        self.slots.leave(self._written[-1])
        if has_grad:
            self.slots.record_params()
        return outputs

    def _written_by(self, count: int) -> list[PyTree]:
        """Return the present buffers for each of this number of slices."""
        return self._written if len(self._written) == count else self._written[:1] * count

    def _loss_in_eval_mode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss in the output of a call in eval mode, which leaves buffers alone."""
        modes, written = [(x, x.training) for x in self.module.modules()], self._written
        self.module.eval()
        try:
            return loss_in(self(*args, **kwargs))
        finally:
            for module, is_training in modes:
                module.training = is_training
            self._written = written
            self.slots.leave(written[-1])

    # -- backward ----------------------------------------------------------------------------------

    @as_device
    def backward(
        self,
        loss: Tensor,
        *,
        scale: float,
        sync: bool,
        weight: float | Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradient of `scale` times the loss; without `sync` it is not reduced yet.

        A mean over this device's samples is weighted by the number of samples of the last forward,
        or by `weight`. In reproducible mode, and where gradients are reduced each time, `sync`
        makes no difference. Leaves beside parameters, such as inputs that require a gradient, get
        their part of it in `.grad`.
        """
        step = self._step
        if step is None or step.last is None:
            raise ModuleError(
                "backward: the model must be called after the last step or zero_grad. Call it "
                "first."
            )
        loss = _validated_loss(loss)
        self._limit_scale(loss, scale, is_first=not step.weights)
        leaves = self._leaves_with_gradients(step, loss)
        step.runtime.check_unchanged()
        models = [*self._state.loop_models]  # a loss may lead through several
        for model in models:
            model.follow_writes()

        phases, share, weights = step.last
        step.differentiated = step.last
        slices = phases.slices
        if weight is not None:
            share = self._share_of(weight, slices)
            weights = [share]
        if self._loss_check is not None:
            is_idle = not step.last.share
            self._loss_check.compare(share, slices.group, slices.site, is_idle=is_idle)

        # In the first step devices agree on the axes of collectives. Later a device without samples
        # has to know whether the losses of others depend on its values: else their gradient is
        # dropped.
        if step.runtime.is_first_step or not share:
            for name, group in loop_collectives(loss):
                slices.collectives.record(name, group)
        phases.agree_on_axes(loss.device)

        cotangent = phases.cotangent(loss, share, scale)
        if self.is_reproducible:
            _validate_no_leaves(leaves)
            self._differentiate_slices(step, loss, cotangent, share, retain_graph=retain_graph)
        else:
            is_reduced = sync or not slices.options.reduce_once
            phases.backward(
                [loss],
                [cotangent],
                weight=share,
                is_reduced=is_reduced,
                leaves=leaves,
                retain_graph=retain_graph,
            )
            if is_reduced:
                step.runtime.reductions.end()

        step.weights.append(weights)
        self.slots.gradients.exist = True
        for model in models:
            model.restore_buffers()

    def _limit_scale(self, loss: Tensor, scale: float, *, is_first: bool) -> None:
        """Set the limit of the scale of a step's losses, whose gradients are of one scale."""
        largest = largest_of(loss)
        if not is_first:
            applied = finite_scale(self.largest_loss, scale)
            if finite_scale(largest, scale) != applied:
                raise ValueError(
                    "backward: all losses of a step must have dtypes that hold one loss scale; "
                    f"got one in {str(loss.dtype).removeprefix('torch.')} after another with a "
                    f"scale of {applied:g}. Write loss.float()."
                )
            largest = min(largest, self.largest_loss)
        self.largest_loss = largest

    def _differentiate_slices(
        self, step: LoopStep, loss: Tensor, cotangent: Tensor, share: float, *, retain_graph: bool
    ) -> None:
        """Add the gradients of the slices of a reproducible step in a tree, and reduce the sums."""
        assert step.differentiated is not None
        phases = step.differentiated.step
        # The loss of all slices has the share of the device already, so they count as 1 here.
        weight = 1.0 if share else 0.0
        with phases.slices.loss_scope():
            slices = split_cotangents(loss, cotangent, step.outputs, retain_graph=retain_graph)
            for pairs in slices:
                phases.backward(
                    [x for x, _ in pairs],
                    [g for _, g in pairs],
                    weight=weight,
                    is_reduced=False,
                    retain_graph=retain_graph,
                )

        # Each backward by itself: sums of two would be rounded otherwise on other meshes.
        assert phases.trees is not None
        reductions = step.runtime.reductions
        for unit in reductions.units:
            reductions.reduce(unit, phases.trees.take(unit) or [None] * len(unit.indices))
        step.runtime.reducer.send()

    def _share_of(self, weight: float | Tensor, slices: DeviceSlices) -> float:
        """Return this device's share of all weights: one sum, for which the host waits."""
        number = nan
        if isinstance(weight, Real | Tensor) and torch.as_tensor(weight).numel() == 1:
            number = float(weight)
        if not 0 <= number < inf:
            raise ValueError(
                f"backward: weight must be one finite number of at least 0; got {weight!r}. Give "
                "the number of samples or tokens that this device's loss is a mean over."
            )
        if self.is_reproducible:
            raise ValueError(
                "backward: weight must be None with reproducible=True, whose bits depend on no "
                "device's share. Divide a sum by a number that is equal on all devices: loss.sum() "
                "/ booster.mean(tokens)."
            )
        assert self._step is not None
        row = host_row([number], self._step.runtime.reducer.device)
        (total,) = reduce_rows((row,), slices.group, slices.site)
        if not total.item():
            raise ValueError(
                "backward: weight must be above 0 on one device at least; got 0 on all. Leave the "
                "batch out."
            )
        return number / total.item()

    def _leaves_with_gradients(self, step: LoopStep, loss: Tensor) -> list[Tensor]:
        """Return the leaves beside parameters that get a gradient.

        The graph of the loss is searched in the first step, and later only if there were some then
        or inputs require a gradient.
        """
        if step.runtime.is_first_step:
            validate_no_other_parameters(loss)
            self._has_other_leaves = bool(self._other_leaves(step, loss))
        if step.has_other_leaves or self._has_other_leaves:
            return self._other_leaves(step, loss)
        return []

    def _other_leaves(self, step: LoopStep, loss: Tensor) -> list[Tensor]:
        """Return the leaves beside parameters whose gradients a loss leads to."""
        outputs = {id(output.joined) for output in step.outputs}  # cut off from the model's graph
        return [x for x in other_leaves(loss) if id(x) not in outputs]

    # -- gradients ---------------------------------------------------------------------------------

    @as_device
    def gradients(self, optimizer: object) -> PyTree:
        """Return the gradients of all backwards since the last time.

        They are None where no device has used a parameter.
        Remaining gradients are reduced, and buffers averaged: the one time in a step that all
        devices agree, also on the options of the optimizer.
        """
        step = self._step
        if step is None or step.differentiated is None or not step.weights:
            raise ModuleError(
                "there are no gradients. Call the model, then booster.backward(loss, optimizer): "
                "loss.backward() does not reduce over devices."
            )
        self.slots.validate_params()
        self.follow_writes()
        self.end_step()
        phases = step.differentiated.step
        must_agree: dict[str, object] = {"optimizer": optimizer}
        if self._state.order:
            must_agree["order"] = self._state.order
        # The hash of forwards without gradients since the last step, beside the all-gathers of this
        # one.
        step.runtime.sequence.append(self._gathers)
        result = phases.finish(self._outputs_of(step), must_agree=must_agree)

        # A tree of gradients is in the plans' layouts; the next step expects the order of units of
        # this one.
        grads = step.params.gradients(step.plans.leaves, [result.gradients])
        step.plans.order = result.order
        self._step = None
        step.drop_forwards()
        self.slots.release_params()
        parts = result.weight / len(step.weights)
        if not self.is_reproducible and abs(parts - 1) > ROUNDING:
            raise MismatchError(
                f"the devices' parts of the batch must add up to one; got {parts:.3f}: rows fit "
                "batches of two sizes. Use each batch of a loader before the next is fetched, or "
                "leave the last one out: "
                "drop_last=True."
            )
        self.set_buffers([self._agreed.after([result.buffers])])
        if self._loss_check is not None:
            self._loss_check.clear()
            self._loss_check = None  # the first step is over
        return grads

    def _outputs_of(self, step: LoopStep) -> list[SliceOutput]:
        """Return the weights of slices and the buffers that they wrote, on which devices agree.

        The loop has used the losses, so they are zeros here.
        """
        zero = torch.zeros((), device=step.runtime.reducer.device)
        weights = [sum(column) for column in zip(*step.weights, strict=True)]
        outputs = list[SliceOutput]()
        for weight, tree in zip(weights, self._written_by(len(weights)), strict=True):
            loss = SliceLoss(zero, weight, [])
            written = self._agreed.changed(0, tree, zero.device)
            outputs.append(SliceOutput(loss, NO_METRICS, written))
        return outputs

    @as_device
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step; as in torch, a forward without backward stays."""
        step = self._step
        self.slots.gradients.exist = False
        if step is not None and step.is_pending:
            step.weights = []
            step.runtime.reductions.drop()
        elif step is not None:
            self._step = None
            step.close()
            self.slots.release_params()
