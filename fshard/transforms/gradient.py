"""The gradient of a loss, on a sharded batch and parameters in any layout: see `value_and_grad`.

Each device takes the loss of its part of the batch; the loss of the batch is their mean, weighted by samples or by
`weight`. So a batch of any size has the loss and the gradient that it has on one device, if the loss is a mean over
samples, or over what `weight` counts. Gradients have the layouts they are given: that is all that ZeRO 0 to 3 differ in.

    parameters    gradients     communication
    P()           P()           psum                    (0)
    P()           flat          psum_scatter            (1, 2)
    flat          flat          psum_scatter            (3; all-gathered at use)

Reproducible mode: the batch is split into slices whose number does not depend on the mesh. Gradients of slices are
added in one binary tree, within a device and, by the collectives, across devices, in at least 32 bits (16-bit sums
would be rounded at other points on other meshes); random draws are seeded by the slice; torch computes with one
thread. Then the bits are the same on any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fshard.ambient import setting
from fshard.errors import CollectiveTimeoutError, DeadlockError, MismatchError
from fshard.memory.kinds import claim, purpose
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import (
    Mesh,
    P,
    PyTree,
    Structure,
    flatten,
    paths_of,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.deterministic import deterministic
from fshard.mesh.spmd.run import local_devices, resolve_mesh, run_on_devices
from fshard.optim.leaves import trainable, without_static
from fshard.randomness import drawn_key
from fshard.source import Site, call_site
from fshard.transforms.agreement import FIX_UNEVEN_GATHERS
from fshard.transforms.array_checks import validate_local, validate_mesh, validate_run
from fshard.transforms.batch import Batch, BatchPart, shard_batch
from fshard.transforms.device_step import DeviceResult, DeviceStep, ModelStep
from fshard.transforms.fsdp.param_runtime import (
    ParamPlans,
    ParamRuntime,
    numbered,
    plan_param,
    validate_ties_frozen,
)
from fshard.transforms.fsdp.plans import Gradients, ParamPlan
from fshard.transforms.metrics import global_metrics
from fshard.transforms.module.buffers import Buffers, no_buffers
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import chosen, named, parts_of
from fshard.transforms.reproducible.rerun import RecordedInputs
from fshard.uncompiled import uncompiled

if TYPE_CHECKING:
    from fshard.transforms.differentiable_gradient import DifferentiableStep


CACHED_PLANS = 64
"""Number of trees whose plans a gradient caches."""


class StepValue(NamedTuple):
    """The result of a gradient function: the loss, its weight, and the metrics of the loss function.

    `samples`: of the batch; None if its tensors disagree on their number. In an unsharded batch all tensors count.
    """

    loss: Tensor
    weight: float
    samples: int | None
    buffers: PyTree
    aux: PyTree


class StepInputs(NamedTuple):
    """The inputs of a step on all devices of the caller.

    `restore` puts static leaves back; `indices` are those of leaves without ties, `numbers` the number of each leaf among
    these; `key`: of random draws.
    """

    leaves: Sequence[Sharded]
    structure: Structure
    restore: Callable[[PyTree], PyTree]
    indices: Sequence[int]
    numbers: Sequence[int]
    batch: Batch
    buffers: Buffers
    key: int
    scale: float
    site: Site

    def shards(self, device_index: int) -> list[Tensor]:
        """Return the shards of a local device, each parameter once."""
        return [self.leaves[index].shards[device_index] for index in self.indices]

    def tree(self, params: Sequence[Tensor]) -> PyTree:
        """Return parameters, each once, as the tree that the caller gave."""
        return self.restore(unflatten(self.structure, [params[number] for number in self.numbers]))


@dataclass(frozen=True)
class GradientFunction:
    """A function of (params, batch) that returns the loss and its gradient, and caches its plans.

    `run` is one algorithm for a full model and for one in stages; they differ in plans and in what each device does.
    """

    options: StepOptions
    mesh: Mesh
    specs: PyTree
    plans: list[tuple[object, Any]] = field(
        init=False, default_factory=list[Any], compare=False, repr=False
    )

    @uncompiled
    def __call__(
        self, params: PyTree, *inputs: PyTree, scale: Tensor | float | None = None
    ) -> tuple[Any, PyTree]:
        """Return the loss, or loss and metrics, and the gradient of `scale` times the loss.

        The engine differentiates detached shards, of which torch.func and autograd see nothing: within a transform a
        differentiable program takes its place, and where inputs require grad, their backward runs that program.
        """
        options = self.options
        if transformed():
            return self.differentiable(params, *inputs).loss_and_gradient(scale)
        recorded_inputs = RecordedInputs.of(params, *inputs)
        buffers, batch = inputs if options.has_buffers else ((), *inputs)
        validate_run(self.mesh, options.caller, params=params, buffers=buffers, batch=batch)
        value, grads = self.run(
            params, buffers, batch, call_site(), 1.0 if scale is None else float(scale)
        )
        loss = value.loss
        if recorded_inputs is not None:

            def program(params: PyTree, *inputs: PyTree) -> tuple[Tensor, PyTree]:
                return self.differentiable(params, *inputs).loss_and_gradient(scale)

            loss, grads = recorded_inputs.attach(program, (loss, grads))
        extras = (value.buffers,) * options.has_buffers + (value.aux,) * options.has_aux
        return ((loss, *extras) if extras else loss), grads

    def run(
        self, params: PyTree, buffers: PyTree, batch: PyTree, site: Site, scale: float = 1.0
    ) -> tuple[StepValue, PyTree]:
        """Run forward and backward on all devices; return the loss, and the gradients of `scale` times it in their layouts."""
        if self.options.backward and torch.is_inference_mode_enabled():
            raise ValueError(
                f"{self.options.caller} under torch.inference_mode(): nothing is recorded there, so there is no gradient. "
                "Call it outside, or in torch.inference_mode(False)."
            )
        options, mesh = self.options, resolve_mesh(self.mesh)
        params, restore = without_static(params)
        leaves, structure = flatten(params)
        self._validate_argument_order(leaves, batch)
        self.check_params(params, leaves, structure, mesh)
        sharded_batch = shard_batch(batch, self.specs, mesh)
        sharded_batch.check(options.turns(prod(mesh.shape[axis] for axis in sharded_batch.axes)))
        indices, numbers = numbered(leaves)  # a tied leaf is one, however often it occurs
        plans = self.plans_of(structure, leaves, numbers, mesh, sharded_batch.axes)  # (1)
        before = self.buffers_on(mesh, buffers) if options.has_buffers else no_buffers(mesh)
        key = drawn_key()  # the same on every process
        inputs = StepInputs(
            leaves, structure, restore, indices, numbers, sharded_batch, before, key, scale, site
        )
        claim(leaves, "parameters")
        claim(buffers, "buffers")
        try:
            results = self._on_devices(plans, inputs, mesh)
        except RuntimeError as error:
            if not self.runs_again(plans, error):
                raise
            results = self._on_devices(plans, inputs, mesh)
        plans.order = results[0].order
        grads = gradient_tree(
            plans.leaves, [result.gradients for result in results], structure, numbers
        )
        after, aux = before.after([result.buffers for result in results]), ()
        if options.has_aux:
            aux = global_metrics([result.aux for result in results], sharded_batch, options.aux)
        return StepValue(
            results[0].loss, results[0].weight, sharded_batch.samples, after, aux
        ), grads

    def _on_devices(self, plans: Any, inputs: StepInputs, mesh: Mesh) -> list[DeviceResult]:
        """Run the step of each local device."""
        options, devices, steps = self.options, local_devices(mesh), dict[int, Any]()

        def on_device(device: int) -> DeviceResult:
            index = devices.index(device) if len(devices) > 1 else 0
            step = steps[device] = self.device_step(plans, inputs, index, device)  # (2)
            return step.run()

        try:
            with (
                deterministic(options.reproducible, mesh.device_type),
                purpose("activations", inputs.site),
                setting(activations=options.activations),
            ):
                return run_on_devices(mesh, on_device, mapped=mesh.axis_names)
        except BaseException as error:
            self.failed(mesh, steps, error)
            raise

    def runs_again(self, plans: Any, error: RuntimeError) -> bool:
        """Return True if the step that raised may succeed with plans that this changes."""
        return False

    def differentiable(self, params: PyTree, *inputs: PyTree) -> DifferentiableStep:
        """Return the loss and its gradient as functions that can be differentiated."""
        caller = self.options.caller
        raise TypeError(
            f"{caller} of stages must not be differentiated, within a torch.func transform or by autograd. Differentiate "
            f"fs.{caller} of the loss of the full model, without schedule=."
        )

    def plans_of(
        self,
        structure: Structure,
        leaves: Sequence[Sharded],
        numbers: Sequence[int],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> Any:
        """Return the cached plans for parameters of this structure, these ties, shapes, dtypes and layouts.

        The key is compared, which is faster than hashing it for a few entries.
        """
        key = (
            structure,
            numbers,
            axes,
            [x.shape for x in leaves],
            [x.dtype for x in leaves],
            [x.layout for x in leaves],
        )
        plans = next((plans for cached, plans in self.plans if cached == key), None)
        if plans is None:
            paths = [*paths_of(structure)]
            frozen = chosen(self.options.frozen, paths, "frozen")
            validate_ties_frozen(paths, numbers, frozen)
            self._validate_dtypes(paths, leaves)
            validate_local(self.options, paths, leaves, axes)
            plans = self.plan(
                structure, [*zip(paths, leaves, frozen, strict=True)], numbers, mesh, axes
            )
            self.plans[:] = [(key, plans), *self.plans[: CACHED_PLANS - 1]]
        return plans

    def _validate_argument_order(self, leaves: Sequence[Any], batch: PyTree) -> None:
        """Raise if the parameters were given as the batch, and the batch as the parameters."""
        if batch is None and isinstance(self.specs, P) and self.specs.axes:
            raise TypeError(
                f"{self.options.caller}: the batch must be a tree of tensors, sharded by {self.specs}; got None."
            )
        if any(isinstance(x, Sharded) for x in leaves) or isinstance(batch, Tensor | BatchPart):
            return
        if any(isinstance(x, Sharded) for x in flatten(batch)[0]):
            raise ValueError(
                f"{self.options.caller}: params must be sharded parameters; got plain tensors, and sharded ones as the batch. "
                "Swap the two: the order is (params, batch), in a step (params, state, batch)."
            )

    def _validate_dtypes(self, paths: Sequence[str], leaves: Sequence[Sharded]) -> None:
        """Raise if there is nothing to differentiate by."""
        if (
            self.options.backward
            and leaves
            and not any(x.dtype.is_floating_point or x.dtype.is_complex for x in leaves)
        ):
            dtypes = ", ".join(
                f"{named(parts_of(path)) or 'the parameter'} is {str(x.dtype).removeprefix('torch.')}"
                for path, x in zip(paths, leaves, strict=True)
            )
            raise TypeError(
                f"{self.options.caller}: parameters must be floating-point or complex to have gradients; {dtypes}. "
                "Shard x.float() of them."
            )

    def check_params(
        self, params: PyTree, leaves: Sequence[Any], structure: Structure, mesh: Mesh
    ) -> None:
        """Raise unless the parameters are on the mesh."""
        validate_mesh(leaves, structure, mesh)

    def buffers_on(self, mesh: Mesh, buffers: PyTree) -> Buffers:
        """Return the given buffers on the mesh."""
        return Buffers(buffers, mesh)

    def plan(
        self,
        structure: Structure,
        params: Sequence[tuple[str, Sharded, bool]],
        numbers: Sequence[int],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> Any:
        """Return the plans of parameters: for each leaf its path, its parameter, and whether it is frozen."""
        raise NotImplementedError

    def device_step(self, plans: Any, inputs: StepInputs, index: int, device: int) -> DeviceStep:
        """Return the step of a device, the local one at `index`."""
        raise NotImplementedError

    def failed(self, mesh: Mesh, steps: Mapping[int, Any], error: BaseException) -> None:
        """Handle an error in the steps of the devices, which is raised then."""
        raise NotImplementedError


def gradient_tree(
    leaves: Sequence[ParamPlan],
    by_device: Sequence[Gradients],
    structure: Structure,
    numbers: Sequence[int],
) -> PyTree:
    """Return gradients as the tree of parameters, from the local shards of each device."""
    grads = [
        None if shards[0] is None else Sharded(leaf.shape, leaf.gradient, tuple(shards))
        for leaf, *shards in zip(leaves, *by_device, strict=True)
    ]
    return unflatten(structure, [grads[number] for number in numbers])


class Gradient(GradientFunction):
    """The gradient of a loss function of the full model."""

    def differentiable(self, params: PyTree, *inputs: PyTree) -> DifferentiableStep:
        """Return the loss and its gradient as functions that can be differentiated."""
        from fshard.transforms.differentiable_gradient import differentiable_step  # rare

        batch = inputs[-1]  # with buffers it raises
        return differentiable_step(self.options, resolve_mesh(self.mesh), self.specs, params, batch)

    def plan(
        self,
        structure: Structure,
        params: Sequence[tuple[str, Sharded, bool]],
        numbers: Sequence[int],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> ParamPlans:
        """Return the plans of parameters, each once."""
        plans: dict[int, ParamPlan] = {}
        for (path, x, is_frozen), number in zip(params, numbers, strict=True):
            trained = self.options.backward and trainable(x) and not is_frozen
            gradients, used = (
                self.options.gradients if trained else None,
                self.options.used(x.layout),
            )
            plans.setdefault(number, plan_param(path, x, gradients, used))
        return ParamPlans(
            tuple(plans[number] for number in sorted(plans)), mesh, axes, self.options.reproducible
        )

    def device_step(
        self, plans: ParamPlans, inputs: StepInputs, index: int, device: int
    ) -> ModelStep:
        """Return the step of a device, the local one at `index`."""
        options, (*_, batch, buffers, key, scale, site) = self.options, inputs
        runtime = ParamRuntime(plans, inputs.shards(index), device, options, site)
        return ModelStep(
            options,
            runtime,
            lambda: inputs.tree(runtime.lazy_params),
            buffers,
            batch,
            index,
            key,
            scale,
        )

    # Note [torch.func refuses saved-tensor hooks]
    # Under ZeRO-3 such hooks let unsharded parameters be freed until the backward. torch.func's grad, vjp, jacrev and
    # hessian raise under any, and which loss functions call one is not known before. So the first step that does
    # runs again, from its inputs and with its draws, and it and all later ones go without the hooks: what autograd saves
    # stays unsharded until the backward, as with reshard_after_forward=False.
    def runs_again(self, plans: ParamPlans, error: RuntimeError) -> bool:
        """Return True if the loss function calls torch.func, which needs a step without saved-tensor hooks."""
        if plans.keeps_saved or "support saved tensor hooks" not in str(error):
            return False
        plans.keeps_saved = True
        return True

    def failed(self, mesh: Mesh, steps: Mapping[int, ModelStep], error: BaseException) -> None:
        """Name the units in which devices differ."""
        runtimes = {device: step.runtime for device, step in steps.items()}
        is_of_devices = isinstance(error, MismatchError | DeadlockError | CollectiveTimeoutError)
        if is_of_devices and (gathers := describe_gathers(mesh, runtimes)):
            error.add_note(f"{self.options.caller}: {gathers}")


def describe_gathers(mesh: Mesh, runtimes: Mapping[int, ParamRuntime]) -> str:
    """Return the units that each device has all-gathered, and the fix; empty if several devices have gathered the same."""
    if (
        len(runtimes) > 1
        and len({*(tuple(runtime.sequence) for runtime in runtimes.values())}) == 1
    ):
        return ""
    devices = list[str]()
    for device, runtime in runtimes.items():
        coordinates = ", ".join(
            f"{axis}={index}" for axis, index in mesh.coordinates(device).items()
        )
        units = ", then ".join(runtime.describe_units()[number] for number in runtime.sequence)
        devices.append(f"({coordinates}) has gathered {units or 'nothing'}")
    fix = (
        FIX_UNEVEN_GATHERS
        if len(runtimes) > 1
        else f"If another process has gathered others: {FIX_UNEVEN_GATHERS}"
    )
    return f"{'; '.join(devices)}. {fix}"
