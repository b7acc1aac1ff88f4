"""Why a leaf diverges: the gradient is looked at, and then the update that was made of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

import fshard as fs
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.optim.leaves import Leaf
from fshard.testing.certify.again import Again, before, named, step_again, subsets, trials
from fshard.testing.certify.beside import Piece, beside, first_difference, largest, near, piece_of, wide
from fshard.testing.certify.comparison import Comparison


class Reasons:
    """Why leaves diverge in a stage's first step that has any that do."""

    def __init__(self, it: Comparison, step: int) -> None:
        self._it, self._step = it, step
        self._factors = _factors(it.mesh, it.task.options.get("accumulate", 1))
        self._tolerance = 1e-3 if it.task.compute is None else 5e-2  # how near is equal

    def of(self, place: int) -> str:
        """Say why one leaf does."""
        it, step = self._it, self._step
        found, alone = it.turns[step].grads[place], it.alone[step].grads[place]
        if found is None or alone is None:
            has = "the sharded run" if alone is None else "the run on one device"
            if found is not alone:
                return f"only {has} has a gradient: does the loss function use the parameter on all devices alike?"
        elif not torch.isfinite(alone).all():
            return "the gradient on one device is not finite"
        elif not all(torch.isfinite(piece.found).all() for piece in beside(found, alone)):
            return "the gradient on the mesh is not finite, on one device it is"
        elif not it.gap(step, "grads", place).ok:
            return self._of_gradient(place, found, alone)
        return self._of_update(place)

    def of_buffer(self, place: int) -> str:
        """Say why a buffer does."""
        found, alone = (turns[self._step].buffers[place] for turns in (self._it.turns, self._it.alone))
        at = first_difference(found, alone, self._tolerance)
        return (
            f"it first differs at {at}. Is it of each device's own part of the batch? BatchNorm has to be synchronised, "
            "fs.functionalize(module, sync_batchnorm=axis), and its batch not be cut by accumulate"
        )

    def _of_gradient(self, place: int, found: Leaf, alone: Tensor) -> str:
        pieces = beside(found, alone)
        if told := self._of_collectives(place, pieces):
            return told
        if factors := self._of_size(pieces):
            return f"the gradient is {factors[0].size}: {', or '.join(factor.reason for factor in factors)}"
        if (missing := self._missing(place, found)) is not None:
            return missing
        if near(pieces, self._tolerance):
            return "the gradient differs by rounding: it is added up in another order than on one device"
        return f"unknown; the gradient first differs at {first_difference(found, alone, self._tolerance)}"

    def _of_collectives(self, place: int, pieces: Sequence[Piece]) -> str:
        """Name the sums that should be averages, and the other way round: with the other one, the gradient is right."""
        if near(pieces, self._tolerance):
            return ""
        alone = self._it.alone[self._step].grads

        def right(grads: list[Leaf], place: int, size: float) -> bool:
            found, whole = grads[place], alone[place]
            if found is None or whole is None:
                return found is whole
            return largest(wide(found) - wide(whole)) <= self._tolerance * size

        size = max(largest(piece.expected) + largest(piece.error) for piece in pieces)
        fits = {told: grads for told, grads in self._trials.items() if right(grads, place, size)}
        every = max(map(largest, alone))
        best = [told for told, grads in fits.items() if all(right(grads, at, every) for at in range(len(alone)))]
        return ", or ".join(best or fits)

    def _of_update(self, place: int) -> str:
        it, step = self._it, self._step
        found, alone = it.turns[step].params[place], it.alone[step].params[place]
        pieces, olds = beside(found, alone), beside(found, before(it, step)[place])
        updates = [
            Piece(one.device, one.found - old.expected, one.expected - old.expected)
            for one, old in zip(pieces, olds, strict=True)
        ]
        told = "the gradient is right, the update is not: "
        if not torch.isfinite(alone).all():
            return f"{told}the parameter on one device is not finite, so nothing can be said"
        factors = self._of_size(updates)
        if factors and not factors[0].root:
            return (
                f"{told}it is {factors[0].size}. The optimizer multiplies or divides by the size of {factors[0].axes}"
            )
        if near(pieces, 1e-5):
            return f"{told}it differs by rounding, as a fused kernel may at the ends of pieces: try fused=False"
        why = "does not do the same on a mesh" if it.stage == 0 else "is not elementwise, pieces give another result"
        at = first_difference(found, alone, self._tolerance)
        return f"{told}the optimizer {why}; the parameter first differs at {at}"

    def _of_size(self, pieces: Sequence[Piece]) -> list[Factor]:
        """Return the likely constants between pieces and what stands beside them, which are all of one size."""
        return [one for one in self._factors if near(pieces, self._tolerance, times=one.value)]

    def _missing(self, place: int, found: Leaf) -> str | None:
        """Compare a gradient with sums over fewer axes: then what each device holds is its own, or one device's."""
        local = self._again.grads[place]
        if apart := self._axes_apart:
            return (
                f"a reduction over {named(apart)} is missing inside the loss function: the batch is whole along it, and yet "
                "losses differ"
            )
        if not isinstance(local, Sharded) or not isinstance(found, Sharded):
            return None
        mesh = local.mesh
        if uneven := self._uneven_axes(local):
            return f"a reduction over {named(uneven)} is missing: the batch is whole along it, and yet gradients differ"
        for axes in subsets(local.spec.unreduced):
            sums = dict(zip(held(mesh), fs.reshard(local, Layout(mesh, P(unreduced=axes))).shards, strict=True))
            own = [
                one._replace(expected=piece_of(sums[one.device], found.layout, one.device))
                for one in beside(found, sums[held(mesh)[0]])
            ]
            told = f"a reduction over {named(axes)} is missing:"
            for times in (1, prod(mesh.shape[axis] for axis in axes)):  # a sum over the others, or their mean
                if near(own, self._tolerance, times=times):
                    return f"{told} each device has what it adds to the sum"
                for device, summed in sums.items():
                    if near(beside(found, summed), self._tolerance, times=times):
                        return f"{told} all have what device {device} adds to the sum"
        return None

    def _uneven_axes(self, local: Sharded) -> tuple[str, ...]:
        """Return the axes along which devices have different gradients, though they were given the same."""
        mesh, shards = local.mesh, local.shards

        def differ(axis: str) -> bool:
            first = [mesh.index({**mesh.coordinates(device), axis: 0}) for device in range(mesh.size)]
            pieces = [Piece(device, x, shards[at]) for device, (x, at) in enumerate(zip(shards, first, strict=True))]
            return not near(pieces, self._tolerance) and any(largest(piece.error) > 0 for piece in pieces)

        return tuple(axis for axis in mesh.axis_names if axis not in local.spec.unreduced and differ(axis))

    @property
    def _axes_apart(self) -> tuple[str, ...]:
        """Return the axes along which devices have different losses, though they were given the same."""
        mesh = self._it.mesh
        losses = self._again.losses.reshape([mesh.shape[axis] for axis in mesh.axis_names])

        def differ(place: int) -> bool:
            return largest(losses - losses.narrow(place, 0, 1)) > self._tolerance * largest(losses)

        return tuple(
            axis for place, axis in enumerate(mesh.axis_names) if axis not in self._again.axes and differ(place)
        )

    @cached_property
    def _again(self) -> Again:
        """What devices have in this step before any sum over them, from the parameters that it began with."""
        return step_again(self._it, self._step)

    @cached_property
    def _trials(self) -> dict[str, list[Leaf]]:
        """The gradients that each other choice between a sum and an average, within the loss function, would give."""
        return trials(self._it, self._step, self._again.asked)


# -- the constants that gradients are often wrong by ----------------------------------------------------------------


class Factor(NamedTuple):
    """A constant that gradients are often wrong by."""

    value: float
    size: str
    axes: str
    reason: str
    root: bool = False


def _factors(mesh: Mesh, accumulate: int) -> list[Factor]:
    """List the constants that sizes of axes, and the turns of accumulate, give: what is likelier comes first."""
    turns = f"the {accumulate} turns of accumulate"
    sizes: dict[int, list[str]] = {}
    for axes in reversed(subsets(tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1))):
        n = prod(mesh.shape[axis] for axis in axes)
        sizes.setdefault(n, []).append(named(axes))
        if accumulate > 1:
            sizes.setdefault(n * accumulate, []).append(f"{named(axes)} and {turns}")
    if accumulate > 1:
        sizes.setdefault(accumulate, []).append(turns)
    whole: list[Factor] = []
    roots: list[Factor] = []
    for n, names in sizes.items():
        over = " or ".join(names)
        summed = f"averaged over {over} where it should be summed (or the loss function returns a sum, not a mean)"
        root, scaled = f"{n**0.5:.4g} = √{n}", f"scaled by the root of the size of {over}"
        whole += [
            Factor(n, f"{n} times too large", over, f"summed over {over} where it should be averaged"),
            Factor(1 / n, f"{n} times too small", over, summed),
        ]
        roots += [
            Factor(n**0.5, f"{root} times too large", over, scaled, root=True),
            Factor(n**-0.5, f"{root} times too small", over, scaled, root=True),
        ]
    return whole + roots
