"""Plans of parameters: how each is unsharded and used, and how its gradient gets to its layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.layout import Layout, Memory, Mesh, P
from fshard.mesh.reshard.execute import ReshardPlan, plan_reshard

Along = tuple[str, ...]
"""Axes besides the batch's over which gradients are summed."""
Gradients = list[Tensor | None]
"""The gradients of the parameters of a unit; None where there is none."""


class ParamPlan(NamedTuple):
    """The plan of one parameter: how it is unsharded, whether it is trained, the layout of its gradient; the spec in which
    it is used, and the memory in which it is stored.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    gather: ReshardPlan
    trained: bool
    gradient: Layout
    used: P = P()
    memory: Memory = "device"

    @property
    def is_sharded(self) -> bool:
        """True if it is all-gathered, or copied to the device, before it is used."""
        return self.memory != "device" or any(step.kind != "reshape" for step in self.gather.steps)


ReductionPlans = Callable[[Along], Sequence[ReshardPlan | None]]
"""From axes to the reshard plans of gradients, None where frozen: from summands to the layouts of gradients."""


def plan_reduction(
    mesh: Mesh, axes: tuple[str, ...], leaf: ParamPlan, *, in_order: bool
) -> ReshardPlan:
    """Return the plan from summands over `axes`, or shards along those where it is used so, to the layout of a gradient."""
    axes, used = tuple([axis for axis in axes if axis not in leaf.used.split_axes]), leaf.used
    if in_order:
        return plan_in_order(mesh, axes, leaf.gradient, leaf.shape, used)
    return plan_reshard(_summands(mesh, axes, used), leaf.gradient, leaf.shape)


def _summands(mesh: Mesh, axes: tuple[str, ...], used: P) -> Layout:
    return Layout(mesh, P(*used.entries, unreduced=axes, at=dict(used.at)))


@lru_cache(maxsize=1024)
def local_plans(leaves: tuple[ParamPlan, ...], device: int) -> Sequence[ParamPlan]:
    """Return the plans of one device: with the shapes of the shards that it uses."""
    blocks = [Layout(leaf.gradient.mesh, leaf.used).block(leaf.shape, device) for leaf in leaves]
    shapes = [tuple([stop - start for start, stop in block]) for block in blocks]
    return [leaf._replace(shape=shape) for leaf, shape in zip(leaves, shapes, strict=True)]


@lru_cache(maxsize=4096)
def plan_in_order(
    mesh: Mesh, axes: tuple[str, ...], wanted: Layout, shape: tuple[int, ...], used: P = P()
) -> ReshardPlan:
    """Return the plan from summands over `axes`, sharded as in `used`, to a layout; it reduces over the last axis first.

    It is the usual plan, if that does; else axes are reduced one by one, and the gradient is scattered with the first.

    >>> from fshard import make_mesh
    >>> mesh = make_mesh({"a": 2, "b": 2})
    >>> for axis in "ab":
    ...     print([(step.kind, *step.axes) for step in plan_in_order(mesh, ("a", "b"), Layout(mesh, P.flat(axis)), (8,)).steps])
    [('psum', 'b'), ('flat_scatter', 'a')]
    [('flat_scatter', 'b'), ('psum', 'a')]
    """
    summands = [_summands(mesh, axes[:count], used) for count in range(len(axes), 0, -1)]
    plan = plan_reshard(_summands(mesh, axes, used), wanted, shape)
    added = [axis for step in reversed(plan.steps) if step.kind in _ADDING for axis in step.axes]
    if added == [axis for axis in axes if mesh.shape[axis] > 1]:
        return plan
    return ReshardPlan(
        tuple(
            step
            for leg in pairwise([*summands, wanted])
            for step in plan_reshard(*leg, shape).steps
        ),
        shape,
    )


_ADDING = ("psum", "psum_scatter", "flat_scatter")


def savable() -> AbstractContextManager[Any]:
    """Return a context whose results can be saved for a backward even in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _ANY_MODE


_ANY_MODE = nullcontext()


def versions_of(xs: Sequence[Tensor]) -> list[int]:
    """Return the version counters of tensors, which writes increment; 0 for tensors of inference mode, which have none."""
    try:
        return [x._version for x in xs]
    except RuntimeError:
        return [0 if x.is_inference() else x._version for x in xs]
