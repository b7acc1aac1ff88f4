"""Compressed gradients: they come unreduced along an axis, and a compressor reduces them before the optimizer.

    gradients {U:node}  ──compressor──>  gradients  ──optimizer──>  parameters
         state["compress"]["node"]                state["inner"]

State of the structure of the parameters has the layout of these gradients: it is a sum not yet made, whose total is kept
on another mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fshard.errors import LayoutError, OptimizerError
from fshard.mesh.collectives.api import psum
from fshard.mesh.layout import Layout, Mesh, PyTree, flatten, map_leaves, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import reshard_all
from fshard.optim.contract import Optimizer, Update
from fshard.optim.leaves import Leaf, Leaves, map_shards
from fshard.optim.per_device import on_arrays
from fshard.source import call_site


class Compression:
    """The compressed reductions before an optimizer, along some axes, in order.

    Args:
        compressors: by axis: pairs of init and reduce, as those of `fs.comm`.
        mesh: the devices.
        gradients: from a parameter's layout to that of its reduced gradient.
        loss_scale: of the optimizer's state: gradients are divided by it while they are compressed.
    """

    def __init__(
        self,
        compressors: Mapping[str, Any],
        mesh: Mesh,
        gradients: Callable[[Layout], Layout],
        loss_scale: Callable[[PyTree], Tensor] | None,
    ) -> None:
        self._mesh, self._gradients, self._loss_scale = mesh, gradients, loss_scale
        for axis, compressor in compressors.items():
            mesh.check_axes(axis, "partition_optimizer(compress=)")
            if not callable(getattr(compressor, "reduce", None)):
                raise OptimizerError(
                    f"partition_optimizer: compress must be a compressor for each axis, as {{{axis!r}: fs.comm.top_k(0.01)}}; "
                    f"got {compressor!r}."
                )
        self._compressors = [compressor for axis, compressor in compressors.items() if mesh.shape[axis] > 1]
        self._steps = {
            axis: on_arrays(
                Optimizer(compressor.init, self._on_device(axis, compressor.reduce), elementwise=True), "compress"
            )
            for axis, compressor in compressors.items()
            if mesh.shape[axis] > 1
        }

    def layout(self, layout: Layout) -> Layout:
        """Return the layout of a parameter's gradient: unreduced along the axes of the compressors."""
        return _relabelled(self._reduced(layout), tuple(self._steps))

    def _reduced(self, layout: Layout) -> Layout:
        if sharded := [axis for axis in self._steps if axis in layout.spec.sharded_axes]:
            raise LayoutError(
                f"partition_optimizer: compress must be along axes that do not shard the parameters; got {', '.join(sharded)} "
                f"for a parameter of {layout}. Compress along another axis, where they are replicated."
            )
        reduced = self._gradients(layout)
        if reduced.spec.split_axes and any(compressor.full for compressor in self._compressors):
            raise LayoutError(
                f"partition_optimizer: compress must not be power_sgd where gradients are shards, of {reduced}: a shard of a "
                "matrix has other factors. Use stage=0, or another compressor."
            )
        return reduced

    def init(self, params: PyTree) -> PyTree:
        """Return the state of each compressor."""
        return {axis: opt.init(self._labelled(params)) for axis, opt in self._steps.items()}

    def reduce(self, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """Reduce gradients; those that are reduced already stay. `state` is that of the compressors and the optimizer."""
        leaves = [x for x in flatten(grads)[0] if isinstance(x, Sharded)]
        if not any(x.layout.spec.unreduced for x in leaves):
            return grads, state
        scale = 1.0 if self._loss_scale is None else float(self._loss_scale(state["inner"]))
        like, states, rest = self._labelled(params), dict[str, PyTree](), [*self._steps]
        if scale != 1.0:
            grads = map_leaves(lambda x: map_shards(lambda g: g / scale, x), grads)
        for axis, opt in self._steps.items():
            grads, states[axis] = opt.update(grads, state["compress"][axis], like)
            rest.remove(axis)
            grads, like = (map_leaves(lambda x: _with_unreduced(x, tuple(rest)), tree) for tree in (grads, like))
        if scale != 1.0:
            grads = map_leaves(lambda x: map_shards(lambda g: g * scale, x), grads)
        return grads, {"compress": states, "inner": state["inner"]}

    def _labelled(self, params: PyTree) -> PyTree:
        """Return the parameters in the layouts of their unreduced gradients: only layouts and shapes are used."""
        at, axes = Leaves.of(params), tuple(self._steps)
        targets = [None if leaf is None else self._reduced(leaf.layout) for leaf in at.leaves]
        moved = iter(
            reshard_all([x for x in at.leaves if x is not None], [x for x in targets if x is not None], call_site())
        )
        return at.rebuild([None if leaf is None else _with_unreduced(next(moved), axes) for leaf in at.leaves])

    def _on_device(self, axis: str, reduce: Callable[..., Any]) -> Update:
        """Return the reduction on one device; gradients that are not finite anywhere leave the state as it is."""

        def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            total, _, after = reduce(grads, state, axis)
            sums = [x.sum() * 0 for x in flatten(total)[0]]
            if not sums:
                return total, after
            is_finite = psum(torch.stack([x.float() for x in sums]).sum(), self._mesh.axis_names) == 0
            before, structure = flatten(state)
            kept = [
                torch.where(is_finite.to(new.device), new, old)
                for new, old in zip(flatten(after)[0], before, strict=True)
            ]
            return total, unflatten(structure, kept)

        return update


def _relabelled(layout: Layout, unreduced: tuple[str, ...]) -> Layout:
    return layout.with_spec(layout.spec.with_unreduced(unreduced))


def _with_unreduced(x: Leaf, axes: tuple[str, ...]) -> Leaf:
    """Return an array whose shards are summands along some axes."""
    return Sharded(x.shape, _relabelled(x.layout, axes), x.shards) if isinstance(x, Sharded) else x
