"""The collectives that a loss function calls: which axes it is averaged over, and which raise.

Every value in a loss function is varying, and the objective is the mean of all devices' losses,
weighted by their parts of the batch, as a function of all devices' values:

    mean over all devices of    f(z_d, psum(z))      each device's parameters, with equal numbers
           │                       │     └ backward: psum of all cotangents       │
           └ 1/n to each           └ backward: its own      backward: gradients summed over all ┘

The devices are those along the batch's axes, and those along any other axis over which the loss
function of some device calls a collective or, in the first step, `axis_index`. Along all other axes
devices compute the same.

Some collectives raise, since their result would differ on other meshes (`sync_batchnorm` weights
devices by samples):

    5 samples on 2 devices    fs.pmean is no mean over samples: [0 1] and [2 3 4] have equal weights
    3 samples on 4 devices    one device has a neighbour's sample, which a sum would count twice
    reproducible mode         a slice sees only the slices that other devices compute concurrently

So do those along a local axis that the loss function differentiates itself, by torch.func or
autograd. Devices along it compute one value, but the inner gradient is that of the sum of all
devices' values: n times too large for each psum on its way.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch._C._functorch import TransformType, get_interpreter_stack  # no public API

from fshard.mesh.collectives.moves import Purpose
from fshard.mesh.layout import as_written
from fshard.mesh.spmd.scope import Group, Scope
from fshard.source import Site, call_site
from fshard.transforms.agreement import host_row, reduce_rows
from fshard.transforms.batch import Batch
from fshard.transforms.options import StepOptions

LOCAL_CALLS = ("fs.pvary", "fs.axis_size")
"""Calls that need no communication.

`fs.axis_index` needs none either, but it counts in the first step, where devices agree.
"""

ALLOWED_ON_UNEVEN_BATCHES = (
    "fs.pmax",
    "fs.pmin",
    "fs.axis_index",
    "fs.all_to_all",
    "sync_batchnorm",
)
"""Collectives whose results for other samples do not change if one is there twice."""


class LossCollectives:
    """The collectives that one device's loss function calls in a step.

    `along`: axes beside the batch's that were used, local ones always; `is_mixed`: True if a
    collective was over an axis of the batch.

    Args:
        batch: of the step.
        turns: the number of slices that each device takes.
        options: of the step.
    """

    def __init__(self, batch: Batch, turns: int, options: StepOptions) -> None:
        self._cut = batch.cut
        self._axes = frozenset(batch.axes)
        self._is_reproducible = options.reproducible
        self._sizes = {axis: size for axis, size in batch.mesh.shape.items() if size > 1}
        self._slices = 0 if batch.cut is None else batch.cut.parts * turns
        # The axes of which samples must not meet in reproducible mode.
        self._dependent = self._axes - frozenset(options.local)
        self._local = {axis for axis in options.local if axis in self._sizes} - self._axes
        self._outer_gradients = _gradients_around()  # those in which the loss is differentiated
        self._indexed: set[str] = set()
        self.along: tuple[str, ...] = ()
        self.is_mixed = False
        self._add_axes(options.local)

    def record(self, call: str, group: Group, purpose: Purpose = "values") -> None:
        """Record a call over the axes of a group; raise if its result would depend on the mesh.

        For cotangents: the loss function differentiates the collective.
        """
        if purpose == "cotangents" or _gradients_around() > self._outer_gradients:
            self._validate_not_local(call, group)
        if call in LOCAL_CALLS:
            return
        self._validate_call(call, group)
        if call == "fs.axis_index":
            self._indexed.update(group.axes)
            return
        self.is_mixed |= not self._axes.isdisjoint(group.axes)
        self._add_axes(group.axes)

    def _validate_call(self, call: str, group: Group) -> None:
        """Raise if a collective mixes samples that must stay apart, or counts them wrongly."""
        if self._is_reproducible and not self._dependent.isdisjoint(group.axes):
            raise ValueError(
                f"{call} over {as_written(group.axes)} in the loss function, at {call_site()}: "
                "with reproducible=True a slice of the batch must be computed independently, so "
                "that it does not depend on the mesh. Use its own samples only, or leave "
                "reproducible=True out."
            )
        cut = self._cut
        if cut is None or group.size == 1 or call in ALLOWED_ON_UNEVEN_BATCHES:
            return
        is_over_samples = not {*cut.axes}.isdisjoint(group.axes)
        is_even = cut.length % self._slices == 0
        # Of uneven slices without an idle one, only a mean over devices is no mean over samples.
        is_idle = cut.length <= self._slices
        is_counted_wrongly = not is_even and (is_idle or call == "fs.pmean")
        if is_over_samples and is_counted_wrongly:
            raise ValueError(
                f"{call} in the loss function: the {cut.length} samples of the batch are cut into "
                f"{self._slices} slices, which are not of one size, or some without samples, and "
                f"all would count alike. Give batches of a multiple of {self._slices}."
            )

    def _validate_not_local(self, call: str, group: Group) -> None:
        """Raise if an inner gradient would count a value several times.

        Devices along local axes compute it together.
        """
        if self._local.isdisjoint(group.axes) or call in (*LOCAL_CALLS, "fs.axis_index"):
            return
        raise ValueError(
            f"{call} over {as_written(group.axes)} in the loss function, at {call_site()}: along "
            "local= axes it must not be differentiated inside of the loss function, by torch.func "
            "or torch.autograd.grad, which would count each device's copy of the result. "
            "Differentiate the parts before and after the collective by torch.func.vjp, and sum "
            "the gradients by fs.psum; or differentiate outside: "
            "fs.array.lift(torch.func.grad)(fs.evaluate(loss_fn, ...))."
        )

    def agree(
        self, scope: Scope, cached: tuple[str, ...] | None, device: torch.device, site: Site
    ) -> None:
        """Add the axes over which any device called a collective.

        `cached`: those of an earlier step, of which nothing is sent.
        """
        if cached is not None:
            self._add_axes(cached)
            return
        replicated = [axis for axis in self._sizes if axis not in self._axes]
        if not replicated:
            return
        group = scope.group(tuple(self._sizes), "value_and_grad")
        used = {*self.along, *self._indexed}
        flags = host_row([float(axis in used) for axis in replicated], device)
        (row,) = reduce_rows((flags,), group, site)
        if not row.is_meta:
            counts = zip(replicated, row.tolist(), strict=True)
            self._add_axes([axis for axis, users in counts if users])

    def _add_axes(self, axes: Iterable[str]) -> None:
        axes = {*axes, *self.along} - self._axes
        self.along = tuple([axis for axis in self._sizes if axis in axes])

    @property
    def copies(self) -> int:
        """The number of devices along these axes, which have the same samples."""
        return prod(self._sizes[axis] for axis in self.along)


def _gradients_around() -> int:
    """Return the number of reverse-mode transforms of torch.func that the calling thread is in."""
    stack = get_interpreter_stack() or []
    return sum(level.key() == TransformType.Grad for level in stack)
