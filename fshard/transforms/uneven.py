"""What a loss function may not ask other devices for, where these do not hold equally many samples.

    5 samples on 2 devices      fs.pmean is no mean over samples: [0 1] and [2 3 4] count alike
    3 samples on 4 devices      one device has none and computes on a neighbour's, which a sum would count twice

`sync_batchnorm` knows how much each device has, and leaves out what counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from fshard.errors import LayoutError
from fshard.mesh.scope import Group
from fshard.transforms.batch import Batch

_HARMLESS = ("fs.pvary", "fs.pmax", "fs.pmin")
"""What a sample that is there twice does not change."""


def objection(batch: Batch, count: int) -> Callable[[str, Group], None] | None:
    """Return what raises if a loss function calls the wrong collective; None if the batch is cut evenly.

    `count` is the number of slices that each device takes.
    """
    cut = batch.cut
    if cut is None or cut.length % (cut.parts * count) == 0:
        return None
    length, slices, axes = cut.length, cut.parts * count, frozenset(cut.axes)
    found = f"the {length} samples of the batch are cut into {slices} slices"
    cure = f"Give batches of a multiple of {slices}."

    def object_to(what: str, group: Group) -> None:
        if group.size == 1 or what in _HARMLESS or axes.isdisjoint(group.axes):
            return
        if length < slices:
            raise LayoutError(
                f"{what} in the loss function: {found}, so some have none and compute on a neighbour's, which would "
                f"count twice. {cure}"
            )
        if what == "fs.pmean":
            raise LayoutError(
                f"fs.pmean in the loss function takes all devices alike, but {found} of different size, so it is no mean over "
                f"samples. {cure} Or divide the fs.psum of sums by that of counts."
            )

    return object_to
