"""Collectives that a loss function must not call, because their result would differ on other meshes.

    5 samples on 2 devices      fs.pmean is no mean over samples: [0 1] and [2 3 4] count alike
    3 samples on 4 devices      one device computes on a neighbour's sample, which a sum would count twice
    reproducible mode           a slice sees only the slices that other devices compute meanwhile: fewer on fewer devices

`sync_batchnorm` weights devices by their samples.
"""

from __future__ import annotations

from fshard.errors import LayoutError
from fshard.mesh.scope import Group, Notice
from fshard.mesh.spec import as_written
from fshard.source import call_site
from fshard.transforms.batch import Batch

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
