"""The way of a gradient in reproducible mode, where it matters in which order devices are added up.

A batch that is cut over ("a", "b") has its slices in the order of a, then b.  Neighbours are added first, so that one binary
tree goes on from the slices of a device to the devices: over b, then over a, or over both at once in that order.

    slices   0   1   2   3       a = 0: 0, 1;  a = 1: 2, 3;  b = 0, 1 within each
             0 + 1   2 + 3       over "b"
             (0+1) + (2+3)       over "a"
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.spec import P
from fshard.mesh.steps import Way, way_between


@lru_cache(maxsize=4096)
def way_in_order(
    mesh: Mesh, axes: tuple[str, ...], wanted: Layout, shape: tuple[int, ...], on: tuple[tuple[str, int], ...] = ()
) -> Way:
    """Return the way from summands over `axes`, at a place `on` others, to a layout that adds up over the last axis first.

    It is the cheapest, if that does; else axes are added up one by one, and the gradient is cut with the first.

    >>> from fshard import make_mesh
    >>> mesh = make_mesh({"a": 2, "b": 2})
    >>> for axis in "ab":
    ...     print([(step.kind, *step.axes) for step in way_in_order(mesh, ("a", "b"), Layout(mesh, P.flat(axis)), (8,)).steps])
    [('psum', 'b'), ('flat_scatter', 'a')]
    [('flat_scatter', 'b'), ('psum', 'a')]
    """
    summands = [Layout(mesh, P(unreduced=axes[:count], on=dict(on))) for count in range(len(axes), 0, -1)]
    way = way_between(summands[0] if axes else Layout(mesh, P(on=dict(on))), wanted, shape)
    added = [axis for step in reversed(way.steps) if step.kind in _ADDING for axis in step.axes]
    if added == [axis for axis in axes if mesh.shape[axis] > 1]:
        return way
    return Way(tuple(step for leg in pairwise([*summands, wanted]) for step in way_between(*leg, shape).steps), shape)


_ADDING = ("psum", "psum_scatter", "flat_scatter")
