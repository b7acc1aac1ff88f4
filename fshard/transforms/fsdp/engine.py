"""Plans of parameters, and `GradientSums`: from full gradients to the shards of their sums.

    full gradients ──cast──bucket──reduce-scatter──> sums

Units of a full model (`Reductions`) and of stages (`StageSums`) differ only in when they are put into the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.reshard.execute import ReshardPlan, go, plan_reshard
from fshard.source import Site
from fshard.transforms.options import StepOptions

Along = tuple[str, ...]
"""Axes besides the batch's over which gradients are summed."""
Gradients = list[Tensor | None]
"""The gradients of the parameters of a unit; None where there is none."""


class ParamPlan(NamedTuple):
    """The plan of one parameter: how it is unsharded, whether it is trained, the layout of its gradient; the spec in which
    it is used.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    gather: ReshardPlan
    trained: bool
    gradient: Layout
    used: P = P()


Ways = Callable[[Along], Sequence[ReshardPlan | None]]
"""From axes to the reshard plans of gradients, None where frozen: from summands to the layouts of gradients."""


class PendingReduction(NamedTuple):
    """The reduction of a bucket: the indices of its parameters, the function that waits for it, and how many devices have
    the same samples.
    """

    indices: Sequence[int]
    wait: Callable[[], list[Tensor]]
    copies: int


def plan_reduction(mesh: Mesh, axes: tuple[str, ...], leaf: ParamPlan, *, in_order: bool) -> ReshardPlan:
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
    way = plan_reshard(_summands(mesh, axes, used), wanted, shape)
    added = [axis for step in reversed(way.steps) if step.kind in _ADDING for axis in step.axes]
    if added == [axis for axis in axes if mesh.shape[axis] > 1]:
        return way
    return ReshardPlan(
        tuple(step for leg in pairwise([*summands, wanted]) for step in plan_reshard(*leg, shape).steps), shape
    )


_ADDING = ("psum", "psum_scatter", "flat_scatter")


class GradientSums:
    """The gradients of one device in one step: cast, reduced in buckets, and summed.

    Args:
        leaves: the plans of parameters.
        device: of the gradients.
        options: of units.
        ways: the plans that sum gradients: reduce-scatter where they are sharded, all-reduce elsewhere.
        site: the source line of the step.
        wide: True if sums of several slices are reduced in at least 32 bits.

    `used` is True for each parameter that this device has used; `sums` are the reduced gradients.
    """

    def __init__(
        self,
        leaves: Sequence[ParamPlan],
        device: torch.device,
        options: StepOptions,
        ways: Ways,
        site: Site,
        *,
        wide: bool,
        along: Along = (),
    ) -> None:
        self.leaves, self.device, self.options, self.wide, self.along = leaves, device, options, wide, along
        self._ways, self.site = ways, site
        self.used = [False] * len(leaves)
        self.sums: list[Tensor | None] = [None] * len(leaves)
        self._bucket: list[tuple[int, Tensor]] = []
        self._size = 0  # of the bucket, in bytes
        self._in_flight: list[PendingReduction] = []

    def record(self, indices: Sequence[int], gs: Sequence[Tensor | None], *, is_idle: bool) -> Gradients:
        """Record parameters as used; return their gradients, dense, or None if the slice is idle."""
        for index, g in zip(indices, gs, strict=True):
            self.used[index] |= g is not None
        return [None if is_idle else g.to_dense() if g is not None and g.is_sparse else g for g in gs]

    def cast(self, indices: Sequence[int], gs: Sequence[Tensor | None]) -> Gradients:
        """Cast gradients to the dtypes that they are reduced in."""
        dtypes = [self.options.reduced_in(self.leaves[index].dtype, wide=self.wide) for index in indices]
        return [g if g is None or g.dtype is dtype else g.to(dtype) for g, dtype in zip(gs, dtypes, strict=True)]

    def put(self, indices: Sequence[int], gs: Sequence[Tensor | None]) -> None:
        """Put the gradients of trained parameters into the bucket, zeros for those that this device has not."""
        for index, g in zip(indices, self.cast(indices, gs), strict=True):
            leaf = self.leaves[index]
            if leaf.trained:
                dtype = self.options.reduced_in(leaf.dtype, wide=self.wide)
                g = torch.zeros(leaf.shape, dtype=dtype, device=self.device) if g is None else g
                self._bucket.append((index, g))
                self._size += g.nbytes

    @property
    def is_full(self) -> bool:
        """True if the bucket has its size."""
        return self._size >= self.options.bucket

    def clear(self) -> None:
        """Empty the bucket."""
        self._bucket, self._size = [], 0

    def send(self) -> None:
        """Start the reduction of the bucket."""
        if not self._bucket:
            return
        indices, xs = zip(*self._bucket, strict=True)
        self.clear()
        self.finish(max(self.options.in_flight - 1, 0))  # before the next one is packed
        ways = self._ways(self.along)
        plans = [way for index in indices if (way := ways[index])]
        wait = go(xs, plans, self.site, ahead=self.options.in_flight > 0)  # (8)
        shape = self.leaves[0].gradient.mesh.shape
        self._in_flight.append(PendingReduction(indices, wait, prod([shape[axis] for axis in self.along])))

    def finish(self, in_flight: int = 0) -> None:
        """Wait for reductions, the oldest first, until at most `in_flight` are left."""
        while len(self._in_flight) > in_flight:
            pending = self._in_flight.pop(0)
            for index, g in zip(pending.indices, pending.wait(), strict=True):
                total, leaf = self.sums[index], self.leaves[index]
                g = g if g.dtype is leaf.dtype else g.to(torch.promote_types(g.dtype, leaf.dtype))
                g = g if pending.copies == 1 else g / pending.copies
                self.sums[index] = g if total is None else total + g

    def gradients(self, used: Sequence[float], divisor: float | Tensor = 1.0) -> Gradients:
        """Return the sums divided by a number, in the dtypes of the parameters; None for those that no device used."""
        sums = [g if times else None for g, times in zip(self.sums, used, strict=True)]
        if isinstance(divisor, Tensor) or divisor != 1.0:
            sums = [g if g is None else g / divisor for g in sums]
        return [
            g if g is None or g.dtype is leaf.dtype else g.to(leaf.dtype)
            for g, leaf in zip(sums, self.leaves, strict=True)
        ]


def has_communication(way: ReshardPlan) -> bool:
    """Return True if a reshard sends anything."""
    return len(way.steps) > 1 or (bool(way.steps) and way.steps[0].kind != "reshape")


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
