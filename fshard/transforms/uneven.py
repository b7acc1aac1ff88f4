"""What a loss function may not ask other devices for, because what it says would not be so on other meshes.

    5 samples on 2 devices      fs.pmean is no mean over samples: [0 1] and [2 3 4] count alike
    3 samples on 4 devices      one device has none and computes on a neighbour's, which a sum would count twice
    reproducible mode           a slice knows only the slices that other devices compute on meanwhile: fewer on fewer devices

`sync_batchnorm` knows how much each device has, and leaves out the samples that are there twice.
"""

from __future__ import annotations

from fshard.errors import LayoutError
from fshard.mesh.scope import Group, Notice
from fshard.mesh.spec import as_written
from fshard.source import call_site
from fshard.transforms.batch import Batch

_HARMLESS = ("fs.pvary", "fs.pmax", "fs.pmin", "fs.axis_index", "fs.axis_size", "sync_batchnorm")
"""What a sample that is there twice does not change."""


def objection(batch: Batch, count: int, *, reproducible: bool) -> Notice | None:
    """Return what raises if a loss function asks for the wrong thing; None if there is nothing wrong.

    `count` is the number of slices that each device takes.
    """
    return _to_what_differs(batch) if reproducible else _to_uneven_parts(batch, count)


def _to_what_differs(batch: Batch) -> Notice:
    axes = frozenset(batch.axes)

    def object_to(what: str, group: Group) -> None:
        if what in ("fs.pvary", "fs.axis_size") or axes.isdisjoint(group.axes):
            return
        raise LayoutError(
            f"{what} over {as_written(group.axes)} in the loss function, at {call_site()}: with reproducible=True a slice of "
            "the batch is computed by itself, so that it does not depend on the mesh, and can ask no other slice. Let it "
            "use its own samples only, or leave reproducible=True out."
        )

    return object_to


def _to_uneven_parts(batch: Batch, count: int) -> Notice | None:
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
