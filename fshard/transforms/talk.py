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
"""

from __future__ import annotations

import torch

from fshard.mesh.scope import Group, Notice, Scope
from fshard.source import Site
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
