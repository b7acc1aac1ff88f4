"""What a loss function has to do with other devices, and what follows for its gradient.

In a loss function every value counts as the device's own: parameters, and what a collective has made equal everywhere too.
Each device has a loss; the objective is their mean, weighted by what the devices' parts of the batch count for, as a
function of the values of all devices together.  That is right for any code, and nobody has to promise anything.

    mean over all devices of    f(z_d, psum(z))          each device's parameters, with equal numbers
           │                       │     └ backward: psum of all cotangents        │
           └ 1/n to each           └ backward: its own                             └ backward: gradients summed over all

Over which devices: those along the batch's axes, who have other samples; and those along any other axis over which the
loss function asks for something, its place, say, to compute with a part of the parameters.  Where it asks for nothing, all
along such an axis compute the same, and nothing is sent.
"""

from __future__ import annotations

from fshard.mesh.scope import Group, Notice
from fshard.transforms.batch import Batch

NOT_HEARD = ("fs.pvary", "fs.axis_size")
"""What is the same on all devices, and tells them nothing of each other."""


class Talk:
    """What one device's loss function asks for in a step; `objection` may refuse it.

    `along` are the axes, besides those that cut the batch, over which anything was asked for; `mixed` says whether
    something was along those.
    """

    def __init__(self, batch: Batch, objection: Notice | None) -> None:
        self._sizes, self._cut, self._objection = batch.mesh.shape, frozenset(batch.axes), objection
        self.along: tuple[str, ...] = ()
        self.mixed = False

    def notice(self, what: str, group: Group) -> None:
        """Note what is asked for over the axes of a group, unless it is refused."""
        if self._objection is not None:
            self._objection(what, group)
        if what in NOT_HEARD:
            return
        self.mixed |= not self._cut.isdisjoint(group.axes)
        if new := {axis for axis in group.axes if self._sizes.get(axis, 1) > 1} - self._cut - {*self.along}:
            self.along = tuple(axis for axis in self._sizes if axis in new or axis in self.along)

    @property
    def many(self) -> int:
        """How many devices there are along those axes, which all count for the same samples."""
        many = 1
        for axis in self.along:
            many *= self._sizes[axis]
        return many
