"""The batch of a step: laid on the mesh, and cut into the slices that each device takes one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import collected, device_put
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.tree import PyTree, Structure, broadcast_prefix, flatten_with_paths, unflatten


class Batch(NamedTuple):
    """A batch on a mesh.

    Args:
        leaves: tensors as `Sharded`s, and what is no tensor as it is.
        cut: which leaves hold samples, so that slices cut them: those whose first dim is cut over devices.
        structure: of the tree that they are the leaves of.
        axes: along which anything is cut.
    """

    leaves: list[Any]
    cut: list[bool]
    structure: Structure
    axes: tuple[str, ...]

    def part(self, place: int) -> list[Any]:
        """Return what the device whose shards stand at `place` has of the leaves."""
        return [x.shards[place] if isinstance(x, Sharded) else x for x in self.leaves]

    def slices(self, place: int, count: int) -> list[list[Any]]:
        """Cut a device's part into slices; what is whole on every device is in every slice."""
        parts, cut = self.part(place), self.cut
        if count == 1:
            return [parts]
        wrong = sorted({tuple(x.shape) for x, one in zip(parts, cut, strict=True) if one and x.shape[0] % count})
        if wrong or not any(cut):
            raise LayoutError(
                f"each device's part of the batch is to be cut into {count} slices, but has "
                + (
                    f"tensors of shape {', '.join(map(str, wrong))}"
                    if wrong
                    else "no tensor whose first dim is cut by its spec"
                )
                + ". Give a batch whose first dim they divide."
            )
        chunks = [x.chunk(count) if one else (x,) * count for x, one in zip(parts, cut, strict=True)]
        return [[chunk[place] for chunk in chunks] for place in range(count)]

    def tree(self, leaves: list[Any], dtype: torch.dtype | None = None) -> PyTree:
        """Put leaves together again, floating ones in a dtype."""
        if dtype is not None:
            leaves = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
        return unflatten(self.structure, leaves)


def placed(batch: PyTree, specs: PyTree, mesh: Mesh) -> Batch:
    """Lay a batch on a mesh by a P, or a prefix tree of Ps."""
    paths, leaves, structure = flatten_with_paths(batch, sharded_is_leaf=True, none_is_leaf=True)
    try:
        chosen = broadcast_prefix(specs, batch, none_is_leaf=True)
    except ValueError:
        raise LayoutError(f"the batch specs {specs!r} are no prefix of the batch {structure}.") from None
    laid: list[Any] = []
    with collected("batch") as attempt:
        for path, leaf, spec in zip(paths, leaves, chosen, strict=True):
            with attempt(path):
                laid.append(_placed(leaf, spec, mesh) if isinstance(leaf, Tensor | Sharded) else leaf)
    over = tuple(axis for axis in mesh.axis_names if any(isinstance(spec, P) and axis in spec.axes for spec in chosen))
    cut = [isinstance(x, Sharded) and bool(x.ndim and x.spec.dims(x.ndim)[0]) for x in laid]
    return Batch(laid, cut, structure, over)


def _placed(leaf: Tensor | Sharded, spec: Any, mesh: Mesh) -> Sharded:
    if not isinstance(spec, P):
        raise LayoutError(f"is a tensor, but its spec is {spec!r}. Give a P.")
    layout = Layout(mesh, spec)
    layout.check(leaf.shape)
    return leaf if isinstance(leaf, Sharded) and leaf.layout == layout else device_put(leaf, layout)
