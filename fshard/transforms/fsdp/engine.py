"""The two communications of a step: from shards to full parameters, and from full gradients to their shards.

    shards ──cast──all-gather──> full parameters        `Storage.unshard`
    full gradients ──cast──bucket──reduce-scatter──> shards of their sums        `GradientSums`, by a `Reducer`

Units (`Unit`, used by need) and stages (`StageUnit`, used by a schedule) differ only in when they call these.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

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


@dataclass(frozen=True)
class Storage:
    """Shards in the memory of the device; parameters are referred to by index."""

    leaves: Sequence[ParamPlan]
    shards: Sequence[Tensor]
    compute: torch.dtype | None
    site: Site

    def unshard(self, indices: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Start the all-gather of parameters; those that need none are views of their shards."""
        leaves = [self.leaves[index] for index in indices]
        with no_graph():  # (4)
            xs = [self.shards[index].detach() for index in indices]
            if self.compute is not None:
                xs = [x.to(self.compute) if x.is_floating_point() else x for x in xs]
            if any(has_communication(leaf.gather) for leaf in leaves):
                return go(xs, [leaf.gather for leaf in leaves], self.site, ahead=True)
            full = [x.reshape(leaf.shape) for x, leaf in zip(xs, leaves, strict=True)]
            return lambda: full


Ways = Callable[[Along], Sequence[ReshardPlan | None]]
"""From axes to the reshard plans of gradients, None where frozen."""


@dataclass(frozen=True)
class Reducer:
    """Sums gradients by their reshard plans: reduce-scatter where they are sharded, all-reduce elsewhere."""

    ways: Ways
    site: Site
    ahead: bool = True

    def reduce(self, indices: Sequence[int], gs: Sequence[Tensor], along: Along) -> Callable[[], list[Tensor]]:
        """Start the reshards from summands to the layouts of gradients."""
        ways = self.ways(along)
        return go(gs, [way for index in indices if (way := ways[index])], self.site, ahead=self.ahead)


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
        reducer: sums gradients over devices.
        wide: True if sums of several slices are reduced in at least 32 bits.

    `used` is True for each parameter that this device has used; `sums` are the reduced gradients.
    """

    def __init__(
        self, leaves: Sequence[ParamPlan], device: torch.device, options: StepOptions, reducer: Reducer, wide: bool
    ) -> None:
        self.leaves, self.device, self.options, self.reducer, self.wide = leaves, device, options, reducer, wide
        self.along: Along = ()
        self.used = [False] * len(leaves)
        self.sums: list[Tensor | None] = [None] * len(leaves)
        self._bucket: list[tuple[int, Tensor]] = []
        self._size = 0  # of the bucket, in bytes
        self._in_flight: list[tuple[Sequence[int], Callable[[], list[Tensor]], int]] = []

    def record(self, indices: Sequence[int], gs: Sequence[Tensor | None], *, idle: bool) -> Gradients:
        """Record parameters as used; return their gradients, dense, or None if the slice is idle."""
        for index, g in zip(indices, gs, strict=True):
            self.used[index] |= g is not None
        return [None if idle else g.to_dense() if g is not None and g.is_sparse else g for g in gs]

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
        if self._bucket:  # (8)
            indices, xs = zip(*self._bucket, strict=True)
            self.clear()
            self.finish(max(self.options.in_flight - 1, 0))  # before the next one is packed
            shape = self.leaves[0].gradient.mesh.shape
            many = prod([shape[axis] for axis in self.along])  # devices with the same samples
            self._in_flight.append((indices, self.reducer.reduce(indices, xs, self.along), many))

    def finish(self, but: int = 0) -> None:
        """Wait for reductions, the oldest first, until at most `but` are in flight."""
        while len(self._in_flight) > but:
            indices, finish, many = self._in_flight.pop(0)
            for index, g in zip(indices, finish(), strict=True):
                known, leaf = self.sums[index], self.leaves[index]
                g = g if g.dtype is leaf.dtype else g.to(torch.promote_types(g.dtype, leaf.dtype))
                g = g if many == 1 else g / many
                self.sums[index] = g if known is None else known + g

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


def no_graph() -> AbstractContextManager[None]:
    """Return a context without grad mode, whose results can be saved for a backward even in inference mode."""
    return _out_of_inference() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _out_of_inference() -> Generator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def versions_of(xs: Sequence[Tensor]) -> list[int]:
    """Return the version counters of tensors, which writes increment; 0 for tensors of inference mode, which have none."""
    try:
        return [x._version for x in xs]
    except RuntimeError:
        return [0 if x.is_inference() else x._version for x in xs]
