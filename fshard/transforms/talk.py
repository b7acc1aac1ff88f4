"""What a loss function has to do with other devices, and what follows for its gradient.

In a loss function every value counts as the device's own: parameters, and what a collective has made equal everywhere too.
Each device has a loss; the objective is their mean, weighted by what the devices' parts of the batch count for, as a
function of the values of all devices together.  That is right for any code, and nobody has to promise anything.

    mean over all devices of    f(z_d, psum(z))          each device's parameters, with equal numbers
           │                       │     └ backward: psum of all cotangents        │
           └ 1/n to each           └ backward: its own                             └ backward: gradients summed over all

Over which devices: those along the batch's axes, which have other samples; and those along any other axis over which the
loss function of some device calls a collective, or takes its index to use a part of the parameters.  Devices agree on these
axes in the first step, before anything is reduced; later only collectives add to them, so a device may print by its index.
Where nothing is asked, all along such an axis compute the same, and nothing is sent along it after the first step.

Some collectives are refused, since their result would differ on other meshes (`sync_batchnorm` weights devices by samples):

    5 samples on 2 devices      fs.pmean is no mean over samples: [0 1] and [2 3 4] count alike
    3 samples on 4 devices      one device computes on a neighbour's sample, which a sum would count twice
    reproducible mode           a slice sees only the slices that other devices compute meanwhile
"""

from __future__ import annotations

import torch

from fshard.errors import LayoutError
from fshard.mesh.scope import Group, Notice, Scope
from fshard.mesh.spec import as_written
from fshard.source import Site, call_site
from fshard.transforms.agree import on_host, summed
from fshard.transforms.batch import Batch

NOT_HEARD = ("fs.pvary", "fs.axis_size")
"""What is the same on all devices, and tells them nothing of each other."""
_INDEX = "fs.axis_index"
"""What sends nothing: it counts in the first step, in which devices agree, and not for one device alone in a later one."""


class Talk:
    """What one device's loss function asks for in a step; `objection` may refuse it.

    `along` are the axes, besides those that cut the batch, over which anything was asked for; `mixed` says whether
    something was along those.
    """

    def __init__(self, batch: Batch, objection: Notice | None) -> None:
        self._sizes, self._cut, self._objection = batch.mesh.shape, frozenset(batch.axes), objection
        self.along: tuple[str, ...] = ()
        self._indexed = set[str]()
        self.mixed = False

    def notice(self, what: str, group: Group) -> None:
        """Note what is asked for over the axes of a group, unless it is refused."""
        if self._objection is not None:
            self._objection(what, group)
        if what in NOT_HEARD:
            return
        if what == _INDEX:
            self._indexed |= {*group.axes}
            return
        self.mixed |= not self._cut.isdisjoint(group.axes)
        if new := {axis for axis in group.axes if self._sizes.get(axis, 1) > 1} - self._cut - {*self.along}:
            self._add(new)

    def agree(self, scope: Scope, known: tuple[str, ...] | None, near: torch.device, site: Site) -> None:
        """Have the axes over which any device called a collective; `known` are those of an earlier step."""
        if known is not None:
            self._add({*known})
            return
        others = [axis for axis, size in self._sizes.items() if size > 1 and axis not in self._cut]
        if others:
            group = scope.group(tuple(axis for axis, size in self._sizes.items() if size > 1), "value_and_grad")
            used = {*self.along, *self._indexed}
            (found,) = summed((on_host([float(axis in used) for axis in others], near),), group, site)
            if not found.is_meta:
                self._add({axis for axis, times in zip(others, found.tolist(), strict=True) if times})

    def _add(self, axes: set[str]) -> None:
        self.along = tuple(axis for axis in self._sizes if axis in axes or axis in self.along)

    @property
    def many(self) -> int:
        """How many devices there are along those axes, which all count for the same samples."""
        many = 1
        for axis in self.along:
            many *= self._sizes[axis]
        return many


_HARMLESS = ("fs.pvary", "fs.pmax", "fs.pmin", "fs.axis_index", "fs.axis_size", "sync_batchnorm")
"""Collectives that a sample which is there twice does not change."""


def objection(batch: Batch, count: int, *, reproducible: bool) -> Notice | None:
    """Return a function that raises if a loss function calls a wrong collective; None if all are right.

    `count` is the number of slices that each device takes.
    """
    cut = batch.cut
    slices = 0 if cut is None else cut.parts * count
    if not reproducible and (cut is None or cut.length % slices == 0):
        return None
    axes = frozenset(batch.axes if cut is None or reproducible else cut.axes)

    def object_to(what: str, group: Group) -> None:
        if axes.isdisjoint(group.axes):
            return
        if reproducible:
            if what not in ("fs.pvary", "fs.axis_size"):
                raise LayoutError(
                    f"{what} over {as_written(group.axes)} in the loss function, at {call_site()}: with reproducible=True a "
                    "slice of the batch must be computed by itself, so that it does not depend on the mesh. Use its own "
                    "samples only, or leave reproducible=True out."
                )
            return
        if group.size == 1 or what in _HARMLESS or cut is None:
            return
        found = f"the {cut.length} samples of the batch are cut into {slices} slices"
        cure = f"Give batches of a multiple of {slices}."
        if cut.length < slices:
            raise LayoutError(
                f"{what} in the loss function: {found}, so some have none and compute on a neighbour's, which would count "
                f"twice. {cure}"
            )
        if what == "fs.pmean":
            raise LayoutError(
                f"fs.pmean in the loss function weights all devices alike, but {found} of different size. {cure} Or divide "
                "the fs.psum of sums by that of counts."
            )

    return object_to
