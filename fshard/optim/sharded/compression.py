"""Compressed gradients: they come unreduced along an axis, and a compressor reduces them first.

    gradients {U:node}  ──compressor──>  gradients  ──optimizer──>  parameters
         state["compress"]["node"]                state["inner"]

State of the structure of the parameters has the layout of these gradients: it is a sum not yet
made, whose total is kept on another mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fshard.errors import LayoutError, OptimizerError
from fshard.mesh.collectives.api import axis_index, psum
from fshard.mesh.layout import Layout, Mesh, PyTree, flatten, map_leaves
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import reshard
from fshard.mesh.spmd.moments import listeners, reach
from fshard.optim.contract import Optimizer
from fshard.optim.leaves import Leaf, Leaves, each_list, undifferentiable
from fshard.optim.per_device.run import device_optimizer
from fshard.optim.rules import foreach
from fshard.optim.sharded.layouts import shard_layout

Handles = dict[tuple[str, int], Any]
"""Reductions that are started, by axis and device."""


class Compression:
    """The compressed reductions before an optimizer, along some axes, in order.

    Args:
        compressors: by axis: those of `fs.comm`.
        mesh: the devices.
        axes: along which the reduced gradients are sharded.
        loss_scale: of the optimizer's state: gradients are divided by it while they are compressed.
    """

    def __init__(
        self,
        compressors: Mapping[str, Any],
        mesh: Mesh,
        axes: tuple[str, ...],
        loss_scale: Callable[[PyTree], Tensor] | None,
    ) -> None:
        _validate(compressors, mesh)
        self._mesh = mesh
        self._axes = axes
        self._loss_scale = loss_scale
        self._compressors = dict(compressors)
        self._has_gradient: list[bool] = []  # of each leaf in the last step

    def on_mesh(self, mesh: Mesh) -> Compression:
        """Return the same reductions on another mesh with these axes."""
        return Compression(self._compressors, mesh, self._axes, self._loss_scale)

    def layout(self, layout: Layout, first: int = 0) -> Layout:
        """Return the layout of a parameter's gradient before its reductions from the first on.

        It is unreduced along their axes.
        """
        sharded = [axis for axis in self._compressors if axis in layout.spec.sharded_axes]
        if sharded:
            raise LayoutError(
                "partition_optimizer: compress must be along axes that do not shard the "
                f"parameters; got {', '.join(sharded)} for a parameter of {layout}. Compress along "
                "another axis, where they are replicated."
            )
        reduced = shard_layout(layout, self._axes)
        needs_matrices = any(compressor.full for compressor in self._compressors.values())
        if needs_matrices and reduced.spec.split_axes:
            raise LayoutError(
                "partition_optimizer: compress must not be power_sgd where gradients are shards, "
                f"of {reduced}: a shard of a matrix has other factors. Use stage=0, or another "
                "compressor."
            )
        return reduced.with_spec(reduced.spec.replace(unreduced=[*self._compressors][first:]))

    def init(self, params: PyTree) -> PyTree:
        """Return the state of each compressor."""
        leaves = Leaves.of(params)
        states: dict[str, PyTree] = {}
        for axis, compressor in self._compressors.items():
            gradients = leaves.mapped(partial(self._example, axis))
            state = self._on_devices(axis, self._reduce).init(gradients)
            states[axis] = _with_replicated(state, compressor.totals, axis)
        return states

    def start(self, state: PyTree, params: PyTree) -> Handles:
        """Start, before the forward, what needs no gradients; `reduce` takes the result."""
        leaves = Leaves.of(params)
        handles: Handles = {}

        def start(axis: str, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            device = axis_index(self._mesh.axis_names)
            handles[axis, device] = self._compressors[axis].early(state, axis)
            return grads, state

        # Which parameters have a gradient is known from the last step: the first starts nothing.
        if len(self._has_gradient) != len(leaves.leaves):
            return handles
        for axis, compressor in self._compressors.items():
            if compressor.early is not None:
                examples = leaves.mapped(partial(self._example, axis), self._has_gradient)
                self._on_devices(axis, start).update(examples, state["compress"][axis], examples)
        return handles

    @undifferentiable
    def reduce(
        self, grads: PyTree, state: PyTree, handles: Handles | None = None
    ) -> tuple[PyTree, PyTree]:
        """Reduce gradients that are unreduced along the axes of the compressors.

        Args:
            grads: the gradients.
            state: of the compressors and the optimizer.
            handles: what `start` has returned.
        """
        if not are_unreduced(grads):
            return grads, state  # no parameter has a gradient
        has_gradient = [grad is not None for grad in Leaves.of(grads).leaves]
        if has_gradient != self._has_gradient:
            handles = None  # they were started for other gradients
        self._has_gradient = has_gradient

        scale = 1.0 if self._loss_scale is None else float(self._loss_scale(state["inner"]))
        grads = _scaled(grads, 1 / scale)
        states: dict[str, PyTree] = {}
        for axis in self._compressors:
            reduction = self._on_devices(axis, partial(self._reduce, handles=handles or {}))
            grads, states[axis] = reduction.update(grads, state["compress"][axis], grads)
        return _scaled(map_leaves(_reduced, grads), scale), {**state, "compress": states}

    def _reduce(
        self, axis: str, grads: PyTree, state: PyTree, params: PyTree, handles: Handles
    ) -> tuple[PyTree, PyTree]:
        """Reduce gradients on one device.

        Unless all are finite, the total is nan and the state does not change.
        """
        if listeners:
            reach("reduce")
        handle = handles.get((axis, axis_index(self._mesh.axis_names)))
        started = [] if handle is None else [handle]
        total, _, after = self._compressors[axis].reduce(grads, state, axis, *started)
        if self._is_finite(grads, total):
            return total, after
        return map_leaves(lambda x: x * torch.nan, total), state

    def _is_finite(self, grads: PyTree, total: PyTree) -> bool:
        """Return True if gradients and their total are finite on all devices."""
        zero = torch.zeros((), device=self._mesh.device_type)
        sums = zero
        for x in flatten((grads, total))[0]:
            dtype = torch.promote_types(x.dtype, zero.dtype)
            sums = sums + x.sum(dtype=dtype).abs() * 0  # 0 times what is not finite is nan
        is_finite = psum(sums.float(), self._mesh.axis_names) == 0
        # Counts in the state are on the host, which must wait for the result.
        return is_finite.is_meta or bool(is_finite)

    def _example(self, axis: str, param: Leaf, has_gradient: bool = True) -> Leaf:
        """Return an array like a parameter's gradient before the reduction along an axis."""
        if not has_gradient or not isinstance(param, Sharded):
            return None
        return reshard(param, self.layout(param.layout, [*self._compressors].index(axis)))

    def _on_devices(self, axis: str, update: Callable[..., Any]) -> Optimizer:
        """Return a function of an axis and one device's trees as one of arrays."""
        init = self._compressors[axis].init
        return device_optimizer(Optimizer(init, partial(update, axis), sharding="flat"))


def are_unreduced(grads: PyTree) -> bool:
    """Return True if gradients are still to be reduced.

    `train_step` and boosted optimizers reduce them before the step of the optimizer, to take their
    norm; of a step that is called directly they are its arguments.
    """
    for grad in flatten(grads)[0]:
        if isinstance(grad, Sharded) and grad.layout.spec.unreduced:
            return True
    return False


def _validate(compressors: Any, mesh: Mesh) -> None:
    """Raise unless there is a compressor for each axis."""
    reductions: list[Any] = [None]
    if isinstance(compressors, Mapping):
        reductions = [getattr(compressor, "reduce", None) for compressor in compressors.values()]
    if not all(map(callable, reductions)):
        raise OptimizerError(
            "partition_optimizer: compress must be a compressor for each axis, as "
            f"{{{mesh.axis_names[0]!r}: fs.comm.top_k(0.01)}}; got {compressors!r}."
        )
    for axis in compressors:
        mesh.check_axes(axis, "partition_optimizer(compress=)")


def _reduced(x: Sharded) -> Sharded:
    """Return an array whose shards are the sums."""
    return Sharded(x.shape, x.layout.with_spec(x.spec.replace(unreduced=None)), x.shards)


def _with_replicated(state: PyTree, names: Sequence[str], axis: str) -> PyTree:
    """Return the state of a compressor whose trees of these names are replicated along its axis.

    `init` gives all trees of the structure of the gradients their layout, unreduced. A total with
    that layout would be zero on all devices but one of another mesh, and parameters would differ
    from then on.
    """

    def replicated(x: Leaf) -> Leaf:
        if not isinstance(x, Sharded):
            return x
        unreduced = [name for name in x.spec.unreduced if name != axis]
        return Sharded(x.shape, x.layout.with_spec(x.spec.replace(unreduced=unreduced)), x.shards)

    if not names or not isinstance(state, dict):
        return state
    result: dict[str, PyTree] = {}
    for name, tree in state.items():
        if name == "inner":
            result[name] = _with_replicated(tree, names, axis)
        elif name in names:
            result[name] = map_leaves(replicated, tree)
        else:
            result[name] = tree
    return result


def _scaled(grads: PyTree, factor: float) -> PyTree:
    return grads if factor == 1.0 else each_list(lambda xs: foreach.mul(xs, factor), grads)
