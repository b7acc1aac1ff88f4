"""A model with separate forward and backward, as torch's loops are written.

    output = model(x)              forward     of this device's part of the batch; parameters are unsharded as they are used
    loss = criterion(output, y)                the caller's own
    model.backward(loss)           backward    gradients are reduced as they are ready; or kept: sync=False
    grads = model.gradients()                  devices agree: gradients of all backwards since the last call, and buffers

It runs `value_and_grad`'s device step: the loss is a mean over the samples of this device, the gradient that of the
mean over all devices, weighted by samples. The caller is one device: a process, or inside of `fs.run`.

In reproducible mode the module runs once for each slice of the device's part: see `joined_outputs`. So the bits of
gradients are equal on any mesh, if a sample's loss depends on that sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fshard.booster.loader import DeviceState
from fshard.booster.model import BoostedModel, refuse_outside
from fshard.booster.plugins import Plugin
from fshard.errors import MismatchError, ModuleError
from fshard.mesh.layout import PyTree, Structure, flatten, unflatten
from fshard.mesh.spmd.deterministic import deterministic
from fshard.mesh.spmd.run import local_devices, resolve_mesh, run_on_devices
from fshard.optim.partition import Partitioned
from fshard.optim.torch_optim.instances import OptimizerSource
from fshard.source import call_site
from fshard.transforms.agreement import SliceLoss, hash_of
from fshard.transforms.batch import Slice
from fshard.transforms.device_step import ModelStep
from fshard.transforms.fsdp.graph_checks import refuse_other_parameters, refuse_unreached
from fshard.transforms.fsdp.lazy_param import unsharded
from fshard.transforms.fsdp.param_runtime import ParamPlans, ParamRuntime, numbered
from fshard.transforms.fsdp.units import LazyUnit
from fshard.transforms.gradient import gradient_tree, unstaged
from fshard.transforms.module.buffers import Buffers
from fshard.transforms.reproducible.joined_outputs import JoinedOutput, join, split_backward
from fshard.transforms.reproducible.randomness import drawn_key
from fshard.transforms.reproducible.summation_tree import TreeAccumulator
from fshard.uncompiled import uncompiled


@dataclass
class _Step:
    """A step in progress: from its first forward to the gradients."""

    runtime: ParamRuntime
    plans: ParamPlans
    structure: Structure  # of the tree of parameters
    at: list[int]  # the index of each leaf of the tree among the parameters
    device: ModelStep = field(init=False)  # of the last forward
    done: ModelStep = field(init=False)  # of the last backward
    share: float = 1.0  # the weight of its part of the batch
    weights: Sequence[float] = ()  # of its slices
    is_pending: bool = False  # it has had no backward
    outputs: list[JoinedOutput] = field(default_factory=list[JoinedOutput])  # of all forwards, in reproducible mode
    backwards: list[Sequence[float]] = field(default_factory=list[Sequence[float]])  # the weights of the slices of each

    def params(self) -> PyTree:
        """Return the parameters as the module gets them."""
        return unflatten(self.structure, [self.runtime.lazy_params[place] for place in self.at])


class LoopModel(BoostedModel):
    """A boosted model that is called and differentiated by the caller: see above.

    Args:
        module, plugin, source: see `BoostedModel`.
        opt: with the layouts of gradients.
        state: of the Booster; it has the batches of loaders.
    """

    def __init__(
        self, module: nn.Module, plugin: Plugin, source: OptimizerSource, opt: Partitioned, state: DeviceState
    ) -> None:
        super().__init__(module, plugin, source)
        self._axes, self._state = plugin.replica_axes(self.mesh), state
        self._gradient = unstaged(self.function, gradients=opt.gradients, **plugin.gradient_options())
        self._step: _Step | None = None
        self._gathers = 0  # a hash of the all-gathers without gradients, which devices compare in the next step
        self.set_buffers(self.module_buffers)

    def set_buffers(self, buffers: PyTree) -> None:
        self.module_buffers = buffers
        self._agreed = Buffers(buffers, resolve_mesh(self.mesh))
        self._written = [self._agreed.part(0)]  # as each slice of the last forward has left them

    def trees(self) -> list[PyTree]:
        changed = self._agreed.changed(0, self._written[0], torch.device("cpu"))
        return [self.params, self._agreed.after([changed])]

    def _on_device(self, body: Callable[[], Any]) -> Any:
        refuse_outside(self.mesh)
        with deterministic(self.is_reproducible, self.mesh.device_type):
            (result,) = run_on_devices(resolve_mesh(self.mesh), lambda _: body(), mapped=self.mesh.axis_names)
        return result

    # -- forward ----------------------------------------------------------------------------------------------------

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this device's part of the batch."""
        return self._on_device(lambda: self._forward((args, kwargs)))

    def _forward(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        grad = torch.is_grad_enabled()
        step = self._step if self._step is not None and grad else self._begin()
        if not step.is_pending:
            step.runtime.begin_slice()
        sliced, part, mesh = grad and self.is_reproducible, self._state.part_of(given), resolve_mesh(self.mesh)
        batch, step.share = replace(part.on(mesh, split=sliced), axes=self._axes), part.cut.share(mesh, self._axes)
        with self.draws(grad=grad):
            key = drawn_key()
        step.device = ModelStep(self._gradient.options, step.runtime, step.params, self._agreed, batch, 0, key, 1.0)
        try:
            output = self._run_slices(step, sliced=sliced)
        except BaseException:
            if step is not self._step:  # no later call uses it
                step.runtime.close(wait=False)
            raise
        if grad:
            self._step, step.is_pending = step, True
        else:
            step.runtime.finish_slice()
            if step.runtime.sequence:
                self._gathers = hash_of((self._gathers, step.runtime.sequence))
            step.runtime.close()
        return output

    def _begin(self) -> _Step:
        """Begin a step: make the parameters available."""
        leaves, structure = flatten(self.params)
        own, at = numbered(leaves)
        mesh = resolve_mesh(self.mesh)
        plans = self._gradient.plans_of(structure, leaves, at, mesh, self._axes)
        shards, (device,) = [leaves[place].shards[0] for place in own], local_devices(mesh)
        runtime = ParamRuntime(plans, shards, device, self._gradient.options, call_site())
        return _Step(runtime, plans, structure, at)

    def _run_slices(self, step: _Step, *, sliced: bool) -> Any:
        """Run the module; once for each slice, whose outputs are joined as if it had been called once."""
        device = step.device
        given = Slice([x for (x,) in device.batch.columns], 1, None)
        slices = device.batch.slices(0, device.turns, apart=True) if sliced else [given]
        if sliced and any(isinstance(x, Tensor) and x.requires_grad for slice in slices for x in slice.leaves):
            raise ValueError(
                "reproducible=True: arguments of the model must not need a gradient, as the output of another call does: "
                "slices are cut off from its graph. detach() them, or leave reproducible=True out."
            )
        first = self._state.cut(0).device_index(device.batch.mesh) * len(slices)
        pairs = zip(slices, self._written_by(len(slices)), strict=True)
        found = [self._run(step, slice.leaves, buffers, first + turn) for turn, (slice, buffers) in enumerate(pairs)]
        outputs, written = [output for output, _ in found], [buffers for _, buffers in found]
        if len(written) >= len(self._written):  # else it is a look between the forwards of a reproducible step
            self._written = written
        if not sliced:
            step.weights = [step.share]
            return outputs[0]
        step.weights = rows = [slice.rows for slice in slices]
        output, recorded = join(outputs, rows)
        step.outputs += recorded
        return output

    def _written_by(self, slices: int) -> list[PyTree]:
        """Return the present buffers for each of these slices."""
        return self._written if len(self._written) == slices else self._written[:1] * slices

    def _run(self, step: _Step, leaves: list[Any], buffers: PyTree, number: int) -> tuple[Any, PyTree]:
        """Run the module once; return its output, and the buffers after it."""
        device, runtime, grad = step.device, step.runtime, torch.is_grad_enabled()
        args, kwargs = device.batch.tree(leaves, device.options.compute)
        with device.running(number), runtime.saved.watch() if grad else nullcontext():
            output, after = self.function(step.params(), buffers, *args, **kwargs)
        if grad and runtime.is_first_step:
            refuse_unreached(output)
        return unsharded(output), after

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, scale: float, sync: bool) -> None:
        """Add the gradient of `scale` times the loss; without `sync` it is not reduced yet.

        A mean over this device's samples is weighted by the number of samples of the last forward. In reproducible
        mode, and where gradients are reduced each time, `sync` makes no difference.
        """
        step = self._step
        if step is None:
            raise ModuleError("backward: the model must be called after the last step or zero_grad. Call it first.")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError("backward: the loss must be a tensor of one number that the model's output led to.")
        if step.runtime.is_first_step:
            refuse_other_parameters(loss)
        self._on_device(lambda: self._backward(step, loss, scale, sync))

    def _backward(self, step: _Step, loss: Tensor, scale: float, sync: bool) -> None:
        device, units, reductions = step.device, step.runtime.units, step.runtime.reductions
        step.runtime.check_unchanged()
        device.scale, step.is_pending = scale, False
        device.agree_on_axes(loss.device)
        if self.is_reproducible:
            trees = TreeAccumulator(units, reductions.as_reduced)
            start = device.begin_backward(loss, step.share, trees.add, idle=not step.share)
            split_backward(loss, start, step.outputs, device.differentiate, trees)
            for unit in units:  # each backward on its own: sums of two would be rounded otherwise on other meshes
                reductions.reduce(unit, trees.result(unit) or [None] * len(unit.indices))
            reductions.send()
        else:
            keep = None if sync or not device.options.reduce_once else LazyUnit.accumulate
            device.differentiate([loss], [device.begin_backward(loss, step.share, keep, idle=not step.share)])
            if keep is None:
                reductions.end()
        step.backwards.append(step.weights)
        step.done = device

    # -- gradients --------------------------------------------------------------------------------------------------

    def gradients(self) -> PyTree:
        """Return the gradients of all backwards since the last time; None where no device has used a parameter."""
        step = self._step
        if step is None or not step.backwards:
            raise ModuleError(
                "there are no gradients. Call the model, then booster.backward(loss, optimizer): loss.backward() does not "
                "reduce over devices."
            )
        self.end_step()
        return self._on_device(lambda: self._agree(step))

    def _agree(self, step: _Step) -> PyTree:
        """Reduce the remaining gradients, and average buffers: the one time in a step that all devices agree."""
        device, near = step.done, torch.zeros((), device=step.runtime.reductions.device)
        losses = [SliceLoss(near, sum(weights), []) for weights in zip(*step.backwards, strict=True)]
        changed = [self._agreed.changed(0, tree, near.device) for tree in self._written_by(len(losses))]
        step.runtime.sequence.append(self._gathers)
        mean, used, after = device.agree(losses, changed)
        if not self.is_reproducible and abs(mean.weight - len(step.backwards)) > 1e-6:
            raise MismatchError(
                f"the devices' parts of the batch must add up to one; got {mean.weight / len(step.backwards):.3f}: rows fit "
                "batches of two sizes. Use each batch of a loader before the next is fetched, or leave the last one out: "
                "drop_last=True."
            )
        self.set_buffers(self._agreed.after([after]))
        grads = gradient_tree(step.plans.leaves, [device.gradients(used)], step.structure, step.at)
        step.plans.order, self._step = step.runtime.order, None
        step.runtime.close()
        return grads

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step; a forward without its backward stays, as in torch."""
        step = self._step
        if step is not None and step.is_pending:
            step.backwards = []
            self._on_device(lambda: step.runtime.reductions.drop())
        elif step is not None:
            self._step = None
            self._on_device(lambda: step.runtime.close())
