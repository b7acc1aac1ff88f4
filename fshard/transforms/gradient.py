"""The gradient of a loss, on a sharded batch and parameters in any layout: see `value_and_grad`.

Each device takes the loss of its part of the batch; the loss of the batch is their mean, weighted
by samples or by `weight`. So a batch of any size has the loss and the gradient that it has on one
device, if the loss is a mean over samples, or over what `weight` counts. Gradients have the layouts
they are given: that is all that ZeRO 0 to 3 differ in.

    parameters    gradients     communication
    P()           P()           psum                    (0)
    P()           flat          psum_scatter            (1, 2)
    flat          flat          psum_scatter            (3; all-gathered at use)

Reproducible mode: the batch is split into slices whose number does not depend on the mesh.
Gradients of slices are added in one binary tree, within a device and, by the collectives, across
devices, in at least 32 bits (16-bit sums would be rounded at other points on other meshes); random draws are seeded by the
slice; torch computes with one thread. Then the bits are the same on any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

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
from fshard.mesh.layout.sharded import Sharded, abstract_array, only_arrays
from fshard.mesh.spmd.deterministic import deterministic
from fshard.mesh.spmd.run import local_devices, resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import require
from fshard.optim.leaves import trainable, without_static
from fshard.randomness import drawn_key
from fshard.source import Site, call_site
from fshard.transforms.agreement import FIX_UNEVEN_GATHERS
from fshard.transforms.array_checks import (
    REPLICATED_OR_FSDP,
    validate_local,
    validate_mesh,
    validate_run,
)
from fshard.transforms.batch import Batch, BatchPart, shard_batch
from fshard.transforms.device_step import DeviceResult, ModelStep
from fshard.transforms.fsdp.param_runtime import ParamRuntime
from fshard.transforms.fsdp.plans import (
    Gradients,
    ParamPlan,
    ParamPlans,
    numbered,
    plan_param,
    validate_ties_frozen,
)
from fshard.transforms.metrics import global_metrics
from fshard.transforms.module.buffers import Buffers, no_buffers
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import chosen, titled
from fshard.transforms.reproducible.rerun import RecordedInputs
from fshard.transforms.slices import DeviceSlices
from fshard.uncompiled import uncompiled

if TYPE_CHECKING:
    from fshard.transforms.differentiable_gradient import DifferentiableStep
    from fshard.transforms.stages.plan import Pipeline


CACHED_PLANS = 64
"""Number of trees whose plans a gradient caches."""


class StepValue(NamedTuple):
    """The result of a gradient function: the loss with its weight, buffers and metrics.

    `largest`: the largest number of the dtype of the loss function's result: it limits the scale.
    `samples`: of the batch; None if its tensors disagree on their number. In an unsharded batch all
    tensors count. Outside of the mesh loss, samples and metrics are None.
    """

    loss: Tensor | None
    weight: float
    largest: float
    samples: int | None
    buffers: PyTree
    aux: PyTree


class ParamTree(NamedTuple):
    """The parameters that a step is given: a tree, in which tied ones occur several times.

    Args:
        leaves: of the tree.
        structure: of the tree.
        restore: puts static leaves back.
        indices: those of the leaves without repeated ones.
        numbers: of each leaf, its number among these.
    """

    leaves: Sequence[Sharded]
    structure: Structure
    restore: Callable[[PyTree], PyTree]
    indices: Sequence[int]
    numbers: Sequence[int]

    @staticmethod
    def of(params: PyTree) -> ParamTree:
        """Return the leaves of a tree of parameters."""
        params, restore = without_static(params)
        leaves, structure = flatten(params)
        return ParamTree(leaves, structure, restore, *numbered(leaves))

    def shards(self, device_index: int) -> list[Tensor]:
        """Return the shards of a local device, each parameter once."""
        return [self.leaves[index].shards[device_index] for index in self.indices]

    def with_leaves(self, params: Sequence[Any]) -> PyTree:
        """Return the tree with other values of its parameters, each given once."""
        return unflatten(self.structure, [params[number] for number in self.numbers])

    def with_params(self, params: Sequence[Tensor]) -> PyTree:
        """Return the tree that the caller gave, static leaves included, with other values."""
        return self.restore(self.with_leaves(params))

    def gradients(self, plans: Sequence[ParamPlan], by_device: Sequence[Gradients]) -> PyTree:
        """Return gradients as the tree of parameters, from the local shards of each device."""
        grads = list[Sharded | None]()
        for plan, *shards in zip(plans, *by_device, strict=True):
            is_used = shards[0] is not None
            grads.append(Sharded(plan.shape, plan.gradient, tuple(shards)) if is_used else None)
        return self.with_leaves(grads)


class StepInputs(NamedTuple):
    """The inputs of a step on all devices of the caller.

    `key` is that of random draws.
    """

    params: ParamTree
    batch: Batch
    buffers: Buffers
    key: int
    scale: float
    site: Site

    def slices(self, options: StepOptions, device_index: int) -> DeviceSlices:
        """Return the slices of the local device at an index, which calls this."""
        scope = require(options.caller)
        return DeviceSlices(options, scope, self.batch, device_index, self.key, self.site)


class RunnableStep(Protocol):
    """One device's step."""

    def run(self) -> DeviceResult: ...


class StepProgram(Protocol):
    """The program of a step: a full model, or stages that run by a schedule.

    `pipeline`: the stages and how they run; None: the full model.
    """

    @property
    def pipeline(self) -> Pipeline | None: ...

    def validate_params(
        self, options: StepOptions, params: PyTree, tree: ParamTree, mesh: Mesh
    ) -> None:
        """Raise unless these are the parameters of the program, on the mesh."""
        ...

    def buffers(self, options: StepOptions, buffers: PyTree, mesh: Mesh) -> Buffers:
        """Return the given buffers on the mesh."""
        ...

    def plan(
        self,
        options: StepOptions,
        tree: ParamTree,
        params: Sequence[tuple[str, Sharded, bool]],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> Any:
        """Return plans of `params`: for each leaf a path, a parameter, and whether it is frozen."""
        ...

    def device_step(
        self, options: StepOptions, plans: Any, inputs: StepInputs, index: int
    ) -> RunnableStep:
        """Return the step of a device, the local one at `index`, which calls this."""
        ...

    def differentiable(
        self, options: StepOptions, mesh: Mesh, specs: PyTree, params: PyTree, batch: PyTree
    ) -> DifferentiableStep:
        """Return the loss and its gradient as functions that can be differentiated."""
        ...

    def handle_error(
        self, caller: str, mesh: Mesh, plans: Any, steps: Mapping[int, Any], error: BaseException
    ) -> bool:
        """Add to an error of the devices' steps; return True if they may run again.

        Then this has changed the plans, so that it returns True once.
        """
        ...


@dataclass(frozen=True)
class GradientFunction:
    """A function of (params, batch) that returns the loss and its gradient, and caches its plans.

    Args:
        options: of the step.
        mesh: the devices.
        specs: the specs of the batch.
        program: what runs on each device.
    """

    options: StepOptions
    mesh: Mesh = field(repr=False)  # the options show it
    specs: PyTree = field(repr=False)
    program: StepProgram = field(repr=False)
    plans: list[tuple[object, Any]] = field(
        init=False, default_factory=list[Any], compare=False, repr=False
    )

    @uncompiled
    def __call__(
        self, params: PyTree, *inputs: PyTree, scale: Tensor | float | None = None
    ) -> tuple[Any, PyTree]:
        """Return the loss, or loss and metrics, and the gradient of `scale` times the loss.

        The engine differentiates detached shards, of which torch.func and autograd see nothing:
        within a transform a differentiable program takes its place, and where inputs require grad,
        their backward runs that program.
        """
        options = self.options
        if transformed():
            return self.differentiable(params, *inputs).loss_and_gradient(scale)
        recorded_inputs = RecordedInputs.of(params, *inputs)
        buffers, batch = inputs if options.has_buffers else ((), *inputs)
        validate_run(self.mesh, options.caller, params=params, buffers=buffers, batch=batch)
        factor = 1.0 if scale is None else float(scale)
        value, grads = self.run(params, buffers, batch, call_site(), factor)

        loss = value.loss
        if recorded_inputs is not None and self.mesh.is_member:

            def program(params: PyTree, *inputs: PyTree) -> tuple[Tensor, PyTree]:
                return self.differentiable(params, *inputs).loss_and_gradient(scale)

            loss, grads = recorded_inputs.attach(program, (loss, grads))
        results = [loss]
        if options.has_buffers:
            results.append(value.buffers)
        if options.has_aux:
            results.append(value.aux)
        return (loss if len(results) == 1 else tuple(results)), grads

    def differentiable(self, params: PyTree, *inputs: PyTree) -> DifferentiableStep:
        """Return the loss and its gradient as functions that can be differentiated."""
        batch = inputs[-1]  # with buffers it raises
        mesh = resolve_mesh(self.mesh)
        return self.program.differentiable(self.options, mesh, self.specs, params, batch)

    def run(
        self,
        params: PyTree,
        buffers: PyTree,
        batch: PyTree,
        site: Site,
        scale: float = 1.0,
    ) -> tuple[StepValue, PyTree]:
        """Run forward and backward on all devices; return the loss, and gradients in their layouts.

        The gradients are those of `scale` times the loss.
        """
        options, program = self.options, self.program
        mesh = resolve_mesh(self.mesh)
        if not mesh.is_member:
            return self._run_outside(mesh, params, buffers)
        plans, inputs = self._prepare(mesh, params, buffers, batch, site, scale)
        claim(inputs.params.leaves, "parameters")
        claim(buffers, "buffers")
        devices = local_devices(mesh)
        steps = dict[int, RunnableStep]()

        def on_device(device: int) -> DeviceResult:
            index = devices.index(device) if len(devices) > 1 else 0
            step = steps[device] = program.device_step(options, plans, inputs, index)  # (2)
            return step.run()

        while True:
            try:
                with (
                    deterministic(options.reproducible, mesh.device_type),
                    purpose("activations", site),
                ):
                    results = run_on_devices(mesh, on_device, mapped=mesh.axis_names)
                break
            except BaseException as error:
                # Once: it returns True if it has changed the plans.
                if not program.handle_error(options.caller, mesh, plans, steps, error):
                    raise

        plans.order = results[0].order
        grads = inputs.params.gradients(plans.leaves, [result.gradients for result in results])
        buffers = inputs.buffers.after([result.buffers for result in results])
        aux = ()
        if options.has_aux:
            aux = global_metrics([result.aux for result in results], inputs.batch, options.aux)
        loss, weight, largest = results[0].loss, results[0].weight, results[0].largest
        return StepValue(loss, weight, largest, inputs.batch.samples, buffers, aux), grads

    # Note [Steps outside of a mesh]
    # Outside of a mesh a step runs no loss function: it might look at values, and a batch that is
    # read or computed on the mesh is not there. Types of gradients follow from those of parameters,
    # a trained one that no device uses included. Plain values of the mesh, such as the loss, are
    # None. A key is drawn as on the devices, so that all processes draw the same numbers later.
    def _run_outside(self, mesh: Mesh, params: PyTree, buffers: PyTree) -> tuple[StepValue, PyTree]:
        """Return gradients without values: see Note [Steps outside of a mesh]."""
        tree = ParamTree.of(params)
        self.program.validate_params(self.options, params, tree, mesh)
        batch_axes: set[str] = set()
        for spec in flatten(self.specs)[0]:
            batch_axes.update(spec.axes)
        axes = tuple([axis for axis in mesh.axis_names if axis in batch_axes])

        plans = self.plans_of(tree, mesh, axes)
        grads: list[Sharded | None] = []
        for plan in plans.leaves:
            grad = None
            if plan.trained:
                grad = abstract_array(plan.shape, plan.gradient, plan.dtype)
            grads.append(grad)
        drawn_key()
        value = StepValue(None, 0.0, inf, None, only_arrays(buffers), None)
        return value, tree.with_leaves(grads)

    def _prepare(
        self,
        mesh: Mesh,
        params: PyTree,
        buffers: PyTree,
        batch: PyTree,
        site: Site,
        scale: float,
    ) -> tuple[Any, StepInputs]:
        """Return the plans of a step and its inputs: shard the batch, and draw a random key."""
        options = self.options
        if options.backward and torch.is_inference_mode_enabled():
            raise ValueError(
                f"{options.caller} under torch.inference_mode(): nothing is recorded there, so "
                "there is no gradient. "
                "Call it outside, or in torch.inference_mode(False)."
            )
        tree = ParamTree.of(params)
        self._validate_argument_order(tree.leaves, batch)
        self.program.validate_params(options, params, tree, mesh)
        sharded_batch = shard_batch(batch, self.specs, mesh)
        sharded_batch.check(options.turns(prod(mesh.shape[axis] for axis in sharded_batch.axes)))
        plans = self.plans_of(tree, mesh, sharded_batch.axes)  # (1)
        buffers_before = no_buffers(mesh)
        if options.has_buffers:
            buffers_before = self.program.buffers(options, buffers, mesh)
        key = drawn_key()  # the same on every process
        return plans, StepInputs(tree, sharded_batch, buffers_before, key, scale, site)

    def plans_of(self, tree: ParamTree, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        """Return the cached plans for this structure, these ties, shapes, dtypes and layouts.

        `axes` are those that shard the batch. The key is compared, which is faster than hashing it
        for a few entries.
        """
        leaves, numbers = tree.leaves, tree.numbers
        key = (
            tree.structure,
            numbers,
            axes,
            [x.shape for x in leaves],
            [x.dtype for x in leaves],
            [x.layout for x in leaves],
        )
        for cached_key, plans in self.plans:
            if cached_key == key:
                return plans
        paths = [*paths_of(tree.structure)]
        frozen = chosen(self.options.frozen, paths, "frozen")
        validate_ties_frozen(paths, numbers, frozen)
        self._validate_dtypes(paths, leaves)
        validate_local(self.options, paths, leaves, axes)
        params = [*zip(paths, leaves, frozen, strict=True)]
        plans = self.program.plan(self.options, tree, params, mesh, axes)
        self.plans[:] = [(key, plans), *self.plans[: CACHED_PLANS - 1]]
        return plans

    def _validate_argument_order(self, leaves: Sequence[Any], batch: PyTree) -> None:
        """Raise if the parameters were given as the batch, and the batch as the parameters."""
        caller = self.options.caller
        if batch is None and isinstance(self.specs, P) and self.specs.axes:
            raise TypeError(
                f"{caller}: the batch must be a tree of tensors, sharded by {self.specs}; got None."
            )
        if any(isinstance(x, Sharded) for x in leaves) or isinstance(batch, Tensor | BatchPart):
            return
        if any(isinstance(x, Sharded) for x in flatten(batch)[0]):
            raise ValueError(
                f"{caller}: params must be sharded parameters; got plain tensors, and sharded ones "
                "as the batch. "
                "Swap the two: the order is (params, batch), in a step (params, state, batch)."
            )

    def _validate_dtypes(self, paths: Sequence[str], leaves: Sequence[Sharded]) -> None:
        """Raise if there is nothing to differentiate by."""
        if not self.options.backward or not leaves:
            return
        if any(x.dtype.is_floating_point or x.dtype.is_complex for x in leaves):
            return
        dtypes = list[str]()
        for path, x in zip(paths, leaves, strict=True):
            name = titled(path)
            dtypes.append(f"{name} is {str(x.dtype).removeprefix('torch.')}")
        raise TypeError(
            f"{self.options.caller}: parameters must be floating-point or complex to have "
            f"gradients; {', '.join(dtypes)}. "
            "Shard x.float() of them."
        )


# -- the full model --------------------------------------------------------------------------------


_IN_STEP = f"{REPLICATED_OR_FSDP}; the arguments of a step are (params, state, batch)"
"""The way out where a state may have been given as the parameters."""


class ModelProgram:
    """A loss function of the full model: each device runs it on its slices of the batch."""

    pipeline = None

    def validate_params(
        self, options: StepOptions, params: PyTree, tree: ParamTree, mesh: Mesh
    ) -> None:
        """Raise unless the parameters are on the mesh."""
        fix = _IN_STEP if options.caller == "train_step" else REPLICATED_OR_FSDP
        validate_mesh(tree.leaves, tree.structure, mesh, options.caller, fix)

    def buffers(self, options: StepOptions, buffers: PyTree, mesh: Mesh) -> Buffers:
        """Return the given buffers on the mesh."""
        return Buffers(buffers, mesh)

    def plan(
        self,
        options: StepOptions,
        tree: ParamTree,
        params: Sequence[tuple[str, Sharded, bool]],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> ParamPlans:
        """Return the plans of parameters, each once: a tied one by its first path."""
        plans: dict[int, ParamPlan] = {}
        for (path, x, is_frozen), number in zip(params, tree.numbers, strict=True):
            if number in plans:
                continue
            is_trained = options.backward and trainable(x) and not is_frozen
            gradients = options.gradients if is_trained else None
            plans[number] = plan_param(path, x, gradients, options.used(x.layout))
        leaves = tuple([plans[number] for number in sorted(plans)])
        return ParamPlans(leaves, mesh, axes, options.reproducible)

    def device_step(
        self, options: StepOptions, plans: ParamPlans, inputs: StepInputs, index: int
    ) -> ModelStep:
        """Return the step of a device, the local one at `index`."""
        device = inputs.batch.devices[index]
        params = inputs.params
        shards = params.shards(index)
        runtime = ParamRuntime(plans, shards, device, options, inputs.site)
        return ModelStep(
            inputs.slices(options, index),
            runtime,
            lambda: params.with_params(runtime.lazy_params),
            inputs.buffers,
            inputs.scale,
        )

    def differentiable(
        self, options: StepOptions, mesh: Mesh, specs: PyTree, params: PyTree, batch: PyTree
    ) -> DifferentiableStep:
        """Return the loss and its gradient as functions that can be differentiated."""
        from fshard.transforms.differentiable_gradient import differentiable_step  # rare

        return differentiable_step(options, mesh, specs, params, batch)

    def handle_error(
        self,
        caller: str,
        mesh: Mesh,
        plans: ParamPlans,
        steps: Mapping[int, ModelStep],
        error: BaseException,
    ) -> bool:
        """Name the units in which devices differ; let steps run again without saved-tensor hooks."""
        if isinstance(error, MismatchError | DeadlockError | CollectiveTimeoutError):
            runtimes = {device: step.runtime for device, step in steps.items()}
            gathers = describe_gathers(mesh, runtimes)
            if gathers:
                error.add_note(f"{caller}: {gathers}")
        # The frames of the error hold the graph, which holds the runtime, which would hold them all.
        for step in steps.values():
            step.runtime.close(wait=False)
        has_refused = isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error)
        if plans.keeps_saved or not has_refused:
            return False
        plans.keeps_saved = True  # Note [torch.func refuses saved-tensor hooks]
        return True


# Note [torch.func refuses saved-tensor hooks]
# Under ZeRO-3 such hooks let unsharded parameters be freed until the backward. torch.func's grad,
# vjp, jacrev and hessian raise under any, and which loss functions call one is not known before. So
# the first step that does runs again, from its inputs and with its draws, and it and all later ones
# go without the hooks: what autograd saves stays unsharded until the backward, as with
# reshard_after_forward=False.


def describe_gathers(mesh: Mesh, runtimes: Mapping[int, ParamRuntime]) -> str:
    """Return the units that each device has all-gathered, and the fix.

    It is empty if several devices have gathered the same.
    """
    sequences = {tuple(runtime.sequence) for runtime in runtimes.values()}
    if len(runtimes) > 1 and len(sequences) == 1:
        return ""
    devices = list[str]()
    for device, runtime in runtimes.items():
        coordinates = mesh.coordinates(device)
        name = ", ".join([f"{axis}={index}" for axis, index in coordinates.items()])
        descriptions = runtime.describe_units()
        units = ", then ".join([descriptions[number] for number in runtime.sequence])
        devices.append(f"({name}) has gathered {units or 'nothing'}")
    fix = FIX_UNEVEN_GATHERS
    if len(runtimes) < 2:
        fix = f"If another process has gathered others: {FIX_UNEVEN_GATHERS}"
    return f"{'; '.join(devices)}. {fix}"
