"""The other layout of an audit: its step, and arrays moved there and back.

params   [8, 4]{flat:data} on data=4     ──>  [8, 4] on data=2, ZeRO 1
state    as the other step's `init` makes it
batch, buffers                           ──>  the same specs on the other mesh
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, P, PyTree, as_axes, flatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import reshard
from fshard.optim.leaves import Leaves
from fshard.optim.partition import partition_optimizer
from fshard.optim.sharded.layouts import Stage, shard_layout
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.randomness import drawing_from, random_state
from fshard.transforms.options import refusal
from fshard.transforms.stages.buffers import stage_of
from fshard.transforms.stages.plan import at_coordinate
from fshard.transforms.train_step import TrainStep


def other_step(step: TrainStep, mesh: Mesh | None, stage: Stage | None, options: Any) -> TrainStep:
    """Return a step on another mesh, in another stage of ZeRO, or with other options."""
    if stage is not None:
        optimizer = _in_stage(step, stage)
        step = TrainStep.of(step.loss_fn, optimizer, step.options)
    if mesh is not None:
        options = {**options, "mesh": mesh}
    return step.replace(**options)


def _in_stage(step: TrainStep, stage: Stage) -> ShardedOptimizer:
    """Return the optimizer of a step in another stage of ZeRO, along its axes or the batch's."""
    if isinstance(step.opt, ShardedOptimizer):
        return step.opt.replaced(layouts=replace(step.opt.layouts, stage=stage))
    axes = _axes_of_batch(step)
    return partition_optimizer(step.opt, mesh=step.mesh, axis=axes, stage=stage)


def layout_errors(step: TrainStep, other: TrainStep) -> list[str]:
    """Return why two steps cannot be compared, if they cannot."""
    errors: list[str] = []
    if step.mesh.runtime == "abstract" and step.mesh.is_member:
        errors.append("an abstract mesh has no values. Audit on a virtual mesh or on processes")
    has_other_state = other.mesh != step.mesh or other.optimizer.layouts != step.optimizer.layouts
    if step.optimizer.compression is not None and has_other_state:
        errors.append(
            "the optimizer compresses gradients, with a state of each device: mesh= and stage= "
            "must be left out"
        )
    if step.state_memory == "disk":
        errors.append('a state on disk is not copied. Give partition_optimizer state_memory="host"')
    counts = step.gradient.options.slices, other.gradient.options.slices
    if step.options.reproducible and other.options.reproducible and counts[0] != counts[1]:
        errors.append(
            f"the other layout must cut the batch into as many slices, {counts[0]}, to have equal "
            f"bits; got {counts[1]}. Of stages they are the microbatches of all devices"
        )
    errors += refusal(partial(_count_slices, other))
    for axis in as_axes(step.options.local):
        sizes = step.mesh.shape.get(axis), other.mesh.shape.get(axis)
        if sizes[0] != sizes[1]:
            errors.append(
                f"mesh= must have the same size along the local axis {axis}, {sizes[0]}; "
                f"got {sizes[1]}"
            )
    return errors


def _count_slices(step: TrainStep) -> int:
    """Return the number of slices of a device; raise if devices cannot share them evenly."""
    parts = 1
    for axis in _axes_of_batch(step):
        parts *= step.mesh.shape[axis]
    return step.gradient.options.turns(parts)


def _axes_of_batch(step: TrainStep) -> tuple[str, ...]:
    """Return the axes that shard the batch of a step."""
    axes: dict[str, None] = {}  # a set in order
    for spec in flatten(step.options.batch)[0]:
        if isinstance(spec, P):
            axes.update(dict.fromkeys(spec.axes))
    return tuple(axes)


@dataclass(frozen=True)
class OtherLayout:
    """The layouts of the arguments of one step for another one.

    Args:
        step: that is audited.
        other: that computes it again.
    """

    step: TrainStep
    other: TrainStep

    def arguments(self, arguments: Sequence[PyTree]) -> list[PyTree]:
        """Return copies of the arguments of the step, as the other step takes them."""
        params, state, *inputs = arguments
        params = self._moved_params(params)
        state = self._moved_state(state, params)
        return [params, state, *[self._moved_input(tree) for tree in inputs]]

    def _moved_params(self, params: PyTree) -> PyTree:
        leaves = Leaves.of(params)
        layouts: list[Layout | None] = []
        for path, leaf in zip(leaves.paths, leaves.leaves, strict=True):
            layout = None
            if isinstance(leaf, Sharded):
                layout = self._on_other_mesh(leaf.layout, path)
                layout = self._in_other_stage(layout, leaf.dtype)
            layouts.append(layout)
        return moved(params, layouts)

    def _on_other_mesh(self, layout: Layout, path: str) -> Layout:
        """Return the same layout on the other mesh, of a stage on the devices of that stage."""
        options = self.other.options
        layout = replace(layout, mesh=self.other.mesh)
        if options.schedule is None or options.axis not in layout.spec.at_axes:
            return layout
        coordinate = options.schedule.placement[stage_of(path)]
        return at_coordinate(layout, options.axis, coordinate)

    def _in_other_stage(self, layout: Layout, dtype: torch.dtype) -> Layout:
        """Return the layout of a parameter in the other stage of ZeRO."""
        before, after = self.step.optimizer.stage, self.other.optimizer.stage
        axes = self.other.optimizer.layouts.axes
        if before == 3 and after < 3:
            kept = tuple([axis for axis in layout.spec.flat_axes or () if axis not in axes])
            return layout.with_spec(layout.spec.replace(flat=kept or None))
        if before < 3 and after == 3 and (dtype.is_floating_point or dtype.is_complex):
            return shard_layout(layout, axes)
        return layout

    def _moved_state(self, state: PyTree, params: PyTree) -> PyTree:
        """Return a state in the layouts in which the other step makes one of its parameters."""
        is_same = self.step.optimizer.layouts == self.other.optimizer.layouts
        if is_same and self.step.options.schedule is self.other.options.schedule:
            return copied_like(state, state)
        with drawing_from(random_state()):
            like = self.other.init(params)
        return copied_like(state, like)

    def _moved_input(self, tree: PyTree) -> PyTree:
        """Return buffers or a batch on the other mesh."""
        leaves = Leaves.of(tree)
        layouts: list[Layout | None] = []
        for path, leaf in zip(leaves.paths, leaves.leaves, strict=True):
            is_array = isinstance(leaf, Sharded)
            layouts.append(self._on_other_mesh(leaf.layout, path) if is_array else None)
        return moved(tree, layouts)


@torch.no_grad()
def moved(tree: PyTree, layouts: Sequence[Layout | None]) -> PyTree:
    """Return copies of the leaves of a tree: arrays in other layouts. Ties stay ties."""
    leaves = Leaves.of(tree)
    results = list(leaves.leaves)
    indices: list[int] = []
    for index, leaf in enumerate(leaves.leaves):
        if leaves.firsts[index] != index:
            continue
        if layouts[index] is not None:
            indices.append(index)
        elif isinstance(leaf, Tensor):
            results[index] = leaf.detach().clone()
    targets: Any = [layouts[index] for index in indices]
    arrays = reshard([leaves.leaves[index] for index in indices], targets) if indices else []
    for index, array in zip(indices, arrays, strict=True):
        results[index] = array
    return leaves.rebuild([results[first] for first in leaves.firsts])


def copied_like(tree: PyTree, like: PyTree) -> PyTree:
    """Return copies of the leaves of a tree, arrays in the layouts of another tree."""
    leaves = Leaves.of(tree)
    likes = Leaves.of(like)
    if likes.structure != leaves.structure:
        raise LayoutError(
            "fs.audit: the state must be a tree as opt.init makes it, to be moved to other layouts; "
            f"got {leaves.structure} in place of {likes.structure}. Audit with the same mesh and "
            "stage."
        )
    layouts: list[Layout | None] = []
    for leaf, target in zip(leaves.leaves, likes.leaves, strict=True):
        is_array = isinstance(leaf, Sharded) and isinstance(target, Sharded)
        layouts.append(target.layout if is_array else None)
    return moved(tree, layouts)


def without_arrays(tree: PyTree) -> PyTree:
    """Return a tree with None in place of its arrays."""
    return Leaves.of(tree).mapped(lambda x: None if isinstance(x, Sharded) else x)
