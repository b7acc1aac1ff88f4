"""A model with separate forward and backward, as torch's loops are written.

    output = model(x)              forward     of this device's part of the batch; parameters are unsharded as they are used
    loss = criterion(output, y)                the caller's own
    model.backward(loss)           backward    gradients are reduced as they are ready; or kept: sync=False
    grads = model.gradients(options)           devices agree: gradients of all backwards since the last call, and buffers

It runs `value_and_grad`'s device step: the loss is a mean over the samples of this device, the gradient that of the
mean over all devices, weighted by samples. The caller is one device: a process, or inside of `fs.run`.

In reproducible mode the module runs once for each slice of the device's part: see `joined_outputs`. So the bits of
gradients are equal on any mesh, if a sample's loss depends on that sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
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
from fshard.errors import MismatchError, ModuleError
from fshard.memory.kinds import claim, purpose
from fshard.mesh.layout import Layout, Mesh, PyTree, Structure, flatten, unflatten
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.spmd.deterministic import deterministic
from fshard.mesh.spmd.run import as_one_device, local_devices, resolve_mesh
from fshard.optim.partition import Partitioned
from fshard.optim.torch_optim.instances import OptimizerSource
from fshard.randomness import drawn_key
from fshard.source import call_site
from fshard.transforms.agreement import SliceLoss, hash_of, host_row, reduce_rows
from fshard.transforms.batch import Slice
from fshard.transforms.device_step import ModelStep
from fshard.transforms.fsdp.graph_checks import (
    other_leaves,
    validate_no_other_parameters,
    validate_no_reentrant_checkpoint,
)
from fshard.transforms.fsdp.lazy_param import unsharded
from fshard.transforms.fsdp.param_runtime import ParamPlans, ParamRuntime, numbered
from fshard.transforms.fsdp.units import LazyUnit
from fshard.transforms.gradient import gradient_tree
from fshard.transforms.module.buffers import Buffers
from fshard.transforms.options import Options
from fshard.transforms.reproducible.joined_outputs import JoinedOutput, join, split_backward
from fshard.transforms.reproducible.summation_tree import TreeAccumulator
from fshard.transforms.value_and_grad import gradient_of
from fshard.uncompiled import uncompiled

Args = ParamSpec("Args")
Result = TypeVar("Result")
ROUNDING = 1e-11
"""Of a sum of the devices' shares. A share of a batch of another size changes it by 1 / (devices x samples) or more."""


def as_device(
    method: Callable[Concatenate[LoopModel, Args], Result],
) -> Callable[Concatenate[LoopModel, Args], Result]:
    """Return a method that runs as the device of the model's mesh that the caller is."""

    @wraps(method)
    def run(self: LoopModel, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        validate_inside(self.mesh)
        scope = as_one_device(resolve_mesh(self.mesh), mapped=self.mesh.axis_names)
        with (
            deterministic(self.is_reproducible, self.mesh.device_type),
            scope,
            purpose("activations"),
        ):
            return method(self, *args, **kwargs)

    return run


class Forward(NamedTuple):
    """A forward of the model on a batch: this device's share of it, and the weights of its slices."""

    device: ModelStep
    share: float
    weights: Sequence[float]


@dataclass
class _Step:
    """A step in progress: from its first forward to the gradients."""

    runtime: ParamRuntime
    plans: ParamPlans
    structure: Structure  # of the tree of parameters
    indices: list[int]  # of each leaf of the tree among the parameters
    forward: Forward | None = None  # the last one
    differentiated: Forward | None = None  # that of the last backward
    weights: list[Sequence[float]] = field(
        default_factory=list[Sequence[float]]
    )  # of the slices of each backward
    outputs: list[JoinedOutput] = field(
        default_factory=list[JoinedOutput]
    )  # of all forwards, in reproducible mode
    has_other_leaves: bool = False  # a loss may lead to leaves beside parameters, such as inputs

    @property
    def is_pending(self) -> bool:
        """True if the last forward has had no backward."""
        return self.forward is not self.differentiated

    def params(self) -> PyTree:
        """Return the parameters as the module gets them."""
        return unflatten(
            self.structure, [self.runtime.lazy_params[index] for index in self.indices]
        )

    def close(self, *, wait: bool = True) -> None:
        """End the step, and drop its batch, which would stay until Python collects cycles of the runtime."""
        self.runtime.close(wait=wait)
        self.forward = self.differentiated = None


def _validate_no_leaves(leaves: Sequence[Tensor]) -> None:
    """Raise if the loss of a reproducible step depends on other leaves than the model's parameters."""
    if leaves:
        shapes = ", ".join([str(tuple(x.shape)) for x in leaves])
        raise ValueError(
            "reproducible=True: the loss must depend on no tensors that need a gradient, beside the model's "
            f"parameters; got some of shapes {shapes}. detach() them, or leave reproducible=True out."
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
        opt: Partitioned,
        state: DeviceState,
        loss_check: LossCheck | None = None,
    ) -> None:
        super().__init__(module, plugin, source)
        self._axes, self._state, self._loss_check = plugin.replica_axes(), state, loss_check
        self._unmeasured = (plugin, opt) if isinstance(plugin, GeminiPlugin) else None
        self._options = plugin.gradient_options()
        self.set_gradients(opt.gradients)
        self._step: _Step | None = None
        self._has_other_leaves = False  # the loss of the first step led to leaves beside parameters
        self._gathers = (
            0  # a hash of the all-gathers without gradients, which devices compare in the next step
        )
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
        """Use the buffers that the loop has written to: in each slice, and in the mean over devices of this step."""
        written = self.slots.written()
        if written:
            self._written = [{**tree, **written} for tree in self._written]
            self.slots.leave(self._written[-1])

    def restore_buffers(self) -> None:
        """Undo the writes of layers that ran again in a backward: those of the forward count."""
        self.slots.leave(self._written[-1])

    def validate_between_steps(self) -> None:
        super().validate_between_steps()
        if (
            self._step is not None
        ):  # a forward without a backward, as of a discriminator in another model's loss
            self._step.close()
            self._step = None
            self.slots.release_params()

    # -- forward ----------------------------------------------------------------------------------------------------

    @uncompiled
    @as_device
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this device's part of the batch."""
        grad, mesh, shard = (
            torch.is_grad_enabled(),
            resolve_mesh(self.mesh),
            self._state.part_of((args, kwargs)),
        )
        self.slots.validate_params()
        self.follow_writes()
        if grad and self._unmeasured is not None:
            plugin, opt = self._unmeasured
            self._unmeasured = None
            plugin.validate_loop(self.function, opt, self.params, self.module_buffers, shard)
        step = self._step if self._step is not None and grad else self._begin(mesh)
        if not step.is_pending:
            step.runtime.begin_slice()
        sliced, share = grad and self.is_reproducible, shard.cut.share(mesh, self._axes)
        batch = replace(shard.on(mesh, split=sliced), axes=self._axes)
        with self.draws(grad=grad):
            key = drawn_key()
        device = ModelStep(
            self._gradient.options, step.runtime, step.params, self._agreed, batch, 0, key, 1.0
        )
        slices = (
            batch.slices(0, device.turns, is_copied=True)
            if sliced
            else [Slice([x for (x,) in batch.columns], 1, None)]
        )
        rows = [slice.rows for slice in slices]
        try:
            outputs = self._run_slices(step, device, slices, sliced=sliced)
            output, recorded = join(outputs, rows) if sliced else (outputs[0], [])
        except BaseException:
            if step is not self._step:  # no later call uses it
                step.close(wait=False)
            raise
        step.outputs += recorded
        if grad:
            self._step, step.forward = step, Forward(device, share, rows if sliced else [share])
            if self._loss_check is not None and loss_in(output) is not None:
                self._loss_check.record(self._loss_in_eval_mode, args, kwargs)
            return output
        step.runtime.finish_slice()
        if step.runtime.sequence:
            self._gathers = hash_of((self._gathers, step.runtime.sequence))
        step.close()
        return output

    def _loss_in_eval_mode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss in the output of a call in eval mode, which leaves buffers as they are."""
        modes, written = [(x, x.training) for x in self.module.modules()], self._written
        self.module.eval()
        try:
            return loss_in(self(*args, **kwargs))
        finally:
            for module, is_training in modes:
                module.training = is_training
            self._written = written
            self.slots.leave(written[-1])

    def _begin(self, mesh: Mesh) -> _Step:
        """Begin a step: make the parameters available."""
        leaves, structure = flatten(self.params)
        claim(leaves, "parameters")
        firsts, indices = numbered(leaves)
        plans = self._gradient.plans_of(structure, leaves, indices, mesh, self._axes)
        shards, (device,) = [leaves[first].shards[0] for first in firsts], local_devices(mesh)
        runtime = ParamRuntime(plans, shards, device, self._gradient.options, call_site())
        return _Step(runtime, plans, structure, indices)

    def _run_slices(
        self, step: _Step, device: ModelStep, slices: Sequence[Slice], *, sliced: bool
    ) -> list[Any]:
        """Run the module once for each slice; return the outputs."""
        grad, outputs, written = torch.is_grad_enabled(), list[Any](), list[PyTree]()
        inputs = [x for slice in slices for x in slice.leaves if isinstance(x, Tensor)]
        step.has_other_leaves |= any([x.requires_grad for x in inputs])
        if sliced and step.has_other_leaves:
            raise ValueError(
                "reproducible=True: arguments of the model must not need a gradient, as the output of another call does: "
                "slices are cut off from its graph. detach() them, or leave reproducible=True out."
            )
        first = self._state.cut(0).device_index(device.batch.mesh) * len(slices)
        for number, (slice, buffers) in enumerate(
            zip(slices, self._written_by(len(slices)), strict=True), first
        ):
            args, kwargs = device.batch.tree(slice.leaves, device.options.compute)
            with device.running(number), step.runtime.saved.watch() if grad else nullcontext():
                output, after = self.function(step.params(), buffers, *args, **kwargs)
            if grad and step.runtime.is_first_step:
                validate_no_reentrant_checkpoint(output)
            outputs.append(unsharded(output))
            written.append(after)
        if len(written) >= len(
            self._written
        ):  # else it is a look between the forwards of a reproducible step
            self._written = written
        self.slots.leave(self._written[-1])
        if grad:
            self.slots.record_params()
        return outputs

    def _written_by(self, count: int) -> list[PyTree]:
        """Return the present buffers for each of this number of slices."""
        return self._written if len(self._written) == count else self._written[:1] * count

    # -- backward ---------------------------------------------------------------------------------------------------

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

        A mean over this device's samples is weighted by the number of samples of the last forward, or by `weight`. In
        reproducible mode, and where gradients are reduced each time, `sync` makes no difference. Leaves beside parameters,
        such as inputs that require a gradient, get their part of it in `.grad`.
        """
        step = self._step
        if step is None or step.forward is None:
            raise ModuleError(
                "backward: the model must be called after the last step or zero_grad. Call it first."
            )
        loss = unshard(loss)  # an array, if penalties of sharded parameters were added to it
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                "backward: the loss must be a tensor of one number that the model's output led to."
            )
        if step.runtime.is_first_step:
            validate_no_other_parameters(loss)
            self._has_other_leaves = bool(self._other_leaves(step, loss))
        leaves = list[Tensor]()
        if step.has_other_leaves or self._has_other_leaves:
            leaves = self._other_leaves(step, loss)
        step.runtime.check_unchanged()
        models = [*self._state.loop_models]  # a loss may lead through several
        for model in models:
            model.follow_writes()

        device, share, weights = step.forward
        step.differentiated = step.forward
        if weight is not None:
            share = self._share_of(weight, device)
            weights = [share]
        if self._loss_check is not None:
            is_idle = not step.forward.share
            self._loss_check.compare(share, device.group, device.site, is_idle=is_idle)

        device.scale = scale
        device.agree_on_axes(loss.device)
        if self.is_reproducible:
            _validate_no_leaves(leaves)
            self._differentiate_slices(step, loss, share, retain_graph=retain_graph)
        else:
            accumulate = None if sync or not device.options.reduce_once else LazyUnit.accumulate
            cotangent = device.begin_backward(loss, share, accumulate, idle=not share)
            device.differentiate([loss], [cotangent], leaves, retain_graph=retain_graph)
            if accumulate is None:
                step.runtime.reductions.end()

        step.weights.append(weights)
        self.slots.gradients.exist = True
        for model in models:
            model.restore_buffers()

    def _differentiate_slices(
        self, step: _Step, loss: Tensor, share: float, *, retain_graph: bool
    ) -> None:
        """Add the gradients of the slices of a reproducible step in their tree, and reduce the sums."""
        assert step.differentiated is not None
        device = step.differentiated.device
        units, reductions = step.runtime.units, step.runtime.reductions
        trees = TreeAccumulator(units, reductions)
        start = device.begin_backward(loss, share, trees.add, idle=not share)
        differentiate = partial(device.differentiate, retain_graph=retain_graph)
        split_backward(loss, start, step.outputs, differentiate, trees, retain_graph=retain_graph)

        # each backward by itself: sums of two would be rounded otherwise on other meshes
        for unit in units:
            reductions.reduce(unit, trees.result(unit) or [None] * len(unit.indices))
        reductions.send()

    def _share_of(self, weight: float | Tensor, device: ModelStep) -> float:
        """Return this device's share of the weights of all devices: one sum, for which the host waits."""
        is_number = isinstance(weight, Real | Tensor) and torch.as_tensor(weight).numel() == 1
        number = float(weight) if is_number else nan
        if not 0 <= number < inf:
            raise ValueError(
                f"backward: weight must be one finite number of at least 0; got {weight!r}. Give the number of samples or "
                "tokens that this device's loss is a mean over."
            )
        if self.is_reproducible:
            raise ValueError(
                "backward: weight must be None with reproducible=True, whose bits depend on no device's share. Divide a sum by "
                "a number that is equal on all devices: loss.sum() / booster.mean(tokens)."
            )
        row = host_row([number], device.runtime.reductions.device)
        (total,) = reduce_rows((row,), device.group, device.site)
        if not total.item():
            raise ValueError(
                "backward: weight must be above 0 on one device at least; got 0 on all. Leave the batch out."
            )
        return number / total.item()

    def _other_leaves(self, step: _Step, loss: Tensor) -> list[Tensor]:
        """Return the leaves beside parameters whose gradients a loss leads to."""
        outputs = {id(output.joined) for output in step.outputs}  # cut off from the model's graph
        return [x for x in other_leaves(loss) if id(x) not in outputs]

    # -- gradients --------------------------------------------------------------------------------------------------

    @as_device
    def gradients(self, optimizer: object) -> PyTree:
        """Return the gradients of all backwards since the last time; None where no device has used a parameter.

        Remaining gradients are reduced, and buffers averaged: the one time in a step that all devices agree, also on the
        options of the optimizer.
        """
        step = self._step
        if step is None or step.differentiated is None or not step.weights:
            raise ModuleError(
                "there are no gradients. Call the model, then booster.backward(loss, optimizer): loss.backward() does not "
                "reduce over devices."
            )
        self.slots.validate_params()
        self.follow_writes()
        self.end_step()
        device = step.differentiated.device
        zero = torch.zeros(
            (), device=step.runtime.reductions.device
        )  # the loop has used the losses
        losses = [SliceLoss(zero, sum(weights), []) for weights in zip(*step.weights, strict=True)]
        changed = [
            self._agreed.changed(0, tree, zero.device) for tree in self._written_by(len(losses))
        ]
        step.runtime.sequence.append(self._gathers)
        mean, used, after = device.agree(losses, changed, optimizer, self._state.order)
        if not self.is_reproducible and abs(mean.weight / len(step.weights) - 1) > ROUNDING:
            raise MismatchError(
                f"the devices' parts of the batch must add up to one; got {mean.weight / len(step.weights):.3f}: rows fit "
                "batches of two sizes. Use each batch of a loader before the next is fetched, or leave the last one out: "
                "drop_last=True."
            )
        self.set_buffers([self._agreed.after([after])])
        grads = gradient_tree(
            step.plans.leaves, [device.gradients(used)], step.structure, step.indices
        )
        step.plans.order, self._step = step.runtime.order, None
        if self._loss_check is not None:
            self._loss_check.clear()
            self._loss_check = None  # the first step is over
        step.close()
        self.slots.release_params()
        return grads

    @as_device
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step; a forward without its backward stays, as in torch."""
        step, self.slots.gradients.exist = self._step, False
        if step is not None and step.is_pending:
            step.weights = []
            step.runtime.reductions.drop()
        elif step is not None:
            self._step = None
            step.close()
            self.slots.release_params()
