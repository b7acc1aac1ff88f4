"""The likely reason of a divergence: hypotheses about the gradient in a fixed order, and then about the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fshard as fs
from fshard.mesh.layout import Layout, Mesh, P, flatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import local_devices
from fshard.mesh.spmd.scope import require
from fshard.optim.leaves import Leaf, Leaves
from fshard.testing.certify.bounds import Comparison, What
from fshard.testing.certify.runs import CertifyTask, Snapshot
from fshard.testing.certify.shards import (
    LeafPair,
    first_difference,
    gather_processes,
    is_near,
    largest,
    local_range,
    pair_shards,
)
from fshard.transforms.reproducible.randomness import keyed_random


class Factor(NamedTuple):
    """A constant that gradients are often wrong by."""

    value: float
    size: str
    axes: str
    reason: str
    is_root: bool = False


@dataclass(frozen=True)
class Reasons:
    """Explains the leaves that diverge in `step`, the first in which any does."""

    task: CertifyTask
    mesh: Mesh
    stage: int
    comparison: Comparison
    step: int

    def of(self, what: What, place: int) -> str:
        """Explain one leaf."""
        found, serial = (run[self.step] for run in (self.comparison.found, self.comparison.reference.serial))
        if what == "buffers":
            at = first_difference(found.buffers[place], serial.buffers[place], self._tolerance)
            return (
                f"it first differs at {at}. Is it computed from each device's own part of the batch? BatchNorm has to be "
                "synchronised, fs.functionalize(module, sync_batchnorm=axis), and its batch not be cut by accumulate"
            )
        gradient, expected = found.grads[place], serial.grads[place]
        if gradient is None or expected is None:
            has = "the sharded run" if expected is None else "the run on one device"
            if gradient is not expected:
                return f"only {has} has a gradient: does the loss function use the parameter on all devices alike?"
        elif not all(torch.isfinite(pair.found).all() for pair in pair_shards(gradient, expected)):
            return "the gradient on the mesh is not finite, on one device it is"
        elif self.comparison.gap(self.step, "grads", place).verdict == "DIVERGENT":
            return self._of_gradient(place, gradient, expected)
        return self._of_update(place, found.params[place], serial.params[place])

    # -- the gradient ---------------------------------------------------------------------------------------------

    def _of_gradient(self, place: int, found: Leaf, serial: Tensor) -> str:
        pairs = pair_shards(found, serial)
        if is_near(pairs, self._tolerance):
            return "the gradient differs by rounding: it is added up in another order than on one device"
        if factors := self._factors_of(pairs):
            return f"the gradient is {factors[0].size}: {', or '.join(factor.reason for factor in factors)}"
        if reason := self._missing_in_loss or self._missing_reduction(self._summands.grads[place], found):
            return reason
        return f"unknown; the gradient first differs at {first_difference(found, serial, self._tolerance)}"

    def _missing_reduction(self, summand: Leaf, found: Leaf) -> str:
        """Compare a gradient with sums over fewer axes: then each device has its own summand, or all have one
        device's.
        """
        if not isinstance(summand, Sharded) or not isinstance(found, Sharded):
            return ""
        mesh = summand.mesh
        if uneven := tuple(axis for axis in mesh.axis_names if self._varies(summand, axis)):
            return (
                f"a reduction over {quoted(uneven)} is missing: the batch is equal along it, and yet gradients differ"
            )
        for axes in subsets(summand.spec.unreduced):
            sums = dict(
                zip(local_devices(mesh), fs.reshard(summand, Layout(mesh, P(unreduced=axes))).shards, strict=True)
            )
            own = [
                pair._replace(expected=local_range(sums[pair.device], found.layout, pair.device))
                for pair in pair_shards(found, sums[local_devices(mesh)[0]])
            ]
            missing = f"a reduction over {quoted(axes)} is missing:"
            for times in (1, prod(mesh.shape[axis] for axis in axes)):  # a sum over the others, or their mean
                if is_near(own, self._tolerance, times=times):
                    return f"{missing} each device has its own summand"
                for device, summed in sums.items():
                    if is_near(pair_shards(found, summed), self._tolerance, times=times):
                        return f"{missing} all have the summand of device {device}"
        return ""

    def _varies(self, summand: Sharded, axis: str) -> bool:
        """Test whether devices along an axis have different gradients for the same batch."""
        mesh, shards = summand.mesh, summand.shards
        if axis in summand.spec.unreduced:
            return False
        first = [mesh.index({**mesh.coordinates(device), axis: 0}) for device in range(mesh.size)]
        pairs = [LeafPair(device, x, shards[at]) for device, (x, at) in enumerate(zip(shards, first, strict=True))]
        return not is_near(pairs, self._tolerance) and any(largest(pair.error) > 0 for pair in pairs)

    @cached_property
    def _missing_in_loss(self) -> str:
        """Name the axes along which devices have different losses, though they were given the same batch."""
        mesh, found = self.mesh, self._summands
        losses = found.losses.reshape([mesh.shape[axis] for axis in mesh.axis_names])
        axes = tuple(
            axis
            for dim, axis in enumerate(mesh.axis_names)
            if axis not in found.axes and largest(losses - losses.narrow(dim, 0, 1)) > self._tolerance * largest(losses)
        )
        reason = "is missing inside the loss function: the batch is equal along it, and yet losses differ"
        return f"a reduction over {quoted(axes)} {reason}" if axes else ""

    # -- the update -----------------------------------------------------------------------------------------------

    def _of_update(self, place: int, found: Leaf, serial: Tensor) -> str:
        pairs, before = pair_shards(found, serial), pair_shards(found, self._before.params[place])
        updates = [
            LeafPair(now.device, now.found - old.expected, now.expected - old.expected)
            for now, old in zip(pairs, before, strict=True)
        ]
        wrong = "the gradient is right, the update is not: "
        factors = self._factors_of(updates)
        if factors and not factors[0].is_root:
            return (
                f"{wrong}it is {factors[0].size}. The optimizer multiplies or divides by the size of {factors[0].axes}"
            )
        if is_near(pairs, 1e-5):
            return f"{wrong}it differs by rounding, as a fused kernel may at the ends of shards: try fused=False"
        why = "does not do the same on a mesh" if self.stage == 0 else "is not elementwise, shards give another result"
        at = first_difference(found, serial, self._tolerance)
        return f"{wrong}the optimizer {why}; the parameter first differs at {at}"

    # -- what both need -------------------------------------------------------------------------------------------

    @property
    def _tolerance(self) -> float:
        """Relative tolerance of equality."""
        return 1e-3 if self.task.compute is None else 5e-2

    def _factors_of(self, pairs: Sequence[LeafPair]) -> list[Factor]:
        """List the likely constant factors, all equal, between shards and their expected values."""
        factors = _factors(self.mesh, self.task.options.get("accumulate", 1))
        return [factor for factor in factors if is_near(pairs, self._tolerance, times=factor.value)]

    @property
    def _before(self) -> Snapshot:
        reference = self.comparison.reference
        return reference.serial[self.step - 1] if self.step else reference.start

    @cached_property
    def _summands(self) -> Summands:
        return summands(self.task, self.mesh, self.stage, self.step, self._before)


def _factors(mesh: Mesh, accumulate: int) -> list[Factor]:
    """List the constants that sizes of axes and turns of accumulate make, the likelier first."""
    turns = f"the {accumulate} turns of accumulate"
    sizes: dict[int, list[str]] = {}
    for axes in reversed(subsets(tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1))):
        n = prod(mesh.shape[axis] for axis in axes)
        sizes.setdefault(n, []).append(quoted(axes))
        if accumulate > 1:
            sizes.setdefault(n * accumulate, []).append(f"{quoted(axes)} and {turns}")
    if accumulate > 1:
        sizes.setdefault(accumulate, []).append(turns)
    factors: list[Factor] = []
    roots: list[Factor] = []
    for n, names in sizes.items():
        over = " or ".join(names)
        summed = f"averaged over {over} where it should be summed (or the loss function returns a sum, not a mean)"
        root, scaled = f"{n**0.5:.4g} = √{n}", f"scaled by the root of the size of {over}"
        factors += [
            Factor(n, f"{n} times too large", over, f"summed over {over} where it should be averaged"),
            Factor(1 / n, f"{n} times too small", over, summed),
        ]
        roots += [
            Factor(n**0.5, f"{root} times too large", over, scaled, is_root=True),
            Factor(n**-0.5, f"{root} times too small", over, scaled, is_root=True),
        ]
    return factors + roots


class Summands(NamedTuple):
    """Gradients that are unreduced over `axes`, and the loss of each device."""

    axes: tuple[str, ...]
    grads: list[Leaf]
    losses: Tensor


def summands(task: CertifyTask, mesh: Mesh, stage: int, step: int, before: Snapshot) -> Summands:
    """Repeat the gradient of a step without its reduction."""
    wanted = {axis for spec in flatten(task.batch_spec)[0] if isinstance(spec, P) for axis in spec.axes}
    axes = tuple(axis for axis in mesh.axis_names if axis in wanted and mesh.shape[axis] > 1)
    unreduced, losses = Layout(mesh, P(unreduced=axes)), dict[int, Tensor]()
    left_out = ("donate", "precision", "gradients", "compute")
    options: dict[str, Any] = {key: x for key, x in task.options.items() if key not in left_out}

    def loss_fn(*args: Any) -> Any:
        result, device = task.loss_fn(*args), require("certify").device
        loss: Tensor = result[0] if task.has_buffers or task.options.get("has_aux") else result
        losses[device] = losses.get(device, 0) + loss.detach().mean().double()
        return result

    params = task.place(Leaves.of(task.params).rebuild(before.params), mesh, stage)
    buffers = [Leaves.of(task.buffers).rebuild(before.buffers)] if task.has_buffers else []
    run = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=task.batch_spec, gradients=lambda layout: unreduced, compute=task.compute, **options
    )
    with keyed_random(task.seed, step):
        _, grads = run(params, *buffers, task.batch)
    rows = tuple(losses[device].reshape(1) for device in local_devices(mesh))
    every = fs.unshard(Sharded((mesh.size,), Layout(mesh, P(mesh.axis_names)), rows))
    return Summands(axes, [gather_processes(leaf) for leaf in Leaves.of(grads).leaves], every)


def subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """List the choices of one or more axes, all of them first."""
    return [some for size in range(len(axes), 0, -1) for some in combinations(axes, size)]


def quoted(axes: tuple[str, ...]) -> str:
    """Write axes as error messages have them."""
    return " x ".join(f'"{axis}"' for axis in axes)
