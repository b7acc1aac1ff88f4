"""The loss and its gradient as one differentiable program, for derivatives of either: see `value_and_grad`.

A step takes its gradient from detached shards, of which neither a transform of `torch.func` nor autograd sees anything.
Here the mean loss is one differentiable program, whose gradient torch.func takes: more memory and communication than a
step, and any further derivative.

    within a transform       jvp(fs.grad(loss_fn, ...), ...)    the program takes the place of the step
    inputs require grad      torch.autograd.grad(gradient, w)   the step runs, and the backward runs the program

The mean loss is that of a step: its slices with their weights and draws, on parameters as its options have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (  # no public API
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
)

from fshard.mesh.collectives.api import psum, pvary
from fshard.mesh.collectives.autograd import Tensors, recorded
from fshard.mesh.layout import (
    Layout,
    Mesh,
    P,
    PyTree,
    Structure,
    broadcast_prefix,
    flatten,
    paths_of,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import full_values, put_equal, reshard_all, spread
from fshard.mesh.spmd.outer_autograd import run_mapped
from fshard.mesh.spmd.scope import loss_scope, require
from fshard.optim.leaves import like, shards_of, trainable, without_static
from fshard.randomness import drawn_key, keyed_random
from fshard.source import call_site
from fshard.transforms.agreement import SliceLoss, StepAgreement, losses_by_index
from fshard.transforms.array_checks import validate_local, validate_mesh
from fshard.transforms.batch import Batch, BatchPart, Slice, device_shard, shard_batch
from fshard.transforms.fsdp.autograd import outside_transforms
from fshard.transforms.fsdp.plans import numbered, validate_ties_frozen
from fshard.transforms.loss_collectives import LossCollectives
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import chosen
from fshard.transforms.slices import nonzero_weight, one_loss, weight_of


def validate_differentiable(options: StepOptions) -> None:
    """Raise if a step has options whose results no differentiable program computes."""
    flags = {
        "has_buffers": options.has_buffers,
        "has_aux": options.has_aux,
        "reproducible": options.reproducible,
    }
    if names := [name for name, flag in flags.items() if flag]:
        raise ValueError(
            f"{options.caller} must not have {', '.join(names)} where its result is differentiated, within a torch.func "
            "transform or by autograd. Differentiate one without, whose loss_fn returns the loss alone."
        )


# The batch. A leaf that something differentiates by is an argument of the program, which all devices get in full, so
# that its gradient is complete on each; the others are constants.


def is_watched(leaf: Any) -> bool:
    """Return True if autograd or a transform of torch.func looks at a tensor.

    Or at a shard of an array.
    """
    if not isinstance(leaf, Tensor | Sharded):
        return False
    shards = shards_of(leaf)
    return recorded(shards) or any(is_functorch_wrapped_tensor(x) for x in shards)


@dataclass(frozen=True)
class WatchedBatch:
    """A batch on a mesh, some of whose leaves are replicated arrays that are differentiated by.

    `batch` has constants in their place; `arrays` and `specs` are those leaves and their specs, by index.
    """

    batch: Batch
    arrays: dict[int, Sharded]
    specs: dict[int, P]

    @staticmethod
    def of(batch: PyTree, specs: PyTree, mesh: Mesh) -> WatchedBatch:
        """Shard the constants of a batch; replicate the other leaves."""
        if isinstance(batch, BatchPart):  # each device has its own part, which is a constant
            return WatchedBatch(shard_batch(batch, specs, mesh), {}, {})
        leaves, structure = flatten(batch, none_is_leaf=True)
        watched = [index for index, x in enumerate(leaves) if is_watched(x)]
        constants = [*leaves]
        with outside_transforms():  # which would wrap the shards of constants too
            for index in watched:
                x = leaves[index]
                constants[index] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            sharded = shard_batch(unflatten(structure, constants), specs, mesh)

        leaf_specs: list[Any] = [specs] * len(leaves)
        if not isinstance(specs, P):
            leaf_specs = broadcast_prefix(specs, batch, none_is_leaf=True)
        arrays = {index: _replicated(leaves[index], mesh) for index in watched}
        return WatchedBatch(sharded, arrays, {index: leaf_specs[index] for index in watched})

    def on_device(self, device: int, values: Sequence[Tensor]) -> tuple[Batch, int]:
        """Return the batch with a device's shards of the global values.

        Also the index of the device.
        """
        batch = self.batch
        device_index = batch.devices.index(device) if len(batch.devices) > 1 else 0
        columns = [*batch.columns]
        for (index, spec), x in zip(self.specs.items(), values, strict=True):
            columns[index] = (device_shard(x, spec, batch.mesh, device),) * len(batch.devices)
        return replace(batch, columns=columns), device_index


def _replicated(leaf: Tensor | Sharded, mesh: Mesh) -> Sharded:
    if isinstance(leaf, Sharded):
        return put_equal(leaf, Layout(mesh))
    return spread(leaf, Layout(mesh))


# The loss.


@dataclass(frozen=True)
class MeanLoss:
    """The mean loss of a batch, as a function of the parameters' shards.

    Args:
        options: of the step.
        mesh: the devices.
        leaves: the parameters, each once.
        tree: makes the tree that the loss function takes, of each parameter's values.
        batch: of the step.
        key: of random draws.
    """

    options: StepOptions
    mesh: Mesh
    leaves: Sequence[Sharded]
    tree: Callable[[Sequence[Tensor]], PyTree]
    batch: WatchedBatch
    key: int

    def __call__(self, leaves: Sequence[Sharded]) -> Tensor:
        """Return the loss at these parameters."""
        used = [self.options.used(x.layout) for x in self.leaves]
        arrays = reshard_all(leaves, used, call_site())  # shards of uneven dims may be shorter
        arrays += self.batch.arrays.values()
        varying = [_unnamed(self.mesh, layout) for layout in used]
        varying += [self.mesh.axis_names] * len(self.batch.arrays)

        def on_device(device: int, xs: Tensors) -> Tensors:
            values, zero = _as_varying(xs, varying)
            return (self._on_device(device, values, zero),)

        columns = [x.shards for x in arrays]
        (losses,) = run_mapped(self.mesh, on_device, columns, mapped=self.mesh.axis_names)
        return full_values(Sharded((), Layout(self.mesh), losses))

    def _on_device(self, device: int, values: list[Tensor], zero: Tensor | float) -> Tensor:
        """Return the mean loss of all devices, each of which takes its slices of the batch."""
        options, dtype = self.options, self.options.compute
        params, batch_values = values[: len(self.leaves)], values[len(self.leaves) :]
        if dtype is not None:
            params = [x.to(options.used_in(x.dtype)) for x in params]
        batch, device_index = self.batch.on_device(device, batch_values)
        group = require(options.caller).group(batch.axes, options.caller) if batch.axes else None
        turns = options.turns(1 if group is None else group.size)
        first = 0 if group is None else group.index * turns
        collectives = LossCollectives(batch, turns, options)

        total, total_weight, loss_dtype = zero, 0.0, torch.float32
        for turn, part in enumerate(batch.slices(device_index, turns)):
            weight = _weight(options, batch, part)
            samples = batch.tree(part.leaves, dtype)
            with (
                keyed_random(self.key, 0, first + turn),
                loss_scope(self.mesh.axis_names, collectives.record, is_idle=not part.rows),
            ):
                result = options.loss_fn(self.tree(params), samples)
            loss = one_loss(options, result, part)
            loss_dtype = torch.promote_types(loss.dtype, torch.float32)
            weight = weight.to(loss.device)
            adds_nothing = value_of(weight) == 0 and not collectives.is_mixed
            weighted = _derivative_by_weight(loss, weight) if adds_nothing else loss * weight
            total = total + weighted
            total_weight = total_weight + weight

        self._validate_equal(total, total_weight, loss_dtype, batch.axes)
        device_type = self.mesh.device_type
        sums = [
            torch.as_tensor(x, dtype=torch.float64, device=device_type)
            for x in (total, total_weight)
        ]
        loss_sum, weight_sum = psum(sums, self.mesh.axis_names)
        if value_of(weight_sum) == 0:
            nonzero_weight(0.0)
        return (loss_sum / weight_sum).to(loss_dtype)

    def _validate_equal(
        self, total: Any, total_weight: Any, dtype: torch.dtype, batch_axes: tuple[str, ...]
    ) -> None:
        """Raise if devices along local axes have other losses.

        See Note [Losses of the same samples].
        """
        caller, local = self.options.caller, self.options.local
        axes = [axis for axis in self.mesh.axis_names if axis in local and axis not in batch_axes]
        value, weight = value_of(torch.as_tensor(total)), value_of(torch.as_tensor(total_weight))
        if not axes or value is None or not weight:
            return
        group = require(caller).group(tuple(axes), caller)
        with outside_transforms():
            loss = SliceLoss(torch.tensor(value / weight, dtype=dtype), weight, [])
            agreement = StepAgreement(0.0, {}, losses=losses_by_index([loss], group))
            agreement.reduce(group, call_site()).check_losses(caller, tuple(axes), weight)


def _unnamed(mesh: Mesh, layout: Layout) -> tuple[str, ...]:
    """Return the axes along which a layout has replicas."""
    return tuple([axis for axis in mesh.axis_names if axis not in layout.spec.axes])


def _as_varying(
    xs: Tensors, varying: Sequence[tuple[str, ...]]
) -> tuple[list[Tensor], Tensor | float]:
    """Convert values that are replicated along some axes to varying ones; return them and a zero.

    The zero depends on all of them. Added to a loss, it makes the backwards of all devices call the same collectives,
    whatever the loss of a device depends on.
    """
    values, zero = [*xs], 0.0
    groups: dict[Any, list[int]] = {}
    for index, (x, axes) in enumerate(zip(xs, varying, strict=True)):
        if axes and (x.is_floating_point() or x.is_complex()):
            groups.setdefault((axes, x.dtype), []).append(index)
    for (axes, _), indices in groups.items():
        example = xs[indices[0]]
        *converted, anchor = pvary([*[xs[index] for index in indices], example.new_zeros(())], axes)
        for index, x in zip(indices, converted, strict=True):
            values[index] = x
        anchor = anchor.real if anchor.is_complex() else anchor
        zero = zero + anchor.double()
    return values, zero


def _weight(options: StepOptions, batch: Batch, part: Slice) -> Tensor:
    """Return the weight of a slice; one without samples has none."""
    if options.weight is None or not part.rows:
        return weight_of(float(part.rows))
    weight = weight_of(options.weight(batch.tree(part.leaves)))
    if weight.is_meta:
        return torch.ones_like(weight)
    value = value_of(weight)
    if value is not None and not 0 <= value < inf:
        raise ValueError(f"weight= must return finite numbers of at least 0; got {value}.")
    return weight


def _derivative_by_weight(loss: Tensor, weight: Tensor) -> Tensor:
    """Return a 0 for a loss of weight 0, finite or not.

    Its derivative by the weight is the loss.
    """
    value = loss.detach()
    is_finite = value.isfinite()
    not_a_number = (weight * float("nan")).masked_fill(torch.ones_like(is_finite), 0)
    return torch.where(is_finite, value * weight, not_a_number)


def value_of(x: Tensor) -> float | None:
    """Return the value of a number, also of one that transforms of torch.func look at.

    None if vmap maps over it.
    """
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return None
        x = get_unwrapped(x)
    return None if x.is_meta else x.item()


# Its gradient.


@dataclass(frozen=True)
class DifferentiableStep:
    """The loss and the gradient of a step, as functions that can be differentiated.

    `trained`: the indices of the parameters with a gradient; `structure` and `numbers` lead from parameters, each once,
    to the tree of the caller.
    """

    mean_loss: MeanLoss
    trained: Sequence[int]
    structure: Structure
    numbers: Sequence[int]

    def loss(self) -> Tensor:
        """Return the mean loss."""
        return self.mean_loss(self.mean_loss.leaves)

    def loss_and_gradient(self, scale: Tensor | float | None = None) -> tuple[Tensor, PyTree]:
        """Return the mean loss and the gradient of `scale` times it, in its layout."""
        leaves, options = self.mean_loss.leaves, self.mean_loss.options

        def of_trained(chosen: list[Tensors]) -> Tensor:
            xs = [*leaves]
            for index, shards in zip(self.trained, chosen, strict=True):
                xs[index] = like(leaves[index], shards)
            return self.mean_loss(xs)

        shards = [leaves[index].shards for index in self.trained]
        gradients, loss = torch.func.grad_and_value(of_trained)(shards)
        if scale is not None:
            gradients = [tuple([x * scale for x in gradient]) for gradient in gradients]
        trained = [leaves[index] for index in self.trained]
        layouts = [options.gradients(x.layout) for x in trained]
        arrays = [like(x, gradient) for x, gradient in zip(trained, gradients, strict=True)]
        resharded = reshard_all(arrays, layouts, call_site())

        grads: list[Any] = [None] * len(leaves)
        for index, gradient in zip(self.trained, resharded, strict=True):
            grads[index] = gradient
        return loss, unflatten(self.structure, [grads[number] for number in self.numbers])


def differentiable_step(
    options: StepOptions, mesh: Mesh, specs: PyTree, params: PyTree, batch: PyTree
) -> DifferentiableStep:
    """Return the loss and the gradient of a step as functions that can be differentiated."""
    validate_differentiable(options)
    params, restore = without_static(params)
    leaves, structure = flatten(params)
    validate_mesh(leaves, structure, mesh)
    paths = [*paths_of(structure)]
    frozen = chosen(options.frozen, paths, "frozen")
    indices, numbers = numbered(leaves)  # a tied leaf is one, however often it occurs
    validate_ties_frozen(paths, numbers, frozen)

    watched_batch = WatchedBatch.of(batch, specs, mesh)
    axes = watched_batch.batch.axes
    validate_local(options, paths, leaves, axes)
    watched_batch.batch.check(options.turns(prod(mesh.shape[axis] for axis in axes)))

    def tree(values: Sequence[Tensor]) -> PyTree:
        return restore(unflatten(structure, [values[number] for number in numbers]))

    distinct = [leaves[index] for index in indices]
    trained = [
        number
        for number, index in enumerate(indices)
        if trainable(leaves[index]) and not frozen[index]
    ]
    with outside_transforms():  # vmap would refuse to draw
        key = drawn_key()
    mean_loss = MeanLoss(options, mesh, distinct, tree, watched_batch, key)
    return DifferentiableStep(mean_loss, trained, structure, numbers)
