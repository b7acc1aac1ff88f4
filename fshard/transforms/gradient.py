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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import CollectiveTimeoutError, DeadlockError, LayoutError, MismatchError
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import (
    Mesh,
    P,
    PyTree,
    Structure,
    as_written,
    flatten,
    paths_of,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.deterministic import deterministic
from fshard.mesh.spmd.run import local_devices, resolve_mesh, run_on_devices
from fshard.optim.leaves import trainable, without_static
from fshard.source import Site, call_site
from fshard.transforms.agreement import FIX_UNEVEN_GATHERS
from fshard.transforms.array_checks import validate_mesh, validate_run
from fshard.transforms.batch import Batch, BatchPart, placed
from fshard.transforms.device_step import DeviceResult, DeviceStep
from fshard.transforms.fsdp.engine import Gradients, ParamPlan, Reducer, Storage, local_plans
from fshard.transforms.fsdp.param_runtime import ParamPlans, ParamRuntime, numbered, plan_param, refuse_half_frozen
from fshard.transforms.metrics import global_metrics
from fshard.transforms.module.buffers import Buffers, no_buffers
from fshard.transforms.options import StepOptions, wrong_options
from fshard.transforms.patterns import chosen, named, parts_of
from fshard.transforms.reproducible.randomness import drawn_key
from fshard.uncompiled import uncompiled


def unstaged(
    loss_fn: Callable[..., Any], *, mesh: Mesh, batch: PyTree, backward: bool = True, **given: Any
) -> Gradient:
    """Return the gradient of a loss function of the full model; for its options see `value_and_grad`."""
    if errors := wrong_options(given):
        raise ValueError(f"value_and_grad: {'; '.join(errors)}.")
    return Gradient(StepOptions.of(loss_fn, given, backward=backward), mesh, batch)


def refuse_not_local(options: StepOptions, paths: Sequence[str], leaves: Sequence[Sharded]) -> None:
    """Raise with the parameters that are not sharded along local axes by dims, and along others flat."""
    wrong = [
        f"{named(parts_of(path)) or 'the parameter'} is {x.spec}"
        for path, x in zip(paths, leaves, strict=True)
        if any((axis in options.local) == (axis in (x.spec.flat_axes or ()) + x.spec.at_axes) for axis in x.spec.axes)
    ]
    if options.local and wrong:
        raise LayoutError(
            f"{options.caller}(local=): along {as_written(options.local)} dims of parameters may be sharded, along other axes "
            f"their flattened shards only; {'; '.join(wrong)}. Write fs.shard_params(params, fs.fsdp(axis, within=rules), "
            "mesh=mesh)."
        )


KNOWN = 64
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

    `restore` puts static leaves back; `own` are the indices of leaves without ties, `at` the number of each leaf among
    these; `key`: of random draws.
    """

    leaves: Sequence[Sharded]
    structure: Structure
    restore: Callable[[PyTree], PyTree]
    own: Sequence[int]
    at: Sequence[int]
    batch: Batch
    buffers: Buffers
    key: int
    scale: float
    site: Site

    def shards(self, place: int) -> list[Tensor]:
        """Return the shards of the device at index `place`, each parameter once."""
        return [self.leaves[at].shards[place] for at in self.own]


@dataclass(frozen=True)
class GradientFunction:
    """A function of (params, batch) that returns the loss and its gradient, and caches its plans.

    `run` is one algorithm for a full model and for one in stages; they differ in plans and in what each device does.
    """

    options: StepOptions
    mesh: Mesh
    specs: PyTree
    plans: list[tuple[object, Any]] = field(init=False, default_factory=list[Any], compare=False, repr=False)

    @uncompiled
    def __call__(self, params: PyTree, *given: PyTree, scale: Tensor | float | None = None) -> tuple[Any, PyTree]:
        """Return the loss, or loss and metrics, and the gradient of `scale` times the loss."""
        options = self.options
        if transformed():  # the engine differentiates detached shards, of which torch.func sees nothing
            return self.differentiable(params, *given)
        buffers, batch = given if options.has_buffers else ((), *given)
        validate_run(self.mesh, options.caller, params=params, buffers=buffers, batch=batch)
        value, grads = self.run(params, buffers, batch, call_site(), 1.0 if scale is None else float(scale))
        rest = (value.buffers,) * options.has_buffers + (value.aux,) * options.has_aux
        return ((value.loss, *rest) if rest else value.loss), grads

    def run(
        self, params: PyTree, buffers: PyTree, batch: PyTree, site: Site, scale: float = 1.0
    ) -> tuple[StepValue, PyTree]:
        """Run forward and backward on all devices; return the loss, and the gradients of `scale` times it in their layouts."""
        if self.options.backward and torch.is_inference_mode_enabled():
            raise ValueError(
                f"{self.options.caller} under torch.inference_mode(): nothing is recorded there, so there is no gradient. "
                "Call it outside, or in torch.inference_mode(False)."
            )
        mesh = resolve_mesh(self.mesh)
        params, restore = without_static(params)
        leaves, structure = flatten(params)
        self._refuse_swapped(leaves, batch)
        self.check_params(params, leaves, structure, mesh)
        parts = placed(batch, self.specs, mesh)
        parts.check(self.options.turns(prod(mesh.shape[axis] for axis in parts.axes)))
        own, at = numbered(leaves)  # a tied leaf is one, however often it occurs
        plans = self.plans_of(structure, leaves, at, mesh, parts.axes)  # (1)
        drawn = drawn_key()  # the same on every process
        memory = self.buffers_on(mesh, buffers) if self.options.has_buffers else no_buffers(mesh)
        inputs = StepInputs(leaves, structure, restore, own, at, parts, memory, drawn, scale, site)
        with deterministic(self.options.reproducible, mesh.device_type):
            results = self.run_devices(plans, inputs, mesh)
        first = results[0]
        grads = gradient_tree(plans.leaves, [result.gradients for result in results], structure, at)
        after = memory.after([result.buffers for result in results])
        aux = (
            global_metrics([result.aux for result in results], parts, self.options.aux) if self.options.has_aux else ()
        )
        value = StepValue(first.loss, first.weight, parts.samples, after, aux)
        return value, grads

    def differentiable(self, params: PyTree, *given: PyTree) -> tuple[Any, PyTree]:
        """Return the loss and its gradient within a transform of `torch.func`."""
        raise TypeError(f"{self.options.caller} of stages must not be called within a torch.func transform.")

    def plans_of(
        self, structure: Structure, leaves: Sequence[Sharded], at: Sequence[int], mesh: Mesh, axes: tuple[str, ...]
    ) -> Any:
        """Return the cached plans for parameters of this structure, these ties, shapes, dtypes and layouts.

        The key is compared, which is faster than hashing it for a few entries.
        """
        key = structure, at, axes, [x.shape for x in leaves], [x.dtype for x in leaves], [x.layout for x in leaves]
        found = next((plans for known, plans in self.plans if known == key), None)
        if found is None:
            paths = [*paths_of(structure)]
            fixed = chosen(self.options.frozen, paths, "frozen")
            refuse_half_frozen(paths, at, fixed)
            self._refuse_integers(paths, leaves)
            refuse_not_local(self.options, paths, leaves)
            found = self.plan(structure, [*zip(paths, leaves, fixed, strict=True)], at, mesh, axes)
            self.plans[:] = [(key, found), *self.plans[: KNOWN - 1]]
        return found

    def _refuse_swapped(self, leaves: Sequence[Any], batch: PyTree) -> None:
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

    def _refuse_integers(self, paths: Sequence[str], leaves: Sequence[Sharded]) -> None:
        """Raise if there is nothing to differentiate by."""
        if (
            self.options.backward
            and leaves
            and not any(x.dtype.is_floating_point or x.dtype.is_complex for x in leaves)
        ):
            found = ", ".join(
                f"{named(parts_of(path)) or 'the parameter'} is {str(x.dtype).removeprefix('torch.')}"
                for path, x in zip(paths, leaves, strict=True)
            )
            raise TypeError(
                f"{self.options.caller}: parameters must be floating-point or complex to have gradients; {found}. "
                "Shard x.float() of them."
            )

    def check_params(self, params: PyTree, leaves: Sequence[Any], structure: Structure, mesh: Mesh) -> None:
        """Raise unless the parameters are on the mesh."""
        validate_mesh(leaves, structure, mesh)

    def buffers_on(self, mesh: Mesh, buffers: PyTree) -> Buffers:
        """Return the given buffers on the mesh."""
        return Buffers(buffers, mesh)

    def plan(
        self,
        structure: Structure,
        given: Sequence[tuple[str, Sharded, bool]],
        at: Sequence[int],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> Any:
        """Return the plans of parameters: for each leaf its path, its parameter, and whether it is frozen."""
        raise NotImplementedError

    def run_devices(self, plans: Any, inputs: StepInputs, mesh: Mesh) -> Sequence[DeviceResult]:
        """Run the step on each device of the caller."""
        raise NotImplementedError


def gradient_tree(
    leaves: Sequence[ParamPlan], each: Sequence[Gradients], structure: Structure, at: Sequence[int]
) -> PyTree:
    """Return gradients as the tree of parameters, from the local shards of each device."""
    grads = [
        None if shards[0] is None else Sharded(leaf.shape, leaf.gradient, tuple(shards))
        for leaf, *shards in zip(leaves, *each, strict=True)
    ]
    return unflatten(structure, [grads[place] for place in at])


class Gradient(GradientFunction):
    """The gradient of a loss function of the full model."""

    def differentiable(self, params: PyTree, *given: PyTree) -> tuple[Any, PyTree]:
        """Return the loss and its gradient within a transform of `torch.func`."""
        from fshard.transforms.differentiable_gradient import differentiable_gradient  # rare

        options = self.options
        wrong = {"has_buffers": options.has_buffers, "has_aux": options.has_aux, "reproducible": options.reproducible}
        if found := [name for name, given in wrong.items() if given]:
            raise ValueError(
                f"{options.caller} must not have {', '.join(found)} within a torch.func transform: return the loss alone."
            )
        return differentiable_gradient(options, resolve_mesh(self.mesh), self.specs, params, *given)

    def plan(
        self,
        structure: Structure,
        given: Sequence[tuple[str, Sharded, bool]],
        at: Sequence[int],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> ParamPlans:
        """Return the plans of parameters, each once."""
        plans: dict[int, ParamPlan] = {}
        for (path, x, fix), place in zip(given, at, strict=True):
            trained = self.options.backward and trainable(x) and not fix
            gradients, used = self.options.gradients if trained else None, self.options.used(x.layout)
            plans.setdefault(place, plan_param(path, x, gradients, used))
        return ParamPlans(tuple(plans[place] for place in sorted(plans)), mesh, axes, self.options.reproducible)

    def run_devices(self, plans: ParamPlans, inputs: StepInputs, mesh: Mesh) -> Sequence[DeviceResult]:
        """Run the step on each device of the caller; errors name the units in which devices differ."""
        devices, runtimes = local_devices(mesh), dict[int, ParamRuntime]()
        _, structure, restore, _, at, batch, buffers, key, scale, site = inputs

        def on_device(device: int) -> DeviceResult:
            place = devices.index(device) if len(devices) > 1 else 0
            runtime = runtimes[device] = self.runtime(plans, inputs.shards(place), site, device)  # (2)

            def tree() -> PyTree:
                return restore(unflatten(structure, [runtime.lazy_params[place] for place in at]))

            return DeviceStep(self.options, runtime, tree, buffers, batch, place, key, scale).run()

        try:
            results = run_on_devices(mesh, on_device, mapped=mesh.axis_names)
        except (MismatchError, DeadlockError, CollectiveTimeoutError) as error:
            if gathers := describe_gathers(mesh, runtimes):
                error.add_note(f"{self.options.caller}: {gathers}")
            raise
        plans.order = results[0].order
        return results

    def runtime(self, plans: ParamPlans, shards: Sequence[Tensor], site: Site, device: int) -> ParamRuntime:
        """Return the parameters of one device for a step, of which it holds these shards."""
        options, leaves = self.options, plans.leaves
        if options.local:
            leaves = local_plans(leaves, device)
        return ParamRuntime(
            leaves,
            plans.by_unit,
            shards,
            Storage(leaves, shards, options.compute, site),
            Reducer(plans.ways, site, ahead=options.in_flight > 0),
            options,
            site,
            plans.order,
            several=options.reproducible or (options.reduce_once and options.accumulate > 1),
            each_use=options.reproducible,
        )


def describe_gathers(mesh: Mesh, runtimes: Mapping[int, ParamRuntime]) -> str:
    """Return the units that each device has all-gathered, and the fix; empty if several devices have gathered the same."""
    if len(runtimes) > 1 and len({*(tuple(runtime.sequence) for runtime in runtimes.values())}) == 1:
        return ""
    devices = list[str]()
    for device, runtime in runtimes.items():
        coordinates = ", ".join(f"{axis}={index}" for axis, index in mesh.coordinates(device).items())
        units = ", then ".join(runtime.words()[number] for number in runtime.sequence)
        devices.append(f"({coordinates}) has gathered {units or 'nothing'}")
    return f"{'; '.join(devices)}. {FIX_UNEVEN_GATHERS}"
